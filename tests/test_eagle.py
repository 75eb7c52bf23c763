"""EAGLE-3 heads: logits as their papers define them, unchanged texts, and training."""

import copy
import json
import random

import pytest
import torch
from checkpoints import save_checkpoint
from commands import PROMPT, refused, run
from definitions import attended, rms_norm, turned
from models import VOCABULARY, Erratic, lively_model, prompt, ragged, tiny_model
from safetensors.torch import load_file, save_file
from small import BATCHES, NEW_TOKENS, check_texts, small_model
from talks import chat
from transformers import AutoModelForCausalLM

import layerskip
from layerskip import LayerSkipDecoding
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings
from layerskip.cache.library_cache import LibraryCache
from layerskip.decoding.sources import drafter_of
from layerskip.model.eagle_head import load_eagle, save_eagle
from layerskip.model.opened_models import sublayers_of
from layerskip.training.eagle_training import new_head, read, unrolled

WIDTH, HEAD, DRAFTED = 32, 8, 40
LAYER = {
    **{"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 48, "head_dim": HEAD},
    **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 500.0},
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": DRAFTED,
    "transformer_layer_config": LAYER,
}
QWEN = LAYER | {"model_type": "qwen3", "hidden_size": 24}
FORMS = {
    "speculators": SPECULATORS | {"norm_before_residual": True},
    "normed": SPECULATORS | {"norm_before_fc": True, "norm_output": True},
    "qwen": SPECULATORS
    | {"transformer_layer_config": QWEN, "target_hidden_size": WIDTH, "fc_norm": True}
    | {"eagle_aux_hidden_state_layer_ids": [1, 6, 3, 5]},
    "authors": LAYER
    | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
}
DEPTHS = {"qwen": [1, 6, 3, 5], "authors": [1, 3, 5]}
HOW = {"lookup": False, "max_draft_length": 3}


def weights_of(form, seed=1):
    """Random tensors of a head, with the names of its form."""
    config = FORMS[form]
    layer = config.get("transformer_layer_config", config)
    width, inner, count = layer["hidden_size"], layer["intermediate_size"], 3 + (form == "qwen")
    generator, made = torch.Generator().manual_seed(seed), {}

    def put(name, *shape):
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        noise = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        made[f"{name}.weight"] = noise

    name = "midlayer." if form == "authors" else "layers.0."
    for each in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        put(name + each, width)
    for each, size in (("q", 32), ("k", 16), ("v", 16)):
        put(f"{name}self_attn.{each}_proj", size, 2 * width)
    put(f"{name}self_attn.o_proj", width, 32)
    for each in ("q_norm", "k_norm") if form == "qwen" else ():
        put(f"{name}self_attn.{each}", HEAD)
    put(f"{name}mlp.gate_proj", inner, width)
    put(f"{name}mlp.up_proj", inner, width)
    put(f"{name}mlp.down_proj", width, inner)
    put("fc", width, count * WIDTH)
    put("norm", width)
    if form == "normed":
        put("input_norm", count * WIDTH)
    for number in range(count) if form == "qwen" else ():
        put(f"fc_norm.{number}", WIDTH)
    if form == "authors":  # it uses the target's embeddings and output head
        return made
    put("lm_head", DRAFTED, width)
    if form == "qwen":
        put("embed_tokens", VOCABULARY, width)
    kept = torch.randperm(VOCABULARY, generator=generator)[:DRAFTED].sort().values
    made["d2t"] = kept - torch.arange(DRAFTED)
    made["t2d"] = torch.isin(torch.arange(VOCABULARY), kept)
    return made


def written(folder, config, weights):
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(model, config, weights, tokens, states):
    """The states of a head and its logits over the target's tokens, for (T,) and states (T, W).

    Written from the EAGLE-3 paper and the documentation of `speculators`, in float64.
    """
    layer = config.get("transformer_layer_config", config)
    weights = {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def norm(x, name):
        return rms_norm(x, weights[f"{name}.weight"].double(), layer["rms_norm_eps"])

    def linear(x, name):
        return x @ weights[f"{name}.weight"].double().T

    def attention(x, name):
        q, k, v = (linear(x, f"{name}{each}_proj").view(len(x), -1, HEAD) for each in "qkv")
        if f"{name}q_norm.weight" in weights:
            q, k = norm(q, f"{name}q_norm"), norm(k, f"{name}k_norm")
        q, k = (turned(each, HEAD, layer["rope_theta"]) for each in (q, k))
        return linear(attended(q, k, v).flatten(1), f"{name}o_proj")

    name, normed = "layers.0.", norm(states, "layers.0.hidden_norm")
    x = normed if config.get("norm_before_residual") else states
    both = torch.cat([norm(embeddings[tokens].double(), f"{name}input_layernorm"), normed], -1)
    x = x + attention(both, f"{name}self_attn.")
    y = norm(x, f"{name}post_attention_layernorm")
    gate = torch.nn.functional.silu(linear(y, f"{name}mlp.gate_proj"))
    x = x + linear(gate * linear(y, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")
    last = norm(x, "norm")
    output = weights.get("lm_head.weight", model.get_output_embeddings().weight).double()
    raw = torch.full((len(tokens), VOCABULARY), float("-inf")).double()
    shift = weights.get("d2t", torch.zeros(VOCABULARY, dtype=torch.long))
    raw[:, torch.arange(len(shift)) + shift] = last @ output.T
    return last if config.get("norm_output") else x, raw


def joined(model, form, config, weights, ids):
    """The head's input states for tokens (T,) except the last, (T - 1, W)."""
    norm, model.model.norm = model.model.norm, torch.nn.Identity()  # also for the last states
    every = model.model(ids[None], output_hidden_states=True).hidden_states
    model.model.norm = norm
    states = torch.cat([every[depth][0, :-1] for depth in DEPTHS.get(form, [2, 3, 3])], -1)

    def norm(x, name):
        return rms_norm(x, weights[f"{name}.weight"], 1e-5)

    if config.get("norm_before_fc"):
        states = norm(states, "input_norm")
    if config.get("fc_norm"):
        parts = enumerate(states.chunk(4, -1))
        states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in parts], -1)
    return states.double() @ weights["fc.weight"].double().T


@pytest.fixture
def head(tmp_path):
    """Writes a head of a form; returns its folder and tensors."""

    def make(form, **more):
        weights = weights_of(form)
        return written(tmp_path / form, FORMS[form] | more, weights), weights

    return make


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_drafts_are_those_of_the_definition(form, head):
    """Logits over a prompt in pieces; then drafts, of which the second reads the head's states."""
    folder, weights = head(form)
    model, config = lively_model("llama"), FORMS[form]
    target, ids = sublayers_of(model), prompt(12)[0]
    source = layerskip.decoding.sources.second_model(
        target, load_eagle(folder, dtype=torch.float64)
    )
    first = joined(model, form, config, weights, ids)
    want = reference(model, config, weights, ids[1:], first)[1]
    before = torch.cat([torch.zeros_like(first[:1]), first])[None]  # (1, T, W)
    cache, got = LibraryCache(1, 16, (None,)), []
    for start, end in ((0, 7), (7, 8), (8, 12)):
        cache.place([start], end - start)
        out = source.compute(ids[None, start:end], before[:, start:end], cache)
        got.append(source.logits(out.transpose(0, 1)))
    assert torch.allclose(torch.cat(got)[1:], want, atol=1e-4)  # norms use float32
    text, drafts = ids.tolist(), []
    for each in layerskip.decode(
        model, ids[None], max_new_tokens=8, controller="fixed", assistant=folder, **HOW
    ):
        for number, drafted in enumerate(each.drafts[0][:2] if each.drafts else ()):
            seen = torch.tensor([*text, *each.drafts[0][:number]])
            states = joined(model, form, config, weights, torch.tensor(text))
            for place in range(len(text), len(seen)):
                own = reference(model, config, weights, seen[1:place], states)[0][-1:]
                states = torch.cat([states, own])
            drafts.append(drafted)
            assert drafted == reference(model, config, weights, seen[1:], states)[1][-1].argmax()
        text += each.tokens[0]
    assert len(drafts) > 4


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f"gemma{n}", marks=pytest.mark.thorough) for n in "234")]
)
def test_texts_are_the_same_with_and_without(family, head):
    """Rows of a batch, by both accept rules; in native passes bit by bit."""
    folder, _ = head("speculators")
    how = {"assistant": folder, "controller": Erratic(), **HOW}
    inputs = ragged(BATCHES["ragged"], seed=3)
    check_texts(lively_model(family), inputs, "eagle3", (torch.float64, torch.bfloat16), **how)


def test_sessions_and_servers_draft_with_heads(head):
    folder, _ = head("speculators")
    model = lively_model("gemma3", dtype=torch.float32)
    how = {"assistant": str(folder), "controller": "fixed", **HOW}
    chat(model, 2, NEW_TOKENS, **how)
    told = open_plan(model, Settings(**how)).explain()
    assert f"drafts: an EAGLE-3 head in 8 bits, {folder}" in told


def test_one_decoding_serves_models_of_several_dtypes_and_loads_a_head_once_for_each(head, spied):
    folder, _ = head("speculators")
    double = lively_model("llama")
    models = [double, copy.deepcopy(double).float()]
    decoding = LayerSkipDecoding(assistant=folder, controller="fixed", lookup=False)
    settings = dict(vars(decoding))
    read = spied(layerskip.decoding.sources, "load_eagle", lambda source, _: source)
    for _ in range(2):
        for model in models:
            plain = layerskip.generate(model, prompt(9), max_new_tokens=NEW_TOKENS, enabled=False)
            how = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
            out = model.generate(prompt(9), custom_generate=decoding, **how)
            assert out.sequences.tolist() == plain.sequences.tolist()
            assert out.stats.num_drafts > 0
    assert read == [folder] * 2
    assert vars(decoding) == settings
    assert decoding.assistant == folder
    twice = [open_plan(double, decoding) for _ in range(2)]
    assert twice[0].sources is twice[1].sources
    layerskip.release(double)
    assert open_plan(double, decoding).sources is not twice[0].sources


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, w: w.pop("fc.weight"), "is incomplete: fc.weight is missing"),
        (lambda c, w: w.pop("d2t"), "is incomplete: d2t is missing"),
        (lambda c, w: w.update({"fc.weight": w["fc.weight"][:, 1:].clone()}), r"shape \[32, 95\]"),
        (lambda c, w: w["d2t"].add_(70), "must map to different tokens in 0..96"),
        (lambda c, w: w["d2t"].copy_(-torch.arange(DRAFTED)), "different tokens"),
        (lambda c, w: w.update(x=w["norm.weight"].clone()), "holds an unknown tensor, x"),
        (lambda c, w: c.update(speculators_model_type="peagle"), "a head of kind 'peagle'"),
        (lambda c, w: c["transformer_layer_config"].update(model_type="t5"), "llama or qwen3"),
        (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "layers 1, 2, 7 of 6"),
        (
            lambda c, w: (
                c["transformer_layer_config"].update(vocab_size=99),
                w.update({"t2d": torch.ones(99, dtype=torch.bool)}),
            ),
            "made for 99 tokens, the model has 97",
        ),
    ],
)
def test_bad_folders_are_named_errors(damage, message, tmp_path):
    config, weights = copy.deepcopy(FORMS["speculators"]), weights_of("speculators")
    damage(config, weights)
    folder = written(tmp_path / "head", config, weights)
    with pytest.raises(ValueError, match=message) as raised:
        layerskip.generate(lively_model("llama"), prompt(5), max_new_tokens=2, assistant=folder)
    assert "\n" not in str(raised.value)


def test_heads_of_other_models_are_refused(head, tmp_path):
    folder, _ = head("speculators")
    wide = tiny_model("llama", hidden_size=48)
    with pytest.raises(ValueError, match="hidden states of 32 numbers, the model has 48"):
        layerskip.generate(wide, prompt(5), max_new_tokens=2, assistant=folder)
    whole = small_model("phi")
    with pytest.raises(ValueError, match="runs as a whole"):
        layerskip.generate(whole, prompt(5), max_new_tokens=2, assistant=folder)
    (tmp_path / "speculators" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_eagle(folder)
    save_file({"fc.weight": torch.ones(2)}, tmp_path / "speculators" / "part.safetensors")
    index = {"weight_map": dict.fromkeys(weights_of("speculators"), "part.safetensors")}
    (tmp_path / "speculators" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"cannot read .* in .*part.safetensors: File does not"):
        load_eagle(folder)
    (tmp_path / "trained.json").write_text("{}")
    with pytest.raises(ValueError, match="name it by --skip"):
        drafter_of(tmp_path)


def shaken_head(target):
    """A new head whose layer is perturbed, so that it does something."""
    head = new_head(target, torch.arange(5, 60))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for weight in head.layers.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return head


@torch.no_grad()
def test_training_unrolls_the_steps_of_decoding():
    model = lively_model("gemma3")
    target, ids = sublayers_of(model), prompt(12)
    head = shaken_head(target)
    reading = read(target, head, ids)
    assert torch.allclose(reading.logits, model(ids).logits[..., 5:60].float(), atol=1e-5)
    got = unrolled(head, reading, head.lm_head.weight, 3)
    weights = head.state_dict()
    for place in (0, 4, 8):
        states = head.join(reading.states)[0, : place + 1]
        for step in range(3):
            tokens = ids[0, 1 : place + 2 + step]
            out, raw = reference(model, head.config, weights, tokens, states)
            assert torch.allclose(got[step][0, place], raw[-1, 5:60].float(), atol=1e-3)
            states = torch.cat([states, out[-1:]])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_speculators_reads_what_is_written(family, tmp_path):
    """Its own training steps draft the same tokens as ours. Needs that package."""
    pytest.importorskip("speculators")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    save_checkpoint(tmp_path / "model", lively_model(family, dtype=torch.float32))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    target, ids = sublayers_of(model), prompt(20)
    head = shaken_head(target)
    save_eagle(head, tmp_path / "head")
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(tmp_path / "head", config=config)
    for name, weight in theirs.state_dict().items():
        if not name.startswith("verifier_"):
            ours = head.state_dict().get(name)
            assert name == "t2d" or torch.equal(weight, ours), name
    reading = read(target, head, ids)
    drafted = theirs(
        hidden_states=reading.states[:, :-1],
        input_ids=ids[:, 1:],
        document_ids=torch.zeros_like(ids[:, 1:]),
        ttt_steps=3,
    )
    for step, logits in enumerate(unrolled(head, reading, head.lm_head.weight, 3)):
        assert drafted[step][:, : logits.shape[1]].tolist() == logits.argmax(-1).tolist()


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tmp_path, lively_model("llama", dtype=torch.float32))


def test_commands_train_and_draft_with_heads(folder, tmp_path):
    draws = random.Random(0)  # all documents have one law, also those held out
    texts = (" ".join(f"w{2 + draws.choice((i, 7))}" for i in range(50)) for _ in range(30))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in texts))
    out = folder / "out"
    made = ("train", folder, "--draft", "eagle3", "--texts", folder / "texts.jsonl")
    result = run(*made, "--tokens", 8_192, "--output", out)
    assert result.exit_code == 0, result.output
    assert (
        f"next: layerskip generate {folder} --prompt TEXT --assistant {out}/eagle3" in result.stderr
    )
    record = json.loads((out / "eagle3.json").read_text())
    assert sum(record["overlap"]["after"]) > sum(record["overlap"]["before"])
    assert {file.stat().st_mode & 0o777 for file in (out / "eagle3").iterdir()} == {0o644}
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--no-lookup")
    result = run("generate", folder, *flags, "--assistant", out / "eagle3")
    assert result.exit_code == 0, result.output
    assert f"an EAGLE-3 head in 8 bits, {out}/eagle3" in result.stderr
    assert run("generate", folder, *flags, "--no-draft").stdout == result.stdout
    again = load_eagle(out / "eagle3")
    save_eagle(again, tmp_path / "again")
    kept, made = (
        load_file(each / "model.safetensors") for each in (tmp_path / "again", out / "eagle3")
    )
    assert all(torch.equal(kept[name], value) for name, value in made.items())
    further = ("train", folder, "--draft", "eagle3", "--start", folder)
    assert "must name a head" in refused(*further, "--tokens", 8, "--output", folder / "o")
