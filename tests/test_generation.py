"""The public entry points: with drafts they keep the promises of `generate()`, or refuse."""

import copy
import pickle
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import copytree
from types import MethodType, SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from marks import slow, thorough
from models import (
    FAMILIES,
    FEW_FAMILIES,
    VOCABULARY,
    Erratic,
    LowRank,
    generated,
    lively_model,
    prompt,
    pure,
    ragged,
    side_by_side,
    tiny_model,
)
from ties import partings
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteriaList,
    set_seed,
)

import layerskip
from layerskip import GenerationOutput, LayerSkipDecoding, SkipConfig, UnsupportedModelError
from layerskip.api.drafts import automatic_draft
from layerskip.bench.methods import Task
from layerskip.config.skips import DecodingOptions
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.noise import stream_key
from layerskip.library import cache_name
from layerskip.model.opened_models import Sublayers
from layerskip.search.pipeline import Search
from layerskip.search.space import Space
from layerskip.timing.cost_tables import place as where

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))
SKIP = SkipConfig.early_exit(4)
LENGTHS = (9, 3, 6)
NEW_TOKENS = 20


def decoding(**settings):
    return LayerSkipDecoding(**({"skip": SKIP, "controller": "fixed", "costs": COSTS} | settings))


def new_tokens(out, width):
    return getattr(out, "sequences", out)[:, width:].tolist()


def emitted(out):
    """Each row's tokens, from the rounds."""
    return [
        [token for r in out.rounds for token in r.tokens[row]] for row in range(len(out.sequences))
    ]


# ---- Three entry points, one text ----


@pytest.mark.parametrize("sample", [False, True])
def test_the_three_doors_agree(llama, sample):
    """The model's settings, its methods and the caller's grad mode stay unchanged."""
    config = copy.deepcopy(llama.generation_config.to_dict())
    ids, mask = ragged(LENGTHS)
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": sample, "seed": 3}
    how |= {"temperature": 0.7, "top_k": 9, "top_p": 0.9} if sample else {}
    settings = {"skip": SKIP, "controller": Fixed(2), "costs": COSTS}
    inputs = {"input_ids": ids, "attention_mask": mask}
    two = layerskip.generate(llama, **inputs, **settings, **how)
    rounds = []
    for round_ in layerskip.decode(llama, ids, mask, **settings, **how):
        assert torch.is_grad_enabled()
        rounds.append(round_)
    shared = decoding(controller=Fixed(2), seed=how.pop("seed"))
    one = llama.generate(ids, attention_mask=mask, custom_generate=shared, **how)
    assert isinstance(one, Tensor)
    assert isinstance(two, GenerationOutput)
    assert one.tolist() == two.sequences.tolist()
    joined = [[token for r in rounds for token in r.tokens[row]] for row in range(3)]
    assert joined == new_tokens(one, 9)
    assert two.rounds == rounds
    assert max(max(round_.drafted) for round_ in rounds) == 2
    assert two.stats.num_accepted_tokens > 0
    assert two.stats.seeds == ((3, 3, 3) if sample else ())
    assert two.costs == COSTS
    assert llama.generation_config.to_dict() == config
    assert "generate" not in vars(llama)


def test_a_decoding_serves_several_models_and_threads(llama):
    models, shared = (llama, lively_model("qwen3")), decoding(controller="expected-gain", seed=1)
    how = {"custom_generate": shared, "max_new_tokens": 16, "do_sample": True}
    alone = [model.generate(prompt(7), **how).tolist() for model in models]
    out = {}

    def run(number):
        out[number] = models[number].generate(prompt(7), **how).tolist()

    side_by_side(*(partial(run, number) for number in range(2)))
    assert alone == [out[0], out[1]]
    assert alone[0] != alone[1]


def test_settings_come_from_the_skip_config_unless_given():
    own = {"controller": "confidence", "max_draft_length": 3, "acceptance": "rejection"}
    skip = SkipConfig(exit_layer=2, decoding=DecodingOptions(threshold=0.2, **own))
    read = LayerSkipDecoding(skip)
    assert {name: getattr(read, name) for name in own} == own
    assert (read.threshold, read.enabled) == (0.2, True)
    told = {"controller": "fixed", "max_draft_length": 5, "acceptance": "coupled", "enabled": False}
    given = LayerSkipDecoding(skip, **told)
    assert {name: getattr(given, name) for name in told} == told
    off = SkipConfig(exit_layer=2, decoding=DecodingOptions(enabled=False))
    assert [LayerSkipDecoding(off).enabled, LayerSkipDecoding(off, enabled=True).enabled] == [0, 1]
    assert LayerSkipDecoding().enabled
    assert LayerSkipDecoding(SKIP).controller == "expected-gain"
    assert LayerSkipDecoding(seeds=iter((5, 6))).seeds == (5, 6)


def test_naming_a_draft_keeps_lookups_but_for_the_rejection_rule(llama, tmp_path):
    """There, texts depend on drafts, so that older skip configs would write other texts."""
    told = {"lookup": False}, {"lookup": True}, {}
    for number, options in enumerate(told):
        skip = replace(SKIP, decoding=DecodingOptions(**options))
        skip.save(path := tmp_path / f"{number}.json")
        for given in (skip, path):
            for rule in ("coupled", "rejection"):
                how = {"skip": given, "acceptance": rule, "execution": "modules"}
                lines = LayerSkipDecoding(**how).explain(llama).splitlines()
                looked_up = "drafts: looked up in the text so far" in lines
                assert looked_up is options.get("lookup", rule == "coupled")
    assert LayerSkipDecoding(SKIP, lookup=False).explain(llama).count("drafts: ") == 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_without_a_skip_config_drafts_need_no_set_up(do_sample):
    """They are looked up, and with native passes also made in 8 bits. The text does not change."""
    model = lively_model("llama", dtype=torch.float32)
    ids = prompt(5).repeat(1, 4)
    how = {"max_new_tokens": 24, "do_sample": do_sample, "seed": 2}
    plain = layerskip.generate(model, ids, enabled=False, **how)
    assert (plain.stats.num_drafts, plain.stats.sources) == (0, [])
    fixed = {"controller": "fixed", "max_draft_length": 3}
    for settings in ({}, fixed, {"draft_memory": 0, **fixed}, {"lookup": False, **fixed}):
        out = layerskip.generate(model, ids, **how, **settings)
        assert out.sequences.tolist() == plain.sequences.tolist()
        own = "draft_memory" not in settings  # in 8 bits, or an exit that is asked for
        assert len(out.stats.sources) == own + ("lookup" not in settings)
        assert sum(each.num_drafts for each in out.stats.sources) == out.stats.num_drafts
    with pytest.warns(UserWarning, match="draft_memory has no effect where drafts are named"):
        LayerSkipDecoding(SKIP, draft_memory=1)


def test_copies_of_weights_keep_within_the_memory_that_is_free(built, monkeypatch):
    model = Sublayers(lively_model("llama", dtype=torch.float32))
    nbytes = model.weights.nbytes(SkipConfig.low_precision(8))
    for free, drafts in ((2 * nbytes - 2, False), (2 * nbytes, True), (None, True)):
        monkeypatch.setattr("layerskip.api.drafts.free_memory", lambda free=free: free)
        found = automatic_draft(Sublayers(lively_model("llama", dtype=torch.float32)))
        assert (found.skip == SkipConfig.low_precision(8)) is drafts
        assert (found.reason is None) is drafts
    assert automatic_draft(model, nbytes).skip is not None
    refused = automatic_draft(model, nbytes - 1)
    assert refused.skip is None
    assert "the limit is" in str(refused.reason)
    # the decision stays, whatever memory is free later
    monkeypatch.setattr("layerskip.api.drafts.free_memory", lambda: 0)
    assert automatic_draft(model, nbytes).skip is not None
    modules = automatic_draft(Sublayers(lively_model("llama", dtype=torch.float32), "modules"))
    assert modules.skip is None


def test_costs_are_the_skip_configs_or_measured_only_where_needed(llama, monkeypatch):
    ids = prompt(5)

    def costs(skip=SKIP, **settings):
        out = layerskip.generate(llama, ids, skip=skip, max_new_tokens=6, **settings)
        return out.costs

    stored = SkipConfig(exit_layer=4, costs={"draft": 0.3, "verify": [1.0, 1.1]})
    assert costs(stored) == CostTable(0.3, (1.0, 1.1), "given")
    noted = SkipConfig(exit_layer=4, costs={"draft": 0.3, "verify": [1.0], "machine": "mine"})
    assert costs(noted) == CostTable(0.3, (1.0,), "given")
    assert costs(stored, costs=COSTS) == COSTS
    assert costs(controller="fixed") is None
    here = where(Sublayers(llama), 1)
    ours = replace(noted, costs={**(noted.costs or {}), **here})
    assert costs(ours) == CostTable(0.3, (1.0,), "given")
    for name, value in {"hardware": "a faster one", "dtype": "float16", "batch_size": 8}.items():
        others = replace(ours, costs={**(ours.costs or {}), name: value})
        with pytest.warns(UserWarning, match=f"costs are ignored.* for {name} {value}; here it is"):
            found = costs(others)
        assert found.source == "analytic"  # six tokens are not worth a measurement
    assert costs(enabled=False) is None
    layerskip.LayerSkipDecoding(SKIP).prepare(llama, seconds=0.1)
    monkeypatch.setattr("layerskip.timing.cost_tables.time_rounds", None)
    table = costs()  # measured once per process
    assert table.source == "measured"
    # draft lengths decide the text here, so they must not depend on a clock
    table = costs(acceptance="rejection", do_sample=True)
    assert table.source == "analytic"


# ---- Logits processors with exact histories ----


class Shift(LogitsProcessor):
    """A user's processor that depends on all earlier tokens and on the row number."""

    layerskip_pure = True

    def __call__(self, input_ids, scores):
        favoured = (input_ids.sum(-1) * 7 + torch.arange(len(input_ids))) % VOCABULARY
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 1.5))


def allow_by_row(row, seen):
    """Allows each row another third of the vocabulary, and no token twice in a row."""
    return [t for t in range(2 + 31 * row, 33 + 31 * row) if t != int(seen[-1])]


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 9, "eos_token_id": list(range(2, 60))},
    "bad words": {"bad_words_ids": [[5], [17, 30], [61, 2, 9], [39], [64]]},
    "forced tokens": {"forced_bos_token_id": 7, "forced_eos_token_id": 11},
    "suppressed tokens": {"suppress_tokens": list(range(30, 60)), "begin_suppress_tokens": [82]},
    "sequence bias": {"sequence_bias": [[[39], -4.0], [[49, 77], 6.0], [[8], 2.0]]},
    "length penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [3, 9, 33]},
    "prefix": {"prefix_allowed_tokens_fn": allow_by_row},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "user": {"logits_processor": LogitsProcessorList([Shift()])},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "eos_token_id": [9, 23, 41],
        "logits_processor": LogitsProcessorList([Shift()]),
        "prefix_allowed_tokens_fn": lambda row, seen: list(range(2, VOCABULARY - row)),
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_mean_the_same_as_in_the_library(llama, name):
    ids, mask = ragged(LENGTHS)
    plain = llama.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    drafted = accepted = 0
    for i, m in ((ids, mask), (ids[1:2, 6:], mask[1:2, 6:])):
        how = {"attention_mask": m, "max_new_tokens": NEW_TOKENS}
        how |= {"do_sample": False, "return_dict_in_generate": True} | PROCESSORS[name]
        want = llama.generate(i, **how)
        for controller in ("fixed", Erratic())[: len(i)]:  # a single row is tested with one of them
            settings = {"controller": controller, "skip": SkipConfig(attention=(3,), mlp=(4,))}
            got = llama.generate(i, custom_generate=decoding(**settings), **how)
            assert got.sequences.tolist() == want.sequences.tolist()
            drafted += got.stats.num_draft_tokens
            accepted += got.stats.num_accepted_tokens
        if len(i) == 3:
            assert want.sequences.tolist() != plain.tolist()  # the processor has an effect
    assert 0 < accepted < drafted


def test_a_draft_that_may_draw_nothing_ends_there(llama):
    """The processor forbids all tokens after any text that the target never emits."""
    ids = prompt(6)
    text = new_tokens(llama.generate(ids, max_new_tokens=NEW_TOKENS), 6)[0]
    true = {tuple(text[:n]) for n in range(NEW_TOKENS)}

    @pure
    def forbid(input_ids, scores):
        real = torch.tensor([tuple(row[6:].tolist()) in true for row in input_ids])
        return scores.masked_fill(~real[:, None], float("-inf"))

    how = {"logits_processor": [forbid], "max_new_tokens": NEW_TOKENS}
    skip = SkipConfig(attention=(0,), mlp=(5,))
    got = layerskip.generate(llama, ids, skip=skip, controller="fixed", **how)
    assert new_tokens(got, 6) == [text]
    assert got.stats.num_accepted_tokens < got.stats.num_draft_tokens


# ---- Ends ----


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with one printable character per token of the tiny models."""
    vocabulary = {chr(33 + i): i for i in range(VOCABULARY)}
    built = Tokenizer(WordLevel(vocabulary, unk_token=chr(33)))
    built.pre_tokenizer = Split(Regex("."), "isolated")
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=built)


def test_stop_strings(llama, tokenizer):
    ids, mask = ragged(LENGTHS)
    text = new_tokens(llama.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS), 9)
    for row, place in ((0, 3), (1, 8), (2, 12)):
        stop = "".join(chr(33 + token) for token in text[row][place : place + 2])
        how = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        how |= {"stop_strings": [stop, "never"], "tokenizer": tokenizer}
        want = llama.generate(ids, attention_mask=mask, **how)
        got = layerskip.generate(
            llama, {"input_ids": ids, "attention_mask": mask}, skip=SKIP, controller="fixed", **how
        )
        assert got.sequences.tolist() == want.tolist()
    with pytest.raises(ValueError, match="stop_strings needs the tokenizer"):
        layerskip.generate(llama, ids, skip=SKIP, stop_strings=["x"], max_new_tokens=4)
    named = {"tokenizer": tokenizer, "generation_config": GenerationConfig(stop_strings=stop)}
    want = llama.generate(ids[2:, 3:], max_new_tokens=NEW_TOKENS, **named)
    got = layerskip.generate(llama, ids[2:, 3:], max_new_tokens=NEW_TOKENS, **named)
    assert got.sequences.tolist() == want.tolist()
    assert want.shape[1] < 6 + NEW_TOKENS
    with pytest.raises(ValueError, match=r"token_healing is not supported.*model.heal_tokens"):
        layerskip.generate(llama, ids, token_healing=True, tokenizer=tokenizer)


def test_user_stopping_criteria_are_asked_once_per_row_and_token_in_order(llama):
    ids, mask = ragged(LENGTHS)
    seen = []

    def watch(input_ids, scores, **_):
        assert input_ids.shape[0] == 1
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] == 9 + 7])

    inputs = {"input_ids": ids, "attention_mask": mask}
    how = {"max_new_tokens": NEW_TOKENS, "stopping_criteria": [watch], "eos_token_id": VOCABULARY}
    got = layerskip.generate(llama, inputs, skip=SKIP, controller="fixed", **how)
    assert [len(row) for row in emitted(got)] == [7, 7, 7]
    for row, full in enumerate(got.sequences.tolist()):
        mine = [history for history in seen if history[:9] == ids[row].tolist()]
        assert mine == [full[: 9 + n] for n in range(1, 8)]
    assert len(seen) == 21


@pytest.mark.parametrize("ends", [None, VOCABULARY])
def test_rows_that_a_criterion_stops_are_written_on_or_padded_as_by_the_library(llama, ends):
    """It pads them only where there are end tokens, and returns when the last row stops."""
    ids, mask = ragged(LENGTHS)

    def stop(input_ids, scores, **_):
        return input_ids[:, 9:].sum(-1) % 7 == 0

    how = {"attention_mask": mask, "stopping_criteria": [stop], "eos_token_id": ends}
    how |= {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    how |= {"pad_token_id": 0}
    want = llama.generate(ids, **how)
    stops = [min(n for n in range(1, 21) if sum(new[:n]) % 7 == 0) for new in new_tokens(want, 9)]
    assert len(want.scores) == max(stops) > min(stops)
    for controller in (Fixed(3), Erratic()):
        drafts = decoding(controller=controller, assistant=llama, max_draft_length=9)
        got = llama.generate(ids, custom_generate=drafts, **how)
        assert got.sequences.tolist() == want.sequences.tolist()
        assert len(got.scores) == len(want.scores)
        assert max(map(len, emitted(got))) > max(stops) or ends
        assert got.finish_reasons == ["stop"] * 3
    limited = how | {"max_new_tokens": max(stops) - 1}
    got = llama.generate(ids, custom_generate=decoding(), **limited)
    assert got.sequences.tolist() == llama.generate(ids, **limited).sequences.tolist()
    assert got.finish_reasons[stops.index(max(stops))] == "length"


@pytest.mark.parametrize("length", [5, 9, 15])
def test_a_maximum_length_of_the_users_replaces_the_configs(llama, length):
    ends = StoppingCriteriaList([MaxLengthCriteria(length)])
    how = {"stopping_criteria": ends, "max_new_tokens": 6}
    want = llama.generate(prompt(6), **how).tolist()
    assert layerskip.generate(llama, prompt(6), skip=SKIP, **how).sequences.tolist() == want


def test_criteria_that_read_scores_are_refused(llama):
    how = {"stopping_criteria": [lambda _, scores: scores is not None and scores[-1].max() > 0]}
    how |= {"max_new_tokens": 6, "skip": SKIP}
    assert layerskip.generate(llama, prompt(6), **how).sequences.shape[1] == 12
    with pytest.raises(ValueError, match="that read scores are not supported; decide by input_ids"):
        layerskip.generate(llama, prompt(6), output_scores=True, **how)


def test_max_time_ends_every_row(llama):
    @pure
    def slow(input_ids, scores):
        time.sleep(0.002)
        return scores

    ids, mask = ragged(LENGTHS)
    how = {"max_new_tokens": 200, "max_time": 0.05, "logits_processor": [slow]}
    got = llama.generate(ids, attention_mask=mask, custom_generate=decoding(), **how)
    assert 9 < got.shape[1] < 209


# ---- Seeds ----


def test_num_return_sequences_draw_from_streams_of_their_own(llama):
    how = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    ids = prompt(6)
    rows = llama.generate(ids, custom_generate=decoding(seed=5), **how).tolist()
    assert len({tuple(row) for row in rows}) == 3
    assert rows == llama.generate(ids, custom_generate=decoding(seed=5), **how).tolist()
    assert (
        rows == llama.generate(ids, custom_generate=decoding(seed=5, enabled=False), **how).tolist()
    )
    assert rows != llama.generate(ids, custom_generate=decoding(seed=6), **how).tolist()
    first = llama.generate(ids, custom_generate=decoding(seed=5), do_sample=True, max_new_tokens=12)
    assert first.tolist() == rows[:1]


def test_without_a_seed_the_librarys_generator_decides_and_the_stats_report(llama):
    def text(**settings):
        how = {"do_sample": True, "max_new_tokens": 12, "custom_generate": decoding(**settings)}
        return generated(llama, (prompt(6), None), **how)

    torch.manual_seed(1)
    one, two = text(), text()
    torch.manual_seed(1)
    again = text()
    state = torch.random.get_rng_state()
    text(seed=1)
    llama.generate(prompt(6), custom_generate=decoding(), max_new_tokens=6)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's generator is unused
    set_seed(1)
    library = text()
    assert one.stats.seeds != two.stats.seeds
    assert one.sequences.tolist() != two.sequences.tolist()
    for out in (again, library, text(seed=one.stats.seeds[0])):
        assert out.stats.seeds == one.stats.seeds
        assert out.sequences.tolist() == one.sequences.tolist()


# ---- Streaming ----


class Recorder:
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value)

    def end(self):
        self.events.append("end")


def check_stream(events, ids, sequences):
    first, *new, last = events
    assert first.flatten().tolist() == ids[0].tolist()
    assert all(value.dim() == 1 and len(value) and value.device.type == "cpu" for value in new)
    assert torch.cat(new).tolist() == sequences[0, ids.shape[1] :].tolist()
    assert len(new) > 1
    assert last == "end"


def test_streamer_gets_the_prompt_then_new_tokens_then_the_end(llama):
    """Also through the library's `generate()`, which does not pass `streamer` on."""
    ids, first, second, how = prompt(6), Recorder(), Recorder(), {"max_new_tokens": 12}
    out = layerskip.generate(llama, ids, skip=SKIP, controller="fixed", streamer=first, **how)
    check_stream(first.events, ids, out.sequences)
    text = llama.generate(ids, custom_generate=decoding(), streamer=second, **how)
    check_stream(second.events, ids, text)


def test_streamer_ends_exactly_once_whatever_fails(llama):
    @pure
    def fail(input_ids, scores):
        if input_ids.shape[1] > 9:
            raise RuntimeError("no more")
        return scores

    ask = [
        ({"logits_processor": LogitsProcessorList([fail])}, "no more"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"max_new_tokens": 900}, "at most 256 tokens"),
        ({"inputs": prompt(3, rows=2)}, "a streamer serves one row, got 2"),
        # also if no text was begun: refused by the library, or by the settings
        ({"max_new_tokens": 0}, "greater than 0"),
        ({"unknown": 1}, "unknown"),
        ({"seed": 1.5}, "a seed must be an integer"),
        ({"stop_strings": ["x"]}, "stop_strings needs the tokenizer"),
        ({"inputs": "text"}, "must be a tensor"),
    ]
    for how, match in ask:
        recorder = Recorder()
        how = {"inputs": prompt(6), "skip": SKIP, "max_new_tokens": 12} | how
        with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
            layerskip.generate(llama, controller="fixed", streamer=recorder, **how)
        assert recorder.events.count("end") == 1, match
        assert recorder.events[-1] == "end"


# ---- Refusals that name the argument ----


def refused(model, match, error=ValueError, **how):
    how = {"inputs": prompt(5), "max_new_tokens": 4, "custom_generate": decoding()} | how
    with pytest.raises(error, match=match):
        model.generate(**how)


def test_what_is_not_served_is_refused_by_name(llama):
    ids = prompt(5)
    empty, filled = (DynamicCache(config=llama.config) for _ in range(2))
    name = cache_name(llama)
    llama(ids[:, :3], **{name: filled})
    embeds = llama.model.embed_tokens(ids).detach()
    cases = [
        ({"num_beams": 2}, "num_beams must be 1, got 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is not supported"),
        ({"dola_layers": "low"}, "dola_layers is not supported"),
        ({"inputs": None, "inputs_embeds": embeds}, "inputs_embeds is not supported"),
        ({name: empty}, f"a custom KV cache .*{name}.* is not supported"),
        ({name: filled}, "a custom KV cache"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"output_hidden_states": True}, "output_hidden_states is not supported"),
        ({"position_ids": torch.arange(5)[None] + 3}, "custom position_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens.*must be greater than 0"),
        ({"guidance_scale": 1.5}, "ClassifierFreeGuidance.* keeps state"),
        ({"suppress_tokens": list(range(VOCABULARY))}, "row 0 has no token to draw after 0 new"),
        ({"prefix_allowed_tokens_fn": lambda row, seen: []}, "returned an empty list"),
    ]
    settings = [
        ({"skip": SkipConfig.early_exit(6)}, r"exit_layer must be in 1\.\.5"),
        ({"skip": SkipConfig(attention=(6,))}, r"attention indices must be in 0\.\.5"),
        ({"skip": SkipConfig(attention=range(6), mlp=range(6))}, "must keep at least one sublayer"),
        ({"controller": "greedy"}, "controller must be one of"),
    ]
    cases += [({"custom_generate": decoding(**wrong)}, match) for wrong, match in settings]
    for how, match in cases:
        refused(llama, match, **how)
    for name in ("synced_gpus", "assistant_model"):  # the library would silently drop these
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            layerskip.generate(llama, ids, skip=SKIP, **{name: llama})


def test_prompts_that_are_none(llama):
    ids, mask = ragged(LENGTHS)
    empty = mask.clone()
    empty[1] = 0
    holes = mask.clone()
    holes[0, 4] = 0  # the library's windows would count them
    for wrong, match in (
        (mask.flip(1), "padded on the right.* give an attention_mask if they only end with"),
        (empty, "prompt is empty"),
        (holes, "attention_mask has holes"),
    ):
        refused(llama, match, inputs=ids, attention_mask=wrong)
        with pytest.raises(ValueError, match=match):
            next(layerskip.decode(llama, ids, wrong, skip=SKIP))
    for wrong, error, match in (
        (mask[:, 1:], ValueError, "attention_mask needs shape"),
        (mask[0], ValueError, "attention_mask needs shape"),
        (mask.tolist(), TypeError, "attention_mask must be a tensor, got list"),
        (mask * 2, ValueError, "attention_mask must hold 0 .* and 1 only"),
    ):
        with pytest.raises(error, match=match):
            next(layerskip.decode(llama, ids, wrong, skip=SKIP))
        with pytest.raises(error, match=match):
            layerskip.generate(llama, {"input_ids": ids, "attention_mask": wrong}, skip=SKIP)
    with pytest.raises(TypeError, match="must be int64 or int32, got a tensor of"):
        layerskip.generate(llama, ids.short(), skip=SKIP)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        LayerSkipDecoding(SKIP).prepare(llama, top=3)
    with pytest.warns(UserWarning, match="top_k has no effect without do_sample=True"):
        next(layerskip.decode(llama, ids, mask, skip=SKIP, top_k=3))
    for shape in ((9,), (1, 0), (0, 4)):
        wrong = torch.ones(shape, dtype=torch.long)
        with pytest.raises(ValueError, match="input_ids must be"):
            layerskip.generate(llama, wrong, skip=SKIP)
        with pytest.raises(ValueError, match="input_ids must be"):
            next(layerskip.decode(llama, wrong, skip=SKIP))
    with pytest.raises(ValueError, match="max_new_tokens must be 1 or more, got 0"):
        next(layerskip.decode(llama, ids, mask, skip=SKIP, max_new_tokens=0))
    wrong = {"max_new_tokens": 1.5, "costs": 3, "sources": [5], "seeds": 3, "controller": Fixed}
    for name, value in wrong.items():
        with pytest.raises(TypeError, match=rf"{name} must be .*, got"):
            next(layerskip.decode(llama, ids, mask, **{name: value}))
    for text in ("text", ["text"], [1, 2], {"input_ids": [[1, 2]]}):
        with pytest.raises(TypeError, match=r"must be a tensor .* tokenizer\(text, return"):
            layerskip.generate(llama, text, skip=SKIP)
    with pytest.raises(TypeError, match="must be a tensor of token ids, got str"):
        next(layerskip.decode(llama, "text", skip=SKIP))


def test_a_decoding_can_be_copied_and_pickled(llama):
    shared = decoding(seed=3, draft_vocabulary=range(2, 60), max_draft_length=4)
    how = {"max_new_tokens": 12, "do_sample": True}
    want = llama.generate(prompt(6), custom_generate=shared, **how).tolist()
    for twin in (copy.copy(shared), copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert vars(twin) == vars(shared)
        assert llama.generate(prompt(6), custom_generate=twin, **how).tolist() == want


def test_models_that_are_not_served():
    config = RwkvConfig(num_hidden_layers=2, hidden_size=8, vocab_size=20)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    flash = tiny_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    for model, match in (
        (RwkvForCausalLM(config).eval(), "'rwkv' is not supported: it has a recurrent state"),
        (flash, r"'flash_attention_2'.*'eager' or 'sdpa'"),
        (tiny_model("llama", rope_parameters=dynamic), "rope type 'dynamic' is not supported"),
    ):
        with pytest.raises(layerskip.LayerskipError, match=match):
            next(layerskip.decode(model, prompt(3) % 20, skip=SkipConfig.early_exit(1)))
    refused(tiny_model("llama").train(), "training mode")


def test_longrope_is_served_on_one_side_of_its_switch():
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
    }
    model = tiny_model("phi3", rope_parameters=longrope, original_max_position_embeddings=32)
    for length in (8, 40):
        want = model.generate(prompt(length), max_new_tokens=16)
        got = model.generate(prompt(length), max_new_tokens=16, custom_generate=decoding())
        assert got.tolist() == want.tolist()
    refused(model, "longrope changes its angles at 32 tokens", inputs=prompt(20), max_new_tokens=16)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_other_rope_types_are_served(rope):
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0}
    parameters["original_max_position_embeddings"] = 64
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope == "linear":
        del parameters["original_max_position_embeddings"]
    model = lively_model("llama", rope_parameters=parameters)
    ids, mask = ragged((70, 9))
    want = model.generate(ids, attention_mask=mask, max_new_tokens=16)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=16, custom_generate=decoding())
    assert got.tolist() == want.tolist()


def test_settings_without_effect_warn(llama):
    want = llama.generate(prompt(5), max_new_tokens=6).tolist()
    for how, match in (
        ({"assistant_early_exit": 3}, "assistant_early_exit has no effect"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens has no effect"),
        ({"use_cache": False}, "use_cache=False has no effect"),
    ):
        with pytest.warns(UserWarning, match=match):
            got = llama.generate(prompt(5), max_new_tokens=6, custom_generate=decoding(), **how)
        assert got.tolist() == want


def test_a_mask_of_another_dtype_serves(llama):
    ids, mask = ragged(LENGTHS)
    want = llama.generate(ids, attention_mask=mask, max_new_tokens=6)
    for dtype in (torch.bool, torch.int32, torch.float32):
        rounds = layerskip.decode(
            llama, ids, mask.to(dtype), skip=SKIP, controller="fixed", max_new_tokens=6
        )
        by_row = zip(*(r.tokens for r in rounds), strict=True)
        assert [[token for new in row for token in new] for row in by_row] == new_tokens(want, 9)


def test_prompts_in_32_bits_give_texts_in_64_as_in_the_library(llama):
    ids, how = prompt(5).int(), {"max_new_tokens": 6}
    assert layerskip.generate(llama, ids, **how).sequences.dtype is llama.generate(ids, **how).dtype


def test_a_skip_config_of_another_model_warns_and_stays_exact(llama):
    model = lively_model("llama")
    model.name_or_path = "here/this"
    skip = SkipConfig(exit_layer=4, model="there/that")
    with pytest.warns(UserWarning, match=r"searched on there/that, .*here/this"):
        got = model.generate(prompt(5), max_new_tokens=6, custom_generate=decoding(skip=skip))
    assert got.tolist() == llama.generate(prompt(5), max_new_tokens=6).tolist()


# ---- Other dtypes and devices ----


# How far passes of different lengths may disagree, relative to the largest score.
RESOLUTION = {torch.float32: 1e-5, torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-11}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(case for case in product(FAMILIES, RESOLUTION) if case[0] in FEW_FAMILIES),
        *slow(*(case for case in product(FAMILIES, RESOLUTION) if case[0] not in FEW_FAMILIES)),
    ],
)
def test_other_dtypes_give_the_same_text_but_for_near_ties(family, dtype):
    model = lively_model(family).to(dtype)
    ids, mask = ragged(LENGTHS)

    def ours(sample, **settings):
        ways = decoding(seed=1 if sample else None, **settings)
        how = {"do_sample": sample, "top_k": 0, "max_new_tokens": 10, "custom_generate": ways}
        return generated(model, (ids, mask), **how)

    # row by row, because padded rows of the library's eager attention are NaN (test_parity.py)
    alone = [
        model.generate(i[m.bool()][None], max_new_tokens=10, do_sample=False)[0, -10:]
        for i, m in zip(ids, mask, strict=True)
    ]
    want = torch.cat([ids, torch.stack(alone)], dim=1)
    greedy, sampled, plain = ours(False), ours(True), ours(True, enabled=False)
    keys = [stream_key(1, row) for row in range(3)]
    gaps = partings(model, mask, greedy.sequences, want)
    gaps += partings(model, mask, sampled.sequences, plain.sequences, keys=keys)
    with torch.no_grad():
        largest = model(ids[:1]).logits.abs().max().item()
    assert max(gaps, default=0) <= RESOLUTION[dtype] * largest
    assert len(gaps) <= (0 if dtype == torch.float32 else 3)  # of 6 texts
    for out in (greedy, sampled):
        assert out.stats.num_draft_tokens > out.stats.num_accepted_tokens > 0


def check_exact(model, **settings):
    inputs = ragged(LENGTHS)
    want = generated(model, inputs, max_new_tokens=12)
    ways = decoding(**settings)
    got = generated(model, inputs, custom_generate=ways, max_new_tokens=12)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapted_linear_layers_stay_exact(family):
    model = lively_model(family)
    plain = model.generate(prompt(6), max_new_tokens=12)
    torch.manual_seed(0)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LowRank(child))
    model.eval()
    assert model.generate(prompt(6), max_new_tokens=12).tolist() != plain.tolist()
    check_exact(model)


@pytest.mark.parametrize(("family", "disk"), [("llama", True), *thorough(("gemma3", False))])
def test_offloaded_models_stay_exact(family, disk, tmp_path):
    model = lively_model(family, num_hidden_layers=5, layer_types=None)
    offload = partial(disk_offload, offload_dir=tmp_path) if disk else cpu_offload
    offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    check_exact(model)
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta


def test_hooks_fire_and_hooks_and_forwards_that_would_be_lost_are_refused():
    model = lively_model("llama")
    plain = model.generate(prompt(6), max_new_tokens=12)
    hook = model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out * -3)
    assert model.generate(prompt(6), max_new_tokens=12).tolist() != plain.tolist()
    check_exact(model)
    hook.remove()
    model(prompt(4), output_hidden_states=True)  # leaves the library's own hooks
    assert Sublayers(model).execution == "fused"
    check_exact(model)
    for module in (model, model.model, model.model.layers[2]):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            hook = register(lambda *_: None)
            with pytest.raises(UnsupportedModelError, match="has forward hooks"):
                next(layerskip.decode(model, prompt(4), skip=SKIP))
            hook.remove()
        kind, module.forward = type(module), lambda *_, **__: None
        with pytest.raises(UnsupportedModelError, match=f"{kind.__name__}.* a custom forward"):
            Sublayers(model)
        module.forward = torch.compile(kind.forward.__get__(module), backend="eager")
        Sublayers(model)
        del module.forward
        module.__class__ = type("Own", (kind,), {"forward": lambda *_, **__: None})
        with pytest.raises(UnsupportedModelError, match=r"Own.* a custom forward"):
            Sublayers(model)
        module.__class__ = kind


def test_generation_config_of_the_model_is_used(llama):
    model = lively_model("llama")
    model.generation_config = GenerationConfig(
        max_new_tokens=9, repetition_penalty=1.5, pad_token_id=0
    )
    got = model.generate(prompt(5), custom_generate=decoding())
    assert got.tolist() == model.generate(prompt(5)).tolist()
    assert got.shape[1] == 14
    got = model.generate(prompt(5), max_length=12, max_new_tokens=None, custom_generate=decoding())
    assert got.shape[1] == 12  # max_length includes the prompt


# ---- Wrappers of adapter libraries ----


class Wrapper(nn.Module):
    """Shaped like PEFT's: it delegates attributes, and `generate()` may get inputs of its own."""

    def __init__(self, model, **config):
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": SimpleNamespace(**{"is_prompt_learning": False} | config)}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        if self.peft_config["default"].is_prompt_learning:
            self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:  # PEFT leaves the bound method, too
            own = type(self.base_model).prepare_inputs_for_generation
            self.base_model.prepare_inputs_for_generation = MethodType(own, self.base_model)

    def prepare_inputs_for_generation(self, *args, **kwargs):
        prepare = type(self.base_model).prepare_inputs_for_generation
        return prepare(self.base_model, *args, **kwargs)


def doors(model):
    """Every way to generate a text."""
    how = {"max_new_tokens": 6}
    named = {"skip": SKIP, "controller": "fixed"} | how

    def decode():
        rounds = layerskip.decode(model, prompt(5), **named)
        return torch.tensor([token for round_ in rounds for token in round_.tokens[0]])

    return {
        "model": lambda: model.generate(prompt(5), **how, custom_generate=decoding())[0, 5:],
        "generate": lambda: layerskip.generate(model, prompt(5), **named).sequences[0, 5:],
        "decode": decode,
    }


def test_a_wrapped_model_with_adapted_layers_is_served_by_every_door():
    model = lively_model("llama")
    layer = model.model.layers[1].mlp
    layer.up_proj = LowRank(layer.up_proj)
    wrapped = Wrapper(model.eval())
    want = model.generate(prompt(5), max_new_tokens=6)[0, 5:]
    for _ in range(2):  # also after what PEFT leaves behind
        assert all(torch.equal(door(), want) for door in doors(wrapped).values())
    space = Space(kind="layer", num_layers=6)
    found = Search(wrapped, [prompt(5)], task=Task(8), space=space, parts=frozenset())
    assert found.model is found.trace.model.model is model


def test_virtual_tokens_are_refused_by_every_door_and_adapters_outside_of_layers_named():
    for config, words in (
        ({"is_prompt_learning": True, "peft_type": "PREFIX_TUNING"}, r"PREFIX_TUNING.*virtual"),
        ({"alora_invocation_tokens": [3]}, "an invocation sequence"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"adapter 'default'.*{words}"):
            Sublayers(Wrapper(lively_model("llama"), **config))
    tuned = Wrapper(lively_model("llama"), is_prompt_learning=True, peft_type="PROMPT_TUNING")
    for door in doors(tuned).values():
        with pytest.raises(UnsupportedModelError, match=r"PROMPT_TUNING|prepare_inputs_for_gen"):
            door()


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_of_the_librarys_making_are_told_from_others(family):
    model = lively_model(family)
    Sublayers(model)  # some families prepare their inputs themselves, which is accepted
    model.prepare_inputs_for_generation = lambda *args, **kwargs: kwargs
    with pytest.raises(UnsupportedModelError, match="comes from test_generation, not from"):
        Sublayers(model)


@pytest.mark.parametrize("place", ["hub", *thorough("the model's own")])
def test_the_library_finds_us_by_the_name_of_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "made")
    )
    monkeypatch.syspath_prepend(tmp_path / "made")
    model, (ids, mask) = lively_model("llama"), ragged((9, 5))
    hub = Path(__file__).parents[1] / "hub"
    by_name = {"custom_generate": str(hub), "trust_remote_code": True}
    if place != "hub":
        model.save_pretrained(tmp_path / "model")
        copytree(hub, tmp_path / "model", dirs_exist_ok=True)
        how = {"trust_remote_code": True, "dtype": torch.float64}
        model, by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **how), {}
        assert isinstance(model.generate, partial)
    how = {"attention_mask": mask, "max_new_tokens": 16, "pad_token_id": 0}
    want = type(model).generate(model, ids, do_sample=False, **how)
    assert torch.equal(model.generate(ids, **how, **by_name), want)
    more = {"return_dict_in_generate": True, "assistant": lively_model("llama"), "costs": COSTS}
    out = model.generate(ids, **how, **more, **by_name)
    assert torch.equal(out.sequences, want)
    assert out.stats.num_accepted_tokens > 0
    sampled = how | {"do_sample": True, "seed": 3}
    plain = layerskip.generate(model, ids, enabled=False, **sampled).sequences
    assert torch.equal(model.generate(ids, **sampled, **by_name), plain)
    with pytest.raises(ValueError, match="num_beams must be 1"):
        model.generate(ids, num_beams=2, **how, **by_name)
