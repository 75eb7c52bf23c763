"""The weights that drafts compute with: rounded, trained, or fewer rows of the head.

They are made on first use and kept as long as the model stays opened. All openings of a model share
its rounded copies (see `rounded`). If a weight changes that was copied, the model is opened again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from torch import nn

from layerskip.backends.base import EXACT, Backend, Block, Variant
from layerskip.config.skips import SkipConfig
from layerskip.families.architecture import Architecture, read_bytes
from layerskip.families.plain import head_refusal
from layerskip.model.draft_modules import OpenBlock, open_block
from layerskip.weights.fingerprint import fingerprint
from layerskip.weights.rounded import TrimmedHead, facts, linears, rounded_bytes


class DraftWeights:
    """The blocks that drafts of an opened model run.

    Attributes:
        vocabulary: number of tokens that drafts can use; the model's, unless `trimmed`.
    """

    def __init__(self, model: Architecture, backend: Backend, head: Block) -> None:
        self.model, self.backend = model, backend
        self._head = head
        self.vocabulary = model.vocabulary
        self._rows: TrimmedHead | None = None
        self._trimmed: DraftWeights | None = None  # the last one
        self._blocks: dict[tuple[int, Variant | None], Block] = {}
        # By bits, and by the hash of the module whose tokens the head covers.
        self._heads: dict[tuple[int | None, str | None], Block] = {}
        self._modules: dict[tuple[str, str, int | None, str], OpenBlock] = {}
        self._hash: tuple[list[Any], str] | None = None

    def fingerprint(self) -> str:
        model = self.model.model
        now = [facts(weight) for weight in model.parameters()]
        if self._hash is None or self._hash[0] != now:
            self._hash = now, fingerprint(model)
        return self._hash[1]

    def trimmed(self, tokens: Sequence[int]) -> DraftWeights:
        """The same, but drafts read only the head's rows of these tokens, and draw no others.

        A head that is not a plain weight stays whole, with a warning.

        Raises:
            ValueError: the model does not have one of the tokens.
        """
        vocabulary = self.model.vocabulary
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            beyond = max(tokens) if min(tokens) >= 0 else min(tokens)
            raise ValueError(
                f"draft_vocabulary must hold tokens in 0..{vocabulary - 1} for this model, "
                f"got {beyond}; rank this model's own, or leave draft_vocabulary out"
            )
        if len(tokens) == vocabulary:
            return self
        head: Any = self.model.unembedding
        reason = head_refusal(head)
        if reason is not None:
            warnings.warn(
                f"draft_vocabulary has no effect: lm_head {reason}; drafts use the whole head",
                UserWarning,
                stacklevel=3,
            )
            return self
        rows = self.backend.copies.trimmed(head, tuple(tokens))
        trimmed = self._trimmed
        if trimmed is None or trimmed._rows is not rows:
            self._trimmed = trimmed = copy(self)
            trimmed._rows, trimmed._head = rows, self.backend.head(rows)
            trimmed._heads, trimmed._trimmed, trimmed.vocabulary = {}, None, len(tokens)
        return trimmed

    def blocks(self, skip: SkipConfig) -> list[Block]:
        """The blocks that a draft runs after its shared prefix; the last one is the head.

        The tail of a skipped MLP still runs, unless only skipped sublayers follow.

        Raises:
            ValueError: the skip config does not fit, or the model cannot run in low precision.
        """
        skip = skip.resolve(self.model.num_layers)
        kept, rounded = skip.kept(), {*skip.rounded()}
        self._check_keys(skip)
        self._check_experts(skip)
        blocks = []
        for index in range(self.shared_prefix(skip), kept[-1] + 1):
            if index in kept:
                variant = self._variant(index, skip, rounded=index in rounded)
                blocks.append(self._block(index, variant))
            elif index % 2 and self.model.parts[index // 2].tail:
                blocks.append(self._block(index, None))
        return [*blocks, self.head(skip)]

    def shared_prefix(self, skip: SkipConfig) -> int:
        """The number of first sublayers whose states verification takes over from a draft."""
        return 0 if self.model.recurrent else skip.shared_prefix()

    def _variant(self, sublayer: int, skip: SkipConfig, *, rounded: bool) -> Variant:
        part = self.model.parts[sublayer // 2]
        bits = skip.low.bits if skip.low is not None and rounded else None
        if sublayer % 2:
            return Variant(bits, experts=skip.experts if part.mixture else None)
        window = skip.window if part.narrows(skip.window) else None
        return Variant(bits, window=window, draft=part.recurrent is not None)

    def _block(self, index: int, variant: Variant | None) -> Block:
        """A sublayer in a variant; None: what follows an MLP even if it is skipped."""
        backend, key = self.backend, (index, variant)
        if variant == EXACT:
            return backend.blocks[index]
        if key not in self._blocks:
            self._blocks[key] = backend.sublayer(index, variant)
        return self._blocks[key]

    def _check_keys(self, skip: SkipConfig) -> None:
        """Reject skipping an attention whose keys a kept one reads: they would be outdated."""
        missed = self.model.missed_keys(skip.attention)
        if missed is not None:
            raise ValueError(
                f"a draft cannot leave out the attention of layer {missed[0]}: layer {missed[1]}, "
                "which it keeps, reads its keys and values; keep it, or leave out the attention of "
                "all layers that read them"
            )

    def _check_experts(self, skip: SkipConfig) -> None:
        if skip.experts is not None and not self.model.mixtures:
            raise ValueError(
                "experts must be left out for this model, which is not a mixture of experts; got "
                f"{skip.experts}"
            )
        for mixture in self.model.mixtures:
            mixture.taken(skip.experts)

    def head(self, skip: SkipConfig | None = None) -> Block:
        """The head of a draft, exact or rounded, with the rows of the tokens it may use."""
        rows = self._rows if skip is None else self._rows_of(skip)
        if skip is None or (rows is self._rows and not skip.head_bits):
            return self._head
        of = skip.trained.hash if skip.trained is not None and rows is not self._rows else None
        key = (skip.head_bits, of)
        if key not in self._heads:
            self._heads[key] = self.backend.head(rows, skip.head_bits)
        return self._heads[key]

    def _rows_of(self, skip: SkipConfig) -> TrimmedHead | None:
        """The rows of the head that a draft reads, None for all. Modules may use few tokens."""
        if skip.trained is None:
            return self._rows
        head: Any = self.model.unembedding
        tokens = self.module(skip).tokens
        if tokens is not None and self._rows is not None:
            tokens = tuple(sorted({*tokens} & {*self._rows.tokens.tolist()}))
        if not tokens or head_refusal(head):
            return self._rows
        return self.backend.copies.trimmed(head, tokens)

    def module(self, skip: SkipConfig) -> OpenBlock:
        """The module that a skip config names, opened anew only if a weight changes."""
        trained, bits = skip.trained, skip.module_bits
        assert trained is not None
        if self.model.encoder:
            raise ValueError("the decoder of an encoder-decoder cannot draft with trained modules")
        key = trained.kind, trained.hash, bits, self.fingerprint()
        if key not in self._modules:
            self._modules[key] = open_block(self.model, self.backend, trained, bits)
        return self._modules[key]

    def linears(self, sublayers: Sequence[int] | None = None) -> Iterator[nn.Linear]:
        """Yield the linear layers of some or all sublayers that can be rounded."""
        for index in range(self.model.num_sublayers) if sublayers is None else sublayers:
            part = self.model.parts[index // 2]
            yield from linears(part.mlp if index % 2 else part.attention)
            if not index % 2 and part.cross:
                yield from linears(part.cross[0])

    def head_linears(self) -> Iterator[nn.Linear]:
        """Yield the linear layers of the head that can be rounded."""
        yield from linears(self.model.unembedding)

    def nbytes(self, skip: SkipConfig) -> int:
        """Bytes that a draft's rounded and trained weights use, or would use."""
        skip = skip.resolve(self.model.num_layers)
        nbytes, packed = 0, self.backend.packed
        if skip.trained is not None:  # it runs no sublayer in low precision
            nbytes += read_bytes(self.module(skip).block, skip.module_bits)
        elif skip.low is not None:
            bits, rounded = skip.low.bits, skip.rounded()
            weights = [linear.weight for linear in self.linears(rounded)]
            if self.model.mixtures and skip.experts != 0:  # copies have all that tokens choose from
                mixtures = [self.model.parts[index // 2].mixture for index in rounded if index % 2]
                weights += [w for each in mixtures if each is not None for w in each.weights]
            nbytes += sum(rounded_bytes(w, bits, packed=packed) for w in weights)
        if skip.head_bits is not None:
            rows = self._rows_of(skip)
            heads = [each.weight for each in self.head_linears()] if rows is None else [rows.weight]
            nbytes += sum(rounded_bytes(head, skip.head_bits, packed=packed) for head in heads)
        return nbytes

    def read_by(self, skip: SkipConfig) -> list[float]:
        """Bytes that a draft step reads: for each sublayer of a resolved config, and the head."""
        model, low = self.model, skip.low
        self._check_experts(skip)
        experts, rounded = skip.experts, set(skip.rounded())
        whole = model.weight_bytes(experts=experts)
        lower = whole if low is None else model.weight_bytes(low.bits, experts=experts)
        read = [(lower if i in rounded else whole)["sublayers"][i] for i in skip.kept()]
        return [*read, self.head_bytes(skip)]

    def head_bytes(self, skip: SkipConfig | None = None) -> float:
        """Bytes of the head's rows that a draft reads."""
        rows = self._rows if skip is None else self._rows_of(skip)
        count = self.model.vocabulary if rows is None else len(rows.tokens)
        whole = self.model.weight_bytes(None if skip is None else skip.head_bits)["head"]
        return float(whole * count / self.model.vocabulary)
