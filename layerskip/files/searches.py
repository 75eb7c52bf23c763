"""The file of a layer search: its required contents, and reading it.

Speedups are over plain decoding, times in seconds, costs in target steps, intervals at 95%.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import product
from reprlib import repr as shown
from typing import Any

from layerskip.files import schema
from layerskip.files.documents import read
from layerskip.files.schema import COUNT, POSITIVE, SHARE, Maybe, flag, has, items, optional, text

SCHEMA = 2
GUIDED = ("gp", "tpe", "ours")
"""Origins of trials that a model of the others proposed; earlier versions wrote "ours"."""


def read_search(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a search file.

    Raises:
        ValueError: the file cannot be read, or a key is missing or wrong; names both.
    """
    advice = "; run the search again with the same --output, which writes it again"
    return read(path, "search", _check, advice)


def _trial(value: Any, name: str) -> None:
    """A complete trial has all values; a failed one may have only its number."""
    state = schema.one_of("complete", "failed")
    has(number=COUNT, state=state, low=Maybe(schema.low_sets))(value, name)
    if value["state"] == "complete":
        _TRIAL(value, name)
    else:
        has(origin=Maybe(text))(value, name)


_DECODING: Mapping[str, schema.Check] = {
    "controller": text,
    "max_draft_length": optional(COUNT),
    "threshold": optional(SHARE),
    "adaptive": Maybe(schema.named(SHARE)),
}
_TRIAL = has(
    origin=text,
    skipped=schema.layer_sets,
    draft_vocabulary=optional(COUNT),
    speedup=POSITIVE,
    acceptance=SHARE,
    draft_cost=POSITIVE,
    **dict.fromkeys(("draft_length", "positions"), COUNT),
    seconds=optional(schema.SECONDS),
)
_RATIO: Mapping[str, schema.Check] = {
    "speedup": POSITIVE,
    **dict.fromkeys(("low", "high"), optional(POSITIVE)),
}
_CONFIRMED = has(
    **_RATIO,
    over_default=has(**_RATIO),
    tokens_per_second=POSITIVE,
    prompts=schema.integer(1),
    repeats=schema.integer(1),
    acceptance_rate=optional(SHARE),
    **dict.fromkeys(("compared", "equal", "near_ties", "faults"), COUNT),
)
_FINALIST = has(
    name=text,
    trial=optional(COUNT),
    skipped=schema.layer_sets,
    decoding=has(**_DECODING, lookup=Maybe(flag)),
    low=Maybe(schema.low_sets),
    experts=Maybe(COUNT),
    window=Maybe(COUNT),
    trained=Maybe(text),
    alpha=optional(SHARE),
    draft_cost=POSITIVE,
    verify=items(POSITIVE, least=1),
    predicted=POSITIVE,
    **dict.fromkeys(("predicted_low", "predicted_high"), Maybe(POSITIVE)),
    confirmed=optional(_CONFIRMED),
)
_LAW = has(
    do_sample=flag,
    **dict.fromkeys(("temperature", "top_p", "top_k"), optional(schema.NUMBER)),
    acceptance=optional(text),
)
_SEARCH = has(
    kind=schema.one_of("search"),
    schema=schema.version(SCHEMA),
    created=text,
    argv=items(text),
    environment=schema.environment,
    model=has(
        **dict.fromkeys(("name", "hash", "architecture"), text),
        num_layers=schema.integer(1),
        parameters=COUNT,
    ),
    **dict.fromkeys(("device", "dtype", "execution"), text),
    threads=optional(COUNT),
    law=_LAW,
    max_new_tokens=COUNT,
    prompts=has(
        name=text,
        sha256=text,
        count=COUNT,
        categories=schema.named(COUNT),
        traced=items(text),
        held_out=items(text),
        chat=Maybe(flag),
    ),
    space=has(kind=text, num_layers=schema.integer(1), allow_ends=flag, switches=COUNT, size=COUNT),
    study=has(name=text, storage=optional(text)),
    trace=has(**dict.fromkeys(("texts", "starts", "draft_length"), COUNT)),
    sampler=text,
    influence=items(schema.NUMBER),
    cost=schema.mapping,
    step_seconds=POSITIVE,
    bound=POSITIVE,
    trials=items(_trial),
    finalists=items(_FINALIST),
    plain=has(predicted_tokens_per_second=POSITIVE, confirmed_tokens_per_second=optional(POSITIVE)),
    default=optional(has(speedup=POSITIVE)),
    keep_default=flag,
    best_exit=optional(text),
    winner=optional(text),
    seconds=has(
        **dict.fromkeys(("trace", "cost", "trials"), schema.SECONDS),
        confirm=optional(schema.SECONDS),
    ),
)


def _check(document: dict[str, Any]) -> None:
    """Check every key separately, then the consistency of the parts."""
    _SEARCH(document, "")
    layers = document["model"]["num_layers"]
    trials, finalists = document["trials"], document["finalists"]
    complete = {n: trial for n, trial in enumerate(trials) if trial["state"] == "complete"}
    for group, drafts in (("trials", complete), ("finalists", dict(enumerate(finalists)))):
        for index, each in drafts.items():
            for name, kind in product(("skipped", "low"), ("attention", "mlp")):
                deepest = max((each.get(name) or {}).get(kind, ()), default=0)
                if deepest >= layers:
                    raise ValueError(
                        f"{group}[{index}].{name}.{kind} must hold layers in 0..{layers - 1}, "
                        f"got {deepest}"
                    )
    if len({trial["number"] for trial in trials}) < len(trials):
        raise ValueError("trials must have different numbers")
    names = [finalist["name"] for finalist in finalists]
    if len(set(names)) < len(names):
        raise ValueError(f"finalists must have different names, got {shown(names)}")
    for key in ("best_exit", "winner"):
        if document[key] is not None and document[key] not in names:
            raise ValueError(f"{key} must be a finalist's name or null, got {document[key]!r}")
