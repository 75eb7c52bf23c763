"""Logits processors with drafts: they are only asked about texts that can really occur."""

import pytest
import torch
from models import lively_model, prompt, ragged

from layerskip import LogitLookup, Lookup, SkipConfig, generate

END = 1
BRANCHES = ([20, 21, 22, 23, 24, 25, END], [20, 21, 30, 31, 32, END], [40, 41, 42, END])
"""Answers of a closed list, as lists of tokens that end with the end of text."""
DRAFTS = ("an exit", "rejection", "lookups", "stored logits")


def drafts_of(name, model, texts):
    """Settings of drafts, some of which know the texts beforehand."""
    if name == "lookups":
        return {"lookup": Lookup(texts)}
    if name == "stored logits":
        return {"sources": [LogitLookup()], "lookup": False}
    acceptance = "rejection" if name == "rejection" else "coupled"
    return {"skip": SkipConfig.early_exit(4), "acceptance": acceptance}


class Trie:
    """Allows only these answers; raises KeyError about any other text."""

    def __init__(self, width, answers):
        self.width, self.next = width, dict[tuple[int, ...], list[int]]()
        for answer in answers:
            for i, token in enumerate(answer):
                here = self.next.setdefault(tuple(answer[:i]), [])
                here += [token] if token not in here else []

    def __call__(self, row, seen):
        return self.next[tuple(seen[self.width :].tolist())]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_nobody_is_asked_what_follows_an_end_of_text(drafts, sample):
    model, ids = lively_model("llama"), prompt(9)
    how = {
        "max_new_tokens": 12,
        "do_sample": sample,
        "eos_token_id": END,
        "pad_token_id": 0,
        "prefix_allowed_tokens_fn": Trie(9, BRANCHES),
    }
    more = drafts_of(drafts, model, BRANCHES)
    drafted = 0
    for seed in range(4):
        law = {"seed": seed} if sample else {}
        out = generate(model, ids, controller="fixed", max_draft_length=8, **how, **more, **law)
        assert out.sequences[0, 9:].tolist() in BRANCHES
        assert out.stats is not None
        drafted += out.stats.num_draft_tokens
        if not sample:
            assert torch.equal(out.sequences, model.generate(ids, **how))
    # the stored logits' most probable tokens are on no branch
    assert drafted > 0 or drafts == "stored logits"


class OnlyThis:
    """Keeps the scores along one text, and raises an error about any other."""

    layerskip_pure = True

    def __init__(self, text, fails_at=1 << 20):
        self.text, self.fails_at = text, fails_at

    def __call__(self, seen, scores):
        length = seen.shape[1]
        if length >= self.fails_at or not torch.equal(seen, self.text[:, :length]):
            raise RuntimeError(f"asked about another text of {length} tokens")
        return scores


@pytest.mark.parametrize("drafts", ["an exit", "lookups"])
def test_an_error_where_the_text_never_comes_is_none(drafts):
    model, ids = lively_model("llama"), prompt(9)
    how = {"max_new_tokens": 30, "controller": "fixed", "max_draft_length": 6}
    how |= {"eos_token_id": None}
    text = generate(model, ids, enabled=False, **how).sequences
    nearly = text[0].tolist()
    nearly[15::6] = [3] * len(nearly[15::6])
    how |= drafts_of(drafts, model, [nearly])
    out = generate(model, ids, logits_processor=[OnlyThis(text)], **how)
    assert torch.equal(out.sequences, text)
    assert out.stats is not None
    assert out.stats.num_draft_tokens > out.stats.num_accepted_tokens > 0
    with pytest.raises(RuntimeError, match="another text of 20 tokens"):
        generate(model, ids, logits_processor=[OnlyThis(text, 20)], **how)


def test_counts_of_sources_have_names():
    model, (ids, mask) = lively_model("llama"), ragged((9, 5))
    skip = SkipConfig.early_exit(4)
    how = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None}
    out = generate(model, ids, skip=skip, lookup=True, **how)
    assert out.stats is not None
    assert [each.name for each in out.stats.sources] == ["lookup", "sublayers"]
