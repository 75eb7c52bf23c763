"""The frozen target's hidden states of the training texts, stored on disk.

The target runs over the texts once. Its last hidden states are stored in half precision, each
divided by its largest number, since they may exceed its range. The frozen norm and head compute the
law at a place when it is needed. States at a tap are stored as well, if a draft reads them.
Shapes: N windows, B of a batch, T tokens of one, H hidden width, n tokens of a draft's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from layerskip.files.writing import replacing
from layerskip.model.opened_model import OpenedModel

CHUNK = 64
"""Number of windows in a file."""
LAST, TAPPED = "", "tapped."
"""Prefixes of the names of tensors, by kind of states."""


def windows(texts: list[list[int]], length: int) -> Tensor:
    """Concatenate texts, and cut them into windows (N, T); the rest is dropped."""
    stream = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    count = len(stream) // length
    return stream[: count * length].view(count, length)


def nbytes(model: OpenedModel, tokens: int, tap: int | None = None) -> int:
    """Bytes on disk for the features of `tokens` tokens."""
    return tokens * (2 * int(model.config.hidden_size) + 4) * (1 if tap is None else 2)


def run(model: OpenedModel, ids: Tensor, tap: int | None = None) -> dict[str, Tensor]:
    """Hidden states of windows (B, T): the last, before the final norm, and after `tap` sublayers.

    (B, T, H) each.
    """
    hidden, step = model.first_pass(ids.to(model.device))
    found = {}
    if tap is not None:
        hidden = found[TAPPED] = model.run(hidden, step, range(tap))
    found[LAST] = model.run(hidden, step, range(tap or 0, model.num_sublayers))
    return found


@torch.no_grad()
def compute(
    model: OpenedModel,
    ids: Tensor,
    folder: Path,
    *,
    tap: int | None = None,
    rows: int = 4,
    more: Callable[[], bool] = lambda: True,
) -> Iterator[int]:
    """Write the features of windows (N, T) to a folder, file by file; existing files are kept.

    Args:
        tap: as for `run`.
        more: whether to compute another missing file; the first is always computed.

    Yields:
        The number of windows done so far.
    """
    folder.mkdir(exist_ok=True)
    for first in range(0, len(ids), CHUNK):
        some, path = ids[first : first + CHUNK], _path(folder, first)
        if not path.exists():
            if first and not more():
                return
            parts, tensors = [run(model, part, tap) for part in some.split(rows)], {}
            for name in parts[0]:
                states = torch.cat([part[name].float() for part in parts])  # (N, T, H)
                sizes = states.abs().amax(-1, keepdim=True).clamp(min=1e-30)  # (N, T, 1)
                tensors[f"{name}states"] = (states / sizes).half()
                tensors[f"{name}sizes"] = sizes[..., 0].contiguous()
            with replacing(path) as partial:
                partial.write_bytes(save(tensors))  # so that a full disk raises OSError
        yield first + len(some)


def states_of(folder: Path, numbers: list[int], name: str = LAST) -> Tensor:
    """Hidden states of the windows with these numbers, float32, (B, T, H).

    Raises:
        ValueError: a file is incomplete or changed.
    """
    found = []
    for number in numbers:
        place = number % CHUNK
        path = _path(folder, number - place)
        try:
            with safe_open(path, "pt") as file:  # mapped, not read
                states = file.get_slice(f"{name}states")[place : place + 1]  # (1, T, H)
                sizes = file.get_slice(f"{name}sizes")[place : place + 1]  # (1, T)
        except SafetensorError as error:
            raise ValueError(
                f"the features in {path} are cut off or changed; remove the file to compute them "
                "again"
            ) from error
        found.append(states.float() * sizes[..., None])
    return torch.cat(found)


def _path(folder: Path, first: int) -> Path:
    return folder / f"{first // CHUNK:05}.safetensors"
