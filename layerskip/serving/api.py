"""The model as clients of OpenAI's interface see it, and the tasks that come of what they ask."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import SequenceBiasLogitsProcessor

from layerskip.checkpoints import Loaded
from layerskip.grammars import response_format
from layerskip.requests import end_tokens
from layerskip.serving.fields import (
    Asked,
    ChatAsked,
    CompletionAsked,
    Content,
    Message,
    Refusal,
)
from layerskip.serving.history import Penalties, StopStrings
from layerskip.serving.requests import TextRequest

COLDEST = 0.001  # a temperature below has scores that float32 does not hold


@dataclass(frozen=True)
class Served:
    """The model as clients see it.

    Attributes:
        context: the most tokens of a prompt and its text together.
        max_new_tokens: where a request says nothing.
        temperature, top_k, top_p: likewise.
    """

    name: str
    tokenizer: Any
    vocabulary: int
    context: int
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        name: str | None = None,
        *,
        context: int | None = None,
        max_new_tokens: int = 1024,
    ) -> Served:
        """A loaded model with what its own configuration says.

        Args:
            name: by default the model's own, without the path of its folder.
        """
        model = loaded.model
        text, config = model.config.get_text_config(), model.generation_config
        longest = getattr(text, "max_position_embeddings", None)
        limits = [limit for limit in (context, longest) if limit is not None]
        if not limits:
            raise ValueError("this model does not say how long its texts may be; give --context N")
        plain = loaded.name if loaded.folder is None else Path(loaded.name).resolve().name
        return cls(
            name or plain,
            loaded.tokenizer,
            text.vocab_size,
            min(limits),
            max_new_tokens,
            temperature=config.temperature or 1.0,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            ends=end_tokens(model),
        )


def tasks_of(asked: Asked, served: Served) -> list[TextRequest]:
    """A task for each choice: n for each prompt, choice i with seed + i.

    Raises:
        Refusal: another model, or a prompt that is empty, too long or of unknown tokens.
    """
    if asked.model != served.name:
        message = f"there is no model {asked.model!r} here, but {served.name!r}"
        raise Refusal(404, message, param="model", code="model_not_found")
    if asked.stream_options is not None and not asked.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
    told = asked.told
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    temperature = served.temperature if asked.temperature is None else asked.temperature
    if 0 < temperature < COLDEST:
        message = f"temperature must be 0 or at least {COLDEST}, got {temperature}"
        raise Refusal(400, message, param="temperature")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": temperature,
            "top_k": served.top_k if asked.top_k is None else asked.top_k,
            "top_p": served.top_p if asked.top_p is None else asked.top_p,
            "min_p": asked.min_p,
        }
    predicted: list[int] = []
    if asked.prediction is not None:
        text = _text(asked.prediction.content)
        predicted = served.tokenizer(text, add_special_tokens=False)["input_ids"]
    grammar = _grammar(asked, served)
    requests: list[TextRequest] = []
    for prompt in _prompts(asked, served):
        bias, limit = _bias(asked, served), _limit(asked, len(prompt), served)
        penalties = Penalties(len(prompt), asked.frequency_penalty, asked.presence_penalty)
        for _ in range(asked.n):
            task = TextRequest(
                prompt,
                limit,
                **sampling,
                seed=seed + len(requests),
                stop=StopStrings(served.tokenizer, asked.stops, len(prompt))
                if asked.stops
                else None,
                processors=[*bias, *([penalties] if penalties else []), *grammar],
                predicted=predicted,
                top_logprobs=told,
            )
            requests.append(task)
    return requests


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _prompts(asked: Asked, served: Served) -> list[list[int]]:
    """Token ids of each prompt."""
    param = "messages" if isinstance(asked, ChatAsked) else "prompt"
    if isinstance(asked, ChatAsked):
        prompts = [_chat(asked.messages, served.tokenizer)]
    else:
        assert isinstance(asked, CompletionAsked)
        given: Any = asked.prompt
        several = given if isinstance(given, list) else [given]
        if several and isinstance(several[0], int):
            several = [several]  # one prompt in token ids
        prompts = [served.tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in several]
    if not prompts or not all(prompts):
        raise Refusal(400, f"{param} must hold at least one token", param=param)
    strange = [t for prompt in prompts for t in prompt if not 0 <= t < served.vocabulary]
    if strange:
        message = f"{param}: token ids must be from 0 to {served.vocabulary - 1}, got {strange[0]}"
        raise Refusal(400, message, param=param)
    return prompts


def _chat(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
    spoken = [
        {"role": "system" if m.role == "developer" else m.role, "content": _text(m.content)}
        for m in messages
    ]
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            spoken, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    except Exception as error:  # a template refuses in whatever way it likes
        message = f"the model's chat template refuses these messages: {error}"
        raise Refusal(400, message, param="messages") from error
    return ids


def _limit(asked: Asked, prompt: int, served: Served) -> int:
    """The most new tokens behind so many of a prompt."""
    name, wanted = asked.most
    room = served.context - prompt
    if room < 1 or (wanted or 1) > room:
        more = f" and {wanted} of {name}" if wanted and room > 0 else " and at least one new one"
        raise Refusal(
            400,
            f"this model's texts have {served.context} tokens at most, the prompt has {prompt}"
            f"{more}; make it shorter",
            param=name if room > 0 else "messages" if isinstance(asked, ChatAsked) else "prompt",
            code="context_length_exceeded",
        )
    return min(served.max_new_tokens, room) if wanted is None else wanted


def _grammar(asked: Asked, served: Served) -> list[Any]:
    """`response_format` as a processor; it serves any number of texts."""
    if asked.response_format is None:
        return []
    ends = sorted(served.ends) or None
    try:
        return [*response_format(asked.response_format, served.tokenizer, eos=ends)]
    except ValueError as error:
        raise Refusal(400, f"response_format: {error}", param="response_format") from error


def _bias(asked: Asked, served: Served) -> list[Any]:
    """`logit_bias` as a processor of the library."""
    if not asked.logit_bias:
        return []
    for token in asked.logit_bias:
        if not token.isdecimal() or not int(token) < served.vocabulary:
            message = f"logit_bias: tokens are 0 to {served.vocabulary - 1}, got {token!r}"
            raise Refusal(400, message, param="logit_bias")
    bias: Any = [[[int(token)], value] for token, value in asked.logit_bias.items()]
    return [SequenceBiasLogitsProcessor(bias)]
