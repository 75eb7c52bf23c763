"""A controller that reads discarded drafts must not change the law of the rejection rule."""

import pytest
import torch

from layerskip.bench.lawtest import chi_square, recorded_rounds
from layerskip.decoding.controllers import Controller
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.noise import stream_key

LEVEL = 1e-6
ROWS = 6000
TARGET = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
DRAFT = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


class Spy(Controller):
    """Drafts two tokens; then one, but only if the draft model favoured the second token."""

    needs_confidence = True

    def reset(self, rows):
        self.seen = [[] for _ in range(rows)]
        self.rounds = [0] * rows

    def limit(self, row, allowed):
        if self.rounds[row] == 0:
            return 3  # one more than wanted, to be told the second confidence
        return int(self.seen[row][1] > 0.25)

    def keep_drafting(self, row, confidence):
        self.seen[row].append(confidence)
        return len(self.seen[row]) < 2

    def update(self, row, drafted, accepted):
        self.rounds[row] += 1


def second_tokens():
    """For rows whose first draft token was rejected: the token after the correction."""
    law, keys = Law(do_sample=True, rows=ROWS), [stream_key(5, row) for row in range(ROWS)]
    rounds = recorded_rounds(TARGET, DRAFT, Spy(), law, keys, longest=3, acceptance="rejection")
    first, second = next(rounds), next(rounds)
    return [second.emitted[row][0] for row in range(ROWS) if first.accepted[row] == 0]


@pytest.mark.thorough
def test_what_was_thrown_away_tells_nothing_of_what_comes():
    tokens = second_tokens()
    assert len(tokens) > ROWS / 4
    assert chi_square(tokens, softmax_law(TARGET)) > LEVEL


@pytest.mark.thorough
def test_the_spy_would_find_a_reused_stream(monkeypatch):
    monkeypatch.setattr("layerskip.decoding.noise.stream_key", lambda key, start: key)
    assert chi_square(second_tokens(), softmax_law(TARGET)) < LEVEL
