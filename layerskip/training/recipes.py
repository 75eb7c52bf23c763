"""Training a model's own early exits, as for the shipped models: states, batches, quality.

**Exit self-distillation** trains the law of an early exit towards the model's own final law, which
is held fixed. This raises the acceptance of drafts directly. The cross-entropy at an exit is added,
as in LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).

Exit E = 1..L means the hidden state after E layers, read through the shared final norm and head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from layerskip.model.sublayers import embed
from layerskip.training.loop import windows_of
from layerskip.training.losses import label_loss, overlap


def call_layer(layer: nn.Module, hidden: Tensor, **inputs: Any) -> Tensor:
    """Run one decoder layer; a top-level function so that a script can compile it once for all."""
    output: Tensor = layer(hidden, **inputs)
    return output


def hidden_states(
    model: Any,
    input_ids: Tensor,
    exits: Sequence[int],
    *,
    run_layer: Callable[..., Tensor] = call_layer,
) -> dict[int, Tensor]:
    """Exit -> hidden states (B, T, D) before the final norm, by one pass of the model's own layers.

    `model` is a Llama, Gemma, Gemma 2 or Gemma 4 causal LM of transformers, used through its own
    modules and left as found; `input_ids` is (B, T) without pads.
    """
    decoder, config = model.model, model.config
    layers = decoder.layers
    hidden = embed(decoder, input_ids)  # (B, T, D)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, T)
    mask_inputs = {
        "config": config,
        "inputs_embeds": hidden[:1],  # masks (1, 1, T, T) that serve any number of rows
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }
    masks = {"full_attention": create_causal_mask(**mask_inputs)}
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    if "sliding_attention" in layer_types:
        masks["sliding_attention"] = create_sliding_window_causal_mask(**mask_inputs)
    gemma4 = config.model_type == "gemma4_text"  # rotary tables per kind, keys shared among layers
    kinds = [(kind,) if gemma4 else () for kind in masks]
    rotary = {
        kind: decoder.rotary_emb(hidden, positions, *named)
        for kind, named in zip(masks, kinds, strict=True)
    }
    per_layer = None  # (B, T, L, P)
    if gemma4 and config.hidden_size_per_layer_input:
        of_tokens = decoder.get_per_layer_inputs(input_ids)
        per_layer = decoder.project_per_layer_inputs(hidden, of_tokens)
    shared: dict[str, tuple[Tensor, Tensor]] = {}  # keys and values of the last layer of a kind

    states = {}
    for index, layer in enumerate(layers[: max(exits)]):
        inputs = {
            "attention_mask": masks[layer_types[index]],
            "position_embeddings": rotary[layer_types[index]],
            "position_ids": positions,
        }
        if gemma4:
            inputs["shared_kv_states"] = shared
            inputs["per_layer_input"] = None if per_layer is None else per_layer[:, :, index]
        hidden = run_layer(layer, hidden, **inputs)
        if index + 1 in exits:
            states[index + 1] = hidden
    return states


def exit_logits(model: Any, hidden: Tensor) -> Tensor:
    """Float32 logits (..., V) of hidden states (..., D): shared final norm, head, final softcap."""
    logits: Tensor = model.lm_head(model.model.norm(hidden)).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def exit_quality(
    model: Any, windows: Tensor, temperatures: Sequence[float] = (1.0, 0.8)
) -> list[dict[str, float]]:
    """The quality of each exit 1..L on `windows` (N, T + 1) of token ids, one dict per exit.

    `loss` in nats per token; `agreement`, the share of positions whose most likely token is the
    final layer's; `overlap@t`, the mean of 1 - TV between the exit's and the final law at
    temperature t, which is the acceptance of one draft token. The final layer has 1 for both.
    """
    exits = range(1, len(model.model.layers) + 1)
    rows: list[dict[str, float]] = [{} for _ in exits]
    for window in windows:
        states = hidden_states(model, window[None, :-1], exits)
        final = exit_logits(model, states[len(exits)])  # (1, T, V)
        for exit_layer, row in zip(exits, rows, strict=True):
            logits = exit_logits(model, states[exit_layer])
            values = {
                "loss": label_loss(logits, window[None, 1:]),
                "agreement": (logits.argmax(-1) == final.argmax(-1)).float().mean(),
            }
            for t in temperatures:
                values[f"overlap@{t:g}"] = overlap(logits, final, t)
            for name, value in values.items():
                row[name] = row.get(name, 0.0) + value.item() / len(windows)
    return rows


def batch_at(tokens: Tensor, step: int, batch_size: int, length: int, seed: int = 0) -> Tensor:
    """Step `step`'s batch (B, T + 1) of windows of `tokens` (N,): each epoch in its own order.

    Windows start at multiples of T and overlap by the one token that is the last label.
    """
    windows = (len(tokens) - 1) // length
    if windows < batch_size:
        raise ValueError(
            f"{len(tokens)} tokens hold {windows} windows of {length}, fewer than one batch of "
            f"{batch_size}; shorten the windows or the batch"
        )
    starts = torch.tensor(windows_of(windows, batch_size, step, seed)) * length  # (B,)
    return tokens[starts[:, None] + torch.arange(length + 1)]
