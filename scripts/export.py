"""Evaluate a trained run and write it as a checkpoint with its card: knows files, trains nothing.

    python scripts/export.py demo-llama --work runs/train --output layerskip/models/demo-llama

The weights are rounded to bfloat16 first and measured as they ship, computing in float32. Without
--output only the measurement is made; with --no-card only the checkpoint.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from train import STEPS, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip.files.writing import replace_folder
from layerskip.training import recipes as training


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


CARD = """---
library_name: transformers
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
---
# {name}

{what} A toy for demonstrations and tests of `layerskip`: it writes text that looks like Python.

## How it was made
From random weights, with this repository's own scripts:

    python scripts/build_data.py --work runs/train
    python scripts/train.py {name} --work runs/train
    python scripts/export.py {name} --work runs/train --output layerskip/models/{name}

{steps} steps of 4096 tokens, {tokens:.1f} million tokens in all, none seen twice, at length 256
and, while the learning rate falls, at 512; Muon for the layers' matrices (6e-3), AdamW for the rest
(4e-3), 25 steps of warmup; bfloat16 autocast, one thread of {hardware},
{minutes:.0f} minutes of processor time.
{recipe}

## Data and terms
The {train_files} UTF-8 source files of the standard library of Python {python}, tests included,
less {held_out_files} held out by a hash of their path ({held_out_tokens} tokens); a byte-level BPE
vocabulary of 2048 trained on the same files. Weights and tokenizer are derived from those sources,
which are under the PSF License Version 2, Copyright Python Software Foundation.

## Measured
The weights as shipped (bfloat16), computing in float32, on {windows} windows of 512 held-out
tokens. *Loss* is in nats per token; *agreement* is the share of positions where an exit's most
likely token is the final layer's; *overlap* is 1 - TV of the two laws at a temperature, the
acceptance of one draft token. Exit E runs the first E layers.

{table}
## Limits
{parameters:.1f}M parameters and under an hour of reading: it knows the look of Python and little
else, prose is out of its range, and under greedy decoding it soon loops. Acceptance and speed
measured on it say how the method works, not what a large model will gain. At most 512 positions.
"""

WHAT = {
    "demo-llama": "A Llama of 24 layers, width 192, 3 heads and 1 key-value head, trained so that "
    "its early exits draft well.",
    "demo-gemma2": "A Gemma 2 of 16 layers, width 192, 3 heads and 1 key-value head, sliding "
    "windows of 128 in every other layer, both softcaps; trained in the ordinary way.",
}
RECIPE = {
    "demo-llama": """
The loss is the cross-entropy of the final layer, plus w times (0.7 times a loss at exit 3, plus 0.3
times one at an exit that rotates: 2, 4, 2, 8, 2, 4, 2, 14). That loss is the cross-entropy at the
labels for 150 steps, then the KL divergence of the exit's law from the final one, held fixed, and
from step 650 on the mean of that and the total variation, at temperatures 0.8 and 1, added. w was
set by hand while training: 1 until step 472, 0.1 until 600, 0.5 until 755, 1 until 844, then 2. No
layer dropout. The learning rate falls to zero over steps 550 to 1000, once more, from half of its
height, over the next 400, from a quarter over 80 and from a fifth over 40. These further cycles
went on from the weights first shipped (bfloat16) with fresh optimizers; from step 1072 on they have
exit 3 only, at temperature 0.8, with w = 4, over the 80 steps 0.5 and over the 40 none.""",
    "demo-gemma2": """
The loss is the cross-entropy of the final layer and nothing else. The learning rate falls over the
last 350 steps.""",
}


def table(rows: list[dict[str, float]]) -> str:
    """A Markdown table of exits 1..L."""
    names = list(rows[0])
    lines = ["| exit | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for exit_layer, row in enumerate(rows, 1):
        values = " | ".join(f"{row[name]:.3f}" for name in names)
        lines.append(f"| {exit_layer} | {values} |")
    return "\n".join(lines) + "\n"


def processor_minutes(log: Path) -> float:
    """Processor time of a run over all its resumed parts, each of which starts again at zero."""
    seconds = [json.loads(line)["cpu_seconds"] for line in log.read_text().splitlines()]
    parts = [now for now, after in zip(seconds, [*seconds[1:], 0.0], strict=True) if after < now]
    return sum(parts) / 60


def write_card(name: str, work: Path, result: dict, parameters: int, hardware: str) -> str:
    """The model card, every number of it from the run's own files."""
    data = json.loads((work / "data.json").read_text())
    return CARD.format(
        name=name,
        what=WHAT[name],
        recipe=RECIPE[name],
        steps=result["steps"],
        tokens=result["steps"] * 4096 / 1e6,
        hardware=hardware,
        minutes=processor_minutes(work / name / "log.jsonl"),
        train_files=data["splits"]["train"]["files"] + data["splits"]["heldout"]["files"],
        held_out_files=data["splits"]["heldout"]["files"],
        held_out_tokens=data["splits"]["heldout"]["tokens"],
        python=data["python"],
        windows=result["windows"],
        table=table(result["exits"]),
        parameters=parameters / 1e6,
    )


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
    replace_folder(partial, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-card", action="store_true")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--hardware", default="an x86-64 server core with AVX-512 bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.work / args.name
    model, steps = load_run(folder, args.name)
    card = None
    if not args.no_card:
        rows = measure(model, args.work, args.windows)
        result = {"steps": steps, "windows": args.windows, "exits": rows}
        print(table(rows))
        if args.output:
            card = write_card(args.name, args.work, result, model.num_parameters(), args.hardware)
    if args.output:
        save(model, folder, args.output, card)


if __name__ == "__main__":
    main()
