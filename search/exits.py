"""How often each early exit is right, and what it would gain here: `layerskip check --exits`.

Every exit is a trial of a search, along greedy and along sampled texts. Where the model drafts in 8
bits by default, that is tried too, and so is the exit that promises most in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from layerskip.api.drafts import automatic_draft
from layerskip.api.own_exits import POSITIONS as ENOUGH
from layerskip.api.own_exits import agreement_of
from layerskip.bench.methods import Task
from layerskip.costs.speculation import best_length
from layerskip.model.opened_models import open_model
from layerskip.model.whole import Whole
from layerskip.search.finalists import Progress, silent
from layerskip.search.objective import extended
from layerskip.search.pipeline import Search
from layerskip.search.space import Space

POSITIONS = 128
"""Maximum number of tokens, along the greedy texts and along the sampled ones."""


def check_exits(
    model: Any, prompts: Sequence[Tensor], task: Task, *, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Draft with every early exit along the model's own texts, and predict its gain.

    An exit's token is read by the model's last norm and head. It is right if it is the token that
    the model emits: the likeliest, or in sampling the one that is drawn with the same noise.

    Args:
        prompts: token ids without pads, (T,) or (1, T) each.
        task: how the sampled texts are decoded; text i uses its seed + i.

    Returns:
        For each exit, then for the drafts in 8 bits: `exit` (None: the whole model) and `bits`;
        by law ("greedy", "sampled") `positions`, `right`, the share of its tokens that are, and
        `gain`, the predicted speedup over plain decoding; the `cost` of its step, in plain ones;
        and the `spread` of the costs.

    Raises:
        ValueError: the model has no early exits; or as for `Search`.
    """
    opened = open_model(model, task.execution)
    if isinstance(opened, Whole):
        raise ValueError(opened.refusal("no early exit of it can be read"))
    if opened.num_layers < 2:
        raise ValueError("a model of one layer has no early exit")
    bits: Any = 8 if automatic_draft(opened).skip is not None else None
    space, cost = Space(kind="exit", num_layers=opened.num_layers, bits=bits), None
    greedy = Task(task.max_new_tokens, seed=task.seed, execution=task.execution)
    values = {}
    for name, law in (("greedy", greedy), ("sampled", task)):
        how: dict[str, Any] = {"task": law, "space": space, "parts": frozenset()}
        steps = Search(model, prompts, positions=POSITIONS, progress=progress, **how)
        steps.open()
        steps.price(cost)
        values[name], cost = steps.objective, steps.objective.cost

    def tried(layer: int | None, low: bool = False) -> dict[str, Any]:
        mask = 0 if layer is None else space.exit_mask(layer)
        found = {
            name: value(space.low_mask(mask) if low else mask) for name, value in values.items()
        }
        return {
            "exit": layer,
            "bits": bits if low else None,
            "positions": {name: each.positions for name, each in found.items()},
            "right": {name: each.acceptance for name, each in found.items()},
            "cost": found["greedy"].draft_cost,
            "gain": {name: each.value for name, each in found.items()},
            "spread": values["greedy"].cost["spread"],
        }

    def promise(exact: dict[str, Any]) -> float:
        """Its gain in 8 bits, if these change no token."""
        costs = values["greedy"].prices.table(space.low_mask(space.exit_mask(exact["exit"])))
        shares = exact["right"].values()
        return fmean(best_length(extended(share, share), costs)[0] for share in shares)

    drafts = []
    for layer in range(1, opened.num_layers):
        progress("drafting with every exit", layer / opened.num_layers)
        drafts.append(tried(layer))
    if (positions := drafts[0]["positions"]["greedy"]) >= ENOUGH:  # the plan asks no more
        counts = {each["exit"]: round(each["right"]["greedy"] * positions) for each in drafts}
        agreement_of(opened).replace(positions, counts)
    if bits is None:
        return drafts
    best = max(drafts, key=promise)["exit"]
    return [*drafts, tried(best, low=True), tried(None, low=True)]
