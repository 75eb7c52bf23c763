"""DFlash drafters: blocks as the library and the paper define them, and unchanged texts."""

import copy

import pytest
import torch
from block_drafters import BLOCK, HEAD, MASK, forms_for, weights_of, written
from checkpoints import save_checkpoint
from commands import PROMPT, refused, run
from definitions import rms_norm, turned
from models import Erratic, decoder_of, lively_model, prompt, ragged
from small import BATCHES, NEW_TOKENS, alone, check_texts, decoded, new_tokens
from talks import chat, finished
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import layerskip
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings
from layerskip.costs.speculation import CostTable
from layerskip.decoding.acceptance import SourceGain
from layerskip.decoding.sources import load_drafter
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving
from layerskip.weights.rounded import rounded

WIDTH, TOKENS = 32, 9
FORMS = forms_for(WIDTH, TOKENS, layers=6)
FAMILIES = {"library": "muse_glimmer", "authors": "qwen3", "authors, sliding": "gemma4"}
WIDER = torch.ones(WIDTH, 3 * 48)
HOW = {"lookup": False, "controller": "fixed", "max_draft_length": BLOCK}


def target(form="authors", **how):
    """A model with so few tokens that a random drafter is right now and then."""
    family = FAMILIES.get(form, "llama")
    more = {"vocab_size_per_layer_input": TOKENS} if family == "gemma4" else {}
    return lively_model(family, vocab_size=TOKENS, **more, **how)


def few(ids):
    return ids % (TOKENS - 2) + 2


@pytest.fixture
def drafter(tmp_path):
    """Writes a drafter of a form; returns its folder."""

    def make(form="authors", **more):
        return written(tmp_path / form, FORMS[form] | more)

    return make


def reference(model, form, weights, text):
    """The tokens of a block after a text (T,), written from the DFlash paper, in float64."""
    config, count = FORMS[form], len(text) - 1
    layers = config.get("transformer_layer_config", config)
    window = (layers.get("sliding_window") or 0) + (form == "library")

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def norm(x, name):
        return rms_norm(x, weights[f"{name}.weight"], layers["rms_norm_eps"])

    every = decoder_of(model)(text[None, :-1], output_hidden_states=True).hidden_states
    states = torch.cat([every[depth][0] for depth in (1, 3, 5)], -1)  # (T - 1, 3 H)
    context = norm(linear(states, "fc"), "output_norm_enc" if form == "library" else "hidden_norm")
    block = torch.tensor([int(text[-1]), *[MASK] * (BLOCK - 1)])
    own, embedding = form == "speculators", model.get_input_embeddings()
    x = embedding.weight[block] if form == "library" else embedding(block)  # without its norm
    x = weights["embed_tokens.weight"][block] if own else x
    places, keys_at = count + torch.arange(BLOCK), torch.arange(count + BLOCK)
    distance = places[:, None] - keys_at  # (K, S)
    for i, kind in enumerate(layers.get("layer_types", ["full_attention"] * 2)):
        name, y = f"layers.{i}.", norm(x, f"layers.{i}.input_layernorm")
        every = torch.cat([context, y])

        def heads(of, each, name=f"{name}self_attn."):
            made = linear(of, f"{name}{each}_proj").view(len(of), -1, HEAD)
            return made if each == "v" else norm(made, f"{name}{each}_norm")

        q, k = heads(torch.cat([torch.zeros(count, len(y[0])).double(), y]), "q"), heads(every, "k")
        q, k = (turned(each, HEAD, layers["rope_theta"]) for each in (q, k))
        k, v = (each.repeat_interleave(2, 1) for each in (k, heads(every, "v")))
        scores = torch.einsum("qhd,khd->hqk", q[count:], k) * HEAD**-0.5
        if kind == "sliding_attention":
            seen = distance.abs() < window
            seen &= (distance >= 0) | (form in ("library", "speculators"))
            scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + linear(out, f"{name}self_attn.o_proj")
        y = norm(x, f"{name}post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, f"{name}mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")
    head = weights.get("lm_head.weight", model.get_output_embeddings().weight)
    best = (norm(x, "norm")[not own :] @ head.T).argmax(-1)
    return (best + weights["d2t"][best]).tolist() if own else best.tolist()


def drafts_of(model, folder, ids, mask, count, **how):
    """Of each row, the tokens drafted by length of the text, and the text."""
    rows = [({}, row[keep.bool()].tolist()) for row, keep in zip(ids, mask, strict=True)]
    how = {"max_new_tokens": count, "attention_mask": mask, "assistant": folder} | HOW | how
    for each in layerskip.decode(model, ids, **how):
        for number, (drafts, text) in enumerate(rows):
            if each.drafts and each.drafts[number]:
                drafts[len(text)] = [*each.drafts[number]]
            text += each.tokens[number]
    return rows


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_drafts_are_those_of_the_definition(form, drafter):
    """Of all rows of a batch, that draft in some rounds, and begin at different places."""
    folder, weights = drafter(form), weights_of(FORMS[form])
    model, (ids, mask) = target(form), ragged((13, 5, 9), seed=3)
    rows = drafts_of(model, folder, few(ids), mask, 30, controller=Erratic())
    for drafts, text in rows:
        for length, drafted in drafts.items():
            want = reference(model, form, weights, torch.tensor(text[:length]))
            assert drafted == want[: len(drafted)]
    assert sum(len(drafts) for drafts, _ in rows) > 40


@pytest.mark.parametrize("form", ["library", "authors"])
def test_drafts_are_those_of_the_library(form, drafter, monkeypatch):
    """Token for token, over at least 200 rounds of both, where windows are long exceeded."""
    folder = drafter(form)
    model, seen = target(form), {}
    theirs = load_drafter(folder, dtype=model.dtype, device=model.device)
    original = DFlashTokenCandidateGenerator.get_candidates

    def noted(self, input_ids, *how, **more):
        out = original(self, input_ids, *how, **more)
        seen[input_ids.shape[1]] = out[0][0, input_ids.shape[1] :].tolist()
        return out

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    how = {"assistant_model": theirs.network, "speculation_type": "dflash", "do_sample": False}
    compared = 0
    for seed in range(2):
        seen.clear()
        ids = few(prompt(12, seed=seed))
        out = model.generate(ids, max_new_tokens=90, **how)
        ((drafts, text),) = drafts_of(model, folder, ids, torch.ones_like(ids), 90)
        assert out[0].tolist() == text
        for length, drafted in drafts.items():
            assert drafted == seen[length][: len(drafted)]
            compared += 1
    assert 100 <= compared < 170  # some tokens of 180 were accepted


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_the_same_with_and_without(form, drafter):
    """Rows of a batch, greedy and sampled, beside lookups; in native passes bit by bit."""
    folder = drafter(form)
    model, (ids, mask) = target(form), ragged(BATCHES["ragged"], seed=3)
    inputs = few(ids) * mask, mask
    how = {"assistant": folder, "max_draft_length": BLOCK, "controller": Erratic(), "lookup": False}
    check_texts(model, inputs, "dflash", (torch.float64, torch.bfloat16), **how)
    branches = how | {"branches": True, "controller": "expected-gain"}
    for more in ({"assistant": folder}, branches):
        assert new_tokens(decoded(model, inputs, **more)) == alone(model, *inputs)


def test_native_passes_draft_with_weights_in_8_bits(drafter, tmp_path):
    """As a drafter does whose weights are these numbers; not where copies have no memory."""
    model, config = target("speculators", dtype=torch.float32), FORMS["speculators"]
    weights = weights_of(config)
    for name in weights.keys() - {"embed_tokens.weight", "d2t"}:
        if weights[name].dim() == 2:
            weights[name] = rounded(weights[name].float(), 8).widened(torch.float32)
    near, folder = written(tmp_path / "rounded", config, weights), drafter("speculators")
    inputs, exact = (few(prompt(9)), torch.ones(1, 9), 90), copy.deepcopy(model)
    ((drafts, _),) = drafts_of(model, folder, *inputs)
    assert drafts_of(model, near, *inputs)[0][0] == drafts
    ((others, _),) = drafts_of(exact, near, *inputs, draft_memory=0)
    same = [drafts[place] == others[place] for place in drafts.keys() & others.keys()]
    assert sum(same) > 0.85 * len(same) > 40  # products of 8 bits round their inputs, too
    for each, words in ((model, "at once in 8 bits, "), (exact, "at once, ")):
        assert f"{words}{near}" in open_plan(each, Settings(assistant=near, **HOW)).explain()


def test_sessions_and_servers_draft_with_blocks(drafter):
    folder = drafter("authors", vocab_size=97)
    model = lively_model("qwen3", dtype=torch.float32)
    how = {"assistant": str(folder), **HOW}
    chat(model, 2, NEW_TOKENS, **how)
    words = open_plan(model, Settings(**how)).explain()
    assert f"drafts: a DFlash drafter of 4 tokens at once in 8 bits, {folder}; by" in words
    assert "drafting 4 tokens costs 0.15" in words
    model, tasks = target(), [TextRequest(few(prompt(n))[0].tolist(), 40) for n in (5, 12)]
    drafter()
    told = finished(Serving(model, max_rows=2, **how), *tasks)[-1].counts
    single = layerskip.generate(model, few(prompt(12)), max_new_tokens=40, **how).stats
    assert (told.drafted, told.accepted) == (single.num_draft_tokens, single.num_accepted_tokens)
    assert told.accepted


def test_a_block_is_paid_once():
    """The controller verifies as much of a drafted block as pays, whatever drafting has cost."""
    costs = CostTable(0.5, (1.0, 1.1, 1.3, 1.9, 3.0), per_step=4)
    assert [costs.round_cost(n) for n in range(5)] == [1.0, 1.6, 1.8, 2.4, 3.5]
    assert CostTable.from_dict(costs.to_dict()) == costs
    source = SourceGain(costs, 4, 0.75)
    source.begin(0, 1)
    assert source.step_costs == pytest.approx([0.6, 0.2, 0.6, 1.1])
    assert source.verify_costs == pytest.approx([0.1, 0.2, 0.6, 1.1])
    assert source.cost(2, 4) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, w: w.pop("fc.weight"), r"is incomplete: network.encoder.fc.weight is missing"),
        (lambda c, w: c.pop("block_size"), "describes no DFlash drafter: KeyError: 'block_size'"),
        (
            lambda c, w: c.update(target_hidden_size=48) or w.update({"fc.weight": WIDER}),
            "made for hidden states of 48 numbers, the model has 32",
        ),
        (lambda c, w: c.update(vocab_size=99), "made for 99 tokens, the model has 9"),
        (lambda c, w: c.update(num_target_layers=7), "made for 7 layers, the model has 6"),
        (lambda c, w: c["dflash_config"].update(mask_token_id=9), "its mask token is 9"),
        (lambda c, w: c["dflash_config"].update(target_layer_ids=[0, 2, 6]), "1, 3, 7 of 6"),
    ],
)
def test_bad_folders_are_named_errors(damage, message, tmp_path):
    config, weights = copy.deepcopy(FORMS["authors"]), weights_of(FORMS["authors"])
    damage(config, weights)
    folder = written(tmp_path / "drafter", config, weights)
    with pytest.raises(ValueError, match=message) as raised:
        layerskip.generate(target(), few(prompt(5)), max_new_tokens=2, assistant=folder)
    assert "\n" not in str(raised.value)


def test_commands_draft_with_blocks(drafter, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", lively_model("qwen3", dtype=torch.float32))
    flags = ("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--no-lookup")
    folder = drafter("authors", vocab_size=97)
    result = run(*flags, "--assistant", folder)
    assert f"a DFlash drafter of 4 tokens at once in 8 bits, {folder}" in result.stderr, (
        result.output
    )
    drafter("authors", vocab_size=98)
    assert "made for 98 tokens, the model has 97" in refused(*flags, "--assistant", folder)
    (folder / "model.safetensors").write_bytes(b"x" * 40)
    assert "cannot read" in refused(*flags, "--assistant", folder)
