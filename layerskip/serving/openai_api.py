"""The model as clients of OpenAI's API see it, and the texts for their requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from layerskip.api.arguments import end_tokens, look, read_text
from layerskip.api.loading import Loaded
from layerskip.config.skips import COLDEST
from layerskip.serving.answers import Answer, Choice
from layerskip.serving.fields import ChatRequest, CompletionRequest, GenerationRequest
from layerskip.serving.formats import format_of, left_open, reasoning_of, template_of
from layerskip.serving.formats.answer_reader import Reader
from layerskip.serving.formats.base import Format, schema_of
from layerskip.serving.history import Penalties, StopStrings
from layerskip.serving.requests import Refusal, TextRequest, refusing
from layerskip.serving.tokenization import check_tokens, prompts_of
from layerskip.texts.grammars import json_schema, lark, response_format
from layerskip.texts.tokens import decode_text

_PREDICTED = 16  # maximum characters of a prediction per token of the context


class Served:
    """A loaded model as clients see it, described by its own configuration.

    Args:
        name: by default the model's own name, without the path of its folder.
        tool_parser, reasoning_parser: names of formats; "auto": found from the chat template.

    Attributes:
        context: maximum number of tokens of a prompt and its text together.
        max_new_tokens, temperature, top_k, top_p: defaults of requests.
        format: the format of the model's tool calls, if known.
        reasoning: the marks around its reasoning, if any.
        longest_token: maximum number of characters in a token.
        added: tokens that a tokenizer adds to its model's, by their text.
    """

    def __init__(
        self,
        loaded: Loaded,
        name: str | None = None,
        *,
        context: int | None = None,
        max_new_tokens: int = 1024,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        text = loaded.model.config.get_text_config(decoder=True)
        longest = getattr(text, "max_position_embeddings", None)
        limits = [limit for limit in (context, longest) if limit is not None]
        if not limits:
            raise ValueError("this model does not limit the length of its texts; give --context N")
        local = loaded.folder is not None or Path(loaded.name).is_file()
        self.name = name or (Path(loaded.name).resolve().name if local else loaded.name)
        self.loaded, self.tokenizer, self.vocabulary = loaded, loaded.tokenizer, text.vocab_size
        self.context, self.max_new_tokens = min(limits), max_new_tokens
        config = loaded.model.generation_config
        self.temperature, self.top_k = config.temperature or 1.0, config.top_k or 0
        self.top_p = 1.0 if config.top_p is None else config.top_p
        self.ends = end_tokens(loaded.model)
        self.eos = tuple(sorted(self.ends)) or None
        template = template_of(self.tokenizer)
        self.format = format_of(tool_parser, template)
        self.reasoning = reasoning_of(reasoning_parser, template)
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))
        self.added: Mapping[str, int] = self.tokenizer.get_added_vocab()

    @property
    def encoder(self) -> bool:
        """Whether it reads a prompt with an encoder before it decodes."""
        return bool(self.loaded.model.config.is_encoder_decoder)

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name not in (None, self.name):
            message = f"there is no model {name!r}; this server has {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def marks(self, texts: Sequence[str]) -> frozenset[int]:
        """The tokens that correspond to these marks."""
        return frozenset(self.added[each] for each in texts if each in self.added)


def answer_of(
    body: GenerationRequest,
    served: Served,
    form: Callable[[Sequence[int]], Sequence[Any]] = lambda prompt: (),
) -> Answer:
    """Prepare the answer to a request: n texts for each prompt, choice i with seed + i.

    Args:
        form: gives the logits processors after a prompt if the request asks for no form or tools.

    Raises:
        Refusal: another model is named, a prompt is empty, too long or has unknown tokens, or
            fields contradict each other.
    """
    served.check_name(body.model)
    body.check()
    chat, num_logprobs = body if isinstance(body, ChatRequest) else None, body.num_logprobs
    prompt_logprobs = int(
        isinstance(body, CompletionRequest) and body.echo and num_logprobs is not None
    )
    if served.encoder and prompt_logprobs:
        message = "this model reads its prompt in an encoder, which gives no log-probabilities"
        raise Refusal(400, message, param="echo")
    temperature = served.temperature if body.temperature is None else body.temperature
    sampled = temperature >= COLDEST
    seed = secrets.randbits(32) if body.seed is None else body.seed
    check_tokens(body.stop_token_ids, "stop_token_ids", served)
    prompts, seen = prompts_of(body, served)
    format_, reasoning = (_format(chat, served), served.reasoning) if chat else (None, None)
    after = left_open(reasoning, served.tokenizer, prompts[0])
    if body.response_format is None and format_ is None:
        grammar = form(prompts[0])
    else:
        grammar = _form(body, served, format_, after)
    if body.response_format is not None and grammar:
        format_ = None  # no calls are read in text of a form
    marks = [*(reasoning or ()), *(() if format_ is None else format_.marks)]
    keep = served.marks([mark.strip() for mark in marks])
    names = {tool.function.name for tool in chat.tools} if chat else {*()}
    several = chat is None or chat.several
    predicted = _predicted(body, served)
    choices = list[Choice]()
    for index, text in enumerate(prompts):
        limit = _limit(body, len(text), served)
        with refusing("prompt"):
            prompt, encoded, also = read_text(served.loaded.model, text, max(1, limit))
        with refusing("messages"):
            pictures = None if seen is None else look(served.loaded.model, seen)
        echo = None
        if isinstance(body, CompletionRequest) and body.echo:
            given = body.prompts[index]
            echo = given if isinstance(given, str) else decode_text(served.tokenizer, text)
        task = TextRequest(
            prompt,
            max(1, limit),
            do_sample=sampled,
            temperature=temperature if sampled else None,
            top_k=served.top_k if body.top_k is None else max(0, body.top_k),  # -1 also means all
            top_p=served.top_p if body.top_p is None else body.top_p,
            min_p=body.min_p,
            eos=frozenset() if body.ignore_eos else served.ends | {*body.stop_token_ids},
            stop=StopStrings(served.tokenizer, body.stops, len(prompt)) if body.stops else None,
            processors=[*also, *_bias(body, len(prompt), served), *grammar],
            predicted=predicted,
            top_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
            pictures=pictures,
            encoded=encoded,
        )
        for number in range(body.n):
            own = number if body.same_seed else len(choices)
            choice = Choice(
                served.tokenizer,
                replace(task, seed=seed + own),
                body.stops,
                reader=Reader(format_, names, reasoning, inside=after is not None, several=several),
                keep=keep,
                echo=echo,
                hidden=limit == 0,
            )
            choices.append(choice)
    return Answer(body, served.name, choices)


def _predicted(body: GenerationRequest, served: Served) -> list[int]:
    """Tokens of the prediction, at most as many as a text may have."""
    if body.prediction is None:
        return []
    text, most = body.prediction.text, _PREDICTED * served.context
    tokens: list[int] = served.tokenizer(text[:most], add_special_tokens=False)["input_ids"]
    return tokens[: served.context]


def _format(body: ChatRequest, served: Served) -> Format | None:
    """The format of the answer's tool calls; None if there may be none."""
    if body.choice == "none":
        return None
    if served.format is None:
        raise Refusal(
            400,
            "the format of tool calls in this model's chat template is not known; leave out tools, "
            "or start the server with --tool-parser",
            param="tools",
        )
    return served.format


def _form(
    body: GenerationRequest, served: Served, format_: Format | None, after: str | None
) -> Sequence[Any]:
    """The form that a request asks for as processors: `response_format`, or calls if required."""
    how: dict[str, Any] = {"eos": served.eos, "after": after}
    if body.response_format is not None:
        with refusing("response_format"):
            return response_format(body.response_format, served.tokenizer, **how)
    if not isinstance(body, ChatRequest) or format_ is None or body.choice == "auto":
        return []
    tools = [
        each.function.model_dump()
        for each in body.tools
        if body.choice in ("required", each.function.name)
    ]

    def mark(text: str) -> str:
        tokens = served.marks([text])
        return f"<[{next(iter(tokens))}]>" if tokens else json.dumps(text)

    with refusing("tools"):
        for tool in tools:  # one by one, so that an error shows the schema and not our rules
            json_schema(schema_of(tool), served.tokenizer, eos=served.eos)
        rules = f"start: calls\n{format_.grammar(tools, body.several, mark)}"
        return [lark(rules, served.tokenizer, **how)]


def _limit(body: GenerationRequest, prompt: int, served: Served) -> int:
    """The maximum number of new tokens after a prompt of `prompt` tokens."""
    name, wanted = body.most
    # An encoder-decoder's own decoder begins with one token.
    room = served.context - (1 if served.encoder and prompt <= served.context else prompt)
    if room < 1 or (wanted or 1) > room:
        more = f"{name} asks for {wanted} more" if wanted and room > 0 else "one more is needed"
        raise Refusal(
            400,
            f"this model's texts have at most {served.context} tokens; the prompt has {prompt}, "
            f"and {more}; make it shorter",
            param=name if room > 0 else "messages" if isinstance(body, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    return min(served.max_new_tokens, room) if wanted is None else wanted


def _bias(body: GenerationRequest, width: int, served: Served) -> list[Any]:
    """`repetition_penalty`, `logit_bias` and penalties as processors, for a prompt's length."""
    processors, bias, most = list[Any](), list[Any](), served.vocabulary - 1
    for token, value in body.logit_bias.items():
        number = int(token) if token.isdecimal() and len(token) < 12 else -1
        if not 0 <= number <= most:
            shown = token if len(token) < 40 else f"{token[:40]}..."
            message = f"logit_bias: token ids must be from 0 to {most}, got {shown!r}"
            raise Refusal(400, message, param="logit_bias")
        bias.append([[number], value])
    if body.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(body.repetition_penalty))
    if bias:
        processors.append(SequenceBiasLogitsProcessor(bias))
    if body.frequency_penalty or body.presence_penalty:
        processors.append(Penalties(width, body.frequency_penalty, body.presence_penalty))
    return processors
