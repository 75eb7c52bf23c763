"""Early exits of a model in training and in evaluation, as for the shipped models.

Exit E = 1..L means the hidden state after E layers, read through the shared final norm and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.training.loop import windows_of
from layerskip.training.losses import overlap


def exit_states(model: Any, input_ids: Tensor, exits: Sequence[int]) -> dict[int, Tensor]:
    """Exit -> hidden states (B, T, D) behind the final norm, by one pass over ids (B, T)."""
    out = model.model(input_ids, output_hidden_states=True, use_cache=False)
    last = len(out.hidden_states) - 1  # which the library has normed
    return {
        e: out.last_hidden_state if e == last else model.model.norm(out.hidden_states[e])
        for e in exits
    }


def exit_logits(model: Any, states: Tensor) -> Tensor:
    """Float32 logits (..., V) of normed states (..., D): the head and the final softcap."""
    logits: Tensor = model.lm_head(states).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits (B, T, V) at labels (B, T)."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@torch.no_grad()
def exit_quality(
    model: Any, windows: Tensor, temperatures: Sequence[float] = (1.0, 0.8)
) -> list[dict[str, float]]:
    """The quality of each exit 1..L on `windows` (N, T + 1) of token ids, one dict per exit.

    `loss` in nats per token; `agreement`, the share of positions whose most likely token is the
    final layer's; `overlap@t`, the mean of 1 - TV between the exit's and the final distribution at
    temperature t, which is the acceptance of one draft token. The final layer has 1 for both.
    """
    exits = range(1, len(model.model.layers) + 1)
    rows: list[dict[str, float]] = [{} for _ in exits]
    for window in windows:
        states = exit_states(model, window[None, :-1], exits)
        final = exit_logits(model, states[len(exits)])  # (1, T, V)
        for exit_layer, row in zip(exits, rows, strict=True):
            logits = exit_logits(model, states[exit_layer])
            values = {
                "loss": label_loss(logits, window[None, 1:]),
                "agreement": (logits.argmax(-1) == final.argmax(-1)).float().mean(),
            }
            for t in temperatures:
                values[f"overlap@{t:g}"] = overlap(logits, final, t)
            for name, value in values.items():
                row[name] = row.get(name, 0.0) + value.item() / len(windows)
    return rows


def batch_at(tokens: Tensor, step: int, batch_size: int, length: int) -> Tensor:
    """Step `step`'s batch (B, T + 1) of windows of `tokens` (N,): each epoch in its own order.

    Windows start at multiples of T and overlap by the one token that is the last label.
    """
    windows = (len(tokens) - 1) // length
    if windows < batch_size:
        raise ValueError(
            f"{len(tokens)} tokens hold {windows} windows of {length}, fewer than one batch of "
            f"{batch_size}; shorten the windows or the batch"
        )
    starts = torch.tensor(windows_of(windows, batch_size, step, 0)) * length  # (B,)
    return tokens[starts[:, None] + torch.arange(length + 1)]
