"""Flags that several `pdserve bench` commands share, and what they become.

Values are read by the owners of what they describe, whose messages name the flag and the limit. Imports little: help
must be fast.
"""

import argparse

from pdserve.loadtest.client.target import Api, Target, parse_url, read_api_key
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.measures.promise import parse_promises
from pdserve.loadtest.options import parse_count, parse_number
from pdserve.loadtest.workload.arrivals import parse_arrivals
from pdserve.loadtest.workload.lengths import DrawnLengths, parse_span
from pdserve.loadtest.workload.load import Load, parse_vocabulary


class OneScreen(argparse.HelpFormatter):
    """Room for each option and its help on one line of 100 columns."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=100)


def add_load_and_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    add("--rate", required=True, metavar="R", help="requests a second; inf sends all at once")
    add(
        "--arrivals",
        default="poisson",
        metavar="P",
        help="poisson, constant, gamma:CV or steps:RATE@SECONDS,... (poisson)",
    )
    add("--num-requests", default="100", metavar="N", help="requests to measure (100)")
    add("--ramp", default="0.1", metavar="SHARE", help="unmeasured before and after them, as a share of N (0.1)")
    add("--input-tokens", default="256-768", metavar="A-B", help="prompt length, uniform, both included (256-768)")
    add("--output-tokens", default="32-96", metavar="A-B", help="exact output length, likewise (32-96)")
    add("--slo", metavar="LIST", help="promises, e.g. ttft=2.0,tpot=0.06 (seconds; also second, gap, e2e)")
    add("--seed", default="0", metavar="N", help="fixes times, lengths and prompts (0)")
    add("--model", metavar="NAME", help="model to ask for (the first that the server lists)")
    add("--api-key-file", metavar="FILE", help="the first key in it is sent to the server")
    add("--api", default="completions", choices=list(Api), help="chat sends words: its prompt lengths are rough")
    add("--vocab", default="100-30000", metavar="A-B", help="prompt ids, B not included (100-30000)")
    add("--timeout-s", default="300", metavar="S", help="longest wait for one request (300)")
    add("--preflight", default="1", metavar="N", help="unmeasured requests, one by one, before the run (1)")
    add("--max-concurrency", default="none", metavar="N", help="requests in flight at most (none: open loop)")
    # Client processes that share the requests: rarely more than one is needed, so it has no line of its own.
    add("--processes", default="1", help=argparse.SUPPRESS)
    add("--max-failed", default="0.05", metavar="SHARE", help="exit 1 above this share of failures (0.05)")


def read_config(args: argparse.Namespace) -> BenchConfig:
    max_concurrency = args.max_concurrency.strip().lower()
    return BenchConfig(
        target=Target(
            url=parse_url(args.url),
            model=args.model,
            api=Api(args.api),
            timeout_s=parse_number("--timeout-s", "", args.timeout_s),
            max_concurrency=None if max_concurrency == "none" else parse_count("--max-concurrency", max_concurrency),
            preflight=parse_count("--preflight", args.preflight),
            api_key=None if args.api_key_file is None else read_api_key(args.api_key_file),
        ),
        load=Load(
            rate_per_s=parse_number("--rate", "", args.rate),
            num_requests=parse_count("--num-requests", args.num_requests),
            lengths=DrawnLengths(
                parse_span("--input-tokens", args.input_tokens), parse_span("--output-tokens", args.output_tokens)
            ),
            arrivals=parse_arrivals(args.arrivals),
            ramp=parse_number("--ramp", "", args.ramp),
            seed=parse_count("--seed", args.seed),
            vocabulary=parse_vocabulary(args.vocab),
        ),
        promises=() if args.slo is None else parse_promises(args.slo),
        num_processes=parse_count("--processes", args.processes),
    )
