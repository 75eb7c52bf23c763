"""The source that drafts with an official assistant, which reads the target's keys and values.

A step takes the newest token, embedded by the target, and a state h (at first the target's own,
after its final norm). It returns logits and the h of the next step. All steps of a round use the
newest token's position, and see the accepted tokens before it. They write nothing.
Shapes: B rows, T tokens of a pass, R rows of a pass, H hidden width of the target, W that of the
assistant, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.cache.rows import RowCache
from layerskip.decoding.sources.assistant import SecondModel
from layerskip.decoding.sources.base import Batch, State
from layerskip.families.architecture import read_bytes
from layerskip.families.family import LayerParts
from layerskip.model.opened_model import OpenedModel, Pass
from layerskip.weights.rounded import spread


class Official(SecondModel):
    """A Gemma 4 assistant (see `layerskip.model.assistants`).

    Raises:
        ValueError: it is another model's assistant, or its dtype or device differs.
    """

    what = "the model's official assistant"

    def __init__(
        self, target: OpenedModel, model: OpenedModel, tokens: Iterable[int] | None = None
    ) -> None:
        if reason := _misfit(target, model):
            raise ValueError(
                f"the assistant cannot draft for this model: {reason}; give the one made for it"
            )
        sources = _sources(target)
        self.sources = {part.keys: sources[part.kind].number for part in model.parts}
        self.module: Any = model.model  # with the library's names for its parts
        self.centroids = self.module.masked_embedding
        self.allowed: Tensor | None = None  # (V,) bool
        if tokens is not None and self.centroids is None:
            model = model.trimmed([*tokens])
        elif tokens is not None:
            self.allowed = torch.zeros(model.vocabulary, dtype=torch.bool, device=model.device)
            self.allowed[[*tokens]] = True
        self.model = model
        self.head = model.weights.head()

    def open(self, batch: Batch) -> State:
        return _OfficialState(batch, self)

    def step_bytes(self) -> Sequence[float]:
        module, ends = self.module, [self.module.pre_projection, self.module.post_projection]
        head = self.model.weights.head_bytes()
        if self.centroids is not None:
            ends += [module.model.norm, self.centroids.centroids]
            count = self.centroids.centroid_intermediate_top_k / self.centroids.num_centroids
            head = module.lm_head.weight.nbytes * count
        around = float(sum(read_bytes(each, None) for each in ends))
        return [*self.model.weight_bytes()["sublayers"], around, head]

    def key_bytes(self) -> Mapping[int | None, float]:
        return self.model.key_bytes()

    def compute(self, embedded: Tensor, state: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Raw logits (B, T, V) and the next h (B, T, H), from tokens and states (B, T, H)."""
        hidden = self.module.pre_projection(torch.cat([embedded, state], -1))  # (B, T, W)
        hidden = self.model.backend.run(hidden, step, self.model.blocks)
        normed = self.module.model.norm(hidden)
        raw = self.head(hidden, None) if self.centroids is None else self._of_candidates(normed)
        return raw, self.module.post_projection(normed)

    def _of_candidates(self, normed: Tensor) -> Tensor:
        """Logits (B, T, V) of the likeliest centroids' tokens, from (B, T, W); others are -inf."""
        centroids = self.centroids
        best = centroids.centroids(normed).topk(centroids.centroid_intermediate_top_k).indices
        by_centroid = centroids.token_ordering.view(centroids.num_centroids, -1)
        tokens = by_centroid[best].flatten(-2)  # (B, T, K)
        rows = self.module.lm_head.weight[tokens]  # (B, T, K, W)
        logits = (rows @ normed[..., None])[..., 0]  # (B, T, K)
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed[tokens], float("-inf"))
        return spread(logits, tokens, self.model.vocabulary)


class _OfficialState(State):
    whole_prompts = False

    def __init__(self, batch: Batch, source: Official) -> None:
        super().__init__(batch)
        self.source, model = source, source.model
        self.tap: int = batch.model.num_sublayers
        self.cache = RowCache(len(batch.seats), batch.cache.slots, model.windows)
        self.resized()
        self.cache.prefilled = True
        self.pass_: Pass  # of the round
        self.carried: Tensor  # h after the token fed last, (R, 1, H)

    def resized(self) -> None:
        batch = self.batch
        # One position before the newest token, so it sees the earlier ones at its own angle.
        self.rotary = self.source.model.rotary(batch.slots, batch.total, first=1)
        self.cache.slots = batch.cache.slots

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        batch, model = self.batch, self.source.model
        if not offset:
            self.cache.borrow(batch.cache, self.source.sources)
            self.cache.place(self.places(-1), 1)
            self.pass_ = Pass(model, self.cache, self.rotary)
            before = batch.tapped(self.tap, self.places(), 1, before=1)  # (R, 1, H)
            self.carried = batch.model.decoder.norm(before)
        raw, self.carried = self.source.compute(hidden, self.carried, self.pass_)
        return raw[:, 0]


def _misfit(target: OpenedModel, model: OpenedModel) -> str | None:
    """Why an assistant cannot draft for a model, or None if it can."""
    if reason := device_mismatch(target, model):
        return reason
    sources = _sources(target)
    made = model.model.config.backbone_hidden_size
    pairs = [("hidden states of {} numbers", made, target.config.hidden_size)]
    pairs.append(("{} tokens", model.vocabulary, target.vocabulary))
    for part in model.parts:
        if part.kind not in sources:
            return f"it reads keys of {part.kind} layers, the model has none"
        what = f"{part.kind} layers with heads of keys, width of them, and window {{}}"
        pairs.append((what, _shape(part), _shape(sources[part.kind])))
    return target_mismatch(pairs)


def device_mismatch(target: OpenedModel, draft: Any) -> str | None:
    """Why a draft's own weights do not match its target's dtype or device, or None."""
    made, needed = ((each.dtype, each.device) for each in (draft, target))
    if made == needed and not target.spread:
        return None
    where = "on several devices" if target.spread else f"{needed[0]} on {needed[1]}"
    return f"its weights are {made[0]} on {made[1]}, the model's {where}"


def target_mismatch(pairs: Iterable[tuple[str, Any, Any]]) -> str | None:
    """The first property in which a draft's intended target and its actual one differ, or None.

    Args:
        pairs: words with a placeholder, the value that the draft needs, the target's value.
    """
    for what, made, there in pairs:
        if made != there:
            return f"it is made for {what.format(made)}, the model has {there}"
    return None


def _sources(target: OpenedModel) -> dict[str, LayerParts]:
    """By kind, a model's last layer that has its own keys and values."""
    # A model that runs as a whole has no layers to read.
    return {part.kind: part for part in getattr(target, "parts", ()) if part.writes}


def _shape(part: LayerParts) -> tuple[int, int, int | None]:
    return *part.heads, part.window
