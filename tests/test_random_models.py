"""Random models of published sizes, and the dial that sets their acceptance."""

import math
from itertools import pairwise

import pytest
import torch
from models import prompt
from random_models import PERPLEXITY, SHAPES, Dial, configuration, random_model
from transformers import AutoConfig, AutoModelForCausalLM

import layerskip
from layerskip import SkipConfig
from layerskip.analysis.runs import Round
from layerskip.analysis.tables import acceptance_of

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED.items())
def test_shapes_have_the_published_numbers_of_parameters(shape, parameters):
    config = configuration(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert set(SHAPES) == {*PUBLISHED, "tiny"}


def small(family, **changes):
    """The tiny shape's configuration, as another family's."""
    _, sizes = SHAPES["tiny"]
    changes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(family, **{**sizes, **changes})


CONFIGS = {
    "tied": small("llama"),
    "untied": small("llama", tie_word_embeddings=False),
    "gemma2": small("gemma2", query_pre_attn_scalar=16),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return random_model(CONFIGS[request.param], torch.float32, CPU, seed=0)


def test_weights_follow_from_the_seed_in_the_dtype_asked_for():
    one, same, other = (
        random_model(configuration("tiny"), torch.bfloat16, CPU, seed) for seed in (0, 0, 1)
    )
    head = one.lm_head.weight
    assert head.dtype == torch.bfloat16
    assert head is one.model.embed_tokens.weight
    assert torch.equal(head, same.lm_head.weight)
    assert not torch.equal(head, other.lm_head.weight)


def test_laws_are_like_those_of_a_language_model(model):
    ids = prompt(256)
    with torch.no_grad():
        law = model(ids).logits[0].log_softmax(-1)  # (T, V)
    perplexity = math.exp(-(law.exp() * law).sum(-1).mean())
    assert PERPLEXITY / 3 < perplexity < 3 * PERPLEXITY  # a small vocabulary is far from the limit
    repeated = law.gather(-1, ids[0, :, None]).exp().mean()
    assert repeated < 0.1  # 0.02 would be the share of a token drawn from a law like these


@pytest.mark.parametrize("greedy", [False, True])
def test_the_dial_sets_acceptance_monotonically(model, greedy):
    dial = Dial(model, 1, greedy=greedy, seed=0)
    counted = [dial.acceptance(2.0**power) for power in range(-6, 7)]
    assert all(b < a + 0.05 for a, b in pairwise(counted))
    assert counted[0] > 0.95
    assert counted[-1] < 0.5
    found = [dial.find(asked) for asked in (0.6, 0.8, 0.9)]
    assert found == sorted(found, reverse=True)
    for asked, strength in zip((0.6, 0.8, 0.9), found, strict=True):
        assert dial.acceptance(strength) == pytest.approx(asked, abs=0.05)


@pytest.mark.parametrize("asked", [0.6, 0.9])
def test_decoding_accepts_as_often_as_the_dial_says_at_every_exit(model, asked):
    dial = Dial(model, 1, greedy=False, seed=0)
    dial.set(dial.find(asked))

    def decoded(layer):
        rounds = layerskip.generate(
            model,
            prompt(8, rows=8),
            skip=SkipConfig.early_exit(layer),
            controller="fixed",
            max_draft_length=4,
            max_new_tokens=50,
            do_sample=True,
            top_k=0,
            seed=0,
        ).rounds
        return [
            Round(*counts)
            for r in rounds[1:]
            for counts in zip(r.drafted, r.accepted, map(len, r.tokens), strict=True)
        ]

    alphas = [acceptance_of(decoded(layer))["alpha"] for layer in (1, 2, 4)]
    # three standard deviations of some 300 draft tokens, and as much of the dial's 256 draws
    assert alphas == pytest.approx([asked] * 3, abs=0.12)
    assert max(alphas) - min(alphas) < 0.03  # the same noise, and nearly the same states


def test_what_the_dial_cannot_do_is_refused(model):
    with pytest.raises(ValueError, match=r"acceptance must be in 0\.\d+\.\.\S+ here, got 0"):
        Dial(model, 1, greedy=False, seed=0).find(0.0)
    with pytest.raises(ValueError, match=r"exits must be in 1\.\.7, got 8"):
        Dial(model, 8, greedy=False, seed=0)
