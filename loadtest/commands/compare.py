"""`pdserve bench compare`: two servers' answers to the same requests, from their files."""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_OK
from pdserve.loadtest.commands.outputs import read_outputs

if TYPE_CHECKING:
    from pdserve.loadtest.report.document import Document
    from pdserve.loadtest.report.pairing import Source

HELP = "say whether two runs, sweeps or searches differ, and by how much"
USAGE = "%(prog)s A.json B.json [options]"
DESCRIPTION = (
    "Compares files of run, replay, sweep or goodput request by request, where both sent the same schedule: ratios of "
    "percentiles with 95 % intervals. What is not comparable is refused by name."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", help="what a is compared with: the baseline")
    parser.add_argument("b", metavar="B.json", help="whose numbers are divided by a's")
    parser.add_argument("--json", metavar="FILE", help="write the comparison there")
    parser.add_argument("--markdown", metavar="FILE", help="and its tables there")
    parser.add_argument("--html", metavar="FILE", help="and a page with both servers' curves there")
    parser.set_defaults(csv=None)


def main(args: argparse.Namespace) -> int:
    outputs = read_outputs(args)

    # Not at the top: these load numpy, which help and other commands need not wait for.
    from pdserve.loadtest.report.comparison_document import compare, describe_comparison, write_comparison
    from pdserve.loadtest.report.markdown import write_document as write_markdown
    from pdserve.loadtest.report.pairing import Source
    from pdserve.loadtest.report.rates_report import read_runs
    from pdserve.loadtest.report.text import format_document

    a, b = (Source(name, read_runs(Path(name))) for name in (args.a, args.b))
    comparison = compare(a, b)
    document = describe_comparison(comparison, a, b)
    print(format_document(document))
    writers = {
        "json": functools.partial(write_comparison, comparison),
        "markdown": functools.partial(write_markdown, document),
        "html": functools.partial(_write_page, document, (a, b)),
    }
    outputs.write_with(writers)
    return EXIT_OK


def _write_page(document: "Document", sources: "Sequence[Source]", path: Path) -> None:
    # Plotly is an extra: only who wants a page needs it.
    from pdserve.loadtest.report.page import write_html
    from pdserve.loadtest.report.search_page import Searched, make_search_page

    # Two files may have the same name, and one file may be given twice.
    named = zip(("a", "b"), sources, strict=True)
    servers = [Searched(f"{letter}: {source.name}", None, source.runs[0], source.runs) for letter, source in named]
    write_html(make_search_page(document, servers, sources[0].runs[0].config.promises), path)
