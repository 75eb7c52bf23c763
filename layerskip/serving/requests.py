"""The requests that a batch serves, and what it reports of each; no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layerskip.decoding.seats import Reason
from layerskip.model.library_cache import EncoderStates
from layerskip.model.pictures import Pictures


@dataclass(frozen=True)
class TextRequest:
    """One text to write.

    Attributes:
        do_sample, temperature, top_k, top_p, min_p: the law, as of `layerskip.decode`.
        seed: of sampling; the text is that of `layerskip.decode` with `seeds=[seed]`.
        eos: tokens that end the text; None: the model's own.
        stop: asked after every token with (0, history (1, n)), as of `Request`; True ends the text.
        processors: run before temperature and the others; of this task alone.
        predicted: token ids that the text probably has (or nearly): looked up as drafts.
        top_logprobs: of every token, how many of the largest log-probabilities of the law before
            warpers are told, beside its own; None: none at all.
        prompt_logprobs: from which of the prompt's tokens on these are told of them, too, at least
            1; 0: of none.
        pictures: what the prompt's placeholders stand for, one row.
        encoded: of an encoder-decoder, what its encoder made of a text, one row; the prompt is then
            the decoder's (see `requests.read_text`).
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    eos: frozenset[int] | None = None
    stop: Callable[[int, Any], bool] | None = None
    processors: Sequence[Any] = ()
    predicted: Sequence[int] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int = 0
    pictures: Pictures | None = None
    encoded: EncoderStates | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, as clients count them."""
        return self.heard or len(self.prompt)

    @property
    def heard(self) -> int:
        """Tokens that an encoder read."""
        return 0 if self.encoded is None else self.encoded.states.shape[1]


@dataclass
class Counts:
    """Of one task so far.

    Attributes:
        drafted, accepted: tokens drafted from any source, and those of them that were emitted.
        predicted, predicted_accepted: those of them that came from `TextRequest.predicted`.
        rounds: passes behind the prompt's.
        longest: tokens of the longest draft.
        accepted_of: of rounds that drafted, how many have so many tokens accepted.
        queued, first, seconds: from its submission to its first pass, to its first token, to its
            last token.
    """

    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    rounds: int = 0
    longest: int = 0
    accepted_of: dict[int, int] = field(default_factory=dict)
    queued: float = 0.0
    first: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Piece:
    """What a task has come to since the last piece: the tokens of a round, or its end.

    Attributes:
        logprobs: of each, its own and the largest ones as {token: log-probability}, if asked for.
        prompt_logprobs: of the prompt's tokens that are asked for, likewise; in the first piece.
        reason: why the text has ended; None while it goes on.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[dict[int, float], ...] = ()
    reason: Reason | None = None
    error: str | None = None
    counts: Counts = field(default_factory=Counts)

    def then(self, other: Piece) -> Piece:
        """This piece and the next one as one."""
        return replace(
            other,
            tokens=self.tokens + other.tokens,
            logprobs=self.logprobs + other.logprobs,
            prompt_logprobs=self.prompt_logprobs + other.prompt_logprobs,
        )


class QueueFull(ValueError):
    """As many tasks wait as may; try again later."""
