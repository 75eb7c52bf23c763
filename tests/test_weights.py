"""Passes read a model's weights in place, and no call moves them."""

import torch
from agreement import assert_agree
from cost_records import cost_record
from models import prompt, tiny_model

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
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
