"""Knows how a report is laid out, as one HTML page and as Markdown; computes and draws nothing.

All text that comes from records is escaped here, invisible characters (line breaks, control and
bidirectional ones) shown by their code points.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from layerskip.analysis.plots import INK, LINE, MUTED, PAPER
from layerskip.analysis.runs import visible
from layerskip.analysis.tables import ALL
from layerskip.analysis.verdict import Verdict

Cell = Callable[[Any], str]


@dataclass(frozen=True)
class Picture:
    """A plot as the page shows it."""

    name: str
    """Its file's path in the report's folder, without ending."""
    title: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Table:
    """A table: all of it goes to a CSV file, the columns of SHOWN onto the page."""

    name: str
    frame: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """One run, or all runs side by side."""

    title: str
    slug: str
    facts: Sequence[tuple[str, str]]
    verdict: Verdict | None
    pictures: Sequence[Picture]
    tables: Sequence[Table]
    texts: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    """Prompt's name, prompt, and what followed."""


def _number(digits: int) -> Cell:
    return lambda value: f"{value:.{digits}f}"


_TWO, _THREE, _WHOLE, _TEXT, _SHARE = _number(2), _number(3), _number(0), str, "{:.0%}".format

SHOWN: Mapping[str, tuple[str, str, Mapping[str, tuple[str, Cell]]]] = {
    "speedup": (
        "Speedup",
        "Ratio of totals is the headline: the sum over prompts of seconds per token (median over "
        "repeats) of one method over that of the other, with a 95% bootstrap interval over prompts "
        "(both methods of a prompt drawn together). The mean of the prompts' own ratios stands "
        "beside it. Decoding leaves the time to the first token out.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "over": ("over", _TEXT),
            "prompts": ("n", _TEXT),
            "tokens_per_second": ("tokens/s", _number(1)),
            "speedup": ("ratio of totals", _TWO),
            "low": ("from", _TWO),
            "high": ("to", _TWO),
            "mean_of_ratios": ("mean of ratios", _TWO),
            "decode_speedup": ("decoding only", _TWO),
            "first_ms": ("first token, ms", _number(1)),
        },
    ),
    "losslessness": (
        "Losslessness",
        "Texts compared with the baseline's, all repeats. A near-tie is a difference at a place "
        "where two scores are closer than the arithmetic resolves; anything else is a fault.",
        {
            "method": ("method", _TEXT),
            "compared": ("compared", _TEXT),
            "equal": ("equal", _TEXT),
            "near_ties": ("near-ties", _TEXT),
            "faults": ("faults", _TEXT),
        },
    ),
    "acceptance": (
        "Acceptance",
        "alpha = accepted / (accepted + rejected); r = accepted / drafted: three different things "
        "with tokens per target pass.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "rounds": ("rounds", _TEXT),
            "alpha": ("alpha", _TWO),
            "acceptance_rate": ("r", _TWO),
            "mean_acceptance_length": ("mean acceptance length", _TWO),
            "tokens_per_pass": ("tokens per target pass", _TWO),
            "mean_draft_length": ("mean draft length", _TWO),
        },
    ),
    "positions": (
        "Acceptance by draft position",
        "Acceptance of a token where all before it were accepted; chain: all up to it accepted.",
        {
            "method": ("method", _TEXT),
            "position": ("position", _TEXT),
            "tried": ("tried", _TEXT),
            "acceptance": ("acceptance", _TWO),
            "chain": ("chain", _TWO),
        },
    ),
    "phases": (
        "Where the time goes",
        "Milliseconds per new token.",
        {
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "prefill": ("prefill", _THREE),
            "draft": ("draft", _THREE),
            "verify": ("verify", _THREE),
            "other": ("other", _THREE),
            "rest": ("not told apart", _THREE),
            "total": ("total", _THREE),
        },
    ),
    "predictions": (
        "Predicted and measured",
        "Decode speedup over the baseline. Predicted: the other half of the prompts' rounds priced "
        "with the cost table. Efficiency = measured / predicted, of all prompts and of each half "
        "alone. Formula: Leviathan's at alpha, for fixed draft lengths.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "predicted": ("predicted", _TWO),
            "measured": ("measured", _TWO),
            "efficiency": ("efficiency", _TWO),
            "efficiency_a": ("first half", _TWO),
            "efficiency_b": ("second half", _TWO),
            "alpha": ("alpha", _TWO),
            "formula": ("formula at own length", _TWO),
            "best_length": ("best fixed length", _WHOLE),
            "best_formula": ("formula at best", _TWO),
            "draft_cost": ("c", _THREE),
            "bound": ("bound 1/c", _number(1)),
        },
    ),
    "controllers": (
        "Controllers",
        "Counted rounds of methods with one skip config, priced with one cost table.",
        {
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "controller": ("controller", _TEXT),
            "speedup": ("priced speedup", _TWO),
            "of_best_fixed": ("of best fixed", _THREE),
            "mean_draft_length": ("mean draft length", _TWO),
            "alpha": ("alpha", _TWO),
        },
    ),
    "repetition": (
        "Repetition",
        "Share of 4-grams that had occurred before in the same text: the more, the easier.",
        {
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "texts": ("texts", _TEXT),
            "repeated_4grams": ("repeated 4-grams", _SHARE),
            "loops": ("loops", _TEXT),
        },
    ),
    "exits": (
        "Exits",
        "Agreement of an exit's most likely token with the target's, match under the law, and mean "
        "distance of confidence from matched share.",
        {
            "exit": ("exit", _TEXT),
            "agreement": ("agreement", _TWO),
            "match": ("match", _TWO),
            "calibration_error": ("calibration error", _TWO),
        },
    ),
    "what-if": (
        "What if",
        "Simulated rounds over the trace, priced; costs from the measured parts of a pass, or "
        "scaled from a drafting method's table.",
        {
            "exit": ("exit", _TEXT),
            "draft_length": ("draft length", _TEXT),
            "threshold": ("threshold", str),
            "speedup": ("priced speedup", _TWO),
            "acceptance": ("r", _TWO),
            "mean_draft_length": ("mean draft length", _TWO),
            "costs": ("costs", _TEXT),
        },
    ),
    "repeatability": (
        "The same numbers twice?",
        "Runs of the same thing: do the intervals overlap?",
        {
            "run": ("run", _TEXT),
            "other_run": ("other run", _TEXT),
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "speedup": ("speedup", _TWO),
            "other_speedup": ("other speedup", _TWO),
            "overlap": ("overlap", lambda value: "yes" if value else "no"),
        },
    ),
    "comparison": (
        "All runs",
        "Ratio of totals over each run's baseline, all prompts.",
        {
            "run": ("run", _TEXT),
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "prompts": ("n", _TEXT),
            "tokens_per_second": ("tokens/s", _number(1)),
            "speedup": ("ratio of totals", _TWO),
            "low": ("from", _TWO),
            "high": ("to", _TWO),
            "mean_of_ratios": ("mean of ratios", _TWO),
        },
    ),
}
BRIEF = ("comparison", "repeatability", "speedup", "losslessness", "acceptance", "predictions")
"""Tables that the Markdown summary has."""
LONG = 16  # rows from which on a table is folded away

GLOSSARY = (
    ("target, draft", "The whole model, and the model with some sublayers left out."),
    ("round", "Draft some tokens, verify them in one target pass, emit those accepted and one of "
     "the target's own."),
    ("alpha", "Probability that one drafted token is accepted, each independent of the others."),
    ("r, acceptance rate", "Accepted / drafted tokens; falls with the draft length, as tokens "
     "behind a rejected one count as drafted."),
    ("mean acceptance length", "1 + accepted tokens / rounds that drafted: tokens per verify that "
     "followed a draft, the target's own included."),
    ("tokens per target pass", "Emitted tokens / rounds, those that drafted nothing included."),
    ("c", "Cost of one draft step / cost of one target step."),
    ("v(n)", "Cost of verifying n positions in one pass / cost of one target step."),
    ("bound", "1/c: what no draft can exceed, however often it is right."),
    ("efficiency", "Measured / predicted speedup."),
    ("plain", "This engine without drafting; generate: the transformers library's own decoding."),
    ("coupled", "Draft and target share their random noise, so that sampled text is the same "
     "whether one drafts or not."),
    ("near-tie", "A place where two scores differ by less than the arithmetic resolves, so that "
     "another order of sums may pick either."),
)  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --muted: #59636e;
  --line: #d1d9e0; --soft: #f4f6f8; --link: #0b5cad; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --muted: #a3acb7;
  --line: #3a424c; --soft: #1e2329; --link: #7ab7ff; --bad: #ff9b92; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: break-word; }
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
figure { margin: 0; min-width: 0; }
figure h3 { margin: 0 0 .4rem; font-size: 1.05rem; }
figure svg { display: block; width: 100%; height: auto; }
.box { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line);
  border-radius: .4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .65rem; text-align: right; white-space: nowrap; }
th.t, td.t { text-align: left; }
thead th { border-bottom: 1px solid var(--line); background: var(--soft); }
tbody tr + tr td { border-top: 1px solid var(--line); }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { white-space: pre-wrap; background: var(--soft); padding: .7rem; border-radius: .4rem;
  max-height: 18rem; overflow: auto; }
@media (max-width: 34rem) { .facts { grid-template-columns: 1fr; }
  .facts dd { margin-bottom: .4rem; } }
.glossary dt { font-weight: 600; } .glossary dd { margin: 0 0 .5rem; }
"""


def escape(text: str, *, lines: bool = False) -> str:
    """Text for HTML, elements and attributes."""
    return html.escape(visible(text, lines=lines), quote=True)


def escape_markdown(text: str) -> str:
    """Text for one line of Markdown, cells of tables included."""
    shown = visible(text)
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", shown).replace("://", "&#58;//")
    # what would begin a list or underline the line before
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", shown)


def page(title: str, sections: Sequence[Section], files: Sequence[str]) -> str:
    """The whole page: nothing outside it is needed to show it."""
    faults = [(s, text) for s in sections if s.verdict for text in s.verdict.faults]
    verdicts = [section for section in sections if section.verdict is not None]
    parts = [f"<h1>{escape(title)}</h1>"]
    for section, fault in faults:
        where = f"{section.title}: " if len(verdicts) > 1 else ""
        parts.append(f'<p class="lead fault">{escape(where + fault)}</p>')
    for section in verdicts:
        assert section.verdict is not None
        if len(verdicts) > 1:
            parts.append(f'<p><a href="#{section.slug}">{escape(section.title)}</a></p>')
        parts.append(f'<p class="lead">{escape(" ".join(section.verdict.result))}</p>')
        parts.append(f"<p>{escape(' '.join(section.verdict.reasons))}</p>")
        if section.verdict.advice:
            items = "".join(f"<li>{escape(text)}</li>" for text in section.verdict.advice)
            parts.append(f"<p>What to change:</p><ul>{items}</ul>")
    links = [(section.slug, section.title) for section in sections]
    links += [("words", "Words"), ("files", "Files")]
    items = "".join(f'<li><a href="#{slug}">{escape(name)}</a></li>' for slug, name in links)
    parts.append(f'<nav aria-label="Contents"><h2>Contents</h2><ul>{items}</ul></nav>')
    parts += [_section(section, number) for number, section in enumerate(sections)]
    terms = "".join(f"<dt>{escape(w)}</dt><dd>{escape(means)}</dd>" for w, means in GLOSSARY)
    parts.append(f'<section id="words"><h2>Words</h2><dl class="glossary">{terms}</dl></section>')
    items = "".join(f"<li>{escape(name)}</li>" for name in files)
    parts.append(
        '<section id="files"><h2>Files</h2><p>Made from the run files below. Beside this page lie '
        "<code>report.md</code>, every table as CSV in <code>tables/</code>, and every plot as PNG "
        f"and SVG in <code>plots/</code>.</p><ul>{items}</ul></section>"
    )
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def markdown(title: str, sections: Sequence[Section], files: Sequence[str]) -> str:
    """The same in brief: verdicts, the main tables, and the plots' words."""
    parts = [f"# {escape_markdown(title)}"]
    verdicts = [section for section in sections if section.verdict is not None]
    for section in verdicts:
        assert section.verdict is not None
        where = f"{escape_markdown(section.title)}: " if len(verdicts) > 1 else ""
        parts += [f"**{where}{escape_markdown(fault)}**" for fault in section.verdict.faults]
    for section in verdicts:
        assert section.verdict is not None
        if len(verdicts) > 1:
            parts.append(f"**{escape_markdown(section.title)}**")
        parts.append(escape_markdown(" ".join(section.verdict.result)))
        parts.append(escape_markdown(" ".join(section.verdict.reasons)))
        if section.verdict.advice:
            parts.append(_lines(f"- {escape_markdown(text)}" for text in section.verdict.advice))
    for section in sections:
        parts.append(f"## {escape_markdown(section.title)}")
        parts.append(
            _lines(
                f"- {escape_markdown(name)}: {escape_markdown(value)}"
                for name, value in section.facts
            )
        )
        for picture in section.pictures:
            alt = escape_markdown(picture.title)
            parts.append(f"![{alt}]({picture.name}.png)\n\n{escape_markdown(picture.alt)}")
        for table in section.tables:
            if table.name in BRIEF and len(table.frame):
                parts += _markdown_table(table)
    parts.append("## Words")
    parts.append(_lines(f"- **{word}**: {means}" for word, means in GLOSSARY))
    parts.append("## Files")
    parts.append(_lines(f"- {escape_markdown(name)}" for name in files))
    return "\n\n".join(part for part in parts if part) + "\n"


def inline_svg(svg: str, prefix: str, title: str, alt: str) -> str:
    """A file's SVG as an element of a page: own ids, the page's colours, a name and a description.

    Args:
        prefix: put before every id, as several drawings share a page.
    """
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # the style element would reach beyond its drawing; the root's attribute is inherited by all
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


def _section(section: Section, number: int) -> str:
    parts = [f'<section id="{section.slug}"><h2>{escape(section.title)}</h2>']
    if section.facts:
        facts = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in section.facts)
        parts.append(f'<dl class="facts">{facts}</dl>')
    if section.pictures:
        parts.append('<div class="pictures">')
        for index, picture in enumerate(section.pictures):
            drawing = inline_svg(picture.svg, f"s{number}p{index}-", picture.title, picture.alt)
            parts.append(
                f"<figure><h3>{escape(picture.title)}</h3>{drawing}<details><summary>In words"
                f"</summary><figcaption>{escape(picture.alt)}</figcaption></details></figure>"
            )
        parts.append("</div>")
    parts += [_shown(table) for table in section.tables if len(table.frame)]
    if section.texts:
        parts.append("<details><summary>Some of the texts</summary>")
        for name, prompt, text in section.texts:
            parts.append(
                f"<h3>{escape(name)}</h3><pre>{escape(prompt, lines=True)}</pre>"
                f"<pre>{escape(text, lines=True)}</pre>"
            )
        parts.append("</details>")
    parts.append("</section>")
    return "\n".join(parts)


def _shown(table: Table) -> str:
    """A table; of a long one the lines over all prompts, the whole of it folded away."""
    frame, title = table.frame, SHOWN[table.name][0]
    brief = frame[frame["category"] == ALL] if "category" in frame else frame.iloc[:0]
    if len(frame) <= max(LONG, len(brief)):
        return _html_table(table)
    head = _html_table(Table(table.name, brief)) if len(brief) else f"<h3>{escape(title)}</h3>"
    summary = f"<summary>{escape(title)}: all {len(frame)} rows</summary>"
    return f"{head}<details>{summary}{_html_table(table, heading=False)}</details>"


def _html_table(table: Table, *, heading: bool = True) -> str:
    title, note, _ = SHOWN[table.name]
    heads, rows = _cells(table)
    aligned = [' class="t"' if text else "" for _, text in heads]
    head = "".join(
        f'<th scope="col"{a}>{escape(h)}</th>' for (h, _), a in zip(heads, aligned, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{a}>{escape(c)}</td>" for c, a in zip(row, aligned, strict=True))
        + "</tr>"
        for row in rows
    )
    grid = (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    words = f'<p class="note">{escape(note)}</p>'
    return f"<h3>{escape(title)}</h3>{words}{grid}" if heading else grid


def _markdown_table(table: Table) -> list[str]:
    title, note, _ = SHOWN[table.name]
    heads, rows = _cells(table)
    lines = ["| " + " | ".join(escape_markdown(head) for head, _ in heads) + " |"]
    lines.append("|" + "|".join("---" if text else "---:" for _, text in heads) + "|")
    lines += ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows]
    return [f"### {title}", note, "\n".join(lines)]


def _cells(table: Table) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    """Headings, each with whether its column holds words, and rows as text; NaN is a dash."""
    shown = {name: how for name, how in SHOWN[table.name][2].items() if name in table.frame}
    columns = [table.frame[name].tolist() for name in shown]
    heads = [
        (head, any(isinstance(value, str) for value in column))
        for (head, _), column in zip(shown.values(), columns, strict=True)
    ]
    cells = [how for _, how in shown.values()]
    rows = [
        ["–" if pd.isna(value) else how(value) for how, value in zip(cells, row, strict=True)]  # noqa: RUF001
        for row in zip(*columns, strict=True)
    ]
    return heads, rows


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
