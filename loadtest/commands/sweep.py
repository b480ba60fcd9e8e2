"""`pdserve bench sweep`: one load at one server, at each of several rates."""

import argparse
import asyncio
import functools
import sys

from pdserve.loadtest.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_MEASURED, EXIT_OK
from pdserve.loadtest.commands.flags import add_selftest, add_target, read_promises, read_selftest, read_target
from pdserve.loadtest.commands.load_flags import add_load, read_load
from pdserve.loadtest.commands.outputs import add_document_outputs, read_outputs
from pdserve.loadtest.commands.series_flags import Watch, add_units, read_seeds, read_units
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import LoadtestError, OptionError
from pdserve.loadtest.options import parse_count, parse_number

HELP = "run the same load at several rates: what is kept and how fast, over the rate"
USAGE = "%(prog)s [--url URL] --rates R,R,... [options]"
DESCRIPTION = "Each rate is a run with its own seeds and preflight, so that no prompt is known from another rate."
MAX_RATES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", required=True, metavar="LIST", help="requests a second of each run, e.g. 0.5,1,1.5")
    parser.add_argument("--seeds", default="1", metavar="N", help="runs at each rate, each with its own seed (1)")
    add_load(parser)
    add_target(parser)
    add_selftest(parser)
    add_document_outputs(parser)
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
    from pdserve.loadtest.report.markdown import write_document as write_markdown
    from pdserve.loadtest.report.rates_document import describe_sweep
    from pdserve.loadtest.report.rates_report import write_rates
    from pdserve.loadtest.report.text import format_document
    from pdserve.loadtest.series import Series, read_sweep

    watch = Watch()
    series = Series(config, watch.draw, watch.tell, tests_itself)
    code = EXIT_OK
    try:
        asyncio.run(series.sweep(rates, num_seeds))
    except (LoadtestError, KeyboardInterrupt) as error:
        # What was measured until then is worth as much as it was.
        if not series.runs:
            raise
        code = tell_cut_short(error)
    finally:
        watch.close()
    report = series.report(read_sweep(series.runs), units)
    document = describe_sweep(report)
    print(format_document(document))
    writers = {"json": functools.partial(write_rates, report), "markdown": functools.partial(write_markdown, document)}
    outputs.write_with(writers)
    return code


def tell_cut_short(error: BaseException) -> int:
    """Say why a series ended before its time; returns the exit code."""
    is_interrupted = isinstance(error, KeyboardInterrupt)
    reason = "interrupted" if is_interrupted else str(error)
    print(f"pdserve bench: {reason}; reported is what was measured until then", file=sys.stderr)
    return EXIT_INTERRUPTED if is_interrupted else EXIT_NOT_MEASURED


def parse_rates(text: str) -> tuple[float, ...]:
    """Read "0.5,1,1.5", ascending and each once."""
    rates = sorted({parse_number("--rates", "", part.strip()) for part in text.split(",")})
    if len(rates) > MAX_RATES:
        raise OptionError(f"--rates: has {len(rates)} rates, at most {MAX_RATES} can be measured")
    return tuple(rates)
