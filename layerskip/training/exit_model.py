"""Early exits in training: LayerSkip's recipe (Elhoushi et al. 2024, arXiv 2404.16710), and
alternatively self-distillation.

Exit E = 1..L is the hidden state after E layers, read through the shared final norm and head; exit
L is the model itself. The recipe drops layers at random, deep ones more often, and adds the losses
of early exits to the final one.
Shapes: B windows, T tokens of one, H hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from layerskip.backends.base import logit_transform
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.families.architecture import Architecture
from layerskip.training.losses import overlap

ROTATION = 8
"""One of this many exits is trained per step of the rotational curriculum, in turn."""
SCALE = 0.1
"""Weight of early exits relative to the final layer (e_scale in the paper)."""


def drop_rates(layers: int, rate: float) -> list[float]:
    """How often each layer is dropped: from 0 at the first, growing exponentially to `rate`."""
    return [rate * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]


def kept_layers(layers: int, rate: float, rows: int, seed: int, step: int) -> Tensor:
    """The layers that run for each window of a step, (L, B) bool; deterministic."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    drawn = torch.rand(layers, rows, generator=generator)
    return drawn >= torch.tensor(drop_rates(layers, rate))[:, None]


def enabled(exits: Sequence[int], curriculum: str, step: int, share: float) -> list[int]:
    """The early exits (ascending) to train in a step, when a share of the training is done.

    "rotational": every R-th in turn, where R is `ROTATION`, or the number of exits if smaller;
    "gradual": from the deepest on, all of them from the middle of the training on; "all".
    """
    count = len(exits)
    if curriculum == "rotational":
        turn = min(ROTATION, count)
        return [each for place, each in enumerate(exits) if place % turn == step % turn]
    if curriculum == "gradual":
        return list(exits[count - min(count, 1 + int(2 * share * count)) :])
    return list(exits)


def exit_weights(exits: Sequence[int], layers: int, *, final: bool) -> dict[int, float]:
    """The weights of the exits' losses, which sum to 1; including the final layer with `final`.

    As in the paper, with layers numbered from 0: exit E, after layer E - 1, counts SCALE times the
    sum of 0..E - 1, and the final layer L - 1 plus SCALE times the sum of 0..L - 2. The paper gives
    exit 1 no weight; here it has that of exit 2.
    """
    raw = {each: SCALE * max(1, each * (each - 1) / 2) for each in exits}
    if final:
        raw[layers] = layers - 1 + SCALE * (layers - 2) * (layers - 1) / 2
    total = sum(raw.values())
    return {each: weight / total for each, weight in raw.items()}


class ExitModel(nn.Module):
    """A causal language model whose forward pass returns the logits of several exits.

    Args:
        model: of an opened family. It is called by the library's own forward pass.

    Raises:
        UnsupportedModelError: its layers are not known.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.known = model, Architecture(model)
        self.finish = logit_transform(self.known)

    def forward(
        self, ids: Tensor, exits: Sequence[int], kept: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Float32 logits (B, T, V) of each exit for token ids (B, T).

        Args:
            kept: layers that run for each window, (L, B) bool; the others pass their input on.
        """
        known, decoder = self.known, self.known.decoder
        states: dict[int, Tensor] = {}
        with self._recording(states, exits, kept):
            final = decoder(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H), normed
        logits = {}
        for each in exits:
            hidden = final if each == known.num_layers else decoder.norm(states[each])
            out = known.unembedding(hidden)
            logits[each] = (out if self.finish is None else self.finish(out)).float()
        return logits

    @contextmanager
    def _recording(
        self, states: dict[int, Tensor], exits: Sequence[int], kept: Tensor | None
    ) -> Iterator[None]:
        """A context in which layers are dropped as `kept` says, and states at exits recorded."""

        def hook(number: int) -> Any:
            def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
                hidden: Tensor = args[0] if args else kwargs["hidden_states"]  # (B, T, H)
                if kept is not None:
                    out = torch.where(kept[number][:, None, None].to(out.device), out, hidden)
                if number + 1 in exits:
                    states[number + 1] = out
                return out

            return after

        hooks = [
            layer.register_forward_hook(hook(number), with_kwargs=True)
            for number, layer in enumerate(self.known.layers)
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()


def random_model(config: Path | None, like: Any, seed: int) -> Any:
    """A model with random weights in float32, with the shape in a file or of another model, and on
    its device.

    Raises:
        ValueError: the file does not contain the configuration of a causal language model, or its
            vocabulary differs.
    """
    shape = like.config
    if config is not None:
        try:
            shape = AutoConfig.from_pretrained(config)
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {config} is not a configuration: {error}") from error
        if shape.vocab_size != like.config.vocab_size:
            raise ValueError(
                f"--config {config} has {shape.vocab_size} tokens, the tokenizer of this model has "
                f"{like.config.vocab_size}; name a model with the same tokenizer"
            )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(like.device).eval()
    model.generation_config = like.generation_config
    return model


@torch.no_grad()
def exit_table(
    model: nn.Module, windows: Tensor, exits: Sequence[int], temperature: float
) -> list[dict[str, float]]:
    """The quality of exits on `windows` (N, T + 1) of token ids, with the final layer's last.

    `loss` in nats per token; `agreement`, the share of places with the same likeliest token as the
    final layer; at the temperature `accepted`, the share where shared noise draws the same token
    from both, and `overlap`, 1 - TV, the same for the rejection rule.
    """
    last = exits[-1]
    columns: dict[int, dict[str, list[float]]] = {each: {} for each in exits}
    for number, window in enumerate(windows):
        logits = model(window[None, :-1], exits)
        labels = window[1:]  # (T,)
        keys = [stream_key(number)] * len(labels)
        noise = gumbel_noise(keys, range(len(labels)), logits[last].shape[-1], device=labels.device)
        final = logits[last][0]  # (T, V)
        drawn = (final / temperature + noise).argmax(-1)
        for each, column in columns.items():
            mine = logits[each][0]
            values = {
                "loss": nn.functional.cross_entropy(mine, labels),
                "agreement": (mine.argmax(-1) == final.argmax(-1)).float().mean(),
                "accepted": ((mine / temperature + noise).argmax(-1) == drawn).float().mean(),
                "overlap": overlap(mine, final, temperature),
            }
            for name, value in values.items():
                column.setdefault(name, []).append(value.item())
    return [
        {"exit": each, **{name: fmean(values) for name, values in column.items()}}
        for each, column in columns.items()
    ]
