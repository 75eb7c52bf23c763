"""Requests, decoders and checks of their caches, for tests of the engine."""

import models
import torch
from models import WINDOW, Erratic, lively_model, ragged

from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Controller, Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_models import Sublayers

SKIPS = models.SKIPS | {"nothing": SkipConfig()}


class Script(Controller):
    """Drafts of given lengths, round by round, the same in every row, as far as allowed."""

    needs_confidence = False

    def __init__(self, *lengths):
        self.lengths = lengths
        self.updates = []

    def reset(self, rows):
        self.round = [0] * rows

    def limit(self, row, allowed):
        self.round[row] += 1
        return self.lengths[(self.round[row] - 1) % len(self.lengths)]

    def update(self, row, drafted, accepted):
        self.updates.append((row, drafted, accepted))


LENGTHS = (WINDOW + 5, 3, 6)


def request(lengths=LENGTHS, *, new_tokens=20, sample=False, processors=(), **settings):
    ids, mask = ragged(lengths, seed=1)
    rows = len(lengths)
    return Request(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        law=Law(processors, do_sample=sample, rows=rows),
        keys=[stream_key(row) for row in range(rows)],
        **settings,
    )


def decoder(model, asked, *, skip="early exit", controller=None, longest=4, execution="auto"):
    return Decoder(
        Sublayers(model, execution=execution),
        SKIPS[skip].resolve(model.config.num_hidden_layers),
        controller or Fixed(longest),
        asked,
        max_draft_length=longest,
    )


@torch.no_grad()
def play(decoder):
    return list(decoder.rounds())


@torch.no_grad()
def check_caches(family, skip, execution, device="cpu"):
    """Decode a batch and a single row, both with ends, and check the cache after every round."""
    model = lively_model(family).to(device)
    text = greedy_text(model, LENGTHS, 5)
    # The library's eager attention has a float32 softmax in every dtype. Its norms are float32 too,
    # and GPU kernels may round those differently than the prefill did.
    exact = family != "gemma2" and device == "cpu"
    tolerance = 1e-9 if exact else 1e-5
    rejected = ended_early = False
    for asked, controller in (
        (request(new_tokens=14, eos=frozenset({text[1][4]})), Erratic()),
        (request((4,), new_tokens=14), Fixed(3)),
    ):
        run, ran = (
            decoder(model, asked, skip=skip, controller=controller, execution=execution)
            for _ in range(2)
        )
        play(ran)
        fresh = prefilled(ran)
        for round_ in run.rounds():
            check_cache(run, fresh, tolerance)
            rejected |= any(a < d for a, d in zip(round_.accepted, round_.drafted, strict=True))
            ended_early |= any(round_.finished) and not all(round_.finished)
        assert max(run.passes.lengths) > WINDOW
    assert rejected == (skip != "nothing")
    assert ended_early


def prefilled(run):
    """The prompt and emitted tokens of every row, and fresh passes that have prefilled them."""
    found = []
    for prompt_ids, emitted in zip(run.passes.prompts, run.emitted, strict=True):
        text = torch.cat([prompt_ids.cpu(), torch.tensor(emitted)])
        fresh = Passes(run.passes.model, [], [Seat(text)], max_draft_length=0)
        fresh.prefill()
        found.append((text.tolist(), fresh))
    return found


def check_cache(run, prefilled, tolerance=1e-9):
    """Check that every row's slots hold what a prefill of its prompt and emitted tokens writes."""
    passes = run.passes
    for row, place in passes.rows.items():
        text, fresh = prefilled[row]
        length = passes.lengths[row]
        # the last emitted token is not cached yet: the next pass feeds it
        assert [*passes.prompts[row].tolist(), *run.emitted[row]] == text[: length + 1]
        layers = range(passes.model.num_layers)
        for name in ("keys", "values"):
            ours, theirs = getattr(passes.cache, name), getattr(fresh.cache, name)
            for layer in layers:
                bases = [each.cache.held(layer)[0] for each in (passes, fresh)]
                # sliding layers may have dropped slots outside the window
                assert max(bases) <= max(0, length - (passes.cache.windows[layer] or length))
                have = ours[layer][place, :, max(bases) - bases[0] : length - bases[0]]  # (H, T, D)
                want = theirs[layer][0, :, max(bases) - bases[1] : length - bases[1]]
                torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def held(run):
    """The bytes of all keys and values."""
    cache = run.passes.cache
    return sum(b.untyped_storage().nbytes() for b in (*cache.keys.values(), *cache.values.values()))


def greedy_text(model, lengths, new_tokens):
    run = decoder(model, request(lengths, new_tokens=new_tokens), longest=0)
    play(run)
    return run.emitted
