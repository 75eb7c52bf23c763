"""Native passes: the numbers of the module path, the tokens of `generate()`, and what if they fail.

Most tests are skipped if native passes cannot be built.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
import zlib
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
import transformers
from agreement import BOUNDS, DIFFERING, assert_agree, pairs
from covering import covering
from filelock import FileLock
from marks import thorough
from models import EVERY, FAMILIES, OTHERS, SKIPS, WINDOW, lively_model, prompt, ragged, tiny_model
from ties import partings
from torch.utils import cpp_extension
from transformers import TopPLogitsWarper

from layerskip import SkipConfig, generate
from layerskip.api.arguments import law_of
from layerskip.backends import native_passes
from layerskip.backends.base import Variant
from layerskip.backends.native_passes import Native
from layerskip.decoding.laws import Warp
from layerskip.decoding.noise import gumbel_noise, starts_of, stream_key
from layerskip.decoding.rules import largest, margins_of, runners_up, with_margin
from layerskip.model.opened_model import Pass
from layerskip.model.opened_models import Sublayers
from layerskip.native import extension
from layerskip.replay.chain_cache import ChainCache
from layerskip.weights.rounded import TrimmedHead

DTYPES = (torch.float32, torch.bfloat16)
SERVED = [family for family in EVERY if family not in models.MODULES_ONLY]
PATHS = list(product(("default", "eager"), DTYPES))
MIXTURES = models.MIXTURES
# wired unlike the others
COUSINS = ("gemma4", "gemma4_mixture", "olmo3", "smollm3", "granite", "mixtral", *models.NEWER)
MAPS = Path("/proc/self/maps")


def both(model):
    """A model opened as modules and natively."""
    opened = Sublayers(model, "modules"), Sublayers(model, "native")
    assert opened[1].execution == "native"
    return opened


@pytest.fixture
def calls(spied):
    """The number of tokens of each native call."""
    return spied(Native, "_run", lambda _, hidden, *__: hidden.shape[0] * hidden.shape[1])


# ---- Sublayers and heads against the library's modules ----


@pytest.mark.parametrize(
    ("family", "attention", "dtype"),
    [
        case
        for case in [
            *((family, *path) for family, path in product(SERVED, PATHS)),
            *((family, *PATHS[number % 4]) for number, family in enumerate(OTHERS)),
            *((family, *PATHS[number % 4 - 1]) for number, family in enumerate(OTHERS)),
        ]
        if case[0] not in MIXTURES or case[2] is torch.float32  # see the next test
    ],
)
def test_every_sublayer_agrees_with_the_module_path(built, family, attention, dtype):
    model = tiny_model(family, dtype=dtype, attention=None if attention == "default" else attention)
    modules, opened = both(model)
    assert_agree(modules, opened)
    assert_agree(modules, opened, rows=3)
    assert_agree(modules, opened, rows=3, ragged=True)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_in_bfloat16_are_those_of_the_fused_path(built, family):
    """Modules would round every partial sum. At ties, another expert may be chosen."""
    model = tiny_model(family, dtype=torch.bfloat16)
    if family in ("ernie4_5_moe", "hunyuan_v1_moe"):
        for mixture in Sublayers(model, "modules").mixtures:
            mixture.router.float()  # as the library loads it
    opened = Sublayers(model, "fused"), Sublayers(model, "native")
    off = differing = numbers = compared = 0
    for rows in (1, 3):
        for want, got in pairs(*opened, rows=rows):
            off += int((got - want).abs().max() > BOUNDS[torch.bfloat16] * want.abs().max())
            differing, numbers = differing + int((got != want).sum()), numbers + got.numel()
            compared += 1
    assert differing <= DIFFERING[torch.bfloat16] * numbers
    assert off <= 0.02 * compared


@torch.no_grad()
def test_fewer_experts_and_none(built):
    for family, few in product(MIXTURES, (0, 1)):
        model = tiny_model(family, dtype=torch.float32)
        plain, opened = Sublayers(model, "fused"), Sublayers(model, "native")
        if few == 0 and not plain.mixtures[0].parallel:  # nothing else would run
            continue
        number = next(part.number for part in plain.parts if part.mixture) * 2 + 1
        (hidden, step), (_, own) = (path.first_pass(prompt(11, rows=2)) for path in (plain, opened))
        want = plain.backend.sublayer(number, Variant(experts=few))(hidden, step)
        block = opened.backend.sublayer(number, Variant(experts=few))
        got = block(hidden, own)
        assert isinstance(block, native_passes.NativeBlock)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert (opened.blocks[number](hidden, own) - want).abs().max() > 1e-3 * want.abs().max()


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
@torch.no_grad()
def test_tails_of_layers_whose_mlp_is_left_out(built, family):
    modules, opened = both(tiny_model(family, dtype=torch.float32))
    for layer in opened.layers:
        layer.layer_scalar.fill_(0.6)
    (hidden, step), (_, own) = (path.first_pass(prompt(7, rows=2)) for path in (modules, opened))
    for layer in (0, 3):
        want, got = (
            path.backend.sublayer(2 * layer + 1, None)(hidden, each)
            for path, each in ((modules, step), (opened, own))
        )
        assert (got - hidden).abs().max() > 0.01 * hidden.abs().max()
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        first, second = opened.blocks[2 * layer + 1], opened.backend.sublayer(2 * layer + 1, None)
        assert torch.equal(
            opened.backend.run(hidden, own, [first, second]), second(first(hidden, own), own)
        )


# Widths that divide neither vectors nor cache lines; 12 queries that share one key.
ODD = (
    {"hidden_size": 44, "head_dim": 10, "intermediate_size": 51, "vocab_size": 101},
    {"hidden_size": 36, "head_dim": 74, "intermediate_size": 7, "num_attention_heads": 12},
)


@pytest.mark.parametrize(("family", "shape"), [*product(("llama", "gemma2", "gemma3"), (0, 1))])
def test_odd_widths_and_every_number_of_tokens(built, family, shape):
    odd = ODD[shape] | {"num_key_value_heads": 1 if shape else 2, "vocab_size": 101}
    # eager, because with wide heads sdpa flips more last bits than `DIFFERING` allows
    modules, opened = both(tiny_model(family, dtype=DTYPES[shape], attention="eager", **odd))
    counts = (WINDOW + 4, *range(1, 18))
    for rows, ragged_rows in ((1, False), (3, True)):
        assert_agree(modules, opened, rows=rows, ragged=ragged_rows, passes=counts)
    if shape == 0:  # families whose heads have no width of their own
        for other in {"llama": ["qwen2"], "gemma2": ["phi3"]}.get(family, []):
            modules, opened = both(tiny_model(other, dtype=torch.float32, hidden_size=40))
            assert_agree(modules, opened, rows=3, ragged=True, passes=counts)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[2].self_attn, "scaling", 0.36),
        lambda model: setattr(model.config, "sliding_window", WINDOW + 1),
        lambda model: model.model.layers[1].input_layernorm.weight.data.sub_(1),
    ],
    ids=["scaled", "wider", "another norm"],
)
def test_the_comparison_can_fail(built, change):
    """`test_fused.py` shows that a cast in the wrong place would be noticed, too."""
    model, wrong = (tiny_model("gemma3", dtype=torch.float32) for _ in range(2))
    change(wrong)
    for execution in ("fused", "native"):
        with pytest.raises(AssertionError):
            assert_agree(Sublayers(model, "modules"), Sublayers(wrong, execution))


@pytest.mark.skipif(not MAPS.exists(), reason="libraries are listed on Linux only")
def test_there_is_no_second_openmp_runtime(built):
    # each of two would have its own threads, and those of one would spin while the other computes
    loaded = {line.split()[-1] for line in MAPS.read_text().splitlines()}
    assert any(path.endswith(f"{extension.NAME}.so") for path in loaded)
    assert len([path for path in loaded if re.search(r"/lib(g|i|)omp[^/]*$", path)]) == 1


@torch.no_grad()
def test_prompts_are_native_and_their_tokens_are_seen(built, calls):
    modules, opened = both(tiny_model("gemma2", dtype=torch.float32))
    assert_agree(modules, opened, passes=(600, 65, 1))
    assert set(calls) == {600, 65, 1}
    assert_agree(modules, opened, rows=3, ragged=True, passes=(50, 30, 1))


def test_buffers_that_grow_and_rows_that_leave(built):
    modules, opened = both(tiny_model("gemma3", dtype=torch.float32))
    assert_agree(modules, opened, passes=(330, 8, 300, 2, 8))  # the buffers start with 641 slots
    steps = []
    for path in (modules, opened):
        cache, rotary = path.new_cache(3, 60), path.rotary(60, 60)
        with torch.no_grad():
            cache.place([0, 0, 0], 12)
            path.run(path.embed(prompt(12, rows=3)), Pass(path, cache, rotary), range(12))
            cache.keep([0, 2], 12)
            cache.place([12, 9], 5)
            hidden = path.embed(prompt(5, rows=2, seed=1))
            steps.append(path.finish(hidden, Pass(path, cache, rotary), range(12)))
    assert (steps[0] - steps[1]).abs().max() < 1e-5 * steps[0].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_trimmed_heads(built, family, dtype):
    modules, opened = both(tiny_model(family, dtype=dtype))
    hidden = modules.embed(prompt(5, rows=3))
    whole = modules.logits(hidden)
    for rows in ([3, 50, 7, 96], range(5, 60)):
        trimmed = opened.backend.head(TrimmedHead(opened.model.lm_head, rows))(hidden, None)
        kept = torch.isfinite(trimmed[0, 0]).nonzero()[:, 0]
        assert kept.tolist() == sorted(rows)
        bound = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
        assert (trimmed - whole)[..., kept].abs().max() <= bound * whole.abs().max()


@torch.no_grad()
def test_no_result_lies_in_memory_of_another(built):
    opened = Sublayers(tiny_model("llama", dtype=torch.float32), "native")
    cache = opened.new_cache(1, 9)
    cache.place([0], 3)
    step, hidden = Pass(opened, cache, opened.rotary(9, 9)), opened.embed(prompt(3))
    given = hidden.clone()
    results = [opened.run(hidden, step, range(n)) for n in (1, 2, 12)]
    results += [opened.finish(hidden, step, range(12)), opened.logits(hidden)]
    copies = [each.clone() for each in results]
    opened.run(torch.ones_like(hidden), step, range(12))
    assert torch.equal(hidden, given)
    assert all(map(torch.equal, results, copies))
    places = {each.untyped_storage().data_ptr() for each in (hidden, *results)}
    assert len(places) == 1 + len(results)


def test_a_head_may_be_added_while_another_thread_is_in_a_pass(built):
    opened = Sublayers(tiny_model("llama", dtype=torch.float32, vocab_size=5000), "native")
    with torch.no_grad():
        hidden = opened.embed(prompt(8))
        want, stop = opened.logits(hidden), threading.Event()

        def add():
            while not stop.is_set():
                opened.backend.head(TrimmedHead(opened.model.lm_head, range(5, 60)))

        adding = threading.Thread(target=add)
        adding.start()
        try:
            got = [opened.logits(hidden) for _ in range(200)]
        finally:
            stop.set()
            adding.join()
    assert all(torch.equal(each, want) for each in got)


# ---- What a caller may do to a model and to a pass ----


def test_what_native_passes_cannot_do_the_lean_path_does(built, calls):
    """Gradients, and rows that see only some of their slots, as in replays."""
    model = tiny_model("llama", dtype=torch.float32)
    fused, outputs = Sublayers(model, "fused"), []
    text = fused.new_cache(1, 9)
    for path in (fused, Sublayers(model, "native")):
        cache, rotary = path.new_cache(1, 9), path.rotary(9, 9)
        cache.place([0], 5)
        step = Pass(path, cache, rotary)
        hidden = path.embed(prompt(5)).detach().requires_grad_()
        path.blocks[1](hidden, step).sum().backward()
        frozen = path.blocks[1](path.embed(prompt(5)).detach(), step)
        assert frozen.requires_grad  # because of its weights
        with torch.no_grad():
            if path is fused:
                text.place([0], 5)
                path.run(hidden, Pass(path, text, rotary), range(12))
            chains = ChainCache(text, torch.tensor([0]), torch.tensor([[2, 4]]), 1)
            chains.advance(0)
            chained = path.run(path.embed(prompt(2)), Pass(path, chains, rotary), range(12))
        outputs.append((hidden.grad, chained))
    assert not calls
    assert all(map(torch.equal, *outputs))


@torch.no_grad()
def test_weights_are_read_at_every_call(built):
    model = tiny_model("qwen2", dtype=torch.float32)
    modules, *others = [Sublayers(model, each) for each in ("modules", "fused", "native")]
    for opened in others:
        for weight in model.parameters():
            weight.mul_(1.1)
        assert_agree(modules, opened)
    for weight in model.parameters():
        weight.data = weight.data.clone() * 0.9
    assert_agree(modules, opened)


@torch.no_grad()
def test_a_model_that_was_changed_is_an_error_that_says_how(built):
    model = tiny_model("llama", dtype=torch.float32)
    opened = Sublayers(model, "native")
    cache = opened.new_cache(1, 9)
    cache.place([0], 3)
    step, hidden = Pass(opened, cache, opened.rotary(9, 9)), opened.embed(prompt(3))
    opened.run(hidden, step, range(12))
    model.to(torch.bfloat16)
    again = "Float tensor .* got BFloat16 .*open the model again"
    for which in ([0], [1], [4, 5, 6]):
        with pytest.raises(ValueError, match=again):
            opened.run(hidden, step, which)
    with pytest.raises(ValueError, match=again):
        opened.logits(hidden)
    with pytest.raises(ValueError, match="cached keys must be a contiguous BFloat16 tensor"):
        opened.run(hidden.bfloat16(), step, [0])
    model.float()
    model.lm_head.weight.data = model.lm_head.weight.data[:, :30]
    with pytest.raises(ValueError, match=r"of shape \[97, 32\].* got Float \[97, 30\]"):
        opened.logits(hidden)
    proj = model.model.layers[1].mlp.up_proj
    proj.weight.data = proj.weight.data[:40].clone()
    with pytest.raises(ValueError, match="gate and up differ in size"):
        opened.run(hidden, step, [3])
    cache.firsts = [7]
    with pytest.raises(ValueError, match="3 tokens from 7 on are beyond 9 slots"):
        opened.run(hidden, step, [0])


# ---- Entries of a plan on their own ----


def drawn(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) / 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (15, 31), (17, 33), (65, 100), (130, 1601), (40, 5000)]
)
@torch.inference_mode()
def test_products_of_any_shape_and_number_of_tokens(built, rows, columns, dtype):
    """They equal float64 but for rounding, in bits that do not depend on other tokens."""
    tools, how = extension.extension(), {"dtype": dtype}
    weight, bias = drawn(rows, columns, **how), drawn(rows, **how)
    hidden = drawn(1, 40, columns, **how).sign()  # a norm leaves signs unchanged
    plan, norm = tools.Plan(), tools.Norm(None, 0.0, "llama")
    head = plan.add("head", before=norm, inputs=[tools.Matrix(weight, bias)])
    got = plan.run(hidden, [head], [], [], [], [])
    want = hidden.double() @ weight.double().T + bias.double()
    rounding = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=2e-5)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33):
        for first in (0, 40 - tokens):
            here = slice(first, first + tokens)
            some = plan.run(hidden[:, here], [head], [], [], [], [])
            assert torch.equal(some, got[:, here])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_buffers_that_begin_later_give_the_same_bits(built, dtype):
    tools, window = extension.extension(), 11
    how = {"dtype": dtype}
    q, kv, out = (
        tools.Matrix(drawn(*shape, **how), None) for shape in ((96, 40), (48, 40), (40, 96))
    )
    plan = tools.Plan()
    attention = {"heads": 4, "kv_heads": 2, "width": 24, "scale": 0.5, "output": out}
    inputs = [q, kv]  # values are made from the keys' projection
    norm = tools.Norm(None, 1e-6, "wide")
    slides = plan.add("attention", inputs=inputs, v_norm=norm, window=window, **attention)
    reads = plan.add("attention", inputs=inputs[:1], window=window, **attention)
    full = plan.add("attention", inputs=inputs, **attention)
    angles = [tools.Angles(drawn(1, 112, 24, **how), drawn(1, 112, 24, seed=1, **how))]
    hidden = drawn(2, 6, 40, **how)
    keys, values = drawn(2, 2, 112, 24, **how), drawn(2, 2, 112, 24, seed=1, **how)
    copies = [torch.stack([each[0, :, 64:], each[1, :, 32:80]]) for each in (keys, values)]
    starts = [82, 59]
    for which in ([slides], [slides, reads]):
        many = len(which)
        want = plan.run(hidden, which, [keys] * many, [values] * many, starts, angles)
        bases = [64, 32] * many
        few = [[each] * many for each in copies]
        got = plan.run(hidden, which, *few, starts, angles, bases)
        assert torch.equal(got, want)
        for copy, whole in zip(copies, (keys, values), strict=True):
            assert torch.equal(copy, torch.stack([whole[0, :, 64:], whole[1, :, 32:80]]))
    for number, base, message in (
        (slides, [48] * 2, "multiple of 32"),
        (full, [32] * 2, "no window"),
        (slides, [64] * 2, "only some"),
        (slides, [32], "1 buffers of keys of 2 rows, but 1 bases"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.run(hidden, [number], [copies[0]], [copies[1]], starts, angles, base)


# ---- Texts in float32: greedy ones against the library, sampled ones against plain decoding ----


RESOLUTION = 1e-4  # of scores, as in test_parity.py
TEXTS = covering((*FAMILIES, *COUSINS), tuple(SKIPS), (1, 3), ("greedy", "coupled", "rejection"))


@pytest.mark.parametrize("start", [0, *thorough(1, 2, 3)])
def test_texts_are_those_of_transformers_and_of_the_module_path(built, calls, start):
    gaps = []
    drafted = accepted = parted = 0
    for family, skip, rows, rule in TEXTS[start::4]:
        model = lively_model(family, dtype=torch.float32)
        ids, mask = ragged((WINDOW + 5, 3, WINDOW + 2)[:rows], seed=3)
        how = {"attention_mask": mask, "max_new_tokens": 12}
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 11, **how}
        drafts = {"skip": SKIPS[skip], "controller": "fixed", "max_draft_length": 3}
        keys = None
        if rule == "greedy":
            want = model.generate(ids, do_sample=False, **how)
            out = generate(model, ids, execution="native", do_sample=False, **drafts, **how)
        elif rule == "coupled":
            keys = [stream_key(11, row) for row in range(rows)]
            want = generate(model, ids, execution="modules", enabled=False, **sampled).sequences
            out = generate(model, ids, execution="native", **drafts, **sampled)
        else:  # its text depends on the drafts
            sampled["acceptance"] = "rejection"
            want = generate(model, ids, execution="modules", **drafts, **sampled).sequences
            out = generate(model, ids, execution="native", **drafts, **sampled)
        if rule == "rejection":
            parted += int((out.sequences != want).any(-1).sum())
        else:
            noisy = {"keys": keys, "temperature": 0.8 if keys else 1.0}
            gaps += partings(model, mask, out.sequences, want, **noisy)
        drafted += out.stats.num_draft_tokens
        accepted += out.stats.num_accepted_tokens
    assert max(gaps, default=0) < RESOLUTION
    assert len(gaps) + parted <= 1
    assert 0.05 * drafted < accepted < 0.95 * drafted
    assert len(calls) > 100


# ---- Failures: one line, the fused path, the same tokens ----


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A machine where nothing has been built yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    another_process()
    yield tmp_path
    another_process()


def expect_lean(message):
    """Expect one warning with this message, and the tokens of the fused path."""
    model, skip = lively_model("llama", dtype=torch.float32), SkipConfig.early_exit(3)

    def text(execution):
        how = {"skip": skip, "execution": execution, "max_new_tokens": 8}
        return generate(model, prompt(9), return_dict_in_generate=True, **how).sequences

    want = text("fused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [text(execution) for execution in ("auto", "native", "auto")]
        assert Sublayers(model).execution == "fused"
    (warning,) = caught
    assert message in str(warning.message)
    assert "\n" not in str(warning.message)
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("CXX", "nothing", "no C++ compiler was found (nothing); install g++ or set CXX"),
        ("platform.system", lambda: "Windows", "are built on Linux and macOS, not Windows"),
        ("TORCH_EXTENSIONS_DIR", "file/below", "native passes cannot be kept or loaded"),
        ("library", b"half of one", "native passes cannot be kept or loaded"),
    ],
)
def test_what_cannot_be_built_or_loaded(fresh, monkeypatch, setting, value, message):
    if setting == "library":
        library = extension.library_path()
        library.parent.mkdir(parents=True)
        library.write_bytes(value)
    elif "." in setting:
        monkeypatch.setattr(setting, value)
    else:
        (fresh / "file").touch()
        monkeypatch.setenv(setting, str(fresh / value) if "/" in value else value)
    expect_lean(message)


BROKEN = """#!/bin/sh
case "$*" in *.cpp*) echo '{}' >&2; exit 1;; esac
exec c++ "$@"
"""


@pytest.mark.thorough
def test_a_compiler_that_fails_is_not_asked_again(built, fresh, monkeypatch):
    words = "native.cpp:1: fatal error: no such vectors"
    compiler = fresh / "c++"
    compiler.write_text(BROKEN.format(words))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    expect_lean(f"native passes could not be built: {words}")
    (failed,) = (fresh / extension.NAME).glob("*.failed")
    left = [each.name for each in (fresh / extension.NAME).iterdir()]
    assert sorted(left) == sorted([failed.name, failed.with_suffix(".lock").name])
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    another_process()
    assert words in str(extension.refusal())
    assert "layerskip env --rebuild, or wait 60 minutes" in str(extension.refusal())


def another_process():
    """Clear this process's caches, as if another process had started."""
    for each in (extension.extension, extension.refusal, native_passes.warn_refusal):
        each.cache_clear()


class Compiler:
    """Replaces the compiling child: its exit code, and the library it makes if it succeeds."""

    def __init__(self, code, library=None, said=""):
        self.code, self.library, self.said, self.calls = code, library, said, 0

    def __call__(self, command, **_):
        self.calls += 1
        time.sleep(0.2)
        if self.library is not None:
            shutil.copy(self.library, command[3])  # the folder of the build
        return subprocess.CompletedProcess(command, self.code, "", self.said)


@pytest.fixture
def compiler(fresh, monkeypatch):
    """A compiler that fails."""
    fake = Compiler(1)
    monkeypatch.setattr(extension, "_check_tools", lambda: None)
    monkeypatch.setattr(extension, "_version", lambda path: "a compiler 1.0")
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


ASSEMBLER = "cc.s: Assembler messages:\ncc.s:9: Error: no such instruction"


@pytest.mark.parametrize(
    ("code", "said", "message", "lasting"),
    [
        (-4, "", "ended by signal 4", True),
        (1, "", "no message", True),
        (1, ASSEMBLER, "cc.s:9: Error: no such instruction", True),
        (-9, "", "could not be built", False),
        (-15, "", "could not be built", False),
        (1, "g++: fatal error: Killed signal terminated program cc1plus", "could not be", False),
        (1, "OSError: [Errno 28] No space left on device", "could not be built", False),
        (1, "MemoryError", "could not be built", False),
    ],
)
def test_a_child_that_dies(compiler, code, said, message, lasting):
    """Failures with a passing cause are not recorded."""
    compiler.code, compiler.said = code, said
    for calls in (1, 1 if lasting else 2):
        assert message in str(extension.refusal())
        assert compiler.calls == calls
        another_process()


def test_a_build_that_failed_is_tried_again_after_an_hour_or_by_another_compiler(
    fresh, compiler, monkeypatch
):
    assert extension.refusal() is not None
    (failed,) = (fresh / extension.NAME).glob("*.failed")
    for age, calls in ((extension.RETRY_AFTER - 60, 1), (extension.RETRY_AFTER + 60, 2)):
        then = time.time() - age
        os.utime(failed, (then, then))
        another_process()
        assert extension.refusal() is not None
        assert compiler.calls == calls
    monkeypatch.setattr(extension, "_version", lambda path: "a compiler 1.1")
    another_process()
    assert extension.refusal() is not None
    assert compiler.calls == 3


def test_nobody_waits_for_ever(fresh, compiler, monkeypatch):
    monkeypatch.setattr(extension, "WAIT", 0.1)
    folder = extension.library_path().parent
    folder.parent.mkdir(parents=True)
    with FileLock(folder.with_suffix(".lock")):
        expect_lean("another process has been building")
    assert compiler.calls == 0


@pytest.fixture
def own(fresh, monkeypatch):
    """A library built earlier, in this test's own folder."""
    with monkeypatch.context() as usual:
        usual.delenv("TORCH_EXTENSIONS_DIR")
        reason = extension.refusal()
        built = extension.library_path()
        another_process()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(subprocess, "run", Compiler(0, built))
    assert extension.refusal() is None
    another_process()
    return extension.library_path()


def test_what_is_built_is_this_users_alone(fresh, own):
    for each in (own, own.parent, own.parent.parent):
        assert each.stat().st_mode & 0o777 == 0o700
    assert extension.status().startswith("built")


def test_what_a_wheel_brings_is_loaded_without_a_compiler(fresh, own, monkeypatch):
    """Not for another version of torch or an edited source, which change its path."""
    monkeypatch.setattr(extension, "BUILT", fresh / "brought")
    place = extension.brought()
    place.parent.mkdir(parents=True)
    shutil.copy(own, place)
    monkeypatch.setenv("CXX", "nothing")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "none"))
    module = SimpleNamespace(tiles_refusal=lambda: None)
    monkeypatch.setattr(extension, "load", lambda path: module if path == place else None)
    another_process()
    assert extension.extension() is module
    assert extension.status().startswith("bundled with the wheel, ")
    release = torch.__version__.partition("+")[0]
    with monkeypatch.context() as other:  # with or without CUDA, the C++ is the same
        other.setattr(torch, "__version__", f"{release}+cu130")
        assert extension.brought() == place
    monkeypatch.setattr(torch, "__version__", "2.0.0+cpu")
    another_process()
    assert "no C++ compiler was found" in extension.refusal()


def test_vectors_without_flags_are_the_machines_usual_ones(monkeypatch):
    """On aarch64, torch may name SVE, whose headers need flags that other machines lack."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    assert "-DCPU_CAPABILITY_DEFAULT" in extension.flags()
    assert not [flag for flag in extension.flags() if "SVE" in flag or flag.startswith("-m")]
    assert extension.brought() == extension.brought("DEFAULT")  # the library of a wheel


@pytest.mark.parametrize("place", range(4), ids=["library", "build", "builds", "root"])
def test_a_library_that_others_can_exchange_is_not_loaded(fresh, own, place, monkeypatch):
    open_to_all = (own, *own.parents)[place]
    assert fresh in (open_to_all, *open_to_all.parents)
    mode = open_to_all.stat().st_mode
    for loose in (0o777, 0o1777):  # only above the root does a sticky bit help
        open_to_all.chmod(loose)
        assert str(open_to_all) in str(extension.refusal())
        assert "chmod" in extension.status()
        another_process()
    open_to_all.chmod(mode)
    assert extension.refusal() is None
    another_process()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    owner = own.stat().st_uid
    if owner == 0:  # files of root are trusted
        os.chown(open_to_all, 1234, -1)
    assert "not loaded" in str(extension.refusal())
    os.chown(open_to_all, owner, -1)


def test_a_sticky_folder_above_the_root_will_do(fresh, own, monkeypatch):
    below = fresh / "below"
    shutil.copytree(fresh / extension.NAME, below / extension.NAME)
    below.chmod(0o700)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(below))
    fresh.chmod(0o1777)
    assert extension.refusal() is None
    another_process()
    fresh.chmod(0o777)
    assert str(fresh) in str(extension.refusal())
    fresh.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "members", "others"),
    [("me", [], False), ("me", ["me", "you"], True), ("us", [], True)],
)
def test_a_group_of_ones_own_is_nobody_else(own, monkeypatch, name, members, others):
    """As on systems whose users have groups of their own, which may write by default."""
    group, user = SimpleNamespace(gr_name=name, gr_mem=members), SimpleNamespace(pw_name="me")
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    monkeypatch.setattr("pwd.getpwuid", lambda number: user)
    own.chmod(0o770)
    assert ("not loaded" in str(extension.refusal())) is others


def test_rebuilding_takes_the_place_of_what_was_there(fresh, own, monkeypatch):
    compiler = subprocess.run
    assert isinstance(compiler, Compiler)
    before = own.stat().st_ino
    extension.rebuild()
    assert compiler.calls == 2
    assert own.stat().st_ino != before
    compiler.code = 1
    with pytest.raises(extension.Unavailable, match="could not be built"):
        extension.rebuild()
    assert own.exists()
    assert list(own.parent.parent.glob("*.failed"))
    compiler.code = 0
    extension.rebuild()
    assert not list(own.parent.parent.glob("*.failed"))


def test_starts_at_once_build_once(built, fresh, monkeypatch):
    """Threads stand for processes here: the lock is a file, so it treats them alike."""
    monkeypatch.undo()
    library = extension.library_path()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh))
    compiler = Compiler(0, library)
    monkeypatch.setattr(subprocess, "run", compiler)
    found = []
    models.side_by_side(*4 * [lambda: found.append(extension.extension())])
    assert compiler.calls == 1
    assert [hasattr(module, "Plan") for module in found] == 4 * [True]


AGAIN = {
    "native": "every_sublayer or products_of or test_odd or test_trimmed",
    "rounded": "native_products or inputs_of or native_sublayers",
    "stored": "numbers_are or products_are or any_two",
}
# `emulated_tiles.h` is not among the sources whose hash names a build, so its checksum is a flag.
DEFINED = """
import sys, pytest
from layerskip.native import extension
flags, defined = extension.flags, sys.argv[1].split()
extension.flags = lambda *kind: [*flags(*kind), *defined]
sys.exit(pytest.main(sys.argv[2:]))
"""
SOURCES = Path(extension.__file__).with_name("csrc")
TILES = Path(__file__).with_name("emulated_tiles.h")
EMULATED = f"-DEMULATED_TILES={zlib.crc32(TILES.read_bytes())} -I{TILES.parent}"


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(file.stem for file in SOURCES.glob("*.cpp")))
def test_the_sources_are_those_of_an_older_standard(source):
    """torch compiles extensions as C++17 up to 2.11 at least; now it takes C++20."""
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = ["-std=c++17", "-fsyntax-only", "-DTORCH_EXTENSION_NAME=x", *extension.flags()]
    file = SOURCES / f"{source}.cpp"
    compiler = [cpp_extension.get_cxx_compiler(), *flags, *(f"-I{each}" for each in folders)]
    done = subprocess.run([*compiler, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("file", AGAIN)
@pytest.mark.parametrize(
    "capability",
    [
        *("default", "avx2", "avx2 -DWITHOUT_DOTS", "avx512 -DWITHOUT_DOTS"),
        *(f"avx2 {EMULATED}", f"avx512 {EMULATED}", "none"),
    ],
)
def test_other_vectors_give_the_same_numbers(built, capability, file):
    """A library is built for them. On CPUs that torch has no vectors for, it is the usual one."""
    vectors, _, defined = capability.partition(" ")
    known = torch.backends.cpu.get_cpu_capability().lower()
    if vectors.startswith("avx") and known not in (vectors, "avx512"):
        pytest.skip(f"no {vectors}")
    start = ["-c", DEFINED, defined] if defined else ["-m", "pytest"]
    tests = [str(Path(__file__).with_name(f"test_{file}.py")), "-k", AGAIN[file]]
    tiles = {"LAYERSKIP_TILES": "1"} if defined == EMULATED else {}
    done = subprocess.run(
        [sys.executable, *start, "-n0", "-q", "-rs", "-W", "default", *tests],
        env={**os.environ, **tiles, "ATEN_CPU_CAPABILITY": vectors},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(f"transformers {transformers.__version__} has no " in line for line in skipped)


DIGEST = """
import hashlib, numpy, sys, torch
from gguf_files import FORMATS, raw
from layerskip.native import extension
from layerskip.weights.rounded import rounded
flags, digest, defined = extension.flags, hashlib.sha256(), sys.argv[1].split()
extension.flags = lambda *kind: [*flags(*kind), *defined]
native = extension.extension()  # before what asks for the usual one
torch.manual_seed(0)
def add(panels, form, rows, columns):
    matrix = native.Matrix(panels, None, format=form, rows=rows, columns=columns)
    head = (plan := native.Plan()).add("head", inputs=[matrix])
    for tokens in (*range(1, 40), 300):
        x = torch.randn(1, tokens, columns) * torch.randn(columns).exp()
        digest.update(plan.run(x, [head], [], [], [], []).numpy().tobytes())
for bits, rows, columns in ((8, 40, 200), (4, 40, 200), (8, 16, 64), (4, 100, 30)):
    copy = rounded(torch.randn(rows, columns), bits, packed=True)
    add(copy.data, f"R{bits}", rows, columns)
rng = numpy.random.default_rng(0)
with open("/proc/cpuinfo") as file:
    dots = "vnni" in file.read()  # without them, vectors split inputs of Q8_0 in another way
for form in (each for each in FORMATS if each[0] == "Q" and (dots or each != "Q8_0")):
    data = torch.from_numpy(raw(rng, form, 75, 512))
    add(native.arranged(data, form, 512), form, 75, 512)
print(native.tiles_refusal(), digest.hexdigest())
"""


@pytest.mark.slow
def test_bytes_in_tiles_have_the_bits_of_vectors(built):
    def said(tiles):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, EMULATED],
            cwd=Path(__file__).parent,
            env={**os.environ, "LAYERSKIP_TILES": tiles},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.rsplit(maxsplit=1)

    (refused, vectors), (taken, tiles) = said("0"), said("1")
    assert (refused, taken) == ("LAYERSKIP_TILES is 0", "None")
    assert vectors == tiles


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_sanitizers_find_nothing_in_attention(built, capability, sanitizers, tmp_path):
    known = torch.backends.cpu.get_cpu_capability()
    if capability != "DEFAULT" and known not in (capability, "AVX512"):
        pytest.skip(f"no {capability}")
    binary = tmp_path / "attention"
    sources = [Path(__file__).with_name("attention.cpp"), SOURCES / "tiles.cpp"]
    library = Path(torch.__file__).with_name("lib")
    vectors = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    vectors += extension.FLAGS.get(capability, ())
    folders = [SOURCES, *cpp_extension.include_paths()]
    checks = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined"]
    flags = ["-std=c++20", "-O1", "-g", "-w", "-fopenmp", *checks, *vectors, *EMULATED.split()]
    places = [f"-I{each}" for each in folders] + [f"-L{library}", f"-Wl,-rpath,{library}"]
    compiler = [cpp_extension.get_cxx_compiler(), *flags, *sources, "-o", binary, *places]
    subprocess.run([*compiler, "-ltorch_cpu", "-lc10", "-pthread"], check=True)
    for tiles, cases in (("0", "150"), ("1", "20")):  # emulated tiles are slow
        environment = {**os.environ, "LAYERSKIP_TILES": tiles}
        done = subprocess.run([binary, cases, "1"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


WARPS = (
    Warp(),
    Warp(0.8),
    Warp(0.8, top_k=5),
    Warp(top_k=10**6),
    Warp(0.7, top_p=0.9),
    Warp(1.3, top_k=50, top_p=0.6),
    Warp(top_p=0.05, least=2),
    Warp(top_p=0.999),
)


@pytest.mark.parametrize("size", [7, 512, 2049])
@pytest.mark.parametrize("warp", WARPS)
def test_native_draws_are_torchs_bit_by_bit(built, size, warp):
    """With the processors of `transformers`, except for top-p, whose sums are rounded there."""
    generator = torch.Generator().manual_seed(size)
    sampling = dict(zip(("temperature", "top_k", "top_p"), warp[:3], strict=True))
    law = law_of({"do_sample": True, **sampling}, rows=3)
    for processor in law.processors:
        if isinstance(processor, TopPLogitsWarper):
            processor.min_tokens_to_keep = warp.least
    assert law.warp == warp
    for case in range(10):
        logits = 8 * torch.randn(3, size, generator=generator)
        starts = starts_of([stream_key(case)] * 3, range(3))
        noise = gumbel_noise([stream_key(case)] * 3, range(3), size)
        if case % 5 == 1:
            logits[:, torch.randperm(size, generator=generator)[: size // 2]] = -math.inf
        elif case % 5 == 2 and warp.top_p == 1:  # ties, which top-p's sort would break
            logits = logits.round()
        elif case % 5 == 3:
            logits[0] = -math.inf
        elif case % 5 == 4:
            logits[0, size // 2] = math.nan
        scores = law.scores(logits, torch.zeros(3, 1, dtype=torch.long), [0, 1, 2], [1, 1, 1])
        for noisy, streams in [(scores + noise, starts), (scores, [])]:
            tokens, behind, others = extension.extension().drawn(logits, *warp, streams)
            want, margins = with_margin(noisy)
            best_but_one = runners_up(noisy, want, 1)[:, 0]
            assert torch.equal(others[want >= 0], best_but_one[want >= 0])
            assert torch.equal(tokens, want)
            assert torch.equal(tokens, largest(noisy))
            assert torch.equal(margins_of(behind)[want >= 0], margins[want >= 0])


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 3.0, 30.0])
def test_noise_of_the_few_tokens_that_may_win_draws_as_noise_of_all(built, spread):
    """Flat laws, where any token may win, and steep ones, also with extreme noise."""
    size = 6000
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(400, size, generator=generator)
    keys, places = [stream_key(5)] * len(logits), range(len(logits))
    noise = gumbel_noise(keys, places, size)  # (N, V)
    # the bounds matter most if the best score has the least noise, and the worst the most
    logits[:100].scatter_(1, noise[:100].argmin(1, keepdim=True), 3 * spread)
    logits[100:200].scatter_(1, noise[100:200].argmax(1, keepdim=True), -9 * spread)
    drawn = extension.extension().drawn
    tokens, behind, others = drawn(logits, *Warp(0.8), starts_of(keys, places))
    noisy = logits / 0.8 + noise
    best = noisy.topk(2)
    assert torch.equal(tokens, best.indices[:, 0])
    assert torch.equal(others, best.indices[:, 1])
    assert torch.equal(behind, best.values[:, 1] - best.values[:, 0])
    half = logits.bfloat16()
    for streams in (starts_of(keys, places), []):
        wide = drawn(half.float(), *Warp(), streams)
        assert all(map(torch.equal, drawn(half, *Warp(), streams), wide))


def test_native_draws_refuse_what_does_not_fit(built):
    drawn = extension.extension().drawn
    for wrong in (torch.zeros(5), torch.zeros(2, 5).double(), torch.zeros(5, 2).T):
        with pytest.raises(ValueError, match="logits must be"):
            drawn(wrong, *Warp(), [])
    with pytest.raises(ValueError, match="starts must be of 2 positions, got 1"):
        drawn(torch.zeros(2, 5), *Warp(), [1])


@torch.no_grad()
def test_weights_that_are_moved_give_the_same_bits(built):
    model = lively_model("llama", dtype=torch.float32, hidden_size=1024, intermediate_size=2048)
    ids = torch.arange(3, 12)[None]  # (1, T)
    opened = Sublayers(model, "native")

    def logits():
        hidden, step = opened.first_pass(ids)
        return opened.finish(hidden, step, range(opened.num_sublayers))  # (1, T, V)

    before = logits()
    opened.backend.long_lived = True
    assert torch.equal(logits(), before)
