"""What heads that others trained for a target have in common, and their weights in files.

Embeddings, and an output head of the whole vocabulary, may be missing; the target's are then used.
Shapes: D tokens that a head drafts, V vocabulary, W its width.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from layerskip.weights.formats.tensors import Tensors

_UNREAD = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq"}
"""Tensors in published files that drafting does not need."""


class PublishedHead(nn.Module, ABC):
    """A head, at first without weights; its parts are named as in files of `speculators`.

    Attributes:
        kind: what it is, in words.
        target_width, vocabulary, num_layers: of its target; None if the config does not say.
        shape: the library's config of its layers, with the vocabulary as `vocab_size`.
        d2t: for each row of its own head, the number to add to get the target's token, (D,).
    """

    kind: str
    name_or_path = ""
    target_width: int
    vocabulary: int | None
    num_layers: int | None = None
    d2t: Tensor
    embed_tokens: Any
    lm_head: Any

    @classmethod
    def loaded(
        cls,
        source: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load one from a folder or a Hub id; `dtype` None: as it is stored.

        Raises:
            ValueError: it is incomplete or of another kind; says which in one line.
        """
        try:
            head = cls(config)
        except Exception as error:  # any error here is about the file
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{source}/config.json describes no {cls.kind}: {type(error).__name__}: {reason}"
            ) from error
        head.load(source, dtype)
        return head

    def add_ends(self, shape: Any, drafted: int | None = None) -> None:
        """Make embeddings and an output head over `drafted` tokens; None: over all."""
        drafted = drafted or shape.vocab_size
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.lm_head = nn.Linear(shape.hidden_size, drafted, bias=False)
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.long))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def tokens(self) -> Tensor:
        """The target's tokens that it can draft, (D,)."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @abstractmethod
    def depths_in(self, num_layers: int) -> Sequence[int]:
        """The numbers of a target's layers after which its states are read."""

    def stored_name(self, name: str) -> str:
        """The name of one of its tensors, from the name in a file."""
        return name.removeprefix("model.")

    def load(self, source: str | os.PathLike[str], dtype: torch.dtype | None) -> None:
        """Load its weights, as for `loaded`."""
        kind, tensors = self.kind, Tensors(os.fspath(source), fetch=True)
        if not tensors.files:
            raise ValueError(
                f"{source} holds no model.safetensors; weights stored as pytorch_model.bin must "
                "be converted (torch.load with weights_only=True, then safetensors.torch.save_file)"
            )
        there = {self.stored_name(name): name for name in tensors.files}
        whole = self.shape.vocab_size == len(self.d2t)
        if "embed_tokens.weight" not in there:
            self.embed_tokens = None
        if whole:
            there.pop("d2t", None)
            self.lm_head = self.lm_head if "lm_head.weight" in there else None
        weights: dict[str, Tensor] = {}
        for name, like in self.state_dict().items():
            if name == "d2t" and whole:
                weights[name] = torch.zeros(like.shape, dtype=torch.long)
                continue
            if name not in there:
                raise ValueError(f"the {kind} in {source} is incomplete: {name} is missing")
            weights[name] = value = tensors.tensor(there[name])
            if value.shape != like.shape or value.is_floating_point() != like.is_floating_point():
                raise ValueError(
                    f"{name} of the {kind} in {source} has shape {[*value.shape]} and is "
                    f"{value.dtype}, but its config says {[*like.shape]} of {like.dtype}"
                )
        unknown = sorted({*there} - {*weights} - _UNREAD)
        if unknown:
            raise ValueError(f"the {kind} in {source} holds an unknown tensor, {unknown[0]}")
        weights["d2t"] = weights["d2t"].long()
        self.load_state_dict(weights, assign=True)
        tokens = self.tokens
        outside = bool((tokens < 0).any() or (tokens >= self.shape.vocab_size).any())
        if outside or len(tokens.unique()) < len(tokens):
            raise ValueError(
                f"d2t of the {kind} in {source} must map to different tokens in 0.."
                f"{self.shape.vocab_size - 1}, got {int(tokens.min())}..{int(tokens.max())}"
            )
        self.name_or_path = str(source)
        self.to(dtype or self.dtype).requires_grad_(False)
