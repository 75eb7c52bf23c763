"""`Session`: keys and values of earlier texts are not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.rounds import Round
from layerskip.environment import free_memory
from layerskip.generation import GenerationOutput, decode, generate
from layerskip.model.opening import sublayers_of

SHARE = 0.25
"""The share of free memory that a session may take by default."""


class Session:
    """Calls on one model that keep the keys and values of their texts for later calls.

    Every row starts at the longest beginning that it has in common with a text that is held: the
    next turn of a chat, the next sample of a prompt, the next document with the same instructions.
    The last token of a prompt is always run, as its logits are needed. Texts are the same as
    without a session; with native passes bit by bit, elsewhere up to near-ties.

    Calls that are given up keep what they have decoded. Everything is dropped when the model's
    weights or adapters change, or its dtype or device; each call reads all weights to see that,
    which takes about as long as two tokens (see `fingerprint.checksum`). Of several prompts with
    pictures in one call nothing is kept. What drafts themselves compute with (a second model, say)
    is not kept.

    A session may serve several threads. What a call takes is copied into its own buffers.

    Args:
        model: as for `layerskip.generate`; no encoder-decoder.
        memory: the most bytes to hold; by default a quarter of what is free now. What was used
            least recently is dropped first, and a text that is too long for it is not kept.
        **settings: as for `LayerSkipDecoding`, `skip` included; calls may give others.

    Raises:
        ValueError: the model is an encoder-decoder, or memory is negative.
    """

    def __init__(self, model: Any, *, memory: int | None = None, **settings: Any) -> None:
        opened = sublayers_of(model, settings.get("execution", "auto"))
        if opened.encoder:
            raise ValueError(
                "a session needs a model of one text, this is an encoder-decoder, whose keys and "
                "values depend on what its encoder has read; use layerskip.generate"
            )
        self.model = model
        self.settings = settings
        self._cached = CachedTexts(share(opened.device) if memory is None else memory)

    def generate(self, inputs: Tensor | Mapping[str, Any], **kwargs: Any) -> GenerationOutput:
        """`layerskip.generate` on the session's model."""
        return generate(self.model, inputs, **{**self.settings, **kwargs, "cached": self._cached})

    def decode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Iterator[Round]:
        """`layerskip.decode` on the session's model."""
        given = {**self.settings, **kwargs, "cached": self._cached}
        return decode(self.model, input_ids, attention_mask, **given)

    @property
    def memory(self) -> int:
        return self._cached.memory

    @property
    def nbytes(self) -> int:
        return self._cached.nbytes

    @property
    def num_texts(self) -> int:
        """How many texts it holds; what one has in common with another is held once."""
        return len(self._cached)

    def clear(self) -> None:
        self._cached.clear()

    def __repr__(self) -> str:
        return f"Session({self.num_texts} texts, {self.nbytes} of {self.memory} bytes)"


def share(device: torch.device) -> int:
    """The default memory of a session on a device; 1 GiB if nobody knows what is free."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return 1 << 30 if free is None else int(SHARE * free)
