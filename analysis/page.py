"""The report as one self-contained HTML page: headings, tables and plots.

All text is escaped here. Invisible characters in records were replaced when they were read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from layerskip.analysis.drawing import INK, LINE, MUTED, PAPER
from layerskip.analysis.run_tables import ENDS
from layerskip.analysis.verdict import Verdict


@dataclass(frozen=True)
class Picture:
    """A plot as shown on the page."""

    title: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Section:
    """One run or search, all trainings, or all runs side by side.

    Attributes:
        tables: by name. A CSV file contains all of each, the page shows the columns in SHOWN.
    """

    title: str
    slug: str
    facts: Mapping[str, str]
    verdict: Verdict | None
    pictures: Sequence[Picture]
    tables: Mapping[str, pd.DataFrame]


HEADINGS = {
    "acceptance": "probability that a drafted token is accepted",
    "acceptance_rate": "share of drafts accepted",
    "accepted_1": "first token accepted",
    "alpha": "probability that a drafted token is accepted",
    "batch_size": "rows of a batch",
    "bound": "gain at most",
    "category": "kind of prompt",
    "context": "tokens of context",
    "decode": "decoding alone",
    "draft_cost": "cost of a draft step",
    "gigabytes_per_second": "GB/s read",
    "mean_acceptance_length": "tokens per verification",
    "mean_draft_length": "drafted tokens per round",
    "memory": "GB/s of memory",
    "own_megabytes": "MB",
    "prefill": "prefill alone",
    "prefill_seconds": "prefill, s",
    "repeated_4grams": "of the text repeated",
    "tokens_per_pass": "tokens per pass",
    "tokens_per_second": "tokens per second",
}
"""Headings that say more than the column's name; for other columns the name is used."""
INTERVALS = ("speedup", "measured", "tokens_per_second")
"""The columns `low` and `high` are the interval of the first of these in a table."""
PLACES = ("batch_size", "category", "context")
"""Columns that locate a row; they are left out if they are the same in all rows."""

SHOWN: Mapping[str, tuple[str, str, str]] = {
    "comparison": (
        "All runs",
        "Speed relative to the run's baseline: all tokens divided by all seconds.",
        "run batch_size method prompts tokens_per_second speedup",
    ),
    "results": (
        "Results",
        "Tokens per second are all new tokens divided by all seconds, prefill included; a prompt "
        "counts with the medians of its repeats. How many times as fast: the ratio of two methods' "
        "tokens per second, with its 95% bootstrap interval over prompts in brackets. Prefill: the "
        "time to the first token; decoding: the time after it. Same text: of the texts that must "
        "equal the baseline's; a near-tie is a difference between two scores that are closer than "
        "the resolution of the arithmetic, any other difference is a fault.",
        "batch_size context method tokens_per_second times* prefill decode acceptance_rate "
        "repeated_4grams same_text",
    ),
    "categories": (
        "By kind of prompt",
        "The speed of each method relative to the baseline, with 95% intervals over prompts.",
        "category prompts of*",
    ),
    "acceptance": (
        "Acceptance",
        "A round is one pass of the whole model with the draft before it. The probability (alpha) "
        "is accepted / (accepted + rejected): tokens after a rejected one were never tested. The "
        "share is accepted / drafted.",
        "batch_size category method rounds alpha acceptance_rate mean_acceptance_length "
        "tokens_per_pass mean_draft_length",
    ),
    "sources": (
        "Sources of drafts",
        "One per round, by expected gain. Share: of all rounds; none: a plain step.",
        "batch_size category method source share alpha acceptance_rate mean_acceptance_length "
        "mean_draft_length",
    ),
    "decoding": (
        "Decoding",
        "After the first tokens: medians over calls, with the slowest and the fastest in brackets. "
        "GB/s read: weights, keys and values that passes read, computed from the model; GB/s of "
        "memory: measured by sweeps over memory between the calls. The CPU's caches can make the "
        "share exceed 1.",
        "batch_size category method calls prefill_seconds tokens_per_second "
        "gigabytes_per_second memory share",
    ),
    "predictions": (
        "Predicted and measured",
        "The speed of decoding relative to the baseline. Predicted: from the rounds and the cost "
        "table; efficiency is measured / predicted. The cost of a draft step (c) is in plain "
        "steps; no such draft gains more than 1/c.",
        "batch_size category method predicted measured efficiency draft_cost bound",
    ),
    "exits": (
        "Exits",
        "Agreement of an exit's most likely token with the target's, match of samples, and the "
        "predicted gain of its replayed rounds at their best draft length.",
        "exit agreement match speedup draft_length acceptance_rate tokens_per_pass",
    ),
    "search-finalists": (
        "Finalists",
        "The speed relative to plain decoding. Predicted: from replayed rounds and costs. "
        "Measured: timed in turn with plain decoding on other prompts, with the 95% interval in "
        "brackets. The cost of a draft step (c) is in plain steps. Same text: of the texts, those "
        "that equal plain decoding's.",
        "finalist predicted measured alpha draft_cost tokens_per_second same_text left_out rounded "
        "drafts",
    ),
    "search-trials": (
        "Best trials",
        "Value: the speedup over plain decoding at the best fixed draft length, without lookups, "
        "by which trials are compared. Predicted: that of a finalist, with its controller and its "
        "lookups. The cost of a draft step (c) is in plain steps.",
        "number origin left_out attention mlp rounded draft_vocabulary value predicted acceptance "
        "draft_cost draft_length",
    ),
    "exit-training": (
        "Exits before and after training",
        "On held-out texts: loss in nats per token; agreement of the likeliest token with the "
        "model's; accepted: the share of an exit's drafts accepted with shared noise; overlap: the "
        "same by the rejection rule. The last line is the model itself.",
        "exit accepted_before accepted_after agreement_before agreement_after overlap_before "
        "overlap_after loss_before loss_after",
    ),
    "trainings": (
        "Trainings",
        "Overlap with the target's distribution: of the first drafted token, before and after "
        "training, on held-out windows. Accepted: share of all positions in held-out texts. "
        "Predicted by the formula at the best draft length; measured together with lookups, with "
        "the 95% interval in brackets; before: measured for the draft used before. It pays if it "
        "is faster by more than prompts differ.",
        "draft of pays measured before predicted draft_cost accepted_1 overlap_before overlap "
        "loss minutes own_megabytes",
    ),
}
"""By table: title, note, and the columns shown, in order; other tables exist only as files.

A name that ends in * stands for all columns with that prefix.
"""

MOST = 24  # rows of a table on the page; all are in its CSV file

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --muted: #59636e;
  --line: #d1d9e0; --soft: #f4f6f8; --link: #0b5cad; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --muted: #a3acb7;
  --line: #3a424c; --soft: #1e2329; --link: #7ab7ff; --bad: #ff9b92; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.75rem, 2vw, 2rem); color: var(--ink);
  background: var(--paper); overflow-wrap: break-word;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
a { color: var(--link); }
p, ul, dl { max-width: 46rem; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { margin-top: 3rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h2, h3 { line-height: 1.3; }
.lead { font-size: 1.1rem; }
.fault { color: var(--bad); font-weight: 600; }
.note, figcaption { color: var(--muted); font-size: .92rem; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; }
.pictures { display: grid; gap: 1.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 31rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 40rem; }
figure h3 { margin: 0 0 .4rem; font-size: 1.05rem; }
figure svg { display: block; width: 100%; height: auto; }
.box { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line);
  border-radius: .4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; hyphens: manual; overflow-wrap: normal; }
th.t, td.t { text-align: left; }
td.t { white-space: normal; min-width: 7rem; max-width: 18rem; }
td.t:first-child { min-width: 10rem; }
thead th { border-bottom: 1px solid var(--line); background: var(--soft); }
tbody tr + tr td { border-top: 1px solid var(--line); }
details { margin: .6rem 0 1rem; max-width: 46rem; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 34rem) { .facts { grid-template-columns: 1fr; }
  .facts dd { margin-bottom: .4rem; } }
"""


def page(title: str, sections: Sequence[Section], files: Sequence[str]) -> str:
    verdicts = [(section, section.verdict) for section in sections if section.verdict]
    several = len(verdicts) > 1
    parts = [f"<h1>{escape(title)}</h1>"]
    for section, verdict in verdicts:
        where = f"{section.title}: " if several else ""
        parts += [f'<p class="lead fault">{_said(where + each)}</p>' for each in verdict.faults]
    for section, verdict in verdicts:
        if several:
            parts.append(f'<p><a href="#{section.slug}">{escape(section.title)}</a></p>')
        headline, *others = verdict.lines
        parts.append(f'<p class="lead">{_said(headline)}</p>')
        parts.append(f"<p>{_said(' '.join(others))}</p>")
        if verdict.advice:
            parts.append(f"<p>What to do next:</p>{_items(map(_said, verdict.advice))}")
    links = [(section.slug, section.title) for section in sections]
    links.append(("files", "Files"))
    items = _items(f'<a href="#{slug}">{escape(name)}</a>' for slug, name in links)
    if several:
        parts.append(f'<nav aria-label="Contents"><h2>Contents</h2>{items}</nav>')
    parts += [_section(section, number, several) for number, section in enumerate(sections)]
    parts.append(
        '<section id="files"><h2>Files</h2><p>Made from the files below. Beside this page lie '
        "every table as CSV in <code>tables/</code> and every plot as SVG in <code>plots/</code>."
        f"</p>{_items(map(escape, files))}</section>"
    )
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _said(text: str) -> str:
    """A sentence as HTML; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _items(elements: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{each}</li>' for each in elements)}</ul>"


def inline_svg(svg: str, prefix: str, title: str, alt: str) -> str:
    """A file's SVG as an element of a page: prefixed ids, the page's colours, and a description."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # A style element would affect the rest of the page; the root's attribute is inherited.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    body = body.replace("url(#", f"url(#{prefix}")
    names = {INK: "ink", PAPER: "paper", MUTED: "muted", LINE: "line"}
    for colour, name in names.items():
        body = body.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="([^"]+)"', body)
    assert box is not None
    root = (
        f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(f"{title}. {alt}")}" '
        'style="stroke-linejoin: round; stroke-linecap: butt" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return root + body[body.index(">") + 1 :]


def _section(section: Section, number: int, several: bool) -> str:
    title = section.title if several else "Details"  # the page's own heading is the title of one
    parts = [f'<section id="{section.slug}"><h2>{escape(title)}</h2>']
    if section.facts:
        facts = section.facts.items()
        terms = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts)
        parts.append(f'<dl class="facts">{terms}</dl>')
    if section.pictures:
        parts.append('<div class="pictures">')
        for index, picture in enumerate(section.pictures):
            drawing = inline_svg(picture.svg, f"s{number}p{index}-", picture.title, picture.alt)
            parts.append(
                f"<figure><h3>{escape(picture.title)}</h3>{drawing}<details><summary>In words"
                f"</summary><figcaption>{escape(picture.alt)}</figcaption></details></figure>"
            )
        parts.append("</div>")
    parts += [
        _html_table(name, table)
        for name, table in section.tables.items()
        if name in SHOWN and len(table)
    ]
    parts.append("</section>")
    return "\n".join(parts)


def _html_table(name: str, table: pd.DataFrame) -> str:
    """A table; only the first rows of a long one."""
    title, note, _ = SHOWN[name]
    frame, left_out = table.head(MOST), ""
    if len(frame) < len(table):
        counted = f"{len(frame)} of {len(table)} rows: tables/{name}.csv has all."
        left_out = f'<p class="note">{escape(counted)}</p>'
    columns = columns_of(name, frame)
    aligned = [' class="t"' if words else "" for _, words, _ in columns]
    head = "".join(
        f'<th scope="col"{a}>{escape(heading)}</th>'
        for a, (heading, _, _) in zip(aligned, columns, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{a}>{escape(cell)}</td>" for a, cell in zip(aligned, row, strict=True))
        + "</tr>"
        for row in zip(*(cells for _, _, cells in columns), strict=True)
    )
    return (
        f"<h3>{escape(title)}</h3>"
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{left_out}"
        f'<details class="note"><summary>What the columns mean</summary>{escape(note)}</details>'
    )


def columns_of(name: str, frame: pd.DataFrame) -> list[tuple[str, bool, list[str]]]:
    """For each column shown: heading, whether it holds words, and cells as text; NaN is a dash.

    Columns without any value are left out, and location columns that are the same in all rows.
    """
    wanted: list[str] = []
    for each in SHOWN[name][2].split():
        like = [one for one in frame if each[:-1] in one and not one.endswith(ENDS)]
        wanted += [one for one in like if one.startswith(each[:-1])] if each[-1] == "*" else [each]
    columns, spread = [], next((each for each in INTERVALS if each in frame), None)
    for each in wanted:
        same = each in PLACES and frame.get(each, pd.Series()).nunique() < 2
        if each not in frame or frame[each].isna().all() or same:
            continue
        ends = ("low", "high") if each == spread else tuple(each + end for end in ENDS)
        values = [frame[one].tolist() for one in (each, *ends) if one in frame]
        words, cells = _cells([value for column in values for value in column])
        if len(values) == 3:
            whole = (cells[n :: len(frame)] for n in range(len(frame)))
            cells = [
                one if low in (high, one) else f"{one} ({low} to {high})"
                for one, low, high in whole
            ]
        cells = cells[: len(frame)]
        heading = HEADINGS.get(each, each.removeprefix("of ").replace("_", " "))
        columns.append((heading, words, cells))
    return columns


def _cells(values: list[object]) -> tuple[bool, list[str]]:
    """Format a column; fractions have equally many decimals, so that the largest shows 3 digits."""
    words = any(isinstance(value, str) for value in values)
    numbers = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    digits = 0
    if any(not number.is_integer() for number in numbers):
        digits = max(0, 2 - math.floor(math.log10(max(map(abs, numbers)))))
    return words, [
        "–" if pd.isna(v) else f"{v:,.{digits}f}" if isinstance(v, float) else _whole(v)  # noqa: RUF001
        for v in values
    ]


def _whole(value: object) -> str:
    """A cell without a fraction: words, or a count with thousands separators."""
    counted = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if counted else str(value)
