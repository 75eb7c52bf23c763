"""The hash that tells checkpoints apart."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 32  # numbers of every tensor


def fingerprint(model: Any) -> str:
    """The `model_hash` of a checkpoint, whatever folder it lies in: "weights-" and 16 digits.

    It covers every parameter's name and shape and some of its numbers, rounded to bfloat16 so that
    a bfloat16 checkpoint has the same hash in every dtype. Adapted, merged and quantised models
    have hashes of their own. Where weights are offloaded it covers names and shapes only, and
    begins with "shapes-"; hashes of different kinds cannot be compared.
    """
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters())
    seen = not any(tensor.is_meta for _, tensor in tensors)
    digest = hashlib.sha256(str(model.config.model_type).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
    if seen:
        samples = [_sample(tensor) for _, tensor in tensors]
        for device in dict.fromkeys(each.device for each in samples):  # one transfer for each
            there = torch.cat([each for each in samples if each.device == device])
            digest.update(there.cpu().view(torch.uint8).numpy().tobytes())
    return f"{'weights' if seen else 'shapes'}-{digest.hexdigest()[:16]}"


def _sample(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, evenly spread, as bfloat16; none of a tensor subclass."""
    if type(tensor.data) is not Tensor:
        return torch.empty(0, dtype=torch.bfloat16)
    flat = tensor.detach().flatten()  # (N,)
    count = min(_SAMPLES, len(flat))
    places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(1, count - 1)
    return flat[places].bfloat16()
