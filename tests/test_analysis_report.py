"""The report as a whole: its words, escaping and refusals, and that no file is half written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import run_files as made
import training_files as trainings
from pages import NASTY, Page, harmless, page_of

from layerskip.analysis import report, write_report
from layerskip.analysis.plots import HEATED
from layerskip.analysis.runs import load_runs
from layerskip.analysis.verdict import judge_run, words
from layerskip.files import writing


def said(tmp_path, lines):
    [run] = load_runs([made.write(tmp_path / "run.jsonl", lines)])
    return words([judge_run(run)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report about one run with everything in it."""
    folder = tmp_path_factory.mktemp("written")
    run = made.write(folder / "run.jsonl", [*made.made_up(), made.sweep()])
    return folder / "report", write_report([run], folder / "report")


def test_the_page_stands_alone(written):
    folder, summary = written
    text = (folder / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("h1") == page.tags.count("main") == 1
    pictures = [label for label in page.labels if ". " in label]
    assert len(pictures) == page.tags.count("figure") == page.tags.count("svg") == 7
    assert all(re.search(r"\d", label) for label in pictures)
    assert summary.split(". ")[0] in page.text
    # drawings use the colours of the page; none of the placeholder colours is left
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in drawings
    assert "#222222" not in drawings
    assert "<style" not in drawings


def test_the_folder_holds_tables_and_plots(written):
    folder, _ = written
    plots = {path.name for path in (folder / "plots").iterdir()}
    named = ("speedup", "positions", "phases", "skip-map", *(f"sweep-{each}" for each in HEATED))
    assert plots == {f"{name}.svg" for name in named}
    tables = {path.stem: path.read_text() for path in (folder / "tables").iterdir()}
    assert tables.keys() == report.kinds()["run"].tables.keys()
    assert tables["speedup"].startswith("run,batch_size,category,method,over,prompts,")
    own = json.loads((folder / report.MARK).read_text())["files"]
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {*own, report.MARK}


@pytest.mark.thorough
def test_a_folder_stands_for_the_files_in_it(tmp_path):
    made.write(tmp_path / "runs" / "run.jsonl", made.made_up(prompts=1))
    (tmp_path / "runs" / "prompts.jsonl").write_text('{"prompt": "x"}')
    write_report([tmp_path / "runs"], tmp_path / "report")
    assert "runs/run.jsonl" in (tmp_path / "report" / "index.html").read_text()
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"folder .*none holds none of these: a report is made of"):
        write_report([tmp_path / "none"], tmp_path / "report")


def test_each_method_stands_once_in_the_results(written):
    """The speeds over each other method are columns of its line, with their intervals."""
    folder, _ = written
    text = (folder / "index.html").read_text(encoding="utf-8")
    table = re.search(r"<h3>Results</h3>.*?</table>", text, re.DOTALL)[0]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    names = [method["name"] for method in made.header()["methods"]]
    assert [row[0] for row in rows] == names
    assert re.fullmatch(r"1\.\d\d \(1\.\d\d to 1\.\d\d\)", rows[2][2])
    assert rows[2][-1] == "16/16"
    heads = re.findall(r"<th.*?>(.*?)</th>", table)
    assert len(heads) <= 10
    assert all(len(head) > 1 for head in heads)


@pytest.mark.thorough
def test_the_same_records_give_the_same_files(written, tmp_path):
    folder, _ = written
    run = made.write(tmp_path / "again.jsonl", [*made.made_up(), made.sweep()])
    write_report([run], tmp_path / "again")
    for name in ("plots/speedup.svg", "plots/phases.svg", "tables/speedup.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_text_from_records_is_escaped(tmp_path):
    head = made.header()
    head["model"] = head["model"] | {"name": NASTY}
    head["methods"][2]["name"] = NASTY + "2"
    head["environment"]["cpu"]["model"] = NASTY
    head["prompts"]["name"] = NASTY
    lines = made.made_up(prompts=1, categories=("code", NASTY), head=head)
    for line in lines[1:]:
        line |= {"texts": [NASTY], "prompt_texts": ["</pre><b>" + NASTY]}
    run = made.write(tmp_path / "run.jsonl", lines)
    summary = write_report([run], tmp_path / "report")
    for shown in harmless(tmp_path / "report", summary)[:2]:
        assert "\\u202e" in shown.replace("\\\\u202e", "\\u202e")


def only(*methods, **changes):
    """A header with these methods, plain ones by name."""
    known = {m["name"]: m for m in made.header()["methods"]}
    return made.header(methods=[known.get(m, m) if isinstance(m, str) else m for m in methods],
                       **changes)  # fmt: skip


def test_a_gain_in_words(tmp_path):
    text = said(tmp_path, [*made.made_up(), made.sweep()])
    for fact in (
        "With self, tiny was 1.15 times as fast as with plain (95% interval 1.09 to 1.23, 8 ",
        "prefill 1.00", "generate() it is 1.60", "with probability 0.60", "16/16", "--exit-layer 3",
    ):  # fmt: skip
        assert fact in text
    assert len(text.split()) < 120


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (made.made_up(speed=1.5, head=only("plain", "self")), ["0.78 times", "--no-draft"]),
        (made.made_up(speed=1.15, head=only("plain", "self")), ["distinguishable", "uncertain"]),
        (made.made_up(prompts=1, categories=("code",), head=only("plain", "self")),
         ["no interval, 1 prompt;", "more prompts"]),
        (made.made_up(head=only("plain", "generate")), ["generate 0.7", "--method self"]),
        (made.made_up(head=only("plain")), ["nothing else was measured"]),
        (made.made_up(head=made.header(prompts={"name": "p", "count": 24})),
         ["unfinished: 8 of 24 prompts"]),
    ],
)  # fmt: skip
def test_what_is_said_of_runs(tmp_path, lines, facts):
    text = said(tmp_path, lines)
    for fact in facts:
        assert fact in text
    assert "nan" not in text


def test_faults_come_before_all_else(tmp_path):
    lines = made.made_up(head=only("plain", "self"))
    wrong = [line for line in lines if line.get("method") == "self"][:3]
    for line in wrong:
        line["equal"] = [False]
    assert said(tmp_path, lines).startswith("FAULT: 3 of 16 texts of self differ")
    tie = {"row": 0, "position": 1, "margin": 0.0, "resolution": 1e-5, "near_tie": True}
    for line in wrong:
        line["differences"] = [tie]
    assert said(tmp_path, lines).startswith("With self")
    assert "13/16, 3 near-ties" in said(tmp_path, lines)


def test_looping_texts_and_faster_peers_are_named(tmp_path):
    lines = made.made_up()
    assert "loop" not in said(tmp_path, lines)
    for line in lines[1:]:
        line["loops"] = [True]
        if line["method"] == "generate-prompt-lookup":
            line["seconds"] = made.seconds(0.02)
    text = said(tmp_path, lines)
    assert "16 of 16 texts loop" in text
    assert "prefer generate-prompt-lookup: it is 3.2" in text


def greedy(**changes):
    law = dict.fromkeys(made.header()["law"]) | {"do_sample": False, "seed": 0}
    return made.header(law=law, **changes)


def test_several_runs_on_one_page(tmp_path):
    batched = made.made_up(prompts=2, head=only("plain", "self", batch_sizes=[1, 2]))
    for line in [line for line in batched if line.get("method")]:
        twice = dict(line, batch_size=2, prompts=[line["prompts"][0], "code-9"])
        for name in ("prompt_tokens", "new_tokens", "first_tokens", "repeated_4grams", "loops"):
            twice[name] = line[name] * 2
        twice["equal"] = line["equal"] and line["equal"] * 2
        twice["rounds"] = {k: v if k in ("sources", "steps") else [row * 2 for row in v]
                           for k, v in line["rounds"].items()}  # fmt: skip
        batched.append(twice)
    files = [
        made.write(tmp_path / "a.jsonl", batched),
        made.write(tmp_path / "b.jsonl", made.made_up(prompts=1, head=greedy())),
    ]
    summary = write_report(files, tmp_path / "report")
    assert summary.count("\n\n") == 1
    assert "tiny, greedy: With self, tiny was" in summary
    page_of(tmp_path / "report")
    drawn = {path.name for path in (tmp_path / "report" / "plots").iterdir()}
    assert {"tiny-sampled-at-t-0.8-speedup-batch-2.svg", "tiny-greedy-speedup.svg"} <= drawn
    assert set(pd.read_csv(tmp_path / "report" / "tables" / "comparison.csv")["run"]) == {
        "tiny, sampled at T=0.8", "tiny, greedy",
    }  # fmt: skip


def test_speed_by_length_of_context_is_drawn(tmp_path):
    lines = [made.header(contexts=[1000, 4000])]
    for context, seconds in ((4000, 0.01), (1000, 0.002)):
        told = {"context": context, "category": f"{context:,} tokens", "bytes_read": 9e5}
        for method, more in (("plain", 1.0), ("self", 0.5), ("generate", 2.0)):
            times = made.seconds(0.001 + more * seconds)
            prompt = f"{context}-1"
            lines.append(made.record(method, prompt, seconds=times, read_bandwidth=1e9, **told))
    write_report([made.write(tmp_path / "run.jsonl", lines)], tmp_path / "report")
    text = page_of(tmp_path / "report").text
    assert "plain 4500.0 at 1,000, 900.0 at 4,000" in text
    assert "self 9000.0 at 1,000, 1800.0 at 4,000" in text
    assert (tmp_path / "report" / "plots" / "contexts.svg").exists()


def lines_of(*lines):
    return [json.dumps(line) if isinstance(line, dict) else line for line in lines]


BAD = {
    "header only": (lines_of(made.header()), "no records"),
    "no baseline": (lines_of(made.header(), made.record("self")), "no record of its baseline"),
    "schema": (lines_of(made.header(schema=2), made.record("plain")), "schema must be 1"),
    "cut off": (lines_of(made.header(), '{"kind": "rec', made.record("plain")), "line 2"),
    "no tokens": (lines_of(made.header(), made.record("plain", new_tokens=[0],
                                                      first_tokens=[0])), "without new tokens"),
    "bare self": (lines_of(only("plain", {"name": "self", "kind": "self"}), made.record("plain")),
                  "methods[1].controller is missing"),
}  # fmt: skip
TRAININGS = [
    ({"curve": []}, "curve must"),
    ({"drafts": {"before": trainings.draft(0.9, 0.3, 1)}}, "must have trained"),
    ({"schema": 2}, "schema must be 1, got 2"),
    ({"curve": [{"tokens": n, "loss": 1.0, "overlap": [0.5] * n} for n in (1, 2)]},
     "overlaps of equally many steps, got [1, 2]"),
    ({"recipe": {"kind": 3}}, "recipe.kind must be a string, got 3"),
    ({"covered": 1.2}, "covered must be in 0..1, got 1.2"),
]  # fmt: skip
BAD |= {
    f"training, {words}": (lines_of(trainings.training(**changes)), words)
    for changes, words in TRAININGS
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path, name):
    lines, message = BAD[name]
    file = tmp_path / ("train.json" if name.startswith("training") else "run.jsonl")
    file.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write_report([file], tmp_path / "report")
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def quick(monkeypatch):
    """Reports without plots and with two tables, for tests of the folder only."""
    monkeypatch.setattr(report.plots, "run_plots", lambda run: [])
    monkeypatch.setattr(report, "RUN_TABLES", ("speedup", "predictions"))


def test_a_run_that_was_killed_while_it_wrote_is_reported(tmp_path, quick):
    """The last line of such a file is cut off. It is left out, with a warning."""
    run = made.write(tmp_path / "run.jsonl", made.made_up(prompts=1, head=only("plain", "self")))
    whole = write_report([run], tmp_path / "whole")
    with run.open("a") as file:
        file.write('{"kind": "record", "meth')
    with pytest.warns(UserWarning, match=r"the last line of .*run\.jsonl is cut off") as caught:
        assert write_report([run], tmp_path / "report") == whole
    assert len(caught) == 1
    for table in ("tables/speedup.csv", "tables/predictions.csv"):
        one, other = (tmp_path / folder / table for folder in ("whole", "report"))
        assert one.read_bytes() == other.read_bytes()


def test_an_answer_that_ended_at_its_first_token_is_reported(tmp_path, quick):
    lines = made.made_up(prompts=2)
    ended_at_once([line for line in lines if line.get("prompts") == ["code-1"]])
    assert "With self, tiny was" in write_report(
        [made.write(tmp_path / "run.jsonl", lines)], tmp_path / "report"
    )
    table = pd.read_csv(tmp_path / "report" / "tables" / "predictions.csv")
    assert table[table["method"] == "self"]["predicted"].between(0.5, 2).all()


def test_a_run_of_first_tokens_only_is_drawn(tmp_path):
    lines = made.made_up(prompts=1)
    ended_at_once(lines[1:])
    told = write_report([made.write(tmp_path / "run.jsonl", lines)], tmp_path / "report")
    assert "every text ended with its first token" in told
    drawn = {path.stem for path in (tmp_path / "report" / "plots").iterdir()}
    assert drawn == {"speedup", "phases", "skip-map"}


def ended_at_once(records):
    for line in records:
        line |= {"new_tokens": [1], "seconds": made.seconds(0.002, 0.002)}
        line |= {"rounds": line["rounds"] and made.rounds()}


def test_missing_and_repeated_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no run file given"):
        write_report([], tmp_path / "report")
    with pytest.raises(ValueError, match=r"nothing\.jsonl"):
        write_report([tmp_path / "nothing.jsonl"], tmp_path / "report")
    run = made.write(tmp_path / "run.jsonl", made.made_up(prompts=1))
    with pytest.raises(ValueError, match="given twice"):
        write_report([run, tmp_path / "." / "run.jsonl"], tmp_path / "report")


def test_earlier_reports_are_replaced_and_other_folders_refused(tmp_path, quick):
    run = made.write(tmp_path / "run.jsonl", made.made_up(prompts=1, head=only("plain", "self")))
    output = tmp_path / "deep" / "report"
    write_report([run], output)
    stale = output / "tables" / "speedup.csv"
    stale.write_text("old")
    write_report([run], output)
    assert stale.read_text() != "old"
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, which no report put there"):
        write_report([run], output)
    assert (output / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="which no report put there"):
        write_report([run], tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        write_report([run], run)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"report \. cannot replace this folder"):
        write_report([run], Path())
    write_report([run], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "run.jsonl"]
    assert [path.name for path in output.parent.iterdir()] == ["report"]


def test_a_failed_report_leaves_what_was_there(tmp_path, quick, monkeypatch):
    run = made.write(tmp_path / "run.jsonl", made.made_up(prompts=1, head=only("plain", "self")))
    write_report([run], tmp_path / "report")
    before = (tmp_path / "report" / "index.html").read_text()

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(report, "page", fails)
        for folder in ("report", "other"):
            with pytest.raises(ValueError, match="No space left on device"):
                write_report([run], tmp_path / folder)
    assert (tmp_path / "report" / "index.html").read_text() == before
    replace = os.replace
    monkeypatch.setattr(
        writing.os, "replace", lambda a, b: fails() if a.suffix == ".tmp" else replace(a, b)
    )
    with pytest.raises(ValueError, match="No space left on device"):
        write_report([run], tmp_path / "report")
    assert (tmp_path / "report" / "index.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "run.jsonl"]


@pytest.mark.wheel
def test_a_report_needs_no_torch(tmp_path):
    run = made.write(tmp_path / "run.jsonl", made.made_up(prompts=1))
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"  # importing these fails now
        "from pathlib import Path\n"
        "from layerskip.analysis import report\n"
        "report.plots.run_plots = lambda run: [report.plots.phases(run)]\n"
        f"report.write_report([Path({str(run)!r})], Path({str(tmp_path / 'report')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"DISPLAY": ""})
    assert (tmp_path / "report" / "index.html").is_file()
