"""Knows the file of a layer search: what it holds, reading, checking; no study, no torch.

A search file is one JSON document of kind "search". Speedups are over plain decoding, times in
seconds, costs in target steps; the ends of intervals are those of 95%. Readers ignore keys they do
not know; what they need and miss is an error that names the file and the key.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

SCHEMA = 1

Check = Callable[[Any, str], None]


def holds_search(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a search's, whole or cut off; False where it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    if re.match(rb'\s*\{\s*"kind"\s*:\s*"search"', data):
        return True
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("kind") == "search"


def read_search(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a search file.

    Raises:
        ValueError: the file cannot be read or is cut off, is of another kind or schema, lacks a
            key, or holds what must not be there; names the file and the key, in one line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read search {path}: {error.strerror}") from error
    try:
        document = json.loads(data, parse_constant=_no_constant)
        _object(_SEARCH)(document, "")
        _check_names(document)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"search {path} is cut off or not JSON: {error}; run the search again with the same "
            "--output, which writes it anew"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"search {path} is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"search {path}: {error}") from error
    found: dict[str, Any] = document
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"numbers must be finite, got {name}")


# ---------------------------------------------------------------------------------------------
# Checks: each is told a value and its name, and raises a ValueError that says both.


def _text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")


def _flag(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")


def _any_object(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}")


@dataclass(frozen=True)
class _Whole:
    """An integer from `low`."""

    low: int = 0

    def __call__(self, value: Any, name: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low:
            raise ValueError(f"{name} must be an integer, {self.low} or more, got {shown(value)}")


@dataclass(frozen=True)
class _Number:
    """A finite number; between `low` and `high`, and with `above` not `low` itself."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __call__(self, value: Any, name: str) -> None:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not _finite(value):
            raise ValueError(f"{name} must be a finite number, got {shown(value)}")
        if not self.low <= value <= self.high or (self.above and value == self.low):
            allowed = f"{'above' if self.above else 'at least'} {self.low:g}"
            if self.high < math.inf:
                allowed += f" and at most {self.high:g}"
            raise ValueError(f"{name} must be {allowed}, got {value}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _or_null(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


def _list(check: Check, least: int = 0) -> Check:
    def each(value: Any, name: str) -> None:
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {shown(value)}")
        if len(value) < least:
            raise ValueError(f"{name} must have at least {least} items, got {len(value)}")
        for index, item in enumerate(value):
            check(item, f"{name}[{index}]")

    return each


def _named(check: Check) -> Check:
    """An object of any keys with values of one kind."""

    def each(value: Any, name: str) -> None:
        _any_object(value, name)
        for key, item in value.items():
            check(item, f"{name}.{shown(key)}")

    return each


def _object(checks: Mapping[str, Check]) -> Check:
    """An object with these keys and perhaps others."""

    def each(value: Any, name: str) -> None:
        _any_object(value, name or "a search")
        for key, check in checks.items():
            where = f"{name}.{key}" if name else key
            if key not in value:
                raise ValueError(f"{where} is missing")
            check(value[key], where)

    return each


def _kind(value: Any, name: str) -> None:
    if value != "search":
        raise ValueError(f"{name} must be 'search', got {shown(value)}")


def _schema(value: Any, name: str) -> None:
    if isinstance(value, bool) or value != SCHEMA:
        raise ValueError(f"{name} must be {SCHEMA}, got {shown(value)}, of another version")


def _trial(value: Any, name: str) -> None:
    """A complete trial says all; one that failed may know no more than its number."""
    _object({"number": _Whole(), "state": _text})(value, name)
    if value["state"] not in ("complete", "failed"):
        raise ValueError(f"{name}.state must be complete or failed, got {shown(value['state'])}")
    if value["state"] == "complete":
        _object(_TRIAL)(value, name)
    elif value.get("origin") is not None:
        _text(value["origin"], f"{name}.origin")


def _importance(value: Any, name: str) -> None:
    _named(_SECONDS)(value, name)
    for key in value:
        if not re.fullmatch(r"exit|(attention|mlp|layer)\.[0-9]{1,9}", key):
            raise ValueError(
                f"{name} must name attention.i, mlp.i, layer.i or exit, got {shown(key)}"
            )


_COUNT, _POSITIVE, _SECONDS = _Whole(), _Number(0, above=True), _Number(0)
_SHARE = _Number(0, 1)
_SKIPPED = _object({"attention": _list(_COUNT), "mlp": _list(_COUNT)})
_DECODING: Mapping[str, Check] = {
    "controller": _text,
    "max_draft_length": _or_null(_COUNT),
    "threshold": _or_null(_SHARE),
}
_TRIAL: Mapping[str, Check] = {
    "origin": _text,
    "skipped": _SKIPPED,
    "value": _POSITIVE,
    "guide": _or_null(_POSITIVE),
    "speedup": _POSITIVE,
    "forced_speedup": _or_null(_POSITIVE),
    "acceptance": _or_null(_SHARE),
    "draft_cost": _POSITIVE,
    **{key: _or_null(check) for key, check in _DECODING.items()},
    "seconds": _or_null(_SECONDS),
    "copy_of": _or_null(_COUNT),
}
_CONFIRMED = _object(
    {
        "speedup": _POSITIVE,
        "low": _or_null(_POSITIVE),
        "high": _or_null(_POSITIVE),
        "tokens_per_second": _POSITIVE,
        "prompts": _Whole(1),
        "repeats": _Whole(1),
        "acceptance_rate": _or_null(_SHARE),
        **dict.fromkeys(("compared", "equal", "near_ties", "faults"), _COUNT),
    }
)
_FINALIST = _object(
    {
        "name": _text,
        "trial": _COUNT,
        "skipped": _SKIPPED,
        "decoding": _object(_DECODING),
        "alpha": _or_null(_SHARE),
        "draft_cost": _POSITIVE,
        "verify": _list(_POSITIVE, least=1),
        "predicted": _POSITIVE,
        "predicted_held_out": _or_null(_POSITIVE),
        "confirmed": _or_null(_CONFIRMED),
    }
)
_ENVIRONMENT = _object(
    {
        "layerskip": _text,
        "packages": _named(_or_null(_text)),
        "cpu": _object({"model": _or_null(_text)}),
        "devices": _list(_object({"name": _text})),
        "git": _or_null(_object({"revision": _text, "dirty": _flag})),
    }
)
_LAW = _object(
    {
        "do_sample": _flag,
        **dict.fromkeys(("temperature", "top_p", "top_k"), _or_null(_Number())),
        "acceptance": _or_null(_text),
    }
)
_SEARCH: Mapping[str, Check] = {
    "kind": _kind,
    "schema": _schema,
    "created": _text,
    "argv": _list(_text),
    "environment": _ENVIRONMENT,
    "model": _object(
        {
            **dict.fromkeys(("name", "hash", "architecture"), _text),
            "num_layers": _Whole(1),
            "parameters": _COUNT,
        }
    ),
    **dict.fromkeys(("device", "dtype", "execution"), _text),
    "threads": _or_null(_COUNT),
    "law": _LAW,
    "max_new_tokens": _COUNT,
    "prompts": _object(
        {
            "name": _text,
            "sha256": _text,
            "count": _COUNT,
            "categories": _named(_COUNT),
            "traced": _list(_text),
            "held_out": _list(_text),
        }
    ),
    "space": _object(
        {
            "kind": _text,
            "num_layers": _Whole(1),
            "allow_ends": _flag,
            "budget": _or_null(_COUNT),
            "switches": _COUNT,
            "size": _COUNT,
        }
    ),
    "study": _object({"name": _text, "storage": _or_null(_text)}),
    "trace": _object(dict.fromkeys(("texts", "starts", "draft_length"), _COUNT)),
    "cost": _any_object,
    "step_seconds": _POSITIVE,
    "bound": _POSITIVE,
    "trials": _list(_trial),
    "importance": _or_null(_importance),
    "finalists": _list(_FINALIST),
    "plain": _object(
        {
            "predicted_tokens_per_second": _POSITIVE,
            "confirmed_tokens_per_second": _or_null(_POSITIVE),
        }
    ),
    "best_exit": _or_null(_text),
    "winner": _or_null(_text),
    "seconds": _object(
        {**dict.fromkeys(("trace", "cost", "trials"), _SECONDS), "confirm": _or_null(_SECONDS)}
    ),
}


def _check_names(document: Mapping[str, Any]) -> None:
    """What the parts of a search say of each other."""
    layers = document["model"]["num_layers"]
    if document["space"]["num_layers"] != layers:
        raise ValueError(
            f"space.num_layers must be model.num_layers, {layers}, got "
            f"{document['space']['num_layers']}"
        )
    for switch in document["importance"] or {}:
        if int(switch.partition(".")[2] or 0) >= layers:
            raise ValueError(f"importance must name layers in 0..{layers - 1}, got {switch}")
    complete = [trial["state"] == "complete" for trial in document["trials"]]
    for group, known in (("trials", complete), ("finalists", [True] * len(document["finalists"]))):
        for index in (index for index, whole in enumerate(known) if whole):
            for kind in ("attention", "mlp"):
                skipped = document[group][index]["skipped"][kind]
                if max(skipped, default=0) >= layers:
                    raise ValueError(
                        f"{group}[{index}].skipped.{kind} must hold layers in 0..{layers - 1}, "
                        f"got {max(skipped)}"
                    )
    numbers = {t["number"] for t, whole in zip(document["trials"], complete, strict=True) if whole}
    if len({trial["number"] for trial in document["trials"]}) < len(document["trials"]):
        raise ValueError("trials must have different numbers")
    names = [finalist["name"] for finalist in document["finalists"]]
    if len(set(names)) < len(names):
        raise ValueError(f"finalists must have different names, got {shown(names)}")
    for index, finalist in enumerate(document["finalists"]):
        if finalist["trial"] not in numbers:
            raise ValueError(
                f"finalists[{index}].trial must be a complete trial's number, got "
                f"{finalist['trial']}"
            )
    for key in ("best_exit", "winner"):
        if document[key] is not None and document[key] not in names:
            raise ValueError(f"{key} must be a finalist's name or null, got {document[key]!r}")
