"""A search from start to end on a live model: trace, study, costs, trials, finalists, result.

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
from typing import Any

from optuna import Study
from torch import Tensor

from layerskip.bench.methods import Task
from layerskip.config import SINK, DecodingOptions, SkipConfig
from layerskip.costs.speculation import speedup_bound
from layerskip.drafts import automatic_draft
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.exits import law_of
from layerskip.replay.trace import take_trace
from layerskip.requests import check_tokens, end_tokens, sampling_of
from layerskip.search import finalists, study
from layerskip.search.finalists import Finalist, Progress, choose, confirm, silent, winner
from layerskip.search.fitting import Bits, influence, parts_of, space_for, typical_context
from layerskip.search.objective import Objective
from layerskip.search.proposals import given, warm_starts
from layerskip.search.record import search_record
from layerskip.search.space import Space
from layerskip.search.study import SamplerName, Standing, sampler_of, standing
from layerskip.search.surrogate import Surrogate
from layerskip.timing import sublayers as sublayer_costs
from layerskip.timing.sublayers import LOW_FACTS, low_facts
from layerskip.timing.tables import machine

FEWEST_TRIALS, TRIALS_PER_SWITCH = 60, 4
"""Trials of a study of no stated length or time."""
FINALISTS = 3
REPEATS = 2
FOR_COSTS = 1.5
"""Seconds of timing for costs."""
FOR_REPLAYS = 0.5
"""Share of the time left after the trials that replays of the best get; the clock has the rest."""
PREFILL = 1.5
"""Times the decoding of a text is what timing it takes, with its prompt."""


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
    """

    skip: SkipConfig
    winner: Finalist | None
    finalists: tuple[Finalist, ...]
    study: Study
    record: Mapping[str, Any]


class Search:
    """The stages of one search, in the order of the methods; each leaves its results.

    Args:
        traced: token ids of the calibration prompts, (T,) or (1, T) each.
        held_out: of the prompts that finalists are timed on; none: nothing is timed.
        positions: that a trial looks at, at most; by default all of the traced texts.
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
        parts: frozenset[str],
        positions: int | None = None,
        progress: Progress = silent,
        until: float = math.inf,
    ) -> None:
        if task.execution == "compiled":
            raise ValueError(
                "a search times drafts one by one: execution must be auto, modules or fused, got "
                "'compiled'; search with 'fused', and decode compiled with what it finds"
            )
        self.task, self.space, self.parts = task, space, parts
        self.positions, self.progress, self.until = positions, progress, until
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
        self.default: dict[str, Any] | None = None
        self.winner: Finalist | None = None
        self.keep_default = False
        self.sampler: SamplerName = "ours"
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
            progress=progress,
        )
        self.influence = influence(self.opened, self.trace.texts)
        self.seconds["trace"] = time.perf_counter() - started

    def open(
        self,
        storage: str | os.PathLike[str] | None = None,
        name: str = "layerskip",
        first: Mapping[str, SkipConfig] | None = None,
    ) -> None:
        """Open the study, a new one or one to go on with, and decide on its first sets.

        `first` has a person's own configs, by name.

        Raises:
            ValueError: as `open_study`; a config to try first that the space does not hold.
        """
        own = given(self.space, first or {})
        prompts = repr([ids.flatten().tolist() for ids in self.traced])
        identity = {  # what the values of a study depend on, with its space and its costs
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
        starts = warm_starts(self.space, self.influence)
        self.warm_starts = own | {n: mask for n, mask in starts.items() if n not in own}

    def price(self, cost: Mapping[str, Any] | None = None) -> None:
        """Time what drafts cost, unless the study, or the caller, knows; after `open`.

        Costs belong to a machine and its threads: trials are worth a ratio to its own plain
        decoding. Those that a caller gives are taken to hold here, wherever they were measured.

        Raises:
            ValueError: trials of this machine were priced with other costs than those given; costs
                that do not price everything that the space holds.
        """
        low = self.space.everything_low
        here = json.dumps([socket.gethostname(), machine(self.opened)])
        stored = self.study.user_attrs.get(f"costs {here}")
        if stored is None:
            stored = dict(self._timed(low) if cost is None else cost)
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
        self.objective = Objective(self.trace, self.space, stored, self.positions)
        self.bound = self._bound()  # raises before any trial

    def _timed(self, low: SkipConfig | None) -> dict[str, Any]:
        """The numbers of the model of costs for this model and machine."""
        started = time.perf_counter()
        seen = {self.trace.context, *(window + SINK for window in self.space.windows)}
        record = sublayer_costs.measure(
            self.opened,
            self.traced,
            contexts=[min(each, self.opened.max_positions // 2) for each in sorted(seen)],
            law=self.law,
            low=low,
            budget=FOR_COSTS,
            progress=self.progress,
        )
        if sublayer_costs.disturbed(record):
            warnings.warn(
                "other work on this machine disturbed the costs: what the search finds may be "
                "slower than it says; search again when the machine is quiet, under another study "
                "name",
                stacklevel=3,
            )
        self.seconds["cost"] = time.perf_counter() - started
        return record

    def _bound(self) -> float:
        """1/c of the cheapest draft of the space: no config of it can be faster, times plain."""
        space, shallow = self.space, self.space.exit_mask(1)
        masks = [shallow, *([space.low_mask(shallow)] if space.bits else [])]
        for bits in space.numbers.values():
            masks = [mask | each for mask in masks for each in (0, *bits.values())]
        return speedup_bound(min(self.objective.costs(mask).draft for mask in masks))

    def run(
        self,
        trials: int | None = None,
        *,
        sampler: SamplerName = "ours",
        timeout: float | None = None,
        on_trial: Callable[[Standing], None] = lambda _: None,
    ) -> None:
        """Go on with the study until it has so many trials; after `price`.

        Args:
            trials: by default as many as the space deserves, or as fit into `timeout`.
        """
        started = time.perf_counter()
        if timeout is not None:
            self.objective.until = time.monotonic() + timeout
        elif trials is None:
            trials = default_trials(self.space)
        self.sampler = sampler
        surrogate = Surrogate(self.space, self.objective.prices, self.influence)
        try:
            study.run(
                self.study,
                self.space,
                self.objective,
                sampler=sampler_of(sampler, self.space, surrogate, self.task.seed),
                name=sampler,
                trials=trials,
                warm_starts=self.warm_starts,
                timeout=timeout,
                on_trial=on_trial,
            )
        finally:
            self.seconds["trials"] = time.perf_counter() - started

    def judge(self, count: int = FINALISTS, repeats: int = REPEATS) -> None:
        """Replay the best drafts whole and, where prompts are held out, time them; after `run`."""
        started, now = time.perf_counter(), time.monotonic()
        replayed = now + FOR_REPLAYS * (self.until - now)
        self.finalists = choose(
            self.study, self.objective, count, self.parts, self.progress, replayed
        )
        if not self.finalists or not self.held_out:
            return
        # plain decoding, the default, and drafts of at least half of the speed of plain
        texts = self.task.max_new_tokens * self.objective.prices.step
        a_text = PREFILL * texts * (2 + len(self.finalists))
        most = max(1.0, min(len(self.held_out), (self.until - time.monotonic()) / a_text))
        self.plain_tokens_per_second, self.default = confirm(
            self.model,
            self.task,
            self.finalists,
            self.held_out[: int(most)],
            default=automatic_draft(self.opened).skip,
            repeats=repeats,
            until=self.until,
            progress=self.progress,
        )
        self.seconds["confirm"] = time.perf_counter() - started

    def result(self) -> SearchResult:
        """What was found, and the config to decode with; after `judge`."""
        self.winner = winner(self.finalists)
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
                "confirmed": best.confirmed,
            }
        if self.keep_default:  # what generates unasked, so that nobody loses who takes it
            usual = automatic_draft(self.opened).skip or SkipConfig()
            skip, decoding = usual.resolve(self.space.num_layers), DecodingOptions(lookup=True)
        if self.task.do_sample and self.task.acceptance == "rejection":
            decoding = replace(decoding, acceptance="rejection")
        at = standing(self.study)
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
    """As many trials as a space deserves."""
    return min(space.size, max(FEWEST_TRIALS, TRIALS_PER_SWITCH * len(space.switches)))


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Bits = "auto",
    allow_ends: bool = False,
    sampler: SamplerName = "ours",
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
    progress: Progress = silent,
) -> SearchResult:
    """Search what a draft of a live model should leave out and round; writes no files.

    Args:
        model: a causal language model of a supported family, in evaluation mode.
        prompts: token ids, (T,) or (1, T) each, as `tokenizer(text, return_tensors="pt")` has them
            in `input_ids`. Some dozen that are like what the model will be asked.
        held_out: others, to time the finalists on; without them the prediction decides.
        space: exit, layer or sublayer, and what else to try: see `layerskip.search.fitting`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 where products in 8 bits are
            fast (execution "native").
        allow_ends: drafts may also leave out the first layer, and halves of the last.
        sampler: ours, or Optuna's gp, tpe or random.
        trials: evaluations in all; by default so many as the space deserves.
        timeout: seconds after which trials end.
        positions: starts of drafts that a trial looks at; by default all of the texts.
        do_sample, temperature, top_p, top_k, acceptance, seed: how the model will be decoded.
        first: configs of your own to try first, by name. Where one is healed, the search is around
            it: all that is low is healed by its weights.
        cost: what `layerskip.timing.sublayers.measure` returned; measured by default.
        storage, study_name: where the trials are kept, and taken up again: a database URL, a
            journal file's path, or None for memory.
        finalists: how many drafts are replayed whole, and timed.
        repeats: timed calls of each of them per prompt.
        progress: called with what is being done, in words, and the share of it that is done.

    Raises:
        ValueError: prompts that are none, empty or too long, settings out of range, a storage that
            cannot be opened or holds another search.
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
        first=[*(first or {}).values()],
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
        progress=progress,
    )
    steps.open(storage, study_name, first)
    study.fail_abandoned(steps.study)
    steps.price(cost)
    steps.run(
        trials,
        sampler=sampler,
        timeout=timeout,
        on_trial=lambda at: progress(
            f"trials, best {at.best:.2f}x", at.finished / at.trials if at.trials else 0.0
        ),
    )
    steps.judge(finalists, repeats)
    return steps.result()
