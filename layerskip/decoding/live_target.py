"""The model as the target of rounds: runs its passes, and draws tokens by the rows' laws.

Shapes: R rows of a pass, N positions, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.cache.branches import along, depths
from layerskip.cache.rows import on_device
from layerskip.decoding.cached_texts import Reuse
from layerskip.decoding.draws import Drawn, Draws, Place, joined
from layerskip.decoding.passes import Passes, Position
from layerskip.decoding.rounds import DraftedTokens, StepRequest, StepResult, VerifyResult
from layerskip.decoding.rules import COUPLED, Rule

# The moves of rows so far, and every row with its length and last token.
_Start = tuple[int, list[tuple[int, int, int]]]


class LiveTarget:
    """A target of rounds computed by a model.

    Args:
        reuse: where texts start from earlier ones, and are stored for later ones.
        progress: called after every pass over prompts.
    """

    def __init__(
        self,
        passes: Passes,
        rule: Rule = COUPLED,
        reuse: Reuse | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.batch, self.seats, self.rule = passes, passes.seats, rule
        self.reuse, self._progress = reuse or Reuse(None, passes), progress
        self._feed: Tensor  # (R, 1) tokens that the next step of a chain feeds
        self._beside: tuple[Tensor, Tensor] | None = None  # rows without steps, and their tokens
        self._ahead: tuple[Tensor, _Start] | None = None  # a pass that has begun: its logits (R, V)

    @property
    def branches(self) -> bool:
        # Processors would have to read a text for every branch.
        contextual = any(self.seats[row].draws.reads_history for row in self.batch.rows)
        return self.rule.branches and self.batch.model.branches and not contextual

    def _by_law(
        self,
        raw: Tensor,
        places: Sequence[Place],
        draw: Callable[[Draws, Tensor, Sequence[Place]], Drawn],
        *,
        native: bool,
    ) -> Drawn:
        """Draw from raw logits (N, V), with one call for all places that allow it.

        Args:
            native: whether native calls may draw; they handle several laws at once.
        """
        groups: dict[object, list[int]] = {}
        if len({seat.draws for seat, _ in places}) > 1:
            for i, (seat, _) in enumerate(places):
                groups.setdefault(seat.draws.group_key if native else seat.draws, []).append(i)
        if len(groups) <= 1:
            return draw(places[0][0].draws, raw, places)
        order = [i for some in groups.values() for i in some]
        parts = []
        for some in groups.values():
            where = [places[i] for i in some]
            parts.append(draw(where[0][0].draws, raw[some], where))
        back = on_device(sorted(range(len(order)), key=order.__getitem__), raw.device)  # (N,)
        drawn = joined(parts)
        values: dict[str, Any] = drawn._asdict()
        values |= {name: x[back] for name, x in values.items() if isinstance(x, Tensor)}
        return Drawn(**values)

    def draft(
        self, drafts: DraftedTokens, rows: Sequence[int], ask: StepRequest
    ) -> StepResult | None:
        if not drafts.num_steps:
            self._begin(drafts)
        places, step = self.batch.rows, drafts.num_steps
        raw = self.batch.draft_step(self._feed[:, 0], step, ask.source)  # (R, V)
        here = None
        if len(rows) < len(places):
            # Processors cannot be called for the other rows: their histories are shorter.
            here = on_device([places[row] for row in rows], raw.device)  # (N,)
            raw = raw[here]  # (N, V)
        drawn = self._by_law(
            raw,
            [(self.seats[row], step) for row in rows],
            lambda draws, some, where: draws.draft(some, where, ask.signal, best=ask.best),
            native=ask.signal != "probability",
        )
        drafts.steps.append(([(row, step) for row in rows], drawn.tokens))
        drafts.laws.extend(drawn.laws)
        # There may be no token (-1): processors may forbid all, and half precision may overflow.
        fed = drawn.tokens.clamp_min(0)  # (N,)
        if here is not None:
            fed = self._feed[:, 0].index_copy(0, here, fed)  # (R,)
        self._feed = fed[:, None]
        if self._beside is not None:
            at, tokens = self._beside
            column = min(step, tokens.shape[1] - 1)
            self._feed = self._feed.index_copy(0, at, tokens[:, column : column + 1])
        reads = (
            ask.signal is not None
            or ask.best > 1
            or any(self.seats[row].draws.reads_history for row in rows)
        )
        drafts.unread = not reads
        if not reads:
            return None
        result = self._step_result(drawn, ask)
        for row, best in zip(rows, result.tokens, strict=True):
            if best[0] >= 0:
                self.seats[row].remember(step, best[0])
        return result

    def _begin(self, drafts: DraftedTokens) -> None:
        """Begin a round's draft with every row's last token; rows without steps feed their own."""
        places, device = self.batch.rows, self.batch.model.device
        self._feed = on_device([[self.seats[row].emitted[-1]] for row in places], device)
        self._beside = None
        if drafts.step_free:
            most = max(drafts.lengths)
            rows = [row for row in places if row in drafts.step_free]
            fed = [self._tokens(drafts, row, range(1, most + 1)) for row in rows]
            at = on_device([places[row] for row in rows], device)  # (N,)
            self._beside = at, on_device(fed, device)  # (N, most)

    def _tokens(self, drafts: DraftedTokens, row: int, offsets: Iterable[int]) -> list[int]:
        """A row's tokens from its last emitted one on; the last drafted one fills the rest."""
        tokens = [self.seats[row].emitted[-1], *drafts.tokens[row]]
        return [tokens[min(offset, len(tokens) - 1)] for offset in offsets]

    def _step_result(self, drawn: Drawn, ask: StepRequest) -> StepResult:
        """Copy what was drawn to the host."""
        values = [drawn.tokens]
        if ask.signal is not None and drawn.confidences is not None:
            values.append(drawn.confidences)
        if ask.best > 1 and drawn.others is not None:
            values += drawn.others.unbind(1)[: ask.best - 1]
        tokens, *more = on_host(*values)()
        sure = more.pop(0) if ask.signal is not None else []
        return StepResult([*zip(tokens, *more, strict=True)], sure)

    def prefill(
        self, ends: Mapping[int, int] | None = None, read: Callable[[Tensor], None] | None = None
    ) -> Tensor | None:
        return self.batch.prefill(ends, self._reached, read)

    def _reached(self) -> None:
        self._progress()
        self.reuse.reached()

    def verify(self, drafts: DraftedTokens, positions: Sequence[Position]) -> Tensor:
        raw = self._begun(drafts, positions)  # (N, V)
        if raw is None:
            raw = self.batch.verify(
                self._unfed(drafts), positions, drafts.branches(self.batch.rows)
            )
        for row in drafts.step_free:
            for offset, token in enumerate(drafts.tokens[row]):
                self.seats[row].remember(offset, token)
        return raw

    def _unfed(self, drafts: DraftedTokens) -> Tensor:
        """The tokens that no step has fed, (R, T), as `Passes.verify` takes them."""
        places, device, kept = self.batch.rows, self.batch.model.device, drafts.kept_steps
        count = 1 + max(drafts.lengths) - kept
        if not kept:
            fed = [self._tokens(drafts, row, range(count)) for row in places]
            return on_device(fed, device)
        if not count:  # nothing could be drawn at the last step
            return self.batch.fed[-1][:, None]
        if count == 1:
            return self._feed
        listed = drafts.step_free | drafts.chosen
        some = [row for row in places if row in listed]
        fed = [self._tokens(drafts, row, range(kept, kept + count)) for row in some]
        at = on_device([places[row] for row in some], device)  # (N,)
        return self._feed.repeat(1, count).index_copy(0, at, on_device(fed, device))

    def judge(
        self,
        raw: Tensor,
        positions: Sequence[Position],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> VerifyResult:
        places = [(self.seats[row], at) for row, at in positions]
        if drafts is not None and drafts.parents:  # noise depends on depth, not on the node
            deep = {row: depths(parents) for row, parents in drafts.parents.items()}
            places = [(seat, deep[seat.row][at] if seat.row in deep else at) for seat, at in places]

        def decide(draws: Draws, some: Tensor, where: Sequence[Place]) -> Drawn:
            with where[0][0].alone():
                return draws.judge(some, where, drafts, keep=keep)
            return Drawn(torch.full((len(some),), -1, device=some.device))  # the text has ended

        verified = self._by_law(raw, places, decide, native=True)
        accepted = [] if verified.accepted is None else [verified.accepted]
        steps = drafts.steps if drafts is not None and drafts.unread else []
        fed = self.batch.fed if drafts is not None and drafts.kept_steps else ()
        arriving = on_host(verified.tokens, *accepted, *(drawn for _, drawn in steps), *fed)
        ahead = self._run_ahead(drafts, verified.tokens, positions)
        target, *others = arriving()
        if ahead is not None:
            self._ahead = ahead, self._start(positions, target, 1)
        flags = others.pop(0) if accepted else []
        drawn, fed_tokens = others[: len(steps)], others[len(steps) :]
        if fed_tokens:
            self.batch.fed_tokens = list(zip(*fed_tokens, strict=True))
        drafted: list[list[int]] = [[] for _ in self.seats] if drafts is None else drafts.tokens
        for (at, _), step in zip(steps, drawn, strict=True):
            for (row, offset), token in zip(at, step, strict=True):
                draft = drafted[row]
                ended = draft and draft[-1] in self.seats[row].eos
                if token >= 0 and offset == len(draft) and not ended:
                    draft.append(int(token))
        branches = {} if drafts is None else drafts.parents
        tokens: list[list[int]] = [[] for _ in self.seats]
        read: list[list[int]] = [[] for _ in self.seats]
        here = [0 for _ in self.seats]  # the last node of each path; -1 after the first rejected
        for i, (row, node) in enumerate(positions):
            if here[row] != node:
                continue
            token, draft = int(target[i]), drafted[row]
            if row in branches:
                here[row] = next(iter(along(branches[row], draft, [token], node)), -1)
            else:
                proposed = draft[node] if node < len(draft) else -1
                stays = proposed >= 0 and bool(flags[i] if flags else proposed == token)
                token, here[row] = (proposed, node + 1) if stays else (token, -1)
            tokens[row].append(token)
            read[row].append(i)
        for state in self.batch.states:
            if state.reads_logits:
                before = drafts.before if drafts is not None else lambda *_: ()
                state.read(raw, [(row, before(row, node)) for row, node in positions])
        return VerifyResult(tokens, read, raw, verified.scores)

    def _run_ahead(
        self, drafts: DraftedTokens | None, drawn: Tensor, positions: Sequence[Position]
    ) -> Tensor | None:
        """Begin the next plain pass with the tokens just drawn (R,); returns its logits (R, V).

        A GPU computes it while the host reads the tokens. It is in vain if the next round has
        drafts, so it is begun only if this round has none.
        """
        passes = self.batch
        if not passes.runs_ahead or drafts is None or drafts.num_steps:
            return None
        if positions != [(row, 0) for row in passes.rows]:
            return None
        if any(self.seats[row].left < 2 for row in passes.rows):
            return None
        return passes.verify(drawn.clamp_min(0)[:, None], positions, None, 1)

    def _begun(self, drafts: DraftedTokens, positions: Sequence[Position]) -> Tensor | None:
        """The logits of a pass that `_run_ahead` began, if this round needs just that pass."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or drafts.num_steps:
            return None
        tokens = [self.seats[row].emitted[-1] for row, _ in positions]
        return ahead[0] if ahead[1] == self._start(positions, tokens) else None

    def _start(
        self, positions: Sequence[Position], tokens: Sequence[int], emitted: int = 0
    ) -> _Start:
        """What a plain pass starts from, once its rows have emitted some more tokens."""
        pairs = zip(positions, tokens, strict=True)
        rows = [(row, self.seats[row].length + emitted, token) for (row, _), token in pairs]
        return self.batch.moves, rows

    def commit(self, row: int, emitted: Sequence[int], drafts: DraftedTokens | None) -> None:
        if drafts is None:  # the token after a prompt, all of which has been fed
            self.batch.tell(row, emitted)
        else:
            path: Sequence[int] = ()
            if row in drafts.parents:
                path = along(drafts.parents[row], drafts.tokens[row], emitted)
            self.batch.commit(row, emitted, path)
        seat = self.seats[row]
        seat.draws.forget(seat)
        if seat.finished:
            self.end(row)

    def end(self, row: int) -> None:
        """Keep a row's text, which has ended or was abandoned, for later ones."""
        self.reuse.keep(row)
        for state in self.batch.states:
            state.end(row)

    def leave(self, rows: Collection[int]) -> None:
        for row in rows:
            if self.seats[row].reason in ("cancelled", "error"):
                self.end(row)
        self.batch.leave(rows)


def on_host(*values: Tensor) -> Callable[[], list[list[Any]]]:
    """Begin to copy tensors (n,) to the host. Call the result for their numbers.

    That call is the only place where the host waits for the device, but not for work that was begun
    after the copy. From another device they are copied together as int64, floats as the bits of
    float32.
    """
    device = values[0].device
    if device.type == "cpu":
        return lambda: [each.tolist() for each in values]
    bits = [
        each.float().view(torch.int32).long() if each.is_floating_point() else each.long()
        for each in values
    ]
    copied = torch.cat(bits).to("cpu", non_blocking=device.type == "cuda")  # into pinned memory
    arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def numbers() -> list[list[Any]]:
        if arrived is not None:
            arrived.synchronize()
        pieces = copied.split([len(each) for each in values])
        return [
            (piece.int().view(torch.float32) if each.is_floating_point() else piece).tolist()
            for each, piece in zip(values, pieces, strict=True)
        ]

    return numbers
