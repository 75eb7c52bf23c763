"""Tiny Gemma 4 models that repeat themselves, and official assistants that draft for them."""

import functools
import importlib.util

import torch
import transformers
from models import FEW, WINDOW, lively_model

from layerskip.decoding.sources.official import Official
from layerskip.model.assistants import assistant_class
from layerskip.model.opened_models import Sublayers

KNOWN = importlib.util.find_spec("transformers.models.gemma4_assistant") is not None
TARGETS = ("gemma4", "gemma4_dense", "gemma4_unified", "gemma4_mixture")
KINDS = ["sliding_attention"] * 3 + ["full_attention"]


def build_assistant(config):
    """An assistant with random weights."""
    return assistant_class(config.model_type)(config).eval()


@functools.cache
def target_of(family, tokens=FEW, dtype=torch.float64):
    """A model with so few tokens that stretches of its texts repeat."""
    how = {"vocab_size": tokens}
    if family == "gemma4":
        how["vocab_size_per_layer_input"] = tokens
    model = lively_model(family, dtype=dtype, **how)
    model.set_experts_implementation("eager")  # the library's faster experts do not support float64
    for name, weight in model.named_parameters():
        if "layers." in name and "post_" in name:
            weight.data.mul_(0.5)  # the assistant can only predict from the embeddings
    if tokens < 8:  # every possible text should occur
        model.lm_head.weight.data.mul_(0.4)
    model.of = family, tokens, dtype
    return model


@functools.cache
def assistant_of(family, centroids=False, tokens=FEW, dtype=torch.float64, noise=0.1, **text):
    """An assistant that agrees with a lively target now and then.

    It mostly applies the target's head to the target's embedding; its layers and h change a little.
    """
    target, groups = target_of(family, tokens, dtype), tokens // 4 if tokens > 8 else tokens
    kind = "gemma4_unified" if "unified" in family else "gemma4"
    prefix = "Gemma4Unified" if "unified" in family else "Gemma4"
    shape = {
        **{"vocab_size": tokens, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 4, "layer_types": KINDS, "num_kv_shared_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW},
        **{"head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 256},
    }
    if family != "gemma4":
        shape |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    if kind == "gemma4":
        shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=getattr(transformers, f"{prefix}TextConfig")(**shape | text),
        backbone_hidden_size=32,
        use_ordered_embeddings=centroids,
        num_centroids=groups,
        centroid_intermediate_top_k=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        built = build_assistant(config)
        for name, weight in built.named_parameters():
            if weight.dim() > 1:
                weight.data.normal_(std=noise)
            elif "post_" in name:
                weight.data.fill_(0.15)
        if centroids:
            built.masked_embedding.token_ordering.copy_(torch.randperm(tokens))
    head = target.lm_head.weight
    built.lm_head.weight.data.copy_(head)
    built.model.norm.weight.data.copy_(target.model.norm.weight)
    built.pre_projection.weight.data[:, :32] += 3 * torch.eye(32)
    if centroids:
        members = head[built.masked_embedding.token_ordering].view(groups, -1, 32)
        built.masked_embedding.centroids.weight.data.copy_(members.mean(1))
    return built.to(dtype).requires_grad_(False)


def source_of(family, centroids=False, execution="auto", **how):
    target = Sublayers(target_of(family), execution)
    return Official(target, Sublayers(assistant_of(family, centroids, **how), execution))
