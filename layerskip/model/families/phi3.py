"""Phi 3: queries, keys and values of one linear, and a gate and its MLP of one."""

from layerskip.model.family import Family

PHI3 = Family(
    "phi3",
    windows="all",
    projections=("qkv_proj",),
    expansions=("gate_up_proj",),
    activation="activation_fn",
)
