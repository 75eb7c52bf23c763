"""Drafts by a Gemma 4 assistant: its steps, what they read, and what is refused.

That the text and its law are the target's, and replays, are tested in `test_every_kind.py`.
"""

from contextlib import contextmanager

import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from commands import PROMPT, document, refused, run
from covering import covering
from kinds import FEW, prompts
from marks import thorough
from models import VOCABULARY as WORDS
from models import WINDOW, Fickle, lively_model
from official import TARGETS, assistant_of, source_of, target_of

import layerskip
from layerskip.costs.speculation import CostTable
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.official import Official
from layerskip.library import cache_name
from layerskip.model.opened_models import Sublayers

# ---- Its steps, against the library's own class ----


@contextmanager
def mended():
    """transformers with a fix of the property that, in 5.23, prevents constructing an assistant."""

    def modes(self):
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return [None] * own + ["reuse"] * self.num_kv_shared_layers

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig"):
            config = getattr(transformers, name)
            patch.setattr(config, "kv_sharing_modes", property(modes), raising=False)
        yield


def library_steps(family, built, prompt, tokens):
    """The library's logits (V,) for the token after a prompt, then for each token of the draft.

    The keys come from the library's forward pass over the prompt.
    """
    with mended():
        own = type(built).__mro__[2](built.config).double().eval()
    own.load_state_dict(built.state_dict())
    target = target_of(family)
    past, name = transformers.DynamicCache(), cache_name(target.model)
    states = target.model(prompt[None], use_cache=True, **{name: past}).last_hidden_state
    shared = {}
    for kind, part in zip(target.config.layer_types, Sublayers(target).parts, strict=True):
        if part.writes:
            layer = past.layers[part.number]
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
def test_its_steps_are_those_of_the_librarys_own_class(family, centroids, execution):
    """Rows of different lengths in one batch, across a window."""
    if family == "gemma4_mixture":
        execution = "modules"
    ids, mask = prompts()
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    fed = [[5, 7, 3, 9], [4, 4, 8, 2], [11, 6, 20, 21]]
    opened = Sublayers(target_of(family), execution)
    passes = Passes(
        opened,
        [source_of(family, centroids, execution)],
        [Seat(row, 8, tokens[:1]) for row, tokens in zip(rows, fed, strict=True)],
        max_draft_length=5,
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
            # other tokens get a number below the candidates'
            assert other.sum() == (FEW // 2 if centroids else 0)
            assert (want[other] == want[~other].min() - 1).all()


@pytest.mark.parametrize(
    ("family", "execution", "dtype"),
    [
        ("gemma4", "fused", torch.float64),
        *thorough(("gemma4_dense", "modules", torch.float64)),
        ("gemma4", "native", torch.float32),
    ],
)
def test_its_drafts_are_the_same_where_sliding_layers_drop_old_keys(
    built, family, execution, dtype, sizes
):
    model, (ids, mask) = target_of(family, dtype=dtype), prompts()
    second = assistant_of(family, dtype=dtype)
    how = {"attention_mask": mask, "max_new_tokens": 30, "lookup": False}
    how |= {"do_sample": True, "seed": 3, "top_k": 0, "execution": execution, "draft_memory": 0}
    found = []
    for more in (256, 4):
        sizes(spare=more)
        out = layerskip.generate(model, ids, assistant=second, controller=Fickle(3), **how)
        found.append((out.sequences.tolist(), out.rounds))
    assert found[0] == found[1]
    assert any(sum(round_.accepted) for round_ in found[0][1] or ())


def test_the_prefill_of_a_target_that_shares_keys_runs_its_upper_layers_once(spied):
    """They only run for the last tokens, because nothing else reads their states."""
    model = target_of("gemma4")
    upper = model.model.layers[-1].mlp
    calls = spied(type(upper), "forward", lambda mlp, x: (mlp, x.shape[1]))
    how = {"lookup": False, "draft_memory": 0, "execution": "modules"}
    how |= {"controller": "fixed", "max_draft_length": 3, "max_new_tokens": 6}
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    layerskip.generate(model, ids, assistant=assistant_of("gemma4"), do_sample=False, **how)
    counts = [count for mlp, count in calls if mlp is upper]
    assert counts[0] == 1
    assert max(counts) == 4


# ---- Entry points, costs, and what is refused ----


@pytest.mark.parametrize("centroids", [False, True])
def test_only_tokens_of_the_draft_vocabulary_are_drafted(centroids):
    target, few = Sublayers(target_of("gemma4")), [3, 5, 7, 8, 9, 11]
    source = Official(target, Sublayers(assistant_of("gemma4", centroids)), few)
    seat = Seat(torch.tensor([5, 6, 7]), 2, [8])
    passes = Passes(target, [source], [seat], max_draft_length=1)
    with torch.no_grad():
        passes.prefill()
        raw = passes.draft_step(torch.tensor([8]), 0)[0]  # (V,)
    drawn = raw.isfinite().nonzero().flatten().tolist()
    assert drawn
    assert {*drawn} <= {*few}
    assert centroids or drawn == few


def test_a_step_reads_its_own_weights_and_of_the_head_what_centroids_choose():
    for centroids in (False, True):
        source = source_of("gemma4", centroids)
        own = sum(weight.nbytes for weight in source.module.parameters())
        unread = source.module.lm_head.weight.nbytes // 2 if centroids else 0
        assert sum(source.step_bytes()) == own - unread
        assert source.key == source_of("gemma4", centroids).key


def test_another_models_assistant_is_refused():
    def refused(message, assistant, target=None):
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


def test_an_assistant_by_itself_is_refused():
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="no keys and values of its own"):
        next(layerskip.decode(assistant_of("gemma4"), ids, enabled=False, max_new_tokens=2))


def test_the_command_line_takes_a_folder(tmp_path, monkeypatch):
    table = CostTable(0.2, (1.0, 1.1, 1.2))
    monkeypatch.setattr(
        "layerskip.api.plan.cost_tables", lambda _, drafts, *__, **___: [table for _ in drafts]
    )
    dtype = torch.float32
    folder = save_checkpoint(tmp_path / "target", target_of("gemma4", WORDS, dtype))
    dense = save_checkpoint(tmp_path / "dense", target_of("gemma4_dense", WORDS, dtype))
    second = tmp_path / "second"
    assistant_of("gemma4", False, WORDS, dtype).save_pretrained(second)
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
    assert "drafts for a Gemma 4; load that, and give this one as" in refused(
        "generate", second, "--prompt", PROMPT
    )
    words = refused("generate", dense, "--prompt", PROMPT, "--assistant", second)
    assert words.startswith("the assistant cannot draft for this model: it is made for")
