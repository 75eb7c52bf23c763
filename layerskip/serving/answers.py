"""From a task's pieces to what a client reads, in OpenAI's shapes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from layerskip.serving.requests import Counts, Piece, TextRequest
from layerskip.text import Detokenizer


class Choice:
    """One text as it comes, cut before the first stop string.

    Attributes:
        text: what may be shown.
        tokens: how many there are, those that are not shown included.
        reason: "stop" or "length"; None while it goes on.
    """

    def __init__(self, tokenizer: Any, task: TextRequest, stops: Sequence[str]) -> None:
        self.task = task
        self.text = ""
        self.tokens = 0
        self.reason: str | None = None
        self.counts = Counts()
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = Detokenizer(tokenizer)
        self._held = ""  # may become a stop string
        self._waiting: list[tuple[int, int, dict[int, float]]] = []  # where a token's text begins

    def add(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """The text that a piece adds, and what is told of its tokens."""
        self.tokens += len(piece.tokens)
        self.counts = piece.counts
        new = self._held
        for number, token in enumerate(piece.tokens):
            if piece.logprobs:
                begin = len(self.text) + len(new)
                self._waiting.append((begin, token, piece.logprobs[number]))
            new += self._decoder.put([token])
        if piece.reason is not None:
            new += self._decoder.end()
        if self.reason is not None:  # a stop string was there
            return "", []
        cut = min((at for each in self._stops if (at := new.find(each)) >= 0), default=None)
        if cut is not None:
            new, self._held, self.reason = new[:cut], "", "stop"
        else:
            held = 0 if piece.reason is not None else _held(new, self._stops)
            new, self._held = new[: len(new) - held], new[len(new) - held :]
            self.reason = piece.reason
        self.text += new
        told = [each for each in self._waiting if each[0] < len(self.text)]
        self._waiting = self._waiting[len(told) :]
        return new, [self._told(*each) for each in told]

    def _told(self, begin: int, token: int, logprobs: dict[int, float]) -> dict[str, Any]:
        """A token as chats tell of it, and where its text begins."""
        most = self.task.top_logprobs or 0
        top = sorted(logprobs.items(), key=lambda each: -each[1])[:most]
        return {
            **self._named(token, logprobs[token]),
            "top_logprobs": [self._named(*each) for each in top],
            "begin": begin,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}


def _held(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    return max(
        (k for each in stops for k in range(1, len(each)) if text.endswith(each[:k])), default=0
    )


class Answer:
    """All choices of a request, and the JSON documents that tell of them."""

    def __init__(self, chat: bool, model: str, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._chat = chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._of_chunks = self._head | ({"object": "chat.completion.chunk"} if chat else {})
        self._told: list[list[dict[str, Any]]] = [[] for _ in choices]

    def add(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Take a piece of a choice; the chunk that tells of it, if it tells anything."""
        choice = self.choices[index]
        ended = choice.reason
        text, told = choice.add(piece)
        self._told[index] += told
        reason = choice.reason if ended is None else None
        if not text and not told and reason is None:
            return None
        content = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        return self.chunk(index, content, told, reason)

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self.chunk(index, {"delta": {"role": "assistant", "content": ""}}, [], None)

    def chunk(
        self, index: int, content: dict[str, Any], told: list[dict[str, Any]], reason: str | None
    ) -> dict[str, Any]:
        return {**self._of_chunks, "choices": [self._choice(index, content, told, reason)]}

    def whole(self) -> dict[str, Any]:
        """The answer to a client that does not stream."""
        choices = []
        for index, (choice, told) in enumerate(zip(self.choices, self._told, strict=True)):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message} if self._chat else {"text": choice.text}
            choices.append(self._choice(index, content, told, choice.reason))
        return {**self._head, "choices": choices, "usage": self.usage(), "timings": self.timings()}

    def last(self) -> dict[str, Any]:
        """The chunk with usage, behind all others."""
        counted = {"usage": self.usage(), "timings": self.timings()}
        return {**self._of_chunks, "choices": [], **counted}

    def usage(self) -> dict[str, Any]:
        prompts = {id(choice.task.prompt): len(choice.task.prompt) for choice in self.choices}
        prompt, new = sum(prompts.values()), sum(choice.tokens for choice in self.choices)
        counts = [choice.counts for choice in self.choices]
        accepted = sum(each.predicted_accepted for each in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": counts[0].cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.predicted for each in counts) - accepted,
            },
        }

    def timings(self) -> dict[str, Any]:
        """What drafting came to, and seconds from the submission on; not OpenAI's."""
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

    def _choice(
        self, index: int, content: dict[str, Any], told: list[dict[str, Any]], reason: str | None
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self.choices[index].task.top_logprobs is not None:
            logprobs = _of_chat(told) if self._chat else _of_completion(told)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _of_chat(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shown = [{name: value for name, value in each.items() if name != "begin"} for each in told]
    return {"content": shown, "refusal": None}


def _of_completion(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [each["token"] for each in told],
        "token_logprobs": [each["logprob"] for each in told],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in told
        ],
        "text_offset": [each["begin"] for each in told],
    }
