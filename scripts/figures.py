"""Check the figures in README against records of benchmarks, or update them; `make figures`.

    python scripts/figures.py runs/benchmark/smollm2-float32.jsonl ...   # stores, updates README
    python scripts/figures.py                                            # checks

After each figure in README, a comment that pages do not show says which one it is:

    2.84 (2.69-2.99)<!-- smollm2-float32 plain/generate -->

The first word is the run, the name of its file. The second is the figure: `plain` is tokens per
second, `plain/generate` a ratio, `:decode` and `:prefill` that of a part of the time; `@4000` is
for prompts of that many tokens. docs/figures.json stores the figures, with command and machine.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from layerskip.analysis.labels import hardware, machine_words
from layerskip.analysis.run_tables import speedup
from layerskip.analysis.runs import ALL, Run, load_runs
from layerskip.files.writing import write_text

ROOT = Path(__file__).parent.parent
ENDS = ("speedup", "low", "high")
README, STORED = ROOT / "README.md", ROOT / "docs" / "figures.json"
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
INTERVAL = rf"(?: \({NUMBER}(?:-| to ){NUMBER}\))?"
MARKED = re.compile(rf"{NUMBER}{INTERVAL}\**<!-- (\S+) (\S+) -->")
RATIO = re.compile(r"\d\.\d\d \(\d\.\d\d(?:-| to )\d\.\d\d\)(?!\**<!-- )")


def figures_of(run: Run) -> dict[str, Any]:
    """A run's command, its machine, and its figures with their intervals."""
    header, figures = run.header, dict[str, list[float]]()
    for row in speedup(run).to_dict("records"):
        if row["category"] not in (ALL, *run.contexts) or row["batch_size"] != run.batch_sizes[0]:
            continue
        context = run.contexts.get(row["category"])
        at = "" if context is None else f"@{context}"
        ratio = f"{row['method']}/{row['over']}"
        figures[f"{row['method']}{at}"] = [row["tokens_per_second"]]
        figures[f"{ratio}{at}"] = [row[name] for name in ENDS]
        figures[f"{ratio}:prefill{at}"] = [row["prefill_speedup"]]
        figures[f"{ratio}:decode{at}"] = [row[f"decode_{name}"] for name in ENDS]
    machine = f"{hardware(header)}, {machine_words(header)}"
    facts = {"command": " ".join(header["argv"]), "machine": machine, "created": header["created"]}
    return facts | {"figures": {name: [x for x in of if x == x] for name, of in figures.items()}}


def filled(text: str, stored: dict[str, Any]) -> tuple[str, list[str]]:
    """The text with its figures replaced by those of the records, and what was wrong in it.

    Wrong are figures that differ from the records, and ratios that name no record.
    """
    lines = [f"{match[0]} names no record" for match in RATIO.finditer(text)]

    def recorded(match: re.Match[str]) -> str:
        *shown, run, name = match.groups()
        values = stored.get(run, {}).get("figures", {}).get(name, [])
        numbers = [number for number in shown if number]
        places = [len(number.partition(".")[2]) for number in numbers]
        right = [f"{value:,.{n}f}" for value, n in zip(values, places, strict=False)]
        if right == numbers:
            return match[0]
        lines.append(f"{run} {name}: README says {' '.join(numbers)}, records {right or 'none'}")
        if len(right) < len(numbers):
            return match[0]
        rest = iter(right)
        return re.sub(NUMBER, lambda _: next(rest), match[0], count=len(right))

    return MARKED.sub(recorded, text), lines


def main() -> None:
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    readme = README.read_text(encoding="utf-8")
    if files := [Path(name) for name in sys.argv[1:]]:
        stored |= {run_of.stem: figures_of(load_runs([run_of])[0]) for run_of in files}
        write_text(STORED, json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
        readme, _ = filled(readme, stored)
        write_text(README, readme)
    _, lines = filled(readme, stored)
    print("\n".join(lines) or f"README's figures are those of {len(stored)} runs")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
