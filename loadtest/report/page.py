"""One self-contained HTML page: numbers in large, figures, tables. It loads nothing, and its policy forbids it to.

page.html is the frame, filled by jinja2 with everything escaped; page.css the looks; page.js draws the figures with
plotly.js, which is part of the file, and follows the reader's light or dark. Called by run_page and search_page.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from pdserve.loadtest.report.figure import Figure
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.palette import DARK
from pdserve.loadtest.report.tables import Table

_UNITS = re.compile(r"(?<=[0-9]) (?=(%|s|ms|/s|tokens/s|requests/s)(?![a-z]))")


@dataclass(frozen=True, slots=True)
class Card:
    """A number in large. is_bad: it should worry the reader."""

    label: str
    value: str
    detail: str = ""
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: figures side by side as room allows, then tables."""

    title: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """verdict and warning are sentences above everything else, empty where there are none."""

    title: str
    subtitle: str
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]
    verdict: str = ""
    warning: str = ""
    notes: tuple[str, ...] = ()


def write_html(page: Page, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    write_whole(path, render(page))


def render(page: Page) -> str:
    """The page as HTML."""
    folder = resources.files(__package__)
    frame = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    frame.filters["tied"] = _tie_units
    template = frame.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    figures = [figure for section in page.sections for figure in section.figures]
    return template.render(
        page=page,
        figures=_as_script(figures),
        dark=Markup(json.dumps(DARK)),
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(folder.joinpath("page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
    )


def _as_script(figures: Sequence[Figure]) -> Markup:
    """The figures as JSON that may stand in a script element: nothing in it can end the element.

    Plotly escapes `<` by itself, but promises it nowhere.
    """
    parts = ",".join(f"{json.dumps(figure.name)}:{figure.plot.to_json(validate=False)}" for figure in figures)
    return Markup("{" + parts.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026") + "}")


def _tie_units(text: str) -> str:
    """The text without line breaks between numbers and their units."""
    return _UNITS.sub("\N{NO-BREAK SPACE}", text)
