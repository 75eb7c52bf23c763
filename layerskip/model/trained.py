"""The files of trained draft weights: reading, checking and writing them.

A file must have the hash that its skip config names, and the model must have the weights that the
file was trained on; otherwise it is refused.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from layerskip.config import Trained
from layerskip.files.writing import replacing
from layerskip.model.fingerprint import fingerprint

Weights = dict[str, Tensor]

_read: WeakKeyDictionary[nn.Module, dict[str, Weights]] = WeakKeyDictionary()  # by hash
_lock = threading.Lock()


def trained_weights(model: nn.Module, trained: Trained) -> Weights:
    """The tensors of a file, by name. They are kept for the model; the file is checked each time.

    Raises:
        ValueError: the model has other weights than they were trained on, or the file is missing,
            damaged or another one; says which in one line.
    """
    base = fingerprint(model)
    if base != trained.base:
        raise ValueError(
            f"the trained draft {trained.weights} belongs to a model with other weights "
            f"({trained.base}, got {base}); train one for this model with `layerskip train`"
        )
    try:
        data = Path(trained.weights).read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read the trained draft {trained.weights}: {error.strerror}"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != trained.hash:
        raise ValueError(
            f"the trained draft {trained.weights} is not the file that its skip config names: it "
            f"is cut off or changed (SHA-256 {trained.hash[:12]}..., got {found[:12]}...)"
        )
    with _lock:
        known = _read.setdefault(model, {})
        if trained.hash not in known:
            try:
                known[trained.hash] = load(data)
            except SafetensorError as error:
                raise ValueError(
                    f"the trained draft {trained.weights} is not a safetensors file: {error}"
                ) from error
        return known[trained.hash]


def save_trained(path: Path, weights: Weights, kind: str, model: nn.Module) -> Trained:
    """Write a file of tensors, whole or not at all; returns its description for this model.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    data = save({name: tensor.contiguous() for name, tensor in weights.items()})
    with replacing(path) as partial:
        partial.write_bytes(data)
    return Trained(
        kind=kind,  # type: ignore[arg-type]
        weights=str(path.absolute()),
        hash=hashlib.sha256(data).hexdigest(),
        base=fingerprint(model),
    )
