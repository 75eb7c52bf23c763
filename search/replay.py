"""What any draft would have drafted from every place of a trace; decodes nothing, knows no clock.

A draft's round depends on its start alone: it feeds the start's token, then its own, and sees the
target's keys and values before the start and its own from there on. So all starts are replayed
together, as tokens of a few wide passes through the engine's own sublayers, step by step.
Letters: B groups, G chains of a group, C chains, J steps, S places of the text, N starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from layerskip.search.chains import ChainCache
from layerskip.search.trace import NOTHING, Text, Trace, draw
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.laws import gumbel_noise
from layerskip.sublayers import Pass

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
        matches: whether that is the text's own token, (N, J) bool; behind a row's first False the
            draft has left the text and it means nothing.
        confidences: probability of each token under the draft's raw logits at temperature 1,
            (N, J) float32.
        ends: whether the token ends a draft: an end of text, or `NOTHING`, (N, J) bool.
    """

    trace: Trace
    skip: SkipConfig
    texts: tuple[slice, ...]
    tokens: Tensor
    matches: Tensor
    confidences: Tensor
    ends: Tensor

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
    progress: Callable[[float], None] = lambda _share: None,
) -> Replay:
    """Draft from every start of a trace with one skip config, as decoding would.

    Args:
        draft_length: tokens drafted from each start; the trace's by default.
        progress: told the share that is done.

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
        parts = _exit(trace, skip, prefix // 2, length, progress)
    else:
        chains = [
            (text, text.prompt + start, int(text.tokens[text.prompt + start]))
            for text in trace.texts
            for start in range(text.starts)
        ]
        tokens, confidences = _draft(trace, skip, chains, length, progress)  # (N, J) each
        counts = [text.starts for text in trace.texts]
        parts = list(zip(tokens.split(counts), confidences.split(counts), strict=True))
    slices, matches, first = [], [], 0
    for text, (tokens, _) in zip(trace.texts, parts, strict=True):
        slices.append(slice(first, first + text.starts))
        first += text.starts
        following = F.pad(text.following, (0, length), value=NOTHING)
        wanted = following.unfold(0, length, 1)[: text.starts]  # (starts, J)
        matches.append((tokens == wanted) & (wanted != NOTHING))
    tokens = torch.cat([tokens for tokens, _ in parts])  # (N, J)
    ends = torch.isin(tokens, torch.tensor([NOTHING, *trace.eos]))
    confidences = torch.cat([confidences for _, confidences in parts])
    return Replay(trace, skip, tuple(slices), tokens, torch.cat(matches), confidences, ends)


def _exit(
    trace: Trace, skip: SkipConfig, layer: int, length: int, progress: Callable[[float], None]
) -> list[tuple[Tensor, Tensor]]:
    """Per text tokens and confidences (starts, J) of a draft that is nothing but shared prefix.

    While it agrees with the text, such a draft computes what the target did there, so that the
    trace knows its tokens. Behind its first wrong token it is the same whatever place it started
    from: one chain for every place where the exit is wrong.
    """
    wrong: list[Tensor] = []
    chains: list[Chain] = []
    for text in trace.texts:
        drafted, following = text.drafted[layer - 1], text.following  # (places,) each
        places = torch.nonzero(drafted != following)[:, 0]
        places = places[places < text.starts + length - 1]  # as far as any start's draft reaches
        wrong.append(places)
        chains += [
            (text, text.prompt + place + 1, token)
            for place, token in zip(places.tolist(), drafted[places].tolist(), strict=True)
        ]
    left = _draft(trace, skip, chains, length - 1, progress)  # (C, J - 1) each
    # one row and column more, so that there is something to look up where nothing is wrong
    left_tokens, left_confidences = (F.pad(table, (0, 1, 0, 1)) for table in left)
    parts, first = [], 0
    for text, places in zip(trace.texts, wrong, strict=True):
        reached = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
        number = torch.searchsorted(places, reached[:, 0].contiguous())  # (starts,)
        end = F.pad(places, (0, 1), value=len(text.tokens) + length)[number]  # (starts,)
        behind = reached - end[:, None] - 1  # (starts, J) steps since the first wrong token
        known = reached.clamp(max=len(text.following) - 1)
        chain = (first + number).clamp(max=len(chains))[:, None], behind.clamp_min(0)
        drafts = [
            torch.where(behind < 0, table[layer - 1][known], rest[chain])
            for table, rest in (
                (text.drafted, left_tokens),
                (text.confidences, left_confidences),
            )
        ]
        parts.append((drafts[0], drafts[1]))
        first += len(places)
    return parts


def _draft(
    trace: Trace,
    skip: SkipConfig,
    chains: Sequence[Chain],
    steps: int,
    progress: Callable[[float], None],
) -> tuple[Tensor, Tensor]:
    """Tokens and confidences, (C, J) each, of drafts that run on from given tokens."""
    tokens = torch.zeros(len(chains), steps, dtype=torch.long)
    confidences = torch.zeros(len(chains), steps)
    if not steps:
        return tokens, confidences
    groups: list[list[int]] = []  # numbers of chains of one text
    for number, (text, _, _) in enumerate(chains):
        if not groups or len(groups[-1]) == _GROUP or chains[groups[-1][0]][0] is not text:
            groups.append([])
        groups[-1].append(number)
    together = max(1, min(_CHAINS, _LOGITS // trace.model.vocabulary) // _GROUP)
    for first in range(0, len(groups), together):
        progress(first / len(groups))
        # a short group is filled up with its last chain
        numbers = [
            [*group, *[group[-1]] * (_GROUP - len(group))]
            for group in groups[first : first + together]
        ]
        ran = _run(trace, skip, [[chains[number] for number in group] for group in numbers], steps)
        places = torch.tensor(numbers).flatten()  # (B G,)
        tokens[places], confidences[places] = ran
    return tokens, confidences


def _run(
    trace: Trace, skip: SkipConfig, groups: Sequence[Sequence[Chain]], steps: int
) -> tuple[Tensor, Tensor]:
    """Tokens and confidences, (B G, J) each, of chains that go through the model together."""
    model, law = trace.model, trace.law
    flat = [chain for group in groups for chain in group]
    starts = torch.tensor([[place for _, place, _ in group] for group in groups])  # (B, G)
    texts = torch.tensor([group[0][0].number for group in groups], device=model.device)  # (B,)
    cache = ChainCache(trace.cache, texts, starts.to(model.device), steps)
    slots = int(starts.max()) + steps
    total = max(max(len(text.tokens), text.prompt + trace.max_new_tokens) for text in trace.texts)
    rotary = model.rotary(slots, min(slots, total))
    noise = shared = None
    if law.do_sample:
        shared = SharedNoise(trace, [(text, place) for text, place, _ in flat], steps)
    histories = None
    if law.reads_history:
        histories = [text.tokens[:place].to(model.device) for text, place, _ in flat]
    fed = torch.tensor([token for _, _, token in flat], device=model.device)  # (B G,)
    tokens, confidences = [], []
    for step in range(steps):
        cache.advance(step)
        fed = fed.clamp_min(0)  # behind `NOTHING` anything will do
        if histories is not None:
            histories = [torch.cat([seen, fed[i : i + 1]]) for i, seen in enumerate(histories)]
        hidden = model.embed(fed.view(starts.shape))  # (B, G, H)
        hidden = model.run(hidden, Pass(model, cache, rotary), skip.kept())
        raw = model.logits(hidden).flatten(0, 1)  # (B G, V)
        if shared is not None:
            noise = shared.at(step)  # (B G, V)
        fed, confidence, _ = draw(law, raw, noise, histories)
        tokens.append(fed)
        confidences.append(confidence)
    return torch.stack(tokens, 1).cpu(), torch.stack(confidences, 1).cpu()


class SharedNoise:
    """The Gumbel noise of chains that draw at neighbouring places: each place's is made once.

    Args:
        starts: text and place of each of C chains' first fed token.
        steps: tokens that each draws.
    """

    def __init__(self, trace: Trace, starts: Sequence[tuple[Text, int]], steps: int) -> None:
        wanted = [(text.key, place + step + 1) for text, place in starts for step in range(steps)]
        made = {pair: row for row, pair in enumerate(dict.fromkeys(wanted))}
        rows = torch.tensor([made[pair] for pair in wanted], device=trace.model.device)
        self.rows = rows.view(len(starts), steps)  # (C, J)
        vocabulary, device = trace.model.vocabulary, trace.model.device
        pairs, many = list(made), max(1, _LOGITS // vocabulary)  # making takes room
        pieces = [pairs[first : first + many] for first in range(0, len(pairs), many)]
        self.table = torch.cat(
            [
                gumbel_noise(
                    [k for k, _ in piece], [p for _, p in piece], vocabulary, device=device
                )
                for piece in pieces
            ]
        )  # (R, V)

    def at(self, step: int, chains: Tensor | None = None) -> Tensor:
        """Of all chains at a step, (C, V), or of those numbered."""
        rows = self.rows[:, step] if chains is None else self.rows[chains, step]
        return self.table[rows]
