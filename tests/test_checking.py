"""The losslessness check: clean on a correct engine, and it fails on each kind of wrong one."""

import json
import math

import pytest
import torch
from models import prompt, tiny_model

from layerskip.bench import lawtest
from layerskip.bench.checks import LEVEL, _deviation, check, compare
from layerskip.bench.comparison import Comparison, Difference, first_difference
from layerskip.bench.lawtest import chi_square, draw_rounds
from layerskip.bench.methods import Task
from layerskip.config import SkipConfig
from layerskip.decoding import draws
from layerskip.decoding.noise import TARGET, gumbel_noise
from layerskip.decoding.passes import Session
from layerskip.model.sublayers import Sublayers

SKIP = SkipConfig.early_exit(3)
PROMPTS = [prompt(12, seed=1), prompt(7, seed=2)]


@pytest.fixture
def few_draws(monkeypatch):
    """Where the sampled law is not the point, which takes the longest."""
    monkeypatch.setattr(lawtest, "DRAWS", 64)


def logits(seed, size=40, scale=2.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("family", "dtype", "skip"),
    [
        ("llama", torch.float64, SKIP),
        ("gemma2", torch.float32, SkipConfig(attention=(0, 3), mlp=(2,))),
    ],
)
def test_a_correct_engine_passes(monkeypatch, family, dtype, skip):
    if family == "gemma2":
        monkeypatch.setattr(lawtest, "DRAWS", 256)
    model = tiny_model(family, dtype=dtype)
    said = []
    report = check(model, PROMPTS, skip, max_new_tokens=16, note=said.append)
    assert report.passed, report
    assert report.greedy.prompts == report.coupled.prompts == 2
    assert report.greedy.tokens == report.coupled.tokens == 32
    assert report.laws.keys() == {"coupled", "rejection"}
    assert len(report.laws["rejection"].p_values) == 8  # 2 prompts, 2 positions, 2 tokens
    # 0 where passes are native: those compute a token alike, bit by bit
    assert 0 <= report.cache_error < report.cache_resolution < 1e-3
    assert len(said) == 4
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["passed"] is True
    assert document["model"]["as_found"] is True


def test_it_honours_processors_of_the_model():
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.5
    assert compare(model, PROMPTS, SKIP, Task(16)).tokens == 32


def shifted_verify(monkeypatch, step):
    """An engine whose verification reads logits that are off by `step` for one token."""
    verify = Session.verify

    def wrong(self, tokens, positions):
        out = verify(self, tokens, positions).clone()  # of one's own
        out[..., 5] += step
        return out

    monkeypatch.setattr(Session, "verify", wrong)


@pytest.mark.usefixtures("few_draws")
def test_wrong_logits_are_faults(monkeypatch):
    model = tiny_model("llama", dtype=torch.float32)
    shifted_verify(monkeypatch, 3.0)
    report = check(model, PROMPTS, SKIP, max_new_tokens=16)
    assert report.greedy.faults > 0
    assert not report.passed
    for difference in report.greedy.differences:
        assert difference.got == 5
        assert difference.margin > 1000 * difference.resolution


def test_rounding_is_told_from_faults():
    """Two tokens of equal weights always tie; which one wins is rounding's choice."""
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[6] = model.lm_head.weight[5] * 4
    chosen = model.generate(PROMPTS[0], do_sample=False, max_new_tokens=16)[0, 12:].tolist()
    assert 5 in chosen  # the first of equals

    class Tied(type(model)):
        def generate(self, *args, **kwargs):
            out = super().generate(*args, **kwargs)
            if "custom_generate" not in kwargs and isinstance(out, torch.Tensor):
                out = torch.where(out == 5, 6, out)
            return out

    model.__class__ = Tied
    found = compare(model, PROMPTS[:1], SKIP, Task(16))
    (difference,) = found.differences
    assert (difference.expected, difference.got) == (6, 5)
    assert difference.near_tie
    assert found.near_ties == 1
    assert found.faults == 0
    assert found.tokens == difference.position == chosen.index(5)


def test_noise_that_depends_on_the_draft_is_a_fault(monkeypatch):
    """Coupled text must not depend on what is drafted; greedy text cannot show it."""
    model = tiny_model("llama")

    def wrong(self, raw, positions, drafts=None, **settings):
        extra = 0 if drafts is None else 1000 * max(drafts.lengths)

        def other(keys, places, scores):
            return [*gumbel_noise(keys, [place + extra for place in places], scores.shape[-1])]

        self.noise.at = other
        verdict = right(self, raw, positions, drafts, **settings)
        del self.noise.at
        return verdict

    right = draws.Draws.judge
    monkeypatch.setattr(draws.Draws, "judge", wrong)
    found = compare(model, PROMPTS, SKIP, Task(16, do_sample=True, temperature=0.8, seed=3))
    assert found.faults > 0


def test_a_length_difference_is_a_fault():
    ended = Difference(0, 4, None, 7, math.inf, 0.0)
    assert not ended.near_tie
    assert Comparison(1, 4, (ended,)).to_dict()["differences"][0]["margin"] is None


class Narrow(torch.Tensor):
    """A tensor of a device without float64, as Apple's GPUs are, until it comes to the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return out.as_subclass(torch.Tensor)
        if isinstance(out, Narrow) and out.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return out


def test_devices_without_float64_are_served():
    narrow = logits(1).as_subclass(Narrow)
    with pytest.raises(TypeError, match="no float64"):
        narrow.double()
    opened = Sublayers(tiny_model("llama", dtype=torch.float32))
    first, second = narrow.cpu().topk(2).indices.tolist()
    found = first_difference(opened, 0, PROMPTS[0], [4, first], [4, second], lambda ids: narrow)
    assert (found.position, found.expected, found.got) == (1, first, second)
    assert found.margin == float(narrow[first].cpu().double()) - float(
        narrow[second].cpu().double()
    )
    keys = torch.ones(1, 2, 5, 3).as_subclass(Narrow)
    assert _deviation(keys * 1.5, keys, length=4) == 0.5
    assert 0 < chi_square([0, 1] * 50, torch.tensor([0.5, 0.5]).as_subclass(Narrow)) <= 1


@pytest.mark.usefixtures("few_draws")
def test_a_stale_cache_is_found(monkeypatch):
    model = tiny_model("llama")
    commit = Session.commit

    def wrong(self, row, emitted):
        commit(self, row, emitted)
        with torch.inference_mode():  # as the passes of the lean path write it
            for keys in self.cache.keys.values():
                keys[row, :, self.lengths[row] - 1] += 1e-6

    monkeypatch.setattr(Session, "commit", wrong)
    report = check(model, PROMPTS[:1], SKIP, max_new_tokens=8)
    assert not report.cache_passed
    assert not report.passed


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("leave", ["weight", "hook", "setting", "patch"])
def test_what_is_left_behind_is_named(monkeypatch, leave):
    model = tiny_model("llama")
    prefill = Session.prefill

    def careless(self):
        if leave == "weight":
            model.lm_head.weight.data[3, 4] += 0.5
        elif leave == "hook":
            model.model.norm.register_forward_hook(lambda *_: None)
        elif leave == "setting":
            model.config.num_hidden_layers = 6
            model.config.tried = True
        else:
            model.model.norm.forward = model.model.norm.forward
        return prefill(self)

    monkeypatch.setattr(Session, "prefill", careless)
    report = check(model, PROMPTS[:1], SKIP, max_new_tokens=4)
    named = {"weight": "lm_head.weight", "setting": "config"}
    assert report.changed == (named.get(leave, "model.norm (module)"),)
    assert not report.passed


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("draft_seed", [1, 2], ids=["equal", "different"])
def test_rounds_follow_the_target(rejection, draft_seed):
    target, draft = logits(1), logits(draft_seed)
    first, bonus = draw_rounds(target, draft, rejection=rejection, temperature=0.7)
    law = torch.softmax(target.double() / 0.7, -1)
    assert chi_square(first, law) > LEVEL
    assert chi_square(bonus, law) > LEVEL
    assert 0 < len(bonus) <= len(first)
    if draft_seed == 1:
        assert len(bonus) == len(first)  # equal laws: nothing is rejected


@pytest.mark.parametrize("rule", ["redraw from p", "accept all", "accept half", "same noise"])
def test_wrong_accept_rules_fail(monkeypatch, rule):
    """The negative control: known-wrong samplers, each one that somebody has shipped."""
    target, draft = logits(1, size=20, scale=1.0), logits(2, size=20, scale=1.0)
    law = torch.softmax(target.double(), -1)
    if rule == "redraw from p":
        monkeypatch.setattr(draws, "residual", lambda p, q: p)
    elif rule == "accept all":
        monkeypatch.setattr(draws, "acceptance_probability", lambda p, q: torch.ones_like(p))
    elif rule == "accept half":
        monkeypatch.setattr(draws, "acceptance_probability", lambda p, q: torch.full_like(p, 0.5))
    else:  # the draft's noise also draws the correction
        monkeypatch.setattr(draws, "DRAFT", TARGET)
    count = 8192 if rule == "same noise" else 2048  # p = 1e-16 and, of others, 1e-50
    first, _ = draw_rounds(target, draft, rejection=True, draws=count)
    assert chi_square(first, law) < LEVEL


def test_chi_square_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    law = torch.softmax(logits(3, size=6, scale=0.5).double(), -1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(law, 3000, replacement=True, generator=generator).tolist()
    counts = torch.bincount(torch.tensor(tokens), minlength=6).numpy()
    expected = stats.chisquare(counts, law.numpy() * 3000).pvalue
    assert chi_square(tokens, law) == pytest.approx(expected, rel=1e-6)


def test_chi_square_pools_rare_tokens_and_refuses_impossible_ones():
    law = torch.tensor([0.497, 0.497, 0.003, 0.003, 0.0])
    assert chi_square([0, 1] * 497 + [2, 3] * 3, law) > 0.99
    assert chi_square([0, 1] * 500 + [4], law) == 0.0
    assert chi_square([2] * 40 + [0, 1] * 480, law) < LEVEL
    assert chi_square([0] * 100, torch.tensor([1.0, 0.0])) == 1.0


def test_it_needs_prompts_that_fit():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="at least one prompt"):
        check(model, [], SKIP)
    with pytest.raises(ValueError, match="at most 256 tokens"):
        check(model, PROMPTS, SKIP, max_new_tokens=250)
