"""Models with recurrent layers: the same tokens as `transformers`, whatever drafts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import prompt, ragged, require
from small import BATCHES, EIGHT, NEW_TOKENS, alone, decoded, every_draft, new_tokens, small_model
from transformers.cache_utils import DynamicCache

import layerskip
from layerskip.model.opening import sublayers_of
from layerskip.model.recurrent import ONE_BY_ONE, SERVED
from layerskip.session import Session

_QUICK = ("falcon_h1", "lfm2", "mamba", "qwen3_next")
KINDS = [
    kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.slow)
    for kind in sorted(SERVED)
]


@functools.cache
def model_of(kind: str) -> Any:
    require(kind)
    return small_model(kind)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_gives_the_tokens_of_transformers(kind: str, batch: str) -> None:
    model, inputs = model_of(kind), ragged(BATCHES[batch], seed=3)
    want = alone(model, *inputs)
    assert sublayers_of(model).execution == "whole"
    assert new_tokens(decoded(model, inputs, enabled=False)) == want
    for settings in every_draft(model, EIGHT):
        out = decoded(model, inputs, **settings)
        assert new_tokens(out) == want
        assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_that_of_plain_decoding_whatever_drafts(kind: str) -> None:
    model, inputs = model_of(kind), ragged(BATCHES["ragged"], seed=3)
    how: dict[str, Any] = {"sample": True, "seeds": (11, 12, 13)}
    want = new_tokens(decoded(model, inputs, enabled=False, **how))
    for settings in every_draft(model, EIGHT):
        assert new_tokens(decoded(model, inputs, **how, **settings)) == want


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba", "qwen3_next"])
@torch.no_grad()
def test_the_library_goes_on_from_a_state_by_several_tokens_or_by_one(kind: str) -> None:
    """`ONE_BY_ONE` names those that lose their state; passes of several tokens would be wrong."""
    model, ids = model_of(kind), prompt(12)
    past: Any = DynamicCache(config=model.config)
    name = "cache_params" if kind == "mamba" else "past_key_values"
    model.base_model(ids[:, :7], **{name: past}, use_cache=True)
    later = model.base_model(ids[:, 7:], **{name: past}, use_cache=True)[0]
    whole = model.base_model(ids, use_cache=False)[0][:, 7:]
    assert torch.allclose(later, whole, atol=1e-4) == (kind not in ONE_BY_ONE)


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba"])
def test_long_prompts_and_many_rejected_drafts(kind: str) -> None:
    """States stay behind for more tokens than are fed again: a pass of their own catches up."""
    model = small_model(kind, max_position_embeddings=2048)
    ids = prompt(600)
    want = model.generate(ids, max_new_tokens=60, do_sample=False)
    how: dict[str, Any] = {"max_new_tokens": 60, "controller": "fixed", "max_draft_length": 5}
    wrong = [layerskip.Lookup([[*range(2, 97)] * 2])]
    out: Any = layerskip.generate(model, ids, lookup=wrong[0], **how)
    assert out.sequences.tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba"])
def test_sessions_keep_states_at_the_end_of_prompts(kind: str) -> None:
    model, ids = model_of(kind), prompt(30)
    session = Session(model, memory=1 << 24)
    how: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "enabled": False}
    for known in (0, 30):
        text = torch.cat([ids, prompt(9, seed=known)], 1) if known else ids
        out: Any = session.generate(text, **how)
        want = model.generate(text, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert out.sequences.tolist() == want.tolist()
        assert out.stats.num_known_tokens == known
