"""Times the parts of a pass on this machine: the "cost" record, which prices any skip config.

Passes and a few drafts are timed as rounds of the engine: two early exits, the MLPs alone and, if
requested, everything in low precision. Divided by bytes, attentions cost what a draft of MLPs alone
saves, and MLPs what an exit saves in addition; the head costs as much as an MLP of its size.
A short draft repeats its few sublayers, which stay in the processor's caches; the shorter exit
shows how much that saves.

A machine's pace drifts, and other work comes and goes. So the timing is repeated until one more
repeat hardly changes the medians. Each repeat is counted in its own plain steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.costs.cost_model import TimingPoint, Work, fitted, interpolated
from layerskip.costs.speculation import isotonic
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Source
from layerskip.families.plain import head_refusal
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import opened_of
from layerskip.timing.cost_tables import traffic_of
from layerskip.timing.kept import machine
from layerskip.timing.round_times import CONTEXT, STEPS, Times, quartile, time_rounds

CONTEXTS = (64, 256)  # default numbers of tokens before the rounds to be priced
BUDGET = 6.0  # seconds after which no further repeat starts
LEAST = 1e-15  # seconds per byte, if a model is so small that only the constant is visible
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tokens per row in timed passes
_REPEAT = 0.3  # approximate seconds of a repeat; two sweeps may take longer
_FEWEST, _ENOUGH = 3, 8  # repeats, if the budget is spent, and if the medians agree
_AGREE = 0.005  # maximum difference of the medians with and without the last repeat
_FAR = 256  # tokens; the keys of fewer cost too little to be distinguished from noise

Seconds = dict[TimingPoint, dict[Work, float]]
"""The time of each kind of work at each place."""


@torch.no_grad()
def measure(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    contexts: Sequence[int] = CONTEXTS,
    law: Law | None = None,
    low: SkipConfig | None = None,
    budget: float = BUDGET,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time passes and a few drafts of a model: the "cost" record.

    Args:
        model: a causal language model, or an `OpenedModel`.
        prompts: token ids, (T,) or (1, T) each.
        contexts: numbers of tokens before the rounds to be priced; those beyond the model's
            positions are left out. After the longest one, if it is long, passes are timed, too.
        law: processors of this law are timed as well; greedy by default.
        low: a draft with everything in low precision, which is timed if given.
        budget: seconds after which no further repeat starts. At least three are made.
        progress: called before each repeat with the current activity and the completed share.

    Returns:
        The record. In seconds over one token of every row, by layer: `attention` and `mlp`, their
        weights, and `keys`, per token of context; `head`; `rest`, the remaining time of a step.
        Factors by which passes take longer, as pairs: `growth` and `key_growth`, by tokens of a
        row, and `repeated`, by a draft's share of all sublayers' seconds. `windows`, the maximum
        number of tokens that each attention sees. With `low`, `low_bits`, `low_attention`,
        `low_mlp` and `low_head`; for a mixture `experts`: by number of experts, the share of each
        MLP's bytes that a draft reads. `spread`: the share by which a round of a draft cost more or
        less than in the median, at most, in three of four repeats. `busy`: whether other processes
        needed the cores.
    """
    opened = opened_of(model)
    if not budget > 0:
        raise ValueError(f"budget must be more than 0 seconds, got {budget}")
    if not any(prompt.numel() for prompt in prompts):
        raise ValueError("costs are measured on the prompts' tokens; give at least one")
    low = None if low is None else low.resolve(opened.num_layers)
    if low is not None and len(low.rounded()) < opened.num_sublayers:
        raise ValueError(
            f"costs of low precision are measured on drafts with everything low, not {low}"
        )
    room = opened.max_positions - 2 * _TOKENS[-1]
    fitting = sorted({context for context in contexts if 1 <= context <= room})
    if not fitting:
        raise ValueError(
            f"contexts must be in 1..{room} for this model of {opened.max_positions} positions, "
            f"got {list(contexts)}"
        )
    ids = torch.cat([prompt.flatten() for prompt in prompts])[None].to(opened.device)  # (1, T)
    request = Request(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        law=law or Law(do_sample=False, rows=1),
        keys=[stream_key(0)],
    )
    layers = opened.num_layers
    skips = {"plain": SkipConfig(), "mlps": SkipConfig(attention=tuple(range(layers)))}
    skips |= {f"exit {n}": SkipConfig.early_exit(n) for n in {layers // 8, layers // 2} if n}
    skips |= {} if low is None else {"low": low}
    sources = {name: source_of(opened, skip.resolve(layers)) for name, skip in skips.items()}
    places = [TimingPoint(1, CONTEXT)]
    places += [TimingPoint(1, fitting[-1])] if fitting[-1] >= _FAR else []
    drafts = [source for name, source in sources.items() if name != "plain"]
    repeats: list[list[float]] = []
    started, busy = now(), False
    while True:
        progress("costs of the sublayers", min(1.0, (now() - started) / budget))
        times: dict[TimingPoint, Times] = {place: {} for place in places}
        for place in places:
            time_rounds(
                opened,
                drafts if place == places[0] else [],
                request,
                times[place],
                place=place,
                budget=_REPEAT / len(places),
                tokens=_TOKENS,
                now=now,
            )
        with opened.disturbed():
            busy = busy or opened.limited
        works = {(at, work): quartile(each) for at in places for work, each in times[at].items()}
        repeats.append([*works.values()])
        seconds = np.array(repeats)  # (R, W)
        steps = seconds / seconds[:, :1]  # (R, W), in plain steps of the same repeat
        names = [(None, STEPS + 1), *((draft.key, 0) for draft in drafts)]
        verify, *drafted = (list(works).index((places[0], name)) for name in names)
        rounds = steps[:, [verify]] + STEPS * steps[:, drafted]  # (R, drafts)
        median = np.median(rounds, 0)  # (drafts,)
        over = len(repeats) >= _FEWEST and now() - started > budget
        change = np.abs(np.median(rounds[:-1], 0) / median - 1) if len(repeats) >= _ENOUGH else 1.0
        if over or np.max(change) <= _AGREE:
            break
    found: Seconds = {place: {} for place in places}
    medians = np.median(steps, 0) * np.median(seconds[:, 0])  # (W,)
    for (at, work), each in zip(works, medians.tolist(), strict=True):
        found[at][work] = each
    return {
        "kind": "cost",
        "place": machine(opened),
        "batch_size": 1,
        "contexts": fitting,
        "spread": float(np.quantile(abs(rounds / median - 1), 0.75, 0, method="lower").max()),
        "busy": busy,
        **_parts(opened, sources, found),
        **({} if low is None or low.low is None else {"low_bits": low.low.bits}),
        **({"experts": _read_of_experts(opened)} if opened.mixtures else {}),
        **({} if head_refusal(opened.unembedding) else {"vocabulary": opened.vocabulary}),
    }


def _parts(model: OpenedModel, sources: Mapping[str, Source], seconds: Seconds) -> dict[str, Any]:
    """The parts of the record that are prices."""
    works = next(iter(seconds.values()))
    steps = {name: works.get((source.key, 0), 0.0) for name, source in sources.items()}
    steps["plain"] = works[None, 1]
    read = {name: _by_kind(source) for name, source in sources.items()}
    exact = [name for name in sources if name != "low"]
    # Nonnegative least squares of relative errors.
    shares = np.array([(*read[name], 1.0) for name in exact])  # (drafts, 3)
    shares /= np.array([steps[name] for name in exact])[:, None]
    by_attention, by_mlp, rest = map(float, nnls(shares, np.ones(len(exact)))[0])
    by_mlp = max(by_mlp, LEAST)

    # For a draft's sublayers and head.
    expected = {name: by_attention * each + by_mlp * mlp for name, (each, mlp) in read.items()}

    def repeated(name: str) -> tuple[float, float]:
        """A draft's share of a plain step's reads, in seconds, and its factor of actual time."""
        parts = expected[name]
        return parts / expected["plain"], max(0.0, steps[name] - rest) / parts

    exits = [name for name in exact if name.startswith("exit") and expected[name]]
    factors = sorted([*(repeated(name) for name in exits), (1.0, 1.0)])
    *whole, head = sources["plain"].step_bytes()
    parts: dict[str, Any] = {
        "attention": [by_attention * each for each in whole[::2]],
        "mlp": [by_mlp * each for each in whole[1::2]],
        "head": by_mlp * head,
        "rest": rest,
        "repeated": [list(pair) for pair in factors],
        **_longer(model, sources, seconds),
    }
    if "low" in sources:
        share, factor = repeated("low")
        factor /= interpolated(dict(factors), share) or 1.0
        *low, head = sources["low"].step_bytes()
        parts |= {
            "low_attention": [factor * by_attention * each for each in low[::2]],
            "low_mlp": [factor * by_mlp * each for each in low[1::2]],
            "low_head": factor * by_mlp * head,
        }
    return parts


def _by_kind(source: Source) -> tuple[float, float]:
    """Bytes that a step reads of attentions, and of MLPs and the head."""
    assert source.skip is not None
    *read, head = source.step_bytes()
    attention = sum(each for i, each in zip(source.skip.kept(), read, strict=True) if i % 2 == 0)
    return attention, sum(read) - attention + head


def _longer(model: OpenedModel, sources: Mapping[str, Source], seconds: Seconds) -> dict[str, Any]:
    """The costs of more tokens in a pass, and of more tokens before it."""
    place, works = next(iter(seconds.items()))
    rates = fitted(seconds, {each.key: traffic_of(model, each) for each in sources.values()})
    passes = {tokens: each for (_, tokens), each in works.items() if tokens}
    growth = isotonic([passes[tokens] / passes[1] for tokens in sorted(passes)])
    keys = [pair for layer in range(model.num_layers) for pair in model.key_bytes([layer]).items()]
    return {
        "growth": [list(pair) for pair in zip(sorted(passes), growth, strict=True)],
        "key_growth": [list(pair) for pair in rates.key_growth.items()],
        "keys": [place.rows * rates.key_byte * read for _, read in keys],
        "windows": [window for window, _ in keys],
    }


def _read_of_experts(model: OpenedModel) -> dict[str, list[float]]:
    """For fewer experts than the model's, the share of each MLP's bytes that a token reads."""
    mixture, whole = model.mixtures[0], model.weight_bytes()["sublayers"][1::2]
    shares = {}
    for count in range(0 if mixture.parallel else 1, mixture.top + 1):
        read = model.weight_bytes(experts=count)["sublayers"][1::2]
        shares[str(count)] = [some / every for some, every in zip(read, whole, strict=True)]
    return shares
