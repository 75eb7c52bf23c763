"""Passes read a model's weights in place, and no call moves them."""

import pytest
import torch
from agreement import assert_agree
from cost_records import cost_record
from models import prompt, tiny_model
from torch import nn

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.model import products
from layerskip.model.sublayers import Sublayers
from layerskip.search import search

SKIP = SkipConfig.early_exit(2)


def test_no_door_moves_weights():
    model, ids = tiny_model("llama"), prompt(5)
    pointers = [p.data_ptr() for p in model.parameters()]
    model.generate(ids, custom_generate=LayerSkipDecoding(SKIP), max_new_tokens=4, pad_token_id=0)
    layerskip.generate(model, ids, skip=SKIP, max_new_tokens=4)
    list(layerskip.decode(model, ids, skip=SKIP, max_new_tokens=4))
    search(model, [ids[0]], max_new_tokens=4, trials=2, space="sublayer,lookup", cost=cost_record())
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_fused_passes_see_weights_that_change():
    model = tiny_model("llama")
    fused = Sublayers(model, "fused")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert_agree(Sublayers(model, "modules"), fused)


@torch.no_grad()
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_products_for_compiled_code_are_the_linear(bias, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    weight = torch.randn(5, 3)
    for count in (1, 2, 9):
        x = torch.randn(1, count, 3)
        want = nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(products.compilable(weight, bias)(x), want)
