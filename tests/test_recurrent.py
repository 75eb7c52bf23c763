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
from layerskip import SkipConfig
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
