"""A training loop that survives a kill; knows no models, losses or data.

Nothing random has a state: batches are functions of a seed and the step, so that a run resumed from
a checkpoint is the unbroken run.
"""

import io
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.files.writing import replacing
from layerskip.training.processes import agreed, average, average_gradients, first

WARM_UP = 20
"""Steps until the rate is whole."""


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    step_loss: Callable[[int], Tensor],
    total_steps: int,
    *,
    schedule: Callable[[int, float], float],
    checkpoint: Path,
    total_seconds: float = math.inf,
    save_seconds: float = 120.0,
    clip_norm: float = 1.0,
) -> Iterator[tuple[int, float]]:
    """Train from `checkpoint` (or from step 0) to the end; yields (steps done, loss).

    The end comes with `total_steps`, or with `total_seconds` of training, over all starts.
    `step_loss(step)` builds the loss of a step from its number alone; every learning rate is its
    optimizer's own times `schedule(step, share)`, of the budget's share that is used up. Model,
    optimizers and step are written to `checkpoint` every `save_seconds` and at the end, whole or
    not at all.

    Of several processes each has the loss of its own rows, and the first one writes.

    Raises:
        FloatingPointError: the loss is no number.
        OSError: the checkpoint cannot be written.
        ValueError: there is one that cannot be read.
    """
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    step, before = 0, 0.0
    for half in checkpoint.parent.glob(f".{checkpoint.name}.*.tmp") if first() else ():
        half.unlink()  # of a run that was killed while it wrote
    if checkpoint.exists():
        state = read_checkpoint(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, before = state["step"], state.get("seconds", 0.0)
    start = saved_at = time.monotonic()
    device = next(model.parameters()).device
    share = agreed(max(step / total_steps, before / total_seconds), device)
    while share < 1:
        factor = schedule(step, share)
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        loss = step_loss(step)
        found = average(loss).item()
        if not math.isfinite(found):
            raise FloatingPointError(f"the loss is {found} at step {step}; lower the rates")
        torch.autograd.backward(loss)
        average_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        now = time.monotonic()
        share = agreed(max(step / total_steps, (before + now - start) / total_seconds), device)
        if first() and (share >= 1 or now - saved_at >= save_seconds):
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "seconds": before + now - start,
            }
            with replacing(checkpoint) as partial:
                whole = io.BytesIO()  # else a full disk is an error of torch's own
                torch.save(state, whole)
                partial.write_bytes(whole.getbuffer())
            saved_at = now
        yield step, found


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `train` wrote.

    Raises:
        ValueError: the file is cut off or changed.
    """
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {path} is cut off or changed; remove it to train from the start"
        ) from error
    return state


def schedule(step: int, share: float) -> float:
    """Up in WARM_UP steps, then cosine to zero over the budget, whatever it is counted in."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def windows_of(count: int, rows: int, step: int, seed: int) -> list[int]:
    """The windows of a step: each pass over them in an order of its own."""
    epoch, place = divmod(step, count // rows)
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator)
    return order[place * rows : (place + 1) * rows].tolist()
