"""Time decoding with random weights of a published shape, cut to few layers.

    python scripts/shapes.py gemma4-e2b --layers 10 --threads 2

Random weights say how long passes take and nothing about acceptance: what a draft would gain is
computed for given acceptance, and marked so. Plain decoding, `generate()` and reads of memory take
turns in one process; c and v are those that the controller measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.costs.speculation import CostTable, optimal_draft_length, speedup
from layerskip.environment import environment, hardware
from layerskip.model.assistants import build_assistant
from layerskip.model.opening import sublayers_of
from layerskip.timing.bandwidth import Sweeps
from layerskip.timing.threads import cpu_threads
from layerskip.training.assistants import assistant_config

PROMPT, NEW = 32, 24  # tokens
SLIDING, FULL = "sliding_attention", "full_attention"
_GEMMA4 = {"class": "Gemma4TextConfig", "final_logit_softcapping": 30.0, "pattern": 6}
_NO_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_KEYS_AS_VALUES = {"attention_k_eq_v": True, "sliding_window": 1024}
ACCEPTANCE = {"8 bits": 0.95, "assistant": 0.8}
"""Assumed, not measured: SmolLM2's with 8 bits, and about the published one of an assistant."""
SHAPES: dict[str, dict[str, Any]] = {
    "gemma4-e2b": {
        **_GEMMA4,
        "pattern": 5,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "shared": 20 / 35,
    },
    "gemma4-e4b": {
        **_GEMMA4,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "shared": 18 / 42,
    },
    "gemma4-12b": {
        **_GEMMA4,
        **_KEYS_AS_VALUES,
        "class": "Gemma4UnifiedTextConfig",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "gemma4-26b": {
        **_GEMMA4,
        **_KEYS_AS_VALUES,
        **_NO_INPUTS,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "moe_intermediate_size": 704,
        "top_k_experts": 8,
    },
    "gemma4-31b": {
        **_GEMMA4,
        **_KEYS_AS_VALUES,
        **_NO_INPUTS,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}


def config_of(name: str, layers: int) -> PreTrainedConfig:
    """The configuration of a shape with so many layers, the last of them a full one."""
    shape = dict(SHAPES[name])
    kind, pattern, shared = shape.pop("class"), shape.pop("pattern"), shape.pop("shared", 0)
    types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
    types[-1] = FULL
    if shared:
        # whole periods, so that both kinds of layers have keys of their own
        own = max(1, round(layers * (1 - shared) / pattern)) * pattern
        shape["num_kv_shared_layers"] = layers - own
    config: PreTrainedConfig = getattr(transformers, kind)(
        **shape, num_hidden_layers=layers, layer_types=types
    )
    return config


def build(name: str, layers: int, dtype: torch.dtype) -> Any:
    """A model of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config_of(name, layers), dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def drafter(model: Any) -> Any:
    """An assistant of the shape that is published for a model, with random weights."""
    own = model.config
    small = bool(getattr(own, "num_kv_shared_layers", 0))  # E2B and E4B
    config = assistant_config(
        own,
        hidden=256 if small else 1024,
        intermediate=2048 if small else 8192,
        heads=4 if small else own.num_attention_heads,
    )
    config.use_ordered_embeddings = small
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made: Any = build_assistant(config)
    if small:
        made.masked_embedding.token_ordering.copy_(torch.randperm(own.vocab_size))
    return made.to(model.dtype).eval()


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def priced(costs: CostTable, alpha: float) -> dict[str, Any]:
    """Measured costs, and the speedup that they make of a given acceptance."""
    length = optimal_draft_length(alpha, costs)
    return {
        "c": round(costs.draft, 3),
        "v of 1, 2, 3, 5, 9 tokens": [round(costs.verify_cost(n), 2) for n in (1, 2, 3, 5, 9)],
        "acceptance assumed": alpha,
        "speedup computed": round(speedup(alpha, length, costs.draft, costs.verify_cost), 2),
        "with drafts of": length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--assistant", action="store_true", help="time one of its shape, too")
    args = parser.parse_args()
    with cpu_threads(args.threads):
        print(json.dumps(measure(args), indent=1))


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = build(args.name, args.layers, getattr(torch, args.dtype))
    opened = sublayers_of(model)
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    read = opened.weight_bytes()
    nbytes = sum(read["sublayers"]) + read["head"]
    plain, sweep = LayerSkipDecoding(enabled=False), Sweeps(opened.device, time.perf_counter)

    def per_token(**how: Any) -> float:
        """Seconds a token behind the prompt and the first token."""
        how |= {"do_sample": False}
        first = seconds(lambda: model.generate(ids, max_new_tokens=1, **how))
        return (seconds(lambda: model.generate(ids, max_new_tokens=NEW, **how)) - first) / (NEW - 1)

    found: dict[str, list[float]] = {"plain": [], "generate": [], "bandwidth": []}
    for _ in range(args.repeats):
        found["plain"].append(per_token(custom_generate=plain))
        found["generate"].append(per_token())
        found["bandwidth"].append(max(sweep() for _ in range(3)))
    middle = {name: statistics.median(values) for name, values in found.items()}
    drafts = {"8 bits": LayerSkipDecoding(SkipConfig.low_precision(8), lookup=True)}
    if args.assistant:
        drafts["assistant"] = LayerSkipDecoding(assistant=drafter(model), draft_memory=0)
    costs = {}
    for label, decoding in drafts.items():
        decoding.prepare(model, seconds=6.0)
        out = model.generate(
            ids, max_new_tokens=2, custom_generate=decoding, return_dict_in_generate=True
        )
        costs[label] = priced(out.costs, ACCEPTANCE[label])
    return {
        "weights": "random",
        "shape": f"{args.name}, {args.layers} layers, {args.dtype}",
        "machine": hardware(opened.device),
        "instructions": environment()["cpu"]["instructions"],
        "threads": args.threads,
        "passes": opened.describe(),
        "gigabytes read a token": round(nbytes / 1e9, 3),
        "tokens a second": {
            "plain": round(1 / middle["plain"], 2),
            "generate()": round(1 / middle["generate"], 2),
        },
        "plain / generate()": round(middle["generate"] / middle["plain"], 2),
        "share of bandwidth, plain": round(nbytes / middle["plain"] / middle["bandwidth"], 2),
        "gigabytes a second": round(middle["bandwidth"] / 1e9, 1),
        "spread of plain": [round(min(found["plain"]), 4), round(max(found["plain"]), 4)],
        "costs": costs,
    }


if __name__ == "__main__":
    main()
