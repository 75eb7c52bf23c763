"""scripts/compare.py: every comparison whole, on tiny models, with the numbers it must find."""

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
from layerskip.analysis import report
from layerskip.analysis.runs import load_runs
from layerskip.analysis.tables import losslessness
from layerskip.checkpoints import encode, load
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import CONTROLLERS
from layerskip.files.comparisons import holds_comparison, read_comparison
from layerskip.files.records import read_run
from layerskip.model.blocks import Heads
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained
from layerskip.prompts import read_prompts

NEW = 12
COSTS = CostTable(0.3, (1.0, 1.1, 1.2))


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


def drafts(there, output, *named, costs=(0.3, 1.0, 1.1, 1.2), more=()):
    more = ["--costs", *costs, "--output", output, *more]
    run(there, "drafts", *more, drafts=[there / each for each in named])
    return {row["name"]: row for row in read_comparison(output)["rows"]}


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_all_drafts_and_controllers_in_one_table(there, tmp_path, capsys, temperature):
    output, law = tmp_path / "drafts.json", "greedy" if temperature is None else "0.8"
    more = () if temperature is None else ("--temperature", temperature)
    rows = drafts(there, output, "gaps.json", "heads", more=more)
    single = ["lookup", "exit 2", "8 bits", "4 bits, head 8", "gaps", "heads"]
    assert list(rows) == [*single, *(f"{name} + lookup" for name in single[1:])]
    assert rows["8 bits"]["bytes"] == rows["8 bits + lookup"]["bytes"] > 0
    assert rows["8 bits"]["parameters"] == 0 < rows["heads"]["parameters"]
    assert {name for name, row in rows.items() if row["trained"]} == {"heads", "heads + lookup"}
    shown = capsys.readouterr().out
    for name, row in rows.items():
        assert name in shown
        assert list(row["controllers"][law]) == list(CONTROLLERS)
        assert row["predicted"][law] == row["controllers"][law]["expected-gain"]
    for name in single:
        survival = rows[name]["acceptance"][law]
        assert survival == sorted(survival, reverse=True)
        best = max((1 + sum(survival[:n])) / COSTS.round_cost(n) for n in range(13))
        if name != "lookup":  # whose step costs nothing
            assert rows[name]["best_fixed"][law] == pytest.approx(best)
    assert rows["lookup"]["costs"]["draft"] == 0
    assert holds_comparison(output)


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
    first = rows["exit 2"]["acceptance"]["greedy"][0]
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
    rows = read_comparison(tmp_path / "drafts.json")["rows"]
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


def test_the_file_is_known_by_what_it_holds(tmp_path):
    path = made.write(tmp_path / "any.json", made.comparison())
    assert holds_comparison(path)
    assert not holds_comparison(made.write(tmp_path / "train.json", made.training()))
    assert not holds_comparison(tmp_path / "none.json")
    assert read_comparison(path)["rows"][0]["name"] == "8 bits"
    for change, message in (
        ({"rows": [made.row("a"), made.row("a")]}, "rows must have different names"),
        ({"rows": [made.row("a", bytes=-1)]}, r"rows\[0\].bytes must be 0 or more, got -1"),
        ({"rows": [made.row("a", acceptance={"0.8": [1.5]})]}, r"acceptance.'0.8'\[0\] must be in"),
        ({"rows": [made.row("a", drafts=[])]}, r"rows\[0\].drafts must"),
        ({"kind": "search"}, "kind must be 'drafts', got 'search'"),
        ({"schema": 9}, "schema must be 1, got 9"),
    ):
        made.write(path, made.comparison(**change))
        with pytest.raises(ValueError, match=message):
            read_comparison(path)
    path.write_text(json.dumps(made.comparison())[:-20])
    with pytest.raises(ValueError, match=r"any\.json is cut off or not JSON"):
        read_comparison(path)


# ---------------------------------------------------------------------------------------------
# Searches


def test_searches_know_the_best_set_and_their_share_of_it(there, tmp_path, capsys):
    output = tmp_path / "searches.json"
    run(
        there,
        "searches",
        "--trials",
        8,
        "--runs",
        2,
        "--searches",
        "ours",
        "random",
        "--output",
        output,
    )
    found = json.loads(output.read_text())
    assert found["best"] >= found["best_exit"] > 0
    for shares in found["rows"].values():
        assert [len(each) for each in shares.values()] == [2, 2, 2]
        first, *_, last = shares.values()
        assert all(a <= b <= 1 for a, b in zip(first, last, strict=True))
    assert max(share for shares in found["rows"].values() for share in shares["8"]) > 0.5
    assert "after 8" in capsys.readouterr().out


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
        "llama.cpp", "generate", "plain", "self",
    ]  # fmt: skip
    assert (llama / "model-F32.gguf").read_bytes() == b"wide"
    assert len(found.records) == 3 * 4
    assert {record["new_tokens"][0] for record in found.records} == {NEW}
    for record in found.records:
        right = record["method"] != "llama.cpp" or wrong is None
        assert record["equal"] == [right]
        positions = [each["position"] for each in record["differences"]]
        assert positions[:1] == ([] if right else [wrong])
    assert "x llama.cpp" in capsys.readouterr().out


def test_what_llama_cpp_lacks_is_one_line(there, tmp_path, capsys, monkeypatch, llama):
    words = ("llama-cpp", "--work", llama, "--output", tmp_path / "run.jsonl")
    message = refused(there, capsys, *words, "--dtype", "float64")
    assert "must be one of float32, bfloat16 beside llama.cpp, got float64" in message
    assert "greedily" in refused(there, capsys, *words, "--temperature", 0.8)
    (there / "model" / "model.gguf").rename(tmp_path / "model.gguf")
    message = refused(there, capsys, *words)
    (tmp_path / "model.gguf").rename(there / "model" / "model.gguf")
    assert "one .gguf in the folder of" in message
    monkeypatch.setattr("compare.importlib.util.find_spec", lambda _: None)
    assert "`pip install llama-cpp-python==" in refused(there, capsys, *words)


# ---------------------------------------------------------------------------------------------
# Shapes


def test_a_shape_is_measured_at_acceptances_that_are_set(tmp_path, monkeypatch):
    prices = "layerskip.generation.cost_tables"
    monkeypatch.setattr(prices, lambda _, drafts, __, **___: [COSTS for _ in drafts])
    words = (
        "scale --shape tiny --dtype float32 --count 2 --new-tokens 12 --prompt-tokens 6 --threads 1"
    )
    words += " --temperature 1 --acceptance 0.6 0.9 --batch-size 1 2 --output"
    compare.main([*words.split(), str(tmp_path / "run.jsonl")])
    (found,) = load_runs([tmp_path / "run.jsonl"])
    assert losslessness(found)["faults"].sum() == 0
    assert found.measured == ["plain", "generate", "exit-1", "exit-2", "exit-4"]
    assert found.batch_sizes == [1, 2]
    assert found.categories == ["acceptance 0.6", "acceptance 0.9"]
    assert len(found.records) == 5 * 2 * (2 + 1)
    monkeypatch.setattr(report.plots, "run_plots", lambda run: [])
    told = report.write_report([tmp_path / "run.jsonl"], tmp_path / "report")
    assert "random weights, exits from layer 1 on accepted about 0.6, 0.9" in told
