"""What `sweep` and `goodput` share: flags, progress, and how a series is carried out and reported.

Imports little: help must be fast.
"""

import argparse
import asyncio
import functools
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_MEASURED, EXIT_OK
from pdserve.loadtest.commands.load_flags import add_rare
from pdserve.loadtest.commands.outputs import Outputs
from pdserve.loadtest.errors import LoadtestError, OptionError
from pdserve.loadtest.options import check_count, parse_count

if TYPE_CHECKING:
    from pdserve.loadtest.report.document import Document
    from pdserve.loadtest.report.progress import Progress
    from pdserve.loadtest.report.rates_report import RatesReport, Units
    from pdserve.loadtest.report.report import Report
    from pdserve.loadtest.series import Series

MAX_SEEDS = 1000
_UNITS = ("nodes", "cores", "gpus")
_MAX_UNITS = 1_000_000


def read_seeds(args: argparse.Namespace) -> int:
    num_seeds = parse_count("--seeds", args.seeds)
    check_count("--seeds", num_seeds, 1, MAX_SEEDS)
    return num_seeds


def add_units(parser: argparse.ArgumentParser) -> None:
    """What the server consists of, to tell its rate per each."""
    add_rare(parser, "--per", None, "LIST")


def read_units(args: argparse.Namespace) -> "Units":
    """Read "nodes=2,cores=4,gpus=1", or some of them."""
    from pdserve.loadtest.report.rates_report import Units

    counts: dict[str, int] = {}
    for part in () if args.per is None else args.per.split(","):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if name not in _UNITS or name in counts:
            raise OptionError(f"--per {args.per}: must be a list of NAME=N, each once, with {', '.join(_UNITS)}")
        counts[name] = parse_count("--per", count)
        check_count(f"--per {name}", counts[name], 1, _MAX_UNITS)
    return Units(**counts)


class Watch:
    """Tells on stderr how far a series is: a line that is redrawn while a run is under way, one that stays after it."""

    def __init__(self) -> None:
        from pdserve.loadtest.report.progress import ProgressLine

        self._line = ProgressLine(sys.stderr)
        self._is_drawn = sys.stderr.isatty()

    def draw(self, rate_per_s: float, progress: "Progress") -> None:
        if self._is_drawn:
            self._line.draw(progress, time.monotonic())

    def tell(self, report: "Report", known: str = "") -> None:
        from pdserve.loadtest.report.rates_document import format_run

        self._line.close()
        print(format_run(report) + known, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._line.close()


def carry_out(series: "Series", runs: Coroutine[None, None, None], watch: Watch) -> int:
    """Make the runs; returns the exit code. Raises what a run raises where there is no run to report."""
    try:
        asyncio.run(runs)
    except (LoadtestError, KeyboardInterrupt) as error:
        # What was measured until then is worth as much as it was.
        if not series.runs:
            raise
        watch.close()
        is_interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if is_interrupted else str(error)
        print(f"pdserve bench: {reason}; reported is what was measured until then", file=sys.stderr)
        return EXIT_INTERRUPTED if is_interrupted else EXIT_NOT_MEASURED
    finally:
        watch.close()
    return EXIT_OK


def report_rates(report: "RatesReport", document: "Document", outputs: Outputs) -> None:
    """Print the document and write the files that were asked for."""
    from pdserve.loadtest.report.markdown import write_document
    from pdserve.loadtest.report.rates_report import write_rates
    from pdserve.loadtest.report.text import format_document

    print(format_document(document))
    writers = {
        "json": functools.partial(write_rates, report),
        "markdown": functools.partial(write_document, document),
        "html": functools.partial(_write_page, report, document),
    }
    outputs.write_with(writers)


def _write_page(report: "RatesReport", document: "Document", path: Path) -> None:
    # Plotly is an extra: only who wants a page needs it.
    from pdserve.loadtest.report.rates_page import write_rates_page

    write_rates_page(report, document, path)
