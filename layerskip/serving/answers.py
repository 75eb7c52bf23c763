"""Turns the pieces of a text into answers in OpenAI's formats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from layerskip.serving.fields import ChatRequest, GenerationRequest
from layerskip.serving.formats.answer_reader import Delta, Reader, held_back
from layerskip.serving.requests import Counts, Piece, Refusal, TextRequest
from layerskip.texts.tokens import Detokenizer, token_bytes


class Choice:
    """One text as it comes, cut before the first stop string.

    Args:
        reader: splits the text into content, reasoning and tool calls.
        keep: special tokens whose text the reader needs.
        echo: the prompt, if it is to be returned before the text.
        hidden: whether to return no text, if the request asks for none.

    Attributes:
        text: the complete text that may be shown so far.
        tokens: number of tokens, including those that are not shown.
        reason: why the text ended, in the client's terms; None while it continues.
        token_logprobs: the information on its tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        task: TextRequest,
        stops: Sequence[str],
        *,
        reader: Reader,
        keep: AbstractSet[int] = frozenset(),
        echo: str | None = None,
        hidden: bool = False,
    ) -> None:
        self.task = task
        self.text = ""
        self.tokens = 0
        self.reason: str | None = None
        self.counts = Counts()
        self.reader = reader
        self._tokenizer, self._stops = tokenizer, stops
        self.token_logprobs: list[dict[str, Any]] = []
        self._deltas: list[Delta] = []
        self._decoder = Detokenizer(tokenizer, keep)
        self._held = ""  # text that may become a stop string
        self._waiting: list[tuple[int, int, dict[int, float]]] = []  # start of each token's text
        self._echo, self._hidden = echo, hidden

    def add(self, piece: Piece) -> tuple[Delta, list[dict[str, Any]]]:
        """Add a piece; returns what it adds to the message, and the information on its tokens."""
        deltas, token_logprobs = self._read(piece)
        self.token_logprobs += token_logprobs
        self._deltas += deltas
        return merged(deltas), token_logprobs

    def _read(self, piece: Piece) -> tuple[list[Delta], list[dict[str, Any]]]:
        deltas, token_logprobs = list[Delta](), list[dict[str, Any]]()
        if self._echo is not None:
            deltas, token_logprobs = [{"content": self._echo}], self._prompt(piece)
            self.text, self._echo = self._echo, None
        self.counts = piece.counts
        if self._hidden:
            self.reason = piece.reason and "length"
            return deltas, token_logprobs
        self.tokens += len(piece.tokens)
        new = self._held
        for number, token in enumerate(piece.tokens):
            if piece.logprobs:
                begin = len(self.text) + len(new)
                self._waiting.append((begin, token, piece.logprobs[number]))
            new += self._decoder.put([token])
        if piece.reason is not None:
            new += self._decoder.end()
        if self.reason is not None:  # the text has already ended at a stop string
            return [], []
        cut = min((at for each in self._stops if (at := new.find(each)) >= 0), default=None)
        if cut is not None:
            new, self._held, self.reason = new[:cut], "", "stop"
        else:
            held = 0 if piece.reason is not None else held_back(new, self._stops)
            new, self._held = new[: len(new) - held], new[len(new) - held :]
            self.reason = piece.reason
        self.text += new
        deltas += self.reader.feed(new, self.reason is not None)
        ready = [each for each in self._waiting if each[0] < len(self.text)]
        self._waiting = self._waiting[len(ready) :]
        return deltas, token_logprobs + [self._of_token(*each) for each in ready]

    def whole(self) -> dict[str, Any]:
        """The complete message, if it is a chat's."""
        message = merged(self._deltas)
        calls = [
            {name: value for name, value in call.items() if name != "index"}
            for call in message.get("tool_calls", ())
        ]
        also = {"tool_calls": calls} if calls else {}
        if "reasoning_content" in message:
            also["reasoning_content"] = message["reasoning_content"]
        content = message.get("content", None if calls else "")
        return {"role": "assistant", "content": content, "refusal": None, **also}

    def _prompt(self, piece: Piece) -> list[dict[str, Any]]:
        """The prompt's tokens if their log-probabilities are requested; the first has none."""
        if not self.task.prompt_logprobs:
            return []
        begin, decoder, token_logprobs = 0, Detokenizer(self._tokenizer), []
        for token, logprobs in zip(self.task.prompt, [{}, *piece.prompt_logprobs], strict=True):
            token_logprobs.append(self._of_token(begin, token, logprobs))
            begin += len(decoder.put([token]))
        return token_logprobs

    def _of_token(self, begin: int, token: int, logprobs: dict[int, float]) -> dict[str, Any]:
        """A token in the format of chats, with the start of its text."""
        most = self.task.top_logprobs or 0
        top = sorted(logprobs.items(), key=lambda each: -each[1])[:most]
        return {
            **self._named(token, logprobs.get(token)),
            "top_logprobs": [self._named(*each) for each in top],
            "begin": begin,
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token)
        shown = None if logprob is None else max(logprob, -9999.0)
        return {"token": data.decode(errors="replace"), "logprob": shown, "bytes": [*data]}


def merged(deltas: Sequence[Delta]) -> Delta:
    """Combine deltas of one choice into one, or into its message."""
    whole: Delta = {}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                whole[name] = whole.get(name, "") + value
                continue
            calls = whole.setdefault("tool_calls", [])
            for call in value:
                same = next((each for each in calls if each["index"] == call["index"]), None)
                if same is None:
                    calls.append(call | {"function": {"arguments": "", **call["function"]}})
                else:
                    same["function"]["arguments"] += call["function"]["arguments"]
    return whole


class Answer:
    """All choices of a request, and the JSON documents for them, whole or as events."""

    done = "data: [DONE]\n\n"
    """What clients expect after the last event."""

    def __init__(self, body: GenerationRequest, model: str, choices: Sequence[Choice]) -> None:
        self.choices, self.model = choices, model
        self.created = int(time.time())
        self._body, self._chat = body, isinstance(body, ChatRequest)
        self._named = isinstance(body, ChatRequest) and body.named
        self._head: dict[str, Any] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": self.created,
            "model": model,
        }
        self._of_chunks = self._head | ({"object": "chat.completion.chunk"} if self._chat else {})
        if body.include_usage:  # null in all chunks but the last
            self._of_chunks["usage"] = None

    def begin(self) -> list[dict[str, Any]]:
        """The first events of a stream."""
        begun = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, begun) for index in range(len(self.choices) * self._chat)]

    def add(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece to a choice; returns the events for it."""
        choice = self.choices[index]
        ended = choice.reason is not None
        delta, token_logprobs = choice.add(piece)
        reason = None if ended else self._reason(choice)
        if not delta and not token_logprobs and reason is None:
            return []
        content = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        chunk = self._chunk(index, content, token_logprobs, reason)
        if not self._body.include_usage and all(each.reason for each in self.choices):
            chunk["timings"] = self.timings()
        return [chunk]

    def end(self) -> list[dict[str, Any]]:
        """The last events of a stream."""
        last = self._of_chunks | {"choices": [], **self._counted()}
        return [last] if self._body.include_usage else []

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """The last event of a stream that cannot be finished."""
        return refusal.body()

    def whole(self) -> dict[str, Any]:
        """The answer for a client that does not stream."""
        choices = []
        for index, choice in enumerate(self.choices):
            content = {"message": choice.whole()} if self._chat else {"text": choice.text}
            choices.append(
                self._choice(index, content, choice.token_logprobs, self._reason(choice))
            )
        return {**self._head, "choices": choices, **self._counted()}

    def _counted(self) -> dict[str, Any]:
        """Token counts and the results of drafting, those of a single text also in vLLM's names."""
        counted = {"usage": self.usage(), "timings": self.timings()}
        if len(self.choices) == 1:
            counted["metrics"] = {"speculative_decoding": _acceptance(self.choices[0].counts)}
        return counted

    def usage(self) -> dict[str, Any]:
        # The choices of a prompt have the same list. The first of them says what was cached.
        firsts = {id(choice.task.prompt): choice for choice in reversed(self.choices)}.values()
        prompt = sum(choice.task.num_prompt for choice in firsts)
        new = sum(choice.tokens for choice in self.choices)
        counts = [choice.counts for choice in self.choices]
        accepted = sum(each.predicted_accepted for each in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(each.counts.cached for each in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.predicted for each in counts) - accepted,
            },
        }

    def timings(self) -> dict[str, Any]:
        """Results of drafting, and seconds since the submission; not part of OpenAI's API."""
        counts = [choice.counts for choice in self.choices]
        return {
            "drafted": sum(each.drafted for each in counts),
            "accepted": sum(each.accepted for each in counts),
            "rounds": sum(each.rounds for each in counts),
            "queued": max(each.queued for each in counts),
            "first": min(each.first for each in counts),
            "seconds": max(each.seconds for each in counts),
            "seeds": [choice.task.seed for choice in self.choices],
        }

    def _reason(self, choice: Choice) -> str | None:
        called = choice.reader.calls and not self._named
        return "tool_calls" if called and choice.reason == "stop" else choice.reason

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        token_logprobs: Sequence[dict[str, Any]] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            **self._of_chunks,
            "choices": [self._choice(index, content, token_logprobs, reason)],
        }

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        token_logprobs: Sequence[dict[str, Any]],
        reason: str | None,
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self.choices[index].task.top_logprobs is not None:
            logprobs = _of_chat(token_logprobs) if self._chat else _of_completion(token_logprobs)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _acceptance(counts: Counts) -> dict[str, Any]:
    """Acceptance in a text's rounds. Benchmarks of servers, such as AIPerf, read these names."""
    steps = sum(counts.accepted_of.values())
    return {
        "mean_acceptance_length": 1 + counts.accepted / steps if steps else 1.0,
        "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else 0.0,
        "acceptance_histogram": [counts.accepted_of.get(k, 0) for k in range(counts.longest + 1)],
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
        "num_spec_steps": steps,
        "num_spec_tokens": counts.longest,
    }


def _of_chat(token_logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shown = [
        {name: value for name, value in each.items() if name != "begin"} for each in token_logprobs
    ]
    return {"content": shown, "refusal": None}


def _spelled(token: dict[str, Any]) -> str:
    """A token as a name, which two of them should not share."""
    data = bytes(token["bytes"])
    if data == token["token"].encode():
        return str(token["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _of_completion(token_logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [_spelled(each) for each in token_logprobs],
        "token_logprobs": [each["logprob"] for each in token_logprobs],
        "top_logprobs": [
            {_spelled(top): top["logprob"] for top in each["top_logprobs"]}
            if each["logprob"] is not None
            else None
            for each in token_logprobs
        ],
        "text_offset": [each["begin"] for each in token_logprobs],
    }
