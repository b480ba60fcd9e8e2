"""What is reported, on a terminal: the tables and sentences that a run ends with, within 100 columns."""

import textwrap

from pdserve.loadtest.report.document import Document, describe_run
from pdserve.loadtest.report.facts import Fact
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import Table

WIDTH = 100
_LABEL_WIDTH = 12
_CELL_WIDTH = 10


def format_report(report: Report) -> str:
    return format_document(describe_run(report))


def format_document(document: Document) -> str:
    """Tables first, what matters most last, where a terminal ends."""
    lines = [*wrap(document.heading), *wrap(document.lead)]
    for table in document.tables:
        lines += ["", *format_table(table)]
    lines.append("")
    for fact in document.facts:
        lines += format_fact(fact)
    if document.warning is not None:
        lines += ["", *wrap(document.warning)]
    return "\n".join(lines)


def format_table(table: Table) -> list[str]:
    """Lines of at most WIDTH columns: numbers to the right, a last column of words to the left and cut."""
    cells = ((table.header[0] or table.title, *table.header[1:]), *table.rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
    lines = []
    for row in cells:
        line = row[0].ljust(max(widths[0], _LABEL_WIDTH))
        for column, cell in enumerate(row[1:], start=1):
            if table.ends_in_words and column == len(row) - 1:
                line += "  " + cell
            else:
                line += cell.rjust(max(widths[column] + 2, _CELL_WIDTH))
        lines.append(line.rstrip()[:WIDTH])
    return lines


def format_fact(fact: Fact) -> list[str]:
    return wrap(fact.label.ljust(_LABEL_WIDTH) + fact.text, " " * _LABEL_WIDTH)


def wrap(text: str, indent: str = "") -> list[str]:
    """Lines of at most WIDTH columns; a word that is longer, such as a path, is broken."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True)
