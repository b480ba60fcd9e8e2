"""`pdserve bench ablate`: what each step of the last years brings here, against the way before it."""

import argparse
import asyncio
import functools
import os
import sys
import time
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_OK
from pdserve.loadtest.commands.outputs import make_folder, read_outputs
from pdserve.loadtest.deployment.layout import Layout, parse_ratios
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count, parse_number, parse_words

if TYPE_CHECKING:
    from pdserve.loadtest.ablation import Ended
    from pdserve.loadtest.report.ablation_report import AblationReport
    from pdserve.loadtest.report.progress import Progress

HELP = "what batching, paging, prefix caching and chunking each bring, against the way before"
USAGE = "%(prog)s [--model DIR] [--only LIST] [options]"
DESCRIPTION = (
    "Starts pdserve as it is and with one older policy, in turn, on the same load, and prints the ratios beside "
    "those that the literature reports."
)
NAMES = ("batching", "paging", "prefix", "chunking")
MAX_BUDGET_MIN = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="the model to serve (the demo model)")
    add("--only", metavar="LIST", help=f"some of {','.join(NAMES)} (all)")
    add(
        "--budget",
        default="15",
        metavar="MIN",
        help="minutes; each step is measured once at least, then again and again (15)",
    )
    add("--nodes", default="2", metavar="N", help="nodes that do both, or P:D prefill and decode nodes (2)")
    add("--seed", default="0", metavar="N", help="fixes lengths and prompts of the first round (0)")
    add("--up-flags", default="", metavar="'...'", help="further flags of `pdserve up`, in every run")
    add("--out", default="results/ablate", metavar="DIR", help="logs and the report of each run (results/ablate)")
    add("--json", metavar="FILE", help="write the result there; likewise --markdown FILE")
    add("--markdown", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(html=None, csv=None)


def main(args: argparse.Namespace) -> int:
    outputs = read_outputs(args)
    budget_min = parse_number("--budget", "", args.budget)
    if not 0 < budget_min <= MAX_BUDGET_MIN:
        raise OptionError(f"--budget {args.budget}: must be above 0 and at most {MAX_BUDGET_MIN} minutes")
    names, layout, folder = _names(args.only), _layout(args.nodes), make_folder("--out", args.out)

    # Not at the top: these load aiohttp and numpy, which help need not wait for.
    from pdserve.loadtest.ablation import Ablation
    from pdserve.loadtest.report.ablation_report import AblationConfig, describe_ablation, write_json
    from pdserve.loadtest.report.markdown import write_document
    from pdserve.loadtest.report.progress import ProgressLine
    from pdserve.loadtest.report.text import format_document
    from pdserve.loadtest.search.ablation import STEPS

    config = AblationConfig(
        steps=tuple(step for step in STEPS if step.name in names),
        layout=layout,
        up_flags=(*([] if args.model is None else ["--model", args.model]), *parse_words("--up-flags", args.up_flags)),
        budget_s=60 * budget_min,
        folder=folder,
        seed=parse_count("--seed", args.seed),
    )
    line = ProgressLine(sys.stderr)

    def draw(name: str, progress: "Progress") -> None:
        if sys.stderr.isatty():
            line.draw(progress, time.monotonic(), f"{name} ")

    def tell(ended: "Ended") -> None:
        line.close()
        minutes = f"{ended.elapsed_s / 60:4.1f} of {budget_min:g} min"
        print(f"[{minutes}] {ended.name}: {ended.words}", file=sys.stderr, flush=True)

    try:
        report: AblationReport = asyncio.run(Ablation(config, draw, tell).run())
    finally:
        line.close()
    document = describe_ablation(report)
    print(format_document(document))
    outputs.write_with(
        {"json": functools.partial(write_json, report), "markdown": functools.partial(write_document, document)}
    )
    return EXIT_OK


def _names(text: str | None) -> tuple[str, ...]:
    names = NAMES if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in NAMES:
            raise OptionError(f"--only {text}: must be some of {','.join(NAMES)}")
    return names


def _layout(nodes: str) -> Layout:
    cores = len(os.sched_getaffinity(0))
    ratios = parse_ratios(nodes) if ":" in nodes else ((0, parse_count("--nodes", nodes)),)
    layout = Layout(*ratios[0], cores)
    is_split = ":" in nodes
    if len(ratios) > 1 or layout.num_decode < 1 or layout.is_split is not is_split or layout.num_nodes > cores:
        raise OptionError(f"--nodes {nodes}: must be N or P:D, a core for each, and we may use {cores} cores here")
    return layout
