"""The weights that drafts compute with: rounded, healed, trained, or fewer rows of the head.

They are made on first use and kept for as long as the model stays opened. Rounded copies are shared
by all openings of a model (see `rounded`). No text depends on them, since the exact weights verify
every draft.
Letters: B rows, T tokens of a pass, H hidden width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from torch import nn

from layerskip.config import SkipConfig, Trained
from layerskip.model.architecture import Architecture, read_bytes
from layerskip.model.backend import Backend, Block
from layerskip.model.blocks import OpenBlock, open_block
from layerskip.model.draft_head import TrimmedHead, trimmed_head
from layerskip.model.fingerprint import fingerprint
from layerskip.model.healed import Deltas, paired
from layerskip.model.plain import head_refusal
from layerskip.model.rounded import copies_of, linears, rounded_bytes
from layerskip.model.trained import trained_weights

_Key = tuple[int | None, int | None, str | None, int | None, int | None]


class DraftWeights:
    """The blocks that drafts of an opened model run.

    Args:
        model: the opened model.
        backend: computes with it.
        exact: blocks of the model's own sublayers, then of its head.

    Attributes:
        vocabulary: how many tokens drafts can draw; the model's, unless `trimmed`.
    """

    def __init__(self, model: Architecture, backend: Backend, exact: Sequence[Block]) -> None:
        self.model, self.backend = model, backend
        *self._exact, self._head = exact
        self.vocabulary = model.vocabulary
        self._rows: TrimmedHead | None = None
        self.copies = copies_of(model.model)
        self._seen = self.copies.changes
        # by sublayer (or None: head), bits, hash of what heals it (or whose head it is), experts,
        # window
        self._low: dict[_Key, Block] = {}
        self._tails: dict[int, Block] = {}
        self._deltas: dict[str, Deltas] = {}  # by hash
        self._modules: dict[tuple[str, str, int | None], OpenBlock] = {}
        self._hash: str | None = None

    def fingerprint(self) -> str:
        """The model's hash, as `fingerprint`, of what it was when it was opened."""
        if self._hash is None:
            self._hash = fingerprint(self.model.model)
        return self._hash

    def refresh(self) -> None:
        """Drop what was made of weights that have changed since."""
        self.copies.forget_changed()
        if self._seen != self.copies.changes:
            self._seen = self.copies.changes
            self._low.clear()
            self._deltas.clear()
            self._modules.clear()
            self._hash = None

    def trimmed(self, tokens: Sequence[int]) -> DraftWeights:
        """The same, but drafts read the head's rows of these tokens only, and draw no others.

        A head that is not a plain weight stays whole, with a warning.

        Args:
            tokens: ids, each once; their rows are copied, once for each model and list.

        Raises:
            ValueError: the model does not have one of them.
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
        few = copy(self)
        few._rows = trimmed_head(head, tuple(tokens))
        few._low = {key: block for key, block in self._low.items() if key[0] is not None}
        few._head = self.backend.head(few._rows)
        few.vocabulary = len(tokens)
        return few

    def blocks(self, skip: SkipConfig) -> list[Block]:
        """The blocks that a draft runs after its shared prefix; the head is the last.

        A left-out MLP's tail runs all the same, unless only left-out sublayers follow.

        Raises:
            ValueError: the skip config does not fit the model, or the model cannot run in low
                precision.
        """
        skip = skip.resolve(self.model.num_layers)
        low, prefix, kept = {*skip.rounded()}, skip.shared_prefix(), skip.kept()
        self._check_keys(skip)
        self._check_experts(skip)
        found = []
        for index in range(prefix, kept[-1] + 1):
            part = self.model.parts[index // 2]
            if index in kept:
                fewer = (
                    part.mixture is not None and skip.experts is not None
                    if index % 2
                    else part.narrowed(skip.window) is not part
                )
                bits = skip.low.bits if skip.low is not None and index in low else None
                changed = bits is not None or fewer
                found.append(self._changed(index, skip, bits) if changed else self._exact[index])
            elif index % 2 and part.tail:
                found.append(self._tail(part.number))
        return [*found, self.head(skip)]

    def _check_keys(self, skip: SkipConfig) -> None:
        """Refuse to leave out an attention whose keys a kept one reads: they would be old."""
        missed = self.model.missed_keys(skip.attention)
        if missed is not None:
            raise ValueError(
                f"a draft cannot leave out the attention of layer {missed[0]}: layer {missed[1]}, "
                "which it keeps, reads its keys and values; keep it, or leave out the attention of "
                "all layers that read them"
            )

    def _check_experts(self, skip: SkipConfig) -> None:
        """Refuse numbers of experts that the model's mixtures do not have."""
        if skip.experts is not None and not self.model.mixtures:
            raise ValueError(
                "experts must be left out for this model, which is no mixture of experts; got "
                f"{skip.experts}"
            )
        for mixture in self.model.mixtures:
            mixture.taken(skip.experts)

    def _tail(self, layer: int) -> Block:
        if layer not in self._tails:
            self._tails[layer] = self.backend.tail(layer)
        return self._tails[layer]

    def head(self, skip: SkipConfig | None = None) -> Block:
        """The head of a draft, exact or rounded, with the rows of the tokens it may draft."""
        if skip is None or (self._rows_of(skip) is self._rows and not skip.head_bits):
            return self._head
        return self._changed(None, skip, skip.head_bits)

    def _rows_of(self, skip: SkipConfig) -> TrimmedHead | None:
        """The rows of the head that a draft reads, None for all. Modules may have few tokens."""
        if skip.trained is None or not skip.trained.module:
            return self._rows
        head: Any = self.model.unembedding
        tokens = self.module(skip).tokens
        if tokens is not None and self._rows is not None:
            tokens = tuple(sorted({*tokens} & {*self._rows.tokens.tolist()}))
        return trimmed_head(head, tokens) if tokens and not head_refusal(head) else self._rows

    def _changed(self, sublayer: int | None, skip: SkipConfig, bits: int | None) -> Block:
        """A sublayer, rounded to bits, of fewer experts or slots; or (None) a head, or few rows."""
        trained, backend = skip.trained, self.backend
        key: _Key
        if sublayer is None:
            rows = self._rows_of(skip)
            of = trained.hash if trained is not None and rows is not self._rows else None
            key = (None, bits, of, None, None)
            if key not in self._low:
                self._low[key] = backend.head(rows, bits)
            return self._low[key]
        if bits is None or (trained is not None and trained.module):
            trained = None  # modules do not change the rounded sublayers
        experts, window = (skip.experts, None) if sublayer % 2 else (None, skip.window)
        key = (sublayer, bits, None if trained is None else trained.hash, experts, window)
        if key not in self._low:
            deltas = None if trained is None else self.deltas(trained)
            self._low[key] = backend.low(sublayer, bits, deltas, experts, window)
        return self._low[key]

    def deltas(self, trained: Trained) -> Deltas:
        """The deltas of the sublayers' linears, checked once for each opening.

        Raises:
            ValueError: the file is not the one that is named, or belongs to another model.
        """
        if trained.hash not in self._deltas:
            weights = {name: linear.weight for name, linear in self.linears()}
            found = trained_weights(self.model.model, trained)
            self._deltas[trained.hash] = paired(found, weights, trained.hash)
        return self._deltas[trained.hash]

    def module(self, skip: SkipConfig) -> OpenBlock:
        """The module that a skip config names, checked once for each opening.

        Raises:
            ValueError: it does not belong to this model (see `open_block`).
        """
        trained, bits = skip.trained, skip.module_bits
        assert trained is not None
        key = trained.kind, trained.hash, bits
        if key not in self._modules:
            self._modules[key] = open_block(self.model, self.backend, trained, bits)
        return self._modules[key]

    def linears(self, sublayers: Sequence[int] | None = None) -> Iterator[tuple[str, nn.Linear]]:
        """The linears of some sublayers, or all, that can be rounded, and their names."""
        for index in range(self.model.num_sublayers) if sublayers is None else sublayers:
            part, name = self.model.parts[index // 2], "mlp" if index % 2 else "self_attn"
            for inner, linear in linears(part.mlp if index % 2 else part.attention):
                yield f"layers.{part.number}.{name}.{inner}", linear

    def nbytes(self, skip: SkipConfig) -> int:
        """Bytes that a draft's rounded and trained weights take, or would take."""
        skip = skip.resolve(self.model.num_layers)
        own = 0
        if skip.trained is not None and skip.trained.module:
            own = read_bytes(self.module(skip).block, skip.module_bits)
        if skip.low is None:
            return own
        rounded = skip.rounded()
        weights = [linear.weight for _, linear in self.linears(rounded)]
        if skip.experts != 0:  # the copies are of all experts, which tokens choose from
            mixtures = [self.model.parts[index // 2].mixture for index in rounded if index % 2]
            weights += [weight for each in mixtures if each is not None for weight in each.weights]
        bits, packed = skip.low.bits, self.backend.packed
        nbytes = own + sum(rounded_bytes(w, bits, packed=packed) for w in weights)
        head_bits = skip.head_bits
        whole = [linear.weight for _, linear in linears(self.model.unembedding)]
        rows = self._rows_of(skip)
        heads = whole if rows is None else [rows.weight]
        if head_bits is not None:
            nbytes += sum(rounded_bytes(head, head_bits, packed=packed) for head in heads)
        if skip.trained is not None and not skip.trained.module:
            deltas = self.deltas(skip.trained)
            apart = [deltas.added_to(weight, bits) for weight in weights]
            nbytes += sum(part.nbytes for delta in apart if delta is not None for part in delta)
        return nbytes

    def read_by(self, skip: SkipConfig) -> list[float]:
        """Bytes that a draft step reads: of each sublayer of a resolved config, and the head."""
        model, low = self.model, skip.low
        self._check_experts(skip)
        experts, rounded = skip.experts, set(skip.rounded())
        whole = model.weight_bytes(experts=experts)
        lower = whole if low is None else model.weight_bytes(low.bits, experts=experts)
        read = [(lower if i in rounded else whole)["sublayers"][i] for i in skip.kept()]
        return [*read, self.head_bytes(skip)]

    def head_bytes(self, skip: SkipConfig | None = None) -> float:
        """Bytes of the rows of the head that a draft reads."""
        rows = self._rows if skip is None else self._rows_of(skip)
        count = self.model.vocabulary if rows is None else len(rows.tokens)
        whole = self.model.weight_bytes(None if skip is None else skip.head_bits)["head"]
        return float(whole * count / self.model.vocabulary)
