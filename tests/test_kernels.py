"""Triton's kernels against the fused blocks: on a GPU, and on a CPU in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from commands import process
from covering import covering
from marks import slow, thorough
from models import FAMILIES, WINDOW, tiny_model

from layerskip.backends import captured
from layerskip.backends.base import Variant
from layerskip.model.sublayers import Sublayers

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
}
BY_TYPE = ("gemma2", "gemma3", "qwen2", "qwen3")  # what a layer sees
# Together the families have norms of heads, biases, soft caps, windows, both gates, and sublayers
# that are multiplied or normalised before they are added. A draft with a window narrows that of a
# layer, or gives it one and the first slots.
AXES = (*FAMILIES, "granite"), tuple(WIDTHS), (1, 2), (1, 5, 8, 16), (3, 120), (None, WINDOW // 2)
FEW = [*zip(cycle(AXES[0]), *zip(*covering(*AXES[1:]), strict=True), strict=False)]
OTHERS = slow(*covering(*AXES, strength=3)) if INTERPRETED else ()  # on a GPU the few are enough

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton")


@pytest.fixture(params=["cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
def compare(request, monkeypatch):
    """Runs passes by kernels and by fused blocks.

    Returns the relative error, and whether single tokens have the bits that they have among others.
    """
    if INTERPRETED:
        from triton.runtime import interpreter

        def dot(self, a, b, sums, *_):
            """In one order for all rows, as on a GPU; NumPy's own products have several."""
            products = a.data[:, :, None] * b.data[None]  # (M, K, N)
            return interpreter.TensorHandle(products.sum(1) + sums.data, sums.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)

    def compared(kernels, family, widths, rows, count, first, window):
        shape = dict(WIDTHS[widths])
        if family in BY_TYPE:
            shape["layer_types"] = ["sliding_attention"]
        model = tiny_model(family, dtype=torch.float32, num_hidden_layers=1, **shape)
        monkeypatch.setattr(captured, "_kernels", lambda _: kernels)
        opened = Sublayers(model.to(request.param), "captured")
        attention = opened.backend.sublayer(0, Variant(window=window))
        assert attention.few is not None
        blocks, tables = (attention, opened.blocks[1], opened.head), opened.rotary(SLOTS, SLOTS)
        heads = model.config.num_key_value_heads, SLOTS, opened.parts[0].attention.head_dim
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, count, model.config.hidden_size, generator=draw)  # (B, T, H)
        buffers = torch.randn(2, rows, *heads, generator=draw)  # (2, B, K, S, D)
        slots = first + torch.arange(count) + 9 * torch.arange(rows)[:, None]  # (B, T)
        hidden, buffers, slots = (each.to(request.param) for each in (hidden, buffers, slots))

        def run(few, buffers, row=slice(None), token=slice(None)):
            inputs = hidden[row, token], slots[row, token].contiguous()
            pairs = {0: tuple(buffers[:, row])}
            return captured._pass(blocks, SLOTS - 1, pairs, tables.tables, few, *inputs)

        def alone(r, t):
            return run(True, own, slice(r, r + 1), slice(t, t + 1))[0, 0]

        with torch.inference_mode():
            own, library = buffers.clone(), buffers.clone()
            got, want = run(True, own), run(False, library)
            corners = {(0, 0), (rows - 1, count - 1)}
            same = all(torch.equal(alone(r, t), got[r, t]) for r, t in corners)
        errors = ((got - want).norm() / want.norm(), (own - library).norm() / library.norm())
        return max(errors).item(), same

    return compared


@pytest.mark.parametrize(("family", "widths", "rows", "count", "first", "window"), [*FEW, *OTHERS])
def test_kernels_compute_what_fused_blocks_do(family, widths, rows, count, first, window, compare):
    from layerskip.backends import kernels

    error, same = compare(kernels, family, widths, rows, count, first, window)
    assert error < BOUND
    assert same


@pytest.mark.parametrize(
    ("family", "widths", "right", "wrong"),
    [
        ("gemma2", "odd", "squares / h", "squares / COLUMNS"),
        ("gemma2", "odd", "tl.sum(wide * wide, 0) / h", "tl.sum(wide * wide, 0) / WIDTH"),
        ("gemma2", "odd", "(i + r // 2) % r", "(i + WIDTH // 2) % r"),
        ("gemma2", "odd", "> slot[:, None] - window", ">= slot[:, None] - window"),
        ("llama", "even", "tl.load(largest + place) - most", "0.0"),
        ("llama", "wide", "512 // x.dtype.itemsize", "512 // x.dtype.itemsize // min(len(x), 2)"),
    ],
)
def test_a_wrong_kernel_is_seen(family, widths, right, wrong, compare, tmp_path):
    """Negative controls of every kernel; the last one gives wrong bits alone."""
    from layerskip.backends import kernels

    source, path = Path(kernels.__file__).read_text("utf-8"), tmp_path / "altered.py"
    assert source.count(right) == 1
    path.write_text(source.replace(right, wrong), "utf-8")
    spec = importlib.util.spec_from_file_location("altered", path)
    spec.loader.exec_module(altered := importlib.util.module_from_spec(spec))
    error, same = compare(altered, family, widths, 1, 5, 125, None)
    if "itemsize" in right:
        assert error < BOUND
        assert not same
    else:
        assert error > BOUND


@linux
@pytest.mark.parametrize("cases", ["not slow", *thorough("slow")])
def test_on_a_cpu(cases):
    """Triton reads TRITON_INTERPRET when it is imported, so this takes a process of its own."""
    tests = test_kernels_compute_what_fused_blocks_do, test_a_wrong_kernel_is_seen
    names = [f"{__file__}::{test.__name__}" for test in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "-m", cases, *names],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


@linux
@pytest.mark.wheel
def test_commands_are_quiet_where_triton_is_installed():
    """It reports every object of its own that is left when a process ends."""
    assert importlib.util.find_spec("triton")
    asked = process("generate", "demo-llama", "--prompt", "a", "--max-new-tokens", 1, "--quiet")
    assert asked.communicate()[1] == ""
    assert asked.returncode == 0
