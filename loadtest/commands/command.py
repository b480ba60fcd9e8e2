"""The command line of the load test: `bench run` and `bench mock`, mounted by the `pdserve` command.

Exit codes: 0 the run is reported (also when it is marked INVALID), 1 too many requests failed, 2 nothing
could be measured (a bad flag, no server, another model), 130 interrupted. Imports little: help must be fast.
"""

import argparse
import asyncio
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.loadtest.client.target import Api, Target, parse_url, read_api_key
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import LoadtestError, OptionError
from pdserve.loadtest.measures.promise import parse_promises
from pdserve.loadtest.options import parse_count, parse_number
from pdserve.loadtest.workload.load import Load, parse_span, parse_vocabulary

if TYPE_CHECKING:
    from pdserve.loadtest.report.report import Report

EXIT_OK = 0
EXIT_TOO_MANY_FAILED = 1
EXIT_NOT_MEASURED = 2
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the sub-commands `run` and `mock`; `main` takes what it then parses."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="run|mock")
    run_parser = commands.add_parser(
        "run",
        help="send a fixed load to a server and measure what its users would see",
        usage="%(prog)s [--url URL] --rate R [options]",
        description="Open loop: Poisson arrivals and unique prompts, fixed by the seed before the run.",
        formatter_class=_OneScreen,
    )
    _add_run_arguments(run_parser)
    mock_parser = commands.add_parser(
        "mock",
        help="a server of known times, to try the load test on",
        usage="%(prog)s [options]",
        description="Serves the streaming API with fixed times and meaningless text.",
        formatter_class=_OneScreen,
    )
    mock_parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    mock_parser.add_argument("--port", default="8001", metavar="N", help="port, 0 takes a free one (8001)")
    mock_parser.add_argument("--ttft-s", default="0.2", metavar="S", help="seconds to the first token (0.2)")
    mock_parser.add_argument("--gap-s", default="0.03", metavar="S", help="seconds between tokens (0.03)")


def main(args: argparse.Namespace) -> int:
    """Run the sub-command that was parsed; returns the exit code."""
    try:
        return _mock(args) if args.bench_command == "mock" else _run(args)
    except LoadtestError as error:
        print(f"pdserve bench: {error}", file=sys.stderr)
        return EXIT_NOT_MEASURED
    except KeyboardInterrupt:
        print("pdserve bench: interrupted, no report", file=sys.stderr)
        return EXIT_INTERRUPTED


class _OneScreen(argparse.HelpFormatter):
    """Room for each option and its help on one line of 100 columns."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=100)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    # Values are read by config.py, whose messages name the flag and the limit.
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    add("--rate", required=True, metavar="R", help="requests a second; inf sends all at once")
    add("--num-requests", default="100", metavar="N", help="requests to send (100)")
    add("--input-tokens", default="256-768", metavar="A-B", help="prompt length, uniform, both included (256-768)")
    add("--output-tokens", default="32-96", metavar="A-B", help="exact output length, likewise (32-96)")
    add("--slo", metavar="LIST", help="promises, e.g. ttft=2.0,tpot=0.06 (seconds; also second, gap, e2e)")
    add("--seed", default="0", metavar="N", help="fixes times, lengths and prompts (0)")
    add("--json", metavar="FILE", help="write the whole report there")
    add("--model", metavar="NAME", help="model to ask for (the first that the server lists)")
    add("--api-key-file", metavar="FILE", help="the first key in it is sent to the server")
    add("--api", default="completions", choices=list(Api), help="chat sends words: its prompt lengths are rough")
    add("--vocab", default="100-30000", metavar="A-B", help="prompt ids, B not included (100-30000)")
    add("--timeout-s", default="300", metavar="S", help="longest wait for one request (300)")
    add("--warmup", default="1", metavar="N", help="unmeasured requests before the run (1)")
    add("--max-concurrency", default="none", metavar="N", help="requests in flight at most (none: open loop)")
    add("--max-failed", default="0.05", metavar="SHARE", help="exit 1 above this share of failures (0.05)")


def _run(args: argparse.Namespace) -> int:
    config = _read_config(args)
    max_failed = parse_number("--max-failed", "", args.max_failed)
    if not 0 <= max_failed <= 1:
        raise OptionError(f"--max-failed {args.max_failed}: must be a share within 0 and 1")
    path = None if args.json is None else _writable_path(args.json)

    # Not at the top: these load aiohttp and numpy, which help and other commands need not wait for.
    from pdserve.loadtest.report.progress import Progress, ProgressLine
    from pdserve.loadtest.report.report import format_report, write_json
    from pdserve.loadtest.runner import ignore_progress, run

    line = ProgressLine(sys.stderr)

    def draw(progress: Progress) -> None:
        line.draw(progress, time.monotonic())

    try:
        report = asyncio.run(run(config, draw if sys.stderr.isatty() else ignore_progress))
    finally:
        line.close()
    print(format_report(report))
    if path is not None:
        try:
            write_json(report, path)
        except OSError as error:
            raise OptionError(f"--json {path}: {error.strerror}") from None
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


def _read_config(args: argparse.Namespace) -> BenchConfig:
    max_concurrency = args.max_concurrency.strip().lower()
    return BenchConfig(
        target=Target(
            url=parse_url(args.url),
            model=args.model,
            api=Api(args.api),
            timeout_s=parse_number("--timeout-s", "", args.timeout_s),
            max_concurrency=None if max_concurrency == "none" else parse_count("--max-concurrency", max_concurrency),
            warmup=parse_count("--warmup", args.warmup),
            api_key=None if args.api_key_file is None else read_api_key(args.api_key_file),
        ),
        load=Load(
            rate_per_s=parse_number("--rate", "", args.rate),
            num_requests=parse_count("--num-requests", args.num_requests),
            input_tokens=parse_span("--input-tokens", args.input_tokens),
            output_tokens=parse_span("--output-tokens", args.output_tokens),
            seed=parse_count("--seed", args.seed),
            vocabulary=parse_vocabulary(args.vocab),
        ),
        promises=() if args.slo is None else parse_promises(args.slo),
    )


def _writable_path(text: str) -> Path:
    """Checked before the run, so that a long one is not lost to a wrong path."""
    path = Path(text)
    if path.is_dir():
        raise OptionError(f"--json {text}: is a folder, needs a file name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OptionError(f"--json {text}: the folder {path.parent} does not exist or cannot be written to")
    return path


def _mock(args: argparse.Namespace) -> int:
    port = parse_count("--port", args.port)
    if not 0 <= port <= 65535:
        raise OptionError(f"--port {port}: must be within 0 and 65535")
    times = {}
    for flag, text in (("--ttft-s", args.ttft_s), ("--gap-s", args.gap_s)):
        times[flag] = parse_number(flag, "", text)
        if not (times[flag] >= 0 and math.isfinite(times[flag])):
            raise OptionError(f"{flag} {text}: must be a number of seconds, at least 0")

    from pdserve.loadtest.mock.server import Behaviour, MockServer

    async def serve() -> None:
        behaviour = Behaviour(first_token_s=times["--ttft-s"], gap_s=times["--gap-s"])
        try:
            async with MockServer([behaviour], host=args.host, port=port) as server:
                print(f"mock server at {server.url}  (Ctrl-C stops)", flush=True)
                await asyncio.Event().wait()
        except OSError as error:
            raise OptionError(f"--host {args.host} --port {port}: {error.strerror}") from None

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        return EXIT_OK
    return EXIT_OK
