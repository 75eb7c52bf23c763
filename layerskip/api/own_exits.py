"""Which of a model's early exits drafts well: asked at its first prompts, and kept.

Layers that were trained to exit early draft well, but no checkpoint says how it was trained. So
where a model has no better draft of its own, the exits at every eighth of its depth are asked at
the last positions of prompts: an exit agrees if its likeliest token is the model's. Published exits
lie there (4 of 16 and of 32 layers, 8 of 32, 15 of 40, 10 of 80). This costs a few products of the
shared head, so it waits until prompts have been long enough to pay for that.
Shapes: N positions, E exits, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.costs.cost_model import USUAL, Rates
from layerskip.costs.speculation import optimal_draft_length, speedup
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.sublayer_draft import SublayerDraft
from layerskip.model.opened_model import OpenedModel, Pass
from layerskip.model.opened_models import Sublayers, kept_for
from layerskip.timing.cost_tables import traffic_of
from layerskip.timing.kept import file_for, keep, kept

POSITIONS = 64
"""Positions that an answer takes."""

SHARE = 0.02
"""Maximum cost of asking, as a share of the products that have run prompts so far."""

LEAST = 1.05
"""The predicted speedup below which no exit is offered."""


class Agreement:
    """At how many positions each exit of a model agreed with it.

    Attributes:
        tokens: how many tokens of prompts the model has run before that.
        positions: how many were asked.
        right: by exit, a number of layers, at how many of them it agreed.
    """

    def __init__(self, model: OpenedModel) -> None:
        self.file = file_for(model, "exits")
        self.tokens, self.positions, self.right = 0, 0, dict[int, int]()
        found, _ = kept(self.file)
        try:
            right = {int(layer): int(count) for layer, count in found["right"].items()}
            tokens, positions = int(found["tokens"]), int(found["positions"])
        except (TypeError, ValueError, KeyError, AttributeError):
            return  # nothing is kept, or not by us
        counts = all(0 <= count <= positions for count in right.values())
        layers = all(0 < layer < model.num_layers for layer in right)
        if counts and layers and (right or not positions):
            self.tokens, self.positions, self.right = tokens, positions, right

    @property
    def done(self) -> bool:
        return self.positions >= POSITIONS

    def share(self, layer: int) -> float:
        """The expected acceptance of an exit's tokens; never 0 nor 1."""
        return (self.right[layer] + 1) / (self.positions + 2)

    def add(self, tokens: int, positions: int = 0, right: Mapping[int, int] | None = None) -> None:
        """Count tokens of prompts that were run, and positions that were asked; keep the counts."""
        self.tokens += tokens
        self.positions += positions
        for layer, count in (right or {}).items():
            self.right[layer] = self.right.get(layer, 0) + count
        counts = {"tokens": self.tokens, "positions": self.positions, "right": self.right}
        keep(self.file, counts)

    def replace(self, positions: int, right: Mapping[int, int]) -> None:
        """Keep counts in place of those so far."""
        self.positions, self.right = 0, {}
        self.add(0, positions, right)

    def best(self, model: OpenedModel) -> int | None:
        """The exit that is expected to gain most, by bytes read; None if none gains."""
        gains = {layer: _gain(model, layer, self.share(layer)) for layer in self.right}
        best = max(gains, key=gains.__getitem__)
        return best if gains[best] >= LEAST else None

    @property
    def words(self) -> str:
        if not self.done:
            return f"asked at the first prompts, {self.positions} of {POSITIONS} positions so far"
        counts = ", ".join(f"exit {layer} at {count}" for layer, count in self.right.items())
        return f"of {self.positions} positions, the model's own token: {counts}"


def _gain(model: OpenedModel, layer: int, share: float) -> float:
    """The expected speedup of an exit over plain decoding, if nothing has been timed."""
    traffic = traffic_of(model, SkipConfig.early_exit(layer))
    costs = Rates(growth=USUAL).table(traffic, None, 0, 1)
    length = optimal_draft_length(share, costs)
    return speedup(share, length, costs.draft, costs.verify_cost)


def agreement_of(model: OpenedModel) -> Agreement:
    """What has been asked of a model, in this process or in an earlier one."""
    of_model = kept_for(model.model)
    key = "exits", model.execution, model.dtype
    if key not in of_model:
        of_model[key] = Agreement(model)
    return of_model[key]  # type: ignore[no-any-return]


def prior_of(model: OpenedModel, layer: int | None) -> float | None:
    """The expected acceptance of an exit's tokens, if it has been asked."""
    agreement = None if layer is None else agreement_of(model)
    if agreement is None or not agreement.done or layer not in agreement.right:
        return None
    return agreement.share(layer)


def has_exits(model: OpenedModel) -> bool:
    """Whether states between the layers can be read, at all positions of a prompt."""
    if not isinstance(model, Sublayers) or model.encoder or model.recurrent:
        return False
    return model.first_reader == model.num_layers > 1


def asked_exits(model: OpenedModel) -> list[int]:
    """The exits at eighths of the depth: all of them on a GPU, the first half on a CPU."""
    eighths = range(1, 5 if model.device.type == "cpu" else 8)
    return sorted({max(1, model.num_layers * each // 8) for each in eighths})


class OwnExits(Source):
    """Asks the exits of a model in its first prompts, and drafts with the best one, if it gains."""

    name = "exits"

    def __init__(self, model: OpenedModel) -> None:
        self.model, self.agreement = model, agreement_of(model)
        self.exits = asked_exits(model)
        head = model.weights.head_bytes()
        row = head / (model.pass_bytes([1])[0] - head)  # in tokens of a prompt
        self.price = POSITIONS * (len(self.exits) + 1) * row / SHARE
        # Until the best one is known, costs are those of another one.
        self.draft = self._drafting(self.exits[len(self.exits) // 2])
        self.best: int | None = None
        self._decide()

    @property
    def words(self) -> str:
        return "the best exit, if it gains" if self.best is None else f"exit {self.best}"

    @property
    def key(self) -> Hashable:
        return ("exits",)

    def _drafting(self, layer: int) -> SublayerDraft:
        return SublayerDraft(
            self.model, SkipConfig.early_exit(layer).resolve(self.model.num_layers)
        )

    @property
    def prefix(self) -> int:  # type: ignore[override]
        return self.draft.prefix

    def open(self, batch: Batch) -> State:
        self._decide()  # others may have asked since
        return _AskingState(batch, self)

    def timed(self) -> Source:
        return self.draft

    def step_bytes(self) -> Sequence[float]:
        return self.draft.step_bytes()

    def key_bytes(self) -> Mapping[int | None, float]:
        return self.draft.key_bytes()

    def wanted(self, tokens: int = 0) -> int:
        """At how many positions to ask once prompts have `tokens` more tokens."""
        paid = self.agreement.tokens + tokens >= self.price
        return max(0, POSITIONS - self.agreement.positions) if paid else 0

    def hear(self, states: Tensor) -> None:
        """Count agreements from the states (E + 1, N, H) after each exit and the last layer."""
        count = states.shape[1]
        tokens = self.model.likeliest(states.flatten(0, 1)).view(-1, count)  # (E + 1, N)
        right = (tokens[:-1] == tokens[-1]).sum(1).tolist()
        self.agreement.add(0, count, dict(zip(self.exits, right, strict=True)))
        self._decide()

    def _decide(self) -> None:
        best = self.agreement.best(self.model) if self.agreement.done else None
        if best is not None and best != self.best:
            self.best, self.draft = best, self._drafting(best)


class _AskingState(State):
    def __init__(self, batch: Batch, source: OwnExits) -> None:
        super().__init__(batch)
        self.source = source
        self._ask(max(batch.prompt_lengths, default=0))

    def begin(self, row: int) -> None:
        self._ask(self.batch.seats[row].prompt_length)

    def _ask(self, tokens: int) -> None:
        source = self.source
        if source.wanted(tokens):
            self.prompt_taps = [*(2 * layer for layer in source.exits), 2 * source.model.num_layers]

    def prompted(self, rows: Sequence[int], tokens: int) -> None:
        batch, source, taps = self.batch, self.source, self.prompt_taps
        self.prompt_taps = ()
        if not source.agreement.done:
            source.agreement.add(tokens)
        for row in rows if taps else ():
            length, place = batch.seats[row].prompt_length, batch.rows[row]
            places = range(place, place + 1)
            last = batch.tapped(taps[-1], [0], length, rows=places)[0]  # (T, H)
            if count := min(source.wanted(), int(last.any(-1).sum())):  # no others were run
                states = [batch.tapped(tap, [length - count], count, rows=places) for tap in taps]
                device = source.model.device
                source.hear(torch.cat([each.to(device) for each in states]))  # (E + 1, N, H)

    @property
    def prefix(self) -> int:  # type: ignore[override]
        return self.source.draft.prefix

    def offer(self, row: int, most: int) -> Proposal:
        return super().offer(row, 0 if self.source.best is None else most)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        return self.batch.model.backend.run(hidden, step, self.source.draft.blocks)[:, 0]
