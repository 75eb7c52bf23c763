"""The tokens of `transformers`, for every family, skip config, controller, batch and prompt.

Float64, so that equality is exact. Every pair of axis values runs by default, every triple under
`-m slow`. Ragged Gemma 2 is compared row by row without padding: the library's eager attention
gives NaN for fully masked pad rows in float64 (its float32 softmax sees finfo(float64).min as
-inf), and `generate()` then returns token 0 for padded rows.
"""

import functools
from pathlib import Path

import pytest
import torch
from covering import covering
from marks import slow, thorough
from models import (
    EVERY,
    MODULES_ONLY,
    MOST,
    OTHERS,
    SKIPS,
    WINDOW,
    Erratic,
    generated,
    lively_model,
    prompt,
    ragged,
    tiny_model,
)
from ties import partings
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.config.registry import CONTROLLERS
from layerskip.costs.speculation import CostTable
from layerskip.decoding.noise import stream_key
from layerskip.texts.prompts import read_prompts

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))  # with these, drafting pays; no test depends on a clock
NEW_TOKENS = 12
PROMPTS = {"short": (5, 2, 4), "past the window": (WINDOW + 5, 3, WINDOW + 2)}
AXES = {
    "family": EVERY,
    "skip": tuple(SKIPS),
    "controller": (*CONTROLLERS, "erratic"),
    "rows": (1, 3),
    "lengths": tuple(PROMPTS),
    "execution": ("modules", "fused"),
}
PAIRS = covering(*AXES.values())
PAIRS += [(family, *case[1:]) for family, case in zip(OTHERS, PAIRS, strict=False)]
TRIPLES = covering(*(AXES | {"family": (*EVERY, *OTHERS)}).values(), strength=3)


@functools.cache
def model_of(family):
    return lively_model(family)


def batch(rows, lengths):
    return ragged(PROMPTS[lengths][:rows], seed=3)


@functools.cache
def reference(family, rows, lengths):
    """New tokens of the library's own greedy decoding."""
    model, (ids, mask) = model_of(family), batch(rows, lengths)
    batches = [(ids, mask)]
    if model.config._attn_implementation == "eager":  # see the module's docstring
        batches = [(i[m.bool()][None], m[m.bool()][None]) for i, m in zip(ids, mask, strict=True)]
    new = []
    for i, m in batches:
        out = model.generate(i, attention_mask=m, max_new_tokens=NEW_TOKENS, do_sample=False)
        new += out[:, i.shape[1] :].tolist()
    return new


def decode(family, ids, mask, *, sample, max_new_tokens=NEW_TOKENS, **settings):
    law = {"do_sample": sample, **({"temperature": 0.8, "top_k": 20} if sample else {})}
    how = {"max_new_tokens": max_new_tokens, **law}
    out = generated(model_of(family), (ids, mask), {"costs": COSTS, **settings}, **how)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


@functools.cache
def plain_sample(family, rows, lengths):
    ids, mask = batch(rows, lengths)
    how = {"sample": True, "seeds": (11, 12, 13)[:rows], "enabled": False}
    return decode(family, ids, mask, **how)[0]


def name_of(case):
    return "-".join(str(value).replace(" ", "_") for value in case)


@pytest.mark.parametrize(
    "case", [*PAIRS, *slow(*((case,) for case in TRIPLES if case not in PAIRS))], ids=name_of
)
def test_tokens_equal_those_of_the_library_and_of_plain_decoding(case):
    family, skip, name, rows, lengths, execution = case
    ids, mask = batch(rows, lengths)
    how = {"skip": SKIPS[skip], "execution": "auto" if family in MODULES_ONLY else execution}

    def controller():
        return Erratic() if name == "erratic" else name

    tokens, stats = decode(family, ids, mask, sample=False, controller=controller(), **how)
    assert tokens == reference(family, rows, lengths)
    assert stats.num_draft_tokens > 0
    assert stats.num_new_tokens == rows * NEW_TOKENS

    seeds = (11, 12, 13)[:rows]
    sampled, stats = decode(
        family, ids, mask, sample=True, controller=controller(), seeds=seeds, **how
    )
    assert sampled == plain_sample(family, rows, lengths)
    assert stats.num_draft_tokens > 0
    if rows > 1:  # the middle row alone, without padding
        real = mask[1].bool()
        alone, _ = decode(
            family,
            ids[1:2, real],
            mask[1:2, real],
            sample=True,
            controller=controller(),
            seeds=seeds[1:2],
            **how,
        )
        assert alone == sampled[1:2]


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("family", MOST)
def test_drafts_are_accepted_and_rejected(family, skip):
    """Without this, the cases above would prove nothing."""
    ids, mask = batch(3, "past the window")
    for sample in (False, True):
        seeds = (11, 12, 13) if sample else None
        how = {"controller": "fixed", "max_draft_length": 3, "seeds": seeds}
        _, stats = decode(family, ids, mask, sample=sample, skip=SKIPS[skip], **how)
        assert 0.05 < stats.acceptance_rate < 0.95


@pytest.mark.parametrize("family", MOST)
def test_eager_attention_and_a_tied_head(family):
    model = tiny_model(family, attention="eager", tie_word_embeddings=True)
    ids = prompt(WINDOW + 3)
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    for skip in SKIPS.values():
        decoding = LayerSkipDecoding(skip, controller="fixed")
        got = model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=decoding)
        assert got.tolist() == want.tolist()


# ---- The shipped models, in float32 ----

SHIPPED = Path(layerskip.__file__).parent / "models"
SHIPPED_SKIPS = {
    "demo-llama": SkipConfig.early_exit(3),
    "demo-gemma2": SkipConfig(attention=(3, 5), mlp=(4, 7)),
    "demo-gemma4": SkipConfig(attention=(3, 10), mlp=(4, 12)),
}
TEMPERATURE = 0.8
RESOLUTION = 1e-4  # of scores: float32 kernels of different shapes differ by up to this


def held_out(name, count):
    """A shipped model and the starts of held-out prompts, all of one length."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / name)
    texts = [p.text for p in read_prompts(SHIPPED / "prompts.jsonl")]
    rows = [tokenizer(text).input_ids[:48] for text in texts]
    assert len(rows) >= count
    # the file lists prompts kind after kind; this takes every kind
    rows = [rows[i * len(rows) // count] for i in range(count)]
    lengths = tuple(map(len, rows))
    ids, mask = ragged(lengths)
    for row, tokens in enumerate(rows):
        ids[row, mask[row].bool()] = torch.tensor(tokens)
    return model, ids, mask


@pytest.mark.parametrize("name", [*thorough("demo-gemma4"), "demo-llama"])
@pytest.mark.parametrize(("count", "new_tokens"), [(10, 20), *slow((60, 160))])
def test_shipped_models_on_held_out_prompts(name, count, new_tokens):
    model, ids, mask = held_out(name, count)
    skip = SHIPPED_SKIPS[name]
    how = {"skip": skip, "controller": "fixed", "max_draft_length": 4}
    ties = drafted = accepted = 0

    def run(rows, sample, settings):
        law = {"temperature": TEMPERATURE, "top_k": 0} if sample else {}
        law |= {"do_sample": sample, "max_new_tokens": new_tokens}
        law |= {"eos_token_id": None, "pad_token_id": 0}
        return generated(model, (ids[rows], mask[rows]), settings, **law)

    for start in range(0, count, 25):
        rows = slice(start, start + 25)
        i, m = ids[rows], mask[rows]
        want, got = run(rows, False, None), run(rows, False, how)
        sampled = run(rows, True, how | {"seed": 4})
        plain = run(rows, True, {"enabled": False, "seed": 4})
        for out in (got, sampled):
            drafted += out.stats.num_draft_tokens
            accepted += out.stats.num_accepted_tokens
        keys = [stream_key(4, row) for row in range(len(i))]
        gaps = partings(model, m, got.sequences, want.sequences)
        gaps += partings(
            model, m, sampled.sequences, plain.sequences, keys=keys, temperature=TEMPERATURE
        )
        assert max(gaps, default=0) < RESOLUTION
        ties += len(gaps)
    assert ties <= count // 10  # of 2 * count texts
    assert 0 < accepted < drafted
