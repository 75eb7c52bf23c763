"""Knows how a report is laid out, as one HTML page; computes and draws nothing.

All text is escaped here. That of records has its invisible characters (line breaks, control and
bidirectional ones) as code points already, from when it was read.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerskip.analysis.canvas import INK, LINE, MUTED, PAPER
from layerskip.analysis.columns import LONG, SHOWN, Table, columns_of
from layerskip.analysis.tables import ALL
from layerskip.analysis.verdict import Verdict


@dataclass(frozen=True)
class Picture:
    """A plot as the page shows it."""

    title: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Section:
    """One run or search, a comparison of drafts, all trainings, or all runs side by side."""

    title: str
    slug: str
    facts: Mapping[str, str]
    verdict: Verdict | None
    pictures: Sequence[Picture]
    tables: Sequence[Table]


GLOSSARY = (
    ("target, draft", "The whole model, and the model with some sublayers left out."),
    ("sublayer", "One attention or one MLP block with its norms; a layer has one of each."),
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
    ("priced, forced", "What counted rounds would take by a table of costs, no clock involved; "
     "forced: without turning off a draft that does not pay."),
    ("overlap", "What two laws have in common, 1 - their total variation distance: the highest "
     "acceptance any accept rule can reach."),
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
figure { margin: 0; min-width: 0; max-width: 40rem; }
figure h3 { margin: 0 0 .4rem; font-size: 1.05rem; }
figure svg { display: block; width: 100%; height: auto; }
.box { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line);
  border-radius: .4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .65rem; text-align: right; white-space: nowrap; }
th.t, td.t { text-align: left; }
td.t { white-space: normal; min-width: 7rem; max-width: 18rem; }
td.t:first-child { min-width: 10rem; }
thead th { border-bottom: 1px solid var(--line); background: var(--soft); }
tbody tr + tr td { border-top: 1px solid var(--line); }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 34rem) { .facts { grid-template-columns: 1fr; }
  .facts dd { margin-bottom: .4rem; } }
.glossary dt { font-weight: 600; } .glossary dd { margin: 0 0 .5rem; }
"""


def escape(text: str) -> str:
    """Text for HTML, elements and attributes."""
    return html.escape(text, quote=True)


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
            parts.append(f"<p>What to do next:</p><ul>{items}</ul>")
    links = [(section.slug, section.title) for section in sections]
    links += [("words", "Words"), ("files", "Files")]
    items = "".join(f'<li><a href="#{slug}">{escape(name)}</a></li>' for slug, name in links)
    parts.append(f'<nav aria-label="Contents"><h2>Contents</h2><ul>{items}</ul></nav>')
    parts += [_section(section, number) for number, section in enumerate(sections)]
    terms = "".join(f"<dt>{escape(w)}</dt><dd>{escape(means)}</dd>" for w, means in GLOSSARY)
    parts.append(f'<section id="words"><h2>Words</h2><dl class="glossary">{terms}</dl></section>')
    items = "".join(f"<li>{escape(name)}</li>" for name in files)
    parts.append(
        '<section id="files"><h2>Files</h2><p>Made from the files below. Beside this page lie '
        "every table as CSV in <code>tables/</code> and every plot as SVG in <code>plots/</code>."
        f"</p><ul>{items}</ul></section>"
    )
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


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
        facts = "".join(
            f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in section.facts.items()
        )
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
    columns = columns_of(table)
    aligned = [' class="t"' if words else "" for _, words, _ in columns]
    head = "".join(
        f'<th scope="col"{a}>{escape(heading)}</th>'
        for a, (heading, _, _) in zip(aligned, columns, strict=True)
    )
    rows = zip(*(cells for _, _, cells in columns), strict=True)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{a}>{escape(cell)}</td>" for a, cell in zip(aligned, row, strict=True))
        + "</tr>"
        for row in rows
    )
    grid = (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    words = f'<p class="note">{escape(note)}</p>'
    return f"<h3>{escape(title)}</h3>{words}{grid}" if heading else grid
