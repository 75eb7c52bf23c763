"""The file that a training leaves, `train.json`: what was done and measured; knows no model."""

from __future__ import annotations

from typing import Any

from layerskip.files.schema import (
    COUNT,
    NUMBER,
    POSITIVE,
    SECONDS,
    flag,
    has,
    items,
    mapping,
    name_text,
    named,
    number,
    optional,
    version,
)

SCHEMA = 1
_SHARE = number(0, 1)
_DRAFT = has(
    greedy=items(_SHARE, least=1),
    coupled=items(_SHARE, least=1),
    costs=has(draft=POSITIVE, verify=items(POSITIVE, least=1)),
    formula=POSITIVE,
    bytes=COUNT,
)
_RECORD = has(
    schema=version(SCHEMA),
    recipe=mapping,
    base=name_text,
    tokens=COUNT,
    text_tokens=COUNT,
    covered=_SHARE,
    parameters=COUNT,
    seconds=named(SECONDS),
    curve=items(has(tokens=COUNT, loss=NUMBER, overlap=items(_SHARE, least=1)), least=1),
    held_out=has(prompts=COUNT, new_tokens=COUNT),
    drafts=named(_DRAFT),
    timed=named(
        has(
            speedup=POSITIVE,
            low=optional(NUMBER),
            high=optional(NUMBER),
            tokens_per_second=POSITIVE,
        )
    ),
    pays=flag,
)


def check_record(record: Any) -> None:
    """Raise a TypeError or ValueError that says what is wrong, what is allowed and what came."""
    _RECORD(record, "")
