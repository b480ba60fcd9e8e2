"""From settings to command-line flags: one flag a setting, all values read by the settings' own readers.

argparse only splits the line; what a value may be stands in cluster/config.py and nowhere else.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from pdserve.cluster.settings import Setting, did_you_mean

HELP_COLUMNS = 100


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and offers the nearest flag for one that does not exist.

    options: the group that all flags go to, shown without a heading
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.options = self.add_argument_group()

    def format_help(self) -> str:
        """No empty lines: help is to fit on one screen."""
        return super().format_help().replace("\n\n", "\n")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def parse_line(self, line: list[str]) -> argparse.Namespace:
        """Parse, or exit with code 2 naming the argument that does not belong here."""
        parsed, unknown = self.parse_known_args(line)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            word = unknown[0].split("=", 1)[0]
            self.error(f"unknown argument {word!r}{did_you_mean(word, flags)}")
        return parsed


def make_parser(prog: str, description: str, usage: str | None) -> Parser:
    parser = Parser(
        prog=prog,
        add_help=False,
        description=description,
        usage=usage,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=34, width=HELP_COLUMNS
        ),
    )
    # Everybody knows it, and lines are few.
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


def add_settings(parser: Parser, settings: Iterable[Setting]) -> None:
    """A flag for each setting; one that is not given stays None."""
    rare = []
    for item in settings:
        text = item.description
        if item.default is not None:
            text += f" (default: {item.reader.show(item.default)})"
        is_shown = not item.is_hidden and not item.is_rare
        text = text.replace("%", "%%") if is_shown else argparse.SUPPRESS
        parser.options.add_argument(item.flag, metavar=item.reader.metavar, help=text)
        if item.is_rare:
            rare.append(item.flag)
    if rare:
        text = f"rarely changed, see configs/: {' '.join(rare)}"
        parser.epilog = textwrap.fill(text, HELP_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def given(parsed: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, str]:
    """Text by setting name of the flags that were given."""
    texts = {item.name: getattr(parsed, item.name, None) for item in settings}
    return {name: text for name, text in texts.items() if text is not None}
