"""The file of a training, `train.json`: its settings and results.

The training is that of a draft for a frozen model, or of a model's early exits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from layerskip.files import schema
from layerskip.files.documents import read
from layerskip.files.schema import COUNT, NUMBER, POSITIVE, SHARE, has, items, name_text, named

SCHEMA = 1
_DRAFT = has(
    greedy=items(SHARE, least=1),
    coupled=items(SHARE, least=1),
    costs=has(**schema.COSTS),
    formula=POSITIVE,
    bytes=COUNT,
)
_TIMED = has(
    speedup=POSITIVE,
    low=schema.optional(NUMBER),
    high=schema.optional(NUMBER),
    tokens_per_second=POSITIVE,
)
_RECORD = has(
    schema=schema.version(SCHEMA),
    recipe=has(
        kind=name_text, loss=name_text, seed=schema.integer(-(1 << 63)), temperature=POSITIVE
    ),
    base=name_text,
    model=schema.Maybe(name_text),
    **dict.fromkeys(("tokens", "text_tokens", "parameters"), COUNT),
    covered=SHARE,
    seconds=named(schema.SECONDS),
    curve=items(has(tokens=COUNT, loss=NUMBER, overlap=items(SHARE, least=1)), least=1),
    held_out=has(prompts=COUNT, new_tokens=COUNT),
    drafts=named(_DRAFT),
    timed=named(_TIMED),
    pays=schema.flag,
)


def read_training(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the file of a training.

    Raises:
        ValueError: the file cannot be read, or a key is missing or wrong; names both.
    """
    return read(path, "training", check_record)


EXITS_SCHEMA = 1
LARGEST_RISE = 0.02
"""Maximum rise of the final layer's loss without a warning, in nats: 2% of perplexity."""
_EXITS = items(
    has(exit=NUMBER, loss=NUMBER, agreement=SHARE, accepted=SHARE, overlap=SHARE), least=2
)
_EXIT_RECORD = has(
    kind=schema.one_of("exits"),
    schema=schema.version(EXITS_SCHEMA),
    recipe=has(exits=items(schema.integer(1), least=1), init=name_text, loss=name_text),
    base=name_text,
    model=schema.Maybe(name_text),
    **dict.fromkeys(("steps", "tokens", "text_tokens"), COUNT),
    seconds=named(schema.SECONDS),
    curve=items(NUMBER),
    before=_EXITS,
    after=_EXITS,
    best=schema.integer(1),
    promised=POSITIVE,
    timed=named(_TIMED),
)


def read_exit_training(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`read_training` for a training of exits."""
    return read(path, "training", check_exit_record)


def rise(record: Mapping[str, Any]) -> float:
    """The rise of the final layer's loss in a training of exits, in nats."""
    return float(record["after"][-1]["loss"] - record["before"][-1]["loss"])


def check_exit_record(record: Any) -> None:
    """`check_record` for a training of exits."""
    _EXIT_RECORD(record, "")
    if len(record["before"]) != len(record["after"]):
        raise ValueError("before and after must have as many exits")


def check_record(record: Any) -> None:
    """Raise a TypeError or ValueError that says what is wrong, what is allowed and what was got."""
    _RECORD(record, "")
    steps = {len(point["overlap"]) for point in record["curve"]}
    if len(steps) > 1:
        raise ValueError(f"curve must have overlaps of equally many steps, got {sorted(steps)}")
    if "trained" not in record["drafts"]:
        raise ValueError(f"drafts must have trained, got {', '.join(record['drafts']) or 'none'}")
