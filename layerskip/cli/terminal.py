"""How talk and results look in a terminal: widths, tables, streamed text; knows no flags.

Talk and progress go to standard error; what is returned here is for standard output.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.bench.comparison import Comparison


EVERY, SOON = 30.0, 5.0
LEAST_BOUND = 1.1
"""A draft with a bound under this is hardly worth its trouble."""


class Talk:
    """Words for the person at the terminal, on standard error."""

    def __init__(self, quiet: bool, now: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._now, self._told, self._stage = now, now(), ""

    def say(self, text: str) -> None:
        """A line that stays."""
        self.progress("")
        if not self.quiet:
            print(wrap(text) if self._live else text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces; where there is no terminal, one now and then.

        That is one every EVERY seconds, or SOON where a stage begins: a stage is named by the first
        word without a digit.
        """
        if self._live:
            print(f"\r\033[K{text[: width() - 1]}", end="", file=sys.stderr, flush=True)
        elif text and not self.quiet:
            stage = next((word for word in text.split() if word.isalpha()), "")
            silent = self._now() - self._told
            if silent >= (EVERY if stage == self._stage else SOON):
                print(text.strip(), file=sys.stderr, flush=True)
                self._told, self._stage = self._now(), stage


def width() -> int:
    return min(shutil.get_terminal_size().columns, 88)


def wrap(text: str) -> str:
    return textwrap.fill(text, width(), subsequent_indent="  ", break_on_hyphens=False)


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns that keep within the terminal."""
    left = max(len(name) for name, _ in rows) + 2
    fill = textwrap.TextWrapper(
        width=max(width(), left + 20), subsequent_indent=" " * left, break_on_hyphens=False
    )
    return "\n".join(fill.fill(f"{name:<{left}}{value}") for name, value in rows)


def title(text: str) -> str:
    return f"\n{text}\n{'-' * min(len(text), width())}"


class TextStream:
    """A streamer that decodes tokens and writes the text as it grows."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.tokens: list[int] = []
        self.written = 0

    def put(self, tokens: Any) -> None:
        if tokens.dim() > 1:
            return  # the prompt
        self.tokens += tokens.tolist()
        text = decode_text(self.tokenizer, self.tokens)
        if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            self._write(text)

    def end(self) -> None:
        self._write(decode_text(self.tokenizer, self.tokens) + "\n")

    def _write(self, text: str) -> None:
        self.write(text[self.written :])
        self.written = len(text)


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def verdict(comparison: Comparison) -> str:
    """What came of a comparison, in a few words."""
    words = f"{comparison.tokens} tokens, {comparison.prompts} prompts: "
    if comparison.faults:
        return words + f"DIFFERENT in {comparison.faults}"
    if comparison.near_ties:
        return words + f"the same up to {comparison.near_ties} near-tie(s)"
    return words + "the same"


def differences(comparison: Comparison, ids: Sequence[str], tokenizer: Any) -> list[str]:
    return [
        f"prompt {ids[d.prompt]}, new token {d.position + 1}: expected "
        f"{_token(d.expected, tokenizer)}, got {_token(d.got, tokenizer)}; margin {d.margin:.2g}, "
        f"resolution {d.resolution:.2g}: {'near-tie' if d.near_tie else 'FAULT'}"
        for d in comparison.differences
    ]


def _token(token: int | None, tokenizer: Any) -> str:
    return "the end" if token is None else repr(tokenizer.decode([token]))


def search_table(record: Mapping[str, Any]) -> str:
    """A search's finalists: what was predicted and what the clock said, with 95% intervals."""
    titles = ["draft", "skips", "vocabulary", "c", "alpha", "predicted", "held out"]
    lines = [[*titles, "measured", "same text"]]
    for row in record["finalists"]:
        skipped = row["skipped"]
        held_out, timed = row["predicted_held_out"], row["confirmed"]
        line = [row["name"], f"{len(skipped['attention'])} attn, {len(skipped['mlp'])} MLP"]
        line.append(str(row.get("draft_vocabulary") or "all"))
        line += [f"{row['draft_cost']:.2f}", f"{row['alpha']:.2f}", f"{row['predicted']:.2f}"]
        line.append("-" if held_out is None else f"{held_out:.2f}")
        if timed is None:
            line += ["-", "-"]
        else:
            low, high = timed["low"], timed["high"]
            interval = "" if low is None else f" ({low:.2f}-{high:.2f})"
            line.append(f"{timed['speedup']:.2f}{interval}")
            same = f"{timed['equal']}/{timed['compared']}" if timed["compared"] else "-"
            same += f", {timed['near_ties']} near-ties" if timed["near_ties"] else ""
            line.append(same + (f", {timed['faults']} FAULTS" if timed["faults"] else ""))
        lines.append(line)
    return aligned(lines)


def search_verdict(record: Mapping[str, Any], skip: Path) -> str:
    """What a search found, what that gains, and what to do next: a line each."""
    rows = {row["name"]: row for row in record["finalists"]}
    won = rows.get(record["winner"])
    best = won or max(rows.values(), key=_worth, default=None)
    lines = ["found    no draft that gains: skip.json drafts nothing"]
    if won is not None:
        left_out = sum(map(len, won["skipped"].values()))
        of = 2 * record["model"]["num_layers"]
        lines = [f"found    {won['name']}, which leaves out {left_out} of {of} sublayers"]
    if best is not None:
        lines.append(f"{'best' if won is None else 'gains':<8} {_gain(best)}")
    bound = record["bound"] if won is None else 1 / won["draft_cost"]
    if bound < LEAST_BOUND:
        lines.append(f"bound    {bound:.2f}x, were it always right")
    faults = 0 if best is None or best["confirmed"] is None else best["confirmed"]["faults"]
    name = record["model"]["name"]
    if faults:
        lines.append(
            f"next     {faults} texts DIFFER from plain decoding's: layerskip check {name}"
        )
    elif won is None:
        lines.append(
            "next     decode plainly; or search with more prompts, trials or a wider space"
        )
    elif won["confirmed"] is None:
        lines.append(f"next     time it: layerskip benchmark {name} --skip {skip}")
    else:
        lines.append(f"next     use it: layerskip generate {name} --skip {skip} --prompt TEXT")
    return "\n".join(lines)


def _worth(row: Mapping[str, Any]) -> float:
    """A finalist's speedup, as far as it is known."""
    held_out, timed = row["predicted_held_out"], row["confirmed"]
    known: float = row["predicted"] if held_out is None else held_out
    return known if timed is None else timed["speedup"]


def _gain(row: Mapping[str, Any]) -> str:
    """A finalist's speedup on the clock, its interval, and its price."""
    held_out, timed = row["predicted_held_out"], row["confirmed"]
    on = "the traced prompts" if held_out is None else "prompts held out"
    price = f"priced at {row['predicted'] if held_out is None else held_out:.2f}x on {on}"
    if timed is None:
        return f"{row['name']}: {price}, not timed"
    interval = "no interval"
    if timed["low"] is not None:
        interval = f"95% interval {timed['low']:.2f}-{timed['high']:.2f}"
    return f"{row['name']}: {timed['speedup']:.2f}x plain decoding ({interval}), {price}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns, all but the first and the last of them flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in (0, len(widths) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
