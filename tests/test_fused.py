"""The fused path against the module path: the same numbers, and checks that the tests can fail."""

import functools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from agreement import BOUNDS, DIFFERING, assert_agree, pairs
from covering import covering
from marks import slow
from models import FAMILIES, FEW_FAMILIES, tiny_model
from torch import Tensor, nn
from transformers.models.gemma import modeling_gemma

from layerskip.backends import fused
from layerskip.model.opened_models import Sublayers

AXES = FAMILIES, ("default", "eager"), tuple(BOUNDS)
PAIRS = covering(*AXES)


@pytest.mark.parametrize(
    ("family", "attention", "dtype"),
    [*PAIRS, *slow(*(case for case in product(*AXES) if case not in PAIRS))],
)
def test_every_sublayer_agrees_with_the_module_path(family, attention, dtype):
    model = tiny_model(family, dtype=dtype, attention=None if attention == "default" else attention)
    modules, lean = Sublayers(model, "modules"), Sublayers(model, "fused")
    assert (modules.execution, lean.execution) == ("modules", "fused")
    assert_agree(modules, lean)
    assert_agree(modules, lean, rows=3)
    assert_agree(modules, lean, rows=3, ragged=True)


@pytest.mark.parametrize("matched", ["cuda", "cpu"], ids=["by kernels", "by products"])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_queries_side_by_side_agree_with_the_module_path(family, matched, spied, monkeypatch):
    model = tiny_model(family)
    apart = Sublayers(model, "fused")
    monkeypatch.setattr(fused, "WIDE", 8)
    monkeypatch.setattr(fused, "MATCHED_ON", matched)
    asked = spied(fused, "_sdpa", lambda q, *_: q.shape)
    modules, lean = Sublayers(model, "modules"), Sublayers(model, "fused")
    for rows, ragged in ((1, False), (3, False), (3, True)):
        assert_agree(modules, lean, rows=rows, ragged=ragged)
        assert_agree(apart, lean, rows=rows, ragged=ragged)
    # 2 key-value heads, each with 2 queries of several tokens
    grouped = [shape for shape in asked if shape[1] == 2 and shape[2] > 2]
    assert bool(grouped) == (family != "gemma2")


def test_a_cast_in_another_place_would_be_seen():
    """Negative control of the counts: Llama's norm with its weight applied in float32."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    wrong = Sublayers(model, "fused")
    norm = model.model.layers[4].post_attention_layernorm

    def late_cast(hidden, step):
        scaled = F.rms_norm(hidden.float(), (32,), norm.weight.float(), norm.variance_epsilon)
        return hidden + model.model.layers[4].mlp(scaled.to(hidden.dtype))

    wrong.blocks = (*wrong.blocks[:9], late_cast, *wrong.blocks[10:])
    with torch.no_grad():
        counts = [
            ((got != want).float().mean() > DIFFERING[torch.bfloat16]).item()
            for want, got in pairs(Sublayers(model, "modules"), wrong)
        ]
    assert any(counts)


class Adapted(nn.Linear):
    """A low-rank adapter, as a subclass of the module it adapts."""


class QuantisedTensor(Tensor):
    """A weight of another class in an ordinary module."""


def _patched_forward(model):
    norm = model.model.norm
    norm.forward = lambda x: x


def _patched_class(model):
    layer = model.model.layers[0]
    original = type(layer.mlp)
    layer.mlp.__class__ = type(original.__name__, (original,), {"forward": lambda self, x: x})


def _adapter(model):
    old = model.model.layers[1].self_attn.v_proj
    new = Adapted(old.in_features, old.out_features, bias=False, dtype=torch.float64)
    model.model.layers[1].self_attn.v_proj = new.eval()


def _quantised(model):
    linear = model.model.layers[1].mlp.up_proj
    weight = linear.weight.detach().as_subclass(QuantisedTensor)
    linear.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: model.model.layers[2].mlp.register_forward_hook(lambda *_: None),
            "layer 2 mlp has forward hooks",
        ),
        (
            lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None),
            "lm_head has forward hooks",
        ),
        (_patched_forward, "model.norm has a patched forward"),
        (_patched_class, "layer 0 mlp is a LlamaMLP of test_fused, not one of"),
        (_adapter, "layer 1 self_attn.v_proj is a Adapted of test_fused, not one of"),
        (_quantised, "layer 1 mlp.up_proj has a weight of class QuantisedTensor"),
        (lambda model: model.lm_head.to("meta"), "lm_head has its weight offloaded"),
        # the marks that accelerate and tensor parallelism leave on modules
        (lambda model: setattr(model.lm_head, "_hf_hook", object()), "lm_head is hooked"),
        (lambda model: setattr(model.model.norm, "_is_hooked", True), "model.norm is hooked"),
        (lambda model: model.model.layers[0].mlp.train(), "layer 0 mlp is in training mode"),
        (lambda model: model.model.layers[0].input_layernorm.float(), "several dtypes"),
    ],
)
def test_what_is_not_plain_keeps_the_module_path(change, reason):
    model = tiny_model("llama")
    assert Sublayers(model).execution == "fused"
    change(model)
    assert Sublayers(model).execution == "modules"
    for execution in ("fused", "captured"):
        with pytest.raises(ValueError, match=f"'{execution}' cannot serve this model: .*{reason}"):
            Sublayers(model, execution)


class FusedNorm(nn.Module):
    """A kernel library's replacement of Gemma's norm: 1 + weight, and another name for epsilon."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.variance_epsilon = eps

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.variance_epsilon).to(x) * (
            1 + self.weight
        )


def test_a_class_replaced_in_the_library_keeps_the_module_path(monkeypatch):
    FusedNorm.__name__ = FusedNorm.__qualname__ = "GemmaRMSNorm"
    monkeypatch.setattr("transformers.models.gemma.modeling_gemma.GemmaRMSNorm", FusedNorm)
    model = tiny_model("gemma")
    assert type(model.model.norm) is FusedNorm
    assert Sublayers(model).execution == "modules"
    with pytest.raises(
        ValueError, match=r"model\.norm is a GemmaRMSNorm of test_fused, not one of"
    ):
        Sublayers(model, "fused")


@pytest.mark.parametrize(
    ("part", "where"), [("MLP", "layer 0 mlp"), ("RMSNorm", "model.norm"), ("Linear", "lm_head")]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_patched_on_its_class_keeps_the_module_path(monkeypatch, part, where, wrapped):
    model = tiny_model("gemma")
    assert Sublayers(model).execution == "fused"
    owner = nn.Linear if part == "Linear" else getattr(modeling_gemma, f"Gemma{part}")
    original = owner.forward

    def forward(self, x):
        return original(self, x) * 2

    monkeypatch.setattr(
        owner, "forward", functools.wraps(original)(forward) if wrapped else forward
    )
    assert Sublayers(model).execution == "modules"
    with pytest.raises(ValueError, match=f"{where} has a patched forward"):
        Sublayers(model, "fused")
    monkeypatch.undo()
    assert Sublayers(model).execution == "fused"


def test_global_hooks_and_autocast_keep_the_module_path():
    model = tiny_model("llama")
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        assert Sublayers(model).execution == "modules"
    finally:
        handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Sublayers(model).execution == "modules"
    assert Sublayers(model).execution == "fused"
