"""What an ablation has found, as sentences and a table, and as JSON. The writers of documents set them."""

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pdserve.loadtest.deployment.layout import Layout
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.environment import Environment
from pdserve.loadtest.report.facts import Fact
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.tables import MISSING, Table
from pdserve.loadtest.report.units import format_rate, format_seconds, format_share
from pdserve.loadtest.search.ablation import Gain, Measure, Step, Unit

_FORMATS = {
    Unit.RATE: format_rate,
    Unit.SECONDS: format_seconds,
    Unit.COUNT: format_rate,
    Unit.SHARE: format_share,
}
SCHEMA = "pdserve.loadtest.ablation/1"


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """up_flags: of `pdserve up` in every run. folder: of logs and of each run's report. seed: of the first round."""

    steps: tuple[Step, ...]
    layout: Layout
    up_flags: tuple[str, ...]
    budget_s: float
    folder: Path
    seed: int = 0
    max_rounds: int = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """A step's gains by the title of their measure; is_valid: no run's client was late."""

    step: Step
    num_rounds: int
    gains: dict[str, Gain | None]
    is_valid: bool


@dataclass(frozen=True, slots=True)
class AblationReport:
    config: AblationConfig
    started_at: datetime
    environment: Environment
    elapsed_s: float
    measured: tuple[Measured, ...]


def describe_ablation(report: AblationReport) -> Document:
    """Sentences and tables, for a terminal and as Markdown."""
    invalid = [each.step.name for each in report.measured if not each.is_valid]
    return Document(
        heading=f"pdserve ({report.config.layout.name}) as it is, against itself without one step at a time",
        lead=(
            f"{report.environment.num_cpus} cores of {report.environment.cpu_model}, "
            f"{report.elapsed_s / 60:.1f} minutes, seeds from {report.config.seed}"
        ),
        tables=(_tabulate(report),),
        facts=tuple(_explain(each) for each in reversed(report.measured)),
        warning=(
            f"INVALID: {', '.join(invalid)}: the client was late, the runs' own reports say by how much"
            if invalid
            else None
        ),
    )


def _tabulate(report: AblationReport) -> Table:
    """One line a measure; the first of each step is the one that others report."""
    rows = []
    for each in report.measured:
        for index, measure in enumerate(each.step.measures):
            title = each.step.title if index == 0 else ""
            gain = each.gains[measure.title]
            cells = (MISSING,) * 3 if gain is None else _cells(measure, gain)
            rows.append((title, measure.title, *cells))
    return Table("What each step brings", ("step", "measure", "with", "without", "gain"), tuple(rows))


def _explain(measured: Measured) -> Fact:
    """What others report, and why it may be something else here."""
    step = measured.step
    runs = "one pair of runs" if measured.num_rounds == 1 else f"{measured.num_rounds} pairs of runs"
    return Fact(step.name, f"reported: {step.quoted} ({step.source}). Here ({runs}): {step.differs}.")


def write_json(report: AblationReport, path: Path) -> None:
    """Raises OSError."""
    write_whole(path, json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")


def to_json(report: AblationReport) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "started_at": report.started_at.isoformat(),
        "elapsed_s": report.elapsed_s,
        "environment": dataclasses.asdict(report.environment),
        "layout": report.config.layout.name,
        "up_flags": list(report.config.up_flags),
        "steps": [
            {
                "name": each.step.name,
                "before": list(each.step.before),
                "common": list(each.step.common),
                "environ": each.step.environ,
                "num_rounds": each.num_rounds,
                "valid": each.is_valid,
                "gains": {
                    title: None if gain is None else dataclasses.asdict(gain) for title, gain in each.gains.items()
                },
                "quoted": each.step.quoted,
                "source": each.step.source,
            }
            for each in report.measured
        ],
    }


def _cells(measure: Measure, gain: Gain) -> tuple[str, str, str]:
    show = _FORMATS[measure.unit]
    width = "" if gain.low == gain.high else f" ({gain.low:.2f}-{gain.high:.2f})"
    return show(gain.now), show(gain.before), f"{gain.factor:.2f}x{width}"
