"""Key-value buffers of layers with sliding windows: what they keep and drop, and their size."""

import random

import pytest
import torch
from models import WINDOW, lively_model, prompt, ragged, tiny_model

from layerskip import SkipConfig, generate
from layerskip.cache.rows import RowCache
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_models import Sublayers
from layerskip.native.extension import refusal

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(bool(refusal()), reason="no native passes")
)
WINDOWS = (WINDOW, None)


def seen(held, layer, keys, values):
    """Keys and values (B, H, T, D) that a pass sees after an update, and its mask."""
    window = held.windows[layer]
    held.update(keys, values, layer)
    all_keys, all_values = held.read(layer)
    mask = held.seen(window, "cpu")[..., -all_keys.shape[2] :]  # (B or 1, 1, T, slots)
    visible = mask.expand(held.rows, -1, -1, -1).any(2)[..., None]  # (B, 1, slots, 1)
    return all_keys * visible, all_values * visible, mask


@pytest.mark.parametrize("more", [1, 40])
def test_trimmed_buffers_hold_all_that_is_seen(more, sizes):
    """Rows advance at different rates, roll back and leave."""
    sizes(spare=more)
    draws, rows, slots = random.Random(more), 3, 500
    trims, whole = (RowCache(rows, slots, WINDOWS, trims=trims) for trims in (True, False))
    lengths, moves = [0] * rows, set()
    while max(lengths) + 20 < slots:
        if max(lengths) > 150 and rows == 3:
            rows, lengths = 2, [lengths[0], lengths[2]]
            for each in (trims, whole):
                each.keep([0, 2], max(lengths))
        offset, count = draws.choice([(0, 1), (0, 6), (2, 1), (3, 5)])
        for each in (trims, whole):
            each.place([length + offset for length in lengths], count, min(lengths))
        for layer in (0, 1):
            written = torch.randn(rows, 2, count, 3)
            (*got, mask), (*want, whole_mask) = (
                seen(each, layer, written, -written) for each in (trims, whole)
            )
            slots_held = mask.shape[-1]
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(mine, theirs[:, :, -slots_held:])
                assert not theirs[:, :, :-slots_held].any()
            assert torch.equal(mask, whole_mask[..., -slots_held:])
        moves.add(trims.base)
        for row in range(rows):
            lengths[row] += draws.randint(0, count) if offset == 0 else 0
    assert len(moves) > (10 if more == 1 else 3)
    assert all(base % 32 == 0 for base in moves)


def test_a_pass_of_a_short_row_keeps_what_long_rows_see():
    """Row 0 is far ahead of row 1, whose prompt is still being prefilled by itself."""
    held = RowCache(2, 2000, WINDOWS, trims=True)
    held.place([1500, 0], 1)
    far = torch.arange(1.0, 1501.0)[None, :, None].expand(2, -1, 3)  # (H, n, D)
    for part in ("keys", "values"):
        for layer in (0, 1):
            held.fill(0, (part, layer), 1500, far)
    held.place([0], 64, 0, range(1, 2))
    for layer in (0, 1):
        held.update(torch.ones(1, 2, 64, 3), torch.ones(1, 2, 64, 3), layer)
    held.place([1500, 64], 1, 64)
    for layer in (0, 1):
        last = 1500 - held.held(layer)[0]
        assert held.keys[layer][0, 0, last - WINDOW : last, 0].tolist() == [*range(1493, 1501)]


@pytest.mark.parametrize("known", [True, False], ids=["length known", "length unknown"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_8000_tokens_take_what_the_formula_says(family, known):
    """Keys and values of layers like those of SmolLM2 135M and Gemma 3 270M."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape |= {"head_dim": 64, "hidden_size": 36}
    if family == "gemma3":
        kinds = [*["sliding_attention"] * 5, "full_attention"]
        shape = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1}
        shape |= {"head_dim": 256, "sliding_window": 512, "layer_types": kinds}
    model = tiny_model(family, dtype=torch.bfloat16, max_position_embeddings=32768, **shape)
    opened = Sublayers(model, "fused")
    held = opened.new_cache(1, 8000 + 17 if known else 32000)
    heads, width = shape["num_key_value_heads"], shape["head_dim"]
    steps = [(first, 512) for first in range(0, 7680, 512)] + [(7680, 256)]
    for start, count in [*steps, *((place, 1) for place in range(7936, 8000))]:
        held.place([start], count, max(start, 7935))
        written = torch.zeros(1, heads, count, width, dtype=torch.bfloat16)  # (B, H, T, D)
        for layer in range(opened.num_layers):
            held.update(written, written, layer)
        assert family == "llama" or held.keys[0].shape[2] <= 2 * (512 + 32 + 256)
    full = 2 if family == "llama" else 1
    sliding = opened.num_layers - full
    said = opened.cache_bytes(8000)
    assert said == 2 * 2 * heads * width * (full * 8000 + sliding * 512)
    taken = sum(each.nbytes for each in (*held.keys.values(), *held.values.values()))
    assert said <= taken < 1.1 * said


@pytest.mark.parametrize("execution", ["modules", "fused", NATIVE])
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "mistral"])
def test_texts_across_windows_are_those_of_transformers(family, execution, spied, sizes):
    sizes(spare=4)
    made = spied(Passes, "__init__", lambda passes, *_: passes)
    dtype = torch.float32 if execution == "native" else torch.float64
    model = lively_model(family, dtype=dtype)
    ids, mask = ragged((3 * WINDOW, 5, 2 * WINDOW + 3), seed=4)
    how = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    want = model.generate(ids, **how)
    skip = SkipConfig.early_exit(4)
    how |= {"skip": skip, "execution": execution, "max_draft_length": 3}
    out = generate(model, ids, return_dict_in_generate=True, **how)
    assert torch.equal(out.sequences, want)
    held = max((passes.cache for passes in made), key=lambda each: each.base)
    assert held.base > 2 * WINDOW
    assert held.keys[0].shape[2] < held.slots


def bases(opened, prompts):
    passes = Passes(opened, [], [Seat(each, 4) for each in prompts], max_draft_length=0)
    passes.prefill()
    return [passes.cache.held(layer)[0] for layer in range(opened.num_layers)]


def test_captured_passes_keep_every_slot(sizes):
    sizes(spare=1, chunk=lambda *_: 8)
    opened = Sublayers(lively_model("mistral"), "fused")
    assert min(bases(opened, [prompt(60)[0]])) > 30
    assert max(bases(opened, [prompt(60)[0], prompt(3)[0]])) == 0  # the short row still sees slot 0
    opened.backend.trims = False  # as for captured passes
    assert max(bases(opened, [prompt(60)[0]])) == 0
