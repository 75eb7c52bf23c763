"""Trains an EAGLE-3 head: a new one, or an existing one further (see `layerskip.model.eagle_head`).

The target is frozen. From every place the head drafts a few tokens. Each step gets the text's token
and the head's own state of the previous step, and sees the text before the place by its states in
the first step, as in decoding. Its distributions are brought closer to the target's.
Shapes: B texts, T tokens of one, S steps, P = T - S places, H the target's width, N depths, D
tokens that the head drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from layerskip.decoding.sources.eagle import EagleHead
from layerskip.model.draft_modules import AHEAD
from layerskip.model.eagle_head import Eagle, load_eagle, save_eagle
from layerskip.model.opened_model import OpenedModel
from layerskip.training.assistant_training import AssistantTraining, TargetReading, draft_steps
from layerskip.training.losses import Step


def new_head(target: OpenedModel, tokens: Tensor) -> Eagle:
    """Make a head for a target that drafts these of its tokens, (D,), with one random layer.

    At first it passes the deepest states that it reads on to the target's own norm and head.
    """
    config, layers, model = target.config, target.num_layers, target.model
    usual = [2, layers // 2, layers - 3]  # distinct for at least eight layers
    depths = usual if layers >= 8 else sorted({1, (layers + 1) // 2, layers})
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    width, heads = config.hidden_size, config.num_attention_heads
    shape = {
        "model_type": "llama",
        "vocab_size": target.vocabulary,
        "hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.get("rope_theta", 10_000.0),
    }
    verifier = {
        "name_or_path": getattr(model, "name_or_path", None) or None,
        "architectures": [type(model).__name__],
    }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": AHEAD,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    head = Eagle(
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "draft_vocab_size": len(tokens),
            "norm_before_residual": False,
            "target_hidden_size": width,
            "eagle_aux_hidden_state_layer_ids": depths,
            "tie_word_embeddings": False,
            "transformer_layer_config": shape,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": verifier,
            },
        }
    )
    head.to_empty(device=target.device)
    tokens = tokens.to(target.device)
    generator = torch.Generator().manual_seed(0)
    one = torch.ones(1, 1, width, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        for weight in head.parameters():
            random = torch.randn(weight.shape, generator=generator) / width**0.5
            weight.copy_(random if weight.dim() > 1 else torch.ones(()))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            nn.init.zeros_(head.layers[0].get_submodule(name).weight)  # type: ignore[arg-type]
        nn.init.zeros_(head.fc.weight)[:, -width:].fill_diagonal_(1.0)
        head.norm.weight.copy_(target.decoder.norm(one)[0, 0])  # includes Gemma's added 1
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        head.lm_head.weight.copy_(target.unembedding.weight[tokens])
        head.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
    return head.to(target.dtype)


@torch.no_grad()
def read(target: OpenedModel, head: Eagle, ids: Tensor) -> TargetReading:
    """Run a target once over texts (B, T): states (B, T, N H), and logits of D tokens."""
    with torch.autocast(ids.device.type, enabled=False):
        hidden, step = target.first_pass(ids)
        depths, states, done = head.depths_in(target.num_layers), {}, 0
        for depth in sorted({*depths}):
            hidden = states[depth] = target.run(hidden, step, range(2 * done, 2 * depth))
            done = depth
        hidden = target.run(hidden, step, range(2 * done, target.num_sublayers))
        logits = target.logits(hidden)[..., head.tokens].float()
        joined = torch.cat([states[depth] for depth in depths], -1)
        embedding = head.embed_tokens or target.model.get_input_embeddings()
        return TargetReading(F.embedding(ids, embedding.weight), joined, logits, {})


def unrolled(head: Eagle, reading: TargetReading, output: Tensor, steps: int) -> list[Tensor]:
    """Logits (B, P, D) of each step; those of step s and place t are for token t + s + 2.

    Args:
        output: weight of the output head, (D, W).
    """
    count = reading.embedded.shape[1] - steps
    state = head.join(reading.states[:, :count].to(head.dtype))  # (B, P, W)
    device, found = state.device, []
    seen = torch.ones(count, count, dtype=torch.bool, device=device).tril()  # (P, P)
    own, places = torch.eye(count, dtype=torch.bool, device=device), torch.arange(count)
    cache: Any = DynamicCache()
    for step in range(steps):
        embedded = reading.embedded[:, step + 1 : step + 1 + count].to(head.dtype)
        where = (places + step).to(device)[None]
        state = head(embedded, state, where, seen[None, None], cache)
        found.append(F.linear(head.normed(state), output).float())
        seen = torch.cat([seen, own], 1)  # (P, (s + 2) P): adds its own earlier steps
    return found


class EagleTraining(AssistantTraining):
    """Trains an EAGLE-3 head; the output head and embeddings stay unchanged.

    Args:
        start: a head to train further; None: a new one, for the texts' most frequent tokens.
    """

    kind = "eagle3"

    def check(self, opened: OpenedModel) -> None:
        EagleHead(opened, self._begun(opened, torch.arange(1)))

    def _begun(self, opened: OpenedModel, tokens: Tensor) -> Eagle:
        if self.start is None:
            return new_head(opened, tokens)
        return load_eagle(self.start, dtype=opened.dtype).to(opened.device)

    def initial(self, windows: Tensor) -> Eagle:
        head = self._begun(self.opened, self.frequent(windows))
        for name, weight in head.named_parameters():
            weight.requires_grad_(not name.startswith(("embed_tokens", "lm_head")))
        return head

    def steps_on(self, assistant: Eagle, ids: Tensor) -> list[Step]:
        reading = read(self.opened, assistant, ids)
        output = (assistant.lm_head or self.opened.unembedding).weight.to(assistant.dtype)
        return draft_steps(unrolled(assistant, reading, output, AHEAD), reading)

    def save(self, assistant: Any, folder: Path) -> None:
        save_eagle(assistant, folder)
