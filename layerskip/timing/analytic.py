"""The costs of rounds from the bytes that passes read, where nothing has been measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layerskip.costs.speculation import ContextCosts, CostTable, keys_read
from layerskip.decoding.engine import DraftOrSkip
from layerskip.decoding.sources import source_of
from layerskip.model.sublayers import Sublayers

READ = 2e10  # assumed bytes a second at which weights are read
_VERIFIED = 16  # tokens of a row up to which an analytic v counts a mixture's experts


@dataclass(frozen=True)
class Read:
    """Bytes that passes read of weights, and of the keys and values of a token of each row.

    It holds numbers only: tables outlive the models that they are of.
    """

    step: float
    draft: float
    verify: Sequence[float]
    """By tokens of the pass; more than one for mixtures of experts."""
    keys: Mapping[int | None, float]
    draft_keys: Mapping[int | None, float]

    @classmethod
    def of(cls, model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> Read:
        longest = _VERIFIED if model.mixtures else 1
        step, *read = model.pass_bytes([1, *(rows * count for count in range(1, longest + 1))])
        source = source_of(model, draft)
        drafted = math.fsum(source.step_bytes())
        return cls(step, drafted, read, model.key_bytes(), source.key_bytes())

    def table(self, context: int, rows: int) -> CostTable:
        """The analytic table."""
        keys = rows * keys_read(self.keys, context)
        step = self.step + keys
        draft = self.draft + rows * keys_read(self.draft_keys, context)
        verify = [(each + keys) / (self.verify[0] + keys) for each in self.verify]
        return replace(CostTable.analytic([draft], [step], verify), step=step / READ)


def by_bytes(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> ContextCosts:
    """The costs on a machine that is limited by reading weights and keys, from their bytes.

    The more tokens a pass has, in all rows, the more of a mixture's experts it reads.
    """
    return ContextCosts(Read.of(model, draft, rows).table)


def analytic(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> CostTable:
    """The table of `by_bytes` where no keys are read yet."""
    return Read.of(model, draft, rows).table(0, rows)
