"""Noise and accept rules: what is drawn follows the target's law, at stated levels.

Seeds are fixed, so every test is repeatable. The levels say how rarely a correct sampler would
fail with other seeds.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import pure
from sampling import LEVEL, accept_always, redraw_from_the_target
from scipy import stats
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation import logits_process

from layerskip.decoding import noise
from layerskip.decoding.laws import Law, check_processor, softmax_law
from layerskip.decoding.noise import (
    ACCEPT,
    DRAFT,
    TARGET,
    NoiseBlocks,
    accept_uniform,
    gumbel_noise,
    stream_key,
)
from layerskip.decoding.rules import acceptance_probability, largest, residual, with_margin

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=5, max_size=5).filter(
    lambda w: sum(w) > 0
)
laws = st.one_of(weights, st.integers(0, 4).map(lambda i: [float(i == j) for j in range(5)])).map(
    lambda w: torch.tensor(w, dtype=torch.float64) / math.fsum(w)
)


# ---- The rejection rule, algebraically ----


def emitted_law(p, q):
    """The law of the tokens that draft, accept test and correction emit together."""
    kept = q * acceptance_probability(p, q)
    return kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q)


@given(p=laws, q=laws)
def test_rejection_emits_the_targets_law(p, q):
    torch.testing.assert_close(emitted_law(p, q), p, rtol=0, atol=1e-12)
    torch.testing.assert_close(emitted_law(p.float(), q.float()), p.float(), rtol=0, atol=1e-6)


@given(p=laws, token=st.integers(0, 4))
def test_rejection_of_one_hot_and_of_equal_drafts(p, token):
    """As for prompt lookup, whose law is one-hot; an equal draft is always accepted."""
    q = torch.zeros(5, dtype=p.dtype)
    q[token] = 1
    assert (q * acceptance_probability(p, q)).sum() == p[token]
    assert torch.equal(acceptance_probability(p, p), torch.ones(5, dtype=p.dtype))
    torch.testing.assert_close(residual(p, p), p)


@given(p=laws, q=laws)
def test_acceptance_is_one_less_total_variation(p, q):
    """If the laws are disjoint, nothing is accepted and the residual is the target."""
    distance = (p - q).abs().sum() / 2
    accepted = (q * acceptance_probability(p, q)).sum()
    torch.testing.assert_close(accepted, 1 - distance)
    if not (p * q).any():
        assert accepted == 0
        torch.testing.assert_close(residual(p, q), p)


def test_known_mistakes_do_not_emit_the_targets_law(monkeypatch):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    torch.testing.assert_close(emitted_law(p, q), p)
    here = emitted_law.__globals__
    for name, wrong in (
        ("residual", redraw_from_the_target),
        ("acceptance_probability", accept_always),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(here, name, wrong)
            assert (emitted_law(p, q) - p).abs().max() > 0.05


# ---- The largest score and its margin ----


@pytest.mark.parametrize("size", [7, 2048, 49_152, 262_144])
def test_the_largest_score_is_ahead_of_the_second_best_by_its_margin(size):
    scores = 2 * torch.randn(7, size, generator=torch.Generator().manual_seed(size))
    scores[1, [3, size - 2]] = 20.0  # equal, far apart
    scores[2, [size // 2, size // 2 + 1]] = torch.tensor([20.0, 19.5])  # adjacent
    scores[3] = float("-inf")
    scores[4, 1:] = float("-inf")
    scores[5, size - 1] = float("nan")
    tokens, margins = with_margin(scores.clone())
    assert torch.equal(tokens, largest(scores))
    assert tokens[[1, 2, 3, 4, 5]].tolist() == [3, size // 2, -1, 0, -1]
    usual = [0, 1, 2, 4, 6]
    best = scores[usual].topk(2).values  # (5, 2)
    assert torch.equal(tokens[usual], scores[usual].argmax(-1))
    torch.testing.assert_close(margins[usual], 1 - torch.exp(best[:, 1] - best[:, 0]))
    assert margins[1] == 0
    assert margins[4] == 1


# ---- Noise ----

KEYS = [stream_key(seed, row) for seed in range(40) for row in range(5)]


def test_noise_is_standard_gumbel_and_its_uniforms_uniform():
    noise = gumbel_noise(KEYS, [7] * 200, 1000).double().flatten()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > LEVEL
    assert noise.isfinite().all()
    keys = [stream_key(seed) for seed in range(20_000)]
    uniform = accept_uniform(keys, [3] * len(keys)).double()
    assert ((uniform > 0) & (uniform < 1)).all()
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > LEVEL


def test_noise_is_finite_and_its_tail_is_fine_at_any_size():
    """The winner of a large vocabulary is in the upper tail: P(largest <= x) = exp(-V e^-x)."""
    size = 60_000
    noise = gumbel_noise(KEYS, [0] * 200, size)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    highest = noise.max(-1).values.double() - math.log(size)
    assert stats.kstest(highest.numpy(), stats.gumbel_r.cdf).pvalue > LEVEL
    assert len(highest.unique()) > 190


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda k: ([k] * 1, [5], TARGET), lambda k: ([k], [6], TARGET)),
        (lambda k: ([k], [5], TARGET), lambda k: ([k], [5], DRAFT)),
        (lambda k: ([k], [5], TARGET), lambda k: ([k], [5], ACCEPT)),
        (lambda k: ([stream_key(k)], [5], TARGET), lambda k: ([stream_key(k, 1)], [5], TARGET)),
        (lambda k: ([stream_key(k)], [5], TARGET), lambda k: ([stream_key(k + 1)], [5], TARGET)),
    ],
    ids=["position", "purpose", "accept", "row", "seed"],
)
def test_noise_is_independent_across_what_names_it(one, other):
    """Chi-square on 8 x 8 cells of pairs, and on neighbouring tokens of one draw."""

    def cells(what):
        rows = []
        for key in range(100):
            keys, positions, purpose = what(key)
            noise = gumbel_noise(keys, positions, 300, purpose=purpose)[0].double()
            rows.append((torch.exp(-torch.exp(-noise)) * 8).long().clamp_max(7))
        return torch.cat(rows).numpy()

    a, b = cells(one), cells(other)
    for left, right in ((a, b), (a[1:], a[:-1]), (a[1:], b[:-1]), (a[:-1], b[1:])):
        table = np.zeros((8, 8))
        np.add.at(table, (left, right), 1)
        assert stats.chi2_contingency(table).pvalue > LEVEL


def earlier_noise(key, position, purpose, vocabulary):
    """The noise of one row (V,), made in one piece, as in the first versions."""

    def mixed(x):  # splitmix64
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        return (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)

    def last(x):
        return x ^ (x >> np.uint64(31))

    golden = np.array([0x9E3779B97F4A7C15], np.uint64)
    place = last(mixed(np.array([position * 4 + purpose], np.uint64) + golden))
    start = last(mixed((np.array([key], np.uint64) ^ place) + golden))
    x = mixed(start + np.arange(vocabulary, dtype=np.uint64) * golden) >> np.uint64(32)
    uniform = torch.from_numpy(x.astype(np.int64)).float().add(0.5).mul(2.0**-32)
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))


@pytest.mark.parametrize("vocabulary", [1, 5, 97, 2047, 49_152, 262_144])
@pytest.mark.parametrize("purpose", [TARGET, DRAFT])
def test_noise_is_bit_by_bit_what_it_was(vocabulary, purpose):
    """However many rows and positions are made at once, and in whatever tiles."""
    keys = [stream_key(seed, row) for seed in (0, 7, 2**40) for row in range(2)]
    places = [0, 1, 5, 131_071, 40, 7]
    noise = gumbel_noise(keys, places, vocabulary, purpose=purpose)  # (6, V)
    for row, key, place in zip(noise, keys, places, strict=True):
        assert torch.equal(row, earlier_noise(key, place, purpose, vocabulary))


# ---- Coupled draws ----


def coupled_draws(scores, count):
    """`count` tokens of the law of scores (V,), with the noise of seeds 0, 1, ..."""
    noise = gumbel_noise([stream_key(seed) for seed in range(count)], [3] * count, len(scores))
    return (scores + noise).argmax(-1)


def test_coupled_draws_follow_the_law():
    scores = torch.tensor([0.0, -1.0, 2.0, -4.0, float("-inf"), 0.5])
    count = 40_000
    seen = torch.bincount(coupled_draws(scores, count), minlength=6).double()
    assert seen[4] == 0
    expected = softmax_law(scores).double() * count
    live = expected > 0
    assert stats.chisquare(seen[live], expected[live] * count / expected.sum()).pvalue > LEVEL


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0, 3.0])
def test_coupled_acceptance_reaches_its_bound(shift):
    """At least (1 - TV) / (1 + TV) and at most 1 - TV, up to five standard errors."""
    generator = torch.Generator().manual_seed(1)
    count = 20_000
    target = torch.randn(50, generator=generator)
    draft = target + shift * torch.randn(50, generator=generator)
    distance = float((softmax_law(target) - softmax_law(draft)).abs().sum() / 2)
    agreed = float((coupled_draws(target, count) == coupled_draws(draft, count)).double().mean())
    error = 5 * math.sqrt(0.25 / count)
    bound = (1 - distance) / (1 + distance)  # Daliri, Musco, Suresh 2024, arXiv 2408.07978
    assert bound - error <= agreed <= 1 - distance + error


# ---- Laws ----


def test_law_of_a_processor_is_asked_with_the_rows_own_history():
    """Rows may have different lengths, and each keeps its row number."""
    calls = []

    @pure
    def watch(ids, scores):
        calls.append(ids.tolist())
        scores = scores + torch.arange(len(ids))[:, None] * 100  # the effect of a row number
        return scores + ids.sum(-1, keepdim=True)

    law = Law([watch], do_sample=True, rows=3)
    history = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    rows, lengths = [2, 0, 0, 1], [3, 2, 3, 3]
    scores = law.scores(torch.zeros(4, 5), history, rows, lengths)
    want = [history[r, :n].sum() + 100 * r for r, n in zip(rows, lengths, strict=True)]
    assert scores[:, 0].tolist() == want
    assert [len(call) for call in calls] == [3, 3]
    assert calls[1] == history[:, :3].tolist()


def test_law_is_float32_and_leaves_the_logits_alone():
    @pure
    def spoil(ids, scores):
        return scores.mul_(2)

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.ones(2, 5, dtype=dtype)
        law = Law([spoil], do_sample=False, rows=2)
        scores = law.scores(logits, torch.zeros(2, 3, dtype=torch.long), [0, 1], [3, 3])
        assert scores.dtype == torch.float32
        assert (scores == 2).all()
        assert (logits == 1).all()


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0, 8.0], ids=lambda spread: f"spread {spread}")
def test_top_p_of_a_large_vocabulary_is_the_librarys(spread, p):
    """Also after top-k, which leaves -inf, with a minimum number of tokens, and for odd rows."""
    generator = torch.Generator().manual_seed(int(10 * spread))
    scores = spread * torch.randn(6, 20_011, generator=generator)  # (N, V)
    scores[1] = TopKLogitsWarper(30)(None, scores[1:2])[0]
    scores[2, 7] = 40
    scores[3] = float("-inf")
    scores[4, 5] = float("nan")
    for least in (1, 3):
        warper = TopPLogitsWarper(p, min_tokens_to_keep=least)
        law = Law([warper], do_sample=True, rows=1)
        got = law.scores(scores, torch.zeros(1, 4, dtype=torch.long), [0] * 6, [4] * 6)
        want = warper(None, scores)
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(got.isnan(), want.isnan())


def test_top_p_keeps_the_same_scores_where_some_are_equal():
    """Which of several equal tokens are cut is decided by the library's sort."""
    scores = (2 * torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0))).round()
    warper = TopPLogitsWarper(0.95)
    law = Law([warper], do_sample=True, rows=1)
    got = law.scores(scores, torch.zeros(1, 4, dtype=torch.long), [0] * 3, [4] * 3)
    assert torch.equal(got.sort().values, warper(None, scores).sort().values)


class Automaton(LogitsProcessor):
    """A user's processor whose state changes with every call."""

    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores


class TemperatureImpostor(TemperatureLogitsWarper):
    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return super().__call__(ids, scores) / self.calls


TemperatureImpostor.__name__ = TemperatureImpostor.__qualname__ = "TemperatureLogitsWarper"


def test_processors_that_do_not_say_that_they_keep_no_state_are_refused():
    """The library's processors are known by class: neither a name nor a base class is enough."""
    for processor in (Automaton(), TemperatureImpostor(0.8), lambda ids, scores: scores):
        with pytest.raises(ValueError, match="layerskip_pure = True"):
            Law([processor], do_sample=True, rows=1)
    Law([pure(Automaton())], do_sample=True, rows=1)
    whisper = object.__new__(WhisperTimeStampLogitsProcessor)
    with pytest.raises(ValueError, match="WhisperTimeStampLogitsProcessor of transformers keeps"):
        Law([whisper], do_sample=True, rows=1)
    with pytest.raises(ValueError, match="temperature must be at least 1e-30, or scores leave"):
        Law([TemperatureLogitsWarper(1e-40)], do_sample=True, rows=1)


def test_every_processor_of_the_library_is_known_or_refused():
    kinds = [
        kind
        for kind in vars(logits_process).values()
        if isinstance(kind, type) and issubclass(kind, LogitsProcessor)
    ]
    refused = set()
    for kind in kinds:
        try:
            check_processor(object.__new__(kind))
        except ValueError:
            refused.add(kind.__name__)
    assert "SynthIDTextWatermarkLogitsProcessor" in refused
    assert "ClassifierFreeGuidanceLogitsProcessor" in refused
    assert not any(name.endswith("Warper") or "Penalty" in name for name in refused)


@pytest.mark.parametrize("rows", [1, 8])
def test_processors_of_the_library_are_asked_once_for_every_position(rows, spied):
    """Not once for every row and length: ragged rows seldom share a length."""
    asked = spied(
        RepetitionPenaltyLogitsProcessor, "__call__", lambda _, ids, __: [ids.shape[1]] * len(ids)
    )
    processor = RepetitionPenaltyLogitsProcessor(1.5)
    law = Law([processor], do_sample=True, rows=rows)
    at = [(row, 9 + 7 * row + offset) for row in range(rows) for offset in range(5)]
    law.scores(
        torch.zeros(len(at), 11),
        torch.zeros(rows, 99, dtype=torch.long),
        [row for row, _ in at],
        [length for _, length in at],
    )
    assert sorted(length for lengths in asked for length in lengths) == sorted(
        length for _, length in at
    )


# ---- Blocks of noise ----


def test_rows_and_places_are_made_together_and_memory_is_bounded(monkeypatch):
    """Eight rows at different speeds take few calls, and hold only a few blocks."""
    size, rows = 2**15, 8
    calls, stores = [], []

    def counted(keys, *rest, **how):
        made = gumbel_noise(keys, *rest, **how)
        calls.append(len(keys))
        stores.append((StorageWeakRef(made.untyped_storage()), made.nbytes))
        return made

    monkeypatch.setattr(noise, "gumbel_noise", counted)
    blocks = NoiseBlocks()
    keys = [stream_key(1, row) for row in range(rows)]
    places, scores = [0] * rows, torch.zeros(rows, size)
    for step in range(40):
        blocks.at(keys, places, scores)
        for row in range(rows):
            places[row] += 1 + (step + row) % 3
            blocks.forget(keys[row], places[row])
        held = sum(nbytes for store, nbytes in stores if not store.expired())
        assert 0 < held <= 2 * 8 * rows * size * 4
    assert len(calls) <= 40
    assert max(calls) <= 8 * rows


def test_noise_made_in_blocks_is_the_same_noise():
    """Whatever the order of positions and rows, and whatever was forgotten."""
    blocks = NoiseBlocks()
    keys = [stream_key(0), stream_key(1)]
    scores = torch.zeros(2, 2047)
    for place in (3, 4, 5, 9, 6, 7, 30, 27, 31, 40):
        places = [place, place + 2]
        made = torch.stack(blocks.at(keys, places, scores))
        assert torch.equal(made, gumbel_noise(keys, places, 2047))
        blocks.forget(keys[0], place)
    blocks.forget(keys[0])
    blocks.forget(stream_key(2))
