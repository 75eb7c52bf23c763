"""Time layerskip beside llama.cpp on a real checkpoint: knows clocks; knows no way to be faster.

    python scripts/compare_llama_cpp.py smollm2 --threads 1 2 --precision float32 bfloat16

The same weights (llama.cpp's own quantise call widens the checkpoint's GGUF), precision, threads
and prompts, greedy, one row, a fixed number of new tokens. All ways run in one process, prompt by
prompt in turn, so that a slower minute of the machine is everybody's. llama.cpp is called through
llama-cpp-python, with its own greedy sampler. In bfloat16 it keeps activations wider than the
library does, so that texts part earlier.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scale_study import read_bandwidth
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as chatter

from layerskip.checkpoints import Loaded, encode, load, unpadded
from layerskip.cli.terminal import aligned
from layerskip.config import SkipConfig
from layerskip.environment import environment
from layerskip.files.writing import replacing
from layerskip.generation import generate
from layerskip.model.joined import join
from layerskip.prompts import Prompt, read_prompts
from layerskip.shelf import SPEC_BENCH

PACKAGE = "llama-cpp-python==0.3.36"
KINDS = {"float32": ("LLAMA_FTYPE_ALL_F32", "F32"), "bfloat16": ("LLAMA_FTYPE_MOSTLY_BF16", "BF16")}
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Timed:
    """One text and its clock."""

    tokens: list[int]
    prefill: float
    """Seconds to the first token."""
    decode: float
    """Seconds from the first token to the last."""

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (len(self.tokens) - 1) / self.decode

    @property
    def whole_rate(self) -> float:
        """Tokens a second, the prompt's time included."""
        return len(self.tokens) / (self.prefill + self.decode)


Way = Callable[[Tensor, int], Timed]
"""Continues token ids (1, T) by so many tokens."""


class FirstToken(BaseStreamer):
    """Notes when the first new token came."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def through_torch(call: Callable[..., Any], ids: Tensor, count: int) -> Timed:
    """Time a call like `model.generate()`."""
    streamer = FirstToken()
    start = time.perf_counter()
    output = call(
        **unpadded(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        streamer=streamer,
    )
    end = time.perf_counter()
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    return Timed(tokens, streamer.at - start, end - streamer.at)


def ours(model: Any, execution: str, **drafts: Any) -> Callable[..., Any]:
    def call(input_ids: Tensor, **settings: Any) -> Any:
        return generate(model, input_ids, execution=execution, **drafts, **settings)

    return call


def through_llama(llama: Any, ids: Tensor, count: int) -> Timed:
    """Time llama.cpp on token ids (1, T); nothing of the text before is used again."""
    llama.reset()
    times, tokens = [time.perf_counter()], []
    for token in llama.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0):
        times.append(time.perf_counter())
        tokens.append(int(token))
        if len(tokens) == count:
            break
    return Timed(tokens, times[1] - times[0], times[-1] - times[1])


def gguf_of(loaded: Loaded) -> Path:
    """The file that the checkpoint was made from.

    Raises:
        ValueError: there is none beside it, or more than one.
    """
    found = [] if loaded.folder is None else sorted(loaded.folder.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(
            f"there must be one .gguf in the folder of {loaded.name}, got {len(found)}; "
            "`make checkpoints` leaves it there"
        )
    return found[0]


def widened(source: Path, precision: str, folder: Path) -> Path:
    """The GGUF in a wider precision, made where it is not there yet.

    Raises:
        OSError: llama.cpp cannot write it.
    """
    import llama_cpp

    kind, suffix = KINDS[precision]
    output = folder / f"{source.stem}-{suffix}.gguf"
    if not output.exists():
        folder.mkdir(parents=True, exist_ok=True)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, kind)
        params.allow_requantize = True
        with replacing(output) as part:
            if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), params):
                raise OSError(f"llama.cpp cannot widen {source} to {suffix}")
    return output


def open_llama(path: Path, threads: int, context: int, precision: str) -> Any:
    import llama_cpp

    own = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": context, "verbose": False}
    if precision == "float32":  # the keys and values, too, which are half precision otherwise
        own |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(path), **own)


def measured(
    ways: Mapping[str, Way], prompts: Sequence[Tensor], count: int, repeats: int
) -> Iterator[tuple[str, int, Timed]]:
    """Name of the way, number of the prompt and time, for all, each going first in its turn."""
    for way in ways.values():
        way(prompts[0], WARMUP_TOKENS)
    names = list(ways)
    turn = 0
    for _ in range(repeats):
        for number, ids in enumerate(prompts):
            for name in (*names[turn:], *names[:turn]):
                yield name, number, ways[name](ids, count)
            turn = (turn + 1) % len(names)


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((place for place, (own, other) in pairs if own != other), len(tokens))


def table(results: Sequence[tuple[str, int, Timed]], base: str, library: str, weights: int) -> str:
    """Medians and ranges over prompts and repeats; ratios are of the same prompt and repeat.

    GB/s are of `weights`, the bytes that a token reads; of self nobody knows how many.
    """
    by_name: dict[str, list[Timed]] = {}
    for name, _, timed in results:
        by_name.setdefault(name, []).append(timed)
    rows = [
        ["", "tok/s", "(range)", "with prompt", "GB/s", f"x {base}", "(range)", f"like {library}"]
    ]
    for name, own in by_name.items():
        rates = [timed.rate for timed in own]
        ratios = [a.rate / b.rate for a, b in zip(own, by_name[base], strict=True)]
        alike = sum(common(a.tokens, b.tokens) for a, b in zip(own, by_name[library], strict=True))
        total = sum(len(timed.tokens) for timed in own)
        rows.append(
            [
                name,
                f"{statistics.median(rates):.1f}",
                f"({min(rates):.1f}-{max(rates):.1f})",
                f"{statistics.median(timed.whole_rate for timed in own):.1f}",
                "-" if name == "self" else f"{statistics.median(rates) * weights / 1e9:.1f}",
                f"{statistics.median(ratios):.2f}",
                f"({min(ratios):.2f}-{max(ratios):.2f})",
                f"{alike}/{total}",
            ]
        )
    return aligned(rows)


def given_prompts(path: Path, count: int, chat: bool) -> list[Prompt]:
    """So many prompts of a file, far apart."""
    found = read_prompts(path)
    count = min(count, len(found))
    chosen = [found[place * len(found) // count] for place in range(count)]
    return [prompt.as_chat() if chat else prompt for prompt in chosen]


def compare(args: argparse.Namespace) -> None:
    for precision in args.precision:
        loaded = load(args.model, dtype=precision, device="cpu")
        model = loaded.model
        join(model)  # as the commands do with a model of their own
        chat = bool(loaded.tokenizer.chat_template)
        chosen = given_prompts(args.prompts, args.count, chat)
        prompts = [encode(loaded.tokenizer, prompt) for prompt in chosen]
        context = max(ids.shape[1] for ids in prompts) + args.tokens
        wide = widened(gguf_of(loaded), precision, args.work)
        skip = None if args.skip is None else SkipConfig.load(args.skip)
        weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
        read = partial(read_bandwidth, torch.device("cpu"))
        for threads in args.threads:
            torch.set_num_threads(threads)
            before = read()
            llama = open_llama(wide, threads, context, precision)
            ways: dict[str, Way] = {
                "llama.cpp": partial(through_llama, llama),
                "generate()": partial(through_torch, model.generate),
                "plain": partial(through_torch, ours(model, args.execution, enabled=False)),
            }
            ways["self"] = partial(through_torch, ours(model, args.execution, skip=skip))
            results = []
            for name, number, timed in measured(ways, prompts, args.tokens, args.repeats):
                results.append((name, number, timed))
                if sys.stderr.isatty():
                    done = f"{name}, prompt {number + 1} of {len(prompts)}"
                    print(f"\r\033[K{precision}, {done}", end="", file=sys.stderr, flush=True)
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
            llama.close()
            words = f"{threads} thread{'s' if threads > 1 else ''}, {args.execution} execution"
            reads = f"a sum reads {before / 1e9:.1f} GB/s before, {read() / 1e9:.1f} after"
            print(f"{loaded.name}, {precision}, {words}; {reads}")
            print(table(results, "llama.cpp", "generate()", weights) + "\n", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="of make checkpoints")
    parser.add_argument("--precision", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--execution", default="auto", help="of plain and self")
    parser.add_argument(
        "--skip", type=Path, help="of self, which drafts as without any set-up otherwise"
    )
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH, help="Spec-Bench otherwise")
    parser.add_argument("--count", type=int, default=6, help="prompts taken")
    parser.add_argument("--tokens", type=int, default=96, help="new ones of every text")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/llama-cpp"), help="for wide GGUFs")
    args = parser.parse_args(argv)
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    cpu = environment()["cpu"]
    try:
        if importlib.util.find_spec("llama_cpp") is None:
            raise ValueError(
                f"llama.cpp is not installed: `pip install {PACKAGE}` compiles it, in minutes"
            )
        print(f"{cpu['model']}, {cpu['cores']} cores, {cpu['instructions']}; {PACKAGE}")
        print(f"{args.count} prompts, {args.tokens} new tokens each, greedy, batch 1\n")
        compare(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"compare_llama_cpp: error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
