"""Runs prompt files with part of the demo model, and reads the rows that they write."""

import json
import time

from checkpoints import shallow_demo
from commands import process
from commands import run as command

FLAGS = ("--execution", "fused", "--exit-layer", "3", "-n", "8", "--max-rows", "3")
SAMPLED = ("--do-sample", "--temperature", "0.9", "--top-k", "20", "--seed", "5")


def run(given, output, *flags):
    return command("run", shallow_demo(), given, "--output", output, *FLAGS, *flags)


def rows(output):
    """The rows by id; no id may occur twice."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def settled(output):
    """The rows by id, without the counts that depend on the other texts in the batch."""
    counts = {"drafted", "accepted"}
    return {
        id_: {name: value for name, value in row.items() if name not in counts}
        for id_, row in rows(output).items()
    }


def complete(output):
    """The complete lines of a file, if it exists."""
    data = output.read_bytes() if output.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def wait_for_rows(process, output, count):
    while process.poll() is None and complete(output).count(b"\n") < count:
        time.sleep(0.001)


def started(given, output, *flags):
    """A run in a separate process."""
    return process("run", shallow_demo(), given, "--output", output, *FLAGS, *flags, stdout=None)
