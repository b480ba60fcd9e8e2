"""A finished run as Markdown, to paste into an issue or a page."""

import re
from pathlib import Path

from pdserve.loadtest.report.facts import describe_load, explain_invalid, gather_facts
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import Table, gather_tables

# What Markdown or the HTML within it could take for its own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def format_markdown(report: Report) -> str:
    target = report.config.target
    invalid = explain_invalid(report.summary)
    lines = [f"### {escape(report.model)} at {escape(target.url)}, {target.api}", ""]
    if invalid is not None:
        lines += [f"**{escape(invalid)}**", ""]
    lines += [escape(describe_load(report.config.load)), ""]
    lines += [f"- **{escape(fact.label)}**: {escape(fact.text)}" for fact in reversed(gather_facts(report))]
    for table in gather_tables(report):
        lines += ["", f"**{escape(table.title)}**", "", *format_table(table)]
    return "\n".join(lines) + "\n"


def write_markdown(report: Report, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    write_whole(path, format_markdown(report))


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
