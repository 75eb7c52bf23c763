"""A model's best raw logits by the last few tokens before them, and their file format.

Shapes: N positions, K tokens kept of each, V vocabulary, S stored positions.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from layerskip.files.reading import read_file
from layerskip.files.writing import replacing
from layerskip.model.opening import opened_of
from layerskip.model.sublayers import Sublayers

SUFFIX = 4
"""Number of tokens in the longest suffix that is looked up."""

MOST = 2**14
"""Default maximum number of stored positions."""

_KEPT = 32  # K
_PLACE = 1024  # approximate bytes per stored position
_BLOCK = 64  # neighbouring tokens
PIECE = 512  # tokens of a text that are read together
_SCHEMA = "layerskip laws 1"

Tokens = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


class StoredLogits:
    """The best raw logits of a model, by the tokens before them.

    Args:
        most: maximum number of positions, of which the latest are kept; `MOST` by default. Each
            takes about a kilobyte, of which 256 bytes are tokens and logits.

    Attributes:
        tokens, logits: for every position, likeliest first, (S, K).
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = MOST if most is None else most
        if self.most < 1:
            raise ValueError(f"logits must be stored of 1 place at least, got most={most}")
        self._lock = threading.Lock()
        self._readers = WeakSet[object]()  # decodings in progress
        self._model: str | None = None  # its fingerprint
        self._file: str | None = None  # the file they came from
        self._clear()

    def __len__(self) -> int:
        """The number of stored positions."""
        return len(self._contexts)

    @property
    def nbytes(self) -> int:
        """Their approximate size in bytes."""
        return _PLACE * len(self)

    def _clear(self) -> None:
        self._next = 0
        self._contexts: list[tuple[int, ...]] = []
        self._places: dict[tuple[int, ...], int] = {}

    def check(self, model: Sublayers, reader: object | None = None) -> None:
        """Drop everything if it belongs to a model other than this one.

        Args:
            reader: a decoding that reads the logits as long as this object lives.

        Raises:
            ValueError: another model's file or a running decoding of another model uses them.
        """
        fingerprint = model.weights.fingerprint()
        with self._lock:
            if self._file is not None:
                wrong = None
                if self._model != fingerprint:
                    wrong = (
                        f"belong to a model with other weights ({self._model}, got {fingerprint})"
                    )
                elif (largest := int(self.tokens[: len(self)].max())) >= model.vocabulary:
                    wrong = f"hold token {largest}, the model has 0..{model.vocabulary - 1}"
                if wrong is not None:
                    raise ValueError(
                        f"the logits in {self._file} {wrong}; store some of this model with "
                        "`layerskip laws`"
                    )
            elif self._model not in (None, fingerprint):
                if self._readers:
                    raise ValueError(
                        f"these stored logits are read by a decoding of another model "
                        f"({self._model}, got {fingerprint}); give each model a StoredLogits() of "
                        "its own"
                    )
                self._clear()
            self._model = fingerprint
            if reader is not None:
                self._readers.add(reader)

    def add(self, contexts: Sequence[Sequence[int]], raw: Tensor) -> None:
        """Store raw logits (N, V) that follow contexts, given by the last tokens of each."""
        self.keep(contexts, *best_of(raw))

    def keep(self, contexts: Sequence[Sequence[int]], tokens: Tokens, logits: Numbers) -> None:
        """Store the best of raw logits that follow contexts, as from `best_of`, (N, K) each."""
        with self._lock:
            if not self._contexts:
                shape = self.most, tokens.shape[1]  # (S, K)
                self.tokens, self.logits = np.empty(shape, np.int32), np.empty(shape, np.float32)
            places = [(self._next + i) % self.most for i in range(len(contexts))]
            for place, context in zip(places, contexts, strict=True):
                last = tuple(context[-SUFFIX:])
                if self._next < self.most:
                    self._contexts.append(last)
                else:
                    for key in suffixes(self._contexts[place]):
                        if self._places[key] == place:
                            del self._places[key]
                    self._contexts[place] = last
                self._places.update(dict.fromkeys(suffixes(last), place))
                self._next += 1
            self.tokens[places], self.logits[places] = tokens, logits

    @torch.no_grad()
    def learn(
        self, model: Any, text: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Store a model's logits after every token of a text.

        Args:
            model: a causal language model, or one opened as `Sublayers`.
            text: its tokens.
            progress: called with the number of tokens read, and their total.

        Raises:
            ValueError: a token is not in the model's vocabulary.
        """
        opened = opened_of(model)
        self.check(opened)
        if text and not 0 <= min(text) <= max(text) < opened.vocabulary:
            raise ValueError(
                f"a text must hold token ids of the model's vocabulary, 0..{opened.vocabulary - 1},"
                f" got {min(text)} to {max(text)}; encode it with its tokenizer"
            )
        longest = min(2 * PIECE, opened.max_positions)
        for first in range(0, len(text), longest // 2):
            # Each piece except the first begins with the end of the one before, for context.
            begin, end = max(0, first - longest // 2), min(first + longest // 2, len(text))
            tokens = torch.tensor([text[begin:end]], device=opened.device)  # (1, T)
            hidden, step = opened.first_pass(tokens)  # (1, T, H)
            hidden = opened.run(hidden, step, range(opened.num_sublayers))
            raw = opened.logits(hidden[:, first - begin :])[0]  # (N, V)
            self.add([text[max(0, i + 1 - SUFFIX) : i + 1] for i in range(first, end)], raw)
            if progress is not None:
                progress(end, len(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the logits to a file atomically, with 272 bytes per position.

        Raises:
            ValueError: nothing has been learned.
            OSError: the folder cannot be written to, or the disk is full.
        """
        with self._lock:
            if not self._contexts or self._model is None:
                raise ValueError("there are no logits to save: nothing has been learned")
            places = [(self._next + i) % len(self) for i in range(len(self))]  # the oldest first
            contexts = np.full((len(self), SUFFIX), -1, np.int32)
            for row, place in zip(contexts, places, strict=True):
                row[SUFFIX - len(self._contexts[place]) :] = self._contexts[place]
            arrays: Arrays = {"schema": _bytes(_SCHEMA), "model": _bytes(self._model)}
            arrays |= {"tokens": self.tokens[places], "logits": self.logits[places]}
        with replacing(path) as partial:
            partial.write_bytes(save(arrays | {"contexts": contexts}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StoredLogits:
        """Read the logits in a file. They belong to one model; any other is rejected later.

        Raises:
            ValueError: the file cannot be read, or was not written by `save`.
        """
        try:
            arrays = load(read_file(path))
        except OSError as error:
            raise ValueError(f"cannot read the logits {path}: {error.strerror}") from error
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"the logits {path} are not a safetensors file: {error}") from error
        if wrong := _damage(arrays):
            raise ValueError(
                f"{path} holds no logits, or is damaged: {wrong}; write it with `layerskip laws`"
            )
        contexts = [[token for token in row if token >= 0] for row in arrays["contexts"].tolist()]
        stored = cls(max(MOST, len(contexts)))
        stored._model, stored._file = arrays["model"].tobytes().decode(), str(path)
        stored.keep(contexts, arrays["tokens"], arrays["logits"])
        return stored

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """The length of the longest known suffix, 0 for none, and its stored position."""
        for key in suffixes(tuple(context[-SUFFIX:])):
            place = self._places.get(key)
            if place is not None:
                return len(key), place
        return 0, -1


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def _damage(arrays: Arrays) -> str | None:
    """What is wrong with the arrays of a file, or None."""
    names = ("schema", "model", "contexts", "tokens", "logits")
    if missing := [name for name in names if name not in arrays]:
        return f"it lacks {missing[0]}"
    if arrays["schema"].tobytes() != _SCHEMA.encode():
        return f"its schema is not {_SCHEMA!r}"
    if not re.fullmatch(rb"(weights|shapes)-[0-9a-f]{16}", arrays["model"].tobytes()):
        return "it does not name a model"
    contexts, tokens, logits = (arrays[name] for name in names[2:])
    places, kept = tokens.shape if tokens.ndim == 2 else (0, 0)
    if not (places and kept) or logits.shape != tokens.shape or contexts.shape != (places, SUFFIX):
        return "its arrays have other shapes"
    if [each.dtype.name for each in (contexts, tokens, logits)] != ["int32", "int32", "float32"]:
        return "its arrays have other dtypes"
    if tokens.min() < 0 or contexts[:, -1].min() < 0:
        return "it has negative tokens"
    if not (np.isfinite(logits).all() and (np.diff(logits) <= 0).all()):
        return "its logits are not finite, or not in descending order"
    return None


def suffixes(context: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The suffixes of a context, longest first."""
    return [context[first:] for first in range(len(context))]


def best_of(raw: Tensor) -> tuple[Tokens, Numbers]:
    """The best tokens of raw logits (N, V), and their logits, likeliest first, (N, K) each."""
    logits, tokens = (each.cpu() for each in largest_of(raw.float(), _KEPT))
    return tokens.int().numpy(), logits.numpy()


def largest_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of values (N, V), in order, and their indices, (N, K) each: K = min(count, V).

    Like `topk`, which would take several times as long on a CPU.
    """
    count = min(count, values.shape[1])
    if missing := -values.shape[1] % _BLOCK:
        values = F.pad(values, (0, missing), value=-float("inf"))
    blocks = values.unflatten(1, (-1, _BLOCK))  # (N, V / 64, 64)
    # The blocks with the largest maxima contain them.
    best = blocks.amax(2).topk(min(count, blocks.shape[1])).indices  # (N, M)
    held = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)  # (N, 64 M)
    largest, at = held.topk(count)  # (N, K) each
    return largest, best.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK
