"""Official assistants built here against the library's, and their training against decoding."""

import json

import pytest
import torch
from models import assistant_config
from official import assistant_of, build_assistant, target_of
from transformers import PretrainedConfig

import layerskip
from layerskip.api.loading import load, load_official
from layerskip.config.shipped import SHIPPED_PROMPTS
from layerskip.costs.speculation import CostTable
from layerskip.families.wrappers import UnsupportedModelError
from layerskip.model.assistants import load_assistant
from layerskip.model.opened_models import Sublayers
from layerskip.texts.prompts import read_prompts
from layerskip.training import assistant_training
from layerskip.training.losses import distance, lk, overlaps

WIDE = 128  # tokens


def test_what_is_no_assistant_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        UnsupportedModelError, match=r"'llama' is not one of.* an ordinary second model"
    ):
        load_assistant(tmp_path)


def test_a_checkpoint_without_a_weight_is_refused(tmp_path):
    built = assistant_of("gemma4_dense")
    weights = built.state_dict()
    del weights["post_projection.weight"], weights["lm_head.weight"]
    built.save_pretrained(tmp_path, state_dict=weights)
    words = r"incomplete: 1 weight missing.*post_projection.weight first"
    with pytest.raises(ValueError, match=words):
        load_assistant(tmp_path)


def read(model, rows, length):
    """Ids (rows, length), and the target's outputs for them."""
    ids = torch.randint(WIDE, (rows, length))
    return ids, assistant_training.read(Sublayers(model, "modules"), ids)


@pytest.mark.parametrize(("family", "centroids"), [("gemma4", True), ("gemma4_unified", False)])
def test_training_unrolls_the_steps_of_the_librarys_own_forward(family, centroids):
    model, drafting = target_of(family, WIDE), assistant_of(family, centroids, WIDE, noise=0.15)
    ids, reading = read(model, 2, 14)
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
            out = drafting(
                inputs_embeds=torch.cat([model.model.embed_tokens(token), state], -1),
                position_ids=torch.tensor([[place + 1]]),
                shared_kv_states=keys,
            )
            state = out.last_hidden_state
            want = out.logits[:, 0].float()  # (B, V)
            chosen = want > want.min()  # by centroids, which give all others one value
            torch.testing.assert_close(drafted[step][:, place][chosen], want[chosen])


def test_training_brings_the_laws_nearer():
    model = target_of("gemma4", WIDE)
    drafting, (_, reading) = build_assistant(assistant_config(model.config)), read(model, 4, 16)
    drafting = drafting.double()
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
