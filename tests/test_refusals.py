"""Values and files that are refused, and the messages: one table."""

import math
from dataclasses import replace
from functools import cache

import pytest
from models import lively_model, prompt
from small import EIGHT, small_model

from layerskip import LayerSkipDecoding, LogitLookup, Session
from layerskip.api.generation import generate
from layerskip.bench.checks import check
from layerskip.cache.branches import ROOT, Branches
from layerskip.config.skips import DecodingOptions, LowPrecision, SkipConfig, Trained
from layerskip.costs.speculation import CostTable, expected_tokens, speedup_bound
from layerskip.decoding.controllers import Fixed, make_controller
from layerskip.model.opened_models import open_model
from layerskip.replay.replayed_drafts import follow, replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import take_trace
from layerskip.search.space import Space
from layerskip.texts.vocabulary import ranked
from layerskip.timing.sublayer_costs import measure

COSTS = CostTable(0.2, (1.0, 1.1, 1.2))
TRAINED = Trained(kind="heads", weights="draft.safetensors", hash="0a" * 32, base="weights-01")
LOW_4, EXIT = LowPrecision(mlp=(1, 4)), SkipConfig.early_exit(2)
FIXED, WHOLE = Fixed(3), "runs as a whole.*cannot "
EMPTY = {"mlp": [1], "decoding": {"draft_vocabulary": []}}


def costs(**told):
    return CostTable.from_dict({"draft": 0.5, "verify": [1.0], "source": "given"} | told)


def vocabulary(*tokens):
    return DecodingOptions(draft_vocabulary=tokens)


def traced(**change):
    return take_trace(
        lively_model("llama"), **{"prompts": [prompt(5)[0]], "max_new_tokens": 4} | change
    )


def measured(**change):
    return measure(lively_model("llama"), **{"prompts": [prompt(5)[0]]} | change)


@cache
def played():
    return replay(traced(draft_length=6), EXIT)


def drawn(**how):
    generate(lively_model("llama"), prompt(5), do_sample=True, max_new_tokens=2, **how)


def draft(family, skip):
    generate(small_model(family), prompt(5), skip=skip, max_new_tokens=2)


def experts(family, number):
    generate(lively_model(family), prompt(4), skip=SkipConfig(experts=number), max_new_tokens=3)


REFUSED = {
    TypeError: [
        (lambda: SkipConfig(attention=(True,)), "attention index must be an integer, got True"),
        (lambda: SkipConfig(mlp="39"), "mlp must be a list of layer indices, got '39'"),
        (lambda: SkipConfig(model=7), "model must be a string, got 7"),
        (lambda: SkipConfig(low={"bits": 8}), "low must be LowPrecision, got"),
        (lambda: SkipConfig(decoding={"enabled": True}), "decoding must be DecodingOptions"),
        (lambda: SkipConfig(notes=[]), "notes must be a JSON object"),
        (lambda: DecodingOptions(enabled=1), "enabled must be true or false, got 1"),
        (lambda: LowPrecision(bits=True), "bits must be an integer, got True"),
        (lambda: LowPrecision(head=6), "head must be true or false, got 6"),
        (lambda: replace(TRAINED, base=None), "base must be a string, got None"),
        (lambda: costs(draft="0.5"), "got '0.5'"),
        (lambda: costs(verify=[True]), "got True"),
        (lambda: costs(verify="1"), "verify must be a list"),
        (lambda: CostTable.from_dict([0.5]), "costs must be a JSON object"),
        (lambda: LayerSkipDecoding({"mlp": 3}), "skip must be a SkipConfig, its file, or several"),
        (lambda: LayerSkipDecoding(draft_memory="1GB"), "draft_memory must be a finite number"),
        (lambda: vocabulary(4, 5.0), r"must be an integer, got 5\.0"),
        (lambda: vocabulary(4, True), "must be an integer, got True"),
        (lambda: DecodingOptions(draft_vocabulary="45"), "must be a list of token ids, got '45'"),
        (lambda: DecodingOptions(draft_vocabulary=7), "must be a list of token ids, got 7"),
        (lambda: drawn(seed=1.5), "a seed must be an integer, got"),
        (lambda: drawn(seeds=(1, "2")), "a seed must be an integer, got"),
        (lambda: replay(played().trace, LogitLookup()), "LogitLookup cannot be replayed"),
        (lambda: Space(kind="layer", num_layers=True), "num_layers must be an integer, got True"),
    ],
    ValueError: [
        (lambda: SkipConfig(attention=(-1,)), "attention index must be 0 or more, got -1"),
        (lambda: SkipConfig(attention=(3, 5, 3)), "must differ from each other, got 3 twice"),
        (lambda: SkipConfig(exit_layer=0), "exit_layer must be 1 or more, got 0"),
        (lambda: SkipConfig(model_hash=""), "model_hash must not be empty"),
        (lambda: SkipConfig(costs={"draft": 0.2}), "costs.verify is missing"),
        (lambda: SkipConfig(costs={"draft": 0, "verify": [1]}), "draft must be above 0, got 0"),
        (lambda: DecodingOptions(controller=""), "controller must not be empty"),
        (lambda: DecodingOptions(max_draft_length=0), "max_draft_length must be 1 or more, got 0"),
        (lambda: DecodingOptions(threshold=1.5), r"threshold must be in 0\.\.1, got 1.5"),
        (
            lambda: DecodingOptions(acceptance="exact"),
            "'coupled' or 'rejection' or 'spectr', got 'exact'",
        ),
        (lambda: LayerSkipDecoding(draft_memory=-1), "draft_memory must be 0 or more, got -1"),
        (lambda: LowPrecision(bits=6), "bits must be 8 or 4, got 6"),
        (lambda: replace(TRAINED, kind="eagle"), "kind must be 'exit-block' or .*, got 'eagle'"),
        (lambda: replace(TRAINED, kind="healed"), "kind 'healed' was removed; leave `trained` out"),
        (lambda: replace(TRAINED, kind="feature-block"), "was removed; train its successor with"),
        (lambda: replace(TRAINED, weights=""), "weights must not be empty"),
        (lambda: replace(TRAINED, hash="0A" * 32), "hash must be 64 hexadecimal digits"),
        # what fits no model
        (lambda: SkipConfig().resolve(0), "num_layers must be 1 or more, got 0"),
        (lambda: SkipConfig(exit_layer=2).kept(), "num_layers is unknown"),
        (lambda: SkipConfig.early_exit(16).resolve(16), r"exit_layer must be in 1\.\.15.*, got 16"),
        (
            lambda: SkipConfig(attention=(1, 4)).resolve(4),
            r"in 0\.\.3 for a 4-layer .*, got 4",
        ),
        (lambda: SkipConfig(mlp=(4,)).resolve(4), r"mlp indices must be in 0\.\.3 .*, got 4"),
        (lambda: SkipConfig(low=LOW_4).resolve(4), r"low mlp indices must be in 0\.\.3 .*, got 4"),
        (lambda: SkipConfig(attention=range(4), mlp=range(4)).resolve(4), "at least one sublayer"),
        (lambda: SkipConfig(mlp=(0, 1), attention=(0, 1), exit_layer=2).resolve(4), "at least one"),
        (lambda: SkipConfig(num_layers=12).resolve(16), "is for a 12-layer model, got a 16-layer"),
        (lambda: LayerSkipDecoding([]), "at least one skip config; give None"),
        (lambda: LayerSkipDecoding([EXIT, EXIT]), r"skip holds SkipConfig\(exit_layer=2\) twice"),
        # draft vocabularies
        (vocabulary, "1 token or more, got none; leave it out"),
        (lambda: LayerSkipDecoding(EXIT, draft_vocabulary=()), "1 token or more, got none"),
        (lambda: SkipConfig.from_dict(EMPTY), "1 token or more, got none"),
        (lambda: vocabulary(4, 7, 4), "must differ from each other, got 4 twice"),
        (lambda: vocabulary(4, -1), "must be 0 or more, got -1"),
        (lambda: ranked([[3, 9]], 9), r"tokens in 0\.\.8, got 3 to 9"),
        (lambda: ranked([[-1, 2]], 9), r"tokens in 0\.\.8, got -1 to 2"),
        (lambda: ranked([[1]], 9, ends=(9,)), r"tokens in 0\.\.8, got \[9\]"),
        # spaces, traces, and costs of sublayers
        (lambda: Space(kind="block", num_layers=5), "one of exit, layer, sublayer, got 'block'"),
        (lambda: Space(kind="layer", num_layers=0), "num_layers must be 1 or more, got 0"),
        (lambda: Space(kind="layer", num_layers=5, bits=6), "bits must be 8 or 4, got 6"),
        (lambda: traced(prompts=[]), "at least one token"),
        (lambda: traced(prompts=[prompt(0)[0]]), "at least one token"),
        (lambda: traced(seeds=[1, 2]), "one per prompt, 1; got 2"),
        (lambda: traced(max_new_tokens=1), "at least 2"),
        (lambda: traced(draft_length=0), "at least 1"),
        (lambda: traced(acceptance="typical"), "'coupled' or 'rejection', got 'typical'"),
        (lambda: traced(max_new_tokens=255), "at most 256"),
        (lambda: traced(eos=frozenset(range(97))), "first token"),
        (lambda: measured(contexts=(4000,)), r"contexts must be in 1\.\."),
        (lambda: measured(budget=0.0), "budget must be more than 0"),
        (lambda: measured(prompts=[prompt(0)[0]]), "at least one"),
        (lambda: replay(played().trace, EXIT, 7), r"1\.\.6"),
        (lambda: replay(played().trace, SkipConfig.early_exit(6)), r"1\.\.5 for a 6-layer"),
        (lambda: follow(played().trace, EXIT, 0), r"1\.\.6"),
        (lambda: follow(played().trace, EXIT, 7), r"1\.\.6"),
        (lambda: next(simulate(played(), FIXED, max_draft_length=7)), r"0\.\.6"),
        (lambda: Space(kind="layer", num_layers=5).params(4), "is not in the layer space of 5 lay"),
        # models
        (lambda: drawn(seeds=(1, 2)), "one seed per row, 1; got 2"),
        (lambda: drawn(seed=1, seeds=(1,)), "not both"),
        (lambda: drawn(seed=-1), "a seed must be 0 or more, got -1"),
        (lambda: Session(lively_model("llama"), memory=-1), "memory must be a number of bytes"),
        (lambda: Session(small_model("bart")), "encoder-decoder, whose keys and values depend"),
        (lambda: open_model(small_model("phi"), "fused"), "'fused' cannot serve .*runs as a whole"),
        (
            lambda: draft("phi", SkipConfig.early_exit(1)),
            f"{WHOLE}leave sublayers out or",
        ),
        (lambda: draft("phi", SkipConfig(attention=(1,))), f"{WHOLE}leave sublayers out or exit"),
        (lambda: draft("phi", SkipConfig(experts=1)), f"{WHOLE}take fewer experts.*lookups, a sec"),
        (
            lambda: draft("phi", SkipConfig(low=LowPrecision(mlp=(1,)))),
            f"{WHOLE}round some sublayers",
        ),
        (lambda: draft("gpt2", EIGHT), "runs as a whole.*none of its linears is an ordinary one"),
        (lambda: take_trace(small_model("phi"), [prompt(9)], max_new_tokens=4), "runs as a whole"),
        (lambda: measure(small_model("phi"), [prompt(9)], contexts=[8]), "runs as a whole"),
        (lambda: experts("gemma4_mixture", 3), r"experts must be in 0..2 .* 2 of 4, got 3"),
        (lambda: experts("mixtral", 0), r"experts must be in 1..2 .* got 0"),
        (lambda: experts("qwen3_moe", 0), r"experts must be in 1..2 .* got 0"),
        (
            lambda: experts("llama", 1),
            "experts must be left out for this model, which is not a mix",
        ),
        (lambda: check(lively_model("llama"), [], EXIT), "at least one prompt"),
        (lambda: check(lively_model("llama"), [prompt(9)], EXIT, max_new_tokens=250), "at most"),
        # costs
        (lambda: costs(draft=-0.5), "draft must be 0 or more"),
        (lambda: costs(draft=math.nan), "got nan"),
        (lambda: costs(verify=[]), "at least 1 items"),
        (lambda: costs(verify=[1, -1]), r"verify\[1\]"),
        (lambda: costs(verify=[math.inf]), "got inf"),
        (lambda: costs(source="guess"), "got 'guess'"),
        (lambda: CostTable.from_dict({"draft": 0.5, "verify": [1.0]}), "costs.source is missing"),
        (lambda: COSTS.verify_cost(0), "at least 1 position, got 0"),
        (lambda: speedup_bound(0.0), "draft_cost must be finite and positive, got 0"),
        (lambda: expected_tokens(1.2, 3), r"alpha must be in \[0, 1\], got 1.2"),
        (lambda: expected_tokens(0.5, -1), "draft_length must be at least 0, got -1"),
        # controllers and trees
        (lambda: make_controller("greedy", costs=COSTS), "fixed, confidence, .*, got 'greedy'"),
        (lambda: Branches([[0]]), "root"),
        (lambda: Branches([[ROOT, 1]]), "follow"),
        (lambda: Branches([[ROOT, 0], [ROOT]]), r"root|follow"),
        (lambda: Branches([[ROOT, 0, 3]]), "follow"),
    ],
}
FILES = [
    ("", "not valid JSON"),
    ('{"schema": 3, "attention": [3, 9], "ml', "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('{"attention": [1], "attention": [2]}', "'attention' occurs twice"),
    ('{"attention": [NaN], "mlp": []}', "numbers must be finite, got NaN"),
    ("[3, 9]", "must be a JSON object, got"),
    ("{}", "must have attention, mlp, .* low, trained, experts or window, got none"),
    ('{"schema": 2, "mlp": []}', "schema must be 3, got 2: of another version"),
    ('{"schema": 1, "recipe": {}}', "got 1: of another version of layerskip, or another kind of"),
    ('{"model_type": "llama"}', "may have the keys attention, .*; got 'model_type'"),
    ('{"mlp": null}', "mlp must be a list of layer indices, got None"),
    ('{"low": []}', "low must be a JSON object"),
    ('{"trained": {"kind": "heads"}}', "trained.weights is missing"),
    ('{"mlp": [], "decoding": {"gamma": 3}}', "decoding may have the keys .*; got 'gamma'"),
    (bytes(range(256)), "not valid JSON"),
    (None, "cannot read skip config"),
]


def test_values_are_refused_with_these_words(subtests):
    for error, calls in REFUSED.items():
        for call, words in calls:
            with subtests.test(words), pytest.raises(error, match=words):
                call()


def test_skip_configs_that_cannot_be_loaded_name_the_file_and_the_fault(tmp_path, subtests):
    path = tmp_path / "skip.json"
    for content, words in FILES:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        with subtests.test(words), pytest.raises(ValueError, match=words) as caught:
            SkipConfig.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot read skip config"):
        SkipConfig.load(tmp_path)  # it is a folder
