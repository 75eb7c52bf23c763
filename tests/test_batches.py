"""Batches whose rows end at different times: finished rows are dropped, and that is all."""

from itertools import product

import pytest
import torch
from engines import SKIPS, check_cache, decoder, held, play, prefilled, request
from marks import slow, thorough
from models import (
    FAMILIES,
    FEW_FAMILIES,
    WINDOW,
    Erratic,
    generated,
    lively_model,
    prompt,
    pure,
    ragged,
)

from layerskip import LayerSkipDecoding
from layerskip.cache.rows import RowCache
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Fixed

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))
# without Gemma 2, whose padded rows are NaN in the library's float64 (test_parity.py)
PADDED = [family for family in FAMILIES if family != "gemma2"]
CASES = [("llama", 16), ("gemma3", 16), ("phi3", 16)]
CASES += thorough(*((family, 16) for family in PADDED if (family, 16) not in CASES))
CASES += slow(*product(PADDED, (2, 3, 5, 8)))
NEW_TOKENS = 24


def batch(rows):
    """Prompts of 1 to WINDOW + 6 tokens; neighbours differ in length."""
    return ragged(tuple(1 + 5 * row % (WINDOW + 6) for row in range(rows)), seed=rows)


def ends(model, rows):
    """Tokens that end half of the rows at different times in the library's decoding."""
    ids, mask = batch(rows)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(out[row, ids.shape[1] + 1 + 3 * row % NEW_TOKENS]) for row in range(rows // 2)]


def generate(model, rows, decoding, **how):
    how = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "custom_generate": decoding} | how
    return generated(model, batch(rows), **how)


def decoding(controller="fixed", **settings):
    if controller == "erratic":
        controller = Erratic()
    return LayerSkipDecoding(
        SKIPS["scattered"], controller=controller, costs=COSTS, max_draft_length=4, **settings
    )


# ---- The tokens do not change. ----


@pytest.mark.parametrize(("family", "rows"), CASES)
def test_greedy_tokens_equal_the_librarys(family, rows):
    model = lively_model(family)
    how = {"eos_token_id": ends(model, rows), "pad_token_id": 0}
    want = generate(model, rows, None, **how).sequences.tolist()
    compactions = 0
    for controller, execution in (("erratic", "auto"), ("expected-gain", "modules")):
        got = generate(model, rows, decoding(controller, execution=execution), **how)
        assert got.sequences.tolist() == want
        compactions += got.stats.num_compactions
    assert compactions > 0


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_sampled_rows_equal_themselves_alone(family, acceptance):
    model = lively_model(family)
    rows = 6
    ids, mask = batch(rows)
    seeds = tuple(range(20, 20 + rows))
    settings = {"acceptance": acceptance}
    how = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}
    free = generate(model, rows, decoding(seeds=seeds, **settings), **how).sequences
    how["eos_token_id"] = [int(free[row, ids.shape[1] + 4 * row + 1]) for row in range(rows - 1)]
    got = generate(model, rows, decoding(seeds=seeds, **settings), **how)
    assert got.stats.num_compactions > 0
    assert got.stats.num_accepted_tokens > 0
    for row in range(rows):
        alone = model.generate(
            ids[row : row + 1, mask[row].bool()],
            custom_generate=decoding(seeds=seeds[row : row + 1], **settings),
            max_new_tokens=NEW_TOKENS,
            **how,
        )
        new = alone[0, int(mask[row].sum()) :].tolist()
        assert got.sequences[row, ids.shape[1] :].tolist()[: len(new)] == new
        assert set(got.sequences[row, ids.shape[1] + len(new) :].tolist()) <= {0}


@pure
def forbid_by_row(ids, scores):
    """A processor that depends on the row number."""
    scores = scores.clone()
    for row in range(len(scores)):
        scores[row, 2 + 5 * row : 7 + 5 * row] = float("-inf")
    return scores


def test_processors_see_true_row_numbers_and_histories(llama):
    rows = 8
    how = {"pad_token_id": 0, "repetition_penalty": 1.3}
    free = generate(llama, rows, None, logits_processor=[forbid_by_row], **how).sequences
    width = free.shape[1] - NEW_TOKENS
    how["eos_token_id"] = [int(free[row, width + 2 * row + 1]) for row in range(rows - 1)]
    asked = []

    def constraint(row, seen):
        asked.append((row, seen.tolist()))
        return list(range(2 + row, 97))

    for extra in ({"logits_processor": [forbid_by_row]}, {"prefix_allowed_tokens_fn": constraint}):
        want = generate(llama, rows, None, **how, **extra).sequences.tolist()
        asked.clear()
        got = generate(llama, rows, decoding("erratic"), **how, **extra)
        assert got.sequences.tolist() == want
        assert got.stats.num_compactions > 0
        ids, _ = batch(rows)
        for row, seen in asked:
            assert seen[: ids.shape[1]] == ids[row].tolist()
    assert {row for row, _ in asked} == set(range(rows))


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.4}])
def test_scores_are_those_of_the_true_rows(llama, processors):
    how = {"eos_token_id": ends(llama, 8), "pad_token_id": 0, **processors}
    how |= {"output_scores": True, "output_logits": True, "temperature": None}
    want = generate(llama, 8, None, **how)
    got = generate(llama, 8, decoding("erratic"), **how)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.num_compactions > 0
    assert got.stats.num_accepted_tokens > 0
    assert all(round_.scores is round_.logits is None for round_ in got.rounds)
    assert len(got.scores) == len(got.logits) == len(want.scores)
    lengths = [sum(len(r.tokens[row]) for r in got.rounds) for row in range(8)]
    assert len(set(lengths)) > 3
    for name in ("scores", "logits"):
        for step, (have, expected) in enumerate(zip(got[name], want[name], strict=True)):
            assert have.dtype == torch.float32
            for row, length in enumerate(lengths):
                if step < length:
                    torch.testing.assert_close(have[row], expected[row], rtol=1e-5, atol=1e-5)
                else:
                    assert not have[row].any()
    assert generate(llama, 8, decoding(), **how | {"output_logits": False}).logits is None


# ---- Which rows are dropped, and when. ----


def ending_at(lengths):
    """A stop function that ends each row after its number of tokens."""
    width = batch(len(lengths))[0].shape[1]
    return lambda row, seen: seen.shape[1] - width >= lengths[row]


def scripted(model, lengths, longest=0, **settings):
    """Rows that end after these numbers of tokens, with `longest` drafted tokens a round."""
    prompts = tuple(int(row.sum()) for row in batch(len(lengths))[1])
    asked = request(prompts, new_tokens=max(lengths), stop=ending_at(lengths), **settings)
    return decoder(model, asked, skip="early exit", longest=longest)


LENGTHS = {
    "one after another": (tuple(range(1, 17)), [16, 8, 4, 2, 1]),
    "all together": ((6,) * 16, [16]),
    "all but one": ((9, *[2] * 15), [16, 1]),
    "half at once": ((3, 7) * 4, [8, 4]),
    "just above half": ((3, 3, 3, 7, 7, 7, 7, 7), [8]),
    "not a power of two": ((1, 2, 3, 4, 5, 6, 9), [7, 2, 1]),
    "three": ((5, 2, 8), [3, 1]),
    "alone": ((5,), [1]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_batches_halve_as_rows_finish(llama, name):
    lengths, sizes = LENGTHS[name]
    run, ran = scripted(llama, lengths), scripted(llama, lengths)
    play(ran)
    fresh = prefilled(ran)
    seen = []
    with torch.no_grad():
        for round_ in run.rounds():
            size, rows = len(run.passes.rows), list(run.passes.rows)
            assert rows == sorted(rows)
            assert (
                [*run.passes.rows.values()]
                == list(range(size))
                == list(range(run.passes.cache.rows))
            )
            if not seen or seen[-1] != size:
                seen.append(size)
            check_cache(run, fresh)
            assert {row for row, done in enumerate(round_.finished) if not done} <= set(rows)
    assert tuple(map(len, run.emitted)) == lengths
    assert seen == sizes
    assert run.stats.num_compactions == len(sizes) - 1


def test_finished_rows_are_freed_and_fill_up_a_power_of_two_the_shortest_first(llama):
    run = scripted(llama, (9, *[2] * 15))
    with torch.no_grad():
        before, *_, after = (held(run) for _ in run.rounds())
    assert after == before // 16
    lengths = (9, 2, 9, 2, 9, 2, 2, 2)
    run = scripted(llama, lengths)
    play(run)
    shortest = min((1, 3, 5, 6, 7), key=lambda row: run.passes.lengths[row])
    assert list(run.passes.rows) == sorted([0, 2, 4, shortest])


def test_passes_carry_no_row_that_was_left_behind(llama):
    rows_of = []
    hook = llama.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: rows_of.append(args[0].shape[0])
    )
    try:
        for longest in (0, 2):
            rows_of.clear()
            play(scripted(llama, tuple(range(1, 17)), longest=longest))
            prefill = rows_of.index(16)
            assert sum(rows_of[:prefill]) == 16  # each row's prefill is a pass of its own
            rounds = rows_of[prefill:]
            assert rounds == sorted(rounds, reverse=True)
            assert set(rounds) <= {16, 8, 4, 2, 1}
            assert {16, 8, 1} <= set(rounds)
    finally:
        hook.remove()


def test_the_head_computes_only_what_is_read(llama):
    """No logits for finished rows, or for positions beyond a row's draft: nobody reads them."""
    heads = []

    class Own(Erratic):
        def limit(self, row, allowed):
            return min(row, allowed)

    hook = llama.lm_head.register_forward_pre_hook(
        lambda _, args: heads.append(args[0].shape[:-1].numel())
    )
    try:
        asked = request((3, 5, 2, 7), new_tokens=6, stop=lambda row, _: row == 3)
        run = decoder(llama, asked, controller=Own())
        with torch.no_grad():
            rounds = run.rounds()
            next(rounds)
            assert heads == [4]
            heads.clear()
            round_ = next(rounds)
    finally:
        hook.remove()
    assert round_.drafted[0] == round_.drafted[3] == 0
    assert heads[-1] == sum(round_.drafted) + 3 < 4 * (max(round_.drafted) + 1)


def test_a_controller_may_decide_for_the_batch(llama):
    """It is asked before every draft step, including the first, about the rows that still draft."""

    class Together(Fixed):
        def reset(self, rows):
            self.asked = [[]]

        def update(self, row, drafted, accepted):
            if self.asked[-1]:
                self.asked.append([])

        def draft_together(self, rows):
            self.asked[-1].append(len(rows))
            return len(self.asked[-1]) <= len(self.asked) % 3

    controller = Together(4)
    lengths = (12, 3, 9, 7)
    prompts = tuple(int(row.sum()) for row in batch(4)[1])
    asked = request(prompts, new_tokens=12, stop=ending_at(lengths))
    run = decoder(llama, asked, controller=controller, longest=4)
    rounds = play(run)[1:]
    plain = scripted(llama, lengths)
    play(plain)
    assert run.emitted == plain.emitted
    for number, (round_, counts) in enumerate(zip(rounds, controller.asked, strict=False), 1):
        assert max(round_.drafted) <= number % 3
        assert len(counts) <= number % 3 + 1
        assert counts == sorted(counts, reverse=True)
    assert [max(round_.drafted) for round_ in rounds[:3]] == [1, 2, 0]
    assert controller.asked[0] == [4, 4]


@torch.no_grad()
def test_mixed_up_rows_would_be_seen(llama, monkeypatch):
    """Negative control: the tests above fail if the kept rows are in another order."""
    lengths, _ = LENGTHS["half at once"]
    want = scripted(llama, lengths, longest=2)
    play(want)
    keep = RowCache.keep

    def mixed_up(cache, places, length):
        return keep(cache, [*places[1:], places[0]], length)

    monkeypatch.setattr(RowCache, "keep", mixed_up)
    run = scripted(llama, lengths, longest=2)
    play(run)
    differ = [run.emitted[row] != want.emitted[row] for row in range(8)]
    assert not any(differ[::2])  # these rows had ended before
    assert sum(differ[1::2]) >= 2
    run = scripted(llama, lengths)
    rounds = run.rounds()
    next(rounds)
    while len(run.passes.rows) == 8:
        next(rounds)
    with pytest.raises(AssertionError, match="not close"):
        check_cache(run, prefilled(run))


# ---- Prompts in chunks. ----


@pytest.mark.parametrize(
    ("execution", "chunk"), [("modules", 7), ("fused", 1), *slow(("fused", 7))]
)
@pytest.mark.parametrize("family", FEW_FAMILIES)
@torch.no_grad()
def test_prefill_in_chunks_is_the_prefill(family, execution, chunk, sizes):
    """Prompts end in the first, a middle and the last chunk, and at the end of a chunk."""
    model = lively_model(family)
    asked = request((3 * WINDOW + 1, 2, WINDOW, WINDOW + 4))
    whole = decoder(model, asked, execution=execution)
    logits = whole.passes.prefill()  # (B, V)
    sizes(chunk=lambda *_: chunk * 4)
    run = decoder(model, asked, execution=execution)
    # the library's eager attention has a float32 softmax in every dtype
    tolerance = 1e-5 if family == "gemma2" else 1e-9
    chunked = run.passes.prefill()
    torch.testing.assert_close(chunked, logits, rtol=tolerance, atol=tolerance)
    for seat in run.seats:
        seat.emitted.append(0)
    check_cache(run, prefilled(run), tolerance)
    assert (chunked[1] - logits[2]).abs().max() > 1e-3  # rows differ, so mixing them up would show


@pytest.mark.parametrize(
    ("rows", "width", "passes"), [(1, 1300, [512, 512, 276]), (3, 400, [400, 10])]
)
def test_passes_of_the_prefill_are_bounded(rows, width, passes):
    model = lively_model("llama", max_position_embeddings=2048)
    ids = prompt(width, rows=rows)
    mask = torch.ones_like(ids)
    mask[1:, : width - 5] = 0
    how = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False}
    want = model.generate(ids * mask, **how)
    tokens = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: tokens.append(args[0].shape[:-1].numel())
    )
    got = model.generate(ids * mask, custom_generate=decoding(), **how)
    assert tokens[: len(passes)] == passes
    assert got.tolist() == want.tolist()
