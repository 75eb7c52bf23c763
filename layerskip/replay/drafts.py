"""What any draft would have drafted from every place of a trace; decodes nothing, knows no clock.

A draft's round depends on its start alone: it feeds the start's token, then its own, and sees the
target's keys and values before the start and its own from there on. So all starts are replayed
together, as tokens of a few wide passes through the engine's own sublayers, step by step.
Letters: B groups, G chains of a group, C chains, J steps, S places of the text, N starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.laws import gumbel_noise
from layerskip.model.sublayers import Pass
from layerskip.replay.chains import ChainCache
from layerskip.replay.drawing import (
    NOTHING,
    Beside,
    Drawn,
    Histories,
    draw,
    narrowed,
    propose,
    stray_noise,
)
from layerskip.replay.trace import Text, Trace

Chain = tuple[Text, int, int]  # the text left, the place and the id of the first token fed

_GROUP = 16  # chains that share one copy of their text's keys and values
_CHAINS = 256  # of one pass, at most
_LOGITS = 2**24  # elements of one pass's logits, or of noise made at once, at most


@dataclass(frozen=True)
class Replay:
    """A draft's tokens from every start of a trace, at full draft length.

    Starts are those of the trace's texts, text by text: `texts[t]` is the slice of text t. What a
    controller would have kept of these drafts is for `simulation.py` to say.

    Attributes:
        tokens: what each step drafts, (N, J) int64; `NOTHING` where nothing could be drawn, and
            what stands behind that means nothing.
        matches: whether that is the text's own token, and so accepted, (N, J) bool; behind a row's
            first False the draft has left the text and it means nothing.
        confidences: probability of each token under the draft's raw logits at temperature 1,
            (N, J) float32.
        ends: whether the token ends a draft: an end of text, or `NOTHING`, (N, J) bool.
        weights: under the rejection rule, the probability that the token was accepted, given the
            text, (N, J) float32, NaN behind a row's first wrong token; None under other rules.
    """

    trace: Trace
    skip: SkipConfig
    texts: tuple[slice, ...]
    tokens: Tensor
    matches: Tensor
    confidences: Tensor
    ends: Tensor
    weights: Tensor | None = None

    @property
    def draft_length(self) -> int:
        """J."""
        return self.tokens.shape[1]

    @property
    def survival(self) -> list[float]:
        """Share of all starts whose first j drafted tokens are the text's, for j = 1..J."""
        return self.matches.cumprod(1).float().mean(0).tolist()


@torch.no_grad()
def replay(
    trace: Trace,
    skip: SkipConfig,
    draft_length: int | None = None,
    *,
    allowed: Tensor | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Replay:
    """Draft from every start of a trace with one skip config, as decoding would.

    Args:
        draft_length: tokens drafted from each start; the trace's by default.
        allowed: the draft vocabulary of each text, (texts, V) bool; all tokens by default.
        progress: told the share that is done.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    length = checked_length(trace, draft_length)
    skip = skip.resolve(trace.model.num_layers)
    layer = exit_layer(skip)
    if layer is not None:
        return assembled(trace, skip, _exit(trace, skip, layer, length, allowed, progress))
    drafts = _draft(trace, skip, all_starts(trace), length, allowed, progress)
    return assembled(trace, skip, drafts)


class Drafts(NamedTuple):
    """Tokens, confidences and weights of drafts, (C, J) each, as a replay has them."""

    tokens: Tensor
    confidences: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, chains: int, steps: int) -> Drafts:
        """To be filled in."""
        numbers = torch.zeros(2, chains, steps)
        return cls(torch.zeros(chains, steps, dtype=torch.long), *numbers)

    @classmethod
    def joined(cls, parts: Sequence[Drafts]) -> Drafts:
        """The drafts of several texts, one behind the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def write(self, where: tuple[Tensor, int], drawn: Drawn) -> None:
        """Fill in what some chains drew at a step."""
        for mine, theirs in zip(self, drawn, strict=False):
            mine[where] = theirs.cpu()


def checked_length(trace: Trace, draft_length: int | None) -> int:
    """The draft length asked for, J; the trace's by default."""
    length = trace.draft_length if draft_length is None else draft_length
    if not 1 <= length <= trace.draft_length:
        raise ValueError(
            f"draft_length must be in 1..{trace.draft_length}, as far as this trace looks ahead; "
            f"got {length}; take a trace with a longer one"
        )
    return length


def all_starts(trace: Trace) -> list[Chain]:
    """A chain from every start, N of them."""
    return [
        (text, place, token)
        for text in trace.texts
        for place, token in enumerate(text.tokens.tolist()[: text.prompt + text.starts])
        if place >= text.prompt
    ]


def exit_layer(skip: SkipConfig) -> int | None:
    """How many whole layers a resolved config's draft is, if it is nothing but shared prefix."""
    prefix = skip.shared_prefix()
    return prefix // 2 if prefix == len(skip.kept()) and prefix % 2 == 0 else None


def assembled(trace: Trace, skip: SkipConfig, drafts: Drafts) -> Replay:
    """The replay of drafts (N, J) from every start."""
    length = drafts.tokens.shape[1]
    slices, wanted, first = [], [], 0
    for text in trace.texts:
        slices.append(slice(first, first + text.starts))
        first += text.starts
        following = F.pad(text.following, (0, length), value=NOTHING)
        wanted.append(following.unfold(0, length, 1)[: text.starts])  # (starts, J)
    own = torch.cat(wanted)  # (N, J)
    matches = (drafts.tokens == own) & (own != NOTHING)
    ends = torch.isin(drafts.tokens, torch.tensor([NOTHING, *trace.eos]))
    weights = None
    if trace.rejection:
        weights = drafts.weights.masked_fill(astray(matches), float("nan"))
    return Replay(
        trace, skip, tuple(slices), drafts.tokens, matches, drafts.confidences, ends, weights
    )


def astray(matches: Tensor) -> Tensor:
    """Which steps lie behind a row's first wrong token, (N, J)."""
    return F.pad(matches.long().cumprod(1)[:, :-1], (1, 0), value=1) == 0


def _exit(
    trace: Trace,
    skip: SkipConfig,
    layer: int,
    length: int,
    allowed: Tensor | None,
    progress: Callable[[float], None],
) -> Drafts:
    """Drafts (N, J) that are nothing but shared prefix.

    While it agrees with the text, such a draft computes what the target did there, so that the
    trace knows its tokens. Behind its first wrong token it is the same whatever place it started
    from: one chain for every place where the exit is wrong.
    """
    wrong: list[Tensor] = []
    chains: list[Chain] = []
    proposals = [trace.proposed(text, layer, [allowed])[0] for text in trace.texts]
    for text, proposed in zip(trace.texts, proposals, strict=True):
        drafted, following = proposed.tokens, text.following  # (places,) each
        places = torch.nonzero(drafted != following)[:, 0]
        places = places[places < text.starts + length - 1]  # as far as any start's draft reaches
        wrong.append(places)
        chains += [
            (text, text.prompt + place + 1, token)
            for place, token in zip(places.tolist(), drafted[places].tolist(), strict=True)
        ]
    left = _draft(trace, skip, chains, length - 1, allowed, progress)  # (C, J - 1) each
    # one row and column more, so that there is something to look up where nothing is wrong
    rest = [F.pad(table, (0, 1, 0, 1)) for table in left]
    parts, first = [], 0
    for text, places, proposed in zip(trace.texts, wrong, proposals, strict=True):
        reached = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
        number = torch.searchsorted(places, reached[:, 0].contiguous())  # (starts,)
        end = F.pad(places, (0, 1), value=len(text.tokens) + length)[number]  # (starts,)
        behind = reached - end[:, None] - 1  # (starts, J) steps since the first wrong token
        chain = (first + number).clamp(max=len(chains))[:, None], behind.clamp_min(0)
        known = exit_drafts(text, proposed, length)
        tables = zip(known, rest, strict=True)
        parts.append(Drafts(*(torch.where(behind < 0, own, later[chain]) for own, later in tables)))
        first += len(places)
    return Drafts.joined(parts)


def exit_drafts(text: Text, proposed: Drawn, length: int) -> Drafts:
    """What an exit drafts from each start (starts, J) while it agrees with the text."""
    reached = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
    reached = reached.clamp(max=len(text.following) - 1)
    return Drafts(*(table[reached] for table in proposed[:3]))


def _draft(
    trace: Trace,
    skip: SkipConfig,
    chains: Sequence[Chain],
    steps: int,
    allowed: Tensor | None,
    progress: Callable[[float], None],
) -> Drafts:
    """Drafts (C, J) that run on from given tokens."""
    drafts = Drafts.empty(len(chains), steps)
    if not steps:
        return drafts
    groups: list[list[int]] = []  # numbers of chains of one text
    for number, (text, _, _) in enumerate(chains):
        if not groups or len(groups[-1]) == _GROUP or chains[groups[-1][0]][0] is not text:
            groups.append([])
        groups[-1].append(number)
    together = max(1, min(_CHAINS, _LOGITS // trace.model.vocabulary) // _GROUP)
    for first in range(0, len(groups), together):
        progress(first / len(groups))
        # a short group is filled up with its last chain
        layout = torch.tensor(
            [
                [*group, *[group[-1]] * (_GROUP - len(group))]
                for group in groups[first : first + together]
            ]
        )  # (B, G)
        flat = layout.flatten()  # (B G,)
        ran = _run(trace, skip, [chains[number] for number in flat.tolist()], steps, allowed)
        for step, drawn in enumerate(ran):
            drafts.write((flat, step), drawn)
    return drafts


def _run(
    trace: Trace, skip: SkipConfig, chains: Sequence[Chain], steps: int, allowed: Tensor | None
) -> Iterator[Drawn]:
    """What chains (B G,) draw, step by step, that go through the model together."""
    model, law = trace.model, trace.law
    starts = torch.tensor([place for _, place, _ in chains]).view(-1, _GROUP)  # (B, G)
    texts = torch.tensor([text.number for text, _, _ in chains[::_GROUP]])  # (B,)
    cache = ChainCache(trace.cache, texts.to(model.device), starts.to(model.device), steps)
    rotary = trace.rotary(int(starts.max()) + steps)
    draws = Draws(trace, chains, steps).within(allowed)
    histories = None
    if law.reads_history:
        histories = [text.tokens[:place].to(model.device) for text, place, _ in chains]
    fed = torch.tensor([token for _, _, token in chains], device=model.device)  # (B G,)
    for step in range(steps):
        cache.advance(step)
        fed = fed.clamp_min(0)  # behind `NOTHING` anything will do
        if histories is not None:
            histories = [torch.cat([seen, fed[i : i + 1]]) for i, seen in enumerate(histories)]
        hidden = model.embed(fed.view(starts.shape))  # (B, G, H)
        hidden = model.run(hidden, Pass(model, cache, rotary), skip.kept())
        drawn = draws.at(step, model.logits(hidden).flatten(0, 1), histories)
        yield drawn
        fed = drawn.tokens


class Draws:
    """What chains draw from their logits, step by step, under the trace's law and accept rule.

    Args:
        chains: C of them.
        steps: tokens that each draws.
    """

    def __init__(self, trace: Trace, chains: Sequence[Chain], steps: int) -> None:
        self.trace, self.chains = trace, chains
        self.noise = None
        if trace.law.do_sample and not trace.rejection:
            self.noise = _SharedNoise(trace, chains, steps)
        self.strayed: list[int] = []
        """Under the rejection rule, the place of each chain's first wrong token; 0 on its text."""
        if trace.rejection:
            self.strayed = [
                0 if text.tokens[place : place + 1].tolist() == [token] else place
                for text, place, token in chains
            ]
        self.allowed: Tensor | None = None

    def within(self, allowed: Tensor | None) -> Draws:
        """The same chains from their beginning, and the same noise, in a draft vocabulary.

        Args:
            allowed: of each text, (texts, V) bool; None: all tokens.
        """
        draws = copy(self)
        draws.allowed, draws.strayed = allowed, list(self.strayed)
        return draws

    def at(
        self, step: int, raw: Tensor, histories: Histories, chains: Tensor | None = None
    ) -> Drawn:
        """Draw from raw logits (C, V) of all chains at a step, or of those numbered."""
        if chains is None:
            chains = torch.arange(len(self.chains))
        if self.allowed is not None:
            texts = [self.chains[number][0].number for number in chains.tolist()]
            raw = narrowed(raw, self.allowed[texts].to(raw.device))
        if not self.trace.rejection:
            noise = None if self.noise is None else self.noise.at(step, chains)
            return draw(self.trace.law, raw, noise, histories)
        numbers = chains.tolist()
        on = [i for i, number in enumerate(numbers) if not self.strayed[number]]
        off = [i for i, number in enumerate(numbers) if self.strayed[number]]
        parts = []
        for which, draw_them in ((on, self._on_text), (off, self._off_text)):
            if which:
                seen = None if histories is None else [histories[i] for i in which]
                parts.append(draw_them(step, raw[which], seen, [numbers[i] for i in which]))
        order = torch.tensor(on + off, device=raw.device).argsort()
        return Drawn(*(torch.cat(tables)[order] for tables in zip(*parts, strict=True)))

    def _on_text(
        self, step: int, raw: Tensor, histories: Histories, numbers: Sequence[int]
    ) -> Drawn:
        places = [(text, place + step) for text, place, _ in (self.chains[n] for n in numbers)]
        rows = torch.tensor(
            [self.trace.offsets[text.number] + place - text.prompt for text, place in places]
        )
        following = self.trace.following[rows]  # (N,)
        beside = Beside(
            following.to(raw.device),
            self.trace.likelihoods[rows].to(raw.device),
            [text.key for text, _ in places],
            [place + 1 for _, place in places],
        )

        def target(rows: Tensor) -> Tensor:
            few = rows.tolist()
            seen = None if histories is None else [histories[i] for i in few]
            return self.trace.target_law([places[i] for i in few], seen)

        drawn = propose(self.trace.law, raw, histories, beside, target)
        # behind the last known token of a text no draft is on it
        right = ((drawn.tokens.cpu() == following) & (following != NOTHING)).tolist()
        for number, (_, place), agrees in zip(numbers, places, right, strict=True):
            self.strayed[number] = 0 if agrees else place + 1
        return drawn

    def _off_text(
        self, step: int, raw: Tensor, histories: Histories, numbers: Sequence[int]
    ) -> Drawn:
        keys = [self.chains[number][0].key for number in numbers]
        places = [self.chains[number][1] + step + 1 for number in numbers]
        noise = stray_noise(keys, [self.strayed[number] for number in numbers], places, raw)
        return draw(self.trace.law, raw, noise, histories)


class _SharedNoise:
    """The Gumbel noise of chains that draw at neighbouring places: each place's is made once."""

    def __init__(self, trace: Trace, chains: Sequence[Chain], steps: int) -> None:
        vocabulary, device = trace.model.vocabulary, trace.model.device
        wanted = [(text.key, place + j + 1) for text, place, _ in chains for j in range(steps)]
        made = {pair: row for row, pair in enumerate(dict.fromkeys(wanted))}
        self.rows = torch.tensor([made[pair] for pair in wanted]).view(len(chains), steps)  # (C, J)
        pairs, many = list(made), max(1, _LOGITS // vocabulary)  # making takes room
        pieces = []
        for first in range(0, len(pairs), many):
            keys, places = zip(*pairs[first : first + many], strict=True)
            pieces.append(gumbel_noise(keys, places, vocabulary, device=device))
        self.table = torch.cat(pieces)  # (R, V)

    def at(self, step: int, chains: Tensor) -> Tensor:
        """Noise of the chains so numbered, at a step, (N, V)."""
        return self.table[self.rows[chains, step].to(self.table.device)]
