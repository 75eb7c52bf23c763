"""The value of early exits: one recorded decoding, replayed with every exit and draft length.

Nothing is timed here; costs come from the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.api.arguments import end_tokens, law_of
from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.model.opened_models import opened_of
from layerskip.replay.replayed_drafts import Replay, replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import Trace, take_trace


def exit_sweep(
    model: Any,
    prompts: Sequence[Tensor],
    exits: Sequence[int],
    draft_lengths: Sequence[int],
    *,
    law: Mapping[str, Any],
    max_new_tokens: int = 64,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
) -> dict[str, Any]:
    """Exact counts for decoding texts with every early exit and fixed draft length.

    Args:
        model: a causal language model, or one opened as `Sublayers`.
        prompts: token ids without pads, (T,) or (1, T) each.
        law: the record's `law` block: do_sample, temperature, top_p, top_k, seed, acceptance; text
            i uses seed + i.

    Returns:
        `tokens` of all texts after their first ones, which every cell emits; `draft_lengths`; and
        `exits`, each with its layer (`exit`), `agreement` of its likeliest tokens with the model's,
        `match` of its drafts with the text (for greedy the same), and `rounds`: by draft length,
        the numbers of rounds that drafted 0, 1, 2, ... tokens.
    """
    opened = opened_of(model)
    seed = law.get("seed") or 0
    trace = take_trace(
        opened,
        prompts,
        max_new_tokens=max_new_tokens,
        law=law_of(law),
        seeds=[seed + number for number in range(len(prompts))],
        eos=end_tokens(opened.model),
        draft_length=max(draft_lengths),
        acceptance=law.get("acceptance") or "coupled",
        progress=progress,
    )
    entries, final = [], likeliest(trace, opened.num_layers)  # (N,)
    for number, layer in enumerate(exits):
        progress("replaying exits", number / len(exits))
        replayed = replay(trace, SkipConfig.early_exit(layer), max(draft_lengths))
        rounds = [rounds_of(replayed, length) for length in draft_lengths]
        match = replayed.survival[0]
        agreement = (likeliest(trace, layer) == final).double().mean().item()
        shares = {"agreement": agreement if trace.law.do_sample else match, "match": match}
        entries.append({"exit": layer, **shares, "rounds": rounds})
    return {"tokens": trace.starts, "draft_lengths": list(draft_lengths), "exits": entries}


def rounds_of(drafts: Replay, length: int) -> list[int]:
    """How many rounds draft 0, 1, ... tokens, with at most `length` and every text alone."""
    texts = range(len(drafts.texts))
    rounds = (simulate(drafts, Fixed(length), [text], max_draft_length=length) for text in texts)
    counts = Counter(each.drafted[0] for of_a_text in rounds for each in of_a_text)
    return [counts[drafted] for drafted in range(length + 1)]


def likeliest(trace: Trace, layer: int) -> Tensor:
    """The likeliest token after every start, from the states after a layer, (N,)."""
    states = torch.cat([text.states[layer - 1, : text.starts] for text in trace.texts])  # (N, H)
    return trace.model.likeliest(states)
