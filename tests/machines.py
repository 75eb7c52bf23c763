"""Made-up machines, whose clock advances in a model's blocks only, by known costs."""

import random
from copy import copy

from layerskip.model.opened_models import Sublayers


class Machine:
    """A backend with a simulated clock: a pass takes the larger of its reads and its arithmetic.

    Args:
        model: the model that `opened` computes.
        bend: number of tokens from which on arithmetic takes longer than reading weights.
        rest: constant time of every pass and step, relative to that of all weights.
        keys: time of a byte of keys relative to a byte of weights.
        noise: spread of times; if not 0, one time in a hundred is also five times as long.
    """

    def __init__(self, model, *, bend, rest=0.1, keys=1.0, noise=0.0):
        inner = Sublayers(model)
        self.inner, self.blocks = inner.backend, [*inner.blocks, inner.head]
        self.opened = copy(inner)
        self.opened.backend = self
        read = inner.weight_bytes()
        self.weights = [*read["sublayers"], read["head"]]
        self.keys = [keys * sum(inner.key_bytes([i]).values()) for i in range(inner.num_layers)]
        self.bend, self.rest, self.noise = bend, rest * sum(self.weights), noise
        self.time, self.draws = 0.0, random.Random(0)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def now(self):
        return 1e-9 * self.time

    def run(self, hidden, step, blocks):
        rows, tokens = hidden.shape[:2]
        seconds = sum(self._seconds(block, rows, tokens, step.cache.firsts[0]) for block in blocks)
        if self.noise:
            seconds *= 1.0 + abs(self.draws.gauss(0.0, self.noise))
            seconds *= 5.0 if self.draws.random() < 0.01 else 1.0
        self.time += seconds
        return self.inner.run(hidden, step, blocks)

    def _seconds(self, block, rows, tokens, context):
        for number, each in enumerate(self.blocks):
            if each is block:
                return self.part(number, rows, tokens, context)
        return self.low

    @property
    def low(self):
        """Time of any block in low precision."""
        return 0.4 * (sum(self.weights) + self.rest) / len(self.weights)

    def part(self, number, rows, tokens, context):
        """Time of one sublayer, or of the head and the constant rest."""
        seconds = self.weights[number] * max(1.0, rows * tokens / self.bend)
        if number == len(self.weights) - 1:
            return seconds + self.rest
        return seconds + (number % 2 == 0) * rows * context * self.keys[number // 2]

    def draft(self, skip, context, rows=1):
        """The true cost of a draft step, in target steps."""
        kept = [*skip.kept(), len(self.weights) - 1]
        seconds = (self.part(number, rows, 1, context) for number in kept)
        return sum(seconds) / self.seconds(1, rows, context)

    def verify(self, tokens, skip, context, rows=1):
        """The true cost of a pass that verifies drafts, in target steps."""
        prefix = skip.shared_prefix()
        return self.seconds(tokens, rows, context, prefix) / self.seconds(1, rows, context)

    def seconds(self, tokens, rows, context, prefix=0):
        """Time of a pass that runs its first `prefix` sublayers for one token only."""
        counts = [1 if number < prefix else tokens for number in range(len(self.weights))]
        parts = (self.part(number, rows, count, context) for number, count in enumerate(counts))
        return sum(parts)


MACHINES = {
    "memory": {"bend": 40},
    "Zen 4": {"bend": 9},
    "Intel": {"bend": 5, "keys": 3},
    "launches": {"bend": 12, "rest": 1.0},
}
