"""The model as clients of OpenAI's API see it, and the texts for their requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from layerskip.checkpoints import Loaded
from layerskip.grammars import lark, response_format
from layerskip.requests import end_tokens, read_text
from layerskip.serving.answers import Answer, Choice
from layerskip.serving.fields import Asked, ChatAsked, CompletionAsked, Refusal, refusing
from layerskip.serving.formats import format_of, reasoning_of
from layerskip.serving.formats.base import Format
from layerskip.serving.formats.reading import Reader
from layerskip.serving.history import Penalties, StopStrings
from layerskip.serving.prompts import check_tokens, prompts_of, seen_in
from layerskip.serving.requests import TextRequest
from layerskip.text import decode_text

COLDEST = 0.001  # lower temperatures give scores beyond float32
_PREDICTED = 16  # maximum characters of a prediction per token of the context


@dataclass(frozen=True)
class Served:
    """The model as clients see it.

    Attributes:
        context: maximum number of tokens of a prompt and its text together.
        max_new_tokens: default of requests.
        temperature, top_k, top_p: likewise.
        format: the format of the model's tool calls, if known.
        reasoning: the marks around its reasoning, if any.
        longest_token: maximum number of characters in a token.
        added: tokens that a tokenizer adds to its model's, by their text.
    """

    name: str
    loaded: Loaded
    tokenizer: Any
    vocabulary: int
    context: int
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ends: frozenset[int] = frozenset()
    format: Format | None = None
    reasoning: tuple[str, str] | None = None
    longest_token: int = 256
    added: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        name: str | None = None,
        *,
        context: int | None = None,
        max_new_tokens: int = 1024,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> Served:
        """Describe a loaded model by its own configuration.

        Args:
            name: by default the model's own name, without the path of its folder.
            tool_parser, reasoning_parser: names of formats; "auto": found from the chat template.
        """
        model, tokenizer = loaded.model, loaded.tokenizer
        text, config = model.config.get_text_config(decoder=True), model.generation_config
        longest = getattr(text, "max_position_embeddings", None)
        limits = [limit for limit in (context, longest) if limit is not None]
        if not limits:
            raise ValueError("this model does not limit the length of its texts; give --context N")
        local = loaded.folder is not None or Path(loaded.name).is_file()
        plain = Path(loaded.name).resolve().name if local else loaded.name
        template = tokenizer.chat_template
        template = template if isinstance(template, str) else json.dumps(template or "")
        return cls(
            name or plain,
            loaded,
            tokenizer,
            text.vocab_size,
            min(limits),
            max_new_tokens,
            temperature=config.temperature or 1.0,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            ends=end_tokens(model),
            format=format_of(tool_parser, template),
            reasoning=reasoning_of(reasoning_parser, template),
            longest_token=max(map(len, tokenizer.get_vocab())),
            added=tokenizer.get_added_vocab(),
        )

    @property
    def encoder(self) -> bool:
        """Whether it reads a prompt with an encoder before it decodes."""
        return bool(self.loaded.model.config.is_encoder_decoder)

    def check_name(self, name: str) -> None:
        """Refuse another model's name."""
        if name != self.name:
            message = f"there is no model {name!r}; this server has {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def marks(self, texts: Sequence[str]) -> frozenset[int]:
        """The tokens that correspond to these marks."""
        return frozenset(self.added[each] for each in texts if each in self.added)


def answer_of(asked: Asked, served: Served) -> Answer:
    """Prepare the answer to a request: n texts for each prompt, choice i with seed + i.

    Raises:
        Refusal: another model is named, a prompt is empty, too long or has unknown tokens, or
            fields contradict each other.
    """
    served.check_name(asked.model)
    if asked.stream_options is not None and not asked.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
    chat = isinstance(asked, ChatAsked)
    if isinstance(asked, ChatAsked):
        asked.check()
    told, echo = asked.told, isinstance(asked, CompletionAsked) and asked.echo
    if served.encoder and echo and told is not None:
        message = "this model reads its prompt in an encoder, which gives no log-probabilities"
        raise Refusal(400, message, param="echo")
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    check_tokens(asked.stop_token_ids, "stop_token_ids", served)
    prompts, seen = prompts_of(asked, served)
    reader = _Readers(asked, served)
    shared = {
        **_sampling(asked, served),
        "eos": frozenset() if asked.ignore_eos else served.ends | {*asked.stop_token_ids},
        "predicted": _predicted(asked, served),
        "top_logprobs": told,
        "prompt_logprobs": int(echo and told is not None),
    }
    before, grammar = _bias(asked, served), reader.grammar() or _grammar(asked, served)
    choices = list[Choice]()
    for text in prompts:
        limit = _limit(asked, len(text), served)
        with refusing("prompt"):
            prompt, encoded, also = read_text(served.loaded.model, text, max(1, limit))
        pictures = None if seen is None else seen_in(seen, served)
        penalties = Penalties(len(prompt), asked.frequency_penalty, asked.presence_penalty)
        stop = StopStrings(served.tokenizer, asked.stops, len(prompt)) if asked.stops else None
        for number in range(asked.n):
            task = TextRequest(
                prompt,
                max(1, limit),
                seed=seed + (number if asked.same_seed else len(choices)),
                stop=stop,
                processors=[*also, *before, *([penalties] if penalties else []), *grammar],
                pictures=pictures,
                encoded=encoded,
                **shared,
            )
            choice = Choice(
                served.tokenizer,
                task,
                asked.stops,
                reader=reader(text),
                keep=reader.keep,
                echo=_echoed(asked, text, served) if echo else None,
                hidden=limit == 0,
            )
            choices.append(choice)
    return Answer(chat, served.name, choices, called=reader.named)


def _sampling(asked: Asked, served: Served) -> dict[str, Any]:
    temperature = served.temperature if asked.temperature is None else asked.temperature
    if 0 < temperature < COLDEST:
        message = f"temperature must be 0 or at least {COLDEST}, got {temperature}"
        raise Refusal(400, message, param="temperature")
    if not temperature:
        return {"do_sample": False}
    top_k = served.top_k if asked.top_k is None else max(0, asked.top_k)  # other servers use -1
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": min(top_k, served.vocabulary),
        "top_p": served.top_p if asked.top_p is None else asked.top_p,
        "min_p": asked.min_p,
    }


def _predicted(asked: Asked, served: Served) -> list[int]:
    """Tokens of the prediction, at most as many as a text may have."""
    if asked.prediction is None:
        return []
    text, most = asked.prediction.text, _PREDICTED * served.context
    tokens: list[int] = served.tokenizer(text[:most], add_special_tokens=False)["input_ids"]
    return tokens[: served.context]


def _echoed(asked: Asked, prompt: list[int], served: Served) -> str:
    """The prompt, to be returned before the text."""
    assert isinstance(asked, CompletionAsked)
    given = asked.prompts[0] if len(asked.prompts) == 1 else None
    return given if isinstance(given, str) else decode_text(served.tokenizer, prompt)


class _Readers:
    """Makes readers for the texts of a request: of tool calls and reasoning, if it is a chat.

    Attributes:
        keep: special tokens whose text is read.
        named: whether one tool is required by name.
    """

    def __init__(self, asked: Asked, served: Served) -> None:
        self._asked, self._served = asked, served
        self._format: Format | None = None
        self._inside = False
        self._reasoning = served.reasoning if isinstance(asked, ChatAsked) else None
        self.named = False
        marks = list(self._reasoning or ())
        if isinstance(asked, ChatAsked) and asked.choice != "none":
            self._format, self.named = served.format, asked.choice not in ("auto", "required")
            if self._format is None:
                raise Refusal(
                    400,
                    "the format of tool calls in this model's chat template is not known; "
                    "leave out tools, or start the server with --tool-parser",
                    param="tools",
                )
            marks += self._format.marks
        self.keep = served.marks([mark.strip() for mark in marks])

    def __call__(self, prompt: list[int]) -> Reader | None:
        if not isinstance(self._asked, ChatAsked):
            return None
        several = self._asked.parallel_tool_calls and not self.named
        inside = False
        if self._reasoning is not None:  # the template may have started it
            text: str = self._served.tokenizer.decode(prompt[-16:]).rstrip()
            inside = text.endswith(self._reasoning[0].rstrip())
        return Reader(self._format, self._reasoning, inside=inside, several=several)

    def grammar(self) -> list[Any]:
        """A processor that enforces calls which are required, or required by name."""
        asked, served = self._asked, self._served
        if not isinstance(asked, ChatAsked) or self._format is None or asked.choice == "auto":
            return []
        tools = [
            each.function.model_dump()
            for each in asked.tools
            if not self.named or each.function.name == asked.choice
        ]

        def mark(text: str) -> str:
            tokens = served.marks([text])
            return f"<[{next(iter(tokens))}]>" if tokens else json.dumps(text)

        several = asked.parallel_tool_calls and not self.named
        ends = sorted(served.ends) or None
        with refusing("tools"):
            rules = self._format.grammar(tools, several, mark)
            return [lark(f"start: calls\n{rules}", served.tokenizer, eos=ends)]


def _limit(asked: Asked, prompt: int, served: Served) -> int:
    """The maximum number of new tokens after a prompt of `prompt` tokens."""
    name, wanted = asked.most
    # An encoder-decoder's own decoder begins with one token.
    room = served.context - (1 if served.encoder and prompt <= served.context else prompt)
    if room < 1 or (wanted or 1) > room:
        more = f"{name} asks for {wanted} more" if wanted and room > 0 else "one more is needed"
        raise Refusal(
            400,
            f"this model's texts have at most {served.context} tokens; the prompt has {prompt}, "
            f"and {more}; make it shorter",
            param=name if room > 0 else "messages" if isinstance(asked, ChatAsked) else "prompt",
            code="context_length_exceeded",
        )
    return min(served.max_new_tokens, room) if wanted is None else wanted


def _grammar(asked: Asked, served: Served) -> list[Any]:
    """`response_format` as a processor, which serves any number of texts."""
    if asked.response_format is None:
        return []
    ends = sorted(served.ends) or None
    with refusing("response_format"):
        return [*response_format(asked.response_format, served.tokenizer, eos=ends)]


def _bias(asked: Asked, served: Served) -> list[Any]:
    """`repetition_penalty` and `logit_bias` as the library's processors."""
    bias, most = list[Any](), served.vocabulary - 1
    for token, value in asked.logit_bias.items():
        number = int(token) if token.isdecimal() and len(token) < 12 else -1
        if not 0 <= number <= most:
            shown = token if len(token) < 40 else f"{token[:40]}..."
            message = f"logit_bias: token ids must be from 0 to {most}, got {shown!r}"
            raise Refusal(400, message, param="logit_bias")
        bias.append([[number], value])
    penalty = asked.repetition_penalty
    processors = [] if penalty == 1 else [RepetitionPenaltyLogitsProcessor(penalty)]
    return processors + ([SequenceBiasLogitsProcessor(bias)] if bias else [])
