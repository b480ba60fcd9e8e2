"""A finished run, as the runner hands it to whoever shows it: text, JSON, CSV, Markdown and the page."""

from dataclasses import dataclass
from datetime import datetime

from pdserve.loadtest.client.gauges import GaugeSample
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.measures.summary import Summary
from pdserve.loadtest.report.environment import Environment


@dataclass(frozen=True, slots=True)
class Report:
    """One run. started_at is the time of day, for people; all other times are monotonic.

    gauges  what the server said of its own nodes during the run; empty for servers that do not
    harness what the load test itself got wrong in a self-test just before; None where there was none
    notes   what is rough, capped or left out in this run, a sentence each
    """

    config: BenchConfig
    model: str
    started_at: datetime
    environment: Environment
    schedule_digest: str
    summary: Summary
    records: tuple[Record, ...]
    gauges: tuple[GaugeSample, ...] = ()
    notes: tuple[str, ...] = ()
    harness: HarnessError | None = None
