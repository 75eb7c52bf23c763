"""The best few of a study, looked at closely: replayed whole, then timed beside plain decoding.

Here is decided, too, whether a draft is joined by lookups. What a search found on calibration
prompts is priced anew as decoding prices it, promised for held-out prompts, and confirmed on them
by the clock; the winner is the clock's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from optuna import Study
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor

from layerskip.bench.batches import Batch
from layerskip.bench.decoded import decoding_totals
from layerskip.bench.methods import Engine, Task
from layerskip.bench.runner import benchmark
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.ratios import measured_speedup
from layerskip.costs.speculation import CostTable
from layerskip.decoding.engine import Request
from layerskip.decoding.lookup import Lookup
from layerskip.replay.drafts import Replay, look_up, replay
from layerskip.replay.trace import Trace
from layerskip.search.objective import (
    Choice,
    LookedUp,
    Objective,
    best_choice,
    choices,
    speedup,
)
from layerskip.search.sampler import claim
from layerskip.search.space import Space
from layerskip.timing.tables import analytic, measure

CANDIDATES = 2
"""So many more configs are replayed whole than finalists are wanted."""
PRICING_SECONDS = 2.0
"""For the costs of a finalist: sweeps of a large model take long."""

Progress = Callable[[str, float], None]


@dataclass(slots=True)
class Finalist:
    """A config that is worth timing.

    Attributes:
        name: of the method that it is timed as.
        trial: number of its trial in the study; None of a given draft that is no trial's.
        skip: resolved, with decoding options and costs.
        drafts: its replay along the traced prompts.
        choice: how to decode with it.
        costs, looked_up: what rounds of it cost, and of lookups.
        predicted: speedup over plain decoding of whole replays, on the traced prompts.
        predicted_held_out: the same of the same options on held-out prompts, where there are any.
        confirmed: what the clock said, where it was asked: the block of a search file.
    """

    name: str
    trial: int | None
    skip: SkipConfig
    drafts: Replay
    choice: Choice
    costs: CostTable
    looked_up: CostTable
    predicted_held_out: float | None = None
    confirmed: dict[str, Any] | None = field(default=None)

    @property
    def alpha(self) -> float:
        """Probability that the first token of a draft is accepted, on the traced prompts."""
        return self.drafts.survival[0]

    @property
    def predicted(self) -> float:
        return self.choice.speedup

    def decide(self, looked_up: Replay) -> None:
        """Choose how to decode, by the costs that it has.

        Args:
            looked_up: what lookups draft along the traced prompts.
        """
        found = choices(self.drafts, self.costs, LookedUp(looked_up, self.looked_up))
        self.choice = best_choice(found[1:])  # of those that draft
        assert self.skip.decoding is not None
        tokens = self.skip.draft_vocabulary
        self.skip = replace(
            self.skip,
            decoding=replace(self.choice.decoding, draft_vocabulary=tokens),
            costs={**(self.skip.costs or {}), **self.costs.to_dict()},
        )

    @property
    def price(self) -> float:
        """The speedup predicted on held-out prompts, or, where there are none, on the traced."""
        return self.predicted if self.predicted_held_out is None else self.predicted_held_out


def choose(
    study: Study,
    space: Space,
    objective: Objective,
    count: int,
    progress: Progress = lambda _what, _share: None,
) -> list[Finalist]:
    """The configs of the highest predicted speedup by whole replays, best first.

    The best early exit of the study is among them, as one more where it is none of the best, and so
    is, in a space with healed weights, the best config that has them. Configs that skip nothing are
    not: plain decoding is timed anyway.
    """
    plain = 1.0 / objective.step_seconds

    def score(trial: FrozenTrial) -> float:
        assert trial.value is not None
        return trial.value if trial.value > plain else trial.user_attrs.get("guide", trial.value)

    trials: dict[int, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        mask = claim(trial, space)
        if mask:
            trials.setdefault(mask, trial)
    kinds = [{space.exit_mask(layer) for layer in range(1, space.num_layers)} & trials.keys()]
    if space.trained is not None:
        kinds.append({mask for mask in trials if space.skip_config(mask).trained})
    ranked = sorted(trials, key=lambda mask: -score(trials[mask]))
    looked_at = ranked[: candidates(count)]
    for kind in kinds:
        looked_at += [mask for mask in ranked if mask in kind][:1]
    found = []
    for number, mask in enumerate(dict.fromkeys(looked_at)):
        progress("the best drafts, replayed whole", number / len(looked_at))
        found.append((mask, _closely(trials[mask], space, mask, objective)))
    found.sort(key=lambda pair: -pair[1].predicted)
    best = [next((mask for mask, _ in found if mask in kind), None) for kind in kinds]
    return [
        finalist for number, (mask, finalist) in enumerate(found) if number < count or mask in best
    ]


def candidates(count: int) -> int:
    """How many configs are replayed whole where so many finalists are wanted."""
    return count + CANDIDATES


def _closely(trial: FrozenTrial, space: Space, mask: int, objective: Objective) -> Finalist:
    skip = space.skip_config(mask)
    size = trial.user_attrs.get("draft_vocabulary")
    costs = objective.costs(skip, size)
    drafts = replay(objective.trace, skip, allowed=objective.allowed(size))
    tokens = None if size is None else objective.vocabulary(size)
    depth = next((e for e in range(1, space.num_layers) if space.exit_mask(e) == mask), None)
    name = f"trial-{trial.number}" if depth is None else f"exit-{depth}"
    origin = str(trial.user_attrs.get("origin")).removeprefix("seed:")
    if space.bits and origin.startswith(f"{space.bits}-bits"):
        name = origin  # a seed that says what it is
    return _finalist(name, trial.number, skip, tokens, drafts, costs, objective)


def fixed(name: str, skip: SkipConfig, objective: Objective) -> Finalist:
    """A draft that is no config of a space; what it costs is a guess until `price_again`.

    Args:
        skip: perhaps with a draft vocabulary.
    """
    trace, tokens = objective.trace, skip.draft_vocabulary
    model = trace.model if tokens is None else trace.model.trimmed(tokens)
    skip = skip.resolve(model.num_layers)
    drafts = replay(trace, skip, allowed=_allowed(trace, tokens))
    return _finalist(name, None, skip, tokens, drafts, analytic(model, skip), objective)


def _finalist(
    name: str,
    trial: int | None,
    skip: SkipConfig,
    tokens: tuple[int, ...] | None,
    drafts: Replay,
    costs: CostTable,
    objective: Objective,
) -> Finalist:
    size = objective.trace.model.vocabulary if tokens is None else len(tokens)
    where = {"batch_size": 1, "draft_vocabulary": size}
    finalist = Finalist(
        name=name,
        trial=trial,
        skip=replace(
            skip,
            decoding=DecodingOptions(draft_vocabulary=tokens),
            costs={**costs.to_dict(), **objective.cost.get("place", {}), **where},
        ),
        drafts=drafts,
        choice=Choice(DecodingOptions(enabled=False), 1.0),
        costs=costs,
        looked_up=objective.looked_up.costs,
    )
    finalist.decide(objective.looked_up.replay)
    return finalist


def _allowed(trace: Trace, tokens: tuple[int, ...] | None) -> Tensor | None:
    """What a draft with a vocabulary of its own can draw on each text, (texts, V) bool."""
    if tokens is None:
        return None
    allowed = torch.zeros(len(trace.texts), trace.model.vocabulary, dtype=torch.bool)
    allowed[:, tokens] = True
    return allowed


def price_again(finalist: Finalist, looked_up: Replay, request: Request) -> None:
    """Take the costs that decoding would measure, and decide anew.

    A search prices hundreds of drafts by their parts; a few can be timed as they run.

    Args:
        looked_up: what lookups draft along the traced prompts.
        request: of one row, whose tokens and law are timed.
    """
    model, tokens = finalist.drafts.trace.model, finalist.skip.draft_vocabulary
    if tokens is not None:
        model = model.trimmed(tokens)
    context = int(request.input_ids.shape[1])
    drafts: list[SkipConfig | Lookup] = [Lookup(), finalist.skip]
    found = measure(model, drafts, request, context=context, budget=PRICING_SECONDS)
    if found is not None:
        finalist.looked_up, finalist.costs = found.tables()
        finalist.decide(looked_up)


def predict(finalist: Finalist, trace: Trace) -> float:
    """Speedup over plain decoding that a finalist's options are expected to bring on a trace."""
    skip, how = finalist.skip, finalist.choice.decoding
    allowed = _allowed(trace, skip.draft_vocabulary)
    drafts = replay(trace, skip, how.max_draft_length, allowed=allowed)
    looked_up = look_up(trace, Lookup(), how.max_draft_length)
    return speedup(drafts, finalist.costs, how, LookedUp(looked_up, finalist.looked_up))


def confirm(
    model: Any,
    task: Task,
    finalists: Sequence[Finalist],
    batches: Sequence[Batch],
    *,
    repeats: int,
    progress: Progress = lambda _what, _share: None,
) -> float:
    """Time finalists and plain decoding in turn on the same prompts; fills in `confirmed`.

    Times are of decoding, from the first new token on: no draft changes what a prompt costs.

    Returns:
        Plain decoding's tokens per second.
    """
    methods = [Engine(model, task)]
    methods += [
        Engine(
            model,
            task,
            finalist.name,
            finalist.skip,
            lookup=finalist.choice.decoding.lookup is True,
        )
        for finalist in finalists
    ]
    found: list[dict[str, Any]] = []
    benchmark(
        model, task, methods, batches, repeats=repeats, warmup=1, write=found.append, note=progress
    )
    # a text that ended with its first token tells nothing of decoding
    decoded = [each for each in found if sum(each["new_tokens"]) > sum(each["first_tokens"])]
    if not decoded:
        raise ValueError("every held-out text ends with its first token; give other prompts")
    plain = decoding_totals(decoded, "plain")
    for finalist in finalists:
        own = decoding_totals(decoded, finalist.name)
        faster, low, high = measured_speedup(own, plain)
        finalist.confirmed = {
            "speedup": faster,
            "low": None if np.isnan(low) else low,
            "high": None if np.isnan(high) else high,
            "tokens_per_second": own.rate,
            "prompts": len(own.tokens),
            "repeats": repeats,
            **_counts([each for each in decoded if each["method"] == finalist.name]),
        }
    return plain.rate


def _counts(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a method drafted, and whether its texts were right, as a search file has them."""
    proposed, accepted = (
        sum(sum(map(sum, each["rounds"][name])) for each in records)
        for name in ("drafted", "accepted")
    )
    compared = [each for each in records if each["repeat"] == 0 and each["equal"] is not None]
    near = [d["near_tie"] for each in compared for d in each["differences"]]
    return {
        "acceptance_rate": accepted / proposed if proposed else None,
        "compared": len(compared),
        "equal": len(compared) - len(near),
        "near_ties": sum(near),
        "faults": len(near) - sum(near),
    }


def winner(finalists: Sequence[Finalist]) -> Finalist | None:
    """The fastest that gains, on the clock or, where none was timed, by its price; None: plain."""
    gaining = [finalist for finalist in finalists if gains(finalist)]
    return max(
        gaining,
        key=lambda each: each.confirmed["speedup"] if each.confirmed else each.price,
        default=None,
    )


def gains(finalist: Finalist) -> bool:
    """Whether a draft is taken to be faster than plain decoding.

    Price and clock must both say so, or the clock's interval exclude 1: of several drafts that gain
    nothing, noise makes one look faster. What was not timed is believed its price.
    """
    price, timed = finalist.price > 1.0, finalist.confirmed
    if timed is None:
        return price
    sure = timed["low"] is not None and timed["low"] > 1.0
    return sure or (price and timed["speedup"] > 1.0)
