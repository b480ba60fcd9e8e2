"""The command line of the load test, mounted by the `pdserve` command: one module of this folder a sub-command.

Each has HELP, USAGE, DESCRIPTION, add_arguments(parser) and main(args) -> exit code. Imports little: help must be fast.
"""

import argparse
import sys
from types import ModuleType

from pdserve.loadtest.commands import ab, ablate, compare, goodput, mock, replay, run, selftest, sweep
from pdserve.loadtest.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_MEASURED
from pdserve.loadtest.commands.flags import OneScreen
from pdserve.loadtest.errors import LoadtestError

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "sweep": sweep,
    "goodput": goodput,
    "replay": replay,
    "compare": compare,
    "ab": ab,
    "ablate": ablate,
    "selftest": selftest,
    "mock": mock,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the sub-commands; `main` takes what it then parses."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, usage=module.USAGE, description=module.DESCRIPTION, formatter_class=OneScreen
        )
        module.add_arguments(command)


def main(args: argparse.Namespace) -> int:
    """Run the sub-command that was parsed; returns the exit code."""
    try:
        code: int = COMMANDS[args.bench_command].main(args)
    except LoadtestError as error:
        print(f"pdserve bench: {error}", file=sys.stderr)
        return EXIT_NOT_MEASURED
    except KeyboardInterrupt:
        print("pdserve bench: interrupted, no report", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code
