"""`pdserve bench ab`: does splitting pay for this load on this machine, and at what ratio?"""

import argparse
import asyncio
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.loadtest.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_MEASURED, EXIT_OK
from pdserve.loadtest.commands.flags import (
    add_selftest,
    read_budget_min,
    read_promises,
    read_selftest,
    read_up_flags,
)
from pdserve.loadtest.commands.load_flags import VERDICT_NUM_REQUESTS, add_load, add_rare, read_searched_load
from pdserve.loadtest.commands.outputs import Outputs, add_outputs, make_folder, read_outputs
from pdserve.loadtest.deployment.cores import usable_cores
from pdserve.loadtest.deployment.layout import layouts, parse_ratios
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.options import parse_count, parse_number, parse_words

if TYPE_CHECKING:
    from pdserve.loadtest.ab import EndedRun
    from pdserve.loadtest.deployment.server import Server
    from pdserve.loadtest.report.ab_report import AbReport
    from pdserve.loadtest.report.progress import Progress

HELP = "split against colocated nodes over the same cores: which serves more, and at what ratio"
USAGE = "%(prog)s [--model DIR] [--slo LIST] [options]"
DESCRIPTION = "Serves in every layout of the cores, in turn; searches the highest rate each can promise."
DEFAULT_SLO = "ttft=2.0,tpot=0.06"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="the model to serve (the demo model)")
    add("--slo", default=DEFAULT_SLO, metavar="LIST", help=f"the promises, in seconds ({DEFAULT_SLO})")
    add("--budget", default="20", metavar="MIN", help="minutes for all of it (20)")
    add("--cores", metavar="N", help="cores to lay the nodes over, a node a core (all)")
    add("--ratios", metavar="LIST", help="prefill:decode nodes to try, e.g. 1:3,2:2 (all that fit, 5 at most)")
    add_load(parser, VERDICT_NUM_REQUESTS)
    add_outputs(parser)
    add_rare(parser, "--rate", None, "R")
    add_rare(parser, "--out", "results/ab", "DIR")
    add_rare(parser, "--up-flags", "", "'...'")
    add_rare(parser, "--server", None, "'NAME|URL|COMMAND'")
    add_rare(parser, "--tolerance", "0.1", "SHARE")
    add_selftest(parser)


def main(args: argparse.Namespace) -> int:
    if args.csv is not None:
        raise OptionError(f"--csv {args.csv}: an A/B has no table of requests; each run's is in --out {args.out}")
    promises = read_promises(args)
    budget_min = read_budget_min(args)
    outputs, tests_itself = read_outputs(args), read_selftest(args)
    servers = _servers(args)
    folder = make_folder("--out", args.out)

    # Not at the top: these load aiohttp and numpy, which help need not wait for.
    from pdserve.loadtest.ab import Ab
    from pdserve.loadtest.client.target import Target
    from pdserve.loadtest.report.ab_report import AbConfig
    from pdserve.loadtest.report.progress import ProgressLine

    # Not all of a trace: a run must fit into the budget many times.
    args.num_requests = args.num_requests or str(VERDICT_NUM_REQUESTS)
    load = read_searched_load(args)
    config = AbConfig(
        servers=servers,
        target=Target(servers[0].placed().url),
        load=load,
        promises=promises,
        budget_s=60 * budget_min,
        folder=folder,
        first_rate_per_s=None if args.rate is None else load.rate_per_s,
        step=1 + parse_number("--tolerance", "", args.tolerance),
    )
    line = ProgressLine(sys.stderr)

    def draw(name: str, rate_per_s: float, progress: "Progress") -> None:
        if sys.stderr.isatty():
            line.draw(progress, time.monotonic(), f"{name} at {rate_per_s:g}/s ")

    def tell(ended: "EndedRun") -> None:
        line.close()
        print(_describe(ended, budget_min), file=sys.stderr, flush=True)

    ab = Ab(config, draw, tell, tests_itself)
    code = EXIT_OK
    try:
        asyncio.run(ab.run())
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        line.close()
    report = ab.report()
    if report is None:
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        raise TargetError("no layout could be measured; the lines above say why, or raise --budget")
    if code == EXIT_INTERRUPTED:
        print("pdserve bench: interrupted; reported is what was measured until then", file=sys.stderr)
    _tell(report, outputs)
    has_failed = any(contestant.failure is not None for contestant in report.contestants)
    return EXIT_NOT_MEASURED if code == EXIT_OK and has_failed else code


def _tell(report: "AbReport", outputs: Outputs) -> None:
    """Print the report and write the files that were asked for."""
    from pdserve.loadtest.report.ab_document import describe_ab
    from pdserve.loadtest.report.ab_report import write_json
    from pdserve.loadtest.report.markdown import write_document
    from pdserve.loadtest.report.text import format_document

    document = describe_ab(report)
    print(format_document(document))
    outputs.write_with(
        {
            "json": functools.partial(write_json, report),
            "markdown": functools.partial(write_document, document),
            "html": functools.partial(_write_page, report),
        }
    )


def _write_page(report: "AbReport", path: Path) -> None:
    # Plotly is an extra: only who wants a page needs it.
    from pdserve.loadtest.report.ab_document import describe_ab
    from pdserve.loadtest.report.page import write_html
    from pdserve.loadtest.report.search_page import Searched, make_search_page

    servers = [
        Searched(contestant.server.name, contestant.result, report.shown.get(contestant.server.name))
        for contestant in report.contestants
    ]
    share = report.contestants[0].result.rates[0].share
    page = make_search_page(describe_ab(report), servers, report.config.promises, share, report.conclusion.headline)
    write_html(page, path)


def _servers(args: argparse.Namespace) -> tuple["Server", ...]:
    from pdserve.loadtest.deployment.server import LOOPBACK_URL, Server

    available = usable_cores()
    num_cores = len(available) if args.cores is None else parse_count("--cores", args.cores)
    if num_cores > len(available):
        raise OptionError(f"--cores {num_cores}: this machine lets us use {len(available)}")
    flags = [*_promised(args), *read_up_flags(args)]
    cores = available[:num_cores]
    servers = []
    for layout in layouts(num_cores, () if args.ratios is None else parse_ratios(args.ratios)):
        command = layout.up_command(LOOPBACK_URL, flags)
        servers.append(Server(layout.name, LOOPBACK_URL, command, cores, layout.num_nodes, layout.is_split))
    if args.server is not None:
        name, url, command = _parse_server(args.server)
        servers.append(Server(name, url, command, cores))
    return tuple(servers)


def _promised(args: argparse.Namespace) -> list[str]:
    """What `pdserve up` is told of the promises: it orders prompts and sizes chunks by them."""
    flags = {"ttft": "--ttft-s", "tpot": "--tpot-s"}
    limits = {str(promise.measure): promise.limit_s for promise in read_promises(args)}
    return [word for name, flag in flags.items() if name in limits for word in (flag, str(limits[name]))]


def _parse_server(text: str) -> tuple[str, str, tuple[str, ...]]:
    name, _, rest = text.partition("|")
    url, _, command = rest.partition("|")
    if not (name and url and command):
        raise OptionError(f"--server {text}: must be 'NAME|URL|COMMAND'")
    return name, url.rstrip("/"), tuple(parse_words("--server", command))


def _describe(ended: "EndedRun", budget_min: float) -> str:
    what = f"[{ended.elapsed_s / 60:4.1f} of {budget_min:g} min] {ended.name} at {ended.rate_per_s:g}/s: "
    run = ended.run
    if run is None:
        return f"{what}cannot be run any more: {ended.failure}"
    return f"{what}{sum(run.kept())} of {run.num_requests} kept every promise" + ("" if run.is_valid else ", INVALID")
