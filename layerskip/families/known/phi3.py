"""Phi 3: one linear layer for queries, keys and values, and one for gate and MLP."""

from layerskip.families.family import Family

PHI3 = Family(
    "phi3",
    windows="all",
    projections=("qkv_proj",),
    expansions=("gate_up_proj",),
    activation="activation_fn",
)
