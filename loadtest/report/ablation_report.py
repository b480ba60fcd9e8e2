"""What an ablation has found, as a table and sentences, on a terminal, as Markdown and as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pdserve.loadtest.deployment.layout import Layout
from pdserve.loadtest.report.environment import Environment
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.markdown import escape
from pdserve.loadtest.report.markdown import format_table as format_markdown_table
from pdserve.loadtest.report.tables import MISSING, Fact, Table
from pdserve.loadtest.report.text import format_fact, format_table, wrap
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


def describe(report: AblationReport) -> str:
    """What was compared, in a sentence."""
    where = f"{report.environment.num_cpus} cores of {report.environment.cpu_model}"
    return (
        f"pdserve ({report.config.layout.name}) as it is against itself without one step at a time, on {where}, "
        f"{report.elapsed_s / 60:.1f} minutes"
    )


def tabulate(report: AblationReport) -> Table:
    """One line a measure; the first of each step is the one that is quoted."""
    rows = []
    for each in report.measured:
        for index, measure in enumerate(each.step.measures):
            title = each.step.title if index == 0 else ""
            gain = each.gains[measure.title]
            cells = (MISSING,) * 3 if gain is None else _cells(measure, gain)
            rows.append((title, measure.title, *cells))
    return Table("Ablation", ("step", "measure", "with", "without", "gain"), tuple(rows))


def gather(report: AblationReport) -> tuple[Fact, ...]:
    """Of each step: what others report, and why it may be something else here."""
    facts = []
    for each in report.measured:
        step = each.step
        runs = "one pair of runs" if each.num_rounds == 1 else f"{each.num_rounds} pairs of runs"
        invalid = "" if each.is_valid else " INVALID: the client was late, see the runs' own reports."
        facts.append(
            Fact(step.name, f"reported: {step.quoted} ({step.source}). Ours ({runs}): {step.differs}.{invalid}")
        )
    return tuple(facts)


def format_ablation(report: AblationReport) -> str:
    """Within 100 columns."""
    lines = [*wrap(describe(report)), "", *format_table(tabulate(report)), ""]
    for fact in gather(report):
        lines += format_fact(fact)
    return "\n".join(lines)


def write_markdown(report: AblationReport, path: Path) -> None:
    """Raises OSError."""
    lines = [f"### {escape(describe(report))}", "", *format_markdown_table(tabulate(report)), ""]
    lines += [f"- **{escape(fact.label)}**: {escape(fact.text)}" for fact in gather(report)]
    write_whole(path, "\n".join(lines) + "\n")


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
