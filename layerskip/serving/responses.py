"""OpenAI's `/v1/responses` in terms of chats: the request, the whole answer, and its events.

Nothing is stored: a request contains its whole conversation.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from layerskip.serving.answers import Answer
from layerskip.serving.fields import ChatRequest, Fields, Share, ToolFunction, ToolName, read
from layerskip.serving.requests import Piece, Refusal

_NAMES = {  # of a chat's fields in this API
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class ResponsePart(Fields):
    """A piece of text, or a picture; conversion to a chat's part reports what is missing."""

    type: Literal["input_text", "input_image", "output_text", "reasoning_text", "summary_text"]
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] = "auto"  # ignored: processors have one size
    annotations: list[Any] = Field([])
    logprobs: list[Any] = Field([])

    def of_chat(self) -> dict[str, Any]:
        values = {"text": self.text, "image_url": self.image_url}
        kind = "image_url" if self.type == "input_image" else "text"
        return {"type": kind} | {name: each for name, each in values.items() if each is not None}


class InputItem(Fields):
    """An item, perhaps from an earlier answer, which gave it an id."""

    id: str = ""
    status: str = ""


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ResponsePart]
    phase: str = ""


class FunctionCall(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponsePart] = ""


class Reasoning(InputItem):
    type: Literal["reasoning"]
    summary: list[ResponsePart] = Field([])
    content: list[ResponsePart] = Field([])


class FlatTool(ToolFunction):
    type: Literal["function"]


class NamedFlatTool(ToolName):
    type: Literal["function"]


class TextForm(Fields):
    format: dict[str, Any] = {"type": "text"}  # noqa: RUF012


class Effort(Fields):
    effort: str | None = None
    summary: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return f"{kind}".title()


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCall, Tag("Function_Call")]
    | Annotated[FunctionOutput, Tag("Function_Call_Output")]
    | Annotated[Reasoning, Tag("Reasoning")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message="type must be message, function_call, function_call_output or "
        "reasoning",
    ),
]


class ResponseRequest(Fields):
    """A request; `seed`, `top_k` and `min_p` are not OpenAI's."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: Share | None = None
    seed: int | None = None
    stream: bool = False
    text: TextForm = TextForm()
    tools: list[FlatTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedFlatTool | None = None
    parallel_tool_calls: bool = True
    reasoning: Effort = Effort()

    def chat(self) -> ChatRequest:
        """Convert to a chat request.

        Raises:
            Refusal: a field is wrong; it is named as the chat's field, see `renamed`.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                _say(item, messages)
        names = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream")
        body: dict[str, Any] = {name: getattr(self, name) for name in names}
        body |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        body |= {"parallel_tool_calls": self.parallel_tool_calls}
        body["reasoning_effort"] = self.reasoning.effort
        body["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        body["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedFlatTool):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        form = self.text.format
        if form.get("type") == "json_schema":
            inner = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": inner}
        body["response_format"] = None if form == {"type": "text"} else form
        return read(ChatRequest, json.dumps(body).encode())


def renamed(refusal: Refusal) -> Refusal:
    """A refusal of a chat's field, with this API's name for the field."""
    message, param = str(refusal), refusal.param or ""
    for chat, ours in _NAMES.items():
        if param.partition(".")[0] == chat:
            message, param = message.replace(chat, ours), param.replace(chat, ours)
    return Refusal(refusal.status, message, param=param or None, code=refusal.code)


def _say(item: Item, messages: list[dict[str, Any]]) -> None:
    """Append an input item as a message, or as a part of the message before it."""
    match item:
        case MessageItem():
            message = {"role": item.role, "content": _chat_content(item.content)}
            thought = bool(messages) and messages[-1].keys() == {"role", "reasoning_content"}
            if item.role == "assistant" and thought:
                messages[-1] |= message
            else:
                messages.append(message)
        case FunctionOutput():
            values = _chat_content(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": values})
        case Reasoning():
            text = "".join(part.text or "" for part in item.content)
            messages.append({"role": "assistant", "reasoning_content": text})
        case FunctionCall():
            called = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": called}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)


def _chat_content(content: str | list[ResponsePart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.of_chat() for part in content]


class ResponseAnswer:
    """An answer with one choice, in the format of this API; used like an `Answer`."""

    done = ""

    def __init__(self, request: ResponseRequest, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._id = f"resp_{secrets.token_hex(12)}"
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def _document(self, status: str) -> dict[str, Any]:
        values = self._request.model_dump(exclude={"input", "stream", "seed", "top_k", "min_p"})
        values["tool_choice"] = values["tool_choice"] or "auto"
        values |= {
            "id": self._id,
            "model": self._answer.model,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "output": self._items,
            "previous_response_id": None,
            "store": False,
            "usage": None,
        }
        if status != "in_progress":
            usage = self._answer.usage()
            values["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            values["timings"] = self._answer.timings()
        if status == "incomplete":
            values["incomplete_details"] = {"reason": "max_output_tokens"}
        return values

    def whole(self) -> dict[str, Any]:
        """The complete response."""
        *_, last = self.end()
        return dict(last["response"])

    def begin(self) -> list[dict[str, Any]]:
        """The first events."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._document("in_progress")) for kind in kinds]

    def add(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece; returns the events for it."""
        chunks = self._answer.add(index, piece)
        return [each for chunk in chunks for each in self._added(chunk["choices"][0]["delta"])]

    def _added(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if text := delta.get("reasoning_content"):
            yield from self._more("reasoning", text)
        if text := delta.get("content"):
            yield from self._more("message", text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._open(
                    "function_call", call_id=call["id"], name=call["function"]["name"], arguments=""
                )
            self._items[-1]["arguments"] += call["function"]["arguments"]
            if more := call["function"]["arguments"]:
                yield self._of_item("response.function_call_arguments.delta", delta=more)

    def end(self) -> Iterator[dict[str, Any]]:
        """The last events."""
        status = "incomplete" if self._answer.choices[0].reason == "length" else "completed"
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._document(status))

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """The last event if the answer cannot be finished."""
        error = refusal.body()["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Append text to a message or to reasoning."""
        name, item, begun, also = _KINDS[kind]
        if not self._items or self._items[-1]["type"] != kind:
            part = {"type": name, "text": "", **begun}
            yield from self._open(kind, content=[], **item)
            self._items[-1]["content"].append(part)
            yield self._of_item("response.content_part.added", part=part, content_index=0)
        self._items[-1]["content"][0]["text"] += text
        yield self._of_item(f"response.{name}.delta", delta=text, content_index=0, **also)

    def _open(self, kind: str, **values: Any) -> Iterator[dict[str, Any]]:
        yield from self._close()
        id_ = f"{kind[:3]}_{secrets.token_hex(12)}"
        self._items.append({"type": kind, "id": id_, "status": "in_progress", **values})
        yield self._event(
            "response.output_item.added", item=self._items[-1], output_index=len(self._items) - 1
        )

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the current item."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            yield self._of_item(kind, arguments=item["arguments"], name=item["name"])
        else:
            [part], (name, _, _, also) = item["content"], _KINDS[item["type"]]
            yield self._of_item(f"response.{name}.done", text=part["text"], content_index=0, **also)
            yield self._of_item("response.content_part.done", part=part, content_index=0)
        yield self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _of_item(self, kind: str, **values: Any) -> dict[str, Any]:
        return self._event(
            kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **values
        )

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        # A copy, since items grow.
        number, self._number = self._number, self._number + 1
        event: dict[str, Any] = {"type": kind, "sequence_number": number, **values}
        return deepcopy(event)


# For each kind of text: its part's type, and further content of its item, part and events.
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", {"role": "assistant"}, {"annotations": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", {"summary": []}, {}, {}),
}
