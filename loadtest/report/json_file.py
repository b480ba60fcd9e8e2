"""A finished run as a JSON file for programs, and back for `bench compare`.

The top level has `schema`, whose number changes whenever a field changes its meaning, then `slo_attainment`,
`goodput_per_s`, `valid`, and below them everything the run knew, each request included. A request carries its
derived values (`ttft_s`, `gaps_s`, `kept`, ...) for programs that do not know how they are made; reading makes
them anew.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pdserve.loadtest.errors import OptionError, ReportError
from pdserve.loadtest.measures.kept import broken_promises, is_kept
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record, parse_json
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.schema import decode, encode

SCHEMA = "pdserve.loadtest.run/2"

# Some 100 times a run of 1,000 requests with 64 tokens each; it only stops a file that is none of ours.
_MAX_FILE_BYTES = 1024 * 1024 * 1024
_DERIVED = (
    "lag_s",
    "ttft_s",
    "service_ttft_s",
    "second_token_s",
    "tpot_s",
    "gaps_s",
    "e2e_s",
    "service_e2e_s",
    "merged_tokens",
)


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON types, without the API key."""
    summary = report.summary
    target = dataclasses.replace(report.config.target, api_key=None)
    content = encode(dataclasses.replace(report, config=dataclasses.replace(report.config, target=target), records=()))
    del content["records"]
    return {
        "schema": SCHEMA,
        "slo_attainment": summary.slo_attainment,
        "goodput_per_s": summary.goodput_per_s,
        "valid": summary.validity.is_valid,
        **content,
        "requests": [_record_to_json(record, report.config.promises) for record in report.records],
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report, all of it or nothing, each part and each request on a line. Raises OSError."""
    content = to_json(report)
    requests = ",\n".join(json.dumps(request, allow_nan=False) for request in content.pop("requests"))
    head = "".join(f'"{name}": {json.dumps(value, allow_nan=False)},\n' for name, value in content.items())
    write_whole(path, f'{{{head}"requests": [\n{requests}\n]}}\n')


def read_content(path: Path) -> Any:
    """The JSON of a file. Raises ReportError naming the file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ReportError(f"{path}: has more than {_MAX_FILE_BYTES} bytes, which no report of ours has")
    try:
        return parse_json(content)
    except ValueError as error:
        raise ReportError(f"{path}: is not JSON: {error}") from None


def from_json(content: Any) -> Report:
    """The report of a file's content. Raises ReportError naming the first thing that does not fit."""
    if not isinstance(content, dict):
        raise ReportError("holds no run: its top level is not an object")
    schema = content.get("schema")
    if schema != SCHEMA:
        raise ReportError(
            f"schema: is {schema!r:.80}, this version reads {SCHEMA}; run the load again to compare with it"
        )
    if "requests" not in content:
        raise ReportError("requests: is missing")
    try:
        report: Report = decode(Report, {**content, "records": content["requests"]}, "run")
    except OptionError as error:
        # A load or a target checks itself, in the words of its flags.
        raise ReportError(f"holds a run that could not have been: {error}") from None
    if not report.records:
        raise ReportError("requests: is empty, such a run says nothing")
    return report


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there in full or as it was before. Raises OSError."""
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _record_to_json(record: Record, promises: tuple[Promise, ...]) -> dict[str, Any]:
    return {
        **encode(record),
        "kept": is_kept(record, promises),
        "broken": list(broken_promises(record, promises)),
        **{name: encode(getattr(record, name)) for name in _DERIVED},
    }
