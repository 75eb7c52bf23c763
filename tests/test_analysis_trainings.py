"""The report of trainings and comparisons of drafts: numbers, words, pictures, what it refuses."""

import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
import run_files
import training_files as made
from matplotlib import rc_context
from test_analysis_report import NASTY, Page

from layerskip import LowPrecision, SkipConfig, Trained
from layerskip.analysis import training_plots, training_verdict, trainings, write_report
from layerskip.analysis.canvas import STYLE
from layerskip.files.trainings import holds_training, read_training


def loaded(tmp_path, *records):
    files = [
        made.write(tmp_path / f"run {number}" / "train.json", record)
        for number, record in enumerate(records)
    ]
    return trainings.load_trainings(files)


def compared(tmp_path, **changes):
    file = made.write(tmp_path / "drafts.json", made.comparison(**changes))
    [comparison] = trainings.load_comparisons([file])
    return comparison


def timed(speedup, low, high, **changes):
    """A row's clock, at the temperature of the files."""
    known = made.row("any")["timed"]["0.8"]
    return {"0.8": known | {"speedup": speedup, "low": low, "high": high} | changes}


# ---------------------------------------------------------------------------------------------
# Trainings.


def test_trainings_are_named_by_what_tells_them_apart(tmp_path):
    def of(**recipe):
        return made.training(recipe=recipe)

    names = [
        each.label
        for each in loaded(
            tmp_path, of(kind="heads"), of(kind="healed", loss="kl"), of(kind="healed", seed=0),
            of(kind="healed", seed=1), of(), of(),
        ).each
    ]  # fmt: skip
    assert names == [
        "heads", "healed (kl)", "healed (lk, seed 0)", "healed (lk, seed 1)",
        "feature-block (run 4)", "feature-block (run 5)",
    ]  # fmt: skip
    other = [
        of(),
        of(optimizer="muon"),
        of(tokens=None),
    ]  # the first is of before there was a choice
    assert [each.label for each in loaded(tmp_path, *other).each] == [
        "feature-block (adamw, tokens 80000)", "feature-block (muon)", "feature-block (adamw)",
    ]  # fmt: skip
    files = [made.write(tmp_path / at / "x" / "train.json", of()) for at in "ab"]
    labels = [each.label for each in trainings.load_trainings(files).each]
    assert labels == ["feature-block (file 1)", "feature-block (file 2)"]


def test_what_a_draft_is_trained_on_is_told(tmp_path):
    four = SkipConfig(low=LowPrecision(bits=4, head=8)).resolve(6)
    gaps = SkipConfig(attention=(2,), mlp=(2, 3), low=LowPrecision(bits=8)).resolve(6)
    before = Trained(kind="healed", weights="w", hash="0" * 64, base="b")
    for kind, skip, words in (
        ("heads", SkipConfig(), "last states"),
        ("exit-block", SkipConfig.early_exit(2), "exit 2"),
        ("exit-block", SkipConfig.early_exit(2).resolve(6), "exit 2"),
        ("healed", four, "4 bits, head 8"),
        ("healed", gaps, "3 sublayers out, 8 bits"),
        ("healed", replace(four, trained=before), "4 bits, head 8, trained before"),
    ):
        assert trainings.base_of({"kind": kind, "skip": skip.to_dict()}) == words
    each = [made.training(recipe={"kind": "healed", "skip": s.to_dict()}) for s in (four, gaps)]
    labels = [one.label for one in loaded(tmp_path, *each).each]
    assert labels == ["healed (4 bits, head 8)", "healed (3 sublayers out, 8 bits)"]


def test_a_training_in_numbers(tmp_path):
    of = loaded(tmp_path, made.training(), made.training(recipe={"kind": "heads"}, timed={}))
    table = trainings.trainings(of)
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
    curve = trainings.curves(of)
    assert len(curve) == 2 * len(made.CURVE) * 2
    rows = curve[(curve["draft"] == "heads") & (curve["step"] == 2)]
    assert rows["overlap"].tolist() == [steps[1] for _, _, *steps in made.CURVE]
    assert rows["tokens"].tolist() == [tokens for tokens, *_ in made.CURVE]
    assert rows["loss"].tolist() == [loss for _, loss, *_ in made.CURVE]


def test_trainings_in_pictures(tmp_path):
    of = loaded(
        tmp_path,
        made.training(),
        made.training(recipe={"kind": "heads"}),
        made.training(recipe={"kind": "heads", "loss": "kl"}),
    )
    with rc_context(STYLE):
        overlap, loss = training_plots.training_plots(of)
        for plot in (overlap, loss):
            plot.figure.draw_without_rendering()  # warns where there is no room
    (axes,) = overlap.figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert [*lines] == ["feature-block", "heads (lk)", "heads (kl)"]
    assert lines["heads (kl)"].get_ydata().tolist() == [0.30, 0.52, 0.61, 0.66]
    assert "feature-block 0.300 to 0.660 after 80,000 tokens" in overlap.alt
    # losses of different kinds do not share an axis
    assert [axes.get_ylabel() for axes in loss.figure.axes] == ["loss: lk", "loss: kl"]
    drawn = [[line for line in axes.lines if len(line.get_xdata())] for axes in loss.figure.axes]
    assert [len(lines) for lines in drawn] == [2, 1]
    assert drawn[1][0].get_color() == lines["heads (kl)"].get_color()
    assert "lk: feature-block 1.6 to 0.7, heads (lk) 1.6 to 0.7; kl: heads (kl)" in loss.alt
    # of two seeds the second is dashed
    seeds = [made.training(recipe={"seed": seed}) for seed in (0, 1)]
    [overlap, _] = training_plots.training_plots(
        loaded(tmp_path, *seeds, made.training(recipe={"kind": "heads"}))
    )
    looks = [(line.get_color(), line.get_linestyle()) for line in overlap.figure.axes[0].lines]
    assert looks[0][0] == looks[1][0] != looks[2][0]
    assert [dashes for _, dashes in looks] == ["-", "--", "-"]
    assert [training_plots.short(n) for n in (0, 500, 20_000, 1.5e6)] == ["0", "500", "20k", "1.5M"]


@pytest.mark.parametrize("pays", [True, False])
def test_trainings_in_words(tmp_path, pays):
    one = made.training(pays=pays)
    verdict = training_verdict.judge_trainings(loaded(tmp_path, one))
    assert verdict.result == [
        f"The trained draft {'pays' if pays else 'does not pay'}.",
        "feature-block is 1.20 times as fast as plain decoding (95% interval 1.10 to 1.30), what "
        "drafted before 1.50.",
    ]
    assert "0.600 of its first tokens and 0.360 of its first two at c 0.10" in verdict.reasons[0]
    assert "its overlap still rose by 0.050 over the second half" in verdict.advice[0]
    flat = [point | {"overlap": [0.5, 0.4]} for point in one["curve"]]
    better = made.training(recipe={"kind": "heads"}, curve=flat, timed={})
    better["drafts"]["trained"] = made.draft(0.9, 0.2, 1)
    verdict = training_verdict.judge_trainings(loaded(tmp_path, one, better))
    assert verdict.result[0] == f"{'1' if pays else 'None'} of 2 trained drafts pays."
    assert len(verdict.result) == 2  # nothing is said of the speed of what was not timed
    assert verdict.reasons[0].startswith("heads is accepted most often: 0.900 ")
    assert verdict.advice == []


# ---------------------------------------------------------------------------------------------
# Comparisons.


def test_a_comparison_in_numbers(tmp_path):
    rows = made.comparison()["rows"]
    rows[0]["acceptance"]["greedy"] = [0.99]
    rows[0]["timed"]["greedy"] = timed(2.0, None, None)["0.8"]
    table = trainings.drafts(compared(tmp_path, rows=rows)).set_index("draft")
    assert table.index.tolist() == ["8 bits", "lookup", "heads", "8 bits + lookup"]
    eight, mixture = table.loc["8 bits"], table.loc["8 bits + lookup"]
    assert eight["greedy_1"] == 0.99
    assert math.isnan(eight["greedy_2"])
    assert [eight[f"accepted_{n}"] for n in (1, 4)] == pytest.approx([0.9, 0.9**4])
    assert eight["at_one_2"] == pytest.approx(0.81)
    assert (eight["greedy_measured"], eight["own_megabytes"]) == (2.0, 9)
    assert math.isnan(eight["greedy_low"])
    assert (mixture["measured"], mixture["low"], mixture["high"]) == (1.5, 1.4, 1.6)
    assert mixture["efficiency"] == pytest.approx(1.5 / 1.6)
    assert mixture[["accepted_1", "draft_cost", "tokens"]].isna().all()
    assert table["offered"].dropna().to_dict() == {"lookup": 0.4}
    assert table["trained"].tolist() == ["no", "no", "yes", "no"]
    assert (table.loc["heads", "tokens"], table.loc["heads", "minutes"]) == (80_000, 21)


def test_a_comparison_in_words_and_pictures(tmp_path):
    plain = made.row("8 bits", timed=timed(1.5, 1.4, 1.6))
    near = made.row("heads", "heads", timed=timed(1.55, 1.45, 1.65))
    far = made.row("healed", "healed", timed=timed(2.0, 1.9, 2.1))
    for trained, said in (
        (near, "8 bits is 1.50 times as fast as plain decoding (95% interval 1.40 to 1.60), the "
               "best without trained weights: training brings 1.03x, and the intervals overlap."),
        (far, "training brings 1.33x."),
    ):  # fmt: skip
        verdict = training_verdict.judge_comparison(compared(tmp_path, rows=[plain, trained]))
        assert verdict.result[1].endswith(said)
        assert verdict.faults == []
    assert verdict.result[0].startswith("healed is 2.00 times as fast")
    assert verdict.reasons == ["1 of 2 are more than 10% from what was predicted."]
    wrong = plain | {"timed": timed(1.5, 1.4, 1.6, equal=7, faults=2)}
    comparison = compared(tmp_path, rows=[wrong, near])
    verdict = training_verdict.judge_comparison(comparison)
    assert verdict.faults[0].startswith("FAULT: 2 of 9 texts of 8 bits differ")
    with rc_context(STYLE):
        speedups, accepted = training_plots.comparison_plots(comparison)
        for plot in (speedups, accepted):
            plot.figure.draw_without_rendering()
    labels = [text.get_text() for text in speedups.figure.axes[0].get_yticklabels()]
    assert labels == ["heads", "8 bits"]  # the fastest first
    assert "within 10% of predicted for 2 of 2" in speedups.alt
    assert len(accepted.figure.axes[0].lines) == 2
    untimed = [{key: plain[key] for key in plain.keys() - {"timed", "predicted", "costs"}}]
    comparison = compared(tmp_path, rows=untimed)
    assert "nothing was timed yet" in training_verdict.judge_comparison(comparison).result[0]
    assert [plot.name for plot in training_plots.comparison_plots(comparison)] == [
        "draft-acceptance"
    ]


# ---------------------------------------------------------------------------------------------
# The report.


def test_all_kinds_of_files_on_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr("layerskip.analysis.report.plots.run_plots", lambda run: [])
    files = [
        made.write(tmp_path / "a" / "train.json", made.training(model=NASTY)),
        run_files.write(tmp_path / "run.jsonl", run_files.made_up(prompts=1)),
        made.write(tmp_path / "drafts.json", made.comparison()),
        made.write(tmp_path / "b" / "train.json", made.training(recipe={"seed": 1})),
    ]
    output = tmp_path / "report"
    summary = write_report(files, output)
    assert summary.count("\n\n") == 2
    page = Page((output / "index.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert {"run-1", "drafts-1", "trainings"} <= set(page.ids)
    for text in ("feature-block (seed 1)", "8 bits + lookup", "overlap before", "80,000"):
        assert text in page.text
    assert "script" not in page.tags
    for name, rows in (("trainings", 2), ("training-curves", 16), ("drafts", 4)):
        assert len(pd.read_csv(output / "tables" / f"{name}.csv")) == rows
    drawn = {path.name for path in (output / "plots").iterdir()}
    assert {"trainings-training-overlap.svg", "trainings-training-loss.svg"} <= drawn
    one = write_report(files[:1], tmp_path / "one")
    assert one.startswith("The trained draft does not pay.")
    assert "<title>Trainings</title>" in (tmp_path / "one" / "index.html").read_text()


BAD = {
    "no curve": (made.training(curve=[]), "curve must"),
    "no trained": (made.training(drafts={"before": made.draft(0.9, 0.3, 1)}), "must have trained"),
    "schema": (made.training(schema=2), "schema must be 1, got 2"),
    "steps": (
        made.training(curve=[{"tokens": 0, "loss": 1.0, "overlap": [0.5]},
                             {"tokens": 1, "loss": 1.0, "overlap": [0.5, 0.4]}]),
        "overlaps of equally many steps, got [1, 2]",
    ),
    "kind": (made.training(recipe={"kind": 3}), "recipe.kind must be a string, got 3"),
    "share": (made.training(covered=1.2), "covered must be in 0..1, got 1.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_trainings_are_refused_in_one_line(tmp_path, name):
    document, message = BAD[name]
    file = made.write(tmp_path / "train.json", document)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write_report([file], tmp_path / "report")
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report").exists()


def test_what_is_no_file_of_a_report_is_refused_and_told(tmp_path):
    file = made.write(tmp_path / "of" / "train.json", made.training())
    assert holds_training(file)
    assert read_training(file)["recipe"]["kind"] == "feature-block"
    assert not holds_training(made.write(tmp_path / "drafts.json", made.comparison()))
    other = made.write(tmp_path / "skip.json", {"attention": [1], "mlp": []})
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(made.training())[:200])
    for path, message in (
        (tmp_path / "of", f"is a folder; name {file}"),
        (tmp_path, "is a folder; a report is made of"),
        (other, "is none of its kinds: a report is made of records of runs (.jsonl), search.json"),
        (cut, "cut.json is cut off or not JSON"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_report([path], tmp_path / "report")
