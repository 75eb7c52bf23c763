"""Random models of published sizes, with a dial for the acceptance of their early exits.

What a draft gains depends on the values of the weights through its acceptance only, and random
weights may be given any acceptance. The layers behind the first exit are all but silent, except for
the last one, whose strength moves the target's law away from that of every exit alike.
Letters: T positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.model.sublayers import Pass, Sublayers

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Model type and sizes, as in the config.json published with each model, but for the special tokens:
# there are none, so that no text ends early.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (  # meta-llama/Llama-3.2-1B
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LLAMA_3_ROPE, "factor": 32.0},
        },
    ),
    "llama-3.1-8b": (  # meta-llama/Llama-3.1-8B
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "rope_parameters": {**_LLAMA_3_ROPE, "factor": 8.0},
        },
    ),
    "gemma-2-2b": (  # google/gemma-2-2b
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (  # no published model: to try the script out
        "llama",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
}

PERPLEXITY = 20  # of the laws, in the limit of many tokens; a few times that at real sizes
# Strength of a layer that is not to matter: not 0, so that real numbers are moved, and the smallest
# whose distance from 1 bfloat16 can tell.
SILENT = 1 / 256
POSITIONS, DRAWS = 64, 4  # that an acceptance is counted over
CLOSE = 0.01  # to what was asked: less than such a count can tell
STRENGTHS = (-6.0, 6.0)  # of the last layer, powers of 2
HALVINGS = 9


def configuration(shape: str) -> Any:
    """The `transformers` configuration of a shape, without special tokens."""
    kind, sizes = SHAPES[shape]
    nothing = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(kind, **sizes, **nothing)


def random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A model of seeded random weights, written once and in place, whose laws are like real ones.

    Weights are uniform, of variance 1 / inputs, so that every sublayer keeps the scale of its
    input. Embeddings are small beside what the sublayers add, or a tied head would repeat the last
    token for ever. The final norm gives logits the deviation at which V random ones have a law that
    is neither flat nor certain: for large V its entropy is log V - deviation^2 / 2 (Derrida 1981,
    the random energy model).
    """
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    width = config.hidden_size
    gemma = config.model_type.startswith("gemma")  # whose embeddings are scaled by sqrt(width)
    embedding = 1 / width if gemma else width**-0.5
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                deviation = embedding if "embed_tokens" in name else weight.shape[1] ** -0.5
                bound = 3**0.5 * deviation
                weight.uniform_(-bound, bound, generator=generator)
        deviation = math.sqrt(2 * math.log(config.vocab_size / PERPLEXITY))
        head = embedding if config.tie_word_embeddings else width**-0.5
        _scale(model.model.norm, deviation / (head * width**0.5), gemma)
    return model.requires_grad_(False).eval()


def _scale(norm: Any, scale: float, gemma: bool) -> None:
    """Set what a norm multiplies by; Gemma's multiply by 1 + weight."""
    norm.weight.fill_(scale - 1 if gemma else scale)


class Dial:
    """Sets how often the early exits of a random model are accepted, all of them alike.

    A layer's strength is what its norms multiply by: those before its sublayers, or behind them
    where a model has such. These are vectors of one value each, so that weights stay as they are.

    Args:
        model: from `random_model`; it is changed.
        first_exit: exits at this layer and deeper are accepted alike.
        greedy: count equal likeliest tokens, instead of equal draws from shared noise.
    """

    def __init__(self, model: Any, first_exit: int, *, greedy: bool, seed: int) -> None:
        self.opened = Sublayers(model)
        layers = self.opened.num_layers
        if not 1 <= first_exit < layers:
            raise ValueError(f"exits must be in 1..{layers - 1}, got {first_exit}")
        self.gemma = self.opened.config.model_type.startswith("gemma")
        for layer in self.opened.layers[first_exit:-1]:
            self._strength(layer, SILENT)
        device, vocabulary = self.opened.device, self.opened.vocabulary
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (1, POSITIONS), generator=generator)
        cache = self.opened.new_cache(1, POSITIONS)
        cache.place([0], POSITIONS)
        self.step = Pass(self.opened, cache, self.opened.rotary(POSITIONS, POSITIONS))
        self.last = range(2 * layers - 2, 2 * layers)
        hidden = self.opened.embed(tokens.to(device))
        self.hidden = self.opened.run(hidden, self.step, range(2 * layers - 2))  # (1, T, H)
        keys = [] if greedy else [stream_key(seed, draw) for draw in range(DRAWS)]
        places = range(POSITIONS)
        self.noise: list[Tensor | float] = [
            gumbel_noise([key] * POSITIONS, places, vocabulary, device=device) for key in keys
        ] or [0.0]  # (T, V) each
        self.drafted = self._draws(self.hidden)
        self.known: dict[float, float] = {}

    def _strength(self, layer: Any, strength: float) -> None:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        if not self.opened.family.sandwich:
            names = ("input_layernorm", "post_attention_layernorm")
        for name in names:
            _scale(getattr(layer, name), strength, self.gemma)

    def _draws(self, hidden: Tensor) -> Tensor:
        """Tokens drawn after hidden states (1, T, H), (draws, T)."""
        logits = self.opened.logits(hidden)[0].float()  # (T, V)
        return torch.stack([(logits + noise).argmax(-1) for noise in self.noise])

    def set(self, strength: float) -> None:
        """Set the last layer's strength."""
        self._strength(self.opened.layers[-1], strength)

    def acceptance(self, strength: float) -> float:
        """Share of random tokens after which an exit's next token is the target's."""
        if strength not in self.known:
            self.set(strength)
            drawn = self._draws(self.opened.run(self.hidden, self.step, self.last))
            self.known[strength] = float((drawn == self.drafted).double().mean())
        return self.known[strength]

    def find(self, asked: float) -> float:
        """The strength at which acceptance is about what is asked, by bisection."""
        low, high = STRENGTHS
        least, most = self.acceptance(2**high), self.acceptance(2**low)
        if not least <= asked <= most:
            raise ValueError(f"acceptance must be in {least:.2f}..{most:.2f} here, got {asked}")
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = self.acceptance(2**middle)
            if abs(found - asked) <= CLOSE:
                break
            low, high = (middle, high) if found > asked else (low, middle)
        return 2**middle
