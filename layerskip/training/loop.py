"""A training loop that survives a kill.

Randomness has no state: batches are functions of a seed and the step. So a run resumed from a
checkpoint equals the uninterrupted run.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from layerskip.files.writing import replace_folder, replacing
from layerskip.training.processes import average, average_gradients, from_first, is_first, on_first
from layerskip.training.stages import Stages

WARM_UP = 20
"""Number of steps up to the full rate."""
SAVE_SECONDS = 60.0
CLIP_NORM = 1.0
StepLoss = Callable[[int, float], Tensor]
"""Computes the loss of a step from its number and the completed share of the training."""


def train(
    stages: Stages, model: nn.Module, step_loss: StepLoss, total_steps: int, judging: float
) -> Iterator[tuple[int, float, float]]:
    """Train a model in a folder, from its checkpoint if there is one.

    Training ends after `total_steps`, or when `judging` seconds are left. In the latter case the
    user is told, after the first step, how many will be possible. The learning rate is the recipe's
    `rate * schedule(step, share)`. Model, optimizer, step and `stages.curve`, to which the caller
    adds between steps, are written to a checkpoint atomically every SAVE_SECONDS and at the end.
    With several processes, each has the loss of its own rows, and the first one writes. If a
    model's weights are sharded (FSDP2), each process writes its own to a folder.

    Yields:
        After each step, the number of steps done, the loss, and the share of the training done.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
        OSError: the checkpoint cannot be written.
        ValueError: an existing checkpoint cannot be read.
    """
    rate, log, recipe = stages.recipe.rate, stages.curve, stages.recipe
    a_step = recipe.rows * recipe.window
    assert rate is not None  # a None was replaced by the kind's own
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    step, before, total_seconds = 0, stages.seconds["training"], stages.budget(judging)
    shards = any(isinstance(each, DTensor) for each in model.parameters())
    if stages.checkpoint.exists():
        read = _read_shards if shards else _read_checkpoint
        state = read(model, optimizer, stages.checkpoint)
        step, log[:] = state["step"], state["log"]
    begun, start = step, time.monotonic()
    saved_at = start
    device = next(model.parameters()).device
    share = from_first(max(step / total_steps, before / total_seconds), device)
    while share < 1:
        optimizer.param_groups[0]["lr"] = rate * schedule(step, share)
        loss = step_loss(step, share)
        torch.autograd.backward(loss)
        if not shards:
            average_gradients(model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        found, steepness = average(loss).item(), norm.item()
        if not math.isfinite(found + steepness):
            raise FloatingPointError(
                f"the loss is {found} at step {step}, its gradient {steepness}; lower the rate"
            )
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seconds = before + time.monotonic() - start
        share = from_first(max(step / total_steps, seconds / total_seconds), device)
        if step == begun + 1 and recipe.minutes is not None:
            steps = step + (total_seconds - seconds) / (seconds - before)
            few = " That is few: expect little of it." if steps * a_step < stages.few else ""
            stages.say(
                f"{recipe.minutes:g} minutes suffice for about {steps:,.0f} steps of {a_step:,} "
                f"tokens.{few}"
            )
        yield step, found, share  # before saving, since the caller may log this step
        left = max(0.0, seconds / max(share, 1e-9) * (1 - share))
        stages.progress(
            f"training: {step * a_step:,} tokens, loss {found:.3f}, {left / 60:.0f} min left",
            min(1.0, share),
        )
        late = from_first(float(time.monotonic() - saved_at >= SAVE_SECONDS), device)
        if late or share >= 1:
            facts = {"step": step, "log": log}
            if shards:
                _write_shards(model, optimizer, facts, stages.checkpoint)
            elif is_first():
                _write_checkpoint(model, optimizer, facts, stages.checkpoint)
            saved_at = time.monotonic()


def _write_checkpoint(
    model: nn.Module, optimizer: AdamW, facts: dict[str, Any], path: Path
) -> None:
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with replacing(path) as partial:
        buffer = io.BytesIO()  # so that a full disk raises OSError, not torch's own error
        torch.save(facts | {"model": weights, "optimizer": optimizer.state_dict()}, buffer)
        partial.write_bytes(buffer.getbuffer())


def _read_checkpoint(model: nn.Module, optimizer: AdamW, path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {path} is cut off or changed; remove it to train from the start"
        ) from error
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return state


def _shards_of(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    states = dcp_state.get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1]}


def _write_shards(model: nn.Module, optimizer: AdamW, facts: dict[str, Any], path: Path) -> None:
    """Write each process's own part to a folder, which then replaces the old one."""
    partial = path.with_name(f"{path.name}.new")
    save(_shards_of(model, optimizer) | facts, checkpoint_id=partial)  # all have written it now
    on_first(lambda: replace_folder(partial, path))


def _read_shards(model: nn.Module, optimizer: AdamW, path: Path) -> dict[str, Any]:
    state = _shards_of(model, optimizer) | {"step": 0, "log": []}
    load(state, checkpoint_id=path)
    dcp_state.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state


def schedule(step: int, share: float) -> float:
    """A factor that rises for WARM_UP steps, then falls as a cosine to zero over the budget."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def windows_of(count: int, rows: int, step: int, seed: int) -> list[int]:
    """The numbers of a step's windows; every epoch has its own order."""
    epoch, place = divmod(step, count // rows)
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator)
    return order[place * rows : (place + 1) * rows].tolist()
