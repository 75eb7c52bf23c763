"""scripts/compare.py: comparisons whole, on tiny models, with the right numbers."""

import json
import sys
from types import SimpleNamespace

import compare
import pytest
import torch
import training_files as made
from checkpoints import save_checkpoint
from models import lively_model

from layerskip import SkipConfig
from layerskip.checkpoints import encode, load
from layerskip.costs.speculation import CostTable
from layerskip.files.records import read_run
from layerskip.model.blocks import Heads
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained
from layerskip.prompts import read_prompts
from layerskip.registry import CONTROLLERS

NEW = 12
COSTS_GIVEN = (0.3, 1.0, 1.1, 1.2)
COSTS = CostTable(COSTS_GIVEN[0], COSTS_GIVEN[1:])


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with a model, a training, a skip config and prompts."""
    folder = tmp_path_factory.mktemp("compare")
    save_checkpoint(folder / "model", lively_model("llama", dtype=torch.float32))
    lines = [" ".join(f"w{2 + (7 * i + j) % 90}" for j in range(6)) for i in range(3)]
    (folder / "prompts.txt").write_text("\n".join(lines))
    SkipConfig.layers([2, 3]).save(folder / "gaps.json")
    model = load(str(folder / "model")).model
    weights = Heads(Sublayers(model), 4).state_dict()
    made.write(folder / "heads" / "train.json", made.training())
    trained = save_trained(folder / "heads" / "draft.safetensors", weights, "heads", model)
    SkipConfig(trained=trained).save(folder / "heads" / "trained.json")
    return folder


def run(there, command, *more, drafts=()):
    """A comparison of the tiny model; its prompts and lengths are fixed."""
    fixed = ["--prompts", there / "prompts.txt", "--new-tokens", NEW, "--threads", 1]
    fixed += ["--execution", "fused"]
    compare.main([command, *map(str, [there / "model", *drafts, *fixed, *more])])


def refused(there, capsys, *words, **named):
    """The one line that a refused comparison says."""
    with pytest.raises(SystemExit) as stopped:
        run(there, *words, **named)
    assert stopped.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("compare: error: ")
    return line


# ---------------------------------------------------------------------------------------------
# Drafts


def drafts(there, output, *named, costs=COSTS_GIVEN, more=()):
    more = ["--costs", *costs, "--output", output, *more]
    run(there, "drafts", *more, drafts=[there / each for each in named])
    return {row["name"]: row for row in json.loads(output.read_text())["rows"]}


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_all_drafts_and_controllers_in_one_table(there, tmp_path, capsys, temperature):
    output = tmp_path / "drafts.json"
    more = () if temperature is None else ("--temperature", temperature)
    rows = drafts(there, output, "gaps.json", "heads", more=more)
    single = ["lookup", "exit 2", "8 bits", "4 bits, head 8", "gaps", "heads"]
    assert list(rows) == [*single, *(f"{name} + lookup" for name in single[1:])]
    assert rows["8 bits"]["bytes"] == rows["8 bits + lookup"]["bytes"] > 0
    assert rows["8 bits"]["parameters"] == 0 < rows["heads"]["parameters"]
    shown = capsys.readouterr().out
    for name, row in rows.items():
        assert name in shown
        assert list(row["controllers"]) == list(CONTROLLERS)
    for name in single:
        survival = rows[name]["acceptance"]
        assert survival == sorted(survival, reverse=True)
        best = max((1 + sum(survival[:n])) / COSTS.round_cost(n) for n in range(13))
        if name != "lookup":  # whose step costs nothing
            assert rows[name]["best_fixed"] == pytest.approx(best)
    assert rows["lookup"]["costs"]["draft"] == 0


def test_acceptance_is_what_the_model_says(there, tmp_path):
    rows = drafts(there, tmp_path / "drafts.json")
    loaded = load(str(there / "model"))
    right = []
    for prompt in read_prompts(there / "prompts.txt"):
        ids = encode(loaded.tokenizer, prompt)
        with torch.no_grad():
            text = loaded.model.generate(ids, do_sample=False, max_new_tokens=NEW)
            states = loaded.model(text, output_hidden_states=True).hidden_states[2]
            proposed = loaded.model.lm_head(loaded.model.model.norm(states)).argmax(-1)
        right.append(proposed[0, ids.shape[1] : -1] == text[0, ids.shape[1] + 1 :])
    first = rows["exit 2"]["acceptance"][0]
    assert first == pytest.approx(torch.cat(right).double().mean().item())
    assert 0 < first < 1


def test_costs_are_measured_where_none_are_given(there, tmp_path, monkeypatch):
    asked = []

    def given(_model, drafts, _request, *, seconds):
        assert seconds > 0
        asked.append(drafts)
        return [COSTS for _ in drafts]

    monkeypatch.setattr(compare, "cost_tables", given)
    run(there, "drafts", "--output", tmp_path / "drafts.json")
    rows = json.loads((tmp_path / "drafts.json").read_text())["rows"]
    assert len(asked) == 4
    assert {row["costs"]["draft"] for row in rows if "costs" in row} == {0.3}


def test_what_cannot_be_compared_is_refused_in_one_line(there, tmp_path, capsys):
    output = tmp_path / "drafts.json"
    (tmp_path / "heads").mkdir()
    gaps = there / "gaps.json"
    for named, message in (
        ([gaps, gaps], "two drafts are called 'gaps'"),
        ([tmp_path / "heads"], "holds no finished training"),
        ([tmp_path / "none.json"], "cannot read skip config"),
    ):
        assert message in refused(there, capsys, "drafts", "--output", output, drafts=named)
    assert not output.exists()


# ---------------------------------------------------------------------------------------------
# llama.cpp


class FakeLlama:
    """Generates what the model does, greedily, but for one token."""

    wrong_at = None

    def __init__(self, path, **settings):
        self.model, self.settings = load(path).model, settings

    def reset(self):
        pass

    def generate(self, ids, temp, repeat_penalty):
        assert temp == 0.0
        text = self.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW)
        for place, token in enumerate(text[0, len(ids) :].tolist()):
            yield token + 1 if place == self.wrong_at else token


@pytest.fixture
def llama(there, tmp_path, monkeypatch):
    """A stand-in for llama.cpp that opens the checkpoint beside the GGUF."""

    def widen(source, part, how):
        assert how.allow_requantize
        with open(part, "wb") as file:
            file.write(b"wide")
        return 0

    fake = SimpleNamespace(
        Llama=lambda _, **settings: FakeLlama(str(there / "model"), **settings),
        llama_model_quantize=widen,
        llama_model_quantize_default_params=SimpleNamespace,
        LLAMA_FTYPE_ALL_F32=0,
        GGML_TYPE_F32=0,
    )
    fake.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    gguf = there / "model" / "model.gguf"
    gguf.write_bytes(b"4 bits")
    yield tmp_path / "wide"
    gguf.unlink()


@pytest.mark.parametrize("wrong", [None, 3])
def test_llama_cpp_takes_turns_with_the_others(there, tmp_path, llama, capsys, monkeypatch, wrong):
    monkeypatch.setattr(FakeLlama, "wrong_at", wrong)
    output = tmp_path / "run.jsonl"
    run(there, "llama-cpp", "--skip", there / "gaps.json", "--work", llama, "--output", output)
    found = read_run(output)
    assert [each["name"] for each in found.header["methods"]] == [
        "llama.cpp", "llama.cpp-flash", "generate", "plain", "self",
    ]  # fmt: skip
    assert (llama / "model-F32.gguf").read_bytes() == b"wide"
    assert len(found.records) == 3 * 5
    assert {record["new_tokens"][0] for record in found.records} == {NEW}
    for record in found.records:
        right = "llama.cpp" not in record["method"] or wrong is None
        assert record["equal"] == [right]
        positions = [each["position"] for each in record["differences"]]
        assert positions[:1] == ([] if right else [wrong])
    assert "x llama.cpp" in capsys.readouterr().out


def test_llama_cpp_at_lengths_of_context(there, tmp_path, llama, capsys):
    output = tmp_path / "run.jsonl"
    more = ("--context", 8, "--context", 12, "--limit", 1, "--warmup", 0)
    run(there, "llama-cpp", *more, "--work", llama, "--output", output)
    found = read_run(output)
    assert found.header["contexts"] == [8, 12]
    lengths = [(r["context"], *r["prompt_tokens"]) for r in found.records]
    assert lengths == [(8, 8)] * 5 + [(12, 12)] * 5
    assert "method           context" in capsys.readouterr().out


def test_what_llama_cpp_lacks_is_one_line(there, tmp_path, capsys, monkeypatch, llama):
    words = ("llama-cpp", "--work", llama, "--output", tmp_path / "run.jsonl")
    message = refused(there, capsys, *words, "--dtype", "float64")
    assert "must be one of float32, bfloat16, float16 beside llama.cpp, got float64" in message
    assert "greedily" in refused(there, capsys, *words, "--temperature", 0.8)
    (there / "model" / "model.gguf").rename(tmp_path / "model.gguf")
    message = refused(there, capsys, *words)
    (tmp_path / "model.gguf").rename(there / "model" / "model.gguf")
    assert "one .gguf in the folder of" in message
    monkeypatch.setattr("compare.importlib.util.find_spec", lambda _: None)
    assert "`pip install llama-cpp-python==" in refused(there, capsys, *words)
