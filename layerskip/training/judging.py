"""Measures the value of a trained draft: by exact replay on held-out prompts, and by timing.

Replay gives the acceptance by depth, greedy and with shared noise. With measured costs the formula
gives the expected speedup. Then the draft is timed in turn with plain decoding and with the draft
used before. If it does not pay, the skip config that is written is the one that paid before. The
prompts were not used in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerskip.api.arguments import end_tokens, law_of
from layerskip.api.drafts import automatic_draft
from layerskip.bench.methods import Engine, Task
from layerskip.bench.runner import timed_drafts
from layerskip.config.skips import DecodingOptions, SkipConfig
from layerskip.costs.speculation import best_length
from layerskip.decoding.engine import Request
from layerskip.decoding.noise import stream_key
from layerskip.files.trainings import SCHEMA, check_record
from layerskip.model.opened_model import OpenedModel
from layerskip.replay.replayed_drafts import replay
from layerskip.replay.trace import NothingToDraft, Trace, take_trace
from layerskip.timing.cost_tables import cost_tables
from layerskip.training.data import LEAST_ROOM, LONGEST_QUESTION
from layerskip.training.draft_training import TRAINED_FILE, Training
from layerskip.training.stages import RECORD
from layerskip.weights.fingerprint import fingerprint

PROMPTS, NEW_TOKENS = 12, LEAST_ROOM
TIMED, REPEATS = 6, 3
FOR_QUESTIONS, FOR_REPLAYS = 0.15, 0.4
"""Shares of judging's time for questions and replays; the rest is for timing."""
DEEPEST = 4
BEFORE, TRAINED = "before", "trained"


def judge(training: Training, skip: SkipConfig, usual: SkipConfig | None = None) -> dict[str, Any]:
    """Judge a trained draft, and write `skip.json` and `train.json`; returns the latter's record.

    Args:
        skip: the trained draft, as `training.run` returns it.
        usual: the draft stored with the checkpoint, which commands use so far; None: there is none.
    """
    opened, recipe = training.opened, training.recipe
    began = time.monotonic()
    if (corpus := training.texts.corpus) is None:
        windows = training.held_out(min(recipe.window, LONGEST_QUESTION), PROMPTS)
        prompts = [window[None, :-1] for window in windows]  # (1, T) each
    else:
        corpus.late = began + FOR_QUESTIONS * (training.until - began)
        held = corpus.held_out(PROMPTS)
        prompts = [torch.tensor([ids], device=opened.device) for ids in held]
    base, usual = replace(training.skip, num_layers=None), usual or automatic_draft(opened).skip
    drafts = {TRAINED: skip}
    if training.skip.shared_prefix() < opened.num_sublayers:  # otherwise it is the whole model
        drafts["untrained"] = base
    if usual is not None:
        drafts[BEFORE] = usual
    acceptance: dict[str, dict[str, list[float]]] = {}
    while not acceptance:
        began = time.monotonic()
        try:
            acceptance = _replayed(training, prompts[:1], drafts)
        except NothingToDraft as error:
            prompts = prompts[1:]
            if not prompts:
                raise ValueError(
                    "every held-out text ends with its first token, so the draft was not judged; "
                    f"use {training.folder / TRAINED_FILE}, or train on other texts in another "
                    "folder"
                ) from error
    a_prompt, left = time.monotonic() - began, training.until - began
    if left < math.inf:
        prompts = prompts[: max(1, int(FOR_REPLAYS * left / a_prompt))]
    if len(prompts) > 1:
        acceptance = _replayed(training, prompts, drafts)
    request = Request(  # the first text of `answers`
        input_ids=prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        max_new_tokens=NEW_TOKENS,
        law=law_of({"do_sample": True, "temperature": recipe.temperature}),
        keys=[stream_key(0)],
        eos=end_tokens(opened.model),
    )
    resolved = [each.resolve(opened.num_layers) for each in drafts.values()]
    context = prompts[0].shape[1]
    costs = [each.at(context) for each in cost_tables(opened, resolved, request)]
    table = {
        name: {
            **acceptance[name],
            "costs": {"draft": cost.draft, "verify": list(cost.verify)},
            "formula": max(1.0, best_length(acceptance[name]["coupled"], cost)[0]),
            "bytes": opened.weights.nbytes(each),
        }
        for (name, each), cost in zip(drafts.items(), costs, strict=True)
    }
    timed = clock(
        opened,
        prompts,
        drafts,
        recipe.temperature,
        until=training.until,
        progress=training.progress,
    )
    best, pays = chosen(drafts, timed)
    written = replace(best, model=skip.model, model_hash=skip.model_hash)
    record = {
        "schema": SCHEMA,
        "recipe": recipe.to_dict(),
        "model": skip.model,
        "base": fingerprint(opened.model),
        **training.facts,
        "held_out": {"prompts": len(prompts), "new_tokens": NEW_TOKENS},
        "drafts": table,
        "timed": timed,
        "pays": pays,
    }
    check_record(record)
    written.save(training.folder / "skip.json")
    return training.finish(RECORD, record)


def _replayed(
    training: Training, prompts: Sequence[Tensor], drafts: Mapping[str, SkipConfig]
) -> dict[str, dict[str, list[float]]]:
    """By draft and law, how often its first, second, ... tokens are accepted along the answers."""
    acceptance: dict[str, dict[str, list[float]]] = {name: {} for name in drafts}
    for law, temperature in (("greedy", None), ("coupled", training.recipe.temperature)):
        training.progress(f"judging: {law} texts", 0.0)
        trace = answers(training.opened, prompts, temperature)
        for number, (name, each) in enumerate(drafts.items()):
            training.progress(f"judging: {law} replay of {name}", number / len(drafts))
            acceptance[name][law] = replay(trace, each).survival
    return acceptance


def answers(opened: OpenedModel, prompts: Sequence[Tensor], temperature: float | None) -> Trace:
    """The target's answers to prompts (1, T), for replaying drafts; None is greedy."""
    return take_trace(
        opened,
        prompts,
        max_new_tokens=NEW_TOKENS,
        law=law_of({"do_sample": temperature is not None, "temperature": temperature}),
        eos=end_tokens(opened.model),
        draft_length=DEEPEST,
    )


def clock(
    opened: OpenedModel,
    prompts: Sequence[Tensor],
    drafts: Mapping[str, SkipConfig],
    temperature: float,
    *,
    until: float,
    progress: Callable[[str, float], None],
) -> dict[str, dict[str, Any]]:
    """The trained draft and the one used before, as `timed_drafts` of sampled texts with lookups.

    Empty if every text ended with its first token.
    """
    task = Task(NEW_TOKENS, do_sample=True, temperature=temperature, execution=opened.execution)
    _, timed = timed_drafts(
        [
            Engine(opened.model, task, name, drafts.get(name), lookup=True)
            for name in (BEFORE, TRAINED)
        ],
        prompts[:TIMED],
        repeats=REPEATS,
        until=until,
        note=lambda what, share: progress(f"judging: timing text {what}", share),
    )
    return {name: timed[name] for name in (TRAINED, BEFORE) if timed}


def chosen(
    drafts: Mapping[str, SkipConfig], timed: Mapping[str, Mapping[str, Any]]
) -> tuple[SkipConfig, bool]:
    """The draft to use from now on, and whether it is the trained draft.

    The trained draft is chosen if it pays; otherwise the one before, or nothing if that was not
    faster than plain decoding.
    """
    pays, usual = _pays(timed), drafts.get(BEFORE)
    usually = BEFORE in timed and timed[BEFORE]["speedup"] > 1
    skip = drafts[TRAINED] if pays else usual or SkipConfig()
    options = DecodingOptions(lookup=True, enabled=None if pays or usually else False)
    notes = {"trained": {"pays": pays, "timed": {name: {**each} for name, each in timed.items()}}}
    return replace(skip, decoding=options, notes=notes), pays


def _pays(timed: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a trained draft is faster than plain decoding, and than the draft used before.

    The lower ends of both 95% intervals over prompts must be above 1.
    """
    mine = timed.get(TRAINED)
    return mine is not None and all((each["low"] or 0) > 1 for each in (mine, mine["over_default"]))
