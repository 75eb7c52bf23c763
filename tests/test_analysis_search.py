"""The report of a layer search: its numbers, pictures and words, and what it refuses."""

import copy
import itertools
import json
import math
import re

import pandas as pd
import pytest
import run_files
import search_files as made
from marks import thorough
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from pages import NASTY, harmless, page_of

from layerskip.analysis import plots, report, search_plots, search_tables, write_report
from layerskip.analysis.drawing import STYLE
from layerskip.analysis.page import MOST
from layerskip.analysis.runs import load_runs
from layerskip.analysis.verdict import judge_search, words
from layerskip.files.documents import kind_of
from layerskip.files.searches import read_search


def loaded(tmp_path, document):
    [search] = search_tables.load_searches([made.write(tmp_path / "search.json", document)])
    return search


def trial(number, **changes):
    """A trial that skips only the attention of layer 1 and gains nothing."""
    return {
        "number": number,
        "origin": "local",
        "state": "complete",
        "skipped": {"attention": [1], "mlp": []},
        "draft_vocabulary": None,
        "speedup": 0.9,
        "acceptance": 0.5,
        "draft_cost": 0.5,
        "draft_length": 3,
        "positions": 200,
        "seconds": 1.0,
    } | changes


def of_trials(*trials, **changes):
    """A search with these trials and no finalists."""
    none = {"finalists": [], "winner": None, "best_exit": None}
    return made.made_up(trials=1) | none | {"trials": list(trials)} | changes


LOW = {"bits": 8, "attention": [0, 2], "mlp": [*range(12)], "head": True}

# ---- Numbers ----


def test_trials_in_numbers(tmp_path):
    document = of_trials(
        trial(3, speedup=1.2, origin="ours", acceptance=0.8, draft_cost=0.4, seconds=2.0),
        trial(1, origin="first:exit-3"),
        {"number": 2, "origin": None, "state": "failed"},
        trial(4, speedup=1.1, skipped={"attention": [1, 2, 3, 7], "mlp": [5]}, origin="tpe"),
        trial(5, speedup=0.8, low=LOW, draft_vocabulary=64),
    )
    search = loaded(tmp_path, document)
    table = search.trials  # sorted, the best first
    assert table["number"].tolist() == [3, 4, 1, 5, 2]
    assert table["front"].tolist() == [True, False, False, False, False]
    assert table["left_out"].dropna().tolist() == [1, 5, 1, 1]
    assert (table["attention"][1], table["mlp"][1]) == ("1-3, 7", "5")
    assert table["bound"][0] == pytest.approx(2.5)
    assert table["rounded"][3] == "8 bits: attention 0, 2, MLP 0-11, head"
    assert search.complete["number"].tolist() == [3, 4, 1, 5]
    progress = search_tables.progress(document)
    assert progress["seconds"].tolist() == [1, 3, 4, 5]
    assert progress["best"].tolist() == [0.9, 1.2, 1.2, 1.2]
    assert progress["proposer"].tolist() == ["first", "ours", "tpe", "local"]


def test_finalists_in_numbers(tmp_path):
    document = made.made_up(finalists=2)
    first, second, third = document["finalists"]
    first |= {"predicted": 1.6, "draft_cost": 0.25}
    first["confirmed"] |= {"speedup": 1.2, "low": 1.1, "high": 1.3}
    second |= {"predicted": 1.5}
    second["confirmed"] |= {"speedup": 1.2}
    third["confirmed"] = None
    document |= {"winner": first["name"], "best_exit": third["name"]}
    rule = {"controller": "adaptive-threshold", "adaptive": {"alpha": 0.7}}
    first["decoding"] = first["decoding"] | rule
    table = search_tables.finalists(loaded(tmp_path, document))
    assert table["controller"][0] == "adaptive-threshold (alpha 0.7)"
    assert table["role"].tolist() == ["winner", "", "best exit"]
    assert table["efficiency"].tolist() == pytest.approx([0.75, 0.8, math.nan], nan_ok=True)
    assert table[["low", "high", "bound"]].iloc[0].tolist() == [1.1, 1.3, 4]
    document["best_exit"] = first["name"]
    table = search_tables.finalists(loaded(tmp_path, document))
    assert table["role"].tolist() == ["winner, best exit", "", ""]


# ---- Pictures ----


def texts_of(figure):
    """Every visible text of a figure, with its box in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    unseen = set()  # tick labels beyond the ends of an axis, which matplotlib keeps
    for axes in (a for one in figure.axes for a in (one, *one.child_axes)):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() if not low <= t.get_loc() <= high]
            unseen.update(label for t in ticks for label in (t.label1, t.label2))
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    # of annotations, only the text without its arrow
    boxes = [(t, Text.get_window_extent(t, canvas.get_renderer())) for t in texts]
    return [(t, box) for t, box in boxes if t not in unseen]


LARGE = {"layers": 80, "trials": 700, "finalists": 11}
SMALL = {"layers": 2, "trials": 6, "finalists": 1}


def long_names():
    """A run of so many methods that their legend is as tall as the axes."""
    names = [f"self:expected-gain with up to {n} tokens of a draft" for n in range(2, 9)]
    top = run_files.header()
    methods = [m for m in top["methods"] if m["kind"] != "self"]
    top["methods"] = [*methods, *map(run_files.drafting, names)]
    return run_files.made_up(prompts=1, head=top)


@pytest.mark.parametrize(
    "settings",
    [{}, run_files.made_up, long_names, *thorough(LARGE, SMALL)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_no_text_covers_another_or_leaves_the_picture(tmp_path, settings):
    with rc_context(STYLE):
        if callable(settings):
            [run] = load_runs([run_files.write(tmp_path / "run.jsonl", settings())])
            drawn = plots.run_plots(run)
        else:
            document = made.made_up(**settings)
            document["finalists"][0]["low"] = {"bits": 8, "attention": [0], "mlp": [], "head": True}
            drawn = search_plots.search_plots(loaded(tmp_path, document))
    assert len(drawn) == 4
    for plot in drawn:
        with rc_context(STYLE):
            texts = texts_of(plot.figure)
        assert len(texts) > 5, plot.name
        width, height = plot.figure.canvas.get_width_height()
        for text, box in texts:
            assert text.get_fontsize() >= 8, (plot.name, text)
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, (plot.name, text)
            assert "…" not in text.get_text()
        for (one, a), (other, b) in itertools.combinations(texts, 2):
            apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
            assert apart, (plot.name, one.get_text(), other.get_text())


def test_pictures_say_their_numbers(tmp_path):
    document = made.made_up()
    document["finalists"][0]["low"] = LOW
    search = loaded(tmp_path, document)
    progress, strip, front, skip_map = search_plots.search_plots(search)
    table = search.complete
    assert f"{table['front'].sum()} of them not dominated" in front.alt
    assert f"value of {table['value'].max():.2f}" in front.alt
    assert f"so far: {table['value'].max():.3f} after 119 trials and 95 seconds" in progress.alt
    winner = next(f for f in document["finalists"] if f["name"] == document["winner"])
    assert winner["trial"] != table["number"].iloc[0]  # the trial of the highest value
    for kind, dots in zip(("attention", "mlp"), strip.figure.axes[0].collections, strict=True):
        assert dots.get_offsets()[:, 0].tolist() == winner["skipped"][kind]
    assert strip.alt.count("MLP") + strip.alt.count("attention") > 5
    out = {kind: len(layers) for kind, layers in winner["skipped"].items()}
    assert f"{winner['name']} (winner) {out['attention'] + out['mlp']}" in skip_map.alt
    cells = skip_map.figure.axes[0].collections[0].get_array()  # (drafts, sublayers and the head)
    assert cells[0, -1] == 2  # in 8 bits
    number = document["finalists"].index(winner)
    assert [(cells[number] == kind).sum() for kind in (0, 1)] == [out["attention"], out["mlp"]]
    rows = [label.get_text() for label in skip_map.figure.axes[0].get_yticklabels()]
    assert rows[-1].startswith("exit-")
    assert rows.count(f"{winner['name']} (winner)") == 1


def test_other_searches_of_the_same_kind_are_drawn_beside(tmp_path):
    documents = [made.made_up(seed=seed) for seed in (0, 1)]
    documents += [documents[0] | {"sampler": "random"}, made.made_up(layers=6)]
    files = [made.write(tmp_path / f"{n}.json", each) for n, each in enumerate(documents)]
    loaded = search_tables.load_searches(files)
    assert [len(search.others) for search in loaded] == [2, 2, 2, 0]
    labels = search_plots.search_progress(loaded[0]).figure.axes[0].get_legend_handles_labels()[1]
    assert labels[-1] == "best so far of another search (random)"


# ---- Words ----


def said(tmp_path, document):
    return words([judge_search(loaded(tmp_path, document))])


def changed(rounded=None, **parts):
    """A made-up search in which parts of the winner, or of its timing, are replaced."""
    document = made.made_up()
    winner = next(f for f in document["finalists"] if f["name"] == document["winner"])
    confirmed = {name: value for name, value in parts.items() if name in winner["confirmed"]}
    winner["confirmed"] |= confirmed
    winner |= {name: value for name, value in parts.items() if name not in confirmed}
    winner["low"] = rounded
    return document


UNTIMED = made.made_up(confirm=False)


@pytest.mark.parametrize(
    ("document", "facts", "absent"),
    [
        (made.made_up(),
         ["Run `layerskip generate tiny --prompt TEXT --do-sample --temperature 0.8 --skip ",
          "without --skip (1.02 times", "of 24 sublayers (sampled", ", n = 6;",
          "119 trials finished, 103 of them guided (1 more failed); no set of the sublayer space",
          "skip.json", "6 leave the"], "--no-draft"),
        (changed(skipped={"attention": [4, 5], "mlp": []}, rounded=LOW),
         ["leaves out 2 of 24 sublayers and runs in 8 bits: attention 0, 2, MLP 0-11, head ("],
         "--no-draft"),
        (made.made_up() | {"prompts": made.made_up()["prompts"] | {"chat": True}},
         ["--prompt TEXT --chat --do-sample"], "±"),
        (changed(speedup=1.9, low=1.8, high=2.0, prompts=20), ["1.90 times"], "uncertain"),
        (changed(low=0.98), ["not distinguishable from plain"], "Time the"),
        (changed(low=None, high=None, prompts=1), ["no interval, n = 1", "1 leave the"], "nan"),
        (changed(equal=3, faults=3), ["FAULT: 3 of 6 texts of "], "nan"),
        (made.made_up() | {"winner": "exit-4", "best_exit": "exit-4"},
         ["best draft found, exit-4"], "The best early exit"),
        (made.made_up() | {"keep_default": True}, ["without --skip: its default drafts (1.02 times "
         "plain decoding) are as fast as anything found"], "skip.json"),
        (made.made_up(pays=False), ["--no-draft`: nothing found is faster"], "skip.json"),
        (UNTIMED, ["nothing found is faster", "Time the finalists"], "was timed at"),
        (UNTIMED | {"winner": UNTIMED["finalists"][0]["name"]},
         ["it should be 1.", "is predicted to be 1.", "Time the fin"], " (1."),
        (changed(predicted=1.7, predicted_low=1.4, predicted_high=1.9),
         ["predicted 1.70 (1.40 to 1.90))"], "±"),
    ],
)  # fmt: skip
def test_what_is_said_of_searches(tmp_path, document, facts, absent):
    text = said(tmp_path, document)
    for fact in facts:
        assert fact in text
    assert absent not in text
    assert "nan" not in text


# ---- The folder ----


@pytest.fixture
def quick(monkeypatch):
    """Reports with one plot per search and none for runs."""
    monkeypatch.setattr(plots, "run_plots", lambda run: [])
    monkeypatch.setattr(
        report, "search_plots", lambda search: [search_plots.search_skip_map(search)]
    )


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_report_on_a_search(tmp_path):
    file = made.write(tmp_path / "search.json", made.made_up())
    summary = write_report([file], tmp_path / "report")
    page = page_of(tmp_path / "report")
    assert summary.split(". ")[0].replace("`", "") in page.text
    assert "`" not in page.text
    assert (
        re.sub(r"\s+", " ", page.text).count("Search of tiny, sampled at T=0.8 ") == 2
    )  # title, h1
    assert page.tags.count("figure") == page.tags.count("svg") == 4
    names, tables = ("progress", "influence", "front", "skip-map"), ("finalists", "trials")
    assert files_of(tmp_path / "report") == {
        "index.html", report.MARK,
        *(f"tables/search-{name}.csv" for name in tables),
        *(f"plots/search-{name}.svg" for name in names),
    }  # fmt: skip
    trials = pd.read_csv(tmp_path / "report" / "tables" / "search-trials.csv")
    assert len(trials) == 120
    assert trials["search"].unique().tolist() == ["Search of tiny, sampled at T=0.8"]
    text = (tmp_path / "report" / "index.html").read_text()
    finalists = re.search(r"<h3>Finalists</h3>.*?</thead>", text, re.DOTALL)[0]
    heads = re.findall(r"<th .*?>(.*?)</th>", finalists)
    assert len(heads) <= 10  # which fit on a page
    assert {"predicted", "same text", "drafts", "cost of a draft step"} < {*heads}
    best = re.search(r"<h3>Best trials</h3>.*?</table>", text, re.DOTALL)
    assert best[0].count("<tr>") == 1 + MOST


def test_only_a_finalists_speedup_is_called_predicted(tmp_path):
    document = made.made_up()
    document["finalists"][0]["decoding"] |= {"threshold": 0.4, "lookup": True}
    document["finalists"][0]["predicted"] = 3.15
    search = loaded(tmp_path, document)
    table, finalists = search.trials, search_tables.finalists(search)
    named = table.dropna(subset=["predicted"]).set_index("number")["predicted"]
    assert named.to_dict() == finalists.set_index("trial")["predicted"].to_dict()
    assert table["value"].tolist()[0] == table["value"].max() != 3.15
    assert finalists["drafts"].iloc[0] == "expected-gain, up to 8, threshold 0.4, lookups"
    pictures = search_plots.search_plots(search)
    assert not any("predicted" in plot.alt for plot in pictures)


def test_searches_and_runs_on_one_page(tmp_path, quick):
    files = [
        made.write(tmp_path / "search.json", made.made_up()),
        run_files.write(tmp_path / "run.jsonl", run_files.made_up(prompts=1)),
        made.write(tmp_path / "other.json", made.made_up(pays=False)),
        made.write(tmp_path / "third.json", made.made_up(dtype="bfloat16")),
    ]
    summary = write_report(files, tmp_path / "report")
    labels = [paragraph.partition(":")[0] for paragraph in summary.split("\n\n")]
    assert labels == [
        "tiny, sampled at T=0.8",
        "Search of tiny, sampled at T=0.8, float32 on cpu, 1 thread, search",
        "Search of tiny, sampled at T=0.8, float32 on cpu, 1 thread, other",
        "Search of tiny, sampled at T=0.8, bfloat16 on cpu, 1 thread",
    ]
    page = page_of(tmp_path / "report")
    assert {"run-1", "search-1", "search-2", "search-3"} <= set(page.ids)
    found = files_of(tmp_path / "report")
    drawn = [name for name in found if name.endswith("search-skip-map.svg")]
    assert len(drawn) == 3
    assert "tables/speedup.csv" in found
    trials = pd.read_csv(tmp_path / "report" / "tables" / "search-trials.csv")
    assert trials["search"].nunique() == 3
    with pytest.raises(ValueError, match="given twice"):
        write_report([files[0], files[1], files[0]], tmp_path / "again")


def hostile(document):
    """The same search with a hostile string for every name."""
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
        line["origin"] = f"{NASTY}:{NASTY}"
    document["sampler"] = NASTY
    return document


def test_text_from_searches_is_escaped(tmp_path):
    file = made.write(tmp_path / "search.json", hostile(made.made_up(trials=40)))
    summary = write_report([file], tmp_path / "report")
    shown = "".join(harmless(tmp_path / "report", summary))
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    "document",
    [
        of_trials(),
        of_trials({"number": 0, "origin": "local", "state": "failed"}),
        of_trials(
            trial(0, speedup=1.2, origin="first:exit-3"),
            space=made.made_up()["space"] | {"kind": "exit", "switches": 0, "budget": 4},
        ),
        made.made_up(trials=4, confirm=False),
    ],
    ids=["no trials", "all failed", "exits", "few"],
)
def test_searches_with_little_in_them_are_reported(tmp_path, document):
    file = made.write(tmp_path / "search.json", document)
    summary = write_report([file], tmp_path / "report")
    tried = any(trial["state"] == "complete" for trial in document["trials"])
    assert summary.startswith("Run `layerskip" if tried else "No trial finished in time")
    assert "nan" not in summary
    page_of(tmp_path / "report")


# ---- Bad files ----

FREE = ("cost", "environment.packages", "prompts.categories")
"""Objects whose keys are data."""
UNREAD = {"environment.python", "environment.platform", "environment.cpu.cores",
          "environment.cpu.threads", "law.seed", "environment.devices", "importance"}  # fmt: skip
FULL = json.loads(json.dumps(made.made_up(trials=30)))  # shares no parts
FULL["environment"]["devices"] = [{"name": "Test GPU"}]


def places(value, path=()):
    """The path of every key in a document; of lists, the first two items."""
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
    """The one-line error for a document."""
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
            continue  # without it, the file is not taken for a search
        assert f": {name_of(path)} is missing" in refusal(tmp_path, document)


def test_every_key_has_a_type(tmp_path):
    more = [("argv", 0), ("environment", "devices"), ("trials", 5, "skipped", "mlp", 0)]
    for path in [*READ, *more]:
        document = copy.deepcopy(FULL)
        there = at(document, path)
        wrong = 5 if isinstance(there, str) else [] if isinstance(there, dict | None) else {}
        at(document, path[:-1])[path[-1]] = wrong
        assert f": {name_of(path)} must be " in refusal(tmp_path, document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 1, "schema must be 2, got 1"),
        (("max_new_tokens",), True, "max_new_tokens must be an integer, got True"),
        (("step_seconds",), 0, "step_seconds must be above 0, got 0"),
        (("trials", 3, "acceptance"), 1.5, "trials[3].acceptance must be in 0..1, got 1.5"),
        (("trials", 3, "draft_cost"), True, "trials[3].draft_cost must be a finite number"),
        (("trials", 3, "speedup"), 10**400, "trials[3].speedup must be a finite number"),
        (("trials", 3, "state"), "running", "trials[3].state must be 'complete' or 'failed'"),
        (("trials", 3, "number"), 4, "trials must have different numbers"),
        (("trials", 3, "skipped", "mlp"), [12], "trials[3].skipped.mlp must hold layers in 0..11"),
        (("trials", 3, "low"), LOW | {"mlp": [12]}, "trials[3].low.mlp must hold layers in 0..11"),
        (("trials", 3, "low"), {"bits": 8}, "trials[3].low.attention is missing"),
        (("finalists", 0, "low"), LOW | {"head": 1}, "finalists[0].low.head must be true or"),
        (("trials", 11, "origin"), 5, "trials[11].origin must be a string"),
        (("finalists", 1, "name"), FULL["finalists"][0]["name"], "finalists must have different"),
        (("finalists", 0, "verify"), [], "finalists[0].verify must have at least 1 items"),
        (("winner",), "trial-999", "winner must be a finalist's name or null"),
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
        assert (kind_of(file) == "search") == (length > 20)
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
    assert kind_of(made.write(tmp_path / "run.jsonl", flipped)) == "search"
    assert read_search(tmp_path / "run.jsonl") == FULL
    assert kind_of(run_files.write(tmp_path / "search.json", [run_files.header()])) == "run"
    assert kind_of(tmp_path / "nothing") == "run"
    made.write(tmp_path / "list.json", [FULL])
    assert kind_of(tmp_path / "list.json") == "run"
