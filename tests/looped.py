"""A model with so few tokens that stretches of its texts repeat, its texts and its traces."""

import functools

import torch
from models import lively_model, near, ragged
from official import TARGETS, target_of
from transformers import TemperatureLogitsWarper

from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.model.opened_models import Sublayers
from layerskip.replay.trace import take_trace

LENGTHS = (13, 3, 6)


ENDS = frozenset({4})


@functools.cache
def model_of(family="llama", vocab_size=12):
    """A model with so few tokens that stretches of its texts repeat."""
    if family in TARGETS:
        return target_of(family, vocab_size)
    return lively_model(family, vocab_size=vocab_size)


@functools.cache
def second_of(family="llama", vocab_size=12, noise=0.5):
    return near(model_of(family, vocab_size), noise)


def decoded(drafts, controller, *, execution="auto", each=lambda run: None, **how):
    """Decode ragged prompts to the end, calling `each` after each round; returns the decoder."""
    model = how.pop("model", None) or model_of()
    ids, mask = prompts(model)
    request = Request(
        ids,
        mask,
        how.pop("new_tokens", 24),
        Law(how.pop("processors", ()), do_sample=how.pop("sample", False), rows=len(ids)),
        [stream_key(row) for row in range(len(ids))],
        **how,
    )
    opened = Sublayers(model, execution)
    run = Decoder(opened, drafts, controller, request, max_draft_length=6)
    run.played = []
    with torch.no_grad():
        for round_ in run.rounds():
            run.played.append(round_)
            each(run)
    return run


def prompts(model):
    ids, mask = ragged(LENGTHS, seed=3)
    return torch.where(mask.bool(), ids % (model.config.vocab_size - 2) + 2, ids), mask


def rows(lengths=(3, 12, 7)):
    """Prompts of the usual vocabulary, one by one."""
    ids, mask = ragged(tuple(lengths))
    return [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]


def sampling(temperature, *processors):
    """The law of one row; None: greedy."""
    warpers = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    return Law([*processors, *warpers], do_sample=temperature is not None, rows=1)


@functools.cache
def traced(sample, ended, family="llama"):
    ids, mask = prompts(model_of())
    return take_trace(
        model_of(family),
        [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)],
        max_new_tokens=24,
        law=Law((), do_sample=sample, rows=1),
        seeds=range(len(ids)),
        eos=ENDS if ended else frozenset(),
        draft_length=6,
    )


def counted(rounds):
    """What simulated and real rounds have in common."""
    return [(r.drafted, r.accepted, r.tokens, r.source) for r in rounds]
