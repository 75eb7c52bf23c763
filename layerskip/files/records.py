"""Record files of runs: their required contents, reading them, and appending to them.

A run file is JSON lines: a header, then lines of the kinds "record" (one per method, batch of
prompts and repeat) and "sweep" in any order. Times are in seconds. A record's "context" is the
length to which its prompts were joined or cut, "bytes_read" the weights, keys and values that its
passes after the first tokens read, and "read_bandwidth" a measured bandwidth in bytes per second.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from layerskip.files import schema
from layerskip.files.reading import errors_of, read_file
from layerskip.files.schema import COUNT, Check, Maybe, flag, has, integer, items, optional, text
from layerskip.files.writing import add_lines

SCHEMA = 1

Line = dict[str, Any]
Key = tuple[str, tuple[str, ...], int, int]  # method, prompts, batch size, repeat

_START = b'{"kind": "header"'
_MAY_DIFFER = {"created", "argv", "environment.git.dirty", "passes"}
"""Parts of the header that may differ when a run is resumed."""


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file."""

    path: Path
    header: Line
    records: tuple[Line, ...]
    """In the file's order; only the first of records with equal keys."""
    sweeps: tuple[Line, ...]
    cut_off: bool
    """Whether the last line is incomplete."""


def key_of(record: Mapping[str, Any]) -> Key:
    return record["method"], tuple(record["prompts"]), record["batch_size"], record["repeat"]


def costs_key(batch_size: int, context: int | None) -> str:
    """The key of the costs for such batches, in the `costs` of a method in the header."""
    return str(batch_size) if context is None else f"{batch_size}@{context}"


def read_run(path: str | os.PathLike[str]) -> RunFile:
    """Read and check a run file; a last line without a line end is incomplete, and is ignored.

    Raises:
        ValueError: the file cannot be read or is empty, has another schema, or has a wrong line;
            names the file and the line.
    """
    path = Path(path)
    run = _run(path)
    if run is None:
        raise ValueError(f"records {path} are empty: there is no header")
    return run


def read_unfinished(path: str | os.PathLike[str]) -> RunFile | None:
    """Read a run to resume; None if there is no file, or only the beginning of a header."""
    path = Path(path)
    return _run(path) if path.exists() else None


def begins_as_run(path: Path) -> bool:
    """Whether a file begins like a run file."""
    with path.open("rb") as file:
        return file.read(len(_START)) == _START


def _run(path: Path) -> RunFile | None:
    with errors_of(f"records {path}"):
        data = read_file(path, 1 << 34)
    *lines, rest = data.split(b"\n")
    if not lines and not (rest.startswith(_START) or _START.startswith(rest)):
        raise ValueError(f"{path} is not a file of records: it does not start with a header")
    header: Line | None = None
    by_kind: dict[str, list[Line]] = {"record": [], "sweep": []}
    seen: set[Key] = set()
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        with errors_of(f"records {path}, line {number}"):
            line = schema.mapping(schema.parse(raw), "a line")
            if header is None:
                header = _header(line)
                continue
            kind = line.get("kind")
            if kind == "header":
                raise ValueError("a second header: two runs in one file; each needs its own file")
            if kind not in by_kind:
                allowed = ", ".join(by_kind)
                raise ValueError(f"kind must be one of {allowed}, got {shown(kind)}")
            _CHECKS[kind](line, header)
            if kind == "record":
                if key_of(line) in seen:
                    continue
                seen.add(key_of(line))
            by_kind[kind].append(line)
    if header is None:
        return None
    records, sweeps = map(tuple, by_kind.values())
    return RunFile(path, header, records, sweeps, bool(rest))


_METHOD = has(
    **dict.fromkeys(("name", "kind"), text),
    label=Maybe(text),
    low=Maybe(schema.low_sets),
    costs=Maybe(schema.named(schema.cost_table)),
)
_DRAFTING = has(controller=text, num_kept=COUNT, skipped=schema.layer_sets, sources=items(text))


def _method(value: Any, name: str) -> None:
    _METHOD(value, name)
    if value["kind"] == "self":
        _DRAFTING(value, name)


_HEADER = has(
    schema=schema.version(SCHEMA),
    created=text,
    model=has(name=text, architecture=text, num_layers=integer(1), parameters=COUNT),
    **dict.fromkeys(("device", "dtype"), text),
    **dict.fromkeys(("max_new_tokens", "repeats", "warmup"), COUNT),
    batch_sizes=items(COUNT),
    law=has(
        do_sample=flag, **dict.fromkeys(("temperature", "top_p", "top_k"), Maybe(schema.NUMBER))
    ),
    prompts=has(count=COUNT),
    environment=schema.environment,
    methods=items(_method),
    baseline=text,
    passes=Maybe(text),
    contexts=Maybe(items(integer(1))),
)


def _header(line: Line) -> Line:
    if line.get("kind") != "header":
        raise ValueError(f"the first line must be a header, got kind {shown(line.get('kind'))}")
    _HEADER(line, "")
    names = [method["name"] for method in line["methods"]]
    if len(set(names)) < len(names):
        raise ValueError(f"methods must have different names, got {', '.join(names)}")
    if line["baseline"] not in names:
        raise ValueError(
            f"baseline must be one of the methods ({', '.join(names)}), got {line['baseline']!r}"
        )
    return line


_DIFFERENCE = has(
    **dict.fromkeys(("row", "position"), COUNT),
    near_tie=flag,
    **dict.fromkeys(("margin", "resolution"), optional(schema.NUMBER)),
)


def _record(line: Line, header: Line) -> None:
    names = [method["name"] for method in header["methods"]]
    if has(method=schema.anything)(line, "")["method"] not in names:
        raise ValueError(
            f"method must be one of the header's ({', '.join(names)}), got {shown(line['method'])}"
        )
    has(batch_size=integer(1))(line, "")

    def by_row(check: Check) -> Check:
        return items(check, line["batch_size"])

    phases = dict.fromkeys(("draft", "verify", "other"), optional(schema.SECONDS))
    has(
        **dict.fromkeys(("repeat", "order"), COUNT),
        prompts=by_row(text),
        category=optional(text),
        context=Maybe(integer(1)),
        **dict.fromkeys(("prompt_tokens", "new_tokens", "first_tokens"), by_row(COUNT)),
        repeated_4grams=by_row(schema.SECONDS),
        loops=by_row(flag),
        seconds=has(total=schema.POSITIVE, first=schema.SECONDS, **phases),
        equal=optional(by_row(flag)),
        differences=items(_DIFFERENCE),
        peak_memory=optional(COUNT),
        rounds=optional(schema.mapping),
        **dict.fromkeys(("bytes_read", "read_bandwidth"), Maybe(schema.POSITIVE)),
    )(line, "")
    parts = sum(line["seconds"][name] or 0.0 for name in ("first", "draft", "verify", "other"))
    total = line["seconds"]["total"]
    if parts > total * (1 + 1e-6):
        raise ValueError(f"the parts of seconds must not exceed the total, {total}; got {parts}")
    if line["rounds"] is not None:
        (method,) = (each for each in header["methods"] if each["name"] == line["method"])
        _rounds(line, len(method.get("sources") or ()))


def _rounds(line: Line, sources: int) -> None:
    """Check the rounds of a record whose method has this number of sources."""
    rounds = has(drafted=items(schema.anything))(line["rounds"], "rounds")
    turns, rows = len(rounds["drafted"]), line["batch_size"]

    def source(value: Any, name: str) -> Any:
        if value is not None and COUNT(value, name) >= sources:
            raise ValueError(
                f"{name} must be the number of one of the method's {sources} sources, got {value}"
            )

    def one_or_by_row(value: Any, name: str) -> Any:
        (items(source, rows) if isinstance(value, list) else source)(value, name)

    def by_turn_and_row(check: Check) -> Check:
        return items(items(check, rows), turns)

    has(
        **dict.fromkeys(("drafted", "accepted", "emitted"), by_turn_and_row(COUNT)),
        confidences=optional(items(items(items(schema.NUMBER), rows))),
        sources=items(one_or_by_row, turns),
        steps=items(COUNT, turns),
        depths=Maybe(by_turn_and_row(COUNT)),
    )(rounds, "rounds")
    for turn, row in product(range(turns), range(rows)):
        drafted, accepted = (rounds[name][turn][row] for name in ("drafted", "accepted"))
        depth = rounds["depths"][turn][row] if rounds.get("depths") else drafted
        if not accepted <= depth <= drafted:
            raise ValueError("rounds.accepted and rounds.depths must not exceed rounds.drafted")
    for row, first in enumerate(line["first_tokens"]):
        counted = first + sum(emitted[row] for emitted in rounds["emitted"])
        if counted != line["new_tokens"][row]:
            raise ValueError(
                f"first_tokens and rounds.emitted must add up to new_tokens, "
                f"{line['new_tokens'][row]}; got {counted}"
            )


_SWEEP = has(
    prompts=items(text, least=1),
    tokens=integer(1),
    draft_lengths=items(integer(1), least=1),
    exits=items(
        has(exit=COUNT, agreement=schema.SHARE, match=schema.SHARE, costs=schema.cost_table),
        least=1,
    ),
)


def _sweep(line: Line, _: Line) -> None:
    _SWEEP(line, "")
    for number, entry in enumerate(line["exits"]):
        counts = items(items(COUNT), len(line["draft_lengths"]))
        has(rounds=counts)(entry, f"exits[{number}]")
        if not all(map(sum, entry["rounds"])):
            raise ValueError(f"exits[{number}].rounds must hold rounds of every draft length")


_CHECKS = {"record": _record, "sweep": _sweep}


class RunWriter:
    """Appends to a run file line by line, so that a killed run keeps its measurements.

    Args:
        earlier: the result of `read_unfinished`. Its header stays; an incomplete line is replaced.

    Raises:
        ValueError: the file's settings differ from those of `header`; names the differences.
    """

    def __init__(self, path: str | os.PathLike[str], header: Line, earlier: RunFile | None) -> None:
        self.path = Path(path)
        if earlier is not None:
            differing = _differences(earlier.header, json.loads(_dumps(header)))
            if differing:
                raise ValueError(
                    f"{path} holds records of other settings: {differing[0]}"
                    + (f", and {len(differing) - 1} more" if len(differing) > 1 else "")
                    + "; give another --output, or the same settings to resume it"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w+b" if earlier is None else "a+b")
        if earlier is None:
            self.write(header)

    def write(self, line: Line) -> None:
        add_lines(self._file, _dumps(line).encode() + b"\n")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _dumps(line: Line) -> str:
    return json.dumps(line, allow_nan=False)


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Describe the differences of two headers, except for those that are allowed."""
    if name in _MAY_DIFFER or there == here:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        differing = []
        for key in [*there, *(key for key in here if key not in there)]:
            path = f"{name}.{key}" if name else key
            differing += _differences(there.get(key), here.get(key), path)
        return differing
    return [f"{name} is {shown(there)} there and {shown(here)} here"]


def redacted(text: str) -> str:
    """The text without the passwords and queries of its URLs."""
    text = re.sub(r"(\w+://[^\s/:@]*):[^\s]*@", r"\1:***@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:passw|pwd|secret|token)[^=&\s]*)=[^&\s]+", r"\1=***", text)
