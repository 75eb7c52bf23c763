"""What a benchmark measures: its methods with their costs, and the header of its records."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from layerskip.api.arguments import law_of
from layerskip.api.generation import LayerSkipDecoding
from layerskip.api.loading import Loaded
from layerskip.api.own_exits import OwnExits
from layerskip.bench.batches import Encoded, PromptBatch
from layerskip.bench.llama_cpp import LLAMAS, open_llama
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.config.registry import WITH_THRESHOLD, installed
from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.engine import Request
from layerskip.decoding.sources import HEADS
from layerskip.decoding.sources.universal import UniversalAssistant
from layerskip.files.environment import environment, free_memory
from layerskip.files.records import SCHEMA, RunFile, costs_key, redacted
from layerskip.model.assistants import is_assistant, library_can_assist
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import sublayers_of
from layerskip.replay.exit_sweep import exit_sweep
from layerskip.texts.prompts import Prompt
from layerskip.timing.cost_tables import cost_tables
from layerskip.weights.fingerprint import fingerprint
from layerskip.weights.stored import stored_weights, unpacked_model

SWEEP_TOKENS = 64  # maximum number of tokens of each text in a sweep
SWEEP_PROMPTS = 2  # per category
SWEEP_BEST = 3  # cells of a sweep that are timed afterwards
PRICE_SECONDS = 2.0  # time limit for measuring costs, per batch size and context

PROMPT_LOOKUP_TOKENS = 10  # the value in transformers' documentation


def make_header(
    loaded: Loaded,
    opened: OpenedModel,
    task: Task,
    prompts: Sequence[Prompt],
    path: Path | None,
    encoded: Sequence[Encoded] = (),
) -> dict[str, Any]:
    """Make the header, except what the command adds: repeats, warm-ups, batch sizes, methods.

    Args:
        path: the file of prompts.
        encoded: the prompts as they are used, if they are joined or cut.
    """
    content = [[p.id, p.category, p.text, p.messages] for p in prompts]
    categories = [p.category or "none" for p in encoded or prompts]
    machine = environment()
    model = loaded.model
    return {
        "kind": "header",
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "argv": [redacted(argument) for argument in sys.argv[1:]],
        "environment": machine,
        "model": {
            "name": loaded.name,
            "hash": fingerprint(model),
            "architecture": model.config.model_type,
            "num_layers": opened.num_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "device": str(opened.device),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "threads": machine["cpu"]["threads"],
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


def store_halves(loaded: Loaded, kinds: set[str], execution: str) -> str | None:
    """Read float32 weights in half the bytes, as `generate` does, if that changes no number.

    Methods of transformers need them as they are, in a copy beside (`Suite.methods`).

    Returns:
        What to tell the user, if anything.
    """
    if loaded.model.dtype is not torch.float32:
        return None
    plain = sum(weight.nbytes for weight in loaded.model.parameters())
    if any(kind.startswith("generate") for kind in kinds) and plain > (free_memory() or 0):
        return "weights are read as they are loaded: no memory for the copy that generate() needs"
    stored = loaded.store_halves(execution)
    return "the float32 weights are exact in bfloat16: half the bytes are read" if stored else None


@dataclass(frozen=True)
class Suite:
    """Turns a request into methods. Decisions of a run that is resumed are kept."""

    loaded: Loaded
    task: Task
    prompts: Sequence[Encoded]
    """For sweeps: prompts that are not joined to longer ones."""
    batches: Sequence[PromptBatch]
    earlier: RunFile | None
    say: Callable[[str], None]
    """Called with messages that stay on the terminal."""
    progress: Callable[[str], None]
    """Called with messages that the next one replaces."""

    def engines(
        self,
        kinds: set[str],
        given: Sequence[tuple[str, SkipConfig]],
        others: Mapping[str, Any],
        own: Mapping[str, Any],
        assistant: Loaded | None,
        controllers: Sequence[str | None] = (None,),
        threshold: float | None = None,
        adaptive: Mapping[str, float] | None = None,
        **pace: Any,
    ) -> list[Engine]:
        """The methods of this engine that draft: one for every source and controller.

        Args:
            given: skip configs of "self" with names; without any, sources that need no setup.
            others: settings of the other sources of "self": `sources`, and `lookup`, whether and in
                which other texts it looks drafts up; None: unless its skip config says no.
            own: settings of the model's own drafts if none is given.
            controllers: None stands for the skip config's own, or the default.
            pace: further settings of `LayerSkipDecoding`.
        """
        drafts: list[tuple[str, str, dict[str, Any]]] = []  # method, label, sources
        if "self" in kinds:
            for label, skip in given:
                drafts.append(("self", label, {"skip": skip, **others}))
            if not given:
                drafts.append(("self", "default", self._default(others, own)))
        if "self-lookup" in kinds:
            drafts.append(("self-lookup", "lookup", {"lookup": others["lookup"] or True}))
        if "self-together" in kinds:
            skips = [skip for _, skip in given]
            drafts.append(("self-together", "together", {"skip": skips, **others}))
        if "self-8bit" in kinds:
            drafts.append(("self-8bit", "8-bit", {"skip": SkipConfig.low_precision(8)}))
        if "self-assistant" in kinds and assistant is not None:
            second = {"assistant": assistant.model, "named": assistant.name}
            drafts.append(("self-assistant", "assistant", second))
        engines: dict[str, Engine] = {}
        rules = {"threshold": WITH_THRESHOLD, "adaptive": ("adaptive-threshold",)}
        others = installed("controller")  # which say themselves what has no effect on them
        tuned: dict[str, Any] = {"threshold": threshold, "adaptive": adaptive or None}
        idle = tuned
        for (kind, label, what), controller in itertools.product(drafts, controllers):
            chosen = str(LayerSkipDecoding(what.get("skip"), controller=controller).controller)
            takes = [name for name, those in rules.items() if chosen in (*those, *others)]
            how = {name: value for name, value in tuned.items() if name in takes}
            idle = {name: value for name, value in idle.items() if name not in how}
            parts = [kind, *([label] if sum(kind == other for other, *_ in drafts) > 1 else [])]
            name = ":".join([*parts, chosen] if len(controllers) > 1 else parts)
            like = sum(other.partition("#")[0] == name for other in engines)
            name = f"{name}#{like + 1}" if like else name
            how |= {"controller": controller, **pace}
            engine = Engine(self.loaded.model, self.task, name, draft=label, **what, **how)
            if engine.kind == "self":
                engines[name] = engine
        for flag in (each for each, value in idle.items() if engines and value is not None):
            words = " or ".join(rules[flag])
            warnings.warn(f"--{flag} has no effect without {words}", stacklevel=2)
        return list(engines.values())

    def _default(self, others: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the default drafts, with the model's own of a run that is resumed."""
        looks_up = True if others["lookup"] is None else others["lookup"]
        what = {"draft_memory": None, **others, **own, "lookup": looks_up}
        entry = self._entries.get("self")
        if entry is not None and entry["skip"] is not None:
            what |= {"skip": SkipConfig.from_dict(entry["skip"]), "draft_memory": None}
        elif entry is not None and OwnExits.name in entry["sources"]:
            opened = sublayers_of(self.loaded.model, self.task.execution)
            what |= {"skip": None, "draft_memory": 0, "sources": [OwnExits(opened)]}
        elif entry is not None and "mtp" not in entry["sources"]:
            what |= {"skip": None, "draft_memory": 0}
        return what

    def swept(self, sweep: Mapping[str, Any]) -> list[Engine]:
        """The exits and draft lengths of a sweep with the highest predicted speed."""
        cells = []
        for entry in sweep["exits"]:
            costs = CostTable.from_dict(entry["costs"])
            for length, counts in zip(sweep["draft_lengths"], entry["rounds"], strict=True):
                cells.append((sweep["tokens"] / costs.cost_of(counts), entry["exit"], length))
        engines = []
        for _, layer, length in sorted(cells, reverse=True)[:SWEEP_BEST]:
            name, skip = f"exit {layer}, {length} drafted", SkipConfig.early_exit(layer)
            how: dict[str, Any] = {"controller": "fixed", "max_draft_length": length}
            engines.append(Engine(self.loaded.model, self.task, name, skip, draft=name, **how))
        return engines

    def methods(
        self, kinds: set[str], engines: Sequence[Engine], assistant: Loaded | None
    ) -> list[Method]:
        """All methods to measure; those that draft with their costs."""
        model, task = self.loaded.model, self.task
        for each in engines:
            self._price(each)
        methods: list[Method] = [Engine(model, task), *engines]
        if any(kind.startswith("generate") for kind in kinds):
            model = unpacked_model(model, free_memory() or 0)
            if stored_weights(model):
                self.say("generate() unpacks weights in every product: no memory for a copy")
        if "generate" in kinds:
            methods.append(Peer(model, task))
        if "generate-early-exit" in kinds:
            if hasattr(model.config, "num_hidden_layers"):
                depth = self._depth(engines)
                exits, at = {"assistant_early_exit": depth}, {"exit_layer": depth}
                methods.append(Peer(model, task, "generate-early-exit", options=exits, details=at))
            else:
                what = f"transformers cannot exit a {type(model).__name__} early"
                warnings.warn(f"generate-early-exit is left out: {what}", stacklevel=2)
        if (name := "generate-prompt-lookup") in kinds:
            copied = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
            details: dict[str, Any] = {"num_tokens": PROMPT_LOOKUP_TOKENS}
            methods.append(Peer(model, task, name, options=copied, details=details))
        for name in sorted(kinds & {"generate-static", "generate-compiled"}):
            how = {"cache_implementation": "static", "disable_compile": name != "generate-compiled"}
            methods.append(Peer(model, task, name, options=how, details=how))
        if (name := "generate-assistant") in kinds and assistant is not None:
            second = {"assistant_model": assistant.model}
            details = {"assistant": assistant.name}
            if isinstance(assistant.model, UniversalAssistant):
                second = {"assistant_model": assistant.model.model}
                second |= {"tokenizer": self.loaded.tokenizer}
                second |= {"assistant_tokenizer": assistant.tokenizer}
            if isinstance(second["assistant_model"], HEADS):
                self.say(f"{name} is left out: transformers is given no heads of others")
            elif is_assistant(second["assistant_model"].config) and not library_can_assist(
                model.config
            ):
                self.say(f"{name} is left out: transformers cannot assist this model with it")
            else:
                methods.append(Peer(model, task, name, options=second, details=details))
        if kinds & {*LLAMAS}:
            longest = max(batch.input_ids.shape[1] for batch in self.batches)
            context = longest + task.max_new_tokens
            chosen = [name for name in LLAMAS if name in kinds]
            methods += open_llama(self.loaded, task, chosen, context)
        alone = [m.name for m in methods if m.one_row]
        if alone and any(batch.rows > 1 for batch in self.batches):
            self.say(f"{', '.join(alone)}: batch size 1 only, larger batches are refused")
        return methods

    def _depth(self, engines: Sequence[Engine]) -> int:
        """The early exit of transformers: as many sublayers as our draft runs, or half of them."""
        layers = int(self.loaded.model.config.get_text_config().num_hidden_layers)
        kept = [len(each.skip.kept(layers)) for each in engines if each.skip is not None]
        shorter = [count for count in kept if count < 2 * layers]
        return max(1, min(layers - 1, round(shorter[0] / 2 if shorter else layers / 2)))

    def _price(self, method: Engine) -> None:
        decided = self._entries.get(method.name, {}).get("costs")
        if decided:
            method.prices = {key: CostTable.from_dict(each) for key, each in decided.items()}
            return
        self.progress(f"measuring the costs of drafting: {method.name}")
        price(method, self.batches)

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """The entries of methods in the header of a resumed run, by name."""
        entries = self.earlier.header["methods"] if self.earlier else []
        return {entry["name"]: entry for entry in entries}

    def sweep(self, exits: Sequence[int], draft_lengths: Sequence[int]) -> dict[str, Any]:
        """Replay every exit on the first prompts of every category, with costs."""
        if self.earlier is not None and self.earlier.sweeps:
            return self.earlier.sweeps[0]
        chosen: dict[str | None, list[Encoded]] = {}
        for prompt in self.prompts:
            chosen.setdefault(prompt.category, []).append(prompt)
        prompts = [prompt for each in chosen.values() for prompt in each[:SWEEP_PROMPTS]]
        opened = sublayers_of(self.loaded.model, self.task.execution)
        law = self.task.law | {"acceptance": "coupled"}
        swept = exit_sweep(
            opened,
            [each.ids for each in prompts],
            exits,
            draft_lengths,
            law=law,
            max_new_tokens=min(self.task.max_new_tokens, SWEEP_TOKENS),
            progress=lambda what, share: self.progress(f"{what}, {share:.0%}"),
        )
        request = Request(
            input_ids=prompts[0].ids,
            attention_mask=torch.ones_like(prompts[0].ids),
            max_new_tokens=self.task.max_new_tokens,
            law=law_of(law),
        )
        drafts = [SkipConfig.early_exit(layer) for layer in exits]
        tables = cost_tables(opened, drafts, request, seconds=PRICE_SECONDS)
        context = prompts[0].ids.shape[1]
        for entry, table in zip(swept["exits"], tables, strict=True):
            entry["costs"] = table.at(context).to_dict()
        return {"kind": "sweep", "prompts": [each.name for each in prompts], **swept}


def price(method: Engine, batches: Sequence[PromptBatch]) -> None:
    """Measure the costs of drafting once, and give them to the method for all its calls."""
    skip = [each.bare() for each in method.skips] or None
    bare = LayerSkipDecoding(**{**method.plan.explicit, "skip": skip})
    sampling = method.task.arguments()
    del sampling["max_new_tokens"]
    by_key: dict[str, list[PromptBatch]] = {}
    for batch in batches:
        by_key.setdefault(costs_key(batch.rows, batch.context), []).append(batch)
    for key, alike in by_key.items():
        lengths = [length for each in alike for length in each.attention_mask.sum(-1).tolist()]
        at = {"rows": alike[0].rows, "context": round(statistics.median(lengths))}
        costs = bare.prepare(method.model, **at, seconds=PRICE_SECONDS, **sampling)
        assert costs is not None
        method.prices[key] = costs
