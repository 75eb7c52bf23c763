"""Drafts from stored logits: what is found, and that they are drawn as the target draws.

That the text and its law are the target's is tested in `test_every_kind.py`.
"""

import random

import kinds
import pytest
import torch
from models import seated
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip import LogitLookup, Session, generate
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.rules import COUPLED, REJECTION
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import Batch
from layerskip.research.logit_lookup import BestAcceptance, LogitTable, _Best, best_of

# ---- What is kept ----


def test_the_longest_suffix_is_found_the_latest_of_several_and_old_ones_are_dropped():
    drawn = random.Random(0)
    text, most = [drawn.randrange(3) for _ in range(300)], 20
    table = LogitTable(most)
    for end in range(1, len(text)):
        context = text[max(0, end - 6) : end]
        match, place = table.find(context)
        best = (0, -1)
        for earlier in range(max(1, end - most), end):  # only the latest ones are held
            common = 0
            while common < min(4, earlier) and text[earlier - 1 - common] == text[end - 1 - common]:
                common += 1
            best = max(best, (common, earlier))
        assert match == best[0]
        if match:  # each place has its own number as a logit
            assert int(table.logits[place, 0]) == best[1]
        table.keep([context], *best_of(torch.full((1, 40), float(end))))


def test_what_is_kept_is_what_the_model_says():
    model, source = kinds.model_of("llama"), kinds.Keeping()
    ids = torch.arange(2, 13)[None]  # (1, W)
    how = {"do_sample": True, "temperature": 2.0, "top_k": 0, "seed": 1, "lookup": False}
    how |= {"draft_memory": 0, "max_new_tokens": 30}
    text = generate(model, ids, sources=[source], **how).sequences  # (1, W + 30)
    with torch.no_grad():
        raw = model(text).logits[0].float()  # (T, V)
    for end in range(11, 41):
        suffix, place = source.table.find(text[0, :end].tolist())
        assert suffix == 4
        values, tokens = raw[end - 1].sort(descending=True)
        assert source.table.tokens[place].tolist() == tokens.tolist()
        assert source.table.logits[place] == pytest.approx(values.numpy(), rel=1e-4, abs=1e-4)


# ---- What is drawn from it ----

PROCESSORS = {
    "softmax": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top-k": [TemperatureLogitsWarper(0.9), TopKLogitsWarper(5)],
    "top-p": [TopPLogitsWarper(0.8)],
    "all": [TemperatureLogitsWarper(1.2), TopKLogitsWarper(9), TopPLogitsWarper(0.7)],
}


def draws_of(processors, *, sample=True, rule=COUPLED):
    law = Law(processors, do_sample=sample, rows=2)
    return Draws(law, rule=rule), seated([7, 8], [3, 2], [[1], [1, 4]], 3)


def drawn(draws, place, tokens, raw):
    scores = draws.scores(place, tokens.tolist(), raw.tolist())
    return int(tokens[max(range(len(scores)), key=scores.__getitem__)])


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_all_tokens_of_a_law_draw_what_the_target_draws(processors, sample):
    draws, seats = draws_of(PROCESSORS[processors], sample=sample)
    raw = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))  # (N, V)
    places = [(seats[i % 2], i // 2) for i in range(40)]
    values, tokens = raw.sort(descending=True)
    for _ in range(2):  # first without, then with cached blocks of noise
        ours = [
            drawn(draws, place, mine, theirs)
            for place, mine, theirs in zip(places, tokens, values, strict=True)
        ]
        assert ours == draws.judge(raw, places).tokens.tolist()


@pytest.mark.parametrize(
    "processor", [RepetitionPenaltyLogitsProcessor(1.1), MinPLogitsWarper(0.1)]
)
def test_laws_that_are_more_than_a_few_numbers_draw_nothing(processor):
    draws, (seat, _) = draws_of([processor])
    assert not draws.scores((seat, 0), [3, 1], [2.0, 1.0])


def test_under_the_rejection_rule_the_likeliest_is_drafted():
    draws, (seat, _) = draws_of([], rule=REJECTION)
    few = torch.arange(20), -torch.arange(20) / 100
    assert {drawn(draws, (seat, offset), *few) for offset in range(9)} == {0}


# ---- Decoding ----


def again(source, seed=5):
    """Sampled texts of a model with few tokens, and their counts."""
    model, (ids, mask) = kinds.model_of("llama"), kinds.prompts()
    how = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": True}
    how |= {"sources": [source], "lookup": False, "draft_memory": 0, "top_k": 0}
    return generate(model, ids, controller="fixed", max_draft_length=4, seed=seed, **how)


def test_what_is_kept_drafts_the_same_text_again_and_another_seeds_by_its_own_noise(monkeypatch):
    source = kinds.Keeping()
    first, second, third = again(source), again(source), again(source, seed=6)
    assert torch.equal(first.sequences, second.sequences)
    assert not torch.equal(first.sequences, third.sequences)
    share = [
        out.stats.num_accepted_tokens / out.stats.num_draft_tokens for out in (first, second, third)
    ]
    assert share[1] > max(share[0], share[2]) + 0.2
    # negative control: with the noise of another position, fewer drafts are right
    scores = Draws.scores
    monkeypatch.setattr(
        Draws, "scores", lambda self, place, *law: scores(self, (place[0], place[1] + 1), *law)
    )
    wrong = again(source)
    assert torch.equal(first.sequences, wrong.sequences)
    assert wrong.stats.num_accepted_tokens / wrong.stats.num_draft_tokens < share[1] - 0.2


def test_a_call_drafts_from_its_own_laws_not_from_those_of_earlier_calls():
    model, (ids, mask) = kinds.model_of("llama"), kinds.prompts()
    session = Session(model, sources=[LogitLookup()], lookup=False, draft_memory=0)
    how = {"attention_mask": mask, "max_new_tokens": 40, "controller": "fixed"}
    one, other = (session.generate(ids, do_sample=False, **how) for _ in range(2))
    assert torch.equal(one.sequences, other.sequences)
    assert one.stats.num_rounds == other.stats.num_rounds
    assert one.stats.num_accepted_tokens == other.stats.num_accepted_tokens > 50  # of 120


def test_chances_learn_which_of_the_best_tokens_comes():
    """The share of each rank among the best tokens is learned, by suffix length and margin."""
    drawn, rates = random.Random(3), BestAcceptance()
    for _ in range(4000):
        suffix, margin = drawn.randint(1, 6), drawn.choice((0.1, 2.0))
        first = 0.9 if suffix > 3 and margin > 1 else 0.3
        rank = 0 if drawn.random() < first else drawn.choice((1, 1, 2, None))
        rates.observe(_Best([1, 2, 3], suffix, margin), rank)
    assert rates.chances(_Best([1, 2, 3], 5, 3.0)) == pytest.approx([0.9, 0.05, 0.025], abs=0.03)
    assert rates.chances(_Best([1, 2, 3], 9, 0.2)) == pytest.approx([0.3, 0.35, 0.175], abs=0.03)
    assert rates.chances(_Best([1], 1, 3.0)) == pytest.approx([0.3], abs=0.08)


def test_a_tree_grows_where_it_promises_most():
    """A node's chance is at most that of its parent, and chances come in descending order."""
    likely, torn = torch.full((40,), -9.0), torch.full((40,), -9.0)
    likely[7], torn[3], torn[4] = 5.0, 2.0, 1.9
    batch = _AsBatch()  # the state refers to it weakly
    state = LogitLookup().open(batch)
    state.read(torch.stack([likely, torn]), [(0, []), (0, [7])])
    for i in range(60):  # the text follows the stored laws
        state.offer(0, 6)
        state.commit(0, [7, 3 if i % 3 else 4, 1], 0)
    found = state.offer(0, 6)
    assert list(found.tokens or ())[:3] == [7, 3, 4]
    assert list(found.parents or ())[:3] == [0, 1, 1]
    chances = list(found.chances or ())
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.9
    for _ in range(600):  # it does not follow them any more
        state.offer(0, 6)
        state.commit(0, [50, 1], 0)
    assert (state.offer(0, 6).chances or [0.0])[0] < 0.3


class _AsBatch:
    """What a state reads of a batch with one row, whose text is token 1."""

    seats = (Seat(torch.tensor([1])),)
    prompts = Batch.prompts

    def scores(self, row, offset, tokens, raw):
        return raw
