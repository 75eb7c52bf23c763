"""Several processes that train one draft together.

`torchrun` or `accelerate launch` starts them and sets environment variables with their number. Each
has the whole model and takes the same steps with its own rows of the batch. Gradients are averaged,
so that all have the same weights. Only the first process makes texts, writes files and judges. A
single process counts as the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

_PATIENCE = timedelta(days=7)  # time that others wait while the first makes texts


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that were started together, if there are several."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield
        return
    if not dist.is_available():
        raise ValueError("this build of torch does not support several processes; start one")
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
    """The number of processes."""
    return dist.get_world_size() if _started() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if _started() else 0


def is_first() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def on_first(make: Callable[[], object]) -> None:
    """Let the first process do something, while the others wait."""
    if is_first():
        make()
    if count() > 1:
        dist.barrier()


def from_first(value: float, device: torch.device) -> float:
    """The first process's value."""
    if count() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64).to(device)
    dist.broadcast(shared, 0)
    return float(shared.item())


def average(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes; without gradients if there are several."""
    if count() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / count()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their mean over all processes."""
    found = [each.grad for each in parameters if each.grad is not None]
    if count() > 1 and found:
        vector_to_parameters(average(parameters_to_vector(found)), found)
