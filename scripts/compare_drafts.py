"""Compare all drafts of a model on prompts that none was trained on; knows clocks, trains nothing.

    python scripts/compare_drafts.py smollm2 runs/healed runs/heads --prompts spec-bench --chat \
        --output drafts.json

Beside the skip configs and trainings that are named stand an early exit, a set of layers left out,
all in 8 and in 4 bits, lookups, perhaps a second model, and mixtures. Acceptance is replayed along
the target's own answers and knows no clock; prices and speedups are timed, plain decoding and all
drafts in turn. With `--skip-clock` only the first is done; the same command without it goes on, and
does nothing again that is in the file already but for timing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from layerskip.bench.batches import Batch
from layerskip.bench.methods import Clock, Decoded, Task
from layerskip.bench.plans import make_header
from layerskip.checkpoints import encode, load
from layerskip.cli.options import first_of_each, given_prompts, spoken
from layerskip.cli.terminal import Talk, aligned, ratio
from layerskip.config import LowPrecision, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.acceptance import prior_acceptance
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.engine import Decoder, Draft
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.lookup import Lookup
from layerskip.files.comparisons import KIND, SCHEMA, read_comparison, write_comparison
from layerskip.generation import DEFAULT_CONTROLLER, LONGEST_DRAFT
from layerskip.model.blocks import TOKENS
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers
from layerskip.replay.drafts import Replay, follow, look_up
from layerskip.replay.simulation import simulate, tokens_per_step
from layerskip.replay.trace import DRAFT_LENGTH, Trace
from layerskip.timing.tables import cost_tables
from layerskip.timing.threads import cpu_threads, fitting_threads
from layerskip.training.judging import (
    answers,
    formula,
    read_record,
    request_of,
    speedups,
    trained_skip,
)
from layerskip.vocabulary import check_vocabularies

SHOWN = 4  # depths in the table; the file has all that were replayed
TIMES = 4  # that prices are asked for: disturbed ones are measured again, and count together
SAME = ("model", "dtype", "execution", "law", "max_new_tokens", "prompts")
"""What a file that is gone on with must have been made with."""
GREEDY = "greedy"
EXIT_SHARE, LEFT_OUT_SHARE = 1 / 4, 1 / 8  # of the layers


@dataclass
class Row:
    """A draft, or several of which a round takes one.

    Attributes:
        draft: None of a mixture.
        parts: names of what a mixture is made of; of a single draft its own.
        known: what the file says of it.
    """

    name: str
    kind: str
    draft: Draft | None = None
    parts: tuple[str, ...] = ()
    known: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = self.parts or (self.name,)


@dataclass(eq=False)
class Way:
    """Decoding with some drafts, or plainly without any: a method of the benchmark."""

    opened: Sublayers
    name: str
    temperature: float | None
    new_tokens: int
    drafts: Sequence[Draft] = ()
    costs: Sequence[CostTable] = ()
    one_row = True

    def __post_init__(self) -> None:
        self.kind = "self" if self.drafts else "plain"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind}

    @torch.no_grad()
    def decode(
        self, batch: Batch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        request = request_of(
            self.opened,
            batch.input_ids,
            self.temperature,
            new_tokens=max_new_tokens or self.new_tokens,
            seed=batch.numbers[0],
            clock=clock,
        )
        controller = make_controller(
            DEFAULT_CONTROLLER if self.drafts else "fixed",
            costs=self.costs or CostTable(1.0, (1.0,)),
            priors=list(map(prior_acceptance, self.drafts)) or None,
        )
        longest = LONGEST_DRAFT if self.drafts else 0
        decoder = Decoder(self.opened, self.drafts, controller, request, max_draft_length=longest)
        rounds = list(decoder.rounds())
        assert rounds[0].times is not None
        return Decoded(decoder.emitted, rounds[0].times[-1], [1], rounds)


class Comparison:
    """The table as it comes about.

    Args:
        laws: names of the laws and their temperatures, None where it is greedy.
        keep: told after every step, with the file as it is.
    """

    def __init__(
        self,
        opened: Sublayers,
        prompts: Sequence[torch.Tensor],
        rows: Sequence[Row],
        laws: Mapping[str, float | None],
        new_tokens: int,
        talk: Talk,
        keep: Callable[[], None],
    ) -> None:
        self.opened, self.prompts, self.rows = opened, prompts, rows
        self.laws, self.new_tokens = laws, new_tokens
        self.talk, self.keep = talk, keep
        self.drafts = {row.name: row.draft for row in rows if row.draft is not None}
        self._traces: dict[str, Trace] = {}
        self._replays: dict[tuple[str, str], Replay] = {}

    def trace(self, law: str) -> Trace:
        """The target's answers under a law."""
        if law not in self._traces:
            self.talk.progress(f"answers: {law}")
            self._traces[law] = answers(
                self.opened,
                self.prompts,
                self.laws[law],
                new_tokens=self.new_tokens,
                draft_length=DRAFT_LENGTH,
            )
        return self._traces[law]

    def replay(self, law: str, name: str) -> Replay:
        """What a draft would have drafted along them."""
        if (law, name) not in self._replays:
            trace, draft = self.trace(law), self.drafts[name]
            self.talk.progress(f"replay: {law}, {name}")
            if isinstance(draft, Lookup):
                found = look_up(trace, draft)
            else:
                (found,) = follow(trace, draft)
            self._replays[law, name] = found
        return self._replays[law, name]

    def accept(self) -> None:
        """Acceptance of every draft under every law, where it is not known yet."""
        for law in self.laws:
            for row in self.rows:
                known = row.known.setdefault("acceptance", {})
                if row.draft is None or law in known:
                    continue
                found = self.replay(law, row.name)
                known[law] = found.survival
                if found.found is not None:
                    offered = (found.tokens[:, 0] >= 0).double().mean().item()
                    row.known.setdefault("offered", {})[law] = offered
                self.keep()
            self._traces.pop(law, None)

    def price(self, law: str) -> dict[str, CostTable]:
        """What every draft costs, and so the speedup that is to be expected of each row."""
        request = request_of(self.opened, self.prompts[0], self.laws[law])
        tables = {}
        for row in self.rows:
            if row.draft is None:
                continue
            self.talk.progress(f"prices: {row.name}")
            for _ in range(TIMES):
                (table,) = cost_tables(self.opened, [row.draft], request)
            tables[row.name] = table
            row.known["costs"] = {"draft": table.draft, "verify": list(table.verify)}
        for row in self.rows:
            row.known.setdefault("predicted", {})[law] = self.predicted(law, row, tables)
        self.keep()
        return tables

    def predicted(self, law: str, row: Row, tables: Mapping[str, CostTable]) -> float:
        """By the formula, at the best draft length; of a mixture by its rounds along the texts."""
        if row.draft is not None:
            return formula(row.known["acceptance"][law], tables[row.name])
        replays = [self.replay(law, name) for name in row.parts]
        costs = [tables[name] for name in row.parts]
        priors = [prior_acceptance(self.drafts[name]) for name in row.parts]
        controller = ExpectedGain(costs, priors=priors)
        texts = range(len(replays[0].texts))
        rounds = (simulate(replays, controller, [text]) for text in texts)
        return tokens_per_step(chain.from_iterable(rounds), costs)

    def time(self, law: str, tables: Mapping[str, CostTable], repeats: int) -> None:
        """Decode with every row in turn, and plainly."""
        temperature = self.laws[law]
        task = Task(
            self.new_tokens,
            do_sample=temperature is not None,
            temperature=temperature,
            execution=self.opened.execution,
        )
        ways = [Way(self.opened, "plain", temperature, self.new_tokens)]
        for row in self.rows:
            drafts = [self.drafts[name] for name in row.parts]
            costs = [tables[name] for name in row.parts]
            ways.append(Way(self.opened, row.name, temperature, self.new_tokens, drafts, costs))
        timed = speedups(
            self.opened.model,
            task,
            ways,
            self.prompts,
            repeats=repeats,
            note=lambda what, share: self.talk.progress(f"clock: {share:4.0%} {law}, {what}"),
        )
        for row in self.rows:
            row.known.setdefault("timed", {})[law] = timed[row.name]
        self.keep()


def usual(opened: Sublayers, influence: Sequence[float]) -> list[Row]:
    """The drafts that need no training, of any model.

    Args:
        influence: how much each layer but the first and the last changes what goes through it.
    """
    layers = opened.num_layers
    exit_layer = max(1, round(EXIT_SHARE * layers))
    count = max(1, round(LEFT_OUT_SHARE * layers))
    least = sorted(range(1, layers - 1), key=lambda layer: influence[layer - 1])[:count]
    plural = "s" * (count > 1)
    return [
        Row(f"exit {exit_layer}", "exit", SkipConfig.early_exit(exit_layer)),
        Row(f"without {count} layer{plural}", "left out", SkipConfig.layers(sorted(least))),
        Row("8 bits", "rounded", SkipConfig.low_precision(8)),
        Row("4 bits, head 8", "rounded", SkipConfig(low=LowPrecision(bits=4, head=8))),
        Row("lookup", "lookup", Lookup()),
    ]


def influences(trace: Trace) -> list[float]:
    """Of layers 1 to L-2, how far they turn the hidden state, on the mean (1 - cosine)."""
    states = torch.cat([text.states for text in trace.texts], dim=1).float()  # (L, N, H)
    turned = 1 - F.cosine_similarity(states[:-2], states[1:-1], dim=-1)  # (L - 2, N)
    return turned.mean(1).tolist()


def given(path: Path) -> Row:
    """The draft that a path names: a skip config, or a folder that a training left."""
    if not path.is_dir():
        name = path.stem if path.stem not in ("skip", "trained") else path.absolute().parent.name
        return Row(name, "given", SkipConfig.load(path).bare())
    skip, record = trained_skip(path), read_record(path)
    assert skip.trained is not None
    row = Row(path.absolute().name, skip.trained.kind, skip.bare())
    if record is not None:
        row.known = {
            "tokens": record["tokens"],
            "minutes": sum(record["seconds"].values()) / 60,
            "loss": record["recipe"]["loss"],
            "seed": record["recipe"]["seed"],
        }
    return row


def mixtures(named: Sequence[Row], second: Row | None) -> Iterator[Row]:
    """What is worth trying together: lookups with anything, and 8 bits with what is named."""
    yield Row("8 bits + lookup", "mixture", parts=("lookup", "8 bits"))
    if second is not None:
        yield Row(f"{second.name} + lookup", "mixture", parts=("lookup", second.name))
    for row in named:
        yield Row(f"{row.name} + lookup", "mixture", parts=("lookup", row.name))
        both = ("lookup", "8 bits", row.name)
        yield Row(f"8 bits + {row.name} + lookup", "mixture", parts=both)


def measure_sizes(opened: Sublayers, rows: Sequence[Row]) -> None:
    """Bytes and parameters of each row's own weights; a mixture has those of its parts."""
    by_name = {row.name: row for row in rows}
    for row in rows:
        if isinstance(row.draft, SkipConfig):
            row.known["bytes"] = opened.weights.nbytes(row.draft)
            if row.draft.trained is not None:
                weights = load_file(row.draft.trained.weights)
                weights.pop(TOKENS, None)
                row.known["parameters"] = sum(weight.numel() for weight in weights.values())
        elif isinstance(row.draft, Assistant):
            own = list(row.draft.model.model.parameters())
            row.known["bytes"] = sum(weight.nbytes for weight in own)
            row.known["parameters"] = sum(weight.numel() for weight in own)
        others = [by_name[name].known for name in row.parts if name != row.name]
        for what in ("bytes", "parameters"):
            row.known.setdefault(what, sum(other[what] for other in others))


def identity(draft: Draft) -> str:
    """What tells a draft from others, wherever its weights lie."""
    if isinstance(draft, Assistant):
        return fingerprint(draft.model.model)
    if not isinstance(draft, SkipConfig):
        return "lookup"
    content = draft.to_dict()
    of = {name: content.get(name) for name in ("attention", "mlp", "low")}
    return json.dumps(of | {"trained": draft.trained and draft.trained.hash})


def trained(draft: Draft | None) -> bool:
    return isinstance(draft, SkipConfig) and draft.trained is not None


def distinct(rows: Sequence[Row]) -> None:
    """Refuse two rows of one name."""
    names = [row.name for row in rows]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"two drafts are called {twice[0]!r}; names are those of folders and files, give "
            "different ones"
        )


def go_on(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Take over what a file knows of rows that are the same."""
    if not path.exists():
        return
    found = read_comparison(path)
    other = [name for name in SAME if found.get(name) != header[name]]
    if other:
        raise ValueError(
            f"{path} holds a comparison with another {other[0]} ({found.get(other[0])}, now "
            f"{header[other[0]]}); name another file"
        )
    known = {row["name"]: row for row in found["rows"]}
    lost = [name for name in known if name not in {row.name for row in rows}]
    if lost:
        raise ValueError(
            f"{path} has {lost[0]}, too, which is not named now; name it again, or another file"
        )
    for row in rows:
        old = known.get(row.name, {})
        if old.get("drafts") == row.known["drafts"]:
            row.known = old | row.known


def table(rows: Sequence[Row], laws: Sequence[str], clocked: Sequence[str]) -> list[list[str]]:
    """The lines of the table, its head first."""
    head = ["draft", "MB", "parameters", "tokens", "minutes", *map(heading, laws), "c"]
    for law in clocked:
        head += [f"predicted, {heading(law)}", f"measured, {heading(law)}"]
    lines = [head]
    for row in rows:
        known = row.known
        line = [row.name, f"{known['bytes'] / 1e6:.1f}", number(known["parameters"])]
        line += [number(known.get("tokens")), number(known.get("minutes"))]
        line += [shares(known.get("acceptance", {}).get(law)) for law in laws]
        line.append(f"{known['costs']['draft']:.2f}" if "costs" in known else "-")
        for law in clocked:
            predicted = known.get("predicted", {}).get(law)
            timed = known.get("timed", {}).get(law)
            line.append("-" if predicted is None else f"{predicted:.2f}")
            line.append(ratio(timed["speedup"], timed["low"], timed["high"]) if timed else "-")
        lines.append(line)
    return lines


def heading(law: str) -> str:
    return law if law == GREEDY else f"T={law}"


def number(value: float | None) -> str:
    return "-" if not value else f"{value:,.0f}"


def shares(found: Sequence[float] | None) -> str:
    """Acceptance by depth in a cell."""
    return " ".join(f"{share:.3f}".lstrip("0") for share in (found or ())[:SHOWN]) or "-"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def notes(comparison: Comparison, document: dict[str, Any]) -> list[str]:
    """What one has to know to read the table."""
    cpu = document["environment"]["cpu"]["model"]
    words = [
        f"{document['model']['name']}, {document['dtype']}, {document['passes']}, {cpu}; "
        f"{document['prompts']['count']} prompts ({document['prompts']['name']}), up to "
        f"{document['max_new_tokens']} new tokens.",
        "Acceptance: share of all places whose first 1, 2, 3, 4 drafted tokens are accepted, "
        "greedy and with shared noise at a temperature.",
        "Predicted: by the formula at the best fixed length; mixtures by their simulated rounds. "
        "Measured: decoding of expected-gain over plain decoding, ratio of totals, 95% interval.",
    ]
    for row in comparison.rows:
        if "offered" in row.known:
            offered = ", ".join(f"{law} {share:.2f}" for law, share in row.known["offered"].items())
            words.append(f"Share of places where {row.name} offers a draft: {offered}.")
        for law, timed in row.known.get("timed", {}).items():
            same = f"{timed['equal']} of {timed['compared']} texts are those of plain decoding"
            if timed["near_ties"] or timed["faults"]:
                others = f"{timed['near_ties']} near-ties, {timed['faults']} FAULTS"
                words.append(f"{row.name}, {heading(law)}: {same}; {others}.")
    return words


def compare(args: argparse.Namespace) -> None:
    talk = Talk(args.quiet)
    named = [given(path) for path in args.drafts]
    chosen = spoken(given_prompts(args.prompts, args.model), args.chat)
    chosen = first_of_each(chosen, args.limit)
    loaded = load(args.model, dtype=args.dtype)
    talk.say(loaded.describe())
    opened = loaded.opened(args.execution)
    second = None
    if args.assistant is not None:
        other = load(args.assistant, dtype=args.dtype)
        check_vocabularies(loaded.tokenizer, other.tokenizer)
        second = Row(other.name, "second model", Assistant(other.opened(args.execution)))
    prompts = [encode(loaded.tokenizer, each).to(opened.device) for each in chosen]
    lengths = [ids.shape[1] for ids in prompts]
    opened.check_lengths(lengths, max(lengths) + args.new_tokens)
    laws = {GREEDY: None, **{f"{each:g}": each for each in sorted({args.temperature, 1.0})}}
    sampled = f"{args.temperature:g}"
    with cpu_threads(None), cpu_threads(args.threads or fitting_threads(opened)):
        task = Task(args.new_tokens, do_sample=True, temperature=args.temperature)
        document = make_header(loaded, opened, task, chosen, args.prompts)
        document |= {"kind": KIND, "schema": SCHEMA}
        talk.say(f"passes: {document['passes']}")
        first = answers(opened, prompts, None, new_tokens=args.new_tokens)
        rows = [*usual(opened, influences(first)), *named, *([] if second is None else [second])]
        rows += mixtures(named, second)
        distinct(rows)
        for row in rows:
            if isinstance(row.draft, SkipConfig):
                row.draft = row.draft.resolve(opened.num_layers)
        by_name = {row.name: row for row in rows}
        made_of = {row.name: identity(row.draft) for row in rows if row.draft is not None}
        for row in rows:
            drafts = [made_of[name] for name in row.parts]
            row.known |= {"name": row.name, "kind": row.kind, "drafts": drafts}
            row.known["trained"] = any(map(trained, (by_name[name].draft for name in row.parts)))
        measure_sizes(opened, rows)
        go_on(args.output, document, rows)

        def keep() -> None:
            write_comparison(args.output, document | {"rows": [row.known for row in rows]})

        comparison = Comparison(opened, prompts, rows, laws, args.new_tokens, talk, keep)
        comparison.accept()
        clocked = [sampled, *([GREEDY] if args.greedy else [])]
        for law in [] if args.skip_clock else clocked:
            tables = comparison.price(law)
            comparison.time(law, tables, args.repeats)
        keep()
    talk.progress("")
    lines = table(
        rows,
        [*laws],
        [law for law in clocked if any(law in row.known.get("timed", {}) for row in rows)],
    )
    print(markdown(lines) if args.markdown else aligned(lines))
    print("\n".join(["", *notes(comparison, document)]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for the layerskip command")
    parser.add_argument(
        "drafts", nargs="*", type=Path, help="skip configs (.json), folders of `layerskip train`"
    )
    parser.add_argument("--assistant", metavar="MODEL", help="a second model of its vocabulary")
    parser.add_argument("--prompts", type=Path, help="a file, spec-bench or copying")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says")
    parser.add_argument("--limit", type=int, help="prompts of each category, at most")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="of the clock")
    parser.add_argument("--greedy", action="store_true", help="time greedy decoding, too")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each, per prompt")
    parser.add_argument("--skip-clock", action="store_true", help="acceptance only, for now")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--threads", type=int, help="measured otherwise")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    try:
        compare(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"compare_drafts: error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
