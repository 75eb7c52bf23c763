"""What several drafts for one place would bring, by accept rule, from every start of a trace.

The laws of draft and target are computed along the texts. Given them, the chance that one of K
drafts is accepted is known exactly, or on average over few draws; nothing is decoded.
Letters: N starts, K drafts of a place, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.laws import softmax_law
from layerskip.decoding.several import k_seq_chance, rank, without_replacement
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Source
from layerskip.replay.chains import Chains, Places
from layerskip.replay.drafts import all_starts
from layerskip.replay.drawing import Drawn, scores_at
from layerskip.replay.trace import Trace

COUPLED, K_SEQ, WITHOUT = "coupled", "k-seq", "without-replacement"
SEVERAL = (COUPLED, K_SEQ, WITHOUT)

_TOGETHER = 16  # places whose laws are compared at once, so that they stay in caches


@torch.no_grad()
def accepted_of_several(
    trace: Trace, draft: SkipConfig | Source, most: int = 4
) -> dict[str, Tensor]:
    """The chance that one of 1, 2, ... drafts of the place behind each start is accepted, (N, K).

    By rule of `SEVERAL`. "coupled": whether the text's token is among the best scores of the draft,
    with the noise of the place; it is 0 or 1. "k-seq": exact. "without-replacement": given the K
    tokens that the coupled rule drafts.

    Raises:
        ValueError: the trace's texts are greedy or for the rejection rule, or `most` is below 1; or
            the source's tokens are known: they have no laws.
    """
    source = source_of(trace.model, draft)
    if not trace.law.do_sample or trace.rejection:
        raise ValueError("several drafts are compared on a trace sampled with shared noise")
    if most < 1:
        raise ValueError(f"there must be at least one draft for a place, got {most}")
    if source.known:
        raise ValueError(f"a {type(source).__name__} has no law of its own; take another source")
    chains = _Laws(trace, source, most)
    chains.run()
    return chains.found


class _Laws(Chains):
    """Drafts of one step, whose laws are compared with the target's instead of only drawn from."""

    def __init__(self, trace: Trace, source: Source, most: int) -> None:
        super().__init__(trace, source, all_starts(trace), 1, [None])
        self.most = most
        self.found = {name: torch.zeros(len(self.chains), most) for name in SEVERAL}  # (N, K) each

    def _draw(
        self, raw: Tensor, at: Places, allowed: Tensor | None, left: Tensor, noise: Tensor | None
    ) -> Drawn:
        assert noise is not None
        for some in torch.arange(len(raw)).split(_TOGETHER):  # (n,)
            histories = None if at.histories is None else [at.histories[i] for i in some.tolist()]
            scores = scores_at(self.trace.law, raw[some], histories)  # (n, V)
            p = self.trace.target_law(at.rows[some], histories)  # (n, V)
            q, noisy = softmax_law(scores), scores + noise[some]  # (n, V) each
            wanted = self.trace.following[at.rows[some]].to(raw.device)  # (n,)
            counts = torch.arange(1, self.most + 1, device=raw.device)  # (K,)
            found = {
                COUPLED: (rank(noisy, wanted)[:, None] < counts).float(),
                K_SEQ: torch.stack([k_seq_chance(p, q, n) for n in counts.tolist()], 1),
                WITHOUT: without_replacement(p, q, noisy.topk(self.most).indices).passed,
            }
            for name, chances in found.items():  # (n, K) each
                self.found[name][at.chains[some]] = chances.cpu()
        return super()._draw(raw, at, allowed, left, noise)
