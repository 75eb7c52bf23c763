"""The report of a layer search: its numbers, its pictures, its words, and what it refuses."""

import copy
import itertools
import json
import math
import random
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import run_files
import search_files as made
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from test_analysis_report import NASTY, Page
from typer.testing import CliRunner

from layerskip.analysis import (
    report,
    search_plots,
    search_tables,
    search_verdict,
    shared_plots,
    write_report,
)
from layerskip.analysis.canvas import STYLE, new_figure
from layerskip.cli import main as cli
from layerskip.costs.speculation import CostTable, speedup
from layerskip.files.searches import holds_search, read_search


def loaded(tmp_path, document):
    [search] = search_tables.load_searches([made.write(tmp_path / "search.json", document)])
    return search


def trial(number, **changes):
    """A trial that leaves out the attention of layer 1 alone and gains nothing."""
    return {
        "number": number,
        "origin": "local",
        "state": "complete",
        "skipped": {"attention": [1], "mlp": []},
        "value": 100.0,
        "guide": 90.0,
        "speedup": 1.0,
        "forced_speedup": 0.9,
        "acceptance": 0.5,
        "draft_cost": 0.5,
        "controller": "expected-gain",
        "max_draft_length": 8,
        "threshold": None,
        "seconds": 1.0,
        "copy_of": None,
    } | changes


def of_trials(*trials, **changes):
    """A search of these trials, without finalists."""
    none = {"finalists": [], "winner": None, "best_exit": None}
    return made.made_up(trials=1) | none | {"trials": list(trials)} | changes


def gaining(number, gain, **changes):
    return trial(number, value=100 * gain, guide=100 * gain, speedup=gain, forced_speedup=gain,
                 **changes)  # fmt: skip


LOW = {"bits": 8, "attention": [0, 2], "mlp": [*range(12)], "head": True}

# ---------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_what_no_other_point_dominates(seed):
    draw = random.Random(seed)
    costs = np.array([draw.randint(0, 8) / 8 for _ in range(40)])
    accepted = np.array([draw.choice([math.nan, *(n / 6 for n in range(7))]) for _ in range(40)])
    points = list(zip(costs, accepted, strict=True))

    def dominated(c, a):
        return any(x <= c and y >= a and (x < c or y > a) for x, y in points)

    expected = [not math.isnan(a) and not dominated(c, a) for c, a in points]
    assert search_tables.front(costs, accepted).tolist() == expected
    assert 0 < sum(expected) < 40


def test_trials_in_numbers(tmp_path):
    document = of_trials(
        gaining(3, 1.2, origin="tpe", acceptance=0.8, draft_cost=0.4),
        trial(0, origin="seed:none", guide=None, forced_speedup=None, acceptance=None,
              skipped={"attention": [], "mlp": []}, draft_cost=1.0),
        trial(1, origin="single"),
        {"number": 2, "origin": None, "state": "failed"},
        gaining(4, 1.1, skipped={"attention": [1, 2, 3, 7], "mlp": [5]}, copy_of=3),
        gaining(5, 1.004) | {"forced_speedup": 0.8},
    )  # fmt: skip
    table = loaded(tmp_path, document).trials
    assert table["number"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table["kind"].tolist() == ["seed", "single", "other", "bayesian", "local", "local"]
    assert table["score"].tolist() == pytest.approx([1, 0.9, math.nan, 1.2, 1.1, 0.8], nan_ok=True)
    assert table["best_so_far"].tolist() == [1, 1, 1, 1.2, 1.2, 1.2]
    assert table["front"].tolist() == [False, False, False, True, False, False]
    assert table["left_out"].dropna().tolist() == [0, 1, 1, 5, 1]
    assert (table["attention"][4], table["mlp"][4]) == ("1-3, 7", "5")
    assert table["bound"][3] == pytest.approx(2.5)
    # plain decoding is there from the start, whatever the first trials do
    assert loaded(tmp_path, of_trials(trial(0))).trials["best_so_far"].tolist() == [1]
    best = search_tables.best_trials(loaded(tmp_path, document), 3)
    assert best["number"].tolist() == [3, 0, 1]  # 4 is a copy, 5 would lose


def test_low_precision_in_numbers_and_pictures(tmp_path):
    document = made.made_up()
    exact = loaded(tmp_path, document)
    assert "rounded" not in exact.trials
    assert "rounded" not in search_tables.finalists(exact)
    document["finalists"][0]["low"] = LOW
    for trial in document["trials"]:
        if trial["number"] in (document["finalists"][0]["trial"], 0):
            trial["low"] = LOW
    search = loaded(tmp_path, document)
    words = "8 bits: attention 0, 2, MLP 0-11, head"
    assert search.trials.set_index("number")["rounded"].dropna().to_dict() == {0: words, 87: words}
    assert search_tables.finalists(search)["rounded"][0] == words
    plots = {plot.name: plot for plot in search_plots.search_plots(search)}
    skip_map, pareto = plots["search-skip-map"], plots["search-pareto"]
    assert "leave out or round" in skip_map.title
    assert "runs attention of layers 0, 2 and MLP of layers 0-11 and the head in 8 bits" in (
        skip_map.alt
    )
    [legend] = skip_map.figure.legends
    assert "low bar: in 8 bits" in [text.get_text() for text in legend.get_texts()]
    [legend] = pareto.figure.legends
    assert "partly in low precision" in [text.get_text() for text in legend.get_texts()]
    old = {plot.name: plot for plot in search_plots.search_plots(exact)}
    assert old["search-skip-map"].title == "What the drafts leave out"


def test_finalists_in_numbers(tmp_path):
    document = made.made_up(finalists=2)
    first, second, third = document["finalists"]
    first |= {"predicted": 2.0, "predicted_held_out": 1.6, "draft_cost": 0.25}
    first["confirmed"] |= {"speedup": 1.2, "low": 1.1, "high": 1.3}
    second |= {"predicted_held_out": None, "predicted": 1.5}
    second["confirmed"] |= {"speedup": 1.2}
    third["confirmed"] = None
    document |= {"winner": first["name"], "best_exit": third["name"]}
    table = search_tables.finalists(loaded(tmp_path, document))
    assert table["role"].tolist() == ["winner", "", "best exit"]
    assert table["forecast"].tolist()[:2] == [1.6, 1.5]
    assert table["efficiency"].tolist() == pytest.approx([0.75, 0.8, math.nan], nan_ok=True)
    assert table[["low", "high", "bound"]].iloc[0].tolist() == [1.1, 1.3, 4]
    document["best_exit"] = first["name"]
    table = search_tables.finalists(loaded(tmp_path, document))
    assert table["role"].tolist() == ["winner, best exit", "", ""]


def test_sublayers_in_numbers(tmp_path):
    finalists = copy.deepcopy(made.made_up()["finalists"])[:2]
    finalists[0] |= {"trial": 0, "skipped": {"attention": [1, 11], "mlp": [11]}}
    finalists[1] |= {"trial": 0, "skipped": {"attention": [11], "mlp": []}}
    whole = {"attention": [11], "mlp": [11]}
    search = loaded(
        tmp_path,
        of_trials(
            trial(0, origin="single", forced_speedup=0.97, acceptance=0.9, draft_cost=0.95),
            trial(1, origin="single", skipped=whole, forced_speedup=None),
            trial(2, skipped={"attention": [], "mlp": [3]}),  # alone, but by another move
            finalists=finalists,
            importance={"mlp.2": 0.2, "attention.1": 0.3},
        ),
    )
    table = search_tables.sublayers(search).set_index("switch")
    assert table.index.tolist() == ["attention.1", "mlp.2", "layer.11"]
    assert table["importance"].tolist() == pytest.approx([0.3, 0.2, math.nan], nan_ok=True)
    assert table["alone_speedup"].tolist() == pytest.approx([0.97, math.nan, math.nan], nan_ok=True)
    assert table["alone_acceptance"].tolist() == pytest.approx([0.9, math.nan, 0.5], nan_ok=True)
    assert table["finalists"].tolist() == [1, 0, 1]


def test_curves_of_equal_speedup_follow_the_closed_formula(tmp_path):
    search = loaded(tmp_path, made.made_up())
    _, axes = new_figure(4)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    first = search.finalists[0]
    costs = CostTable(first["draft_cost"], tuple(first["verify"]))
    ends = shared_plots.equal_speedups(axes, costs, 8)
    verify = CostTable(0.1, tuple(search.finalists[0]["verify"])).verify_cost
    assert {1.5, 2, 3} < ends.keys()
    for level, c in ends.items():
        found = max(speedup(1.0, length, c, verify) for length in range(9))
        assert found == pytest.approx(level, rel=0.02)
    ends = shared_plots.equal_speedups(axes, CostTable(0.1, (1.0,)), 40)
    places = sorted(ends.values())  # with 10 and 20 they would stand too close
    assert {2, 3, 4, 6} < ends.keys()
    assert min(b - a for a, b in itertools.pairwise(places)) > 0.07


# ---------------------------------------------------------------------------------------------
# Pictures


def texts_of(figure):
    """Every text that is drawn, with its box in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    unseen = set()  # labels of ticks beyond an axis's ends, which matplotlib keeps
    for axes in (a for one in figure.axes for a in (one, *one.child_axes)):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() if not low <= t.get_loc() <= high]
            unseen.update(label for t in ticks for label in (t.label1, t.label2))
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    # of annotations the text alone, without its line
    boxes = [(t, Text.get_window_extent(t, canvas.get_renderer())) for t in texts]
    return [(t, box) for t, box in boxes if t not in unseen]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layers": 80, "trials": 700, "finalists": 11},
        {"layers": 2, "trials": 6, "finalists": 1},
        {"pays": False, "confirm": False},
    ],
    ids=str,
)
def test_no_text_covers_another_or_leaves_the_picture(tmp_path, settings):
    search = loaded(tmp_path, made.made_up(**settings))
    with rc_context(STYLE):
        drawn = search_plots.search_plots(search)
    assert len(drawn) == 5 - (not settings.get("confirm", True))
    for plot in drawn:
        with rc_context(STYLE):
            texts = texts_of(plot.figure)
        assert len(texts) > 5, plot.name
        width, height = plot.figure.canvas.get_width_height()
        for text, box in texts:
            assert text.get_fontsize() >= 8, (plot.name, text)
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, (plot.name, text)
        for (one, a), (other, b) in itertools.combinations(texts, 2):
            apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
            assert apart, (plot.name, one.get_text(), other.get_text())


def test_pictures_say_their_numbers(tmp_path):
    search = loaded(tmp_path, made.made_up())
    words = {plot.name: plot.alt for plot in search_plots.search_plots(search)}
    table = search.trials
    assert (table["front"] & table["copy_of"].notna()).sum() == 0
    assert f"{table['front'].sum()} are not dominated" in words["search-pareto"]
    assert f"has {table['score'].max():.2f}" in words["search-history"]
    assert "trial-87 (winner) leaves out attention of layers 2, 4-11" in words["search-skip-map"]
    [skip_map] = [p for p in search_plots.search_plots(search) if p.name == "search-skip-map"]
    rows = [label.get_text() for label in skip_map.figure.axes[0].get_yticklabels()]
    assert rows[:5] == ["trial-87 (winner)", "trial-81", "trial-80", "trial-83", "exit-4"]
    assert len(rows) == len(set(rows)) == 20
    assert "exit-3" in rows
    assert "within 10% of predicted for 5 of 5 points" in words["search-forecasts"]
    assert "highest mlp.10 0.249" in words["search-sublayers"]


# ---------------------------------------------------------------------------------------------
# Words


def said(tmp_path, document):
    return " ".join(search_verdict.judge(loaded(tmp_path, document)).sentences)


def test_a_winner_in_words(tmp_path):
    text = said(tmp_path, made.made_up())
    assert text.startswith(
        "The search found trial-87, a draft that leaves out 18 of 24 sublayers of tiny (sampled "
        "at T=0.8, float32 on cpu, 1 thread): it was 1.33 times as fast as plain decoding on the "
        "clock (95% interval 1.25 to 1.42, n = 6). The best early exit, exit-4, was 1.20 times as "
        "fast as plain decoding on the clock (95% interval 1.12 to 1.28, n = 6). Its draft step "
        "costs c = "
    )
    assert "120 (1 failed), in the sublayer space of 2,097,151 sets; the winner came" in text
    assert "skip.json" in text
    assert text.count(". ") <= 6  # headline, limit, what to do
    assert "--no-draft" not in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("skipped", "rounded", "lookup", "words"),
    [
        (
            [],
            range(12),
            True,
            "runs all 24 sublayers of tiny in 8 bits, joined by lookups (sampled",
        ),
        ([], range(11), False, "runs 22 of 24 sublayers of tiny in 8 bits (sampled"),
        ([3], range(11), False, "leaves out 2 of 24 sublayers of tiny and runs 22 in 8 bits (sa"),
    ],
)
def test_a_winner_in_low_precision_in_words(tmp_path, skipped, rounded, lookup, words):
    document = made.made_up()
    winner = next(f for f in document["finalists"] if f["name"] == document["winner"])
    winner["skipped"] = {"attention": skipped, "mlp": skipped}
    winner["low"] = {"bits": 8, "attention": [*rounded], "mlp": [*rounded], "head": True}
    winner["decoding"]["lookup"] = lookup
    assert f"found trial-87, a draft that {words}" in said(tmp_path, document)


def changed(**parts):
    """A made-up search with parts of its winner, and of what was measured of it, set anew."""
    document = made.made_up()
    winner = next(f for f in document["finalists"] if f["name"] == document["winner"])
    confirmed = {name: value for name, value in parts.items() if name in winner["confirmed"]}
    winner["confirmed"] |= confirmed
    winner |= {name: value for name, value in parts.items() if name not in confirmed}
    return document


def test_a_clear_winner_is_told_from_a_doubtful_one(tmp_path):
    clear = said(tmp_path, changed(speedup=1.9, low=1.8, high=2.0, prompts=20))
    assert "may be as good" not in clear
    assert "more prompts" not in clear
    doubtful = said(tmp_path, changed(low=0.98))
    assert "but it is not distinguishable from plain decoding" in doubtful
    assert "skip.json" not in doubtful
    assert "more prompts: 6 leave doubt (95% interval 0.98 to 1.42)" in doubtful
    one = said(tmp_path, changed(low=None, high=None, prompts=1))
    assert "more prompts: 1 leave doubt (no interval)" in one
    assert "nan" not in one
    fitted = said(tmp_path, changed(predicted_held_out=1.1))
    assert "lower on held-out prompts" in fitted


def test_an_exit_that_wins_is_called_one(tmp_path):
    document = made.made_up()
    document["winner"] = document["best_exit"]
    text = said(tmp_path, document)
    assert "It is an early exit: no other set of sublayers did better." in text
    assert "may be as good" not in text
    document["space"]["kind"] = "exit"
    text = said(tmp_path, document)
    assert "no other set" not in text
    assert "may be as good" not in text


def test_faults_come_first(tmp_path):
    text = said(tmp_path, changed(equal=3, faults=3))
    assert text.startswith("FAULT: 3 of 6 texts of trial-87 differ")
    assert "skip.json" not in text


def test_nothing_found_says_why(tmp_path):
    text = said(tmp_path, made.made_up(pays=False))
    assert text.startswith("Nothing beat plain decoding of tiny (sampled")
    assert "the fastest of 5 finalists, exit-4, was 0.91 times as fast as plain decoding on" in text
    assert "can be more than 5.9 times" in text
    assert "Decode plainly" in text
    close = made.made_up(pays=False)
    close["finalists"][0]["confirmed"] |= {"speedup": 1.02, "low": 0.99, "high": 1.05}
    text = said(tmp_path, close)
    assert text.startswith("Nothing clearly beat plain decoding of tiny")
    assert "more prompts: 6 leave doubt (95% interval 0.99 to 1.05)" in text
    untimed = said(tmp_path, made.made_up(pays=False, confirm=False))
    assert untimed.startswith("Nothing beat plain decoding of tiny (sampled")
    assert "no draft is priced above it" in untimed


def test_what_was_not_timed_is_not_promised(tmp_path):
    document = made.made_up(confirm=False)
    text = said(tmp_path, document)
    assert text.startswith("The search names no winner")
    assert "Time the finalists before" in text
    assert "Decode plainly" not in text
    document["winner"] = document["finalists"][0]["name"]
    text = said(tmp_path, document)
    assert "it is priced at 1.27 times plain decoding and has not been timed." in text
    assert "exit-4, is priced at 1.23 times" in text
    assert "on the clock" not in text


def test_more_trials_are_asked_for_while_the_search_still_finds(tmp_path):
    trials = [gaining(n, 1.1 + 0.01 * n) for n in range(20)]
    assert "ask for more --trials" in said(tmp_path, of_trials(*trials))
    assert "ask for more" not in said(tmp_path, of_trials(*trials[::-1]) | {
        "trials": [t | {"number": 19 - t["number"]} for t in trials]})  # fmt: skip
    seeds = [t | {"origin": f"seed:exit-{t['number']}"} for t in trials]
    assert "ask for more" not in said(tmp_path, of_trials(*seeds))
    space = made.made_up()["space"] | {"size": 20}
    assert "ask for more" not in said(tmp_path, of_trials(*trials, space=space))


# ---------------------------------------------------------------------------------------------
# The folder


@pytest.fixture
def quick(monkeypatch):
    """Reports with one plot for each search and none for runs."""
    monkeypatch.setattr(report.plots, "run_plots", lambda run: [])
    monkeypatch.setattr(report.plots, "overview_plots", lambda runs: [])
    monkeypatch.setattr(report, "search_plots", lambda search: [search_plots.forecasts(search)])


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_report_on_a_search(tmp_path):
    file = made.write(tmp_path / "search.json", made.made_up())
    summary = write_report([file], tmp_path / "report")
    page = Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert summary.split(". ")[0] in page.text
    assert page.tags.count("figure") == page.tags.count("svg") == 5
    assert len(page.ids) == len(set(page.ids))
    names = ("history", "pareto", "skip-map", "sublayers", "forecasts")
    tables = ("finalists", "sublayers", "trials")
    assert files_of(tmp_path / "report") == {
        "index.html", report.MARK,
        *(f"tables/search-{name}.csv" for name in tables),
        *(f"plots/search-{name}.svg" for name in names),
    }  # fmt: skip
    trials = pd.read_csv(tmp_path / "report" / "tables" / "search-trials.csv")
    assert len(trials) == 120
    assert trials["search"].unique().tolist() == ["Search of tiny, sampled at T=0.8"]
    text = (tmp_path / "report" / "index.html").read_text()
    best = re.search(r"<h3>Best trials</h3>.*?</table>", text, re.DOTALL)
    assert best[0].count("<tr>") == 21
    assert {"Finalists", "Sublayers"} <= set(re.findall("<h3>(.*?)</h3>", text))


def test_searches_and_runs_on_one_page(tmp_path, quick):
    files = [
        made.write(tmp_path / "search.json", made.made_up()),
        run_files.write(tmp_path / "run.jsonl", run_files.made_up(prompts=1)),
        made.write(tmp_path / "other.json", made.made_up(pays=False)),
        made.write(tmp_path / "third.json", made.made_up(dtype="bfloat16")),
    ]
    summary = write_report(files, tmp_path / "report")
    starts = [paragraph[:40] for paragraph in summary.split("\n\n")]
    assert starts == [
        "tiny, sampled at T=0.8: Self-speculation",
        "Search of tiny, sampled at T=0.8, float3",
        "Search of tiny, sampled at T=0.8, float3",
        "Search of tiny, sampled at T=0.8, bfloat",
    ]
    page = Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert {"run-1", "search-1", "search-2", "search-3"} <= set(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    found = files_of(tmp_path / "report")
    drawn = [name for name in found if name.endswith("search-forecasts.svg")]
    assert len(drawn) == 3
    assert "tables/speedup.csv" in found
    trials = pd.read_csv(tmp_path / "report" / "tables" / "search-trials.csv")
    assert trials["search"].nunique() == 3
    two = [files[0], files[2]]
    assert write_report(two, tmp_path / "two").count("\n\n") == 1
    assert "tables/speedup.csv" not in files_of(tmp_path / "two")
    with pytest.raises(ValueError, match="given twice"):
        write_report([files[0], files[1], files[0]], tmp_path / "again")


def hostile(document):
    """The same search with every name in it nasty."""
    document = copy.deepcopy(document)
    for name in ("name", "architecture"):
        document["model"][name] = NASTY
    document["environment"]["cpu"]["model"] = NASTY
    document["prompts"]["name"] = NASTY
    document["study"] = {"name": NASTY, "storage": "mysql://me:hunter2@host/db" + NASTY}
    document["space"]["kind"] = NASTY
    document["dtype"] = document["created"] = document["device"] = NASTY
    for number, finalist in enumerate(document["finalists"]):
        for key in ("winner", "best_exit"):
            if document[key] == finalist["name"]:
                document[key] = f"{NASTY}{number}"
        finalist["name"] = f"{NASTY}{number}"
        finalist["decoding"]["controller"] = NASTY
    for line in document["trials"]:
        line["origin"] = f"seed:{NASTY}"
    return document


def test_text_from_searches_is_escaped(tmp_path):
    file = made.write(tmp_path / "search.json", hostile(made.made_up(trials=40)))
    summary = write_report([file], tmp_path / "report")
    text = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "alert(1)" in page.text
    assert not {"script", "b"} & set(page.tags)
    tables = [path.read_text() for path in (tmp_path / "report" / "tables").iterdir()]
    assert "alert(1)" in "".join(tables)
    for shown in (text, summary, *tables):
        assert not re.search("[\u202e\u2066\ud800]", shown)
        assert "hunter2" not in shown


@pytest.mark.parametrize(
    "document",
    [
        of_trials(importance=None),
        of_trials({"number": 0, "origin": "local", "state": "failed"}, importance=None),
        of_trials(trial(0, origin="seed:none", forced_speedup=None, guide=None, acceptance=None)),
        of_trials(
            gaining(0, 1.2, origin="seed:exit-3"),
            importance={"exit": 1.0},
            space=made.made_up()["space"] | {"kind": "exit", "switches": 0, "budget": 4},
        ),
        made.made_up(trials=4, confirm=False) | {"importance": None},
    ],
    ids=["no trials", "all failed", "nothing drafts", "exits", "few"],
)
def test_searches_with_little_in_them_are_reported(tmp_path, document):
    file = made.write(tmp_path / "search.json", document)
    summary = write_report([file], tmp_path / "report")
    assert summary.startswith(("Nothing beat", "The search names no winner"))
    assert "nan" not in summary
    Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))


@pytest.mark.wheel
def test_a_report_on_a_search_needs_no_torch_and_no_optuna(tmp_path):
    file = made.write(tmp_path / "search.json", made.made_up(trials=30))
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'optuna'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from layerskip.analysis import report, search_plots\n"
        "report.search_plots = lambda search: [search_plots.forecasts(search)]\n"
        f"report.write_report([Path({str(file)!r})], Path({str(tmp_path / 'report')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "report" / "index.html").is_file()


def test_the_command_takes_searches(tmp_path, quick):
    file = made.write(tmp_path / "search.json", made.made_up())
    output = tmp_path / "report"
    result = CliRunner().invoke(cli.app, ["report", str(file), "--output", str(output), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout.splitlines()[-1])
    assert shown["output"] == str(output)
    assert shown["summary"].startswith("The search found trial-87")
    file.write_text(file.read_text()[:-100])
    result = CliRunner().invoke(cli.app, ["report", str(file), "--output", str(output), "--quiet"])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"layerskip: error: search {file} is cut off or not JSON")


# ---------------------------------------------------------------------------------------------
# Bad files

FREE = ("cost", "importance", "environment.packages", "prompts.categories")
"""Objects whose keys are data."""
UNREAD = {"environment.python", "environment.platform", "environment.cpu.cores",
          "environment.cpu.threads", "law.seed", "environment.devices"}  # fmt: skip
FULL = json.loads(json.dumps(made.made_up(trials=30)))  # no part of it is there twice
FULL["environment"]["devices"] = [{"name": "Test GPU"}]


def places(value, path=()):
    """Every key of a document with its path; of lists the first item and, of trials, one that
    drafts."""
    if isinstance(value, dict) and ".".join(map(str, path)) not in FREE:
        for key, item in value.items():
            yield (*path, key)
            yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        for index in {0, min(1, len(value) - 1)}:
            yield from places(value[index], (*path, index))


def name_of(path):
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def at(document, path):
    for part in path:
        document = document[part]
    return document


def refusal(tmp_path, document):
    """The one line with which a document is refused."""
    file = made.write(tmp_path / "search.json", document)
    with pytest.raises(ValueError, match=re.escape(f"search {file}: ")) as error:
        read_search(file)
    assert "\n" not in str(error.value)
    return str(error.value)


READ = [p for p in places(FULL) if name_of(p) not in UNREAD]


def test_every_key_is_needed(tmp_path):
    assert len(READ) > 120
    for path in READ:
        document = copy.deepcopy(FULL)
        del at(document, path[:-1])[path[-1]]
        if path == ("kind",):
            continue  # then it is no search
        assert f": {name_of(path)} is missing" in refusal(tmp_path, document)


def test_every_key_has_a_type(tmp_path):
    for path in [
        *READ,
        ("argv", 0),
        ("environment", "devices"),
        ("trials", 5, "skipped", "mlp", 0),
    ]:
        document = copy.deepcopy(FULL)
        wrong = [] if isinstance(at(document, path), dict | None) else {}
        if isinstance(at(document, path), str):
            wrong = 5
        at(document, path[:-1])[path[-1]] = wrong
        assert f": {name_of(path)} must be " in refusal(tmp_path, document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "schema must be 1, got 2"),
        (("max_new_tokens",), True, "max_new_tokens must be an integer, got True"),
        (("step_seconds",), 0, "step_seconds must be above 0, got 0"),
        (("trials", 3, "acceptance"), 1.5, "trials[3].acceptance must be in 0..1, got 1.5"),
        (("trials", 3, "draft_cost"), True, "trials[3].draft_cost must be a finite number"),
        (("trials", 3, "value"), 10**400, "trials[3].value must be a finite number"),
        (("trials", 3, "state"), "running", "trials[3].state must be complete or failed"),
        (("trials", 3, "number"), 4, "trials must have different numbers"),
        (("trials", 3, "skipped", "mlp"), [12], "trials[3].skipped.mlp must hold layers in 0..11"),
        (("trials", 3, "low"), LOW | {"mlp": [12]}, "trials[3].low.mlp must hold layers in 0..11"),
        (("trials", 3, "low"), {"bits": 8}, "trials[3].low.attention is missing"),
        (("finalists", 0, "low"), LOW | {"head": 1}, "finalists[0].low.head must be true or"),
        (("trials", 11, "origin"), 5, "trials[11].origin must be a string"),
        (("finalists", 1, "trial"), 11, "finalists[1].trial must be a complete trial's number"),
        (("finalists", 1, "name"), FULL["finalists"][0]["name"], "finalists must have different"),
        (("finalists", 0, "verify"), [], "finalists[0].verify must have at least 1 items"),
        (("winner",), "trial-999", "winner must be a finalist's name or null"),
        (("space", "num_layers"), 13, "space.num_layers must be model.num_layers, 12, got 13"),
        (("importance",), {"mlp.12": 1.0}, "importance must name layers in 0..11, got mlp.12"),
        (("importance",), {"layer.x": 1.0}, "importance must name attention.i, mlp.i, layer.i"),
        (("importance",), {"exit": "high"}, "importance.'exit' must be a finite number"),
        (("prompts", "categories"), {"a\nb": -1}, r"prompts.categories.'a\nb' must be 0 or more"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(tmp_path, path, value, message):
    document = copy.deepcopy(FULL)
    at(document, path[:-1])[path[-1]] = value
    assert message in refusal(tmp_path, document)


def test_files_that_are_cut_off_or_no_json_are_refused(tmp_path):
    whole = json.dumps(FULL, indent=1)
    file = tmp_path / "search.json"
    for length in [5, 10, 30, *range(500, len(whole), 5003), len(whole) - 2]:
        file.write_text(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(file))) as error:
            write_report([file], tmp_path / "report")
        assert "\n" not in str(error.value)
        assert holds_search(file) == (length > 20)
    for text, message in (
        (whole.replace("0.007,", "NaN,"), "numbers must be finite, got NaN"),
        (whole + "{}", "is cut off or not JSON"),
        (whole.replace('"shipped"', '"shipped\udcff"'), ": not UTF-8"),
    ):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=message):
            write_report([file], tmp_path / "report")
    with pytest.raises(ValueError, match="cannot read search"):
        read_search(tmp_path / "nothing.json")
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]


def test_searches_are_told_from_runs_by_what_they_hold(tmp_path):
    flipped = dict(reversed(FULL.items()))
    assert holds_search(made.write(tmp_path / "run.jsonl", flipped))
    assert read_search(tmp_path / "run.jsonl") == FULL
    assert not holds_search(run_files.write(tmp_path / "search.json", [run_files.header()]))
    assert not holds_search(tmp_path / "nothing")
    made.write(tmp_path / "list.json", [FULL])
    assert not holds_search(tmp_path / "list.json")
