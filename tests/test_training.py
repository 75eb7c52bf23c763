"""Batches, a loss that is not finite, and what ships."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import Letters
from models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerskip
from layerskip.training import loop, token_files
from layerskip.training.exit_model import ExitModel, exit_table
from layerskip.training.stages import BaseRecipe, Stages, Texts

SHIPPED = Path(layerskip.__file__).parent / "models"


def test_an_epoch_holds_every_window_once(tmp_path):
    np.arange(1001, dtype=np.int32).tofile(tmp_path / "tokens")
    windows = token_files.windows(tmp_path / "tokens", 10)
    batches = [windows[loop.windows_of(len(windows), 5, step, 0)] for step in range(40)]
    assert {batch.shape for batch in batches} == {(5, 11)}
    first, second = torch.cat(batches[:20]), torch.cat(batches[20:])
    for epoch in (first, second):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 1000, 10))
        assert torch.equal(epoch - epoch[:, :1], torch.arange(11).expand(100, 11))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_the_run(wrong, tmp_path):
    """Nor may its gradient: the weights would be lost, and the checkpoint with them."""
    model = tiny_model("llama", dtype=torch.float32)

    def loss(step, share):
        zero = sum((p - p).square().sum() for p in model.parameters())
        return zero * math.nan if wrong == "loss" else zero.sqrt()

    class Plain(Stages):
        recipe = BaseRecipe(rate=0.1, window=16)

    (tmp_path / "text").write_text("all that there is to read\n" * 999)
    texts = Texts(Letters(), None, tmp_path / "text")
    stages = Plain(tmp_path / "out", {}, texts, model.device)
    with pytest.raises(FloatingPointError, match="at step 0"):
        next(loop.train(stages, model, loss, 3, 0.0))
    assert not stages.checkpoint.exists()


# ---- What ships ----


@pytest.mark.parametrize("name", ["demo-llama", "demo-gemma2", "demo-gemma4"])
def test_a_shipped_model_is_small_and_its_depth_pays(name):
    files = list((SHIPPED / name).iterdir())
    assert max(file.stat().st_size for file in files) <= 14e6
    assert sum(file.stat().st_size for file in files) <= 24e6
    assert "## Data and terms" in (SHIPPED / name / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / name)
    ends = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    assert ends == (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert (tokenizer.padding_side, tokenizer.bos_token_id) == ("left", None)
    prompts = [p["prompt"] for p in shipped_prompts() if p["category"] == "code"][::4]
    tokens = torch.tensor(tokenizer(prompts, truncation=True, max_length=60)["input_ids"])
    [third, last] = exit_table(ExitModel(model), tokens, (3, model.config.num_hidden_layers), 1.0)
    assert last["loss"] < 3.2
    assert last["loss"] < third["loss"] - 0.2


def shipped_prompts():
    return [json.loads(line) for line in (SHIPPED / "prompts.jsonl").read_text().splitlines()]


def test_the_shipped_prompts_are_of_three_kinds():
    prompts = shipped_prompts()
    assert Counter(p["category"] for p in prompts) == {"code": 24, "repetitive": 24, "unlike": 24}
    assert len({p["prompt"] for p in prompts}) == 72
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "demo-llama")
    for row in prompts:
        ids = tokenizer(row["prompt"])["input_ids"]
        assert len(ids) <= 150
        assert tokenizer.decode(ids) == row["prompt"]
