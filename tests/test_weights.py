"""No call moves a model's weights, which passes read in place."""

from cost_records import cost_record
from models import prompt, tiny_model

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
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
