"""A search from end to end, on a live model: trace, costs, study, finalists, winner; no files.

What a person waits for, in order: the target's texts on some prompts, what each sublayer costs, the
trials of a study, and the best few drafts on the clock. Each step is a method; `search` calls them.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from optuna import Study
from optuna.trial import TrialState
from torch import Tensor

from layerskip.bench.batches import one_by_one
from layerskip.bench.methods import Task
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.speculation import speedup_bound
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.exits import law_of
from layerskip.replay.trace import DRAFT_LENGTH, Trace, take_trace
from layerskip.search import seeds, study
from layerskip.search.finalists import Finalist, choose, confirm, gains, predict, winner
from layerskip.search.objective import Objective
from layerskip.search.rows import finalist_row, importance, trial_rows
from layerskip.search.space import Space
from layerskip.served import end_tokens
from layerskip.timing import sublayers as costs
from layerskip.timing.tables import machine

TRIALS_PER_SWITCH = 6
"""Trials of a study of no stated length; the strategy asks for at least four."""
FEWEST_TRIALS = 60
ATTEMPTS = 3
"""Measurements of the costs before a busy machine's are taken."""
FINALISTS = 3
REPEATS = 2

Progress = Callable[[str, float], None]
Asked = Literal["auto", 8, 4] | None


def low_bits(
    asked: Asked, model: Any, execution: str, cost: Mapping[str, Any] | None = None
) -> Literal[8, 4] | None:
    """Of the low precision that a search looks at: as asked, or what is fast, or what has prices.

    Only native passes have products of 8 bits that are faster than exact ones on every machine.
    """
    if asked != "auto":
        return asked
    if cost is not None:
        return cost.get("low_bits")
    return 8 if Sublayers(model, execution).execution == "native" else None


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
            given: a person's own configs, by name, to try first.

        Raises:
            ValueError: as `open_study`; a given config that the space does not hold.
        """
        planted = seeds.given(self.space, given or {})
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
                mine = self._measured()
                self.seconds["cost"] = time.perf_counter() - started
            self.study.set_user_attr("cost", dict(mine))
            known = self.study.user_attrs["cost"]  # another worker's, if that was later
        if self.space.bits and known.get("low_bits") != self.space.bits:
            raise ValueError(
                f"the costs given do not know low precision of {self.space.bits} bits; measure "
                "them with it, or leave them out"
            )
        if cost is not None and dict(cost) != known:
            raise ValueError(
                "the study's trials were priced with other costs than those given; choose another "
                "study name, or leave the costs out"
            )
        if known != mine:
            self._check_place(known.get("place"))
        self.objective = Objective(self.trace, known)
        return self.objective

    def _check_place(self, there: Mapping[str, Any] | None) -> None:
        """Refuse a study's costs that were measured elsewhere; warn where no one knows."""
        here = machine(self.opened)
        if there is None:
            warnings.warn(
                "the study does not say where its costs were measured (an older version made it): "
                "they are taken to hold here",
                stacklevel=3,
            )
            return
        differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if differing:
            raise ValueError(
                "the study's trials were priced with costs measured with "
                + ", ".join(f"{name} {there.get(name)}" for name in differing)
                + "; here it is "
                + ", ".join(str(here.get(name)) for name in differing)
                + ". Go on there, or choose another study name"
            )

    def _measured(self) -> dict[str, Any]:
        """The costs here, measured again where the machine was busy."""
        for _ in range(ATTEMPTS):
            found = costs.measure(
                self.opened,
                self.traced,
                law=self.law,
                bits=self.space.bits,
                progress=self.progress,
            )
            if not costs.disturbed(found):
                return found
        warnings.warn(
            f"other work on this machine disturbed the costs, {ATTEMPTS} times: what the search "
            "finds may be slower than it says; search again when the machine is quiet, under "
            "another study name",
            stacklevel=2,
        )
        return found

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

    def choose(self, count: int = FINALISTS) -> list[Finalist]:
        """The best drafts by whole replays, on held-out prompts, too; after `run`."""
        self.finalists = choose(self.study, self.space, self.objective, count, self.progress)
        if self.held_out:
            trace = self._trace(self.held_out)
            for finalist in self.finalists:
                finalist.predicted_held_out = predict(finalist, trace)
        return self.finalists

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
        return SearchResult(skip, best, tuple(self.finalists), self.study, self.record())

    def record(self) -> dict[str, Any]:
        """The search file, but for what its writer knows: header, and the prompts' names."""
        exits = {f"exit-{layer}" for layer in range(1, self.space.num_layers)}
        names = [finalist.name for finalist in self.finalists]
        best = winner(self.finalists)
        step = self.objective.step_seconds
        switches = len(self.space.switches) or 1
        return {
            "space": {**self.space.to_dict(), "switches": switches, "size": self.space.size},
            "trace": {
                "texts": len(self.trace.texts),
                "starts": self.trace.starts,
                "draft_length": self.draft_length,
            },
            "cost": self.objective.cost,
            "step_seconds": step,
            "bound": self.bound,
            "trials": trial_rows(self.study, self.space, step),
            "importance": importance(self.study),
            "finalists": [finalist_row(finalist) for finalist in self.finalists],
            "plain": {
                "predicted_tokens_per_second": 1.0 / step,
                "confirmed_tokens_per_second": self.plain_tokens_per_second,
            },
            "best_exit": next((name for name in names if name in exits), None),
            "winner": None if best is None else best.name,
            "seconds": self.seconds,
        }


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
    """

    skip: SkipConfig
    winner: Finalist | None
    finalists: tuple[Finalist, ...]
    study: Study
    record: Mapping[str, Any]


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Asked = "auto",
    allow_ends: bool = False,
    budget: int | None = None,
    trials: int | None = None,
    timeout: float | None = None,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    acceptance: str = "coupled",
    seed: int = 0,
    execution: str = "auto",
    draft_length: int = DRAFT_LENGTH,
    seeds: Mapping[str, SkipConfig] | None = None,
    cost: Mapping[str, Any] | None = None,
    storage: str | os.PathLike[str] | None = None,
    study_name: str = "layerskip",
    finalists: int = FINALISTS,
    repeats: int = REPEATS,
    progress: Progress = lambda _what, _share: None,
) -> SearchResult:
    """Search what a draft of a live model should leave out and round; writes no files.

    Args:
        model: a causal language model of a supported family, in evaluation mode.
        prompts: token ids, (T,) or (1, T) each, as `tokenizer(text, return_tensors="pt")` has them
            in `input_ids`. Some dozen that are like what the model will be asked.
        held_out: others, to time the finalists on; without them the prediction decides.
        space, allow_ends, budget: where to look; see `layerskip.search.space.Space`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 where products in 8 bits are
            fast (execution "native"), or what a given `cost` knows.
        trials: evaluations in all; by default so many as the space deserves.
        timeout: seconds after which no further trial starts.
        max_new_tokens: of each text, at most.
        do_sample, temperature, top_p, top_k, acceptance, seed: how the model will be decoded.
        seeds: configs of your own to try first, by name.
        cost: what `layerskip.timing.sublayers.measure` returned; measured by default.
        storage, study_name: where the trials are kept, and taken up again: a database URL, a
            journal file's path, or None for memory.
        finalists: how many drafts are replayed whole, and timed.
        repeats: timed calls of each of them per prompt.
        progress: told what is being done, in words, and the share of it that is done.

    Raises:
        ValueError: prompts that are none, empty or too long, settings out of range, a storage that
            cannot be opened or holds another search.
    """
    if finalists < 1 or repeats < 1:
        raise ValueError(
            f"finalists and repeats must be 1 or more, got {finalists} and {repeats}; to time "
            "nothing, give no held_out"
        )
    where = Space(
        kind=space,
        num_layers=model.config.num_hidden_layers,
        allow_ends=allow_ends,
        budget=budget,
        bits=low_bits(bits, model, execution, cost),
    )
    task = Task(
        max_new_tokens,
        do_sample,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        acceptance=acceptance,
        seed=seed,
        execution=execution,
    )
    going = Search(
        model,
        prompts,
        held_out,
        task=task,
        space=where,
        draft_length=draft_length,
        progress=progress,
    )
    going.open(storage, study_name, seeds)
    going.price(cost)
    going.run(
        trials,
        timeout=timeout,
        told=lambda at: progress(
            f"trials, best {at.best * going.objective.step_seconds:.2f}x", at.finished / at.trials
        ),
    )
    going.choose(finalists)
    if held_out:
        going.confirm(repeats)
    return going.result()
