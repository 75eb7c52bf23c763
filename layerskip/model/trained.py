"""Weights trained for a model's drafts, in a file; knows whose they are, not what they are for.

A file is taken for what its hash says and for nothing else: not in part, not changed, and not
beside a model with other weights than those it was trained on.
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
    """The tensors of a file, by name; read once for a model, and checked whenever it is opened.

    Raises:
        ValueError: the model's weights are not those they were trained on, or the file is not
            there, not whole or another one; says which in one line.
    """
    base = fingerprint(model, like=trained.base)
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
    """Write a file of tensors, whole or not at all, and name it as this model's.

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
