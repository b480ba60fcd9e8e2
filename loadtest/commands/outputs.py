"""The files that a command writes its report to: --json, --html, --csv, --markdown.

Paths, and what a format needs, are checked before the run, so that a long one is not lost to a wrong path.
"""

import argparse
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.loadtest.errors import OptionError

if TYPE_CHECKING:
    from pdserve.loadtest.report.report import Report

FORMATS = ("json", "csv", "markdown", "html")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a report goes, by format."""

    paths: dict[str, Path]

    def write(self, report: "Report") -> None:
        """Write every file that was asked for. Raises OptionError naming the flag."""
        # Not at the top: these load numpy and, for a page, plotly.
        from pdserve.loadtest.report.csv_file import write_csv
        from pdserve.loadtest.report.json_file import write_json
        from pdserve.loadtest.report.markdown import write_markdown

        writers = {"json": write_json, "csv": write_csv, "markdown": write_markdown, "html": _write_page}
        self.write_with({name: functools.partial(write, report) for name, write in writers.items()})

    def write_with(self, writers: Mapping[str, Callable[[Path], None]]) -> None:
        """Write each format that was asked for with its writer. Raises OptionError naming the flag."""
        for name, path in self.paths.items():
            try:
                writers[name](path)
            except OSError as error:
                raise OptionError(f"--{name} {path}: {error.strerror}") from None


def add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the whole report there; --html FILE: a page; also --csv, --markdown")
    add("--html", metavar="FILE", help=argparse.SUPPRESS)
    add("--csv", metavar="FILE", help=argparse.SUPPRESS)
    add("--markdown", metavar="FILE", help=argparse.SUPPRESS)


def add_rates_outputs(parser: argparse.ArgumentParser) -> None:
    """For commands whose result is several runs."""
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the result with all runs there; --html FILE: a page; also --markdown")
    add("--html", metavar="FILE", help=argparse.SUPPRESS)
    add("--markdown", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(csv=None)


def read_outputs(args: argparse.Namespace) -> Outputs:
    """The files asked for. Raises OptionError for one that cannot be written."""
    paths = {name: _writable_path(f"--{name}", given) for name in FORMATS if (given := getattr(args, name)) is not None}
    if "html" in paths and importlib.util.find_spec("plotly") is None:
        raise OptionError(f"--html {paths['html']}: needs plotly, which comes with the extra `report`: pdserve[report]")
    return Outputs(paths)


def make_folder(flag: str, text: str) -> Path:
    """The folder for the files of many runs, made if need be. Raises OptionError naming the flag."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{flag} {text}: cannot be made a folder: {error.strerror}") from None
    return path


def _write_page(report: "Report", path: Path) -> None:
    # Plotly is an extra: only who wants a page needs it.
    from pdserve.loadtest.report.run_page import write_page

    write_page(report, path)


def _writable_path(flag: str, text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise OptionError(f"{flag} {text}: is a folder, needs a file name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OptionError(f"{flag} {text}: the folder {path.parent} does not exist or cannot be written to")
    return path
