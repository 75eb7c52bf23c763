"""Made-up run files: rounds drawn from a known acceptance, times from known costs."""

import json
import random

COSTS = {"draft": 0.15, "verify": [1.0, 1.2, 1.35, 1.45, 1.5], "source": "measured"}
STEP = 0.001  # seconds of one target step
LAYERS = 6


def header(**changes):
    """The header of a sampled run of five methods."""
    return {
        "kind": "header",
        "schema": 1,
        "created": "2026-11-21T09:40:00Z",
        "argv": ["benchmark", "tiny"],
        "environment": {
            "layerskip": "0.1.0",
            "python": "3.11.7",
            "packages": {"torch": "2.13.0"},
            "platform": "Linux",
            "cpu": {"model": "Test CPU", "cores": 2, "threads": 1},
            "devices": [],
            "git": {"revision": "0" * 40, "dirty": False},
        },
        "model": {
            "name": "tiny",
            "hash": "0123456789abcdef",
            "architecture": "llama",
            "num_layers": LAYERS,
            "parameters": 1000,
        },
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "execution": "fused",
        "law": {
            "do_sample": True,
            "temperature": 0.8,
            "top_p": None,
            "top_k": None,
            "acceptance": "coupled",
            "seed": 0,
        },
        "max_new_tokens": 64,
        "repeats": 2,
        "warmup": 1,
        "batch_sizes": [1],
        "prompts": {"name": "shipped", "sha256": "0", "count": 8, "categories": {}},
        "baseline": "plain",
        "methods": [
            {"name": "generate", "kind": "generate"},
            {"name": "plain", "kind": "plain"},
            drafting("self"),
            drafting("self:fixed-4", controller="fixed", max_draft_length=4),
            {"name": "generate-prompt-lookup", "kind": "generate-prompt-lookup", "num_tokens": 10},
        ],
    } | changes


def drafting(name, **changes):
    """A method of kind `self`: exit 2 of 6 layers."""
    skipped = list(range(2, LAYERS))
    return {
        "name": name,
        "kind": "self",
        "label": "exit 2, expected-gain",
        "skip": {"schema": 3, "exit_layer": 2},
        "sources": ["sublayers"],
        "skipped": {"attention": skipped, "mlp": skipped},
        "num_kept": 4,
        "prefix": 4,
        "controller": "expected-gain",
        "max_draft_length": None,
        "threshold": None,
        "costs": {"1": COSTS | {"step_seconds": STEP}},
    } | changes


def record(method, prompt="code-1", **changes):
    """One call of 10 ms for 10 tokens, of which the first took 1 ms."""
    return {
        "kind": "record",
        "method": method,
        "prompts": [prompt],
        "category": prompt.partition("-")[0],
        "batch_size": 1,
        "repeat": 0,
        "order": 0,
        "prompt_tokens": [5],
        "new_tokens": [10],
        "seconds": {"total": 0.01, "first": 0.001, "draft": None, "verify": None, "other": None},
        "first_tokens": [1],
        "rounds": None,
        "peak_memory": None,
        "repeated_4grams": [0.1],
        "loops": [False],
        "equal": None,
        "differences": [],
    } | changes


def seconds(total, first=0.001, **phases):
    return {"total": total, "first": first, "draft": None, "verify": None, "other": None} | phases


def rounds(*triples):
    """Rounds of a batch of one from (drafted, accepted, emitted), all drafts from one source."""
    return {
        "sources": [0 if d else None for d, _, _ in triples],
        "drafted": [[d] for d, _, _ in triples],
        "accepted": [[a] for _, a, _ in triples],
        "emitted": [[e] for _, _, e in triples],
        "confidences": [[[0.5] * d] for d, _, _ in triples],
        "steps": [d for d, _, _ in triples],
    }


def drawn_rounds(draw, alpha, length, tokens):
    done = []
    while tokens:
        drafted = min(length, tokens - 1)
        accepted = 0
        while accepted < drafted and draw.random() < alpha:
            accepted += 1
        done.append((drafted, accepted, accepted + 1))
        tokens -= accepted + 1
    return done


def round_cost(drafted):
    return drafted * COSTS["draft"] + COSTS["verify"][drafted] if drafted else 1.0


def made_up(
    *,
    prompts=4,
    categories=("code", "foreign"),
    alpha=0.6,
    speed=1.0,
    noise=0.02,
    seed=0,
    head=None,
):
    """The lines of a whole run; `speed` multiplies the seconds of the drafting methods."""
    draw = random.Random(seed)
    top = header() if head is None else head
    lines = [top]
    for category in categories:
        for number in range(prompts):
            texts = random.Random(f"{category} {number}".encode(errors="surrogatepass"))
            counts = {
                method["name"]: drawn_rounds(
                    texts, alpha, method["max_draft_length"] or 3, top["max_new_tokens"] - 1
                )
                for method in top["methods"]
                if method["kind"] == "self"
            }
            for repeat in range(top["repeats"]):
                for order, method in enumerate(top["methods"]):
                    name, kind = method["name"], method["kind"]
                    steps = top["max_new_tokens"] - 1
                    slower = {"generate": 1.4, "generate-prompt-lookup": 1.1}.get(kind, 1.0)
                    shake = 1 + noise * draw.uniform(-1, 1)
                    times = seconds(0.002 + steps * STEP * slower * shake, 0.002)
                    done = [(0, 0, 1)] * steps
                    if kind == "self":
                        done = counts[name]
                        drafts = sum(d for d, _, _ in done) * COSTS["draft"] * STEP * speed
                        rest = sum(round_cost(d) for d, _, _ in done) * STEP * speed - drafts
                        times = seconds(
                            0.002 + (drafts + rest) * shake,
                            0.002,
                            draft=drafts * shake,
                            verify=rest * shake * 0.9,
                            other=rest * shake * 0.1,
                        )
                    elif kind == "plain":
                        whole = times["total"] - 0.002
                        times |= {"draft": 0.0, "verify": whole * 0.9, "other": whole * 0.1}
                    lines.append(
                        record(
                            name,
                            f"{category}-{number}",
                            repeat=repeat,
                            order=order,
                            new_tokens=[top["max_new_tokens"]],
                            seconds=times,
                            rounds=rounds(*done) if kind in ("plain", "self") else None,
                            repeated_4grams=[0.15],
                            equal=[True] if kind == "self" else None,
                        )
                    )
    return lines


def sweep(tokens=1000):
    """A sweep over three exits and three draft lengths; every round drafts as many as it may."""
    lengths, exits = [1, 2, 4], []
    for layer, alpha in ((1, 0.3), (2, 0.6), (3, 0.8)):
        rounds = [[0] * g + [round(tokens / (1 + alpha * g))] for g in lengths]
        shares = dict.fromkeys(("agreement", "match"), alpha)
        costs = COSTS | {"draft": layer / 20}
        exits.append({"exit": layer, **shares, "rounds": rounds, "costs": costs})
    return {
        "kind": "sweep",
        "prompts": ["code-0"],
        "tokens": tokens,
        "draft_lengths": lengths,
        "exits": exits,
    }


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
