"""Settings for all tests: repeatable random cases, one thread per process, no network."""

import atexit
import gc
import json
import os
import random
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from covering import leave_pairs
from hypothesis import settings

gc.disable()  # while tests are collected, garbage collection takes a tenth of the time
_thaws, _unfreeze = [], gc.unfreeze
gc.unfreeze = lambda: _thaws.append(_unfreeze())  # get_freeze_count() counts a million objects
atexit.register(_unfreeze)  # Triton reports what is left of its own objects
sys.dont_write_bytecode = False  # rewrite asserts once, not in every process
# torch reads this when it is imported; tests run in parallel, and child processes inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LAYERSKIP_CACHE"] = ""  # neither read timings of earlier runs nor keep any
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads this when it is imported

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    gc.freeze()  # modules and collected tests, which would take half a second at a time
    gc.enable()
    leave_pairs(items)


@pytest.fixture(autouse=True)
def _modules_are_no_garbage():
    """Exempt them from garbage collection again if a benchmark has ended that."""
    if _thaws:
        gc.freeze()
        _thaws.clear()


@pytest.fixture(scope="session", autouse=True)
def _costs_are_measured_in_a_moment():
    """By two sweeps over all passes, and one MiB; users get more, and so does `test_costs.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("layerskip.timing.round_times.SWEEPS", 2)
        patch.setattr("layerskip.bench.bandwidth.Sweeps.__init__.__defaults__", (1 << 20,))
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_cpu_has_graphs():
    """What was captured runs once more, on the buffers that it was captured with."""
    import torch

    from layerskip.backends import captured

    on_a_gpu = captured._captured

    def on_a_cpu(run, inputs, beside):
        if inputs["hidden"].is_cuda:
            return on_a_gpu(run, inputs, beside)
        blocks, used, pairs, tables, few = run.args
        # of their own, so that a graph does not keep buffers from being handed out again
        pairs = {layer: tuple(each.view_as(each) for each in pair) for layer, pair in pairs.items()}
        tables = {kind: tuple(each.view_as(each) for each in pair) for kind, pair in tables.items()}
        held = {name: torch.empty_like(each) for name, each in inputs.items()}
        out = run(**inputs)
        run = partial(run.func, blocks, used, pairs, tables, few)
        graph = SimpleNamespace(replay=lambda: out.copy_(run(**held)))
        return captured._Graph(graph, held, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "DEVICES", ("cuda", "cpu"))
        patch.setattr(captured, "_captured", on_a_cpu)
        yield


@pytest.fixture(scope="session")
def llama():
    """A tiny model that no test changes."""
    from models import lively_model

    return lively_model("llama")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model that no test changes."""
    from checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def built():
    """Native passes, or the test is skipped."""
    from layerskip.native import extension

    reason = extension.refusal()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def priced(monkeypatch):
    """Costs that take no time to measure."""
    from layerskip.costs.speculation import CostTable

    table = CostTable(0.2, (1.0, 1.1, 1.2))
    for module in ("api.plan", "bench.suite"):
        monkeypatch.setattr(
            f"layerskip.{module}.cost_tables", lambda _, drafts, __, **___: [table for _ in drafts]
        )


@pytest.fixture
def given(tmp_path):
    """A file of nine prompts of several lengths."""
    draw = random.Random(0)
    lines = [
        {"id": f"a{n}", "prompt": "def f(x):\n" * draw.randint(1, 9) + f"  return {n}"}
        for n in range(9)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def shifted_verify(monkeypatch):
    """Breaks the engine: its verification reads logits that are too large for token 5."""

    def shift(step):
        from layerskip.decoding.passes import Passes

        verify = Passes.verify

        def wrong(self, tokens, positions, *branches):
            out = verify(self, tokens, positions, *branches).clone()  # a buffer that can be changed
            out[..., 5] += step
            return out

        monkeypatch.setattr(Passes, "verify", wrong)

    return shift


SIZES = {
    # thousands of draws of each accept rule, which tests of the check's other parts do not need
    "draws": "bench.lawtest.DRAWS",
    # tests of the rest of decoding measure costs in a moment, and those of costs do not
    "sweeps": "timing.round_times.SWEEPS",
    # the pieces of long texts: texts that cross their edges as they are would take seconds each
    "spare": "cache.rows.SPARE",
    "chunk": "model.opened_model.chunk_size",
    "piece": "decoding.places.PIECE",
    # the pieces of many texts: likewise
    "texts": "replay.trace.ROWS",
    "traced_logits": "replay.trace.LOGITS",
    **{name: f"replay.chains.{name.upper()}" for name in ("chains", "groups", "logits")},
}


@pytest.fixture
def sizes(monkeypatch):
    """Changes how much some code does at once, so that tiny cases cross the edges of its pieces."""

    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(f"layerskip.{SIZES[name]}", value)

    return change


@pytest.fixture
def spied(monkeypatch):
    """Notes what a function is given: `keep` says of each call what to note of its arguments."""

    def spy(place, name, keep):
        calls, function = [], getattr(place, name)

        def noted(*given, **named):
            calls.append(keep(*given))
            return function(*given, **named)

        monkeypatch.setattr(place, name, noted)
        return calls

    return spy
