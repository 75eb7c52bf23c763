"""Names that users choose from, and the place of each name's class, by role.

A module is imported when its name is requested. So the core can offer what `layerskip.research`
contains without importing it. Installed packages add controllers and sources of drafts as entry
points in `GROUPS`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

ControllerName = Literal["fixed", "confidence", "adaptive-threshold", "expected-gain"]
CONTROLLERS: tuple[str, ...] = get_args(ControllerName)
"""Controllers that need nothing."""
LEARNT = ("disco",)
"""Controllers that need a classifier."""
WITH_THRESHOLD = ("confidence", "adaptive-threshold", "disco")
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

Role = Literal["controller", "source", "rule", "drafter", "loss", "module", "state"]
PLACES: dict[Role, dict[str, str]] = {
    "controller": {
        "fixed": "decoding.controllers:Fixed",
        "confidence": "decoding.controllers:Confidence",
        "adaptive-threshold": "decoding.controllers:AdaptiveThreshold",
        "disco": "research.disco:Disco",
        "expected-gain": "decoding.expected_gain:ExpectedGain",
        "expected-gain-trees": "research.trees:TreeGain",
    },
    "source": {
        "logit-lookup": "research.logit_lookup:LogitLookup",
        "running-ahead": "research.running_ahead:running_ahead",
    },
    "rule": {"spectr": "research.spectr:SPECTR"},
    "drafter": {"medusa": "research.medusa:load_medusa"},
    "loss": {
        "lk": "training.losses:lk",
        "kl": "research.published_losses:kl",
        "tvd++": "research.published_losses:tvd_plus",
        "ce": "training.losses:ce",
    },
    "module": {
        "exit-block": "research.blocks:ExitBlock",
        "heads": "model.draft_modules:Heads",
        "streams": "research.blocks:Streams",
    },
    "state": {
        "exit-block": "research.blocks:ExitState",
        "heads": "decoding.sources.sublayer_draft:HeadsState",
        "streams": "research.blocks:StreamsState",
    },
}


GROUPS: dict[Role, str] = {"controller": "layerskip.controllers", "source": "layerskip.sources"}
"""Groups of entry points, whose names join those of this package."""


def installed(role: Role) -> dict[str, EntryPoint]:
    """What installed packages add to a role, by name. None of it is imported."""
    points = entry_points(group=GROUPS[role]) if role in GROUPS else ()
    return {point.name: point for point in points if point.name not in PLACES[role]}


def names(role: Role) -> tuple[str, ...]:
    """The names of a role that users choose from."""
    own = CONTROLLERS + LEARNT if role == "controller" else PLACES[role]
    return (*own, *installed(role))


def named(role: Role, name: str) -> Any:
    """Import and return the object that a name stands for.

    Raises:
        ValueError: there is no such name, or what another package installed cannot be imported.
    """
    if name in PLACES[role]:
        module, _, attribute = PLACES[role][name].partition(":")
        return getattr(import_module(f"layerskip.{module}"), attribute)
    point = installed(role).get(name)
    if point is None:
        raise ValueError(f"{role} must be one of {', '.join(names(role))}, got {name!r}")
    try:
        return point.load()
    except Exception as error:  # it is another package's code
        raise ValueError(
            f"the {role} {name} ({point.value}) of an installed package cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
