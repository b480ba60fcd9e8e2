"""Flags and the progress that `sweep` and `goodput` share. Imports little: help must be fast."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.load_flags import add_rare
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count, parse_count

if TYPE_CHECKING:
    from pdserve.loadtest.report.progress import Progress
    from pdserve.loadtest.report.rates_report import Units
    from pdserve.loadtest.report.report import Report

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
