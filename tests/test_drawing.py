"""The rejection rule in traces: drafts drawn for given texts, against decoding with drafts.

Seeds are fixed, so every test is repeatable. The levels say how rarely correct counts would fail
with other seeds.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from marks import slow, thorough
from models import lively_model, prompt
from scipy import stats
from transformers import TemperatureLogitsWarper

from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Confidence, Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import accept_uniform, gumbel_noise, stream_key
from layerskip.decoding.rules import residual
from layerskip.model.opened_models import Sublayers
from layerskip.replay import token_draws
from layerskip.replay.replayed_drafts import replay
from layerskip.replay.simulation import simulate
from layerskip.replay.token_draws import NOTHING, TextPlaces, propose
from layerskip.replay.trace import take_trace

LEVEL = 1e-6  # of every statistical test here
LENGTH, NEW, TEXTS = 3, 48, 200  # few long texts: rounds are counted, but each text costs a pass
PROMPT = prompt(5)
EOS, NO_END = frozenset(range(5, 8)), frozenset[int]()
SKIPS = {"an exit": SkipConfig.early_exit(4), "scattered": SkipConfig(attention=(1, 4), mlp=(2, 3))}
CONTROLLERS = {"fixed": Fixed(LENGTH), "confidence": Confidence(0.15, LENGTH)}
# skip config, controller, end tokens (if the length of a text adds to the spread of counts)
ROUNDS = [
    *slow(("an exit", "fixed", NO_END), ("an exit", "confidence", NO_END)),
    *slow(("scattered", "fixed", NO_END)),
    *thorough(("scattered", "confidence", EOS)),
]


def sampling(temperature=1.0, *processors, rows=1):
    warpers = [] if temperature == 1.0 else [TemperatureLogitsWarper(temperature)]
    return Law([*processors, *warpers], do_sample=True, rows=rows)


# ---- One position: the joint law of proposals and the accept test ----

PLACES = 20_000
TARGET = torch.tensor([0.1, 1.2, -0.4, -0.5, 0.7, float("-inf"), -2.0])
DRAFT = torch.tensor([0.6, 0.3, 0.9, -2.5, 0.7, -1.0, float("-inf")])


def proposals(target=TARGET):
    """Tokens of many texts at one position, drawn as in a trace, and proposals given these."""
    p = target.softmax(-1)
    keys = [stream_key(seed) for seed in range(PLACES)]
    texts = (TARGET + gumbel_noise(keys, [7] * PLACES, len(TARGET))).argmax(-1)  # (N,)
    beside = TextPlaces(texts, p[texts], keys, [7] * PLACES)
    raw = DRAFT.expand(PLACES, -1)
    return texts, propose(sampling(), raw, None, beside, lambda rows: p.expand(len(rows), -1))


def of_law(tokens, law):
    """The p-value of tokens under a law (V,)."""
    seen = torch.bincount(tokens, minlength=len(law)).double()
    live = law > 0
    if seen[~live].any():
        return 0.0
    expected = law[live].double() / law[live].double().sum() * len(tokens)
    return float(stats.chisquare(seen[live], expected).pvalue)


def test_proposals_follow_the_drafts_law_and_are_accepted_by_the_rule():
    p, q = TARGET.softmax(-1), DRAFT.softmax(-1)
    texts, drawn = proposals()
    accepted = drawn.tokens == texts
    assert of_law(drawn.tokens, q) > LEVEL
    assert of_law(drawn.tokens[accepted], torch.minimum(p, q)) > LEVEL
    assert of_law(drawn.tokens[~accepted], residual(q, p)) > LEVEL
    assert of_law(texts[~accepted], residual(p, q)) > LEVEL
    rate = float(torch.minimum(p, q).sum())
    count = int(accepted.sum())
    assert stats.binomtest(count, PLACES, rate).pvalue > LEVEL
    products = (q / p).clamp(max=1)[texts]  # the products have one factor here
    assert float(products.mean()) == pytest.approx(rate, abs=5 * math.sqrt(0.25 / PLACES))
    likely = products > 0.9
    assert (
        stats.binomtest(
            int(accepted[likely].sum()), int(likely.sum()), float(products[likely].mean())
        ).pvalue
        > LEVEL
    )
    torch.testing.assert_close(drawn.confidences, q[drawn.tokens])


@pytest.mark.parametrize("mistake", ["temperature", "proposals from q", "the text's noise"])
def test_known_mistakes_are_seen(mistake, monkeypatch):
    target = TARGET
    if mistake == "temperature":
        target = TARGET / 0.8
    elif mistake == "proposals from q":
        monkeypatch.setattr(token_draws, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(
            token_draws,
            "draft_noise",
            lambda keys, _, places, s: gumbel_noise(keys, places, len(s[0])),
        )
    _, drawn = proposals(target)
    assert of_law(drawn.tokens, DRAFT.softmax(-1)) < LEVEL


def test_places_where_a_text_is_known_no_further_and_drafts_without_a_token():
    p = TARGET.softmax(-1)
    beside = TextPlaces(torch.tensor([NOTHING, 1]), p[[0, 1]], [stream_key(0)] * 2, [7, 8])
    raw = torch.stack([DRAFT, torch.full_like(DRAFT, float("-inf"))])
    drawn = propose(sampling(), raw, None, beside, lambda rows: p.expand(len(rows), -1))
    assert drawn.tokens[0] != NOTHING
    assert drawn.tokens[1] == NOTHING


# ---- Whole texts: simulated rounds against real ones, by their counts over many seeds ----


@cache
def model():
    return lively_model("llama")


@cache
def traced(acceptance, eos, texts=TEXTS):
    """Texts of seeds that no decoding here uses."""
    return take_trace(
        model(),
        [PROMPT] * texts,
        max_new_tokens=NEW,
        law=sampling(),
        seeds=range(10_000, 10_000 + texts),
        eos=eos,
        draft_length=LENGTH,
        acceptance=acceptance,
    )


@cache
def replayed(skip, acceptance="rejection", eos=NO_END):
    return replay(traced(acceptance, eos), SKIPS[skip])


def totals(rounds, row=0):
    """Counts of one text: rounds, drafted tokens, rounds that accepted at least 1, 2, 3."""
    done = [(each.drafted[row], each.accepted[row]) for each in rounds if each.tokens[row]]
    reached = [sum(accepted > j for _, accepted in done) for j in range(LENGTH)]
    return [len(done), sum(drafted for drafted, _ in done), *reached]


def simulated(played, controller):
    made = CONTROLLERS[controller]
    counts = [totals(simulate(played, made, [text])) for text in range(len(played.texts))]
    return torch.tensor(counts).double()


@cache
def decoded(skip, controller, eos=NO_END):
    """Counts of real texts, decoded in one batch: these controllers treat rows separately."""
    request = Request(
        input_ids=PROMPT.expand(TEXTS, -1),
        attention_mask=torch.ones(TEXTS, PROMPT.shape[1], dtype=torch.long),
        max_new_tokens=NEW,
        law=sampling(rows=TEXTS),
        keys=[stream_key(seed) for seed in range(TEXTS)],
        acceptance="rejection",
        eos=eos,
    )
    decoder = Decoder(
        Sublayers(model()),
        SKIPS[skip].resolve(6),
        CONTROLLERS[controller],
        request,
        max_draft_length=LENGTH,
    )
    with torch.no_grad():
        rounds = list(decoder.rounds())[1:]
    return torch.tensor([totals(rounds, row) for row in range(TEXTS)]).double()


def p_value(ours, theirs):
    """Welch's test that all mean counts are equal, with Bonferroni's correction."""
    found = stats.ttest_ind(ours.numpy(), theirs.numpy(), equal_var=False).pvalue
    return float(found.min()) * ours.shape[1]


@pytest.mark.parametrize(("skip", "controller", "eos"), ROUNDS)
def test_rounds_are_in_law_those_of_decoding(skip, controller, eos):
    ours = simulated(replayed(skip, "rejection", eos), controller)
    assert p_value(ours, decoded(skip, controller, eos)) > LEVEL
    rounds, drafted, accepted, *_ = ours.sum(0).tolist()
    assert 0.2 * rounds < accepted < 0.9 * rounds
    if controller == "confidence":  # it stops some drafts early, but not all
        fixed = simulated(replayed(skip, "rejection", eos), "fixed").sum(0)
        assert 1.1 * rounds < drafted < 0.9 * float(fixed[1])


@pytest.mark.thorough
@pytest.mark.parametrize("skip", [*slow("an exit"), "scattered"])
def test_another_accept_rule_is_seen(skip):
    coupled = simulated(replayed(skip, "coupled"), "fixed")
    assert p_value(coupled, decoded(skip, "fixed")) < LEVEL


@pytest.mark.thorough
def test_weights_of_another_temperature_are_seen():
    trace = traced("rejection", NO_END)
    other = replace(trace, law=sampling(0.6), texts=trace.texts[: TEXTS // 2])  # p = 1e-14
    other = replay(other, SKIPS["scattered"])
    assert p_value(simulated(other, "fixed"), decoded("scattered", "fixed")) < LEVEL


def ratios(trace, layers, temperature):
    """w = min(1, q / p) of an exit, from truncated models, (texts, T - prompt)."""
    whole, cut = lively_model("llama"), lively_model("llama")
    cut.model.layers = cut.model.layers[:layers]
    ids = torch.stack([text.tokens for text in trace.texts])  # (texts, T)
    prompt = trace.texts[0].prompt
    with torch.no_grad():
        p, q = (
            (each(ids).logits[:, prompt:-1].float() / temperature).softmax(-1)
            for each in (whole, cut)
        )
    following = ids[:, prompt + 1 :, None]
    likely, own = (law.gather(2, following)[..., 0] for law in (p, q))
    return (own / likely).clamp(max=1)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafts_survive_as_often_as_the_mean_of_products_says(temperature):
    """The mean over all starts. A wrong temperature is noticed."""
    played = replayed("an exit")
    w = ratios(played.trace, 4, temperature).double()  # (texts, T - prompt - 1)
    products = w.unfold(1, LENGTH, 1).cumprod(2)[:, : NEW - 1]  # (texts, starts, J)
    survived = played.matches.cumprod(1).double().view_as(products)
    surprise = (survived - products).sum(1)  # (texts, J)
    p = float(stats.ttest_1samp(surprise.numpy(), 0.0).pvalue.min()) * LENGTH
    assert (p > LEVEL) == (temperature == 1.0)


# ---- Exactly, against the model itself ----


def test_an_exit_is_accepted_where_its_own_law_says():
    """The model is truncated after four layers."""
    trace = traced("rejection", NO_END, 20)
    played = replay(trace, SkipConfig.early_exit(4), 1)
    assert replay(trace, SkipConfig(), 1).matches.all()
    for text, mine, starts in zip(trace.texts, ratios(trace, 4, 1.0), played.texts, strict=True):
        places = range(text.prompt + 1, text.prompt + 1 + text.starts)
        lucky = accept_uniform([text.key] * len(places), places) < mine[: len(places)]
        assert torch.equal(played.matches[starts, 0], lucky)
