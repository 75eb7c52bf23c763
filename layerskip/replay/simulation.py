"""Rounds of decoding without a model: the engine's own code, run on a recorded target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Controller
from layerskip.decoding.decoding_loop import Loop
from layerskip.decoding.rounds import Round
from layerskip.replay.recorded import RecordedTarget
from layerskip.replay.replayed_drafts import Replay


def simulate(
    sources: Replay | Sequence[Replay],
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[Round]:
    """Simulate decoding texts of the trace together, one row each, as the engine would.

    The controller is reset. The texts' ends and the request's limit apply as in decoding.

    Args:
        sources: replays of one trace, one for each draft that a round may use, in order.
        texts: numbers of the texts that share the batch and the controller.
        max_draft_length: maximum number of tokens per round; by default the replays' draft length.

    Raises:
        ValueError: `max_draft_length` exceeds the replayed length.
    """
    several = [sources] if isinstance(sources, Replay) else list(sources)
    replayed = min(each.draft_length for each in several)
    longest = replayed if max_draft_length is None else max_draft_length
    if not 0 <= longest <= replayed:
        raise ValueError(
            f"max_draft_length must be in 0..{replayed}, as far as was replayed; got {longest}"
        )
    target = RecordedTarget(several, texts)
    loop = Loop(target, controller, longest=longest)
    loop.prefill()
    for index in count(1):
        if not loop.going:
            return
        loop.compact()
        yield loop.record(loop.round(), index)


def cost_of(rounds: Iterable[Round], tables: Sequence[CostTable]) -> float:
    """The cost of rounds in target steps, by the costs of each source.

    A round of several rows costs as much as its longest draft, with the steps of one source.
    """
    total = 0.0
    for round_ in rounds:
        sources = round_.source if isinstance(round_.source, tuple) else (round_.source,)
        used = [tables[source] for source in sources if source is not None] or tables[:1]
        stepping = max(used, key=lambda table: table.draft)  # other sources need no steps
        total += stepping.round_cost(max(round_.drafted), round_.steps)
    return total
