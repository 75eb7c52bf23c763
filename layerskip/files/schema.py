"""Parses JSON, and checks its values by name; used for the formats of all files.

A check takes a value and its name, and returns the value. It raises a TypeError for a wrong kind
and a ValueError for a wrong value; both state the name, what is allowed, and what was got.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import index
from reprlib import repr as shown
from typing import Any

Check = Callable[[Any, str], Any]
_MOST = sys.float_info.max  # some integers are larger; NaN is in no relation to it


def parse(data: str | bytes) -> Any:
    """Parse a JSON document: finite numbers, and no key twice in one object.

    Raises:
        ValueError: it is not one; says why in one line. A `json.JSONDecodeError`, which is a
            subclass, if the text is not JSON or is incomplete.
    """
    try:
        return json.loads(data, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg}"
        raise json.JSONDecodeError(reason, error.doc, error.pos) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error


def parse_characters(data: str | bytes) -> Any:
    """Like `parse`, but refuses half of a surrogate pair, which cannot be encoded."""
    document = parse(data)
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"\\u{code:04x} is half of a surrogate pair, no character") from error
    return document


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(repeated)} occurs twice in one object")
    return content


def _no_constant(name: str) -> float:
    raise ValueError(f"numbers must be finite, got {name}")


def anything(value: Any, name: str) -> Any:
    return value


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    return value


def name_text(value: Any, name: str) -> str:
    if not text(value, name).strip():
        raise ValueError(f"{name} must not be empty")
    return str(value)


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {shown(value)}")
    return value


def integer(least: int = 0) -> Check:
    """An integer from `least`; anything with `__index__` is allowed, except bool."""

    def check(value: Any, name: str) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {shown(value)}")
        number = index(value)
        if number < least:
            raise ValueError(f"{name} must be {least} or more, got {number}")
        return number

    return check


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Check:
    """A finite number in `low`..`high`, excluding `low` with `above`."""

    def check(value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
            wrong = ValueError if isinstance(value, float) else TypeError
            raise wrong(f"{name} must be a finite number, got {shown(value)}")
        if not low <= value <= high or (above and value == low):
            allowed = f"in {low:g}..{high:g}" if high < math.inf else f"{low:g} or more"
            raise ValueError(
                f"{name} must be {f'above {low:g}' if above else allowed}, got {value}"
            )
        return value

    return check


def mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a JSON object, got {shown(value)}")
    return value


def instance(kind: type) -> Check:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__}, got {value!r}")
        return value

    return check


def checked(check: Check, default: Any = None, *, flag: Any = None, **how: Any) -> Any:
    """A field of a frozen dataclass whose `__post_init__` calls `check_fields`.

    Args:
        flag: how a command shows it.
        how: further arguments of `dataclasses.field`.
    """
    return field(default=default, metadata={"check": check, "flag": flag}, **how)


def check_fields(value: Any) -> None:
    """Check a dataclass's fields, except None where that is the default, and keep the results."""
    for each in fields(value):
        given, check = getattr(value, each.name), each.metadata.get("check")
        if check is not None and (given is not None or each.default is not None):
            object.__setattr__(value, each.name, check(given, each.name))


def optional(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


@dataclass(frozen=True)
class Maybe:
    """The check of a key that may be missing from its object, or null."""

    check: Check

    def __call__(self, value: Any, name: str) -> Any:
        return None if value is None else self.check(value, name)


def one_of(*allowed: str | int) -> Check:
    def check(value: Any, name: str) -> Any:
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
        return value

    return check


def version(expected: int) -> Check:
    def check(value: Any, name: str) -> int:
        if isinstance(value, bool) or value != expected:
            raise ValueError(
                f"{name} must be {expected}, got {shown(value)}: of another version of layerskip, "
                "or another kind of file; name the right file, or write it again with this version"
            )
        return expected

    return check


def items(check: Check, length: int | None = None, *, least: int = 0) -> Check:
    """A list of values of one kind: exactly `length` if given, otherwise at least `least`."""

    def check_items(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list, got {shown(value)}")
        if length is not None and len(value) != length:
            raise ValueError(f"{name} must have {length} items, got {len(value)}")
        if len(value) < least:
            raise ValueError(f"{name} must have at least {least} items, got {len(value)}")
        return [check(item, f"{name}[{place}]") for place, item in enumerate(value)]

    return check_items


def index_set(values: Any, name: str) -> tuple[int, ...]:
    """Layer indices from 0, sorted and distinct."""
    return tuple(sorted(_distinct(values, name, "layer indices", f"{name} index")))


def token_list(values: Any, name: str) -> tuple[int, ...]:
    """Token ids, at least one, distinct, in their order."""
    tokens = tuple(_distinct(values, name, "token ids", f"a token of {name}"))
    if not tokens:
        raise ValueError(f"{name} must hold 1 token or more, got none; leave it out to use all")
    return tokens


def _distinct(values: Any, name: str, what: str, each: str) -> list[int]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {what}, got {shown(values)}")
    numbers = [integer()(value, each) for value in values]
    if twice := [number for number, times in Counter(numbers).items() if times > 1]:
        raise ValueError(f"{what} of {name} must differ from each other, got {twice[0]} twice")
    return numbers


def named(check: Check) -> Check:
    """An object with any keys and values of one kind."""

    def check_named(value: Any, name: str) -> dict[str, Any]:
        return {
            key: check(item, f"{name}.{shown(key)}") for key, item in mapping(value, name).items()
        }

    return check_named


def has(**checks: Check) -> Check:
    """An object with these keys and possibly others. An empty name of its own is left out.

    Keys whose check is a `Maybe` may be missing.
    """

    def check_keys(value: Any, name: str) -> dict[str, Any]:
        mapping(value, name)
        for key, check in checks.items():
            where = f"{name}.{key}" if name else key
            if key in value:
                check(value[key], where)
            elif not isinstance(check, Maybe):
                raise ValueError(f"{where} is missing")
        checked: dict[str, Any] = value
        return checked

    return check_keys


def layer_sets(value: Any, name: str) -> None:
    """Layers whose attention, and those whose MLP, a draft skips."""
    has(**dict.fromkeys(("attention", "mlp"), items(COUNT)))(value, name)


def low_sets(value: Any, name: str) -> None:
    """The parts of a draft in low precision, in a file: explicit sets."""
    layer_sets(value, name)
    has(bits=integer(1), head=head_bits)(value, name)


def head_bits(value: Any, name: str) -> bool | int:
    """Whether a draft's head is rounded like the rest, or to how many bits."""
    return value if value in (8, 4) and not isinstance(value, bool) else flag(value, name)


COUNT, POSITIVE, SECONDS, NUMBER = integer(), number(0, above=True), number(0), number()
SHARE = number(0, 1)
COSTS = dict[str, Check](draft=POSITIVE, verify=items(POSITIVE, least=1))
"""Of a cost table: c, and v from one token on."""
cost_table = has(**COSTS | {"draft": SECONDS}, source=text)
"""A cost table that was measured; c is 0 if tokens are looked up."""
environment = has(
    layerskip=text,
    packages=named(optional(text)),
    cpu=has(model=optional(text)),
    devices=items(has(name=text)),
    git=optional(has(revision=text, dirty=flag)),
)
"""What `layerskip.files.environment` says about a machine, as far as reports read it."""
