"""The fields of requests as OpenAI's clients send them, checked.

What is not supported is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_SEEDS = 2**63
# Fields that say who asks or where, not what for.
_ABOUT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# What other fields may say, as it asks for nothing.
_NOTHING: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class Refusal(ValueError):
    """A request that is not served, with the HTTP status that says so.

    Attributes:
        param: the field that is wrong, if it is one.
        code: one word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, given: Any) -> Any:
        """Without fields that ask for nothing."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None
            and name not in _ABOUT
            and not (name in _NOTHING and value in _NOTHING[name])
        }


class TextPart(_Fields):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(_Fields):
    type: Literal["content"]
    content: Content


StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Asked(_Fields):
    """What chats and completions may both say; `top_k` and `min_p` are not OpenAI's."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: Share | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def most(self) -> tuple[str, int | None]:
        """The field that limits new tokens, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def told(self) -> int | None:
        """How many log-probabilities are told beside each token's own; None: none at all."""
        raise NotImplementedError


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def most(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most
        if self.max_tokens is not None:
            raise Refusal(
                400,
                "max_tokens is the old name of max_completion_tokens; give one of them",
                param="max_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def told(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionAsked(Asked):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def told(self) -> int | None:
        return self.logprobs


Body = TypeVar("Body", bound=Asked)


def read(kind: type[Body], body: bytes) -> Body:
    """A request's body, checked.

    Raises:
        Refusal: it is no JSON, or a field is unknown, not supported or wrong; names it.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as failure:
        # of a union's kinds, the one that fits best is wrong at the deepest place
        error = max(failure.errors(include_url=False), key=lambda each: len(each["loc"]))
        place = [str(part) for part in error["loc"] if not _is_kind(part)]
        param = ".".join(place) or None
        if error["type"] == "extra_forbidden":
            message = f"{param} is not supported; leave it out"
        elif param is None:
            message = f"the body is not what is asked here: {error['msg']}"
        else:
            message = f"{param}: {error['msg']}"
        raise Refusal(400, message, param=param) from failure


def _is_kind(part: int | str) -> bool:
    """Whether a part of an error's place is one of the kinds of a union, no field."""
    return isinstance(part, str) and (part in ("str", "int", "constrained-str") or "[" in part)
