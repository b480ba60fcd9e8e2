"""What is reported, before it is set: a heading, sentences and tables, the same for a run, a search and an A/B.

`text.py` and `markdown.py` set it; whoever has something to report makes one. Pure.
"""

from dataclasses import dataclass

from pdserve.loadtest.report.facts import (
    Fact,
    describe_load,
    explain_invalid,
    gather_facts,
)
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import Table, gather_tables


@dataclass(frozen=True, slots=True)
class Document:
    """heading: what was measured; lead: with which load. facts: what matters most last. warning: None or a sentence."""

    heading: str
    lead: str
    tables: tuple[Table, ...]
    facts: tuple[Fact, ...]
    warning: str | None = None


def describe_run(report: Report) -> Document:
    target = report.config.target
    return Document(
        heading=f"{report.model} at {target.url}, {target.api}",
        lead=describe_load(report.config.load),
        tables=gather_tables(report),
        facts=gather_facts(report),
        warning=explain_invalid(report.summary),
    )
