"""Mixtures of experts: routing and sums, drafts with fewer or rounded experts, their bytes."""

import copy
import functools
from dataclasses import replace
from itertools import product

import models
import pytest
import torch
from cost_records import analytic, cost_record, cost_table, step_seconds
from marks import thorough
from models import WINDOW, generated, lively_model, prompt, ragged, tiny_model

from layerskip import LowPrecision, SkipConfig
from layerskip.backends.norms import rms_norm
from layerskip.bench.methods import Task
from layerskip.costs.speculation import CostTable
from layerskip.families.experts import (
    exact_products,
    plain_router,
    rounded_products,
    smaller_router,
    sum_of_experts,
)
from layerskip.families.plain import refusal
from layerskip.model.opened_models import Sublayers
from layerskip.search.fitting import space_for
from layerskip.search.pipeline import Search
from layerskip.search.record import trials_table
from layerskip.timing.sublayer_costs import measure
from layerskip.weights.rounded import copies_of, rounded, rounded_bytes

MIXTURES = ("gemma4_mixture", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe")
PARALLEL = ("gemma4_mixture", "qwen2_moe", "glm4_moe")
EXECUTIONS = ("modules", "fused")
COSTS = CostTable(0.1, (1.0, 1.01, 1.02))
BITS = (8, 4)
DRAFTS = {
    "one expert": SkipConfig(experts=1),
    "rounded": SkipConfig.low_precision(8),
    "rounded to 4 bits, one expert": replace(SkipConfig.low_precision(4), experts=1),
    "some rounded, some left out, one expert": SkipConfig(
        attention=(2,), mlp=(3,), experts=1, low=LowPrecision(attention=(1,), mlp=(1, 4))
    ),
    "early exit, one expert": SkipConfig(exit_layer=4, experts=1),
    "left out": SkipConfig(attention=(2,), mlp=(0, 3)),
    "dense MLPs only": SkipConfig(experts=0),
    "dense MLPs only, rounded": replace(SkipConfig.low_precision(8), experts=0),
}
CASES = [
    (family, draft)
    for family in MIXTURES
    for draft in DRAFTS
    if family in PARALLEL or DRAFTS[draft].experts != 0
]


@functools.cache
def model_of(family):
    return lively_model(family)


def logits(opened, ids, skip=None):
    """Logits (B, T, V) of whole texts (B, T), exact or as a draft computes them."""
    skip = (skip or SkipConfig()).resolve(opened.num_layers)
    hidden, step = opened.first_pass(ids)
    hidden = opened.run(hidden, step, range(skip.shared_prefix()))
    return opened.backend.run(hidden, step, opened.weights.blocks(skip))


def with_top(model, top):
    """A copy of a model with another number of experts per token."""
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        if hasattr(layer, "router"):
            layer.router.config.top_k_experts = top
        elif hasattr(layer.mlp, "gate"):
            layer.mlp.gate.top_k = top
    return other


# ---- The arithmetic ----


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", models.MIXTURES)
def test_routers_are_the_library_s_bit_by_bit(family, dtype, top, normalised):
    more = {"norm_topk_prob": normalised} if family == "qwen3_moe" else {}
    model = tiny_model(family, dtype=dtype, **more)
    mixture = Sublayers(model, "modules").mixtures[0]
    library = smaller_router(mixture.router, top)
    # with the library's norm, because ours sums in another order
    route = plain_router(mixture, top, mixture.norm)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        _, *want = library(x)
        _, *got = route(x)
    loose = {"rtol": 0, "atol": 0}
    if mixture.sigmoid or family == "granitemoe":  # the library's sums are in another order
        want, got = ([each.gather(1, of[1].argsort()) for each in of] for of in (want, got))
        loose["rtol"] = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, want, **loose)
    assert mixture.top == 2  # the model's own number is unchanged
    if mixture.norm is not None:
        with torch.no_grad():
            _, near, _ = plain_router(mixture, top, rms_norm(mixture.norm, "wide", x.device))(x)
        torch.testing.assert_close(near, want[0], rtol=2e-2, atol=0)


# the library's faster experts do not support float64
SUMS = product((torch.float32, torch.bfloat16), ("eager", "grouped_mm", "batched_mm"))


@pytest.mark.parametrize(("dtype", "implementation"), [(torch.float64, "eager"), *SUMS])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_add_up_as_the_library_s(tokens, dtype, implementation):
    model = tiny_model("mixtral", dtype=dtype)
    mixture = Sublayers(model, "modules").mixtures[0]
    model.config._experts_implementation = implementation
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    experts = mixture.experts
    ours = sum_of_experts(
        exact_products(experts.gate_up_proj), exact_products(experts.down_proj), experts.act_fn
    )
    with torch.no_grad():
        _, weights, chosen = mixture.router(x)
        want, got = experts(x, chosen, weights), ours(x, chosen, weights)
        assert got.dtype is dtype
        # the library's eager experts round every summand, ours only the sum
        loose = {"rtol": 2e-2, "atol": 4e-3} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **loose)
        # a token's experts are summed in its own order, whatever else is in the pass
        alone = ours(x[:1], chosen[:1], weights[:1])
    torch.testing.assert_close(alone, got[:1])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_draft_of_one_expert_is_the_model_that_takes_one(family, execution):
    model, ids = model_of(family), prompt(WINDOW + 3, rows=2)
    opened = Sublayers(model, execution)
    with torch.no_grad():
        got = logits(opened, ids, SkipConfig(experts=1))
        torch.testing.assert_close(got, with_top(model, 1)(ids).logits, rtol=0, atol=2e-5)
        whole = logits(opened, ids, SkipConfig(experts=2))
        torch.testing.assert_close(whole, model(ids).logits, rtol=0, atol=2e-5)
    assert not torch.allclose(got, whole, atol=1e-2)


@pytest.mark.parametrize("family", PARALLEL)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_draft_of_no_expert_runs_the_dense_mlps(execution, family):
    model, ids = model_of(family), prompt(WINDOW + 3, rows=2)
    dense = copy.deepcopy(model)
    for mixture in Sublayers(dense, "modules").mixtures:
        (mixture.after.weight if mixture.after else mixture.experts.down_proj).data.zero_()
    with torch.no_grad():
        got = logits(Sublayers(model, execution), ids, SkipConfig(experts=0))
        torch.testing.assert_close(got, dense(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_rounded_draft_is_the_model_with_rounded_weights_and_exact_routers(
    family, execution, bits
):
    model, ids = model_of(family), prompt(WINDOW + 3, rows=2)
    wide = copy.deepcopy(model)
    opened = Sublayers(wide, "modules")
    changed = {linear.weight for linear in opened.weights.linears()}
    changed |= {weight for mixture in opened.mixtures for weight in mixture.weights}
    for weight in changed:
        flat = weight.data.flatten(0, -2)  # each expert has its own rows
        weight.data = rounded(flat, bits).widened(weight.dtype).view_as(weight)
    with torch.no_grad():
        skip = SkipConfig(low=LowPrecision(bits=bits, head=False))
        got = logits(Sublayers(model, execution), ids, skip)
        want = wide(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_rounded_experts_are_rounded_alone(bits, packed):
    weight = torch.randn(3, 17, 70, generator=torch.Generator().manual_seed(3))
    whole = rounded(weight, bits, packed=packed)
    assert whole.nbytes == rounded_bytes(weight, bits, packed=packed)
    for one, part in zip(weight, whole.chunk(3), strict=True):
        alone = rounded(one, bits, packed=packed)
        assert torch.equal(part.data, alone.data)
        assert torch.equal(part.widened(torch.float32), alone.widened(torch.float32))
    x = torch.randn(2, 70)
    want = x @ rounded(weight[1], bits).widened(x.dtype).T
    torch.testing.assert_close(rounded_products(whole, 3)(1)(x), want)


# ---- Texts ----


def decoded(family, rows, settings, sample):
    """New tokens of every row, and the output."""
    ids, mask = ragged((WINDOW + 5, 3, WINDOW + 2)[:rows], seed=3)
    law = {"temperature": 0.8, "top_k": 20} if sample else {}
    how = {"max_new_tokens": 12, "do_sample": sample, **law}
    out = generated(model_of(family), (ids, mask), settings, **how)
    return out.sequences[:, ids.shape[1] :].tolist(), out


@functools.cache
def reference(family, rows, sample):
    """The library's greedy texts, or sampled texts of plain decoding."""
    plain = {"enabled": False, "seeds": (11, 12, 13)[:rows]} if sample else None
    return decoded(family, rows, plain, sample)[0]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("family", "draft"), CASES)
def test_texts_do_not_depend_on_drafts(family, draft, execution, rows, sample):
    how = {"execution": execution, "controller": "fixed", "costs": COSTS, "max_draft_length": 3}
    how |= {"skip": DRAFTS[draft], "seeds": (11, 12, 13)[:rows] if sample else None}
    got, out = decoded(family, rows, how, sample)
    assert got == reference(family, rows, sample)
    assert 0 < out.stats.num_accepted_tokens <= out.stats.num_draft_tokens


def test_drafts_leave_the_model_as_it_was():
    model = lively_model("gemma4_mixture")
    router = model.model.layers[0].router
    before = {**vars(router)}, {**vars(model.model.layers[0].experts)}, model.config.to_dict()
    for execution in EXECUTIONS:
        logits(Sublayers(model, execution), prompt(4), DRAFTS["rounded to 4 bits, one expert"])
    now = vars(router), vars(model.model.layers[0].experts), model.config.to_dict()
    assert now == before


# ---- The choice ----


@pytest.mark.parametrize("family", MIXTURES)
def test_what_is_not_plain_keeps_the_module_path(family):
    model = tiny_model(family)
    assert Sublayers(model).execution == "fused"
    mixture = Sublayers(model).mixtures[0]
    for module in (mixture.router, mixture.experts):
        hook = module.register_forward_hook(lambda *_: None)
        assert "has forward hooks" in (refusal(Sublayers(model, "modules")) or "")
        hook.remove()
    mixture.router.forward = type(mixture.router).forward.__get__(mixture.router)
    opened = Sublayers(model)
    assert opened.execution == "modules"
    with pytest.raises(ValueError, match="routers have a custom forward"):
        opened.weights.blocks(SkipConfig(experts=1))


def test_captured_passes_fall_back_to_fused_ones():
    with pytest.warns(UserWarning, match="in mixtures the host reads"):
        assert Sublayers(tiny_model("mixtral"), "captured").execution == "fused"


# ---- Bytes and costs ----


def test_bytes_of_the_experts_that_tokens_touch():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)  # 2 of 4 experts, dense in layer 1
    opened = Sublayers(model, "modules")
    mlp = model.model.layers[0].mlp
    norm, router = 2 * 32, 2 * 4 * 32
    expert = 2 * 3 * 32 * mlp.experts.down_proj.shape[2]
    assert opened.weight_bytes()["sublayers"][1] == norm + router + 2 * expert
    assert opened.weight_bytes(experts=1)["sublayers"][1] == norm + router + expert
    for tokens, distinct in ((1, 2.0), (2, 3.0), (3, 3.5), (4, 3.75)):
        read = opened.weight_bytes(tokens=tokens)["sublayers"]
        assert read[1] == norm + router + distinct * expert
        assert read[3] == norm + sum(p.nbytes for p in model.model.layers[1].mlp.parameters())
    eight = opened.weight_bytes(8)["sublayers"][1]
    scales, filled = 2 * (2 * 16 + 32), 32 * 16  # rows of 16 columns are filled up to 32
    assert eight == norm + router + 2 * (expert // 2 + filled + scales)


def test_bytes_of_drafts():
    model = tiny_model("gemma4_mixture", dtype=torch.bfloat16)
    opened = Sublayers(model, "modules")
    layer = model.model.layers[0]
    skips = [SkipConfig(experts=n).resolve(6) for n in (0, 1, 2)]
    none, one, two = (opened.weights.read_by(skip)[1] for skip in skips)
    expert = sum(weight.nbytes for weight in layer.experts.parameters()) / 4
    router = sum(weight.nbytes for weight in layer.router.parameters())
    assert (one - none, two - one) == (expert + router, expert)
    assert opened.weights.read_by(SkipConfig().resolve(6))[1] == two
    for skip in (DRAFTS["rounded"], DRAFTS["dense MLPs only, rounded"]):
        fresh = tiny_model("gemma4_mixture", dtype=torch.bfloat16)
        opened = Sublayers(fresh, "fused")
        opened.weights.blocks(skip)
        assert copies_of(fresh).nbytes == opened.weights.nbytes(skip)


def test_analytic_costs_count_experts():
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    opened = Sublayers(model, "modules")
    found = analytic(opened, SkipConfig(experts=1).resolve(6))

    def bytes_of(tokens):
        read = opened.weight_bytes(tokens=tokens)
        return int(sum(read["sublayers"]) + read["head"])

    for count in (1, 2, 3, 9):
        want = bytes_of(count) / bytes_of(1)
        assert found.verify_cost(count) == pytest.approx(want, rel=1e-3)
    assert found.verify_cost(9) > 1.5
    one = opened.weight_bytes(experts=1)
    draft = (sum(one["sublayers"]) + one["head"]) / bytes_of(1)
    assert found.draft == pytest.approx(draft)
    assert found.draft < 0.75
    several = analytic(opened, SkipConfig(experts=1).resolve(6), 3)
    assert several.verify_cost(2) == pytest.approx(bytes_of(6) / bytes_of(3), rel=1e-3)
    assert analytic(Sublayers(tiny_model("llama")), SkipConfig().resolve(6)).verify == (1.0,)


# ---- The search ----


@pytest.mark.parametrize("family", [*thorough(*MIXTURES[:2]), *MIXTURES[2:]])
def test_a_search_prices_and_finds_drafts_of_fewer_experts(family):
    model = lively_model(family)
    ids = [prompt(9, seed=seed) for seed in range(2)]
    where = space_for(Sublayers(model), "sublayer,experts")
    assert where.experts == ((1, 0) if family in PARALLEL else (1,))
    measured = measure(model, ids, contexts=(16,), budget=0.01)
    opened = Sublayers(model)
    for count in where.experts:
        few, all_ = (opened.weight_bytes(experts=n)["sublayers"][1::2] for n in (count, None))
        shares = [some / whole for some, whole in zip(few, all_, strict=True)]
        assert measured["experts"][str(count)] == shares
        assert min(shares) < 0.85
    cost = cost_record() | {"experts": measured["experts"]}
    one = cost_table(cost, SkipConfig(experts=1))
    saved = 1e-3 * sum(1 - share for share in measured["experts"]["1"])
    step = step_seconds(cost)
    assert one.draft == pytest.approx(cost_table(cost, SkipConfig()).draft - saved / step)
    with pytest.raises(ValueError, match=r"these costs do not price drafts of 7 experts"):
        cost_table(cost, SkipConfig(experts=7))
    steps = Search(model, ids, task=Task(8), space=where, parts=frozenset())
    steps.open()
    steps.price(cost)
    steps.run(len(steps.warm_starts))
    steps.judge(2)
    tried = [mask for name, mask in steps.warm_starts.items() if "experts" in name]
    assert [where.skip_config(mask).experts for mask in tried] == [*where.experts]
    rows = trials_table(steps.study, where)
    assert {row["experts"] for row in rows} == {None, *where.experts}
    assert steps.finalists
    assert all(0 < steps.objective(mask).acceptance < 1 for mask in tried)
