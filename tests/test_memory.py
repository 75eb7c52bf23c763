"""Memory of decoding beside the model and its cache, in bytes, at realistic proportions."""

import weakref

import pytest
import torch
from marks import thorough
from models import prompt, seated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

from layerskip import SkipConfig, generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import SIGNALS
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.rounds import DraftedTokens
from layerskip.decoding.rules import rule_of

# Llama-3.2-1B with an eighth of its width and lengths and a 64th of its vocabulary. Weights, cache,
# activations and logits are then a 64th of theirs.
PROMPT, NEW_TOKENS = 2048 // 8, 128 // 8


class Held(TorchDispatchMode):
    """Bytes of the model's storages, and of those that operations have made, while they live."""

    def __init__(self, model):
        super().__init__()
        self.live = {}
        self.now = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor.untyped_storage())
        self.model = self.peak = self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _note(self, storage):
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.now -= self.live.pop(key)


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=128256 // 64,
        hidden_size=2048 // 8,
        intermediate_size=8192 // 8,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def _to_scale(sizes, monkeypatch):
    sizes(chunk=lambda *_: 512 // 8)
    monkeypatch.setattr("layerskip.decoding.noise.BLOCK", 2**18 // 64)


def cache_bytes(model, tokens):
    config = model.config
    return tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def overhead(model, rows, **settings):
    """Peak bytes beyond the model and a cache of just the texts, relative to these."""
    held = Held(model)
    with held:
        generate(
            model,
            prompt(PROMPT, rows=rows),
            skip=SkipConfig.early_exit(4),
            costs=CostTable(0.1, (1.0, 1.01)),
            max_draft_length=4,
            max_new_tokens=NEW_TOKENS,
            seed=0,
            **settings,
        )
    cache = cache_bytes(model, rows * (PROMPT + NEW_TOKENS))
    assert held.peak > held.model + cache
    return held.peak / (held.model + cache) - 1


def repeated(model, rows):
    """The relative size of what the library adds: one layer's keys and values per query head."""
    config = model.config
    cache = cache_bytes(model, rows * (PROMPT + NEW_TOKENS))
    groups = config.num_attention_heads // config.num_key_value_heads
    return groups * cache / config.num_hidden_layers / (Held(model).model + cache)


@pytest.mark.parametrize("rows", [1, *thorough(4)])
@pytest.mark.parametrize("execution", [*thorough("modules"), "fused"])
def test_less_than_3_percent_beside_model_and_cache(model, execution, rows):
    beside = overhead(model, rows, execution=execution, do_sample=True)
    library = repeated(model, rows) if execution == "modules" and rows > 1 else 0.0
    assert beside < 0.03 + library


@pytest.mark.thorough
def test_a_prompt_in_one_piece_would_be_seen(model, sizes):
    sizes(chunk=lambda *_: 8 * PROMPT)
    assert overhead(model, 4, execution="fused", do_sample=False) > 0.1


def test_nothing_is_held_afterwards(model):
    def call():
        generate(
            model,
            prompt(9),
            skip=SkipConfig.early_exit(4),
            costs=CostTable(0.1, (1.0,)),
            max_new_tokens=4,
            do_sample=True,
            seed=0,
        )

    call()  # native passes keep some scratch memory
    held = Held(model)
    with held:
        call()
    assert held.now < 1.001 * held.model


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that an operation makes or returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("sample", "rejection"),
    [
        pytest.param(False, False, id="greedy"),
        pytest.param(True, False, id="coupled", marks=pytest.mark.thorough),
        pytest.param(True, True, id="rejection", marks=pytest.mark.thorough),
    ],
)
def test_laws_of_many_rows_need_no_fresh_mappings(sample, rejection):
    """Allocations of 32 MiB are always mapped anew, which costs a page fault for every page."""
    rows, vocabulary = 400, 24_576  # 39 MB of logits
    processors = [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)] if sample else []
    draws = Draws(
        Law(processors, do_sample=sample, rows=rows),
        rule=rule_of("rejection" if rejection else "coupled", sampling=sample),
    )
    raw = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))  # (N, V)
    keys = [stream_key(0, row) for row in range(rows)]
    places = [(seat, 0) for seat in seated(keys, [4] * rows, [[1]] * rows, 4)]
    with Largest() as made:
        for signal in SIGNALS:
            drawn = draws.draft(raw, places, signal)
        steps = [([(row, 0) for row in range(rows)], drawn.tokens)]
        drafts = DraftedTokens([], [], [], steps=steps, laws=[*drawn.laws])
        verdict = draws.judge(raw, places, drafts)
    if not (sample and rejection):
        assert verdict.tokens.tolist() == drawn.tokens.tolist()
    assert 0 < made.bytes < 9 << 20
