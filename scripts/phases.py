"""Print the time of the phases in a native decoding pass: milliseconds, share, bandwidth.

    LAYERSKIP_STAMPS=1 python scripts/phases.py CHECKPOINT --dtype bfloat16 --threads 2

Milliseconds of a phase are means over all threads; whole passes and memory reads are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from layerskip.checkpoints import load
from layerskip.decoding.passes import Passes
from layerskip.model.extension import stamps
from layerskip.model.opening import sublayers_of
from layerskip.timing.bandwidth import Sweeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--passes", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    show(load(args.checkpoint, dtype=args.dtype).model, args.context, args.passes)


def show(model: torch.nn.Module, context: int, passes: int) -> None:
    """Decode tokens at a context length and print the phases."""
    opened = sublayers_of(model, "native")
    prompt = torch.arange(context) % opened.model.vocab_size + 1  # (context,)
    batch = Passes(opened, [], [prompt], max_new_tokens=passes + 8, max_draft_length=1)
    batch.prefill()
    sweeps, times, reads = Sweeps(torch.device("cpu"), time.perf_counter), [], []
    token = torch.zeros(1, 1, dtype=torch.long)  # (R, T)
    for number in range(passes + 8):
        if number == 8:
            stamps()
        if number % 10 == 0:
            reads.append(sweeps())
        start = time.perf_counter()
        batch.verify(token, [(0, 0)])
        times.append(time.perf_counter() - start)
    taken, threads, whole = stamps(), torch.get_num_threads(), statistics.median(times[8:])
    read = sum(count for _, count in taken.values()) / passes
    print(f"pass {whole * 1e3:.2f} ms, {read / whole / 1e9:.1f} GB/s of weights", end="")
    print(f" = {read / whole / statistics.median(reads):.2f} of the sweeps' bandwidth")
    total, each = sum(seconds for seconds, _ in taken.values()), 1e3 / passes / threads
    for phase, (seconds, count) in sorted(taken.items(), key=lambda item: -item[1][0]):
        if seconds:
            speed = f"{count / seconds * threads / 1e9:8.1f}" if count else ""
            print(f"{phase:10} {seconds * each:8.3f} ms {seconds / total:6.1%} {speed}")


if __name__ == "__main__":
    main()
