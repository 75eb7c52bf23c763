"""Heads that come with checkpoints: logits as their papers define them, and unchanged texts."""

import copy
import json

import pytest
import torch
from checkpoints import save_checkpoint
from commands import PROMPT, refused, run
from definitions import attended, rms_norm, turned
from marks import slow, thorough
from models import Erratic, prompt, ragged, require
from safetensors.torch import load_file, save_file
from small import BATCHES, NEW_TOKENS, alone, check_texts, decoded, new_tokens, small_model
from talks import chat
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from layerskip import LayerSkipDecoding, SkipConfig, UnsupportedModelError, decode, generate
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings
from layerskip.model.mtp_head import LAYOUTS
from layerskip.model.opened_models import sublayers_of

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_5_text")
SLOW = ("glm4_moe_lite", "qwen3_5_moe_text", "qwen3_next")
OTHERS = (*KINDS[1:], *SLOW)
HEAD = {"lookup": False, "max_draft_length": 3}


def weights_of(kind, config):
    """Random tensors of a head, with the names of checkpoints."""
    made = {}
    qwen = LAYOUTS[kind].prefix == "mtp."
    layers = config.num_hidden_layers
    first, layer = ("mtp.", "mtp.layers.0.") if qwen else (f"model.layers.{layers}.",) * 2
    width, heads = config.hidden_size, config.num_attention_heads

    def put(name, *shape):
        noise = torch.randn(*shape, dtype=torch.float64)
        if len(shape) == 1:
            noise = 0.1 * noise + (0.0 if qwen else 1.0)
        made[f"{name}.weight"] = noise if len(shape) == 1 else 0.3 * noise

    for name, shape in zip(
        _ends(qwen), ((width,), (width,), (width, 2 * width), (width,)), strict=True
    ):
        put(first + name, *shape)
    put(f"{layer}input_layernorm", width)
    put(f"{layer}post_attention_layernorm", width)
    if "kv_lora_rank" in vars(config):
        rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
        plain, values = config.qk_nope_head_dim, config.v_head_dim
        put(f"{layer}self_attn.q_a_proj", config.q_lora_rank, width)
        put(f"{layer}self_attn.q_a_layernorm", config.q_lora_rank)
        put(f"{layer}self_attn.q_b_proj", heads * (plain + rotated), config.q_lora_rank)
        put(f"{layer}self_attn.kv_a_proj_with_mqa", rank + rotated, width)
        put(f"{layer}self_attn.kv_a_layernorm", rank)
        put(f"{layer}self_attn.kv_b_proj", heads * (plain + values), rank)
        put(f"{layer}self_attn.o_proj", width, heads * values)
    else:
        each, keys = _head_dim(config), config.num_key_value_heads
        put(f"{layer}self_attn.q_proj", heads * each * (2 if qwen else 1), width)
        put(f"{layer}self_attn.k_proj", keys * each, width)
        put(f"{layer}self_attn.v_proj", keys * each, width)
        put(f"{layer}self_attn.o_proj", width, heads * each)
        for name in ("q_norm", "k_norm") if qwen or config.use_qk_norm else ():
            put(f"{layer}self_attn.{name}", each)
    dense = [f"{layer}mlp."] if kind == "qwen3_5_text" else []
    inner = config.intermediate_size if dense else config.moe_intermediate_size
    shared = config.shared_expert_intermediate_size if qwen and not dense else inner
    if not dense:
        experts = config.num_experts if qwen else config.n_routed_experts
        put(f"{layer}mlp.gate", experts, width)
        dense = [f"{layer}mlp.experts.{number}." for number in range(experts)]
        more = f"{layer}mlp.shared_expert{'' if qwen else 's'}."
        put(f"{more}gate_proj", shared, width)
        put(f"{more}up_proj", shared, width)
        put(f"{more}down_proj", width, shared)
        if qwen:
            put(f"{layer}mlp.shared_expert_gate", 1, width)
        else:
            made[f"{layer}mlp.gate.e_score_correction_bias"] = torch.rand(experts).double()
    for name in dense:
        put(f"{name}gate_proj", inner, width)
        put(f"{name}up_proj", inner, width)
        put(f"{name}down_proj", width, inner)
    return made


def reference(model, weights, tokens, states):
    """The head's states and logits for tokens (T,) and the states before them, (T, H) each.

    Written from the published definitions (DeepSeek V3's report, Qwen 3 Next's model card and the
    layers of both families), in float64.
    """
    config = model.config
    qwen = "mtp.fc.weight" in weights
    first = "mtp." if qwen else f"model.layers.{config.num_hidden_layers}."
    layer = "mtp.layers.0." if qwen else first

    def norm(x, name):
        eps = 1e-6 if "_a_layernorm" in name else config.rms_norm_eps
        return rms_norm(x, weights[f"{name}.weight"] + (1.0 if qwen else 0.0), eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def gated(x, name):
        inner = torch.nn.functional.silu(linear(x, f"{name}gate_proj"))
        return linear(inner * linear(x, f"{name}up_proj"), f"{name}down_proj")

    def attention(x):
        name, heads = f"{layer}self_attn.", config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        if f"{name}kv_b_proj.weight" in weights:
            plain, count = config.qk_nope_head_dim, config.qk_rope_head_dim
            q = linear(
                norm(linear(x, f"{name}q_a_proj"), f"{name}q_a_layernorm"), f"{name}q_b_proj"
            )
            q = q.view(len(x), heads, -1)
            rank = config.kv_lora_rank
            both = linear(x, f"{name}kv_a_proj_with_mqa")
            kv = linear(norm(both[:, :rank], f"{name}kv_a_layernorm"), f"{name}kv_b_proj")
            k, v = kv.view(len(x), heads, -1).split([plain, config.v_head_dim], -1)
            turn = turned(both[:, None, rank:], count, theta, pairs=True).expand(-1, heads, -1)
            q = torch.cat([q[..., :plain], turned(q[..., plain:], count, theta, pairs=True)], -1)
            return linear(attended(q, torch.cat([k, turn], -1), v).flatten(1), f"{name}o_proj")
        q = linear(x, f"{name}q_proj").view(len(x), heads, -1)
        gate = torch.ones(())
        if qwen:
            q, gate = q.chunk(2, -1)
        k, v = (
            linear(x, f"{name}{each}_proj").view(len(x), config.num_key_value_heads, -1)
            for each in "kv"
        )
        if f"{name}q_norm.weight" in weights:
            q, k = norm(q, f"{name}q_norm"), norm(k, f"{name}k_norm")
        count = int(_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
        q, k = (turned(each, count, theta) for each in (q, k))
        out = attended(q, k, v) * (gate.sigmoid() if qwen else gate)
        return linear(out.flatten(1), f"{name}o_proj")

    def mixture(x):
        scores, count = linear(x, f"{layer}mlp.gate"), config.num_experts_per_tok
        if qwen:
            chances = scores.softmax(-1)
            best, factor = chances.topk(count).indices, 1.0
            share = linear(x, f"{layer}mlp.shared_expert_gate").sigmoid()
            out = share * gated(x, f"{layer}mlp.shared_expert.")
        else:
            chances, factor = scores.sigmoid(), config.routed_scaling_factor
            bias = weights[f"{layer}mlp.gate.e_score_correction_bias"]
            best = (chances + bias).topk(count).indices
            out = gated(x, f"{layer}mlp.shared_experts.")
        for row, chosen in enumerate(best.tolist()):
            some = chances[row, chosen] / chances[row, chosen].sum() * factor
            for weight, expert in zip(some, chosen, strict=True):
                out[row] = out[row] + weight * gated(x[row], f"{layer}mlp.experts.{expert}.")
        return out

    embedded = norm(model.get_input_embeddings().weight[tokens], first + _ends(qwen)[0])
    x = torch.cat([embedded, norm(states, first + _ends(qwen)[1])], -1)
    x = linear(x, first + _ends(qwen)[2])
    x = x + attention(norm(x, f"{layer}input_layernorm"))
    behind = norm(x, f"{layer}post_attention_layernorm")
    dense = f"{layer}mlp.gate_proj.weight" in weights
    x = x + (gated(behind, f"{layer}mlp.") if dense else mixture(behind))
    x = norm(x, first + _ends(qwen)[3])
    return x, x @ model.get_output_embeddings().weight.T


def _head_dim(config):
    return getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)


def _ends(qwen):
    if qwen:
        return "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    return "enorm", "hnorm", "eh_proj", "shared_head.norm"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes a model of a kind, loaded from a checkpoint with a head; with the head's tensors."""
    known = {}

    def make(kind):
        if kind not in known:
            require(kind)
            folder = tmp_path_factory.mktemp(kind)
            model = copy.deepcopy(small_model(kind, first_k_dense_replace=1))
            model.save_pretrained(folder)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                weights = weights_of(kind, model.config)
            _write(folder, weights)
            model.name_or_path = str(folder)
            known[kind] = model, weights
        return known[kind]

    return make


def _write(folder, weights):
    file = folder / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", [*KINDS, *slow(*SLOW)])
@torch.no_grad()
def test_drafts_are_those_of_the_definition(kind, made):
    """The second draft reads the head's own state of the first."""
    model, weights = made(kind)
    ids = prompt(9)
    rounds = decode(model, ids, max_new_tokens=10, controller="fixed", **HEAD)
    text, seen = ids[0].tolist(), 0
    for each in rounds:
        for number, drafted in enumerate(each.drafts[0][:2] if each.drafts else ()):
            tokens = torch.tensor([*text, *each.drafts[0][:number]])
            states = model.base_model(torch.tensor([text]))[0][0][:-1]
            for place in range(len(text), len(tokens)):
                own = reference(model, weights, tokens[1:place], states)[0][-1:]
                states = torch.cat([states, own])
            assert drafted == int(reference(model, weights, tokens[1:], states)[1][-1].argmax())
            seen += 1
        text += each.tokens[0]
    assert seen > 4


@pytest.mark.parametrize("batch", [*thorough("one"), "ragged"])
@pytest.mark.parametrize("kind", ["deepseek_v3", *slow(*OTHERS)])
def test_texts_are_the_same_with_and_without(kind, batch, made):
    inputs = ragged(BATCHES[batch], seed=3)
    check_texts(made(kind)[0], inputs, "mtp", controller=Erratic(), **HEAD)


@pytest.mark.parametrize("kind", ["qwen3_5_text", *slow("deepseek_v3")])
def test_sessions_and_servers_draft_with_heads(kind, made):
    chat(made(kind)[0], 3, NEW_TOKENS, controller="fixed", **HEAD)


def test_a_loaded_checkpoint_s_head_is_found_and_told(made):
    folder = made("qwen3_5_text")[0].name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert "drafts: the checkpoint's own head" in open_plan(model, Settings()).explain()
    without = open_plan(model, Settings(draft_memory=0)).explain()
    assert "head" not in without
    small = open_plan(model, Settings(draft_memory=1000)).explain()
    assert "no drafts by the checkpoint's own head: copies of its weights would take" in small


def test_a_published_checkpoint_that_sees_pictures_is_loaded_as_text(tmp_path):
    text = small_model("qwen3_5_text").config
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": text.hidden_size}
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "num_position_embeddings": 16}
    ids = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id"), 90)
    config = CONFIG_MAPPING["qwen3_5"](text_config=text.to_dict(), vision_config=sizes, **ids)
    whole = AutoModelForImageTextToText.from_config(config).double().eval()
    with pytest.raises(UnsupportedModelError, match="text with AutoModelForCausalLM"):
        sublayers_of(whole)
    whole.save_pretrained(tmp_path)
    _write(tmp_path, weights_of("qwen3_5_text", text))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    inputs = ragged((5, 9))
    out = decoded(model, inputs, controller="fixed", **HEAD)
    assert new_tokens(out) == alone(model, *inputs)
    assert [each.num_draft_tokens > 0 for each in out.stats.sources] == [True]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a head, and a tokenizer."""
    model = copy.deepcopy(small_model("deepseek_v3")).float()
    save_checkpoint(tmp_path, model)
    weights = weights_of("deepseek_v3", model.config)
    _write(tmp_path, {name: weight.float() for name, weight in weights.items()})
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n{PROMPT} w5\n")
    return tmp_path


def test_commands_draft_with_heads(folder):
    flags = ("--max-new-tokens", 12, "--controller", "fixed", "--no-lookup")
    result = run("generate", folder, "--prompt", PROMPT, *flags)
    assert result.exit_code == 0, result.output
    assert "drafts: the checkpoint's own head for the token after the next;" in result.stderr
    plain = run("generate", folder, "--prompt", PROMPT, *flags[:2], "--draft-memory", 0)
    assert plain.stdout.strip() == result.stdout.strip()
    given = ("--prompts", folder / "prompts.txt", "--output", folder / "found")
    assert "there are no sublayers to search" in refused("search", folder, *given, "--no-confirm")


def _damaged(made, folder, change, kind):
    model, weights = made(kind)
    model, weights = copy.deepcopy(model), dict(weights)
    change(weights)
    save_file(weights, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.name_or_path = str(folder)
    return model


def test_damaged_heads_are_named_errors(made, tmp_path):
    name = "model.layers.2.mlp.experts.1.up_proj.weight"

    def cut(weights):
        weights[name] = weights[name][:-1].clone()

    model = _damaged(made, tmp_path, cut, "glm4_moe")
    shapes = r"part.safetensors has shape \[15, 32\], the model's head for drafts needs \[16, 32\]"
    with pytest.raises(ValueError, match=f"{name} in .*{shapes}"):
        generate(model, prompt(5), max_new_tokens=2)
    out = generate(model, prompt(5), max_new_tokens=2, draft_memory=0)
    assert out.sequences.shape == (1, 7)
    model = _damaged(made, tmp_path, lambda weights: weights.pop(name), "glm4_moe")
    with pytest.raises(ValueError, match=f"incomplete: {name} is missing"):
        generate(model, prompt(5), max_new_tokens=2)
    (tmp_path / "part.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"cannot read .*part.safetensors"):
        generate(model, prompt(5), max_new_tokens=2)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"cannot read .*index.json"):
        generate(model, prompt(5), max_new_tokens=2)


def test_heads_that_cannot_draft_are_told(made, tmp_path):
    def stored(weights):
        name = "mtp.fc.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)

    model = _damaged(made, tmp_path, stored, "qwen3_5_text")
    assert "own head: mtp.fc.weight is stored as F8_E4M3" in open_plan(model, Settings()).explain()
    other = small_model("ernie4_5_moe")
    path, other.name_or_path = other.name_or_path, str(tmp_path)
    try:
        words = open_plan(other, Settings()).explain()
        assert "the head of a ernie4_5_moe is not supported" in words
    finally:
        other.name_or_path = path


def test_other_decoding_options_leave_heads_aside(made):
    model, _ = made("deepseek_v3")
    how = LayerSkipDecoding(skip=SkipConfig.low_precision(8), lookup=False)
    out = model.generate(
        prompt(5), custom_generate=how, max_new_tokens=4, return_dict_in_generate=True
    )
    assert [each.name for each in out.stats.sources] == ["sublayers"]
