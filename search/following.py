"""How far any draft follows the texts of a trace; knows nothing of a draft that has gone astray.

As in `replay.py`, but each draft is left at its first wrong token, and what it would compute
in the shared prefix is taken from the trace. That is all that a fixed draft length needs, at a part
of the cost: a search looks at hundreds of drafts in this way, and replays only the best whole.
Letters: B groups, G chains of a group, J steps, N starts, P places of all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from layerskip.search.chains import ChainCache
from layerskip.search.replay import Replay, SharedNoise
from layerskip.search.trace import NOTHING, Text, Trace, draw
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.sublayers import Pass

_GROUPS = (16, 8, 4)  # chains that share one copy of their text's keys and values; copies cost, too
_CHAINS = 512  # of one pass, at most
_LOGITS = 2**24  # elements of one pass's logits, at most
_REGROUP = 0.8  # a pass is made smaller when at most so many of its places are needed


@torch.no_grad()
def follow(
    trace: Trace,
    skip: SkipConfig,
    draft_length: int | None = None,
    *,
    enough: Callable[[Sequence[float]], bool] | None = None,
) -> Replay:
    """Draft from every start of a trace, as far as the drafts agree with the text.

    The replay has tokens, matches and confidences up to each start's first wrong token. Behind it,
    confidences are those of drafts that start at the same place: a draft that goes on after a wrong
    token is about as sure as one that starts there afresh. So rounds of a fixed draft length are
    exact (but for an end of text drafted behind a wrong token), and of other controllers close.

    Args:
        draft_length: tokens drafted from each start; the trace's by default.
        enough: told the survival (of each step so far, the share of a sample of the starts that
            still agree), says whether longer drafts are of no interest; the replay then ends there.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    length = trace.draft_length if draft_length is None else draft_length
    if not 1 <= length <= trace.draft_length:
        raise ValueError(
            f"draft_length must be in 1..{trace.draft_length}, as far as this trace looks ahead; "
            f"got {length}; take a trace with a longer one"
        )
    skip = skip.resolve(trace.model.num_layers)
    prefix = skip.shared_prefix()
    if prefix == len(skip.kept()) and prefix % 2 == 0:
        reached = [
            (torch.arange(text.starts)[:, None] + torch.arange(length)).clamp_(
                max=len(text.following) - 1
            )
            for text in trace.texts
        ]
        tokens, confidences = (
            torch.cat(
                [
                    getattr(text, name)[prefix // 2 - 1][places]
                    for text, places in zip(trace.texts, reached, strict=True)
                ]
            )  # (N, J)
            for name in ("drafted", "confidences")
        )
    else:
        tokens, confidences = _Following(trace, skip, length).run(enough or _never)
        length = tokens.shape[1]
    slices, matches, sure, first = [], [], [], 0
    for text in trace.texts:
        rows = slice(first, first + text.starts)
        slices.append(rows)
        first += text.starts
        following = torch.nn.functional.pad(text.following, (0, length), value=NOTHING)
        wanted = following.unfold(0, length, 1)[: text.starts]  # (starts, J)
        agrees = (tokens[rows] == wanted) & (wanted != NOTHING)
        matches.append(agrees)
        places = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
        afresh = confidences[rows, 0][places.clamp_(max=text.starts - 1)]  # (starts, J)
        sure.append(torch.where(_astray(agrees), afresh, confidences[rows]))
    matched = torch.cat(matches)  # (N, J)
    astray = _astray(matched)
    tokens = tokens.masked_fill(astray, 0)
    ends = torch.isin(tokens, torch.tensor([NOTHING, *trace.eos])) & ~astray
    return Replay(trace, skip, tuple(slices), tokens, matched & ~astray, torch.cat(sure), ends)


def _astray(agrees: Tensor) -> Tensor:
    """Which steps lie behind a row's first wrong token, (N, J)."""
    return torch.nn.functional.pad(agrees.long().cumprod(1)[:, :-1], (1, 0), value=1) == 0


class _Following:
    """The passes of one skip config over all starts."""

    def __init__(self, trace: Trace, skip: SkipConfig, length: int) -> None:
        self.trace, self.length = trace, length
        model, texts = trace.model, trace.texts
        layers = skip.shared_prefix() // 2  # whole ones, which the trace has been through
        self.sublayers = [index for index in skip.kept() if index >= 2 * layers]
        if layers:
            self.before = torch.cat([text.states[layers - 1] for text in texts])  # (P, H)
        else:
            known = torch.cat([text.tokens[text.prompt :] for text in texts])  # (P,)
            self.before = model.embed(known.to(model.device)[None])[0]  # (P, H)
        self.following = torch.cat([text.following for text in texts])  # (P,)
        sizes = torch.tensor([len(text.following) for text in texts])
        lasts = sizes.cumsum(0) - 1
        self.text = torch.cat([torch.full((t.starts,), i) for i, t in enumerate(texts)])  # (N,)
        self.start = torch.cat([torch.arange(text.starts) for text in texts])  # (N,)
        self.row = (lasts + 1 - sizes)[self.text] + self.start  # (N,) among all places
        self.last_row = lasts[self.text]  # (N,) of the start's text
        slots = max(len(text.tokens) for text in texts) + length
        total = max(max(len(text.tokens), text.prompt + trace.max_new_tokens) for text in texts)
        self.rotary = model.rotary(slots, min(slots, total))

    def run(self, enough: Callable[[Sequence[float]], bool]) -> tuple[Tensor, Tensor]:
        """Tokens and confidences, (N, J) each; behind a wrong token they mean nothing."""
        groups = self._grouped(range(len(self.start)), _GROUPS[0])
        vocabulary = self.trace.model.vocabulary
        together = max(1, min(_CHAINS, _LOGITS // vocabulary) // _GROUPS[0])
        parts = -(-len(groups) // together)
        tokens = torch.zeros(len(self.start), self.length, dtype=torch.long)
        confidences = torch.zeros(len(self.start), self.length)
        steps = self.length
        for part in range(parts):  # each has starts from all over the texts
            steps = self._run(groups[part::parts], steps, tokens, confidences, enough)
            enough = _never  # the first part has decided for all
        return tokens[:, :steps], confidences[:, :steps]

    def _run(
        self,
        groups: Sequence[Sequence[int]],
        steps: int,
        tokens: Tensor,
        confidences: Tensor,
        enough: Callable[[Sequence[float]], bool],
    ) -> int:
        """Fill in the rows of some starts; returns after how many steps it was enough."""
        trace, model, law = self.trace, self.trace.model, self.trace.law
        layout = torch.tensor(groups)  # (B, G) numbers of starts
        cache = ChainCache(trace.cache, self._texts(layout), self._places(layout), steps)
        first = layout.flatten()
        count = len(first.unique())
        alive = torch.zeros(len(self.start), dtype=torch.bool)
        alive[first] = True
        noise_row = torch.zeros(len(self.start), dtype=torch.long)
        noise_row[first] = torch.arange(len(first))
        shared = SharedNoise(trace, self._chains(first), steps) if law.do_sample else None
        survival: list[float] = []
        for step in range(steps):
            flat = layout.flatten()  # (B G,)
            rows = torch.minimum(self.row[flat] + step, self.last_row[flat])  # (B G,)
            cache.advance(step)
            hidden = self.before[rows.to(self.before.device)].unflatten(0, layout.shape)
            hidden = model.run(hidden, Pass(model, cache, self.rotary), self.sublayers)
            raw = model.logits(hidden).flatten(0, 1)  # (B G, V)
            noise = None if shared is None else shared.at(step, noise_row[flat])
            histories = None
            if law.reads_history:
                histories = [
                    text.tokens[: place + step + 1].to(model.device)
                    for text, place in self._chains(flat)
                ]
            drawn, sure, _ = draw(law, raw, noise, histories)
            tokens[flat, step], confidences[flat, step] = drawn.cpu(), sure.cpu()
            alive[flat] &= tokens[flat, step] == self.following[rows]
            left = len(flat[alive[flat]].unique())
            survival.append(left / count)
            if enough(survival):
                return step + 1
            if not left:
                break
            if left <= _REGROUP * layout.numel() and step + 1 < steps:
                layout, cache = self._regrouped(layout, alive, cache, steps, step + 1)
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
        layout = torch.tensor(groups)  # (B, G)
        chosen = chosen.to(cache.starts.device)
        return layout, cache.regrouped(chosen, steps, fed)

    def _grouped(self, starts: Sequence[int], size: int) -> list[list[int]]:
        """Groups of starts of one text, short ones filled up with their last."""
        texts = self.text.tolist()
        groups: list[list[int]] = []
        for number in starts:
            if not groups or len(groups[-1]) == size or texts[groups[-1][0]] != texts[number]:
                groups.append([])
            groups[-1].append(number)
        return [[*group, *[group[-1]] * (size - len(group))] for group in groups]

    def _texts(self, layout: Tensor) -> Tensor:
        """Text of each group, (B,), on the model's device."""
        return self.text[layout[:, 0]].to(self.trace.model.device)

    def _places(self, layout: Tensor) -> Tensor:
        """Places of the first fed tokens, (B, G), on the model's device."""
        prompts = torch.tensor([text.prompt for text in self.trace.texts])
        places = prompts[self.text[layout]] + self.start[layout]
        return places.to(self.trace.model.device)

    def _chains(self, starts: Tensor) -> list[tuple[Text, int]]:
        """Text and place of each start."""
        texts = [self.trace.texts[number] for number in self.text[starts].tolist()]
        own = self.start[starts].tolist()
        return [(text, text.prompt + place) for text, place in zip(texts, own, strict=True)]


def _places_taken(groups: Sequence[Sequence[int]]) -> int:
    return len(groups) * len(groups[0])


def _never(_survival: Sequence[float]) -> bool:
    return False
