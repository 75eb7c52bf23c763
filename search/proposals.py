"""Which set to try next, given only what the sets tried so far were worth."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .space import Change, Space, changed

LENGTHSCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the kernel, in units of the number of switches."""
NOISE = 1e-4
"""Added variance: values are exact, but the model of them is not."""
PAYS = 1.1
"""Times the score of skipping nothing, from which on a warm start is the base of single flips."""
WIDEST = 24
"""Changes whose pairs are considered as one move: the most promising ones."""


@dataclass(slots=True)
class History:
    """What is known of a study's sets, by mask."""

    scores: dict[int, float] = field(default_factory=dict)
    """Of finished trials: what to maximise."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of finished trials: acceptance lost per draft cost saved, where both are known."""
    taken: set[int] = field(default_factory=set)
    """Sets not to propose: finished, running, or known to fail."""
    left: dict[int, str] = field(default_factory=dict)
    """Sets whose trial never ended, each with what proposed it."""

    def free(self, space: Space, mask: int) -> bool:
        return mask in space and mask not in self.taken


def acceptance_loss(acceptance: float, saved: float) -> float:
    """-log(acceptance) per part of the target step saved: what ranks single switches."""
    return (1e-3 - math.log(max(acceptance, 1e-6))) / max(saved, 1e-6)


def base(history: History, warm_starts: Iterable[int]) -> int:
    """The set that switches are tried on one by one: the best warm start, or nothing.

    A switch is worth another thing in a draft that pays, say a trained exit, than in a whole model.
    """
    tried = [mask for mask in warm_starts if mask in history.scores]
    best = max(tried, key=lambda mask: history.scores[mask], default=0)
    return best if history.scores.get(best, 0.0) > PAYS * history.scores.get(0, math.inf) else 0


def next_single(space: Space, history: History, base: int = 0) -> int | None:
    """The first switch that has not been flipped alone."""
    flips = (changed(base, flip) for flip in space.flips(base))
    return next((mask for mask in flips if history.free(space, mask)), None)


def next_on_path(space: Space, history: History, base: int = 0) -> int | None:
    """Ranked greedy: flip the switches that promise most alone, as many of them as pay.

    From nothing, those promise most that lose little for what they save; from a set that pays,
    those of the highest score. How many pay is found by halving the gaps beside the best count
    known: the first that does not pay may lie on the way to larger drafts that do.
    """
    alone = {changed(base, flip): flip for flip in space.flips(base)}
    tried = [mask for mask in alone if mask in history.scores]
    if base:
        tried.sort(key=lambda mask: -history.scores[mask])
    else:
        tried.sort(key=lambda mask: (history.losses.get(mask, 0.0), -history.scores[mask]))
    path = [base]
    for mask in tried:
        further = changed(path[-1], alone[mask])
        if further in space:
            path.append(further)
    last = len(path) - 1
    if base:
        counts = sorted({min(last, count) for count in (0, 2, 3, 4, 6, last // 4)})
    else:
        counts = sorted({0, last // 8, last // 4, last // 2, 3 * last // 4, last})
    while True:
        for count in counts:
            if history.free(space, path[count]):
                return path[count]
        tried_counts = [i for i, count in enumerate(counts) if path[count] in history.scores]
        if not tried_counts:
            return None
        best = max(tried_counts, key=lambda i: history.scores[path[counts[i]]])
        gaps = [(counts[i], counts[i + 1]) for i in (best - 1, best) if 0 <= i < len(counts) - 1]
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
        if high - low < 2:
            return None
        counts = sorted({*counts, (low + high) // 2})


def next_local(space: Space, history: History, rank: int = 0, base: int = 0) -> int | None:
    """The change of one switch or two of a good set, swaps included, that promises most.

    `rank` 0 starts from the best set known, 1 from the best one that is far from it, and so on.
    The promise is the expected improvement under a Gaussian process over the switches, with the
    kernel exp(-differing switches / lengthscale). None where every move was made.
    """
    if not history.scores or not space.switches:
        return None
    centre = _elite(history, rank, apart=max(2, len(space.switches) // 8))
    model = _Surrogate(space, history.scores, base)
    changes = space.changes(centre)
    alone = [changed(centre, change) for change in changes]
    promise = model.expected_improvement(alone)
    widest = sorted(range(len(changes)), key=lambda i: -promise[i])[:WIDEST]
    out = [i for i, (bits, _) in enumerate(changes) if space.left_out(centre) & bits]
    widest += [i for i in out if i not in widest][:WIDEST]
    pairs = [
        changed(alone[i], changes[j])
        for n, i in enumerate(widest)
        for j in widest[n + 1 :]
        if changes[i][0] != changes[j][0]
    ]
    moves = [mask for mask in (*alone, *pairs) if history.free(space, mask)]
    if not moves:
        return None
    promise = model.expected_improvement(moves)
    return moves[max(range(len(moves)), key=lambda i: promise[i])]


def unseen(space: Space, history: History, near: int, draw: random.Random) -> int | None:
    """`near` itself if it is free, else a free set few flips away; None where none is left."""
    if history.free(space, near):
        return near
    changes: dict[int, list[Change]] = {}  # by the bits of a switch
    for change in space.changes(near):
        changes.setdefault(change[0], []).append(change)
    for distance in range(1, len(changes) + 1):
        for _ in range(20):
            mask = near
            for bits in draw.sample(list(changes), distance):
                mask = changed(mask, draw.choice(changes[bits]))
            if history.free(space, mask):
                return mask
    return next((mask for mask in space.enumerate() if history.free(space, mask)), None)


def _elite(history: History, rank: int, apart: int) -> int:
    """The best set, or the best one at least `apart` sublayers from all better elites."""
    elites: list[int] = []
    for mask in sorted(history.scores, key=lambda m: -history.scores[m]):
        if all((mask ^ other).bit_count() >= apart for other in elites):
            elites.append(mask)
            if len(elites) > rank:
                break
    return elites[-1]


class _Surrogate:
    """A Gaussian process over N sets of n switches with F choices in all, fitted to their scores.

    Switches differ in size: one that changes the score more alone sets sets farther apart.
    """

    def __init__(self, space: Space, scores: dict[int, float], base: int) -> None:
        self.choices = [
            (bits, value)
            for bits, choices in zip(space.fields.values(), space.switches.values(), strict=True)
            for value in choices.values()
        ]
        middle = scores.get(base, 0.0)
        flips = [changed(base, flip) for flip in space.flips(base)]
        changes = [abs(scores.get(flip, middle) - middle) for flip in flips]
        alone = torch.tensor(changes).double()
        mean = float(alone.mean()) + 1e-12
        sizes = torch.ones_like(alone)  # (n,)
        if base in scores:
            sizes = (alone + mean) / (2 * mean)
        self.count, self.whole = len(sizes), sizes.sum()
        counts = torch.tensor([len(choices) for choices in space.switches.values()])
        self.sizes = sizes.repeat_interleave(counts)  # (F,)
        self.tried = self._bits(list(scores))  # (N, F)
        values = torch.tensor(list(scores.values()), dtype=torch.float64)  # (N,)
        values = values.clamp_min(float(values.quantile(0.2)))  # how bad the worst are is no news
        values = (values - values.mean()) / (values.std(correction=0) + 1e-12)
        self.best = float(values.max())
        same = self._overlap(self.tried)  # (N, N)
        likeliest = -math.inf
        for scale in LENGTHSCALES:
            kernel = torch.exp((same - self.whole) / (scale * self.count))
            root = torch.linalg.cholesky(
                kernel + NOISE * torch.eye(len(kernel), dtype=kernel.dtype)
            )
            weights = torch.cholesky_solve(values[:, None], root)[:, 0]  # (N,)
            variance = float(values @ weights) / len(values) + 1e-12
            fit = -0.5 * len(values) * math.log(variance) - float(root.diagonal().log().sum())
            if fit > likeliest:
                likeliest, self.scale, self.root = fit, scale, root
                self.weights, self.variance = weights, variance

    def expected_improvement(self, masks: Sequence[int]) -> list[float]:
        bits = self._bits(masks)  # (M, F)
        same = self._overlap(bits)  # (M, N)
        kernel = torch.exp((same - self.whole) / (self.scale * self.count))
        explained = torch.linalg.solve_triangular(self.root, kernel.T, upper=False)  # (N, M)
        spread = (self.variance * (1 + NOISE - explained.square().sum(0))).clamp_min(1e-12).sqrt()
        above = (kernel @ self.weights - self.best) / spread  # (M,)
        density = torch.exp(-0.5 * above.square()) / math.sqrt(2 * math.pi)
        expected: list[float] = (spread * (above * torch.special.ndtr(above) + density)).tolist()
        return expected

    def _bits(self, masks: Sequence[int]) -> torch.Tensor:
        rows = [[float(mask & bits == value) for bits, value in self.choices] for mask in masks]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def _overlap(self, bits: torch.Tensor) -> torch.Tensor:
        """Switches that are alike, by size: (M, F) against the tried sets to (M, N)."""
        return (bits * self.sizes) @ self.tried.T
