"""The table of all drafts of a model, and its file: numbers, going on, refusals."""

import json
from dataclasses import replace

import compare_drafts
import pytest
import torch
import training_files as made
from checkpoints import save_checkpoint
from models import lively_model

from layerskip import SkipConfig
from layerskip.checkpoints import encode, load
from layerskip.costs.speculation import CostTable
from layerskip.decoding.sources.lookup import Lookup
from layerskip.files.comparisons import holds_comparison, read_comparison
from layerskip.model.blocks import Heads
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained
from layerskip.prompts import read_prompts

NEW = 12


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with a model, another, a training, a skip config and prompts."""
    folder = tmp_path_factory.mktemp("drafts")
    save_checkpoint(folder / "model", lively_model("llama", dtype=torch.float32))
    save_checkpoint(folder / "second", lively_model("llama", dtype=torch.float32, seed=1))
    lines = [" ".join(f"w{2 + (7 * i + j) % 90}" for j in range(6)) for i in range(3)]
    (folder / "prompts.txt").write_text("\n".join(lines))
    SkipConfig.layers([2, 3]).save(folder / "gaps.json")
    model = load(str(folder / "model")).model
    weights = Heads(Sublayers(model), 4).state_dict()
    of = folder / "heads"
    made.write(of / "train.json", made.training())
    trained = save_trained(of / "draft.safetensors", weights, "heads", model)
    SkipConfig(trained=trained).save(of / "trained.json")
    return folder


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch):
    costs = CostTable(0.3, (1.0, 1.1, 1.2))

    def given(_model, drafts, _request):
        free = replace(costs, draft=0.0)
        return [free if isinstance(draft, Lookup) else costs for draft in drafts]

    monkeypatch.setattr(compare_drafts, "cost_tables", given)


def run(there, output, *more, drafts=("gaps.json", "heads")):
    """What the script says."""
    named = [str(there / each) for each in drafts]
    fixed = ["--prompts", str(there / "prompts.txt"), "--new-tokens", str(NEW), "--threads", "1"]
    how = [*fixed, "--repeats", "1", "--execution", "fused", "--output", str(output)]
    compare_drafts.main([str(there / "model"), *named, *how, *more])


def rows_of(path):
    return {row["name"]: row for row in read_comparison(path)["rows"]}


def test_all_drafts_in_one_table_and_in_parts(there, tmp_path, capsys, monkeypatch):
    output = tmp_path / "drafts.json"
    run(there, output, "--skip-clock", "--assistant", str(there / "second"))
    rows = rows_of(output)
    second = str(there / "second")
    assert list(rows) == [
        "exit 2", "without 1 layer", "8 bits", "4 bits, head 8", "lookup", "gaps", "heads", second,
        "8 bits + lookup", f"{second} + lookup", "gaps + lookup", "8 bits + gaps + lookup",
        "heads + lookup", "8 bits + heads + lookup",
    ]  # fmt: skip
    assert "timed" not in rows["8 bits"]
    assert [rows["heads"][key] for key in ("tokens", "minutes", "loss")] == [80_000, 21.0, "lk"]
    assert (
        rows["8 bits + heads + lookup"]["bytes"] == rows["8 bits"]["bytes"] + rows["heads"]["bytes"]
    )
    assert rows["8 bits"]["parameters"] == 0 < rows["heads"]["parameters"]
    loaded = load(str(there / "second"))
    assert rows[second]["parameters"] == sum(each.numel() for each in loaded.model.parameters())
    capsys.readouterr()

    calls = []
    follow = compare_drafts.follow

    def counted(trace, draft):
        calls.append(trace.law.do_sample)
        return follow(trace, draft)

    monkeypatch.setattr(compare_drafts, "follow", counted)
    run(there, output, "--greedy", "--assistant", second)
    again = rows_of(output)
    # acceptance is not looked at again but for what mixtures are made of
    assert (
        len(calls)
        == 2
        * sum(row["kind"] in ("rounded", "given", "heads", "second model") for row in rows.values())
        - 2
    )
    for name, row in rows.items():
        assert again[name].get("acceptance") == row.get("acceptance")
        assert again[name]["timed"].keys() == again[name]["predicted"].keys() == {"0.8", "greedy"}
        for timed in again[name]["timed"].values():
            assert timed["compared"] == timed["equal"] == 3
    table = capsys.readouterr().out.splitlines()
    assert len([line for line in table if line.startswith(tuple(rows))]) >= len(rows)
    of = again["8 bits"]["acceptance"]["0.8"]
    best = max((1 + sum(of[:n])) / CostTable(0.3, (1.0, 1.1, 1.2)).round_cost(n) for n in range(9))
    assert again["8 bits"]["predicted"]["0.8"] == pytest.approx(best)


def test_acceptance_is_what_the_model_says(there, tmp_path):
    output = tmp_path / "drafts.json"
    run(there, output, "--skip-clock", drafts=())
    rows = rows_of(output)
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
    for row in rows.values():
        for survival in row["acceptance"].values():
            assert survival == sorted(survival, reverse=True)


def test_what_cannot_be_compared_is_refused_in_one_line(there, tmp_path, capsys):
    output = tmp_path / "drafts.json"
    run(there, output, "--skip-clock", drafts=["gaps.json"])
    before = output.read_bytes()
    (tmp_path / "heads").mkdir()
    made.write(tmp_path / "drafts" / "broken.json", {"kind": "drafts"})
    SkipConfig.layers([2]).save(tmp_path / "gaps.json")
    for more, how, message in (
        (["--new-tokens", "9"], {}, "holds a comparison with another max_new_tokens (12, now 9)"),
        ([], {"drafts": ["heads"]}, "has gaps, too, which is not named now"),
        ([], {"drafts": ["gaps.json", tmp_path / "gaps.json"]}, "two drafts are called 'gaps'"),
        ([], {"drafts": [tmp_path / "heads"]}, "holds no finished training"),
        (["--output", str(tmp_path / "drafts" / "broken.json")], {}, "schema is missing"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(there, output, "--skip-clock", *more, **({"drafts": ["gaps.json"]} | how))
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("compare_drafts: error: ")
        assert message in said
    assert output.read_bytes() == before


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
