"""Train one of the shipped models; a run that was stopped goes on by itself.

demo-small is not shipped: a second model to draft for demo-llama, the classic way.

python scripts/build_data.py --work runs/train
python scripts/train.py demo-llama --work runs/train
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from layerskip.training import loop
from layerskip.training import recipes as training
from layerskip.training.losses import divergences

TOKENS_PER_STEP = 4096
STEPS = {"demo-llama": 1520, "demo-gemma2": 700, "demo-gemma4": 640, "demo-small": 400}
COOLDOWN = {"demo-llama": 450, "demo-gemma2": 350, "demo-gemma4": 300, "demo-small": 200}
# Further cycles of the learning rate: how long, from what factor.
CYCLES: dict[str, tuple[tuple[int, float], ...]] = {
    "demo-llama": ((400, 0.5), (80, 0.25), (40, 0.2))
}
EXIT, OTHER_EXITS = 3, (2, 4, 2, 8, 2, 4, 2, 14)


def build_model(name: str) -> PreTrainedModel:
    """A model of the named shape with random weights, the same ones each time."""
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    shape = {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        # softmax(q k) as plain matrix products: on a CPU twice as fast in training as the fused one
        "attn_implementation": "eager",
        **tokens,
    }
    torch.manual_seed(0)
    model: PreTrainedModel
    if name == "demo-gemma2":
        config = Gemma2Config(
            num_hidden_layers=16,
            sliding_window=128,
            query_pre_attn_scalar=64,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            **shape,
        )
        model = Gemma2ForCausalLM(config)
    elif name == "demo-gemma4":
        model = Gemma4ForCausalLM(
            Gemma4TextConfig(
                num_hidden_layers=16,
                layer_types=[*["sliding_attention"] * 3, "full_attention"] * 4,
                sliding_window=128,
                global_head_dim=128,
                num_kv_shared_layers=8,
                use_double_wide_mlp=True,
                vocab_size_per_layer_input=2048,
                hidden_size_per_layer_input=16,
                final_logit_softcapping=30.0,
                **shape | {"intermediate_size": 256},
            )
        )
        with torch.no_grad():
            for layer in model.model.layers:
                layer.layer_scalar.fill_(0.9375)  # not 1, so that leaving it out shows
                attention = layer.self_attn
                for norm in (attention.q_norm, getattr(attention, "k_norm", None)):
                    if norm is not None:  # scores are not divided by the root of the width
                        norm.weight.fill_(attention.head_dim**-0.25)
    else:
        layers = 24 if name == "demo-llama" else 2
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, rope_theta=10000.0, **shape))
        with torch.no_grad():  # GPT-2's scaling of what writes to the residual stream
            for layer in model.model.layers:
                for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    module.weight.mul_((2 * len(model.model.layers)) ** -0.5)
    model.generation_config.update(**tokens)
    return model


def build_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=6e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(
    step: int, first: int, cooldown: int, cycles: tuple[tuple[int, float], ...] = ()
) -> float:
    """Learning-rate factor: up in 25 steps, flat, then linear to zero over `cooldown` steps.

    Behind these `first` steps come the cycles, each up in 25 steps to its factor and linear to
    zero. Nothing before the cooldown depends on the number of steps, here or in the losses: a run
    may be resumed with another number of steps until then.
    """
    if step < first:
        return min((step + 1) / 25, 1.0, (first - step) / cooldown)
    done = step - first
    for length, factor in cycles:
        if done < length:
            return factor * min((done + 1) / 25, (length - done) / length)
        done -= length
    return 0.0


def exit_weight(step: int) -> float:
    """What the losses of the early exits count; low while the deep layers learn to copy."""
    turns = ((472, 1.0), (600, 0.1), (755, 0.5), (844, 1.0))
    return next((weight for until, weight in turns if step < until), 2.0)


def make_step_loss(
    model: PreTrainedModel,
    tokens: Tensor,
    name: str,
    first_cycle: int,
    log: dict[str, float],
) -> Callable[[int], Tensor]:
    """The loss of a step as a function of its number; puts the final layer's part into `log`."""
    for layer in model.model.layers:  # Gemma 4 has six kinds, and each is compiled for two lengths
        layer.compile(dynamic=False, recompile_limit=16)
    early_exits = name == "demo-llama"

    def loss_of(
        final: Tensor, early: list[Tensor], labels: Tensor, weights: Tensor, phase: str
    ) -> tuple[Tensor, Tensor]:
        logits = training.exit_logits(model, final)
        loss = final_loss = training.label_loss(logits, labels)
        for hidden, weight in zip(early, weights, strict=False):
            exit_logits = training.exit_logits(model, hidden)
            if phase == "labels":
                loss = loss + weight * training.label_loss(exit_logits, labels)
            elif phase == "distances":
                loss = loss + weight * divergences(exit_logits, logits, 1.0)[0]
            else:
                for temperature in (0.8, 1.0) if phase == "overlap" else (0.8,):
                    kl, tv = divergences(exit_logits, logits, temperature)
                    loss = loss + weight * (kl + tv) / 2
        return loss, final_loss

    compiled_loss = torch.compile(loss_of, dynamic=False)

    def step_loss(step: int) -> Tensor:
        done = step / first_cycle
        length = 256 if done < 0.65 else 512
        # Blocks of 512 whatever the length, so that the order of the data does not depend on it.
        blocks = training.batch_at(tokens, step, TOKENS_PER_STEP // 512, 512)
        rows = torch.cat([blocks[:, i : i + length + 1] for i in range(0, 512, length)])
        exits = [EXIT, OTHER_EXITS[step % len(OTHER_EXITS)]] if early_exits else []
        phase = "labels" if step < 150 else "distances" if done < 0.65 else "overlap"
        weights = torch.tensor([0.7, 0.3]) * exit_weight(step)
        if step >= first_cycle + 72:  # for the exit that is drafted with, and for time
            # the last cycles are for the target
            weight = 4.0 if step < first_cycle + 400 else 0.5 if step < first_cycle + 480 else 0.0
            exits, phase, weights = exits[:1], "exit", torch.tensor([weight])
        last = model.config.num_hidden_layers
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = training.exit_states(model, rows[:, :-1], [*exits, last])
            early = [states[e] for e in exits]
            labels = rows[:, 1:].contiguous()
            loss, final_loss = compiled_loss(states[last], early, labels, weights, phase)
        log["final_loss"] = round(final_loss.item(), 4)
        return loss

    return step_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--steps", type=int, help="default: the shipped model's")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    steps = args.steps or STEPS[args.name]
    folder = args.work / args.name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    tokens = torch.from_numpy(np.load(args.work / "train.npy").astype(np.int64))
    model = build_model(args.name)
    AutoTokenizer.from_pretrained(args.work / "tokenizer").save_pretrained(folder)
    model.config.save_pretrained(folder)
    optimizers = build_optimizers(model)
    last: dict[str, float] = {}
    cycles = CYCLES.get(args.name, ())
    first = steps - sum(length for length, _ in cycles)
    cooldown = min(COOLDOWN[args.name], first // 2)
    step_loss = make_step_loss(model, tokens, args.name, first, last)
    progress = loop.train(
        model,
        optimizers,
        step_loss,
        steps,
        schedule=lambda step, _: schedule(step, first, cooldown, cycles),
        checkpoint=folder / "checkpoint.pt",
    )
    started = time.time()
    mean = 0.0
    with (folder / "log.jsonl").open("a") as log:
        for step, loss, _ in progress:
            mean = loss if mean == 0.0 else 0.95 * mean + 0.05 * loss
            if step % 10 == 0 or step == steps:
                line = {
                    "step": step,
                    "loss": round(mean, 4),
                    **last,
                    "seconds": round(time.time() - started, 1),
                    "cpu_seconds": round(time.process_time(), 1),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
