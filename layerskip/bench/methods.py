"""Ways to decode that a benchmark compares: this engine's and transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from layerskip.api.arguments import end_tokens
from layerskip.api.drafts import skip_label
from layerskip.api.generation import GenerationOutput, LayerSkipDecoding, generate
from layerskip.api.plan import Plan, open_plan
from layerskip.bench.batches import PromptBatch
from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.rounds import Round
from layerskip.files.records import costs_key

Clock = Callable[[], float]


@dataclass(frozen=True)
class Task:
    """The task of every method; settings of sampling that are None are off."""

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
        """Arguments for any `generate()`."""
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
    """The result of a method for a batch."""

    tokens: list[list[int]]
    """New tokens of every row, including an end token, but nothing after it."""
    first: float
    """The clock's time after the first tokens."""
    first_tokens: list[int]
    rounds: Sequence[Round] | None = None
    """Rounds of this engine; None for other methods."""


class Method(Protocol):
    """One way to decode."""

    name: str
    kind: str
    one_row: bool
    """Whether it only supports batches of one row."""

    def describe(self) -> dict[str, Any]:
        """The method's entry in the header."""

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        """Decode the batch, identically for the same repeat; warm-ups have their own limit."""


class Engine:
    """This engine: self-speculation, or plain decoding if there is nothing to draft from.

    Attributes:
        draft, named: names of the draft and of the assistant.
        settings: settings of `LayerSkipDecoding`; sources that they do not name are not used,
            unless draft_memory=None asks for the default drafts.
        decoding: the settings, completed by those of the skip config.
        prices: by `costs_key`, the measured costs: the header's `costs`.
    """

    one_row = False

    def __init__(
        self,
        model: Any,
        task: Task,
        name: str = "plain",
        skip: SkipConfig | Sequence[SkipConfig] | None = None,
        *,
        draft: str | None = None,
        named: str | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.task, self.name = model, task, name
        self.draft, self.named = draft, named
        self.settings = {
            "enabled": True,
            "skip": skip,
            "lookup": False,
            "draft_memory": 0 if skip is None else None,  # disables the model's default draft
            "acceptance": task.acceptance,
            "execution": task.execution,
            **settings,
        }
        self.decoding = LayerSkipDecoding(**self.settings)
        plan = self.plan
        self.settings |= plan.explicit  # calls choose nothing again
        self.skips = plan.skips
        self.skip = self.skips[0] if self.skips else None
        self.prices: dict[str, CostTable] = {}
        self.kind = "self" if plan.sources else "plain"

    @property
    def plan(self) -> Plan:
        """Its draft sources, in the order of their numbers in rounds."""
        return open_plan(self.model, self.decoding, sampling=self.task.do_sample)

    def describe(self) -> dict[str, Any]:
        if self.kind == "plain":
            return {"name": self.name, "kind": self.kind}
        decoding, names = self.decoding, self.plan.names
        num_layers = self.plan.model.num_layers
        resolved = None if self.skip is None else self.skip.resolve(num_layers)
        vocabulary = self.skip and self.skip.draft_vocabulary
        labels = [{"assistant": f"assistant {self.named}"}.get(n, n) for n in names]
        for number, each in enumerate(self.skips, len(labels) - len(self.skips)):
            labels[number] = skip_label(each, each.resolve(num_layers))
        how = f"{decoding.controller}{' with branches' if decoding.branches else ''}"
        return {
            "name": self.name,
            "kind": self.kind,
            "label": f"{' and '.join(labels)}, {how}",
            "draft": self.draft,
            "sources": names,
            "assistant": self.named,
            "skip": self.skip and self.skip.to_dict(),
            **({"skips": [each.to_dict() for each in self.skips]} if len(self.skips) > 1 else {}),
            "draft_vocabulary": vocabulary and len(vocabulary),
            **_sublayers_of(resolved, num_layers),
            "controller": decoding.controller,
            "max_draft_length": decoding.max_draft_length,
            "threshold": decoding.threshold,
            **({"adaptive": decoding.adaptive} if decoding.adaptive else {}),
            **({"branches": True} if decoding.branches else {}),  # so that older runs can resume
            "costs": {key: costs.to_dict() for key, costs in self.prices.items()},
        }

    def costs(self, batch: PromptBatch) -> CostTable | None:
        """The measured costs for the controller; None if it has others, or none yet.

        If the skip config has costs, the acceptance rule allows no measured costs, or several skip
        configs have their own costs, the measured ones are used for predictions only.
        """
        brought = self.skip is not None and self.skip.costs is not None
        rejects = self.task.do_sample and self.task.acceptance != "coupled"
        if brought or rejects or len(self.skips) > 1:
            return None
        return self.prices.get(costs_key(batch.rows, batch.context))

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
        """Generate like a user; a prompt's text depends only on its number and the seed."""
        return generate(
            self.model,
            {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask},
            **{
                **self.settings,
                "seeds": [self.task.seed + number for number in batch.numbers],
                "costs": self.costs(batch),
                "clock": clock,
                **self.task.arguments(),
                **settings,
            },
        )


def _sublayers_of(resolved: SkipConfig | None, num_layers: int) -> dict[str, Any]:
    """A header's description of the target's sublayers in a draft; None: the draft runs none."""
    if resolved is None or (resolved.trained is not None and resolved.trained.alone):
        skipped = {kind: list(range(num_layers)) for kind in ("attention", "mlp")}
        return {"skipped": skipped, "low": None, "num_kept": 0, "prefix": 0}
    kept = {"num_kept": len(resolved.kept()), "prefix": resolved.shared_prefix()}
    return sets_of(resolved) | kept


def sets_of(resolved: SkipConfig) -> dict[str, Any]:
    """What a draft runs of the target, in the form of records."""
    return {
        "skipped": {"attention": list(resolved.attention), "mlp": list(resolved.mlp)},
        "low": resolved.to_dict().get("low"),
        "experts": resolved.experts,
        "window": resolved.window,
    }


@dataclass(eq=False)
class Peer:
    """A way to decode that is part of transformers, named by its kind.

    Attributes:
        options: further arguments of its `generate()`.
        details: the rest of the header's entry.
    """

    model: Any
    task: Task
    kind: str = "generate"
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.kind
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
        base = self.model.config.get_text_config()
        layers = base.num_hidden_layers  # the library's early exit changes it, even after errors
        try:
            sequences = self.model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                **arguments,
                **self.options,
                stopping_criteria=[first],
            )
        finally:
            base.num_hidden_layers = layers
        rows = [self._ended(row) for row in sequences[:, width:].tolist()]
        assert first.at is not None
        return Decoded(rows, first.at, [min(first.tokens, len(row)) for row in rows])

    def _ended(self, tokens: list[int]) -> list[int]:
        ends = end_tokens(self.model)
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        return tokens[: end + 1]


class _First:
    """A stopping criterion that never stops, but records the time of the first new tokens."""

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
