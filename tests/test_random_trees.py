"""Random cases of trees of drafts: whatever drafts, the text is that of plain decoding.

A number determines a case: the model, its windows and dtype, the execution, rows, law, ends,
drafts and controller. In float64, greedy texts are also those of `model.generate()`. Some sources
keep stored logits from case to case, so that many laws are known.
"""

import functools
import logging
import random
from collections import Counter

import pytest
import torch
from guesses import Guesses
from kinds import BLOCKS, Keeping, skip_of
from marks import slow
from models import EVERY, NEWER, All, Erratic, Fickle, Growing, near, ragged, windowed

from layerskip import LogitLookup, Lookup, SkipConfig, generate
from layerskip.config.registry import CONTROLLERS
from layerskip.costs.speculation import CostTable
from layerskip.research.logit_lookup import LogitTable

VOCABULARY = 24  # so few that stretches of texts repeat
NATIVE = ("llama", "gemma2", "gemma3", "gemma4", "qwen3", "phi3", *NEWER)
FLAT, DEAR = CostTable(0.1, (1.0,)), CostTable(0.1, (1.0, 1.3, 1.6, 1.9))
PASSES = (
    (torch.float64, "modules"),
    (torch.float64, "auto"),
    (torch.float32, "native"),
    (torch.bfloat16, "native"),
)
STEPPING = ("exit", "8 bits", "assistant", *BLOCKS)
seen = Counter()


@functools.cache
def model_of(family, window, dtype):
    how = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "dtype": dtype}
    return windowed(family, window, shared=2, **how)


@functools.cache
def laws_of(family, window, dtype):
    """Stored logits that all cases of a model share; so few that old ones are dropped."""
    return LogitTable(400)


@functools.cache
def module_of(kind, folder, family, window, dtype):
    """An untrained module, which is right only now and then."""
    return skip_of(kind, model_of(family, window, dtype), folder)


@functools.cache
def second_of(family, window, dtype):
    return near(model_of(family, window, dtype), 0.3)


def trees(draw, kept, texts):
    """One or two sources that draft trees."""
    found = []
    for kind in draw.sample(
        ("laws", "laws and lookups", "kept laws", "guesses"), draw.choice((1, 1, 2))
    ):
        if kind == "guesses":
            found.append(Guesses(texts, draw.randrange(99)))
        else:
            longest, branches = draw.randint(1, 32), draw.randint(1, 8)
            lookup = Lookup() if kind == "laws and lookups" else None
            if kind == "kept laws":
                found.append(Keeping(kept, branches, longest=longest))
            else:
                found.append(LogitLookup(branches, lookup, longest=longest))
        seen[kind] += 1
    return found


def check(number, native, folder):
    draw = random.Random(number)
    dtype, execution = draw.choice(PASSES if native else PASSES[:2])
    family = draw.choice(NATIVE if execution == "native" else EVERY)
    named = family, draw.choice((3, 7)), dtype
    model, kept = model_of(*named), laws_of(*named)
    ids, mask = ragged(
        tuple(draw.randint(1, 14) for _ in range(draw.choice((1, 1, 2, 3, 4)))), seed=number
    )
    ids = torch.where(mask.bool(), ids % (VOCABULARY - 2) + 2, 0)
    how = {"attention_mask": mask, "max_new_tokens": draw.randint(2, draw.choice((24, 24, 48)))}
    how |= {"eos_token_id": draw.choice((None, None, draw.sample(range(2, VOCABULARY), 3)))}
    if reads := draw.random() < 0.1:  # then only the trunks of trees are drafted
        how |= draw.choice(({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}))
    sample = draw.random() < 0.6
    law = {"do_sample": sample}
    if sample:
        law |= {"seed": draw.randrange(2**31), "temperature": draw.uniform(0.3, 1.5)}
        law |= {"top_k": draw.choice((0, 0, 1, 5)), "top_p": draw.choice((1.0, 1.0, 0.8))}
    plain = generate(model, ids, enabled=False, execution=execution, **how, **law).sequences
    texts = plain[:, ids.shape[1] :].tolist()
    if not (sample or reads) and dtype == torch.float64:
        for i, m, text in zip(ids, mask, texts, strict=True):  # padded Gemma 2 is NaN in float64
            alone = {name: each for name, each in how.items() if name != "attention_mask"}
            want = model.generate(i[m.bool()][None], do_sample=False, pad_token_id=0, **alone)
            new = want[0, int(m.sum()) :].tolist()
            assert text[: len(new)] == new

    sources = trees(draw, kept, texts)
    drafting = {"draft_memory": 0}
    if (beside := draw.choice(("nothing", *STEPPING))) != "nothing":
        if beside == "assistant":
            drafting["assistant"] = second_of(*named)
        elif beside in BLOCKS:
            drafting = {"skip": module_of(beside, folder, *named)}
        else:
            low = SkipConfig.low_precision(8)
            drafting = {"skip": SkipConfig.early_exit(2) if beside == "exit" else low}
        drafting["branches"] = draw.random() < 0.7  # also second-best tokens beside its chain
    drafting["lookup"] = draw.random() < 0.3
    name = draw.choice((*("all", "growing") * 2, "fickle", "erratic", *CONTROLLERS))
    unruly = {"all": All, "growing": Growing, "fickle": Fickle, "erratic": Erratic}
    controller = unruly[name]() if name in unruly else name
    if drafting.get("branches") and name in CONTROLLERS:
        drafting["branches"] = name == "expected-gain"  # others would ignore it
    out = generate(
        model,
        ids,
        sources=sources,
        controller=controller,
        max_draft_length=draw.choice((draw.randint(1, 20), 32)),
        costs=draw.choice((FLAT, DEAR)),
        execution=execution,
        **drafting,
        **how,
        **law,
    )
    assert out.sequences.tolist() == plain.tolist()
    seen.update(("cases", family, dtype, execution, beside, name, len(ids)))
    for round_ in out.rounds[1:]:
        for row, parents in enumerate(round_.parents):
            if parents is not None:
                source = round_.source_of(row)
                stepped = beside != "nothing" and source == len(sources) + drafting["lookup"]
                seen[f"trees by {beside if stepped else 'known tokens'}"] += 1
                seen["nodes"] += len(parents)
                seen["large"] += len(parents) > 20
                taken = round_.taken(row)
                seen["taken"] += len(taken)
                seen["moved"] += taken != [*range(1, len(taken) + 1)]


@pytest.mark.filterwarnings("ignore:the second model may have another vocabulary")
@pytest.mark.filterwarnings("ignore:branches has no effect with logits processors")
@pytest.mark.parametrize("part", [0, *slow(*range(1, 21))])
def test_random_cases(part, request, tmp_path):
    """By default a few cases in float64. The slow parts have 500 cases each, in all passes."""
    seen.clear()
    if part:
        request.getfixturevalue("built")
    for number in range(8) if not part else range(part * 500, part * 500 + 500):
        try:
            check(number, part > 0, tmp_path)
        except BaseException as error:
            error.add_note(f"case {number}, native {part > 0}")
            raise
    logging.getLogger(__name__).info("part %d: %s", part, dict(seen))
    assert seen["nodes"] > seen["taken"] > seen["moved"] > 0
    if part:
        assert all(seen[f"trees by {each}"] for each in STEPPING)
        assert seen["large"]
        assert all(seen[each] for each in (*EVERY, *CONTROLLERS, "laws", "kept laws", "guesses"))
        assert all(seen[each] for case in PASSES for each in case)
