"""The three forward passes of a call: prefill, draft step, verify; knows no laws, no choices.

A session holds one batch's cache and how far each row's exact keys and values reach. Drafting
carries tokens through the shared prefix for good; the hidden states at its end are kept, and
verification starts from them. Letters: B rows, T tokens, D drafted tokens, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.sublayers import Pass, Sublayers


class Session:
    """One batch on one model with one skip config.

    Args:
        model: the opened model.
        skip: which sublayers the draft leaves out, for this model's number of layers.
        prompts: token ids of each row without pads, each (length,).
        max_new_tokens: how many tokens a row may grow by.
        max_draft_length: the most tokens any round drafts.

    Attributes:
        lengths: per row, the tokens whose keys and values are exact in every layer; the row's
            last emitted token is not among them, it is fed by the next pass.
    """

    def __init__(
        self,
        model: Sublayers,
        skip: SkipConfig,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        max_draft_length: int,
    ) -> None:
        self.model = model
        self.prompts = [prompt.to(model.device) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        total = max(self.prompt_lengths) + max_new_tokens
        model.check_lengths(self.prompt_lengths, total)
        kept = skip.kept(model.num_layers)
        self.prefix = skip.shared_prefix(model.num_layers)
        self.num_kept = len(kept)
        self._prefix = range(self.prefix)
        self._draft = tuple(index for index in kept if index >= self.prefix)
        self._rest = range(self.prefix, model.num_sublayers)
        # gamma + 1 slack slots: rows that drafted less ride along as padding behind their end
        slots = total + max_draft_length + 1
        self.cache = model.new_cache(len(prompts), slots)
        self.rotary = model.rotary(slots, total)
        self.lengths = [0] * len(prompts)
        self._boundary: list[Tensor] = []  # (B, 1, H) at the end of the prefix, one per token fed

    def prefill(self) -> Tensor:
        """Carry every prompt through the whole model; logits after its last token, (B, V)."""
        tokens = torch.nn.utils.rnn.pad_sequence(self.prompts, batch_first=True)  # (B, T)
        self.cache.place([0] * len(self.prompts), tokens.shape[1])
        step = Pass(self.model, self.cache, self.rotary)
        hidden = self.model.run(self.model.embed(tokens), step, range(self.model.num_sublayers))
        rows = torch.arange(len(self.prompts), device=hidden.device)
        ends = torch.tensor(self.prompt_lengths, device=hidden.device) - 1
        self.lengths = list(self.prompt_lengths)
        return self.model.logits(hidden[rows, ends][:, None])[:, 0]

    def _feed(self, tokens: Tensor, offset: int) -> tuple[Tensor, Pass]:
        """Carry one token per row (B,) through the shared prefix and keep where it arrives."""
        self.cache.place([length + offset for length in self.lengths], 1)
        step = Pass(self.model, self.cache, self.rotary)
        hidden = self.model.run(self.model.embed(tokens[:, None]), step, self._prefix)
        self._boundary.append(hidden)
        return hidden, step

    def draft_step(self, tokens: Tensor, offset: int) -> Tensor:
        """Feed each row's token (B,) at its length + offset to the draft; raw logits (B, V).

        Tokens outside of the model's draft vocabulary have -inf. Offsets run 0, 1, 2, ... within a
        round, without gaps.
        """
        hidden, step = self._feed(tokens, offset)
        return self.model.draft_logits(self.model.run(hidden, step, self._draft))[:, 0]

    def verify(self, tokens: Tensor, drafted: int) -> Tensor:
        """Raw target logits (B, drafted + 1, V) after each token fed in this round.

        Args:
            tokens: each row's last drafted token (B,), or with drafted = 0 its last emitted one.
            drafted: the longest draft of any row; `draft_step` may have fed one token more, where
                nothing could be drawn after it.
        """
        del self._boundary[drafted:]
        hidden, step = self._feed(tokens, drafted)
        if drafted:
            hidden = torch.cat(self._boundary, dim=1)  # (B, drafted + 1, H)
            self.cache.place(self.lengths, drafted + 1)
            step = Pass(self.model, self.cache, self.rotary)
        self._boundary.clear()
        return self.model.logits(self.model.run(hidden, step, self._rest))

    def commit(self, row: int, emitted: int) -> None:
        """Keep the round's first `emitted` fed tokens of a row; the rest is forgotten."""
        self.lengths[row] += emitted
