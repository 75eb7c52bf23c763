"""Prints what drafts may gain on Gemma 4, from the bytes that passes read: docs/gemma4.md's tables.

    python scripts/expectations.py

No number is measured here. A pass is taken to last as long as reading its weights, keys and values
from memory. Arithmetic, kernel launches, draws and the host's work are left out, so that speeds are
ceilings. The models are built without memory for their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from shapes import FULL, SHAPES, SLIDING, config_of
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from layerskip.costs.speculation import CostTable, optimal_draft_length, speedup, speedup_bound
from layerskip.model.architecture import Architecture, LayerParts, read_bytes

CONTEXT = 4096
"""Tokens before a pass. It reads their keys and values, in sliding layers those of the window."""
LONGEST = 8
"""The most tokens that a round drafts."""
LIKELY = (0.6, 0.75, 0.9)
"""The probability that one token of an assistant is accepted."""
LIKELY_8 = 0.95
"""The same for the model in 8 bits: .93 to .98 on the real checkpoints of docs/experiments.md."""
MACHINES = {  # bytes a second, and bytes of memory
    "H200": (4.8e12, 141e9),
    "H100": (3.35e12, 80e9),
    "RTX 4090": (1.0e12, 24e9),
    "M4 Max": (0.55e12, 128e9),
    "12-channel server": (0.46e12, 768e9),
    "2-channel desktop": (0.09e12, 64e9),
}
LAYERS = {"E2B": 35, "E4B": 42, "12B": 48, "26B": 30, "31B": 60}
"""The models, and how many layers they have."""
CENTROIDS = (2048, 32 * 128)
"""Rows that the assistants of E2B and E4B read of centroids and head; the others read all rows."""


class Published(NamedTuple):
    """What others measured.

    Attributes:
        where: on what, and its source.
        name: of the model.
        bits: of its weights.
        drafted, tokens: of a round.
        reached: against plain decoding, if that was measured.
    """

    where: str
    name: str
    bits: int
    drafted: float
    tokens: float
    reached: str = ""


_IK = "[ik_llama.cpp](https://github.com/ikawrakow/ik_llama.cpp/pull/1993)"
_LLAMA = "[llama.cpp on Strix Halo](https://github.com/ggml-org/llama.cpp/pull/23398)"
_VLLM = "[vLLM](https://github.com/vllm-project/vllm/pull/41745)"
_SPARK = "[vLLM on DGX Spark](https://github.com/eugr/spark-vllm-docker/issues/343)"
PUBLISHED = (
    *(Published(_IK, "31B", 8, n, 1 + n * share) for n, share in ((1, 0.912), (5, 0.604))),
    # of 192 tokens 138 and 149 were accepted drafts, the others are one a round
    Published(f"{_LLAMA}, Python", "31B", 8, 209 / 54, 192 / 54, "2.64"),
    Published(f"{_LLAMA}, C++", "31B", 8, 167 / 43, 192 / 43, "3.35"),
    Published(f"{_VLLM}, code", "31B", 16, 7, 5.4),
    Published(_SPARK, "26B", 4, 2, 1 + 0.766 + 0.545),
    Published(_SPARK, "26B", 4, 4, 1 + 0.844 + 0.599 + 0.385 + 0.271),
)


class Target:
    """The bytes that passes of a model and of its assistant read.

    Attributes:
        held: bytes of all weights.
        keys: bytes of keys and values that one row's pass reads.
        assistant: bytes that a step of the assistant reads, without keys.
        assistant_keys: of the target's, in one row.
    """

    def __init__(self, name: str) -> None:
        self.model = _built(config_of(f"gemma4-{name.lower()}", LAYERS[name]))
        self.opened = Architecture(self.model)
        self.held = sum(weight.nbytes for weight in self.model.parameters())
        by_layer = [_keys(part) for part in self.opened.parts]
        self.keys = sum(by_layer)
        self.assistant = _assistant_bytes(name)
        self.assistant_keys = sum(by_layer[-1:] + 3 * by_layer[-2:-1])  # one full, three sliding

    def read(self, tokens: int, rows: int = 1, bits: int = 16) -> float:
        """Bytes that a pass over so many tokens in all reads, perhaps of weights in fewer bits."""
        each = self.opened.weight_bytes(None if bits == 16 else bits, tokens=tokens)
        return math.fsum(each["sublayers"]) + each["head"] + rows * self.keys

    def costs(self, draft: float, rows: int = 1, bits: int = 16) -> CostTable:
        """c of a draft step that reads so many bytes, and v, of a model of so many bits."""
        plain = self.read(rows, rows, bits)
        counts = range(1, LONGEST + 2)
        passes = tuple(self.read(n * rows, rows, bits) / plain for n in counts)
        return CostTable(draft / plain, passes, "analytic")

    def by_assistant(self, rows: int = 1, bits: int = 16) -> CostTable:
        """Costs of drafts by the assistant, which stays in bfloat16."""
        return self.costs(self.assistant + rows * self.assistant_keys, rows, bits)


def _built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _keys(part: LayerParts) -> int:
    attention = part.attention
    heads = attention.config.num_attention_heads // attention.num_key_value_groups
    return 2 * 2 * heads * attention.head_dim * min(CONTEXT, part.window or CONTEXT)


def _assistant_bytes(name: str) -> int:
    """Bytes that a step of a model's assistant reads: four layers without keys of their own."""
    target, small = SHAPES[f"gemma4-{name.lower()}"], name in ("E2B", "E4B")
    width = 256 if small else 1024
    model = _built(
        Gemma4TextConfig(
            hidden_size=width,
            intermediate_size=8 * width,
            num_hidden_layers=4,
            layer_types=[SLIDING] * 3 + [FULL],
            num_attention_heads=4 if small else target["num_attention_heads"],
            num_key_value_heads=target["num_key_value_heads"],
            num_global_key_value_heads=target.get("num_global_key_value_heads"),
            attention_k_eq_v=not small,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        )
    )
    layers = read_bytes(model.model.layers, None)
    for layer in model.model.layers:
        own = layer.self_attn
        layers -= sum(
            read_bytes(each, None) for each in (own.k_proj, own.v_proj, own.k_norm) if each
        )
    rows = sum(CENTROIDS) if small else model.config.vocab_size
    return layers + 2 * width * (rows + 3 * target["hidden_size"])  # head and two projections


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _best(alpha: float, costs: CostTable) -> str:
    """The speedup of the best draft length, and that length."""
    length = optimal_draft_length(alpha, costs, LONGEST)
    return f"{speedup(alpha, length, costs.draft, costs.verify_cost):.2f} ({length})"


def tables() -> Iterator[str]:
    """The tables of docs/gemma4.md, in its order, as Markdown."""
    targets = {name: Target(name) for name in LAYERS}
    rows = []
    for name, target in targets.items():
        low, own = target.costs(target.read(1, bits=8)), target.by_assistant()
        rows.append(
            [
                name,
                f"{target.held / 1e9:.1f}",
                f"{target.read(1) / 1e9:.2f}",
                f"{low.draft:.2f}",
                f"{speedup_bound(low.draft):.1f}",
                f"{own.draft:.3f}",
                f"{speedup_bound(own.draft):.0f}",
                f"{own.verify_cost(3):.2f}, {own.verify_cost(5):.2f}, {own.verify_cost(9):.2f}",
            ]
        )
    head = "model|GB held|GB a step|c, 8 bits|1/c|c, assistant|1/c|v(3), v(5), v(9)"
    yield _table(head.split("|"), rows)
    rows = []
    for name, target in targets.items():
        for batch in (1, 8):
            label = name if batch == 1 else f"{name}, 8 rows"
            low = target.costs(target.read(batch, batch, bits=8), batch)
            own = target.by_assistant(batch)
            lookup = 5 / own.verify_cost(9)
            if batch == 1 or target.opened.parts[0].mixture:
                cells = [_best(LIKELY_8, low), *(_best(alpha, own) for alpha in LIKELY)]
                rows.append([label, *cells, f"{lookup:.2f}"])
    assistant = [f"assistant, {alpha}" for alpha in LIKELY]
    yield _table(["model", f"8 bits, {LIKELY_8}", *assistant, "looked up, 4 right of 8"], rows)
    rows = []
    for machine, (bandwidth, memory) in MACHINES.items():
        cells = [
            f"{bandwidth / target.read(1):.0f}" if target.held + target.keys < memory else "-"
            for target in targets.values()
        ]
        rows.append([machine, f"{bandwidth / 1e12:g}", *cells])
    yield _table(["machine", "TB/s", *targets], rows)
    rows = []
    for where, name, bits, drafted, tokens, reached in PUBLISHED:
        costs = targets[name].by_assistant(bits=bits)
        few = math.floor(drafted)
        ends = costs.round_cost(few), costs.round_cost(few + 1)
        gain = tokens / (ends[0] + (drafted - few) * (ends[1] - ends[0]))
        cells = [f"{name}, {bits} bits", where, f"{drafted:.3g}", f"{tokens:.2f}"]
        rows.append([*cells, f"{gain:.2f}", reached or "-"])
    yield _table(["model", "source", "drafted", "tokens a round", "computed", "reached"], rows)


if __name__ == "__main__":
    print("\n\n".join(tables()))
