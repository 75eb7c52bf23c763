"""The losslessness check: it passes a correct engine and fails each kind of wrong one."""

import json
import math
from pathlib import Path

import pytest
import torch
from marks import thorough
from models import lively_model, prompt, tiny_model

from layerskip.api.loading import encode, load
from layerskip.bench.batches import one_by_one
from layerskip.bench.checks import LEVEL, check, compare, deviation
from layerskip.bench.comparison import Along, along, resolutions
from layerskip.bench.lawtest import chi_square, draw_rounds
from layerskip.bench.methods import Decoded, Engine, Task
from layerskip.config.skips import SkipConfig
from layerskip.decoding import draws, rules
from layerskip.decoding.noise import TARGET, gumbel_noise
from layerskip.decoding.passes import Passes
from layerskip.model.opened_models import Sublayers
from layerskip.texts.prompts import Prompt

SKIP = SkipConfig.early_exit(3)
PROMPTS = [prompt(12, seed=1), prompt(7, seed=2)]


def compared(model, prompts, task):
    """Drafts of a fixed length, compared with each reference they must equal."""
    drafting = Engine(model, task, "self", SKIP, controller="fixed")
    return compare(model, one_by_one(prompts), drafting)


@pytest.fixture
def few_draws(sizes):
    """Fewer draws for tests that are not about the sampled law, which takes the longest."""
    sizes(draws=64)


def logits(seed, size=40, scale=2.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("family", "dtype", "skip"),
    [
        *thorough(("llama", torch.float64, SKIP)),
        ("gemma2", torch.float32, SkipConfig(attention=(0, 3), mlp=(2,))),
    ],
)
def test_a_correct_engine_passes(sizes, family, dtype, skip):
    if family == "gemma2":
        sizes(draws=256)
    model = tiny_model(family, dtype=dtype)
    said = []
    report = check(model, PROMPTS, skip, max_new_tokens=16, note=said.append)
    assert report.passed, report
    for comparison in (report.greedy, report.plain, report.coupled):
        assert (comparison.prompts, comparison.tokens, comparison.differences) == (2, 32, ())
    assert 0 < report.greedy.resolution < 1e-4
    native = Sublayers(model).exact
    assert native == (report.plain.resolution == 0) == (report.coupled.resolution == 0)
    assert report.laws.keys() == {"coupled", "rejection"}
    assert len(report.laws["rejection"].p_values) == 8  # 2 prompts, 2 positions, 2 tokens
    # 0 if passes are native, because these compute a token identically, bit by bit
    assert 0 <= report.cache_error < report.cache_resolution < 1e-3
    assert len(said) == 4
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["passed"] is True
    assert document["model"]["as_found"] is True


def test_it_honours_processors_of_the_model():
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.5
    found = compared(model, PROMPTS, Task(16))
    assert [(each.tokens, each.differences) for each in found.values()] == [(32, ())] * 2


@pytest.mark.usefixtures("few_draws")
def test_wrong_logits_are_faults(shifted_verify):
    model = tiny_model("llama", dtype=torch.float32)
    shifted_verify(3.0)
    report = check(model, PROMPTS, SKIP, max_new_tokens=16)
    assert report.greedy.faults > 0
    assert not report.passed
    for difference in report.greedy.differences:
        assert difference.got == 5
        assert difference.margin > 1000 * difference.resolution > 0


class Twins:
    """A model in which tokens 5 and 6 always tie, and whose `generate()` takes the higher one.

    So the two ways to decode break the tie differently, as rounding might.
    """

    def __init__(self):
        self.model = model = tiny_model("llama", dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight[5] = model.lm_head.weight[6] = model.lm_head.weight[5] * 4
        out = model.generate(PROMPTS[0], do_sample=False, max_new_tokens=16)
        self.text = out[0, 12:].tolist()
        assert 5 in self.text[:15]  # the lower of two equal tokens

        class Tied(type(model)):
            def generate(self, *args, **kwargs):
                out = super().generate(*args, **kwargs)
                return torch.where(out == 5, 6, out) if isinstance(out, torch.Tensor) else out

        model.__class__ = Tied


def test_rounding_is_told_from_faults():
    twins = Twins()
    found = compared(twins.model, PROMPTS[:1], Task(16))["generate"]
    (difference,) = found.differences  # later tokens are judged along this text
    assert (difference.expected, difference.got) == (6, 5)
    assert difference.position == twins.text.index(5)
    assert difference.near_tie
    assert (found.near_ties, found.faults, found.tokens) == (1, 0, 16)


def decoding(monkeypatch, texts):
    """Make drafting methods give these texts, one per prompt."""
    decode = Engine.decode

    def other(self, batch, repeat, clock, max_new_tokens=None):
        if self.kind != "self":
            return decode(self, batch, repeat, clock, max_new_tokens)
        return Decoded([texts[batch.numbers[0]]], clock(), [1])

    monkeypatch.setattr(Engine, "decode", other)


def test_a_text_is_judged_behind_its_near_ties(monkeypatch):
    twins = Twins()
    first = twins.text.index(5)
    ids = torch.cat([PROMPTS[0], torch.tensor([[*twins.text[:first], 6]])], dim=1)
    length = 15 - first
    rest = type(twins.model).__base__.generate(
        twins.model, ids, do_sample=False, max_new_tokens=length
    )
    text = [*twins.text[:first], 6, *rest[0, -length:].tolist()]
    assert len(text) == 16
    text[-1] = (text[-1] + 1) % 90 + 2
    decoding(monkeypatch, [text])
    found = compared(twins.model, PROMPTS[:1], Task(16, execution="modules"))["plain"]
    tie, *_, fault = found.differences
    assert (tie.position, tie.expected, tie.got, tie.near_tie) == (first, 5, 6, True)
    assert (fault.position, fault.got, fault.near_tie) == (15, text[-1], False)
    assert found.faults == 1


@torch.no_grad()
def runners_up(model, ids, length, every):
    """Greedy text of a prompt (1, T), in which every `every`-th token is the second-best."""
    text = []
    for number in range(length):
        logits = model(torch.cat([ids, ids.new_tensor([text])], dim=1)).logits[0, -1]
        text.append(int(logits.topk(2).indices[int(number % every == every - 1)]))
    return text


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.thorough
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runners_up_fail_the_check(monkeypatch, dtype):
    """Negative control: second-best tokens all along the text, with the measured resolution."""
    model = lively_model("llama").to(dtype)
    texts = [runners_up(model, ids, 32, every=8) for ids in PROMPTS]
    decoding(monkeypatch, texts)
    for execution in ("auto", "modules"):
        report = check(model, PROMPTS, SKIP, max_new_tokens=32, execution=execution)
        assert not report.passed
        for comparison in (report.greedy, report.plain):
            faults = [d for d in comparison.differences if not d.near_tie]
            assert len(faults) >= 6  # of eight
            assert all(d.position % 8 == 7 for d in faults)


@pytest.mark.parametrize(
    ("execution", "dtype"),
    [
        ("auto", DTYPES[1]),
        *thorough(*(("auto", dtype) for dtype in DTYPES[::2])),
        *thorough(*(("modules", dtype) for dtype in DTYPES)),
    ],
    ids=str,
)
def test_correct_texts_pass_in_every_dtype(dtype, execution):
    for family in ("llama", "gemma2"):
        model = lively_model(family).to(dtype)
        sampled = Task(16, True, 0.8, seed=3, execution=execution)
        found = compared(model, PROMPTS, Task(16, execution=execution))
        found |= {"coupled": compared(model, PROMPTS, sampled)["plain"]}
        for reference, comparison in found.items():
            assert comparison.faults == 0
            assert comparison.near_ties <= (3 if dtype == torch.bfloat16 else 0)
            if reference != "generate" and Sublayers(model, execution).exact:
                assert (comparison.resolution, comparison.differences) == (0, ())


def test_where_passes_are_exact_nothing_is_excused(monkeypatch):
    """Not even a tie is accepted."""
    twins = Twins()
    if not Sublayers(twins.model).exact:
        pytest.skip("no native passes here")
    decoding(monkeypatch, [[6 if token == 5 else token for token in twins.text]])
    found = compared(twins.model, PROMPTS[:1], Task(16))
    first = found["plain"].differences[0]
    assert (first.position, first.resolution, first.near_tie) == (twins.text.index(5), 0, False)
    assert found["plain"].faults >= 1


def test_the_resolution_is_that_of_the_changes():
    """It fits known changes: Gaussian ones, ten times as large at every other position."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 10.0]).double().repeat(2000)
    changes = torch.randn(2, 4000, 7, generator=generator, dtype=torch.float64) * sizes[:, None]
    changes[:, :50, 3:] = math.nan
    places = torch.full((4000,), 1e-9).double()
    (found,) = resolutions([Along([0] * 4000, places, places, changes)])
    own = torch.randn(4000, generator=generator, dtype=torch.float64) * sizes
    assert 0.0001 < (own.abs() > found).double().mean() < 0.002
    assert found[1::2].mean() > 1.2 * found[::2].mean()
    (found,) = resolutions([Along([0] * 4000, places, places, changes * 0)])
    assert torch.equal(found, places)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen2"])
def test_what_the_library_says_along_a_text(family):
    """It runs the library's passes of every width, with both attentions if they agree."""
    model, ids = tiny_model(family), PROMPTS[0]
    text = model.generate(ids, do_sample=False, max_new_tokens=40)[0, 12:].tolist()
    others = [*text]
    others[7] = (text[7] + 1) % 90
    before = model.config.to_dict(), model.config._attn_implementation
    found = along(model, ids, text, others, lambda logits, first: logits)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert found.best == text
    logits = model(torch.cat([ids, torch.tensor([text[:7]])], dim=1)).logits[0, -1]
    assert float(found.margins[7]) == pytest.approx(float(logits.max() - logits[others[7]]))
    assert found.margins.count_nonzero() == 1
    assert found.changes.shape == (2, 40, 7)
    assert along(model, ids, text[:1], text[:1], lambda logits, first: logits).best == text[:1]
    assert found.changes.abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("change", ["short", "long", "past the end"])
def test_a_length_difference_is_a_fault(monkeypatch, change):
    model, limit = tiny_model("llama"), 8
    text = runners_up(model, PROMPTS[0], limit + 1, every=99)
    wrong = text[:5] if change == "short" else text
    if change == "past the end":
        model.generation_config.eos_token_id = text[4]
        first = text.index(text[4]) + 1
        wrong = text[:limit]
    decoding(monkeypatch, [wrong])
    for comparison in compared(model, PROMPTS[:1], Task(limit)).values():
        (difference,) = comparison.differences
        places = {"short": (5, text[5], None), "long": (limit, None, text[limit])}
        expected = places.get(change) or (first, None, text[first])
        assert (difference.position, difference.expected, difference.got) == expected
        assert not difference.near_tie
        assert comparison.to_dict()["differences"][0]["margin"] is None


@pytest.mark.checkpoint
def test_runners_up_fail_the_check_of_a_trained_model(monkeypatch):
    """A regression: in bfloat16, 35 of 533 tokens of SmolLM2 once passed."""
    root = Path(__file__).parents[1]
    if not (root / "checkpoints/smollm2").is_dir():
        pytest.skip("no checkpoints/smollm2")
    monkeypatch.chdir(root)
    loaded = load("smollm2", dtype="bfloat16")
    asked = [Prompt(id="1", text=text) for text in ("Why is the sky blue?", "Tell me a story.")]
    prompts = [encode(loaded.tokenizer, each.as_chat()) for each in asked]
    assert compared(loaded.model, prompts, Task(48))["generate"].faults == 0
    decoding(monkeypatch, [runners_up(loaded.model, ids, 48, every=15) for ids in prompts])
    for comparison in compared(loaded.model, prompts, Task(48)).values():
        assert comparison.faults >= 3  # of six


def test_noise_that_depends_on_the_draft_is_a_fault(monkeypatch):
    """Coupled text must not depend on the drafts. Greedy texts cannot show this mistake."""
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
    task = Task(16, do_sample=True, temperature=0.8, seed=3)
    assert compared(model, PROMPTS, task)["plain"].faults > 0


class Narrow(torch.Tensor):
    """A tensor on a device without float64, like Apple's GPUs, until it is copied to the CPU."""

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
    model = tiny_model("llama", dtype=torch.float32)
    first, second = narrow.cpu().topk(2).indices.tolist()

    def scores(logits, number):
        return narrow.expand(len(logits), -1)

    found = along(model, PROMPTS[0], [4, second], [4, first], scores)
    assert found.best == [first, first]
    gap = narrow[first].cpu().double() - narrow[second].cpu().double()
    assert float(found.margins[1]) == float(gap)
    keys = torch.ones(2, 5, 3).as_subclass(Narrow)
    assert deviation(keys * 1.5, keys) == 0.5
    assert 0 < chi_square([0, 1] * 50, torch.tensor([0.5, 0.5]).as_subclass(Narrow)) <= 1


@pytest.mark.usefixtures("few_draws")
def test_a_stale_cache_is_found(monkeypatch):
    model = tiny_model("llama")
    commit = Passes.commit

    def wrong(self, row, emitted, *path):
        commit(self, row, emitted, *path)
        with torch.inference_mode():  # the fused path writes keys in this mode, too
            for keys in self.cache.keys.values():
                keys[row, :, self.lengths[row] - 1] += 1e-6

    monkeypatch.setattr(Passes, "commit", wrong)
    report = check(model, PROMPTS[:1], SKIP, max_new_tokens=8)
    assert not report.cache_passed
    assert not report.passed


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("leave", ["weight", "hook", "setting", "patch"])
def test_what_is_left_behind_is_named(monkeypatch, leave):
    model = tiny_model("llama")
    prefill = Passes.prefill

    def careless(self, *more):
        if leave == "weight":
            model.lm_head.weight.data[3, 4] += 0.5
        elif leave == "hook":
            model.model.norm.register_forward_hook(lambda *_: None)
        elif leave == "setting":
            model.config.num_hidden_layers = 6
            model.config.tried = True
        else:
            model.model.norm.forward = model.model.norm.forward
        return prefill(self, *more)

    monkeypatch.setattr(Passes, "prefill", careless)
    report = check(model, PROMPTS[:1], SKIP, max_new_tokens=4)
    named = {"weight": "lm_head.weight", "setting": "config"}
    assert report.changed == (named.get(leave, "model.norm (module)"),)
    assert not report.passed


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize(
    "draft_seed",
    [pytest.param(1, marks=pytest.mark.thorough, id="equal"), pytest.param(2, id="different")],
)
def test_rounds_follow_the_target(rejection, draft_seed):
    target, draft = logits(1), logits(draft_seed)
    first, bonus = draw_rounds(
        target,
        draft,
        acceptance="rejection" if rejection else "coupled",
        temperature=0.7,
        draws=640,
    )
    law = torch.softmax(target.double() / 0.7, -1)
    assert chi_square(first, law) > LEVEL
    assert chi_square(bonus, law) > LEVEL
    assert 0 < len(bonus) <= len(first)
    if draft_seed == 1:
        assert len(bonus) == len(first)  # with equal laws nothing is rejected


@pytest.mark.parametrize(
    "rule", ["redraw from p", "accept all", "accept half", *thorough("same noise")]
)
def test_wrong_accept_rules_fail(monkeypatch, rule):
    """Negative control: wrong samplers, each of which somebody has shipped."""
    target, draft = logits(1, size=20, scale=1.0), logits(2, size=20, scale=1.0)
    law = torch.softmax(target.double(), -1)
    module, name, wrong = {
        "redraw from p": (rules, "residual", lambda p, q: p),
        "accept all": (rules, "acceptance_probability", lambda p, q: torch.ones_like(p)),
        "accept half": (rules, "acceptance_probability", lambda p, q: torch.full_like(p, 0.5)),
        "same noise": (draws.noise, "DRAFT", TARGET),  # the draft's, reused
    }[rule]
    monkeypatch.setattr(module, name, wrong)
    count = 8192 if rule == "same noise" else 640  # then p = 1e-16, and about 1e-15 for the others
    first, _ = draw_rounds(target, draft, acceptance="rejection", draws=count)
    assert chi_square(first, law) < LEVEL


def test_chi_square_pools_rare_tokens_and_refuses_impossible_ones():
    law = torch.tensor([0.497, 0.497, 0.003, 0.003, 0.0])
    assert chi_square([0, 1] * 497 + [2, 3] * 3, law) > 0.99
    assert chi_square([0, 1] * 500 + [4], law) == 0.0
    assert chi_square([2] * 40 + [0, 1] * 480, law) < LEVEL
    assert chi_square([0] * 100, torch.tensor([1.0, 0.0])) == 1.0
