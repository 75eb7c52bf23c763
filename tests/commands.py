"""Runs commands in this process and reads their output."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile

from typer import testing

from layerskip.cli.main import app

testing._get_command = functools.cache(testing._get_command)  # built once, not for each command
COSTS = tempfile.TemporaryDirectory()  # timed costs, shared by the commands of all tests
PROMPT = "w5 w7 w96 w20"  # for the tiny tokenizer of `checkpoints.py`


def run(*arguments, columns=100, stdin=None):
    """Run a command; the result has exit_code, stdout and stderr."""
    cache = os.environ["LAYERSKIP_CACHE"] or COSTS.name
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1", "LAYERSKIP_CACHE": cache}
    result = testing.CliRunner(env=environment).invoke(app, [*map(str, arguments)], stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments):
    """The single error line of a refused command, which must write no result."""
    result = run(*arguments, "--quiet")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("layerskip: error: ")
    return line.removeprefix("layerskip: error: ")


def warned(result):
    """The warnings that a command printed."""
    prefix = "layerskip: warning: "
    lines = result.stderr.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def document(result):
    """The JSON document that a successful command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def process(*arguments, **kwargs):
    """Start a command in a separate process."""
    command = [sys.executable, "-m", "layerskip", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    # The background jobs of a shell ignore SIGINT, and their children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, env=environment, **kwargs)
    finally:
        signal.signal(signal.SIGINT, before)
