"""What the opened model says about itself. Its arithmetic is tested by parity tests."""

import copy
import re
import warnings

import pytest
import torch
from models import lively_model, prompt, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import SkipConfig, UnsupportedModelError, fingerprint, generate
from layerskip.backends import native_passes
from layerskip.costs.speculation import CostTable
from layerskip.families.family import Family
from layerskip.families.known import FAMILIES
from layerskip.model.opened_model import Pass
from layerskip.model.opened_models import Sublayers, open_model
from layerskip.native import extension
from layerskip.weights.rounded import TrimmedHead

COSTS = CostTable(0.2, (1.0, 1.1))


def test_a_fingerprint_is_the_same_in_every_dtype_and_folder():
    model = tiny_model("gemma2", dtype=torch.bfloat16)
    found = fingerprint(model)
    assert re.fullmatch("weights-[0-9a-f]{16}", found)
    model.name_or_path = "elsewhere"
    assert fingerprint(model.double()) == found


def test_fingerprints_tell_checkpoints_and_architectures_apart():
    one = tiny_model("llama")
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.norm.weight[3] += 0.1
    found = {fingerprint(model) for model in (one, other, tiny_model("mistral"))}
    assert len(found) == 3


@torch.no_grad()
def test_a_merged_adapter_makes_another_checkpoint():
    """Even of rank 1 on one projection, a hundredth of its size, in the checkpoint's bfloat16."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    before = fingerprint(model)
    weight = model.model.layers[3].self_attn.q_proj.weight
    delta = torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1]))  # (N D, H)
    weight += (0.01 * delta * weight.std()).to(weight)
    assert fingerprint(model) != before


def test_offloaded_weights_make_a_hash_of_another_kind():
    model = tiny_model("llama")
    whole = fingerprint(model)
    model.model.layers[2].to("meta")
    assert fingerprint(model).startswith("shapes-")
    skip = SkipConfig(attention=(3,), model="some/name", model_hash=whole)
    assert skip.matches("some/name", fingerprint(model)) is True  # by name
    assert skip.matches("some/other", fingerprint(model)) is False


class Pretended(TorchFunctionMode):
    """Uses the meta device as a second device; tensors that come back from it are zeros.

    Operations on tensors of two devices fail, as with real devices.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and args[0].is_meta and args[1] == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("place", ["head", "norm and head", "norm", "last layer"])
def test_logits_come_back_to_where_tokens_come_in(place):
    model = tiny_model("gemma2", dtype=torch.float32, tie_word_embeddings=False)
    away = {
        "head": [model.lm_head],
        "norm and head": [model.model.norm, model.lm_head],
        "norm": [model.model.norm],
        "last layer": [model.model.layers[-1]],
    }
    few = TrimmedHead(model.lm_head, range(5, 60))
    for module in away[place]:
        module.to("meta")
    opened = Sublayers(model)
    assert opened.execution == "modules"
    heads = [opened.head] if "head" in place else [opened.head, opened.backend.head(few)]
    cache = opened.new_cache(1, 16)
    cache.place([0], 9)
    with Pretended():
        step = Pass(opened, cache, opened.rotary(16, 16))
        hidden = opened.run(opened.embed(prompt(9)), step, range(11))
        for head in heads:
            logits = head(hidden, None)
            assert logits.device == opened.device == torch.device("cpu")
            assert logits.shape == (1, 9, opened.vocabulary)
            logits = head(hidden.to("meta"), None)
            assert logits.device == opened.device


@pytest.mark.parametrize("own", [True, False])
def test_the_hash_decides_whether_a_skip_config_is_foreign(own):
    model = tiny_model("llama")
    generate(model, prompt(5), skip=SkipConfig(model_hash="x"), max_new_tokens=4)
    model.load_state_dict(tiny_model("llama", seed=1).state_dict())  # in place
    model_hash = fingerprint(model) if own else "weights-0123456789abcdef"
    skip = SkipConfig(attention=(3,), model="some/name", model_hash=model_hash)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generate(model, prompt(5), skip=skip, costs=COSTS, max_new_tokens=4)
    assert [str(w.message).startswith("this skip config") for w in caught] == [True] * (not own)


def test_execution_is_told():
    model = tiny_model("llama")
    assert Sublayers(model).execution == "fused"
    assert Sublayers(model, execution="modules").execution == "modules"
    with pytest.raises(ValueError, match="native, captured, got 'graphs'"):
        Sublayers(model, execution="graphs")


def test_why_no_faster_execution_is_told(monkeypatch):
    model = tiny_model("llama", dtype=torch.float32)
    assert Sublayers(model, "fused").describe() == "fused: as asked for"
    assert Sublayers(model.double()).describe() == (
        "fused: native passes need float32 or bfloat16, not ['torch.float64']"
    )
    model = model.float()
    monkeypatch.setattr(extension, "refusal", lambda: "no C++ compiler was found")
    native_passes.warn_refusal.cache_clear()
    with pytest.warns(UserWarning, match="fused path: no C"):
        opened = Sublayers(model)
    assert (opened.execution, opened.reason) == ("fused", "no C++ compiler was found")
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: None)
    assert Sublayers(model).describe() == "modules: layer 2 mlp has forward hooks"


def test_of_native_passes_vectors_and_threads_are_told(built, monkeypatch):
    opened = Sublayers(tiny_model("llama", dtype=torch.float32))
    vectors = torch.backends.cpu.get_cpu_capability()
    assert (opened.execution, opened.reason) == ("native", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert opened.describe() == f"native ({vectors}, 1 thread)"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert opened.describe() == f"native ({vectors}, 2 threads)"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weight_bytes_are_those_of_all_parameters_but_the_embedding(family):
    model = tiny_model(family, dtype=torch.bfloat16)
    opened = Sublayers(model, "modules")
    found = opened.weight_bytes()
    assert len(found["sublayers"]) == opened.num_sublayers
    layer = model.model.layers[0]
    norms = [layer.input_layernorm] + [layer.post_attention_layernorm] * (family == "gemma2")
    attention = [*layer.self_attn.parameters(), *(norm.weight for norm in norms)]
    assert found["sublayers"][0] == 2 * sum(weight.numel() for weight in attention)
    inside = sum(weight.numel() for each in model.model.layers for weight in each.parameters())
    assert sum(found["sublayers"]) == 2 * inside
    assert found["head"] == 2 * (model.lm_head.weight.numel() + model.model.norm.weight.numel())


class MadeUpConfig(LlamaConfig):
    model_type = "made_up"


def test_a_family_like_llamas_is_added_by_one_line(monkeypatch):
    config = tiny_model("llama").config.to_dict() | {"model_type": "made_up"}
    model = LlamaForCausalLM(MadeUpConfig(**config)).double().eval()
    with pytest.raises(UnsupportedModelError, match="architecture 'made_up' are not known"):
        Sublayers(model)
    monkeypatch.setitem(FAMILIES, "made_up", Family("made_up", package="llama"))
    assert open_model(model).execution == "fused"
    ids = prompt(9)
    how = {"max_new_tokens": 12, "do_sample": False}
    drafted = generate(model, ids, skip=SkipConfig.early_exit(4), costs=COSTS, **how)
    assert drafted.sequences.tolist() == model.generate(ids, **how).tolist()
    assert drafted.stats.num_draft_tokens > 0


def _halved(name):
    """A change that halves an attribute in every module of a decoder that has it."""

    def change(decoder):
        for module in decoder.modules():
            if name in vars(module):
                setattr(module, name, vars(module)[name] / 2)

    return change


def _other_scalars(decoder):
    for layer in decoder.layers:
        layer.layer_scalar = torch.full_like(layer.layer_scalar, -1.3)


def _fewer_experts(decoder):
    for layer in decoder.layers:
        layer.mlp.gate.top_k = 1


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", _halved("scaling")),
        ("llama", lambda decoder: vars(decoder.norm).update(variance_epsilon=9.0)),
        ("llama", _halved("attention_scaling")),
        ("gemma2", lambda decoder: vars(decoder.config).update(final_logit_softcapping=0.1)),
        ("gemma2", _halved("attn_logit_softcapping")),
        ("gemma4", _other_scalars),
        ("granite", _halved("residual_multiplier")),
        ("mixtral", _fewer_experts),
    ],
)
def test_numbers_and_buffers_that_are_edited_between_calls_count(family, change):
    model, ids = lively_model(family), prompt(9)
    how = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "costs": COSTS}
    ways = [{"enabled": False}, {"skip": SkipConfig.early_exit(4)}]

    def texts(model):
        return [generate(model, ids, **how, **way).sequences.tolist() for way in ways]

    before = texts(model)
    change(model.model)
    after, fresh = texts(model), texts(copy.deepcopy(model))
    assert after == fresh
    assert after != before
