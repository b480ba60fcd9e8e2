"""A finished run as CSV, one line a request, for spreadsheets and data frames.

Times are seconds; what a request does not have is empty. Gaps and the server's ledger, which are lists, stand in
the JSON alone.
"""

import csv
import io
from collections.abc import Callable
from pathlib import Path

from pdserve.loadtest.measures.kept import broken_promises, is_kept
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.report import Report

_COLUMNS: dict[str, Callable[[Record], object]] = {
    "index": lambda record: record.index,
    "intended_s": lambda record: record.intended_s,
    "sent_s": lambda record: record.sent_s,
    "ended_s": lambda record: record.ended_s,
    "planned_input_tokens": lambda record: record.planned_input_tokens,
    "prompt_tokens": lambda record: record.prompt_tokens,
    "planned_output_tokens": lambda record: record.planned_output_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "merged_tokens": lambda record: record.merged_tokens,
    "lag_s": lambda record: record.lag_s,
    "ttft_s": lambda record: record.ttft_s,
    "service_ttft_s": lambda record: record.service_ttft_s,
    "second_token_s": lambda record: record.second_token_s,
    "tpot_s": lambda record: record.tpot_s,
    "max_gap_s": lambda record: max(record.gaps_s, default=None),
    "e2e_s": lambda record: record.e2e_s,
    "status": lambda record: record.status,
    "finish_reason": lambda record: record.finish_reason,
    "error": lambda record: record.error,
    "detail": lambda record: record.detail,
}


def write_csv(report: Report, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    write_whole(path, format_csv(report))


def format_csv(report: Report) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, "kept", "broken"])
    for record in report.records:
        cells = [_cell(read(record)) for read in _COLUMNS.values()]
        writer.writerow([*cells, *_verdict(record, report.config.promises)])
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    # A spreadsheet would run what a server could put here as a formula.
    return "'" + text if text[:1] in "=+-@" and isinstance(value, str) and text else text


def _verdict(record: Record, promises: tuple[Promise, ...]) -> tuple[str, str]:
    broken = broken_promises(record, promises) if record.is_complete else ()
    return ("1" if is_kept(record, promises) else "0"), " ".join(broken)
