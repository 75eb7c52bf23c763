"""From logits to laws to tokens, and the accept rules; knows nothing of models, caches or text.

The law is the distribution a token is drawn from after every logits processor and warper. Exactly
one function, `Law.scores`, makes it, for draft and target alike, fed with the history that
`generate()` would pass for that row. Letters: B rows, N positions, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]

# Processors of `transformers` whose output depends on the scores alone, position by position.
_POSITIONWISE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# Processors that carry state from call to call (or need a second forward pass): a draft that is
# thrown away would leave its mark on them.
_STATEFUL = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkState",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}

# Where the library's prefix constraint keeps the user's function of (row number, tokens so far).
_ROW_QUESTION = "_prefix_allowed_tokens_fn"


def _ask(question: Callable[[int, Tensor], Any], row: int, _: int, seen: Tensor) -> Any:
    return question(row, seen)


class Law:
    """The processed scores of any positions of any rows.

    Args:
        processors: called as `processor(input_ids, scores)`, in order; pure by contract.
        do_sample: False makes the law one-hot at the largest score (greedy decoding).
        rows: number of rows B of the batch.

    Raises:
        ValueError: a processor is known to keep state between calls.
    """

    def __init__(self, processors: Sequence[Processor] = (), *, do_sample: bool, rows: int) -> None:
        for processor in processors:
            name = type(processor).__name__
            if name in _STATEFUL:
                raise ValueError(
                    f"logits processor {name} keeps state between calls, which drafting would "
                    "corrupt; allowed are pure functions of (input_ids, scores); got a stateful "
                    "one: remove it, or use model.generate() without layerskip"
                )
        self.processors = list(processors)
        self.do_sample = do_sample
        self.rows = rows

    @property
    def reads_history(self) -> bool:
        """Whether any processor may look at the tokens so far."""
        return any(type(p).__name__ not in _POSITIONWISE for p in self.processors)

    @property
    def temperature(self) -> float | None:
        """What logits are divided by, where that is all that is done to them."""
        if not self.processors:
            return 1.0
        (first, *others) = self.processors
        kind = type(first)
        theirs = kind.__module__.startswith("transformers.")  # another's may do something else
        if others or not theirs or kind.__name__ != "TemperatureLogitsWarper":
            return None
        return float(first.temperature)  # type: ignore[attr-defined]

    def scores(
        self, logits: Tensor, history: Tensor, rows: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        """Processed scores; their softmax is the law (greedy: their argmax).

        Args:
            logits: raw logits, (N, V), any float dtype.
            history: token ids as `generate()` holds them, pads included, (B, W).
            rows: row of each position, length N.
            lengths: how many leading tokens of its row's history each position has seen, length N.

        Returns:
            (N, V) float32 scores, as `generate()` would compute them for that row and length.
        """
        scores = logits.float()  # (N, V); generate() casts to float32 before any processor too
        large = logits.device.type == "cpu" and logits.shape[-1] >= _LARGE
        for processor in self.processors:
            name = type(processor).__name__
            if name == "TopPLogitsWarper" and large:
                scores = _nucleus(processor, scores)
            elif name in _POSITIONWISE:
                scores = processor(history[:1], scores)
            elif hasattr(processor, _ROW_QUESTION):
                scores = self._row_by_row(processor, scores, history, rows, lengths)
            else:
                scores = self._with_history(processor, scores, history, rows, lengths)
        return scores

    def _row_by_row(
        self,
        processor: Any,
        scores: Tensor,
        history: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Ask a row's question once per position: of other rows there is nothing true to ask."""
        question = getattr(processor, _ROW_QUESTION)
        out = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            about_row = copy(processor)
            setattr(about_row, _ROW_QUESTION, partial(_ask, question, row))
            out.append(about_row(history[row : row + 1, :length], scores[i : i + 1]))
        return torch.cat(out)  # (N, V)

    def _with_history(
        self,
        processor: Processor,
        scores: Tensor,
        history: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Call a processor once per distinct length, with every row at its true row number.

        Rows that ask for nothing at this length are filled with a copy of one that does.
        """
        out = torch.empty_like(scores)  # (N, V)
        for length in sorted(set(lengths)):
            asked = {rows[i]: i for i in range(len(rows)) if lengths[i] == length}
            filler = next(iter(asked))
            source = [row if row in asked else filler for row in range(self.rows)]
            positions = [asked[row] for row in source]
            # clones: a processor may write into what it is given
            given = history[source, :length]  # (B, length)
            processed = processor(given, scores[positions])  # (B, V)
            taken = list(asked)
            out[[asked[row] for row in taken]] = processed[taken]
        return out


_LARGE = 2**14  # tokens from which on a CPU is spared what the usual ways to a law do
# Unlikely tokens are those below what top-p gives up over one of these, or twice the vocabulary.
_SHARES = (2**9, 2**13)


def _nucleus(warper: Any, scores: Tensor) -> Tensor:
    """Scores (N, V) as the library's top-p makes them, from a sort of few tokens.

    Unlikely tokens that have less than 1 - p together are out in any order. Only the others are
    sorted; of equal scores at the cut the highest ids stay (the library leaves that to its sort).
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
            if others < 0.99 * given_up:  # by so much, whatever was rounded
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
    """Probabilities of the law, (..., V) float32, from processed scores (..., V)."""
    return torch.softmax(scores, dim=-1)


# ---------------------------------------------------------------------------------------------
# Noise: a function of (key, position, purpose) alone, the same on every device and in any batch.

# What a stream of noise is used for. Coupled sampling uses TARGET for draft and target alike.
TARGET, DRAFT, ACCEPT = 0, 1, 2

_MASK64 = (1 << 64) - 1
# Multipliers of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """splitmix64 on a Python integer: 64 well-mixed bits."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, row: int = 0) -> int:
    """Key of a row's noise stream; `seeds=[s, ...]` uses `stream_key(s)` for each row."""
    return _mix(_mix(seed & _MASK64) ^ row)


def _starts(keys: Sequence[int], positions: Sequence[int], purpose: int, device: Any) -> Tensor:
    """Where each of N streams begins, (N, 1) int64."""
    bases = [
        _signed(_mix(key ^ _mix(position * 4 + purpose)))
        for key, position in zip(keys, positions, strict=True)
    ]
    return torch.tensor(bases, dtype=torch.int64).to(device, non_blocking=True)[:, None]


def _uniform(x: Tensor) -> Tensor:
    """Uniform float32 in (0, 1 - 2^-24], fine-grained (2^-32) near zero, of int64, overwritten."""
    # splitmix64 in wrapping int64; the masks turn the arithmetic shift into a logical one
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))
    bits = x.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)  # the best-mixed half
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)


@lru_cache(maxsize=4)
def _steps(size: int, device: torch.device) -> Tensor:
    """How far each token is along its stream, (size,)."""
    return torch.arange(size, device=device) * _signed(_GOLDEN)


def gumbel_noise(
    keys: Sequence[int],
    positions: Sequence[int],
    vocabulary: int,
    *,
    purpose: int = TARGET,
    device: Any = "cpu",
) -> Tensor:
    """Standard Gumbel noise over the vocabulary, (N, V) float32, finite.

    `argmax(log law + noise)` is a draw from the law (Gumbel-max); with the same noise for draft
    and target it is the coupling of Daliri, Musco, Suresh 2024 (arXiv 2408.07978).

    Args:
        keys: stream key of each of the N rows (`stream_key`).
        positions: position of the token drawn, counted without pads.
        purpose: TARGET, DRAFT or ACCEPT: independent streams of one key.
    """
    starts = _starts(keys, positions, purpose, device)  # (N, 1)
    steps = _steps(vocabulary, starts.device)  # (V,)
    noise = torch.empty(len(keys), vocabulary, device=starts.device)  # (N, V)
    few = at_once(noise, _TILE)
    for some, out in zip(starts.split(few), noise.split(few), strict=True):  # up to few of N
        uniform = _uniform(some + steps)
        # -log1p(-u) is Exponential(1), finely resolved where it matters: near zero, at the winner
        torch.neg(uniform.neg_().log1p_().neg_().log_(), out=out)
    return noise


_TILE = 2**18  # elements of noise that a CPU makes at once
_AHEAD, _BLOCK = 8, 2**20  # places made ahead for a row, elements for all rows: at most


def at_once(values: Tensor, most: int = 2**20) -> int:
    """How many rows of values (N, V) to work on at once: of so many numbers at most, but one.

    On a GPU launches are what counts, so all of them. On a CPU few: what is made of them stays in
    its caches, and in memory that the process had before (a fresh mapping costs a fault a page).
    """
    return max(1, most // values.shape[-1] if values.device.type == "cpu" else len(values))


def largest(scores: Tensor) -> Tensor:
    """Token of the first largest of scores (N, V), (N,); -1 where all are -inf, or one is NaN."""
    best, token = _best(scores)[0]
    return torch.where(best > float("-inf"), token, -1)[:, 0]


def with_margin(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`largest` of scores (N, V), and 1 - exp(-m), m its margin over the second-best, (N,) each."""
    (best, token), *searched = _best(scores)
    # the second-best is among those that the largest was found among, here or there
    others = [values.scatter(1, place, -math.inf).amax(-1) for values, place in searched]  # (N,)
    behind = reduce(torch.maximum, others).sub_(best[:, 0])  # (N,), -m
    return torch.where(best > float("-inf"), token, -1)[:, 0], ahead(behind)


def ahead(behind: Tensor) -> Tensor:
    """1 - exp(-m) of the margins -m by which second-best scores are behind, overwritten, (N,)."""
    return behind.expm1_().neg_()


def _best(scores: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Largest of scores (N, V) and its token, (N, 1) each; then among what and where it was found.

    Of many numbers first which part of a row has it: a maximum without its place is several times
    faster on a CPU.
    """
    part = math.gcd(scores.shape[-1], 1024)
    if scores.numel() <= _TILE or part < 64 or scores.device.type != "cpu":
        best, token = scores.max(-1, keepdim=True)
        return [(best, token), (scores, token)]
    parts = scores.unflatten(-1, (-1, part))  # (N, V / part, part)
    tops = parts.amax(-1)  # (N, V / part)
    best, where = tops.max(-1, keepdim=True)  # (N, 1) each
    inside = parts.gather(1, where[:, :, None].expand(-1, 1, part))[:, 0]  # (N, part)
    here = inside.argmax(-1, keepdim=True)  # (N, 1)
    return [(best, where * part + here), (tops, where), (inside, here)]


class NoiseBlocks:
    """The noise that draft and target of one decoding share, made once for every place.

    Where a place is missing, those of all rows that ask are made, with some ahead, in one call
    (on a GPU: as many launches for many rows as for one). They are held until they are forgotten.
    """

    def __init__(self) -> None:
        self._made: dict[int, dict[int, Tensor]] = {}  # key -> place -> (V,)

    def at(self, keys: Sequence[int], places: Sequence[int], scores: Tensor) -> list[Tensor]:
        """`gumbel_noise` of purpose TARGET for scores (N, V), on their device: N times (V,)."""
        asked = [
            (self._made.setdefault(key, {}), key, place)
            for key, place in zip(keys, places, strict=True)
        ]
        if any(place not in made for made, _, place in asked):
            vocabulary = scores.shape[-1]
            ahead = max(1, min(_AHEAD, _BLOCK // (vocabulary * len(set(keys)))))
            missing = dict.fromkeys(
                (key, later)
                for made, key, place in asked
                for later in range(place, place + ahead)
                if later not in made
            )
            owners, later_ones = zip(*missing, strict=True)
            noise = gumbel_noise(owners, later_ones, vocabulary, device=scores.device)  # (M, V)
            for (key, place), row in zip(missing, noise.unbind(), strict=True):  # (V,)
                self._made[key][place] = row
        return [made[place] for made, _, place in asked]

    def forget(self, key: int, place: int | None = None) -> None:
        """Drop a row's noise before a place, or all of it.

        A row that shares the key and lags behind makes its own again.
        """
        made = self._made.get(key, {})
        for past in [past for past in made if place is None or past < place]:
            del made[past]


def accept_uniform(keys: Sequence[int], positions: Sequence[int], device: Any = "cpu") -> Tensor:
    """The uniform number each accept test uses, (N,) float32."""
    return _uniform(_starts(keys, positions, ACCEPT, device))[:, 0]


# ---------------------------------------------------------------------------------------------
# The rejection rule (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023).


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) for every token, (..., V); tokens the draft cannot draw (q = 0) get 1."""
    return torch.where(q > 0, (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp(max=1), 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised, (..., V): the law of the correction after a rejection.

    Where p = q no rejection can happen; rounding can leave no mass there, and p is returned.
    """
    excess = (p - q).clamp_min(0)  # (..., V)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp_min(torch.finfo(p.dtype).tiny), p)


def without(p: Tensor, tokens: Tensor) -> Tensor:
    """`residual` of drafts that are one token each, (N, 1), for certain: p but for it, (N, V)."""
    rest = p.scatter(-1, tokens, 0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass.clamp_min(torch.finfo(p.dtype).tiny), p)
