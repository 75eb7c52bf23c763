"""Searches by several processes on a PostgreSQL server that the tests start: -m postgres."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import optuna
import pytest
import torch
from checkpoints import save_checkpoint
from models import lively_model
from optuna.storages import RDBStorage
from optuna.trial import TrialState

pytestmark = pytest.mark.postgres

WORKER = """
import socket, sys
host, change, *arguments = sys.argv[1:]
socket.gethostname = lambda: host  # as if it ran on a machine of its own
exec(change)
sys.argv[1:] = arguments
from layerskip.cli.main import main
sys.exit(main())
"""
HANGS = """
import pathlib, time
from layerskip.search.objective import Objective
begun = pathlib.Path(arguments[arguments.index("--output") + 1]).with_name("begun")
evaluate = Objective.__call__
def hang(self, *mask):
    if len(self._evaluated) == 3:
        begun.touch()
        time.sleep(3600)
    return evaluate(self, *mask)
Objective.__call__ = hang
"""
IMPATIENT = """
from layerskip.search import storage
storage.BEAT_SECONDS, storage.SILENT_SECONDS = 1, 3
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what, child):
    until = time.monotonic() + 300
    while not what():
        assert time.monotonic() < until
        assert child.poll() is None
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server():
    """The URL of a database on a server of our own."""
    pytest.importorskip("psycopg")
    programs = [shutil.which(name) for name in ("initdb", "postgres")]
    if None in programs:
        pytest.skip("initdb and postgres are not on the path")
    other = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        other = {"user": "nobody", "group": "nogroup", "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="postgres") as place:
        if other:
            shutil.chown(place, other["user"], other["group"])
        port, data = free_port(), f"{place}/data"
        make = [programs[0], "-D", data, "-U", "search", "--auth=trust", "--no-sync"]
        subprocess.run(make, check=True, capture_output=True, cwd=place, **other)
        serve = [programs[1], "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", place]
        running = subprocess.Popen(serve, stderr=subprocess.DEVNULL, cwd=place, **other)
        try:
            wait_for(lambda: listens(port), running)
            yield f"postgresql://search@127.0.0.1:{port}/postgres"
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)


@pytest.fixture
def worker(tmp_path):
    """Starts a search named like its folder; none outlives its test."""
    folder = save_checkpoint(tmp_path / "model", lively_model("llama", dtype=torch.float32))
    lines = [f"w{n} w{n + 9} w{n + 20} w{n + 40} w{n + 50}" for n in range(2, 11)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    started = []

    def start(name, change, storage, *more):
        flags = ["--prompts", tmp_path / "prompts.txt", "--output", tmp_path / name]
        flags += ["--storage", storage, "--study-name", tmp_path.name, "--threads", 1]
        flags += ["--max-new-tokens", 24, "--bits", "none", "--quiet", *more]
        command = [sys.executable, "-c", WORKER, name, change, "search", folder, *flags]
        started.append(subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def trials_in(server, name):
    storage = RDBStorage(server.replace("postgresql://", "postgresql+psycopg://"))
    try:
        return optuna.load_study(study_name=name, storage=storage).trials
    finally:
        storage.remove_session()
        storage.engine.dispose()


def test_the_trial_of_a_killed_worker_is_taken_up(server, worker, tmp_path):
    first = worker("far", HANGS, server, "--trials", 10, "--no-confirm")
    wait_for((tmp_path / "begun").exists, first)
    first.kill()
    first.wait()
    left = trials_in(server, tmp_path.name)[-1]
    assert left.state is TrialState.RUNNING
    second = worker("near", IMPATIENT, server, "--trials", 10, "--no-confirm")
    said = second.communicate(timeout=500)[1]
    assert second.returncode == 0, said
    trials = trials_in(server, tmp_path.name)
    assert trials[left.number].state is TrialState.FAIL
    again = [t for t in trials if t.params == left.params and t.number != left.number]
    assert [t.state for t in again] == [TrialState.COMPLETE]
    assert sum(t.state is TrialState.COMPLETE for t in trials) == 10
