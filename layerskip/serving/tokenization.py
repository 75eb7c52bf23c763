"""Encodes prompts of requests as token ids, with the chat template and pictures if needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from layerskip.serving import fields
from layerskip.serving.fields import ChatRequest, GenerationRequest
from layerskip.serving.requests import Refusal, refusing
from layerskip.texts.pictures import pictures_in

if TYPE_CHECKING:
    from layerskip.serving.openai_api import Served

Encoded = Mapping[str, Any]
# Arguments of the library's own method, such as another template or padding: a template never gets
# them.
_RESERVED = {
    name
    for kind in (PreTrainedTokenizerBase, ProcessorMixin)
    for name in signature(kind.apply_chat_template).parameters
} - {"add_generation_prompt", "continue_final_message", "documents"}


def prompts_of(body: GenerationRequest, served: Served) -> tuple[list[list[int]], Encoded | None]:
    """Token ids of each prompt; for a chat with pictures, also the processor's whole output."""
    seen: Encoded | None = None
    if isinstance(body, ChatRequest):
        also = _for_template(body)
        if body.tools and body.choice != "none":
            also["tools"] = [each.model_dump(exclude_none=True) for each in body.tools]
        if body.reasoning_effort is not None:
            also["reasoning_effort"] = body.reasoning_effort
        ids, seen = _templated(body.messages, also, served)
        param, prompts = "messages", [ids]
    else:
        assert isinstance(body, fields.CompletionRequest)
        param, prompts = "prompt", []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                _check_length(len(prompt), param, served)
                prompt = served.tokenizer(prompt)["input_ids"]
            prompts.append(prompt)
    if not prompts or not all(prompts):
        raise Refusal(400, f"{param} must hold at least one token", param=param)
    for prompt in prompts:
        check_tokens(prompt, param, served)
    return prompts, seen


def check_tokens(tokens: Sequence[int], param: str, served: Served) -> None:
    """Refuse token ids outside the vocabulary."""
    strange = next((token for token in tokens if not 0 <= token < served.vocabulary), None)
    if strange is not None:
        message = f"{param}: token ids must be from 0 to {served.vocabulary - 1}, got {strange}"
        raise Refusal(400, message, param=param)


def _check_length(characters: int, param: str, served: Served) -> None:
    """Refuse a text that is certainly too long, before it is encoded."""
    most = served.context * served.longest_token
    if characters > most:
        message = (
            f"{param} has {characters} characters, more than the {served.context} tokens of this "
            "model's texts can hold; make it shorter"
        )
        raise Refusal(400, message, param=param, code="context_length_exceeded")


def _for_template(body: ChatRequest | fields.Tokenize) -> dict[str, Any]:
    """A copy of `chat_template_kwargs`; refuses those that the template would not get."""
    if reserved := sorted(_RESERVED & body.chat_template_kwargs.keys()):
        message = f"chat_template_kwargs: leave out {', '.join(reserved)}: not for the template"
        raise Refusal(400, message, param="chat_template_kwargs")
    return dict(body.chat_template_kwargs)


def _templated(
    messages: Sequence[fields.Message], also: Mapping[str, Any], served: Served
) -> tuple[list[int], Encoded | None]:
    """Apply the chat template, with further arguments; returns the same as `prompts_of`."""
    tokenizer = served.tokenizer
    if not tokenizer.chat_template:
        raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
    conversation = [message.for_template() for message in messages]
    characters = sum(len(part.text) for each in messages for part in each.parts)
    _check_length(characters, "messages", served)
    if addresses := [place for each in messages for place in each.pictures]:
        with refusing("messages"):
            _ = served.loaded.processor  # raises for a model without vision
            seen = served.loaded.encode_pictures(conversation, pictures_in(addresses), **also)
        return seen["input_ids"][0].tolist(), seen
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            conversation, **{"add_generation_prompt": True, **also, "return_dict": True}
        )["input_ids"]
    except Exception as error:  # templates raise errors of any kind
        message = f"the model's chat template rejects this conversation: {error}"
        raise Refusal(400, message, param="messages") from error
    return ids, None


def tokenized(body: fields.Tokenize, served: Served) -> dict[str, Any]:
    """Token ids of a text or a chat, in vLLM's format.

    Raises:
        Refusal: not exactly one of the two is given, or it is too long or rejected by the template.
    """
    if (body.prompt is None) == (not body.messages):
        raise Refusal(400, "give either prompt or messages", param="prompt")
    if body.prompt is not None:
        _check_length(len(body.prompt), "prompt", served)
        special = body.add_special_tokens
        ids = served.tokenizer(body.prompt, add_special_tokens=special)["input_ids"]
    else:
        also = {"add_generation_prompt": body.add_generation_prompt, **_for_template(body)}
        ids, _ = _templated(body.messages, also, served)
    strings = served.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": served.context,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenized(body: fields.Detokenize, served: Served) -> dict[str, str]:
    """The text of token ids, including special tokens."""
    check_tokens(body.tokens, "tokens", served)
    return {"prompt": served.tokenizer.decode(body.tokens)}
