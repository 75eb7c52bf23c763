"""Made-up training files, without any training."""

import json

CURVE = (  # tokens, loss, overlap of the first and the second step
    (0, 1.6, 0.30, 0.20),
    (20_000, 1.1, 0.52, 0.41),
    (40_000, 0.9, 0.61, 0.47),
    (80_000, 0.7, 0.66, 0.50),
)


def draft(first, cost, size):
    """The judgement of a draft with this acceptance of its first token."""
    survival = [first ** (depth + 1) for depth in range(4)]
    tokens = 1 + sum(survival[:2])
    return {
        "greedy": [min(1.0, share + 0.01) for share in survival],
        "coupled": survival,
        "costs": {"draft": cost, "verify": [1.0, 1.1, 1.2, 1.3, 1.4]},
        "formula": max(1.0, tokens / (2 * cost + 1.2)),
        "bytes": size,
    }


def training(**changes):
    """The record of a training, as an earlier version wrote it; `recipe` is changed in part."""
    recipe = {
        "kind": "feature-block",
        "loss": "lk",
        "skip": {"schema": 3, "attention": [], "mlp": [], "num_layers": 6},
        "tokens": 80_000,
        "minutes": None,
        "seed": 0,
        "temperature": 0.8,
        "rate": 5e-4,
        "rank": 16,
        "vocabulary": 8192,
        "window": 256,
        "rows": 4,
    }
    recipe |= changes.pop("recipe", {})
    timed = {"speedup": 1.2, "low": 1.1, "high": 1.3, "tokens_per_second": 60.0}
    return {
        "schema": 1,
        "recipe": recipe,
        "base": "weights-0123456789abcdef",
        "tokens": 80_000,
        "text_tokens": 40_000,
        "covered": 0.93,
        "parameters": 500_000,
        "seconds": {"texts": 300.0, "features": 60.0, "training": 900.0},
        "curve": [
            {"tokens": tokens, "loss": loss, "overlap": overlap} for tokens, loss, *overlap in CURVE
        ],
        "held_out": {"prompts": 12, "new_tokens": 64},
        "drafts": {"trained": draft(0.6, 0.1, 2_000_000), "before": draft(0.95, 0.3, 9_000_000)},
        "timed": {"trained": timed, "before": timed | {"speedup": 1.5, "low": None, "high": None}},
        "pays": False,
    } | changes


def write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
