"""Triton's kernels against the fused blocks: on a GPU, and on a CPU in Triton's interpreter."""

import importlib.util
import os
import random
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from commands import process
from covering import covering
from guesses import Guesses, path_of, tree
from marks import slow, thorough
from models import FAMILIES, WINDOW, lively_model, prompt, tiny_model

from layerskip import SkipConfig, generate
from layerskip.backends import captured
from layerskip.backends.base import Variant
from layerskip.cache.branches import Branches
from layerskip.decoding.passes import Passes
from layerskip.model.opened_models import Sublayers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BOUND = 1e-5  # error of a pass in float32; two correct ones differ by 1e-6
SLOTS = 256  # two parts of an attention
WIDTHS = {
    "even": {},
    "odd": {
        **{"hidden_size": 40, "intermediate_size": 52, "head_dim": 20},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "wide": {  # several blocks of columns, and of the queries of a key head
        **{"hidden_size": 136, "intermediate_size": 20, "head_dim": 34},
        "num_key_value_heads": 1,
    },
    "many": {  # more than 16 queries of a key head
        **{"hidden_size": 40, "head_dim": 8, "num_attention_heads": 20, "num_key_value_heads": 1}
    },
}
BY_TYPE = ("gemma2", "gemma3", "qwen2", "qwen3")  # what a layer sees
# Together the families have norms of heads, biases, soft caps, windows, both gates, and sublayers
# that are multiplied or normalised before they are added. A draft with a window narrows that of a
# layer, or gives it one and the first slots.
AXES = (
    *((*FAMILIES, "granite"), ("even", "odd", "wide"), (1, 2), (1, 5, 8, 16), (3, 120)),
    *((None, WINDOW // 2), (None, 8, 4)),
)
FEW = [*zip(cycle(AXES[0]), *zip(*covering(*AXES[1:]), strict=True), strict=False)]
OTHERS = slow(*covering(*AXES, strength=3)) if INTERPRETED else ()  # on a GPU the few are enough
TREES = covering(("llama", "gemma2", "qwen2"), AXES[1], (1, 2), (3, 120, 126))
TREES = [*TREES[::2], *slow(*TREES[1::2]), ("llama", "many", 1, 126)]

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton")


@pytest.fixture(params=["cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where kernels run."""
    if INTERPRETED:
        from triton.runtime import interpreter

        def dot(self, a, b, sums, *_):
            """In one order for all rows, as on a GPU; NumPy's own products have several."""
            products = a.data[:, :, None] * b.data[None]  # (M, K, N)
            return interpreter.TensorHandle(products.sum(1) + sums.data, sums.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    return request.param


@pytest.fixture
def compare(device, monkeypatch):
    """Runs passes by kernels and by fused blocks.

    Returns the relative error, and whether tokens have the bits that they have alone (those of a
    tree: in the chain of their path) among others.
    """

    def compared(kernels, family, widths, rows, count, first, window=None, bits=None, trees=False):
        shape = {"vocab_size": 41, **WIDTHS[widths]}
        if family in BY_TYPE:
            shape["layer_types"] = ["sliding_attention"]
        model = tiny_model(family, dtype=torch.float32, num_hidden_layers=1, **shape)
        monkeypatch.setattr(captured, "_kernels", lambda _: kernels)
        opened, fused = (Sublayers(model.to(device), each) for each in ("captured", "fused"))
        blocks, others = (
            (
                each.backend.sublayer(0, Variant(bits, window=window)),
                *(each.backend.sublayer(1, Variant(bits)), each.backend.head(bits=bits)),
            )
            for each in (opened, fused)
        )
        assert blocks[0].few is not None
        tables = opened.rotary(SLOTS, SLOTS).tables
        heads = model.config.num_key_value_heads, SLOTS, opened.parts[0].attention.head_dim
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, count, model.config.hidden_size, generator=draw)  # (B, T, H)
        buffers = torch.randn(2, rows, *heads, generator=draw)  # (2, B, K, S, D)
        slots = first + torch.arange(count) + 9 * torch.arange(rows)[:, None]  # (B, T)
        hidden, buffers, slots = (each.to(device) for each in (hidden, buffers, slots))
        branches = Branches([tree(random.Random(row), count) for row in range(rows)])
        depths = torch.tensor(branches.depths, device=device)  # (B, T)
        nodes = {"positions": slots[:, :1] + depths, "paths": branches.paths.to(device)}

        def run(few, buffers, hidden, slots, **nodes):
            pairs = {0: tuple(buffers)}
            return captured._pass(
                *(blocks if few else others, SLOTS - 1, pairs, tables, few),
                *(hidden, slots.contiguous()),
                **nodes,
            )

        def alone(r, t):
            row = slice(r, r + 1)
            if not trees:
                return run(True, own[:, row], hidden[row, t : t + 1], slots[row, t : t + 1])[0, 0]
            path, fresh = path_of(branches.parents[r], t), buffers[:, row].clone()
            return run(True, fresh, hidden[row, path], slots[row, : len(path)])[0, -1]

        with torch.inference_mode():
            own, library, more = buffers.clone(), buffers.clone(), nodes if trees else {}
            got = run(True, own, hidden, slots, **more)
            want = run(False, library, hidden, slots, **more)
            corners = {(0, count // 2 if trees else 0), (rows - 1, count - 1)}
            same = all(torch.equal(alone(r, t), got[r, t]) for r, t in corners)
        errors = ((got - want).norm() / want.norm(), (own - library).norm() / library.norm())
        return max(errors).item(), same

    return compared


@pytest.mark.parametrize(
    ("family", "widths", "rows", "count", "first", "window", "bits"), [*FEW, *OTHERS]
)
def test_kernels_compute_what_fused_blocks_do(
    family, widths, rows, count, first, window, bits, compare
):
    from layerskip.backends import kernels

    error, same = compare(kernels, family, widths, rows, count, first, window, bits)
    assert error < BOUND
    assert same


@pytest.mark.parametrize(("family", "widths", "rows", "first"), TREES)
def test_nodes_have_the_bits_of_their_path(family, widths, rows, first, compare):
    from layerskip.backends import kernels

    error, same = compare(kernels, family, widths, rows, 10, first, trees=True)
    assert error < BOUND
    assert same


@pytest.mark.parametrize(("bits", "rows"), [(8, 1), (4, 1), (4, 3)])
def test_drafts_in_few_bits_are_those_of_fused_blocks(bits, rows, device, monkeypatch):
    """Token for token; in 4 bits of a part of the vocabulary. Three rows take products alone."""
    from layerskip.backends import kernels

    model = lively_model("llama", dtype=torch.float32, num_hidden_layers=2).to(device)
    monkeypatch.setattr(captured, "_kernels", lambda _: kernels)
    real = Passes.draft_step

    def logits_of(execution):
        logits = []

        def draft_step(*given):
            logits.append(real(*given))
            return logits[-1]

        monkeypatch.setattr(Passes, "draft_step", draft_step)
        how = {"skip": SkipConfig.low_precision(bits), "controller": "fixed", "lookup": False}
        how |= {"draft_vocabulary": range(40) if bits == 4 else None, "max_draft_length": 3}
        ids = prompt(9, rows=rows).to(device)
        generate(model, ids, max_new_tokens=6, execution=execution, **how)
        return logits

    for got, want in zip(logits_of("captured"), logits_of("fused"), strict=True):
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_trees_keep_the_text(device, monkeypatch):
    """Also where nodes are padded to a power of two."""
    from layerskip.backends import kernels

    model, ids = lively_model("llama", dtype=torch.float32, num_hidden_layers=2), prompt(9)
    model, ids, new = model.to(device), ids.to(device), 8
    monkeypatch.setattr(captured, "_kernels", lambda _: kernels)
    want = generate(model, ids, max_new_tokens=new, execution="fused", enabled=False).sequences
    how = {"skip": None, "sources": [Guesses(want[:, 9:].tolist())], "controller": "fixed"}
    how |= {"max_draft_length": 5, "lookup": False}
    out = generate(model, ids, max_new_tokens=new, execution="captured", **how)
    assert torch.equal(out.sequences, want)
    assert out.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("family", "widths", "right", "wrong"),
    [
        ("gemma2", "odd", "squares / h", "squares / COLUMNS"),
        ("gemma2", "odd", "tl.sum(wide * wide, 0) / h", "tl.sum(wide * wide, 0) / WIDTH"),
        ("gemma2", "odd", "(i + r // 2) % r", "(i + WIDTH // 2) % r"),
        ("gemma2", "odd", "> slot[:, None] - window", ">= slot[:, None] - window"),
        ("llama", "even", "tl.load(largest + place) - most", "0.0"),
        ("llama", "wide", "512 // x.dtype.itemsize", "512 // x.dtype.itemsize // min(len(x), 2)"),
        ("gemma2", "odd", "((pairs ^ -128) & -16)", "(pairs & -16)"),
        ("gemma2", "odd", "stride = groups * 32", "stride = h"),
        ("llama", "even", "tl.where(s < root, s", "tl.where(s < root + 64, s"),
        ("llama", "even", "if start + SPLIT > root:", "if start > root:"),
    ],
)
def test_a_wrong_kernel_is_seen(family, widths, right, wrong, compare, tmp_path, monkeypatch):
    """Negative controls of every kernel; the one with other columns gives wrong bits alone."""
    found = 0
    for name in ("layerskip.backends.kernel_products", "layerskip.backends.kernels"):
        source = Path(importlib.util.find_spec(name).origin).read_text("utf-8")
        found += source.count(right)
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(right, wrong), "utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        monkeypatch.setitem(sys.modules, name, altered := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(altered)
    assert found == 1
    bits = {"pairs": 4, "stride": 8}.get(right.strip("(").split()[0])
    error, same = compare(altered, family, widths, 1, 5, 125, None, bits, trees="root" in right)
    if "itemsize" in right:
        assert error < BOUND
        assert not same
    else:
        assert error > BOUND


@linux
@pytest.mark.parametrize("cases", ["not slow", *thorough("slow")])
def test_on_a_cpu(cases):
    """Triton reads TRITON_INTERPRET when it is imported, so this takes a process of its own."""
    tests = (
        *(test_kernels_compute_what_fused_blocks_do, test_nodes_have_the_bits_of_their_path),
        *(test_drafts_in_few_bits_are_those_of_fused_blocks, test_trees_keep_the_text),
        test_a_wrong_kernel_is_seen,
    )
    names = [f"{__file__}::{test.__name__}" for test in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "-m", cases, *names],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


class H100:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@linux
@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled here is kept for its GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_for_a_gpu(dtype, monkeypatch):
    """They are not launched. While they multiply, the next weights arrive, 16 bytes at a time."""
    from triton.runtime import JITFunction, driver

    from layerskip.backends import kernels

    compiled, real = [], JITFunction.run

    def run(self, *given, warmup, **how):
        compiled.append((self.fn.__name__, real(self, *given, warmup=True, **how)))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(captured, "_kernels", lambda _: kernels)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    opened = Sublayers(tiny_model("gemma2", dtype=dtype, **shape), "captured")
    tables, slots = opened.rotary(SLOTS, SLOTS).tables, torch.arange(5)[None]
    pairs = {0: tuple(torch.zeros(2, 1, 2, SLOTS, 8, dtype=dtype))}
    hidden = torch.zeros(1, 5, 512, dtype=dtype)
    monkeypatch.setattr(type(driver), "active", H100())
    for bits in (None, 8, 4):
        blocks = [opened.backend.sublayer(number, Variant(bits)) for number in range(2)]
        blocks.append(opened.backend.head(bits=bits))
        nodes = {} if bits else {"positions": slots, "paths": slots}
        captured._pass(blocks, 255, pairs, tables, True, hidden, slots, **nodes)
    names = {name for name, _ in compiled}
    assert names == {"_product", "_normalised", "_turn", "_attend", "_joined"}
    for name, kernel in compiled:
        assert kernel.metadata.shared <= 99 << 10, name  # bytes, on any GPU since 2020
        assert name != "_product" or "cp.async.cg.shared.global" in kernel.asm["ptx"]


@linux
@pytest.mark.wheel
def test_commands_are_quiet_where_triton_is_installed():
    """It reports every object of its own that is left when a process ends."""
    assert importlib.util.find_spec("triton")
    asked = process("generate", "demo-llama", "--prompt", "a", "--max-new-tokens", 1, "--quiet")
    assert asked.communicate()[1] == ""
    assert asked.returncode == 0
