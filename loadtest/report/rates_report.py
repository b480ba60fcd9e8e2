"""What a sweep or a goodput search of one server found, with all of its runs; and its JSON file.

The file has `schema`, the result, and below `runs` what each run's own file would hold. Called by the commands
`sweep`, `goodput` and `compare`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError, ReportError
from pdserve.loadtest.report import json_file
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.schema import decode, encode
from pdserve.loadtest.search.answer import GoodputResult
from pdserve.loadtest.search.runs import Run, read_run

SCHEMA = "pdserve.loadtest.rates/1"


@dataclass(frozen=True, slots=True)
class Units:
    """What the server consists of, to tell its rate per each; None where it was not said."""

    nodes: int | None = None
    cores: int | None = None
    gpus: int | None = None

    def named(self) -> tuple[tuple[str, int], ...]:
        """Those that are known, in the singular."""
        every = (("node", self.nodes), ("core", self.cores), ("GPU", self.gpus))
        return tuple((name, count) for name, count in every if count is not None)


@dataclass(frozen=True, slots=True)
class RatesReport:
    """config has the load as asked for; each run has its own rate and seed. There is at least one run."""

    config: BenchConfig
    runs: tuple[Report, ...]
    result: GoodputResult
    units: Units = Units()


def run_of(report: Report) -> Run:
    """A run as the search knows it."""
    load = report.config.load
    return read_run(
        load.rate_per_s,
        load.seed,
        load.num_warm_up,
        report.records,
        report.config.promises,
        report.summary.validity.is_valid,
    )


def valid_runs(runs: Sequence[Report]) -> tuple[Report, ...]:
    """Those that decide something."""
    return tuple(report for report in runs if report.summary.validity.is_valid)


def write_rates(report: RatesReport, path: Path) -> None:
    """Write the report, all of it or nothing, with one run a line. Raises OSError."""
    config = replace(report.config, target=replace(report.config.target, api_key=None))
    head = {
        "schema": SCHEMA,
        "result": encode(report.result),
        "units": encode(report.units),
        "config": encode(config),
    }
    runs = ",\n".join(json.dumps(json_file.to_json(run), allow_nan=False) for run in report.runs)
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    json_file.write_whole(path, f'{text},\n "runs": [\n{runs}\n]}}\n')


def rates_from_json(content: dict[str, Any]) -> RatesReport:
    """The report of a file's content. Raises ReportError naming the first thing that does not fit."""
    runs = content.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ReportError("runs: must be a list of at least one run")
    read = []
    for i, run in enumerate(runs):
        try:
            read.append(json_file.from_json(run))
        except ReportError as error:
            raise ReportError(f"runs[{i}]: {error}") from None
    try:
        return RatesReport(
            decode(BenchConfig, content.get("config"), "config"),
            tuple(read),
            decode(GoodputResult, content.get("result"), "result"),
            decode(Units, content.get("units"), "units"),
        )
    except OptionError as error:
        raise ReportError(f"holds a load that could not have been: {error}") from None


def read_runs(path: Path) -> tuple[Report, ...]:
    """The runs in a file of `run`, `replay`, `sweep` or `goodput`. Raises ReportError naming the file."""
    content = json_file.read_content(path)
    try:
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            return rates_from_json(content).runs
        return (json_file.from_json(content),)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None
