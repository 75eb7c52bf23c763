r"""Compare rules by replay: what accepts one of several drafts, what stops one, how trees grow.

    python scripts/rules.py several smollm2 --prompts spec-bench --chat --temperature .8 \
        --output several.json
    python scripts/rules.py stops smollm2 --prompts spec-bench --chat --temperature .8 \
        --output stops.json
    python scripts/rules.py trees smollm2 --prompts spec-bench --chat --decode --output trees.json
    python scripts/rules.py branches smollm2 --prompts spec-bench --chat --decode --costs .55 1 \
        --output branches.json

`several`: how often one of 1, 2, 3, 4 drafts of a place is accepted, by accept rule. `stops`: the
rounds of every stop rule on development prompts (the first half of each category) and held-out ones
(the second), priced with one cost table, beside those of the fixed length that turned out best.
What drafts is the model itself in 8 bits or in 4. `trees`: tokens a verify pass of trees of laws
looked up, by size and by children of a node, replayed along the target's own answers; with --decode
by decoding, too, where what is said beside the text is learnt as well. `branches`: chains of these
drafts (or of --skip FILE) and trees of their second-best tokens, simulated; with --decode decoded.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch
from compare import Setting, costs_of, main, setting, shared_arguments, with_costs

from layerskip.cli.terminal import aligned
from layerskip.config import LowPrecision, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controller import Choice, Controller, Offer
from layerskip.decoding.controllers import Confidence, Fixed, make_controller
from layerskip.decoding.engine import Decoder, DraftOrSkip
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.observers import Classifier, Entropy, Features, TargetConfidence
from layerskip.decoding.sources.kept_laws import Laws
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.lookup_laws import LookupLaws
from layerskip.files.writing import write_text
from layerskip.replay.drafts import Replay, replay
from layerskip.replay.live import Live
from layerskip.replay.several import accepted_of_several
from layerskip.replay.simulation import simulate, tokens_per_step
from layerskip.replay.trace import Trace
from layerskip.training.judging import answers, request_of

DRAFTS = {
    "8 bits": SkipConfig.low_precision(8),
    "4 bits, head 8": SkipConfig(low=LowPrecision(bits=4, head=8)),
}
SHARES = [number / 10 for number in range(1, 10)]
"""Thresholds to choose from on development prompts."""
LONGEST = 8
LENGTHS = range(1, LONGEST + 1)
DEVELOPMENT, HELD_OUT = "development", "held out"

Rules = dict[str, Controller]


def resolved(at: Setting, name: str) -> SkipConfig:
    return DRAFTS[name].resolve(at.opened.num_layers)


def texts_of(at: Setting, draft_length: int) -> Trace:
    at.talk.progress("answers")
    prompts, args = [each.ids for each in at.asked], at.args
    return answers(
        at.opened,
        prompts,
        args.temperature,
        new_tokens=args.new_tokens,
        draft_length=draft_length,
    )


def finish(at: Setting, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    document = at.header(at.task()) | {"kind": kind, "rows": rows}
    write_text(at.args.output, json.dumps(document, indent=1) + "\n")


def compare_several(args: Namespace) -> None:
    """How often one of several drafts of a place is accepted, by rule; standard errors beside."""
    if args.temperature is None:
        raise ValueError("accept rules differ in sampling only: give --temperature")
    rows: list[dict[str, Any]] = []
    with setting(args) as at:
        trace = texts_of(at, 1)
        for name in DRAFTS:
            at.talk.progress(name)
            found = accepted_of_several(trace, resolved(at, name), args.most)
            for rule, chances in found.items():  # (N, K)
                means, errors = chances.mean(0), chances.std(0) / len(chances) ** 0.5
                row = {"draft": name, "rule": rule, "places": len(chances)}
                rows.append(row | {"accepted": means.tolist(), "errors": errors.tolist()})
        finish(at, "several", rows)
    lines = [["draft", "rule", *(str(count) for count in range(1, args.most + 1))]]
    for row in rows:
        shares = zip(row["accepted"], row["errors"], strict=True)
        lines.append([row["draft"], row["rule"], *(f"{a:.4f} ({e:.4f})" for a, e in shares)])
    print(aligned(lines))


# ---------------------------------------------------------------------------------------------
# Trees

SIZES = ((4, 1), (8, 1), (4, 8), (8, 8), (16, 8), (32, 8))
"""Of trees: tokens, and children of a node."""


class All(Controller):
    """Drafts all that the first source offers."""

    needs_confidence = False

    def choose(self, offers: Sequence[Offer]) -> Choice:
        return 0

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        pass


def looked_up(args: Namespace, kept: bool, size: int, children: int, *, beside: bool) -> LookupLaws:
    """A source of trees so large; kept: with laws that stay from text to text."""
    laws, joined = Laws(1 << 20) if kept else None, Lookup() if args.lookups else None
    return LookupLaws(laws, children, joined, longest=size, least=0.0, beside=beside)


def decoded(at: Setting, draft: DraftOrSkip, longest: int, rule: Controller) -> float:
    """Tokens a pass of all answers, behind their first ones."""
    tokens = passes = 0
    args = at.args
    for number, each in enumerate(at.asked):
        request = request_of(
            at.opened, each.ids, args.temperature, new_tokens=args.new_tokens, seed=number
        )
        decoder = Decoder(at.opened, draft, rule, request, max_draft_length=longest)
        for round_ in decoder.rounds():
            if round_.index:
                tokens, passes = tokens + len(round_.tokens[0]), passes + 1
    return tokens / passes


@torch.no_grad()
def compare_trees(args: Namespace) -> None:
    """Trees of laws looked up: tokens a verify pass by size, with laws kept from text to text."""
    rows: list[dict[str, Any]] = []
    sizes = args.size or SIZES
    with setting(args) as at:
        trace = texts_of(at, max(size for size, _ in sizes))
        costs = costs_of(at, Lookup())
        for kept, (size, children) in product((False, True), sizes):
            known = "earlier texts" if kept else "nothing"
            row: dict[str, Any] = {"known": known, "tokens": size, "children": children}
            at.talk.progress(f"replay, {known} known, {size} tokens, {children} children")
            live = Live(trace, looked_up(args, kept, size, children, beside=False))
            texts = range(len(trace.texts))
            rounds = [each for text in texts for each in simulate(live, All(), [text])]
            row |= {"replayed": trace.starts / len(rounds), "gain": tokens_per_step(rounds, costs)}
            for name, beside in (("decoded", False), ("beside", True)) if args.decode else ():
                at.talk.progress(f"decode, {known} known, {size} tokens, {children} children")
                source = looked_up(args, kept, size, children, beside=beside)
                row[name] = decoded(at, source, size, All())
            rows.append(row)
        rows.append({"costs": costs.to_dict()})
        finish(at, "trees", rows)
    names = ("known", "tokens", "children", "replayed", "decoded", "beside", "gain")
    lines = [[*names]]
    for row in rows[:-1]:
        found = [row.get(name, "-") for name in names]
        lines.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in found])
    print(aligned(lines))


# ---------------------------------------------------------------------------------------------
# Second-best tokens


@torch.no_grad()
def compare_branches(args: Namespace) -> None:
    """Chains and trees of a draft: tokens a verify pass and a target step, simulated, decoded."""
    rows: list[dict[str, Any]] = []
    drafts = DRAFTS if args.skip is None else {str(args.skip): SkipConfig.load(args.skip)}
    with setting(args) as at:
        for longest in args.longest:
            trace = texts_of(at, longest)
            texts = range(len(trace.texts))
            for name, skip in drafts.items():
                draft = skip.resolve(at.opened.num_layers)
                at.talk.progress(f"{name}, up to {longest}")
                played, costs = replay(trace, draft), costs_of(at, draft)
                for branches in (False, True):
                    row: dict[str, Any] = {"draft": name, "longest": longest, "branches": branches}
                    rule = ExpectedGain(costs, longest, priors=[played.prior], branches=branches)
                    rounds = [each for text in texts for each in simulate(played, rule, [text])]
                    row["simulated"] = trace.starts / len(rounds)
                    row["gain"] = tokens_per_step(rounds, costs)
                    if args.decode:
                        row["decoded"] = decoded(at, draft, longest, rule)
                    rows.append(row | {"costs": costs.to_dict()})
        finish(at, "branches", rows)
    names = ("draft", "longest", "branches", "simulated", "decoded", "gain")
    lines = [[*names]]
    for row in rows:
        found = [row.get(name, "-") for name in names]
        lines.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in found])
    print(aligned(lines))


# ---------------------------------------------------------------------------------------------
# Stop rules


def learnt(played: Replay, texts: Sequence[int]) -> Features:
    """The weights of a `Classifier` from the drafts of every start, to their first wrong token."""
    regression = Classifier.regression()
    for start in chain.from_iterable(
        range(*played.texts[t].indices(len(played.tokens))) for t in texts
    ):
        right = int(played.matches[start].cumprod(0).sum())
        for place in range(min(right + 1, played.draft_length)):
            told = float(played.confidences[start, place]), float(played.entropies[start, place])
            regression.observe((1.0, *told, float(place)), place < right)
    return tuple(regression.weights)  # type: ignore[return-value]


def published(costs: CostTable, prior: float, sampling: bool) -> Rules:
    """The rules as they are published, and ours; none drafts more than 8."""
    names = ("fixed", "confidence", "adaptive-threshold", "heuristic", "entropy", "classifier")
    rules = {
        name: make_controller(name, costs=costs, priors=[prior], sampling=sampling)
        for name in (*names, "target-confidence", "expected-gain")
    }
    return rules | {"target-confidence, by odds": TargetConfidence(0.5, LONGEST, odds=True)}


def families(weights: Features) -> dict[str, Iterator[Controller]]:
    """What the development prompts choose from."""
    pairs = list(product(SHARES, LENGTHS))
    return {
        "fixed, chosen": (Fixed(length) for length in LENGTHS),
        "confidence, chosen": (Confidence(*each) for each in pairs),
        "entropy, chosen": (Entropy(*each) for each in pairs),
        "classifier of a trace, chosen": (Classifier(*each, weights=weights) for each in pairs),
        "target-confidence, chosen": (TargetConfidence(*each) for each in pairs),
        "target-confidence, by odds, chosen": (
            TargetConfidence(*each, odds=True) for each in pairs
        ),
    }


def gain(played: Replay, controller: Controller, texts: Sequence[int], costs: CostTable) -> float:
    """Tokens per target step, every text decoded alone."""
    rounds = (simulate(played, controller, [text]) for text in texts)
    return tokens_per_step(chain.from_iterable(rounds), costs)


def compare_stops(args: Namespace) -> None:
    """Stop rules: tokens per target step, and the share lost against the best fixed length."""
    rows: list[dict[str, Any]] = []
    with setting(args) as at:
        trace = texts_of(at, LONGEST)
        seen: dict[str | None, list[int]] = {}
        for number, prompt in enumerate(at.asked):
            seen.setdefault(prompt.category, []).append(number)
        halves = {
            DEVELOPMENT: [n for each in seen.values() for n in each[: len(each) // 2]],
            HELD_OUT: [n for each in seen.values() for n in each[len(each) // 2 :]],
        }
        name = next(name for name in DRAFTS if name.startswith(args.bits))
        at.talk.progress(f"replay: {name}")
        draft = resolved(at, name)
        played, costs = replay(trace, draft), costs_of(at, draft)
        best = {
            half: max((gain(played, Fixed(length), texts, costs), length) for length in LENGTHS)
            for half, texts in halves.items()
        }
        rules = published(costs, played.prior, args.temperature is not None)
        for label, members in families(learnt(played, halves[DEVELOPMENT])).items():
            at.talk.progress(f"choose: {label}")
            texts = halves[DEVELOPMENT]
            rules[label] = max(members, key=lambda rule: gain(played, rule, texts, costs))
        for label, rule in rules.items():
            row: dict[str, Any] = {"rule": label}
            for half, texts in halves.items():
                own = gain(played, rule, texts, costs)
                row[half] = {"gain": own, "regret": 1 - own / best[half][0]}
            for each in ("threshold", "max_draft_length"):
                row[each] = getattr(rule, each, None)
            rows.append(row)
        facts = {"best_fixed": best, "costs": costs.to_dict(), "alpha": played.survival[0]}
        rows.append({"rule": "best fixed afterwards"} | facts)
        finish(at, "stops", rows)
    lines = [[name, "threshold", "longest", *(f"{half}, regret" for half in halves)]]
    for row in rows:
        line = [row["rule"]]
        if "best_fixed" in row:
            ends = [f"{value:.3f} of {length}" for value, length in row["best_fixed"].values()]
            lines.append([*line, "-", "-", *ends])
            continue
        for each in (row["threshold"], row["max_draft_length"]):
            line.append("-" if each is None else f"{each:g}")
        for half in halves:
            line.append(f"{row[half]['gain']:.3f} {row[half]['regret']:+.1%}")
        lines.append(line)
    print(aligned(lines))


def arguments() -> ArgumentParser:
    asked = shared_arguments()
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    several = commands.add_parser("several", parents=[asked], description=compare_several.__doc__)
    several.set_defaults(run=compare_several)
    several.add_argument("--most", type=int, default=4, help="drafts of a place")
    trees = commands.add_parser("trees", parents=[asked], description=compare_trees.__doc__)
    trees.set_defaults(run=compare_trees)
    trees.add_argument(
        "--size", type=int, nargs=2, action="append", metavar=("TOKENS", "CHILDREN"),
        help="of trees; repeatable",
    )  # fmt: skip
    trees.add_argument("--decode", action="store_true", help="decode, too")
    trees.add_argument("--lookups", action="store_true", help="let lookups join the trees")
    with_costs(trees)
    branches = commands.add_parser(
        "branches", parents=[asked], description=compare_branches.__doc__
    )
    branches.set_defaults(run=compare_branches)
    branches.add_argument("--skip", help="the draft's file")
    branches.add_argument("--longest", type=int, nargs="+", default=[LONGEST], metavar="TOKENS")
    branches.add_argument("--decode", action="store_true", help="decode, too")
    with_costs(branches)
    stops = commands.add_parser("stops", parents=[asked], description=compare_stops.__doc__)
    stops.set_defaults(run=compare_stops)
    stops.add_argument("--bits", choices=("8", "4"), default="8", help="of the draft")
    with_costs(stops)
    return parser


if __name__ == "__main__":
    main(name="rules", parser=arguments())
