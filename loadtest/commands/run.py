"""`pdserve bench run`: one load at one server, once."""

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_OK, EXIT_TOO_MANY_FAILED
from pdserve.loadtest.commands.flags import add_rate, add_selftest, add_target, read_config, read_selftest
from pdserve.loadtest.commands.load_flags import add_load, add_rare
from pdserve.loadtest.commands.outputs import add_outputs, read_outputs
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_number

if TYPE_CHECKING:
    from pdserve.loadtest.report.report import Report

HELP = "send a fixed load to a server and measure what its users would see"
USAGE = "%(prog)s [--url URL] --rate R [options]"
DESCRIPTION = "Open loop: times and prompts are fixed by the seed before the run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rate(parser)
    add_load(parser)
    add_target(parser)
    add_rare(parser, "--max-failed", "0.05", "SHARE")
    add_selftest(parser)
    add_outputs(parser)


def main(args: argparse.Namespace) -> int:
    config = read_config(args)
    max_failed = parse_number("--max-failed", "", args.max_failed)
    if not 0 <= max_failed <= 1:
        raise OptionError(f"--max-failed {args.max_failed}: must be a share within 0 and 1")
    outputs = read_outputs(args)
    tests_itself = read_selftest(args)

    # Not at the top: these load aiohttp and numpy, which help and other commands need not wait for.
    from pdserve.loadtest.report.progress import Progress, ProgressLine
    from pdserve.loadtest.report.text import format_report
    from pdserve.loadtest.runner import ignore_progress, run
    from pdserve.loadtest.selftest import QUICK, measure

    line = ProgressLine(sys.stderr)

    def draw(progress: Progress) -> None:
        line.draw(progress, time.monotonic())

    async def measure_run() -> "Report":
        harness = await measure(QUICK, config.num_processes) if tests_itself else None
        return await run(config, draw if sys.stderr.isatty() else ignore_progress, harness=harness)

    try:
        report = asyncio.run(measure_run())
    finally:
        line.close()
    print(format_report(report))
    outputs.write(report)
    return _judge_failures(report, max_failed)


def _judge_failures(report: "Report", max_failed: float) -> int:
    failures = [record for record in report.records if not record.is_complete]
    if len(failures) <= max_failed * len(report.records):
        return EXIT_OK
    first = failures[0]
    print(
        f"pdserve bench: {len(failures)} of {len(report.records)} requests failed, above --max-failed {max_failed:g}; "
        f"the first: request {first.index}, {first.error}: {first.detail}",
        file=sys.stderr,
    )
    return EXIT_TOO_MANY_FAILED
