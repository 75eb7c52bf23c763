"""The requests of a batch, the results it reports, and refusals; independent of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from layerskip.cache.library_cache import EncoderStates
from layerskip.decoding.seats import Reason
from layerskip.errors import LayerskipError
from layerskip.model.picture_features import Pictures


@dataclass(frozen=True)
class TextRequest:
    """One text to write.

    Attributes:
        do_sample, temperature, top_k, top_p, min_p: of sampling, as for `layerskip.decode`.
        seed: sampling seed; the text is that of `layerskip.decode` with `seeds=[seed]`.
        eos: tokens that end the text; None: the model's own.
        stop: called after every token with (0, history (1, n)) as in `Request`; True ends the text.
        processors: applied before temperature and the others; used by this request only.
        predicted: token ids of the expected text (or nearly), looked up as drafts.
        top_logprobs: for every token, how many of the largest log-probabilities before warpers to
            report besides its own; None: none at all.
        prompt_logprobs: the number of the first prompt token whose log-probability is reported, at
            least 1; those of all later ones follow. 0: none are reported.
        pictures: the features for the prompt's placeholders, one row.
        encoded: for an encoder-decoder, the encoder's output for a text, one row; the prompt is
            then the decoder's (see `requests.read_text`).
        owner: whose text it is; drafts remember the answers of each owner separately.
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
    owner: str = ""

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens, as clients count them."""
        return self.encoder_length or len(self.prompt)

    @property
    def encoder_length(self) -> int:
        """Number of tokens read by an encoder."""
        return 0 if self.encoded is None else self.encoded.states.shape[1]


@dataclass
class Counts:
    """Counts of one request so far.

    Attributes:
        drafted, accepted: tokens drafted from any source, and those that were emitted.
        predicted, predicted_accepted: those of them from `TextRequest.predicted`.
        rounds: passes after those over the prompt.
        accepted_of: number of rounds with a draft, by their number of accepted tokens.
        longest: tokens of the longest draft.
        queued, first, seconds: from the submission to the first pass, the first token and the last
            token.
    """

    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    rounds: int = 0
    accepted_of: dict[int, int] = field(default_factory=dict)
    longest: int = 0
    queued: float = 0.0
    first: float = 0.0
    seconds: float = 0.0


@dataclass
class Piece:
    """Progress of a request since its last piece: the tokens of a round, or the end.

    Attributes:
        logprobs: per token, its own and the largest as {token: log-probability}, if requested.
        prompt_logprobs: the same for requested prompt tokens; in the first piece.
        reason: why the text has ended; None while it continues.
        refused: whether the error lies in the request, for all that was known before.
        before: seconds of the text up to the previous piece; 0 if this is the first.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    reason: Reason | None = None
    before: float = 0.0
    error: str | None = None
    refused: bool = False
    counts: Counts = field(default_factory=Counts)

    def then(self, other: Piece) -> Piece:
        """Combine this piece with the next one."""
        return replace(
            other,
            tokens=self.tokens + other.tokens,
            logprobs=self.logprobs + other.logprobs,
            prompt_logprobs=self.prompt_logprobs + other.prompt_logprobs,
        )


class Refusal(LayerskipError):
    """A request that is refused, with its HTTP status.

    Attributes:
        param: the wrong field, if there is one.
        code: one word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """Turn an error in a request, or in the content of one of its fields, into a refusal."""
    try:
        yield
    except Refusal:
        raise
    except ValueError as error:
        message = f"{error}" if param is None else f"{param}: {error}"
        raise Refusal(400, message, param=param) from error
