"""Search files made up for tests: trials drawn over a made-up landscape, phase by phase."""

import json
import random
from pathlib import Path
from typing import Any

import run_files
from landscapes import LENGTHS, Landscape

from layerskip.costs.speculation import CostTable, speedup

STEP = 0.007  # seconds of one plain step


def made_up(
    *,
    layers: int = 12,
    trials: int = 120,
    confirm: bool = True,
    pays: bool = True,
    finalists: int = 4,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """A search of the sublayer space; `pays` False: of drafts that cost too much for their worth.

    Args:
        finalists: how many there are beside the best exit.
    """
    draw = random.Random(seed)
    land = Landscape(layers, seed, exits=True, verify=0.05 if pays else 0.6)
    done: list[dict[str, Any]] = []
    seen: set[int] = set()
    for origin, mask in _proposals(land, layers, trials, draw, done):
        if mask not in seen:
            seen.add(mask)
            done.append(_trial(len(done), origin, mask, land))
        if len(done) == trials:
            break
    if trials > 20:
        done[11] = {"number": 11, "origin": "single", "state": "failed"}
        done[13] = done[13] | {"copy_of": 12}
    drafting = [trial for trial in done if trial.get("forced_speedup") is not None]
    order = sorted(drafting, key=lambda t: -t["forced_speedup"])
    exits = [t for t in order if t["origin"].startswith("seed:exit")][:1]
    chosen = [t for t in order if t not in exits][:finalists]
    last = [_finalist(t, land, confirm, draw) for t in [*chosen, *exits]]
    timed = [f for f in last if f["confirmed"] and f["confirmed"]["low"] > 1]
    winner = max(timed, key=lambda f: f["confirmed"]["speedup"], default=None)
    head = run_files.header()
    document = {
        "kind": "search",
        "schema": 1,
        "created": "2026-11-21T12:00:00Z",
        "argv": ["search", "tiny"],
        "model": head["model"] | {"num_layers": layers},
        **{key: head[key] for key in ("environment", "device", "dtype", "threads", "execution")},
        "law": head["law"],
        "max_new_tokens": 64,
        "prompts": {
            "name": "shipped",
            "sha256": "0",
            "count": 24,
            "categories": {"code": 12, "foreign": 12},
            "traced": [f"code-{i}" for i in range(18)],
            "held_out": [f"foreign-{i}" for i in range(6)],
        },
        "space": {
            "kind": "sublayer",
            "num_layers": layers,
            "allow_ends": False,
            "switches": 2 * layers - 3,
            "size": 2 ** (2 * layers - 3) - 1,
        },
        "study": {"name": "layerskip", "storage": "search.log"},
        "trace": {"texts": 18, "starts": 1051, "draft_length": 8},
        "cost": {},
        "step_seconds": STEP,
        "bound": 1 / land.cost(((1 << 2 * layers) - 1) ^ 3),
        "trials": done,
        "finalists": last,
        "plain": {
            "predicted_tokens_per_second": 1 / STEP,
            "confirmed_tokens_per_second": 0.99 / STEP if confirm else None,
        },
        "best_exit": last[-1]["name"] if exits else None,
        "winner": winner["name"] if winner else None,
        "seconds": {
            "trace": 5.1,
            "cost": 6.0,
            "trials": 120.0,
            "confirm": 40.0 if confirm else None,
        },
    }
    return document | changes


def write(path: Path, document: dict[str, Any]) -> Path:
    """A search file of this document."""
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return path


def skipped(mask: int) -> dict[str, list[int]]:
    """The sets of a mask: bit 2i is the attention of layer i, bit 2i + 1 its MLP."""
    bits = range(mask.bit_length())
    return {
        "attention": [i // 2 for i in bits if mask >> i & 1 and i % 2 == 0],
        "mlp": [i // 2 for i in bits if mask >> i & 1 and i % 2],
    }


def _switches(layers: int) -> dict[str, int]:
    """Switches with their first sublayer: the first layer stays, the last goes whole."""
    names = {f"{kind}.{i}": 2 * i + (kind == "mlp") for i in range(1, layers - 1)
             for kind in ("attention", "mlp")}  # fmt: skip
    return names | {f"layer.{layers - 1}": 2 * layers - 2}


def _proposals(land, layers, trials, draw, done):
    """Origins and masks: seeds, singles, a path by rank, then moves near the best, and others."""
    every = (1 << 2 * layers) - 1
    yield "seed:none", 0
    for exit_layer in range(layers - 1, 0, -1):
        yield f"seed:exit-{exit_layer}", every ^ ((1 << 2 * exit_layer) - 1)
    masks = {n: (3 if n.startswith("layer") else 1) << bit for n, bit in _switches(layers).items()}
    for mask in masks.values():
        yield "single", mask
    path = 0
    for mask in sorted(masks.values(), key=lambda m: land.damage[m.bit_length() - 1]):
        path |= mask
        yield "ranked", path
    for number in range(20 * trials):
        near = sorted((t for t in done if t["state"] == "complete"), key=lambda t: -t["value"])[:5]
        found = sum(1 << 2 * i for i in near[number % len(near)]["skipped"]["attention"])
        found += sum(2 << 2 * i for i in near[number % len(near)]["skipped"]["mlp"])
        if number % 8 == 0:
            yield "tpe", sum(mask for mask in masks.values() if draw.random() < 0.4)
        else:
            yield "local", found ^ draw.choice(list(masks.values()))


def _trial(number: int, origin: str, mask: int, land: Landscape) -> dict[str, Any]:
    alpha, costs = land.acceptance(mask), CostTable(land.cost(mask), land.verify)
    forced = max(speedup(alpha, g, costs.draft, costs.verify_cost) for g in LENGTHS)
    drafts = mask != 0
    return {
        "number": number,
        "origin": origin,
        "state": "complete",
        "skipped": skipped(mask),
        "value": max(1.0, forced) / STEP if drafts else 1 / STEP,
        "guide": forced / STEP if drafts else None,
        "speedup": max(1.0, forced) if drafts else 1.0,
        "forced_speedup": forced if drafts else None,
        "acceptance": alpha if drafts else None,
        "draft_cost": costs.draft,
        "controller": "expected-gain",
        "max_draft_length": 8,
        "threshold": None,
        "seconds": 0.8,
        "copy_of": None,
    }


def _finalist(
    trial: dict[str, Any], land: Landscape, confirm: bool, draw: random.Random
) -> dict[str, Any]:
    measured = trial["forced_speedup"] * draw.uniform(0.93, 1.04)
    origin = trial["origin"]
    return {
        "name": origin[5:] if origin.startswith("seed:exit") else f"trial-{trial['number']}",
        "trial": trial["number"],
        "skipped": trial["skipped"],
        "decoding": {key: trial[key] for key in ("controller", "max_draft_length", "threshold")},
        "alpha": trial["acceptance"],
        "draft_cost": trial["draft_cost"],
        "verify": list(land.verify),
        "predicted": trial["forced_speedup"],
        "predicted_held_out": trial["forced_speedup"] * 0.97,
        "confirmed": {
            "speedup": measured,
            "low": measured * 0.94,
            "high": measured * 1.07,
            "tokens_per_second": measured / STEP,
            "prompts": 6,
            "repeats": 2,
            "acceptance_rate": 0.51,
            "compared": 6,
            "equal": 6,
            "near_ties": 0,
            "faults": 0,
        }
        if confirm
        else None,
    }
