"""Checks the arguments of `model.generate()`, and converts them and its results for the engine.

Arguments that the engine cannot support exactly are refused by name. Shapes: B rows, W width of the
padded prompts, n new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip.cache.library_cache import EncoderStates
from layerskip.decoding.laws import Law
from layerskip.decoding.rounds import Round
from layerskip.families.known import CONDITIONAL, unopened
from layerskip.library import CACHE_NAMES, cache_in, holds_tokens, pad_token
from layerskip.model.picture_features import Pictures

# The library's defaults for sampling.
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
_OTHER_MEDIA = {
    "video": "video",
    "pixel_values_videos": "video",
    "audio": "audio",
    "input_features": "audio",
}
_HARMLESS = {"logits_to_keep", "use_cache", "cache_position", "position_ids", *CACHE_NAMES}
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


def checked_mask(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Tensor:
    """The attention mask (B, W); raises an error that names any unsupported argument."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"beam search is not supported: num_beams must be 1, got {config.num_beams}; "
            "leave out custom_generate for beams"
        )
    for name in ("dola_layers", "penalty_alpha", "output_attentions", "output_hidden_states"):
        if model_kwargs.pop(name, None) or getattr(config, name, None):
            raise ValueError(f"{name} is not supported; leave it out, or leave out custom_generate")
    if model_kwargs.pop("synced_gpus", False):
        raise ValueError(
            "synced_gpus is not supported: ranks would draft different lengths; "
            "leave out custom_generate under ZeRO-3 or FSDP"
        )
    for name in ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"):
        if model_kwargs.pop(name, None) or getattr(config, name, None):
            warnings.warn(f"{name} has no effect under layerskip", UserWarning, stacklevel=4)
    if "inputs_embeds" in model_kwargs:
        raise ValueError("inputs_embeds is not supported: processors need tokens; pass input_ids")
    if holds_tokens(cache_in(model_kwargs)):
        raise ValueError(
            "a custom KV cache (past_key_values, cache) is not supported: the engine keeps "
            "one itself; pass the whole conversation as input_ids"
        )
    mask = model_kwargs.pop("attention_mask", None)
    mask = torch.ones_like(input_ids) if mask is None else mask  # (B, W)
    check_mask(input_ids, mask)
    unknown = sorted(
        name for name, value in model_kwargs.items() if value is not None and name not in _HARMLESS
    )
    if unknown:
        raise ValueError(f"model arguments {', '.join(unknown)} are not supported; leave them out")
    positions = model_kwargs.get("position_ids")
    usual = (mask.cumsum(-1) - 1).clamp_min(0)  # (B, W)
    if positions is not None and not torch.equal((positions * mask).expand_as(usual), usual * mask):
        raise ValueError("custom position_ids are not supported; leave them out")
    if not mask.any(-1).all():
        raise ValueError("a prompt is empty: every row needs at least one token")
    if not mask[:, -1].all():
        raise ValueError(
            "prompts are padded on the right; pad on the left (tokenizer.padding_side='left'), or "
            "give an attention_mask if they only end with the pad token"
        )
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise ValueError(
            "attention_mask has holes: zeros are supported in front of a prompt only, as padding; "
            "give an attention_mask if a prompt only contains the pad token"
        )
    if model_kwargs.get("use_cache") is False:
        warnings.warn("use_cache=False has no effect under layerskip", UserWarning, stacklevel=4)
    return mask


def drop_token_types(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Take token types out of the arguments if they are zeros and mean the same as none.

    They do unless the model embeds them, as GPT-2 does. The model is asked, with two tokens.
    """
    for name in _TOKEN_TYPES:
        types = model_kwargs.get(name)  # (B, W)
        if types is None or types.any():
            continue
        tokens, zeros = input_ids[:1, -2:], types[:1, -2:]  # (1, T) each
        if torch.equal(model(tokens)[0], model(tokens, **{name: zeros})[0]):
            del model_kwargs[name]


def encoded_of(
    input_ids: Tensor, read: Tensor | None, model_kwargs: dict[str, Any]
) -> EncoderStates | None:
    """Take the encoder's input and states out of the arguments; None without an encoder.

    Args:
        input_ids: the decoder's, (B, W).
        read: what was given to `model.generate()`, (rows, E).
    """
    outputs = model_kwargs.pop("encoder_outputs", None)
    if outputs is None:
        return None
    states = outputs[0]  # (B, E, H)
    mask = model_kwargs.pop("attention_mask", None)
    mask = states.new_ones(states.shape[:2], dtype=torch.long) if mask is None else mask  # (B, E)
    tokens = None
    if read is not None and not read.is_floating_point():
        tokens = read.repeat_interleave(len(input_ids) // len(read), dim=0)  # (B, E)
        tokens = tokens if tokens.shape == mask.shape else None
    model_kwargs["attention_mask"] = model_kwargs.pop("decoder_attention_mask", None)
    return EncoderStates(states, mask, tokens)


def pictures_of(
    model: Any, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Pictures | None:
    """Take the pictures in prompts (B, W) out of the arguments; None if there are none.

    Raises:
        ValueError: other media, or another number of features than of placeholders.
    """
    encoded = model_kwargs.pop("mm_encoder_outputs", None) or {}
    for name, what in _OTHER_MEDIA.items():
        if model_kwargs.get(name) is not None or encoded.get(name) is not None:
            raise ValueError(
                f"{what} ({name}) is not supported, only text and pictures; leave out "
                "custom_generate"
            )
    outer: Any = model.config
    text, images = outer.get_text_config(), encoded.get("image")
    wrapper = CONDITIONAL.get(outer.model_type)
    two_way = None
    if wrapper is not None:
        types = model_kwargs.pop(wrapper.types, None)  # (B, W)
        if types is not None and wrapper.two_way(text):
            two_way = (types == 1) | (types == 2)
            two_way = two_way if bool(two_way.any()) else None
    if images is None and two_way is None:
        return None
    if unopened(outer) is not None or wrapper is None:
        raise ValueError(
            f"pictures are not supported with {outer.model_type!r}; supported are "
            f"{', '.join(CONDITIONAL)}"
        )
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise ValueError("prefill_chunk_size is not supported with pictures; leave it out")
    token: int = outer.image_token_id
    if token >= text.vocab_size:
        raise ValueError(
            f"the placeholder of pictures must be one of {text.vocab_size} tokens, it is {token}"
        )
    placeholders, features = torch.zeros_like(input_ids).bool(), torch.empty(0, text.hidden_size)
    if images is not None:
        parts = images.pooler_output  # (..., H), or one for each picture
        parts = [parts] if isinstance(parts, Tensor) else parts
        features = torch.cat([part.flatten(0, -2) for part in parts])  # (N, H)
        placeholders = input_ids == token  # (B, W)
    if len(features) != int(placeholders.sum()):
        raise ValueError(
            f"prompts have {int(placeholders.sum())} placeholders (token {token}) for "
            f"{len(features)} features of pictures; take both from one call of the processor"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask  # (B, W)
    return Pictures.of(features, placeholders, mask, two_way)


@torch.no_grad()
def look(model: Any, inputs: Mapping[str, Tensor]) -> Pictures | None:
    """Encode a prompt's pictures, prepared by a processor, with the model's vision tower.

    Raises:
        ValueError: as for `pictures_of`.
    """
    given: dict[str, Any] = dict(inputs)
    tower = model.base_model.get_image_features
    names = inspect.signature(tower).parameters.keys() & given
    images = tower(**{name: given.pop(name) for name in names}, return_dict=True)
    given["mm_encoder_outputs"] = {"image": images}
    return pictures_of(model, given["input_ids"], model.generation_config, given)


@torch.no_grad()
def read_text(
    model: Any, tokens: list[int], max_new_tokens: int
) -> tuple[list[int], EncoderStates | None, list[Any]]:
    """Encode a text with an encoder-decoder before it decodes; for other models it stays the same.

    Returns:
        The decoder's prompt, the encoder's output, and the processors that the model's generation
        config asks for.

    Raises:
        ValueError: the encoder cannot read so many tokens, or the generation config asks for beams.
    """
    if not model.config.is_encoder_decoder:
        return tokens, None, []
    most = getattr(model.config.get_text_config(encoder=True), "max_position_embeddings", None)
    if most is not None and len(tokens) > most:
        raise ValueError(f"the encoder reads at most {most} tokens, got {len(tokens)}")
    given: dict[str, Any] = {}

    def prepared(_: Any, input_ids: Tensor, **others: Any) -> Tensor:
        given.update(others, input_ids=input_ids)
        return input_ids

    read = torch.tensor([tokens], device=model.device)  # (1, E)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(read), "do_sample": False}
    model.generate(read, max_new_tokens=max_new_tokens, custom_generate=prepared, **how)
    prompt, config = given.pop("input_ids"), given.pop("generation_config")
    processors = [*given.pop("logits_processor")]
    del given["stopping_criteria"]
    encoded = encoded_of(prompt, read, given)
    checked_mask(prompt, config, given)
    return prompt[0].tolist(), encoded, processors


def check_ids(input_ids: Any) -> None:
    """Raise an error for anything except a batch of prompts in token ids, (B, W)."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"prompts must be a tensor of token ids, got {type(input_ids).__name__}; tokenize text "
            'first, and pass the result of tokenizer(text, return_tensors="pt")'
        )
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            "input_ids must be (rows, tokens) with at least one token each, "
            f"got shape {tuple(input_ids.shape)}"
        )


def check_mask(input_ids: Tensor, mask: Any) -> None:
    """Raise an error for anything except a mask of the shape of prompts (B, W)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask needs shape {[*input_ids.shape]}, got {[*mask.shape]}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 0 (padding) and 1 only, got other numbers")


def check_tokens(model: Any, tokens: Tensor) -> None:
    """Raise an error for token ids without an embedding, before they are looked up.

    Raises:
        TypeError: they are not integers.
        ValueError: one is outside the vocabulary.
    """
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids must be int64 or int32, got a tensor of {tokens.dtype}")
    embeddings = model.get_input_embeddings()
    count = getattr(embeddings, "num_embeddings", None)
    if count is None or not tokens.numel():  # the model has its own kind of table
        return
    least, most = (int(end) for end in tokens.aminmax())
    if least < 0 or most >= count:
        raise ValueError(
            f"token ids must be in 0..{count - 1} for this model, got "
            f"{least if least < 0 else most}; take them from its own tokenizer"
        )


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """End the streamer whatever happens, since something may wait for its next token."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


class _NoScores:
    """What stopping criteria get where `generate()` would give them the scores so far."""

    def __getitem__(self, _: Any = None) -> Any:
        raise ValueError(
            "stopping criteria that read scores are not supported; decide by input_ids, or leave "
            "out custom_generate"
        )

    __len__ = __getitem__


def stop_of(
    criteria: Sequence[Callable[..., Any]], *, scored: bool, together: int = 0
) -> Callable[[int, Tensor], bool] | None:
    """Combine stopping criteria into a function of a row; all are called, as in `generate()`.

    Args:
        together: the number of rows that end together, when the last of them stops: `generate()`
            pads rows that have stopped only if there are end tokens, else it writes on. 0: each
            row ends alone.
    """
    if not criteria:
        return None
    scores = _NoScores() if scored else None
    lengths: dict[int, int] = {}  # of rows that have stopped, at that moment

    def stop(row: int, seen: Tensor) -> bool:
        answers = [criterion(seen, scores) for criterion in criteria]
        stopped = any(bool(torch.as_tensor(answer).all()) for answer in answers)
        if not together:
            return stopped
        if stopped:
            lengths.setdefault(row, seen.shape[1])
        return len(lengths) == together and seen.shape[1] >= max(lengths.values())

    return stop


def padded(input_ids: Tensor, emitted: list[list[int]], config: GenerationConfig) -> Tensor:
    rows = [torch.tensor(tokens, device=input_ids.device) for tokens in emitted]
    new = pad_sequence(rows, batch_first=True, padding_value=pad_token(config))  # (B, n)
    return torch.cat([input_ids, new], dim=1)


def per_step(rounds: list[Round], name: str, rows: int) -> tuple[Tensor, ...]:
    """One (B, V) per step, from the rounds' (emitted, V) per row; zeros for ended rows."""
    chunks = [getattr(round_, name) for round_ in rounds]
    by_row = [torch.cat([chunk[row] for chunk in chunks]) for row in range(rows)]  # (emitted, V)
    return tuple(pad_sequence(by_row))  # of (n, B, V)


def law_of(settings: Mapping[str, Any], rows: int = 1, processors: Sequence[Any] = ()) -> Law:
    """The distribution of processors, then of sampling, as `generate()` has it.

    Args:
        settings: do_sample, temperature, top_k, top_p (see `sampling_of`), min_p; None: off.
    """
    warpers: list[Any] = []
    if settings["do_sample"]:
        names = ("temperature", "top_k", "top_p", "min_p")
        temperature, top_k, top_p, min_p = (settings.get(name) for name in names)
        warpers += [TemperatureLogitsWarper(temperature)] if temperature not in (None, 1.0) else []
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1.0 else []
        warpers += [] if min_p is None else [MinPLogitsWarper(min_p)]
    return Law([*processors, *warpers], do_sample=settings["do_sample"], rows=rows)


def sampling_of(
    model: Any,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> dict[str, Any]:
    """Temperature, top-k and top-p of sampling, as `model.generate()` takes them.

    None means the value of the model's generation config, then the library's default.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    config = getattr(model, "generation_config", None)
    return {
        name: next(
            x for x in (value, getattr(config, name, None), _SAMPLING[name]) if x is not None
        )
        for name, value in given.items()
    }


def end_tokens(model: Any, given: int | Sequence[int] | None = None) -> frozenset[int]:
    """The tokens that end a text: those given, else those of the model's generation config."""
    ends = model.generation_config.eos_token_id if given is None else given
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
