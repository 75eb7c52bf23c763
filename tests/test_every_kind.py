"""What holds for drafts of every kind: the text, the law, replays.

Each contract has few cases, which cover all pairs of its parameters. `kinds.py` makes the drafts.
"""

from itertools import cycle, product

import looped
import pytest
import sampling
import torch
from covering import covering
from kinds import (
    BLOCKS,
    CONFIGS,
    CONTROLLERS,
    COSTS,
    FAMILIES,
    KINDS,
    LAWS,
    LENGTHS,
    NEW,
    OFFICIAL,
    REPLAYED,
    decoded,
    draft_of,
    family_of,
    model_of,
    prompts,
    wanted,
)
from marks import slow, thorough
from models import Erratic, Fickle, Growing
from official import TARGETS
from sampling import LEVEL, PROCESSORS, SKIP, accept_always, p_value, redraw_from_the_target
from transformers import TemperatureLogitsWarper

from layerskip import LogitLookup, Lookup, SkipConfig, generate
from layerskip.bench.checks import check
from layerskip.costs.speculation import CostTable
from layerskip.decoding import rules
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.draws import Draws, streams
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.noise import accept_uniform
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.earlier import EarlierAnswers
from layerskip.model.opened_models import Sublayers
from layerskip.replay.replayed_drafts import follow, replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import take_trace

DTYPES = (torch.float32, torch.bfloat16)
BESIDE = {
    "alone": (),
    "lookup, and answers of earlier cases": (Lookup(), EarlierAnswers()),
    "8 bits": (SkipConfig.low_precision(8),),
    "lookup, an exit, 8 bits": (Lookup(), SkipConfig.early_exit(2), SkipConfig.low_precision(8)),
    "laws looked up, 8 bits": (LogitLookup(), SkipConfig.low_precision(8)),
    "two lookups, streams, an assistant, layers left out": (
        *(Lookup([[*range(2, 12), 4, 6, 8, 3, 5]]), Lookup()),
        *("streams", "assistant", SkipConfig(attention=(0, 3), mlp=(2,))),
    ),
}


def drafts_of(drafts, model, folder, execution="auto"):
    """Drafts, with those of a kind given by its name."""
    return tuple(
        draft_of(each, model, folder, execution) if isinstance(each, str) else each
        for each in drafts
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kinds")


# ---- The text ----

TEXTS = covering(
    KINDS,
    tuple(BESIDE),
    tuple(LAWS),
    ("modules", "fused"),
    FAMILIES,
    tuple(CONTROLLERS),
    (False, True),
)


@pytest.mark.parametrize(
    "kind", [*(kind for kind in KINDS if kind not in OFFICIAL), *thorough(*OFFICIAL)]
)
def test_the_text_is_that_of_the_target(kind, folder):
    drafted = accepted = compactions = 0
    for _, beside, law, execution, family, controller, ended in (t for t in TEXTS if t[0] == kind):
        family = family_of(kind, family)
        if family == "gemma4_mixture":  # it has no fused passes
            execution = "modules"
        model = model_of(family)
        drafts = drafts_of((kind, *BESIDE[beside]), model, folder, execution)
        out = decoded(model, drafts, law, CONTROLLERS[controller](), execution, ended, new=NEW)
        assert out.sequences[:, max(LENGTHS) :].tolist() == wanted(family, law, ended)
        drafted += out.stats.sources[0].num_draft_tokens
        accepted += out.stats.sources[0].num_accepted_tokens
        compactions += out.stats.num_compactions
    assert drafted / 20 < accepted < drafted
    assert compactions


NATIVE = covering(KINDS, DTYPES, ("llama", "gemma3", "qwen2"), ("greedy", "coupled"), tuple(BESIDE))


@pytest.mark.parametrize("dtype", [*thorough(torch.float32), torch.bfloat16])
def test_native_texts_are_those_of_native_plain_decoding_bit_by_bit(built, dtype, folder):
    """Even at near-ties."""
    accepted = dict.fromkeys(KINDS, 0)
    for number, (kind, _, family, law, beside) in enumerate(t for t in NATIVE if t[1] is dtype):
        model, (ids, mask) = model_of(family_of(kind, family), dtype), prompts()
        how = {"attention_mask": mask, "max_new_tokens": NEW, **LAWS[law]}
        plain = generate(model, ids, enabled=False, execution="native", **how).sequences
        drafts = drafts_of((kind, *BESIDE[beside]), model, folder, "native")
        out = decoded(model, drafts, law, (Fickle, Growing)[number % 2](2), "native", new=NEW)
        assert torch.equal(out.sequences, plain), (kind, family, law, beside)
        accepted[kind] += out.stats.sources[0].num_accepted_tokens
    assert all(accepted.values()), accepted


@pytest.mark.parametrize(
    ("kind", "family"),
    covering(("8 bits, a layer out", *BLOCKS, "assistant", *OFFICIAL[1:]), ("llama", "gemma3")),
)
def test_captured_texts_are_those_of_plain_decoding(kind, family, folder):
    family = family_of(kind, family)
    model = model_of(family)
    drafts = (draft_of(kind, model, folder, "captured"), Lookup())
    out = decoded(model, drafts, "coupled", Fickle(1), "captured", new=NEW, longest=3)
    assert out.sequences[:, max(LENGTHS) :].tolist() == wanted(family, "coupled", False)
    assert out.stats.sources[0].num_accepted_tokens


@pytest.mark.parametrize("kind", ["assistant", *BLOCKS, *OFFICIAL[1:]])
def test_the_doors_take_it_in_every_form(kind, folder, tmp_path):
    """A second model, an opened one, a folder; a skip config with any passes; with few tokens."""
    family, (ids, mask) = family_of(kind), prompts()
    model = model_of(family)
    draft = draft_of(kind, model, folder)
    ways = [{"skip": draft, "execution": each} for each in ("auto", "modules")]
    if kind not in BLOCKS:
        second = draft.module if kind in OFFICIAL else draft.model.model
        ways = [{"assistant": second}, {"assistant": Sublayers(second, "modules")}]
    if kind in OFFICIAL:
        second.save_pretrained(tmp_path)
        ways.append({"assistant": str(tmp_path)})
    how = {"attention_mask": mask, "max_new_tokens": NEW, "costs": COSTS, **LAWS["coupled"]}
    for way, tokens in product(ways, (None, [3, 5, 7, 8, 9, 11, 14])):
        out = generate(model, ids, draft_vocabulary=tokens, controller="fixed", **way, **how)
        assert out.sequences[:, ids.shape[1] :].tolist() == wanted(family, "coupled", False)
        assert out.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("assistant", "llama"),
        *thorough(*zip(OFFICIAL[1:], ("llama",), strict=False)),
        *thorough(("exit-block", "gemma2")),
        *slow(*covering(CONFIGS, ("llama", "gemma3"))),
    ],
)
def test_the_check_of_a_persons_own_machine_passes(kind, family, folder, sizes):
    sizes(draws=256)
    trained = kind in CONFIGS
    model = model_of(family_of(kind, family), torch.float32 if trained else torch.float64)
    ids = [torch.tensor([[5, 9, 2, 7]]), torch.tensor([[8, 3, 11]])][trained:]
    draft = draft_of(kind, model, folder)
    second = None if trained else draft.module if kind in OFFICIAL else draft.model
    report = check(model, ids, draft if trained else None, assistant=second, max_new_tokens=NEW)
    assert report.passed


# ---- The law of whole texts, against enumeration by a small model ----

PAIRS = [[a, b, a] for a in range(5) for b in range(5)]
SOURCES = {
    **{kind: (kind,) for kind in KINDS},
    "layers left out": (SKIP.resolve(6),),
    "layers left out, 3 tokens": (SKIP.resolve(6),),
    "lookup": (Lookup(PAIRS),),
    "lookup, layers left out": (Lookup(PAIRS), SKIP.resolve(6)),
    "lookup, assistant": (Lookup(PAIRS), "assistant"),
}
REJECTION = [  # logits are looked up only under laws of a temperature, top-k and top-p
    (source, "none" if source == "stored logits" else law, True, "fused")
    for source, law in zip(SOURCES, cycle(PROCESSORS))
]
# coupled texts are those of plain decoding, whatever drafts, so one draft suffices
COUPLED = [("layers left out", law, False, "fused") for law in PROCESSORS]
EXECUTIONS = [
    pytest.param("layers left out", "none", rejection, execution, marks=marks)
    for execution, marks in (("native", ()), ("modules", ()), ("captured", pytest.mark.thorough))
    for rejection in (False, True)
]


def sampled(source, processors, rejection, execution, folder):
    """The p-value of many texts under the target's law, and each draft's token counts."""
    family = family_of(source)
    drafts = drafts_of(SOURCES[source], sampling.small_model(family), folder)
    how = {"drafts": drafts, "execution": execution, "family": family}
    if source.endswith("3 tokens"):
        how |= {"vocabulary": [0, 2, 3]}
    if len(drafts) > 1:  # enough batches to take every draft
        how |= {"fickle": True, "rows": 100}
    if source == "stored logits":  # later batches find stored logits
        how |= {"rows": 100}
    if execution == "native":  # short batches get native passes
        how |= {"dtype": torch.float32, "rows": 10}
    counts, tokens = sampling.sample_texts(
        processors, acceptance="rejection" if rejection else "coupled", **how
    )
    return p_value(counts, processors, family), tokens


@pytest.mark.parametrize(
    ("source", "processors", "rejection", "execution"), [*REJECTION, *COUPLED, *EXECUTIONS]
)
def test_texts_follow_the_targets_law(source, processors, rejection, execution, folder, request):
    if execution == "native":
        request.getfixturevalue("built")
    fits, tokens = sampled(source, processors, rejection, execution, folder)
    assert len(tokens) == len(SOURCES[source])
    assert all(0.1 * drafted < accepted < drafted for drafted, accepted in tokens), tokens
    assert fits > LEVEL


def peeking(self, raw, places, *more, **named):
    """A known mistake: a draft reads the numbers that decide acceptance, but reports its law."""
    small = accept_uniform(*streams(places)) < 0.5  # (N,)
    other = torch.where(small[:, None], 3 * raw, -3 * raw)  # (N, V)
    return DRAFT(self, other, places, *more, **named)


def lying(self, raw, places, *more, **named):
    """A known mistake: the accept rule is told another law than that of the drafts."""
    drawn = DRAFT(self, raw, places, *more, **named)
    return drawn._replace(laws=[softmax_law(law.log() * 3) for law in drawn.laws])


def peeking_at_few(self, place, tokens, raw):
    """A known mistake: a draft from stored logits reads the number that decides its acceptance."""
    small = accept_uniform(*streams([place])) < 0.5  # (1,)
    chosen = 0 if small else len(tokens) - 1
    return [float(place == chosen) for place in range(len(tokens))]


DRAFT = Draws.draft
MISTAKES = [
    (rules, "residual", redraw_from_the_target),
    (rules, "acceptance_probability", accept_always),
    (Draws, "draft", peeking),
    (Draws, "draft", lying),
]


@pytest.mark.parametrize(
    ("source", "place", "name", "wrong"),
    [
        *((source, *each) for source in ("layers left out", "heads") for each in MISTAKES),
        *thorough(*((source, *each) for source in OFFICIAL[:1] for each in MISTAKES[:2])),
        ("stored logits", Draws, "scores", peeking_at_few),
    ],
)
def test_known_wrong_samplers_fail_the_same_test(source, place, name, wrong, folder, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    assert sampled(source, "none", True, "fused", folder)[0] < LEVEL


# ---- Replays ----


MIXTURES = {
    **{kind: (kind,) for kind in (*CONFIGS, "assistant")},
    "exit, assistant": (SkipConfig.early_exit(4).resolve(6), "assistant"),
    "lookup": (Lookup(),),
    "two lookups, exit, layers left out": (
        *(Lookup([[*range(2, 12), 4, 6, 8, 3, 5]]), Lookup()),
        *(SkipConfig.early_exit(4).resolve(6), SkipConfig(attention=(0, 3), mlp=(2, 5)).resolve(6)),
    ),
    "one of each": (
        *(Lookup(), SkipConfig.low_precision(8).resolve(6), "4 bits behind a prefix, head exact"),
        *(SkipConfig(attention=(5,), mlp=(5,)).resolve(6), *BLOCKS, "assistant"),
    ),
}


if OFFICIAL:
    MIXTURES |= {
        f"{family}: {kind}": (*(Lookup(),) * (kind == OFFICIAL[0]), kind)
        for family, kind in zip(TARGETS, cycle(OFFICIAL), strict=False)
    }


DEAR = ("one of each", "exit, assistant", "4 bits behind a prefix, head exact")


@pytest.mark.parametrize(
    ("number", "mixture"),
    [
        pytest.param(*case, marks=pytest.mark.thorough if case[1] in DEAR else ())
        for case in enumerate(MIXTURES)
    ],
)
@pytest.mark.parametrize(("sample", "ended"), [*product((False, True), repeat=2)])
def test_simulated_rounds_are_those_of_decoding(number, mixture, sample, ended, folder):
    """Mixtures take turns with controllers, and each law and end meets one of them."""
    family = mixture.partition(":")[0] if ":" in mixture else "llama"
    model = looped.model_of(family)
    drafts = drafts_of(MIXTURES[mixture], model, folder)
    costs = [CostTable(0.0, COSTS.verify) if isinstance(d, Lookup) else COSTS for d in drafts]
    made = [Fickle, lambda: Fixed(5), Erratic, lambda: ExpectedGain(costs)]
    make = made[(number + 2 * sample + ended) % 4]
    trace = looped.traced(sample, ended, family)
    replays = [replay(trace, draft) for draft in drafts]
    run = looped.decoded(drafts, make(), model=model, sample=sample, eos=trace.eos)
    real = looped.counted(run.played[1:])
    controller = make()
    rounds = simulate(replays, controller, range(len(trace.texts)))
    assert looped.counted(rounds) == real
    if isinstance(controller, Fickle):
        assert controller.told == run.controller.told


@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        *zip((*CONFIGS, "assistant"), cycle((False, True)), strict=False),
        *thorough(*zip(OFFICIAL, (False, True), strict=False)),
    ],
)
def test_a_followed_draft_agrees_with_its_text_as_far_as_one_replayed(kind, sample, folder):
    family = family_of(kind)
    draft = draft_of(kind, looped.model_of(family), folder)
    trace = looped.traced(sample, False, family)
    whole, some = replay(trace, draft), follow(trace, draft, trace.draft_length)
    assert torch.equal(some, whole.matches[:, : some.shape[1]].cumprod(1).bool())
    assert 0 < whole.survival[0] < 1


@pytest.mark.parametrize("kind", REPLAYED)
@torch.no_grad()
def test_replays_accept_by_the_rejection_rule_what_decodings_drafts_would(kind, folder):
    """Token by token while a draft is right, by the laws of states begun anew at each start."""
    model, (ids, mask) = model_of(family_of(kind, "gemma3")), prompts()
    law, steps = Law([TemperatureLogitsWarper(0.8)], do_sample=True, rows=1), 4
    trace = take_trace(
        model,
        [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)],
        max_new_tokens=NEW,
        law=law,
        seeds=range(3),
        draft_length=steps,
        acceptance="rejection",
    )
    draft = draft_of(kind, model, folder)
    played = replay(trace, draft)
    starts = [(t, t.prompt + i) for t in trace.texts for i in range(t.starts)]
    texts = [text.tokens[place:] for text, place in starts]
    passes = Passes(
        trace.model,
        [draft],
        [Seat(text.tokens[:place], NEW, [int(text.tokens[place])]) for text, place in starts],
        max_draft_length=steps,
    )
    passes.prefill()
    longest = min(steps, played.longest or steps)
    fed = torch.stack([tokens[: longest + 1] for tokens in texts])  # (N, J + 1)
    drafted = [passes.draft_step(fed[:, step], step) for step in range(longest)]
    places = [(row, step) for row in range(len(starts)) for step in range(longest)]
    raw = passes.verify(fed[:, longest - 1 : longest], places)  # (N J, V)
    lucky = []
    for step, raw_q in enumerate(drafted):
        p, q = (
            softmax_law(law.scores(each, fed, [0] * len(fed), [1] * len(fed)))
            for each in (raw[step::longest], raw_q)
        )
        own = fed[:, step + 1 :][:, :1]  # (N, 1)
        w = (q.gather(1, own) / p.gather(1, own)).clamp(max=1)[:, 0]
        at = [place + step + 1 for _, place in starts]
        lucky.append(accept_uniform([text.key for text, _ in starts], at) < w)
    want = torch.stack(lucky, 1).cumprod(1).bool()  # (N, J)
    assert torch.equal(played.matches.cumprod(1).bool()[:, :longest], want)
    sure = torch.stack(drafted, 1).float().softmax(-1).gather(2, fed[:, 1:, None])[..., 0]  # (N, J)
    known = played.confidences[:, :longest]
    torch.testing.assert_close(known[want], sure[want], rtol=1e-4, atol=1e-6)
    assert 0.1 < want.float().mean() < 0.98
    assert not played.matches[:, longest:].any()
