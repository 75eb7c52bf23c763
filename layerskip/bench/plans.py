"""From what a benchmark is asked for to its methods and header; knows no flags and writes nothing.

What a run to go on with has decided already (drafts, costs, draft lengths) stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from layerskip.bench.batches import Batch
from layerskip.bench.methods import (
    Clock,
    Engine,
    Method,
    Peer,
    Task,
    early_exit_peer,
)
from layerskip.bench.runner import device_clock
from layerskip.checkpoints import Loaded
from layerskip.config import SkipConfig
from layerskip.costs.pricing import cost_table
from layerskip.costs.speculation import CostTable
from layerskip.environment import environment
from layerskip.files.records import SCHEMA, Run, redacted
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.prompts import Prompt
from layerskip.replay.exits import best_exit, exit_trace, law_of
from layerskip.timing.sublayers import measure

TRACE_TOKENS = 64  # of each text of a trace, at most
TRACE_PROMPTS = 2  # of each category
CALIBRATION_TOKENS = 48  # of each prompt that tells what a step costs and how long drafts get
CALIBRATION_BATCHES = 3
_Named = tuple[str, str | None, Tensor]  # name, category, token ids (1, T)

PROMPT_LOOKUP_TOKENS = 10  # the value that transformers' documentation shows
WITH_THRESHOLD = ("confidence", "adaptive-threshold")


def make_header(
    loaded: Loaded, opened: Sublayers, task: Task, prompts: Sequence[Prompt], path: Path | None
) -> dict[str, Any]:
    """The header but for what the command adds: repeats, warm-ups, batch sizes, methods."""
    content = [[p.id, p.category, p.text, p.messages] for p in prompts]
    categories = [p.category or "none" for p in prompts]
    found = environment()
    model = loaded.model
    return {
        "kind": "header",
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "argv": [redacted(argument) for argument in sys.argv[1:]],
        "environment": found,
        "model": {
            "name": loaded.name,
            "hash": fingerprint(model),
            "architecture": model.config.model_type,
            "num_layers": opened.num_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "device": str(opened.device),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "threads": found["cpu"]["threads"],
        "execution": opened.execution,
        "passes": opened.describe(),
        "weights": {
            **opened.weight_bytes(),
            "vocabulary": opened.vocabulary,
            "low": {str(bits): opened.weight_bytes(bits) for bits in (8, 4)},
        },
        "law": task.law,
        "max_new_tokens": task.max_new_tokens,
        "prompts": {
            "name": "shipped" if path is None else path.name,
            "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "count": len(prompts),
            "categories": {name: categories.count(name) for name in dict.fromkeys(categories)},
        },
        "baseline": "plain",
    }


class Talk(Protocol):
    """Where words for the person who waits go: lines that stay, and one that is replaced."""

    def say(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...


@dataclass(frozen=True)
class Drafting:
    """How `self` drafts; a controller of None is the skip config's own, or the default."""

    controllers: Sequence[str | None]
    max_draft_length: int | None
    threshold: float | None


@dataclass(frozen=True)
class Plan:
    """From what was asked for, and what a run to go on with has decided already, to methods."""

    loaded: Loaded
    task: Task
    prompts: Sequence[_Named]
    batches: Sequence[Batch]
    found: Run | None
    talk: Talk

    def skips(self, given: list[tuple[str, SkipConfig]]) -> list[tuple[str, SkipConfig]]:
        """The drafts, with names: those given, the one beside the checkpoint, or the best exit."""
        if not given and (own := self.loaded.skip_config()) is not None:
            given = [("layerskip", own)]
        if not given:
            entries = [entry for entry in self._known.values() if entry["kind"] == "self"]
            known = {entry["draft"]: entry["skip"] for entry in entries}
            given = [(name, SkipConfig.from_dict(skip)) for name, skip in known.items()]
        if not given:
            given = [self._best_exit()]
        return [(name, self._checked(skip)) for name, skip in given]

    def _checked(self, skip: SkipConfig) -> SkipConfig:
        model = self.loaded.model
        skip.resolve(model.config.num_hidden_layers)
        skip.warn_if_foreign(self.loaded.name, fingerprint(model))
        return replace(skip, model=None, model_hash=None)  # said once is enough

    def _best_exit(self) -> tuple[str, SkipConfig]:
        """The exit of the highest predicted speedup, from a trace of a few prompts."""
        layer, speedup = best_exit(
            self.trace["what_if"],
            lambda exit_: cost_table(self.sublayer_costs, SkipConfig.early_exit(exit_)),
        )
        self.talk.say(f"best exit of a quick trace: {layer} (predicted {speedup:.2f}x)")
        return f"exit-{layer}", SkipConfig.early_exit(layer)

    def methods(
        self,
        kinds: set[str],
        skips: Sequence[tuple[str, SkipConfig]],
        options: Drafting,
        assistant: Loaded | None,
    ) -> list[Method]:
        """All methods to measure, what their drafts cost measured."""
        model, task = self.loaded.model, self.task
        plain = Engine(model, task)
        methods: list[Method] = [plain]
        ours = self._drafting(skips, options) if skips else []
        for each in ours if "self" in kinds else ():
            self._price(each, plain)
            methods.append(each)
        if "generate" in kinds:
            methods.append(Peer(model, task))
        if "generate-early-exit" in kinds:
            first = ours[0]
            assert first.skip is not None
            depth = _depth(first.skip, model.config.num_hidden_layers)
            length = self._matched_length(first)
            methods += [early_exit_peer(model, task, depth)]
            methods += [early_exit_peer(model, task, depth, length)]
        if "generate-prompt-lookup" in kinds:
            copied = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
            told = {"num_tokens": PROMPT_LOOKUP_TOKENS}
            methods.append(
                Peer(model, task, "generate-prompt-lookup", options=copied, details=told)
            )
        if assistant is not None:
            second, name = {"assistant_model": assistant.model}, {"assistant": assistant.name}
            methods.append(Peer(model, task, "generate-assistant", options=second, details=name))
        alone = [m.name for m in methods if m.one_row]
        if alone and any(batch.rows > 1 for batch in self.batches):
            self.talk.say(f"{', '.join(alone)}: batch size 1 only, transformers refuses more")
        return methods

    def _drafting(self, skips: Sequence[tuple[str, SkipConfig]], options: Drafting) -> list[Engine]:
        """One method for every skip config and controller, with names that tell them apart."""
        found: dict[str, Engine] = {}
        for label, skip in skips:
            for controller in options.controllers:
                each = Engine(
                    self.loaded.model,
                    self.task,
                    skip=skip,
                    controller=controller,
                    max_draft_length=options.max_draft_length,
                    draft=label,
                )
                if each.controller in WITH_THRESHOLD and options.threshold is not None:
                    each.threshold = options.threshold
                parts = [label] if len(skips) > 1 else []
                parts += [str(each.controller)] if len(options.controllers) > 1 else []
                name = ":".join(["self", *parts])
                like = sum(other.partition("#")[0] == name for other in found)
                each.name = f"{name}#{like + 1}" if like else name
                found[each.name] = each
        used = any(each.controller in WITH_THRESHOLD for each in found.values())
        if options.threshold is not None and not used:
            rule = " or ".join(WITH_THRESHOLD)
            warnings.warn(f"--threshold has no effect without {rule}", stacklevel=2)
        return list(found.values())

    def _price(self, method: Engine, plain: Engine) -> None:
        known = self._known.get(method.name, {}).get("costs")
        if known:
            method.prices = known
            names = ("draft", "verify", "source")
            for size, costs in known.items():
                table = CostTable.from_dict({name: costs[name] for name in names})
                method.use(int(size), table)
            return
        self.talk.progress(f"measuring what drafting costs: {method.name}")
        price(method, plain, self.batches, device_clock(self.batches[0].input_ids.device))

    def _matched_length(self, method: Engine) -> int:
        """How long drafts of transformers' early exit are, to be like the method's."""
        for name, entry in self._known.items():
            if entry["kind"] == "generate-early-exit" and name != entry["kind"]:
                return int(entry["num_assistant_tokens"])
        self.talk.progress(f"how long the drafts of {method.name} are")
        return mean_draft_length(method, self.batches)

    @cached_property
    def _known(self) -> dict[str, dict[str, Any]]:
        """What a run to go on with says of its methods, by name."""
        entries = self.found.header["methods"] if self.found else []
        return {entry["name"]: entry for entry in entries}

    @cached_property
    def trace(self) -> dict[str, Any]:
        """What every exit would have drafted, on the first prompts of every category."""
        few = self._few()
        return exit_trace(
            self._opened,
            [ids for _, _, ids in few],
            names=[name for name, _, _ in few],
            law=self._law,
            max_new_tokens=min(self.task.max_new_tokens, TRACE_TOKENS),
            progress=self._progress,
        )

    @cached_property
    def sublayer_costs(self) -> dict[str, Any]:
        """What sublayers cost, on the same prompts."""
        return measure(
            self._opened,
            [ids for _, _, ids in self._few()],
            law=law_of(self._law),
            progress=self._progress,
        )

    def _few(self) -> list[_Named]:
        """The first prompts of every category."""
        chosen: dict[str | None, list[_Named]] = {}
        for prompt in self.prompts:
            chosen.setdefault(prompt[1], []).append(prompt)
        return [prompt for each in chosen.values() for prompt in each[:TRACE_PROMPTS]]

    @property
    def _opened(self) -> Sublayers:
        # single sublayers can be timed, and traces replayed, on the path that is compiled only
        execution = "fused" if self.task.execution == "compiled" else self.task.execution
        return Sublayers(self.loaded.model, execution=execution)

    @property
    def _law(self) -> dict[str, Any]:
        """What texts are drawn from; an accept rule does not matter to a trace."""
        law = self.task.law
        return {**law, "acceptance": "coupled"} if law["do_sample"] else law

    def _progress(self, what: str, share: float) -> None:
        self.talk.progress(f"{what}, {share:.0%}")


def _depth(skip: SkipConfig, num_layers: int) -> int:
    """The early exit that runs as many sublayers as the draft does."""
    return max(1, min(num_layers - 1, round(len(skip.kept(num_layers)) / 2)))


def calibration(batches: Sequence[Batch], size: int) -> list[Batch]:
    """A few batches of that size, of different categories where there are any."""
    of_size = [batch for batch in batches if batch.rows == size]
    step = max(1, len(of_size) // CALIBRATION_BATCHES)
    return of_size[::step][:CALIBRATION_BATCHES]


def price(method: Engine, plain: Engine, batches: Sequence[Batch], now: Clock) -> None:
    """Measure what drafting costs, once, and give it to the method for all its calls."""
    assert method.skip is not None
    task = replace(method.task, acceptance="coupled")
    for size in sorted({batch.rows for batch in batches}):
        few = calibration(batches, size)
        bare = Engine(method.model, task, skip=method.skip.bare())
        measured = bare.generate(few[0], max_new_tokens=1)
        assert measured.costs is not None
        steps = []
        for batch in few:
            rounds = plain.generate(batch, now, max_new_tokens=_shorter(task)).rounds
            steps += [r.times[-1] - r.times[0] for r in (rounds or [])[1:] if r.times is not None]
        method.prices[str(size)] = {
            **measured.costs.to_dict(),
            "step_seconds": statistics.median(steps) if steps else None,
        }
        method.use(size, measured.costs)


def mean_draft_length(method: Engine, batches: Sequence[Batch]) -> int:
    """Tokens the method drafts in a round that drafts, on a few prompts, rounded; at least 1."""
    if method.controller == "fixed" and method.max_draft_length is not None:
        return method.max_draft_length
    drafts = drafted = 0
    for batch in calibration(batches, min(batch.rows for batch in batches)):
        stats = method.generate(batch, max_new_tokens=_shorter(method.task)).stats
        assert stats is not None
        drafts += stats.num_drafts
        drafted += stats.num_draft_tokens
    return max(1, round(drafted / drafts)) if drafts else 1


def _shorter(task: Task) -> int:
    return min(task.max_new_tokens, CALIBRATION_TOKENS)
