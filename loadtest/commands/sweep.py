"""`pdserve bench sweep`: one load at one server, at each of several rates."""

import argparse

from pdserve.loadtest.commands.flags import add_selftest, add_target, read_promises, read_selftest, read_target
from pdserve.loadtest.commands.load_flags import add_load, add_rare, read_load
from pdserve.loadtest.commands.outputs import add_rates_outputs, read_outputs
from pdserve.loadtest.commands.series import Watch, add_units, carry_out, read_seeds, read_units, report_rates
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count, parse_number

HELP = "run the same load at several rates: what is kept and how fast, over the rate"
USAGE = "%(prog)s [--url URL] --rates R,R,... [options]"
DESCRIPTION = "Each rate is a run with its own seeds and preflight, so that no prompt is known from another rate."
MAX_RATES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", required=True, metavar="LIST", help="requests a second of each run, e.g. 0.5,1,1.5")
    add_load(parser)
    add_target(parser)
    add_selftest(parser)
    add_rates_outputs(parser)
    add_rare(parser, "--seeds", "1", "N")
    add_units(parser)


def main(args: argparse.Namespace) -> int:
    rates = parse_rates(args.rates)
    load = read_load(args, str(rates[0]))
    for rate in rates:
        load.at_rate(rate)
    config = BenchConfig(read_target(args), load, read_promises(args), parse_count("--processes", args.processes))
    num_seeds, units, outputs = read_seeds(args), read_units(args), read_outputs(args)
    tests_itself = read_selftest(args)

    # Not at the top: these load numpy, which help and other commands need not wait for.
    from pdserve.loadtest.report.rates_document import describe_sweep
    from pdserve.loadtest.series import Series, read_sweep

    watch = Watch()
    series = Series(config, watch.draw, watch.tell, tests_itself)
    code = carry_out(series, series.sweep(rates, num_seeds), watch)
    report = series.report(read_sweep(series.runs), units)
    report_rates(report, describe_sweep(report), outputs)
    return code


def parse_rates(text: str) -> tuple[float, ...]:
    """Read "0.5,1,1.5", ascending and each once."""
    rates = sorted({parse_number("--rates", "", part.strip()) for part in text.split(",")})
    if len(rates) > MAX_RATES:
        raise OptionError(f"--rates: has {len(rates)} rates, at most {MAX_RATES} can be measured")
    return tuple(rates)
