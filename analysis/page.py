"""The report as one self-contained HTML page, by the template beside this file.

The template escapes all text. Invisible characters in records were replaced when they were read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from layerskip.analysis.drawing import Plot
from layerskip.analysis.labels import hardware, law_words, machine_words
from layerskip.analysis.run_tables import ENDS
from layerskip.analysis.verdict import Verdict
from layerskip.files.records import redacted


@dataclass(frozen=True)
class Section:
    """One run or search, all trainings, or all runs side by side.

    Attributes:
        kind: what `kind_of` calls the file of the subject.
        tables: by name. A CSV file contains all of each; the template says what the page shows.
    """

    title: str
    slug: str
    kind: str
    subject: Any
    verdict: Verdict | None
    pictures: Sequence[Plot]
    tables: Mapping[str, pd.DataFrame]


INTERVALS = ("speedup", "measured", "tokens_per_second")
"""The columns `low` and `high` are the interval of the first of these in a table."""
PLACES = ("batch_size", "category", "context")
"""Columns that locate a row; they are left out if they are the same in all rows."""

MOST = 24  # rows of a table on the page; all are in its CSV file


class Column(NamedTuple):
    """A column as shown; columns of words stand at the left."""

    heading: str
    words: bool
    cells: list[str]


def page(title: str, sections: Sequence[Section], files: Sequence[str]) -> str:
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["code"] = _with_code
    pages.globals |= {"columns_of": columns_of, "most": MOST, "redacted": redacted}
    pages.globals |= {each.__name__: each for each in (law_words, machine_words, hardware)}
    template = pages.get_template("page.html.j2")
    return template.render(title=title, sections=sections, files=files)


def _with_code(sentence: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))


def columns_of(names: str, frame: pd.DataFrame, headings: Mapping[str, str]) -> list[Column]:
    """These columns with their cells as text; NaN is a dash, and an interval follows its number.

    Columns without any value are left out, and location columns that are the same in all rows. A
    name that ends in * stands for all columns with that prefix.
    """
    wanted: list[str] = []
    for each in names.split():
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
        heading = headings.get(each, each.removeprefix("of ").replace("_", " "))
        columns.append(Column(heading, words, cells))
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
