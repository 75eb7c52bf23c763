"""Low precision: numbers, products, copies that follow changed weights, and unchanged texts."""

import gc
from itertools import product

import pytest
import torch
from agreement import assert_agree, pairs
from models import FAMILIES, NEWER, VOCABULARY, WINDOW, LowRank, lively_model, prompt, ragged
from models import tiny_model as tiny
from torch import nn

from layerskip import LowPrecision, SkipConfig, generate
from layerskip.model.opened_models import Sublayers
from layerskip.native import extension
from layerskip.weights.rounded import copies_of, rounded, rounded_bytes

BITS = (8, 4)


# ---- Numbers ----


def weight_of(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[rows // 2] = 0
    return weight * torch.logspace(-3, 1, rows)[:, None]


def steps_of(weight, bits):
    """The most that rounding may change each number, (R, C); scales are bfloat16."""
    if bits == 8:  # half a step
        return weight.abs().amax(1, keepdim=True).expand_as(weight) / 127 / 2 * (1 + 2**-8 * 127)
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in weight.split(32, 1)]
    return torch.cat(parts, 1) / 7 * (1 + 2**-8 * 7)  # codes end at -8 and at 7


@pytest.mark.parametrize(
    ("shape", "bits", "dtype"),
    [*product(((1, 1), (16, 64), (17, 65), (40, 200)), BITS, (torch.bfloat16, torch.float64))],
)
def test_numbers_are_rounded_by_a_step_at_most_in_both_layouts(shape, bits, dtype):
    weight = weight_of(*shape).to(dtype)
    plain, packed = (rounded(weight, bits, packed=packed) for packed in (False, True))
    wide = plain.widened(torch.float64)
    assert torch.equal(packed.widened(torch.float64), wide)
    off = (wide - weight.double()).abs()
    assert (off <= steps_of(weight.double(), bits)).all()
    if shape[1] > 1:
        assert off.max() > 0  # numbers do change
    for copy in (plain, packed):
        assert copy.nbytes == rounded_bytes(weight, bits, packed=copy.packed)


def test_a_large_weight_is_rounded_as_its_parts_are():
    """Large weights are rounded in chunks."""
    weight = weight_of(80, 1 << 15)
    for bits, packed in product(BITS, (False, True)):
        whole = rounded(weight, bits, packed=packed)
        parts = [rounded(part, bits, packed=packed) for part in weight.split(16)]
        assert torch.equal(whole.data, torch.cat([part.data for part in parts]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_products_with_weights_as_they_are_widened(bits, dtype):
    weight, bias = weight_of(33, 100), torch.arange(33.0).to(dtype)
    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    for packed in (False, True):
        copy = rounded(weight, bits, packed=packed)
        got = copy.linear(bias)(x).double()
        want = x.double() @ copy.widened(torch.float64).T + bias.double()
        size = x.double().abs() @ copy.widened(torch.float64).abs().T + bias.double()
        bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
        assert ((got - want).abs() <= bound * size).all()


# ---- Native products: the same rounding in float64 ----


def rounded_inputs(x):
    """Inputs (n, C) rounded as in native products, 32 at a time."""
    made = []
    for part in x.float().split(32, -1):
        most = part.abs().amax(-1, keepdim=True)  # (n, 1)
        made.append((part * (127 / most)).round().double() * (most / 127).double())
    return torch.cat(made, -1)


def native_matrix(copy, bias):
    rows, columns = copy.shape
    how = {"format": f"R{copy.bits}", "rows": rows, "columns": columns}
    return extension.extension().Matrix(copy.data, bias, **how)


def native_head(copy, bias, size, signs):
    """A native product of inputs `signs * size` (n, C), which a norm makes exactly from signs."""
    module = extension.extension()
    plan, matrix = module.Plan(), native_matrix(copy, bias)
    head = plan.add("head", before=module.Norm(size, 0.0, "llama"), inputs=[matrix])
    return plan.run(signs[None].to(size.dtype), [head], [], [], [], [])[0].double()


SHAPES = ((1, 4), (15, 63), (16, 64), (17, 65), (50, 31), (80, 200), (200, 1000))


@pytest.mark.parametrize(
    ("bits", "dtype", "threads"), [*product(BITS, (torch.float32, torch.bfloat16), (1, 3))]
)
def test_native_products_of_integers(built, bits, dtype, threads):
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(5)
    finer = 0.0
    try:
        torch.set_num_threads(threads)
        for rows, columns in SHAPES:
            weight = weight_of(rows, columns, seed=columns)
            copy = rounded(weight, bits, packed=True)
            wide = copy.widened(torch.float64)
            size = torch.randn(columns, generator=generator).to(dtype)
            bias = torch.randn(rows, generator=generator).to(dtype) if columns % 2 else None
            signs = torch.randint(0, 2, (20, columns), generator=generator) * 2.0 - 1
            x = signs.double() * size.double()
            added = 0 if bias is None else bias.double()
            want = rounded_inputs(x) @ wide.T + added
            scale = x.abs() @ wide.abs().T + abs(added)
            bound = 2e-6 if dtype is torch.float32 else 2**-8
            all_of_them = native_head(copy, bias, size, signs)
            assert ((all_of_them - want).abs() <= bound * scale).all()
            for count in range(1, 20):  # other tokens do not change a token's numbers
                got = native_head(copy, bias, size, signs[:count])
                assert torch.equal(got, all_of_them[:count])
            exact = x @ wide.T + added
            finer = max(finer, ((exact - want).abs() - bound * scale).max().item())
    finally:
        torch.set_num_threads(before)
    assert dtype is torch.bfloat16 or finer > 0  # unrounded inputs would differ


def test_inputs_of_zeros_and_of_few_large_numbers(built):
    weight = weight_of(20, 128)
    copy = rounded(weight, 8, packed=True)
    for size in (torch.zeros(128), torch.cat((torch.zeros(64), torch.full((64,), 1e30)))):
        got = native_head(copy, None, size, torch.ones(1, 128))
        want = size[None].double() @ copy.widened(torch.float64).T
        assert ((got - want).abs() <= 1e-5 * want.abs().max()).all()


def test_matrices_that_are_not_packed_are_refused(built):
    module = extension.extension()
    copy = rounded(weight_of(20, 70), 8, packed=True)
    how = {"format": "R8", "rows": 20, "columns": 70}
    for wrong, message in (
        ({"format": "R6"}, "there is no format R6"),
        ({"rows": 40}, r"a stored weight must be .* \[4800\]"),
        ({"format": "R4"}, "a stored weight must be"),
        ({"group": 32}, "rows of R8 have a multiple of 32 columns, not 70"),
    ):
        with pytest.raises(ValueError, match=message):
            module.Matrix(copy.data, None, **(how | wrong))


# ---- Sublayers and heads ----


def lowered(model, execution, bits):
    """A model opened with everything in low precision."""
    opened = Sublayers(model, execution)
    assert opened.execution == execution
    *opened.blocks, opened.head = opened.weights.blocks(SkipConfig.low_precision(bits))
    return opened


@pytest.mark.parametrize(
    ("family", "bits", "dtype"),
    [*product(FAMILIES, (8,), (torch.float64, torch.bfloat16)), ("gemma3", 4, torch.float32)],
)
def test_lean_sublayers_are_those_of_modules(family, bits, dtype):
    model = tiny(family, dtype=dtype)
    assert_agree(lowered(model, "modules", bits), lowered(model, "fused", bits), rows=2)
    with pytest.raises(AssertionError):
        assert_agree(lowered(model, "modules", bits), Sublayers(model, "fused"), rows=2)


OFF = 0.03
"""Share of the largest number by which native outputs may be off: inputs are rounded, too."""


@pytest.mark.parametrize(
    ("family", "bits", "dtype"),
    [
        *product((*FAMILIES, *NEWER, "gemma4", "olmo3", "mixtral"), (8,), (torch.float32,)),
        *(("phi3", 4, torch.bfloat16), ("gemma4_dense", 4, torch.bfloat16)),
    ],
)
def test_native_sublayers_round_inputs_too(built, family, bits, dtype):
    """The sublayers add little to the residual, so their own outputs are compared."""
    # Phi 3 has gate and up in one matrix; with this width, `up` does not start at a block
    width = {"intermediate_size": 40} if family == "phi3" else {}
    width |= {"hidden_size": 64} if family == "gemma4" else {}  # results from few inputs vary more
    model = tiny(family, dtype=dtype, **width)
    opened = [lowered(model, execution, bits) for execution in ("fused", "native")]
    off = [
        ((got - want).abs().max() / want.abs().max()).item()
        for ragged_rows in (False, True)
        for want, got in pairs(*opened, rows=3, ragged=ragged_rows)
    ]
    assert 0 < max(off) < OFF
    exact = Sublayers(tiny(family, dtype=dtype, seed=1, **width), "native")
    others = [
        ((got - want).abs().max() / want.abs().max()).item()
        for want, got in pairs(opened[0], exact, rows=3)
    ]
    assert max(others) > 3 * OFF


@pytest.mark.parametrize("execution", ["modules", "fused", "native"])
@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_drafts_run_what_they_are_asked_to(execution, bits):
    model = tiny("llama", dtype=torch.float32)
    opened = Sublayers(model, execution)
    low = LowPrecision(bits=bits, attention=(3,), mlp=(2, 4), head=False)
    skip = SkipConfig(attention=(4,), low=low)
    blocks = opened.weights.blocks(skip)
    assert len(blocks) == 12 - 1 - 5 + 1  # all but the prefix and the skipped one, with the head
    kept = [index for index in range(5, 12) if index != 8]
    same = [block is opened.blocks[index] for block, index in zip(blocks, kept, strict=False)]
    assert same == [index not in (5, 6, 9) for index in kept]
    assert blocks[-1] is opened.weights.head()
    assert opened.weights.blocks(skip)[0] is blocks[0]
    few = opened.trimmed([3, 50, 7, 96])
    head = few.weights.blocks(SkipConfig.low_precision(bits))[-1]
    hidden = opened.embed(prompt(5))
    logits = head(hidden, None)
    assert torch.isfinite(logits[0, 0]).nonzero()[:, 0].tolist() == [3, 7, 50, 96]
    whole = opened.weights.blocks(SkipConfig.low_precision(bits))[-1](hidden, None)
    some = logits[..., [3, 7, 50, 96]] - whole[..., [3, 7, 50, 96]]
    assert some.abs().max() < 1e-5 * whole.abs().max()


# ---- Copies ----


def _merged(weight):
    """Change a weight as merging an adapter does."""
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(n, 2, generator=generator) for n in weight.shape)
    weight.data += 0.1 * down @ up.T


@pytest.mark.parametrize("execution", ["modules", "fused", "native"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(1.5),
        lambda weight: setattr(weight, "data", weight.data.clone() * 1.5),
        lambda weight: weight.data.copy_(weight.data.flip(0)),  # as loading does
        _merged,
    ],
    ids=["multiplied", "replaced", "loaded", "merged"],
)
@torch.no_grad()
def test_copies_of_changed_weights_are_made_anew(execution, change):
    model = tiny("llama", dtype=torch.float32)
    weight = model.model.layers[2].mlp.up_proj.weight
    skip, hidden = SkipConfig.low_precision(8), torch.randn(1, 1, 32)

    def blocks(of):
        return Sublayers(of, execution).weights.blocks(skip)

    old = blocks(model)
    again = blocks(model)
    kept = copies_of(model).of(model.model.layers[1].mlp.up_proj.weight, 8, packed=True)
    assert torch.equal(old[5](hidden, None), again[5](hidden, None))
    change(weight)
    new = blocks(model)
    fresh = tiny("llama", dtype=torch.float32)
    change(fresh.model.layers[2].mlp.up_proj.weight)
    want = blocks(fresh)[5](hidden, None)
    assert torch.equal(new[5](hidden, None), want)
    assert (old[5](hidden, None) - want).abs().max() > 0.01 * want.abs().max()  # the stale one
    assert copies_of(model).of(model.model.layers[1].mlp.up_proj.weight, 8, packed=True) is kept


@torch.no_grad()
def test_copies_of_changed_weights_and_former_draft_vocabularies_are_freed(built):
    model = tiny("llama", dtype=torch.float32)

    def taken(number, times):
        for n in range(number, number + times):
            model.lm_head.weight.mul_(1.01)
            how = {"skip": SkipConfig.low_precision(8), "draft_vocabulary": range(n, n + 60)}
            generate(model, prompt(5), **how, max_new_tokens=4, do_sample=False)
        gc.collect()
        tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
        return sum(each.dtype is torch.uint8 for each in tensors)

    assert taken(0, 4) == taken(4, 8)


def test_a_replaced_parameter_and_another_dtype_are_noticed():
    model = tiny("llama", dtype=torch.float32)
    linear = model.model.layers[0].self_attn.q_proj
    copies = copies_of(model)
    first = copies.of(linear.weight, 8)
    assert copies_of(model).of(linear.weight, 8) is first
    with torch.no_grad():
        linear.weight.view(-1)[:1] = float("nan")
    assert copies_of(model).of(linear.weight, 8) is not first
    first = copies.of(linear.weight, 8)
    assert copies_of(model).of(linear.weight, 8) is first  # a NaN does not count as a change
    linear.weight = nn.Parameter(linear.weight.data.clone())
    second = copies_of(model).of(linear.weight, 8)
    assert second is not first
    model.bfloat16()
    assert copies_of(model).of(linear.weight, 8) is not second


@pytest.mark.parametrize("execution", ["modules", "fused", "native"])
@pytest.mark.parametrize("bits", BITS)
def test_memory_is_told_and_shared(execution, bits):
    model = tiny("qwen2", dtype=torch.float32)
    opened = Sublayers(model, execution)
    low = LowPrecision(bits=bits, attention=(1, 2), mlp=(3,), head=True)
    some = SkipConfig(attention=(2,), low=low)
    for skip in (some, SkipConfig.low_precision(bits)):
        told = opened.weights.nbytes(skip)
        assert copies_of(model).nbytes < told
        opened.weights.blocks(skip)
        assert copies_of(model).nbytes == told
    Sublayers(model, execution).weights.blocks(some)
    assert copies_of(model).nbytes == told
    assert opened.weights.nbytes(SkipConfig.early_exit(3)) == 0
    few = opened.trimmed(range(0, VOCABULARY, 7))
    head = rounded_bytes(torch.empty(14, 32), bits, packed=opened.backend.packed)
    whole = rounded_bytes(torch.empty(VOCABULARY, 32), bits, packed=opened.backend.packed)
    assert few.weights.nbytes(SkipConfig.low_precision(bits)) == told - whole + head


# ---- Modules that are not plain ----


class Quantised(nn.Linear):
    """A linear layer that is not plain."""


@torch.no_grad()
def test_adapted_quantised_and_hooked_modules():
    model = tiny("llama")
    mlp = model.model.layers[2].mlp
    quantised = Quantised(32, 48, bias=False, dtype=torch.float64).eval()
    mlp.gate_proj = quantised
    mlp.up_proj = LowRank(mlp.up_proj).eval()
    seen = []
    mlp.down_proj.register_forward_hook(lambda *call: seen.append(call))
    opened = Sublayers(model)
    assert opened.execution == "modules"
    hidden = torch.randn(1, 3, 32, dtype=torch.float64)
    got = opened.weights.blocks(SkipConfig.low_precision(8))[5](hidden, None)
    assert len(seen) == 1
    x = model.model.layers[2].post_attention_layernorm(hidden)
    up, down = (rounded(each, 8) for each in (mlp.up_proj.base_layer.weight, mlp.down_proj.weight))
    wide = x @ up.widened(torch.float64).T + mlp.up_proj.up(mlp.up_proj.down(x))
    want = (torch.nn.functional.silu(quantised(x)) * wide) @ down.widened(torch.float64).T
    assert (got - hidden - want).abs().max() < 1e-12
    assert opened.weights.nbytes(
        SkipConfig(low=LowPrecision(attention=(), mlp=(2,), head=False))
    ) == (up.nbytes + down.nbytes)


def test_a_forward_of_its_own_is_refused_by_name():
    model = tiny("llama")
    for name in ("model.layers.2.mlp", "model.layers.2.mlp.up_proj"):
        module = model.get_submodule(name)
        module.forward = module.forward
        opened = Sublayers(model)
        assert opened.execution == "modules"
        where = name.replace("model.layers.2", "layer 2").replace("layer 2.", "layer 2 ")
        with pytest.raises(ValueError, match=f"{where} has a custom forward"):
            opened.weights.blocks(SkipConfig.low_precision(8))
        opened.weights.blocks(SkipConfig(low=LowPrecision(attention=(2,), mlp=(1,))))
        del module.forward


# ---- Texts ----


def test_drafts_in_low_precision_are_mostly_right_and_leave_the_model_alone():
    """`test_every_kind.py` and `test_random_cases.py` test that texts do not depend on drafts."""
    model = lively_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [sorted(vars(module)) for module in model.modules()]
    ids, mask = ragged((WINDOW + 5, 3), seed=3)
    how = {"attention_mask": mask, "max_new_tokens": 20}
    want = generate(model, ids, enabled=False, **how).sequences
    rates = {}
    for bits in BITS:
        how |= {"skip": SkipConfig.low_precision(bits), "controller": "fixed"}
        out = generate(model, ids, max_draft_length=3, **how)
        assert torch.equal(out.sequences, want)
        assert out.stats is not None
        rates[bits] = out.stats.acceptance_rate
    assert rates[8] > 0.8
    assert 0 < rates[4] < 1
    assert names == [sorted(vars(module)) for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
