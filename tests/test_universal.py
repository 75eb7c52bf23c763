"""A second model with another tokenizer: its drafts are re-encoded, and leave the text as it is."""

import pytest
import torch
from letters import letters_of, shuffled, spelling
from marks import thorough
from models import Erratic, lively_model, ragged
from small import small_model

from layerskip import UniversalAssistant, generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Fixed
from layerskip.texts.retokenized import Retokenized, Spelling

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))
HOW = {"lookup": False, "draft_memory": 0, "costs": COSTS, "max_new_tokens": 40}
LETTERS = letters_of(87)
WORDS = [*zip("ABCDEFGHIJ", "BCDEFGHIJK", strict=True)]  # with these, 97 tokens
OTHERS = [(" ", "C"), (" C", "D"), *zip("acegikmo", "bdfhjlnp", strict=True)]


@pytest.mark.parametrize("sample", [False, True])
def test_the_same_weights_behind_another_vocabulary_are_always_right(sample):
    """Also when sampling, since tokens are drawn with the noise of the target's."""
    model = lively_model("llama")
    other, *both = shuffled(model)
    ids, mask = ragged((9, 4), seed=2)
    how = HOW | {"attention_mask": mask, "do_sample": sample, "seed": 1 if sample else None}
    how |= {"max_new_tokens": 90}  # the first tokens are no longer encoded again
    plain = generate(model, ids, enabled=False, **how)
    given = {"assistant": other, "tokenizer": both[0], "assistant_tokenizer": both[1]}
    out = generate(model, ids, controller=Fixed(4), **given, **how)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.num_accepted_tokens == out.stats.num_draft_tokens > 100


@pytest.mark.parametrize("rule", ["greedy", "coupled", *thorough("rejection", "history")])
@pytest.mark.parametrize("theirs", ["letters", "other words"])
@pytest.mark.parametrize("ours", ["letters", "words"])
def test_words_of_either_leave_the_text(ours, theirs, rule):
    words = {"letters": (letters_of(97),), "words": (LETTERS, *WORDS)}
    words["other words"] = (LETTERS, *OTHERS)
    model, other = lively_model("llama"), lively_model("llama", seed=1, vocab_size=98)
    both = spelling(*words[ours]), spelling(*words[theirs])
    second = UniversalAssistant(other, *both)
    ids, mask = ragged((9, 60, 4), seed=2)
    how = HOW | {"attention_mask": mask, "do_sample": rule != "greedy"}
    how |= {} if rule == "greedy" else {"seed": 1, "temperature": 0.8}
    how |= {"repetition_penalty": 1.2} if rule == "history" else {}
    drafting = {"assistant": second, "controller": Erratic(3), "max_draft_length": 5}
    if rule == "rejection":
        how |= {"acceptance": rule}
        again = generate(model, ids, **drafting | {"controller": Erratic(3)}, **how)
    else:
        again = generate(model, ids, enabled=False, **how)
    out = generate(model, ids, **drafting, **how)
    assert torch.equal(out.sequences, again.sequences)
    assert out.stats.num_draft_tokens > 30
    if rule == "greedy":
        given = dict(zip(("tokenizer", "assistant_tokenizer"), both, strict=True))
        one = {"attention_mask": mask[1:2], "max_new_tokens": 40, "pad_token_id": 0}
        library = model.generate(ids[1:2], assistant_model=other, do_sample=False, **given, **one)
        assert torch.equal(library, out.sequences[1:2])


def test_texts_longer_than_the_second_model_takes_go_on_without_it():
    model = lively_model("llama")
    other, *both = shuffled(lively_model("llama", max_position_embeddings=32))
    ids, mask = ragged((3, 40, 20), seed=2)
    how = HOW | {"attention_mask": mask}
    plain = generate(model, ids, enabled=False, **how)
    how |= {"assistant": UniversalAssistant(other, *both), "controller": Fixed(4)}
    out = generate(model, ids, **how)
    assert torch.equal(out.sequences, plain.sequences)
    drafted = [sum(each.drafted[row] for each in out.rounds[1:]) for row in range(3)]
    assert 0 == drafted[1] < drafted[2] < drafted[0] < 40


def test_what_is_drafted_is_encoded_again():
    ours, theirs = Spelling(spelling(LETTERS, *WORDS)), Spelling(spelling(letters_of(97)))
    text = Retokenized(ours, theirs)
    assert text.follow(ours.encode(b"aA")) == 0
    assert text.tokens == theirs.encode(b"aA")
    drawn = theirs.encode(b"BAB")
    for token, offered, sure in zip(drawn, (b"B", b"BA", b"BAB"), (True, True, False), strict=True):
        text.draft(token)
        assert ours.text(text.offered) == offered
        assert text.settled(len(text.offered) - 1) is sure
    assert text.follow(ours.encode(b"aABAB")) == len(theirs.encode(b"aABAB"))
    for token in (theirs.end[0], 5):  # nothing follows an end
        text.draft(token)
        assert (text.offered, text.ended) == (ours.end, True)


@pytest.mark.parametrize("spaced", [(False, True), (True, False), (True, True)])
def test_a_space_before_every_text_is_no_part_of_it(spaced):
    ours, theirs = (Spelling(spelling(LETTERS, spaced=each)) for each in spaced)
    text = Retokenized(ours, theirs)
    text.follow(ours.encode(b" ab ca"))
    assert theirs.text(text.tokens) == b" ab ca"
    text.draft(theirs.encode(b"b")[-1])
    assert ours.text(text.offered) == b"b"


@pytest.mark.parametrize("words", ["recurrent layers", "leave draft_vocabulary out"])
def test_what_cannot_draft_so_is_refused(words):
    model = lively_model("llama")
    other = small_model("mamba2") if "recurrent" in words else model
    how = HOW | ({} if "recurrent" in words else {"draft_vocabulary": [3, 4]})
    second, named = UniversalAssistant(other, *shuffled(model)[1:]), ["running-ahead"]
    with pytest.raises(ValueError, match=words):
        generate(model, torch.tensor([[5, 6]]), assistant=second, **how)
    second = UniversalAssistant(*shuffled(model))
    with pytest.raises(ValueError, match="with the same tokenizer"):
        generate(model, torch.tensor([[5]]), assistant=second, sources=named, **HOW)
