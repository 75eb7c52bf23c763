"""Made-up models to search: how skipped sublayers lower acceptance, and what drafts cost."""

import math
import random
from itertools import product

from layerskip.costs.speculation import CostTable, speedup

LENGTHS = range(1, 9)


def masks_of(space):
    """Every mask of a small space, once."""
    masks = (sum(bits) for bits in product(*(each.values() for each in space.switches.values())))
    return [mask for mask in masks if mask in space]


class Landscape:
    """The expected tokens per target step of any set of skipped sublayers, in place of a replay.

    Each skipped sublayer lowers the acceptance by its own damage, more if its neighbours are
    skipped too, and more in larger sets. With `exits`, the model was trained for early exit: a
    skipped tail costs what its first layer says, not the sum of its damages. Low precision costs
    a third; only for some sublayers and the head does it do much damage.
    """

    def __init__(self, num_layers, seed, *, exits=False, verify=0.1):
        draw = random.Random(seed)
        n = self.sublayers = 2 * num_layers
        depth = [i / (n - 1) for i in range(n)]
        shape = [0.25 + 3.0 * math.exp(-9 * x) + 1.5 * math.exp(-9 * (1 - x)) for x in depth]
        scale = 1.6 / n
        self.damage = [
            scale * s * math.exp(draw.gauss(0, 0.9)) * (0.7 if i % 2 == 0 else 1.3)
            for i, s in enumerate(shape)
        ]
        self.pairs = {
            (i, i + gap): scale * draw.gauss(0.3, 0.3) / gap
            for gap in (1, 2, 3)
            for i in range(n - gap)
        }
        self.exit_damage = None
        if exits:
            fall = draw.uniform(3, 5)
            self.exit_damage = [1.1 * math.exp(-fall * (e / num_layers)) for e in range(n // 2 + 1)]
        weights = [draw.uniform(0.8, 1.2) * (1.0 if i % 2 == 0 else 1.8) for i in range(n)]
        self.head = 0.08 * sum(weights)
        self.weights = weights
        self.rounding = [scale * 0.15 * math.exp(draw.gauss(0, 1.3)) for _ in range(n + 1)]
        self.verify = tuple(1 + verify * tokens for tokens in range(max(LENGTHS) + 1))
        self.calls = 0

    def acceptance(self, mask):
        tail = self.sublayers
        damage = 0.0
        if self.exit_damage is not None:
            while tail >= 2 and mask >> tail - 2 & 3 == 3:
                tail -= 2
            if tail < self.sublayers:
                damage = self.exit_damage[tail // 2]
        out = [i for i in range(tail) if mask >> i & 1]
        damage += sum(self.damage[i] for i in out)
        chosen = set(out)
        damage += sum(d for (i, j), d in self.pairs.items() if i in chosen and j in chosen)
        damage = max(0.0, damage) * (1 + 1.5 * len(out) / self.sublayers)
        low = mask >> self.sublayers  # the highest bit is the head's
        return math.exp(-damage - sum(d for i, d in enumerate(self.rounding) if low >> i & 1))

    def cost(self, mask):
        low = mask >> self.sublayers
        read = [w / 3 if low >> i & 1 else w for i, w in enumerate([*self.weights, self.head])]
        kept = sum(w for i, w in enumerate(read) if i == self.sublayers or not mask >> i & 1)
        return kept / (sum(self.weights) + self.head) + 0.02

    def costs(self, mask):
        return CostTable(self.cost(mask), self.verify)

    def influence(self, seed=0):
        """An estimate of each sublayer's damage, as from similarity: off by half to twice."""
        draw = random.Random(seed)
        return [damage * math.exp(draw.gauss(0, 0.6)) for damage in self.damage]

    def __call__(self, mask):
        """Value, acceptance and draft cost."""
        self.calls += 1
        alpha, costs = self.acceptance(mask), self.costs(mask)
        value = max(speedup(alpha, g, costs.draft, costs.verify_cost) for g in LENGTHS)
        return value, alpha, costs.draft
