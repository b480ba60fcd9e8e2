"""`pdserve bench ablate`: what each technique of the last years brings here, against the way before it."""

import argparse
import asyncio
import functools
import sys
import time
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_MEASURED, EXIT_OK
from pdserve.loadtest.commands.flags import add_selftest, read_budget_min, read_selftest, read_up_flags
from pdserve.loadtest.commands.outputs import make_folder, read_outputs
from pdserve.loadtest.deployment.cores import usable_cores
from pdserve.loadtest.deployment.layout import Layout, parse_ratios
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count

if TYPE_CHECKING:
    from pdserve.loadtest.ablation.ablation import Ablation, EndedHalf
    from pdserve.loadtest.report.progress import Progress, ProgressLine

HELP = "what batching, paging, prefix caching and chunking each bring, against the way before"
USAGE = "%(prog)s [--model DIR] [--only LIST] [options]"
DESCRIPTION = (
    "Starts pdserve as it is and with one older policy, in turn, on the same load, and prints the ratios beside "
    "those that the literature reports."
)
NAMES = ("batching", "paging", "prefix", "chunking")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="the model to serve (the demo model)")
    add("--only", metavar="LIST", help=f"some of {','.join(NAMES)} (all)")
    add(
        "--budget",
        default="15",
        metavar="MIN",
        help="minutes; each technique is measured once at least, then again (15)",
    )
    add("--nodes", default="2", metavar="N", help="nodes that do both, or P:D prefill and decode nodes (2)")
    add("--seed", default="0", metavar="N", help="fixes lengths and prompts of the first round (0)")
    add("--up-flags", default="", metavar="'...'", help="further flags of `pdserve up`, in every run")
    add("--out", default="results/ablate", metavar="DIR", help="logs and the report of each run (results/ablate)")
    add("--json", metavar="FILE", help="write the result there; likewise --markdown FILE")
    add("--markdown", metavar="FILE", help=argparse.SUPPRESS)
    add_selftest(parser)
    parser.set_defaults(html=None, csv=None)


def main(args: argparse.Namespace) -> int:
    outputs, tests_itself = read_outputs(args), read_selftest(args)
    budget_min = read_budget_min(args)
    names, layout, folder = _names(args.only), _layout(args.nodes), make_folder("--out", args.out)

    # Not at the top: these load aiohttp and numpy, which help need not wait for.
    from pdserve.loadtest.ablation.ablation import Ablation
    from pdserve.loadtest.ablation.techniques import TECHNIQUES
    from pdserve.loadtest.report.ablation_report import AblationConfig, describe_ablation, write_json
    from pdserve.loadtest.report.markdown import write_document
    from pdserve.loadtest.report.progress import ProgressLine
    from pdserve.loadtest.report.text import format_document

    config = AblationConfig(
        techniques=tuple(technique for technique in TECHNIQUES if technique.name in names),
        layout=layout,
        up_flags=tuple(read_up_flags(args)),
        budget_s=60 * budget_min,
        folder=folder,
        seed=parse_count("--seed", args.seed),
    )
    line = ProgressLine(sys.stderr)

    def draw(name: str, progress: "Progress") -> None:
        if sys.stderr.isatty():
            line.draw(progress, time.monotonic(), f"{name} ")

    def tell(ended: "EndedHalf") -> None:
        line.close()
        minutes = f"{ended.elapsed_s / 60:4.1f} of {budget_min:g} min"
        print(f"[{minutes}] {ended.name}: {ended.words}", file=sys.stderr, flush=True)

    ablation = Ablation(config, draw, tell, tests_itself)
    code = carry_out(ablation, line)
    report = ablation.report()
    document = describe_ablation(report)
    print(format_document(document))
    outputs.write_with(
        {"json": functools.partial(write_json, report), "markdown": functools.partial(write_document, document)}
    )
    return code


def carry_out(ablation: "Ablation", line: "ProgressLine") -> int:
    """Make the runs; returns the exit code. Raises what ends it before there is anything to report."""
    try:
        asyncio.run(ablation.run())
    except KeyboardInterrupt:
        # What was measured until then is worth as much as it was.
        if not any(each.num_pairs for each in ablation.report().measured):
            raise
        line.close()
        print("pdserve bench: interrupted; reported is what was measured until then", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        line.close()
    has_failed = any(each.failure is not None for each in ablation.report().measured)
    return EXIT_NOT_MEASURED if has_failed else EXIT_OK


def _names(text: str | None) -> tuple[str, ...]:
    names = NAMES if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in NAMES:
            raise OptionError(f"--only {text}: must be some of {','.join(NAMES)}")
    return names


def _layout(nodes: str) -> Layout:
    cores = len(usable_cores())
    ratios = parse_ratios(nodes) if ":" in nodes else ((0, parse_count("--nodes", nodes)),)
    layout = Layout(*ratios[0], cores)
    is_split = ":" in nodes
    if len(ratios) > 1 or layout.num_decode < 1 or layout.is_split is not is_split or layout.num_nodes > cores:
        raise OptionError(f"--nodes {nodes}: must be N or P:D, a core for each, and we may use {cores} cores here")
    return layout
