"""Compares texts with those that they must equal, and separates near-ties from faults.

A text is judged along its own tokens: at every position the reference's choice is computed given
the text's tokens before it (teacher forcing), so that one near-tie does not hide later faults. A
token that differs from that choice is a near-tie if the reference's scores of the two differ by at
most the resolution, and a fault otherwise.

The resolution is measured on the texts themselves. The library scores them as `generate()` does,
token by token, and again in wide passes, once with its other attention. The change of the distance
between two candidates from one computation to another is the effect of rounding. Its size varies
between positions, and so does the resolution: it covers a share of `QUANTILE` of these changes.

If passes are `exact`, drafting must not change anything, and the resolution is zero.

Shapes: T tokens of a prompt, W width of padded prompts, n tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerskip.api.arguments import end_tokens
from layerskip.bench.batches import PromptBatch
from layerskip.bench.methods import Method, Peer, Task
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.families.wrappers import unwrapped
from layerskip.library import cache_in, cache_name
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import sublayers_of
from layerskip.texts.tokens import common_prefix

QUANTILE = 0.999
CANDIDATES = 8  # number of best tokens per position whose distances are measured
WIDTH, OTHER_WIDTH = 32, 5  # tokens of wide passes; of the second if there is only one attention

Scores = Callable[[Tensor, int], Tensor]
"""Maps logits (N, V) of new tokens from a number on to the scores that choose them, (N, V)."""


@dataclass(frozen=True)
class Difference:
    """A token that differs from the reference's; a token is None where its text has ended."""

    prompt: int
    position: int
    """Index of the new token."""
    expected: int | None
    got: int | None
    margin: float
    """How far the lower score of the two is below the highest; infinite if a text has ended."""
    resolution: float
    """The effect of rounding on their distance; 0 if it must be exact, or if a text has ended."""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference; if not, it is a fault."""
        return 0 < self.resolution >= self.margin

    def to_dict(self) -> dict[str, Any]:
        margin = self.margin if math.isfinite(self.margin) else None
        return asdict(self) | {"near_tie": self.near_tie, "margin": margin}


@dataclass(frozen=True)
class Comparison:
    """Texts compared with references, and the numbers of prompts and new tokens compared."""

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]
    resolution: float | None = None
    """The median over positions; 0 if texts must be bit-identical, None if not measured."""

    @property
    def near_ties(self) -> int:
        return sum(difference.near_tie for difference in self.differences)

    @property
    def faults(self) -> int:
        return len(self.differences) - self.near_ties

    def to_dict(self) -> dict[str, Any]:
        counts = {"near_ties": self.near_ties, "faults": self.faults}
        return vars(self) | counts | {"differences": [d.to_dict() for d in self.differences]}


@dataclass(frozen=True)
class Along:
    """The library's scores along a text of n tokens.

    Attributes:
        best: its choice at each position, (n,).
        margins: how far the lower of two given tokens is below its choice, (n,) float64.
        places: the last place of the best score at its precision, (n,) float64.
        changes: changes of the candidates' distances from the best one in two computations,
            relative to that of `generate()`; nan if a score is not finite, (2, n, K) float64.
    """

    best: list[int]
    margins: Tensor
    places: Tensor
    changes: Tensor


def along(
    model: Any, prompt: Tensor, text: Sequence[int], others: Sequence[int], scores: Scores
) -> Along:
    """Score a text after a prompt (1, T) with the library's own passes.

    Args:
        text, others: the two tokens to compare at every position; those of the text are fed.
    """
    ids = torch.cat([prompt, prompt.new_tensor([text[:-1]])], dim=1)  # (1, T + n - 1)
    first = prompt.shape[1]
    pairs = prompt.new_tensor([[*text], [*others]]).T  # (n, 2)
    best: list[int] = []
    picks, values = [], []
    for part in _scored(model, ids, first, None, scores):  # (N, V)
        here = pairs[len(best) : len(best) + len(part)].to(part.device)  # (N, 2)
        best += part.argmax(-1).tolist()
        top = part.topk(min(CANDIDATES, part.shape[-1])).indices
        picks.append(torch.cat([top, here], dim=-1))  # (N, K + 3)
        values.append(part.gather(-1, picks[-1]))
    computed, asked = [torch.cat(values)], torch.cat(picks)
    usual, another = _attentions(model)
    for width, attention in ((WIDTH, usual), (WIDTH if another else OTHER_WIDTH, another or usual)):
        wide, done = list[Tensor](), 0
        with _attending(model, attention):
            for part in _scored(model, ids, first, width, scores):  # (N, V)
                wide.append(part.gather(-1, asked[done : done + len(part)]))  # (N, K + 3)
                done += len(part)
        computed.append(torch.cat(wide))
    # On the CPU, since not every device has float64.
    logits = torch.stack([each.cpu().double() for each in computed])  # (3, n, K + 3)
    gaps = logits[..., 1:-2] - logits[..., :1]  # (3, n, K)
    changes = gaps[1:] - gaps[0]
    # Logits have the model's dtype, and scores are computed from them in float32.
    eps = max(torch.finfo(unwrapped(model).dtype).eps, 2 * torch.finfo(torch.float32).eps)
    return Along(
        best=best,
        margins=logits[0, :, 0] - logits[0, :, -2:].amin(-1),
        places=(logits[0, :, 0].abs() * eps).clamp_min(torch.finfo(torch.float32).tiny),
        changes=changes.masked_fill(~changes.isfinite(), math.nan),
    )


@torch.no_grad()
def _scored(
    model: Any, ids: Tensor, first: int, width: int | None, scores: Scores
) -> Iterator[Tensor]:
    """Yield scores from token number `first` of ids (1, T + n - 1) on, pass by pass, (N, V).

    In passes of `width` tokens, or like `generate()`: the prompt at once, then token by token.
    """
    total = ids.shape[1]
    starts = range(0, total, width) if width else (0, *range(first, total))
    name, cache, done = cache_name(unwrapped(model)), None, 0
    assert name is not None
    for start, end in pairwise((*starts, total)):
        count = max(0, end - max(start, first - 1))
        out = model(
            input_ids=ids[:, start:end],
            **{name: cache},
            use_cache=True,
            logits_to_keep=max(1, count),
        )
        cache = cache_in(out)
        if count:
            yield scores(out.logits[0, -count:], done)
        done += count


def _attentions(model: Any) -> tuple[str, str | None]:
    """The attention that a model uses, and another one that computes the same, or None."""
    inner = unwrapped(model)
    text = inner.config.get_text_config()
    usual: str = text._attn_implementation
    capped = getattr(text, "attn_logit_softcapping", None)  # sdpa ignores the cap
    sdpa = inner._supports_sdpa and capped is None
    return usual, {"sdpa": "eager", "eager": "sdpa"}.get(usual) if sdpa else None


@contextmanager
def _attending(model: Any, attention: str) -> Iterator[None]:
    inner = unwrapped(model)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(attention)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def resolutions(texts: Sequence[Along]) -> list[Tensor]:
    """The effect of rounding on the distance of two tokens at every position of texts, (n,) each.

    A computation's changes are compared with their scale at the position in the other computation,
    averaged with the scale over all positions, since a position has too few candidates to estimate
    it alone. Where nothing has changed, the last place still may.
    """
    changes = torch.cat([each.changes for each in texts], dim=1)  # (2, N, K)
    power = changes.square().nanmean(-1)  # (2, N)
    typical = power.nanmean()
    quantile = 0.0
    if typical > 0:
        scaled = changes.abs() / _scale(power.flip(0), typical)[..., None]
        quantile = float(scaled[scaled.isfinite()].quantile(QUANTILE))
    widths = quantile * _scale(power.nanmean(0), typical)  # (N,)
    widths = torch.maximum(widths, torch.cat([each.places for each in texts]))
    return list(widths.split([len(each.best) for each in texts]))


def _scale(power: Tensor, typical: Tensor) -> Tensor:
    """The scale of changes: from mean squares at a position, unless nan, and from all positions."""
    return ((power.nan_to_num(float(typical)) + typical) / 2).nan_to_num(0.0).sqrt()


def differences(
    prompt: int,
    expected: list[int],
    got: list[int],
    scored: Along,
    resolution: Tensor,
    *,
    bitwise: bool,
    longest: int,
) -> list[Difference]:
    """All tokens of a text that differ from the reference; `bitwise` allows no near-ties.

    Args:
        scored: scores along the text and the expected token at the first difference; one token
            further if the text ends too early.
        longest: the length at which the text must end, by an end token or by the limit.
    """
    if expected == got:
        return []
    first, wrong = common_prefix(expected, got), []
    for i in range(first, min(len(got), longest)):
        wanted = expected[i] if i == first and i < len(expected) else scored.best[i]
        if wanted != got[i]:
            most = 0.0 if bitwise and i == first else float(resolution[i])
            wrong.append(Difference(prompt, i, wanted, got[i], float(scored.margins[i]), most))
    if len(got) > longest:  # no score explains a wrong end
        wrong.append(Difference(prompt, longest, None, got[longest], math.inf, 0.0))
    elif len(got) < longest:
        wrong.append(Difference(prompt, len(got), scored.best[len(got)], None, math.inf, 0.0))
    return wrong


class Judge:
    """Decides whether methods' texts are as promised, separating near-ties from faults.

    Self-speculation must give the text of plain decoding. Greedy text of every other method must be
    that of transformers' `generate()`, or of plain decoding if that is not measured. Other samples
    follow the same distribution, which a single text cannot show. Where top-k or top-p nearly cut a
    token, a difference counts as a fault: rounding may explain it, but no score shows that.
    """

    def __init__(self, model: Any, task: Task, methods: Sequence[Method]) -> None:
        self.task = task
        kinds = {method.kind: method for method in reversed(methods)}
        peer = kinds.get("generate")  # its model may be an unpacked copy, which the library needs
        self.model = peer.model if isinstance(peer, Peer) else model
        self.plain = kinds["plain"]
        self.greedy = self.plain if task.do_sample else kinds.get("generate", self.plain)
        self._batch: PromptBatch | None = None
        self._expected: dict[str, list[list[int]]] = {}
        self._scored: dict[Hashable, Along] = {}  # since texts repeat

    @cached_property
    def opened(self) -> OpenedModel:
        return sublayers_of(self.model, self.task.execution)

    def promised(self, method: Method) -> bool:
        """Whether the method's text must equal the reference's."""
        coupled = self.task.acceptance == "coupled" and method.kind in ("plain", "self")
        return coupled or not self.task.do_sample

    def reference(self, method: Method) -> Method:
        """The method whose text another method must give."""
        return self.plain if method.kind == "self" else self.greedy

    def learn(self, method: Method, batch: PromptBatch, tokens: list[list[int]]) -> None:
        """Use a reference's texts from a timed call, instead of decoding them again."""
        if method in (self.plain, self.greedy):
            self._texts(batch).setdefault(method.kind, tokens)

    def expected(self, reference: Method, batch: PromptBatch) -> list[list[int]]:
        """The reference's texts of a batch."""
        texts = self._texts(batch)
        if reference.kind not in texts:
            texts[reference.kind] = reference.decode(batch, 0, time.perf_counter).tokens
        return texts[reference.kind]

    def _texts(self, batch: PromptBatch) -> dict[str, list[list[int]]]:
        """The known texts of the batch, by kind of reference."""
        if batch is not self._batch:
            self._batch, self._expected = batch, {}
        return self._expected

    def compare(
        self,
        method: Method,
        decoded: Sequence[tuple[PromptBatch, Sequence[list[int]]]],
        reference: Method | None = None,
        *,
        every: bool = False,
    ) -> Comparison | None:
        """Compare a method's texts of batches with the reference's; None if nothing is promised.

        Args:
            reference: one other than usual.
            every: report the resolution even if no text differs.
        """
        if not self.promised(method):
            return None
        reference = reference or self.reference(method)
        bitwise = {reference.kind, method.kind} <= {"plain", "self"} and self.opened.exact
        cases = [
            (batch, row, expected, got)
            for batch, texts in decoded
            for row, (expected, got) in enumerate(
                zip(self.expected(reference, batch), texts, strict=True)
            )
        ]
        scored = [
            number
            for number, (_, _, expected, got) in enumerate(cases)
            if expected != got or (every and not bitwise)
        ]
        along_texts = [self._along(*cases[number]) for number in scored]
        resolved = resolutions(along_texts) if along_texts else []
        differing: list[Difference] = []
        for number, along_it, resolution in zip(scored, along_texts, resolved, strict=True):
            _, _, expected, got = cases[number]
            longest = self._longest(got)
            differing += differences(
                number, expected, got, along_it, resolution, bitwise=bitwise, longest=longest
            )
        median = float(torch.cat(resolved).median()) if resolved else None
        tokens = sum(len(got) for _, _, _, got in cases)
        return Comparison(len(cases), tokens, tuple(differing), 0.0 if bitwise else median)

    def _longest(self, text: Sequence[int]) -> int:
        """The maximum length of a text: up to its first end token, or the limit."""
        limit, ends = self.task.max_new_tokens, end_tokens(self.model)
        return next((i + 1 for i, token in enumerate(text[:limit]) if token in ends), limit)

    def _along(self, batch: PromptBatch, row: int, expected: list[int], got: list[int]) -> Along:
        """The library's scores along a text, and at its end if that comes too early."""
        longest = self._longest(got)
        text = got[:longest] if len(got) >= longest else [*got, 0]  # the last token is not fed
        others = [*text]
        first = common_prefix(expected, got)
        if first < min(len(expected), len(text)):
            others[first] = expected[first]
        key = batch.names, row, tuple(text), tuple(others)
        if key not in self._scored:
            prompt = batch.input_ids[row][batch.attention_mask[row].bool()][None]  # (1, T)
            scores = self._scores(batch, row, text)
            self._scored[key] = along(self.model, prompt, text, others, scores)
        return self._scored[key]

    def _scores(self, batch: PromptBatch, row: int, text: Sequence[int]) -> Scores:
        """The function that chooses a text's tokens: processed scores, plus their noise."""
        ids, mask = (part[row : row + 1] for part in (batch.input_ids, batch.attention_mask))
        width, length = ids.shape[1], int(mask.sum())
        processors = self.model.generate(  # the library makes them without decoding anything
            input_ids=ids,
            attention_mask=mask,
            custom_generate=lambda _model, _ids, logits_processor, **_rest: logits_processor,
            **self.task.arguments(),
        )
        law = Law(processors, do_sample=self.task.do_sample, rows=1)
        history = torch.cat([ids, ids.new_tensor([text])], dim=1)  # (1, W + n)
        key = stream_key(self.task.seed + batch.numbers[row], 0)

        def scores(logits: Tensor, first: int) -> Tensor:
            numbers = range(first, first + len(logits))
            seen = [width + number for number in numbers]
            scored = law.scores(logits, history.to(logits.device), [0] * len(seen), seen)  # (N, V)
            if not self.task.do_sample:
                return scored
            places = [length + number for number in numbers]
            keys = [key] * len(places)
            return scored + gumbel_noise(keys, places, scored.shape[-1], device=scored.device)

        return scores
