"""A search from start to end on a live model, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from layerskip.bench.methods import Task
from layerskip.config import SkipConfig
from layerskip.requests import sampling_of
from layerskip.search.finalists import Progress, silent
from layerskip.search.fitting import Bits, space_for, typical_context
from layerskip.search.stages import FINALISTS, REPEATS, Search, SearchResult


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Bits = "auto",
    allow_ends: bool = False,
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
    first: Mapping[str, SkipConfig] | None = None,
    cost: Mapping[str, Any] | None = None,
    storage: str | os.PathLike[str] | None = None,
    study_name: str = "layerskip",
    finalists: int = FINALISTS,
    repeats: int = REPEATS,
    progress: Progress = silent,
) -> SearchResult:
    """Search what a draft of a live model should leave out and round; writes no files.

    Args:
        model: a causal language model of a supported family, in evaluation mode.
        prompts: token ids, (T,) or (1, T) each, as `tokenizer(text, return_tensors="pt")` has them
            in `input_ids`. Some dozen that are like what the model will be asked.
        held_out: others, to time the finalists on; without them the prediction decides.
        space, allow_ends: where to look; see `layerskip.search.space.Space`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 where products in 8 bits are
            fast (execution "native"), or what a given `cost` knows.
        trials: evaluations in all; by default so many as the space deserves.
        timeout: seconds after which trials end.
        do_sample, temperature, top_p, top_k, acceptance, seed: how the model will be decoded.
        first: configs of your own to try first, by name. Where one is healed, the search is around
            it: all that is low is healed by its weights.
        cost: what `layerskip.timing.sublayers.measure` returned; measured by default.
        storage, study_name: where the trials are kept, and taken up again: a database URL, a
            journal file's path, or None for memory.
        finalists: how many drafts are replayed whole, and timed.
        repeats: timed calls of each of them per prompt.
        progress: called with what is being done, in words, and the share of it that is done.

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
        first or {},
        kind=space,
        bits=bits,
        allow_ends=allow_ends,
        cost=cost,
        context=typical_context(prompts, max_new_tokens),
    )
    task = Task(
        max_new_tokens,
        do_sample,
        **(sampling_of(model, temperature, top_k, top_p) if do_sample else {}),
        acceptance=acceptance,
        seed=seed,
        execution=execution,
    )
    steps = Search(model, prompts, held_out, task=task, space=where, progress=progress)
    steps.open(storage, study_name, first)
    steps.price(cost)
    steps.run(
        trials,
        timeout=timeout,
        on_trial=lambda at: progress(f"trials, best {at.best:.2f}x", at.finished / at.trials),
    )
    steps.choose(finalists)
    if held_out:
        steps.confirm(repeats)
    return steps.result()
