"""The fields of requests as OpenAI's clients send them, with checks.

Fields without effect here are logged; other unsupported ones are refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerskip.serving.requests import Refusal

_LARGE = 2**31 - 1
# Fields about the client or the connection, which do not affect the answer.
_ABOUT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# Fields about other servers' caches and models.
_IDLE = ("cache_control", "prompt_cache_retention", "cache_prompt", "keep_alive", "verbosity")
# Values of other fields that are accepted, since they ask for nothing.
_NOTHING: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "length_penalty": (1.0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "use_beam_search": (False,),
}
_log = logging.getLogger(__name__)


@cache  # once in the life of a server
def _tell_idle(name: str) -> None:
    _log.warning("requests have the field %s, which has no effect here", name)


class Fields(BaseModel):
    """An object in a request.

    Attributes:
        others: names of other servers for fields.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    others: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, given: Any) -> Any:
        """Drop fields that ask for nothing, and rename others."""
        if not isinstance(given, dict):
            return given
        values = {
            name: value
            for name, value in given.items()
            if value is not None
            and name not in _ABOUT
            and not (name in _NOTHING and value in _NOTHING[name])
        }
        for name in values.keys() & {*_IDLE}:
            _tell_idle(name)
            del values[name]
        for name in values.keys() & cls.others.keys():
            values.setdefault(cls.others[name], values.pop(name))
        return values


class TextPart(Fields):
    type: Literal["text"]
    text: str


class ImageUrl(Fields):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"  # ignored: processors have one size


class Part(Fields):
    """A part of a message: text or a picture."""

    type: Literal["text", "image_url"]
    text: str = ""
    image_url: str | ImageUrl | None = None

    @model_validator(mode="after")
    def _is_its_type(self) -> Part:
        if self.model_fields_set != {"type", self.type}:
            raise ValueError(f"a part of type {self.type} needs {self.type}, and nothing else")
        return self

    @property
    def address(self) -> str | None:
        """The address of a picture; None for text."""
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Fields):
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0
    function: CalledFunction


class Message(Fields):
    others = {"reasoning": "reasoning_content"}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] = []

    @model_validator(mode="after")
    def _speaks(self) -> Message:
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool"):
            raise ValueError("a message needs content, unless it is an assistant's or a tool's")
        return self

    @property
    def parts(self) -> list[Part]:
        """The content in parts."""
        content = self.content
        return [Part(type="text", text=content)] if isinstance(content, str) else content

    @property
    def pictures(self) -> list[str]:
        """The addresses of its pictures."""
        return [part.address for part in self.parts if part.address is not None]

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates: text, or parts if it has pictures."""
        parts = [
            {"type": "text", "text": part.text} if part.address is None else {"type": "image"}
            for part in self.parts
        ]
        values: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": parts if self.pictures else "".join(part.text for part in self.parts),
        }
        also = ("name", "tool_call_id", "reasoning_content")
        values |= {name: value for name in also if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            values["tool_calls"] = [
                {"type": "function", "id": each.id, "function": _arguments(each.function)}
                for each in self.tool_calls
            ]
        return values


def _arguments(called: CalledFunction) -> dict[str, Any]:
    """A call with its arguments as templates need them: an object, if they are one."""
    arguments: Any = called.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # written by a model, perhaps cut off
            arguments = called.arguments
    return {"name": called.name, "arguments": arguments}


class ToolFunction(Fields):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Fields):
    type: Literal["function"]
    function: ToolFunction


class ToolName(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: ToolName


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(Fields):
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationRequest(Fields):
    """Fields of both chats and completions: OpenAI's first, then those of other servers.

    Attributes:
        model: None for the only one.
        same_seed: whether every prompt of a list uses `seed`; otherwise the seeds count up.
    """

    others = {"repeat_penalty": "repetition_penalty"}
    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    max_tokens: int | None = Field(None, ge=0, le=_LARGE)
    max_completion_tokens: int | None = Field(None, ge=1, le=_LARGE)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = Field(None, ge=-1, le=_LARGE)
    min_p: Share | None = None
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    same_seed: bool = False

    @property
    def texts(self) -> int:
        """The number of texts requested."""
        return self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def most(self) -> tuple[str, int | None]:
        """The field that limits new tokens, and its value."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):  # some clients send both
            raise Refusal(
                400,
                "max_tokens is the old name of max_completion_tokens; give one of them",
                param="max_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities to report besides each token's own; None: none at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream: true", param="stream_options")


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=_LARGE)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        names = [each.function.name for each in self.tools]
        if self.choice not in ("none", "auto", "required", *names):
            message = f"tool_choice names {self.choice!r}, tools are {', '.join(names) or 'none'}"
            raise Refusal(400, message, param="tool_choice")
        if self.choice == "required" and not names:
            raise Refusal(400, "tool_choice: required needs tools", param="tool_choice")
        if self.choice not in ("none", "auto") and self.response_format is not None:
            message = "response_format and a tool that must be called do not go together"
            raise Refusal(400, message, param="response_format")

    @property
    def named(self) -> bool:
        """Whether one tool is required by name."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def several(self) -> bool:
        """Whether several tools may be called."""
        return self.parallel_tool_calls and not self.named

    @property
    def choice(self) -> str:
        """Which tools may be called: none, auto, required, or the name of one."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        if not self.tools and self.tool_choice != "required":
            return "none"
        return self.tool_choice or "auto"

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as lists of token ids."""
        given: Any = self.prompt
        several: Any = given if isinstance(given, list) else [given]
        return [several] if several and isinstance(several[0], int) else several

    @property
    def texts(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Tokenize(Fields):
    """Text, or messages of a chat, to be encoded."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class Detokenize(Fields):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], body: bytes) -> Body:
    """Parse and check a request's body.

    Raises:
        Refusal: it is not JSON, or a field is unknown, unsupported or wrong; names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as failure:
        places = [
            (tuple(str(part) for part in each["loc"] if not _is_kind(part)), each)
            for each in failure.errors(include_url=False)
        ]
        # Of a union's kinds, the one that fits best fails at the deepest place.
        place, error = max(places, key=lambda each: (len(each[0]), each[1]["type"] != "missing"))
        param = ".".join(place) or None
        wanted = [each["msg"].removeprefix("Value error, ") for at, each in places if at == place]
        message = " or ".join(dict.fromkeys(wanted)).replace(" or Input should be", " or")
        if error["type"] == "extra_forbidden":
            message = f"{param} is not supported; leave it out"
        elif param is None:
            message = f"the body is not what is expected here: {message}"
        else:
            given = error["input"]
            simple = isinstance(given, str | int | float) and error["type"] != "value_error"
            message = f"{param}: {message}" + (f", got {json.dumps(given)[:40]}" if simple else "")
        raise Refusal(400, message, param=param) from failure


def _is_kind(part: int | str) -> bool:
    """Whether a part of an error's location names a kind of a union rather than a field."""
    return isinstance(part, str) and (
        part in ("str", "int")
        or part.startswith("constrained-")
        or "[" in part
        or part[:1].isupper()
    )
