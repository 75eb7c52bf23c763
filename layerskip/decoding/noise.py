"""Gumbel noise for sampling: a function of (key, position, purpose) only.

It is the same on every device and in any batch. This makes coupled sampling reproducible.
Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# The purposes of a noise stream. Coupled sampling uses TARGET for draft and target alike.
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


def starts_of(keys: Sequence[int], positions: Sequence[int], purpose: int = TARGET) -> list[int]:
    """Starts of noise streams: token t mixes the number start + t * g (g of splitmix64)."""
    return [
        _signed(_mix(key ^ _mix(position * 4 + purpose)))
        for key, position in zip(keys, positions, strict=True)
    ]


def _starts(keys: Sequence[int], positions: Sequence[int], purpose: int, device: Any) -> Tensor:
    """The start of each of N streams, (N, 1) int64."""
    bases = starts_of(keys, positions, purpose)
    return torch.tensor(bases, dtype=torch.int64).to(device, non_blocking=True)[:, None]


def _uniform(x: Tensor) -> Tensor:
    """Uniform float32 in (0, 1 - 2^-24], fine (2^-32) near zero, from int64, in place."""
    # splitmix64 in wrapping int64; the masks turn the arithmetic shift into a logical one
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))
    bits = x.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)  # the best-mixed half
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)


@lru_cache(maxsize=4)
def _steps(size: int, device: torch.device) -> Tensor:
    """The offset of each token in its stream, (size,)."""
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

    `argmax(log law + noise)` is a draw from the law (Gumbel-max). The same noise for draft and
    target gives the coupling of Daliri, Musco, Suresh 2024 (arXiv 2408.07978).

    Args:
        positions: position of the token drawn, counted without pads.
    """
    starts = _starts(keys, positions, purpose, device)  # (N, 1)
    steps = _steps(vocabulary, starts.device)  # (V,)
    noise = torch.empty(len(keys), vocabulary, device=starts.device)  # (N, V)
    count = at_once(noise, TILE)
    for some, out in zip(starts.split(count), noise.split(count), strict=True):
        torch.neg(_negative_gumbel(some + steps), out=out)
    return noise


def draft_noise(
    keys: Sequence[int], starts: Sequence[int], places: Sequence[int], scores: Tensor
) -> Tensor:
    """Gumbel noise of drafts under the rejection rule, like scores (N, V).

    A rejected draft has shown the controller something of its noise. So no later round may use the
    same noise: each has a stream of its own, by the place where it starts.
    """
    keys = list(map(stream_key, keys, starts))
    return gumbel_noise(keys, places, scores.shape[-1], purpose=DRAFT, device=scores.device)


def _negative_gumbel(x: Tensor) -> Tensor:
    # -log1p(-u) is Exponential(1), finely resolved where it matters: near zero, at the winner
    return _uniform(x).neg_().log1p_().neg_().log_()


TILE = 2**17  # elements of noise that a CPU makes at once
_AHEAD, BLOCK = 8, 2**20  # maxima: positions made ahead per row, elements for all rows


def at_once(values: Tensor, most: int = 2**20) -> int:
    """How many rows of values (N, V) to process at once: at least 1, with at most `most` numbers.

    On a GPU all of them, since launches cost most. On a CPU few, so that results stay in its caches
    and in memory that the process already has (new memory costs a page fault per page).
    """
    return max(1, most // values.shape[-1] if values.device.type == "cpu" else len(values))


class NoiseBlocks:
    """The noise that draft and target of one decoding share, made once per position.

    Missing positions of all rows, and some ahead, are made in one call (on a GPU many rows take as
    many launches as one). They are kept until `forget`.
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
            ahead = max(1, min(_AHEAD, BLOCK // (vocabulary * len(set(keys)))))
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

    def of_tokens(self, key: int, place: int, tokens: Sequence[int]) -> list[float]:
        """The noise of some tokens at one place."""
        made = self._made.get(key, {}).get(place)
        if made is not None and made.device.type == "cpu":
            noise = made[torch.tensor(tokens)]  # (n,)
        else:
            start = starts_of([key], [place])[0]
            x = torch.tensor([_signed(start + token * _GOLDEN) for token in tokens])  # (n,)
            noise = -_negative_gumbel(x)
        numbers: list[float] = noise.tolist()
        return numbers

    def forget(self, key: int, place: int | None = None) -> None:
        """Drop a row's noise before a position, or all of it.

        A slower row with the same key computes it again.
        """
        made = self._made.get(key, {})
        for past in [past for past in made if place is None or past < place]:
            del made[past]


def accept_uniform(keys: Sequence[int], positions: Sequence[int], device: Any = "cpu") -> Tensor:
    """The uniform random number of each acceptance test, (N,) float32."""
    return _uniform(_starts(keys, positions, ACCEPT, device))[:, 0]
