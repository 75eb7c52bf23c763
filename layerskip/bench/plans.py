"""What a benchmark measures: its methods, priced, and the header of its records.

What a run to go on with has decided already (drafts, costs, draft lengths) stays as it is.
"""

from __future__ import annotations

import hashlib
import itertools
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

from layerskip.bench.batches import Encoded, PromptBatch
from layerskip.bench.methods import (
    BRANCHES,
    Engine,
    Method,
    Peer,
    Task,
    early_exit_peer,
)
from layerskip.checkpoints import Loaded
from layerskip.config import SkipConfig
from layerskip.costs.pricing import cost_table
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import WITH_THRESHOLD
from layerskip.decoding.sources.kept_laws import Laws
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.lookup_laws import LookupLaws
from layerskip.environment import environment
from layerskip.files.records import SCHEMA, Run, costs_key, redacted
from layerskip.model.assistants import hands_over_keys, is_assistant
from layerskip.model.fingerprint import fingerprint
from layerskip.model.opening import open_model
from layerskip.model.sublayers import Sublayers
from layerskip.prompts import Prompt
from layerskip.replay.exits import best_exit, exit_trace, law_of
from layerskip.timing.sublayers import measure

TRACE_TOKENS = 64  # of each text of a trace, at most
TRACE_PROMPTS = 2  # of each category
PRICE_SECONDS = 2.0  # that measuring what drafts cost may take, by batch size and context

PROMPT_LOOKUP_TOKENS = 10  # the value that transformers' documentation shows


def make_header(
    loaded: Loaded,
    opened: Sublayers,
    task: Task,
    prompts: Sequence[Prompt],
    path: Path | None,
    encoded: Sequence[Encoded] = (),
) -> dict[str, Any]:
    """The header but for what the command adds: repeats, warm-ups, batch sizes, methods.

    Args:
        path: the prompts' file.
        encoded: what is made of them, if they are joined or cut.
    """
    content = [[p.id, p.category, p.text, p.messages] for p in prompts]
    categories = [p.category or "none" for p in encoded or prompts]
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
        "law": task.law,
        "max_new_tokens": task.max_new_tokens,
        "prompts": {
            "name": "shipped" if path is None else path.name,
            "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "count": len(categories),
            "categories": {name: categories.count(name) for name in dict.fromkeys(categories)},
        },
        "contexts": sorted({p.context for p in encoded if p.context is not None}) or None,
        "baseline": "plain",
    }


class Talk(Protocol):
    """Where words for the person who waits go: lines that stay, and one that is replaced."""

    def say(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """From what was asked for, and what a run to go on with has decided already, to methods."""

    loaded: Loaded
    task: Task
    prompts: Sequence[Encoded]
    """For quick traces, not joined to long ones."""
    batches: Sequence[PromptBatch]
    found: Run | None
    talk: Talk

    def engines(
        self,
        kinds: set[str],
        given: Sequence[tuple[str, SkipConfig]],
        lookup: bool | Lookup | None,
        default: SkipConfig | None,
        assistant: Loaded | None,
        controllers: Sequence[str | None] = (None,),
        max_draft_length: int | None = None,
        threshold: float | None = None,
        laws: Laws | None = None,
        branches: bool | None = None,
    ) -> list[Engine]:
        """The methods of this engine that draft: one for every source, and controller.

        Args:
            given: skip configs of "self", with names; without any what drafts without set-up.
            lookup: whether, and in which other texts, "self" looks drafts up; None: as its skip
                config says, and where there is none it does.
            default: the model's own draft where none is given, if it has one.
            assistant: the second model of "self-assistant".
            controllers: None is the skip config's own, or the default.
            threshold: of those controllers that have one.
            laws: of earlier texts, which every call of "self" and "self-laws" starts with.
            branches: True: those that may have any are measured with and without; None is the skip
                config's own.
        """
        sources: list[tuple[str, str, dict[str, Any]]] = []  # kind, label, what drafts
        for label, skip in given if "self" in kinds else ():
            stored = skip.decoding is not None and skip.decoding.lookup is True
            how = stored if lookup is None else lookup
            sources.append(("self", label, {"skip": self._checked(skip), "lookup": how}))
        if "self" in kinds and not given:
            own_skip = self._decided("self", default)
            how = True if lookup is None else lookup
            if own_skip is not None or how:
                sources.append(("self", "default", {"skip": own_skip, "lookup": how}))
        if "self-lookup" in kinds:
            sources.append(("self-lookup", "lookup", {"lookup": lookup or True}))
        joined = lookup if isinstance(lookup, Lookup) else Lookup()
        trees = LookupLaws(known=laws, lookup=joined)
        if laws is not None:
            for _, _, own in sources:
                own |= {"trees": trees}
        if "self-laws" in kinds:
            sources.append(("self-laws", "laws", {"trees": trees}))
        if "self-8bit" in kinds:
            sources.append(("self-8bit", "8-bit", {"skip": SkipConfig.low_precision(8)}))
        if "self-assistant" in kinds and assistant is not None:
            second = {"assistant": assistant.opened(self.task.execution), "named": assistant.name}
            sources.append(("self-assistant", "assistant", second))
        if "self-exit" in kinds:
            exit_ = self._decided("self-exit", None) or self.best_exit
            sources.append(("self-exit", f"exit-{exit_.exit_layer}", {"skip": exit_}))
        found: dict[str, Engine] = {}
        ways = (False, True) if branches else (branches,)
        for (kind, label, own), controller, way in itertools.product(sources, controllers, ways):
            each = Engine(
                self.loaded.model,
                self.task,
                controller=controller,
                max_draft_length=max_draft_length,
                branches=way,
                draft=label,
                **own,
            )
            if way and not each.may_branch:
                continue
            if each.controller in WITH_THRESHOLD and threshold is not None:
                each.threshold = threshold
            several = sum(other == kind for other, _, _ in sources) > 1
            parts = [kind, *([label] if several else [])]
            parts += [str(each.controller)] if len(controllers) > 1 else []
            name = ":".join(parts) + (BRANCHES if way else "")
            like = sum(other.partition("#")[0] == name for other in found)
            each.name = f"{name}#{like + 1}" if like else name
            found[each.name] = each
        if branches and not any(each.branches for each in found.values()):
            which = "a draft that takes steps, and expected-gain"
            warnings.warn(f"--branches has no effect without {which}", stacklevel=2)
        used = any(each.controller in WITH_THRESHOLD for each in found.values())
        if threshold is not None and found and not used:
            rule = " or ".join(WITH_THRESHOLD)
            warnings.warn(f"--threshold has no effect without {rule}", stacklevel=2)
        return list(found.values())

    def methods(
        self, kinds: set[str], engines: Sequence[Engine], assistant: Loaded | None
    ) -> list[Method]:
        """All methods to measure, what their drafts cost measured."""
        model, task = self.loaded.model, self.task
        by_name = {each.name: each for each in engines}
        for each in engines:
            twin = by_name.get(each.name.removesuffix(BRANCHES))
            if twin is None or twin is each:
                self._price(each)
            else:  # so that they differ by their branches alone
                each.prices, each.costs = twin.prices, twin.costs
        methods: list[Method] = [Engine(model, task), *engines]
        if "generate" in kinds:
            methods.append(Peer(model, task))
        if "generate-early-exit" in kinds and not hasattr(model.config, "num_hidden_layers"):
            warnings.warn(
                f"generate-early-exit is left out: transformers cannot exit a "
                f"{type(model).__name__} early",
                stacklevel=2,
            )
        elif "generate-early-exit" in kinds:
            methods.append(early_exit_peer(model, task, self._depth(engines)))
        if (name := "generate-prompt-lookup") in kinds:
            copied = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
            told = {"num_tokens": PROMPT_LOOKUP_TOKENS}
            methods.append(Peer(model, task, name, options=copied, details=told))
        if (name := "generate-assistant") in kinds and assistant is not None:
            second = {"assistant_model": assistant.model}
            named = {"assistant": assistant.name}
            if is_assistant(assistant.model.config) and not hands_over_keys(model.config):
                self.talk.say(f"{name} is left out: transformers hands over no keys of this model")
            else:
                methods.append(Peer(model, task, name, options=second, details=named))
        alone = [m.name for m in methods if m.one_row]
        if alone and any(batch.rows > 1 for batch in self.batches):
            self.talk.say(f"{', '.join(alone)}: batch size 1 only, transformers refuses more")
        return methods

    def _decided(self, name: str, otherwise: SkipConfig | None) -> SkipConfig | None:
        """The skip config that a run to go on with has for a method."""
        entry = next((e for n, e in self._known.items() if n.partition(":")[0] == name), None)
        if entry is None:
            return otherwise
        return None if entry["skip"] is None else SkipConfig.from_dict(entry["skip"])

    def _checked(self, skip: SkipConfig) -> SkipConfig:
        model = self.loaded.model
        skip.resolve(model.config.get_text_config().num_hidden_layers)
        skip.warn_if_foreign(self.loaded.name, fingerprint(model))
        return replace(skip, model=None, model_hash=None)  # said once is enough

    @cached_property
    def best_exit(self) -> SkipConfig:
        """The exit of the highest predicted speedup, from a trace of a few prompts."""
        layer, speedup = best_exit(
            self.trace["what_if"],
            lambda exit_: cost_table(self.sublayer_costs, SkipConfig.early_exit(exit_)),
        )
        self.talk.say(f"best exit of a quick trace: {layer} (predicted {speedup:.2f}x)")
        return SkipConfig.early_exit(layer)

    def _depth(self, engines: Sequence[Engine]) -> int:
        """The early exit of transformers: that runs as many sublayers as our draft, if it can."""
        known = self._known.get("generate-early-exit")
        if known is not None:
            return int(known["exit_layer"])
        layers = int(self.loaded.model.config.get_text_config().num_hidden_layers)
        kept = [len(each.skip.kept(layers)) for each in engines if each.skip is not None]
        shorter = [count for count in kept if count < 2 * layers]
        if not shorter:
            return int(self.best_exit.exit_layer or 1)
        return max(1, min(layers - 1, round(shorter[0] / 2)))

    def _price(self, method: Engine) -> None:
        known = self._known.get(method.name, {}).get("costs")
        if known:
            method.prices = known
            names = ("draft", "verify", "source")
            for key, costs in known.items():
                method.use(key, CostTable.from_dict({name: costs[name] for name in names}))
            return
        self.talk.progress(f"measuring what drafting costs: {method.name}")
        price(method, self.batches)

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
            [each.ids for each in few],
            names=[each.name for each in few],
            law=self._law,
            max_new_tokens=min(self.task.max_new_tokens, TRACE_TOKENS),
            progress=self._progress,
        )

    @cached_property
    def sublayer_costs(self) -> dict[str, Any]:
        """What sublayers cost, on the same prompts."""
        return measure(
            self._opened,
            [each.ids for each in self._few()],
            law=law_of(self._law),
            progress=self._progress,
        )

    def _few(self) -> list[Encoded]:
        """The first prompts of every category."""
        chosen: dict[str | None, list[Encoded]] = {}
        for prompt in self.prompts:
            chosen.setdefault(prompt.category, []).append(prompt)
        return [prompt for each in chosen.values() for prompt in each[:TRACE_PROMPTS]]

    @property
    def _opened(self) -> Sublayers:
        # single sublayers can be timed, and traces replayed, on the path that is compiled only
        execution = "fused" if self.task.execution == "compiled" else self.task.execution
        return open_model(self.loaded.model, execution)

    @property
    def _law(self) -> dict[str, Any]:
        """What texts are drawn from; an accept rule does not matter to a trace."""
        law = self.task.law
        return {**law, "acceptance": "coupled"} if law["do_sample"] else law

    def _progress(self, what: str, share: float) -> None:
        self.talk.progress(f"{what}, {share:.0%}")


def price(method: Engine, batches: Sequence[PromptBatch]) -> None:
    """Measure what drafting costs, once, and give it to the method for all its calls."""
    task = replace(method.task, acceptance="coupled")
    own = None if method.skip is None else method.skip.bare()
    drafts = {"lookup": method.lookup, "trees": method.trees, "assistant": method.assistant}
    bare = Engine(method.model, task, skip=own, **drafts)
    for key, alike in itertools.groupby(
        batches, lambda batch: costs_key(batch.rows, batch.context)
    ):
        few = [*alike]
        lengths = [length for batch in few for length in batch.attention_mask.sum(-1).tolist()]
        length = round(statistics.median(lengths))
        found = bare.prepare(few[0].rows, length, PRICE_SECONDS)
        method.prices[key] = found.to_dict()
        method.use(key, found)
