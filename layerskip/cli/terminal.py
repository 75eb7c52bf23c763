"""Terminal output: widths, tables and streamed text.

`Talk` writes to standard error. Functions that return text format it for standard output.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from layerskip.texts.tokens import Detokenizer, plural

if TYPE_CHECKING:
    from layerskip.bench.comparison import Comparison
    from layerskip.decoding.rounds import DecodingStats


EVERY, SOON = 30.0, 5.0
PATIENCE = 3.0  # seconds before a progress bar is shown
_BAR = 30  # width in characters


class Talk:
    """Messages to the user on standard error."""

    def __init__(self, quiet: bool, now: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self._now, self._shown_at, self._stage = now, now(), ""

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.progress("")
        if not self.quiet:
            print(wrap(text) if self.live else text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Show a line that the next one replaces. Without a terminal, print one now and then.

        That means one line every EVERY seconds, or after SOON seconds when a new stage begins. The
        first word without a digit names the stage.
        """
        if self.live:
            print(f"\r\033[K{text[: width() - 1]}", end="", file=sys.stderr, flush=True)
        elif text and not self.quiet:
            stage = next((word for word in text.split() if word.isalpha()), "")
            silent = self._now() - self._shown_at
            if silent >= (EVERY if stage == self._stage else SOON):
                print(text.strip(), file=sys.stderr, flush=True)
                self._shown_at, self._stage = self._now(), stage


def reading(talk: Talk, now: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return a callback that shows a progress bar while a long prompt is read."""
    began = now()

    def show(done: int, whole: int) -> None:
        if not talk.live or now() - began < PATIENCE:
            return
        shown = f"reading {bar(done / whole)} {done} of {whole} tokens"
        talk.progress(shown if done < whole else "")

    return show


def bar(share: float) -> str:
    return f"[{'#' * int(_BAR * share):<{_BAR}}]"


# What a terminal would act on: control characters. They begin every escape sequence.
_OBEYED = {code: f"\\x{code:02x}" for code in {*range(32), *range(127, 160)} - {*b"\n\t"}}


def shown(text: str, where: TextIO | None = None) -> str:
    """Escape control characters in foreign text if it is printed on a terminal. `where` defaults
    to standard output."""
    return text.translate(_OBEYED) if (where or sys.stdout).isatty() else text


def write_out(text: str) -> None:
    print(shown(text), end="", flush=True)


def width() -> int:
    return min(shutil.get_terminal_size().columns, 88)


def wrap(text: str) -> str:
    return textwrap.fill(text, width(), subsequent_indent="  ", break_on_hyphens=False)


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Format two columns to the terminal's width. If it is narrow, the second goes below."""
    left = max(len(name) for name, _ in rows) + 2
    wide = width() >= left + 20
    fill = textwrap.TextWrapper(
        width=width(), subsequent_indent=" " * (left if wide else 2), break_on_hyphens=False
    )
    if wide:
        return "\n".join(fill.fill(f"{name:<{left}}{value}") for name, value in rows)
    fill.initial_indent = fill.subsequent_indent
    return "\n".join(f"{fill.fill(name).strip()}\n{fill.fill(value)}" for name, value in rows)


def title(text: str) -> str:
    return f"\n{text}\n{'-' * min(len(text), width())}"


class TextStream:
    """A streamer that decodes tokens and writes the text as it grows."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.decoder = Detokenizer(tokenizer)
        self.write = write

    def put(self, tokens: Any) -> None:
        if tokens.dim() > 1:
            return  # the prompt
        if text := self.decoder.put(tokens.tolist()):
            self.write(text)

    def end(self) -> None:
        self.write(self.decoder.end() + "\n")


def verdict(comparison: Comparison) -> str:
    """The result of a comparison in a few words."""
    words = f"{plural(comparison.tokens, 'token')}, {plural(comparison.prompts, 'prompt')}: "
    if comparison.faults:
        words += f"DIFFERENT in {comparison.faults}"
    else:
        words += "the same"
    if comparison.near_ties:
        joined = "and" if comparison.faults else "up to"
        words += f" {joined} {plural(comparison.near_ties, 'near-tie')}"
    if comparison.resolution is None:
        return words
    exact = comparison.resolution == 0
    return words + (", bit for bit" if exact else f", resolution {comparison.resolution:.2g}")


def to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False)


def counts(stats: DecodingStats, sources: Sequence[str]) -> dict[str, Any]:
    """What was drafted and accepted, in total and per source, in the form of `--json`."""
    names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    names += ["acceptance_rate", "mean_acceptance_length"]
    pairs = zip(sources, stats.sources, strict=False)  # fewer where none drafted
    by_source = [{"name": name} | vars(each) for name, each in pairs]
    return {name: getattr(stats, name) for name in names} | {"sources": by_source}


def by_source(counted: dict[str, Any]) -> str:
    """The number of drafts of each source in `counts`."""
    return ", ".join(f"{each['num_drafts']} {each['name']}" for each in counted["sources"])


_SHOWN = 3  # differences listed per prompt


def differences(comparison: Comparison, ids: Sequence[str], tokenizer: Any) -> list[str]:
    """One line for each of a prompt's first differences, and the number of further ones."""
    lines = []
    for prompt, group in groupby(comparison.differences, lambda d: d.prompt):
        every = list(group)
        lines += [
            f"prompt {ids[prompt]}, new token {d.position + 1}: expected "
            f"{_token(d.expected, tokenizer)}, got {_token(d.got, tokenizer)}; "
            f"margin {d.margin:.2g}, resolution {d.resolution:.2g}: "
            f"{'near-tie' if d.near_tie else 'FAULT'}"
            for d in every[:_SHOWN]
        ]
        more = len(every) - _SHOWN
        lines += [f"prompt {ids[prompt]}: {plural(more, 'more difference')}"] if more > 0 else []
    return lines


def _token(token: int | None, tokenizer: Any) -> str:
    return "the end" if token is None else repr(tokenizer.decode([token]))


def ratio(value: float | None, low: float | None, high: float | None) -> str:
    """A speedup, with its 95% interval if known."""
    if value is None:
        return "-"
    return f"{value:.2f}" if low is None else f"{value:.2f} ({low:.2f}-{high:.2f})"


def aligned(lines: Sequence[Sequence[str]], keys: int = 1) -> str:
    """Format columns flush right, except for the first and the last.

    If a terminal is too narrow for them, they form several tables, one below the other. Each begins
    with the first `keys` columns.
    """
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    columns = []
    for index, column in enumerate(zip(*lines, strict=True)):
        flush = str.ljust if index in (0, len(lines[0]) - 1) else str.rjust
        columns.append([flush(cell, max(map(len, column))) for cell in column])
    tables = [columns[:keys]]
    for each in columns[keys:]:
        wide = len("  ".join(column[0] for column in (*tables[-1], each))) > room
        if wide and len(tables[-1]) > keys:
            tables.append(columns[:keys])
        tables[-1] = [*tables[-1], each]
    rows = (("  ".join(cells).rstrip() for cells in zip(*table, strict=True)) for table in tables)
    return "\n\n".join("\n".join(each) for each in rows)
