"""Drafts with a window: the slots they see, texts, bytes, prices, and searches."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from cost_records import cost_record, cost_table, step_seconds
from models import WINDOW, lively_model, prompt, tiny_model

from layerskip import SkipConfig
from layerskip.api.drafts import WINDOW as WIDE
from layerskip.api.drafts import automatic_draft
from layerskip.bench.methods import Task
from layerskip.config.skips import SINK
from layerskip.decoding.sources.sublayer_draft import SublayerDraft
from layerskip.model.opened_models import Sublayers
from layerskip.search import fitting
from layerskip.search.fitting import space_for, windows_for
from layerskip.search.pipeline import Search
from layerskip.search.record import trials_table
from layerskip.weights.rounded import copies_of

FAMILIES = ("llama", "gemma2", "gemma3", "gemma4", "qwen2")
EXECUTIONS = ("modules", "fused", "native")
LONG = 3 * WINDOW


@cache
def model_of(family, dtype=torch.float64):
    return lively_model(family, dtype=dtype)


def opened_of(family, execution):
    dtype = torch.float32 if execution == "native" else torch.float64
    return Sublayers(model_of(family, dtype), execution)


def masks(model, count, window):
    """The library's masks for a draft with a window, by kind of layer, (1, 1, T, T).

    They follow the description of `SkipConfig.window` slot by slot.
    """
    found = {}
    own = getattr(model.config, "sliding_window", None)
    for kind in ("full_attention", "sliding_attention"):
        mask = torch.full((count, count), torch.finfo(model.dtype).min, dtype=model.dtype)
        for query in range(count):
            for slot in range(query + 1):
                if kind == "full_attention":
                    seen = slot < SINK or query - slot < window
                else:
                    seen = query - slot < min(window, own or count)
                if seen:
                    mask[query, slot] = 0.0
        found[kind] = mask[None, None]
    return found


def logits(opened, ids, skip):
    """Logits (B, T, V) of whole texts (B, T), as a draft computes them in one pass."""
    hidden, step = opened.first_pass(ids)
    return opened.backend.run(hidden, step, opened.weights.blocks(skip))


@pytest.mark.parametrize("window", [1, 5, WINDOW, LONG - SINK - 1])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_draft_sees_the_first_slots_and_the_last(family, execution, window):
    opened, ids = opened_of(family, execution), prompt(LONG, rows=2)
    model = model_of(family)
    seen = masks(model, LONG, window)
    by_kind = family not in ("llama",)
    want = model(ids, attention_mask=seen if by_kind else seen["full_attention"]).logits
    got = logits(opened, ids, SkipConfig(window=window))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    exact = opened.logits(opened.run(*opened.first_pass(ids), range(opened.num_sublayers)))
    narrow = window + SINK < LONG
    assert narrow != torch.allclose(got, exact, atol=1e-2)


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize(
    ("family", "execution"),
    [*product(("llama", "gemma3", "gemma4"), EXECUTIONS), ("gemma3", "captured")],
)
@torch.no_grad()
def test_steps_of_one_token_see_as_much_as_whole_passes(family, execution, behind):
    opened, ids = opened_of(family, execution), prompt(LONG, rows=2)
    skip = SkipConfig(window=5)
    want, blocks = logits(opened, ids, skip), opened.weights.blocks(skip)
    kept, rotary = opened.new_cache(2, LONG), opened.rotary(LONG, LONG)
    for time in range(LONG + behind):
        kept.prefilled = time > 0
        places = [min(time, LONG - 1), max(0, time - behind)]
        kept.place(places, 1, max(0, time - behind))
        fed = torch.stack([ids[row, place] for row, place in enumerate(places)])[:, None]  # (2, 1)
        hidden, step = opened.feed(fed, kept, rotary)
        got = opened.backend.run(hidden, step, blocks)[:, 0]
        for row, place in enumerate(places):
            torch.testing.assert_close(got[row], want[row, place], rtol=0, atol=2e-5)


# ---- The choice ----


def test_windows_share_the_copies_of_weights():
    model = tiny_model("llama", dtype=torch.float32)
    opened = Sublayers(model, "fused")
    low = SkipConfig.low_precision(8)
    first = opened.weights.blocks(low)
    taken = copies_of(model).nbytes
    narrow = opened.weights.blocks(replace(low, window=4))
    assert copies_of(model).nbytes == taken == opened.weights.nbytes(replace(low, window=4))
    # everything but attention is the same block
    assert [a is b for a, b in zip(first, narrow, strict=True)] == [False, True] * 6 + [True]


def test_bytes_of_keys_that_a_step_reads():
    model = tiny_model("gemma3", dtype=torch.bfloat16)
    opened = Sublayers(model, "modules")
    slot = 2 * model.config.num_key_value_heads * model.config.head_dim * 2
    full = opened.windows.count(None)
    slides = opened.num_layers - full

    def read(skip):
        return dict(SublayerDraft(opened, skip.resolve(6)).key_bytes())

    assert read(SkipConfig()) == {None: slot * full, WINDOW: slot * slides}
    assert read(SkipConfig(window=20)) == {20 + SINK: slot * full, WINDOW: slot * slides}
    assert read(SkipConfig(window=3)) == {3 + SINK: slot * full, 3: slot * slides}


@pytest.mark.parametrize(
    ("family", "positions", "window"),
    [
        ("llama", WIDE + SINK + 1, WIDE),
        ("llama", WIDE + SINK, None),  # every text is seen whole
        ("gemma3", 8192, WIDE),
        ("mistral", 8192, None),  # all of its layers slide
    ],
)
@pytest.mark.usefixtures("built")
def test_the_automatic_draft_has_a_window_where_texts_may_be_longer(family, positions, window):
    model = tiny_model(family, dtype=torch.float32, max_position_embeddings=positions)
    skip = automatic_draft(Sublayers(model)).skip
    assert skip == replace(SkipConfig.low_precision(8), window=window)


# ---- The search ----


@pytest.mark.parametrize(
    ("family", "context", "found"),
    [
        ("llama", 511, ()),
        ("llama", 512, (256,)),
        ("llama", 9000, (256, 1024, 4096)),
        ("gemma3", 3000, (256, 1024)),  # some of its layers slide
        ("mistral", 3000, ()),  # all of its layers slide
    ],
)
def test_windows_are_searched_where_texts_are_long(family, context, found):
    assert windows_for(Sublayers(tiny_model(family), "modules"), context) == found


def test_attention_with_a_window_is_priced_as_behind_less_text():
    cost = cost_record(keys=1e-5)
    whole, narrow, wide = (
        cost_table(cost, SkipConfig(window=window), 64 + SINK) for window in (None, 16, 64)
    )
    assert wide.draft == whole.draft
    step = step_seconds(cost, 64 + SINK)
    assert narrow.draft == pytest.approx(whole.draft - 6 * 48e-5 / step)
    assert narrow.verify == wide.verify  # without a shared prefix
    short = cost_table(cost, SkipConfig(window=16), 16 + SINK)
    assert short.draft == cost_table(cost, SkipConfig(), 16 + SINK).draft


def test_a_search_tries_windows(monkeypatch):
    monkeypatch.setattr(fitting, "WINDOWS", (4, 100))
    model = lively_model("llama")
    ids = [prompt(30, seed=seed) for seed in range(2)]
    where = space_for(Sublayers(model), "sublayer,window", context=34)
    assert where.windows == (4,)
    steps = Search(model, ids, task=Task(8), space=where, parts=frozenset())
    steps.open()
    steps.price(cost_record())
    steps.run(len(steps.warm_starts))
    steps.judge(2)
    assert where.skip_config(steps.warm_starts["window-4"]) == SkipConfig(window=4).resolve(6)
    rows = trials_table(steps.study, where)
    assert {row["window"] for row in rows} == {None, 4}
    assert steps.finalists
    accepted = steps.objective(steps.warm_starts["window-4"]).acceptance
    assert 0 < accepted < 1
