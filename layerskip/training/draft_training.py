"""Trains a draft for a frozen model in two stages: texts, training.

Each stage leaves complete files in the working folder, and a restart continues after the last of
them. `judging` measures the result.
Shapes: N windows, B of a step, T tokens of one.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config.registry import named
from layerskip.config.skips import DecodingOptions, LowPrecision, SkipConfig
from layerskip.model.opened_model import OpenedModel
from layerskip.model.trained_weights import TOKENS, save_trained
from layerskip.texts.vocabulary import ranked
from layerskip.training import data, processes
from layerskip.training.loop import train, windows_of
from layerskip.training.losses import Step, distance, overlaps
from layerskip.training.stages import BaseRecipe, Stages
from layerskip.training.students import RATES, Student, skip_for
from layerskip.weights.fingerprint import fingerprint
from layerskip.weights.stored import unpacked_copy

TRAINED_FILE = "trained.json"
"""The skip config of the trained draft, whether or not it pays."""
PASSES = 2  # over the texts, if a number of tokens is requested
FOR_TEXTS, FOR_JUDGING = 0.4, 0.1  # shares of the requested minutes
LEAST_JUDGING = 60.0
"""Minimum seconds for judging, but at most a third of the total."""
FEW = 20_000
"""Tokens of answers that, read twice, gave most of the gain of SmolLM2's drafts."""
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

    def __init__(
        self,
        opened: OpenedModel,
        corpus: data.Corpus,
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
        self.opened, self.corpus = opened, corpus
        super().__init__(
            folder, self._identity(), ("texts", "training"), opened.device, **reporting
        )
        opened.model.requires_grad_(False)
        self.facts: dict[str, Any] = {}

    def _identity(self) -> dict[str, Any]:
        """The values that identify this training."""
        facts = {"base": fingerprint(self.opened.model), "hash of prompts": self.corpus.given}
        return self.recipe.to_dict() | facts

    def run(self) -> SkipConfig:
        """Run all stages; returns the trained draft's skip config, also kept in the folder."""
        ids, texts = self._windows()
        recipe, frequent = self.recipe, self._frequent(texts)
        student = Student(self.opened, recipe.kind, self.skip.shared_prefix(), frequent)
        whole = 60 * (recipe.minutes or 0.0)
        judging = max(FOR_JUDGING * whole, min(LEAST_JUDGING, whole / 3))
        self._train(student, ids, student.steps, judging)
        self.facts["parameters"] = sum(each.numel() for each in student.parameters())
        processes.on_first(lambda: self._write(student, frequent))
        return SkipConfig.load(self.folder / TRAINED_FILE)

    def _windows(self) -> tuple[Tensor, list[data.TrainingText]]:
        """The texts, made if missing, and their windows (N, T)."""
        processes.on_first(self._make_texts)
        texts, recipe = data.all_texts(self.work / "texts"), self.recipe
        ids = data.windows([text.ids for text in texts], recipe.window)
        if recipe.tokens is not None and not self.corpus.answers:  # texts may be of any length
            enough = math.ceil(recipe.tokens / PASSES / recipe.window)
            ids = ids[: max(recipe.rows, enough) + APART]
        if len(ids) <= recipe.rows:
            raise ValueError(
                f"the texts hold {sum(len(text.ids) for text in texts)} tokens, too few for a "
                f"step ({recipe.rows} windows of {recipe.window}) and a window kept apart; give "
                "more prompts or texts, and another folder"
            )
        return ids, texts

    def _make_texts(self) -> None:
        recipe = self.recipe
        enough = math.inf if recipe.tokens is None else math.ceil(recipe.tokens / PASSES)
        left = self.until - time.monotonic() + self.seconds["texts"]
        limit = FOR_TEXTS * max(1.0, left)
        if recipe.minutes is not None and self.corpus.answers:
            self._estimate(limit)
        self._check_space(0 if recipe.tokens is None else 8 * recipe.tokens, "texts")
        if self.half and self.corpus.answers:  # faster, and close to the model's law
            self.corpus.drawn_by = unpacked_copy(self.opened.model).bfloat16()
        self.collect(self.corpus, enough, limit)
        self.corpus.drawn_by = self.opened.model

    def _estimate(self, seconds: float) -> None:
        """Estimate how many tokens the model can answer in the time for texts, and say so."""
        ids = torch.ones(1, data.BATCH, dtype=torch.long)
        with torch.no_grad():
            for _ in range(2):  # the first one is slow
                began = time.monotonic()
                hidden, step = self.opened.first_pass(ids.to(self.opened.device))
                self.opened.run(hidden, step, range(self.opened.num_sublayers))
        drawn = data.BATCH * seconds / (time.monotonic() - began)
        few = " That is few: expect little of it." if drawn < FEW else ""
        self.say(
            f"{self.recipe.minutes:g} minutes suffice to train on about {drawn:,.0f} tokens of "
            f"answers, each several times.{few}"
        )

    def _check_space(self, nbytes: int, what: str) -> None:
        free = shutil.disk_usage(self.work).free
        if nbytes > free:
            raise ValueError(
                f"{what} need {nbytes / 1e9:.1f} GB in {self.folder}, but {free / 1e9:.1f} GB are "
                "free; free some, or train on fewer tokens or for fewer minutes"
            )
        if nbytes >= 1e6:
            self.say(f"{what} take {nbytes / 1e6:.0f} MB on disk during training")

    def _frequent(self, texts: list[data.TrainingText]) -> Tensor:
        """The tokens that the loss covers: the most frequent in the answers, (n,)."""
        answers = torch.tensor([token for text in texts for token in text.ids[text.prompt :]])
        frequent = ranked([answers], self.opened.vocabulary)[: self.recipe.vocabulary]
        covered = torch.isin(answers, frequent).double().mean().item() if len(answers) else 0.0
        self.say(f"the loss covers {len(frequent):,} tokens, {covered:.1%} of the answers'")
        self.facts["covered"] = covered
        return frequent.sort().values

    def _train(
        self,
        module: nn.Module,
        ids: Tensor,
        steps_of: Callable[[Tensor], list[Step]],
        judging: float,
    ) -> None:
        """Train a module on windows (N, T), and measure it on the last of them, held out.

        Args:
            steps_of: the draft's steps on some of them, (B, T).
            judging: seconds to leave for judging.
        """
        recipe, a_step = self.recipe, self.recipe.rows * self.recipe.window
        loss, at = named("loss", recipe.loss), recipe.temperature
        count = len(ids) - max(1, min(APART, len(ids) // 16))
        apart = range(max(recipe.rows, count), len(ids))

        def step_loss(step: int, _: float) -> Tensor:
            numbers = windows_of(apart.start, recipe.rows, step, recipe.seed)
            with self.precision():
                mine = ids[numbers[processes.rank() :: processes.count()]]
                return distance(loss, steps_of(mine.to(self.device)), at)

        @torch.no_grad()
        def measure(tokens: int) -> None:
            losses, found = [], []
            with self.precision():
                for number in apart:
                    steps = steps_of(ids[[number]].to(self.device))
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
            "text_tokens": ids.numel(),
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
