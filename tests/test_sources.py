"""Sources: the guide's own example, default drafts, and what is kept for a model."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from models import LowRank, lively_model, near, prompt, ragged
from torch import nn

import layerskip
from layerskip import DecodingOptions, LayerSkipDecoding, Lookup, SkipConfig
from layerskip.api.drafts import automatic_draft
from layerskip.api.plan import open_plan
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import make_controller
from layerskip.model.opened_models import Sublayers, sublayers_of
from layerskip.replay.replayed_drafts import replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import take_trace
from layerskip.weights.rounded import copies_of

GUIDE = Path(__file__).parents[1] / "docs" / "sources.md"
COSTS = CostTable(0.0, (1.0, 1.1))
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def example():
    """The classes in the guide, as a reader would paste them."""
    _, code, *_ = GUIDE.read_text(encoding="utf-8").split("```python\n")
    names = {}
    exec(code.partition("```")[0], names)
    return names


@pytest.mark.parametrize("sample", [False, True])
def test_the_guides_source_drafts_and_leaves_the_text(sample):
    names = example()
    model = lively_model("llama", vocab_size=24)
    ids, mask = ragged((9, 4, 7), seed=2)
    ids = torch.where(mask.bool(), ids % 22 + 2, 0)  # (B, W)
    how = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": sample}
    how |= {"seed": 3} if sample else {}
    plain = layerskip.generate(model, ids, enabled=False, **how)
    phrases = names["Phrases"]([plain.sequences[0, 10:30].tolist(), [5, 6, 7, 8]])
    for controller in ("expected-gain", "fixed"):
        out = layerskip.generate(
            model,
            ids,
            sources=[phrases],
            lookup=False,
            controller=controller,
            costs=COSTS,  # measured costs may say that nothing pays
            **how,
        )
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.num_accepted_tokens > 0
    phrases.longest = 2
    short = layerskip.generate(
        model, ids, sources=[phrases], lookup=False, controller="fixed", costs=COSTS, **how
    )
    assert torch.equal(short.sequences, plain.sequences)
    assert 0 < len(short.stats.accepted_per_position) <= 2 < len(out.stats.accepted_per_position)
    # with other sources, too
    out = layerskip.generate(
        model, ids, sources=[phrases], skip=SkipConfig.early_exit(3), lookup=True, **how
    )
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.stats.sources) == 3


def test_the_guides_source_is_replayed_as_it_decodes():
    model = lively_model("llama", vocab_size=24)
    ids = prompt(6) % 22 + 2
    trace = take_trace(model, [ids[0]], max_new_tokens=30, draft_length=5)
    text = trace.texts[0].tokens.tolist()
    phrases = example()["Phrases"]([text[10:16], text[20:29]])
    fixed = make_controller("fixed", max_draft_length=5, costs=COSTS)
    simulated = [r.accepted for r in simulate(replay(trace, phrases, 5), fixed)]
    settings = {"lookup": False, "draft_memory": 0, "controller": "fixed"}
    real = layerskip.decode(
        model, ids, sources=[phrases], max_draft_length=5, max_new_tokens=30, **settings
    )
    assert simulated == [round_.accepted for round_ in list(real)[1:]]
    assert sum(sum(counts) for counts in simulated) > 4


# ---- Default drafts, and those added to what the caller names ----


def test_what_is_added_never_takes_away(built):
    """The draft in 8 bits stays if lookups, a second model or a user's sources are added."""
    model = lively_model("llama", dtype=torch.float32)
    given = [
        {},
        {"lookup": True},
        {"lookup": Lookup([[5, 6, 7]])},
        {"lookup": False},
        {"assistant": near(model, 0.3)},
        {"sources": [Lookup([[5, 6, 7]])]},
    ]
    plain = layerskip.generate(model, prompt(6), enabled=False, **GREEDY).sequences
    for settings in given:
        decoding = LayerSkipDecoding(**settings)
        sources = open_plan(model, decoding).sources
        assert sources[-1].skip == SkipConfig.low_precision(8).resolve(6)
        more = ("assistant" in settings) + ("sources" in settings)
        assert len(sources) == 1 + (settings.get("lookup") is not False) + more
        out = layerskip.generate(model, prompt(6), **settings, **GREEDY)
        assert torch.equal(out.sequences, plain)
    alone = open_plan(model, LayerSkipDecoding(draft_memory=0))
    assert [source.skip for source in alone.sources] == [None]


def test_the_rejection_rules_text_does_not_depend_on_free_memory(built, monkeypatch):
    texts = []
    for free in (1, 10**15):
        monkeypatch.setattr("layerskip.api.drafts.free_memory", lambda free=free: free)
        model = lively_model("llama", dtype=torch.float32)
        coupled = automatic_draft(sublayers_of(model)).skip
        assert (coupled is None) == (free == 1)
        how = {"do_sample": True, "seed": 4, "acceptance": "rejection"}
        out = layerskip.generate(model, prompt(6), max_new_tokens=40, **how)
        texts.append(out.sequences.tolist())
        assert len(out.stats.sources) == 2
        few = layerskip.generate(model, prompt(6), max_new_tokens=9, draft_memory=1, **how)
        assert len(few.stats.sources) == 1  # the flag decides
    assert texts[0] == texts[1]


def test_explain_says_what_drafts_and_why_nothing_better():
    model = lively_model("llama")  # in float64, which has no native passes
    words = LayerSkipDecoding().explain(model)
    assert "keys and values: 2 MB per 1,000 tokens of text" in words
    assert words.startswith("passes: fused: ")
    assert "looked up" in words
    assert "no drafts by the model in 8 bits: 8-bit products are fast in native" in words
    assert "near-ties" in words
    named = LayerSkipDecoding(SkipConfig.low_precision(8), lookup=False).explain(model)
    assert re.search(r"drafts: whole model, in 8 bits \(.* of memory\)", named)
    assert "looked up" not in named
    skip = SkipConfig(exit_layer=2, decoding=DecodingOptions(adaptive={"alpha": 0.8, "beta1": 0.1}))
    how = {"controller": "adaptive-threshold", "adaptive": {"beta1": 0.2}, "max_draft_length": 5}
    words = "adaptive-threshold, max_draft_length 5, alpha 0.8, epsilon 0.01, beta1 0.2, beta2 0.9"
    assert f"controller: {words}" in LayerSkipDecoding(skip, **how).explain(model)
    with pytest.raises(ValueError, match=r"adaptive alpha must be in 0\.\.1, got 2"):
        LayerSkipDecoding(adaptive={"alpha": 2})
    assert "enabled is False" in LayerSkipDecoding(enabled=False).explain(model)


def test_explain_of_native_passes_has_nothing_to_excuse(built):
    words = LayerSkipDecoding().explain(lively_model("llama", dtype=torch.bfloat16))
    assert "passes: native" in words
    assert "near-ties" not in words
    assert "drafts: whole model, in 8 bits" in words


def _packed(model):
    linear = model.model.layers[1].mlp.up_proj
    weight = linear.weight.detach().as_subclass(Packed)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def _adapted(model):
    model.model.layers[1].mlp.up_proj = LowRank(model.model.layers[1].mlp.up_proj).eval()


class Packed(torch.Tensor):
    """A weight of its own class, like those of torchao."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_adapted, r"unmerged adapters \(LoRA\), .*merge_and_unload\(\)"),
        (_packed, r"quantised \(Packed\), .* load it unquantised, with dtype='bfloat16'"),
        (lambda model: model.half(), "in float16, .* load it with dtype='bfloat16'"),
    ],
)
def test_what_to_load_differently_for_drafts_in_8_bits_is_said_once(change, words):
    model = lively_model("llama", dtype=torch.float32)
    change(model)
    decoding = LayerSkipDecoding(seed=0)
    assert re.search("no drafts by the model in 8 bits: it.*" + words, decoding.explain(model))
    how = {"max_new_tokens": 6, "custom_generate": decoding}
    with pytest.warns(UserWarning, match="lookups are the only drafts: it.*" + words):
        first = model.generate(prompt(5), **how)
    assert model.generate(prompt(5), **how).tolist() == first.tolist()  # a warning would fail
    asked = lively_model("llama", dtype=torch.float32)
    change(asked)  # no warning if the drafts were chosen
    for chosen in ({"draft_memory": 0}, {"enabled": False}, {"skip": SkipConfig.early_exit(4)}):
        layerskip.generate(asked, prompt(5), max_new_tokens=3, **chosen)


# ---- One law for all entry points ----


@pytest.mark.parametrize("own", [{}, {"top_k": 7}, {"top_p": 0.8, "temperature": 1.3}])
def test_all_doors_mean_the_same_law_where_nobody_says_one(own):
    """The model's generation config, then the library's default, a top_k of 50."""
    from layerskip.bench.batches import one_by_one
    from layerskip.bench.methods import Engine
    from layerskip.cli.flags import Sampling

    model = lively_model("llama", initializer_range=0.02)  # a flat law, which top_k cuts in half
    model.generation_config.update(**own)
    ids = prompt(6)
    asked = {"do_sample": True, "max_new_tokens": 30}
    by_generate = layerskip.generate(model, ids, seed=1, **asked).sequences[0, 6:].tolist()
    by_decode = [t for r in layerskip.decode(model, ids, seed=1, **asked) for t in r.tokens[0]]
    task = Sampling(do_sample=True).task(model, 30, seed=1, execution="auto")
    (batch,) = one_by_one([ids])
    by_benchmark = Engine(model, task).decode(batch, 0, lambda: 0.0).tokens[0]
    assert by_generate == by_decode == by_benchmark
    assert task.top_k == own.get("top_k", 50)
    whole = layerskip.decode(model, ids, seed=1, top_k=0, **asked)
    assert own or by_decode != [t for r in whole for t in r.tokens[0]]


# ---- What is kept for a model, and for how long ----


def _hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _patched(model):
    own = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: own(x)


def _replaced(model):
    model.model.layers[2].mlp.down_proj = nn.Linear(48, 32, bias=False, dtype=torch.float64)


def _cast(model):
    model.to(torch.float32)


def _widened(model):
    model.config.max_position_embeddings += 1


@pytest.mark.parametrize("change", [_hooked, _patched, _replaced, _cast, _widened])
def test_a_model_is_opened_once_until_it_changes(change, spied):
    found = spied(Sublayers, "__init__", lambda *given: given)
    model = lively_model("llama")
    for _ in range(3):
        layerskip.generate(model, prompt(5), skip=SkipConfig.early_exit(2), **GREEDY)
    assert len(found) == 1
    change(model)
    ids = prompt(5)
    out = layerskip.generate(model, ids, skip=SkipConfig.early_exit(2), **GREEDY)
    assert len(found) == 2
    assert torch.equal(out.sequences, model.generate(ids, pad_token_id=0, **GREEDY))


@torch.no_grad()
def test_changed_numbers_need_no_opening_and_are_read():
    model, ids = lively_model("llama"), prompt(5)
    how = {"skip": SkipConfig.low_precision(8), "controller": "fixed", **GREEDY}
    layerskip.generate(model, ids, **how)
    before = copies_of(model).changes
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(-1.0)
    out = layerskip.generate(model, ids, **how)
    assert torch.equal(out.sequences, model.generate(ids, pad_token_id=0, **GREEDY))
    assert copies_of(model).changes == before + 1
    # the copies were made from the new weights
    assert out.stats.acceptance_rate > 0.8


@pytest.mark.parametrize("execution", ["auto", "captured"])
def test_copies_can_be_released_and_live_no_longer_than_the_model(execution):
    model, how = lively_model("llama"), {"execution": execution, **GREEDY}
    how["skip"] = SkipConfig.low_precision(8)
    out = layerskip.generate(model, prompt(5), **how)
    held = copies_of(model).nbytes
    assert held > 0
    assert layerskip.release(model) == held
    assert copies_of(model).nbytes == 0
    again = layerskip.generate(model, prompt(5), **how)
    assert torch.equal(again.sequences, out.sequences)
    weight = weakref.ref(model.model.layers[0].mlp.down_proj.weight)
    copies, alive = weakref.ref(copies_of(model)), weakref.ref(model)
    del model, out, again
    for _ in range(2):  # the first collection may free objects that hold others
        gc.collect()
    assert (alive(), copies(), weight()) == (None, None, None)


def test_a_plan_is_made_once_and_keeps_neither_the_model_nor_the_settings_alive():
    model, decoding = lively_model("llama"), LayerSkipDecoding(SkipConfig.early_exit(3))
    plans = [open_plan(model, decoding) for _ in range(2)]
    assert plans[0].sources is plans[1].sources
    assert plans[0].settings is decoding
    _hooked(model)
    assert open_plan(model, decoding).sources is not plans[0].sources
    alive = [weakref.ref(decoding), weakref.ref(model)]
    del plans, decoding
    gc.collect()
    assert alive[0]() is None
    open_plan(model, decoding := LayerSkipDecoding(SkipConfig.early_exit(2)))
    del model
    gc.collect()
    assert alive[1]() is None
    assert decoding.skips
