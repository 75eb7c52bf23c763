"""What every sublayer costs on this machine, by tokens of a pass and by context.

One measurement prices every skip config. Sublayers are timed inside whole passes in layer order,
within rounds of the engine itself: one sublayer repeated would stay in the processor's caches and
lie, and a pass alone would leave out what the engine does around it. Passes that are not timed
inside are interleaved, and the parts are made to add up to them. A short draft does repeat its few
sublayers; what that saves is measured on two early exits. Low precision is timed in drafts of
everything low, healed where the drafts to be priced are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.costs.pricing import low_facts
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.rounds import Round
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.model.backend import Backend, Block
from layerskip.model.draft_head import TrimmedHead
from layerskip.model.opening import opened_of
from layerskip.model.plain import head_refusal
from layerskip.model.sublayers import Sublayers
from layerskip.timing.rounds import Stopwatch, typical
from layerskip.timing.tables import machine

COUNTS = tuple(range(1, 10))
"""Tokens of the passes timed, per row: those that verify 0 to 8 drafted tokens."""

CONTEXTS = (64, 256)
"""Tokens before them."""

TRIMMED = (2, 4, 8, 16)
"""A trimmed head is timed at each of these parts of the vocabulary."""

DISTURBED = 0.25
"""By what share a quiet machine's times do not contradict each other; .01 to .09 were seen."""

BUDGET = 6.0
"""Seconds that a measurement takes, about."""

_TYPICAL_LENGTH = 4  # of the drafts that a repeated step is read off, as in `tables.py`
_SWEEPS = 40  # at most, of every context; the first one warms up
_FEWEST = 3


class _Noting:
    """A backend that can note when each block begins and ends."""

    def __init__(self, backend: Backend, now: Callable[[], float], *, on_gpu: bool) -> None:
        self.backend, self.now, self.on_gpu = backend, now, on_gpu
        self.marks: list[Any] = []  # two for each block, as they ran
        self.on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def run(self, hidden: Tensor, step: Any, blocks: Sequence[Block]) -> Tensor:
        if not self.on:
            return self.backend.run(hidden, step, blocks)
        for block in blocks:
            self._mark()
            hidden = self.backend.run(hidden, step, [block])
            self._mark()
        return hidden

    def note(self, on: bool) -> None:
        """Begin another round, with or without notes."""
        self.on = on
        self.marks.clear()

    def seconds(self) -> list[float]:
        """What each block took, in the order they ran."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        if self.on_gpu:
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]

    def _mark(self) -> None:
        if self.on_gpu:  # an event, since waiting for the device would be timed too
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(self.now())


class _HeadSteps(Source):
    """Steps of one MLP and one of some heads each, in turn."""

    key = "heads"

    def __init__(self, heads: Sequence[Block]) -> None:
        self.heads = heads

    def step_bytes(self) -> Sequence[float]:
        return (1.0,)

    def open(self, batch: Batch) -> State:
        return _HeadState(batch, self.heads)


class _HeadState(State):
    def __init__(self, batch: Batch, heads: Sequence[Block]) -> None:
        super().__init__(batch)
        self.heads = heads

    def step(self, tokens: Tensor, hidden: Tensor, step: Any, offset: int) -> Tensor:
        model = self.batch.model
        # a round has one step more than is asked for
        head = self.heads[offset] if offset < len(self.heads) else model.head
        return model.backend.run(hidden, step, [model.blocks[1], head])[:, 0]


@torch.no_grad()
def measure(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    batch_size: int = 1,
    contexts: Sequence[int] = CONTEXTS,
    counts: Sequence[int] = COUNTS,
    law: Law | None = None,
    low: SkipConfig | None = None,
    budget: float = BUDGET,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time the sublayers of a model: the "cost" record.

    Args:
        model: a causal language model, or one opened as `Sublayers`.
        prompts: token ids, (T,) or (1, T) each, from which contexts are pieced together.
        contexts: tokens before the passes; those beyond the model's positions are left out.
        counts: tokens of the passes, per row, 1 among them.
        law: whose processors are timed along; greedy by default.
        low: a draft of everything low, which is timed where it is given.
        budget: seconds after which no further sweep starts. At least three are made.
        progress: told what is done, in words, and the share of it that is.
        now: the clock, in seconds.

    Returns:
        The record, with more by context: `draft_rest`, what a draft step takes beside its sublayers
        and head; `trimmed_head`, what a head of each of `head_sizes` rows takes over one token
        (where the head can be trimmed); `repeated`, by which factor sublayers and head are cheaper
        in the drafts of two early exits, and `repeated_shares`, those exits' shares of all
        sublayers' seconds; with `low` (then there are its `low_facts`) `low_attention`, `low_mlp`,
        `low_head` and `low_trimmed_head`, over one token; for a mixture `experts`, by number of
        them the share of each MLP's bytes that a draft of so many reads; and `gap`, by which share
        the parts of a pass, each typical, exceed the typical pass, for each count. The parts have
        been scaled by it, so that they add up to `passes`.

    Raises:
        ValueError: no prompt tokens, counts without 1, no budget, no context that fits the model,
            or a draft that is not low as a whole.
    """
    opened = opened_of(model)
    counts = sorted(set(counts))
    if not counts or counts[0] != 1:
        raise ValueError(f"counts must be at least 1 and hold 1, a plain step; got {counts}")
    if not budget > 0:
        raise ValueError(f"budget must be more than 0 seconds, got {budget}")
    if not any(prompt.numel() for prompt in prompts):
        raise ValueError("costs are measured on the prompts' tokens; give at least one")
    heads = _disjoint_heads(opened)
    low = None if low is None else low.resolve(opened.num_layers)
    if low is not None and len(low.rounded()) < opened.num_sublayers:
        raise ValueError(
            f"prices of low precision are read off a draft of everything low, not {low}"
        )
    head_bits = None if low is None or low.low is None else low.low.head_bits
    low_heads = {} if head_bits is None else _disjoint_heads(opened, head_bits)
    # of a sweep, if all that is drafted were accepted
    growth = 2 * sum(counts) + len(heads) + len(low_heads) + 4
    growth = max(growth, 4 * (_TYPICAL_LENGTH + 1) + 4)
    room = opened.max_positions - growth
    fitting = sorted({context for context in contexts if 1 <= context <= room})
    if not fitting:
        raise ValueError(
            f"contexts must be in 1..{room} for this model of {opened.max_positions} positions, "
            f"got {list(contexts)}"
        )
    text = torch.cat([prompt.flatten() for prompt in prompts]).to(opened.device)
    text = text.repeat(-(-fitting[-1] // len(text)))  # (at least the longest context,)
    law = law or Law(do_sample=False, rows=1)
    record: dict[str, Any] = {
        "kind": "cost",
        "place": machine(opened),
        "batch_size": batch_size,
        "contexts": fitting,
        "counts": counts,
    }
    if heads:
        record |= {"vocabulary": opened.vocabulary, "head_sizes": list(heads)}
    record |= low_facts(low)
    if opened.mixtures:
        record["experts"] = _read_of_experts(opened)
    for number, context in enumerate(fitting):
        ids = text[:context].expand(batch_size, -1)  # (B, T)
        many = [list(heads.values()), list(low_heads.values())]
        sweeps = _Sweeps(opened, ids, law, counts, many, low, growth, now)
        started, made = now(), 0
        while made < _FEWEST or (made < _SWEEPS and now() - started < budget / len(fitting)):
            share = min(1.0, max(made / _SWEEPS, (now() - started) * len(fitting) / budget))
            progress("costs of the sublayers", (number + share) / len(fitting))
            sweeps.run(made)
            made += 1
        for name, value in sweeps.summary().items():
            record.setdefault(name, []).append(value)
    return record


def disturbed(record: Mapping[str, Any]) -> bool:
    """Whether other work on the machine shows in a record, beyond what any machine does.

    Drafts repeat their sublayers sooner than plain steps do, so that these can only be cheaper
    there; and the parts of a pass add up to it, nearly.
    """
    repeated = max((factor for factors in record["repeated"] for factor in factors), default=0.0)
    gap = max(abs(share) for shares in record["gap"] for share in shares)
    return repeated > 1 + DISTURBED or gap > DISTURBED


def _disjoint_heads(model: Sublayers, bits: int | None = None) -> dict[int, Block]:
    """Heads by the sizes to be timed, smallest first; none where the head cannot be trimmed.

    Views of the head's own rows, and no row in two of them: copies would take room, and a row that
    was just read is in the processor's caches.
    """
    head = model.unembedding
    if head_refusal(head) is not None:
        return {}
    heads, first = {}, 0
    for part in sorted(TRIMMED, reverse=True):
        size = model.vocabulary // part
        if size:
            heads[size] = model.backend.head(TrimmedHead(head, slice(first, first + size)), bits)
        first += size
    return heads


def _read_of_experts(model: Sublayers) -> dict[str, list[float]]:
    """By fewer experts than the model's, the share of each MLP's bytes that a token then reads."""

    def bytes_of(experts: int | None) -> list[int]:
        mlps: list[int] = model.weight_bytes(experts=experts)["sublayers"][1::2]
        return mlps

    mixture, whole = model.mixtures[0], bytes_of(None)
    fewer = range(0 if mixture.beside else 1, mixture.top + 1)
    return {
        str(count): [read / all_ for read, all_ in zip(bytes_of(count), whole, strict=True)]
        for count in fewer
    }


class _Sweeps:
    """Timed rounds at one context: one sweep has two rounds of every count."""

    def __init__(
        self,
        model: Sublayers,
        ids: Tensor,
        law: Law,
        counts: Sequence[int],
        heads: Sequence[Sequence[Block]],
        low: SkipConfig | None,
        growth: int,
        now: Callable[[], float],
    ) -> None:
        self.counts = counts
        self.heads = heads
        self.now = now
        self.layers = model.num_layers
        self.probe = _Noting(model.backend, now, on_gpu=model.device.type == "cuda")
        self.model = copy(model)
        self.model.backend = cast(Backend, self.probe)
        # A draft of one MLP: no prefix is shared, so that verification runs every sublayer over
        # all tokens, and drafting them takes hardly any time.
        every = tuple(range(self.layers))
        self.skip = SkipConfig(attention=every, mlp=every[1:]).resolve(self.layers)
        self.low = low
        self.exits = sorted({self.layers // 8, self.layers // 2} - {0})
        rows = len(ids)
        self.request = Request(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=growth,
            law=Law(law.processors, do_sample=law.do_sample, rows=rows),
            keys=[stream_key(0, row) for row in range(rows)],
        )
        self.passes: dict[int, list[float]] = defaultdict(list)
        self.parts: dict[int, list[list[float]]] = defaultdict(list)  # 2L sublayers, head, rest
        self.draft_rests: list[float] = []
        # exact ones and, with bits, low ones
        self.trimmed: list[list[list[float]]] = [[[] for _ in some] for some in heads]
        self.low_shares: list[float] = []  # of a plain step just behind, that a draft step takes
        self.low_parts: list[list[float]] = []  # 2L sublayers, head
        self.drafts: dict[int, list[float]] = defaultdict(list)  # a step's seconds, by exit layer

    def run(self, number: int) -> None:
        """One sweep, in an order that turns from sweep to sweep; the first one is not kept."""
        watch = Stopwatch(self.now)
        drafts: list[DraftOrSkip] = [self.skip, *map(_HeadSteps, self.heads)]
        rounds = self._rounds(drafts, watch, max(*self.counts, len(self.heads[0]) + 1))
        turn = number % len(self.counts)
        for count in (*self.counts[turn:], *self.counts[:turn]):
            watch.length = drafted = count - 1
            for noting in (False, True) if number % 2 else (True, False):
                self.probe.note(noting)
                start = watch.drafted = self.now()
                next(rounds)
                whole = self.now() - watch.drafted
                if number == 0:
                    continue
                if not noting:
                    self.passes[count].append(whole)
                    continue
                seconds = self.probe.seconds()
                verified = 2 * self.layers + 1  # the last ones of the round
                parts = seconds[-verified:]
                self.parts[count].append([*parts, whole - sum(parts)])
                if drafted:
                    in_steps = sum(seconds[:-verified])
                    self.draft_rests.append((watch.drafted - start - in_steps) / drafted)

        for draft, times in enumerate(self.trimmed, 1):
            if times:
                watch.draft = draft
                self._run_heads(rounds, watch, len(times), times if number else [])
        watch.draft = 0
        if self.low is not None:
            self._run_low(watch, kept=number > 0)
        watch.length = _TYPICAL_LENGTH
        for layer in self.exits:
            skip = SkipConfig.early_exit(layer).resolve(self.layers)
            rounds = self._rounds([skip], watch, _TYPICAL_LENGTH + 1)
            start = self.now()
            next(rounds)
            if number:
                self.drafts[layer].append((watch.drafted - start) / _TYPICAL_LENGTH)

    def _run_heads(
        self,
        rounds: Iterator[Round],
        watch: Stopwatch,
        heads: int,
        times: Sequence[list[float]],
    ) -> None:
        """A round with a draft step for each of some trimmed heads: one MLP, and that head."""
        watch.length = heads
        self.probe.note(True)
        next(rounds)
        drafted = self.probe.seconds()[: -2 * self.layers - 1]  # before the pass that verifies
        for of_head, seconds in zip(times, drafted[1::2], strict=False):
            of_head.append(seconds)

    def _run_low(self, watch: Stopwatch, *, kept: bool) -> None:
        """Rounds of drafts with everything in low precision; in one of them, parts are noted.

        The others are compared with a plain step behind each: of few sweeps, on a machine whose
        memory is faster now and then, the quickest drafts and the quickest steps are no pair.
        """
        assert self.low is not None
        watch.length = _TYPICAL_LENGTH
        rounds = self._rounds([self.low], watch, _TYPICAL_LENGTH + 1)
        for noting in (False, True, False):
            watch.length = _TYPICAL_LENGTH
            self.probe.note(noting)
            start = self.now()
            next(rounds)
            step = (watch.drafted - start) / _TYPICAL_LENGTH
            if noting:
                seconds, parts = self.probe.seconds(), 2 * self.layers + 1
                verify = len(seconds) - parts
                if kept:
                    self.low_parts += [seconds[i : i + parts] for i in range(0, verify, parts)]
                continue
            watch.length = 0
            start = self.now()
            next(rounds)
            if kept:
                self.low_shares.append(step / (self.now() - start))

    def _rounds(
        self, drafts: Sequence[DraftOrSkip], watch: Stopwatch, longest: int
    ) -> Iterator[Round]:
        self.probe.note(False)
        decoder = Decoder(self.model, drafts, watch, self.request, max_draft_length=longest)
        rounds = decoder.rounds()
        next(rounds)
        next(rounds)  # untimed: a round that follows a prefill finds other things in the caches
        return rounds

    def summary(self) -> dict[str, Any]:
        """This context's entry of each of the record's tables."""
        attention, mlp, head, rest, passes, gap = [], [], [], [], [], []
        for count in self.counts:
            whole = typical(self.passes[count])
            parts = [typical(part) for part in zip(*self.parts[count], strict=True)]
            scale = whole / sum(parts)
            parts = [part * scale for part in parts]
            attention.append(parts[: 2 * self.layers : 2])
            mlp.append(parts[1 : 2 * self.layers : 2])
            head.append(parts[-2])
            rest.append(parts[-1])
            passes.append(whole)
            gap.append(1 / scale - 1)
        # a law that forbids all tokens of a head ends the draft steps before it
        trimmed = [typical(times) / (1 + gap[0]) if times else head[0] for times in self.trimmed[0]]
        draft_rest = typical(self.draft_rests) if self.draft_rests else rest[0]
        repeated, shares = [], []
        for layer in self.exits:
            kept = sum(attention[0][:layer]) + sum(mlp[0][:layer])
            shares.append(kept / (sum(attention[0]) + sum(mlp[0])))
            step = typical(self.drafts[layer]) - draft_rest
            repeated.append(max(0.0, step) / (kept + head[0]))
        return {
            "attention": attention,
            "mlp": mlp,
            "head": head,
            "rest": rest,
            "passes": passes,
            "gap": gap,
            "draft_rest": draft_rest,
            "repeated": repeated,
            "repeated_shares": shares,
            **({"trimmed_head": trimmed} if trimmed else {}),
            **({} if self.low is None else self._low_summary(draft_rest)),
        }

    def _low_summary(self, draft_rest: float) -> dict[str, Any]:
        """What is low: parts that add up to the typical draft step."""
        parts = [typical(part) for part in zip(*self.low_parts, strict=True)]
        step = median(self.low_shares) * typical(self.passes[1])
        scale = max(0.0, step - draft_rest) / sum(parts)
        *sublayers, head = [part * scale for part in parts]
        trimmed = [typical(times) * scale if times else head for times in self.trimmed[1]]
        return {
            "low_attention": sublayers[::2],
            "low_mlp": sublayers[1::2],
            "low_head": head,
            **({"low_trimmed_head": trimmed} if trimmed else {}),
        }
