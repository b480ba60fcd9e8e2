"""The page of a sweep or a goodput search: the curve, and a closer look at the run that its answer rests on.

Imports plotly.
"""

from pathlib import Path

from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.page import write_html
from pdserve.loadtest.report.rates_report import RatesReport, run_of, valid_runs
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.search_page import Searched, make_search_page
from pdserve.loadtest.search.attainment import cross, points_of


def write_rates_page(report: RatesReport, document: Document, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    share = report.result.rates[0].share
    server = Searched(report.runs[0].model, report.result, _choose(report, share), report.runs)
    write_html(make_search_page(document, [server], report.config.promises, share), path)


def _choose(report: RatesReport, share: float) -> Report:
    """The longest valid run at the highest rate that keeps the share, else at the lowest rate tried."""
    points = points_of([run_of(run) for run in report.runs])
    if not points:
        return report.runs[0]
    rate = cross(points, share).above or points[0].rate_per_s
    runs = [run for run in valid_runs(report.runs) if run.config.load.rate_per_s == rate]
    return max(runs, key=lambda run: len(run.records))
