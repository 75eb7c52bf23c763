"""The results of a search as JSON values, in the form of a search file: trials and finalists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna import Study
from optuna.trial import TrialState

from layerskip.bench.methods import sets_of
from layerskip.search.finalists import Finalist
from layerskip.search.space import Space
from layerskip.search.study import value_of

if TYPE_CHECKING:
    from layerskip.search.pipeline import Search


def trials_table(study: Study, space: Space) -> list[dict[str, Any]]:
    """The trials that ended, in the form of a search file."""
    rows = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
        row: dict[str, Any] = {"number": trial.number, "origin": trial.user_attrs.get("origin")}
        if trial.state is TrialState.FAIL:
            rows.append({**row, "state": "failed"})
            continue
        mask, worth = space.from_params(trial.params), trial.user_attrs["worth"]
        seconds = trial.duration.total_seconds() if trial.duration else None
        rows.append(
            {
                **row,
                "state": "complete",
                **sets_of(space.skip_config(mask)),
                "draft_vocabulary": space.number("vocabulary", mask),
                "speedup": value_of(trial),
                **{name: each for name, each in worth.items() if name != "value"},
                "seconds": seconds,
            }
        )
    return rows


def _finalist_row(finalist: Finalist) -> dict[str, Any]:
    skip, decoding = finalist.skip, finalist.decoding
    names = ("controller", "max_draft_length", "threshold", "adaptive")
    return {
        "name": finalist.name,
        "trial": finalist.trial,
        **sets_of(skip),
        "decoding": {
            **{name: getattr(decoding, name) for name in names},
            "lookup": decoding.lookup is True,
        },
        "draft_vocabulary": skip.draft_vocabulary and len(skip.draft_vocabulary),
        "alpha": finalist.alpha,
        "draft_cost": finalist.costs.draft,
        "verify": list(finalist.costs.verify),
        "predicted": finalist.predicted,
        "predicted_low": finalist.low,
        "predicted_high": finalist.high,
        "confirmed": finalist.confirmed,
    }


def search_record(search: Search) -> dict[str, Any]:
    """The search file, except for parts known to its writer: the header and the prompts' names."""
    exits = {f"exit-{layer}" for layer in range(1, search.space.num_layers)}
    names = [finalist.name for finalist in search.finalists]
    step, switches = search.objective.prices.step, len(search.space.switches) or 1
    return {
        "space": {
            **search.space.to_dict(),
            "parts": sorted(search.parts),
            "switches": switches,
            "size": search.space.size,
        },
        "sampler": search.sampler,
        "trace": {
            "texts": len(search.trace.texts),
            "starts": search.trace.starts,
            "draft_length": search.trace.draft_length,
        },
        "influence": search.influence,
        "cost": search.objective.cost,
        "step_seconds": step,
        "bound": search.bound,
        "trials": trials_table(search.study, search.space),
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
