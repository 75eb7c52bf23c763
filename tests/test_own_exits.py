"""A model's own exits: what its first prompts tell of them, and when they draft."""

from functools import partial

import pytest
import torch
from checkpoints import save_checkpoint
from commands import document, run
from models import lively_model, near, prompt, tiny_model
from talks import said, together

from layerskip import LayerSkipDecoding, Lookup, Session, SkipConfig, generate, load
from layerskip.api import own_exits
from layerskip.api.own_exits import OwnExits, agreement_of
from layerskip.api.plan import open_plan
from layerskip.model.opened_models import sublayers_of
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving

HOW = {"execution": "modules", "max_new_tokens": 12}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5}


@pytest.fixture
def generous(monkeypatch):
    """Short prompts answer at as many positions as they have."""
    monkeypatch.setattr(own_exits, "SHARE", 10.0)


def early(later=0.02, **shape):
    """A model whose first layers decide nearly everything, so that its exits agree; or `later`."""
    model = lively_model("llama", **shape)
    for layer in model.model.layers[2:]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data *= later
    return model


def plan_of(model, **settings):
    return open_plan(model, LayerSkipDecoding(execution="modules", **settings))


def asking(plan):
    return any(isinstance(source, OwnExits) for source in plan.sources)


def test_agreements_are_those_of_the_librarys_hidden_states():
    """At the last positions of the prompt by which they cost 2% of the products of all so far."""
    model = load("demo-llama", dtype="float64").model
    opened = sublayers_of(model, "modules")
    found, head = agreement_of(opened), opened.weights.head_bytes()
    price = 64 * 5 * head / 0.02 / (opened.pass_bytes([1])[0] - head)
    seen = 0
    while not found.positions:
        ids = prompt(300, seed=seen)
        generate(model, ids, **HOW)
        seen += 300
        assert (found.positions == 64) is (seen >= price)
    assert seen > 300
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[:-1]  # the last is normed
        final = model(ids).logits[0, -64:].argmax(-1)
        for layer in (3, 6, 9, 12):
            agree = model.lm_head(model.model.norm(states[layer][0, -64:])).argmax(-1) == final
            assert found.right[layer] == int(agree.sum())
    assert [*found.right] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("execution", "sampling"), [("modules", {}), ("modules", SAMPLED), ("captured", SAMPLED)]
)
def test_the_best_exit_drafts_in_the_call_that_asks_and_in_later_ones(
    execution, sampling, generous
):
    model, ids, how = early(), prompt(70), HOW | {"execution": execution} | sampling
    plan_of = partial(open_plan, model, LayerSkipDecoding(execution=execution))
    assert "asked at the first prompts, 0 of 64" in plan_of().explain()
    plain = generate(model, ids, enabled=False, **how).sequences
    names = []
    for _ in range(2):
        out = generate(model, ids, lookup=False, **how)
        assert torch.equal(out.sequences, plain)
        (counts,) = out.stats.sources
        assert counts.num_accepted_tokens > 0
        names.append(counts.name)
    assert names == ["exits", "sublayers"]
    plan, agreement = plan_of(), agreement_of(sublayers_of(model, execution))
    (layer,) = [skip.exit_layer for skip in plan.skips]
    assert plan.sources[-1].prior == agreement.share(layer) < 1
    assert f"drafts: exit {layer}" in plan.explain()
    assert f"exit {layer} at {agreement.right[layer]}" in plan.summary
    assert plan.explicit["skip"] == [SkipConfig.early_exit(layer)]


def test_what_gains_nothing_is_dropped(generous):
    model = early(20.0)
    out = generate(model, prompt(70), **HOW)
    assert [each.num_drafts for each in out.stats.sources][1] == 0
    plan = plan_of(model)
    assert plan.names == ["lookup"]
    assert "its own exits: of 64 positions, the model's own token: exit 1 at" in plan.summary


def test_positions_add_up_over_rows_and_turns(generous):
    """Each token answers once: a session's earlier tokens are in its cache."""
    model = early()
    agreement = agreement_of(sublayers_of(model, "modules"))
    generate(model, prompt(9, rows=2), **HOW)
    assert agreement.positions == 18
    session = Session(model, execution="modules")
    first = session.generate(prompt(20, seed=1), max_new_tokens=4).sequences
    assert agreement.positions == 38
    session.generate(torch.cat([first, prompt(6, seed=2)], 1), max_new_tokens=4)
    assert 38 + 6 <= agreement.positions <= 38 + 8
    assert not agreement.done


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({"acceptance": "rejection"}, True),
        ({"draft_memory": 0}, False),
        ({"skip": SkipConfig.early_exit(4)}, False),
        ({"skip": SkipConfig.low_precision(8)}, False),
        ({"sources": [Lookup([[5, 6]])]}, False),
        ({"enabled": False}, False),
    ],
)
def test_where_nothing_is_asked(settings, sampling):
    model = early()
    decoding = LayerSkipDecoding(execution="modules", **settings)
    assert not asking(open_plan(model, decoding, sampling=sampling))
    assert asking(plan_of(model, lookup=False))
    assert not asking(plan_of(model, assistant=near(model, 0.3)))


def test_a_model_that_drafts_in_8_bits_is_not_asked():
    model = lively_model("llama", dtype=torch.float32)
    in_8_bits = bool(open_plan(model, LayerSkipDecoding()).skips)
    assert asking(open_plan(model, LayerSkipDecoding())) is not in_8_bits
    assert not asking(open_plan(tiny_model("llama", num_hidden_layers=1), LayerSkipDecoding()))


def test_the_answer_is_kept_with_the_weights(tmp_path, monkeypatch, generous):
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    generate(early(), prompt(70), **HOW)
    assert plan_of(early()).skips  # another object with the same weights
    assert asking(plan_of(early(seed=1)))
    file = agreement_of(sublayers_of(early(), "modules")).file
    for broken in ("[]", '{"positions": 64}', '{"tokens": 9, "positions": 64, "right": {}}', "no"):
        file.write_text(broken)
        assert asking(plan_of(early()))


def test_a_server_asks_its_first_texts(generous):
    model = early()
    serving = Serving(model, execution="modules", session_memory=0, max_rows=2, lookup=False)
    tasks = [TextRequest(prompt(20 + n, seed=n)[0].tolist(), max_new_tokens=12) for n in range(4)]
    for task, pieces in zip(tasks, together(serving, tasks), strict=True):
        ids = torch.tensor([task.prompt])
        plain = generate(model, ids, enabled=False, **HOW).sequences
        assert said(pieces) == plain[0, ids.shape[1] :].tolist()
    assert agreement_of(sublayers_of(model, "modules")).done
    assert serving._batch.passes.states[-1].source.best is not None


def test_generate_says_it(tmp_path, generous):
    folder = save_checkpoint(tmp_path / "tiny", early(dtype=torch.float32))
    for words, told in ((9, "asked at the first prompts, 9 of 64"), (70, "of 64 positions")):
        flags = ("--prompt", "w5 " * words, "-n", 3, "--execution", "modules", "--json")
        assert told in document(run("generate", folder, *flags))["drafts"]
