"""Official assistants built here against the library's, and their training against decoding."""

import json

import pytest
import torch
from models import assistant_config
from official import KINDS, assistant_of, build_assistant, target_of
from transformers import PretrainedConfig

import layerskip
from layerskip.api.loading import load, load_official
from layerskip.config.shipped import SHIPPED_PROMPTS
from layerskip.costs.speculation import CostTable
from layerskip.families.wrappers import UnsupportedModelError
from layerskip.model.assistants import load_assistant
from layerskip.model.sublayers import Sublayers
from layerskip.texts.prompts import read_prompts
from layerskip.training import assistant_training
from layerskip.training.losses import distance, lk, overlaps

WIDE = 128  # tokens


def assistant(unified=False, ordered=False):
    return assistant_of("gemma4_unified" if unified else "gemma4_dense", ordered, noise=0.15)


def random_keys(length):
    """Random keys and values by layer type, with `length` slots."""
    shapes = {KINDS[0]: (1, 2, length, 8), KINDS[3]: (1, 1, length, 16)}
    return {kind: (*torch.randn(2, *shape).double(),) for kind, shape in shapes.items()}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("unified", [False, True])
def test_a_saved_assistant_is_the_librarys(tmp_path, unified, ordered):
    built = assistant(unified, ordered)
    built.save_pretrained(tmp_path)
    loaded = load_assistant(tmp_path, dtype=torch.float64)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    keys = random_keys(7)
    embedded, state = torch.randn(2, 1, 1, 32).double()
    position = torch.tensor([[7]])
    expected = built(
        inputs_embeds=torch.cat([embedded, state], -1), position_ids=position, shared_kv_states=keys
    )
    logits, after = loaded.step(embedded, state, keys, dict.fromkeys(keys), position)
    torch.testing.assert_close(logits, expected.logits)
    torch.testing.assert_close(after, expected.last_hidden_state)


def test_many_positions_at_once_are_each_alone():
    built = assistant()
    keys = random_keys(5)
    embedded, state = torch.randn(2, 1, 5, 32).double()
    causal = torch.full((5, 5), float("-inf")).double().triu(1)[None, None]  # (1, 1, T, K)
    positions = torch.arange(1, 6)[None]
    logits, after = built.step(embedded, state, keys, dict.fromkeys(keys, causal), positions)
    for t in range(5):
        until = {kind: (k[:, :, : t + 1], v[:, :, : t + 1]) for kind, (k, v) in keys.items()}
        alone = built.step(
            embedded[:, t : t + 1],
            state[:, t : t + 1],
            until,
            dict.fromkeys(keys),
            positions[:, t : t + 1],
        )
        torch.testing.assert_close(logits[:, t : t + 1], alone[0])
        torch.testing.assert_close(after[:, t : t + 1], alone[1])


def test_what_is_no_assistant_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        UnsupportedModelError, match=r"'llama' is not one of.* an ordinary second model"
    ):
        load_assistant(tmp_path)


def test_a_checkpoint_without_a_weight_is_refused(tmp_path):
    built = assistant()
    weights = built.state_dict()
    del weights["post_projection.weight"], weights["lm_head.weight"]
    built.save_pretrained(tmp_path, state_dict=weights)
    words = r"incomplete: 1 weight missing.*post_projection.weight first"
    with pytest.raises(ValueError, match=words):
        load_assistant(tmp_path)


def untrained(rows, length):
    """A target, an assistant, ids (rows, length) and the target's outputs for them."""
    model = target_of("gemma4", WIDE)
    drafting = build_assistant(assistant_config(model.config)).double()
    ids = torch.randint(WIDE, (rows, length))
    return model, drafting, ids, assistant_training.read(Sublayers(model, "modules"), ids)


def test_training_unrolls_the_steps_of_decoding():
    model, drafting, ids, reading = untrained(2, 14)
    torch.testing.assert_close(reading.logits, model(ids).logits.float())
    drafted = assistant_training.unrolled(drafting, reading, 3)
    assert [logits.shape for logits in drafted] == [(2, 11, WIDE)] * 3
    window = model.config.sliding_window
    for place in (0, 3, 10):
        first = {"sliding_attention": max(0, place + 1 - window), "full_attention": 0}
        keys = {
            kind: tuple(part[:, :, first[kind] : place + 1] for part in both)
            for kind, both in reading.keys.items()
        }
        state = reading.states[:, place : place + 1]
        for step in range(3):
            token = ids[:, place + 1 + step : place + 2 + step]
            logits, state = drafting.step(
                model.model.embed_tokens(token),
                state,
                keys,
                dict.fromkeys(keys),
                torch.tensor([[place + 1]]),
            )
            torch.testing.assert_close(drafted[step][:, place], logits[:, 0].float())


def test_training_brings_the_laws_nearer():
    _, drafting, _, reading = untrained(4, 16)
    optimizer = torch.optim.Adam(drafting.parameters(), lr=1e-2)
    found = []
    for _ in range(40):
        steps = assistant_training.draft_steps(
            assistant_training.unrolled(drafting, reading, 2), reading
        )
        found.append(overlaps(steps, 1.0))
        torch.autograd.backward(distance(lk, steps, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    before, *_, after = found
    assert all(new > old + 0.1 for new, old in zip(after, before, strict=True)), (before, after)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    asked = []

    def unreachable(name, **_):
        asked.append(name)
        raise OSError("no connection")

    loaded = load("demo-llama")
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(ValueError, match="cannot load model 'nosuch' from the Hub: no connection"):
        load_official("nosuch", loaded)
    assert asked == ["nosuch"]


def test_the_shipped_assistant_drafts_for_its_model():
    loaded = load("demo-gemma4")
    official = load_official("demo-gemma4-assistant", loaded)
    files = list(official.folder.iterdir())
    assert sum(file.stat().st_size for file in files) <= 1.2e6
    assert "## Data and terms" in (official.folder / "README.md").read_text()
    texts = [each.text for each in read_prompts(SHIPPED_PROMPTS)][:24:12]
    laws = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 1}
    for text, law in zip(texts, laws, strict=True):
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :48]
        how = {"max_new_tokens": 48, **law}
        plain = layerskip.generate(loaded.model, ids, enabled=False, **how)
        found = layerskip.generate(
            loaded.model,
            ids,
            assistant=official.model,
            lookup=False,
            draft_memory=0,
            costs=CostTable(0.2, (1.0, 1.1)),
            **how,
        )
        assert found.sequences.tolist() == plain.sequences.tolist()
        assert found.stats.num_draft_tokens > 20
        assert found.stats.acceptance_rate > 0.4
