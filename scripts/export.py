"""Evaluate a trained run and write it as a checkpoint with its card: knows files, trains nothing.

    python scripts/export.py demo-llama --work runs/train --output layerskip/models/demo-llama

The weights are rounded to bfloat16 first and measured as they ship, computing in float32. Without
--output only the measurement is made (and kept in the run's folder, where the card of another run
may look for it); with --no-card only the checkpoint.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from train import STEPS, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip import training


def load_run(folder: Path, name: str) -> tuple[PreTrainedModel, int]:
    """The model of a run's checkpoint, bfloat16-rounded float32 weights, and the steps done."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = build_model(name)
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16).float().eval()
    return model, state["step"]


def measure(model: PreTrainedModel, work: Path, windows: int, length: int = 512) -> list[dict]:
    """Quality of every exit on `windows` windows spread evenly over the held-out tokens."""
    tokens = torch.from_numpy(np.load(work / "heldout.npy").astype(np.int64))
    starts = torch.linspace(0, len(tokens) - length - 1, windows).long()  # (N,)
    return training.exit_quality(model, tokens[starts[:, None] + torch.arange(length + 1)])


def save(model: PreTrainedModel, tokenizer_folder: Path, output: Path, card: str | None) -> None:
    """Write the checkpoint to `output`, whole or not at all, after loading it back."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    shipped = model.to(torch.bfloat16)
    shipped.save_pretrained(partial, max_shard_size="13MB")
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(partial)
    if card is not None:
        (partial / "README.md").write_text(card)
    for shard in partial.glob("*.safetensors"):
        if shard.stat().st_size > 14e6:
            raise ValueError(f"{shard.name} has {shard.stat().st_size} bytes, allowed 14000000")
    loaded = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.bfloat16)
    for key, value in shipped.state_dict().items():
        if not torch.equal(value, loaded.state_dict()[key]):
            raise ValueError(f"{key} is not what was saved")
    partial.chmod(0o755)
    for file in partial.iterdir():  # temporary names are private to their owner, a package is not
        file.chmod(0o644)
    old = output.with_name(f".{output.name}-old")
    if output.exists():
        os.replace(output, old)
    os.replace(partial, output)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-card", action="store_true")
    parser.add_argument("--windows", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.work / args.name
    model, steps = load_run(folder, args.name)
    card = None
    if not args.no_card:
        rows = measure(model, args.work, args.windows)
        result = {"steps": steps, "windows": args.windows, "exits": rows}
        (folder / "evaluation.json").write_text(json.dumps(result, indent=1))
        print(json.dumps(result))
    if args.output:
        save(model, folder, args.output, card)


if __name__ == "__main__":
    main()
