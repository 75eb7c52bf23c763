"""A whole search of a live model in one call; its steps are known elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from layerskip.bench.methods import Task
from layerskip.config import SkipConfig
from layerskip.model.sublayers import Sublayers
from layerskip.replay.trace import DRAFT_LENGTH
from layerskip.search.finding import FINALISTS, REPEATS, Progress, Search, SearchResult
from layerskip.search.space import Space

Asked = Literal["auto", 8, 4] | None


def low_bits(
    asked: Asked, model: Any, execution: str, cost: Mapping[str, Any] | None = None
) -> Literal[8, 4] | None:
    """Of the low precision that a search looks at: as asked, or what is fast, or what has prices.

    Only native passes have products of 8 bits that are faster than exact ones on every machine.
    """
    if asked != "auto":
        return asked
    if cost is not None:
        return cost.get("low_bits")
    return 8 if Sublayers(model, execution).execution == "native" else None


def space_for(
    model: Any,
    execution: str,
    given: Mapping[str, SkipConfig],
    *,
    kind: str,
    bits: Asked = "auto",
    allow_ends: bool = False,
    budget: int | None = None,
    cost: Mapping[str, Any] | None = None,
) -> Space:
    """The space to search, in the precision of the given config that is healed, if one is.

    Raises:
        ValueError: another precision was asked for, or two given configs are healed by different
            weights.
    """
    own = [(n, skip) for n, skip in given.items() if skip.trained and not skip.trained.module]
    for name, skip in own[1:]:
        if skip.trained != own[0][1].trained:
            raise ValueError(
                f"skip configs {own[0][0]} and {name} are healed by different weights; give one of "
                "them, to search around it"
            )
    head: Literal[8, 4] | None = None
    if own:
        name, around = own[0]
        assert around.low is not None
        if bits not in ("auto", around.low.bits):
            raise ValueError(
                f"skip config {name} is healed in {around.low.bits} bits, and {bits or 'no'} bits "
                "were asked for; leave them out"
            )
        bits = around.low.bits
        head = None if isinstance(around.low.head, bool) else around.low.head
    return Space(
        kind=kind,
        num_layers=model.config.num_hidden_layers,
        allow_ends=allow_ends,
        budget=budget,
        bits=low_bits(bits, model, execution, cost),
        head=head,
        trained=own[0][1].trained if own else None,
    )


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Asked = "auto",
    allow_ends: bool = False,
    budget: int | None = None,
    trials: int | None = None,
    timeout: float | None = None,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    acceptance: str = "coupled",
    seed: int = 0,
    execution: str = "auto",
    draft_length: int = DRAFT_LENGTH,
    seeds: Mapping[str, SkipConfig] | None = None,
    cost: Mapping[str, Any] | None = None,
    storage: str | os.PathLike[str] | None = None,
    study_name: str = "layerskip",
    finalists: int = FINALISTS,
    repeats: int = REPEATS,
    progress: Progress = lambda _what, _share: None,
) -> SearchResult:
    """Search what a draft of a live model should leave out and round; writes no files.

    Args:
        model: a causal language model of a supported family, in evaluation mode.
        prompts: token ids, (T,) or (1, T) each, as `tokenizer(text, return_tensors="pt")` has them
            in `input_ids`. Some dozen that are like what the model will be asked.
        held_out: others, to time the finalists on; without them the prediction decides.
        space, allow_ends, budget: where to look; see `layerskip.search.space.Space`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 where products in 8 bits are
            fast (execution "native"), or what a given `cost` knows.
        trials: evaluations in all; by default so many as the space deserves.
        timeout: seconds after which no further trial starts.
        max_new_tokens: of each text, at most.
        do_sample, temperature, top_p, top_k, acceptance, seed: how the model will be decoded.
        seeds: configs of your own to try first, by name. Where one is healed, the search is around
            it: all that is low is healed by its weights. Those of other trained modules cannot be
            varied, and are timed beside what is found.
        cost: what `layerskip.timing.sublayers.measure` returned; measured by default.
        storage, study_name: where the trials are kept, and taken up again: a database URL, a
            journal file's path, or None for memory.
        finalists: how many drafts are replayed whole, and timed.
        repeats: timed calls of each of them per prompt.
        progress: told what is being done, in words, and the share of it that is done.

    Raises:
        ValueError: prompts that are none, empty or too long, settings out of range, a storage that
            cannot be opened or holds another search.
    """
    if finalists < 1 or repeats < 1:
        raise ValueError(
            f"finalists and repeats must be 1 or more, got {finalists} and {repeats}; to time "
            "nothing, give no held_out"
        )
    where = space_for(
        model,
        execution,
        seeds or {},
        kind=space,
        bits=bits,
        allow_ends=allow_ends,
        budget=budget,
        cost=cost,
    )
    task = Task(
        max_new_tokens,
        do_sample,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        acceptance=acceptance,
        seed=seed,
        execution=execution,
    )
    going = Search(
        model,
        prompts,
        held_out,
        task=task,
        space=where,
        draft_length=draft_length,
        progress=progress,
    )
    going.open(storage, study_name, seeds)
    going.price(cost)
    going.run(
        trials,
        timeout=timeout,
        told=lambda at: progress(
            f"trials, best {at.best * going.objective.step_seconds:.2f}x", at.finished / at.trials
        ),
    )
    going.choose(finalists)
    if held_out:
        going.confirm(repeats)
    return going.result()
