"""Trains a draft for a frozen model in two stages: texts, training.

Each stage leaves complete files in the working folder, and a restart continues after the last of
them. `judging` measures the result.
Shapes: N windows, B of a step, T tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config.registry import named
from layerskip.config.skips import DecodingOptions, LowPrecision, SkipConfig
from layerskip.model.draft_modules import TOKENS, save_trained
from layerskip.model.opened_model import OpenedModel
from layerskip.texts.vocabulary import ranked
from layerskip.training import processes
from layerskip.training.loop import train, windows_of
from layerskip.training.losses import Step, distance, overlaps
from layerskip.training.stages import BaseRecipe, Stages, Texts
from layerskip.training.students import RATES, Student, skip_for
from layerskip.weights.fingerprint import fingerprint
from layerskip.weights.stored import unpacked_copy

TRAINED_FILE = "trained.json"
"""The skip config of the trained draft, whether or not it pays."""
PASSES = 2  # over the texts, if a number of tokens is requested
FOR_TEXTS, FOR_JUDGING = 0.4, 0.1  # shares of the requested minutes
LEAST_JUDGING = 60.0
"""Minimum seconds for judging, but at most a third of the total."""
APART = 8  # maximum number of windows held out to measure the curve
POINTS = 8  # of the curve, plus one before training
ROUNDED_MODULE = LowPrecision(bits=8, attention=(), mlp=())
"""The precision of a module if products with rounded weights are fast: a step mostly reads the
head. It is trained with exact weights, which makes hardly any difference."""


@dataclass(frozen=True, kw_only=True)
class Recipe(BaseRecipe):
    """The settings of a draft's training.

    Attributes:
        kind: a name of `layerskip.config.registry`.
        skip: the parts of the model that the draft runs; by default as `skip_for` says.
        tokens: number of training tokens over all passes; None: as many as `minutes` allow.
        vocabulary: how many of the target's most frequent tokens the loss covers.
        rate: by default the kind's own.

    Raises:
        ValueError: a value is out of range, or neither tokens nor minutes are given.
    """

    kind: str
    skip: SkipConfig | None = None
    tokens: int | None = None
    vocabulary: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is None and self.minutes is None:
            raise ValueError("give tokens or minutes, as the length of the training")

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        skip = None if self.skip is None else self.skip.to_dict()
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"skip": skip}


class Training(Stages):
    """A training in a folder.

    Args:
        opened: the model; its weights do not change, and have no gradients from now on.
        folder: for the files; empty, or of the same training.
        reporting: as for `Stages`: progress, say, started.

    Attributes:
        skip: the draft's resolved skip config.
        curve: progress on held-out windows: points with training `tokens`, `loss`, and `overlap` by
            step of the draft.
        facts: what was trained, on how much, and how long it took; set by `run`.

    Raises:
        ValueError: the folder holds another training, or the recipe's skip does not suit its kind.
    """

    recipe: Recipe
    few = 40_000  # so many gave most of the gain of SmolLM2's drafts

    def __init__(
        self,
        opened: OpenedModel,
        texts: Texts,
        recipe: Recipe,
        folder: Path,
        **reporting: Any,
    ) -> None:
        chosen = skip_for(recipe.kind, recipe.skip, opened.num_layers)
        self.skip = replace(
            chosen, model=None, model_hash=None, decoding=None, costs=None, notes=None
        )
        rate = RATES[recipe.kind] if recipe.rate is None else recipe.rate
        self.recipe = replace(recipe, skip=self.skip, rate=rate)
        self.opened = opened
        super().__init__(folder, self._identity(), texts, opened.device, **reporting)
        opened.model.requires_grad_(False)
        self.facts: dict[str, Any] = {}

    def _identity(self) -> dict[str, Any]:
        """The values that identify this training, besides its texts."""
        return self.recipe.to_dict() | {"base": fingerprint(self.opened.model)}

    def run(self) -> SkipConfig:
        """Run all stages; returns the trained draft's skip config, also kept in the folder."""
        windows = self.windows()
        recipe, frequent = self.recipe, self.frequent(windows)
        student = Student(self.opened, recipe.kind, self.skip.shared_prefix(), frequent)
        whole = 60 * (recipe.minutes or 0.0)
        judging = max(FOR_JUDGING * whole, min(LEAST_JUDGING, whole / 3))
        self._train(student, windows, student.steps, judging)
        self.facts["parameters"] = sum(each.numel() for each in student.parameters())
        processes.on_first(lambda: self._write(student, frequent))
        return SkipConfig.load(self.folder / TRAINED_FILE)

    def windows(self) -> Tensor:
        """The windows of the texts, made if missing, (N, T + 1)."""
        recipe, corpus, model = self.recipe, self.texts.corpus, self.opened.model
        enough = math.inf if recipe.tokens is None else recipe.tokens / PASSES
        if corpus is not None and self.half and processes.is_first():
            corpus.drawn_by = unpacked_copy(model).bfloat16()  # faster, and close to its law
        windows = self.make_texts(enough, FOR_TEXTS, APART)
        if corpus is not None:
            corpus.drawn_by = model
        return windows

    def frequent(self, windows: Tensor) -> Tensor:
        """The tokens that the loss covers: the most frequent in the texts, (n,)."""
        tokens = windows.flatten().long()
        frequent = ranked([tokens], self.opened.vocabulary)[: self.recipe.vocabulary]
        covered = torch.isin(tokens, frequent).double().mean().item()
        self.say(f"the loss covers {len(frequent):,} tokens, {covered:.1%} of the texts'")
        self.facts["covered"] = covered
        return frequent.sort().values

    def _train(
        self,
        module: nn.Module,
        windows: Tensor,
        steps_of: Callable[[Tensor], list[Step]],
        judging: float,
    ) -> None:
        """Train a module on windows (N, T + 1), and measure it on those held out.

        Args:
            steps_of: the draft's steps on token ids (B, T).
            judging: seconds to leave for judging.
        """
        recipe, a_step = self.recipe, self.recipe.rows * self.recipe.window
        loss, at = named("loss", recipe.loss), recipe.temperature
        apart = self.held_out(recipe.window, APART)[:, None, :-1]  # (N, 1, T)

        def step_loss(step: int, _: float) -> Tensor:
            numbers = windows_of(len(windows), recipe.rows, step, recipe.seed)
            mine = windows[numbers[processes.rank() :: processes.count()], :-1]  # (B, T)
            with self.precision():
                return distance(loss, steps_of(mine.long().to(self.device)), at)

        @torch.no_grad()
        def measure(tokens: int) -> None:
            losses, found = [], []
            with self.precision():
                for ids in apart:
                    steps = steps_of(ids)
                    losses.append(distance(loss, steps, at).item())
                    found.append(overlaps(steps, at))
            means = [fmean(step) for step in zip(*found, strict=True)]
            self.curve.append({"tokens": tokens, "loss": fmean(losses), "overlap": means})

        if not self.checkpoint.exists():
            measure(0)
        total = math.ceil((recipe.tokens or 1 << 50) / a_step)
        steps = train(self, module, step_loss, total, judging)
        for step, _, share in self.timed("training", steps):
            if share >= 1 or share * POINTS >= len(self.curve):
                measure(step * a_step)
        self.facts |= {
            "tokens": self.curve[-1]["tokens"],  # measured after the last step, over all starts
            "text_tokens": len(windows) * recipe.window,
            "seconds": self.seconds,
            "curve": self.curve,
        }

    def _write(self, student: Student, frequent: Tensor) -> None:
        """Write the draft's weights and its skip config to the folder."""
        kind, model = self.recipe.kind, self.opened.model
        weights = student.weights()
        if len(frequent) < self.opened.vocabulary:
            weights[TOKENS] = frequent.int()
        trained = save_trained(self.folder / "draft.safetensors", weights, kind, model)
        low = self.skip.low
        if low is None and self.opened.execution == "native":
            low = ROUNDED_MODULE
        replace(
            self.skip,
            trained=trained,
            low=low,
            num_layers=None,
            model=getattr(model, "name_or_path", None) or None,
            model_hash=trained.base,
            decoding=DecodingOptions(lookup=True),
        ).save(self.folder / TRAINED_FILE)
