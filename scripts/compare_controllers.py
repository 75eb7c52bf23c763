"""Compare controllers by counted rounds: knows the shipped models and prompts; times nothing.

    python scripts/compare_controllers.py --split held-out

Every prompt is decoded once, drafting from every emitted token: what every draft would have been,
and how much of it accepted. Rounds of any controller and of every fixed draft length follow from
that, and one given cost table prices them all, so that no clock's noise is in the comparison. The
held-out prompts are the first 8 of each kind, those of the README's table; the others of the
shipped file are for development.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from layerskip.config import SkipConfig
from layerskip.controllers import CONTROLLERS, Controller, Fixed, make_controller
from layerskip.engine import Decoder, Request
from layerskip.laws import Law, stream_key
from layerskip.loading import SHIPPED_PROMPTS, Loaded, encode, load
from layerskip.prompts import Prompt, read_prompts
from layerskip.speculation import CostTable, draft_limit
from layerskip.sublayers import Sublayers

EXITS = {"demo-llama": 3, "demo-gemma2": 12}
KINDS = {"code": "code", "repetitive": "repetitive", "unlike": "foreign"}
HELD_OUT = 8  # prompts of each kind
LONGEST = 12  # fixed draft length of the sweep


def whole_rounds(draft: float, *rounds: float) -> CostTable:
    """The table under which a round of d drafts costs the d-th of `rounds` target steps."""
    return CostTable(draft, (1.0, *(cost - d * draft for d, cost in enumerate(rounds, 1))))


# Whole rounds of 1, 2, ... drafts in target steps. "measured": one thread of an AMD EPYC (Zen 4),
# batch 1, float32. The others are what else a machine may look like.
TABLES = {
    "demo-llama": {
        "measured": whole_rounds(0.145, 1.41, 1.63, 1.74, 1.95, 2.05, 2.13, 2.21, 2.40),
        "faster head": whole_rounds(0.11, 1.37, 1.56, 1.65, 1.83, 1.90, 1.96, 2.01, 2.17),
        "memory-bound": CostTable(0.16, (1.0,)),
        "dear": CostTable(0.3, (1.0, 1.25, 1.35, 1.45)),
    },
    "demo-gemma2": {
        "measured": CostTable(0.78, (1.0, 1.08, 1.12, 1.14, 1.18, 1.19, 1.21, 1.22, 1.26)),
        "memory-bound": CostTable(0.76, (1.0,)),
    },
}


@dataclass(frozen=True)
class Text:
    """One prompt's decoding and all that drafts would have been.

    `accepted[i]` tokens of the draft that starts after emitted token i are accepted;
    `confidences[i]` are that draft's, as long as the engine allows and at most `LONGEST`.
    """

    accepted: Sequence[int]
    confidences: Sequence[Sequence[float]]


class Tracer(Decoder):
    """Emits one token a round, whatever is accepted, so that a draft starts at every token."""

    def _match(
        self,
        drafts: list[list[int]],
        positions: Sequence[tuple[int, int]],
        scores: Tensor,
        laws: dict[tuple[int, int], Tensor],
    ) -> list[list[int]]:
        tokens = super()._match(drafts, positions, scores, laws)
        self.matched = len(tokens[0]) - 1
        return [tokens[0][:1]]


class Everything(Fixed):
    """Drafts all the time, and has the engine note confidences."""

    needs_confidence = True


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn: greedy, or coupled sampling."""

    temperature: float | None

    def request(self, ids: Tensor, tokens: int, seed: int) -> Request:
        heat = self.temperature
        warpers = [] if heat is None else [TemperatureLogitsWarper(heat)]
        return Request(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            law=Law(warpers, do_sample=heat is not None, rows=1),
            keys=[stream_key(seed, 0)],
        )


def trace(model: Sublayers, skip: SkipConfig, request: Request) -> Text:
    """Decode plainly, with a draft from every token."""
    decoder = Tracer(model, skip, Everything(LONGEST), request, max_draft_length=LONGEST)
    accepted, confidences = [], []
    for round_ in decoder.rounds():
        if round_.index:
            accepted.append(decoder.matched)
            confidences.append(round_.confidences[0])
    return Text(accepted, confidences)


def rounds(controller: Controller, text: Text) -> list[tuple[int, int]]:
    """(drafted, accepted) of every round that decoding this text takes."""
    controller.reset(1)
    position, length = 0, len(text.accepted)
    played = []
    while position < length:
        left = length - position
        limit = controller.limit(0, draft_limit(LONGEST, left, left))
        drafted = 0
        while drafted < limit:
            drafted += 1
            confidence = text.confidences[position][drafted - 1]
            if drafted < limit and not controller.keep_drafting(0, confidence):
                break
        accepted = min(drafted, text.accepted[position])
        controller.update(0, drafted, accepted)
        played.append((drafted, accepted))
        position += accepted + 1
    return played


def speedup(controller: Controller, texts: Iterable[Text], costs: CostTable) -> float:
    """Tokens per target step over all texts; plain decoding's are 1."""
    played = [round_ for text in texts for round_ in rounds(controller, text)]
    emitted = sum(accepted + 1 for _, accepted in played)
    return emitted / sum(costs.round_cost(drafted) for drafted, _ in played)


def choose(split: str, per_kind: int) -> dict[str, list[tuple[int, Prompt]]]:
    """Prompts of the split with their numbers in the file, by kind."""
    chosen = {}
    for category, kind in KINDS.items():
        prompts = enumerate(p for p in read_prompts(SHIPPED_PROMPTS) if p.category == category)
        own = [(n, p) for n, p in prompts if (n < HELD_OUT) == (split == "held-out")]
        chosen[kind] = own[: per_kind or None]
    return chosen


def agrees(
    loaded: Loaded, text: Text, skip: SkipConfig, request: Request, costs: CostTable
) -> bool:
    """Whether decoding for real takes the very rounds that `rounds` counts."""
    controller = make_controller("expected-gain", costs=costs)
    decoder = Decoder(Sublayers(loaded.model), skip, controller, request, max_draft_length=LONGEST)
    real = [(r.drafted[0], r.accepted[0]) for r in decoder.rounds() if r.index]
    return real == rounds(make_controller("expected-gain", costs=costs), text)


@torch.no_grad()
def collect(
    loaded: Loaded, skip: SkipConfig, draw: Draw, args: argparse.Namespace
) -> tuple[dict[str, list[Text]], int, int]:
    """Texts by kind; and of how many, decoded again for real, the rounds were those counted."""
    texts: dict[str, list[Text]] = {}
    checked = agreed = 0
    model = Sublayers(loaded.model)
    costs = next(iter(TABLES[loaded.name].values()))
    for kind, prompts in choose(args.split, args.prompts).items():
        texts[kind] = []
        for number, prompt in prompts:
            ids = encode(loaded.tokenizer, prompt)
            for seed in range(args.seeds if draw.temperature is not None else 1):
                request = draw.request(ids, args.tokens, number + 1000 * seed)
                texts[kind].append(trace(model, skip, request))
                if sys.stderr.isatty():
                    print(f"\r{loaded.name}, {kind}: {len(texts[kind])}", end="", file=sys.stderr)
            if number == prompts[0][0]:
                request = draw.request(ids, args.tokens, number)
                checked += 1
                agreed += agrees(loaded, texts[kind][0], skip, request, costs)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return texts, checked, agreed


def row(texts: Sequence[Text], costs: CostTable, sampling: bool) -> list[str]:
    """The cells of one line of the table."""
    fixed = [speedup(Fixed(length), texts, costs) for length in range(LONGEST + 1)]
    best = max(fixed)
    cells = [f"{best:.3f} ({fixed.index(best)})"]
    for name in CONTROLLERS:
        controller = make_controller(name, costs=costs, sampling=sampling)
        gained = speedup(controller, texts, costs)
        cells.append(f"{gained:.3f}")
    return [*cells, f"{gained / best:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(EXITS), help="of demo-llama, demo-gemma2")
    parser.add_argument("--split", choices=["development", "held-out"], default="development")
    parser.add_argument("--exit-layer", type=int, help="another exit than the best one")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=0, help="of each kind; 0: all of the split")
    parser.add_argument("--seeds", type=int, default=1, help="sampled texts of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--costs", help='another cost table, JSON: {"draft": c, "verify": [...]}')
    parser.add_argument("--quick", action="store_true", help="2 prompts of each kind, 64 tokens")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 2, 64
    torch.set_num_threads(1)
    for name, temperature in itertools.product(args.models, (args.temperature, None)):
        loaded = load(name, dtype="float32")
        skip = SkipConfig.early_exit(args.exit_layer or EXITS[name])
        draw = Draw(temperature)
        texts, checked, agreed = collect(loaded, skip, draw, args)
        how = "greedy" if temperature is None else f"sampled at {temperature}"
        print(f"\n### {name}, exit {skip.exit_layer}, {how}, {args.split} prompts\n")
        print("| costs | prompts | best fixed | " + " | ".join(CONTROLLERS) + " | ours / best |")
        print("|---|---|---|" + "---|" * len(CONTROLLERS) + "---|")
        tables = TABLES[name]
        if args.costs:
            tables = {"given": CostTable.from_dict({"source": "given"} | json.loads(args.costs))}
        for title, costs in tables.items():
            for kind, own in texts.items():
                cells = row(own, costs, temperature is not None)
                print(f"| {title} | {kind} | " + " | ".join(cells) + " |", flush=True)
        print(f"\nDecoded again for real: {agreed} of {checked} prompts took the rounds counted.")


if __name__ == "__main__":
    main()
