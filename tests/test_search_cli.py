"""`layerskip search`: its files, continuing after any end, workers, and bad input in one line."""

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from checkpoints import save_checkpoint
from commands import document, process, refused, run, warned
from cost_records import MACHINES
from models import lively_model
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from layerskip.cli.search import default_positions
from layerskip.cli.terminal import Talk
from layerskip.config.skips import SkipConfig
from layerskip.files.environment import hardware
from layerskip.files.searches import read_search
from layerskip.search import pipeline
from layerskip.search.objective import Objective
from layerskip.timing.kept import machine

FILES = {"skip.json", "trials.csv", "cost.json", "search.json", "study.log", "report"}
COST = MACHINES["reads weights"] | {"vocabulary": 97, "spread": 0.031, "busy": False}
Search = Callable[..., Any]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    model = lively_model("llama", dtype=torch.float32)
    return save_checkpoint(tmp_path_factory.mktemp("lively"), model)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Nine prompts, of which three are held out and six are traced."""
    return words(tmp_path_factory.mktemp("prompts") / "prompts.txt", 9)


def words(path, count, length=6):
    draw = random.Random(count)
    lines = [" ".join(f"w{draw.randrange(2, 97)}" for _ in range(length)) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def fast(patch, **more):
    """Replace timed costs, which take long and are tested elsewhere."""

    def measured(model, *_, low, **__):
        bits = {} if low is None else {"low_bits": low.low.bits}
        return COST | more | bits | {"place": machine(model)}

    patch.setattr(pipeline.sublayer_costs, "measure", measured)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    fast(monkeypatch)
    monkeypatch.setattr("layerskip.analysis.write_report", lambda *a, **k: "no report")


def flags(folder, prompts, output, *more):
    always = ["--prompts", prompts, "--output", output, "--max-new-tokens", 24]
    always += [] if "--no-confirm" in more else ["--repeats", 1]
    always += [] if "--bits" in more else ["--bits", "none"]
    return ["search", folder, *always, *more]


@pytest.fixture(scope="session")
def found(folder, prompts, tmp_path_factory):
    """The folder and the result of a search of 12 trials, with timed finalists and a report."""
    output = tmp_path_factory.mktemp("found") / "deeper" / "out"
    with pytest.MonkeyPatch.context() as patch:
        fast(patch)
        return output, run(*flags(folder, prompts, output, "--trials", 12, "--json"))


@pytest.fixture
def searched(folder, prompts, tmp_path):
    """Runs a search that times nothing."""

    def searched(*more, output=tmp_path / "out", **options):
        return run(*flags(folder, prompts, output, "--no-confirm", *more), **options)

    return searched


def trials(output):
    rows = read_search(output / "search.json")["trials"]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def partial(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


# ---- What it writes and says ----


def test_the_files(folder, prompts, found):
    output, result = found
    assert result.exit_code == 0
    assert {path.name for path in output.iterdir()} == FILES
    assert (output / "report" / "index.html").stat().st_size > 1000
    place = {"hardware": hardware(torch.device("cpu")), "dtype": "float32"}
    place |= {"execution": "native", "threads": torch.get_num_threads()}
    cost = COST | {"place": place}
    assert json.loads((output / "cost.json").read_text()) == cost
    record = read_search(output / "search.json")
    assert record["cost"] == cost
    assert record["study"] == {"name": "layerskip", "storage": str(output / "study.log")}
    assert record["prompts"]["traced"] == ["4", "5", "6", "7", "8", "9"]
    assert record["prompts"]["held_out"] == ["1", "2", "3"]
    assert record["model"]["num_layers"] == 6
    assert record["best_exit"] is not None
    notes = json.loads((output / "skip.json").read_text())["notes"]
    assert {"created", "hardware", "versions", "prompts", "bound", "trials"} <= notes.keys()
    for finalist in record["finalists"]:
        assert finalist["confirmed"]["equal"] == finalist["confirmed"]["compared"] == 3
    with (output / "trials.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["number"]) for row in rows] == list(range(12))
    for row, trial in zip(rows, record["trials"], strict=True):
        assert float(row["speedup"]) == trial["speedup"]
        assert row["origin"] == trial["origin"]
        assert json.loads(row["skipped"]) == trial["skipped"]


def test_what_it_says(found):
    output, result = found
    assert "bound: no draft of the sublayer space of 6 layers" in result.stderr
    assert f"written to {output}: " in result.stderr
    rows = read_search(output / "search.json")["trials"]
    guided = sum(trial["origin"] == "gp" for trial in rows)
    assert f"trials 12, of which guided {guided}\n" in result.stderr
    assert guided >= 12 - 10
    assert result.stdout.startswith("Run `layerskip generate ")
    last = document(result)
    record = read_search(output / "search.json")
    assert last["skip"] == json.loads((output / "skip.json").read_text())
    assert last["trials"] == 12
    assert last["output"] == str(output)
    for key in ("bound", "plain", "finalists", "best_exit", "winner", "seconds"):
        assert last[key] == record[key]
    drafts = last["skip"].get("decoding", {}).get("enabled") is not False
    assert drafts is (last["winner"] is not None or last["keep_default"])
    for row in last["finalists"]:
        low, high = row["predicted_low"], row["predicted_high"]
        assert low < 0.97 * row["predicted"] < 1.03 * row["predicted"] < high
        assert f"  {row['predicted']:.2f} ({low:.2f}-{high:.2f})  " in result.stdout
    table = result.stdout[result.stdout.index("\ndraft ") :].splitlines()[:-1]
    assert max(map(len, table)) <= 80
    assert "costs: uncertain by ±4%" in result.stderr


def test_going_on_adds_what_is_missing(folder, prompts, found, tmp_path, searched):
    shutil.copytree(found[0], tmp_path / "out")
    (tmp_path / "out" / "cost.json").write_text("[]")  # damaged; the study has the costs, too
    evaluated, evaluate = [], Objective._evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Objective,
            "_evaluate",
            lambda self, *mask: evaluated.append(mask) or evaluate(self, *mask),
        )
        assert searched("--trials", 20).exit_code == 0
        assert len(evaluated) == 8
        assert searched("--trials", 20).exit_code == 0
        assert len(evaluated) == 8
    assert len(trials(tmp_path / "out")) == 20
    assert trials(tmp_path / "out")[:12] == trials(found[0])
    record = read_search(tmp_path / "out" / "search.json")
    assert record["seconds"]["cost"] == 0
    assert record["finalists"][0]["confirmed"] is None


@pytest.mark.thorough
def test_a_database_is_shared_between_folders(tmp_path, searched):
    storage = ("--storage", f"sqlite:///{tmp_path}/study.db", "--study-name", "ours")
    for number, asked in enumerate((2, 4)):
        output = tmp_path / str(number)
        assert searched(*storage, "--trials", asked, output=output).exit_code == 0
        assert len(trials(output)) == asked
        assert not (output / "study.log").exists()
        study = read_search(output / "search.json")["study"]
        assert study == {"name": "ours", "storage": storage[1]}
    assert trials(tmp_path / "1")[:2] == trials(tmp_path / "0")
    study = optuna.load_study(study_name="ours", storage=storage[1])
    complete = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert [trial.value for trial in complete] == [t["speedup"] for t in trials(tmp_path / "1")]


def test_skip_configs_of_ones_own_are_tried_first(tmp_path, searched):
    """Even if two files have the same name."""
    paths = [tmp_path / name / "skip.json" for name in ("a", "b")]
    for layer, path in enumerate(paths, 2):
        path.parent.mkdir()
        SkipConfig(attention=(layer,)).save(path)
    given = [word for path in paths for word in ("--skip", path)]
    assert searched(*given, "--trials", 3).exit_code == 0
    rows = trials(tmp_path / "out")
    assert [row["origin"] for row in rows[:2]] == [f"first:{path}" for path in paths]
    assert [row["skipped"]["attention"] for row in rows[:2]] == [[2], [3]]


@pytest.mark.thorough
def test_samplers_and_spaces_by_name(searched, tmp_path):
    """A study may continue with another sampler."""
    for sampler, trials_asked in (("random", 12), ("tpe", 14), ("gp", 15)):
        named = ("--sampler", sampler, "--space", "sublayer,vocabulary")
        result = searched(*named, "--trials", trials_asked)
        assert result.exit_code == 0
    record = read_search(tmp_path / "out" / "search.json")
    origins = [trial["origin"] for trial in record["trials"]]
    assert origins[-5:] == ["random", "random", "tpe", "tpe", "gp"]
    assert record["sampler"] == "gp"
    assert record["space"]["parts"] == ["vocabulary"]
    assert all(each["decoding"]["lookup"] is False for each in record["finalists"])
    assert "got 'magic'" in refused("search", "--space", "magic", "--output", tmp_path / "no")


def test_time_over(folder, prompts, found, tmp_path):
    """A search without a finished trial writes no draft, and leaves earlier ones alone."""
    how = ("--timeout", 1e-6)
    reason = refused(*flags(folder, prompts, tmp_path / "out", *how))
    assert reason.startswith("no time was left for this: texts of the target; finished trials")
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]
    output = shutil.copytree(found[0], tmp_path / "there")
    before = (output / "skip.json").read_bytes()
    refused(*flags(folder, prompts, output, *how))
    assert (output / "skip.json").read_bytes() == before


def test_without_a_terminal_there_is_a_line_now_and_then(searched, capsys):
    """One line when a stage begins, then one every half minute. Short commands print none."""
    seconds = 0.0
    talk = Talk(quiet=False, now=lambda: seconds)
    told = []
    for seconds in (1, 6, 7, 8, 11, 12, 40, 41, 42, 300):
        talk.progress("loading" if seconds < 8 else f"trial {seconds}/60")
        told += capsys.readouterr().err.splitlines()
    assert told == ["loading", "trial 11/60", "trial 41/60", "trial 300/60"]
    assert searched("--trials", 3).stderr.count("trials") == 1 + 1
    assert searched("--trials", 4, "--quiet").stderr == ""


# ---- Ends of every kind ----


def test_ctrl_c_keeps_finished_trials(tmp_path, searched, monkeypatch):
    evaluate = Objective.__call__

    def interrupted(self, *mask):
        if len(self._evaluated) == 4:
            raise KeyboardInterrupt
        return evaluate(self, *mask)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "__call__", interrupted)
        result = searched("--trials", 8)
    assert result.exit_code == 130
    assert result.stderr.endswith("layerskip: interrupted\n")
    assert "4 finished trials kept; the same command resumes the search\n" in result.stderr
    output = tmp_path / "out"
    with (output / "trials.csv").open(newline="") as lines:
        assert [row["state"] for row in csv.DictReader(lines)] == ["complete"] * 4 + ["failed"]
    assert {path.name for path in output.iterdir()} == {"cost.json", "study.log", "trials.csv"}
    assert searched("--trials", 8).exit_code == 0
    states = [row["state"] for row in trials(output)]
    assert states == ["complete"] * 4 + ["failed"] + ["complete"] * 4
    assert partial(output) == []


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["judge", "result"])
def test_ctrl_c_after_the_trials(step, folder, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.Search, step, interrupt)
    result = run(*flags(folder, prompts, tmp_path / "out", "--trials", 3))
    assert result.exit_code == 130
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert kept == {"cost.json", "study.log", "trials.csv"}


@pytest.mark.slow
def test_workers_share_the_trials(tmp_path, searched):
    result = searched("--workers", 2, "--trials", 40)
    assert result.exit_code == 0
    assert warned(result) == []
    check_shared(tmp_path / "out", 40)
    assert multiprocessing.active_children() == []


def check_shared(output, asked):
    complete = [row for row in trials(output) if row["state"] == "complete"]
    assert asked <= len(complete) <= asked + 1
    sets = {json.dumps([row["skipped"], row["draft_vocabulary"]]) for row in complete}
    assert len(sets) >= 0.9 * len(complete)


def workers_in(log):
    """The workers that a journal names."""
    text = log.read_bytes() if log.exists() else b""
    return {line.partition(b'"worker_id":"')[2][:36].decode() for line in text.splitlines()} - {""}


def finished_in(log):
    return log.read_bytes().count(b'"values":[')


def alive(session):
    """The processes of a session, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rpartition(") ")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it has ended
        if int(own) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(what, child=None):
    until = time.monotonic() + 180
    while not what():
        assert time.monotonic() < until
        if child is not None and child.poll() is not None:
            pytest.fail(f"ended too soon: {child.communicate()}")
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("weights", "positions"), [(1e5, 1024), (7e7, 500), (1.4e8, 250), (7e9, 128)]
)
def test_a_large_model_is_tried_on_fewer_positions(weights, positions):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight = torch.nn.Parameter(torch.empty(1).expand(int(weights)))
    model.device = torch.device("cpu")
    assert default_positions(model) == positions
    model.device = torch.device("cuda")
    assert default_positions(model) == 1024


def test_positions_that_are_asked_for(searched, tmp_path):
    """Positions come in whole texts. By default all six are traced, as the model is small."""
    result = searched("--trials", 1, "--positions", 30, "--space", "exit", "--allow-ends")
    assert warned(result) == ["--allow-ends has no effect with --space exit"]
    idle = ("--space", "exit,experts,window", "--bits", 4, "--study-name", "idle")
    assert warned(searched("--trials", 1, "--positions", 30, *idle)) == [
        "--bits has no effect without bits in --space",
        "--space experts has no effect with this model and these prompts",
        "--space window has no effect with this model and these prompts",
    ]
    assert read_search(tmp_path / "out" / "search.json")["trace"]["texts"] == 2


@pytest.fixture
def begun(folder, tmp_path):
    """A folder whose study knows its costs, and a command that continues it for a while."""
    output = tmp_path / "out"
    many = words(tmp_path / "many.txt", 300)  # enough to keep workers busy
    more = ("--no-confirm", "--space", "layer,lookup", "--trials", 31, "--quiet")
    more += ("--positions", 99999)
    command = flags(folder, many, output, *more, "--threads", 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Search, "run", interrupt)
        assert run(*command).exit_code == 130
    return output, command


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_lock_that_complains_of_ctrl_c(folder, prompts, tmp_path, monkeypatch, interrupted):
    """Optuna's file lock raises another error if Ctrl-C comes while it is released."""

    def broken(*_, **__):
        try:
            if interrupted:
                raise KeyboardInterrupt
        finally:
            (tmp_path / "lock.rename").unlink()

    monkeypatch.setattr(pipeline.Search, "run", broken)
    result = run(*flags(folder, prompts, tmp_path / "out", "--no-confirm", "--repeats", 3))
    assert warned(result) == ["--repeats has no effect with --no-confirm"]
    assert result.exit_code == (130 if interrupted else 2)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("ending", ["terminal", "kill"])
def test_workers_end_with_their_parent(begun, ending):
    output, command = begun
    log = output / "study.log"
    child = process(*command, "--workers", 3, start_new_session=True)
    try:
        wait_for(lambda: len(workers_in(log)) >= 2, child)
        if ending == "terminal":  # on a terminal, Ctrl-C reaches all processes
            os.killpg(child.pid, signal.SIGINT)
        else:
            child.send_signal(signal.SIGKILL)
        told = finished_in(log)
        out, err = child.communicate(timeout=180)
        wait_for(lambda: alive(child.pid) == [])
    finally:
        for left in alive(child.pid):
            os.kill(left, signal.SIGKILL)
    assert out == ""
    if ending == "kill":
        assert child.returncode == -signal.SIGKILL
    else:
        assert child.returncode == 130
        assert err.strip() == "layerskip: interrupted"
    assert finished_in(log) >= told
    # the same command continues to the end: every config of the space once
    assert run(*command).exit_code == 0
    check_shared(output, 31)
    assert partial(output) == []


@pytest.mark.parametrize("storage", ["{}/out/study.log", "{}/journal.log"])
def test_a_second_command_does_not_run_beside_the_first(
    folder, prompts, tmp_path, storage, monkeypatch
):
    """Neither in one folder nor on one journal: it would give up the first one's trials."""
    told, storage = [], storage.format(tmp_path)
    elsewhere = "journal" in storage

    def meanwhile(*_, **__):
        output = tmp_path / ("other" if elsewhere else "out")
        told.append(refused(*flags(folder, prompts, output, "--storage", storage)))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.Search, "run", meanwhile)
    command = flags(folder, prompts, tmp_path / "out", "--storage", storage)
    for _ in range(2):
        assert run(*command).exit_code == 130
    where, flag = (storage, "--storage") if elsewhere else (f"{tmp_path}/out", "--output")
    assert told == [f"another run writes {where}; wait until it ends, or give another {flag}"] * 2
    assert {path.name for path in tmp_path.rglob("*.lock")} == set()


# ---- Bad input ----


def test_an_output_that_is_a_file(folder, prompts, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file; give a folder" in refused(*flags(folder, prompts, tmp_path / "file"))
    assert "file" in refused(*flags(folder, prompts, tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_storage_that_cannot_be_opened(folder, prompts, tmp_path, monkeypatch):
    output, storage = tmp_path / "out", "postgresql://me:hunter2@localhost:1/x"
    reason = refused(*flags(folder, prompts, output, "--storage", storage))
    assert reason.startswith("cannot open the storage ")
    assert "hunter2" not in reason
    monkeypatch.setitem(sys.modules, "psycopg", None)
    reason = refused(*flags(folder, prompts, output, "--storage", storage))
    assert reason.endswith("psycopg is not installed: pip install 'layerskip[postgres]'")
    assert not output.exists()


def test_passwords_are_shown_nowhere(tmp_path, searched, monkeypatch):
    """Also of databases; a journal stands in for one here."""
    url = "postgresql://me:hunter2@host/db"
    monkeypatch.setattr("sys.argv", ["layerskip", "search", "--storage", url])
    local = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    for module in ("storage", "study"):
        monkeypatch.setattr(f"layerskip.search.{module}.open_storage", lambda _: local)
    result = searched("--storage", url, "--trials", 2, "--json")
    assert result.exit_code == 0
    assert "hunter2" not in result.output
    assert "postgresql://me:***@host/db" in (tmp_path / "out" / "search.json").read_text()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()
