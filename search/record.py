"""What a search found as JSON values, as a search file holds them: trials and finalists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna import Study
from optuna.trial import TrialState

from layerskip.config import SkipConfig
from layerskip.search.finalists import Finalist
from layerskip.search.sampler import claimed, value_of
from layerskip.search.space import Space

if TYPE_CHECKING:
    from layerskip.search.stages import Search

_WORTH = ("acceptance", "max_draft_length", "threshold", "draft_vocabulary", "copy_of")


def trials_table(study: Study, space: Space, step_seconds: float) -> list[dict[str, Any]]:
    """The trials that ended, as a search file has them: values are tokens a second here."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        worth, mask = trial.user_attrs, claimed(trial)
        row: dict[str, Any] = {"number": trial.number, "origin": worth.get("origin")}
        if trial.state is TrialState.FAIL:
            rows.append({**row, "state": "failed"})
        if trial.state is not TrialState.COMPLETE or mask is None:
            continue
        skip, value, guide = space.skip_config(mask), value_of(trial), worth.get("guide")
        rows.append(
            {
                **row,
                "state": "complete",
                **_sets(skip),
                "value": value / step_seconds,
                "guide": None if guide is None else guide / step_seconds,
                "speedup": value,
                "forced_speedup": guide,
                "draft_cost": worth["draft_cost"],
                "controller": worth.get("controller", "plain"),
                "seconds": trial.duration.total_seconds() if trial.duration else None,
                **{name: worth.get(name) for name in _WORTH},
            }
        )
    return rows


def _finalist_row(finalist: Finalist) -> dict[str, Any]:
    skip, decoding = finalist.skip, finalist.choice.decoding
    names = ("controller", "max_draft_length", "threshold")
    return {
        "name": finalist.name,
        "trial": finalist.trial,
        **_sets(skip),
        "trained": None if skip.trained is None else skip.trained.words,
        "decoding": {
            **{name: getattr(decoding, name) for name in names},
            "lookup": decoding.lookup is True,
        },
        "draft_vocabulary": skip.draft_vocabulary and len(skip.draft_vocabulary),
        "alpha": finalist.alpha,
        "draft_cost": finalist.costs.draft,
        "verify": list(finalist.costs.verify),
        "predicted": finalist.predicted,
        "predicted_held_out": finalist.predicted_held_out,
        "confirmed": finalist.confirmed,
    }


def _sets(skip: SkipConfig) -> dict[str, Any]:
    skipped = {"attention": list(skip.attention), "mlp": list(skip.mlp)}
    low = skip.to_dict().get("low")
    return {"skipped": skipped, "low": low, "experts": skip.experts, "window": skip.window}


def search_record(search: Search) -> dict[str, Any]:
    """The search file, but for what its writer knows: header, and the prompts' names."""
    exits = {f"exit-{layer}" for layer in range(1, search.space.num_layers)}
    names = [finalist.name for finalist in search.finalists]
    step = search.objective.step_seconds
    switches = len(search.space.switches) or 1
    return {
        "space": {**search.space.to_dict(), "switches": switches, "size": search.space.size},
        "trace": {
            "texts": len(search.trace.texts),
            "starts": search.trace.starts,
            "draft_length": search.trace.draft_length,
        },
        "cost": search.objective.cost,
        "step_seconds": step,
        "bound": search.bound,
        "trials": trials_table(search.study, search.space, step),
        "finalists": [_finalist_row(finalist) for finalist in search.finalists],
        "plain": {
            "predicted_tokens_per_second": 1.0 / step,
            "confirmed_tokens_per_second": search.plain_tokens_per_second,
        },
        "default": search.default,
        "keep_default": search.keep_default,
        "best_exit": next((name for name in names if name in exits), None),
        "winner": None if search.winner is None else search.winner.name,
        "seconds": search.seconds,
    }
