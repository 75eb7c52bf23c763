"""Models with recurrent layers: the same tokens as `transformers`, whatever drafts."""

import copy

import pytest
import torch
from marks import thorough
from models import Erratic, prompt, ragged
from small import EIGHT, NEW_TOKENS, alone, decoded, every_draft, new_tokens, small_model
from talks import finished, said

from layerskip import LayerSkipDecoding, Lookup, LowPrecision, Session, SkipConfig, generate
from layerskip.decoding.sources.assistant import state_bytes
from layerskip.model.opened_models import opened_of, sublayers_of
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving


@pytest.mark.parametrize("kind", [*thorough("falcon_h1"), "mamba", "qwen3_5_text"])
def test_long_prompts_and_many_rejected_drafts(kind):
    """States lag behind by more tokens than are fed again, so a separate pass catches up."""
    model = small_model(kind, max_position_embeddings=2048)
    ids = prompt(600)
    want = model.generate(ids, max_new_tokens=60, do_sample=False)
    how = {"max_new_tokens": 60, **_wrong(kind, max_position_embeddings=2048)}
    out = generate(model, ids, **how)
    assert out.sequences.tolist() == want.tolist()
    wrong = out.stats.num_draft_tokens - out.stats.num_accepted_tokens
    assert wrong > 20 or kind == "mamba"  # whose text repeats here, so that lookups are right


@pytest.mark.parametrize("kind", ["falcon_h1", *thorough("mamba", "qwen3_next"), "qwen3_5_text"])
def test_sessions_keep_states_where_texts_end_and_where_they_part(kind):
    model = copy.deepcopy(small_model(kind))
    session = Session(model, memory=1 << 24)

    def known(ids, **how):
        how = {"max_new_tokens": NEW_TOKENS, **how}
        out = session.generate(ids, **how)
        want = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert out.sequences.tolist() == want.tolist()
        return out.stats.num_known_tokens, out.sequences

    first = prompt(30)
    assert known(first, enabled=False)[0] == 0
    same, turn = known(first, **_drafts(model))
    assert same == 29  # the last token of a prompt is always run
    second = torch.cat([turn, prompt(9, seed=1)], 1)
    end = turn.shape[1] - 1  # the last token was not fed
    assert known(second, enabled=False)[0] == end
    others = [torch.cat([first[:, :20], prompt(9, seed=seed)], 1) for seed in (2, 3)]
    assert [known(each)[0] for each in others] == [0, 20]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert known(second)[0] == 0


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_5_text"])
def test_a_text_whose_last_drafts_were_rejected_is_kept_up_to_the_state_before(kind):
    model, ids = small_model(kind), prompt(30)
    session = Session(model, memory=1 << 24)
    out = session.generate(ids, max_new_tokens=NEW_TOKENS, **_wrong(kind))
    assert out.stats.num_draft_tokens > out.stats.num_accepted_tokens
    text = torch.cat([out.sequences, prompt(5, seed=1)], 1)
    again = session.generate(text, max_new_tokens=NEW_TOKENS, enabled=False)
    assert 30 <= again.stats.num_known_tokens < out.sequences.shape[1]
    want = model.generate(text, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert again.sequences.tolist() == want.tolist()


def _wrong(kind, **shape):
    """Settings by which drafts are hardly ever right; models of some types all write alike."""
    how = {"controller": "fixed", "max_draft_length": 5}
    if kind in ("falcon_h1", "mamba"):
        return {"lookup": Lookup([[*range(2, 97)] * 2]), **how}
    return {"assistant": small_model(kind, seed=1, **shape), "lookup": False, **how}


def _drafts(model):
    return every_draft(model, EIGHT)[-1]


@pytest.mark.parametrize("kind", [*thorough("falcon_h1", "qwen3_next"), "mamba", "qwen3_5_text"])
def test_servers_keep_states_of_prompts_and_turns(kind):
    model = small_model(kind)
    serving = Serving(model, max_rows=2, lookup=False, skip=EIGHT, controller=Erratic(2))
    assert serving._batch.passes.nbytes(1, 0) >= state_bytes(sublayers_of(model)) > 0

    def text(tokens):
        told = finished(serving, TextRequest(tokens, max_new_tokens=NEW_TOKENS))
        want = model.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False)
        new = said(told)
        assert [*tokens, *new] == want[0].tolist()
        return told[-1].counts.cached, [*tokens, *new]

    first = prompt(30)[0].tolist()
    assert text(first)[0] == 0
    cached, turn = text(first)
    assert cached == 29
    assert text([*turn, 5, 6, 7])[0] >= 30


HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
OPENED = {
    "exit": {"skip": SkipConfig.early_exit(1)},
    "sublayers": {"skip": SkipConfig(attention=(0, 3), mlp=(1,))},
    "half in 8 bits": {"skip": SkipConfig(low=LowPrecision(bits=8, attention=(2, 3), mlp=(0, 1)))},
}


@pytest.mark.parametrize("execution", ["modules", "fused", "native"])
@pytest.mark.parametrize("draft", OPENED)
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.usefixtures("built")
def test_opened_hybrids_draft_with_any_sublayers(kind, execution, draft):
    """Natively in float32, which gives the same tokens here."""
    shape = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    plain = small_model.__wrapped__(kind, head_dim=32, **shape)
    ids, mask = ragged([4, 9, 30], seed=5)
    want = alone(plain, ids, mask)
    model = copy.deepcopy(plain).float() if execution == "native" else plain
    assert sublayers_of(model, execution).execution == execution
    how = {"lookup": False, "controller": Erratic(3), "max_draft_length": 4, "execution": execution}
    why = "library computes recurrent" if execution == "native" else "passes are not native"
    assert why in LayerSkipDecoding(execution=execution, lookup=False).explain(model)
    out = decoded(model, (ids, mask), **how, **OPENED[draft])
    assert new_tokens(out) == want
    assert out.stats.num_draft_tokens > 0
    assert out.stats.acceptance_rate < 1 or draft == "half in 8 bits"


def test_narrow_heads_with_gates_have_no_native_passes():
    model = copy.deepcopy(small_model("qwen3_5_text")).float()
    assert sublayers_of(model).execution == "fused"


def test_what_would_replay_recurrent_states_is_refused():
    with pytest.raises(ValueError, match="models with recurrent layers are not supported here"):
        opened_of(small_model("qwen3_5_text"))
