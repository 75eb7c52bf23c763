"""Followed drafts against replayed ones, up to every first wrong token and round by round."""

from functools import cache

import pytest
import torch
from covering import covering
from models import lively_model, pure, ragged
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from layerskip.config import LowPrecision, SkipConfig
from layerskip.decoding.laws import Law
from layerskip.decoding.sources import steps as steps_module
from layerskip.decoding.sources.chain_cache import ChainCache
from layerskip.replay.drafts import astray, follow, replay
from layerskip.replay.simulation import count_rounds
from layerskip.replay.trace import take_trace

LENGTH = 6
EOS = frozenset(range(5, 9))
# family, temperature (None: greedy), accept rule, tokens that end a text
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


def sampling(temperature, *processors):
    warpers = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    return Law([*processors, *warpers], do_sample=temperature is not None, rows=1)


def prompts(lengths=(3, 12, 7)):
    ids, mask = ragged(tuple(lengths))
    return [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]


@cache
def traced(case):
    family, temperature, acceptance, eos = CASES[case]
    return take_trace(
        lively_model(family),
        prompts(),
        max_new_tokens=24,
        law=sampling(temperature),
        eos=eos,
        draft_length=LENGTH,
        acceptance=acceptance,
    )


def followed_alone(trace, skip, *length, enough=None):
    """A draft that can draw every token; `enough` is told its survival."""
    alone = None if enough is None else lambda each: [enough(each[0])]
    return follow(trace, skip, [None], *length, enough=alone)[0]


@cache
def replayed(case, skip):
    return replay(traced(case), SKIPS[skip])


def agree(followed, whole):
    """Whether both say the same of every draft up to and with its first wrong token."""
    length = followed.draft_length
    on = ~astray(whole.matches)[:, :length]  # (N, J)

    def same(name):
        mine, theirs = getattr(followed, name)[on], getattr(whole, name)[:, :length][on]
        if mine.is_floating_point():  # last bits may depend on how many share a product
            return torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        return torch.equal(mine, theirs)

    names = ["tokens", "matches", "ends", "confidences", "margins"]
    return all(map(same, names)) and followed.survival == whole.survival[:length]


def ended_astray(whole):
    """Which drafts end behind a wrong token, (N,)."""
    first = whole.ends & (whole.ends.cumsum(1) == 1)  # (N, J)
    return (first & astray(whole.matches)).any(1)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("case", CASES)
def test_followed_drafts_are_the_replayed_ones(case, skip):
    followed, whole = followed_alone(traced(case), SKIPS[skip]), replayed(case, skip)
    assert agree(followed, whole)
    assert followed.texts == whole.texts
    lost = astray(whole.matches)
    assert not (followed.matches & lost).any()
    assert not (followed.ends & lost).any()
    if not ended_astray(whole).any():
        for length in range(1, LENGTH + 1):
            assert count_rounds(followed, length) == count_rounds(whole, length)


def vocabularies():
    """All tokens, most, few and hardly any, other ones for each text."""
    shares = torch.rand(3, 97, generator=torch.Generator().manual_seed(4))
    return [None, shares < 0.8, shares < 0.3, shares < 0.02]


@pytest.mark.parametrize("skip", ["an exit", "an odd prefix", "no prefix", "nothing skipped"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_followed_together_are_those_replayed_alone(case, skip):
    trace, each = traced(case), vocabularies()
    together = follow(trace, SKIPS[skip], each)
    survivals = []
    for followed, allowed in zip(together, each, strict=True):
        whole = replay(trace, SKIPS[skip], allowed=allowed)
        assert agree(followed, whole)
        survivals.append(whole.survival[0])
    assert survivals == sorted(survivals, reverse=True)
    assert survivals[0] > survivals[1] > survivals[2]
    told = []
    ended = follow(trace, SKIPS[skip], each, enough=lambda now: told.append(now) or [True] * 4)
    if skip in ("an odd prefix", "no prefix"):  # the others are exits
        assert [played.draft_length for played in ended] == [1] * 4
        assert [len(survival) for survival in told[0]] == [1] * 4


def test_the_cases_follow_some_drafts_and_lose_some():
    whole = {(case, skip): replayed(case, skip) for case in CASES for skip in SKIPS}
    first, last = ([played.survival[step] for played in whole.values()] for step in (0, -1))
    assert sum(0.2 < share < 0.9 for share in first) > len(whole) / 2
    assert sum(0 < share < 0.5 for share in last) > len(whole) / 3
    assert min(last) == 0
    for (_, skip), played in whole.items():
        assert (played.survival[0] == 1) == (skip == "nothing skipped")
    exact = [not ended_astray(played).any() for played in whole.values()]
    assert len(whole) / 2 < sum(exact) < len(whole)


@pytest.mark.parametrize("case", ["coupled", "windows, rejection"])
def test_behind_a_wrong_token_drafts_are_as_sure_as_those_that_start_there(case):
    for skip in ("an exit", "an odd prefix"):
        followed = followed_alone(traced(case), SKIPS[skip])
        for rows, text in zip(followed.texts, followed.trace.texts, strict=True):
            lost = torch.nonzero(astray(followed.matches[rows])).tolist()
            for told in (followed.confidences[rows], followed.margins[rows]):
                for start, step in lost:
                    assert told[start, step] == told[min(start + step, text.starts - 1), 0]


@pytest.mark.parametrize(
    ("case", "skip", "most"),
    covering(
        ("greedy windows", "windows", "rejection"),
        ("an odd prefix", "no prefix", "one MLP"),
        ((256, (16, 8, 4)), (8, (4, 2)), (6, (3, 1)), (1, (1,))),
    ),
)
def test_chunks_and_groups_change_nothing(case, skip, most, sizes):
    """Also where groups change after every step, whatever is left of them."""
    chains, groups = most
    sizes(chains=chains, groups=groups, regroup=1.0, logits=700)  # of the noise
    assert agree(followed_alone(traced(case), SKIPS[skip]), replayed(case, skip))


def test_logits_bound_a_pass(monkeypatch, sizes):
    seen = []

    class Watched(ChainCache):
        def __init__(self, known, texts, starts, steps):
            seen.append(starts.numel())
            super().__init__(known, texts, starts, steps)

    monkeypatch.setattr(steps_module, "ChainCache", Watched)
    sizes(logits=40 * 97)  # of 97 tokens: two groups of 16
    followed = followed_alone(traced("windows"), SKIPS["no prefix"])
    assert max(seen) == 32
    assert agree(followed, replayed("windows", "no prefix"))


def swapped(cache, chosen, steps, fed):
    """A known mistake: every chain of a group takes its neighbour's keys and values."""
    return RIGHT(cache, chosen.roll(1, dims=1), steps, fed)


def stale(cache, chosen, steps, fed):
    """A known mistake: the last step's keys and values stay behind."""
    return RIGHT(cache, chosen, steps, fed - 1)


RIGHT = ChainCache.regrouped


@pytest.mark.parametrize("wrong", [swapped, stale])
def test_a_wrong_regrouping_shows(wrong, monkeypatch):
    monkeypatch.setattr(ChainCache, "regrouped", wrong)
    followed = followed_alone(traced("windows"), SKIPS["no prefix"])
    assert not agree(followed, replayed("windows", "no prefix"))


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_processors_that_read_the_text(acceptance):
    @pure
    def by_length(ids, scores):
        """Likes another token at every length, and none that has just been."""
        scores = scores.clone()
        scores[:, ids.shape[1] % scores.shape[1]] += 1.0
        return scores.scatter(1, ids[:, -1:], float("-inf"))

    law = sampling(0.8, RepetitionPenaltyLogitsProcessor(1.3), by_length)
    trace = take_trace(
        lively_model("llama"),
        prompts((9, 5)),
        max_new_tokens=16,
        law=law,
        eos=EOS,
        draft_length=LENGTH,
        acceptance=acceptance,
    )
    for skip in ("an exit", "an odd prefix", "no prefix"):
        whole = replay(trace, SKIPS[skip])
        assert 0 < whole.survival[0] < 1
        assert agree(followed_alone(trace, SKIPS[skip]), whole)


@pytest.mark.parametrize("chains", [512, 16])
def test_following_ends_when_it_is_enough(chains, sizes):
    sizes(chains=chains)
    trace, skip = traced("windows"), SKIPS["an odd prefix"]
    told = []

    def enough(survival):
        told.append(list(survival))
        return len(survival) == 3

    followed = followed_alone(trace, skip, enough=enough)
    assert followed.draft_length == 3
    assert agree(followed, replayed("windows", "an odd prefix"))
    assert [len(survival) for survival in told] == [1, 2, 3]
    if chains == 512:  # one pass holds all starts: the sample is the whole
        assert told[-1] == pytest.approx(followed.survival)
    assert followed_alone(trace, skip, 2, enough=enough).draft_length == 2


def test_one_of_several_vocabularies_may_end_sooner():
    trace, skip, each = traced("coupled"), SKIPS["an odd prefix"], vocabularies()
    ends = [3, 1, 6, 2]

    def enough(told):
        return [len(mine) >= end for mine, end in zip(told, ends, strict=True)]

    found = follow(trace, skip, each, enough=enough)
    assert [played.draft_length for played in found] == ends
    for played, allowed in zip(found, each, strict=True):
        assert agree(played, replay(trace, skip, allowed=allowed))


def test_bad_lengths_are_told():
    trace = traced("greedy")
    for length in (0, LENGTH + 1):
        with pytest.raises(ValueError, match=r"1\.\.6"):
            followed_alone(trace, SKIPS["no prefix"], length)
    with pytest.raises(ValueError, match=r"1\.\.5 for a 6-layer"):
        followed_alone(trace, SkipConfig.early_exit(6))
