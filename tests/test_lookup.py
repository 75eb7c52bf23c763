"""Looked-up drafts, and several drafts in one decoding: the index, the text, the law."""

import random
from functools import partial
from itertools import cycle

import pytest
import torch
from looped import decoded
from models import VOCABULARY, Fickle, lively_model, prompt
from sampling import LEVEL, NEW_TOKENS, PROMPT, TEXTS, p_value, sample_texts

from layerskip import Lookup, Proposal, SkipConfig, decode
from layerskip.costs.speculation import CostTable
from layerskip.decoding import draws
from layerskip.decoding.controllers import Controller, Fixed, Offer
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.noise import accept_uniform, stream_key
from layerskip.decoding.sources.lookup import NOTHING, LookupRow

COSTS = CostTable(0.15, (1.0, 1.05, 1.1))
EXIT, SCATTERED = SkipConfig.early_exit(4), SkipConfig(attention=(0, 3), mlp=(2, 5))
MIXTURES = {
    "lookup": (Lookup(),),
    "lookup, exit": (Lookup(), EXIT),
    "two lookups, exit, scattered": (
        Lookup([[*range(2, 12), 4, 6, 8, 3, 5]]),
        Lookup(),
        EXIT,
        SCATTERED,
    ),
    "scattered, exit": (SCATTERED, EXIT),
}
# ---- The index ----


def common(text, end, history):
    """How many of the last tokens of the history precede a place in a text."""
    length = 0
    while length < min(end, len(history)) and text[end - 1 - length] == history[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("alphabet", [1, 2, 3, 12])
def test_the_longest_match_is_found_and_of_several_the_latest(alphabet):
    drawn = random.Random(alphabet)
    for _ in range(3):
        text = [drawn.randrange(alphabet) for _ in range(60)]
        row = Lookup().row(text[:1])
        for length in range(1, len(text)):
            history = text[:length]
            match, behind = max(
                ((common(history, end, history), end) for end in range(1, length)), default=(0, 0)
            )
            want = NOTHING
            if match:
                drafted = list(history)
                for i in range(7):  # the draft may overlap itself
                    drafted.append(drafted[behind + i])
                want = Proposal.of(drafted[length:], match)
            assert row.find(7) == want
            row.extend(text[length : length + 1])


@pytest.mark.parametrize("alphabet", [2, 3, 12])
def test_the_longer_match_wins_and_the_own_history_of_equals(alphabet):
    drawn = random.Random(alphabet)
    wins = [0, 0, 0]
    for _ in range(20):
        others = [[drawn.randrange(alphabet) for _ in range(20)] for _ in range(3)]
        text = [drawn.randrange(alphabet) for _ in range(30)]
        row = Lookup(others).row(text[:1])
        for length in range(1, len(text)):
            history = text[:length]
            own = max((common(history, end, history) for end in range(1, length)), default=0)
            other = max(common(some, end, history) for some in others for end in range(1, 20))
            found = row.find(5)
            assert found.match == max(own, other)
            stretch = [*history[length - found.match :], *found.tokens]
            if other > own:
                places = [(some, end) for some in others for end in range(len(stretch), 21)]
                assert any(some[end - len(stretch) : end] == stretch for some, end in places)
            elif own:
                alone = Lookup().row(history)
                assert found == alone.find(5)
            wins[1 if other > own else 2 if own else 0] += 1
            row.extend(text[length : length + 1])
    assert min(wins[1:]) > 10


def test_another_text_ends_where_it_ends():
    row = Lookup([[5, 6, 7], [8, 9]]).row([1, 5, 6])
    assert row.find(9) == Proposal.of([7], 2)
    row.extend([7])
    assert row.find(9) == NOTHING
    row.extend([8])  # not followed by the beginning of the other text
    assert row.find(9) == Proposal.of([9], 1)
    lookup = Lookup()  # shared by rows that must not see each other
    one, other = lookup.row([1, 2, 3, 1, 2]), lookup.row([3, 4, 2])
    assert one.find(2) == Proposal.of([3, 1], 2)
    assert other.find(2) == NOTHING


# ---- Decoding. Texts and replays are tested in `test_every_kind.py`. ----


def test_sources_are_counted():
    drafts = MIXTURES["two lookups, exit, scattered"]
    run = decoded(drafts, Fickle(3), eos=frozenset({4}), sample=True)
    rounds = run.played
    for number, counts in enumerate(run.stats.sources):
        mine = [
            (round_.drafted[row], round_.accepted[row])
            for round_ in rounds
            for row in range(len(round_.drafted))
            if round_.source_of(row) == number and round_.drafted[row]
        ]
        assert counts.num_draft_tokens == sum(drafted for drafted, _ in mine) > 0
        assert counts.num_accepted_tokens == sum(accepted for _, accepted in mine)
        assert counts.num_drafts == len(mine)
    assert any(isinstance(round_.source, tuple) for round_ in rounds)
    assert all(not any(round_.drafted) for round_ in rounds if round_.source is None)
    assert sum(counts.num_drafts for counts in run.stats.sources) == run.stats.num_drafts


def test_a_controller_that_chooses_is_told_how_good_every_lookup_was():
    """Also about lookups that it did not choose."""
    fickle = Fickle(4)
    run = decoded(MIXTURES["two lookups, exit, scattered"], fickle, new_tokens=40)
    texts = [prompt.tolist() for prompt in run.passes.prompts]
    want, lookups = [], run.passes.sources[:2]
    for round_ in run.played:
        for row, tokens in enumerate(round_.tokens):
            if round_.index and tokens:
                left = 40 - (len(texts[row]) - len(run.passes.prompts[row]))
                for number, lookup in enumerate(lookups):
                    draft = lookup.row(texts[row]).find(min(6, left - 1)).tokens
                    pairs = list(zip(draft, tokens, strict=False))
                    right = [ours == own for ours, own in pairs]
                    count = (*right, False).index(False)
                    if pairs:
                        want.append((number, row, min(count + 1, len(pairs)), count))
            texts[row] += tokens
    assert fickle.told == want
    assert {told[0] for told in want} == {0, 1}
    assert any(known == right for _, _, known, right in want)


def test_processors_never_see_what_they_forbid():
    """A looked-up token may be forbidden. The processor is never asked what follows it."""
    seen = []

    class ByGrammar:
        """Alternates odd and even tokens; like a user's trie, it raises if the text does not."""

        layerskip_pure = True

        def __call__(self, ids, scores):
            new = ids[:, 13:]
            assert ((new[:, 1:] + new[:, :-1]) % 2 == 1).all()
            seen.extend(new.tolist())
            parity = (torch.arange(scores.shape[1])[None] + ids[:, -1:]) % 2  # (B, V)
            return scores.masked_fill(parity == 0, float("-inf"))

    for rejection in (False, True):
        how = {"processors": (ByGrammar(),), "sample": True}
        plain = decoded((), Fixed(), **how)
        for mixture in ("lookup", "lookup, exit"):
            run = decoded(
                MIXTURES[mixture],
                Fixed(4),
                **how,
                acceptance="rejection" if rejection else "coupled",
                keep_scores=True,
            )
            lookups = run.stats.sources[0]
            assert 0 < lookups.num_accepted_tokens < lookups.num_draft_tokens
            if not rejection:
                assert run.emitted == plain.emitted
    assert seen


# ---- The law under the rejection rule ----


class Peeking(Lookup):
    """Drafts given texts, one per row, from their first token."""

    def __init__(self, texts):
        super().__init__()
        self.texts = cycle(texts)

    def row(self, prompt):
        return PeekingRow(self, next(self.texts))


class PeekingRow(LookupRow):
    def __init__(self, lookup, text):
        super().__init__(lookup)
        self.left = list(text)

    def extend(self, tokens):
        del self.left[: len(tokens)]

    def find(self, longest):
        return Proposal.of(self.left, 2)


@pytest.mark.thorough
def test_peeks_at_what_decides_and_broken_rules_do_not(monkeypatch):
    """Drafting the target's most probable text does no harm; reading the deciding noise does."""

    def texts_of(drafts):
        return sample_texts("none", acceptance="rejection", drafts=drafts, rows=300)

    plain, _ = texts_of(())
    columns = [[text[i] for text in plain.elements()] for i in range(NEW_TOKENS)]
    likely = [max(range(5), key=column.count) for column in columns]
    texts, ((drafted, accepted),) = texts_of(Peeking([likely]))
    assert accepted < drafted
    assert p_value(texts, "none") > LEVEL
    # drafts depend on uniform numbers: those of other rows do no harm,
    rare = [min(range(5), key=column.count) for column in columns]
    places = range(len(PROMPT), len(PROMPT) + NEW_TOKENS)
    for first in (TEXTS, 0):
        peeks = []
        for row in range(first, first + TEXTS):
            small = accept_uniform([stream_key(row)] * NEW_TOKENS, places) < 0.5
            peeks.append(torch.where(small, torch.tensor(likely), torch.tensor(rare)).tolist())
        texts, ((drafted, accepted),) = texts_of(Peeking(peeks))
        assert 0 < accepted < drafted
        assert (p_value(texts, "none") > LEVEL) is (first > 0)  # those that decide do
    monkeypatch.setattr(draws.noise, "accept_uniform", lambda keys, *_: torch.zeros(len(keys)))
    texts, _ = texts_of(Peeking([likely]))
    assert p_value(texts, "none") < LEVEL


def test_what_a_source_proposes_is_cut_or_refused():
    how = {"controller": Controller(), "lookup": False, "draft_memory": 0, "max_new_tokens": 4}
    ask = partial(decode, lively_model("llama"), prompt(6), **how)
    assert [*ask(sources=[Peeking([[5] * 99])])][1].drafted == (2,)
    for token in (-1, VOCABULARY):
        with pytest.raises(ValueError, match=rf"the source lookup must .* 0\.\.96.*\[{token}\]"):
            [*ask(sources=[Peeking([[5, token]])])]


# ---- The choice of expected-gain ----


def decide(controller, offers, right, drafts=1.0):
    """One round of a row in which `right` tokens of every draft are right; what it drafted."""
    choice = controller.choose(offers)
    most = 0 if choice is None else offers[choice].lengths[0]
    limit, drafted = controller.limit(0, most), 0
    if choice is not None and offers[choice].matches is not None:
        drafted = limit
    elif choice is not None:
        while drafted < limit and controller.draft_together([0]):
            drafted += 1
            controller.keep_drafting(0, drafts)
    accepted = min(right, drafted)
    for number, offer in enumerate(offers):
        known = min(offer.lengths[0], accepted + 1)
        if offer.matches is not None and known:
            controller.learn(number, 0, min(min(right, known) + 1, known), min(right, known))
    controller.update(0, drafted, accepted)
    return choice, drafted


STEEP = (1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 3.1, 3.4)


def test_of_several_drafts_the_one_that_promises_most_is_taken():
    controller = ExpectedGain([CostTable(0.0, STEEP), CostTable(0.1, STEEP), CostTable(0.4, STEEP)])
    far, near = Offer({0: 8}, {0: 40}), Offer({0: 8}, {0: 1})
    model, nothing = Offer({0: 8}, None), Offer({0: 0}, {0: 0})
    assert decide(controller, [far, model, model], 8)[0] == 0
    assert decide(controller, [near, model, model], 8)[0] == 1
    assert decide(controller, [nothing, model, model], 8)[0] == 1
    assert decide(controller, [nothing, Offer({0: 0}, None), model], 8)[0] == 2
    assert decide(controller, [nothing] + 2 * [Offer({0: 0}, None)], 0) == (None, 0)


def test_lookups_are_learned_about_while_others_draft():
    """Short matches are chosen in the end if they were always right beside other drafts."""
    controller = ExpectedGain([CostTable(0.0, STEEP), CostTable(0.1, STEEP)])
    offers = [Offer({0: 1}, {0: 1}), Offer({0: 8}, None)]
    first = decide(controller, offers, 2)[0]
    for _ in range(60):
        decide(controller, offers, 1)
    alone = [offers[0], Offer({0: 0}, None)]
    assert first == 1
    assert decide(controller, alone, 1) == (0, 1)
    controller.reset(1)
    for _ in range(60):
        decide(controller, offers, 0)
    assert decide(controller, alone, 0) == (None, 0)
    far = Offer({0: 8}, {0: 40})
    assert decide(controller, [far, Offer({0: 0}, None)], 8)[0] == 0


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("match", [1, 3, 40])
def test_lookups_that_do_not_pay_cost_little(match, right):
    """At most the allowed loss of a row, and one round more, however sure the prior is."""
    costs = CostTable(0.0, (1.0, *(3.0 + 0.1 * n for n in range(12))))
    controller = ExpectedGain(costs)
    cost = tokens = 0.0
    for _ in range(300):
        _, drafted = decide(controller, [Offer({0: 8}, {0: match})], right)
        cost += costs.round_cost(drafted)
        tokens += min(right, drafted) + 1
    assert cost < 1.02 * tokens + 2.0 + 4.0


def test_a_row_that_a_model_has_set_back_still_looks_up():
    """Whatever lost too much stops, but other drafts continue."""
    controller = ExpectedGain([CostTable(0.0, STEEP), CostTable(0.2, STEEP)])
    nothing, model = Offer({0: 0}, {0: 0}), Offer({0: 8}, None)
    while decide(controller, [nothing, model], 0) != (None, 0):
        pass
    far = Offer({0: 8}, {0: 40})
    assert decide(controller, [far, model], 8)[0] == 0


def test_costs_are_those_of_each_draft():
    with pytest.raises(ValueError, match="needs costs for each of 2 drafts, got 1; give one table"):
        decoded(MIXTURES["lookup, exit"], ExpectedGain(COSTS))


def test_rows_look_up_beside_the_steps_of_others():
    """A row that copies drafts longer than the others take steps, at no further cost."""
    tables = [CostTable(0.0, (1.0, 1.05)), CostTable(0.1, (1.0, 1.05))]
    controller = ExpectedGain(tables, priors=[0.5, 0.9])
    controller.reset(3)
    copies, writes = Offer({0: 12, 1: 12, 2: 0}, {0: 40, 1: 1, 2: 0}), Offer(LENGTHS_OF_3, None)
    chosen = controller.choose([copies, writes])
    assert chosen == {0: 0, 1: 1, 2: 1}
    limits = [controller.limit(row, 12) for row in range(3)]
    steps = 0
    while steps < 12 and controller.draft_together([1, 2]):
        steps += 1
        assert all(controller.keep_drafting(row, 0.5) for row in (1, 2))
    assert 0 < steps < limits[0]
    # if all rows copy, none takes a step; if none copies, all do
    everybody = Offer(LENGTHS_OF_3, dict.fromkeys(range(3), 40))
    assert controller.choose([everybody, writes]) == 0
    nobody = Offer(dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0))
    assert controller.choose([nobody, writes]) == 1


LENGTHS_OF_3 = dict.fromkeys(range(3), 12)
