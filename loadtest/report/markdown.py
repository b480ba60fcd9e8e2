"""What is reported, as Markdown, to paste into an issue or a page."""

import re
from collections.abc import Sequence
from pathlib import Path

from pdserve.loadtest.report.document import Document, describe_run
from pdserve.loadtest.report.facts import Fact
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import Table

# What Markdown or the HTML within it could take for its own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def format_markdown(report: Report) -> str:
    return format_document(describe_run(report))


def format_document(document: Document) -> str:
    """What matters most first, where a page begins."""
    lines = [f"### {escape(document.heading)}", ""]
    if document.warning is not None:
        lines += [f"**{escape(document.warning)}**", ""]
    lines += [escape(document.lead), ""]
    for fact, *more in reversed(_grouped(document.facts)):
        lines.append(f"- **{escape(fact.label)}**: {escape(fact.text)}")
        lines += [f"  - {escape(each.text)}" for each in more]
    for table in document.tables:
        lines += ["", f"**{escape(table.title)}**", "", *format_table(table)]
    return "\n".join(lines) + "\n"


def _grouped(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Each fact that has a label with those after it that have none."""
    groups: list[list[Fact]] = []
    for fact in facts:
        if fact.label or not groups:
            groups.append([])
        groups[-1].append(fact)
    return groups


def write_markdown(report: Report, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    write_document(describe_run(report), path)


def write_document(document: Document, path: Path) -> None:
    """Raises OSError, likewise."""
    write_whole(path, format_document(document))


def format_table(table: Table) -> list[str]:
    """The lines of a Markdown table: first column to the left, numbers to the right."""
    last = ":--" if table.ends_in_words else "--:"
    return [
        _row(table.header),
        "|" + "|".join([":--"] + ["--:"] * (len(table.header) - 2) + [last]) + "|",
        *(_row(row) for row in table.rows),
    ]


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"
