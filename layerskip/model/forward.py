"""The "whole" backend: the library's own forward as one block, and its head as another.

Shapes: B rows, T tokens of a pass, H hidden width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerskip.backends.base import EXACT, Backend, Block, Step, Variant, rounded
from layerskip.cache.library_cache import LibraryCache, Positions
from layerskip.cache.recurrent import ONE_BY_ONE, RecurrentCache
from layerskip.cache.rows import RowCache, additive
from layerskip.library import BaseModelOutput, cache_name
from layerskip.weights.rounded import TrimmedHead

if TYPE_CHECKING:
    from layerskip.model.whole import Whole


class Forward(Backend):
    """The "whole" backend: the library's forward as one block."""

    name = "whole"
    model: Whole

    @cached_property
    def blocks(self) -> Sequence[Block]:
        return (self.sublayer(0),)

    def _block(self, base: Any, draft: bool = False) -> Block:
        model = self.model
        together, eager, dtype, device = model.together, model.eager, model.dtype, model.device
        windows = model.window_by_type

        placed = "position_ids" in inspect.signature(type(base).forward).parameters
        past_name = str(cache_name(base))
        uncounted = -1 if placed else model.uncounted
        one_by_one = model.model.config.get_text_config().model_type in ONE_BY_ONE

        def forward(tokens: Tensor, places: Tensor, past: Any, **more: Any) -> Tensor:
            if placed:
                more["position_ids"] = places
            more[past_name] = past
            return base(input_ids=tokens, use_cache=True, **more)[0]  # type: ignore[no-any-return]

        def states(
            tokens: Tensor,
            places: Tensor,
            cache: LibraryCache,
            rows: Any = None,
            offset: int = 0,
            **more: Any,
        ) -> Tensor:
            if cache.encoded is not None:
                encoded = cache.encoded_of(rows)
                more["encoder_hidden_states"] = encoded.states
                more["encoder_attention_mask"] = encoded.mask
            past = cache.for_library(rows, tokens.shape[1], offset)
            return forward(tokens, places, past, **more)

        def masks(cache: RowCache) -> Any:
            """Masks for the library, (B, 1, T, end) each, by layer type if windows differ."""
            by_type = {}
            for kind, window in windows.items():
                seen = cache.seen(window, device)
                by_type[kind] = additive(seen, dtype) if eager else seen
            return by_type if len({*windows.values()}) > 1 else next(iter(by_type.values()))

        def block(hidden: Tensor, step: Step) -> Tensor:
            tokens, cache, places = hidden[..., 0], step.cache, step.rope["positions"]
            if isinstance(cache, RecurrentCache):
                total = step.rotary.total
                return cache.run(tokens, total, forward, one_by_one=one_by_one, draft=draft)
            pads = tokens == uncounted  # (B, T)
            cut = uncounted >= 0 and bool(pads[:, :-1].any())
            if cache.in_step and not cut:
                return states(tokens, places, cache)
            if together:
                return states(tokens, places, cache, attention_mask=masks(cache))
            starts, total, out = cache.firsts, step.rotary.total, None
            for start in dict.fromkeys(starts):
                rows = [row for row, first in enumerate(starts) if first == start]
                count = min(tokens.shape[1], total - start)  # the rest are pads
                cuts = 1 + pads[rows, : count - 1].any(0).nonzero()[:, 0] if cut and start else []
                for begin, end in pairwise([0, *map(int, cuts), count] if count > 0 else []):
                    place = rows, slice(begin, end)
                    part = states(tokens[place], places[place], cache, rows, begin)
                    if out is None:
                        out = part.new_zeros(*tokens.shape, part.shape[-1])  # (B, T, H)
                    out[place] = part
            assert out is not None
            return out

        return block

    def sublayer(self, number: int, variant: Variant | None = EXACT) -> Block:
        assert variant is not None  # no layer is left out
        base = rounded(self, self.model.decoder, variant, "the decoder")
        return self._block(base, draft=variant.bits is not None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) as the states before the block, (B, T, 1)."""
        return tokens[..., None]

    def inputs(self, tokens: Tensor, hidden: Tensor) -> None:
        """None, because the library's forward makes the inputs of its layers itself."""

    def rotary(self, slots: int, total: int, first: int = 0) -> Positions:
        return Positions(total, self.model.device)

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        """The library's own forward, given the decoder's states instead of tokens."""
        whole, config, inner = self.model.model, self.model.decoder.config, self.model.inner
        parts = {
            name: _GivenStates(config, part) if part is inner else part
            for name, part in whole._modules.items()
        }
        for name, part in self.model.head_parts().items():
            parts[name] = rounded(self, part, Variant(bits), name)
        made = copy(whole)
        made._modules = parts
        forward, device, encoder = type(whole).forward, self.model.device, self.model.encoder

        name = "decoder_inputs_embeds" if encoder else "inputs_embeds"

        def head(hidden: Tensor, _: Step | None) -> Tensor:
            given: dict[str, Any] = {name: hidden}
            if encoder:
                given["encoder_outputs"] = BaseModelOutput(hidden)  # required, but never read
            logits: Tensor = forward(made, **given)[0]  # (B, T, V)
            return logits.to(device)

        return head


class _GivenStates:
    """Replaces a decoder, and returns given states instead of computing them.

    Some families call the decoder inside their decoder (OPT), or read its config (T5Gemma) or one
    of its numbers (Falcon H1).
    """

    def __init__(self, config: Any, decoder: Any) -> None:
        self.config, self.decoder, self._numbers = config, self, vars(decoder)

    def __getattr__(self, name: str) -> Any:
        if name in self._numbers:
            return self._numbers[name]
        raise AttributeError(name)

    def get_decoder(self) -> _GivenStates:
        return self

    def __call__(self, *_: Any, **given: Any) -> _DecoderOutput:
        return _DecoderOutput([given.get("decoder_inputs_embeds", given.get("inputs_embeds"))])


class _DecoderOutput(tuple[Any, ...]):
    """A decoder's output with only its states."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        return None
