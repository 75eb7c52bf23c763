"""What the steps of a draft compute for many chains at once; draws nothing, knows no law.

A chain begins at a place of a text and feeds its own tokens. It sees what a draft would have there:
the text's keys and values before its start, and its own from there on, of every cache that the
draft has. Drafts of sublayers share the target's; a second model and trained modules have caches of
their own, for which they read the texts once.
Letters: B groups, G chains of a group, P places of all texts, T tokens of a text, H hidden width, V
vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.config import SkipConfig
from layerskip.decoding.assistant import Assistant, common, known
from layerskip.decoding.followers import Drafter
from layerskip.decoding.trained import TrainedDraft, as_drafter
from layerskip.model.blocks import FeatureBlock, Heads, Streams
from layerskip.model.cache import RowCache
from layerskip.model.sublayers import Pass, Sublayers
from layerskip.replay.chain_cache import ChainCache
from layerskip.replay.trace import Trace, joined


class Steps(ABC):
    """A draft, and how far a pass of chains is.

    Args:
        model: what computes.
        texts: keys and values of the trace's texts, of every cache that it writes.

    Attributes:
        longest: tokens that it drafts at most, if there is a limit.
    """

    longest: int | None = None

    def __init__(self, trace: Trace, model: Sublayers, *texts: RowCache) -> None:
        self.trace, self.model, self.texts = trace, model, texts
        self.caches: list[ChainCache] = []
        self.carried: list[Tensor] = []  # (B, G, H) each, from step to step

    def begin(self, texts: Tensor, starts: Tensor, steps: int) -> None:
        """Begin with chains of some texts (B,) at places (B, G), of so many steps at most."""
        texts, starts = (each.to(self.model.device) for each in (texts, starts))
        self.caches = [ChainCache(each, texts, starts, steps) for each in self.texts]
        self.rotary = self.trace.rotary(int(starts.max()) + steps, self.model)

    def raw(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """Raw logits (B, G, V) of a step.

        Args:
            tokens: those fed, (B, G).
            rows: while a chain follows its text, which of the P places they are, (B, G).
        """
        for cache in self.caches:
            cache.advance(step)
        return self.compute(step, tokens.to(self.model.device), rows.to(self.model.device))

    @abstractmethod
    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """`raw`, with caches that are placed."""

    def regroup(self, chosen: Tensor, steps: int, fed: int) -> None:
        """Go on with some chains in other groups, as `ChainCache.regrouped`."""
        chosen = chosen.to(self.model.device)
        self.caches = [cache.regrouped(chosen, steps, fed) for cache in self.caches]
        self.carried = [each.flatten(0, 1)[chosen] for each in self.carried]

    def run(self, hidden: Tensor, blocks: list[object], cache: int = 0) -> Tensor:
        """Carry hidden states (B, G, H) through blocks that write a cache."""
        step = Pass(self.model, self.caches[cache], self.rotary)
        return self.model.backend.run(hidden, step, blocks)  # type: ignore[arg-type]


class _Sublayers(Steps):
    """A draft of the model's own sublayers, and perhaps a module behind an exit.

    Args:
        follow: whether chains follow their texts: what they would compute in whole layers of the
            shared prefix, the trace knows then.
    """

    def __init__(
        self, trace: Trace, skip: SkipConfig, behind: TrainedDraft | None, *, follow: bool
    ) -> None:
        model, prefix = trace.model, skip.shared_prefix()
        layers = prefix // 2  # whole ones, which the trace has been through
        first = 2 * layers if follow else 0
        self.blocks: list[object] = list(model.blocks[first:prefix])
        self.before: Tensor | None = None
        if follow and layers:
            self.before = torch.cat([text.states[layers - 1] for text in trace.texts])  # (P, H)
        self.own: list[object] = []
        if behind is None:
            self.blocks += model.draft(skip)
            super().__init__(trace, model, trace.cache)
            return
        assert not isinstance(behind.block, Heads)
        self.own = [*behind.own]
        window = behind.block.layer.window
        read = _read(trace, model, self.own[:-1], window, lambda tokens, states: states)
        super().__init__(trace, model, trace.cache, read(prefix))

    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        hidden = self.model.embed(tokens) if self.before is None else self.before[rows]
        if self.blocks:
            hidden = self.run(hidden, self.blocks)  # (B, G, H), or logits
        return self.run(hidden, self.own, cache=1) if self.own else hidden


class _Second(Steps):
    """A second model."""

    def __init__(self, trace: Trace, assistant: Assistant) -> None:
        model = assistant.model
        caches = []
        for text in trace.texts:
            tokens = known(text.tokens, model, trace.model)[None]  # (1, T)
            caches.append(model.new_cache(1, tokens.shape[1]))
            caches[-1].place([0], tokens.shape[1])
            step = Pass(model, caches[-1], model.rotary(tokens.shape[1], tokens.shape[1]))
            model.run(model.embed(tokens), step, range(model.num_sublayers))
        super().__init__(trace, model, joined(caches))

    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        embedded = self.model.embed(known(tokens, self.model, self.trace.model))
        blocks: list[object] = [*self.model.blocks, self.model.draft_head]
        return common(self.run(embedded, blocks), self.trace.model)


class _Features(Steps):
    """A module over the target's last states: a block that feeds on its own, streams or heads."""

    def __init__(self, trace: Trace, draft: TrainedDraft) -> None:
        self.block, model = draft.block, trace.model
        every = _states(trace, model.num_sublayers)
        # those of the token before each, zeros before the first
        table = pad_sequence([torch.cat([s.new_zeros(1, s.shape[1]), s]) for s in every])
        self.before = table.transpose(0, 1)  # (texts, T + 1, H)
        self.own: list[object] = [*draft.own[:-1]]
        self.head = draft.own[-1]
        if isinstance(self.block, FeatureBlock):
            join, layer = self.block.join, self.block.layer

            def fed(tokens: Tensor, states: Tensor) -> Tensor:
                features = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
                return join(features, model.embed(tokens))

            read = _read(trace, model, self.own, layer.window, fed)
            super().__init__(trace, model, read(model.num_sublayers, every))
        else:
            super().__init__(trace, model)
        self.longest = draft.longest

    def begin(self, texts: Tensor, starts: Tensor, steps: int) -> None:
        super().begin(texts, starts, steps)
        at = (each.to(self.before.device) for each in (texts[:, None], starts))
        self.carried = [self.before[tuple(at)]]  # (B, G, H)

    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        block = self.block
        if isinstance(block, Heads):
            if not step:  # (B, G, K, H)
                self.carried = [block(self.carried[0], self.model.embed(tokens))]
            return self.head(self.carried[0][:, :, step], None)
        assert isinstance(block, FeatureBlock)
        if isinstance(block, Streams):  # step by step what decoding has in one pass
            if not step:  # (B, G, K, H)
                self.carried = [block.fed(self.carried[0], self.model.embed(tokens))]
            return self.head(self.run(self.carried[0][:, :, step], self.own), None)
        out = self.run(block.join(self.carried[0], self.model.embed(tokens)), self.own)
        self.carried = [out]
        return self.head(out, None)


def steps_of(trace: Trace, draft: SkipConfig | Drafter, *, follow: bool) -> Steps:
    """What computes a draft, a skip config for the trace's number of layers or a `Drafter`."""
    drafter = as_drafter(trace.model, draft)
    if isinstance(drafter, Assistant):
        return _Second(trace, drafter)
    if isinstance(drafter, TrainedDraft):
        if drafter.prefix:
            return _Sublayers(trace, drafter.skip, drafter, follow=follow)
        return _Features(trace, drafter)
    if isinstance(drafter, SkipConfig):
        return _Sublayers(trace, drafter, None, follow=follow)
    raise TypeError(
        f"a {type(drafter).__name__} cannot be replayed; a skip config or one of the "
        "library's drafters can"
    )


def _states(trace: Trace, tap: int) -> list[Tensor]:
    """The target's states of all tokens of every text behind so many sublayers, (T, H) each."""
    model, found = trace.model, []
    for text in trace.texts:
        tokens = text.tokens.to(model.device)[None]  # (1, T)
        cache = model.new_cache(1, tokens.shape[1])
        cache.place([0], tokens.shape[1])
        step = Pass(model, cache, model.rotary(tokens.shape[1], tokens.shape[1]))
        found.append(model.run(model.embed(tokens), step, range(tap))[0])
    return found


def _read(
    trace: Trace,
    model: Sublayers,
    blocks: list[object],
    window: int | None,
    fed: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., RowCache]:
    """Reads all texts through blocks with a cache of their own.

    Args:
        fed: from tokens (1, T) and states at a tap (1, T, H) to what the blocks are fed with.
    """

    def read(tap: int, states: list[Tensor] | None = None) -> RowCache:
        caches = []
        for text, each in zip(trace.texts, states or _states(trace, tap), strict=True):
            tokens = text.tokens.to(model.device)[None]  # (1, T)
            count = tokens.shape[1]
            caches.append(RowCache(1, count, (window,)))
            caches[-1].place([0], count)
            step = Pass(model, caches[-1], model.rotary(count, count))
            model.backend.run(fed(tokens, each[None]), step, blocks)  # type: ignore[arg-type]
        return joined(caches)

    return read
