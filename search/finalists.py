"""The best few drafts of a study: replayed whole, then timed in turn with plain decoding.

They are priced anew as decoding prices them, predicted for held-out prompts, and confirmed on these
by the clock, which names the winner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from optuna import Study
from optuna.trial import FrozenTrial
from torch import Tensor

from layerskip.bench.methods import Engine, Task
from layerskip.bench.runner import decoded_records
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.ratios import decoding_totals, times_over
from layerskip.costs.speculation import CostTable
from layerskip.decoding.engine import Request
from layerskip.decoding.sources.lookup import Lookup
from layerskip.replay.drafts import Replay, replay
from layerskip.replay.trace import Trace
from layerskip.search.objective import Choice, LookedUp, Objective, best_choice, choices, speedup
from layerskip.search.sampler import finished_sets, read_history
from layerskip.search.space import Space
from layerskip.timing.tables import analytic, cost_tables

MORE = 2
"""So many more configs are replayed whole than finalists are wanted."""
PRICING_SECONDS = 2.0
"""For the costs of a finalist: sweeps of a large model take long."""

DEFAULT = "default"
"""What the method is called that drafts as `generate` does unasked."""

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Is called with what is being done, in words, and the share of it that is done."""


def silent(_what: str, _share: float) -> None:
    """The progress of a search that nobody watches."""


def within(items: Iterable[T], until: float) -> Iterator[tuple[int, T]]:
    """Items and their numbers: the first, and others while there is time for them.

    None that would end after `until` (of `time.monotonic`), if it took as long as the longest.
    """
    longest = 0.0
    for number, item in enumerate(items):
        began = time.monotonic()
        if number and began + longest > until:
            return
        yield number, item
        longest = max(longest, time.monotonic() - began)


@dataclass(slots=True)
class Finalist:
    """A config that is worth timing.

    Attributes:
        name: of the method that it is timed as.
        trial: number of its trial in the study; None of the default draft, which is no trial's.
        skip: resolved, with decoding options and costs.
        drafts: its replay along the traced prompts.
        costs, looked_up: what rounds of it cost, and of lookups.
        predicted_held_out: speedup over plain decoding of the same options on held-out prompts.
        confirmed: what the clock said: the block of a search file.
    """

    name: str
    trial: int | None
    skip: SkipConfig
    drafts: Replay
    choice: Choice
    costs: CostTable
    looked_up: CostTable
    predicted_held_out: float | None = None
    confirmed: dict[str, Any] | None = None

    @property
    def alpha(self) -> float:
        """Probability that the first token of a draft is accepted, on the traced prompts."""
        return self.drafts.survival[0]

    @property
    def predicted(self) -> float:
        """Speedup over plain decoding of whole replays, on the traced prompts."""
        return self.choice.speedup

    @property
    def price(self) -> float:
        """The speedup predicted on held-out prompts, or, where there are none, on the traced."""
        return self.predicted if self.predicted_held_out is None else self.predicted_held_out

    def decide(self, looked_up: Replay) -> None:
        """Choose how to decode, by the costs that it has, perhaps with lookups."""
        ways = choices(self.drafts, self.costs, LookedUp(looked_up, self.looked_up))
        self.choice = best_choice(ways[1:])  # of those that draft
        tokens = self.skip.draft_vocabulary
        self.skip = replace(
            self.skip,
            decoding=replace(self.choice.decoding, draft_vocabulary=tokens),
            costs={**(self.skip.costs or {}), **self.costs.to_dict()},
        )


def choose(
    study: Study,
    space: Space,
    objective: Objective,
    count: int,
    progress: Progress = silent,
    until: float = math.inf,
) -> list[Finalist]:
    """The configs of the highest predicted speedup by whole replays, best first.

    The best early exit of the study is among them, as one more where it is none of the best, and so
    is, in a space with healed weights, the best config that has them. Configs that skip nothing are
    not: plain decoding is timed anyway. None but the first is replayed where it would end after
    `until` (of `time.monotonic`).
    """
    trials = finished_sets(study.get_trials(deepcopy=False))
    trials.pop(0, None)
    scores = read_history(study).scores
    ranked = sorted(trials, key=lambda mask: -scores[mask])
    exits = {space.exit_mask(layer) for layer in range(1, space.num_layers)}
    kinds = (exits.__contains__, lambda mask: space.skip_config(mask).trained is not None)

    def best_of(masks: Sequence[int], many: int) -> list[int]:
        """So many of the first, and the first of each kind."""
        firsts = [next(filter(kind, masks), None) for kind in kinds]
        return [mask for n, mask in enumerate(masks) if n < many or mask in firsts]

    looked_at = best_of(ranked, count + MORE)
    finalists: dict[int, Finalist] = {}
    for number, mask in within(looked_at, until):
        progress("the best drafts, replayed whole", number / len(looked_at))
        finalists[mask] = _finalist(trials[mask], space, mask, objective)
    best = sorted(finalists, key=lambda mask: -finalists[mask].predicted)
    return [finalists[mask] for mask in best_of(best, count)]


def _finalist(trial: FrozenTrial, space: Space, mask: int, objective: Objective) -> Finalist:
    skip = space.skip_config(mask)
    size = trial.user_attrs.get("draft_vocabulary")
    depth = next((e for e in range(1, space.num_layers) if space.exit_mask(e) == mask), None)
    name = f"trial-{trial.number}" if depth is None else f"exit-{depth}"
    origin = str(trial.user_attrs.get("origin")).removeprefix("seed:")
    if space.bits and origin.startswith(f"{space.bits}-bits"):
        name = origin  # a warm start that says what it is
    return _replayed(name, trial.number, skip, size, objective.costs(skip, size), objective)


def default_draft(skip: SkipConfig, objective: Objective) -> Finalist:
    """What drafts without a search, to be timed too; its costs are a guess until `price_again`."""
    model = objective.trace.model
    skip = skip.resolve(model.num_layers)
    return _replayed("before", None, skip, None, analytic(model, skip), objective)


def _replayed(
    name: str,
    trial: int | None,
    skip: SkipConfig,
    size: int | None,
    costs: CostTable,
    objective: Objective,
) -> Finalist:
    """A finalist with a draft vocabulary of a size, as the costs given say that it decodes best."""
    drafts = replay(objective.trace, skip, allowed=objective.allowed(size))
    tokens = None if size is None else objective.vocabulary(size)
    where = {"batch_size": 1, "draft_vocabulary": size or objective.trace.model.vocabulary}
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


def price_again(finalist: Finalist, looked_up: Replay, request: Request) -> None:
    """Take the costs that decoding would measure for a request of one row, and decide anew.

    A search prices hundreds of drafts by their parts; a few can be timed as they run.
    """
    model, tokens = finalist.drafts.trace.model, finalist.skip.draft_vocabulary
    if tokens is not None:
        model = model.trimmed(tokens)
    context = int(request.input_ids.shape[1])
    drafts: list[SkipConfig | Lookup] = [Lookup(), finalist.skip]
    costs = cost_tables(model, drafts, request, seconds=PRICING_SECONDS)
    if costs[1].at(context).source == "measured":
        finalist.looked_up, finalist.costs = (each.at(context) for each in costs)
        finalist.decide(looked_up)


def predict(finalist: Finalist, trace: Trace) -> float:
    """Speedup over plain decoding that a finalist's options are expected to bring on a trace."""
    skip, how = finalist.skip, finalist.choice.decoding
    allowed = None
    if skip.draft_vocabulary is not None:
        allowed = torch.zeros(len(trace.texts), trace.model.vocabulary, dtype=torch.bool)
        allowed[:, skip.draft_vocabulary] = True
    drafts = replay(trace, skip, how.max_draft_length, allowed=allowed)
    looked_up = replay(trace, Lookup(), how.max_draft_length)
    return speedup(drafts, finalist.costs, how, LookedUp(looked_up, finalist.looked_up))


def confirm(
    model: Any,
    task: Task,
    finalists: Sequence[Finalist],
    prompts: Sequence[Tensor],
    *,
    default: SkipConfig | None,
    repeats: int,
    until: float = math.inf,
    progress: Progress = silent,
) -> tuple[float, dict[str, Any]]:
    """Time finalists, the default and plain decoding in turn; fills in `confirmed`.

    Times are of decoding, from the first new token on: no draft changes what a prompt costs.

    Args:
        default: what drafts unasked, beside lookups; None: lookups only.
        until: of `time.monotonic`, when to end after a whole number of repeats, one at least.

    Returns:
        Plain decoding's tokens per second, and the default's times.
    """
    methods = [Engine(model, task), Engine(model, task, DEFAULT, default, lookup=True)]
    for each in finalists:
        lookup = each.choice.decoding.lookup is True
        methods.append(Engine(model, task, each.name, each.skip, lookup=lookup))
    decoded = decoded_records(
        model, task, methods, prompts, repeats=repeats, until=until, note=progress
    )
    if not decoded:
        raise ValueError("every held-out text ends with its first token; give other prompts")
    plain = decoding_totals(decoded, "plain")
    usual = decoding_totals(decoded, DEFAULT)
    for finalist in finalists:
        totals = decoding_totals(decoded, finalist.name)
        finalist.confirmed = {
            **times_over(totals, plain),
            "over_default": times_over(totals, usual),
            "prompts": len(totals.tokens),
            "repeats": 1 + max(each["repeat"] for each in decoded),
            **_counts([each for each in decoded if each["method"] == finalist.name]),
        }
    return plain.rate, times_over(usual, plain)


def keeps_default(best: Finalist | None, default: Mapping[str, Any] | None) -> bool:
    """Whether the fastest is no faster than the default by more than prompts differ.

    Where nothing else gains, the default is kept if it does.
    """
    if default is None or best is None or best.confirmed is None:
        return best is None and default is not None and default["speedup"] > 1
    low = best.confirmed["over_default"]["low"]
    return low is None or low <= 1


def _counts(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a method drafted, and whether its texts were right, as a search file has them."""
    proposed, accepted = (
        sum(sum(map(sum, each["rounds"][name])) for each in records)
        for name in ("drafted", "accepted")
    )
    compared = [each for each in records if each["repeat"] == 0 and each["equal"] is not None]
    differing = [each["differences"] for each in compared if each["differences"]]
    near = [all(d["near_tie"] for d in places) for places in differing]
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
