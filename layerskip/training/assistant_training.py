"""Training an official assistant of Gemma 4 (see `layerskip.model.assistants`).

The target is frozen and reads each text once. From every place the assistant drafts a few tokens:
each step gets the text's token, since only drafts that were right so far matter, and the h of the
previous step. Its distributions are brought closer to the target's.
Shapes: B texts, T tokens of one, S steps, P = T - S places, H the target's width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from layerskip.backends.base import logit_transform
from layerskip.cache.rows import additive, causal
from layerskip.decoding.sources.official import Official
from layerskip.files.writing import replacing_folder
from layerskip.library import cache_name
from layerskip.model.assistants import load_assistant
from layerskip.model.draft_modules import AHEAD
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import Sublayers
from layerskip.training import processes
from layerskip.training.draft_training import Recipe, Training
from layerskip.training.losses import Step
from layerskip.training.stages import Texts


@dataclass(frozen=True)
class TargetReading:
    """The target's results that an assistant reads, for texts (B, T).

    Attributes:
        embedded: embeddings of the tokens, (B, T, H).
        states: after the final norm, (B, T, H).
        logits: with the softcap, (B, T, V).
        keys: by layer type, keys and values of the last layer that writes them, (B, G, T, D) each.
    """

    embedded: Tensor
    states: Tensor
    logits: Tensor
    keys: dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def read(target: OpenedModel, ids: Tensor) -> TargetReading:
    """Run a Gemma 4 once over texts (B, T)."""
    cache: Any = DynamicCache()  # without a config, every layer keeps all keys
    name = cache_name(target.decoder)
    assert name is not None
    out = target.decoder(ids, **{name: cache}, use_cache=True)
    states: Tensor = out.last_hidden_state
    with torch.autocast(ids.device.type, enabled=False):  # laws need more than half precision
        logits = target.unembedding(states.to(target.dtype)).float()
    finish = logit_transform(target)
    last = {part.kind: cache.layers[part.number] for part in target.parts if part.writes}
    keys = {kind: (layer.keys, layer.values) for kind, layer in last.items()}
    return TargetReading(
        embedded=target.embed(ids),
        states=states,
        logits=logits if finish is None else finish(logits),
        keys=keys,
    )


def unrolled(assistant: Any, reading: TargetReading, steps: int) -> list[Tensor]:
    """Logits (B, P, V) of each step; those of step s and place t are for token t + s + 2."""
    embedded = reading.embedded.to(assistant.dtype)
    places, config = embedded.shape[1] - steps, assistant.model.config
    latest = torch.arange(places, device=embedded.device)  # last tokens that are seen, (P,)
    masks = {}  # (1, 1, P, P) each
    for kind in reading.keys:
        window = config.sliding_window if kind == "sliding_attention" else None
        masks[kind] = additive(causal(latest[None], latest, window), assistant.dtype)
    keys = {
        kind: tuple(part[:, :, :places].to(assistant.dtype) for part in both)
        for kind, both in reading.keys.items()
    }
    state, found = reading.states[:, :places].to(assistant.dtype), []
    for step in range(steps):
        token = embedded[:, step + 1 : step + 1 + places]
        logits, state = assistant.step(token, state, keys, masks, latest[None] + 1)
        found.append(logits.float())
    return found


def draft_steps(drafted: list[Tensor], reading: TargetReading) -> list[Step]:
    """The unrolled steps with the target's logits for the same tokens, (B, P, V) each."""
    count = drafted[0].shape[1]
    return [
        (logits, reading.logits[:, step + 1 : step + 1 + count], None)
        for step, logits in enumerate(drafted)
    ]


class AssistantTraining(Training):
    """Trains an assistant further in a folder, on the target's answers or on given texts.

    The assistant and its record are kept in the folder, under the name of the kind.

    Args:
        start: the assistant's checkpoint: a folder or a Hub id.
        opened, texts, recipe, folder, reporting: as for `Training`.

    Raises:
        ValueError: the folder holds another training, or the assistant is another model's.
    """

    kind = "assistant"

    def __init__(
        self,
        start: str | None,
        opened: OpenedModel,
        texts: Texts,
        recipe: Recipe,
        folder: Path,
        **reporting: Any,
    ) -> None:
        self.start: Any = start
        self.check(opened)  # rejects a wrong start now, not in an hour
        super().__init__(opened, texts, replace(recipe, kind=self.kind), folder, **reporting)

    def check(self, opened: OpenedModel) -> None:
        """Raise an error for a start that does not fit the model."""
        loaded = load_assistant(self.start, dtype=opened.dtype).to(opened.device)
        Official(opened, Sublayers(loaded, "modules"))

    def initial(self, windows: Tensor) -> Any:
        """The assistant at the beginning of training on windows (N, T + 1)."""
        return load_assistant(self.start)

    def steps_on(self, assistant: Any, ids: Tensor) -> list[Step]:
        """Its steps over texts (B, T)."""
        reading = read(self.opened, ids)
        return draft_steps(unrolled(assistant, reading, AHEAD), reading)

    def save(self, assistant: Any, folder: Path) -> None:
        """Write the checkpoint to a folder atomically."""
        with replacing_folder(folder) as partial:
            assistant.save_pretrained(partial)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"start": self.start}

    def run_all(self) -> dict[str, Any]:
        """Run all stages; only the first process returns the record as long as it is new."""
        if done := self.finished(f"{self.kind}.json"):
            return done
        windows = self.windows()
        assistant = self.initial(windows).to(self.opened.device)
        dtype, assistant = assistant.dtype, assistant.float()
        # Measuring the last point of the curve takes no longer than a few steps.
        self._train(assistant, windows, lambda ids: self.steps_on(assistant, ids), judging=0.0)
        if not processes.is_first():
            return {}
        self.save(assistant.to(dtype), self.folder / self.kind)
        record = {
            "recipe": self.recipe.to_dict(),
            "start": self.start,
            "model": getattr(self.opened.model, "name_or_path", None) or None,
            **{name: self.facts[name] for name in ("tokens", "text_tokens", "seconds")},
            "overlap": {"before": self.curve[0]["overlap"], "after": self.curve[-1]["overlap"]},
        }
        return self.finish(f"{self.kind}.json", record)
