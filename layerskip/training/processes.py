"""Several processes that train one draft together.

Started by `torchrun` or `accelerate launch`, which say by environment variables how many there are.
Every one of them has the whole model and goes through the same steps, each with some rows of a
step's batch; gradients are averaged, so that all have the same weights. The first one alone makes
texts and features, writes and judges. One process by itself is the first of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PATIENCE = timedelta(days=7)  # of the others, while the first one makes texts and features


@contextmanager
def process_group() -> Iterator[None]:
    """Be one of the processes that were started together, if there are several."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield
        return
    if not dist.is_available():
        raise ValueError("this build of torch knows no other processes; start one")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(timeout=_PATIENCE)  # gloo on a CPU, nccl on GPUs
    try:
        yield
    finally:
        dist.destroy_process_group()


def _started() -> bool:
    return dist.is_available() and dist.is_initialized()  # some builds of torch lack it


def count() -> int:
    """How many there are."""
    return dist.get_world_size() if _started() else 1


def rank() -> int:
    """Which of them this is, from 0 on."""
    return dist.get_rank() if _started() else 0


def first() -> bool:
    """Whether this is the one that writes."""
    return rank() == 0


def wait() -> None:
    """Go on when all others are here, too."""
    if count() > 1:
        dist.barrier()


def agreed(value: float, device: torch.device) -> float:
    """What the first one says."""
    if count() == 1:
        return value
    told = torch.tensor([value], dtype=torch.float64).to(device)
    dist.broadcast(told, 0)
    return float(told.item())


def average(value: Tensor) -> Tensor:
    """The mean of a tensor over all of them, without gradients where there are several."""
    if count() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / count()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let all have the mean of their gradients."""
    found = [each.grad for each in parameters if each.grad is not None]
    if count() == 1 or not found:
        return
    flat = average(torch.cat([gradient.flatten() for gradient in found]))
    for gradient, part in zip(found, flat.split([each.numel() for each in found]), strict=True):
        gradient.copy_(part.view_as(gradient))
