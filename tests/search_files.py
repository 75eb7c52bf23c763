"""Made-up search files: trials drawn over a made-up landscape, phase by phase."""

import json
import random

import run_files
from landscapes import LENGTHS, Landscape

from layerskip.costs.speculation import CostTable, speedup

STEP = 0.007  # seconds of one plain step


def made_up(*, layers=12, trials=120, confirm=True, pays=True, finalists=4, seed=0, **changes):
    """A search of the sublayer space. With `pays` False, drafts cost too much to gain.

    Args:
        finalists: number of finalists besides the best exit.
    """
    draw = random.Random(seed)
    land = Landscape(layers, seed, exits=True, verify=0.05 if pays else 0.6)
    done = []
    seen = set()
    for origin, mask in _proposals(land, layers, trials, draw, done):
        if mask not in seen:
            seen.add(mask)
            done.append(_trial(len(done), origin, mask, land))
        if len(done) == trials:
            break
    if trials > 20:
        done[11] = {"number": 11, "origin": "gp", "state": "failed"}
    order = sorted((t for t in done if t["state"] == "complete"), key=lambda t: -t["speedup"])
    exits = [t for t in order if t["origin"].startswith("first:exit")][:1]
    chosen = [t for t in order if t not in exits][:finalists]
    last = [_finalist(t, land, confirm, draw) for t in [*chosen, *exits]]
    timed = [f for f in last if f["confirmed"] and f["confirmed"]["low"] > 1]
    winner = max(timed, key=lambda f: f["confirmed"]["speedup"], default=None)
    head = run_files.header()
    document = {
        "kind": "search",
        "schema": 2,
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
        "sampler": "gp",
        "influence": [damage / 10 for damage in land.damage],
        "cost": {},
        "step_seconds": STEP,
        "bound": 1 / land.cost(((1 << 2 * layers) - 1) ^ 3),
        "trials": done,
        "finalists": last,
        "plain": {
            "predicted_tokens_per_second": 1 / STEP,
            "confirmed_tokens_per_second": 0.99 / STEP if confirm else None,
        },
        "default": {"speedup": 1.02} if confirm else None,
        "keep_default": False,
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


def write(path, document):
    """A search file of this document."""
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return path


def skipped(mask):
    """The sets of a mask: bit 2i is the attention of layer i, bit 2i + 1 its MLP."""
    bits = range(mask.bit_length())
    return {
        "attention": [i // 2 for i in bits if mask >> i & 1 and i % 2 == 0],
        "mlp": [i // 2 for i in bits if mask >> i & 1 and i % 2],
    }


def _proposals(land, layers, trials, draw, done):
    """Origins and masks: exits, a path by increasing damage, then moves near the best."""
    every = (1 << 2 * layers) - 1
    for exit_layer in range(layers - 1, 0, -1):
        yield f"first:exit-{exit_layer}", every ^ ((1 << 2 * exit_layer) - 1)
    switches = [1 << bit for bit in range(2, 2 * layers - 2)] or [3 << 2]
    path = 0
    for mask in sorted(switches, key=lambda m: land.damage[m.bit_length() - 1])[: layers // 2]:
        path |= mask
        yield f"first:without-{path.bit_count()}", path
    for number in range(20 * trials):
        near = sorted((t for t in done if t["state"] == "complete"), key=lambda t: -t["speedup"])
        sets = near[number % min(5, len(near))]["skipped"]
        start = sum(1 << 2 * i for i in sets["attention"]) | sum(2 << 2 * i for i in sets["mlp"])
        mask = start ^ draw.choice(switches)
        if mask:
            yield "gp", mask


def _trial(number, origin, mask, land):
    alpha, costs = land.acceptance(mask), CostTable(land.cost(mask), land.verify)
    gained, length = max((speedup(alpha, g, costs.draft, costs.verify_cost), g) for g in LENGTHS)
    return {
        "number": number,
        "origin": origin,
        "state": "complete",
        "skipped": skipped(mask),
        "draft_vocabulary": None,
        "speedup": gained,
        "acceptance": alpha,
        "draft_cost": costs.draft,
        "draft_length": length,
        "positions": 256,
        "seconds": 0.8,
    }


def _finalist(trial, land, confirm, draw):
    measured = trial["speedup"] * draw.uniform(0.93, 1.04)
    origin = trial["origin"]
    decoding = {"controller": "expected-gain", "max_draft_length": 8, "threshold": None}
    return {
        "name": origin[6:] if origin.startswith("first:exit") else f"trial-{trial['number']}",
        "trial": trial["number"],
        "skipped": trial["skipped"],
        "decoding": decoding,
        "alpha": trial["acceptance"],
        "draft_cost": trial["draft_cost"],
        "verify": list(land.verify),
        "predicted": trial["speedup"],
        "confirmed": {
            "speedup": measured,
            "low": measured * 0.94,
            "high": measured * 1.07,
            "over_default": {"speedup": measured, "low": measured * 0.9, "high": measured * 1.1},
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
