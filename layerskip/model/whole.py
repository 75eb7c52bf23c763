"""Any causal language model as one block: the library's own forward with this project's cache.

This is how a model runs whose sublayers are not opened (see `families`): its decoder is called as a
whole, and its head is the library's own. Its drafts need nothing from inside: lookups, a second
model, a user's own sources, and the model itself with linear layers in 8 or 4 bits. The decoders of
encoder-decoders run in the same way; the encoder's output is part of the cache.
Shapes: B rows, T tokens of a pass, E of an encoder, H hidden width, D head width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    DynamicCache,
)

from layerskip.backends.base import Block, Variant
from layerskip.cache import recurrent as recurrents
from layerskip.cache.library_cache import LibraryCache
from layerskip.cache.rows import RowCache
from layerskip.config.skips import SkipConfig
from layerskip.families.architecture import foreign_hooks, own_forward, read_bytes
from layerskip.families.family import part_named
from layerskip.families.known import two_way, unopened
from layerskip.families.wrappers import UnsupportedModelError, config_of, unwrapped
from layerskip.library import cache_name
from layerskip.model.draft_weights import DraftWeights
from layerskip.model.forward import Forward
from layerskip.model.opened_model import OpenedModel
from layerskip.weights.rounded import linears

DRAFTS = (
    "drafts there: lookups, a second model, custom sources, and the model itself with its "
    "linears in 8 or 4 bits (SkipConfig.low_precision(8))"
)
# Layers of the library's caches whose keys and values can be rolled back. They are named, because
# some versions lack some of them.
_ROLLED_BACK = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_NAMED = {
    "blt": "it works on patches of bytes, whose borders move with the text",
    "cpmant": "it puts virtual tokens in front of the prompt",
    **dict.fromkeys(("moshi", "musicgen", "musicgen_melody"), "it generates audio"),
    "prophetnet": "it predicts in several streams",
    "switch_transformers": "its head reads its encoder's routers",
    "encoder-decoder": "its decoder is a model of its own, with a head",
    "fsmt": "its decoder has no configuration",
    "xlm": "it predicts the place of a mask token, which its attention sees from all sides",
}
_NO_LIMIT = 1 << 40


def support(model: Any) -> tuple[str, str]:
    """How a model can be used: "opened", "whole" or "refused", and the reason in words.

    Nothing is run. A model may still be refused when it is opened (for its hooks, say), or decodes.

    Args:
        model: a model, or the config of a causal language model or an encoder-decoder.
    """
    config = model if isinstance(model, transformers.PretrainedConfig) else config_of(model)
    kind = config.model_type
    if kind not in _NAMED and unopened(config) is None:
        return "opened", "its sublayers are known"
    refused = _NAMED.get(kind) or _refusal(model, config)
    if refused is not None:
        return "refused", f"architecture {kind!r} is not supported: {refused}"
    return "whole", f"the sublayers of {kind!r} are not known"


def _refusal(model: Any, config: Any) -> str | None:
    """Why a model cannot even be used as a whole; None if it can."""
    kind: Any = type(model) if isinstance(model, nn.Module) else None
    encoder = config.is_encoder_decoder
    classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if encoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if encoder and type(config) not in classes:
        return "it is an encoder-decoder that reads something other than text"
    if kind is None and type(config) in classes:
        kind = classes[type(config)]
    if kind is None or not issubclass(kind, transformers.GenerationMixin):
        return "it is not a language model of transformers that generates text"
    mixed = config.model_type == "doge" and config.is_moe
    if mixed or getattr(config, "moe_eval_capacity_token_fraction", 1.0) < 1:  # NLLB's
        return "what its experts do with a token depends on all tokens of a pass"
    recurrent = config.get_text_config().model_type in recurrents.SERVED
    if recurrent and isinstance(model, nn.Module) and config.get_text_config() is not config:
        return "it has recurrent layers and sees pictures; load its text with AutoModelForCausalLM"
    if kind._is_stateful and not recurrent:
        if config.model_type == "recurrent_gemma":
            return "it keeps its recurrent state in its modules, so for one text at a time"
        return "it has a recurrent state of a kind that is not kept here"
    bidirectional = not encoder and getattr(config, "is_decoder", None) is False
    documented = "config.is_decoder = True"  # the library mentions this even where it has no effect
    if bidirectional and "config.is_decoder" in _source(kind).replace(documented, ""):
        return "it has bidirectional attention (its config says is_decoder=False)"
    if two_way(config.get_text_config(decoder=True)):
        return "it has bidirectional attention (use_bidirectional_attention)"
    if cache_name(kind.forward) is None:
        return "its forward names no cache among its arguments"
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, ValueError) as error:
        return f"the library makes no cache for it ({type(error).__name__}: {error})"
    kept = (*_ROLLED_BACK, *recurrents.KINDS) if recurrent else _ROLLED_BACK
    fixed = {type(layer).__name__ for layer in layers} - {*kept}
    if fixed:
        return f"its cache ({', '.join(sorted(fixed))}) cannot be rolled back"
    return None


class Whole(OpenedModel):
    """A causal language model as one block.

    The states before that block are the token ids themselves, (B, T, 1); those after it are the
    decoder's output. It still counts as 2L sublayers, of which all or none are run.

    Args:
        model: a causal language model or encoder-decoder of `transformers`, or a PEFT wrapper.

    Attributes:
        decoder: the decoder, without the head.
        inner: the part of the model that is the decoder, or contains it and an encoder.
        window_by_type: the sliding window in tokens, or None for full attention, by layer type; ""
            if a config names no types.
        together: whether rows of different lengths run in one pass, or only those of equal length.
        uncounted: the pad token, if positions in a pass do not count it (M2M100), else -1. After
            the prompt it must end a pass, as it does when tokens are decoded one by one.

    Raises:
        UnsupportedModelError: names what is not supported.
        ValueError: training mode, or an execution that needs the sublayers.
    """

    parts = ()
    branches = False  # the library's forward sees all earlier slots

    def __init__(self, model: Any, execution: str = "auto") -> None:
        model = unwrapped(model)
        config: Any = config_of(model)
        how, why = support(model)
        if how == "refused":
            raise UnsupportedModelError(why)
        self.reason = why
        if execution not in ("auto", "modules"):
            raise ValueError(
                f"execution {execution!r} cannot serve this model, which runs as a whole: {why}; "
                "use execution='auto'"
            )
        if model.training:
            raise ValueError("model is in training mode, where dropout is drawn; call model.eval()")
        self.encoder = config.is_encoder_decoder
        self.inner, self.decoder = self._decoder(model)
        text: Any = (self.decoder.config if self.encoder else config).get_text_config()
        layers = DynamicCache(config=self.decoder.config if self.encoder else config).layers
        super().__init__(model, text, len(layers), model.get_input_embeddings())
        self._check_rope()
        # A sliding layer of the library's cache has a window. Here, masks hide the slots instead.
        window = vars(layers[0]).get("sliding_window")
        self.windows = (None,) * self.num_layers
        types = getattr(text, "layer_types", None)
        self.window_by_type = {"": window} if types is None else dict.fromkeys(types)
        if "sliding_attention" in self.window_by_type:
            self.window_by_type["sliding_attention"] = text.sliding_window
        self.recurrent = any(type(layer).__name__ in recurrents.KINDS for layer in layers)
        self.together = not self.recurrent and _accepts_positions(self.decoder, self.window_by_type)
        counts = "create_position_ids_from_input_ids" not in _source(type(self.decoder))
        self.uncounted = -1 if counts or text.pad_token_id is None else text.pad_token_id
        self.max_positions = getattr(text, "max_position_embeddings", None) or _NO_LIMIT
        self.spread = len({weight.device for weight in model.parameters()}) > 1
        self._compute_with(Forward(self), why, _Weights)

    def own_cache(self, rows: int, slots: int) -> RowCache:
        if self.recurrent:
            return recurrents.RecurrentCache(rows, slots, self.windows, self._layers)
        return LibraryCache(rows, slots, self.windows)

    def _layers(self) -> list[Any]:
        return DynamicCache(config=self.model.config).layers

    def chosen(self, sublayers: Iterable[int]) -> list[Block]:
        """One block for all sublayers, and none for none."""
        count = len([*sublayers])
        if count not in (0, self.num_sublayers):  # for example, for a source with a tap
            raise ValueError(self.refusal("it has no states between sublayers"))
        return [*self.blocks[: min(count, 1)]]

    def refusal(self, what: str) -> str:
        """The error message for something that needs the sublayers."""
        return f"this model runs as a whole, as {self.reason}: {what}; {DRAFTS}"

    def normed(self, states: Tensor) -> Tensor:
        return states

    def weight_bytes(self, bits: int | None = None, **_: Any) -> dict[str, Any]:
        """Like that of an opened model, with the decoder as the only entry of "sublayers"."""
        tables = [each for each in self.decoder.modules() if isinstance(each, nn.Embedding)]
        body = read_bytes(self.decoder, bits) - sum(read_bytes(table, bits) for table in tables)
        head = sum(read_bytes(part, bits) for part in self.head_parts().values())
        return {"sublayers": [body], "head": head}

    def key_bytes(
        self, layers: Iterable[int] | None = None, window: int | None = None
    ) -> dict[int | None, float]:
        """Empty, because it is not known how the library's attentions read keys."""
        return {}

    def check_lengths(self, prompt_lengths: Sequence[int], total: int) -> None:
        super().check_lengths(prompt_lengths, total)
        for parameters in self._rope_types():
            switch = parameters.get("original_max_position_embeddings", total)
            if parameters.get("rope_type") == "longrope" and total > switch:
                raise UnsupportedModelError(
                    f"longrope changes its angles at {switch} tokens, and the library chooses them "
                    f"by the tokens of a pass; this model serves up to {switch}, got {total}"
                )

    def head_parts(self) -> dict[str, Any]:
        """The parts of the model after its decoder, by name."""
        separate = [self.inner, *([self.model.get_encoder()] if self.encoder else [])]
        return {
            name: part
            for name, part in self.model._modules.items()
            if part is not None
            and not isinstance(part, nn.Embedding)
            and not any(part is each for each in separate)
        }

    def _decoder(self, model: Any) -> tuple[Any, Any]:
        """`inner` and `decoder`. The decoder must be callable separately from the head."""
        parts = [part for part in model._modules.values() if part is not None]
        named = [model.base_model, part_named(model, "model")]
        named += [model.get_decoder()] if self.encoder else []
        inner = next((each for each in named if any(each is part for part in parts)), None)
        if inner is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: its decoder is not a separate module"
            )
        patched = "forward" in vars(model) and own_forward(model)
        if patched or foreign_hooks(model):
            raise UnsupportedModelError(
                f"the model ({type(model).__name__}) has "
                f"{'a custom forward' if patched else 'forward hooks'}, which is not supported "
                "there: decoder and head are called one by one; hook these, or remove it"
            )
        wraps = self.encoder or cache_name(inner) is None  # Bart's, say, around a decoder alone
        base = model.get_decoder() if wraps else inner
        if cache_name(base) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: the forward of its decoder "
                f"({type(base).__name__}) names no cache (past_key_values) among its arguments"
            )
        return inner, base


class _Weights(DraftWeights):
    """The blocks of a whole model's drafts, which run everything in low precision."""

    model: Whole  # type: ignore[assignment]

    def trimmed(self, tokens: Sequence[int]) -> DraftWeights:
        warnings.warn(
            "draft_vocabulary has no effect: the model runs as a whole; drafts use the whole head",
            UserWarning,
            stacklevel=3,
        )
        return self

    def blocks(self, skip: SkipConfig) -> list[Block]:
        skip = skip.resolve(self.model.num_layers)
        self._check(skip)
        bits = skip.low.bits if skip.low is not None and skip.rounded() else None
        return [*([self._block(0, Variant(bits))] if bits else []), self.head(skip)]

    def _check(self, skip: SkipConfig) -> None:
        low = len(skip.rounded())
        cases = {
            "it cannot draft with trained weights": skip.trained is not None,
            "it cannot take fewer experts": skip.experts is not None,
            "its drafts cannot have a window": skip.window is not None,
            "it cannot leave sublayers out or exit early": skip.skipped(),
            "it cannot round some sublayers and not others": 0 < low < self.model.num_sublayers,
            "none of its linears is an ordinary one to round": low and not [*self.linears()],
        }
        for what, wrong in cases.items():
            if wrong:
                raise ValueError(self.model.refusal(what))

    def linears(self, sublayers: Sequence[int] | None = None) -> Iterator[nn.Linear]:
        if sublayers is None or len(sublayers):
            yield from linears(self.model.decoder)

    def module(self, skip: SkipConfig) -> Any:
        raise ValueError(self.model.refusal("it cannot draft with trained modules"))

    def head_linears(self) -> Iterator[nn.Linear]:
        for part in self.model.head_parts().values():
            yield from linears(part)

    def nbytes(self, skip: SkipConfig) -> int:
        self._check(skip.resolve(self.model.num_layers))
        return super().nbytes(skip)

    def read_by(self, skip: SkipConfig) -> list[float]:
        bits = skip.low.bits if skip.low is not None and skip.rounded() else None
        return [*self.model.weight_bytes(bits)["sublayers"], self.head_bytes(skip)]


def _accepts_positions(base: Any, windows: Mapping[str, int | None]) -> bool:
    """Whether a decoder accepts positions and finished masks for rows of different lengths.

    It does if its forward has `position_ids`, if it makes its masks with the library's functions,
    which pass finished ones through, and if its source does not otherwise ask a cache for a single
    length (as ALiBi does). If windows differ, its forward must accept masks by layer type.
    """
    kind = type(base)
    source = _source(kind)
    return (
        base.config.get_text_config()._attn_implementation in ("eager", "sdpa")
        and {*windows} <= {"", "full_attention", "sliding_attention"}
        and (len({*windows.values()}) == 1 or ", dict)" in _source(kind.forward))
        and "position_ids" in inspect.signature(kind.forward).parameters
        and "create_causal_mask" in source
        and source.count("get_seq_length") <= 1
        and "alibi" not in source
    )


def _source(thing: Any) -> str:
    """The source of a function, or of the module of a class; empty if there is none."""
    try:
        return inspect.getsource(
            sys.modules[thing.__module__] if isinstance(thing, type) else thing
        )
    except (OSError, TypeError):  # for example, in a notebook
        return ""
