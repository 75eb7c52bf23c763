"""Trained modules as drafts: the text, their states and replays; here they are untrained."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cost_records import analytic
from guesses import Guesses
from kinds import BLOCKS, weights_of
from looped import ENDS, decoded, model_of, prompts, second_of
from marks import thorough
from models import Fickle, Growing, lively_model, tiny_model

from layerskip import Lookup, LowPrecision, SkipConfig, generate
from layerskip.bench.methods import Engine, Task
from layerskip.cache.rows import RowCache
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources import assistant as assistants
from layerskip.decoding.sources.assistant import Assistant
from layerskip.model.draft_modules import TOKENS, Heads, save_trained
from layerskip.model.opened_model import Pass
from layerskip.model.opened_models import Sublayers
from layerskip.research import blocks as states
from layerskip.timing.cost_tables import cost_tables
from layerskip.weights.stored import store_halves

LOW = {
    f"{kind} in {bits} bits": LowPrecision(bits=bits, attention=(), mlp=(), head=head)
    for kind, bits, head in zip(BLOCKS, (8, 8, 4), (8, 4, 4), strict=True)
}
EXIT = 4
LAYERED = tuple(kind for kind in BLOCKS if kind != "heads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


def skip_of(name, folder, model=None):
    """A module's skip config, for the usual model by default; rounded if its name says so."""
    kind = name.partition(" ")[0]
    trained = weights_of(kind, model or model_of(), folder)
    exit_layer = EXIT if kind == "exit-block" else None
    return SkipConfig(exit_layer=exit_layer, trained=trained, low=LOW.get(name))


def drafts_of(mixture, folder):
    named = {"lookup": Lookup(), "exit": SkipConfig.early_exit(2)}
    named |= {"scattered": SkipConfig(attention=(5,), mlp=(5,))}
    for name, noise in (("assistant", 0.5), ("second", 0.2)):
        named[name] = Assistant(Sublayers(second_of(noise=noise)))
    found = [
        named[name] if name in named else skip_of(name, folder) for name in mixture.split(", ")
    ]
    return tuple(d.resolve(6) if isinstance(d, SkipConfig) else d for d in found)


ASSISTED = (
    "assistant",
    "assistant, exit",
    "lookup, assistant, second, exit",
    "lookup, exit-block, heads, streams, scattered, exit, assistant",
)


def check_states(run):
    """Compare every state with one pass over its text; counts comparisons and lagging states."""
    passes, model, counts = run.passes, run.passes.model, Counter[str]()
    for state in passes.states:
        if not isinstance(state, (states._LayerState, assistants.AssistantState)):
            continue
        for row, place in passes.rows.items():
            text = torch.tensor([*passes.prompts[row].tolist(), *run.emitted[row]])
            seen = state.seen[row]
            counts["short"] += seen < len(text) - 1
            if not seen:
                continue
            if isinstance(state, assistants.AssistantState):
                other = Passes(state.model, [], [Seat(text[:seen])], max_draft_length=0)
                other.prefill()
                fresh = other.cache
            else:
                cache = model.new_cache(1, len(text))
                cache.place([0], len(text))
                step = Pass(model, cache, passes.rotary)
                hidden = model.run(model.embed(text[None]), step, range(state.tap or 0))
                if isinstance(state, states.StreamsState):
                    before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
                    hidden = state.block.join(before, model.embed(text[None]))
                fresh = states.RowCache(1, len(text), state.cache.windows)
                fresh.place([0], len(text))
                model.backend.run(hidden, Pass(model, fresh, passes.rotary), state.blocks)
            for name in ("keys", "values"):
                for layer, ours in getattr(state.cache, name).items():
                    want = getattr(fresh, name)[layer][0, :, :seen]
                    torch.testing.assert_close(ours[place, :, :seen], want, rtol=1e-9, atol=1e-9)
                    counts["looked"] += 1
    return counts


def play(drafts, controller, sample):
    counts = Counter[str]()
    how = {"sample": sample, "new_tokens": 30, "eos": ENDS, "execution": "modules"}
    decoded(drafts, controller, **how, each=lambda run: counts.update(check_states(run)))
    return counts


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("mixture", [*LAYERED, *[*LOW][::2], *ASSISTED])
def test_states_are_those_of_whole_texts_after_every_round(mixture, sample, folder):
    counts = play(drafts_of(mixture, folder), Fickle(7 + sample), sample)
    assert counts["looked"]
    assert counts["short"] or "assistant" not in mixture  # while others drafted, or none


@pytest.mark.parametrize("mixture", ["lookup, streams", *thorough("lookup, exit-block")])
def test_states_are_those_of_whole_texts_where_trees_were_taken(mixture, folder, spied):
    drafts = drafts_of(mixture, folder)
    how = {"new_tokens": 30, "eos": ENDS, "execution": "modules"}
    texts = decoded(drafts, Fickle(7), sample=True, **how).emitted
    paths = spied(RowCache, "keep_path", lambda _, __, ___, path: [*path])
    assert play((Guesses(texts), *drafts), Fickle(7), True)["looked"]
    assert any(path != [*range(1, len(path) + 1)] for path in paths)  # which moved some slots


@pytest.mark.parametrize("mixture", ["lookup, exit-block", *thorough("lookup, assistant")])
def test_states_are_those_of_whole_texts_where_drafts_branch(mixture, folder):
    controller = Growing(3)
    assert play(drafts_of(mixture, folder), controller, True)["looked"]
    assert controller.widened


@pytest.mark.parametrize("together", [*thorough(0), 2, *thorough(64)])
def test_streams_draft_the_same_in_however_many_passes_they_catch_up(together, folder, monkeypatch):
    drafts = drafts_of("lookup, streams", folder)
    whole = decoded(drafts, Fickle(3), sample=True)
    monkeypatch.setattr("layerskip.research.blocks.TOGETHER", together)
    run = decoded(drafts, Fickle(3), sample=True)
    assert run.emitted == whole.emitted
    assert run.stats.sources == whole.stats.sources
    assert whole.stats.sources[1].num_accepted_tokens > 0
    assert play(drafts, Fickle(3), True)["looked"]


@pytest.mark.parametrize("kind", [*LAYERED, "assistant"])
def test_a_state_that_is_not_rolled_back_is_seen(kind, folder, monkeypatch):
    """Negative control: states that keep rejected tokens fail the tests above."""

    def forgetful(self, row, emitted, steps):
        if steps:
            self.seen[row] = self.batch.lengths[row] + steps + 1

    monkeypatch.setattr(states._LayerState, "commit", forgetful)
    monkeypatch.setattr(states.StreamsState, "commit", forgetful)
    monkeypatch.setattr(assistants.AssistantState, "commit", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        play(drafts_of(kind, folder), Fixed(4), sample=False)


@pytest.mark.parametrize("kind", BLOCKS)
def test_it_is_measured_what_they_cost(kind, folder):
    model, skip = model_of(), skip_of(kind, folder)
    ids, mask = prompts(model)
    opened = Sublayers(model)
    request = Request(ids, mask, 8, Law((), do_sample=False, rows=len(ids)))
    found = cost_tables(opened, [skip.resolve(6)], request, seconds=0.1)  # at least two sweeps
    (table,) = (each.at(0) for each in found)
    assert table.source == "measured"
    exact = analytic(opened, SkipConfig.early_exit(EXIT)).draft
    assert (analytic(opened, skip).draft > exact) is (kind == "exit-block")


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_that_are_read_in_half_the_bytes_take_them(kind, tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96).float()
    ids, skip = torch.arange(5, 30)[None], skip_of(kind, tmp_path, model)
    assert store_halves(model)
    how = {"max_new_tokens": 20, "do_sample": True, "seed": 5}
    plain = generate(model, ids, enabled=False, **how).sequences
    assert torch.equal(generate(model, ids, skip=skip, **how).sequences, plain)


def drafting(opened, skip, ids):
    """Logits of three draft steps after a prompt (T,) and token 3, (3, 1, V)."""
    passes = Passes(opened, [skip.resolve(6)], [Seat(ids, 9, [3])], max_draft_length=4)
    passes.prefill()
    return torch.stack([passes.draft_step(torch.tensor([3]), n) for n in range(3)])


@pytest.mark.parametrize("name", LOW)
def test_rounded_modules_cost_less_and_draft_nearly_the_same(name, folder):
    model = lively_model("llama", dtype=torch.float32, vocab_size=12)
    ids, _ = prompts(model)
    skip, opened = skip_of(name, folder, model), Sublayers(model)
    exact = replace(skip, low=None)
    assert opened.execution == "native"
    assert analytic(opened, skip).draft < analytic(opened, exact).draft
    assert 0 < opened.weights.nbytes(skip) < opened.weights.nbytes(exact) + 4 * 12 * 32
    more = replace(skip, low=replace(skip.low, attention=None, mlp=None))
    assert opened.weights.nbytes(more) == opened.weights.nbytes(skip)  # it runs no sublayer so
    # the laws are close to those of exact weights, but not equal
    want, got = (drafting(opened, each, ids[0]).softmax(-1) for each in (exact, skip))
    assert 0 < (got - want).abs().max() < (0.1 if skip.module_bits == 8 else 0.3)


@pytest.mark.parametrize("name", ["heads", "streams", "heads in 8 bits"])
def test_a_module_drafts_the_tokens_that_it_has_learnt_only(name, folder):
    """Restricted to the draft vocabulary, unless the module knows none of that."""
    model = lively_model("llama", dtype=torch.float32)
    opened, skip = Sublayers(model), skip_of(name, folder, model).resolve(6)
    every = range(model.config.vocab_size)
    known = {token for token in every if token % 6 != 2}
    for given, wanted in ((every, known), ([2, 3, 4, 9], {3, 4, 9}), ([2, 8], {2, 8})):
        for logits in drafting(opened.trimmed(given), skip, torch.tensor([5, 9])):
            assert set(logits[0].isfinite().nonzero()[:, 0].tolist()) == wanted
    assert skip.trained is not None
    whole = save_trained(
        folder / "whole.safetensors",
        opened.weights.module(skip).block.state_dict(),
        skip.trained.kind,
        model,
    )
    other = replace(skip, trained=whole)
    assert analytic(opened, skip).draft < analytic(opened, other).draft
    assert (opened.weights.nbytes(skip) < opened.weights.nbytes(other)) is (skip.low is not None)


def test_modules_that_do_not_fit_are_refused(folder):
    model = model_of()
    opened = Sublayers(model)
    trained = save_trained(
        folder / "wrong.safetensors", Heads(opened, 2).state_dict(), "exit-block", model
    )
    for skip, words in (
        (SkipConfig(exit_layer=3, trained=trained), "holds no exit-block for this model"),
        (SkipConfig(mlp=(2,), trained=skip_of("exit-block", folder).trained), "follows an early"),
    ):
        with pytest.raises(ValueError, match=words):
            decoded((skip.resolve(6),), Fixed(2))
    for tokens in ([5, 97], [-1, 5], []):
        weights = Heads(opened, 2).state_dict() | {TOKENS: torch.tensor(tokens, dtype=torch.int32)}
        foreign = save_trained(folder / "tokens.safetensors", weights, "heads", model)
        with pytest.raises(ValueError, match=r"drafts tokens that this model lacks: it has 0\.\."):
            decoded((SkipConfig(trained=foreign).resolve(6),), Fixed(2))


@pytest.mark.parametrize(
    ("name", "label", "kept"),
    [
        ("exit-block", "exit 4, a trained block", 8),
        ("heads", "trained heads", 0),
        ("streams", "trained streams", 0),
        ("exit-block in 8 bits", "exit 4, a trained block in 8 bits", 8),
        ("heads in 8 bits", "trained heads in 8 bits, head in 4", 0),
    ],
)
def test_records_and_lines_name_them(name, label, kept, folder):
    skip = skip_of(name, folder)
    told = Engine(model_of(), Task(8), "self", skip).describe()
    assert told["label"].startswith(f"{label}, ")
    assert told["num_kept"] == told["prefix"] == kept
    assert SkipConfig.from_dict(told["skip"]) == skip
