"""Rounds, cache and counters: what the engine does between tokens, checked from outside."""

import math
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import engines
import models
import pytest
import torch
from covering import covering
from engines import (
    LENGTHS,
    SKIPS,
    Script,
    check_cache,
    decoder,
    greedy_text,
    held,
    play,
    request,
)
from marks import slow, thorough
from models import FAMILIES, FEW_FAMILIES, VOCABULARY, Erratic, lively_model, prompt, pure, ragged
from transformers import TemperatureLogitsWarper

from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import draft_limit
from layerskip.decoding import live_target
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_models import Sublayers

EXECUTIONS = ["modules", "fused", "captured"]
COVERING = covering(FAMILIES, tuple(SKIPS), ("modules", "fused"))


# ---- The cache ----


ROUNDS = [
    (family, skip, execution)
    for (family, execution), skip in zip(
        product(FAMILIES, ("modules", "fused")), cycle([*SKIPS, "scattered"]), strict=False
    )
]


@pytest.mark.parametrize(
    ("family", "skip", "execution"),
    [
        *ROUNDS,
        ("llama", "scattered", "captured"),
        ("gemma2", "early exit", "captured"),
        *slow(*(case for case in COVERING if case not in ROUNDS)),
    ],
)
def test_cache_after_every_round_equals_a_fresh_prefill(family, skip, execution):
    engines.check_caches(family, skip, execution)


def test_cache_differs_where_verification_does_not_overwrite(llama):
    """Negative control: after a draft step, before verification, the cache differs."""
    run = decoder(llama, request((6,)), skip="scattered")
    with torch.no_grad():
        first = next(run.rounds())
        passes = run.passes
        passes.draft_step(torch.tensor(first.tokens[0]), 0)
        run.emitted[0].append(5)
        passes.commit(0, [5])  # as if the draft's keys and values were exact
        with pytest.raises(AssertionError, match="not close"):
            check_cache(run, engines.prefilled(run))


def test_a_short_text_holds_little_whatever_its_limit_is():
    """Of 32,768 allowed tokens it emits five, so the buffers never hold more than some hundred."""
    model = lively_model("llama", max_position_embeddings=40_000)
    text = greedy_text(model, (6,), 5)[0]
    run = decoder(model, request((6,), new_tokens=32_768, eos=frozenset({text[4]})))
    play(run)
    slot = 2 * 6 * 2 * 8 * 8  # keys and values, layers, heads, width, bytes
    assert len(run.emitted[0]) <= 5
    assert 0 < held(run) <= 321 * slot
    assert run.passes.cache.slots > 32_768


@pytest.mark.parametrize("execution", [*thorough("modules"), "fused"])
@torch.no_grad()
def test_a_long_text_holds_few_slots_beyond_its_own(execution):
    model = lively_model("llama", max_position_embeddings=40_000, num_hidden_layers=2)
    asked = request((700,), new_tokens=32_768)
    run = Decoder(Sublayers(model, execution), SkipConfig(), Fixed(4), asked, max_draft_length=4)
    rounds, sizes = run.rounds(), set()
    while len(run.emitted[0]) < 500:
        next(rounds)
        sizes.add(run.passes.cache.size)
        assert held(run) <= (run.passes.lengths[0] + 5 + 257) * 2 * 2 * 2 * 8 * 8
    assert len(sizes) == 2  # it grew only once: copies are rare
    emitted = torch.tensor(run.emitted)  # (1, N)
    want = model(torch.cat([asked.input_ids, emitted], 1)).logits[0, 699:-1].argmax(-1)  # (N,)
    assert run.emitted == [want.tolist()]


@pytest.fixture
def small_buffers(sizes, monkeypatch):
    """Buffers with almost no spare room, so that a text often outgrows them."""
    sizes(spare=1)
    monkeypatch.setattr("layerskip.cache.rows.rounded_up", lambda slots: slots)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("execution", [*thorough("modules"), "fused"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_texts_across_growing_buffers(family, execution):
    """Ragged rows draft, roll back and end around the edges of their buffers."""
    model = lively_model(family)
    asked = request(
        (2, 9, 1, 5), new_tokens=60, stop=lambda row, seen: seen.shape[1] > 60 - 9 * row
    )
    want = decoder(model, asked, longest=0, execution=execution)
    sizes = []
    edges = 0  # rounds that rolled back into an earlier, smaller buffer
    run = decoder(model, asked, skip="scattered", controller=Erratic(), execution=execution)
    play(want)
    fresh = engines.prefilled(want)
    for _ in run.rounds():
        size = run.passes.cache.size
        if sizes and size > sizes[-1]:
            edges += max(run.passes.lengths) < sizes[-1]
        sizes.append(size)
        check_cache(run, fresh)
    assert run.emitted == want.emitted
    assert len(set(sizes)) > 4
    assert edges > 0


# ---- Masks. ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_may_differ_in_dtype(attention):
    """As in quantised or adapted layers that compute in their own dtype."""
    model = lively_model("llama")
    model.set_attn_implementation(attention)
    attend = model.model.layers[1].self_attn.float()

    def into(_, args, kwargs):
        angles = tuple(table.float() for table in kwargs["position_embeddings"])
        hidden = kwargs["hidden_states"].float()
        return args, kwargs | {"hidden_states": hidden, "position_embeddings": angles}

    attend.register_forward_pre_hook(into, with_kwargs=True)
    attend.register_forward_hook(lambda module, args, out: (out[0].double(), *out[1:]))
    run = decoder(model, request(), skip="scattered", controller=Erratic())
    play(run)
    assert run.passes.model.execution == "modules"
    for text, emitted in zip(run.passes.prompts, run.emitted, strict=True):
        want = model.generate(text[None], max_new_tokens=20, do_sample=False)
        assert emitted == want[0, len(text) :].tolist()


# ---- Counters ----


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("skip", SKIPS)
def test_stats_follow_from_the_rounds(llama, skip, sample):
    asked = request(sample=sample, eos=frozenset({9, 23}))
    run = decoder(llama, asked, skip=skip, controller=Erratic())
    rounds = play(run)
    stats = run.stats
    rows = range(len(LENGTHS))
    took_part = [(r, row) for r in rounds[1:] for row in rows if r.tokens[row]]
    drafts = [(r.drafted[row], r.accepted[row]) for r, row in took_part]
    assert stats.num_rounds == len(took_part)
    assert stats.num_drafts == sum(drafted > 0 for drafted, _ in drafts)
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in drafts)
    assert stats.num_accepted_tokens == sum(accepted for _, accepted in drafts)
    assert stats.num_sequences == len(LENGTHS)
    assert stats.num_new_tokens == sum(len(new) for r in rounds for new in r.tokens)
    assert stats.accepted_per_position == [
        sum(accepted > j for _, accepted in drafts)
        for j in range(max(accepted for _, accepted in drafts))
    ]
    assert stats.acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
    for r in rounds:
        assert [len(c) for c in r.confidences] == list(r.drafted)
        assert all(0.0 <= x <= 1.0 for c in r.confidences for x in c)
    for row in rows:
        tokens = [token for r in rounds for token in r.tokens[row]]
        assert tokens == run.emitted[row]
        ends = [i for i, token in enumerate(tokens) if token in asked.eos]
        assert ends in ([], [len(tokens) - 1])
        assert len(tokens) == asked.max_new_tokens or ends


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_shared_prefix_is_run_once_a_token(family, skip):
    model = lively_model(family)
    seen = {"tokens": 0}

    def count(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        seen["tokens"] += hidden.shape[0] * hidden.shape[1]

    hooks = [
        module.register_forward_pre_hook(count, with_kwargs=True)
        for layer in model.model.layers
        for module in (layer.self_attn, layer.mlp)
    ]
    run = decoder(model, request((7,)), skip=skip, controller=Script(3, 0, 1, 2))
    with torch.no_grad():
        rounds = run.rounds()
        next(rounds)
        assert seen["tokens"] == 7 * 12  # the prefill runs the whole model
        seen["tokens"] = 0
        after = list(rounds)
    assert run.stats.num_draft_tokens > 0
    # Drafts run what they keep, verification runs what is not shared, and the last token runs all.
    k, kept = SKIPS[skip].shared_prefix(6), len(SKIPS[skip].kept(6))
    drafted = [each.drafted[0] for each in after]
    assert seen["tokens"] == sum(d * kept + (d + 1) * (12 - k) + k for d in drafted)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("new_tokens", [1, 9])
def test_plain_decoding_has_a_round_for_each_token(llama, new_tokens):
    """The first token comes from the prefill."""
    run = decoder(llama, request((5,), new_tokens=new_tokens), longest=0)
    rounds = play(run)
    assert [round_.index for round_ in rounds] == list(range(new_tokens))
    assert rounds[-1].finished == (True,)
    assert run.stats.num_new_tokens == new_tokens
    assert run.stats.num_drafts == run.stats.num_draft_tokens == 0
    assert run.stats.acceptance_rate == 0.0
    assert run.stats.mean_acceptance_length == 1.0
    assert run.stats.tokens_per_round == (new_tokens > 1)


# ---- Ends ----


def test_lengths_bound_what_is_drafted(llama):
    """The verification emits one token more, so a draft is shorter than the tokens left."""
    for new_tokens in range(2, 9):
        # a draft of the whole model is always right, so every round emits drafted + 1
        run = decoder(llama, request((5,), new_tokens=new_tokens), skip="nothing", longest=9)
        rounds = play(run)
        assert len(rounds) == 2
        assert rounds[1].drafted == rounds[1].accepted == (new_tokens - 2,)
        assert len(run.emitted[0]) == new_tokens
        assert draft_limit(9, new_tokens - 1, 99) == new_tokens - 2


def test_end_inside_a_draft_cuts_the_round_and_stops_drafting(llama):
    text = greedy_text(llama, (5,), 12)[0]
    end = next(i for i in range(2, 9) if text[i] not in text[:i])
    asked = request((5,), new_tokens=12, eos=frozenset({text[end], VOCABULARY + 1}))
    controller = Script(8)
    run = decoder(llama, asked, skip="nothing", controller=controller, longest=8)
    rounds = play(run)
    assert run.emitted == [text[: end + 1]]
    # drafting stopped at the end token, and the bonus token after it was not emitted
    assert rounds[1].drafted == rounds[1].accepted == (end,)
    assert rounds[1].tokens == (tuple(text[1 : end + 1]),)
    assert rounds[1].finished == (True,)
    assert run.stats.num_accepted_tokens == end
    assert run.stats.num_new_tokens == end + 1
    assert run.passes.lengths == [5 + end]


def test_end_in_the_first_token(llama):
    text = greedy_text(llama, LENGTHS, 1)
    run = decoder(llama, request(eos=frozenset({text[1][0]})))
    rounds = play(run)
    assert rounds[0].finished[1]
    assert all(r.tokens[1] == () and r.drafted[1] == 0 for r in rounds[1:])
    assert run.emitted[1] == text[1]


def test_stop_inside_a_round_cuts_it_and_is_asked_token_by_token(llama):
    text = greedy_text(llama, LENGTHS, 20)
    asked_with = [[], [], []]

    def stop(row, seen):
        asked_with[row].append(seen[0].tolist())
        return row == 0 and seen.shape[1] == max(LENGTHS) + 4

    asked = request(stop=stop)
    controller = Script(8)
    run = decoder(llama, asked, skip="nothing", controller=controller, longest=8)
    rounds = play(run)
    assert run.emitted == [text[0][:4], *text[1:]]
    assert rounds[1].drafted[0] == 8
    assert rounds[1].accepted[0] == len(rounds[1].tokens[0]) == 3
    for row, histories in enumerate(asked_with):
        start = asked.input_ids[row].tolist()
        want = [start + run.emitted[row][: n + 1] for n in range(len(run.emitted[row]))]
        assert histories == want


def test_controller_is_told_every_round_and_held_back_where_it_asks_too_much(llama):
    controller = Script(2, 0, 3, 9)
    run = decoder(llama, request(eos=frozenset({9})), controller=controller)
    rounds = play(run)
    took_part = [(row, r.drafted[row]) for r in rounds[1:] for row in range(3) if r.tokens[row]]
    assert [(row, drafted) for row, drafted, _ in controller.updates] == took_part
    assert max(drafted for _, drafted in took_part) == 4


# ---- When the host waits for the device ----


class Watched(Fixed):
    """Like `Fixed`, but the host reads every token as soon as it is drawn."""

    needs_confidence = True


class Sure(Erratic):
    signal = "margin"


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("sample", [False, True])
def test_confidences_are_margins_where_they_are_asked_for(llama, sample, skip, spied):
    asked = request(sample=sample, processors=(TemperatureLogitsWarper(0.7),) if sample else ())
    run = decoder(llama, asked, skip=skip, controller=Sure())
    seen = spied(run.seats[0].draws, "draft", lambda raw, at, *_: (raw.clone(), at))
    compared = 0
    for round_ in run.rounds():
        assert round_.signal == "margin"
        told = [list(row) for row in round_.confidences]
        for raw, at in seen:
            for logits, (seat, offset) in zip(raw, at, strict=True):
                row = seat.row
                scores = logits.float()
                if sample:
                    emitted = len(run.emitted[row]) - len(round_.tokens[row])
                    place = LENGTHS[row] + emitted + offset
                    scores = scores / 0.7 + gumbel_noise([asked.keys[row]], [place], VOCABULARY)[0]
                best, second = scores.sort(descending=True).values[:2].tolist()
                assert told[row][offset] == pytest.approx(1 - math.exp(second - best), abs=1e-6)
                compared += 1
        seen.clear()
    assert compared == run.stats.num_draft_tokens > 20


def test_by_the_rejection_rule_margins_are_not_told(llama):
    asked = request(sample=True, acceptance="rejection")
    sure, plain = (play(decoder(llama, asked, controller=kind())) for kind in (Sure, Erratic))
    assert sure == plain
    assert sure[1].signal == "probability"


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("sample", [False, True])
def test_drafts_are_the_same_whether_they_are_read_at_once_or_not(llama, sample, rejection):
    ended = 0
    for end in range(0, VOCABULARY, 48):
        asked = request(
            sample=sample,
            acceptance="rejection" if rejection else "coupled",
            eos=frozenset({end, end + 1}),
        )
        late, once = (decoder(llama, asked, controller=kind(4)) for kind in (Fixed, Watched))
        for got, want in zip(play(late), play(once), strict=True):
            apart = {"confidences": (), "signal": None, "steps": 0}
            assert replace(got, **apart) == replace(want, **apart)
            assert got.steps >= want.steps  # unread drafts continue past an end token
            ended += any(want.finished) and max(want.drafted) > 0
        assert late.stats == once.stats
        assert late.emitted == once.emitted
    assert ended > 1


@pytest.mark.parametrize("rejection", [False, True])
def test_the_host_waits_once_a_round(llama, rejection, spied):
    """This does not see reads of single numbers. On a GPU, test_gpu.py does."""
    reads = spied(live_target, "on_host", lambda *values: len(values))
    lists = spied(torch.Tensor, "tolist", lambda *_: None)
    asked = request(sample=True, acceptance="rejection" if rejection else "coupled")
    for controller, per_step in ((Script(3, 0, 5), 0), (Watched(4), 1)):
        run = decoder(llama, asked, controller=controller, longest=5)
        reads.clear()
        lists.clear()
        rounds = play(run)
        steps = sum(max(each.drafted) for each in rounds)
        assert steps > 10
        assert len(reads) == len(rounds) + per_step * steps
        assert len(lists) == sum(reads)


# ---- Laws that break ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # fused path, native passes
def test_nan_logits_stop_with_a_reason(dtype):
    for part in ("lm_head", "model.layers.5.mlp.down_proj"):
        model = lively_model("llama", dtype=dtype)
        with torch.no_grad():
            model.get_submodule(part).weight[3, 3] = float("nan")
        for sample in (False, True):
            with pytest.raises(ValueError, match=r"row 0 has no token to draw.*NaN"):
                play(decoder(model, request(sample=sample)))


def test_nan_in_the_draft_alone_only_ends_the_draft(llama):
    """Half precision may overflow in a draft although the model does not."""
    opened = Sublayers(llama)
    calls = {"n": 0}

    class Overflowing(Passes):
        def draft_step(self, tokens, offset, draft=0):
            calls["n"] += 1
            logits = super().draft_step(tokens, offset, draft)
            return logits * float("nan") if calls["n"] % 2 else logits

    for sample, rejection in ((False, False), (True, False), (True, True)):
        asked = request(sample=sample, acceptance="rejection" if rejection else "coupled")
        run = Decoder(opened, SKIPS["early exit"].resolve(6), Fixed(3), asked, max_draft_length=3)
        run.passes.__class__ = Overflowing
        play(run)
        assert run.stats.num_draft_tokens > 0
        if not rejection:
            plain = decoder(llama, request(sample=sample), longest=0)
            play(plain)
            assert run.emitted == plain.emitted


# ---- What is left behind, and what runs concurrently ----


def state(model):
    return {
        "weights": {k: (v.data_ptr(), v.clone()) for k, v in model.state_dict().items()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "types": [type(m) for m in model.modules()],
        "hooks": [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()],
        "gradients": [p.requires_grad for p in model.parameters()],
    }


def check_untouched(model, before):
    after = state(model)
    for (pointer, tensor), (was, values) in zip(
        after.pop("weights").values(), before.pop("weights").values(), strict=True
    ):
        assert pointer == was
        assert torch.equal(tensor, values)
    assert after == before


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_the_model_is_left_as_it_was_found(family, execution):
    """Also after an exception."""
    model = lively_model(family)
    before = state(model)
    play(decoder(model, request(sample=True), skip="scattered", execution=execution))
    check_untouched(model, before.copy())

    @pure
    def fail(ids, scores):
        if ids.shape[1] > max(LENGTHS) + 3:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(RuntimeError, match="no more"):
        play(decoder(model, request(processors=(fail,)), execution=execution))
    check_untouched(model, before)


@pytest.mark.parametrize("execution", [*thorough("modules"), "fused", "captured"])
def test_two_decoders_interleaved_give_the_same_as_alone(llama, execution):
    def runs():
        return [
            decoder(
                llama, request(sample=True, new_tokens=17), skip="scattered", execution=execution
            ),
            decoder(llama, request((9, 4), new_tokens=15), execution=execution),
        ]

    alone = runs()
    for run in alone:
        play(run)
    together = runs()
    pending = [run.rounds() for run in together]
    with torch.no_grad():
        while pending:
            pending = [rounds for rounds in pending if next(rounds, None) is not None]
    assert [run.emitted for run in together] == [run.emitted for run in alone]
    assert [run.stats for run in together] == [run.stats for run in alone]


@pytest.mark.parametrize("execution", [*thorough("modules"), "fused", "captured"])
def test_two_threads_on_one_model(llama, execution):
    opened = Sublayers(llama, execution=execution)

    def run(sample):
        lengths, skip = ((9, 4), "scattered") if sample else ((5, 7, 2), "early exit")
        asked = request(lengths, sample=sample, new_tokens=16)
        return Decoder(opened, SKIPS[skip].resolve(6), Fixed(3), asked, max_draft_length=3)

    alone = [run(sample) for sample in (False, True)]
    for one in alone:
        play(one)
    together = [run(sample) for sample in (False, True, False, True)]
    models.side_by_side(*(partial(play, one) for one in together))
    assert [one.emitted for one in together] == [one.emitted for one in alone] * 2


# ---- What a decoder refuses ----


def test_what_cannot_run_is_refused_before_anything_does(llama):
    class Nothing:
        def restart(self, rows):
            pytest.fail("asked")

    limit = llama.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"at most {limit} tokens.*got {limit + 1}"):
        decoder(llama, request((limit - 3, 2), new_tokens=4))
    with pytest.raises(TypeError, match=r"must have some of needs_confidence,.* got a Nothing"):
        decoder(llama, request(), controller=Nothing())
    passes = Passes(Sublayers(llama), [SkipConfig()], [Seat(prompt(4)[0])], max_draft_length=0)
    with pytest.raises(ValueError, match="cache has 6 slots per row, a pass needs 7"):
        passes.cache.place([4], 3)


def test_the_last_position_is_used_and_none_past_it(llama):
    limit = llama.config.max_position_embeddings
    ids = prompt(limit - 6)
    asked = Request(ids, torch.ones_like(ids), 6, Law([], do_sample=False, rows=1))
    run = decoder(llama, asked, longest=9)
    play(run)
    want = llama.generate(ids, max_new_tokens=6, do_sample=False)
    assert run.emitted == want[:, limit - 6 :].tolist()


@pytest.mark.parametrize("lengths", [(40, 3), (3, 40), (12, 3), (3, 3)])
def test_rows_of_one_seed_at_different_places(llama, lengths):
    """Rows may share a noise stream and read it at distant positions."""
    ids, mask = ragged(lengths)
    keys = [stream_key(7)] * 2
    law = Law([], do_sample=True, rows=2)
    run = decoder(llama, Request(ids, mask, 20, law, keys), skip="scattered", controller=Erratic())
    play(run)
    for row in range(2):
        text = ids[row : row + 1, mask[row].bool()]
        one = Law([], do_sample=True, rows=1)
        alone = decoder(llama, Request(text, torch.ones_like(text), 20, one, keys[:1]), longest=0)
        play(alone)
        assert run.emitted[row] == alone.emitted[0]


# ---- Who owns the memory ----


@pure
def double_in_place(ids, scores):
    return scores.mul_(2)


@pytest.mark.parametrize("rejection", [False, True], ids=["coupled", "rejection"])
@pytest.mark.parametrize("processors", [(), (TemperatureLogitsWarper(0.7),), (double_in_place,)])
@pytest.mark.parametrize("execution", ["modules", "fused"])
@torch.no_grad()
def test_what_a_round_gives_is_the_callers_own(processors, rejection, execution):
    """The output does not change while decoding continues, and changing it has no effect."""
    model = lively_model("llama").float()  # float32 tensors are not copied for a cast
    how = {
        "sample": True,
        "processors": processors,
        "acceptance": "rejection" if rejection else "coupled",
    }
    asked = request(**how, keep_scores=True, keep_logits=True)
    kept, copies = [], []
    for round_ in decoder(model, asked, execution=execution).rounds():
        assert round_.scores is not None
        assert round_.logits is not None
        kept += [*round_.scores, *round_.logits]
        copies += [tensor.clone() for tensor in kept[len(copies) :]]
    assert len(kept) > 30
    assert all(map(torch.equal, kept, copies))
    text = []
    for round_ in decoder(model, asked, execution=execution).rounds():
        assert round_.scores is not None
        assert round_.logits is not None
        for tensor in (*round_.scores, *round_.logits):
            tensor.zero_()
        text.append(round_.tokens)
    plain = request(**how)
    assert text == [round_.tokens for round_ in play(decoder(model, plain, execution=execution))]
