"""The report of trainings: its numbers, words and picture, and what it refuses."""

import json
import re

import pandas as pd
import pytest
import run_files
import training_files as made
from matplotlib import rc_context
from pages import NASTY, page_of

from layerskip import LowPrecision, SkipConfig
from layerskip.analysis import exit_report, plots, training_tables, write_report
from layerskip.analysis.drawing import STYLE
from layerskip.analysis.verdict import judge_trainings, words
from layerskip.cli.train import _verdict
from layerskip.files.documents import kind_of
from layerskip.files.trainings import read_training


def loaded(tmp_path, *records):
    files = [
        made.write(tmp_path / f"run {number}" / "train.json", record)
        for number, record in enumerate(records)
    ]
    return training_tables.load_trainings(files)


def test_trainings_are_named_by_what_tells_them_apart(tmp_path):
    def labels(*recipes):
        return [*loaded(tmp_path, *(made.training(recipe=recipe) for recipe in recipes)).each]

    assert labels({}) == ["feature-block"]
    assert labels({"kind": "heads"}, {"kind": "healed", "loss": "kl"}) == [
        "heads (last states, lk)",
        "healed (kept sublayers, kl)",
    ]
    assert labels({"seed": 0}, {"seed": 1}) == ["feature-block (seed 0)", "feature-block (seed 1)"]
    assert labels({}, {"tokens": None, "minutes": 3.0}) == [
        "feature-block (tokens 80000)", "feature-block (minutes 3.0)",
    ]  # fmt: skip
    assert labels({}, {}) == ["feature-block, file 1", "feature-block, file 2"]


def test_what_a_draft_is_trained_on_is_told(tmp_path):
    exit = SkipConfig.early_exit(2)
    rounded = SkipConfig(exit_layer=2, low=LowPrecision(bits=8)).resolve(6)
    for kind, skip, named in (
        ("heads", SkipConfig(), "last states"),
        ("exit-block", exit, "exit 2"),
        ("exit-block", exit.resolve(6), "exit 2"),
        ("exit-block", rounded, "exit 2, 8 bits"),
        ("healed", rounded, "kept sublayers"),
    ):
        recipe = {"kind": kind, "skip": skip.to_dict()}
        assert training_tables.base_of(recipe) == named
        began = {"kind": "healed", "hash": "0" * 64, "base": "b"}  # as files of earlier versions
        recipe["skip"] = skip.to_dict() | {"trained": began}
        assert training_tables.base_of(recipe) == named


def test_a_training_in_numbers(tmp_path):
    of = loaded(tmp_path, made.training(), made.training(recipe={"kind": "heads"}, timed={}))
    table = training_tables.trainings(of)
    first, second = (row for _, row in table.iterrows())
    assert first["minutes"] == pytest.approx(21)
    assert (first["overlap_before"], first["overlap"]) == (0.30, 0.66)
    wanted = made.training()["drafts"]["trained"]
    for depth in range(1, 5):
        assert first[f"accepted_{depth}"] == pytest.approx(0.6**depth)
    assert first["greedy"] == wanted["greedy"][0]
    assert (first["draft_cost"], first["predicted"]) == (0.1, wanted["formula"])
    assert (first["measured"], first["low"], first["high"], first["before"]) == (1.2, 1.1, 1.3, 1.5)
    assert second[["measured", "low", "high", "before"]].isna().all()
    assert table["model"].tolist() == ["weights-0123456789abcdef"] * 2
    curve = training_tables.curves(of)
    assert len(curve) == 2 * len(made.CURVE) * 2
    rows = curve[(curve["draft"] == "heads") & (curve["step"] == 2)]
    assert rows["overlap"].tolist() == [steps[1] for _, _, *steps in made.CURVE]
    assert rows["tokens"].tolist() == [tokens for tokens, *_ in made.CURVE]
    assert rows["loss"].tolist() == [loss for _, loss, *_ in made.CURVE]


def test_trainings_in_pictures(tmp_path):
    of = loaded(tmp_path, made.training(), made.training(recipe={"kind": "heads", "loss": "kl"}))
    with rc_context(STYLE):
        curve = plots.training_curve(of)
        curve.figure.draw_without_rendering()  # warns if there is too little room
    (axes,) = curve.figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert [*lines] == ["feature-block (lk)", "heads (kl)"]
    assert lines["heads (kl)"].get_ydata().tolist() == [0.30, 0.52, 0.61, 0.66]
    assert "feature-block (lk) 0.660 after 80,000 tokens" in curve.alt
    told = curve.figure.axes[0].xaxis.get_major_formatter()
    assert [told(n) for n in (0, 500, 20_000, 1.5e6)] == ["0", "500", "20k", "1.5M"]


@pytest.mark.parametrize("pays", [True, False])
def test_trainings_in_words(tmp_path, pays):
    one = made.training(pays=pays)
    verdict = judge_trainings(loaded(tmp_path, one))
    text = words([verdict])
    for fact in (f"{int(pays)} of 1", "is 1.20 (1.10 to 1.30) times", "draft 1.50", "0.600",
                 "c 0.10", "0.300 to 0.660"):  # fmt: skip
        assert fact in text
    assert "its overlap still grew" in text
    flat = [point | {"overlap": [0.5, 0.4]} for point in one["curve"]]
    better = made.training(recipe={"kind": "heads"}, curve=flat, timed={})
    better["drafts"]["trained"] = made.draft(0.9, 0.2, 1)
    verdict = judge_trainings(loaded(tmp_path, one, better))
    assert "0.900 of its first tokens" in words([verdict])
    assert "grew" not in words([verdict])
    assert "nan" not in words([judge_trainings(loaded(tmp_path, better))])


def test_all_kinds_of_files_on_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "run_plots", lambda run: [])
    files = [
        made.write(tmp_path / "a" / "train.json", made.training(model=NASTY)),
        run_files.write(tmp_path / "run.jsonl", run_files.made_up(prompts=1)),
        made.write(tmp_path / "b" / "train.json", made.training(recipe={"seed": 1})),
    ]
    output = tmp_path / "report"
    summary = write_report(files, output)
    assert summary.count("\n\n") == 1
    page = page_of(output)
    assert {"run-1", "training-1"} <= set(page.ids)
    for text in ("feature-block (seed 1)", "overlap before", "80,000"):
        assert text in page.text
    assert "script" not in page.tags
    for name, rows in (("trainings", 2), ("training-curves", 16)):
        assert len(pd.read_csv(output / "tables" / f"{name}.csv")) == rows
    drawn = {path.name for path in (output / "plots").iterdir()}
    assert drawn == {"trainings-training-curve.svg"}
    one = write_report(files[:1], tmp_path / "one")
    assert one.startswith("0 of 1 trained drafts pay")
    assert "<title>Trainings</title>" in (tmp_path / "one" / "index.html").read_text()


def exit_record(tmp_path, **changes):
    def row(exit, loss, accepted):
        return dict(exit=exit, loss=loss, agreement=accepted, accepted=accepted, overlap=accepted)

    record = {
        "kind": "exits",
        "schema": 1,
        "recipe": {"exits": [2], "init": "checkpoint", "loss": "lk"},
        "model": NASTY,
        "base": "weights-0123456789abcdef",
        **{"steps": 10, "tokens": 10_240, "text_tokens": 20_000, "best": 2, "promised": 1.2},
        "seconds": {"training": 60.0},
        "curve": [2.0, 1.0],
        "before": [row(1, 5.0, 0.1), row(2, 4.0, 0.3), row(4, 2.0, 1.0)],
        "after": [row(1, 4.0, 0.2), row(2, 3.0, 0.6), row(4, 2.01, 1.0)],
        "timed": {},
    }
    return made.write(tmp_path / "exits" / "train.json", record | changes)


def test_trained_exits_are_drawn_before_and_after(tmp_path):
    file = exit_record(tmp_path)
    assert kind_of(file) == "exits"
    [one] = exit_report.load_exit_trainings([file])
    with rc_context(STYLE):
        [plot] = exit_report.exit_plots(one)
        plot.figure.draw_without_rendering()
    (axes,) = plot.figure.axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn == {"before training": [0.1, 0.3], "after training": [0.2, 0.6]}
    assert "after training 1: 0.20, 2: 0.60" in plot.alt
    summary = write_report([file], tmp_path / "report")
    assert summary.startswith(
        "Exit 2: 0.600 accepted (before: 0.300); the model's own loss is 2.010"
    )
    assert "0.600" in page_of(tmp_path / "report").text
    assert len(pd.read_csv(tmp_path / "report" / "tables" / "exit-training.csv")) == 3
    worse = [*one.record["after"][:-1], one.record["after"][-1] | {"loss": 2.1}]
    summary = write_report([exit_record(tmp_path, after=worse)], tmp_path / "report")
    assert summary.startswith("The model's own loss rose by 0.100 nats, more than 0.02")
    with pytest.raises(ValueError, match="before and after must have as many exits"):
        write_report([exit_record(tmp_path, after=worse[1:])], tmp_path / "report")


def test_train_tells_its_results_in_the_words_of_a_report(tmp_path):
    made.write(tmp_path / "train.json", made.training())
    assert _verdict(tmp_path, "training").startswith("0 of 1 trained drafts pay")
    timed = {"speedup": 1.3, "low": 1.2, "high": None, "tokens_per_second": 50.0}
    exit_record(tmp_path, timed={"trained": timed | {"high": 1.4}, "before": timed | {"low": None}})
    told = _verdict(tmp_path / "exits", "exits")
    assert "that exit with lookups is 1.30 (1.20 to 1.40) times as fast as plain decoding" in told
    assert "the usual draft is 1.30 times as fast" in told


def test_what_is_no_file_of_a_report_is_refused_and_told(tmp_path):
    file = made.write(tmp_path / "of" / "train.json", made.training())
    assert kind_of(file) == "training"
    assert read_training(file)["recipe"]["kind"] == "feature-block"
    drafts = made.write(tmp_path / "drafts.json", {"kind": "drafts", "rows": []})
    other = made.write(tmp_path / "skip.json", {"attention": [1], "mlp": []})
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(made.training())[:200])
    for path, message in (
        (tmp_path, "holds none of these: a report is made of"),
        (other, "cannot be reported: a report is made of records of runs (.jsonl), search.json"),
        (drafts, "drafts.json cannot be reported"),
        (cut, "cut.json: it is cut off or not JSON"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_report([path], tmp_path / "report")
