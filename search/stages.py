"""The steps of one search on a live model: trace, study, costs, trials, finalists, result.

No files are written but the study's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from optuna import Study
from optuna.trial import TrialState
from torch import Tensor

from layerskip.bench.methods import Task
from layerskip.config import SINK, DecodingOptions, SkipConfig
from layerskip.costs.pricing import LOW_FACTS, low_facts
from layerskip.costs.speculation import speedup_bound
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.drafts import automatic_draft
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.exits import law_of
from layerskip.replay.trace import Trace, take_trace
from layerskip.requests import check_tokens, end_tokens
from layerskip.search import study, warm_starts
from layerskip.search.finalists import (
    MORE,
    PRICING_SECONDS,
    Finalist,
    Progress,
    choose,
    confirm,
    default_draft,
    gains,
    keeps_default,
    predict,
    price_again,
    silent,
    winner,
    within,
)
from layerskip.search.objective import Objective
from layerskip.search.record import search_record
from layerskip.search.space import Space
from layerskip.timing import sublayers as sublayer_costs
from layerskip.timing.sublayers import BUDGET
from layerskip.timing.tables import machine

TRIALS_PER_SWITCH = 6
"""Trials of a study of no stated length; the strategy asks for at least four."""
FEWEST_TRIALS = 60
FINALISTS = 3
REPEATS = 2
CHOOSING = 0.3, 0.4, 0.55
"""Shares of the time left after the trials by which the best are replayed, priced, predicted."""
PREFILL = 1.5
"""Times the decoding of a text is what timing it takes, with its prompt."""
ATTEMPTS, PATIENCE = 3, 40.0
"""So many measurements are made before a busy machine's are taken, or for so many seconds."""
FOR_COSTS = 0.1
"""Of the time left, what these get at most, but for the first."""

JUDGED = "finalists", "plain", "default", "keep_default", "best_exit", "winner"
"""What the clocks of two workers would say differently, by key of the record."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        skip: the config to decode with: the winner's; the default where that is as fast; one that
            drafts nothing where nothing was faster than plain decoding. `skip.notes` says what was
            measured.
        winner: the finalist whose config that is, if it is one's.
        finalists: best first by prediction.
        record: all of it as JSON values: what `layerskip report` reads, except for a header.
        healed: of a search around healed weights the best config that has them, to train further.
    """

    skip: SkipConfig
    winner: Finalist | None
    finalists: tuple[Finalist, ...]
    study: Study
    record: Mapping[str, Any]
    healed: SkipConfig | None = None


class Search:
    """The stages of one search, in the order of the methods; each leaves what it found.

    Args:
        traced: token ids of the calibration prompts, (T,) or (1, T) each.
        held_out: of the prompts that finalists are timed on; none: nothing is timed.
        until: of `time.monotonic`: what follows the trials does less of everything to end by then.

    Raises:
        ValueError: as `take_trace`, for held-out prompts, too; a space for another number of
            layers; compiled execution.
    """

    def __init__(
        self,
        model: Any,
        traced: Sequence[Tensor],
        held_out: Sequence[Tensor] = (),
        *,
        task: Task,
        space: Space,
        progress: Progress = silent,
        until: float = math.inf,
    ) -> None:
        self.until = until
        self.default: dict[str, Any] | None = None
        self.winner: Finalist | None = None
        self.keep_default = False
        if task.execution == "compiled":
            raise ValueError(
                "a search times sublayers one by one: execution must be auto, modules or fused, "
                "got 'compiled'; search with 'fused', and decode compiled with what it finds"
            )
        self.task, self.space, self.progress = task, space, progress
        self.law: Law = law_of(task.law)
        self.opened = Sublayers(model, execution=task.execution)
        self.model: Any = self.opened.model  # without an adapter library's wrapper
        if space.num_layers != self.opened.num_layers:
            raise ValueError(
                f"the space is for {space.num_layers} layers, the model has "
                f"{self.opened.num_layers}"
            )
        self.traced = [ids.reshape(1, -1).to(self.opened.device) for ids in traced]
        self.held_out = [ids.reshape(1, -1).to(self.opened.device) for ids in held_out]
        lengths = [ids.shape[1] for ids in self.held_out]
        if lengths:  # looked at again when all trials are done, which is late to refuse them
            if not min(lengths):
                raise ValueError("held-out prompts need at least one token each")
            self.opened.check_lengths(lengths, max(lengths) + task.max_new_tokens)
            for ids in self.held_out:
                check_tokens(self.model, ids)
        if space.trained is not None:
            self.opened.weights.deltas(space.trained)  # refused before anything slow is done
        self.seconds: dict[str, float | None] = {"cost": 0.0, "trials": 0.0, "confirm": None}
        self.finalists: list[Finalist] = []
        self.plain_tokens_per_second: float | None = None
        started = time.perf_counter()
        self.trace = self._trace(self.traced)
        self.seconds["trace"] = time.perf_counter() - started

    def _trace(self, prompts: Sequence[Tensor]) -> Trace:
        return take_trace(
            self.opened,
            prompts,
            max_new_tokens=self.task.max_new_tokens,
            law=self.law,
            seeds=[self.task.seed + number for number in range(len(prompts))],
            eos=end_tokens(self.model),
            acceptance=self.task.acceptance,
            progress=self.progress,
        )

    def open(
        self,
        storage: str | os.PathLike[str] | None = None,
        name: str = "layerskip",
        first: Mapping[str, SkipConfig] | None = None,
    ) -> None:
        """Open the study, a new one or one to go on with, and decide on its warm starts.

        `first` has a person's own configs, by name.

        Raises:
            ValueError: as `open_study`; a config to try first that the space does not hold.
        """
        given = warm_starts.given(self.space, first or {})
        prompts = repr([ids.flatten().tolist() for ids in self.traced])
        identity = {  # what the values of a study depend on, with its space and its costs
            "model": fingerprint(self.model),
            "dtype": str(self.opened.dtype).removeprefix("torch."),
            "law": self.task.law,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
            "max_new_tokens": self.task.max_new_tokens,
            "draft_length": self.trace.draft_length,
            "execution": f"{self.opened.execution} on {self.opened.device.type}",
            "value": "speedup over plain decoding",
        }
        self.study = study.open_study(self.space, storage=storage, name=name, identity=identity)
        self._result_before = self.study.user_attrs.get("result")
        seeds = warm_starts.standard(self.space)
        self.warm_starts = given | {n: mask for n, mask in seeds.items() if n not in given}

    def price(self, cost: Mapping[str, Any] | None = None) -> None:
        """Measure what sublayers cost, unless the study, or the caller, knows; after `open`.

        Costs belong to a machine and its threads: trials are worth a ratio to its own plain
        decoding. Those that a caller gives are taken to hold here, wherever they were measured.

        Raises:
            ValueError: trials of this machine were priced with other costs than those given.
        """
        self._costs_given = cost is not None
        low = self.space.everything_low
        here = json.dumps([socket.gethostname(), machine(self.opened)])
        stored = self.study.user_attrs.get(f"costs {here}")
        if stored is None:
            if cost is None:
                started = time.perf_counter()
                seen = {self.trace.context, *(window + SINK for window in self.space.windows)}
                cost = measured_costs(
                    self.opened, self.traced, self.law, low, sorted(seen), self.progress, self.until
                )
                self.seconds["cost"] = time.perf_counter() - started
            stored = dict(cost)
            self.study.set_user_attr(f"costs {here}", stored)
        facts = low_facts(low)
        if facts and facts != {name: stored[name] for name in LOW_FACTS if name in stored}:
            raise ValueError(
                f"the costs given do not know low precision of {self.space.bits} bits"
                f"{' with these healed weights' if self.space.trained else ''}; measure them with "
                "it, or leave them out"
            )
        if cost is not None and dict(cost) != stored:
            raise ValueError(
                "the study's trials were priced with other costs than those given; choose another "
                "study name, or leave the costs out"
            )
        self.objective = Objective(self.trace, stored)

    @property
    def bound(self) -> float:
        """1/c of the cheapest draft of the space: no config of it can be faster, times plain."""
        shallow = self.space.exit_mask(1)
        masks = [shallow, *([self.space.low_mask(shallow)] if self.space.bits else [])]
        fewer = [(0, *bits.values()) for bits in (self.space.fewer_experts, self.space.narrower)]
        masks = [mask | some | near for mask in masks for some, near in product(*fewer)]
        cheapest = min(
            self.objective.costs(self.space.skip_config(mask), size).draft
            for mask in masks
            for size in self.objective.sizes
        )
        return speedup_bound(cheapest)

    def run(
        self,
        trials: int | None = None,
        *,
        timeout: float | None = None,
        on_trial: Callable[[study.Standing], None] = lambda _: None,
    ) -> None:
        """Go on with the study until it has so many trials; after `price`."""
        started = time.perf_counter()
        if timeout is not None:
            self.objective.until = time.monotonic() + timeout
        try:
            study.run(
                self.study,
                self.space,
                self.objective,
                trials=default_trials(self.space) if trials is None else trials,
                warm_starts=self.warm_starts,
                seed=self.task.seed,
                timeout=timeout,
                on_trial=on_trial,
            )
        finally:
            self.seconds["trials"] = time.perf_counter() - started

    def seconds_after_trials(self, count: int = FINALISTS, repeats: int = REPEATS) -> float:
        """About how many seconds `choose` and `confirm` will take; after `price`, before `run`.

        It makes the trial of a draft that keeps nearly everything now, to see how long that takes.
        """
        switches = self.space.leaving_out
        typical = self.space.low_mask(0) if self.space.bits else switches[-1] if switches else 0
        started = time.perf_counter()
        self.objective(self.space.skip_config(typical))
        whole = time.perf_counter() - started
        seconds = whole * (count + MORE + 1)
        if self.held_out:
            traced, held_out = (
                sum(ids.shape[1] + self.task.max_new_tokens for ids in some)
                for some in (self.traced, self.held_out)
            )
            share, drafts = held_out / traced, count + 1  # the best exit is one more
            seconds += share * (self.seconds["trace"] or 0.0) + share * whole * drafts
            seconds += drafts * PRICING_SECONDS
            texts = len(self.held_out) * self.task.max_new_tokens * self.objective.step_seconds
            # plain, the exit as slow as it, and drafts that halve it; prompts come on top
            seconds += texts * repeats * (2 + count / 2) * PREFILL
        return seconds

    def choose(self, count: int = FINALISTS) -> None:
        """The best drafts by whole replays, on held-out prompts, too; after `run`.

        Where they are to be timed, and costs were measured here, theirs are measured again, as
        decoding does it. Around healed weights the model's default draft is one of them, which has
        no other costs.
        """
        started, now = time.perf_counter(), time.monotonic()
        replayed, priced, predicted = (now + share * (self.until - now) for share in CHOOSING)
        finalists = choose(self.study, self.space, self.objective, count, self.progress, replayed)
        again = [] if self._costs_given or not self.held_out else list(finalists)
        default = automatic_draft(self.opened).skip if self.space.trained else None
        if default is not None:
            finalists.append(default_draft(default, self.objective))
            again.append(finalists[-1])
        for number, finalist in within(again, priced):
            self.progress("prices of the best drafts", number / len(again))
            price_again(finalist, self.objective.looked_up.replay, self._typical_request())
        finalists.sort(key=lambda finalist: -finalist.predicted)
        if self.held_out:
            self._hold_out_less()
            trace = self._trace(self.held_out)
            for number, finalist in within(finalists, predicted):
                self.progress("the best drafts on other texts", number / len(finalists))
                finalist.predicted_held_out = predict(finalist, trace)
        self.finalists = finalists
        self.seconds["choose"] = time.perf_counter() - started

    def _hold_out_less(self) -> None:
        """As many held-out prompts as half of the time left is enough to look at, one at least."""
        a_text = 2 * (self.seconds["trace"] or 0.0) / len(self.traced)  # traced, and replayed
        left = self.until - time.monotonic()
        if a_text * len(self.held_out) > left / 2:
            del self.held_out[max(1, int(left / 2 / a_text)) :]

    def _typical_request(self) -> Request:
        """One row, as long as the texts were in their middle."""
        texts = self.trace.texts
        ids = torch.cat([text.tokens[: text.prompt + text.emitted] for text in texts])  # (T,)
        ids = ids[None, : self.trace.context].to(self.opened.device)  # (1, T)
        return Request(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.task.max_new_tokens,
            law=self.law,
            keys=[stream_key(self.task.seed)],
        )

    def confirm(self, repeats: int = REPEATS) -> None:
        """Time the finalists and plain decoding in turn on the held-out prompts."""
        if not self.finalists:
            return
        started = time.perf_counter()
        timed = partial(
            confirm,
            self.model,
            self.task,
            default=automatic_draft(self.opened).skip,
            until=self.until,
            progress=self.progress,
        )
        self.plain_tokens_per_second, self.default = timed(
            self.finalists, self.held_out, repeats=repeats
        )
        # The fastest of several is partly the luckiest: what no price backs is timed anew.
        doubted = [each for each in self.finalists if each.price <= 1.0 and gains(each)]
        if doubted and time.monotonic() < self.until:
            timed(doubted, self.held_out, repeats=2 * repeats)
        self.seconds["confirm"] = time.perf_counter() - started

    def result(self) -> SearchResult:
        """What was found, and the config to decode with; after `choose`.

        Of several workers of a study the first that is done says it, and the others take its words:
        the best drafts are near each other, and two clocks would not always name the same.
        """
        self.winner = winner(self.finalists)
        self.keep_default = keeps_default(self.winner, self.default)
        skip, document = self._config(), search_record(self)
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        judged = {name: document[name] for name in JUDGED}
        mine = {
            "of": [len(complete), bool(self.held_out)],
            "skip": skip.to_dict(),
            "judged": judged,
        }
        first = self.study.user_attrs.get("result")
        if first is None or first == self._result_before or first["of"] != mine["of"]:
            self.study.set_user_attr("result", mine)
        else:
            document |= first["judged"]
            skip = SkipConfig.from_dict(first["skip"])
            if skip.trained is not None:
                skip = replace(skip, trained=self.space.trained)  # where it lies on this machine
        trained = self.space.trained
        healed = [each for each in self.finalists if trained and each.skip.trained == trained]
        best = winner(healed) or next(iter(healed), None)
        return SearchResult(
            skip,
            next((each for each in self.finalists if each.name == document["winner"]), None),
            tuple(self.finalists),
            self.study,
            document,
            None if best is None else replace(best.skip, costs=None),
        )

    def _config(self) -> SkipConfig:
        """The config to decode with: see `SearchResult.skip`."""
        skip = SkipConfig(num_layers=self.space.num_layers)
        decoding = DecodingOptions(enabled=False)
        notes: dict[str, Any] = {"bound": self.bound}
        best = self.winner
        if best is not None:
            skip, decoding = best.skip, best.skip.decoding or decoding
            notes |= {
                "alpha": best.alpha,
                "draft_cost": best.costs.draft,
                "predicted_speedup": best.predicted,
                "predicted_held_out": best.predicted_held_out,
                "confirmed": best.confirmed,
            }
        if self.keep_default:  # what generates unasked, so that nobody loses who takes it
            usual = automatic_draft(self.opened).skip or SkipConfig()
            skip, decoding = usual.resolve(self.space.num_layers), DecodingOptions(lookup=True)
        if self.task.do_sample and self.task.acceptance == "rejection":
            decoding = replace(decoding, acceptance="rejection")
        notes |= {
            "keep_default": self.keep_default,
            "law": self.task.law,
            "max_new_tokens": self.task.max_new_tokens,
            "positions": self.trace.starts,
            "prompts": {"traced": len(self.traced), "held_out": len(self.held_out)},
            "trials": len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))),
        }
        return replace(
            skip,
            decoding=decoding,
            model=getattr(self.model, "name_or_path", "") or None,
            model_hash=fingerprint(self.model),
            notes=notes,
        )


def default_trials(space: Space) -> int:
    """As many trials as a space deserves."""
    return min(space.size, max(FEWEST_TRIALS, TRIALS_PER_SWITCH * len(space.switches)))


def measured_costs(
    model: Sublayers,
    prompts: Sequence[Tensor],
    law: Law,
    low: SkipConfig | None,
    contexts: Sequence[int],
    progress: Progress,
    until: float = math.inf,
) -> dict[str, Any]:
    """What `layerskip.timing.sublayers.measure` returns, measured again where the machine was busy.

    It takes a tenth of the time left `until` (of `time.monotonic`) the whole search ends.
    """
    patience = min(PATIENCE, FOR_COSTS * max(0.0, until - time.monotonic()))
    attempts = 0
    for _ in within(range(ATTEMPTS), time.monotonic() + patience):
        attempts += 1
        record = sublayer_costs.measure(
            model,
            prompts,
            contexts=[min(context, model.max_positions // 2) for context in contexts],
            law=law,
            low=low,
            budget=max(0.1, min(BUDGET, patience)),
            progress=progress,
        )
        if not sublayer_costs.disturbed(record):
            return record
    warnings.warn(
        f"other work on this machine disturbed the costs, {attempts} times: what the search "
        "finds may be slower than it says; search again when the machine is quiet, under "
        "another study name",
        stacklevel=3,
    )
    return record
