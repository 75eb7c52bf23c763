"""What early exits are worth: one recorded decoding, replayed with every exit and draft length.

No clock is read here: prices come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from layerskip.config import SkipConfig
from layerskip.decoding.laws import Law
from layerskip.model.opening import opened_of
from layerskip.replay.drafts import replay
from layerskip.replay.simulation import count_rounds
from layerskip.replay.trace import Trace, take_trace
from layerskip.requests import end_tokens, warpers

Progress = Callable[[str, float], None]


def law_of(settings: Mapping[str, Any]) -> Law:
    """The law of a record's `law` block, for one row: temperature, top-k, top-p, in that order."""
    if not settings["do_sample"]:
        return Law(do_sample=False, rows=1)
    chosen = (settings.get(name) for name in ("temperature", "top_k", "top_p"))
    return Law(warpers(*chosen), do_sample=True, rows=1)


def exit_sweep(
    model: Any,
    prompts: Sequence[torch.Tensor],
    exits: Sequence[int],
    draft_lengths: Sequence[int],
    *,
    law: Mapping[str, Any],
    max_new_tokens: int = 64,
    progress: Progress = lambda _what, _share: None,
) -> dict[str, Any]:
    """Exact counts of decoding texts with every early exit and fixed draft length.

    Args:
        model: a causal language model, or one opened as `Sublayers`.
        prompts: token ids without pads, (T,) or (1, T) each.
        law: the record's `law` block: do_sample, temperature, top_p, top_k, seed, acceptance; text
            i is drawn from seed + i.

    Returns:
        `tokens` of all texts after their first ones, which every cell emits; `draft_lengths`; and
        `exits`, each with its layer (`exit`), `agreement` and `match`, and `rounds`: by draft
        length the number of rounds that drafted 0, 1, 2, ... tokens.
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
    shares, entries = agreement(trace), []
    for number, layer in enumerate(exits):
        progress("replaying exits", number / len(exits))
        replayed = replay(trace, SkipConfig.early_exit(layer), max(draft_lengths))
        rounds = [count_rounds(replayed, length) for length in draft_lengths]
        entries.append({"exit": layer, **shares[layer], "rounds": rounds})
    return {"tokens": trace.starts, "draft_lengths": list(draft_lengths), "exits": entries}


def agreement(trace: Trace) -> dict[int, dict[str, float]]:
    """By exit 1..L-1, over all starts: agreement of the likeliest tokens, and match.

    Match is with the text, under the trace's law and accept rule: when greedy, agreement.
    """
    following = torch.cat([text.following[: text.starts] for text in trace.texts])  # (N,)
    drafted, _, *_, likeliest = (
        torch.cat([t[:, : text.starts] for t, text in zip(table, trace.texts, strict=True)], dim=1)
        for table in zip(*trace.exits, strict=True)  # by kind, then by text
    )  # (L, N) each
    matches = drafted == following  # (L, N)
    agrees = likeliest == likeliest[-1] if trace.law.do_sample else matches  # (L, N)
    names = ("agreement", "match")
    rates = zip(*(each.double().mean(1).tolist() for each in (agrees, matches)), strict=True)
    return {
        layer: dict(zip(names, rate, strict=True))
        for layer, rate in zip(range(1, trace.model.num_layers), rates, strict=False)
    }
