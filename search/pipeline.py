"""A search from start to end on a live model: `search` makes it in one call, `Search` by steps.

What a person waits for, in order: the target's texts on some prompts, what each sublayer costs, the
trials of a study, and the best few drafts on the clock. No files are written but the study's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
import uuid
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
from layerskip.defaults import automatic_draft
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.exits import law_of
from layerskip.replay.trace import Trace, take_trace
from layerskip.requests import check_tokens, end_tokens, sampling_of
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
from layerskip.search.fitting import Bits, space_for, typical_context
from layerskip.search.objective import Objective
from layerskip.search.record import record
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


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        skip: the config to decode with: the winner's; the default, where that is as fast; one that
            drafts nothing where nothing was faster than plain decoding. `skip.notes` says what was
            measured.
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


def search(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    held_out: Sequence[Tensor] = (),
    space: str = "sublayer",
    bits: Bits = "auto",
    allow_ends: bool = False,
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
        space, allow_ends: where to look; see `layerskip.search.space.Space`.
        bits: of low precision, 8 or 4, or None for none. "auto" is 8 where products in 8 bits are
            fast (execution "native"), or what a given `cost` knows.
        trials: evaluations in all; by default so many as the space deserves.
        timeout: seconds after which trials end.
        max_new_tokens: of each text, at most.
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
        model,
        execution,
        first or {},
        kind=space,
        bits=bits,
        allow_ends=allow_ends,
        cost=cost,
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
    steps = Search(model, prompts, held_out, task=task, space=where, progress=progress)
    steps.open(storage, study_name, first)
    steps.price(cost)
    steps.run(
        trials,
        timeout=timeout,
        on_trial=lambda at: progress(f"trials, best {at.best:.2f}x", at.finished / at.trials),
    )
    steps.choose(finalists)
    if held_out:
        steps.confirm(repeats)
    return steps.result()


class Search:
    """The steps of one search; each leaves what it found.

    Args:
        model: a causal language model.
        traced: token ids of the calibration prompts, (T,) or (1, T) each.
        held_out: of the prompts that finalists are timed on; none: nothing is timed.
        task: what is decoded: law, tokens, seed, execution.
        space: where to look.
        progress: called with what is being done, in words, and the share of it that is done.
        until: of `time.monotonic`: what follows the trials does less of everything to end by then.

    Attributes:
        trace: the target's texts.
        study: its trials; after `open`.
        objective: what a config is worth; after `price`.
        finalists: after `choose`; timed after `confirm`.
        default: after `confirm`, how fast decoding was that drafts as it does unasked.
        winner, keep_default: after `decide`.
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

        Args:
            storage, name: as for `layerskip.search.study.open_study`.
            first: a person's own configs, by name, to try first.

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
        if "seeds" not in self.study.user_attrs:
            hidden = warm_starts.hidden_states(self.trace)
            found = warm_starts.standard(self.space)
            found |= warm_starts.from_hidden_states(self.space, hidden)
            self.study.set_user_attr("seeds", {n: f"{mask:#x}" for n, mask in found.items()})
        self._said_before = self.study.user_attrs
        kept = {n: int(mask, 16) for n, mask in self.study.user_attrs["seeds"].items()}
        self.warm_starts = given | {n: mask for n, mask in kept.items() if n not in given}

    def price(self, cost: Mapping[str, Any] | None = None) -> None:
        """Measure what sublayers cost, unless the study, or the caller, knows; after `open`.

        Every machine has its own costs, and with other threads others: what its trials are worth is
        a ratio to its own plain decoding. Those that a caller gives are taken to hold here,
        wherever they were measured.

        Raises:
            ValueError: trials of this machine were priced with other costs than those given.
        """
        self._costs_given = cost is not None
        low = self.space.everything_low
        here = json.dumps([socket.gethostname(), machine(self.opened)])
        known = self.study.user_attrs.get(f"cost {here}")
        if known is None:
            if cost is None:
                started = time.perf_counter()
                seen = {self.trace.context, *(window + SINK for window in self.space.windows)}
                cost = measured_costs(
                    self.opened, self.traced, self.law, low, sorted(seen), self.progress, self.until
                )
                self.seconds["cost"] = time.perf_counter() - started
            known = dict(cost)
            self.study.set_user_attr(f"cost {here}", known)
        facts = low_facts(low)
        if facts and facts != {name: known[name] for name in LOW_FACTS if name in known}:
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
        self.objective = Objective(self.trace, known)

    @property
    def bound(self) -> float:
        """1/c of the cheapest draft of the space: no config of it can be faster, times plain."""
        shallow = self.space.exit_mask(1)
        masks = [shallow, *([self.space.low_mask(shallow)] if self.space.bits else [])]
        fewer = [(0, *bits.values()) for bits in (self.space.fewer_experts, self.space.narrower)]
        masks = [mask | few | near for mask in masks for few, near in product(*fewer)]
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
        """Go on with the study until it has so many trials; after `price`.

        Raises:
            ValueError: as `layerskip.search.study.run`.
        """
        if trials is None:
            switches = TRIALS_PER_SWITCH * len(self.space.switches)
            trials = min(self.space.size, max(FEWEST_TRIALS, switches))
        started = time.perf_counter()
        if timeout is not None:
            self.objective.until = time.monotonic() + timeout
        try:
            study.run(
                self.study,
                self.space,
                self.objective,
                trials=trials,
                warm_starts=self.warm_starts,
                seed=self.task.seed,
                timeout=timeout,
                on_trial=on_trial,
            )
        finally:
            self.seconds["trials"] = time.perf_counter() - started

    def seconds_after_trials(self, count: int = FINALISTS, repeats: int = REPEATS) -> float:
        """About how many seconds `choose` and `confirm` will take; after `price`, before `run`.

        What they replay takes as long as the trial of a draft that keeps nearly everything, which
        is made now, and remembered as one of the study's.
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
        agreed = self._agreed("finalists") or ()
        found = choose(
            self.study, self.space, self.objective, count, self.progress, replayed, agreed
        )
        self._say("finalists", [finalist.trial for finalist in found])
        again = [] if self._costs_given or not self.held_out else list(found)
        default = automatic_draft(self.opened).skip if self.space.trained else None
        if default is not None:
            found.append(default_draft(default, self.objective))
            again.append(found[-1])
        for number, finalist in within(again, priced):
            self.progress("prices of the best drafts", number / len(again))
            price_again(finalist, self.objective.looked_up.replay, self._typical_request())
        found.sort(key=lambda finalist: -finalist.predicted)
        if self.held_out:
            self._hold_out_less()
            trace = self._trace(self.held_out)
            for number, finalist in within(found, predicted):
                self.progress("the best drafts on other texts", number / len(found))
                finalist.predicted_held_out = predict(finalist, trace)
        self.finalists = found
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

    def _agreed(self, what: str) -> Any:
        """What another worker of the study said of the same trials since this one began, if any."""
        said = self.study.user_attrs.get(what)
        if said is None or said == self._said_before.get(what) or said["of"] != self._judged():
            return None
        return said["is"]

    def _say(self, what: str, value: Any) -> None:
        """Let other workers know."""
        said = {"is": value, "of": self._judged(), "by": uuid.uuid4().hex}
        self._said_before[what] = said
        self.study.set_user_attr(what, said)

    def _judged(self) -> dict[str, Any]:
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return {"trials": len(complete), "timed": bool(self.held_out)}

    def decide(self) -> None:
        """Name the winner: that of the worker which was first, after `confirm`.

        The best are near each other, and two clocks would not always name the same.
        """
        agreed = self._agreed("winner")
        if agreed is None:
            self.winner = winner(self.finalists)
            self.keep_default = keeps_default(self.winner, self.default)
            name, trial = (self.winner.name, self.winner.trial) if self.winner else (None, None)
            agreed = {"name": name, "trial": trial, "keep_default": self.keep_default}
            self._say("winner", agreed)
            return
        self.keep_default = agreed["keep_default"]
        if agreed["trial"] is not None and agreed["name"] not in self._named():
            only = [agreed["trial"]]
            self.finalists += choose(self.study, self.space, self.objective, 1, only=only)
        self.winner = self._named().get(agreed["name"])

    def _named(self) -> dict[str | None, Finalist]:
        return {finalist.name: finalist for finalist in self.finalists}

    def result(self) -> SearchResult:
        """What was found, and the config to decode with: see `SearchResult`."""
        self.decide()
        best = self.winner
        skip = SkipConfig(num_layers=self.space.num_layers)
        decoding = DecodingOptions(enabled=False)
        notes: dict[str, Any] = {"bound": self.bound}
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
        notes |= {
            "keep_default": self.keep_default,
            "law": self.task.law,
            "max_new_tokens": self.task.max_new_tokens,
            "positions": self.trace.starts,
            "prompts": {"traced": len(self.traced), "held_out": len(self.held_out)},
            "trials": len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))),
        }
        if self.task.do_sample and self.task.acceptance == "rejection":
            decoding = replace(decoding, acceptance="rejection")
        skip = replace(
            skip,
            decoding=decoding,
            model=getattr(self.model, "name_or_path", "") or None,
            model_hash=fingerprint(self.model),
            notes=notes,
        )
        trained = self.space.trained
        having = [each for each in self.finalists if trained and each.skip.trained == trained]
        healed = winner(having) or next(iter(having), None)
        return SearchResult(
            skip,
            best,
            tuple(self.finalists),
            self.study,
            record(self),
            None if healed is None else replace(healed.skip, costs=None),
        )


def measured_costs(
    model: Sublayers,
    prompts: Sequence[Tensor],
    law: Law,
    low: SkipConfig | None,
    contexts: Sequence[int],
    progress: Progress,
    until: float = math.inf,
) -> dict[str, Any]:
    """What sublayers cost here, measured again where the machine was busy.

    Arguments and result are those of `layerskip.timing.sublayers.measure`.

    Args:
        until: of `time.monotonic`, when the whole search ends: a tenth of what is left is enough.
    """
    patience = min(PATIENCE, FOR_COSTS * max(0.0, until - time.monotonic()))
    attempts = 0
    for _ in within(range(ATTEMPTS), time.monotonic() + patience):
        attempts += 1
        found = sublayer_costs.measure(
            model,
            prompts,
            contexts=[min(context, model.max_positions // 2) for context in contexts],
            law=law,
            low=low,
            budget=max(0.1, min(BUDGET, patience)),
            progress=progress,
        )
        if not sublayer_costs.disturbed(found):
            return found
    warnings.warn(
        f"other work on this machine disturbed the costs, {attempts} times: what the search "
        "finds may be slower than it says; search again when the machine is quiet, under "
        "another study name",
        stacklevel=3,
    )
    return found
