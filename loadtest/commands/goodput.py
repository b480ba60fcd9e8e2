"""`pdserve bench goodput`: the highest rate at which one server keeps its promises."""

import argparse
import time
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.flags import add_selftest, add_target, read_promises, read_selftest, read_target
from pdserve.loadtest.commands.load_flags import VERDICT_NUM_REQUESTS, add_load, add_rare, read_searched_load
from pdserve.loadtest.commands.outputs import add_rates_outputs, read_outputs
from pdserve.loadtest.commands.series import Watch, add_units, carry_out, read_seeds, read_units, report_rates
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count, parse_number

if TYPE_CHECKING:
    from pdserve.loadtest.report.report import Report

HELP = "search the highest rate at which 90 %% (and 99 %%) of the requests keep every promise"
USAGE = "%(prog)s [--url URL] --slo LIST [--rate R] [options]"
DESCRIPTION = "Doubles or halves the rate from the first guess, then bisects; ends a run once it is clear."
# The verdict's default.
NUM_SEEDS = "3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", metavar="R", help="requests a second to begin with (1; of a trace its own)")
    add_load(parser, VERDICT_NUM_REQUESTS)
    add_target(parser)
    add_selftest(parser)
    add_rates_outputs(parser)
    add_rare(parser, "--seeds", NUM_SEEDS, "N")
    add_rare(parser, "--shares", "0.9,0.99", "LIST")
    add_rare(parser, "--tolerance", "0.05", "SHARE")
    add_rare(parser, "--budget-s", "inf", "S")
    add_units(parser)


def main(args: argparse.Namespace) -> int:
    promises = read_promises(args)
    if not promises:
        raise OptionError("--slo LIST: is needed, goodput is the rate at which promises are kept")
    load = read_searched_load(args)
    config = BenchConfig(read_target(args), load, promises, parse_count("--processes", args.processes))
    num_seeds, units, outputs = read_seeds(args), read_units(args), read_outputs(args)
    tests_itself = read_selftest(args)
    shares = tuple(parse_number("--shares", "", part.strip()) for part in args.shares.split(","))
    step = 1 + parse_number("--tolerance", "", args.tolerance)
    budget_s = parse_number("--budget-s", "", args.budget_s)
    if not budget_s > 0:
        raise OptionError(f"--budget-s {args.budget_s}: must be a number of seconds above 0")

    # Not at the top: these load numpy, which help and other commands need not wait for.
    from pdserve.loadtest.report.rates_document import describe_search, format_known
    from pdserve.loadtest.search.goodput import GoodputConfig, GoodputSearch
    from pdserve.loadtest.series import Series

    search = GoodputSearch(GoodputConfig(load.rate_per_s, shares, step, num_seeds, load.num_requests, load.seed))
    watch = Watch()

    def tell(report: "Report") -> None:
        watch.tell(report, format_known(search))

    series = Series(config, watch.draw, tell, tests_itself)
    ends_at = time.monotonic() + budget_s
    code = carry_out(series, series.search(search, lambda: ends_at - time.monotonic()), watch)
    if not series.runs:
        raise OptionError(f"--budget-s {args.budget_s}: is too short for one run of --num-requests {load.num_requests}")
    report = series.report(search.result(), units)
    report_rates(report, describe_search(report), outputs)
    return code
