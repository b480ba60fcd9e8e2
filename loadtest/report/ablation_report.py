"""What an ablation has found, as sentences and a table, and as JSON. The writers of documents set them."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pdserve.loadtest.ablation.readings import Gain, Reading, Unit
from pdserve.loadtest.ablation.techniques import Technique
from pdserve.loadtest.deployment.layout import Layout
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.environment import Environment
from pdserve.loadtest.report.facts import Fact, describe_harness
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.schema import encode
from pdserve.loadtest.report.tables import MISSING, Table
from pdserve.loadtest.report.units import format_rate, format_seconds, format_share

_FORMATS = {
    Unit.RATE: format_rate,
    Unit.SECONDS: format_seconds,
    Unit.COUNT: format_rate,
    Unit.SHARE: format_share,
}
SCHEMA = "pdserve.loadtest.ablation/2"


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """up_flags: of `pdserve up` in every run. folder: of logs and of each run's report. seed: of the first round."""

    techniques: tuple[Technique, ...]
    layout: Layout
    up_flags: tuple[str, ...]
    budget_s: float
    folder: Path
    seed: int = 0
    max_rounds: int = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """A technique's gains by the title of their reading, over num_pairs pairs of runs.

    late_runs  names of the runs whose client was late
    failure    what ended its measurement; None where nothing did
    """

    technique: Technique
    num_pairs: int
    gains: dict[str, Gain | None]
    late_runs: tuple[str, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class AblationReport:
    """harness: what the load test itself got wrong in a self-test just before; None where there was none."""

    config: AblationConfig
    started_at: datetime
    environment: Environment
    elapsed_s: float
    measured: tuple[Measured, ...]
    harness: HarnessError | None = None


def describe_ablation(report: AblationReport) -> Document:
    """Sentences and tables, for a terminal and as Markdown."""
    return Document(
        heading=f"pdserve ({report.config.layout.name}) as it is, against itself without one technique at a time",
        lead=(
            f"{report.environment.num_cpus} cores of {report.environment.cpu_model}, "
            f"{report.elapsed_s / 60:.1f} min, seeds from {report.config.seed}"
        ),
        tables=(_tabulate(report),),
        facts=(
            Fact("harness", describe_harness(report.harness)),
            *(_explain(each) for each in reversed(report.measured)),
        ),
        warning=_warn(report),
    )


def _warn(report: AblationReport) -> str | None:
    """What of it is not to be believed, or not there."""
    late = [name for each in report.measured for name in each.late_runs]
    warnings = [f"{each.technique.name} failed: {each.failure}" for each in report.measured if each.failure]
    if late:
        warnings.append(f"INVALID: {', '.join(late)}: the client was late, the runs' own reports say by how much")
    return "; ".join(warnings) or None


def _tabulate(report: AblationReport) -> Table:
    """One line a reading; the first of each technique is the one that others report."""
    rows = []
    for each in report.measured:
        for index, reading in enumerate(each.technique.readings):
            title = each.technique.title if index == 0 else ""
            gain = each.gains[reading.title]
            cells = (MISSING,) * 3 if gain is None else _cells(reading, gain)
            rows.append((title, reading.title, *cells))
    return Table("What each technique brings", ("technique", "reading", "with", "without", "gain"), tuple(rows))


def _cells(reading: Reading, gain: Gain) -> tuple[str, str, str]:
    show = _FORMATS[reading.unit]
    width = "" if gain.low == gain.high else f" ({gain.low:.2f}-{gain.high:.2f})"
    return show(gain.now), show(gain.before), f"{gain.factor:.2f}x{width}"


def _explain(measured: Measured) -> Fact:
    """What others report, and why it may be something else here."""
    technique = measured.technique
    runs = {0: "not measured", 1: "one pair of runs"}.get(measured.num_pairs, f"{measured.num_pairs} pairs of runs")
    return Fact(
        technique.name,
        f"reported: {technique.quoted} ({technique.source}). Here ({runs}): {technique.differs}.",
    )


def write_json(report: AblationReport, path: Path) -> None:
    """Raises OSError."""
    write_whole(path, json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")


def to_json(report: AblationReport) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "started_at": report.started_at.isoformat(),
        "elapsed_s": report.elapsed_s,
        "environment": encode(report.environment),
        "harness": encode(report.harness),
        "layout": report.config.layout.name,
        "up_flags": list(report.config.up_flags),
        "techniques": [
            {
                "name": each.technique.name,
                "before": list(each.technique.before),
                "common": list(each.technique.common),
                "environ": each.technique.environ,
                "num_pairs": each.num_pairs,
                "late_runs": list(each.late_runs),
                "failure": each.failure,
                "gains": encode(each.gains),
                "quoted": each.technique.quoted,
                "source": each.technique.source,
                "differs": each.technique.differs,
            }
            for each in report.measured
        ],
    }
