"""Names that users choose from, and the place of each name's class.

A module is imported when its name is requested. So the core can offer what `layerskip.research`
contains without importing it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, get_args

ControllerName = Literal["fixed", "confidence", "adaptive-threshold", "expected-gain"]
CONTROLLERS: tuple[str, ...] = get_args(ControllerName)
WITH_THRESHOLD = ("confidence", "adaptive-threshold")
"""Controllers that have a threshold."""
ADAPTIVE = {"alpha": 0.9, "epsilon": 0.01, "beta1": 0.5, "beta2": 0.9}
"""Parameters of `adaptive-threshold`, with the values in Draft & Verify's published code."""

LossName = Literal["lk", "kl", "tvd++", "ce"]
TrainedKind = Literal["exit-block", "heads", "streams"]
TRAINED: dict[str, str] = {
    "exit-block": "a trained block",
    "heads": "trained heads",
    "streams": "trained streams",
}
"""Kinds of trained modules, in words."""
REMOVED = {
    "healed": "leave `trained` out, which drafts without corrections, or train exits",
    "feature-block": "train its successor with `layerskip train --draft eagle3`",
}
"""Kinds that earlier versions trained, and what to use now."""
ALONE = ("heads", "streams")
"""Modules that draft without any of the model's sublayers."""
StudentName = Literal["exit-block", "heads", "streams", "assistant", "eagle3"]

Role = Literal["controller", "loss", "student", "module", "state"]
PLACES: dict[Role, dict[str, str]] = {
    "controller": {
        "fixed": "decoding.controllers:Fixed",
        "confidence": "decoding.controllers:Confidence",
        "adaptive-threshold": "decoding.controllers:AdaptiveThreshold",
        "expected-gain": "decoding.expected_gain:ExpectedGain",
        "expected-gain-trees": "research.trees:TreeGain",
    },
    "loss": {
        "lk": "training.losses:lk",
        "kl": "research.block_students:kl",
        "tvd++": "research.block_students:tvd_plus",
        "ce": "training.losses:ce",
    },
    "student": {
        "exit-block": "research.block_students:ExitStudent",
        "heads": "training.students:Student",
        "streams": "training.students:Student",
        "assistant": "training.students:Further",
        "eagle3": "training.students:Further",
    },
    "module": {
        "exit-block": "research.blocks:ExitBlock",
        "heads": "model.draft_modules:Heads",
        "streams": "research.blocks:Streams",
    },
    "state": {
        "exit-block": "research.block_states:ExitState",
        "heads": "decoding.sources.trained:HeadsState",
        "streams": "research.block_states:StreamsState",
    },
}


def named(role: Role, name: str) -> Any:
    """Import and return the object that a name stands for."""
    module, _, attribute = PLACES[role][name].partition(":")
    return getattr(import_module(f"layerskip.{module}"), attribute)
