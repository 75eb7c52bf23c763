"""Check whether this machine still decodes as fast as before: five ratios, with limits in a file.

    python scripts/speed.py demo-llama --threads 1

Each is a ratio of medians that are measured in turn in one process: plain decoding over
`generate()`, and over sweeps of the memory; then, in units of a plain step, a draft step in 8 bits
(c), and passes that verify 4 and 8 tokens (v). Weights are read as `layerskip generate` reads them.
The exit code is 1 if a ratio exceeds its limit in scripts/floors.json, which has limits for each
kind of vector instructions: AVX2 has fewer registers than AVX-512, so its v(8) is far higher.
`--write` sets the limits to the measured values, with 15% of slack.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from layerskip.api.loading import DTYPES, Loaded, load
from layerskip.bench.bandwidth import Sweeps, bytes_read
from layerskip.bench.batches import encode_all, make_batches
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.bench.runner import device_clock, interleaved
from layerskip.config.skips import SkipConfig
from layerskip.files.environment import environment
from layerskip.files.writing import write_text
from layerskip.model.opened_models import sublayers_of
from layerskip.texts.prompts import Prompt
from layerskip.timing.threads import cpu_threads
from layerskip.weights.stored import unpacked_model

LIMITS = Path(__file__).parent / "floors.json"
SPEEDS = ("plain / generate()", "plain / sweeps")
"""Ratios that have a floor; the others are costs, and have a ceiling."""
SLACK = 1.15
PROMPT = Prompt(id="prompt", text="The road began behind the last house of the village, and it was")


def measured(loaded: Loaded, repeats: int, tokens: int) -> dict[str, float]:
    """The five ratios of a model."""
    model, opened = loaded.model, sublayers_of(loaded.model)
    batches, _ = make_batches(encode_all(loaded.tokenizer, [PROMPT], opened.device), [1], 0)
    task, low = Task(tokens), SkipConfig.low_precision(8)
    # The library would unpack stored weights in every product.
    methods: list[Method] = [Peer(unpacked_model(model), task), Engine(model, task)]
    for length in (3, 7):
        how: dict[str, Any] = {"controller": "fixed", "max_draft_length": length}
        methods.append(Engine(model, task, f"draft {length}", low, **how))
    now = device_clock(opened.device)
    sweep, times = Sweeps(opened.device, now), defaultdict[str, list[float]](list)
    for timed in interleaved(methods, batches, repeats=repeats, warmup=1, now=now):
        if timed.repeat < 0:
            continue
        decoded, seconds = timed.decoded, timed.seconds - timed.first
        count = len(decoded.tokens[0]) - decoded.first_tokens[0]
        times[timed.method.name].append(seconds / count)
        if timed.method is methods[1]:
            read = bytes_read(opened, timed.method, timed.batch, decoded)
            times["sweeps"].append((read or 0.0) / count / sweep())
        for each in (decoded.rounds or ())[1:]:
            start, drafted, verified, _ = each.times or (0.0,) * 4
            if each.drafted[0]:
                times["draft"].append((drafted - start) / each.drafted[0])
            times[f"verify {1 + each.drafted[0]}"].append(verified - drafted)
    middle = {name: statistics.median(each) for name, each in times.items()}
    step = middle["verify 1"]
    return {
        "plain / generate()": middle["generate"] / middle["plain"],
        "plain / sweeps": middle["sweeps"] / middle["plain"],
        "c": middle["draft"] / step,
        "v(4)": middle["verify 4"] / step,
        "v(8)": middle["verify 8"] / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-llama", help="as for layerskip")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="set limits to the measurements")
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype)
    loaded.store_halves()
    with cpu_threads(args.threads):
        ratios = measured(loaded, args.repeats, args.new_tokens)
    stored = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    cpu = environment()["cpu"]
    what = f"{args.model} {args.dtype}, --threads {args.threads}, {cpu['instructions']}"
    if args.write:
        limits = {n: r / SLACK if n in SPEEDS else r * SLACK for n, r in ratios.items()}
        rounded = {name: round(limit, 3) for name, limit in limits.items()}
        stored[what] = {"cpu": cpu["model"]} | rounded
        write_text(LIMITS, json.dumps(stored, indent=1) + "\n")
    limits = stored.get(what, {})
    print(f"{what} on {cpu['model']}; limits of {limits.get('cpu', 'nothing')}")
    beyond = False
    for name, ratio in ratios.items():
        limit = limits.get(name)
        bad = limit is not None and (ratio < limit if name in SPEEDS else ratio > limit)
        beyond = beyond or bad
        bound = "at least" if name in SPEEDS else "at most"
        bounded = "-" if limit is None else f"{bound} {limit:.2f}"
        print(f"{name:20} {ratio:6.2f}  {bounded:14} {'BEYOND' if bad else ''}")
    raise SystemExit(beyond)


if __name__ == "__main__":
    main()
