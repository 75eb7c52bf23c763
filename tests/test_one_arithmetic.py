"""The promise in the dtypes of checkpoints: whatever drafts, the text is that of plain decoding.

Constants are those of releases, batches have 1 to 16 rows, and drafts are as long as possible.
"""

import random
from collections import Counter

import pytest
import torch
from marks import slow
from models import EVERY, MODULES_ONLY, VOCABULARY, Erratic, Fickle, lively_model, ragged

from layerskip import SkipConfig, generate
from layerskip.api.settings import LONGEST_DRAFT
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_models import Sublayers

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("built")
WIDE = {"hidden_size": 72, "intermediate_size": 1700}  # several cuts of columns, and a remainder


def verified(opened, rows, lengths):
    """Logits (B, T, V) of texts after ragged prompts, fed in passes of these sizes."""
    prompts = [torch.arange(2 + row, 9 + 3 * row) % (VOCABULARY - 2) + 2 for row in range(rows)]
    total = sum(lengths)
    texts = torch.randint(2, VOCABULARY, (rows, total), generator=torch.Generator().manual_seed(3))
    seats = [Seat(each, total) for each in prompts]
    passes = Passes(opened, [], seats, max_draft_length=LONGEST_DRAFT)
    with torch.no_grad():
        passes.prefill()
        pieces, start = [], 0
        for count in lengths:
            positions = [(row, offset) for row in range(rows) for offset in range(count)]
            logits = passes.verify(texts[:, start : start + count], positions)
            pieces.append(logits.clone().view(rows, count, -1))
            for row in range(rows):
                passes.commit(row, range(count))
            start += count
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_of_verified_tokens_are_those_of_single_steps(family, rows, dtype):
    opened = Sublayers(lively_model(family, dtype=dtype, **WIDE))
    assert opened.execution == "native"
    longest = LONGEST_DRAFT + 1
    alone = verified(opened, rows, [1] * (longest + 6))
    assert torch.equal(verified(opened, rows, [longest, 1, 5]), alone)
    assert torch.equal(verified(opened, rows, [2, 3, 8, 14]), alone)


def carried(opened, lengths, chunk, threads):
    """What a prefill of these prompts leaves for the first one: logits (V,), keys and values.

    Each pass carries `chunk` tokens of every row.
    """
    prompts = [
        torch.arange(row, row + each) % (VOCABULARY - 2) + 2 for row, each in enumerate(lengths)
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        session = Passes(opened, [], [Seat(each) for each in prompts], max_draft_length=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("layerskip.model.opened_model._CHUNK", chunk * len(lengths))
            logits = session.prefill()  # (B, V)
    finally:
        torch.set_num_threads(before)
    cache, end = session.cache, lengths[0]
    kept = [logits[0]]
    for layer in cache.keys:
        slots = slice(end - min(end, cache.windows[layer] or end) - cache.held(layer)[0], None)
        for buffers in cache.keys, cache.values:
            kept.append(buffers[layer][0, :, : end - cache.held(layer)[0]][:, slots])  # (K, S, D)
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [family for family in EVERY if family not in MODULES_ONLY])
def test_a_prompt_is_the_same_however_it_is_carried(family, dtype):
    """In one chunk, several, or token by token; alone or in a batch; on any number of threads."""
    how = WIDE | ({"attention": "eager"} if family == "gemma2" else {})
    opened = Sublayers(lively_model(family, dtype=dtype, **how))
    assert opened.execution == "native"
    want = carried(opened, [61], 1, 1)
    for lengths, chunk, threads in (
        ([61], 61, 1),
        ([61], 61, 2),
        ([61], 7, 2),
        ([61], 30, 3),
        ([61, 40, 5], 61, 2),
        ([61, 90], 33, 2),
        ([61, 3], 7, 1),
    ):
        got = carried(opened, lengths, chunk, threads)
        assert all(map(torch.equal, got, want)), (lengths, chunk, threads)


def test_passes_of_the_library_would_be_seen():
    """Negative control: BLAS sums a token in another order if there are others beside it."""
    opened = Sublayers(lively_model("llama", dtype=torch.float32, **WIDE), "fused")
    assert not torch.equal(verified(opened, 1, [7]), verified(opened, 1, [1] * 7))


def texts_apart(number, counts):
    """How many rows of a random case have a drafted text other than the plain one."""
    chance = random.Random(number)
    dtype = DTYPES[number % 2]
    rows = chance.choice([1, 2, 4, 8, 11, 16])
    model = MODELS[chance.choice(["llama", "gemma3"]), dtype]
    ids, mask = ragged(tuple(chance.randint(1, 40) for _ in range(rows)), seed=number)
    how = {"attention_mask": mask, "max_new_tokens": chance.randint(10, 60)}
    if chance.random() < 0.5:
        how |= {"do_sample": True, "temperature": 0.8, "seed": number}
        how |= chance.choice([{}, {"top_k": 0}, {"top_p": 0.9, "top_k": 20}])
    else:
        how["do_sample"] = False
    drafts = chance.choice(
        [
            {},
            {"lookup": True},
            {"skip": SkipConfig.low_precision(4)},
            {"skip": SkipConfig(mlp=(2,))},
        ]
    )
    drafts = drafts | chance.choice(
        [
            {"controller": "fixed", "max_draft_length": LONGEST_DRAFT},
            {"controller": Fickle(number)},
            {"controller": Erratic(number)},
            {},
        ]
    )
    plain = generate(model, ids, enabled=False, **how).sequences
    out = generate(model, ids, **drafts, **how)
    counts["drafted"] += out.stats.num_draft_tokens
    counts["accepted"] += out.stats.num_accepted_tokens
    counts["long passes"] += any(rows * (1 + max(each.drafted)) > 32 for each in out.rounds)
    return int((out.sequences != plain).any(-1).sum())


MODELS = {
    (family, dtype): lively_model(family, dtype=dtype, vocab_size=VOCABULARY)
    for family in ("llama", "gemma3")
    for dtype in DTYPES
}


@pytest.mark.parametrize("cases", [4, *slow(500)])
def test_no_text_depends_on_what_was_drafted(cases):
    counts = Counter()
    assert sum(texts_apart(number, counts) for number in range(cases)) == 0
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["long passes"] > cases / 4
