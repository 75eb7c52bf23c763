"""Tiny random models, at least one per opened family, prompts, and erratic controllers."""

import copy
import random
import threading

import pytest
import torch
import transformers
from marks import slow
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.decoding.controllers import Controller
from layerskip.decoding.seats import Seat
from layerskip.families import known
from layerskip.research.trees import GrownTrees

VOCABULARY = 97
FEW = 24  # tokens of a vocabulary, so few that stretches of texts repeat
WINDOW = 8

SKIPS = {
    "early exit": SkipConfig.early_exit(4),
    "whole layers": SkipConfig(attention=(2, 4), mlp=(2, 4)),
    "scattered": SkipConfig(attention=(0, 3), mlp=(2, 5)),  # also the first and the last
}

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # gives laws that are neither flat nor one-hot
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 8}
_GEMMA = {**_HEAD, "tie_word_embeddings": True}
_BY_TYPE = ["sliding_attention", "full_attention"] * 3
_GEMMA4 = {
    **_GEMMA,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 5.0,
}
_KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_NO_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TOWER = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
}
_MIXTURE = {"num_experts": 4, "moe_intermediate_size": 16}

_SHARED = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_SHARED |= {"n_shared_experts": 2}
_STRETCHED = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 4.0, "factor": 1.0}
}

# the `model_type` of families whose name here differs from it
_TYPES = {"gemma3": "gemma3_text", "gemma4_unified": "gemma4_unified_text"}
_TYPES |= {"muse_glimmer": "muse_glimmer_text"}
_TYPES |= dict.fromkeys(("gemma4", "gemma4_dense", "gemma4_mixture"), "gemma4_text")
# family -> changes to the common configuration
_SLIDING = {"sliding_window": WINDOW, "layer_types": _BY_TYPE}
_FAMILIES = {
    "llama": _HEAD,
    "gemma": _GEMMA,
    "gemma2": {  # caps so low that they matter in a tiny model
        **(_GEMMA | _SLIDING | {"query_pre_attn_scalar": 8}),
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    },
    "gemma3": {
        **(_GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "mistral": {**_HEAD, "sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **_SLIDING},
    "qwen3": {**_HEAD, "use_sliding_window": True, **_SLIDING},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
}
FAMILIES = tuple(_FAMILIES)
"""Those that every test serves; `EVERY` has their cousins, too, which are wired much alike."""

_FAMILIES |= {
    "gemma4": {
        **(_GEMMA4 | {"layer_types": _BY_TYPE}),  # layers 3 to 5 read the keys of layers 1, 2 and 1
        **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    },
    "gemma4_dense": _GEMMA4
    | _KEYS_AS_VALUES
    | _NO_INPUTS
    | {"use_bidirectional_attention": "vision"},
    "gemma4_unified": _GEMMA4 | _KEYS_AS_VALUES,
    "gemma4_mixture": {
        **(_GEMMA4 | _KEYS_AS_VALUES | _NO_INPUTS | _MIXTURE),
        **{"enable_moe_block": True, "top_k_experts": 2},
    },
    "ministral": _HEAD | _SLIDING,
    "ministral3": {
        **_HEAD,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0},
            **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "smollm3": {"no_rope_layer_interval": 3},
    "granite": {
        **{"embedding_multiplier": 1.5, "attention_multiplier": 0.2},
        **{"residual_multiplier": 0.8, "logits_scaling": 2.0},
    },
    "olmo2": {},
    "olmo3": _SLIDING,
    "mixtral": _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen3_moe": _HEAD | _MIXTURE | {"num_experts_per_tok": 2, "mlp_only_layers": [1]},
}
_NEWER = {
    "muse_glimmer": {  # every third layer does not rotate
        **(_HEAD | _SLIDING | {"final_logit_softcapping": 5.0, "output_multiplier": 0.4}),
        "layer_rope_theta": [1e4, 1e4, 0] * 2,
    },
    "ernie4_5": _HEAD | {"use_bias": True},
    "apertus": _HEAD,
    "arcee": _HEAD,
    "granite_swa": {
        **(_SLIDING | {"layer_rope_theta": [1e4, 5e2, 0] * 2, "embedding_multiplier": 1.5}),
        **{"residual_multiplier": 0.8, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    },
    "hunyuan_v1_dense": _HEAD | _STRETCHED,
    "qwen2_moe": {
        **(_MIXTURE | _SLIDING | {"use_sliding_window": True, "num_experts_per_tok": 2}),
        **{"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    },
    "glm4_moe": {
        **(_HEAD | _SHARED | {"use_qk_norm": True, "partial_rotary_factor": 0.5}),
        **{"first_k_dense_replace": 0, "routed_scaling_factor": 1.5},
    },
}
NEWER = tuple(_NEWER)
"""Each has a kind of arithmetic that no other family here has."""
_FAMILIES |= _NEWER
EVERY = tuple(_FAMILIES)
_FAMILIES |= {
    "internlm3": _HEAD,
    "iquestcoder": _HEAD,
    "exaone": _HEAD,
    "seed_oss": _HEAD | {"attention_bias": True},
    "cwm": _HEAD | _SLIDING,
    "vaultgemma": {
        **(_GEMMA | _SLIDING | {"query_pre_attn_scalar": 8}),
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    },
    "helium": _HEAD,
    "glm": _HEAD | {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": _HEAD | {"partial_rotary_factor": 0.5},
    "exaone4": _HEAD | _SLIDING,
    "hyperclovax": {
        **(_HEAD | {"embedding_multiplier": 1.5, "attention_multiplier": 0.2}),
        **{"residual_multiplier": 0.8, "logits_scaling": 0.5, "use_post_norm": True},
    },
    "ernie4_5_moe": {
        **(_HEAD | {"use_bias": True, "moe_num_experts": 4, "moe_k": 2}),
        **{"moe_intermediate_size": 16, "moe_layer_start_index": 0, "moe_layer_end_index": 4},
    },
    "hunyuan_v1_moe": _HEAD | _STRETCHED | {"num_experts": 4, "moe_topk": 2},
    "dots1": _HEAD | _SHARED | _SLIDING | {"norm_topk_prob": True, "first_k_dense_replace": 1},
    "exaone_moe": _HEAD | _MIXTURE | _SLIDING | {"num_experts_per_tok": 2},
    "solar_open": _HEAD | _SHARED,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mellum": {
        **(_HEAD | _MIXTURE | _SLIDING | {"num_experts_per_tok": 2}),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "granitemoe": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 1.5},
        **{"residual_multiplier": 0.8, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    },
}
OTHERS = tuple(_FAMILIES)[len(EVERY) :]
"""Families whose parts all occur in those. Few tests visit them, each in few cases."""
MIXTURES = ("gemma4_mixture", "mixtral", "qwen3_moe", *NEWER[-2:], *OTHERS[-9:])
# families whose parts all occur in others, or that have their own tests
_ALIKE = ("gemma4_unified", "gemma4_mixture", "ministral", "ministral3", "olmo2", "qwen3_moe")
MOST = [*(family for family in EVERY if family not in _ALIKE), *slow(*_ALIKE)]
"""`EVERY`, some of them slow."""
MODULES_ONLY = ("ministral3",)
"""Families without fused passes."""
# The families that differ most. Where every family takes long, the others are marked slow.
_QUICK = ("llama", "gemma2", "gemma3", "phi3")
FEW_FAMILIES = [*_QUICK, *slow(*(family for family in FAMILIES if family not in _QUICK))]


def require(kind):
    """Skip the test if the installed transformers is too old for a model type."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")


def tiny_model(family, *, dtype=torch.float64, attention=None, seed=0, **overrides):
    """A seeded random model of a family: 6 layers, width 32, 4 heads, 2 key-value heads of 8.

    Args:
        family: one of `EVERY`.
        dtype: of the weights.
        attention: attention implementation; None leaves it to transformers.
        seed: of the weights; the default generator is left as it was.
        overrides: configuration values that replace the common ones.
    """
    kind = _TYPES.get(family, family)
    require(kind)
    shape = {**_SHAPE, **_FAMILIES[family], **overrides}
    layers = shape["num_hidden_layers"]
    for name in shape.keys() & {"layer_types", "layer_rope_theta"}:  # those of the last layers
        shape[name] = shape[name] and (shape[name] * layers)[-layers:]
    config = CONFIG_MAPPING[kind](**shape)
    if attention is not None:
        config._attn_implementation = attention
    config._experts_implementation = "eager"  # the library's faster experts do not support float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _built(config)
        # norm weights and biases start as constants, which would hide errors in their use
        with torch.no_grad():
            buffers = {name: each for name, each in model.named_buffers() if "layers." in name}
            for name, weight in [*model.named_parameters(), *buffers.items()]:
                if name.endswith("layer_scalar"):
                    weight.fill_(0.9)
                elif weight.dim() == 1 or name.endswith("correction_bias"):
                    weight.add_(torch.randn_like(weight) * 0.2)
    model = model.to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def _built(config):
    """A random model; Muse Glimmer's decoder exists behind a vision tower only."""
    if config.model_type != "muse_glimmer_text":
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    outer = transformers.MuseGlimmerConfig(
        text_config=config,
        vision_config=TOWER,
        image_token_id=96,
        video_token_id=95,
        out_hidden_size=64,
        projector_hidden_size=32,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    outer._attn_implementation = config._attn_implementation
    return transformers.MuseGlimmerForConditionalGeneration(outer)


def decoder_of(model):
    """The text decoder of a model."""
    return getattr(model.model, "language_model", model.model)


def prompt(length, *, rows=1, seed=0):
    """Seeded random token ids (rows, length) without the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)


def lively_model(family, **overrides):
    """A tiny model whose drafts are accepted and rejected, and whose greedy text varies.

    Random sublayers drown the embedding, so no draft would agree with its target, and a tied head
    would repeat the last token forever. Here, the sublayers add little to strong embeddings, and
    an untied head after a stronger norm makes the laws uneven.
    """
    model = tiny_model(family, **({"tie_word_embeddings": False} | overrides))
    decoder = decoder_of(model)
    gemma = "gemma" in family  # multiplies embeddings by sqrt(width)
    plus = gemma and not family.startswith("gemma4")  # norms multiply by 1 + weight
    with torch.no_grad():
        for layer in decoder.layers:
            if hasattr(layer, "post_feedforward_layernorm") or hasattr(layer, "post_mlp_layernorm"):
                for name, norm in layer.named_modules():
                    if name.startswith("post_") and name.endswith(("layernorm", "input_norm")):
                        own = plus or family == "muse_glimmer"
                        norm.weight.copy_((1 + norm.weight) * 0.25 - 1 if own else norm.weight / 4)
            else:
                layer.self_attn.o_proj.weight.mul_(0.25)
                for name, weight in layer.named_parameters():
                    if "down_proj" in name and weight.dim() > 1:
                        weight.mul_(0.25)
        embedding = decoder.embed_tokens.weight
        embedding.div_(embedding.std() * (embedding.shape[1] ** 0.5 if gemma else 1.0))
        norm = decoder.norm.weight
        norm.copy_((1 + norm) * 2 - 1) if plus else norm.mul_(2)
    return model


def windowed(family, window, *, turn=0, shared=0, **shape):
    """A lively model of a family and shape, in which every other layer has a window, if any has.

    Args:
        window: its size.
        turn: 0 if the first layer has a window, 1 if the second has.
        shared: the number of layers that read the keys of others, in `gemma4`.
    """
    windows = "none" if family == "smollm3" else known.FAMILIES[_TYPES.get(family, family)].windows
    if windows != "none":
        shape["sliding_window"] = window
    gemma4, kinds = family.startswith("gemma4"), ("sliding_attention", "full_attention")
    if windows == "by type":
        kinds = [kinds[(i + turn) % 2] for i in range(shape["num_hidden_layers"])]
        shape["layer_types"] = [*kinds[:-1], "full_attention"] if gemma4 else kinds
    if family == "gemma4":
        shape["vocab_size_per_layer_input"] = shape["vocab_size"]
        shape["num_kv_shared_layers"] = shared
    return lively_model(family, **shape)


def near(model, noise, seed=1):
    """A copy of a model with noise, which agrees with it often but not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in decoder_of(other).layers.parameters():
            if weight.dim() > 1:
                shift = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.add_(shift * weight.std() * noise)
    return other


def ragged(lengths, *, seed=0):
    """Left-padded seeded prompts of these lengths, and their attention mask, (B, W) each."""
    width = max(lengths)
    ids = prompt(width, rows=len(lengths), seed=seed)
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return ids * mask, mask  # the pad token is 0


def side_by_side(*functions):
    """Run functions to the end, each in a thread."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def generated(model, inputs, settings=None, **how):
    """The output of `generate()` for prompts and their mask, by our decoding if it has settings."""
    ours = {} if settings is None else {"custom_generate": LayerSkipDecoding(**settings)}
    how = {"attention_mask": inputs[1], "return_dict_in_generate": True, **ours, **how}
    return model.generate(inputs[0], **how)


def pure(processor):
    """Mark a logits processor as stateless."""
    processor.layerskip_pure = True
    return processor


def scripted(tokens, width):
    """A stateless processor that favours these tokens, in their order, after a prompt."""

    @pure
    def processor(ids, scores):
        pull = torch.zeros_like(scores[0])  # (V,)
        pull[tokens[ids.shape[1] - width :][:1]] = 100.0
        return scores + pull

    return processor


class Counting:
    """A user's grammar: each token is the last plus one, modulo 7, starting from 20."""

    def __init__(self):
        self.text = []

    def start(self):
        return Counting()

    def advance(self, token):
        self.text.append(token)

    def rollback(self, count):
        assert 0 < count <= len(self.text)
        del self.text[-count:]

    def mask(self, scores):
        keep = 20 + len(self.text) % 7
        out = torch.full_like(scores, -float("inf"))
        out[keep] = scores[keep]
        return out


def seated(keys, lengths, emitted, width):
    """Seats of prompts of some lengths that have emitted some tokens."""
    how = {"history": torch.zeros(len(keys), 9, dtype=torch.long), "width": width}
    return [
        Seat(torch.zeros(length, dtype=torch.long), 99, own, row=i, number=i, key=key, **how)
        for i, (key, length, own) in enumerate(zip(keys, lengths, emitted, strict=True))
    ]


class Erratic(Controller):
    """A controller that decides at random, differently for every row and round."""

    needs_confidence = True

    def __init__(self, seed=0):
        self.seed = seed
        self.reset(1)

    def reset(self, rows):
        self.draws = random.Random(self.seed)

    def limit(self, row, allowed):
        return self.draws.randint(0, allowed)

    def keep_drafting(self, row, confidence):
        return self.draws.random() < 0.7

    def update(self, row, drafted, accepted):
        pass


class Fickle(Erratic):
    """An `Erratic` that chooses any of several drafts, or none, and records what it learns of them.

    Every other time it chooses per row: among looked-up drafts, and one draft that takes steps.
    """

    def reset(self, rows):
        super().reset(rows)
        self.told = []

    def choose(self, offers):
        choice = self.draws.randint(-1, 2 * len(offers) - 1)
        if choice < 0 or choice % 2:
            return None if choice < 0 else choice // 2
        known = [number for number, offer in enumerate(offers) if offer.matches is not None]
        steps = [number for number in range(len(offers)) if number not in known]
        some = [None, *known, *(self.draws.sample(steps, 1) * 2 if steps else ())]
        return {row: self.draws.choice(some) for row in offers[0].lengths}

    def learn(self, draft, row, known, right):
        self.told.append((draft, row, known, right))


class Growing(Fickle):
    """A `Fickle` that also has random numbers of second-best tokens verified beside its chains."""

    signal = "margin"

    def __init__(self, seed=0):
        super().__init__(seed)
        self.trees = GrownTrees(self)

    def reset(self, rows):
        super().reset(rows)
        self.seconds = [0, 0]  # places where the best was wrong, and the second-best right
        self.widened = 0

    def rates(self, confidence, count):
        return 0.9, *(self.draws.uniform(0.2, 1.0) / 10 for _ in range(count - 1))

    def widen(self, rows):
        width = self.draws.randint(0, 1 + max(len(chances) for _, chances in rows.values()))
        self.widened += width > max(chain for chain, _ in rows.values())
        return width

    def see_rank(self, row, confidence, rank):
        self.seconds[0] += rank != 0
        self.seconds[1] += rank == 1


class All(Controller):
    """Always drafts from the first source."""

    needs_confidence = False

    def choose(self, offers):
        return 0

    def learn(self, draft, row, known, right):
        pass


class LowRank(nn.Module):
    """What an adapter library puts in place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        self.weight = base.weight  # adapters expose the weight of their base

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def assistant_config(target):
    """The config of a small assistant for a Gemma 4 text model's config."""
    from transformers import Gemma4AssistantConfig, Gemma4TextConfig

    full, sliding = (target.per_layer_config[f"{kind}_attention"] for kind in ("full", "sliding"))
    like = ("vocab_size", "attention_k_eq_v", "rope_parameters", "sliding_window")
    text = Gemma4TextConfig(
        **{name: getattr(target, name) for name in (*like, "max_position_embeddings")},
        **{
            f"{name}_token_id": getattr(target, f"{name}_token_id")
            for name in ("bos", "eos", "pad")
        },
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_kv_shared_layers=4,
        num_attention_heads=2,
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        num_global_key_value_heads=full.num_key_value_heads,
        global_head_dim=full.head_dim,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target.hidden_size)
