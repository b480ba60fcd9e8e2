"""`pdserve bench selftest`: how exact the load test itself is on this machine."""

import argparse
import asyncio
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_NOT_EXACT, EXIT_OK
from pdserve.loadtest.config import MAX_PROCESSES
from pdserve.loadtest.options import check_count, parse_count

if TYPE_CHECKING:
    from pdserve.loadtest.measures.distribution import Distribution
    from pdserve.loadtest.measures.harness import HarnessError

HELP = "measure the load test's own errors against a server of known times"
USAGE = "%(prog)s [options]"
DESCRIPTION = (
    "Drives the mock, which has a core of its own where there are two, and compares both sides' times. stamp: the "
    "client's read of a token - the server's write of it. send: arrival at the server - the intended time. lag: the "
    "client's own lateness. Exit code 1 where one is above its limit. Let nothing else run meanwhile."
)

_COLUMNS = ("streams", "stamp p50", "p99", "max", "send p50", "p99", "max", "lag p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--processes", default="1", metavar="N", help="client processes that share the streams (1)")
    add("--limit", action="store_true", help="find how many streams at 50 tokens/s can be driven (about a minute)")


def main(args: argparse.Namespace) -> int:
    num_processes = parse_count("--processes", args.processes)
    check_count("--processes", num_processes, 1, MAX_PROCESSES)

    # Not at the top: these load aiohttp and numpy, which help and other commands need not wait for.
    from pdserve.loadtest.selftest import find_limit, measure_all

    print(_format_row(_COLUMNS))
    if args.limit:
        limit = asyncio.run(find_limit(num_processes, _show))
        print(f"{limit} streams at 50 tokens/s can be driven; a run with more would be INVALID")
        return EXIT_OK
    errors = asyncio.run(measure_all(num_processes, _show))
    return EXIT_OK if all(error.is_within_bars for error in errors) else EXIT_NOT_EXACT


def _show(error: "HarnessError") -> None:
    from pdserve.loadtest.report.units import format_seconds

    lag_p99_s = max(error.lags.p99, 0.0 if error.loop_lag is None else error.loop_lag.p99)
    times = (*_spread(error.stamps), *_spread(error.sends), lag_p99_s)
    row = _format_row((str(error.num_streams), *map(format_seconds, times)))
    print(f"{row}  {'; '.join(error.faults) or 'ok'}", flush=True)


def _spread(values: "Distribution") -> tuple[float, float, float]:
    return values.p50, values.p99, values.max


def _format_row(cells: tuple[str, ...]) -> str:
    return cells[0].ljust(7) + "".join(cell.rjust(10) for cell in cells[1:])
