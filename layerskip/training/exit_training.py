"""Trains a checkpoint further so that its early exits draft well: `train --recipe exits`.

Three stages: texts, training, judging. The result is an ordinary checkpoint.
Shapes: B windows, T tokens of one, V vocabulary.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerskip.api.drafts import automatic_draft
from layerskip.config.registry import named
from layerskip.config.skips import SkipConfig
from layerskip.families.wrappers import peft
from layerskip.files.schema import checked, number, parse
from layerskip.files.trainings import EXITS_SCHEMA, check_exit_record
from layerskip.files.writing import readable, write_text
from layerskip.model.opened_models import open_model
from layerskip.training import processes
from layerskip.training.exit_model import ExitModel, enabled, exit_table, exit_weights, kept_layers
from layerskip.training.exit_results import best_exit, card, curve, judged_exits
from layerskip.training.judging import BEFORE, TIMED, TRAINED, chosen, clock
from layerskip.training.loop import train, windows_of
from layerskip.training.losses import divergences
from layerskip.training.stages import RECORD, BaseRecipe, Stages, Texts
from layerskip.weights.fingerprint import fingerprint
from layerskip.weights.stored import stored_weights

APART = 16
"""Number of windows held out to judge by."""
FOR_TEXTS, FOR_JUDGING = 0.2, 0.05
"""Shares of the minutes: for all texts, and for judging once."""
QUESTION = 64  # maximum tokens of a timed prompt


@dataclass(frozen=True, kw_only=True)
class ExitRecipe(BaseRecipe):
    """The settings of a training of exits.

    Attributes:
        exits: the early exits to train, ascending, in 1..L-1; none: all.
        loss: of an early exit (see `config.registry`): towards the frozen model's distribution.
            "ce" is towards the text, and includes the final layer, as in LayerSkip.
        keep: weight of the final layer's divergence from the frozen model; 0: no frozen model.
        dropout: how often the last layer is dropped; earlier ones less (see `drop_rates`).
        curriculum: which exits a step trains (see `enabled`).
        lora: rank of low-rank adapters that are trained instead of all weights, and merged at the
            end; None: all weights are trained.
        init: "checkpoint", or "random" weights, which keep nothing of the model.
        steps: number of steps; None: as many as `minutes` allow.

    Raises:
        ValueError: a value is out of range, or neither steps nor minutes are given.
    """

    exits: tuple[int, ...] = ()
    keep: float = checked(number(0), 1.0)
    dropout: float = 0.1
    curriculum: str = "rotational"
    lora: int | None = None
    init: str = "checkpoint"
    steps: int | None = None
    rate: float = checked(number(0), 3e-4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be 0 or more and less than 1, got {self.dropout}")
        if self.init == "random" and (self.loss != "ce" or self.lora is not None):
            raise ValueError("random weights are trained towards the text: loss ce, without lora")
        if self.steps is None and self.minutes is None:
            raise ValueError("give steps or minutes, as the length of the training")

    def for_model(self, layers: int) -> ExitRecipe:
        """The recipe with its exits written out, ascending.

        Raises:
            ValueError: the model does not have such an exit.
        """
        exits = sorted({*(self.exits or range(1, layers))})
        if not exits or exits[0] < 1 or exits[-1] >= layers:
            raise ValueError(f"exits must be in 1..{layers - 1} for this model, got {exits}")
        return replace(self, exits=tuple(exits))


class ExitTraining(Stages):
    """A training of a model's exits in a folder.

    Args:
        model: of an opened family; its weights change.
        texts: what it is trained on; their tokenizer is written together with the checkpoint.
        folder: for the checkpoint; empty, or of the same training.
        reporting: as for `Stages`.

    Raises:
        ValueError: the model has no such exit, peft is missing, or as for `Stages`.
    """

    recipe: ExitRecipe
    few = 80_000  # in so many, demo-gemma2's exits made most of their gain

    def __init__(
        self,
        model: Any,
        texts: Texts,
        recipe: ExitRecipe,
        folder: Path,
        **reporting: Any,
    ) -> None:
        if stored_weights(model):
            raise ValueError(
                "--recipe exits trains plain weights; name the checkpoint that this was packed from"
            )
        self.module = ExitModel(model)
        self.layers = self.module.known.num_layers
        self.recipe = recipe = recipe.for_model(self.layers)
        self.model = model
        if recipe.lora is not None:
            peft()
            if processes.count() > 1:
                raise ValueError("--lora trains in one process; leave out torchrun, or --lora")
        if recipe.rows % processes.count():
            raise ValueError(
                f"--rows must be a multiple of {processes.count()}, the number of processes, got "
                f"{recipe.rows}"
            )
        self.dtype, self.base = model.dtype, fingerprint(model)
        identity = asdict(recipe) | {"base": self.base, "processes": processes.count()}
        super().__init__(folder, identity, texts, model.device, **reporting)

    def run(self) -> dict[str, Any]:
        """Run all stages; returns the record, which is kept together with the checkpoint.

        Only the first process returns it as long as it is new.
        """
        if done := self.finished(RECORD, check_exit_record):
            return done
        recipe = self.recipe
        need = math.inf if recipe.steps is None else recipe.steps * recipe.rows * recipe.window
        windows = self.make_texts(need, FOR_TEXTS, APART)
        frozen = None
        if not self.half:
            self.model.float()
        if recipe.init == "checkpoint" and (recipe.loss != "ce" or recipe.keep > 0):
            frozen = self.module  # without its adapters
            if recipe.lora is None:
                frozen = ExitModel(deepcopy(self.model)).requires_grad_(False)
        self.model.float()
        adapted = None if recipe.lora is None else _adapted(self.model, recipe)
        if processes.count() > 1:
            for each in (self.module, frozen):
                if each is not None:
                    _shard(each, self.device)
        before = self._judged("before")
        self._train(frozen, adapted, windows)
        if adapted is not None:
            adapted.merge_and_unload()
        return self._finish(before, len(windows) * recipe.window)

    def _judged(self, name: str) -> list[dict[str, float]]:
        """The table of exits on held-out windows, kept in a file."""
        path = self.work / f"{name}.json"
        if not path.exists():
            self.progress(f"judging exits {name} training", 0.0)
            exits, at = judged_exits(self.recipe.exits, self.layers), self.recipe.temperature
            with self.precision():
                made = (exit_table(self.module, some, exits, at) for some in self._held_batches())
                rows = [*self.timed("judging", made)][-1]
            processes.on_first(lambda: write_text(path, json.dumps(rows)))
        table: list[dict[str, float]] = parse(path.read_bytes())
        return table

    def _held_batches(self) -> Iterator[Tensor]:
        """The held-out windows, (N, T + 1), preceded by the first alone if N is not known yet.

        N is limited by a share of the minutes, and is the same after training.
        """
        windows, path = self.held_out(self.recipe.window, APART), self.work / "windows.json"
        if not path.exists():
            began = time.monotonic()
            yield windows[:1]
            limit = FOR_JUDGING * 60 * (self.recipe.minutes or math.inf)
            count = int(max(1, min(len(windows), limit / (time.monotonic() - began))))
            processes.on_first(lambda: write_text(path, json.dumps(count)))
        yield windows[: parse(path.read_bytes())]

    def _train(self, frozen: ExitModel | None, adapted: Any, windows: Tensor) -> None:
        """Train on windows (N, T + 1)."""
        recipe, last = self.recipe, self.layers
        loss_of, towards_text = named("loss", recipe.loss), recipe.loss == "ce"
        at = 1.0 if towards_text else recipe.temperature

        @torch.no_grad()
        def original(ids: Tensor) -> Tensor | None:
            if frozen is None:
                return None
            with nullcontext() if adapted is None else adapted.disable_adapter():
                logits: Tensor = frozen(ids, (last,))[last]
            return logits

        def step_loss(step: int, share: float) -> Tensor:
            numbers = windows_of(len(windows), recipe.rows, step, recipe.seed)
            batch = windows[numbers[processes.rank() :: processes.count()]].long().to(self.device)
            ids, labels = batch[:, :-1], batch[:, 1:]
            rate = recipe.dropout * (2**share - 1 if recipe.init == "random" else 1)
            kept = kept_layers(last, rate, recipe.rows, recipe.seed, step)
            kept = kept[:, processes.rank() :: processes.count()].to(self.device)
            exits = enabled(recipe.exits, recipe.curriculum, step, share)
            counts = exit_weights(exits, last, final=towards_text)
            with self.precision():
                target = original(ids)  # (B, T, V)
                logits = self.module(ids, (*exits, last), kept)
                like = logits[last] if target is None else target  # ignored by `ce`
                losses = [
                    weight * loss_of(logits[each], like, labels, at)
                    for each, weight in counts.items()
                ]
                if target is not None and recipe.keep:
                    losses.append(recipe.keep * divergences(logits[last], target, 1.0)[0])
            return torch.stack(losses).sum()

        total, judging = recipe.steps or 1 << 40, 1.5 * self.seconds["judging"]
        steps = train(self, self.module, step_loss, total, judging)
        for _, loss, _ in self.timed("training", steps):
            self.curve.append(loss)

    def _finish(self, before: list[dict[str, float]], text_tokens: int) -> dict[str, Any]:
        """Write the checkpoint and its results; returns these."""
        if processes.count() == 1:
            for weight in self.module.parameters():  # judge the weights as they will be written
                weight.data = weight.to(self.dtype).float()
        after = self._judged("after")
        state = _whole_state(self.module)
        if not processes.is_first():
            return {}
        recipe, base = self.recipe, self.model.name_or_path or None
        partial = self.folder / ".checkpoint.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        state = {name: weight.to(self.dtype) for name, weight in state.items()}
        self.model.to(self.dtype).save_pretrained(partial, state_dict=state)
        self.texts.tokenizer.save_pretrained(partial)
        best, promised = best_exit(after)
        skip, timed = self._timed(partial, best)
        record = {
            "kind": "exits",
            "schema": EXITS_SCHEMA,
            "recipe": asdict(recipe),
            "model": base,
            "base": self.base,
            "steps": len(self.curve),
            "tokens": len(self.curve) * recipe.rows * recipe.window,
            "text_tokens": text_tokens,
            "seconds": self.seconds,
            "curve": curve(self.curve),
            "before": before,
            "after": after,
            "best": best,
            "promised": promised,
            "timed": timed,
        }
        check_exit_record(record)
        skip.save(partial / "layerskip.json")
        write_text(partial / "README.md", card(record))
        readable(partial)
        for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(self.folder / file.name)  # last the config, which completes a checkpoint
        partial.rmdir()
        return self.finish(RECORD, record)

    def _timed(self, folder: Path, best: int) -> tuple[SkipConfig, dict[str, Any]]:
        """The skip config for a checkpoint after timing its exit, and the timings."""
        written = type(self.model).from_pretrained(folder, dtype=self.dtype)
        opened = open_model(written.to(self.device).eval())
        drafts, usual = {TRAINED: SkipConfig.early_exit(best)}, automatic_draft(opened).skip
        if usual is not None:
            drafts[BEFORE] = usual
        windows = self.held_out(min(self.recipe.window, QUESTION), TIMED)
        prompts = [window[None, :-1] for window in windows]
        temperature = self.recipe.temperature
        timed = clock(
            opened, prompts, drafts, temperature, until=self.until, progress=self.progress
        )
        best_skip, _ = chosen(drafts, timed)
        return best_skip, timed


def _adapted(model: Any, recipe: ExitRecipe) -> Any:
    """Add low-rank adapters to all linear modules of the model's layers; only these train."""
    torch.manual_seed(recipe.seed)
    rank = recipe.lora
    config = peft().LoraConfig(r=rank, lora_alpha=2 * (rank or 1), target_modules="all-linear")
    return peft().get_peft_model(model, config)


def _shard(module: ExitModel, device: torch.device) -> None:
    """Distribute weights, gradients and the optimizer's states over all processes (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.count(),))
    for part in (*module.known.layers, module):  # otherwise judging would leave the outermost whole
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def _whole_state(module: ExitModel) -> dict[str, Tensor]:
    """The weights of the model by name, gathered on the first process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(module.model, options=options)
    return dict(state)
