"""The command line: commands, messages and exit codes. Slow imports happen only when used.

Results go to standard output, messages and progress to standard error. Exit codes: 0 success,
1 a check failed, 2 bad input (one line gives the reason), 130 interrupted.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from layerskip.cli.benchmark import benchmark
from layerskip.cli.chat import chat
from layerskip.cli.check import check
from layerskip.cli.demo import demo
from layerskip.cli.env import env
from layerskip.cli.flags import PANELS
from layerskip.cli.generate import generate
from layerskip.cli.report import report
from layerskip.cli.run import run
from layerskip.cli.search import search
from layerskip.cli.serve import serve
from layerskip.cli.terminal import shown
from layerskip.cli.train import train
from layerskip.version import __version__

SPINS = "10000"  # a thirtieth of the default; fewer would cost time on an idle machine
_PIPE_CLOSED = 128 + 13  # what a shell reports for a process that SIGPIPE ended


class _Commands(TyperGroup):
    """Turns every failure of a command into one line of text and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            code = self._run(args, **kwargs)
        if standalone:
            sys.exit(code)
        return code

    def _run(self, args: Sequence[str] | None, **kwargs: Any) -> int:
        try:
            code: int | None = super().main(args, standalone_mode=False, **kwargs)
            sys.stdout.flush()  # here, so that a full disk still gives a message and an exit code
        except (BrokenPipeError, SystemExit):
            # The reader of the output went away. Typer also exits when it meets that.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _PIPE_CLOSED
        except TyperException as error:
            reason = error.format_message().replace("Value error, ", "")
            if "Input should be" in reason:  # in pydantic's words, which do not repeat the value
                cause: Any = error.__cause__
                reason += f", got {cause.errors()[0]['input']!r}"
            command = getattr(getattr(error, "ctx", None), "command_path", "layerskip")
            return _refuse(f"{reason} (see {command} --help)")
        except (ValueError, OSError, FloatingPointError) as error:
            return _refuse(str(error))
        if code == 130:
            print("\nlayerskip: interrupted", file=sys.stderr)
        return code or 0


class _Command(TyperCommand):
    """Lists the options of a command under the headings of `PANELS`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        places = {flag: panel for panel, flags in PANELS.items() for flag in flags.split()}
        order = {flag: number for number, flag in enumerate(places)}
        panels: dict[str, list[tuple[str, str]]] = {each: [] for each in ("Arguments", *PANELS)}
        for each in sorted(self.get_params(ctx), key=lambda each: order.get(str(each.name), 0)):
            panel = getattr(each, "rich_help_panel", None) or places.get(str(each.name), "Options")
            panel = "Arguments" if each.param_type_name == "argument" else panel
            if (record := each.get_help_record(ctx)) is not None:
                panels[panel].append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()), sys.stderr)


def _refuse(reason: str) -> int:
    print(f"layerskip: error: {_one_line(reason)}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"layerskip: warning: {_one_line(str(message))}", file=sys.stderr)


app = typer.Typer(
    name="layerskip",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Faster generation with the same text: a model drafts with cheaper versions of itself.",
)


def main() -> None:
    """Entry point of the console script."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as by `>&-`
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    _spin_less()
    code: Any = 1  # of an exception that nobody catches

    def end() -> None:
        with suppress(OSError):  # the command has told of it
            sys.stdout.flush()
        os._exit(code)

    # The process ends as soon as its threads and its other functions at exit are done. Freeing the
    # million objects of the libraries takes a second, and where they are not freed, Triton, where
    # it is installed, reports each of its own.
    atexit.register(end)  # before the libraries' functions, so that it runs after them
    code = app(prog_name="layerskip", standalone_mode=False)
    sys.exit(code)


def _spin_less() -> None:
    """Make idle threads of torch's pool yield soon, unless the user has set how long they spin.

    By default they spin for milliseconds after every product. If another process needs the core,
    threads then wait for each other many times over. Torch reads the variable when it is loaded.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"layerskip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _spliced(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of flags by one parameter per flag.

    Typer reads this flat signature; the wrapped command receives the dataclass objects.
    """
    groups: dict[str, Any] = {}
    flags: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            flags.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        flags += [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(kind)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name.replace('_', '-')} must be finite, got {value}")
        for name, kind in groups.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        command(**given)

    run.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


for command in (*(generate, chat, serve, run, search, train, benchmark, check, demo, report, env),):
    app.command(cls=_Command)(_spliced(command))
