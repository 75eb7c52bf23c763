"""The benchmark command: prompts, tasks, sweeps of exits, and comparison with llama.cpp."""

import json
import sys

import pytest
import torch
from checkpoints import save_checkpoint
from commands import document, refused, run
from marks import thorough
from models import lively_model

from layerskip.api.loading import load
from layerskip.cli.benchmark import DEFAULT_METHODS
from layerskip.cli.inputs import first_in_turn
from layerskip.costs.speculation import CostTable
from layerskip.files.records import read_run
from layerskip.texts.prompts import Prompt

NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_checkpoint(folder, lively_model("llama", dtype=torch.float32))


@pytest.fixture
def tasks(tmp_path):
    """A folder of two tasks, with three prompts and one."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, count in (("math", 3), ("summaries", 1)):
        texts = [" ".join(f"w{2 + (7 * i + j) % 90}" for j in range(6)) for i in range(count)]
        lines = [json.dumps({"prompt": text, "reference": "w5"}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


pytestmark = pytest.mark.usefixtures("priced")


def words(model, output, *more):
    fixed = ("--max-new-tokens", NEW, "--repeats", 1, "--warmup", 0, "--threads", 1)
    return ("benchmark", model, "--output", output, *fixed, "--execution", "fused", *more)


def test_a_limit_counts_prompts_and_takes_them_from_each_category_in_turn():
    kinds = "aaabbc"
    prompts = [Prompt(id=str(n), text="x", category=kind) for n, kind in enumerate(kinds)]
    for limit, ids in ((1, "0"), (3, "035"), (4, "0135"), (5, "01345"), (None, "012345")):
        assert "".join(each.id for each in first_in_turn(prompts, limit)) == ids


def test_by_default_three_methods_run_and_no_exit_is_replayed(model, tasks, tmp_path):
    output = tmp_path / "run.jsonl"
    result = run(*words(model, output, "--prompts", tasks / "math.jsonl", "--limit", 2))
    assert result.exit_code == 0, result.output
    found = read_run(output)
    assert tuple(each["name"] for each in found.header["methods"]) == DEFAULT_METHODS
    assert len(found.records) == 2 * 3
    assert found.sweeps == ()


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_weights_that_are_halves_are_read_as_halves_beside_plain_ones(
    built, tasks, tmp_path, monkeypatch, free
):
    shape = {"hidden_size": 64, "intermediate_size": 96}
    halves = lively_model("llama", dtype=torch.bfloat16, **shape).float()
    folder, output = save_checkpoint(tmp_path / "model", halves), tmp_path / "run.jsonl"
    monkeypatch.setattr("layerskip.bench.suite.free_memory", lambda: free)
    fixed = ("--max-new-tokens", NEW, "--repeats", 1, "--warmup", 0, "--threads", 1, "--limit", 2)
    given = ("--prompts", tasks / "math.jsonl", *fixed)
    result = run("benchmark", folder, "--output", output, *given)
    assert result.exit_code == 0, result.output
    assert ("half the bytes are read" in result.stderr) is (free > 0)
    assert ("no memory for the copy that generate() needs" in result.stderr) is (free == 0)
    found = read_run(output)
    assert {each["method"] for each in found.records} == {*DEFAULT_METHODS}


def test_tasks_are_told_apart(model, tasks, tmp_path):
    output = tmp_path / "run.jsonl"
    flags = ("--tasks", tasks, "--per-category", 2, "--method", "generate")
    result = run(*words(model, output, *flags, "--json"))
    rows = document(result)["methods"]
    told = {(row["task"], row["method"]): row["compared"] for row in rows}
    assert told == {
        (task, method): count
        for task, count in (("all", 3), ("math", 2), ("summaries", 1))
        for method in ("plain", "generate")
    }
    assert "task" in result.stdout.splitlines()[0]
    assert {each["prompts"][0] for each in read_run(output).records} == {
        "math-1", "math-2", "summaries-1"
    }  # fmt: skip
    (tmp_path / "none").mkdir()
    line = refused(*words(model, tmp_path / "no.jsonl", "--tasks", tmp_path / "none"))
    assert "must be a folder with one .jsonl file per task" in line


def test_a_run_whose_drafts_cost_nothing_is_resumed(model, tasks, tmp_path, monkeypatch):
    table = CostTable(0.0, (1.0, 1.1))
    monkeypatch.setattr("layerskip.api.plan.cost_tables", lambda *_, **__: [table])
    output = tmp_path / "run.jsonl"
    ask = (*words(model, output, "--prompts", tasks / "math.jsonl", "--limit", 1), "--json")
    first = document(run(*ask, "--method", "self-lookup"))
    assert [each.get("costs") for each in read_run(output).header["methods"]] == [
        None, {"1": table.to_dict()}
    ]  # fmt: skip
    assert document(run(*ask, "--method", "self-lookup")) == first


def test_a_sweep_replays_a_grid_and_times_its_best(model, tasks, tmp_path):
    output = tmp_path / "run.jsonl"
    flags = ("--prompts", tasks / "math.jsonl", "--sweep", "exits=2..3,lengths=1..2")
    assert run(*words(model, output, *flags)).exit_code == 0
    found = read_run(output)
    (sweep,) = found.sweeps
    assert [each["exit"] for each in sweep["exits"]] == [2, 3]
    assert sweep["draft_lengths"] == [1, 2]
    timed = [each for each in found.header["methods"] if each["name"].startswith("exit ")]
    assert len(timed) == 3
    predicted = {
        f"exit {entry['exit']}, {length} drafted": sum(counts)
        for entry in sweep["exits"]
        for length, counts in zip(sweep["draft_lengths"], entry["rounds"], strict=True)
    }
    for method in timed:  # decoding has as many rounds as the replay
        records = [each for each in found.records if each["method"] == method["name"]]
        assert (
            sum(len(each["rounds"]["drafted"]) for each in records[:2]) == predicted[method["name"]]
        )
        assert all(all(each["equal"]) for each in records)
    before = output.read_bytes()
    assert run(*words(model, output, *flags)).exit_code == 0  # nothing is left to run
    assert output.read_bytes() == before
    assert run("report", output, "--output", tmp_path / "report").exit_code == 0
    drawn = {path.name for path in (tmp_path / "report" / "plots").glob("sweep-*")}
    assert drawn == {
        f"sweep-{name}.svg" for name in ("acceptance_rate", "tokens_per_pass", "speedup")
    }


# ---- llama.cpp ----


FAKE = """
import json, os, pathlib
from types import SimpleNamespace as llama_model_quantize_default_params

LLAMA_FTYPE_ALL_F32 = GGML_TYPE_F32 = 0
FAULT = os.environ["FAKE_LLAMA"]

def llama_model_quantize(source, part, how):
    assert how.allow_requantize
    pathlib.Path(os.fsdecode(part)).write_bytes(b"wide")

class Llama:
    def __init__(self, path, n_threads, flash_attn, **settings):
        if FAULT == "closed":
            raise ValueError("no such file")
        self.texts = json.loads(pathlib.Path(__file__).with_name("texts.json").read_text())

    def reset(self):
        pass

    def generate(self, ids, temp, repeat_penalty):
        assert temp == 0.0
        for place, token in enumerate(self.texts[str(ids)]):
            if FAULT == f"crashes at {place}":
                os._exit(3)
            yield token + 1 if FAULT == f"errs at {place}" else token
"""


@pytest.fixture
def llama(model, tasks, tmp_path, monkeypatch):
    """A stand-in for llama.cpp with the model's greedy texts and, if asked, a fault."""
    loaded, texts = load(str(model)), {}
    for prompt in map(json.loads, (tasks / "math.jsonl").read_text().splitlines()):
        ids = loaded.tokenizer(prompt["prompt"]).input_ids
        text = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW)
        texts[str(ids)] = text[0, len(ids) :].tolist()
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_LLAMA", "")
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path / "cache"))
    (model / "model.gguf").write_bytes(b"4 bits")
    yield tmp_path / "cache" / "llama.cpp"
    (model / "model.gguf").unlink(missing_ok=True)
    sys.modules.pop("llama_cpp", None)


LLAMAS = ("--method", "plain", "--method", "llama.cpp", "--method", "llama.cpp-flash")


@pytest.mark.parametrize("wrong", [None, *thorough(3)])
def test_llama_cpp_takes_turns_with_the_others(model, tasks, tmp_path, llama, monkeypatch, wrong):
    monkeypatch.setenv("FAKE_LLAMA", "" if wrong is None else f"errs at {wrong}")
    output = tmp_path / "run.jsonl"
    assert run(*words(model, output, "--prompts", tasks / "math.jsonl", *LLAMAS)).exit_code == 0
    found = read_run(output)
    assert [each["name"] for each in found.header["methods"]] == [*LLAMAS[1::2]]
    assert (llama / "model-F32.gguf").read_bytes() == b"wide"
    assert len(found.records) == 3 * 3
    assert {record["new_tokens"][0] for record in found.records} == {NEW}
    for record in found.records:
        right = "llama.cpp" not in record["method"] or wrong is None
        assert record["equal"] == [right]
        positions = [each["position"] for each in record["differences"]]
        assert positions[:1] == ([] if right else [wrong])


def test_what_llama_cpp_lacks_is_one_line(model, tasks, tmp_path, monkeypatch, llama):
    command = words(model, tmp_path / "run.jsonl", "--prompts", tasks / "math.jsonl", *LLAMAS)
    message = refused(*command, "--dtype", "float64")
    assert "must be one of float32, bfloat16, float16 with llama.cpp, got float64" in message
    assert "greedily; leave --do-sample out" in refused(*command, "--do-sample")
    for fault, line in (("closed", "no such file"), ("crashes at 2", "ended with exit code 3")):
        monkeypatch.setenv("FAKE_LLAMA", fault)
        assert line in refused(*command)
    (model / "model.gguf").unlink()
    assert "one .gguf in the folder of" in refused(*command)
    monkeypatch.setattr("layerskip.bench.llama_cpp.importlib.util.find_spec", lambda _: None)
    assert "`pip install llama-cpp-python==" in refused(*command)
