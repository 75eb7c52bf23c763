"""How far any draft follows the texts of a trace; knows nothing of a draft that has gone astray.

As in `replay.py`, but each draft is left at its first wrong token, and what it would compute
in the shared prefix is taken from the trace. That is all that a fixed draft length needs, at a part
of the cost: a search looks at hundreds of drafts in this way, and replays only the best whole.
Drafts that differ only in the tokens they can draw are followed together: on the text they compute
the same, so that all sizes of a draft vocabulary cost one head, and a few draws, more than one.
Letters: B groups, G chains of a group, J steps, N starts, P places of all texts, W vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.model.sublayers import Pass
from layerskip.replay.chains import ChainCache
from layerskip.replay.drafts import (
    Drafts,
    Draws,
    Replay,
    all_starts,
    assembled,
    astray,
    checked_length,
    exit_drafts,
    exit_layer,
)
from layerskip.replay.drawing import NOTHING
from layerskip.replay.trace import Trace

_GROUPS = (16, 8, 4)  # chains that share one copy of their text's keys and values; copies cost, too
_CHAINS = 512  # of one pass, at most
_LOGITS = 2**24  # elements of one pass's logits, at most
_REGROUP = 0.8  # a pass is made smaller when at most so many of its places are needed

Survival = Sequence[float]
Enough = Callable[[Survival], bool]


def follow(
    trace: Trace,
    skip: SkipConfig,
    draft_length: int | None = None,
    *,
    enough: Enough | None = None,
) -> Replay:
    """`follow_each` of a draft that can draw every token; `enough` is told its survival."""
    alone = None if enough is None else lambda each: enough(each[0])
    return follow_each(trace, skip, [None], draft_length, enough=alone)[0]


@torch.no_grad()
def follow_each(
    trace: Trace,
    skip: SkipConfig,
    vocabularies: Sequence[Tensor | None],
    draft_length: int | None = None,
    *,
    enough: Callable[[Sequence[Survival]], bool] | None = None,
) -> list[Replay]:
    """Draft from every start of a trace, as far as the drafts agree with the text.

    A replay has tokens, matches and confidences up to each start's first wrong token. Behind it,
    confidences are those of drafts that start at the same place: a draft that goes on after a wrong
    token is about as sure as one that starts there afresh. So rounds of a fixed draft length are
    exact (but for an end of text drafted behind a wrong token), and of other controllers close.

    Args:
        vocabularies: of W drafts, each of every text, (texts, V) bool; None: all tokens.
        draft_length: tokens drafted from each start; the trace's by default.
        enough: told the survival of each (of each step so far, the share of a sample of the starts
            that still agree), says whether longer drafts are of no interest; the replays then end
            there. Early exits, which the trace has at hardly any cost, are not asked about.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    length = checked_length(trace, draft_length)
    skip = skip.resolve(trace.model.num_layers)
    layer = exit_layer(skip)
    if layer is None:
        drafts = _Following(trace, skip, vocabularies, length).run(enough or _never)
    else:
        proposed = [trace.proposed(text, layer, vocabularies) for text in trace.texts]
        drafts = [
            Drafts.joined(
                [exit_drafts(*pair, length) for pair in zip(trace.texts, each, strict=True)]
            )
            for each in zip(*proposed, strict=True)
        ]
    return [_followed(assembled(trace, skip, each)) for each in drafts]


def _followed(played: Replay) -> Replay:
    """The same without what stands behind wrong tokens."""
    lost = astray(played.matches)  # (N, J)
    steps = torch.arange(played.draft_length)
    afresh = []
    for rows in played.texts:
        reached = torch.arange(rows.start, rows.stop)[:, None] + steps  # (starts, J)
        afresh.append(played.confidences[reached.clamp_(max=rows.stop - 1), 0])
    return replace(
        played,
        tokens=played.tokens.masked_fill(lost, 0),
        matches=played.matches & ~lost,
        confidences=torch.where(lost, torch.cat(afresh), played.confidences),
        ends=played.ends & ~lost,
    )


class _Following:
    """The passes of one skip config over all starts."""

    def __init__(
        self, trace: Trace, skip: SkipConfig, vocabularies: Sequence[Tensor | None], length: int
    ) -> None:
        self.trace, self.vocabularies, self.length = trace, vocabularies, length
        model, texts = trace.model, trace.texts
        layers = skip.shared_prefix() // 2  # whole ones, which the trace has been through
        self.sublayers = [index for index in skip.kept() if index >= 2 * layers]
        if layers:
            self.before = torch.cat([text.states[layers - 1] for text in texts])  # (P, H)
        else:
            known = torch.cat([text.tokens[text.prompt :] for text in texts])  # (P,)
            self.before = model.embed(known.to(model.device)[None])[0]  # (P, H)
        self.chains = all_starts(trace)
        self.text = torch.tensor([text.number for text, _, _ in self.chains])  # (N,)
        self.place = torch.tensor([place for _, place, _ in self.chains])  # (N,)
        ends = [*trace.offsets[1:], len(trace.following)]  # of each text's places among all
        self.last_row = torch.tensor(ends)[self.text] - 1  # (N,)
        shifts = [at - text.prompt for at, text in zip(trace.offsets, texts, strict=True)]
        self.row = torch.tensor(shifts)[self.text] + self.place  # (N,) of each start
        self.rotary = trace.rotary(max(len(text.tokens) for text in texts) + length)

    def run(self, enough: Callable[[Sequence[Survival]], bool]) -> list[Drafts]:
        """Drafts (N, J), W times; what stands behind a wrong token means nothing."""
        groups = self._grouped(range(len(self.row)), _GROUPS[0])
        vocabulary = self.trace.model.vocabulary
        together = max(1, min(_CHAINS, _LOGITS // vocabulary) // _GROUPS[0])
        parts = -(-len(groups) // together)
        drafts = [Drafts.empty(len(self.row), self.length) for _ in self.vocabularies]
        steps = self.length
        for part in range(parts):  # each has starts from all over the texts
            steps = self._run(torch.tensor(groups[part::parts]), steps, drafts, enough)
            enough = _never  # the first part has decided for all
        return [Drafts(*(table[:, :steps] for table in each)) for each in drafts]

    def _run(
        self,
        layout: Tensor,
        steps: int,
        drafts: Sequence[Drafts],
        enough: Callable[[Sequence[Survival]], bool],
    ) -> int:
        """Fill in the drafts of starts (B, G); returns after how many steps it was enough."""
        model, following = self.trace.model, self.trace.following
        device = model.device
        texts, starts = self.text[layout[:, 0]], self.place[layout]  # (B,), (B, G)
        cache = ChainCache(self.trace.cache, texts.to(device), starts.to(device), steps)
        begun = layout.flatten().unique()  # (C,)
        chains = [self.chains[start] for start in begun.tolist()]
        whole = Draws(self.trace, chains, steps)
        draws = [whole.within(allowed) for allowed in self.vocabularies]
        alive = torch.zeros(len(draws), len(self.row), dtype=torch.bool)  # (W, N)
        alive[:, begun] = True
        survivals: list[list[float]] = [[] for _ in draws]
        for step in range(steps):
            flat = layout.flatten()  # (B G,)
            numbers = torch.searchsorted(begun, flat)  # (B G,) among the chains
            rows = torch.minimum(self.row[flat] + step, self.last_row[flat])  # (B G,)
            cache.advance(step)
            hidden = self.before[rows.to(device)].unflatten(0, layout.shape)  # (B, G, H)
            hidden = model.run(hidden, Pass(model, cache, self.rotary), self.sublayers)
            histories = None
            if self.trace.law.reads_history:
                seen = [chains[number] for number in numbers.tolist()]
                histories = [text.tokens[: place + step + 1].to(device) for text, place, _ in seen]
            raw = model.logits(hidden).flatten(0, 1)  # (B G, V)
            wanted = following[rows]  # (B G,)
            for mine, drawing, on, survival in zip(drafts, draws, alive, survivals, strict=True):
                mine.write((flat, step), drawing.at(step, raw, histories, numbers))
                on[flat] &= (mine.tokens[flat, step] == wanted) & (wanted != NOTHING)
                survival.append(int(on.sum()) / len(begun))
            if enough(survivals):
                return step + 1
            left = int(alive.any(0).sum())
            if not left:
                break
            if left <= _REGROUP * layout.numel() and step + 1 < steps:
                layout, cache = self._regrouped(layout, alive.any(0), cache, steps, step + 1)
        return steps

    def _regrouped(
        self, layout: Tensor, alive: Tensor, cache: ChainCache, steps: int, fed: int
    ) -> tuple[Tensor, ChainCache]:
        """The chains that are alive, in groups of a size that leaves few places empty."""
        at = {n: i for i, n in enumerate(layout.flatten().tolist()) if alive[n]}
        kept = sorted(at)
        groups = min((self._grouped(kept, size) for size in _GROUPS), key=_places_taken)
        if _places_taken(groups) > _REGROUP * layout.numel():
            return layout, cache
        chosen = torch.tensor([[at[number] for number in group] for group in groups])
        chosen = chosen.to(cache.starts.device)
        return torch.tensor(groups), cache.regrouped(chosen, steps, fed)

    def _grouped(self, starts: Sequence[int], size: int) -> list[list[int]]:
        """Groups of starts of one text, short ones filled up with their last."""
        texts = self.text.tolist()
        groups: list[list[int]] = []
        for number in starts:
            if not groups or len(groups[-1]) == size or texts[groups[-1][0]] != texts[number]:
                groups.append([])
            groups[-1].append(number)
        return [[*group, *[group[-1]] * (size - len(group))] for group in groups]


def _places_taken(groups: Sequence[Sequence[int]]) -> int:
    return len(groups) * len(groups[0])


def _never(_survivals: Sequence[Survival]) -> bool:
    return False
