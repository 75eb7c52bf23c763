"""The law: the distribution from which a token is drawn, after all logits processors and warpers.

One function, `Law.scores`, computes it for draft and target alike, from the history that
`generate()` would pass for that row. Shapes: B rows, N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
import transformers
from torch import Tensor

from layerskip.texts.tokens import common_prefix

Processor = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class Stateful(Protocol):
    """A logits processor whose state covers the new tokens of one row, without the prompt.

    Before each call it is moved to the text in question, drafted tokens included, and moved back
    later. Its answer must depend on its state only, so a rollback may simply restore a copy.
    """

    def start(self) -> Stateful:
        """An independent copy at the beginning of a text."""

    def advance(self, token: int) -> None:
        """Append a token to the text; it may be one that the processor would forbid."""

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens, at least one."""

    def mask(self, scores: Tensor) -> Tensor:
        """Process the scores (V,) of the next token; may overwrite them."""


class _Text:
    """A processor's state for one row, at the position of the last request."""

    def __init__(self, processor: Stateful) -> None:
        self.state = processor.start()
        self.tokens: list[int] = []

    def at(self, tokens: list[int]) -> Stateful:
        """Return the state after these tokens."""
        same = common_prefix(self.tokens, tokens)
        if same < len(self.tokens):
            self.state.rollback(len(self.tokens) - same)
        for token in tokens[same:]:
            self.state.advance(token)
        self.tokens = tokens
        return self.state


# Processors of `transformers` whose output depends on the scores alone, position by position.
_POSITIONWISE = {
    transformers.EpsilonLogitsWarper,
    transformers.EtaLogitsWarper,
    transformers.InfNanRemoveLogitsProcessor,
    transformers.LogitNormalization,
    transformers.MinPLogitsWarper,
    transformers.SuppressTokensLogitsProcessor,
    transformers.TemperatureLogitsWarper,
    transformers.TopHLogitsWarper,
    transformers.TopKLogitsWarper,
    transformers.TopPLogitsWarper,
    transformers.TypicalLogitsWarper,
}
# Processors that read the history of their row, but not its number.
_OF_THE_ROW = {
    transformers.ExponentialDecayLengthPenalty,
    transformers.ForcedBOSTokenLogitsProcessor,
    transformers.ForcedEOSTokenLogitsProcessor,
    transformers.MinLengthLogitsProcessor,
    transformers.MinNewTokensLengthLogitsProcessor,
    transformers.NoBadWordsLogitsProcessor,
    transformers.NoRepeatNGramLogitsProcessor,
    transformers.RepetitionPenaltyLogitsProcessor,
    transformers.SequenceBiasLogitsProcessor,
    transformers.SuppressTokensAtBeginLogitsProcessor,
    transformers.WatermarkLogitsProcessor,
}
# Processors that depend on a row's number in the batch.
_OF_THE_BATCH = {
    transformers.EncoderNoRepeatNGramLogitsProcessor,
    transformers.EncoderRepetitionPenaltyLogitsProcessor,
    transformers.PrefixConstrainedLogitsProcessor,
}
# The attribute in which the library stores the user's function of (row number, tokens so far).
_ROW_QUESTION = "_prefix_allowed_tokens_fn"


def of_the_batch(processor: Any) -> bool:
    """Whether a processor must receive all rows of its batch, in their places."""
    ignored = getattr(processor, "prompt_ignore_length", None)  # of every row
    return ignored is not None or type(processor) not in _POSITIONWISE | _OF_THE_ROW


def check_processor(processor: Any) -> None:
    """Reject a logits processor that is neither `Stateful` nor known to be a pure function.

    A rejected draft would corrupt state that a processor keeps between calls. Those of
    `transformers` are known; any other declares itself with the attribute `layerskip_pure = True`.

    Raises:
        ValueError: it keeps state, or does not declare that it keeps none; the message names it.
    """
    kind = type(processor)
    if kind in _POSITIONWISE | _OF_THE_ROW | _OF_THE_BATCH:
        return
    if getattr(processor, "layerskip_pure", False) is True or isinstance(processor, Stateful):
        return
    name = getattr(processor, "__qualname__", kind.__qualname__)
    if kind.__module__.startswith("transformers."):
        raise ValueError(
            f"logits processor {name} of transformers keeps state between calls or runs a model of "
            "its own, which drafts would corrupt; leave it out, or use model.generate() without "
            "layerskip"
        )
    raise ValueError(
        f"logits processor {name} does not say whether it keeps state between calls, which drafts "
        "would corrupt; if what it returns depends on (input_ids, scores) alone, set "
        "layerskip_pure = True on it or its class, else give it start, advance, rollback and mask "
        "(see layerskip.decoding.laws.Stateful), or use model.generate() without layerskip"
    )


class Warp(NamedTuple):
    """A distribution defined by temperature, top-k and top-p, applied in this order.

    Attributes:
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        least: minimum number of tokens that top-p leaves.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    least: int = 1


class Law:
    """Computes processed scores at any positions of any rows.

    Args:
        processors: called as `processor(input_ids, scores)`, or `Stateful`, in order; see
            `check_processor`.
        do_sample: False makes the law one-hot at the largest score (greedy decoding).

    Raises:
        ValueError: a processor is not known to be pure, or a temperature is too low for float32.
    """

    def __init__(
        self, processors: Sequence[Processor | Stateful] = (), *, do_sample: bool, rows: int
    ) -> None:
        for processor in processors:
            check_processor(processor)
            cold = getattr(processor, "temperature", 1.0)
            if type(processor) is transformers.TemperatureLogitsWarper and cold < _COLDEST:
                raise ValueError(
                    f"temperature must be at least {_COLDEST}, or scores leave float32, got {cold};"
                    " use do_sample=False for the most likely tokens"
                )
        self.processors = list(processors)
        self.do_sample = do_sample
        self.rows = rows
        self._texts: dict[tuple[int, int], _Text] = {}  # by processor and row

    @property
    def stateful(self) -> list[Stateful]:
        return [each for each in self.processors if isinstance(each, Stateful)]

    @property
    def reads_history(self) -> bool:
        """Whether any processor may read the tokens so far."""
        return any(type(p) not in _POSITIONWISE for p in self.processors)

    @property
    def warp(self) -> Warp | None:
        """The law as a few numbers; None if it is more than temperature, top-k and top-p."""
        warp, order = Warp(), []
        for processor in self.processors:
            warper, kind = cast(Any, processor), type(processor)
            if kind is transformers.TemperatureLogitsWarper:
                warp, place = warp._replace(temperature=float(warper.temperature)), 0
            elif kind is transformers.TopKLogitsWarper:
                warp, place = warp._replace(top_k=min(int(warper.top_k), _MOST)), 1
            elif kind is transformers.TopPLogitsWarper:
                least = max(1, warper.min_tokens_to_keep)
                warp, place = warp._replace(top_p=float(warper.top_p), least=least), 2
            else:
                return None
            if place and warper.filter_value != -float("inf"):
                return None
            order.append(place)
        return warp if order == sorted(set(order)) else None

    def scores(
        self,
        logits: Tensor,
        history: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
        width: int = 0,
    ) -> Tensor:
        """Process raw logits. The softmax of the result is the law (greedy: its argmax).

        Args:
            logits: raw logits, (N, V), any float dtype.
            history: token ids as `generate()` stores them, pads included, (B, W).
            lengths: number of leading tokens of its row's history that each position sees, (N,).
            width: number of these that are pads and prompt.

        Returns:
            (N, V) float32 scores, as `generate()` would compute them for that row and length.
        """
        scores = logits.float()  # (N, V); generate() casts to float32 before any processor too
        large = logits.device.type == "cpu" and logits.shape[-1] >= _LARGE
        for number, processor in enumerate(self.processors):
            kind = type(processor)
            if kind is transformers.TopPLogitsWarper and large:
                scores = _nucleus(processor, scores)
            elif kind in _POSITIONWISE:
                scores = cast(Processor, processor)(history[:1], scores)
            elif isinstance(processor, Stateful):
                out = []
                for each, row, length in zip(scores, rows, lengths, strict=True):
                    text = self._text(number, row, processor)
                    out.append(text.at(history[row, width:length].tolist()).mask(each.clone()))
                scores = torch.stack(out)  # (N, V)
            elif hasattr(processor, _ROW_QUESTION):
                scores = self._row_by_row(processor, scores, history, rows, lengths)
            else:
                everyone = of_the_batch(processor)
                scores = self._with_history(processor, scores, history, rows, lengths, everyone)
        return scores

    def _text(self, number: int, row: int, processor: Stateful) -> _Text:
        if (number, row) not in self._texts:
            self._texts[number, row] = _Text(processor)
        return self._texts[number, row]

    def allowed(self, row: int, text: Sequence[int], tokens: Sequence[int], size: int) -> int:
        """How many of these tokens the stateful processors allow after a row's new text.

        Args:
            size: V.
        """
        count = len(tokens)
        for number, processor in enumerate(self.processors):
            if isinstance(processor, Stateful):
                state = self._text(number, row, processor)
                for place, token in enumerate(tokens[:count]):
                    scores = state.at([*text, *tokens[:place]]).mask(torch.zeros(size))  # (V,)
                    if scores[token] == -float("inf"):
                        count = place
                        break
        return count

    def _row_by_row(
        self,
        processor: Any,
        scores: Tensor,
        history: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Call a function of the row number once per position, with that row's history only."""
        question = getattr(processor, _ROW_QUESTION)
        out = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            about_row = copy(processor)
            setattr(about_row, _ROW_QUESTION, lambda _, seen, row=row: question(row, seen))
            out.append(about_row(history[row : row + 1, :length], scores[i : i + 1]))
        return torch.cat(out)  # (N, V)

    def _with_history(
        self,
        processor: Processor,
        scores: Tensor,
        history: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
        everyone: bool,
    ) -> Tensor:
        """Call a processor once for all positions that see equally many tokens.

        With `everyone` it gets all rows of the batch in their places: rows without a position of
        this length are filled with a copy of one that has one.
        """
        out = torch.empty_like(scores)  # (N, V)
        for length in sorted(set(lengths)):
            asked = {rows[i]: i for i in range(len(rows)) if lengths[i] == length}
            filler = next(iter(asked))
            given = range(self.rows) if everyone else sorted(asked)
            source = [row if row in asked else filler for row in given]
            positions = [asked[row] for row in source]
            # Index copies: a processor may write into its arguments.
            processed = processor(history[source, :length], scores[positions])  # (len(given), V)
            places = [place for place, row in enumerate(given) if row in asked]
            out[[positions[place] for place in places]] = processed[places]
        return out


_COLDEST = 1e-30  # lowest temperature that keeps finite scores of any model in float32
_MOST = 2**31 - 1  # of a top-k: more than any vocabulary has
_LARGE = 2**14  # vocabulary size from which a CPU uses `_nucleus`
# A token is unlikely below (1 - top_p) divided by one of these, or by twice the vocabulary.
_SHARES = (2**9, 2**13)


def _nucleus(warper: Any, scores: Tensor) -> Tensor:
    """Apply the library's top-p to scores (N, V), but sort only few tokens.

    Unlikely tokens with a total below 1 - p are removed without sorting. Of equal scores at the cut
    the highest ids stay (the library leaves that to its sort).
    """
    given_up = 1 - warper.top_p
    least = max(1, warper.min_tokens_to_keep)
    size = scores.shape[-1]
    law = softmax_law(scores)  # (N, V)
    out = torch.full_like(scores, warper.filter_value)  # (N, V)
    for old, new, chances in zip(scores, out, law, strict=True):  # (V,) each
        for share in (*_SHARES, 2 * size):
            unlikely = chances < given_up / share  # (V,)
            others = torch.where(unlikely, chances, 0).sum()
            if others < 0.99 * given_up:  # a margin for rounding
                break
        tokens = unlikely.logical_not_().nonzero()[:, 0]  # (n,)
        if not least <= len(tokens) <= size // 4:  # nearly flat, or NaN
            new.copy_(warper(None, old[None])[0])
            continue
        tokens = tokens[old[tokens].sort(stable=True).indices]  # (n,), the least likely first
        kept = (others + chances[tokens].double().cumsum(0)).float() > given_up  # (n,)
        kept[-least:] = True
        tokens = tokens[kept]
        new[tokens] = old[tokens]
    return out


def softmax_law(scores: Tensor) -> Tensor:
    """Probabilities, (..., V) float32, from processed scores (..., V)."""
    return torch.softmax(scores, dim=-1)
