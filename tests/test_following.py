"""Drafts followed to their first wrong token, against replays of every token."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from covering import covering
from looped import rows, sampling
from marks import thorough
from models import lively_model, pure
from transformers import RepetitionPenaltyLogitsProcessor

from layerskip.config.skips import LowPrecision, SkipConfig
from layerskip.replay import steps as steps_module
from layerskip.replay.chain_cache import ChainCache
from layerskip.replay.replayed_drafts import all_starts, follow, replay
from layerskip.replay.trace import take_trace

LENGTH = 6
EOS = frozenset(range(5, 9))
# family, temperature (None: greedy), accept rule, end tokens
CASES = {
    "greedy": ("llama", None, "coupled", frozenset()),
    "coupled": ("llama", 1.0, "coupled", EOS),
    "rejection": ("llama", 1.0, "rejection", EOS),
    "windows": ("gemma2", 0.7, "coupled", frozenset()),  # of 8 tokens; softcaps, eager attention
    "windows, rejection": ("mistral", 0.7, "rejection", frozenset()),
    "greedy windows": ("qwen2", None, "coupled", EOS),
}
FIVE = (0, 1, 2, 3, 4)
SKIPS = {
    "an exit": SkipConfig.early_exit(4),
    "an odd prefix": SkipConfig(mlp=(2, 4)),
    "an odd prefix alone": SkipConfig(attention=(4, 5), mlp=(3, 4, 5)),
    "an even prefix": SkipConfig(attention=(3,), mlp=(4,)),
    "no prefix": SkipConfig(attention=(0, 3)),
    "one MLP": SkipConfig(attention=(*FIVE, 5), mlp=FIVE),
    "one attention": SkipConfig(attention=FIVE, mlp=(*FIVE, 5)),
    "nothing skipped": SkipConfig(),
    "all low": SkipConfig.low_precision(4),
    "low behind a prefix": SkipConfig(low=LowPrecision(bits=4, attention=(3, 4), mlp=(2, 5))),
    "a low head": SkipConfig(exit_layer=4, low=LowPrecision(bits=4, attention=(), mlp=())),
}


@cache
def traced(case):
    family, temperature, acceptance, eos = CASES[case]
    return take_trace(
        lively_model(family),
        rows(),
        max_new_tokens=24,
        law=sampling(temperature),
        eos=eos,
        draft_length=LENGTH,
        acceptance=acceptance,
    )


@cache
def replayed(case, skip):
    return replay(traced(case), SKIPS[skip])


def agree(followed, whole):
    """Whether drafts are followed exactly to their first wrong token, for (N, J) booleans."""
    right = whole.matches[:, : followed.shape[1]].long().cumprod(1).bool()
    return torch.equal(followed, right)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("case", CASES)
def test_followed_drafts_are_the_replayed_ones(case, skip):
    assert agree(follow(traced(case), SKIPS[skip], LENGTH), replayed(case, skip))


@pytest.mark.parametrize("skip", ["an exit", "an odd prefix", "no prefix"])
@pytest.mark.parametrize("case", ["greedy", "coupled", "rejection"])
def test_some_starts_and_some_tokens(case, skip):
    """Starts in any order, and for each text other tokens that may be drafted."""
    trace = traced(case)
    every = all_starts(trace)
    some = random.Random(1).sample(range(len(every)), 21)
    shares = torch.rand(3, 97, generator=torch.Generator().manual_seed(4))
    for allowed in (None, shares < 0.8, shares < 0.02):
        whole = replay(trace, SKIPS[skip], allowed=allowed)
        starts = [every[number] for number in some]
        followed = follow(trace, SKIPS[skip], 2, starts, allowed=allowed)
        assert agree(followed, replace(whole, matches=whole.matches[some]))
    assert follow(trace, SKIPS[skip], 2, []).shape == (0, 2)


@pytest.mark.thorough
def test_the_cases_follow_some_drafts_and_lose_some():
    whole = {(case, skip): replayed(case, skip) for case in CASES for skip in SKIPS}
    first, last = ([played.survival[step] for played in whole.values()] for step in (0, -1))
    assert sum(0.2 < share < 0.9 for share in first) > len(whole) / 2
    assert sum(0 < share < 0.5 for share in last) > len(whole) / 3
    assert min(last) == 0
    for (_, skip), played in whole.items():
        assert (played.survival[0] == 1) == (skip == "nothing skipped")


@pytest.mark.parametrize(
    ("case", "skip", "most"),
    covering(
        ("greedy windows", "windows", "rejection"),
        ("an odd prefix", "no prefix", "one MLP"),
        ((256, (16, 8, 4)), (8, (4, 2)), (6, (3, 1)), (1, (1,))),
    ),
)
def test_chunks_and_groups_change_nothing(case, skip, most, sizes, monkeypatch):
    chains, groups = most
    sizes(chains=chains, groups=groups)
    monkeypatch.setattr("layerskip.replay.trace.NOISE", 700)
    assert agree(follow(traced(case), SKIPS[skip], LENGTH), replayed(case, skip))


def test_logits_bound_a_pass(monkeypatch, sizes):
    seen = []

    class Watched(ChainCache):
        def __init__(self, known, texts, starts, steps):
            seen.append(starts.numel())
            super().__init__(known, texts, starts, steps)

    monkeypatch.setattr(steps_module, "ChainCache", Watched)
    sizes(logits=40 * 97)  # of 97 tokens each
    followed = follow(traced("windows"), SKIPS["no prefix"], LENGTH)
    assert 20 < max(seen) <= 40
    assert agree(followed, replayed("windows", "no prefix"))


@pytest.mark.parametrize("acceptance", [*thorough("coupled"), "rejection"])
def test_processors_that_read_the_text(acceptance):
    @pure
    def by_length(ids, scores):
        """Favours another token at every length, and forbids the last token."""
        scores = scores.clone()
        scores[:, ids.shape[1] % scores.shape[1]] += 1.0
        return scores.scatter(1, ids[:, -1:], float("-inf"))

    law = sampling(0.8, RepetitionPenaltyLogitsProcessor(1.3), by_length)
    trace = take_trace(
        lively_model("llama"),
        rows((9, 5)),
        max_new_tokens=16,
        law=law,
        eos=EOS,
        draft_length=LENGTH,
        acceptance=acceptance,
    )
    for skip in ("an exit", "an odd prefix", "no prefix"):
        whole = replay(trace, SKIPS[skip])
        assert 0 < whole.survival[0] < 1
        assert agree(follow(trace, SKIPS[skip], LENGTH), whole)
