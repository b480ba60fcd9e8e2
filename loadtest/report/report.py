"""A finished run as a table for people and as JSON for programs.

The JSON's top level has `schema`, whose number changes whenever a field changes its meaning, then
`slo_attainment`, `goodput_per_s`, `valid`, and below them everything the run knew, each request included.
"""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.measures.distribution import Distribution
from pdserve.loadtest.measures.kept import broken_promises, is_kept
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.measures.summary import Summary
from pdserve.loadtest.workload.load import Load

SCHEMA = "pdserve.loadtest.run/1"

_ROWS = (
    ("ttft", "time to first token"),
    ("second", "time to second token"),
    ("tpot", "time per output token"),
    ("gap", "gap between tokens"),
    ("e2e", "end to end"),
    ("service_ttft", "first token, from actual send"),
    ("client_lag", "client lag"),
    ("loop_lag", "client loop lag"),
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine of the client, which is often the server's too."""

    platform: str
    python: str
    num_cpus: int
    load_average: float
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """One run. started_at is the time of day, for people; all other times are monotonic."""

    config: BenchConfig
    model: str
    started_at: datetime
    environment: Environment
    schedule_digest: str
    summary: Summary
    records: tuple[Record, ...]


def describe_environment() -> Environment:
    return Environment(
        platform=platform.platform(),
        python=platform.python_version(),
        num_cpus=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        packages={name: metadata.version(name) for name in ("pdserve", "aiohttp", "numpy")},
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON types."""
    summary = report.summary
    config = asdict(report.config)
    del config["target"]["api_key"]
    config["load"] = report.config.load.to_json()
    return {
        "schema": SCHEMA,
        "slo_attainment": summary.slo_attainment,
        "goodput_per_s": summary.goodput_per_s,
        "valid": summary.validity.is_valid,
        "model": report.model,
        "started_at": report.started_at.isoformat(timespec="seconds"),
        "schedule_digest": report.schedule_digest,
        "config": config,
        "environment": asdict(report.environment),
        "summary": asdict(summary),
        "requests": [_record_to_json(record, report.config.promises) for record in report.records],
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report, all of it or nothing, with one request a line. Raises OSError."""
    content = to_json(report)
    requests = ",\n".join(json.dumps(request, allow_nan=False) for request in content.pop("requests"))
    head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(f'{head},\n "requests": [\n{requests}\n]}}\n', encoding="ascii")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def format_report(report: Report) -> str:
    """The table that a run ends with."""
    summary, load, target = report.summary, report.config.load, report.config.target
    lines = [
        f"{report.model} at {target.url}, {target.api}",
        f"{load.num_requests} requests {_format_rate(load)}, seed {load.seed}, "
        f"{load.input_tokens} tokens in, {load.output_tokens} out",
        "",
        " " * 30 + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max", "mean")),
        *(_format_row(title, summary.latencies[name]) for name, title in _ROWS),
        "",
        f"complete    {_format_complete(summary)}",
        f"throughput  {summary.completed_per_s:.3g} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s "
        f"over {summary.duration_s:.1f} s",
    ]
    if summary.merged_tokens:
        lines.append(f"merged      {summary.merged_tokens} of {summary.output_tokens} tokens came in another's event")
    if summary.num_without_usage:
        lines.append(f"no usage    from {summary.num_without_usage} requests; their tokens are counted by events")
    lines.append(f"promise     {_format_promises(report.config.promises, summary)}")
    lines.append(f"goodput     {summary.goodput_per_s:.3g} requests/s kept every promise")
    if not summary.validity.is_valid:
        lines += [
            "",
            f"INVALID: the client was late by {format_seconds(summary.validity.lag_p99_s)} at p99, above "
            f"{format_seconds(summary.validity.max_lag_s)}. Free a core for it or lower --rate.",
        ]
    return "\n".join(lines)


def format_seconds(value: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1000, "ms"), (1, "s")):
        scaled = value * factor
        if scaled < 9.995:
            return f"{scaled:.2f} {unit}"
        if scaled < 99.95:
            return f"{scaled:.1f} {unit}"
        if scaled < 999.5:
            return f"{scaled:.0f} {unit}"
    return f"{value:.0f} s"


def _format_rate(load: Load) -> str:
    return "all at once" if math.isinf(load.rate_per_s) else f"at {load.rate_per_s:g}/s ({load.arrivals})"


def _format_row(title: str, values: Distribution | None) -> str:
    if values is None:
        return f"{title:<30}{'-':>10}"
    cells = (values.p50, values.p90, values.p99, values.max, values.mean)
    return f"{title:<30}" + "".join(f"{format_seconds(cell):>10}" for cell in cells)


def _format_complete(summary: Summary) -> str:
    text = f"{summary.num_complete} of {summary.num_requests}"
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items())
    return f"{text}; failed: {errors}" if errors else text


def _format_promises(promises: tuple[Promise, ...], summary: Summary) -> str:
    if not promises:
        return f"none given (--slo); {100 * summary.slo_attainment:.1f} % were complete"
    limits = ", ".join(f"{promise.measure} <= {format_seconds(promise.limit_s)}" for promise in promises)
    text = f"{limits}: kept by {100 * summary.slo_attainment:.1f} % of all requests"
    broken = ", ".join(f"{name} {count}" for name, count in summary.broken.items() if count)
    return f"{text} (broken: {broken})" if broken else text


def _record_to_json(record: Record, promises: tuple[Promise, ...]) -> dict[str, Any]:
    return {
        **asdict(record),
        "kept": is_kept(record, promises),
        "broken": broken_promises(record, promises) if record.is_complete else (),
        "lag_s": record.lag_s,
        "ttft_s": record.ttft_s,
        "service_ttft_s": record.service_ttft_s,
        "second_token_s": record.second_token_s,
        "tpot_s": record.tpot_s,
        "gaps_s": record.gaps_s,
        "e2e_s": record.e2e_s,
        "service_e2e_s": record.service_e2e_s,
        "merged_tokens": record.merged_tokens,
    }
