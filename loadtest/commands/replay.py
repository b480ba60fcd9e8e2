"""`pdserve bench replay`: what somebody's users sent, at one server, once."""

import argparse

from pdserve.loadtest.commands import run
from pdserve.loadtest.errors import OptionError

HELP = "send the requests of a published trace: its times, lengths and common prefixes"
USAGE = "%(prog)s [--url URL] --trace FILE [options]"
DESCRIPTION = "`run` with a trace: Azure's CSV, Mooncake's JSON lines, a table of lengths, or the same columns."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if args.trace is None:
        raise OptionError("--trace FILE: is needed; without a trace use `pdserve bench run`")
    return run.main(args)
