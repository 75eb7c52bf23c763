"""Sampled texts of a model with few tokens, and how well they follow its law."""

import copy
import functools
from collections import Counter

import numpy as np
import torch
from models import Fickle, lively_model
from official import target_of
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.model.opened_models import Sublayers

VOCABULARY, NEW_TOKENS, TEXTS = 5, 3, 1500
LEVEL = 1e-6  # of every statistical test here


def redraw_from_the_target(p, q):
    """A known mistake: after a rejection, draw from p instead of the residual."""
    return p


def accept_always(p, q):
    """A known mistake: take every drafted token."""
    return torch.ones_like(p)


PROMPT = [1, 3, 2, 4]


PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top-k": [TopKLogitsWarper(3)],
    "top-p": [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.15)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
}


# the last sublayers change this model's laws most, so skipping them makes a poor draft
SKIP = SkipConfig(attention=(0, 2), mlp=(1, 5))


@functools.cache
def small_model(family="llama"):
    if family != "llama":
        return target_of(family, VOCABULARY)
    model = lively_model("llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3)
    return model


@functools.cache
def exact_law(processors, family):
    """The probability of every text, from the model's own forward pass and the processors."""
    texts = torch.tensor([PROMPT])
    chances = torch.ones(1)
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            scores = small_model(family)(texts).logits[:, -1].float()  # (N, V)
        for processor in PROCESSORS[processors]:
            scores = processor(texts, scores)
        chances = (chances[:, None] * scores.softmax(-1)).flatten()
        next_tokens = torch.arange(VOCABULARY).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCABULARY, 0), next_tokens], 1)
    new = map(tuple, texts[:, len(PROMPT) :].tolist())
    return dict(zip(new, chances.tolist(), strict=True))


def sample_texts(
    processors,
    *,
    acceptance,
    family="llama",
    drafts=SKIP.resolve(6),  # noqa: B008
    fickle=False,
    vocabulary=None,
    execution="auto",
    device="cpu",
    dtype=torch.float64,
    rows=500,
    longest=2,
):
    """Counts of texts over seeds 0, 1, ..., and by draft, numbers of drafted and accepted tokens.

    Args:
        drafts: drafts of the small model; `fickle` chooses any of several for a round, or none.
        vocabulary: the tokens that may be drafted; None: all.
    """
    counts = Counter()
    drafted = []
    model = Sublayers(copy.deepcopy(small_model(family)).to(device, dtype), execution)
    if vocabulary is not None:
        model = model.trimmed(vocabulary)
    for first in range(0, TEXTS, rows):
        run = Decoder(
            model,
            drafts,
            Fickle(first) if fickle else Fixed(longest),
            Request(
                torch.tensor([PROMPT]).expand(rows, -1),
                torch.ones(rows, len(PROMPT), dtype=torch.long),
                NEW_TOKENS,
                Law(PROCESSORS[processors], do_sample=True, rows=rows),
                [stream_key(first + row) for row in range(rows)],
                acceptance=acceptance,
            ),
            max_draft_length=longest,
        )
        with torch.no_grad():
            for _ in run.rounds():
                pass
        counts.update(map(tuple, run.emitted))
        here = [(one.num_draft_tokens, one.num_accepted_tokens) for one in run.stats.sources]
        before = drafted or [(0, 0)] * len(here)
        drafted = [(a + c, b + d) for (a, b), (c, d) in zip(before, here, strict=True)]
    return counts, drafted


def p_value(counts, processors, family="llama"):
    """Chi-square against the exact law, pooling texts expected under 5 times; 0 if impossible."""
    law = exact_law(processors, family)
    if any(law[text] == 0 for text in counts):
        return 0.0
    expected = np.array([law[text] * TEXTS for text in law])
    seen = np.array([counts.get(text, 0) for text in law])
    rare = expected < 5
    cells = [(seen[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        cells.append((seen[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, wanted = (np.concatenate(part) for part in zip(*cells, strict=True))
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
