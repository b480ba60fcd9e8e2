"""A finished A/B, as its run hands it to whoever shows it; and its JSON file."""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.deployment.server import Server
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.report.environment import Environment
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.schema import encode
from pdserve.loadtest.search.answer import GoodputRate, GoodputResult
from pdserve.loadtest.search.conclusion import Conclusion
from pdserve.loadtest.search.diagnosis import Diagnosis
from pdserve.loadtest.search.runs import Run
from pdserve.loadtest.workload.load import Load

SCHEMA = "pdserve.loadtest.ab/1"


@dataclass(frozen=True, slots=True)
class AbConfig:
    """What is compared, with which load. target: its URL counts for nothing, nor does the load's rate.

    folder            for logs and the reports of single runs
    first_rate_per_s  None finds one by trying
    step              ratio of neighbouring rates
    max_runs          of each server
    """

    servers: tuple[Server, ...]
    target: Target
    load: Load
    promises: tuple[Promise, ...]
    budget_s: float
    folder: Path
    first_rate_per_s: float | None = None
    step: float = 1.1
    max_runs: int = 60


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server and what was found.

    strict     the rate at which 99 % keep every promise, as far as the same runs tell
    diagnosis  of the lowest rate above the one that was found, None where it failed none
    failure    why it could not be run any more
    """

    server: Server
    result: GoodputResult
    strict: GoodputRate
    runs: tuple[Run, ...]
    diagnosis: Diagnosis | None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class AbReport:
    """conclusion: split against colocated.

    is_finished: False where the budget, a failure or the user ended the search
    harness: its own error, None where it was not measured
    shown: by name a run at the rate that was found, or next below, for the page; in no file but its own
    """

    config: AbConfig
    started_at: datetime
    environment: Environment
    elapsed_s: float
    contestants: tuple[Contestant, ...]
    conclusion: Conclusion
    is_finished: bool
    harness: HarnessError | None = None
    shown: dict[str, Report] = field(default_factory=dict)


def to_json(report: AbReport) -> dict[str, Any]:
    """The report as plain JSON types, without the API key."""
    target = dataclasses.replace(report.config.target, api_key=None)
    content = encode(dataclasses.replace(report, config=dataclasses.replace(report.config, target=target), shown={}))
    del content["shown"]
    return {"schema": SCHEMA, "verdict": report.conclusion.headline, **content}


def write_json(report: AbReport, path: Path) -> None:
    """Write the report, all of it or nothing. Raises OSError."""
    write_whole(path, json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")
