"""Flags that several `pdserve bench` commands share, and what they become.

Values are read by the owners of what they describe, whose messages name the flag and the limit. Imports little: help
must be fast.
"""

import argparse
import textwrap

from pdserve.loadtest.client.target import Api, Target, parse_url, read_api_key
from pdserve.loadtest.commands.load_flags import add_rare, read_load
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Promise, parse_promises
from pdserve.loadtest.options import parse_count, parse_number, parse_words

MAX_BUDGET_MIN = 10_000


class OneScreen(argparse.HelpFormatter):
    """Room for each option and its help on one line of 100 columns."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=100)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Whole words, since a flag is one."""
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def add_rate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", metavar="R", help="requests a second; inf: all at once (of a trace or steps: their own)"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    add("--slo", metavar="LIST", help="promises, e.g. ttft=2.0,tpot=0.06 (seconds; also second, gap, e2e)")
    add("--api", default="completions", choices=list(Api), help="chat: words, counted by the server or --tokenizer DIR")
    add_rare(parser, "--model", None, "NAME")
    add_rare(parser, "--api-key-file", None, "FILE")
    add_rare(parser, "--timeout-s", "300", "S")
    add_rare(parser, "--preflight", "1", "N")
    add_rare(parser, "--max-concurrency", "none", "N")
    # Client processes that share the requests: rarely more than one is needed.
    add_rare(parser, "--processes", "1", "N")


def add_selftest(parser: argparse.ArgumentParser) -> None:
    add_rare(parser, "--selftest", "on", "on|off")


def read_budget_min(args: argparse.Namespace) -> float:
    """Minutes that all runs together may take. Raises OptionError."""
    budget_min = parse_number("--budget", "", args.budget)
    if not 0 < budget_min <= MAX_BUDGET_MIN:
        raise OptionError(f"--budget {args.budget}: must be above 0 and at most {MAX_BUDGET_MIN} minutes")
    return budget_min


def read_up_flags(args: argparse.Namespace) -> list[str]:
    """The flags of `pdserve up` that were asked for: its model, and --up-flags. Raises OptionError."""
    return [*([] if args.model is None else ["--model", args.model]), *parse_words("--up-flags", args.up_flags)]


def read_selftest(args: argparse.Namespace) -> bool:
    """Whether the harness measures its own errors first, for the report to quote; that takes a second or two."""
    if args.selftest not in ("on", "off"):
        raise OptionError(f"--selftest {args.selftest}: must be on or off")
    return args.selftest == "on"


def read_target(args: argparse.Namespace) -> Target:
    max_concurrency = args.max_concurrency.strip().lower()
    return Target(
        url=parse_url(args.url),
        model=args.model,
        api=Api(args.api),
        timeout_s=parse_number("--timeout-s", "", args.timeout_s),
        max_concurrency=None if max_concurrency == "none" else parse_count("--max-concurrency", max_concurrency),
        preflight=parse_count("--preflight", args.preflight),
        api_key=None if args.api_key_file is None else read_api_key(args.api_key_file),
    )


def read_promises(args: argparse.Namespace) -> tuple[Promise, ...]:
    return () if args.slo is None else parse_promises(args.slo)


def read_config(args: argparse.Namespace) -> BenchConfig:
    return BenchConfig(
        target=read_target(args),
        load=read_load(args, args.rate),
        promises=read_promises(args),
        num_processes=parse_count("--processes", args.processes),
    )
