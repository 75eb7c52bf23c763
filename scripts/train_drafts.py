"""Train the draft that lies beside a shipped model, and put it there.

    python scripts/train_drafts.py demo-gemma2

What trains and judges is `layerskip train`, which goes on where it was stopped.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import layerskip
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.files.writing import replacing

RECIPES = {"demo-gemma2": ("--rank", "4", "--tokens", "470000", "--threads", "1")}
LARGEST = 12_000_000  # bytes of a draft
WEIGHTS, SKIP = "draft.safetensors", "healed.json"


def put(trained: Path, folder: Path) -> None:
    """Copy a training's draft into a model's folder, and a skip config that names it there."""
    skip, weights = SkipConfig.load(trained / "trained.json"), trained / WEIGHTS
    size = weights.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{weights} has {size} bytes, allowed {LARGEST}")
    with replacing(folder / WEIGHTS) as partial:
        shutil.copyfile(weights, partial)
    assert skip.trained is not None
    placed = replace(skip.trained, weights=str((folder / WEIGHTS).absolute()))
    options = DecodingOptions(lookup=True)
    replace(skip, trained=placed, decoding=options, notes=None).save(folder / SKIP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(RECIPES))
    parser.add_argument("--work", type=Path, default=Path("runs/drafts"))
    args = parser.parse_args()
    trained = args.work / args.name
    command = [sys.executable, "-m", "layerskip", "train", args.name, "--output", str(trained)]
    subprocess.run([*command, *RECIPES[args.name]], check=True)
    put(trained, layerskip.shipped(args.name))


if __name__ == "__main__":
    main()
