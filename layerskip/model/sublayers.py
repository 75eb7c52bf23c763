"""A `transformers` decoder as 2L residual sublayers; knows no rounds, laws or skip policies.

Sublayer 2i is the attention of layer i, sublayer 2i+1 its MLP, each with its norms and residual
add. The model stays as it was found; a backend computes with its weights or calls its modules.
Letters: B rows, T tokens of a pass, H hidden width, S slots, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config import SkipConfig, Trained
from layerskip.model import compiled, extension, lean, native
from layerskip.model.backend import Backend, Block, Rotary
from layerskip.model.blocks import OpenBlock, open_block
from layerskip.model.cache import RowCache
from layerskip.model.compiled import Compiled
from layerskip.model.draft_head import TrimmedHead, trimmed_head
from layerskip.model.families import Architecture, read_bytes
from layerskip.model.healed import Deltas, paired
from layerskip.model.lean import Lean
from layerskip.model.modules import Modules
from layerskip.model.native import Native
from layerskip.model.rounded import linears, rounded_bytes
from layerskip.model.trained import trained_weights

EXECUTIONS = ("auto", "modules", "fused", "native", "compiled")
ASKED = "as asked for"


class Pass:
    """What every sublayer of one forward pass shares: the cache, angles and masks when asked for.

    Args:
        cache: placed for the pass.
    """

    def __init__(self, model: Sublayers, cache: RowCache, rotary: Rotary) -> None:
        self.model, self.cache, self.rotary = model, cache, rotary

    @cached_property
    def rope(self) -> Mapping[str, Any]:
        """By layer type, the angles of the pass."""
        return self.rotary.at(self.cache)

    @cached_property
    def masks(self) -> dict[int | None, Tensor | None]:
        """By sliding window, the attention mask of the pass."""
        # the eager kernel knows no causality of its own; sdpa does when it is given no mask
        always = self.model.eager and self.cache.count > 1
        # one mask for all layers: sdpa takes bool, whatever dtype a layer has
        dtype = torch.bool if self.model.backend.bool_masks else self.model.dtype
        return {
            window: self.cache.mask(window, dtype, self.model.device)
            if always or self.cache.needs_mask(window)
            else None
            for window in self.model.distinct_windows
        }

    @cached_property
    def slots(self) -> Tensor:
        """Where the pass writes, (B, T)."""
        return self.cache.placed(self.model.device)


class Sublayers(Architecture):
    """A causal language model opened up into its sublayers.

    Args:
        model: a `transformers` causal language model of a family in `families.FAMILIES`, or
            PEFT's wrapper.
        execution: "modules" calls the library's modules, "fused" the lean path for plain weights,
            "native" the same in one call for passes of few tokens on a CPU, "compiled" in compiled
            functions, but for the prefill (with a warning the lean path where either cannot be
            had), "auto" the first of native, fused and modules that can serve the model as it is
            now.

    Attributes:
        execution: the one taken, any of those but "auto".
        reason: why it is not a faster one; None where it is the fastest.
        blocks: the sublayers.
        drawn: draws tokens in one native call, where there is one (see `Backend`).
        head, draft_head: final norm, head and softcap; the draft's may have few rows.
        draft_vocabulary: how many tokens a draft can draw; `vocabulary` unless `trimmed`.

    Raises:
        UnsupportedModelError: naming what is not supported and what is.
        ValueError: "fused", "native" or "compiled" was asked for and the model's modules must be
            called; or training mode.
    """

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
        super().__init__(model)
        self.backend, self.reason = _backend(self, execution)
        self.execution = self.backend.name
        self.blocks = self.backend.blocks
        self.drawn = self.backend.drawn
        self.head: Block = self.backend.head()
        self.draft_head = self.head
        self.draft_vocabulary = self.vocabulary
        self._rows: TrimmedHead | None = None
        # by sublayer (or None: head), bits and hash of what heals it (or whose head it is)
        self._low: dict[tuple[int | None, int | None, str | None], Block] = {}
        self._opened: dict[str, Deltas] = {}  # by hash
        self._modules: dict[Hashable, OpenBlock] = {}
        self._drafts: dict[SkipConfig, tuple[tuple[int, bool], ...]] = {}

    def describe(self) -> str:
        """How passes are computed here and why not faster, in words."""
        words = self.execution
        if words == "native":
            vectors = torch.backends.cpu.get_cpu_capability()
            words += f" ({vectors}, {self.threads} thread{'s' if self.threads != 1 else ''})"
        return words if self.reason is None else f"{words}: {self.reason}"

    @property
    def threads(self) -> int | None:
        """How many threads of the CPU passes take, torch's own number; None on other devices."""
        return torch.get_num_threads() if self.device.type == "cpu" else None

    def disturbed(self) -> AbstractContextManager[None]:
        """Around a round: where others need the cores, it makes do with one thread."""
        return self.backend.disturbed()

    def new_cache(self, rows: int, slots: int) -> RowCache:
        """An empty cache for a batch."""
        return RowCache(rows, self.backend.capacity(slots), self.windows)

    def rotary(self, slots: int, total: int) -> Rotary:
        """Rotary tables for `slots` positions; none past `total - 1`, the last real one."""
        slots = self.backend.capacity(slots)
        positions = torch.arange(slots, device=self.device).clamp_(max=total - 1)[None]  # (1, S)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        kinds = dict.fromkeys(self.layer_types)
        if self.family.rope_by_type:
            return self.backend.rotary(
                {kind: self.decoder.rotary_emb(like, positions, kind) for kind in kinds}
            )
        table = self.decoder.rotary_emb(like, positions)  # (1, S, R) each
        return self.backend.rotary(dict.fromkeys(kinds, table))

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to the hidden states before sublayer 0, (B, T, H)."""
        return embed(self.decoder, tokens)

    def run(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """Carry hidden states (B, T, H) through the given sublayers, in order."""
        return self.backend.run(hidden, step, [self.blocks[index] for index in sublayers])

    def finish(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """`run`, and `logits` of what comes out: (B, T, H) to (B, T, V)."""
        return self.backend.run(hidden, step, [*(self.blocks[i] for i in sublayers), self.head])

    def finish_draft(self, hidden: Tensor, step: Pass, skip: SkipConfig) -> Tensor:
        """Logits of a draft, of hidden states at the end of its shared prefix: (B, T, V)."""
        return self.backend.run(hidden, step, self.draft(skip))

    def logits(self, hidden: Tensor, step: Pass | None = None) -> Tensor:
        """Final norm, head and softcap: (B, T, H) to raw logits (B, T, V).

        Of a pass that verifies or decodes, `step` says so: its numbers are of one arithmetic.
        """
        return self.head(hidden, step)

    def trimmed(self, tokens: Sequence[int]) -> Sublayers:
        """The same opened model, with drafts that can draw these tokens only, but for less.

        A head that is not a plain weight stays whole, with a warning.

        Args:
            tokens: ids, each once; their rows are copied, once for each model and list.

        Raises:
            ValueError: the model does not have one of them.
        """
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            beyond = max(tokens) if min(tokens) >= 0 else min(tokens)
            raise ValueError(
                f"draft_vocabulary must hold tokens in 0..{self.vocabulary - 1} for this model, "
                f"got {beyond}; rank this model's own, or leave draft_vocabulary out"
            )
        if len(tokens) == self.vocabulary:
            return self
        head: Any = self.model.get_submodule("lm_head")
        reason = lean.head_refusal(head)
        if reason is not None:
            warnings.warn(
                f"draft_vocabulary has no effect: lm_head {reason}; drafts use the whole head",
                UserWarning,
                stacklevel=2,
            )
            return self
        opened = copy(self)
        opened._rows = trimmed_head(head, tuple(tokens))
        opened._low = {key: block for key, block in self._low.items() if key[0] is not None}
        opened.draft_head = self.head_of(opened._rows)
        opened.draft_vocabulary = len(tokens)
        return opened

    def draft(self, skip: SkipConfig) -> list[Block]:
        """What a draft runs behind its shared prefix: sublayers, exact or rounded, and its head.

        Raises:
            ValueError: the model cannot run in low precision, and why.
        """
        if skip not in self._drafts:  # asked for at every step
            low, prefix = skip.rounded(self.num_layers), skip.shared_prefix(self.num_layers)
            behind = (index for index in skip.kept(self.num_layers) if index >= prefix)
            self._drafts[skip] = tuple((index, index in low) for index in behind)
        blocks: list[Block] = []
        for index, rounded in self._drafts[skip]:
            blocks.append(self._rounded(index, skip) if rounded else self.blocks[index])
        return [*blocks, self.head_for(skip)]

    def head_for(self, skip: SkipConfig) -> Block:
        """The head that a draft reads, exact or rounded, of the tokens that it may draft."""
        few = self.head_rows(skip) is not self._rows
        return self._rounded(None, skip) if few or skip.head_bits else self.draft_head

    def head_rows(self, skip: SkipConfig) -> TrimmedHead | None:
        """The rows of the head that a draft reads, None for all: a module may have few tokens."""
        if skip.trained is None or not skip.trained.module:
            return self._rows
        head: Any = self.model.get_submodule("lm_head")
        tokens = self.module(skip).tokens
        if tokens is not None and self._rows is not None:
            tokens = tuple(sorted({*tokens} & {*self._rows.tokens.tolist()}))
        return trimmed_head(head, tokens) if tokens and not lean.head_refusal(head) else self._rows

    def _rounded(self, sublayer: int | None, skip: SkipConfig) -> Block:
        """A sublayer in low precision, or a head of the draft's own."""
        trained, backend = skip.trained, self.backend
        key: tuple[int | None, int | None, str | None]
        if sublayer is None:
            rows = self.head_rows(skip)
            of = trained.hash if trained is not None and rows is not self._rows else None
            key = (None, skip.head_bits, of)
            if key not in self._low:
                self._low[key] = backend.head(rows, skip.head_bits)
            return self._low[key]
        assert skip.low is not None
        if trained is not None and trained.module:
            trained = None  # modules beside rounded sublayers
        bits = skip.low.bits
        key = (sublayer, bits, None if trained is None else trained.hash)
        if key not in self._low:
            deltas = None if trained is None else self.deltas(trained)
            self._low[key] = backend.low(sublayer, bits, deltas)
        return self._low[key]

    def deltas(self, trained: Trained) -> Deltas:
        """What heals the linears of the sublayers, checked once for each opening.

        Raises:
            ValueError: the file is not the one that is named, or heals another model.
        """
        if trained.hash not in self._opened:
            weights = {
                name: linear.weight
                for name, linear in self.named_linears(range(self.num_sublayers))
            }
            found = trained_weights(self.model, trained)
            self._opened[trained.hash] = paired(found, weights, trained.hash)
        return self._opened[trained.hash]

    def module(self, skip: SkipConfig) -> OpenBlock:
        """The module that a skip config names.

        Opened and checked once for each opening.

        Raises:
            ValueError: it is none of this model's (see `open_block`).
        """
        trained, bits = skip.trained, skip.module_bits
        assert trained is not None
        key = trained.kind, trained.hash, bits
        if key not in self._modules:
            self._modules[key] = open_block(self, self.backend, trained, bits)
        return self._modules[key]

    def named_linears(
        self, sublayers: Iterable[int] | None = None
    ) -> Iterator[tuple[str, nn.Linear]]:
        """The linears that can be rounded, of some sublayers or all, and their names."""
        for index in range(self.num_sublayers) if sublayers is None else sublayers:
            part = "mlp" if index % 2 else "self_attn"
            for name, linear in linears(getattr(self.layers[index // 2], part)):
                yield f"layers.{index // 2}.{part}.{name}", linear

    def low_bytes(self, skip: SkipConfig) -> int:
        """Memory that a draft's own weights take, or would take: rounded and trained ones."""
        skip = skip.resolve(self.num_layers)
        own = 0
        if skip.trained is not None and skip.trained.module:
            own = read_bytes(self.module(skip).block, skip.module_bits)
        if skip.low is None:
            return own
        weights = [linear.weight for _, linear in self.named_linears(skip.rounded())]
        bits, packed = skip.low.bits, self.backend.packed
        nbytes = own + sum(rounded_bytes(w, bits, packed=packed) for w in weights)
        head_bits = skip.head_bits
        whole = [linear.weight for _, linear in linears(self.model.lm_head)]
        rows = self.head_rows(skip)
        heads = whole if rows is None else [rows.weight]
        if head_bits is not None:
            nbytes += sum(rounded_bytes(head, head_bits, packed=packed) for head in heads)
        if skip.trained is not None and not skip.trained.module:
            deltas = self.deltas(skip.trained)
            apart = [deltas.beside(weight, bits) for weight in weights]
            nbytes += sum(part.nbytes for delta in apart if delta is not None for part in delta)
        return nbytes

    def head_of(self, rows: TrimmedHead) -> Block:
        """`head` of some rows: -inf elsewhere."""
        return self.backend.head(rows)


def _backend(model: Architecture, execution: str) -> tuple[Backend, str | None]:
    """The backend that serves a model, of those that were asked for, and why no faster one."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
    if execution == "modules":
        return Modules(model), ASKED
    reason = lean.refusal(model)
    if reason is not None:
        if execution == "auto":
            return Modules(model), reason
        raise ValueError(
            f"execution {execution!r} cannot serve this model: {reason}; "
            "use execution='auto' or 'modules'"
        )
    if execution == "compiled":
        reason = compiled.refusal(model.device.type)
        if reason is None:
            return Compiled(model), ASKED
        compiled.warn_refusal(reason)
        return Lean(model), reason
    if execution == "fused":
        return Lean(model), ASKED
    reason = native.refusal(model)
    if reason is None:
        reason = extension.refusal()
    elif execution == "auto":
        return Lean(model), reason if model.device.type == "cpu" else None
    if reason is None:
        return Native(model), None
    native.warn_refusal(reason)
    return Lean(model), reason


def embed(decoder: Any, tokens: Tensor) -> Tensor:
    """Token ids (B, T) to the hidden states before the first layer of a decoder, (B, T, H).

    A Gemma scales its embedding by sqrt(H). Where the library's embedding module does not do that
    itself (Gemma and Gemma 2 in early versions 5 of transformers), it is done here, as there.
    """
    hidden: Tensor = decoder.embed_tokens(tokens)  # (B, T, H)
    if not decoder.config.model_type.startswith("gemma") or hasattr(
        decoder.embed_tokens, "embed_scale"
    ):
        return hidden
    return hidden * torch.tensor(decoder.config.hidden_size**0.5, dtype=hidden.dtype)
