"""Measure all that is said of a GPU, in ten minutes at most: `make benchmark-gpu`.

    python scripts/benchmark_gpu.py --output runs/benchmark/gpu.json
    python scripts/benchmark_gpu.py --device cpu --tiny --output tiny.json    # tries the program

First come runs of `layerskip benchmark`: SmolLM2, `generate()` with a static cache and compiled
passes, and the exits of demo-llama. Then passes and drafts of published shapes with random weights,
and what they would gain; a server with several clients; and a loop in gpt-fast's way. One table is
printed; the record has its rows, and is written after each part. A part is left out if the time is
over when it would begin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import load as clients
import torch
from figures import figures_of
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from layerskip.analysis.runs import load_runs
from layerskip.api.arguments import law_of
from layerskip.api.loading import Loaded, load
from layerskip.bench.runner import device_clock
from layerskip.cli.main import app
from layerskip.cli.terminal import aligned
from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import optimal_draft_length, speedup
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.files.environment import environment
from layerskip.files.writing import write_text
from layerskip.library import cache_name
from layerskip.model.opened_models import sublayers_of
from layerskip.serving.http import make_app
from layerskip.serving.openai_api import Served
from layerskip.serving.scheduler import Serving
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import common_prefix
from layerskip.timing.cost_tables import cost_tables

CHATS = "--prompts spec-bench --chat --per-category 1"
DRAFTING = "--method plain --method self"
PEERS = f"{DRAFTING} --method generate"
STATIC = "--method plain --method generate --method generate-static --method generate-compiled"
COMMON = {"vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 8192}
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SHAPES = {"1B": (16, 2048, 8192, 32), "3B": (28, 3072, 8192, 24), "8B": (32, 4096, 14336, 32)}
RUNS = {
    "smollm2-gpu": ("smollm2", f"{CHATS} {PEERS} --method generate-prompt-lookup"),
    "smollm2-gpu-sampled": ("smollm2", f"{CHATS} {DRAFTING} --do-sample --temperature 0.8"),
    "smollm2-gpu-static": ("smollm2", f"{CHATS} {STATIC} --limit 3"),
    "demo-llama-gpu": ("demo-llama", f"--per-category 3 {DRAFTING}"),
    "demo-llama-gpu-exit-3": ("demo-llama", f"--per-category 3 {DRAFTING} --exit-layer 3"),
}
"""By name, the model and flags of a run."""
ACCEPTED = (0.7, 0.85, 0.95)
DRAFTS = {"8 bits": SkipConfig.low_precision(8), "4 bits": SkipConfig.low_precision(4)}
TEXT = "The road began behind the last house of the village, and it was"
DRAFTED = 7  # tokens of a draft in gpt-fast's way


class Row(NamedTuple):
    part: str
    case: str
    figure: str
    value: float


class Bench:
    """The parts of the benchmark; each yields rows.

    Args:
        folder: where runs are kept.
    """

    def __init__(self, folder: Path, device: str, tiny: bool) -> None:
        self.folder, self.device, self.tiny = folder, torch.device(device), tiny
        self.dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.now, self.tokens = device_clock(self.device), 8 if tiny else 64

    def loaded(self, name: str) -> Loaded:
        return load("demo-llama" if self.tiny else name, dtype=self.dtype, device=str(self.device))

    def runs(self) -> Iterator[Row]:
        """Runs of `layerskip benchmark`, each in a file of its own beside the record."""
        how = ["--device", str(self.device), "--dtype", self.dtype, "--max-new-tokens", self.tokens]
        how += ["--limit", 1, "--repeats", 1] if self.tiny else ["--repeats", 2]
        for name, (model, flags) in RUNS.items():
            file = self.folder / f"{name}.jsonl"
            file.unlink(missing_ok=True)
            if self.tiny:
                model, flags = "demo-llama", flags.replace(CHATS, "")
            words = ["benchmark", model, *flags.split(), *how, "--quiet", "--output", file]
            if code := app([*map(str, words)], standalone_mode=False):
                raise SystemExit(code)
            found = figures_of(load_runs([file])[0])["figures"]
            for method in (each for each in found if not {*"/:"} & {*each}):
                yield Row("runs", name, f"{method}, tokens/s", found[method][0])
                yield Row("runs", name, f"{method} / plain", found[f"{method}/plain"][0])

    def like_gpt_fast(self) -> Iterator[Row]:
        """A static cache and compiled passes of a fixed width; drafts are copied from the text."""
        loaded = self.loaded("smollm2")
        ids = loaded.inputs(Prompt(id="prompt", text=TEXT))["input_ids"].to(self.device)
        for drafted in (0, DRAFTED):
            step = compiled(loaded.model, self.device.type == "cuda")
            # The same for both texts, as a graph is captured with its addresses.
            room = ids.shape[1] + self.tokens + drafted + 1
            cache, seconds = StaticCache(config=loaded.model.config, max_cache_len=room), [0.0, 0.0]
            for turn in (0, 1):
                start = self.now()
                compiled_loop(loaded.model, step, cache, ids, self.tokens, drafted)
                seconds[turn] = self.now() - start
            case = f"{drafted} looked-up tokens a pass"
            yield Row("gpt-fast's way", case, "tokens/s", self.tokens / seconds[1])
            yield Row("gpt-fast's way", case, "s more in the first call", seconds[0] - seconds[1])

    def shapes(self) -> Iterator[Row]:
        shapes = {"tiny": (4, 64, 128, 4)} if self.tiny else SHAPES
        for name, sizes in shapes.items():
            shape = dict(zip(NAMES, sizes, strict=True)) | COMMON
            heads = {
                "num_key_value_heads": 2 if self.tiny else 8,
                "tie_word_embeddings": name != "8B",
            }
            vocabulary = {"vocab_size": 512} if self.tiny else {}
            with self.device:
                config = LlamaConfig(**shape | heads | vocabulary, dtype=self.dtype)
                model = AutoModelForCausalLM.from_config(config).eval()
            yield from self.shape(name, model)

    @torch.no_grad()
    def shape(self, name: str, model: Any) -> Iterator[Row]:
        opened, part = sublayers_of(model), f"shape of {name}"
        ids = torch.ones(1, 16 if self.tiny else 512, dtype=torch.long, device=self.device)
        asked = Request(
            ids, torch.ones_like(ids), max_new_tokens=64, law=law_of({"do_sample": False})
        )
        decoder = Decoder(opened, [], Fixed(), asked, max_draft_length=0)
        rounds, fed = decoder.rounds(), ids[:, :1]
        for _ in range(8):  # the prompt, and what is done once
            next(rounds)

        def typical(run: Callable[[], Any], count: int = 40) -> float:
            start = self.now()
            for _ in range(count):
                run()
            return 1e3 * (self.now() - start) / count

        token = typical(lambda: next(rounds))
        alone = typical(lambda: decoder.passes.verify(fed, [(0, 0)]))
        yield Row(part, "plain", "ms a token", token)
        yield Row(part, "plain", "ms between passes", token - alone)
        drafts = {"exit at a quarter": SkipConfig.early_exit(opened.num_layers // 4)} | DRAFTS
        seconds = 0.1 if self.tiny else 4.0
        tables = cost_tables(opened, [*drafts.values()], asked, seconds=seconds)
        for tokens in (2, 4, 8, 16):
            yield Row(part, "plain", f"v({tokens})", tables[0].at(ids.shape[1]).verify_cost(tokens))
        for draft, costs in zip(drafts, tables, strict=True):
            table = costs.at(ids.shape[1])
            yield Row(part, draft, "c", table.draft)
            for share in ACCEPTED:
                length = optimal_draft_length(share, table, 15)
                gain = speedup(share, length, table.draft, table.verify_cost)
                yield Row(part, draft, f"x plain, computed for {share} accepted", gain)

    def server(self) -> Iterator[Row]:
        loaded = self.loaded("smollm2")
        if self.tiny:
            loaded.tokenizer.chat_template = "{{ messages[-1].content }}"
        serving = Serving(loaded.model, session_memory=0)
        serving.start()
        words = ["http://server/v1", "--clients", *(["1"] if self.tiny else ["1", "4", "16"])]
        words += ["--max-tokens", str(self.tokens), "--requests", "1" if self.tiny else "16"]
        args, transport = (
            clients.parsed(words),
            httpx.ASGITransport(make_app(serving, Served(loaded))),
        )

        async def levels() -> list[dict[str, Any]]:
            async with httpx.AsyncClient(transport=transport, base_url=args.url) as client:
                return [level async for level in clients.run_levels(args, client)]

        try:
            for level in asyncio.run(levels()):
                case = f"clients: {level['clients']}"
                yield Row("server", case, "tokens/s", level["tokens_per_second"])
        finally:
            serving.stop()

    @property
    def parts(self) -> list[Callable[[], Iterator[Row]]]:
        return [self.runs, self.shapes, self.server, self.like_gpt_fast]


def compiled(model: Any, really: bool) -> Callable[..., Tensor]:
    """A pass over tokens (1, T) at places (1, T), which returns the likeliest next ones, (1, T)."""
    name = str(cache_name(model))

    def step(tokens: Tensor, places: Tensor, cache: StaticCache) -> Tensor:
        past = {name: cache}
        out = model(input_ids=tokens, position_ids=places, use_cache=True, **past)
        likeliest: Tensor = out.logits.argmax(-1)
        return likeliest

    return torch.compile(step, mode="reduce-overhead") if really else step


@torch.no_grad()
def compiled_loop(
    model: Any,
    step: Callable[..., Tensor],
    cache: StaticCache,
    ids: Tensor,
    count: int,
    drafted: int,
) -> list[int]:
    """New tokens of a prompt (1, T), greedy; a pass verifies `drafted` tokens that follow the last
    place in the text with the same two tokens."""

    def rewind(length: int) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    text, width = ids[0].tolist(), ids.shape[1]
    places = torch.arange(width + count + drafted + 1, device=ids.device)[None]  # (1, S)
    rewind(0)
    past: dict[str, Any] = {str(cache_name(model)): cache}
    out = model(input_ids=ids, use_cache=True, **past)
    text.append(int(out.logits[0, -1].argmax()))
    while len(text) < width + count:
        at = len(text) - 1
        ends = (end for end in range(at - 1, 0, -1) if text[end - 1 : end + 1] == text[-2:])
        found = next(ends, at)
        draft = [*text[found + 1 : found + 1 + drafted], *[0] * drafted][:drafted]
        rewind(at)  # drops what was rejected
        fed = torch.tensor([[text[-1], *draft]], device=ids.device)  # (1, 1 + drafted)
        likeliest = step(fed, places[:, at : at + 1 + drafted], cache)[0].tolist()
        text += likeliest[: 1 + common_prefix(draft, likeliest)]
    return text[width : width + count]


def table(rows: Sequence[Row]) -> str:
    lines = [[row.part, row.case, f"{row.value:.3g}", row.figure] for row in rows]
    return aligned([["part", "case", "value", "of"], *lines])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    args = parser.parse_args(words)
    bench, rows, left = Bench(args.output.parent, args.device, args.tiny), list[Row](), list[str]()
    until = time.monotonic() + 60 * args.minutes
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else args.device
    for part in bench.parts:
        if time.monotonic() > until:
            left.append(part.__name__)
        else:
            rows += part()
        record = {"environment": environment(), "device": device, "dtype": bench.dtype}
        record |= {"tiny": args.tiny, "left_out": left, "rows": [row._asdict() for row in rows]}
        write_text(args.output, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    if left:
        print(f"no time for: {', '.join(left)}")


if __name__ == "__main__":
    main()
