"""A complete search on a live model: trace, study, costs, trials, finalists, result.

Writes no files except the study's.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from optuna import Study
from torch import Tensor

from layerskip.api.arguments import end_tokens, law_of, sampling_of
from layerskip.api.drafts import automatic_draft
from layerskip.bench.methods import Task
from layerskip.config.skips import SINK, DecodingOptions, SkipConfig
from layerskip.costs.speculation import speedup_bound
from layerskip.model.opened_models import Sublayers
from layerskip.replay.trace import check_prompts, take_trace
from layerskip.search import finalists, study
from layerskip.search.finalists import Finalist, Progress
from layerskip.search.fitting import Bits, influence, parts_of, space_for, typical_context
from layerskip.search.objective import Objective, OutOfTime
from layerskip.search.record import search_record
from layerskip.search.space import Space
from layerskip.search.warm_starts import given, warm_starts
from layerskip.timing import sublayer_costs as sublayer_costs
from layerskip.timing.kept import machine
from layerskip.weights.fingerprint import fingerprint

FEWEST_TRIALS, TRIALS_PER_SWITCH = 60, 4
"""Number of trials in a study without a given number or time."""
FINALISTS = 3
REPEATS = 2
FOR_COSTS = 10.0
"""Maximum seconds for timing costs."""
DISTURBED = 0.15
"""A spread of the costs that no quiet machine shows; 0.02 to 0.1 were seen."""
FOR_REPLAYS = 0.5
"""Share of the time after the trials for replaying the best; the rest is for timing."""
PREFILL = 1.5
"""Time of decoding a text including its prompt, as a multiple of decoding alone."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        skip: the config to decode with: the winner's; the default if that is as fast; one without
            drafts if nothing was faster than plain decoding. `skip.notes` contains the
            measurements.
        winner: the finalist with that config, if any.
        finalists: best first by prediction.
        record: everything as JSON values, for `layerskip report`, except for a header.
    """

    skip: SkipConfig
    winner: Finalist | None
    finalists: tuple[Finalist, ...]
    study: Study
    record: Mapping[str, Any]


class Search:
    """The stages of one search, in the order of the methods; each stores its results.

    Args:
        traced: token ids of the calibration prompts, (T,) or (1, T) each.
        held_out: token ids of prompts for timing finalists; none: nothing is timed.
        positions: maximum number of starts in a trial; by default all of the traced texts.
        first: the user's own configs to try first, by name.
        until: time (of `time.monotonic`) at which all stages end, with the drafts that are judged
            by then.

    Raises:
        OutOfTime: the time was over before anything could be found; also raised by the methods.
        ValueError: as for `take_trace`, also for held-out prompts; the space is for another number
            of layers, or lacks a config to try first.
    """

    def __init__(
        self,
        model: Any,
        traced: Sequence[Tensor],
        held_out: Sequence[Tensor] = (),
        *,
        task: Task,
        space: Space,
        parts: frozenset[str],
        positions: int | None = None,
        first: Mapping[str, SkipConfig] | None = None,
        progress: Progress = finalists.silent,
        until: float = math.inf,
    ) -> None:
        self.task, self.space, self.parts = task, space, parts
        self.positions, self.until, self._tell = positions, until, progress
        self.opened = Sublayers(model, execution=task.execution)
        self.model: Any = self.opened.model  # without an adapter library's wrapper
        if space.num_layers != self.opened.num_layers:
            raise ValueError(
                f"the space is for {space.num_layers} layers, the model has "
                f"{self.opened.num_layers}"
            )
        self.own = given(space, first or {})
        self.traced = [ids.reshape(1, -1).to(self.opened.device) for ids in traced]
        self.held_out = [ids.reshape(1, -1).to(self.opened.device) for ids in held_out]
        if held_out:  # check now, since they are used only after all trials
            check_prompts(self.opened, self.held_out, task.max_new_tokens)
        self.seconds: dict[str, float | None] = {"cost": 0.0, "trials": 0.0, "confirm": None}
        self.finalists: list[Finalist] = []
        self.default: dict[str, Any] | None = None
        self.winner: Finalist | None = None
        self.keep_default = False
        self.sampler: study.SamplerName = "gp"
        self.plain_tokens_per_second: float | None = None
        started = time.perf_counter()
        self.law = law_of(task.law)
        self.trace = take_trace(
            self.opened,
            self.traced,
            max_new_tokens=task.max_new_tokens,
            law=self.law,
            seeds=[task.seed + number for number in range(len(self.traced))],
            eos=end_tokens(self.model),
            acceptance=task.acceptance,
            progress=self.progress,
        )
        self.influence = influence(self.opened, self.trace.texts)
        self.seconds["trace"] = time.perf_counter() - started

    def progress(self, what: str, share: float) -> None:
        """Tell what is done now; raises OutOfTime if there is no time for it."""
        if time.monotonic() > self.until:
            raise OutOfTime(
                f"no time was left for this: {what}; finished trials are kept, so repeat it with a "
                "longer timeout"
            )
        self._tell(what, share)

    def open(
        self,
        storage: str | os.PathLike[str] | None = None,
        name: str = "layerskip",
    ) -> None:
        """Open a new or existing study, and choose its first sets; ValueError as `open_study`."""
        prompts = repr([ids.flatten().tolist() for ids in self.traced])
        identity = {  # everything on which values depend, besides the space and the costs
            "model": fingerprint(self.model),
            "dtype": str(self.opened.dtype).removeprefix("torch."),
            "law": self.task.law,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
            "max_new_tokens": self.task.max_new_tokens,
            "positions": self.positions,
            "execution": f"{self.opened.execution} on {self.opened.device.type}",
            "value": "speedup over plain decoding, two tokens followed",
        }
        self.study = study.open_study(self.space, storage=storage, name=name, identity=identity)
        self.warm_starts = self.own | warm_starts(self.space, self.influence) | self.own

    def price(self, cost: Mapping[str, Any] | None = None) -> None:
        """Time the costs of drafting unless the study or the caller has them; after `open`.

        Costs belong to a machine and its threads: a trial's value is relative to that machine's
        plain decoding. Costs from a caller are assumed to be valid here, wherever measured.

        Raises:
            ValueError: trials of this machine used costs other than those given, or the costs do
                not price everything in the space.
        """
        here = json.dumps([socket.gethostname(), machine(self.opened)])
        stored = self.study.user_attrs.get(f"costs {here}")
        if stored is None:
            stored = dict(self._timed() if cost is None else cost)
            self.study.set_user_attr(f"costs {here}", stored)
        if self.space.bits is not None and stored.get("low_bits") != self.space.bits:
            raise ValueError(
                f"the costs given do not know low precision of {self.space.bits} bits; measure "
                "them with it, or leave them out"
            )
        if cost is not None and dict(cost) != stored:
            raise ValueError(
                "the study's trials were priced with other costs than those given; choose another "
                "study name, or leave the costs out"
            )
        self.objective = Objective(self.trace, self.space, stored, self.positions)
        self.bound = self._bound()  # raises before any trial

    def _timed(self) -> dict[str, Any]:
        """The numbers of the cost model for this model and machine."""
        started, space = time.perf_counter(), self.space
        seen = {self.trace.context, *(window + SINK for window in space.windows)}
        record = sublayer_costs.measure(
            self.opened,
            self.traced,
            contexts=[min(each, self.opened.max_positions // 2) for each in sorted(seen)],
            law=self.law,
            low=space.skip_config(space.low_mask(0)) if space.bits else None,
            budget=max(1.0, min(FOR_COSTS, (self.until - time.monotonic()) / 10)),
            progress=self.progress,
        )
        if record["busy"] or record["spread"] > DISTURBED:
            warnings.warn(
                "other work on this machine disturbed the costs: on a quiet machine, drafts may "
                "gain more or less than predicted; repeat this then, a search under another study "
                "name",
                stacklevel=3,
            )
        self.seconds["cost"] = time.perf_counter() - started
        return record

    def _bound(self) -> float:
        """1/c of the space's cheapest draft: the upper bound of all speedups over plain."""
        space, shallow = self.space, self.space.exit_mask(1)
        masks = [shallow, *([space.low_mask(shallow)] if space.bits else [])]
        for bits in space.numbers.values():
            masks = [mask | each for mask in masks for each in (0, *bits.values())]
        return speedup_bound(min(self.objective.prices.table(mask).draft for mask in masks))

    def run(
        self,
        trials: int | None = None,
        *,
        sampler: study.SamplerName = "gp",
        timeout: float | None = None,
        on_trial: Callable[[study.Standing], None] = lambda _: None,
    ) -> None:
        """Continue the study until it has `trials` trials; after `price`.

        Args:
            trials: by default as many as suit the space, or as fit into `timeout`.

        Raises:
            OutOfTime: the study has no finished trial.
        """
        started = time.monotonic()
        self.objective.until = math.inf if timeout is None else started + timeout
        if timeout is None and trials is None:
            trials = default_trials(self.space)
        self.sampler = sampler
        try:
            study.run(
                self.study,
                self.space,
                self.objective,
                sampler=study.Sampler(sampler, self.space, self.task.seed),
                trials=trials,
                warm_starts=self.warm_starts,
                timeout=timeout,
                on_trial=on_trial,
            )
        finally:
            self.seconds["trials"] = time.monotonic() - started
        if not study.standing(self.study).finished:
            raise OutOfTime("no trial finished in time; give a longer timeout")

    def judge(self, count: int = FINALISTS, repeats: int = REPEATS) -> None:
        """Replay the best drafts in full, and time them if prompts are held out; after `run`.

        They are not timed if there is time for one prompt only, which would not tell them apart.
        """
        started, now = time.perf_counter(), time.monotonic()
        replayed = now + FOR_REPLAYS * (self.until - now)
        self.finalists = finalists.choose(
            self.study, self.objective, count, self.parts, self.progress, replayed
        )
        if not self.finalists or not self.held_out:
            return
        # Plain decoding, the default, and drafts with at least half the speed of plain decoding.
        texts = self.task.max_new_tokens * self.objective.prices.step
        a_text = PREFILL * texts * (2 + len(self.finalists))
        most = min(len(self.held_out), (self.until - time.monotonic()) / a_text)
        if most < min(2, len(self.held_out)):
            return
        with suppress(OutOfTime):
            self.plain_tokens_per_second, self.default = finalists.confirm(
                self.model,
                self.task,
                self.finalists,
                self.held_out[: int(most)],
                repeats=repeats,
                until=self.until,
                # What was timed counts, so only the first prompt may be cut off.
                progress=lambda what, share: (self._tell if share else self.progress)(what, share),
            )
            self.seconds["confirm"] = time.perf_counter() - started

    def result(self) -> SearchResult:
        """The result, with the config to decode with; after `judge`."""
        self.winner = finalists.winner(self.finalists)
        self.keep_default = finalists.keeps_default(self.winner, self.default)
        return SearchResult(
            self._config(), self.winner, tuple(self.finalists), self.study, search_record(self)
        )

    def _config(self) -> SkipConfig:
        """The config to decode with: see `SearchResult.skip`."""
        skip = SkipConfig(num_layers=self.space.num_layers)
        decoding = DecodingOptions(enabled=False)
        notes: dict[str, Any] = {"bound": self.bound}
        best = self.winner
        if best is not None:
            skip, decoding = best.skip, best.decoding
            notes |= {
                "alpha": best.alpha,
                "draft_cost": best.costs.draft,
                "predicted_speedup": best.predicted,
                "predicted_interval": [best.low, best.high],
                "confirmed": best.confirmed,
            }
        if self.keep_default:  # the same as without a config, so that using it loses nothing
            usual = automatic_draft(self.opened).skip or SkipConfig()
            skip, decoding = usual.resolve(self.space.num_layers), DecodingOptions(lookup=True)
        if self.task.do_sample and self.task.acceptance == "rejection":
            decoding = replace(decoding, acceptance="rejection")
        at = study.standing(self.study)
        notes |= {
            "keep_default": self.keep_default,
            "law": self.task.law,
            "max_new_tokens": self.task.max_new_tokens,
            "positions": self.trace.starts,
            "prompts": {"traced": len(self.traced), "held_out": len(self.held_out)},
            "trials": at.finished,
            "guided": at.guided,
        }
        return replace(
            skip,
            decoding=decoding,
            model=getattr(self.model, "name_or_path", "") or None,
            model_hash=fingerprint(self.model),
            notes=notes,
        )


def default_trials(space: Space) -> int:
    """The number of trials that suits a space."""
    return min(space.size, max(FEWEST_TRIALS, TRIALS_PER_SWITCH * len(space.switches)))


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Bits = "auto",
    allow_ends: bool = False,
    sampler: study.SamplerName = "gp",
    trials: int | None = None,
    timeout: float | None = None,
    positions: int | None = None,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    acceptance: str = "coupled",
    seed: int = 0,
    execution: str = "auto",
    first: Mapping[str, SkipConfig] | None = None,
    cost: Mapping[str, Any] | None = None,
    storage: str | os.PathLike[str] | None = None,
    study_name: str = "layerskip",
    finalists: int = FINALISTS,
    repeats: int = REPEATS,
    progress: Progress = finalists.silent,
) -> SearchResult:
    """Search for the best draft of a live model; writes no files.

    Args:
        model: a causal language model of a supported family, in evaluation mode.
        prompts: token ids, (T,) or (1, T) each, such as the `input_ids` of
            `tokenizer(text, return_tensors="pt")`. A few dozen, similar to the intended use.
        held_out: other prompts, for timing the finalists; without them the prediction decides. One
            alone cannot show that a draft is faster than the default, which is then kept.
        space: exit, layer or sublayer, and what else to try: see `layerskip.search.fitting`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 if products in 8 bits are
            fast (execution "native").
        allow_ends: drafts may also skip the first layer, and sublayers of the last.
        sampler: Optuna's Gaussian process (gp), Parzen estimator (tpe) or random.
        trials: total number of evaluations; by default as many as suit the space.
        timeout: seconds after which trials end.
        positions: number of draft starts in a trial; by default all of the texts.
        do_sample, temperature, top_p, top_k, acceptance, seed: how the model will be decoded.
        first: your own configs to try first, by name.
        cost: the result of `layerskip.timing.sublayer_costs.measure`; measured by default.
        storage, study_name: where the trials are stored, and resumed: a database URL, the path of a
            journal file, or None for memory.
        finalists: number of drafts to replay in full and to time.
        repeats: timed calls of each per prompt.
        progress: called with a description of the current activity, and the completed share.

    Raises:
        ValueError: there are no prompts, or they are empty or too long; settings are out of range;
            the storage cannot be opened or holds another search; no trial finished in time.
    """
    if finalists < 1 or repeats < 1:
        raise ValueError(
            f"finalists and repeats must be 1 or more, got {finalists} and {repeats}; to time "
            "nothing, give no held_out"
        )
    where = space_for(
        Sublayers(model, execution),
        space,
        bits=bits,
        allow_ends=allow_ends,
        context=typical_context(prompts, max_new_tokens),
    )
    task = Task(
        max_new_tokens,
        do_sample,
        **(sampling_of(model, temperature, top_k, top_p) if do_sample else {}),
        acceptance=acceptance,
        seed=seed,
        execution=execution,
    )
    steps = Search(
        model,
        prompts,
        held_out,
        task=task,
        space=where,
        parts=parts_of(space)[1],
        positions=positions,
        first=first,
        progress=progress,
    )
    steps.open(storage, study_name)
    study.fail_abandoned(steps.study)
    steps.price(cost)
    steps.run(
        trials,
        sampler=sampler,
        timeout=timeout,
        on_trial=lambda at: progress(
            f"trials, best {at.best:.2f}x{steps.objective.prices.doubt}",
            at.finished / at.trials if at.trials else 0.0,
        ),
    )
    steps.judge(finalists, repeats)
    return steps.result()
