"""Hashes that identify checkpoints, and detect changed weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from layerskip.weights.stored import Stored

_SAMPLES = 32  # numbers of every tensor
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def fingerprint(model: Any) -> str:
    """The `model_hash` of a checkpoint, independent of its folder: "weights-" and 16 digits.

    It covers every parameter's name and shape and some of its numbers, rounded to bfloat16 so that
    a bfloat16 checkpoint has the same hash in every dtype. Adapted, merged and quantised models
    have different hashes. With offloaded weights it covers names and shapes only, and begins with
    "shapes-"; hashes of different kinds cannot be compared.
    """
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters())
    seen = not any(tensor.is_meta for _, tensor in tensors)
    digest = hashlib.sha256(str(model.config.model_type).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
    if seen:
        samples = [_sample(tensor) for _, tensor in tensors]
        for device in dict.fromkeys(each.device for each in samples):  # one transfer per device
            there = torch.cat([each for each in samples if each.device == device])
            digest.update(there.cpu().view(torch.uint8).numpy().tobytes())
    return f"{'weights' if seen else 'shapes'}-{digest.hexdigest()[:16]}"


def checksum(model: Any) -> bytes:
    """A hash that changes with any number in a model's weights and buffers, however it was edited.

    It reads all of them twice at the speed of memory, which takes about as long as two steps of
    decoding. It misses only numbers that change places within a row, and weights that are offloaded
    or not plain tensors (see `fingerprint`).
    """
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is not Tensor or tensor.is_meta or not tensor.numel():
            continue
        rows = tensor.detach().contiguous().flatten(1) if tensor.dim() > 1 else tensor.detach()
        words = rows.reshape(len(rows) if rows.dim() > 1 else 1, -1)  # (R, C)
        nbytes = words.shape[1] * words.element_size()
        whole = next(dtype for dtype in _WORDS if nbytes % dtype.itemsize == 0)
        # The sum as integers reveals the smallest edit, the other sum a change of all signs.
        for sums in (words.view(whole).sum(1), words.sum(1)):  # (R,)
            digest.update(sums.cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _sample(tensor: Tensor) -> Tensor:
    """Some evenly spaced numbers of a tensor as bfloat16, in a plain tensor."""
    if not isinstance(tensor, Stored) and type(tensor.data) is not Tensor:
        return torch.empty(0, dtype=torch.bfloat16)
    size = tensor.numel()
    count = min(_SAMPLES, size)
    places = torch.arange(count, device=tensor.device) * (size - 1) // max(1, count - 1)
    if isinstance(tensor, Stored):
        columns = tensor.shape[1]
        some: Any = tensor.detach()[places // columns]  # (count, columns), stored
        rows: Tensor = some.unpacked()
        return rows[torch.arange(count), places % columns].bfloat16()
    return tensor.detach().flatten()[places].bfloat16()
