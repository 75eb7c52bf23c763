"""`Session`: reuses the keys and values of earlier texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from layerskip.api.generation import GenerationOutput, decode, generate
from layerskip.config.options import DecodingOptions
from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.rounds import Round
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.earlier import EarlierAnswers, earlier_answers
from layerskip.files.environment import free_memory
from layerskip.model.opened_models import sublayers_of

SHARE = 0.25
"""Share of the free memory that a session may take by default."""


class Session:
    """Calls on one model that keep the keys and values of their texts for later calls.

    Every row starts from the longest prefix that it shares with a stored text: the next turn of a
    chat, another sample for the same prompt, the next document with the same instructions. The last
    token of a prompt is always run, since its logits are needed. Texts are the same as without a
    session: bit for bit with native passes, otherwise up to near-ties.

    Abandoned calls keep what they have decoded. Everything is dropped when the model's weights,
    adapters, dtype or device change. To detect that, each call reads all weights, which takes
    about as long as two tokens (see `fingerprint.checksum`). Nothing is kept from a call with
    several prompts and pictures. The states of drafts (of a second model, for instance) are not
    kept. Drafts are also looked up in earlier answers, unless `remember` or `lookup` is off.

    A session may serve several threads. A call copies what it reuses into its own buffers.

    Args:
        model: as for `layerskip.generate`, but not an encoder-decoder.
        memory: maximum number of bytes to store; by default a quarter of the memory now free. The
            least recently used texts are dropped first; a text that is too long is not stored.
        **settings: as for `LayerSkipDecoding`, `skip` included; calls may override them.

    Raises:
        ValueError: the model is an encoder-decoder, or memory is negative.
    """

    def __init__(self, model: Any, *, memory: int | None = None, **settings: Any) -> None:
        opened = sublayers_of(model, settings.get("execution", "auto"))
        if opened.encoder:
            raise ValueError(
                "a session needs a decoder-only model, but this is an encoder-decoder, whose keys "
                "and values depend on its encoder's input; use layerskip.generate"
            )
        self.model = model
        names = ("remember", "remember_tokens")
        asked = DecodingOptions(**{name: settings.get(name) for name in names})  # checks them
        where = asked.remember or ("off" if settings.get("lookup") is False else "memory")
        tokenizer, most = settings.get("tokenizer"), asked.remember_tokens
        earlier = earlier_answers(where, most, tokenizer, opened.vocabulary)
        given = settings.get("sources", ())
        sources = [*earlier, *([given] if isinstance(given, Source | str) else given)]
        self.settings = settings | {"remember": "off", "sources": sources}
        self._cached = CachedTexts(share(opened.device) if memory is None else memory)

    def generate(
        self, inputs: Tensor | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> GenerationOutput:
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
        """The number of stored texts. What they have in common is stored once."""
        return len(self._cached)

    def clear(self) -> None:
        self._cached.clear()

    def forget(self) -> None:
        """Forget earlier answers, also those in a folder."""
        for source in self.settings["sources"]:
            if isinstance(source, EarlierAnswers):
                source.clear()

    def __repr__(self) -> str:
        return f"Session({self.num_texts} texts, {self.nbytes} of {self.memory} bytes)"


def share(device: torch.device) -> int:
    """The default memory of a session on a device in bytes; 1 GiB if the free memory is unknown."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return 1 << 30 if free is None else int(SHARE * free)
