"""Trees of drafted tokens: a node's logits depend only on its path, so texts are the target's."""

import random

import pytest
import torch
from guesses import NODES, Guesses, _Guesses, path_of, tree
from models import FEW_FAMILIES, VOCABULARY, Fickle, lively_model, ragged

from layerskip import Lookup, Proposal, generate
from layerskip.cache.branches import ROOT, Branches, along, depths, trunk
from layerskip.decoding.controllers import Controller
from layerskip.decoding.decoding_loop import trunk_first
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_models import Sublayers


def opened_passes(opened, lengths, nodes=NODES):
    prompts = [torch.arange(row, row + each) % (VOCABULARY - 2) + 2 for row, each in
               enumerate(lengths)]  # fmt: skip
    passes = Passes(opened, [], [Seat(each, 40) for each in prompts], max_draft_length=nodes)
    passes.prefill()
    return passes


def chain_logits(passes, texts):
    """Logits (B, T, V) of tokens that follow one another."""
    count = len(texts[0])
    positions = [(row, offset) for row in range(len(texts)) for offset in range(count)]
    return passes.verify(torch.tensor(texts), positions).view(len(texts), count, -1)


def behind(tokens, paths):
    """The tokens of a path in every row, filled up to one length."""
    texts = [[own[at] for at in path] for own, path in zip(tokens, paths, strict=True)]
    return [text + [5] * (len(own) - len(text)) for own, text in zip(tokens, texts, strict=True)]


@torch.no_grad()
def check(model, execution, lengths, seed, nodes=NODES):
    opened, draw = Sublayers(model, execution), random.Random(seed)
    assert opened.execution == execution

    def same(got, want):
        if opened.exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # norms use float32

    rows = len(lengths)
    parents = [tree(draw, nodes) for _ in lengths]
    tokens = [[draw.randrange(2, VOCABULARY) for _ in range(nodes)] for _ in lengths]
    positions = [(row, node) for row in range(rows) for node in range(nodes)]
    passes = opened_passes(opened, lengths, nodes)
    logits = passes.verify(torch.tensor(tokens), positions, parents).view(rows, nodes, -1).clone()
    paths = []
    for node in range(nodes - 1, 0, -max(1, nodes // 8)):
        paths = [path_of(each, node) for each in parents]
        alone = chain_logits(opened_passes(opened, lengths, nodes), behind(tokens, paths))
        for row, path in enumerate(paths):
            same(logits[row, path], alone[row, : len(path)])
    # The text continues along one path. The next pass must see it as if there were no others.
    paths = [path_of(each, draw.randrange(nodes)) for each in parents]
    other = opened_passes(opened, lengths, nodes)
    chain_logits(other, behind(tokens, paths))
    for row, path in enumerate(paths):
        passes.commit(row, range(len(path)), path[1:])
        other.commit(row, range(len(path)))
    new = [[draw.randrange(2, VOCABULARY) for _ in range(3)] for _ in lengths]
    same(chain_logits(passes, new), chain_logits(other, new))


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("execution", ["modules", "fused", "captured"])
def test_nodes_see_their_path_alone(family, execution):
    for seed, lengths in enumerate([(6,), (9, 4, 30)]):
        check(lively_model(family), execution, lengths, seed)
    check(lively_model(family), execution, (9, 4), 2, nodes=33)


def test_queries_that_are_scaled_by_their_place_go_by_depth():
    check(lively_model("ministral3"), "modules", (9, 4), 0, nodes=33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gemma4"])
def test_native_nodes_have_the_bits_of_their_path(built, family, dtype):
    model = lively_model(family, dtype=dtype, max_position_embeddings=600)
    for seed, lengths in enumerate([(6,), (9, 4, 30), (250, 247), (253, 15)]):
        check(model, "native", lengths, seed)
    check(model, "native", (250, 7), 4, nodes=33)


def test_a_chain_is_a_tree_with_one_branch_and_a_tree_that_peeks_is_seen():
    """Negative control: a node that saw its sibling would have other logits."""
    opened = Sublayers(lively_model("llama"), "fused")
    chain, behind, beside = (
        opened_passes(opened, (6,)).verify(
            torch.tensor([[7, 9, 11]]), [(0, node) for node in range(3)], parents
        )
        for parents in (None, [[ROOT, 0, 1]], [[ROOT, 0, 0]])
    )
    torch.testing.assert_close(chain, behind, rtol=1e-4, atol=1e-5)
    assert torch.allclose(beside[:2], behind[:2])
    assert not torch.allclose(beside[2], behind[2])


def test_depths_and_paths():
    parents, tokens = [0, 0, 1, 2, 4], [5, 7, 6, 5, 5]
    assert depths(parents) == [0, 1, 1, 2, 2, 3]
    assert along(parents, tokens, [7, 5, 5, 3]) == [2, 4, 5]
    assert along(parents, tokens, [5, 5]) == [1]
    assert along(parents, tokens, [9]) == []
    branches = Branches([tree(random.Random(0), 64), tree(random.Random(1), 64)], 3)
    sees = branches.paths[..., None] >> torch.arange(64) & 1
    assert torch.equal(sees.bool(), branches.sees[:, 3:])


def texts_of(out, width):
    return out.sequences[:, width:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sample", [False, True])
def test_native_texts_are_the_targets(built, sample, dtype):
    model = lively_model("llama", dtype=dtype)
    ids, mask = ragged((9, 4, 13))
    how = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": sample}
    how |= {"seed": 3} if sample else {}
    plain = generate(model, ids, enabled=False, **how)
    guesses = Guesses(texts_of(plain, ids.shape[1]))
    out = generate(model, ids, sources=[guesses], lookup=Lookup([[5, 6, 7]]), controller=Fickle(1),
                   max_draft_length=8, **how)  # fmt: skip
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.num_accepted_tokens > 0


def guessed(model, ids, guesses, **how):
    """Decode with guesses only, always with the longest draft."""
    controller = Controller()
    controller.needs_confidence = False
    return generate(model, ids, sources=[guesses], lookup=False, draft_memory=0,
                    controller=controller, max_draft_length=8, **how)  # fmt: skip


def test_trees_give_more_tokens_a_pass_than_their_first_branch():
    """Each round's text is a path of its tree and one more token."""
    model = lively_model("llama")
    ids = torch.arange(2, 9)[None]
    how = {"max_new_tokens": 60}
    plain = generate(model, ids, enabled=False, **how)
    texts = texts_of(plain, 7)

    class Chains(Guesses):
        def open(self, batch):
            return _Chains(batch, self.texts, random.Random(self.seed))

    class _Chains(_Guesses):
        def offer(self, row, most):
            found = super().offer(row, most)
            return found.some(trunk(found.parents)) if found.parents else found

    passes = []
    for kind in (Guesses, Chains):
        out = guessed(model, ids, kind(texts), **how)
        assert out.sequences.tolist() == plain.sequences.tolist()
        passes.append(out.stats.num_rounds)
    assert passes[0] < passes[1] < 60


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.3}, {"acceptance": "rejection"}])
def test_laws_that_read_the_text_get_chains(more):
    model = lively_model("llama")
    ids = torch.arange(2, 9)[None]
    how = {"max_new_tokens": 30, **more}
    if "acceptance" in more:
        how |= {"do_sample": True, "seed": 1}
    plain = generate(model, ids, enabled=False, max_new_tokens=30)
    out = guessed(model, ids, Guesses(texts_of(plain, 7)), **how)
    assert 1 < max(max(round_.drafted) for round_ in out.rounds) < 8
    if "acceptance" not in more:
        want = model.generate(ids, max_new_tokens=30, **more)
        assert out.sequences.tolist() == want.tolist()


def test_scores_are_those_of_the_path():
    model = lively_model("llama")
    ids = torch.arange(2, 9)[None]
    how = {"max_new_tokens": 20, "output_scores": True, "output_logits": True}
    plain = generate(model, ids, enabled=False, **how)
    out = guessed(model, ids, Guesses(texts_of(plain, 7)), **how)
    assert out.sequences.tolist() == plain.sequences.tolist()
    for ours, want in zip((*out.scores, *out.logits), (*plain.scores, *plain.logits), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def test_a_trees_trunk_comes_first():
    """Then accepting the trunk moves nothing in the cache. Every token keeps its parent."""
    found = Proposal.of([5, 6, 7, 8, 9, 4], 2, [0, 0, 1, 2, 3, 3], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    sorted_ = trunk_first(found)
    assert list(sorted_.tokens or ()) == [5, 7, 9, 6, 8, 4]
    assert list(sorted_.parents or ()) == [0, 1, 2, 0, 4, 2]
    texts = [[5, 7, 9], [6, 8], [5, 7, 4]]
    for text in texts:
        for each in (found, sorted_):
            assert len(along(each.parents or (), each.tokens or (), text)) == len(text)
    chain = Proposal.of([5, 6], 2)
    assert trunk_first(chain) is chain
