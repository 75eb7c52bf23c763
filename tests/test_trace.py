"""Traces, replays and simulated rounds against real decoding; drafts followed, against replays."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from covering import covering
from looped import counted, rows, sampling
from models import Erratic, lively_model, pure, ragged
from transformers import (
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import layerskip
from layerskip.config.registry import CONTROLLERS
from layerskip.config.skips import LowPrecision, SkipConfig
from layerskip.costs.speculation import ContextCosts, CostTable
from layerskip.decoding.controllers import SIGNALS, Confidence, make_controller
from layerskip.decoding.rounds import Round
from layerskip.model.opened_models import Sublayers
from layerskip.replay import steps as steps_module
from layerskip.replay.chain_cache import ChainCache
from layerskip.replay.exit_sweep import exit_sweep
from layerskip.replay.replayed_drafts import all_starts, follow, replay
from layerskip.replay.simulation import cost_of, simulate
from layerskip.replay.token_draws import NOTHING
from layerskip.replay.trace import take_trace

COSTS = CostTable(0.2, (1.0, 1.1, 1.2, 1.2, 1.3, 1.4, 1.4, 1.4, 1.5))
NEW, LENGTH = 24, 20
FOLLOWED = 6  # tokens
LENGTHS = (3, 12, 7)
EOS = frozenset(range(5, 9))
FIVE = (0, 1, 2, 3, 4)
SKIPS = {
    "exit 1": SkipConfig.early_exit(1),
    "exit 4": SkipConfig.early_exit(4),
    "scattered": SkipConfig(attention=(1, 4), mlp=(2, 3)),
    "an even prefix": SkipConfig(attention=(3,), mlp=(4,)),
    "a prefix and gaps": SkipConfig(attention=(3,), mlp=(2, 3, 5)),
    "attention last": SkipConfig(attention=(3, 4, 5), mlp=(2, 3, 4, 5)),
    "no prefix": SkipConfig(attention=(0, 1, 2, 3), mlp=(0, 1, 4, 5)),
    "one MLP": SkipConfig(attention=(*FIVE, 5), mlp=FIVE),
    "one attention": SkipConfig(attention=FIVE, mlp=(*FIVE, 5)),
    "nothing skipped": SkipConfig(),
    "all low": SkipConfig.low_precision(4),
    "low, exact and gaps": SkipConfig(
        attention=(4,), mlp=(3,), low=LowPrecision(bits=4, attention=(2, 5), head=False)
    ),
    "a window": SkipConfig(window=5),  # shorter than the longest draft
    "a window, low and gaps": SkipConfig(
        attention=(1, 4), window=9, low=LowPrecision(bits=4, attention=(2, 5))
    ),
    "a low head": SkipConfig(exit_layer=4, low=LowPrecision(bits=4, attention=(), mlp=())),
}
# family, temperature (None: greedy), end tokens, accept rule
CASES = [
    ("llama", None, frozenset(), "coupled"),
    ("llama", 1.0, EOS, "coupled"),
    ("gemma2", 0.7, frozenset(), "coupled"),  # windows of 8 tokens, soft caps, eager attention
    ("gemma3", 1.0, EOS, "coupled"),
    ("qwen2", None, EOS, "rejection"),  # which greedy decoding does not know
    ("llama", 1.0, EOS, "rejection"),
    ("mistral", 0.7, frozenset(), "rejection"),
]
EXACT = range(5)  # rounds of the others are those of decoding in law: test_drawing.py


@cache
def traced(family, temperature, eos, acceptance):
    model, law = lively_model(family), sampling(temperature)
    how = {"eos": eos, "draft_length": LENGTH, "acceptance": acceptance}
    return model, take_trace(model, rows(), max_new_tokens=NEW, law=law, **how)


@cache
def replayed(case, skip):
    model, trace = traced(*CASES[case])
    return model, replay(trace, SKIPS[skip])


def real(model, case, texts, **settings):
    """Rounds of real decoding of some texts of a case in one batch, starting with the prefill."""
    _, temperature, eos, _ = CASES[case]
    ids, mask = ragged(LENGTHS)
    return sampled(
        model,
        ids[list(texts)],
        mask[list(texts)],
        do_sample=temperature is not None,
        temperature=temperature or 1.0,
        eos_token_id=list(eos),
        seeds=list(texts),
        **settings,
    )


def sampled(model, ids, mask=None, **settings):
    usual = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seeds": [0], "lookup": False}
    return list(layerskip.decode(model, ids, mask, **usual | settings))


def decoded(model, case, texts, **settings):
    """The rounds of real decoding, as far as simulated ones are the same."""
    return counted(real(model, case, texts, **{"costs": COSTS} | settings)[1:])


def agree(followed, whole):
    """Whether drafts are followed exactly to their first wrong token, for (N, J) booleans."""
    right = whole.matches[:, : followed.shape[1]].long().cumprod(1).bool()
    return torch.equal(followed, right)


def assert_counts(played, length, rounds, text=0):
    """Check simulated rounds of a fixed length against real ones."""
    fixed = make_controller("fixed", max_draft_length=length, costs=COSTS)
    counts = [(r.drafted, r.accepted) for r in simulate(played, fixed, [text])]
    assert counts == [(r.drafted, r.accepted) for r in rounds[1:]]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_trace_holds_the_texts_of_decoding(case):
    """Whatever the accept rule: it decides about drafts only."""
    (model, trace), eos = traced(*CASES[case]), CASES[case][2]
    for number, text in enumerate(trace.texts):
        new = [token for round_ in real(model, case, [number]) for token in round_.tokens[0]]
        assert text.prompt == LENGTHS[number]
        assert text.tokens[text.prompt :][: text.emitted].tolist() == new
        if text.emitted == NEW and new[-1] not in eos:  # cut by its length: the trace continues
            assert text.emitted < len(text.tokens) - text.prompt <= NEW + LENGTH
    # the whole model draws the target's tokens again
    assert replay(trace, SKIPS["nothing skipped"], 1).matches.all()
    lengths = [text.emitted for text in trace.texts]
    assert trace.starts == sum(lengths) - 3
    assert (min(lengths) < NEW) == bool(eos)  # both kinds of ends occur


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("case", EXACT)
def test_simulated_rounds_are_those_of_decoding(case, skip):
    model, played = replayed(case, skip)
    turn = case + list(SKIPS).index(skip)
    controller = CONTROLLERS[turn % len(CONTROLLERS)]  # so that each is tested in several cases
    text = turn % 3
    made = make_controller(controller, costs=COSTS, sampling=CASES[case][1] is not None)
    real = decoded(model, case, [text], skip=SKIPS[skip], controller=controller)
    assert counted(simulate(played, made, [text])) == real


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_followed_drafts_are_the_replayed_ones(case, skip):
    _, trace = traced(*CASES[case])
    assert agree(follow(trace, SKIPS[skip], FOLLOWED), replayed(case, skip)[1])


@pytest.mark.parametrize("skip", ["exit 4", "an even prefix", "no prefix"])
@pytest.mark.parametrize("case", [0, 1, 5])
def test_some_starts_and_some_tokens(case, skip):
    """Starts in any order, and for each text other tokens that may be drafted."""
    _, trace = traced(*CASES[case])
    every = all_starts(trace)
    some = random.Random(1).sample(range(len(every)), 21)
    shares = torch.rand(3, 97, generator=torch.Generator().manual_seed(4))
    for allowed in (None, shares < 0.8, shares < 0.02):
        whole = replay(trace, SKIPS[skip], allowed=allowed)
        starts = [every[number] for number in some]
        followed = follow(trace, SKIPS[skip], 2, starts, allowed=allowed)
        assert agree(followed, replace(whole, matches=whole.matches[some]))
    assert follow(trace, SKIPS[skip], 2, []).shape == (0, 2)


@pytest.mark.parametrize(("case", "skip"), covering(EXACT, list(SKIPS))[::2])
def test_simulated_rounds_with_a_draft_vocabulary_are_those_of_decoding(case, skip):
    """In some tests of each controller, the vocabulary lacks the end tokens."""
    model, trace = traced(*CASES[case])
    turn = case + list(SKIPS).index(skip)
    tokens = list(range(turn // len(CONTROLLERS) % 2 * 9, 97, 2))
    allowed = torch.zeros(3, 97, dtype=torch.bool)
    allowed[:, tokens] = True
    played = replay(trace, SKIPS[skip], allowed=allowed)
    assert set(played.tokens.unique().tolist()) <= set(tokens)
    text, name = turn % 3, CONTROLLERS[turn % len(CONTROLLERS)]
    made = make_controller(name, costs=COSTS, sampling=CASES[case][1] is not None)
    settings = {"skip": SKIPS[skip], "controller": name, "draft_vocabulary": tokens}
    assert counted(simulate(played, made, [text])) == decoded(model, case, [text], **settings)


def test_each_text_may_have_a_vocabulary_of_its_own():
    _, trace = traced(*CASES[1])
    allowed = torch.zeros(3, 97, dtype=torch.bool)
    for text in range(3):
        allowed[text, text::3] = True
    for skip in ("exit 4", "scattered"):
        played = replay(trace, SKIPS[skip], 6, allowed=allowed)
        whole = replay(trace, SKIPS[skip], 6)
        for text, places in enumerate(played.texts):
            alone = replay(trace, SKIPS[skip], 6, allowed=allowed[[text] * 3])
            assert torch.equal(played.tokens[places], alone.tokens[places])
            assert not torch.equal(played.tokens[places], whole.tokens[places])
            assert {token % 3 for token in played.tokens[places].unique().tolist()} == {text}


@pytest.mark.thorough
def test_the_cases_accept_some_and_reject_some():
    whole = {(n, skip): replayed(n, skip)[1].survival for n in range(len(CASES)) for skip in SKIPS}
    first, last = ([rates[step] for rates in whole.values()] for step in (0, FOLLOWED - 1))
    assert sum(0.05 < rate < 0.95 for rate in first) > len(whole) / 2
    assert sum(0 < rate < 0.5 for rate in last) > len(whole) / 3
    for (_, skip), rates in whole.items():
        assert (rates[0] == 1) == (skip == "nothing skipped")


@pytest.mark.parametrize(
    ("length", "case", "skip"), covering((1, 3, LENGTH), (1, 2), ("exit 4", "scattered"))
)
def test_batches_share_a_controller(case, skip, length):
    model, played = replayed(case, skip)
    for texts in ((0, 1, 2), (2, 0)):
        for name in ("expected-gain", "adaptive-threshold"):
            real = decoded(
                model, case, texts, skip=SKIPS[skip], controller=name, max_draft_length=length
            )
            made = make_controller(name, costs=COSTS, sampling=True, max_draft_length=length)
            assert counted(simulate(played, made, texts, max_draft_length=length)) == real
        real = decoded(
            model, case, texts, skip=SKIPS[skip], controller=Erratic(), max_draft_length=length
        )
        assert counted(simulate(played, Erratic(), texts, max_draft_length=length)) == real


class Told(Erratic):
    """Records what it is told."""

    def begin(self, context, rows):
        self.begun.append((context, rows))

    def __init__(self, signal):
        super().__init__()
        self.signal = signal
        self.told = []
        self.begun = []

    def keep_drafting(self, row, confidence):
        self.told.append(confidence)
        return super().keep_drafting(row, confidence)


@pytest.mark.parametrize("skip", ["exit 4", "scattered"])
@pytest.mark.parametrize("case", EXACT)
def test_controllers_are_told_what_they_ask_for(case, skip):
    model, played = replayed(case, skip)
    heard = []
    for signal in SIGNALS:
        real, simulated = Told(signal), Told(signal)
        rounds = decoded(model, case, [0, 1], skip=SKIPS[skip], controller=real)
        assert counted(simulate(played, simulated, [0, 1])) == rounds
        assert simulated.told == pytest.approx(real.told, rel=1e-5, abs=1e-5)
        assert simulated.begun == real.begun
        heard.append(simulated.told)
    assert heard[0] != pytest.approx(heard[1], rel=0.1)


@pure
def by_length(ids, scores):
    """A processor that favours another token at every length, so that padding would show."""
    scores = scores.clone()
    scores[:, ids.shape[1] % scores.shape[1]] += 4.0
    return scores


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_processors_that_read_the_text(acceptance):
    """Their history is the row's own tokens, including drafted ones."""
    model = lively_model("llama")
    penalties = [
        RepetitionPenaltyLogitsProcessor(3.0),
        MinLengthLogitsProcessor(20, sorted(EOS), device="cpu"),
        by_length,
    ]
    law = sampling(0.8, *penalties)
    how = {"law": law, "eos": EOS, "draft_length": 5, "acceptance": acceptance}
    trace = take_trace(model, rows((9, 5)), max_new_tokens=16, **how)
    asked = {"temperature": 0.8, "logits_processor": penalties, "eos_token_id": sorted(EOS)}
    asked |= {"controller": "fixed", "max_draft_length": 5, "max_new_tokens": 16}
    for skip in (SKIPS["exit 4"], SKIPS["an even prefix"], SKIPS["scattered"]):
        played = replay(trace, skip)
        assert 0 < played.survival[0] < 1
        assert agree(follow(trace, skip, 5), played)
        for number in range(2 if acceptance == "coupled" else 0):
            alone = rows((9, 5))[number][None]
            rounds = sampled(model, alone, skip=skip, seeds=[number], **asked)
            text = trace.texts[number]
            new = text.tokens[text.prompt :][: text.emitted].tolist()
            assert [token for round_ in rounds for token in round_.tokens[0]] == new
            assert_counts(played, 5, rounds, number)


def dead_end(token):
    """A processor that allows nothing after a token."""

    @pure
    def processor(ids, scores):
        return scores.masked_fill((ids[:, -1] == token)[:, None], float("-inf"))

    return processor


def test_drafts_that_find_nothing_to_draw():
    """A draft may reach a history after which everything is forbidden. The text never does."""
    model = lively_model("llama")
    plain = take_trace(model, rows((6,)), max_new_tokens=NEW, law=sampling(1.0), draft_length=6)
    text = set(plain.texts[0].tokens.tolist())
    drafts = replay(plain, SKIPS["scattered"]).tokens.flatten().tolist()
    forbidden = next(token for token in drafts if token not in text)
    law = sampling(1.0, dead_end(forbidden))
    trace = take_trace(model, rows((6,)), max_new_tokens=NEW, law=law, draft_length=6)
    ids, mask = ragged((6,))
    for skip in (SKIPS["scattered"], SKIPS["exit 1"], SKIPS["exit 4"]):
        played = replay(trace, skip)
        how = {"skip": skip, "controller": "fixed", "max_draft_length": 6}
        rounds = sampled(model, ids, mask, logits_processor=law.processors[:1], **how)
        assert_counts(played, 6, rounds)
        if skip is SKIPS["scattered"]:
            assert (played.tokens == NOTHING).any()


@pytest.mark.parametrize(
    ("case", "skip", "execution", "chains", "groups"),
    [
        (case, skip, execution, *most)
        for case, skip, execution, most in covering(
            (2, 4, 6),
            ("exit 4", "scattered", "one MLP"),
            ("fused", "modules"),
            ((256, (16, 8, 4)), (8, (4, 2)), (6, (3, 1)), (1, (1,))),
        )
    ],
)
def test_chunks_and_paths_change_nothing(case, skip, execution, chains, groups, sizes, monkeypatch):
    _, whole = replayed(case, skip)
    sizes(chains=chains, groups=groups, logits=700, texts=2, traced_logits=1)
    monkeypatch.setattr("layerskip.replay.trace.NOISE", 700)
    family, temperature, eos, acceptance = CASES[case]
    how = {"law": sampling(temperature), "eos": eos, "acceptance": acceptance}
    opened = Sublayers(lively_model(family), execution=execution)
    trace = take_trace(opened, rows(), max_new_tokens=NEW, draft_length=FOLLOWED, **how)
    chunked = replay(trace, SKIPS[skip])
    assert torch.equal(chunked.tokens, whole.tokens[:, :FOLLOWED])
    assert torch.equal(chunked.matches, whole.matches[:, :FOLLOWED])
    torch.testing.assert_close(chunked.confidences, whole.confidences[:, :FOLLOWED])
    assert agree(follow(trace, SKIPS[skip], FOLLOWED), whole)


def test_logits_bound_a_pass(monkeypatch, sizes):
    seen = []

    class Watched(ChainCache):
        def __init__(self, known, texts, starts, steps):
            seen.append(starts.numel())
            super().__init__(known, texts, starts, steps)

    monkeypatch.setattr(steps_module, "ChainCache", Watched)
    sizes(logits=40 * 97)  # of 97 tokens each
    followed = follow(traced(*CASES[2])[1], SKIPS["no prefix"], FOLLOWED)
    assert 20 < max(seen) <= 40
    assert agree(followed, replayed(2, "no prefix")[1])


def test_no_room_for_context_at_the_models_last_position():
    model = lively_model("llama", max_position_embeddings=32)
    trace = take_trace(model, rows((12,)), max_new_tokens=20, law=sampling(1.0), draft_length=8)
    assert len(trace.texts[0].tokens) == 32
    for skip in ("exit 4", "scattered"):
        how = {"skip": SKIPS[skip], "controller": "fixed", "max_draft_length": 8}
        rounds = sampled(model, rows((12,))[0][None], max_new_tokens=20, **how)
        assert_counts(replay(trace, SKIPS[skip]), 8, rounds)


# ---- Exits by draft length ----


def test_cells_of_a_sweep_are_totals_of_real_rounds():
    """With the seeds and the processors of the record's law."""
    model = lively_model("llama")
    law = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
    seen, how = [], {"law": law | {"seed": 3}, "max_new_tokens": 12}
    how["progress"] = lambda words, share: seen.append(share)
    record = exit_sweep(model, rows(), (2, 5), (1, 4), **how)
    assert (record["tokens"], record["draft_lengths"]) == (33, [1, 4])
    assert [each["exit"] for each in record["exits"]] == [2, 5]
    assert all(0 <= share <= 1 for share in seen)
    for entry in record["exits"]:
        drafts = {"skip": SkipConfig.early_exit(entry["exit"]), "controller": "fixed", **law}
        for length, counts in zip((1, 4), entry["rounds"], strict=True):
            drafts |= {"max_draft_length": length, "max_new_tokens": 12}
            played = [
                sampled(model, row[None], seeds=[3 + number], **drafts)[1:]
                for number, row in enumerate(rows())
            ]
            drafted = [each.drafted[0] for rounds in played for each in rounds]
            assert counts == [drafted.count(n) for n in range(length + 1)]


def test_not_a_number_stops_where_a_threshold_asks():
    _, played = replayed(1, "exit 4")
    nothing = torch.full_like(played.confidences, float("nan"))
    broken = replace(played, confidences=nothing)
    assert max(r.drafted for r in simulate(broken, Confidence(0.5, 8))) == (1,)


@pytest.mark.parametrize("law", [{"do_sample": False}, {"do_sample": True, "temperature": 1.0}])
def test_agreement_and_match_count_starts(law):
    """Agreement is counted with the model itself, truncated after the exit."""
    model, prompts = lively_model("llama"), rows()
    record = exit_sweep(model, prompts, (1, 4), (3,), law=law, max_new_tokens=NEW)
    trace = take_trace(
        model, prompts, max_new_tokens=NEW, law=sampling(law.get("temperature")), draft_length=3
    )
    for entry in record["exits"]:
        played = replay(trace, SkipConfig.early_exit(entry["exit"]))
        assert entry["match"] == pytest.approx(played.survival[0])
        cut = lively_model("llama")
        cut.model.layers = cut.model.layers[: entry["exit"]]
        agreeing = 0
        for text in trace.texts:
            with torch.no_grad():
                best = [each(text.tokens[None]).logits[0].argmax(-1) for each in (model, cut)]
            agreeing += sum((best[0] == best[1])[text.prompt :][: text.starts].tolist())
        assert entry["agreement"] == pytest.approx(agreeing / trace.starts)
        assert (entry["agreement"] == entry["match"]) == (not law["do_sample"])


def test_prices_of_simulated_rounds():
    shared = {"index": 1, "confidences": ((), ()), "finished": (False, False)}
    one = Round(tokens=((5, 7), (5,)), drafted=(2, 0), accepted=(1, 0), source=0, steps=2, **shared)
    other = Round(tokens=((5,), (5,)), drafted=(0, 0), accepted=(0, 0), **shared)
    assert cost_of([one, other], [COSTS]) == pytest.approx(0.4 + 1.2 + 1.0)


def test_costs_of_a_round_are_those_of_its_context_and_rows():
    """As in decoding: drafts pay in small batches, and after short contexts."""
    model, played = replayed(1, "exit 4")
    dear = CostTable(1.0, (1.0, 2.0, 3.0))
    for costs in (
        ContextCosts(lambda context, rows: COSTS if rows < 3 else dear),
        ContextCosts(lambda context, rows: COSTS if context < 64 else dear),
    ):
        made = make_controller("expected-gain", costs=costs, sampling=True)
        again = make_controller("expected-gain", costs=costs, sampling=True)
        real = decoded(model, 1, (0, 1, 2), skip=SKIPS["exit 4"], controller=made)
        assert counted(simulate(played, again, (0, 1, 2), max_draft_length=LENGTH)) == real
