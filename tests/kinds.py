"""Drafts of every trained kind for tiny models, and decoding with any of them in one call.

Their weights were never trained: near enough to the model's to be right now and then, and none of
them the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import Erratic, Fickle, Growing, near, ragged
from torch import Tensor

from layerskip import LayerSkipDecoding, LowPrecision, SkipConfig
from layerskip.config import Trained
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.model.blocks import ExitBlock, FeatureBlock, Heads, Layer, Streams
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import TOKENS, save_trained

RANK = 3
BLOCKS = ("exit-block", "feature-block", "heads", "streams")
HEALED: dict[str, SkipConfig] = {
    "healed, 8 bits": SkipConfig(low=LowPrecision()),
    "healed, 4 bits, head in 8, a layer out": SkipConfig(
        attention=(1,), mlp=(1,), low=LowPrecision(bits=4, head=8)
    ),
    # what comes first is exact, so that the target's own passes go on from there
    "healed behind a prefix, head exact": SkipConfig(
        attention=(2,), low=LowPrecision(bits=4, attention=(1,), mlp=(1, 2), head=False)
    ),
    "healed in 8 bits, head in 4, from an MLP on": SkipConfig(
        low=LowPrecision(attention=(1, 2), head=4)
    ),
}
ROUNDED = "feature-block in 8 bits"
KINDS = (*HEALED, *BLOCKS, ROUNDED, "assistant")
"""All but the assistant are what a skip config names, of a model of three layers at least."""


def deltas(model: Any, size: float = 0.05, seed: int = 0) -> dict[str, Tensor]:
    """For every linear of a tiny model, each about so large as a share of its weight."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, linear in Sublayers(model).weights.linears():
        rows, columns = linear.weight.shape
        scale = size * linear.weight.detach().float().std() / RANK**0.5
        found[f"{name}.a"] = torch.randn(RANK, columns, generator=generator).half()
        found[f"{name}.b"] = (torch.randn(rows, RANK, generator=generator) * scale).half()
    return found


def block_of(kind: str, model: Any, size: float = 0.2) -> Any:
    """A module that agrees with the model now and then; `size` says how far it was moved."""
    opened = Sublayers(model)
    generator = torch.Generator().manual_seed(1)
    if kind == "heads":
        block: Any = Heads(opened, 3)
        for weight in block.parameters():
            # mostly the token, of which a lively model thinks most
            weight.data.normal_(std=size, generator=generator)
            weight.data[:, len(weight) :] += 4 * torch.eye(len(weight), dtype=weight.dtype)
        return block
    built: Any = {"exit-block": ExitBlock, "feature-block": FeatureBlock, "streams": Streams}[kind]
    block = built(opened)
    if kind != "exit-block":  # which begin as nothing but a state that is passed on
        block.layer = Layer(opened)
        half = torch.eye(block.fuse.out_features, dtype=opened.dtype) / 2
        block.fuse.weight.data.copy_(half.repeat(1, 2))
    for weight in block.parameters():
        if weight.dim() > 1:
            shift = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.add_(shift * weight.data.std() * size)
    if kind == "streams":
        block.ahead.weight.data.normal_(std=size, generator=generator)
    return block


def weights_of(kind: str, model: Any, folder: Path) -> Trained:
    """Deltas ("healed") or a module for a model, written to a folder."""
    weights = deltas(model) if kind == "healed" else block_of(kind, model).state_dict()
    if kind in ("heads", "streams"):  # told few tokens apart: a sixth they may not draft
        weights[TOKENS] = torch.tensor(
            [n for n in range(model.config.get_text_config().vocab_size) if n % 6 != 2]
        )
    return save_trained(folder / f"{kind}.{id(model)}.safetensors", weights, kind, model)


def skip_of(kind: str, model: Any, folder: Path) -> SkipConfig:
    """The skip config of a draft of a kind, resolved; an exit block stands in the middle."""
    layers = len(model.model.layers)
    if kind in HEALED:
        healed = replace(HEALED[kind], trained=weights_of("healed", model, folder))
        return healed.resolve(layers)
    skip = SkipConfig.early_exit(layers // 2) if kind == "exit-block" else SkipConfig()
    if kind == ROUNDED:
        kind, skip = "feature-block", SkipConfig(low=LowPrecision(attention=(), mlp=()))
    return replace(skip, trained=weights_of(kind, model, folder)).resolve(layers)


def draft_of(kind: str, model: Any, folder: Path) -> SkipConfig | Assistant:
    """A draft of any kind, for the engine."""
    if kind == "assistant":
        return Assistant(Sublayers(near(model, 0.4)))
    return skip_of(kind, model, folder)


LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5},
    "history": {
        **{"do_sample": True, "top_p": 0.9, "top_k": 0, "seed": 6},
        **{"repetition_penalty": 1.1, "no_repeat_ngram_size": 4},
    },
}
CONTROLLERS: dict[str, Any] = {
    "fixed": lambda: "fixed",
    "expected-gain": lambda: "expected-gain",
    "erratic": lambda: Erratic(3),
    "fickle": lambda: Fickle(2),
    "growing": lambda: Growing(3),
}
COSTS = CostTable(0.15, (1.0, 1.05, 1.1))
LENGTHS = (11, 2, 5)  # the first is longer than a sliding window
FEW = 24  # tokens of a vocabulary, so that texts repeat some stretches
ENDS = [4, 9]


def prompts() -> tuple[Tensor, Tensor]:
    """Of few tokens, and their mask, (B, W) each."""
    ids, mask = ragged(LENGTHS, seed=3)
    return torch.where(mask.bool(), ids % (FEW - 2) + 2, 0), mask


def decoded(
    model: Any,
    drafts: Sequence[Any],
    law: str,
    controller: Any,
    execution: str,
    ended: bool = False,
    *,
    new: int,
    longest: int = 5,
) -> Any:
    """What `generate()` gives for the prompts."""
    how, (ids, mask) = dict(LAWS[law]), prompts()
    decoding = Several(
        drafts,
        COSTS,
        controller=controller,
        execution=execution,
        max_draft_length=longest,
        seed=how.pop("seed", None),
    )
    return model.generate(
        ids,
        attention_mask=mask,
        custom_generate=decoding,
        return_dict_in_generate=True,
        max_new_tokens=new,
        eos_token_id=ENDS if ended else None,
        pad_token_id=0,
        **how,
    )


class Several(LayerSkipDecoding):
    """Drafts from any drafts, of which the doors take one of each sort at most."""

    def __init__(self, drafts: Sequence[DraftOrSkip], costs: CostTable, **settings: Any) -> None:
        super().__init__(SkipConfig(), **settings)
        self.drafts = drafts
        self.tables = [
            replace(costs, draft=0.0) if isinstance(d, Source) and d.known else costs
            for d in drafts
        ]

    def decoder(self, model: Any, request: Request) -> tuple[Decoder, CostTable | None]:
        opened = Sublayers(model, self.execution)
        controller, longest = self.controller, self.max_draft_length or 9
        if isinstance(controller, str):
            controller = make_controller(
                controller,
                max_draft_length=self.max_draft_length,
                costs=self.tables,
                sampling=request.law.do_sample,
            )
        depth = opened.num_layers
        drafts = [d.resolve(depth) if isinstance(d, SkipConfig) else d for d in self.drafts]
        run = Decoder(opened, drafts, controller, request, max_draft_length=longest)
        return run, self.tables[-1]
