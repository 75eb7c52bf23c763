"""The optimizers that drafts are trained with; knows parameters, no losses, no steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

OPTIMIZERS = ("adamw", "muon")
"""AdamW, or Muon (Jordan et al. 2024; torch 2.9) for matrices and AdamW for the rest."""
MUON = 5.0
"""Times AdamW's rate: scaled to AdamW's size, its steps learn a fifth as much at first."""


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that is unknown, or not in this torch.

    Raises:
        ValueError: in one line.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optimizer muon needs torch 2.9 or newer, this is {torch.__version__}; take adamw"
        )


def optimizers_for(name: str, module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Optimizers of all of a module's parameters, at a rate that means about the same to both."""
    matrices = [each for each in module.parameters() if each.dim() == 2 and name == "muon"]
    taken = {id(each) for each in matrices}
    rest = [each for each in module.parameters() if id(each) not in taken]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        how: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
        found.append(torch.optim.Muon(matrices, lr=MUON * rate, **how))
    if rest:
        found.append(torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    return found
