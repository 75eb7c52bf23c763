"""Knows the record files of runs: what they hold, reading, checking, appending; no run, no torch.

A run file is JSON lines: a header, then lines of the kinds "record" (one per method, batch of
prompts and repeat), "trace" and "cost" in any order. All times are in seconds. Readers ignore keys
they do not know; what they need and miss is an error that names the file and the line. A header
with "synthetic" is of random weights, and says how their acceptance was set.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from types import TracebackType
from typing import Any

SCHEMA = 1

Line = dict[str, Any]
Key = tuple[str, tuple[str, ...], int, int]  # method, prompts, batch size, repeat

_MAY_DIFFER = {"created", "argv", "environment.git.dirty"}  # between the parts of a resumed run


@dataclass(frozen=True)
class Run:
    """What a run file holds.

    Attributes:
        header: the first line.
        records: by the order of the file; of records with one key the first.
        traces, costs: the lines of those kinds.
        whole_bytes: length of the file without a last line that was cut off.
    """

    path: Path
    header: Line
    records: tuple[Line, ...]
    traces: tuple[Line, ...]
    costs: tuple[Line, ...]
    whole_bytes: int


def key_of(record: Mapping[str, Any]) -> Key:
    """What a record is of; a run has one of each."""
    return record["method"], tuple(record["prompts"]), record["batch_size"], record["repeat"]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read and check a run file.

    Raises:
        ValueError: the file cannot be read, is empty or cut off, has another schema, or a line that
            is not as it must be; names the file and the line.
    """
    run = _read(Path(path), cut_off=False)
    assert run is not None
    return run


def read_unfinished(path: str | os.PathLike[str]) -> Run | None:
    """A run to go on with: like `read_run`, but a last line that was cut off is left out.

    Returns:
        None where there is no file, or nothing in it but the start of a header.
    """
    return _read(Path(path), cut_off=True) if os.path.exists(path) else None


def _read(path: Path, *, cut_off: bool) -> Run | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read records {path}: {error.strerror}") from error
    *lines, rest = data.split(b"\n")
    if rest and not cut_off:
        lines.append(rest)
    if not lines and cut_off:
        if _starts_a_header(rest):
            return None
        raise ValueError(f"{path} is no file of records: it does not start with a header")
    if not any(line.strip() for line in lines):
        raise ValueError(f"records {path} are empty: there is no header")
    header: Line | None = None
    found: dict[str, list[Line]] = {"record": [], "trace": [], "cost": []}
    seen: set[Key] = set()
    for number, raw in enumerate(lines, 1):
        try:
            line = _parse(raw)
            if header is None:
                header = _header(line)
                continue
            kind = line.get("kind")
            if kind not in found:
                allowed = ", ".join(found)
                raise ValueError(f"kind must be one of {allowed}, got {shown(kind)}")
            _CHECKS[kind](line, header)
            if kind == "record":
                if key_of(line) in seen:
                    continue
                seen.add(key_of(line))
            found[kind].append(line)
        except (ValueError, TypeError, RecursionError) as error:
            reason = str(error)
            if raw is rest:  # no line break behind it: the run was killed while it wrote this
                reason = (
                    "the line is cut off; run the benchmark again with the same --output, which "
                    "goes on from there, or delete the line"
                )
            raise ValueError(f"records {path}, line {number}: {reason}") from error
    assert header is not None
    whole = len(data) - (len(rest) if cut_off else 0)
    return Run(
        path,
        header,
        tuple(found["record"]),
        tuple(found["trace"]),
        tuple(found["cost"]),
        whole,
    )


def _starts_a_header(data: bytes) -> bool:
    start = b'{"kind": "header"'
    return data.startswith(start) or start.startswith(data)


def _parse(raw: bytes) -> Line:
    try:
        line = json.loads(raw, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"a line must be a JSON object, got {shown(line)}")
    return line


def _no_constant(name: str) -> float:
    raise ValueError(f"numbers must be finite, got {name}")


# ---------------------------------------------------------------------------------------------
# What the lines must hold.


def _get(values: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name."""
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"{name} is missing")
        found = found[part]
    return found


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer, 0 or more, got {shown(value)}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    return value


def _seconds(value: Any, name: str) -> float:
    if _number(value, name) < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return float(value)


def _items(
    value: Any, name: str, check: Callable[[Any, str], Any], length: int | None = None
) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {shown(value)}")
    if length is not None and len(value) != length:
        raise ValueError(f"{name} must have {length} items, got {len(value)}")
    return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _header(line: Line) -> Line:
    if line.get("kind") != "header":
        raise ValueError(f"the first line must be a header, got kind {shown(line.get('kind'))}")
    schema = _get(line, "schema")
    if schema != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {shown(schema)}, of another version")
    for name in ("created", "model.name", "model.architecture", "device", "dtype", "baseline"):
        _text(_get(line, name), name)
    for name in ("model.num_layers", "model.parameters", "max_new_tokens", "repeats", "warmup"):
        _count(_get(line, name), name)
    _items(_get(line, "batch_sizes"), "batch_sizes", _count)
    _flag(_get(line, "law.do_sample"), "law.do_sample")
    _count(_get(line, "prompts.count"), "prompts.count")
    if line.get("synthetic") is not None:
        _text(line["synthetic"], "synthetic")
    if not isinstance(_get(line, "environment"), dict):
        raise ValueError("environment must be a JSON object")
    methods = _items(_get(line, "methods"), "methods", _method)
    names = [method["name"] for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"methods must have different names, got {', '.join(names)}")
    if line["baseline"] not in names:
        raise ValueError(
            f"baseline must be one of the methods ({', '.join(names)}), got {line['baseline']!r}"
        )
    return line


def _method(value: Any, name: str) -> Line:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}")
    for part in ("name", "kind"):
        _text(_get(value, part), f"{name}.{part}")
    return value


def _record(line: Line, header: Line) -> None:
    names = [method["name"] for method in header["methods"]]
    if _get(line, "method") not in names:
        raise ValueError(
            f"method must be one of the header's ({', '.join(names)}), got {shown(line['method'])}"
        )
    for name in ("batch_size", "repeat", "order"):
        _count(_get(line, name), name)
    rows = line["batch_size"]
    if rows < 1:
        raise ValueError("batch_size must be at least 1, got 0")
    _items(_get(line, "prompts"), "prompts", _text, rows)
    if _get(line, "category") is not None:
        _text(line["category"], "category")
    for name in ("prompt_tokens", "new_tokens", "first_tokens"):
        _items(_get(line, name), name, _count, rows)
    _items(_get(line, "repeated_4grams"), "repeated_4grams", _seconds, rows)
    _items(_get(line, "loops"), "loops", _flag, rows)
    total = _seconds(_get(line, "seconds.total"), "seconds.total")
    if total == 0:
        raise ValueError("seconds.total must be above 0, got 0")
    parts = 0.0
    for name in ("first", "draft", "verify", "other"):
        value = _get(line, f"seconds.{name}")
        if name == "first" or value is not None:
            parts += _seconds(value, f"seconds.{name}")
    if parts > total * (1 + 1e-6):
        raise ValueError(f"the parts of seconds must not exceed the total, {total}; got {parts}")
    if _get(line, "equal") is not None:
        _items(line["equal"], "equal", _flag, rows)
    _items(_get(line, "differences"), "differences", _difference)
    if _get(line, "peak_memory") is not None:
        _count(line["peak_memory"], "peak_memory")
    if _get(line, "rounds") is not None:
        _rounds(line, rows)


def _difference(value: Any, name: str) -> None:
    _count(_get(value, "row"), f"{name}.row")
    _count(_get(value, "position"), f"{name}.position")
    _flag(_get(value, "near_tie"), f"{name}.near_tie")
    for part in ("margin", "resolution"):
        if _get(value, part) is not None:
            _number(value[part], f"{name}.{part}")


def _rounds(line: Line, rows: int) -> None:
    def of_rows(value: Any, name: str) -> list[Any]:
        return _items(value, name, _count, rows)

    counts: dict[str, list[list[int]]] = {}
    for part in ("drafted", "accepted", "emitted"):
        name = f"rounds.{part}"
        length = len(counts["drafted"]) if counts else None
        counts[part] = _items(_get(line, name), name, of_rows, length)
    for row in range(rows):
        emitted = line["first_tokens"][row]
        for drafted, accepted, new in zip(*counts.values(), strict=True):
            if accepted[row] > drafted[row]:
                raise ValueError("rounds.accepted must not exceed rounds.drafted")
            emitted += new[row]
        if emitted != line["new_tokens"][row]:
            raise ValueError(
                f"first_tokens and rounds.emitted must add up to new_tokens, "
                f"{line['new_tokens'][row]}; got {emitted}"
            )
    if _get(line, "rounds.confidences") is not None:
        _items(line["rounds"]["confidences"], "rounds.confidences", _confidences(rows))


def _confidences(rows: int) -> Callable[[Any, str], Any]:
    """A check of one round's confidences: a list of numbers for every row."""

    def numbers(value: Any, name: str) -> list[Any]:
        return _items(value, name, _number)

    return lambda value, name: _items(value, name, numbers, rows)


def _trace(line: Line, _: Line) -> None:
    _items(_get(line, "prompts"), "prompts", _text)
    _count(_get(line, "tokens"), "tokens")
    for number, entry in enumerate(_items(_get(line, "exits"), "exits", lambda v, _: v)):
        for name in ("exit", "agreement", "match", "confidence"):
            _get(entry, name)
        _number(entry["match"], f"exits[{number}].match")
    axes = [
        _items(_get(line, f"what_if.{name}"), f"what_if.{name}", _number)
        for name in ("exits", "draft_lengths", "thresholds")
    ]
    shape = [len(axis) for axis in axes]
    for name in ("rounds", "drafted", "emitted"):
        _array(_get(line, f"what_if.{name}"), f"what_if.{name}", shape)
    _array(_get(line, "what_if.lengths"), "what_if.lengths", shape, _counts)


def _cost(line: Line, header: Line) -> None:
    _count(_get(line, "batch_size"), "batch_size")
    shape = [len(_items(_get(line, name), name, _count)) for name in ("contexts", "counts")]
    for name in ("head", "rest", "passes"):
        _array(_get(line, name), name, shape)
    for name in ("attention", "mlp"):
        _array(_get(line, name), name, [*shape, header["model"]["num_layers"]])


def _array(
    value: Any, name: str, shape: Sequence[int], check: Callable[[Any, str], Any] = _number
) -> None:
    if not shape:
        check(value, name)
        return
    _items(value, name, lambda item, at: _array(item, at, shape[1:], check), shape[0])


def _counts(value: Any, name: str) -> None:
    _items(value, name, _count)


_CHECKS: dict[str, Callable[[Line, Line], None]] = {
    "record": _record,
    "trace": _trace,
    "cost": _cost,
}


# ---------------------------------------------------------------------------------------------
# Writing.


class RunWriter:
    """Appends to a run file line by line, so that a killed run keeps what it measured.

    Args:
        path: the file; with its folder it is made where there is none.
        header: the header of the run as it is now.
        found: what `read_unfinished` found there. Its header stays; the cut-off line goes.

    Raises:
        ValueError: the file's settings are not those of `header`; names what differs.
    """

    def __init__(self, path: str | os.PathLike[str], header: Line, found: Run | None) -> None:
        self.path = Path(path)
        if found is not None:
            differing = _differences(found.header, json.loads(_dumps(header)))
            if differing:
                raise ValueError(
                    f"{path} holds records of other settings: {differing[0]}"
                    + (f", and {len(differing) - 1} more" if len(differing) > 1 else "")
                    + "; give another --output, or the same settings to go on with it"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb" if found is None else "r+b")
        if found is None:
            self.write(header)
        else:
            self._file.truncate(found.whole_bytes)
            self._file.seek(0, os.SEEK_END)

    def write(self, line: Line) -> None:
        """Append a line; it is in the file when this returns."""
        self._file.write(_dumps(line).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _dumps(line: Line) -> str:
    return json.dumps(line, allow_nan=False)


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Where two headers differ, in words, without what may."""
    if name in _MAY_DIFFER or there == here:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        found = []
        for key in [*there, *(key for key in here if key not in there)]:
            path = f"{name}.{key}" if name else key
            found += _differences(there.get(key), here.get(key), path)
        return found
    return [f"{name} is {shown(there)} there and {shown(here)} here"]


def redacted(text: str) -> str:
    """The text with the passwords of its URLs and their queries blotted out."""
    text = re.sub(r"(\w+://[^\s/:@]*):[^\s]*@", r"\1:***@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:passw|pwd|secret|token)[^=&\s]*)=[^&\s]+", r"\1=***", text)
