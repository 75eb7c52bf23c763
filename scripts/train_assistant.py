"""Train an official assistant of Gemma 4 for a shipped model; a stopped run goes on by itself.

python scripts/train_assistant.py demo-gemma4 --output layerskip/models/demo-gemma4-assistant

Half of what it reads is the data, half the target's own texts, which are drawn first.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from train import build_optimizers
from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from layerskip.files.writing import replacing
from layerskip.model.assistants import build_assistant
from layerskip.model.sublayers import Sublayers
from layerskip.training import assistants, loop
from layerskip.training.recipes import batch_at

LENGTH, ROWS, AHEAD = 256, 16, assistants.AHEAD
PROMPT, DRAWN = 32, 64  # tokens of a text that are given, and texts drawn together
TEMPERATURE = 0.8
SHAPE = {"hidden": 64, "intermediate": 192, "heads": 2}


@torch.no_grad()
def draw_texts(target: PreTrainedModel, tokens: Tensor, folder: Path, count: int) -> Tensor:
    """The target's own texts (N, LENGTH + 1) in `folder`; batches that are there are kept."""
    folder.mkdir(exist_ok=True)
    texts = []
    for number in range(count):
        path = folder / f"{number:03}.npy"
        if not path.exists():
            torch.manual_seed(number)
            starts = batch_at(tokens, number, DRAWN, LENGTH, seed=1)[:, :PROMPT]
            new = LENGTH + 1 - PROMPT
            ids = target.generate(
                starts,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                eos_token_id=None,  # behind the end of a text begins the next one
                min_new_tokens=new,
                max_new_tokens=new,
            )
            with replacing(path) as partial, partial.open("wb") as file:
                np.save(file, ids.numpy().astype(np.uint16))
            print(json.dumps({"texts": (number + 1) * DRAWN}), flush=True)
        texts.append(torch.from_numpy(np.load(path).astype(np.int64)))
    return torch.cat(texts)


def measure(assistant: PreTrainedModel, target: Sublayers, held_out: Tensor) -> list[float]:
    """Mean overlap of each step on held-out windows (N, T)."""
    found = []
    for window in held_out.split(4):
        reading = assistants.read(target, window)
        drafted = assistants.unrolled(assistant, reading, AHEAD)
        found.append(assistants.overlaps(drafted, reading, TEMPERATURE))
    return [round(sum(step) / len(found), 4) for step in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["demo-gemma4"])
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--texts", type=int, default=12, help=f"batches of {DRAWN} own texts")
    parser.add_argument("--output", type=Path, help="of the checkpoint; none is written without")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.work / f"{args.name}-assistant"
    folder.mkdir(parents=True, exist_ok=True)
    shipped = layerskip.shipped(args.name)
    target = AutoModelForCausalLM.from_pretrained(
        shipped, dtype=torch.float32, attn_implementation="eager"
    )
    target.requires_grad_(False)
    opened = Sublayers(target, "modules")
    tokens, apart = (
        torch.from_numpy(np.load(args.work / f"{split}.npy").astype(np.int64))
        for split in ("train", "heldout")
    )
    own = draw_texts(target, tokens, folder / "texts", args.texts)
    torch.manual_seed(0)
    config = assistants.assistant_config(target.config, **SHAPE)
    config._attn_implementation = "eager"
    assistant = build_assistant(config)
    assistant.generation_config.num_assistant_tokens = AHEAD
    with torch.no_grad():
        for layer in assistant.model.layers:  # scores are not divided by the root of the width
            layer.self_attn.q_norm.weight.fill_(layer.self_attn.head_dim**-0.25)
    distance = torch.compile(assistants.distance, dynamic=False)

    def step_loss(step: int) -> Tensor:
        drawn = own[loop.windows_of(len(own), ROWS // 2, step, 0)]
        ids = torch.cat([batch_at(tokens, step, ROWS // 2, LENGTH), drawn])  # (B, T)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reading = assistants.read(opened, ids)
            drafted = assistants.unrolled(assistant, reading, AHEAD)
        loss: Tensor = distance(drafted, reading, TEMPERATURE)
        return loss

    progress = loop.train(
        assistant,
        build_optimizers(assistant),
        step_loss,
        args.steps,
        schedule=loop.schedule,
        checkpoint=folder / "checkpoint.pt",
    )
    started = time.time()
    for step, loss, _ in progress:
        if step % 10 == 0 or step == args.steps:
            seconds = round(time.time() - started, 1)
            print(
                json.dumps({"step": step, "loss": round(loss, 4), "seconds": seconds}), flush=True
            )
    held_out = batch_at(apart, 0, 32, LENGTH)
    assistant = assistant.to(torch.bfloat16)
    if args.output:
        assistants.save_assistant(assistant, args.output)
    print(json.dumps({"overlaps": measure(assistant.float(), opened, held_out)}))


if __name__ == "__main__":
    main()
