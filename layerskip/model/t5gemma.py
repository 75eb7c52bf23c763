"""T5Gemma's decoder as sublayers, beside its encoder, which the library runs.

The attention sublayer of a layer is its self attention and then its cross attention, each with its
norms and residual add, so that a decoder of L layers has 2L sublayers, as others have.
Letters: B rows, T tokens of a pass, E tokens that the encoder read, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.model.architecture import LayerParts, foreign_hooks, read_bytes
from layerskip.model.backend import Block, Rotary, Step
from layerskip.model.cache import RowCache, additive
from layerskip.model.families import FAMILIES
from layerskip.model.handed import Places
from layerskip.model.modules import LinearOf, Modules, twin
from layerskip.model.rounded import linears
from layerskip.model.sublayers import Sublayers
from layerskip.model.weights import DraftWeights
from layerskip.model.whole import Whole
from layerskip.model.wrappers import UnsupportedModelError


class T5Gemma(Whole):
    """A T5Gemma whose decoder is opened up into its sublayers.

    Args:
        model: `T5GemmaForConditionalGeneration`, or PEFT's wrapper.

    Raises:
        UnsupportedModelError: hooks on modules that are never called as a whole.
        ValueError: training mode, or an execution other than "auto" and "modules".
    """

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
        super().__init__(model, execution)
        self.decoder = self.base
        self.layers = self.base.layers[: self.num_layers]
        for module in (self.inner, self.base, *self.layers):
            if foreign_hooks(module):
                raise UnsupportedModelError(
                    f"{type(module).__name__} has forward hooks, which are not supported there: it "
                    "is never called as a whole; hook what is inside, or remove the hooks"
                )
        self.unembedding = self.model.lm_head.out_proj
        self.family = FAMILIES["gemma2"]  # of which its decoder is built
        self.layer_types = tuple(self.config.layer_types[: self.num_layers])
        self.windows = tuple(map(self.window_by_type.__getitem__, self.layer_types))
        self.distinct_windows = tuple(dict.fromkeys(self.windows))
        self.parts = tuple(self._parts())
        self.backend = _Modules(self)
        self.execution = self.backend.name
        self.blocks = self.backend.blocks
        self.head = self.backend.head()
        self.weights = _Weights(self, self.backend, [*self.blocks, self.head])

    run = Sublayers.run
    finish = Sublayers.finish

    def _parts(self) -> Iterator[LayerParts]:
        each = zip(self.layers, self.windows, self.layer_types, strict=True)
        for number, (layer, window, kind) in enumerate(each):
            norms = (
                *(layer.pre_self_attn_layernorm, layer.post_self_attn_layernorm),
                *(layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm),
            )
            yield LayerParts(number, layer, window, kind, *norms, keys=number)

    @property
    def cached_windows(self) -> Sequence[int | None]:
        return self.windows

    @property
    def softcap(self) -> float | None:
        cap: float | None = self.config.final_logit_softcapping
        return cap

    def rotary(self, slots: int, total: int, first: int = 0) -> Rotary:
        return _Angles(self, total)

    def embed(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.decoder.embed_tokens(tokens)  # (B, T, H)
        return hidden * torch.tensor(self.config.hidden_size**0.5, dtype=hidden.dtype)

    def weight_bytes(self, bits: int | None = None, **more: Any) -> dict[str, Any]:
        found = Sublayers.weight_bytes(self, bits, **more)
        for number, layer in enumerate(self.layers):
            own = (layer.cross_attn, layer.pre_cross_attn_layernorm)
            cross = sum(read_bytes(each, bits) for each in (*own, layer.post_cross_attn_layernorm))
            found["sublayers"][2 * number] += cross
            found["sublayers"][2 * number + 1] -= cross
        return found

    def refusal(self, what: str) -> str:
        return (
            f"this is an encoder-decoder: {what}; its decoder drafts with sublayers left out or "
            "rounded, by lookups, and by a second model"
        )


class _Angles(Places):
    """By layer type the angles of a pass; and under "cross" what the encoder made of the rows."""

    def __init__(self, model: T5Gemma, total: int) -> None:
        super().__init__(total, model.device)
        self.model = model

    def at(self, cache: RowCache) -> Mapping[str, Any]:
        model, held = self.model, cache
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        turned = model.decoder.rotary_emb(like, super().at(cache)["places"])  # (B, T, D) each
        encoded = held.encoded  # type: ignore[attr-defined]
        mask = encoded.mask.bool()[:, None, None]  # (B, 1, 1, E)
        mask = additive(mask, model.dtype) if model.eager else mask
        cross = encoded.states, mask, held.handed()  # type: ignore[attr-defined]
        return {**dict.fromkeys(model.layer_types, turned), "cross": cross}


class _Modules(Modules):
    """The library's modules, the cross attention as part of a layer's attention."""

    def block(
        self,
        sublayer: int,
        linear: LinearOf | None = None,
        bits: int | None = None,
        experts: int | None = None,
        window: int | None = None,
    ) -> Block:
        own = super().block(sublayer, linear, bits, experts, window)
        if sublayer % 2:
            return own
        layer = self.model.parts[sublayer // 2].module
        before, after = layer.pre_cross_attn_layernorm, layer.post_cross_attn_layernorm
        attend = layer.cross_attn
        if linear is not None:
            attend = twin(attend, linear, f"layer {sublayer // 2} cross_attn")

        def block(hidden: Tensor, step: Step) -> Tensor:
            hidden = own(hidden, step)
            states, mask, cache = step.rope["cross"]
            out: Tensor = attend(
                hidden_states=before(hidden),
                encoder_hidden_states=states,
                attention_mask=mask,
                past_key_values=cache,
            )[0]  # (B, T, H)
            hidden = hidden + after(out)  # (B, T, H)
            return hidden

        return block


class _Weights(DraftWeights):
    def linears(self, sublayers: Sequence[int] | None = None) -> Iterator[tuple[str, nn.Linear]]:
        chosen = range(self.model.num_sublayers) if sublayers is None else sublayers
        yield from super().linears(chosen)
        for index in chosen:
            if not index % 2:
                number = index // 2
                for name, linear in linears(self.model.layers[number].cross_attn):
                    yield f"layers.{number}.cross_attn.{name}", linear

    def module(self, skip: Any) -> Any:
        raise ValueError("T5Gemma's decoder cannot draft with trained modules; leave them out")
