"""The file of a comparison of drafts: what it must hold, reading and writing it.

One JSON document of kind "drafts": the setting, as in the header of a run, and `rows`, a draft or a
mixture of them each. `acceptance` is by law ("greedy", or the temperature) and depth: the share of
all places of held-out texts whose first 1, 2, ... drafted tokens are accepted. `timed` is by law,
too; costs are in target steps. What is not measured yet is missing.
"""

from __future__ import annotations

import json
import os
from reprlib import repr as shown
from typing import Any

from layerskip.files.documents import kind_of, read
from layerskip.files.schema import (
    COUNT,
    NUMBER,
    POSITIVE,
    SECONDS,
    SHARE,
    Maybe,
    flag,
    has,
    integer,
    items,
    mapping,
    model_facts,
    named,
    optional,
    text,
    version,
    word,
)
from layerskip.files.writing import write_text

KIND, SCHEMA = "drafts", 1

_TIMED = has(
    speedup=POSITIVE,
    low=optional(NUMBER),
    high=optional(NUMBER),
    tokens_per_second=POSITIVE,
    **dict.fromkeys(("compared", "equal", "near_ties", "faults"), COUNT),
)
_ROW = has(
    name=text,
    kind=text,
    drafts=items(text, least=1),
    **dict.fromkeys(("bytes", "parameters"), COUNT),
    acceptance=Maybe(named(items(SHARE, least=1))),
    trained=Maybe(flag),
    tokens=Maybe(COUNT),
    minutes=Maybe(SECONDS),
    loss=Maybe(text),
    seed=Maybe(integer(-(1 << 63))),
    offered=Maybe(named(SHARE)),
    costs=Maybe(has(draft=SECONDS, verify=items(POSITIVE, least=1))),
    predicted=Maybe(named(POSITIVE)),
    timed=Maybe(named(_TIMED)),
)
_COMPARISON = has(
    kind=word(KIND),
    schema=version(SCHEMA),
    created=text,
    model=model_facts,
    **dict.fromkeys(("device", "dtype"), text),
    threads=optional(COUNT),
    law=has(do_sample=flag, temperature=POSITIVE),
    max_new_tokens=COUNT,
    prompts=has(name=text, sha256=text, count=COUNT),
    environment=mapping,
    rows=items(_ROW),
)


def holds_comparison(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a comparison of drafts, whole or cut off; False where it is unreadable."""
    return kind_of(path) == KIND


def read_comparison(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a comparison.

    Raises:
        ValueError: the file cannot be read, or is not what it must be; names the file and the key.
    """
    return read(path, "comparison", _check)


def write_comparison(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a comparison, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
        TypeError, ValueError: something in it is not as it must be.
    """
    _check(document)
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _check(document: dict[str, Any]) -> None:
    _COMPARISON(document, "")
    names = [row["name"] for row in document["rows"]]
    if len(set(names)) < len(names):
        raise ValueError(f"rows must have different names, got {shown(names)}")
