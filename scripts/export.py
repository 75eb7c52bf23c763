"""Evaluate a model that `train.py` trained, and write it as a checkpoint.

    python scripts/export.py demo-llama --work runs/train --output layerskip/models/demo-llama

The weights are rounded to bfloat16 first, and measured computing in float32. What is printed is the
table of the model card (`README.md`), which is written by hand and stays.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from train import STEPS, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip.files.writing import replace_folder
from layerskip.training import recipes as training

BY_HAND = ("README.md", "layerskip.json")
LARGEST = 14_000_000  # bytes of a file
LENGTH = 512  # tokens of a window


def load_run(folder: Path, name: str) -> PreTrainedModel:
    """The model of a run's checkpoint, with bfloat16-rounded float32 weights."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = build_model(name)
    model.load_state_dict(state["model"])
    return model.to(torch.bfloat16).float().eval()


def quality_table(model: PreTrainedModel, work: Path, windows: int) -> str:
    """A Markdown table of every exit's quality on windows spread over the held-out tokens."""
    tokens = torch.from_numpy(np.load(work / "heldout.npy").astype(np.int64))
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, windows).long()  # (N,)
    rows = training.exit_quality(model, tokens[starts[:, None] + torch.arange(LENGTH + 1)])
    lines = ["| exit | " + " | ".join(rows[0]) + " |", "|---" * (len(rows[0]) + 1) + "|"]
    for exit_layer, row in enumerate(rows, 1):
        values = " | ".join(f"{value:.3f}" for value in row.values())
        lines.append(f"| {exit_layer} | {values} |")
    return "\n".join(lines)


def save(model: PreTrainedModel, tokenizer_folder: Path, output: Path) -> None:
    """Write the checkpoint to `output`, whole or not at all, after loading it back."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    shipped = model.to(torch.bfloat16)
    shipped.save_pretrained(partial, max_shard_size="13MB")
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(partial)
    for shard in partial.glob("*.safetensors"):
        if shard.stat().st_size > LARGEST:
            raise ValueError(f"{shard.name} has {shard.stat().st_size} bytes, allowed {LARGEST}")
    loaded = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.bfloat16)
    for key, value in shipped.state_dict().items():
        if not torch.equal(value, loaded.state_dict()[key]):
            raise ValueError(f"{key} is not what was saved")
    for name in BY_HAND:
        if (output / name).exists():
            shutil.copy(output / name, partial / name)
    partial.chmod(0o755)
    for file in partial.iterdir():  # temporary names are private to their owner, a package is not
        file.chmod(0o644)
    replace_folder(partial, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--output", type=Path, help="only the table is made without")
    parser.add_argument("--windows", type=int, default=64, help="of held-out tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.work / args.name
    model = load_run(folder, args.name)
    print(quality_table(model, args.work, args.windows))
    if args.output:
        save(model, folder, args.output)


if __name__ == "__main__":
    main()
