"""Drafts of every kind for tiny models, and decoding with any of them in one call.

Trained weights are untrained, but near enough to the model's to be right now and then.
"""

import functools
import json
from dataclasses import replace

import torch
from letters import shuffled
from models import FEW, Erratic, Fickle, Growing, generated, lively_model, near, ragged
from official import KNOWN, TARGETS, assistant_of, target_of
from safetensors.torch import save_file

from layerskip import LayerSkipDecoding, LogitLookup, LowPrecision, SkipConfig
from layerskip.api.generation import generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.official import Official
from layerskip.decoding.sources.universal import UniversalAssistant
from layerskip.model.draft_modules import TOKENS, Heads, save_trained
from layerskip.model.opened_models import Sublayers, sublayers_of
from layerskip.research.blocks import ExitBlock, Layer, Streams
from layerskip.research.logit_lookup import LogitTable

BLOCKS = ("exit-block", "heads", "streams")
LOW = {
    "8 bits, a layer out": SkipConfig(attention=(2,), mlp=(2,), low=LowPrecision()),
    "4 bits, head in 8, a layer out": SkipConfig(
        attention=(1,), mlp=(1,), low=LowPrecision(bits=4, head=8)
    ),
    # the first sublayers are exact, so that verification can start from their states
    "4 bits behind a prefix, head exact": SkipConfig(
        attention=(2,), low=LowPrecision(bits=4, attention=(1,), mlp=(1, 2), head=False)
    ),
    "8 bits, head in 4, from an MLP on": SkipConfig(low=LowPrecision(attention=(1, 2), head=4)),
    "4 bits, a window": SkipConfig(window=3, low=LowPrecision(bits=4)),
}
ROUNDED = "streams in 8 bits"
CONFIGS = (*LOW, *BLOCKS, ROUNDED)
"""What a skip config names, of a model of three layers at least."""
OFFICIAL = ("official assistant", "official assistant, centroids") if KNOWN else ()
REPLAYED = (*CONFIGS, "assistant", "another tokenizer", *OFFICIAL)
KINDS = (*REPLAYED, "stored logits")
FAMILIES = ("llama", "gemma2", "gemma3", "qwen2")


def family_of(kind, family="llama"):
    """A family of `FAMILIES`, replaced by a Gemma 4 if the draft is made for Gemma 4."""
    fits = {"llama": 0, "gemma2": 3, "gemma3": 1, "qwen2": 2}
    return TARGETS[fits[family]] if kind in OFFICIAL else family


class Keeping(LogitLookup):
    """Keeps a table of logits from call to call, so that even short texts are drafted from it."""

    def __init__(self, table=None, *how, **more):
        super().__init__(*how, **more)
        self.table = table or LogitTable()

    def open(self, batch):
        state = super().open(batch)
        state.stored = [self.table] * len(batch.prompts)
        return state


def block_of(kind, model, size=0.2):
    """A module that sometimes agrees with the model; `size` scales the random change."""
    opened = Sublayers(model)
    generator = torch.Generator().manual_seed(1)
    if kind == "heads":
        block = Heads(opened, 3)
        for weight in block.parameters():
            # it mostly continues the embedding of the token, which a lively model mostly follows
            weight.data.normal_(std=size, generator=generator)
            weight.data[:, len(weight) :] += 4 * torch.eye(len(weight), dtype=weight.dtype)
        return block
    built = {"exit-block": ExitBlock, "streams": Streams}[kind]
    block = built(opened)
    if kind != "exit-block":  # new ones only pass their input state on
        block.layer = Layer(opened)
        half = torch.eye(block.fuse.out_features, dtype=opened.dtype) / 2
        block.fuse.weight.data.copy_(half.repeat(1, 2))
    for weight in block.parameters():
        if weight.dim() > 1:
            shift = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.add_(shift * weight.data.std() * size)
    if kind == "streams":
        block.ahead.weight.data.normal_(std=size, generator=generator)
    return block


def medusa_folder(folder, model, heads=3, layers=1, *, suffix=".safetensors", scale=0.3):
    """A folder as Medusa's authors publish, with random heads near the model's own."""
    torch_seed = torch.Generator().manual_seed(0)
    own = model.get_output_embeddings().weight.detach()
    width = own.shape[1]
    weights = {}
    for k in range(heads):
        for n in range(layers):
            noise = torch.randn(width, width, generator=torch_seed, dtype=own.dtype)
            weights[f"{k}.{n}.linear.weight"] = scale * noise
            weights[f"{k}.{n}.linear.bias"] = torch.zeros(width, dtype=own.dtype)
        weights[f"{k}.{layers}.weight"] = own.clone()
    about = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "x"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    file = folder / f"medusa_lm_head{suffix}"
    save_file(weights, file) if suffix == ".safetensors" else torch.save(weights, file)
    return weights


def weights_of(kind, model, folder):
    """Write a module for a model to a folder."""
    weights = block_of(kind, model).state_dict()
    if kind in ("heads", "streams"):  # these may draft five sixths of the tokens
        weights[TOKENS] = torch.tensor(
            [n for n in range(model.config.get_text_config().vocab_size) if n % 6 != 2]
        )
    return save_trained(folder / f"{kind}.{id(model)}.safetensors", weights, kind, model)


def skip_of(kind, model, folder):
    """The resolved skip config of a draft of a kind; an exit block follows half of the layers."""
    layers = model.config.get_text_config().num_hidden_layers
    if kind in LOW:
        return LOW[kind].resolve(layers)
    skip = SkipConfig.early_exit(layers // 2) if kind == "exit-block" else SkipConfig()
    if kind == ROUNDED:
        kind, skip = "streams", SkipConfig(low=LowPrecision(attention=(), mlp=()))
    return replace(skip, trained=weights_of(kind, model, folder)).resolve(layers)


def draft_of(kind, model, folder, execution="auto"):
    """A draft of any kind, for the engine."""
    if kind == "assistant":
        return Assistant(Sublayers(near(model, 0.4)))
    if kind == "another tokenizer":
        opened = sublayers_of(model, execution)
        return UniversalAssistant(*shuffled(near(model, 0.4))).source(opened, None)
    if kind == "stored logits":
        return Keeping()
    if kind in OFFICIAL:
        family, tokens, dtype = model.of
        noise = 0.4 if tokens < FEW / 2 else 0.1
        second = assistant_of(family, "centroids" in kind, tokens, dtype, noise)
        return Official(sublayers_of(model, execution), Sublayers(second, execution))
    return skip_of(kind, model, folder)


LAWS = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5},
    "history": {
        **{"do_sample": True, "top_p": 0.9, "top_k": 0, "seed": 6},
        **{"repetition_penalty": 1.1, "no_repeat_ngram_size": 4},
    },
}
CONTROLLERS = {
    "fixed": lambda: "fixed",
    "expected-gain": lambda: "expected-gain",
    "erratic": lambda: Erratic(3),
    "fickle": lambda: Fickle(2),
    "growing": lambda: Growing(3),
}
COSTS = CostTable(0.15, (1.0, 1.05, 1.1))
LENGTHS = (11, 2, 5)  # the first prompt is longer than a sliding window
ENDS = [4, 9]


def prompts():
    """Prompts from few tokens, and their mask, (B, W) each."""
    ids, mask = ragged(LENGTHS, seed=3)
    return torch.where(mask.bool(), ids % (FEW - 2) + 2, 0), mask


def decoded(model, drafts, law, controller, execution, ended=False, *, new, longest=5):
    """The output of `generate()` for the prompts."""
    how = dict(LAWS[law])
    decoding = several(
        model,
        drafts,
        costs=COSTS,
        controller=controller,
        execution=execution,
        max_draft_length=longest,
        seed=how.pop("seed", None),
    )
    how |= {"max_new_tokens": new, "eos_token_id": ENDS if ended else None, "pad_token_id": 0}
    return generated(model, prompts(), custom_generate=decoding, **how)


def several(model, drafts, *, execution="auto", **settings):
    """Decode with any drafts. The public interface would take at most one of each sort."""
    opened = sublayers_of(model, execution)
    sources = [source_of(opened, draft) for draft in drafts]
    how = {"lookup": False, "draft_memory": 0, "execution": execution, **settings}
    return LayerSkipDecoding(sources=sources, **how)


NEW = 16


@functools.cache
def model_of(family, dtype=torch.float64):
    """A model with so few tokens that stretches of its texts repeat."""
    if family in TARGETS:
        return target_of(family, FEW, dtype)
    kinds = {"gemma2", "gemma3", "qwen2", "qwen3"}
    both = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    how = {"layer_types": both} if family in kinds else {}
    return lively_model(family, dtype=dtype, vocab_size=FEW, num_hidden_layers=4, **how)


@functools.cache
def wanted(family, law, ended):
    """New tokens of each row: the library's if greedy, else those of plain decoding in modules."""
    model, (ids, mask) = model_of(family), prompts()
    how = LAWS[law] | {"max_new_tokens": NEW, "eos_token_id": ENDS if ended else None}
    if law != "greedy":
        found = generate(model, ids, attention_mask=mask, enabled=False, execution="modules", **how)
        return found.sequences[:, ids.shape[1] :].tolist()
    new = [  # row by row, because padded rows of the library's Gemma 2 are NaN in float64
        model.generate(row[keep.bool()][None], pad_token_id=0, **how)[0, int(keep.sum()) :].tolist()
        for row, keep in zip(ids, mask, strict=True)
    ]
    longest = max(map(len, new))
    return [tokens + [0] * (longest - len(tokens)) for tokens in new]
