"""A search from end to end, on a live model: trace, costs, study, finalists, winner; no files.

What a person waits for, in order: the target's texts on some prompts, what each sublayer costs, the
trials of a study, and the best few drafts on the clock. Each step is a method.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from optuna import Study
from optuna.trial import TrialState
from torch import Tensor

from layerskip.bench.batches import one_by_one
from layerskip.bench.methods import Task
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.pricing import LOW_FACTS, low_facts
from layerskip.costs.speculation import speedup_bound
from layerskip.decoding.engine import Request
from layerskip.decoding.noise import stream_key
from layerskip.decoding.sources import source_of
from layerskip.defaults import unprepared
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.exits import law_of
from layerskip.replay.trace import DRAFT_LENGTH, Trace, take_trace
from layerskip.search import seeds, study
from layerskip.search.finalists import (
    PRICING_SECONDS,
    Finalist,
    candidates,
    choose,
    confirm,
    fixed,
    gains,
    predict,
    price_again,
    winner,
)
from layerskip.search.objective import Objective
from layerskip.search.prices import check_place, measured
from layerskip.search.rows import record
from layerskip.search.space import Space
from layerskip.served import end_tokens

TRIALS_PER_SWITCH = 6
"""Trials of a study of no stated length; the strategy asks for at least four."""
FEWEST_TRIALS = 60
FINALISTS = 3
REPEATS = 2
PROMPTS = 1.5
"""Times the decoding of a text is what timing it takes, with its prompt."""

Progress = Callable[[str, float], None]


def default_trials(space: Space) -> int:
    """How many trials a space deserves."""
    return min(space.size, max(FEWEST_TRIALS, TRIALS_PER_SWITCH * len(space.switches)))


class Search:
    """The steps of one search; each leaves what it found.

    Args:
        model: a causal language model.
        traced: token ids of the calibration prompts, (T,) or (1, T) each.
        held_out: of the prompts that finalists are timed on; none: nothing is timed.
        task: what is decoded: law, tokens, seed, execution.
        space: where to look.
        draft_length: the longest draft that is looked at.
        progress: told what is being done, in words, and the share of it that is done.

    Attributes:
        trace: the target's texts.
        objective: what a config is worth; after `price`.
        study: the ledger; after `open`.
        beside: by name, drafts that are timed beside what is found; after `open`.
        finalists: after `choose`; timed after `confirm`.
        seconds: what each step took.

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
        draft_length: int = DRAFT_LENGTH,
        progress: Progress = lambda _what, _share: None,
    ) -> None:
        if task.execution == "compiled":
            raise ValueError(
                "a search times sublayers one by one, which compiled passes do not have; execution "
                "must be auto, modules or fused, got 'compiled'; search with 'fused', and decode "
                "compiled with what it finds"
            )
        self.task, self.space, self.progress = task, space, progress
        self.law = law_of(task.law)
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
        self.draft_length = draft_length
        self.seconds: dict[str, float | None] = {"cost": 0.0, "trials": 0.0, "confirm": None}
        self._given = False  # the costs, by the caller
        self.finalists: list[Finalist] = []
        self.plain_tokens_per_second: float | None = None
        if space.trained is not None:
            self.opened.weights.deltas(space.trained)  # refused before anything slow is done
        self.beside: dict[str, SkipConfig] = {}
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
            draft_length=self.draft_length,
            acceptance=self.task.acceptance,
            progress=self.progress,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What a study's values depend on, beside its space and its costs; JSON values."""
        digest = hashlib.sha256()
        for ids in self.traced:
            digest.update(repr(ids.flatten().tolist()).encode())
        return {
            "model": fingerprint(self.model),
            "dtype": str(self.opened.dtype).removeprefix("torch."),
            "law": self.task.law,
            "prompts": digest.hexdigest()[:16],
            "max_new_tokens": self.task.max_new_tokens,
            "draft_length": self.draft_length,
        }

    def open(
        self,
        storage: str | os.PathLike[str] | None = None,
        name: str = "layerskip",
        given: Mapping[str, SkipConfig] | None = None,
    ) -> Study:
        """Open the study, a new one or one to go on with, and plant its seeds.

        Args:
            storage, name: as for `layerskip.search.study.open_study`.
            given: a person's own configs, by name, to try first. What trained modules draft cannot
                be varied: it is timed beside what is found.

        Raises:
            ValueError: as `open_study`; a given config that the space does not hold, or a trained
                module that is none of the model's.
        """
        known = dict(given or {})
        modules = {n: skip for n, skip in known.items() if skip.trained and skip.trained.module}
        others = {n: skip for n, skip in known.items() if n not in modules}
        planted = seeds.given(self.space, others)
        self.beside = self._beside(modules.values())
        self.study = study.open_study(
            self.space, storage=storage, name=name, identity=self.identity
        )
        if "seeds" not in self.study.user_attrs:
            found = seeds.standard(self.space)
            hidden = seeds.hidden_states(self.trace)
            found |= seeds.from_hidden_states(self.space, hidden)
            self.study.set_user_attr("seeds", {n: f"{mask:#x}" for n, mask in found.items()})
        kept = {n: int(mask, 16) for n, mask in self.study.user_attrs["seeds"].items()}
        self.seeds = planted | {n: mask for n, mask in kept.items() if n not in planted}
        return self.study

    def _beside(self, modules: Iterable[SkipConfig]) -> dict[str, SkipConfig]:
        """What is timed beside what is found: modules, and around healed weights the usual.

        A space in which everything low is healed does not hold that.
        """
        found: dict[str, SkipConfig] = {}
        for skip in modules:
            assert skip.trained is not None
            source_of(self.opened, skip)  # refused now
            number = sum(name.startswith(skip.trained.kind) for name in found) + 1
            found[f"{skip.trained.kind}{f'-{number}' * (number > 1)}"] = skip
        before = unprepared(self.opened).skip if self.space.trained else None
        return found if before is None else {**found, "before": before}

    def price(self, cost: Mapping[str, Any] | None = None) -> Objective:
        """Measure what sublayers cost, unless the study, or the caller, knows; after `open`.

        Costs that a caller gives are taken to hold here, wherever they were measured.

        Raises:
            ValueError: the study's values came from other costs than those given, or from costs
                measured elsewhere.
        """
        known, mine = self.study.user_attrs.get("cost"), cost
        if known is None:
            started = time.perf_counter()
            if mine is None:
                mine = measured(
                    self.opened, self.traced, self.law, self.space.everything_low, self.progress
                )
                self.seconds["cost"] = time.perf_counter() - started
            self.study.set_user_attr("cost", dict(mine))
            known = self.study.user_attrs["cost"]  # another worker's, if that was later
        low = low_facts(self.space.everything_low)
        if low and low != {name: known[name] for name in LOW_FACTS if name in known}:
            raise ValueError(
                f"the costs given do not know low precision of {self.space.bits} bits"
                f"{' with these healed weights' if self.space.trained else ''}; measure them with "
                "it, or leave them out"
            )
        if cost is not None and dict(cost) != known:
            raise ValueError(
                "the study's trials were priced with other costs than those given; choose another "
                "study name, or leave the costs out"
            )
        self._given = cost is not None
        if known != mine:
            check_place(known.get("place"), self.opened)
        self.objective = Objective(self.trace, known)
        return self.objective

    @property
    def bound(self) -> float:
        """1/c of the cheapest draft of the space: no config of it can be faster, times plain."""
        shallow = self.space.exit_mask(1)
        masks = [shallow, *([self.space.low_mask(shallow)] if self.space.bits else [])]
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
        told: Callable[[study.Progress], None] | None = None,
    ) -> None:
        """Go on with the study until it has so many trials; after `price`.

        Raises:
            ValueError: as `layerskip.search.study.run`.
        """
        started = time.perf_counter()
        try:
            study.run(
                self.study,
                self.space,
                self.objective,
                trials=default_trials(self.space) if trials is None else trials,
                seeds=self.seeds,
                seed=self.task.seed,
                timeout=timeout,
                progress=told,
            )
        finally:
            self.seconds["trials"] = time.perf_counter() - started

    def reserve(self, count: int = FINALISTS, repeats: int = REPEATS) -> float:
        """About how many seconds `choose` and `confirm` will take; after `price`, before `run`.

        What they replay takes as long as the trial of a draft that keeps nearly everything, which
        is made now, and remembered as one of the study's.
        """
        switches = self.space.leaving_out
        typical = self.space.low_mask(0) if self.space.bits else switches[-1] if switches else 0
        started = time.perf_counter()
        self.objective(self.space.skip_config(typical))
        whole = time.perf_counter() - started
        seconds = whole * (candidates(count) + 1)
        if self.held_out:
            traced, held_out = (
                sum(ids.shape[1] + self.task.max_new_tokens for ids in some)
                for some in (self.traced, self.held_out)
            )
            share, more = held_out / traced, 1 + len(self.beside)
            seconds += share * (self.seconds["trace"] or 0.0) + share * whole * (count + more)
            seconds += (count + more) * PRICING_SECONDS
            texts = len(self.held_out) * self.task.max_new_tokens * self.objective.step_seconds
            # plain, the exit as slow as it, and drafts that halve it; prompts come on top
            seconds += texts * repeats * (1 + more + count / 2) * PROMPTS
        return seconds

    def choose(self, count: int = FINALISTS) -> list[Finalist]:
        """The best drafts by whole replays, on held-out prompts, too; after `run`.

        Where they are to be timed, and costs were measured here, theirs are measured again, as
        decoding does it. Those beside what was found have no other costs.
        """
        started = time.perf_counter()
        found = choose(self.study, self.space, self.objective, count, self.progress)
        beside = [fixed(name, skip, self.objective) for name, skip in self.beside.items()]
        self._price_again(beside if self._given or not self.held_out else found + beside)
        found = sorted(found + beside, key=lambda finalist: -finalist.predicted)
        if self.held_out:
            trace = self._trace(self.held_out)
            for number, finalist in enumerate(found):
                self.progress("the best drafts on other texts", number / len(found))
                finalist.predicted_held_out = predict(finalist, trace)
        self.finalists = found
        self.seconds["choose"] = time.perf_counter() - started
        return found

    def _price_again(self, finalists: list[Finalist]) -> None:
        texts = self.trace.texts
        ids = torch.cat([text.tokens[: text.prompt + text.emitted] for text in texts])  # (T,)
        ids = ids[None, : self.trace.context].to(self.opened.device)  # (1, T)
        request = Request(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.task.max_new_tokens,
            law=self.law,
            keys=[stream_key(self.task.seed)],
        )
        for number, finalist in enumerate(finalists):
            self.progress("prices of the best drafts", number / len(finalists))
            price_again(finalist, self.objective.looked_up.replay, request)

    def confirm(self, repeats: int = REPEATS) -> None:
        """Time the finalists and plain decoding in turn on the held-out prompts."""
        if not self.finalists:
            return
        started = time.perf_counter()
        batches = one_by_one(self.held_out)
        timed = partial(confirm, self.model, self.task, progress=self.progress)
        self.plain_tokens_per_second = timed(self.finalists, batches, repeats=repeats)
        # The fastest of several is partly the luckiest: what no price backs is timed anew.
        doubted = [each for each in self.finalists if each.price <= 1.0 and gains(each)]
        if doubted:
            timed(doubted, batches, repeats=2 * repeats)
        self.seconds["confirm"] = time.perf_counter() - started

    def result(self) -> SearchResult:
        """What was found; a config that drafts nothing where nothing is faster than plain."""
        best = winner(self.finalists)
        skip = SkipConfig(num_layers=self.space.num_layers, decoding=DecodingOptions(enabled=False))
        notes: dict[str, Any] = {"bound": self.bound}
        if best is not None:
            skip = best.skip
            notes |= {
                "alpha": best.alpha,
                "draft_cost": best.costs.draft,
                "predicted_speedup": best.predicted,
                "predicted_held_out": best.predicted_held_out,
                "confirmed": best.confirmed,
            }
        notes |= {
            "law": self.task.law,
            "max_new_tokens": self.task.max_new_tokens,
            "positions": self.trace.starts,
            "prompts": {"traced": len(self.traced), "held_out": len(self.held_out)},
            "trials": len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))),
        }
        if (
            skip.decoding is not None
            and self.task.do_sample
            and self.task.acceptance == "rejection"
        ):
            skip = replace(skip, decoding=replace(skip.decoding, acceptance="rejection"))
        name = getattr(self.model, "name_or_path", "") or None
        skip = replace(skip, model=name, model_hash=fingerprint(self.model), notes=notes)
        return SearchResult(
            skip, best, tuple(self.finalists), self.study, record(self), self._healed()
        )

    def _healed(self) -> SkipConfig | None:
        """Of the finalists that have the space's trained weights the best."""
        trained = self.space.trained
        having = [each for each in self.finalists if trained and each.skip.trained == trained]
        best = winner(having) or next(iter(having), None)
        return None if best is None else replace(best.skip, costs=None)


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        skip: the config to decode with; it drafts nothing where nothing was faster than plain
            decoding. `skip.notes` says what was measured.
        winner: the finalist that it is, if it is one.
        finalists: best first by prediction, with what the clock said of them.
        study: every trial, as Optuna has it.
        record: all of it as JSON values: what `layerskip report` reads, but for a header.
        healed: around healed weights, the best found that has them, to train further.
    """

    skip: SkipConfig
    winner: Finalist | None
    finalists: tuple[Finalist, ...]
    study: Study
    record: Mapping[str, Any]
    healed: SkipConfig | None = None
