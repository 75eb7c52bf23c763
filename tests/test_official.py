"""Drafts by a Gemma 4 assistant: its steps, the text, its law, replays, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import sampling
import torch
import transformers
from checkpoints import save_checkpoint
from commands import PROMPT, document, refused, run
from covering import covering
from kinds import CONTROLLERS, COSTS, ENDS, FEW, LAWS, LENGTHS, decoded, prompts
from models import VOCABULARY as WORDS
from models import WINDOW, Erratic, Fickle, lively_model
from official import TARGETS, assistant_of, source_of, target_of
from sampling import (
    LEVEL,
    PROCESSORS,
    accept_always,
    p_value,
    redraw_from_the_target,
    sample_texts,
)
from torch import Tensor

import layerskip
from layerskip import LayerSkipDecoding, Lookup, SkipConfig
from layerskip.bench.checks import check
from layerskip.costs.speculation import CostTable
from layerskip.decoding import draws
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources.official import Official
from layerskip.environment import _compiler
from layerskip.files.records import read_run
from layerskip.model.sublayers import Sublayers
from layerskip.replay.drafts import follow, replay
from layerskip.replay.simulation import SimulatedRound, simulate
from layerskip.replay.trace import Trace, take_trace

pytest.importorskip("transformers.models.gemma4_assistant", reason="transformers 5.23 has it")

NEW = 24


# ---------------------------------------------------------------------------------------------
# Its steps, against the library's own class.


@contextmanager
def mended() -> Iterator[None]:
    """transformers 5.23 with the property that keeps it from constructing an assistant mended."""

    def modes(self: Any) -> list[str | None]:
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return [None] * own + ["reuse"] * self.num_kv_shared_layers

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig"):
            patch.setattr(getattr(transformers, name), "kv_sharing_modes", property(modes))
        yield


def library_steps(family: str, built: Any, prompt: Tensor, tokens: list[int]) -> list[Tensor]:
    """Logits (V,) of the library's own class for a token that follows a prompt, then others.

    The keys are those of its own forward pass over the prompt.
    """
    with mended():
        own = type(built).__mro__[2](built.config).double().eval()
    own.load_state_dict(built.state_dict())
    target = target_of(family)
    past = transformers.DynamicCache()
    states = target.model(prompt[None], past_key_values=past, use_cache=True).last_hidden_state
    shared = {}
    for kind, part in zip(target.config.layer_types, Sublayers(target).parts, strict=True):
        if part.writes:
            layer: Any = past.layers[part.number]
            keys, values = layer.keys, layer.values
            first = -WINDOW if kind == "sliding_attention" else 0
            shared[kind] = keys[:, :, first:], values[:, :, first:]
    state, found = states[:, -1:], []
    for token in tokens:
        embedded = target.model.embed_tokens(torch.tensor([[token]]))
        out = own(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[len(prompt)]]),
            shared_kv_states=shared,
        )
        state = out.last_hidden_state
        found.append(out.logits[0, 0])
    return found


@pytest.mark.parametrize("execution", ["modules", "fused"])
@pytest.mark.parametrize(("family", "centroids"), covering(TARGETS, (False, True)))
@torch.no_grad()
def test_its_steps_are_those_of_the_librarys_own_class(
    family: str, centroids: bool, execution: str
) -> None:
    """Rows of different lengths at once, across a window."""
    if family == "gemma4_mixture":
        execution = "modules"
    ids, mask = prompts()
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    fed = [[5, 7, 3, 9], [4, 4, 8, 2], [11, 6, 20, 21]]
    opened = Sublayers(target_of(family), execution)
    passes = Passes(
        opened,
        [source_of(family, centroids, execution)],
        rows,
        max_new_tokens=8,
        max_draft_length=5,
        emitted=[tokens[:1] for tokens in fed],
    )
    passes.prefill()
    got = [
        passes.draft_step(torch.tensor(step), i) for i, step in enumerate(zip(*fed, strict=True))
    ]
    for row, (prompt, tokens) in enumerate(zip(rows, fed, strict=True)):
        built = assistant_of(family, centroids)
        for step, want in enumerate(library_steps(family, built, prompt, tokens)):
            own, other = got[step][row], got[step][row] == float("-inf")
            torch.testing.assert_close(own[~other], want[~other], rtol=0, atol=5e-6)
            # behind the candidates the library puts a number below theirs
            assert other.sum() == (FEW // 2 if centroids else 0)
            assert (want[other] == want[~other].min() - 1).all()


# ---------------------------------------------------------------------------------------------
# The text.

BESIDE: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "lookup": (Lookup(),),
    "lookup, 8 bits, layers left out": (
        *(Lookup(), SkipConfig.low_precision(8)),
        SkipConfig(attention=(0, 3), mlp=(2, 5)),
    ),
}


@functools.cache
def wanted(family: str, law: str, ended: bool) -> list[list[int]]:
    """New tokens of each row: the library's greedy ones, or those of plain decoding in modules."""
    model, (ids, mask) = target_of(family), prompts()
    how = LAWS[law] | {"max_new_tokens": NEW, "eos_token_id": ENDS if ended else None}
    if law != "greedy":
        how |= {"enabled": False, "execution": "modules", "attention_mask": mask}
        return layerskip.generate(model, ids, **how).sequences[:, ids.shape[1] :].tolist()
    found: Tensor = model.generate(ids, attention_mask=mask, pad_token_id=0, **how)
    return found[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "family",
    [TARGETS[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in TARGETS[1:])],
)
def test_the_text_is_that_of_the_target(family: str) -> None:
    tried = accepted = compactions = 0
    for beside, law, execution, controller, ended, centroids in covering(
        tuple(BESIDE), tuple(LAWS), ("modules", "fused"), tuple(CONTROLLERS), *[(False, True)] * 2
    ):
        if family == "gemma4_mixture":
            execution = "modules"
        drafts = (source_of(family, centroids, execution), *BESIDE[beside])
        controls = CONTROLLERS[controller]()
        out = decoded(target_of(family), drafts, law, controls, execution, ended, new=NEW)
        assert out.sequences[:, max(LENGTHS) :].tolist() == wanted(family, law, ended)
        tried += out.stats.sources[0].num_draft_tokens
        accepted += out.stats.sources[0].num_accepted_tokens
        compactions += out.stats.num_compactions
    assert tried / 20 < accepted < tried
    assert compactions


@torch.no_grad()
def test_a_node_is_drafted_on_as_the_last_token_of_its_path() -> None:
    tokens, parents = torch.tensor([[7, 9, 11, 5, 8], [4, 3, 8, 10, 6]]), [-1, 0, 0, 2, 1]
    source = source_of("gemma4")

    def opened_passes() -> Passes:
        texts, emitted = [torch.arange(2, 15), torch.arange(5, 9)], [[7], [4]]
        limits: dict[str, Any] = {"max_new_tokens": 20, "max_draft_length": 8}
        passes = Passes(
            Sublayers(target_of("gemma4"), "auto"), [source], texts, emitted=emitted, **limits
        )
        passes.prefill()
        for row, first in enumerate(emitted):
            passes.tell(row, first)
        return passes

    tree = opened_passes()
    said = [tree.draft_step(tokens[:, 0], 0)[:, None]]
    for first, end in ((1, 3), (3, 5)):
        said.append(tree.draft_step(tokens[:, first:end], first, 0, [parents[:end]] * 2))
    raw = torch.cat(said, 1)  # (R, N, V)
    for node, path in ((2, (0, 2)), (3, (0, 2, 3)), (4, (0, 1, 4))):
        chain = opened_passes()
        for offset, at in enumerate(path):
            alone = chain.draft_step(tokens[:, at], offset)
        torch.testing.assert_close(raw[:, node], alone)


DTYPES = (torch.float32, torch.bfloat16)
NATIVE = covering(TARGETS[:3], DTYPES, (False, True), ("greedy", "coupled"), tuple(BESIDE))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_texts_are_those_of_native_plain_decoding_bit_by_bit(dtype: torch.dtype) -> None:
    """Near-ties included."""
    accepted = 0
    for family, _, centroids, law, beside in (t for t in NATIVE if t[1] is dtype):
        model, (ids, mask) = target_of(family, dtype=dtype), prompts()
        opened = Sublayers(model, "native")
        second = Sublayers(assistant_of(family, centroids, dtype=dtype), "native")
        assert opened.execution == second.execution == "native"
        how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, **LAWS[law]}
        plain = layerskip.generate(model, ids, enabled=False, execution="native", **how).sequences
        drafts = (Official(opened, second), *BESIDE[beside])
        out = decoded(model, drafts, law, Fickle(1), "native", new=NEW)
        assert torch.equal(out.sequences, plain), (family, centroids, law, beside)
        accepted += out.stats.sources[0].num_accepted_tokens
    assert accepted > 10


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("family", "execution", "dtype"),
    [
        ("gemma4", "fused", torch.float64),
        ("gemma4_dense", "modules", torch.float64),
        ("gemma4", "native", torch.float32),
    ],
)
def test_its_drafts_are_the_same_where_sliding_layers_drop_old_keys(
    family: str, execution: str, dtype: torch.dtype, sizes: Any
) -> None:
    model, (ids, mask) = target_of(family, dtype=dtype), prompts()
    second = assistant_of(family, dtype=dtype)
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 50, "lookup": False}
    how |= {"do_sample": True, "seed": 3, "top_k": 0, "execution": execution, "draft_memory": 0}
    found = []
    for more in (256, 4):
        sizes(spare=more)
        out = layerskip.generate(model, ids, assistant=second, controller=Fickle(3), **how)
        found.append((out.sequences.tolist(), out.rounds))
    assert found[0] == found[1]
    assert any(sum(round_.accepted) for round_ in found[0][1] or ())


@pytest.mark.slow
@pytest.mark.skipif(_compiler() is None, reason="no C++ compiler on this machine")
def test_compiled_texts_are_those_of_plain_decoding() -> None:
    drafts = (source_of("gemma4", True, "compiled"),)
    out = decoded(target_of("gemma4"), drafts, "coupled", Fixed(3), "compiled", new=NEW)
    assert out.sequences[:, max(LENGTHS) :].tolist() == wanted("gemma4", "coupled", False)
    assert out.stats.sources[0].num_accepted_tokens


def test_the_prefill_of_a_target_that_shares_keys_runs_its_upper_layers_once() -> None:
    """For the last tokens: nothing else is read of their states."""
    counts = []
    model = target_of("gemma4")
    upper = model.model.layers[-1].mlp
    forward = type(upper).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(upper), "forward", lambda self, x: seen(self, x))

        def seen(self: Any, x: Tensor) -> Tensor:
            if self is upper:
                counts.append(x.shape[1])
            return forward(self, x)  # type: ignore[no-any-return]

        how: dict[str, Any] = {"lookup": False, "draft_memory": 0, "execution": "modules"}
        how |= {"controller": "fixed", "max_draft_length": 3, "max_new_tokens": 6}
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        layerskip.generate(model, ids, assistant=assistant_of("gemma4"), do_sample=False, **how)
    assert counts[0] == 1
    assert max(counts) == 4


# ---------------------------------------------------------------------------------------------
# The law.


def sampled(
    processors: str, centroids: bool, rejection: bool, patch: pytest.MonkeyPatch
) -> tuple[float, tuple[int, int]]:
    """The p-value of many texts under the target's law; drafted and accepted tokens."""
    tokens = sampling.VOCABULARY
    model = target_of("gemma4", tokens)
    second = assistant_of("gemma4", centroids, tokens, noise=0.4)
    patch.setattr(sampling, "small_model", lambda: model)
    sampling.exact_law.cache_clear()
    try:
        drafts = [Official(Sublayers(model), Sublayers(second))]
        counts, [drafted] = sample_texts(processors, rejection=rejection, drafts=drafts)
        return p_value(counts, processors), drafted
    finally:
        sampling.exact_law.cache_clear()


@pytest.mark.parametrize(
    ("processors", "centroids", "rejection"),
    [
        *((name, centroids, True) for name, centroids in zip(PROCESSORS, cycle((False, True)))),
        ("none", True, True),
        ("none", True, False),
        ("top-k", False, False),
    ],
)
def test_texts_follow_the_targets_law(
    processors: str, centroids: bool, rejection: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, (drafted, accepted) = sampled(processors, centroids, rejection, monkeypatch)
    assert 0.1 * drafted < accepted < drafted
    assert fits > LEVEL


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("residual", redraw_from_the_target), ("acceptance_probability", accept_always)],
)
def test_known_wrong_samplers_fail_the_same_test(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, name, wrong)
    assert sampled("none", False, True, monkeypatch)[0] < LEVEL


# ---------------------------------------------------------------------------------------------
# Replays.


@functools.cache
def traced(family: str, sample: bool, ended: bool) -> Trace:
    ids, mask = prompts()
    return take_trace(
        target_of(family),
        [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)],
        max_new_tokens=NEW,
        law=Law((), do_sample=sample, rows=1),
        seeds=range(len(ids)),
        eos=frozenset(ENDS) if ended else frozenset(),
        draft_length=6,
    )


@pytest.mark.parametrize(("family", "centroids"), covering(TARGETS, (False, True)))
def test_simulated_rounds_are_those_of_decoding(family: str, centroids: bool) -> None:
    """Alone and beside a lookup, for every law and end."""
    opened = Sublayers(target_of(family))
    source = Official(opened, Sublayers(assistant_of(family, centroids)))
    drafts = [Lookup(), source]
    costs = [CostTable(0.0, COSTS.verify), COSTS]
    made: list[Any] = [Fickle, lambda: Fixed(5), Erratic, lambda: ExpectedGain(costs)]
    for (sample, ended), make in zip(product((False, True), repeat=2), made, strict=True):
        some = drafts if make in (made[0], made[3]) else drafts[1:]
        trace = traced(family, sample, ended)
        ids, mask = prompts()
        request = Request(
            *(ids, mask, NEW, Law((), do_sample=sample, rows=len(ids))),
            [stream_key(row) for row in range(len(ids))],
            eos=trace.eos,
        )
        with torch.no_grad():
            run = Decoder(opened, some, make(), request, max_draft_length=6)
            real = [
                SimulatedRound(r.drafted, r.accepted, tuple(map(len, r.tokens)), r.source)
                for r in run.rounds()
            ][1:]
        replays = [replay(trace, draft) for draft in some]
        assert list(simulate(replays, make(), range(len(trace.texts)))) == real


@pytest.mark.parametrize(("family", "sample"), covering(TARGETS, (False, True)))
def test_a_followed_draft_agrees_with_its_text_as_far_as_one_replayed(
    family: str, sample: bool
) -> None:
    trace = traced(family, sample, False)
    source = source_of(family, sample)
    whole, (some,) = replay(trace, source), follow(trace, source)
    assert torch.equal(some.matches.cumprod(1), whole.matches.cumprod(1))
    assert 0 < whole.survival[0] < 1


# ---------------------------------------------------------------------------------------------
# The doors, what it costs, and what is refused.


def test_the_doors_take_a_model_an_opened_one_or_a_folder(tmp_path: Path) -> None:
    model, (ids, mask) = target_of("gemma4"), prompts()
    built = assistant_of("gemma4", True)
    built.save_pretrained(tmp_path)
    inputs = {"input_ids": ids, "attention_mask": mask}
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": 5, "costs": COSTS}
    plain = layerskip.generate(model, inputs, enabled=False, **how)
    few = [3, 5, 7, 8, 9, 11, 14]
    ways = (built, None), (Sublayers(built, "modules"), few), (tmp_path, few), (str(tmp_path), None)
    for given, tokens in ways:
        got = layerskip.generate(model, inputs, assistant=given, draft_vocabulary=tokens, **how)
        assert got.sequences.tolist() == plain.sequences.tolist()
        assert {count for r in got.rounds or () for count in map(len, r.tokens)} > {1}
    words = LayerSkipDecoding(assistant=tmp_path).explain(model)
    assert "drafts: the model's official assistant" in words


@pytest.mark.parametrize("centroids", [False, True])
def test_only_tokens_of_the_draft_vocabulary_are_drafted(centroids: bool) -> None:
    target, few = Sublayers(target_of("gemma4")), [3, 5, 7, 8, 9, 11]
    source = Official(target, Sublayers(assistant_of("gemma4", centroids)), few)
    prompt = torch.tensor([5, 6, 7])
    passes = Passes(target, [source], [prompt], max_new_tokens=2, max_draft_length=1, emitted=[[8]])
    with torch.no_grad():
        passes.prefill()
        raw = passes.draft_step(torch.tensor([8]), 0)[0]  # (V,)
    drawn = raw.isfinite().nonzero().flatten().tolist()
    assert drawn
    assert {*drawn} <= {*few}
    assert centroids or drawn == few


def test_a_step_reads_its_own_weights_and_of_the_head_what_centroids_choose() -> None:
    for centroids in (False, True):
        source = source_of("gemma4", centroids)
        own = sum(weight.nbytes for weight in source.own.parameters())
        unread = source.own.lm_head.weight.nbytes // 2 if centroids else 0
        assert sum(source.step_bytes()) == own - unread
        assert source.key == source_of("gemma4", centroids).key


def test_check_passes_with_an_assistant(sizes: Any) -> None:
    sizes(draws=256)
    ids = [torch.tensor([[5, 9, 2, 7]]), torch.tensor([[8, 3, 11]])]
    second = Sublayers(assistant_of("gemma4", True))
    report = check(target_of("gemma4"), ids, None, assistant=second, max_new_tokens=12)
    assert report.passed


def test_another_models_assistant_is_refused() -> None:
    def refused(message: str, assistant: Any, target: Any = None) -> None:
        with pytest.raises(ValueError, match=message) as error:
            Official(Sublayers(target or target_of("gemma4")), Sublayers(assistant))
        assert "give the one made for it" in str(error.value)

    refused(
        r"width of them, and window \(1, 16, None\), the model has \(2,",
        assistant_of("gemma4_dense"),
    )
    refused(r"window \(2, 8, 4\), the model", assistant_of("gemma4", sliding_window=4))
    refused(
        "are torch.float32 on cpu, the model's torch.float64",
        assistant_of("gemma4", dtype=torch.float32),
    )
    refused("made for 5 tokens, the model has 24", assistant_of("gemma4", tokens=5))
    refused("reads keys of sliding_attention layers", assistant_of("gemma4"), lively_model("llama"))
    wide = lively_model("gemma4", hidden_size=64, vocab_size=FEW)
    refused("hidden states of 32 numbers, the model has 64", assistant_of("gemma4"), wide)


def test_an_assistant_by_itself_is_refused() -> None:
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="no keys and values of its own"):
        next(layerskip.decode(assistant_of("gemma4"), ids, enabled=False, max_new_tokens=2))


def test_the_command_line_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CostTable(0.2, (1.0, 1.1, 1.2))
    monkeypatch.setattr(
        "layerskip.decoders.cost_tables", lambda _, drafts, *__, **___: [table for _ in drafts]
    )
    dtype = torch.float32
    folder = save_checkpoint(tmp_path / "target", target_of("gemma4", WORDS, dtype))
    dense = save_checkpoint(tmp_path / "dense", target_of("gemma4_dense", WORDS, dtype))
    second, prompts = tmp_path / "second", tmp_path / "prompts.txt"
    assistant_of("gemma4", False, WORDS, dtype).save_pretrained(second)
    prompts.write_text(f"{PROMPT}\n")
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--json")
    plain = document(run("generate", folder, *flags, "--no-draft"))
    drafts = ("--assistant", second, "--controller", "fixed")
    result = run("generate", folder, *flags, *drafts, "--no-lookup", "--draft-memory", 0)
    assert f"drafts: the model's official assistant, {second}" in result.stderr
    alone = document(result)
    assert alone["token_ids"] == plain["token_ids"]
    assert [each["name"] for each in alone["sources"]] == ["assistant"]
    assert alone["num_draft_tokens"]
    beside = document(run("generate", folder, *flags, *drafts))
    assert beside["token_ids"] == plain["token_ids"]
    assert [each["name"] for each in beside["sources"]][:2] == ["lookup", "assistant"]
    output = tmp_path / "run.jsonl"
    methods = ("--method", "self-assistant", "--method", "generate-assistant")
    few = ("--max-new-tokens", 6, "--repeats", 1, "--warmup", 0, "--output", output)
    asked = ("--prompts", prompts, *few, *methods, "--assistant", second)
    result = run("benchmark", folder, *asked)
    assert result.exit_code == 0, result.output
    _, ours, theirs = read_run(output).header["methods"]
    assert ours["assistant"] == theirs["assistant"] == str(second)
    assert "drafts for a Gemma 4; name that, and this one as" in refused(
        "generate", second, "--prompt", PROMPT
    )
    words = refused("generate", dense, "--prompt", PROMPT, "--assistant", second)
    assert words.startswith("the assistant cannot draft for this model: it is made for")
