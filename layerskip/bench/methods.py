"""The ways to decode that a benchmark compares: this engine's and transformers' own.

Each method decodes a batch of prompts and says when, by a clock that it is handed, the first tokens
were out. What is asked for is the same for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from layerskip.bench.batches import PromptBatch
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.rounds import Round
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.lookup_laws import LookupLaws
from layerskip.files.records import costs_key
from layerskip.generation import GenerationOutput, LayerSkipDecoding, generate
from layerskip.model.sublayers import Sublayers
from layerskip.requests import end_tokens
from layerskip.settings import DEFAULT_CONTROLLER

Clock = Callable[[], float]

_ASSISTED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)

BRANCHES = ":branches"
"""What a method's name ends with that is another one with second-best tokens."""


@dataclass(frozen=True)
class Task:
    """What every method is asked for.

    `temperature`, `top_p` and `top_k` are of sampling; None leaves that one off.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    acceptance: str = "coupled"
    seed: int = 0
    execution: str = "auto"

    @property
    def law(self) -> dict[str, Any]:
        """The header's `law`."""
        names = ("temperature", "top_p", "top_k", "acceptance")
        settings = {name: getattr(self, name) if self.do_sample else None for name in names}
        return {"do_sample": self.do_sample, **settings, "seed": self.seed}

    def arguments(self) -> dict[str, Any]:
        """For any `generate()`."""
        shared: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
        }
        if self.do_sample:
            shared |= {
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "top_p": 1.0 if self.top_p is None else self.top_p,
                "top_k": self.top_k or 0,
            }
        return shared


@dataclass(frozen=True)
class Decoded:
    """What a method made of a batch.

    Attributes:
        tokens: new tokens of every row, the one that ended it included, nothing behind it.
        first: what the clock said when the first tokens were out.
        first_tokens: how many that were, per row.
        rounds: of this engine; None elsewhere.
    """

    tokens: list[list[int]]
    first: float
    first_tokens: list[int]
    rounds: Sequence[Round] | None = None


class Method(Protocol):
    """One way to decode."""

    name: str
    kind: str
    one_row: bool
    """Whether it serves batches of one row only."""

    def describe(self) -> dict[str, Any]:
        """The header's entry."""

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        """Decode the batch; the same again for the same repeat.

        Args:
            max_new_tokens: another limit than the task's, for a warm-up.
        """


@dataclass(eq=False)
class Engine:
    """This engine: plain decoding, or self-speculation where there is something to draft from.

    Attributes:
        skip, lookup, trees, assistant: what drafts come from; without any it decodes plainly.
        controller, max_draft_length, threshold, branches: as for `LayerSkipDecoding`.
        draft: what the draft is called.
        named: what the assistant is called.
        costs: by batch size and context (see `costs_key`), what the controller decides with;
            without an entry it is measured at the first call.
        prices: the header's `costs`, likewise: what was measured.
    """

    model: Any
    task: Task
    name: str = "plain"
    skip: SkipConfig | None = None
    _: KW_ONLY
    lookup: bool | Lookup = False
    trees: LookupLaws | None = None
    assistant: Any = None
    named: str | None = None
    controller: str | None = None
    max_draft_length: int | None = None
    threshold: float | None = None
    branches: bool | None = None
    draft: str | None = None
    costs: dict[str, CostTable] = field(default_factory=dict, init=False)
    prices: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    one_row = False

    def __post_init__(self) -> None:
        self.kind = "self" if self.sources else "plain"
        stored = (self.skip and self.skip.decoding) or DecodingOptions()
        self.controller = self.controller or stored.controller or DEFAULT_CONTROLLER
        self.max_draft_length = self.max_draft_length or stored.max_draft_length
        self.threshold = stored.threshold if self.threshold is None else self.threshold
        if self.branches is None and self.controller == DEFAULT_CONTROLLER:
            self.branches = stored.branches

    @property
    def sources(self) -> list[str]:
        """What its drafts come from, in the order in which rounds number them."""
        found = ["lookup"] if self.lookup else []
        found += ["laws"] if self.trees else []
        found += [] if self.assistant is None else ["assistant"]
        return found if self.skip is None else [*found, "sublayers"]

    @property
    def may_branch(self) -> bool:
        """Whether second-best tokens may be verified: a draft takes steps, and the rule has use."""
        steps = self.skip is not None or self.assistant is not None
        rejection = self.task.do_sample and self.task.acceptance == "rejection"
        return steps and self.controller == DEFAULT_CONTROLLER and not rejection

    def describe(self) -> dict[str, Any]:
        if self.kind == "plain":
            return {"name": self.name, "kind": self.kind}
        num_layers = self.model.config.get_text_config().num_hidden_layers
        every = list(range(num_layers))
        own: dict[str, Any] = {
            "skip": None,
            "skipped": {"attention": every, "mlp": every},
            "low": None,
            "num_kept": 0,
            "prefix": 0,
            "draft_vocabulary": None,
        }
        labels = ["lookup"] if self.lookup else []
        labels += ["trees of laws"] if self.trees else []
        labels += [] if self.assistant is None else [f"assistant {self.named}"]
        if self.skip is not None:
            skip = self.skip.resolve(num_layers)
            labels.append(skip_label(self.skip, skip))
            vocabulary = skip.draft_vocabulary
            own |= {
                "skip": self.skip.to_dict(),
                "draft_vocabulary": vocabulary and len(vocabulary),
            }
            if skip.trained is None or not skip.trained.alone:
                own |= {
                    "skipped": {"attention": list(skip.attention), "mlp": list(skip.mlp)},
                    "low": skip.to_dict().get("low"),
                    "experts": skip.experts,
                    "window": skip.window,
                    "num_kept": len(skip.kept()),
                    "prefix": skip.shared_prefix(),
                }
        how = f"{self.controller}{' with branches' if self.branches else ''}"
        return {
            "name": self.name,
            "kind": self.kind,
            "label": f"{' and '.join(labels)}, {how}",
            "draft": self.draft,
            "sources": self.sources,
            "assistant": self.named,
            **own,
            "controller": self.controller,
            "max_draft_length": self.max_draft_length,
            "threshold": self.threshold,
            **({"branches": True} if self.branches else {}),  # so that older runs can go on
            "costs": self.prices,
        }

    def use(self, key: str, costs: CostTable) -> None:
        """Let the controller decide with these costs in batches of a key (see `costs_key`).

        Where the skip config brings costs, or the accept rule lets no clock decide, it keeps to
        those, and these serve predictions only.
        """
        rejection = self.task.do_sample and self.task.acceptance == "rejection"
        brought = self.skip is not None and self.skip.costs is not None
        if not brought and not rejection:
            self.costs[key] = costs

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        limit = max_new_tokens or self.task.max_new_tokens
        rounds = self.generate(batch, clock, max_new_tokens=limit).rounds
        assert rounds is not None
        assert rounds[0].times is not None
        tokens = [[t for r in rounds for t in r.tokens[row]] for row in range(batch.rows)]
        return Decoded(tokens, rounds[0].times[-1], [1] * batch.rows, rounds)

    def generate(
        self, batch: PromptBatch, clock: Clock | None = None, **settings: Any
    ) -> GenerationOutput:
        """As a person would call it; a prompt's text depends on its number and the seed only."""
        task = self.task
        return generate(
            self.model,
            {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask},
            **{
                **self._drafting,
                "acceptance": task.acceptance,
                "enabled": self.kind == "self",
                "seeds": [task.seed + number for number in batch.numbers],
                "costs": self.costs.get(costs_key(batch.rows, batch.context)),
                "clock": clock,
                **task.arguments(),
                **settings,
            },
        )

    def prepare(self, rows: int, context: int, seconds: float) -> CostTable:
        """Measure what drafting costs in such batches, which may take so long."""
        law = {name: x for name, x in self.task.arguments().items() if name != "max_new_tokens"}
        decoding = LayerSkipDecoding(**self._drafting)
        found = decoding.prepare(self.model, rows=rows, context=context, seconds=seconds, **law)
        assert found is not None
        return found

    def opened_sources(self, opened: Sublayers) -> Sequence[Source]:
        """What its drafts come from, as rounds number them."""
        return LayerSkipDecoding(**self._drafting)._sources(opened, rejection=False)[1]

    @property
    def _drafting(self) -> dict[str, Any]:
        """For `LayerSkipDecoding`."""
        return {
            "skip": self.skip,
            "lookup": self.lookup,
            "sources": [self.trees] if self.trees else [],
            "assistant": self.assistant,
            # what is not named here does not draft, though the model may have a draft of its own
            "draft_memory": 0 if self.skip is None else None,
            "controller": self.controller,
            "max_draft_length": self.max_draft_length,
            "threshold": self.threshold,
            "branches": self.branches,
            "execution": self.task.execution,
        }


@dataclass(eq=False)
class Peer:
    """A way to decode that comes with transformers.

    Attributes:
        name: its kind by default.
        options: further arguments of its `generate()`.
        config: what is set in `model.generation_config` during the call, where the library's early
            exit looks for its settings.
        details: the rest of the header's entry.
    """

    model: Any
    task: Task
    kind: str = "generate"
    name: str = ""
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.kind
        self.one_row = self.kind != "generate"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, **self.details}

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        width = batch.input_ids.shape[1]
        first = _First(clock, width)
        if self.task.do_sample:
            draw = random.Random(f"{self.task.seed}/{batch.numbers[0]}/{repeat}")
            torch.manual_seed(draw.getrandbits(63))
        arguments = self.task.arguments()
        arguments["max_new_tokens"] = max_new_tokens or self.task.max_new_tokens
        with _as_found(self.model, self.config):
            sequences = self.model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                **arguments,
                **self.options,
                stopping_criteria=[first],
            )
        rows = [self._ended(row) for row in sequences[:, width:].tolist()]
        assert first.at is not None
        return Decoded(rows, first.at, [min(first.tokens, len(row)) for row in rows])

    def _ended(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first one that ends a row; behind it there is padding."""
        ends = end_tokens(self.model)
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        return tokens[: end + 1]


class _First:
    """A stopping criterion that stops nothing, and notes when the first new tokens are out."""

    def __init__(self, clock: Clock, width: int) -> None:
        self.clock = clock
        self.width = width
        self.at: float | None = None
        self.tokens = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.at is None:
            self.at = self.clock()
            self.tokens = input_ids.shape[1] - self.width
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # (B,)


@contextmanager
def _as_found(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of the model's generation config, and leave the model as it was."""
    config = model.generation_config
    before = {name: getattr(config, name) for name in settings}
    base = model.config.get_text_config()
    layers = base.num_hidden_layers  # which the library's early exit changes, and loses on errors
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        base.num_hidden_layers = layers
        for name, value in before.items():
            setattr(config, name, value)


def early_exit_peer(model: Any, task: Task, exit_layer: int) -> Peer:
    """transformers' early exit with its own defaults."""
    config = model.generation_config
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    found = {name: getattr(config, name, None) for name in _ASSISTED}
    own = {n: defaults.get(n) if value is None else value for n, value in found.items()}
    return Peer(
        model,
        task,
        "generate-early-exit",
        options={"assistant_early_exit": exit_layer},
        config=own,
        details={
            "exit_layer": exit_layer,
            "num_assistant_tokens": own["num_assistant_tokens"],
            "schedule": own["num_assistant_tokens_schedule"],
            "threshold": own["assistant_confidence_threshold"],
        },
    )


def skip_label(skip: SkipConfig, resolved: SkipConfig) -> str:
    """A few words for a draft, as it was asked for and as it is for its model."""
    if skip.trained is not None and skip.trained.alone:
        return skip.trained.words_with(skip.low)
    label = f"skip {len(skip.attention)} attention, {len(skip.mlp)} MLP"
    if not resolved.skipped():
        label = "whole model"
    elif skip.exit_layer is not None and not skip.attention and not skip.mlp:
        label = f"exit {skip.exit_layer}"
    low, vocabulary = resolved.low, skip.draft_vocabulary
    if low is not None and not (skip.trained and skip.trained.module):
        label += f", {low.words(len(resolved.kept()))}"
    if resolved.experts is not None:
        label += f", {resolved.experts} experts" if resolved.experts else ", no experts"
    label += "" if resolved.window is None else f", window {resolved.window}"
    label += "" if skip.trained is None else f", {skip.trained.words_with(low)}"
    return label if vocabulary is None else f"{label}, vocabulary {len(vocabulary)}"
