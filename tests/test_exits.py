"""Early exits in training: the recipe, a training that is killed, and the checkpoint."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, lively_model, prompt, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from layerskip.config import SkipConfig
from layerskip.training import exit_training
from layerskip.training.exit_training import ExitRecipe, ExitTraining, best_exit, card, rise
from layerskip.training.exits import (
    ExitModel,
    drop_rates,
    enabled,
    exit_table,
    exit_weights,
    kept_layers,
)


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "gemma4"])
def test_exits_are_read_through_the_models_own_norm_and_head(family: str) -> None:
    model, ids = tiny_model(family), prompt(20, rows=2)  # longer than Gemma 2's window
    with torch.no_grad():
        logits = ExitModel(model)(ids, (2, 6))
        assert not any(layer._forward_hooks for layer in model.model.layers)
        whole = model(ids, output_hidden_states=True)
        head = model.lm_head(model.model.norm(whole.hidden_states[2])).float()
    torch.testing.assert_close(logits[6], whole.logits.float())
    cap = getattr(model.config, "final_logit_softcapping", None)
    torch.testing.assert_close(logits[2], head if cap is None else cap * torch.tanh(head / cap))


@torch.no_grad()
def test_a_dropped_layer_passes_its_input_on() -> None:
    model, other, ids = tiny_model("llama"), tiny_model("llama"), prompt(9, rows=2)
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[3, 1] = False  # of the second window only
    logits = ExitModel(model)(ids, (6,), kept)[6]
    whole = other(ids).logits.float()
    del other.model.layers[3]
    other.config.num_hidden_layers = 5
    torch.testing.assert_close(logits[0], whole[0])
    torch.testing.assert_close(logits[1], other(ids, use_cache=False).logits[1].float())


def test_the_recipe_is_the_papers() -> None:
    rates = drop_rates(5, 0.2)
    assert rates == pytest.approx([0.2 * (math.exp(n * math.log(2) / 4) - 1) for n in range(5)])
    drawn = torch.stack([kept_layers(5, 0.2, 4, 0, step) for step in range(4000)])
    assert drawn.float().mean((0, 2)).tolist() == pytest.approx([1 - r for r in rates], abs=0.02)
    assert torch.equal(kept_layers(5, 0.2, 4, 0, 7), drawn[7])
    exits = [*range(1, 12)]
    turns = [enabled(exits, "rotational", step, 0.0) for step in range(8)]
    assert turns[:4] == [[1, 9], [2, 10], [3, 11], [4]]
    assert sorted(itertools.chain(*turns)) == exits
    assert enabled([4, 8], "rotational", 3, 0.0) == [8]
    shares = (0.0, 0.2, 0.49, 1.0)
    assert [len(enabled(exits, "gradual", 0, share)) for share in shares] == [1, 5, 11, 11]
    assert enabled(exits, "gradual", 0, 0.1) == [9, 10, 11]
    weights = exit_weights([2, 4], 6, final=True)
    raw = {2: 0.1 * 1, 4: 0.1 * 6, 6: 5 + 0.1 * 10}
    assert weights == pytest.approx({n: each / sum(raw.values()) for n, each in raw.items()})
    assert sum(exit_weights([2, 4], 6, final=False).values()) == pytest.approx(1)


def test_the_table_tells_what_exits_are_worth() -> None:
    """What shared noise accepts is the share that is known of two Gumbel maxima."""
    model, windows = lively_model("gemma2"), prompt(64, rows=12)
    rows = exit_table(ExitModel(model), windows, range(1, 7), 0.8)
    assert rows[-1]["agreement"] == rows[-1]["accepted"] == 1
    assert rows[-1]["loss"] == pytest.approx(model(windows, labels=windows).loss.item(), rel=1e-4)
    with torch.no_grad():
        logits = ExitModel(model)(windows[:, :-1], (5, 6))
    q, p = (logits[each].div(0.8).softmax(-1).flatten(0, 1) for each in (5, 6))
    larger = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    assert rows[4]["accepted"] == pytest.approx(
        (1 / larger.sum(-1)).sum(-1).mean().item(), abs=0.06
    )
    assert rows[4]["overlap"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-4)


# A training in a folder


class Letters:
    """A tokenizer of letters."""

    chat_template, bos_token_id, eos_token_id = None, 1, 0

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        texts = [text] if isinstance(text, str) else text
        ids = [[2 + ord(letter) % (VOCABULARY - 2) for letter in each] for each in texts]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    lines = [{"text": f"{n} times {n} is {n * n}; " * 4} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


HOW: dict[str, Any] = {"window": 16, "rows": 2, "exits": (2, 4), "rate": 3e-3, "steps": 12}


class Stopped(Exception):
    pass


def training(folder: Path, texts: Path, stop: int = 0, **changes: Any) -> ExitTraining:
    def progress(what: str, _: float) -> None:
        if stop and what.startswith(f"training: step {stop},"):
            raise Stopped

    torch.set_num_threads(1)
    model = lively_model("llama", dtype=torch.float32)
    recipe = ExitRecipe(**HOW | changes)
    return ExitTraining(model, Letters(), None, texts, recipe, folder, progress=progress)


@pytest.mark.parametrize("kills", [(5,), pytest.param((1, 3, 6, 8, 11), marks=pytest.mark.slow)])
def test_a_killed_training_gives_the_same_weights(
    kills: tuple[int, ...], tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training(tmp_path / "whole", texts).run()
    monkeypatch.setattr(exit_training, "SAVE_SECONDS", 0.0)
    for kill in kills:
        with pytest.raises(Stopped):
            training(tmp_path / "parts", texts, stop=kill).run()
        assert not (tmp_path / "parts" / "config.json").exists()
    again = training(tmp_path / "parts", texts).run()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    timeless = {"seconds": None}
    assert again | timeless == whole | timeless
    assert not (tmp_path / "parts" / "work").exists()
    assert training(tmp_path / "parts", texts).run() == again  # finished: nothing is done again


def test_training_makes_exits_right_more_often_and_keeps_the_model(
    tmp_path: Path, texts: Path
) -> None:
    record = training(tmp_path / "out", texts, steps=60, curriculum="all").run()
    before, after = record["before"], record["after"]
    for place in (1, 3):
        assert after[place]["accepted"] > before[place]["accepted"] + 0.05
    assert rise(record) < 0.05
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    skip = SkipConfig.load(tmp_path / "out" / "layerskip.json")
    assert skip.exit_layer == record["best"] == best_exit(after)[0]
    assert (tmp_path / "out" / "README.md").read_text() == card(record)
    assert model.config.num_hidden_layers == 6
