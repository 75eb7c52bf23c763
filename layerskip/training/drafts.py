"""Training a draft for a frozen model, stage by stage; knows no command line and no verdict.

Texts, features, training: each stage leaves files in the working folder, whole or not there, and a
second start goes on behind the last of them. `judging` says what came of it.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.draft_weights import TRAINED
from layerskip.files.schema import parse
from layerskip.files.writing import write_text
from layerskip.model.blocks import TOKENS
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained
from layerskip.training import data, features, processes
from layerskip.training.curves import Curve, trained_on
from layerskip.training.healing import RANK
from layerskip.training.laws import Batch, Laws, Student
from layerskip.training.loop import read_checkpoint, schedule, train, windows_of
from layerskip.training.losses import LOSSES
from layerskip.training.optimizers import check_optimizer, optimizers_for
from layerskip.training.students import RATES, ROUNDED_MODULE, skip_for, student_of
from layerskip.vocabulary import ranked

Progress = Callable[[str, float], None]
"""Told what is done, in words, and the share of it that is."""

TRAINED_FILE = "trained.json"
"""The skip config of the trained draft, whether it pays or not."""
SAVE_SECONDS, NOTE_SECONDS = 60.0, 1.0
PASSES = 2  # over the texts, where tokens are asked for
FOR_TEXTS, FOR_JUDGING = 0.2, 0.1  # of the minutes that are asked for
FOR_TEXTS_OF_MODULES = 0.4  # they train in a third of the time, and see texts about as often so


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, on how much, and how.

    Attributes:
        skip: what the draft runs of the model: the draft to heal, perhaps from healed weights on,
            or the exit that an exit block stands behind; by default what `skip_for` says.
        tokens: to train on, over all passes; None: as many as `minutes` allow.
        minutes: of texts, features, training and judging together.
        vocabulary: how many of the target's most frequent tokens the loss looks at.
        optimizer: of `OPTIMIZERS`.
        rate: of learning, at most; by default the kind's own.
        window: tokens of a sequence; `rows` of them are a step.

    Raises:
        ValueError: a value is out of range, or neither tokens nor minutes are given.
    """

    kind: str = "healed"
    loss: str = "lk"
    skip: SkipConfig | None = None
    tokens: int | None = None
    minutes: float | None = None
    seed: int = 0
    temperature: float = 0.8
    optimizer: str = "adamw"
    rate: float | None = None
    rank: int = RANK
    vocabulary: int = 8192
    window: int = 256
    rows: int = 4

    def __post_init__(self) -> None:
        for name, allowed in (("kind", TRAINED), ("loss", tuple(LOSSES))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        check_optimizer(self.optimizer)
        for name in ("tokens", "minutes", "temperature", "rank", "vocabulary", "window", "rows"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.rate is not None and not 0 <= self.rate < math.inf:
            raise ValueError(f"rate must be 0 or more and finite, got {self.rate}")
        if self.tokens is None and self.minutes is None:
            raise ValueError("say how long to train: tokens or minutes")

    def to_dict(self) -> dict[str, Any]:
        """As JSON; weights to begin with are known by their hash, wherever they lie."""
        skip = None if self.skip is None else self.skip.to_dict()
        if skip is not None and "trained" in skip:
            del skip["trained"]["weights"]
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"skip": skip}


class Training:
    """A training in a folder.

    Args:
        model: a causal language model; its weights stay as they are.
        folder: of what is made; there already, and empty or of the same training.

    Attributes:
        skip: what the draft runs of the model, resolved.
        tap: behind how many sublayers it reads states, if anywhere before the last.
        curve: how training goes, on windows kept apart.

    Raises:
        ValueError: the folder holds another training, or the recipe's skip is none for its kind.
    """

    def __init__(
        self,
        model: Any,
        source: data.Source,
        recipe: Recipe,
        folder: Path,
        *,
        execution: str = "auto",
        progress: Progress = lambda _what, _share: None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.opened = Sublayers(model, execution)
        chosen = skip_for(recipe.kind, recipe.skip, self.opened.num_layers)
        self.skip = replace(
            chosen, model=None, model_hash=None, decoding=None, costs=None, notes=None
        )
        if self.skip.trained is not None:
            self.opened.weights.deltas(
                self.skip.trained
            )  # a wrong file is told now, not in an hour
        rate = RATES[recipe.kind] if recipe.rate is None else recipe.rate
        self.recipe = replace(recipe, skip=self.skip, rate=rate)
        self.tap = self.skip.shared_prefix() if recipe.kind == "exit-block" else None
        self.source, self.folder, self.work = source, folder, folder / "work"
        self.curve = Curve(self.work / "curve.json")
        self.progress, self.say = progress, say
        self.work.mkdir(parents=True, exist_ok=True)
        self._check_same(model)
        self.seconds: dict[str, float] = dict.fromkeys(("texts", "features", "training"), 0.0)
        if self._clock.exists():
            self.seconds |= parse(self._clock.read_bytes())

    @property
    def _clock(self) -> Path:
        return self.work / "seconds.json"

    def _check_same(self, model: Any) -> None:
        """Go on with what is in the folder only where it is this training."""
        path = self.work / "recipe.json"
        prompts = len(self.source.known) + len(self.source.apart)
        of = self.recipe.to_dict() | {"base": fingerprint(model), "prompts": prompts}
        if not path.exists():
            if not processes.first():
                return
            write_text(path, json.dumps(of, indent=2) + "\n")
        now = json.loads(json.dumps(of))
        before = {"optimizer": "adamw"} | parse(path.read_bytes())  # which older files do not say
        other = [name for name in now if before.get(name) != now[name]]
        if other:
            raise ValueError(
                f"{self.folder} holds a training with another {other[0]} "
                f"({before.get(other[0])}, now {now[other[0]]}); name another folder"
            )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[Callable[[], None]]:
        """Add a stage's seconds to those of earlier starts; call what this gives now and then."""
        before, start = self.seconds[stage], time.monotonic()
        written = start

        def note(seldom: float = NOTE_SECONDS) -> None:
            nonlocal written
            now = time.monotonic()
            self.seconds[stage] = before + now - start
            if processes.first() and now - written >= seldom:
                write_text(self._clock, json.dumps(self.seconds))
                written = now

        try:
            yield note
        finally:
            note(0.0)

    def run(self) -> SkipConfig:
        """All stages; the skip config of the trained draft, which lies in the folder, too."""
        if processes.first():
            self._texts()
        processes.wait()
        texts = data.all_texts(self.work / "texts")
        ids = features.windows([text.ids for text in texts], self.recipe.window)
        if self.recipe.rows % processes.count():
            raise ValueError(
                f"rows must be a multiple of the number of processes, {processes.count()}, got "
                f"{self.recipe.rows}"
            )
        if len(ids) <= self.recipe.rows:
            raise ValueError(
                f"the texts hold {sum(len(text.ids) for text in texts)} tokens, too few for a "
                f"step ({self.recipe.rows} windows of {self.recipe.window}) and a window kept "
                "apart; give more prompts or texts"
            )
        if processes.first():
            self._features(ids)
        processes.wait()
        return self._train(ids, texts)

    def clear(self) -> None:
        """Remove what only training needs; texts and times stay."""
        shutil.rmtree(self.work / "features", ignore_errors=True)
        (self.work / "checkpoint.pt").unlink(missing_ok=True)

    def _texts(self) -> None:
        recipe, folder = self.recipe, self.work / "texts"
        enough = math.inf if recipe.tokens is None else math.ceil(recipe.tokens / PASSES)
        of_texts = FOR_TEXTS if recipe.kind == "healed" else FOR_TEXTS_OF_MODULES
        limit = math.inf if recipe.minutes is None else recipe.minutes * 60 * of_texts
        self._need(0 if recipe.tokens is None else 8 * recipe.tokens, "texts")
        half = half_is_fast(self.opened.device)
        with self._timed("texts") as note, self.source.in_half() if half else nullcontext():
            made = data.collect(
                self.source, folder, tokens=enough, more=lambda: self.seconds["texts"] < limit
            )
            for total, new in made:
                if new:
                    note()
                share = min(1.0, max(total / enough, self.seconds["texts"] / limit))
                self.progress(f"texts: {total:,} tokens", share)

    def _features(self, ids: Tensor) -> None:
        folder = self.work / "features"
        tokens = ids.numel()
        there = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self._need(features.nbytes(self.opened, tokens, self.tap) - there, "features")
        with self._timed("features") as note:
            for done in features.compute(self.opened, ids, folder, tap=self.tap):
                note()
                self.progress(
                    f"features: {done * ids.shape[1]:,} of {tokens:,} tokens", done / len(ids)
                )

    def _need(self, nbytes: int, what: str) -> None:
        free = shutil.disk_usage(self.work).free
        if nbytes > free:
            raise ValueError(
                f"{what} need {nbytes / 1e9:.1f} GB in {self.folder}, {free / 1e9:.1f} GB are "
                "free; free some, or train on fewer tokens or for fewer minutes"
            )
        if nbytes > 0:
            self.say(f"{what} take {nbytes / 1e6:.0f} MB of disk while training lasts")

    def _train(self, ids: Tensor, texts: list[data.Text]) -> SkipConfig:
        recipe, model = self.recipe, self.opened.model
        path, checkpoint = self.folder / "draft.safetensors", self.work / "checkpoint.pt"
        rows = recipe.rows
        budget = math.inf
        if recipe.minutes is not None:
            spent = self.seconds["texts"] + self.seconds["features"]
            budget = max(1.0, recipe.minutes * 60 * (1 - FOR_JUDGING) - spent)
        steps = math.ceil((recipe.tokens or 1 << 50) / ids[0].numel() / rows)
        frequent = self._frequent(texts)
        laws = Laws(self.opened, frequent, recipe.loss, recipe.temperature)
        with frozen(model):
            half = half_is_fast(self.opened.device)
            module = student_of(
                recipe.kind,
                self.opened,
                self.skip,
                rank=recipe.rank,
                dtype=torch.bfloat16 if half else torch.float32,
                seed=recipe.seed,
            )
            count = trained_on(len(ids), rows)
            step_loss = partial(self._loss, module, laws, ids[:count])
            measure = partial(self._measure, module, laws, ids, range(count, len(ids)))
            if checkpoint.exists():
                self.curve.begin(read_checkpoint(checkpoint)["step"] * rows * ids.shape[1])
            else:
                self.curve.begin(None)
                measure(0)
            with self._timed("training") as note:
                for step, loss in train(
                    module,
                    optimizers_for(recipe.optimizer, module, recipe.rate or 0.0),
                    step_loss,
                    steps,
                    schedule=schedule,
                    checkpoint=checkpoint,
                    total_seconds=budget,
                    save_seconds=SAVE_SECONDS,
                ):
                    note()
                    done = step * rows * ids.shape[1]
                    share = max(step / steps, self.seconds["training"] / budget)
                    if processes.agreed(self.curve.due(share), self.opened.device):
                        measure(done)
                    left = self.seconds["training"] / max(share, 1e-9) * (1 - share)
                    self.progress(
                        f"training: {done:,} tokens, loss {loss:.3f}, {left / 60:.0f} min left",
                        share,
                    )
            if not processes.first():
                processes.wait()
                return SkipConfig.load(self.folder / TRAINED_FILE)
            done = read_checkpoint(checkpoint)["step"]  # of all starts
            self.trained_tokens = done * rows * ids.shape[1]
            self.text_tokens = ids.numel()
            self.parameters = sum(each.numel() for each in module.parameters())
            weights = module.weights()
            if recipe.kind != "healed" and len(frequent) < self.opened.vocabulary:
                weights[TOKENS] = frequent.int()
            trained = save_trained(path, weights, recipe.kind, model)
        low = self.skip.low
        if low is None and trained.module and self.opened.execution == "native":
            low = ROUNDED_MODULE
        skip = replace(
            self.skip,
            trained=trained,
            low=low,
            num_layers=None,
            model=getattr(model, "name_or_path", None) or None,
            model_hash=trained.base,
            decoding=DecodingOptions(lookup=True),
        )
        skip.save(self.folder / TRAINED_FILE)
        processes.wait()
        return skip

    def _frequent(self, texts: list[data.Text]) -> Tensor:
        """The tokens that the loss looks at: the answers' most frequent, (n,)."""
        answers = [text.ids[text.prompt :] for text in texts]
        every = ranked(answers, self.opened.vocabulary)
        counts = torch.zeros(self.opened.vocabulary, dtype=torch.long)
        for answer in answers:
            counts += torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(counts))
        frequent = every[: self.recipe.vocabulary]
        self.covered = int(counts[frequent].sum()) / max(1, int(counts.sum()))
        self.say(f"the loss looks at {len(frequent):,} tokens, {self.covered:.1%} of the answers'")
        return frequent.sort().values

    def _loss(self, module: Student, laws: Laws, ids: Tensor, step: int) -> Tensor:
        numbers = windows_of(len(ids), self.recipe.rows, step, self.recipe.seed)
        numbers = numbers[processes.rank() :: processes.count()]
        with self._autocast():
            batch = self._batch(laws, ids, numbers)
            return laws.distance(module.made(batch), batch)

    def _measure(self, module: Student, laws: Laws, ids: Tensor, apart: range, tokens: int) -> None:
        with self._autocast():
            batches = (self._batch(laws, ids, [number]) for number in apart)
            self.curve.measure(tokens, module, laws, batches)

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self.opened.device
        half = half_is_fast(device)
        return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()

    def _batch(self, laws: Laws, ids: Tensor, numbers: list[int]) -> Batch:
        """What is learned from the windows of those numbers."""
        device = self.opened.device
        some, folder = ids[numbers].to(device), self.work / "features"  # (B, T)
        states, tapped = features.states_of(folder, numbers).to(device), None
        if self.tap is not None:
            tapped = features.states_of(folder, numbers, features.TAPPED).to(device)
        return laws.batch(some, states, tapped)


def half_is_fast(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """No gradients for a model's own weights meanwhile."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
