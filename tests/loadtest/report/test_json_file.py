import json
import math
from dataclasses import replace

import pytest

from pdserve.loadtest.client.gauges import GaugeSample, NodeSample
from pdserve.loadtest.errors import ReportError
from pdserve.loadtest.report.json_file import from_json, to_json, write_json, write_whole
from pdserve.loadtest.report.rates_report import read_runs
from pdserve.loadtest.workload.arrivals import Gamma, Replay, Step, Steps
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.trace import Trace, TraceRequest
from tests.loadtest.report.runs import MIXED, make_harness, make_report
from tests.loadtest.samples import make_config, make_load

GAUGES = (GaugeSample(0.5, 3, (NodeSample("P0", "prefill", 1, 2, 300, 10, 20, 30, 4),)),)


def test_json_has_its_schema_and_the_verdict_at_the_top():
    content = to_json(make_report())
    assert content["schema"] == "pdserve.loadtest.run/2"
    assert content["slo_attainment"] == 1 / 3
    assert content["goodput_per_s"] == 1 / 4
    assert content["valid"] is True


def test_a_late_client_is_marked_at_the_top():
    assert to_json(make_report(loop_lags_s=[[0.2] * 10]))["valid"] is False


def test_json_has_every_request_with_its_measures_and_verdict():
    requests = to_json(make_report())["requests"]
    assert [(request["index"], request["kept"], request["broken"]) for request in requests] == [
        (0, True, []),
        (1, False, ["ttft"]),
        (2, False, []),
    ]
    assert requests[0]["gaps_s"] == [0.25]
    assert requests[2]["error"] == "timeout"


def test_what_is_written_is_read_back_the_same(tmp_path):
    path = tmp_path / "run.json"
    record = replace(MIXED[0], server_metrics={"plan": "split", "queue_s": 0.001})
    report = make_report(
        (record, *MIXED[1:]), rate_per_s=math.inf, gauges=GAUGES, notes=("rough",), harness=make_harness()
    )
    write_json(report, path)
    assert read_runs(path) == (report,)


@pytest.mark.parametrize("arrivals", [Gamma(2.5), Steps((Step(1.0, 30.0), Step(4.0, 5.0))), Replay((0.0, 0.25, 7.5))])
def test_every_kind_of_arrivals_is_read_back_the_same(arrivals):
    report = make_report(config=make_config("http://h:1", make_load(2.0, 3, arrivals=arrivals)))
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


def test_a_replayed_trace_is_read_back_the_same():
    requests = tuple(TraceRequest(10 + i, 3, at_s=0.5 * i, block_ids=(1, i)) for i in range(3))
    trace = Trace("t.jsonl", requests, length_scale=0.25, max_tokens=64)
    load = Load(trace.arrivals.own_rate_per_s, 3, trace, trace.arrivals)
    report = make_report(config=make_config("http://h:1", load))
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


def test_the_file_is_standard_json_even_for_an_infinite_rate(tmp_path):
    path = tmp_path / "run.json"
    write_json(make_report(rate_per_s=math.inf), path)
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(content["requests"]) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_the_api_key_is_in_no_file(tmp_path):
    path = tmp_path / "run.json"
    write_json(make_report(target={"api_key": "secret-key"}), path)
    assert "secret-key" not in path.read_text()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "run.json"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(OSError, match="directory"):
        write_json(make_report(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_what_cannot_be_encoded_leaves_no_part_of_a_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "run.csv", "half a character: \ud800")
    assert list(tmp_path.iterdir()) == []


def change(content, place, value):
    """Set the value at a place like "requests.0.sent_s"."""
    *path, last = (int(name) if name.isdigit() else name for name in place.split("."))
    for name in path:
        content = content[name]
    content[last] = value


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("schema", "pdserve.loadtest.run/1", r"schema: is 'pdserve.loadtest.run/1', this version reads .*/2"),
        ("schema", None, "schema: is None"),
        ("requests", {}, r"run.records: is \{\}, must be a list"),
        ("requests", [], "requests: is empty"),
        ("requests.1", 7, r"run.records\[1\]: is 7, must be an object"),
        ("requests.0.sent_s", "soon", r"run.records\[0\].sent_s: is 'soon', must be a number"),
        ("requests.0.sent_s", True, r"run.records\[0\].sent_s: is True, must be a number"),
        ("requests.0.sent_s", 10**400, r"run.records\[0\].sent_s: is a number too large"),
        ("requests.0.output_tokens", 1.5, r"output_tokens: is 1.5, must be a whole number"),
        ("requests.0.token_times_s", [0.5, None], r"token_times_s\[1\]: is None"),
        ("requests.0.error", 5, r"error: is 5, must be text"),
        ("config.target.api", "telnet", r"api: is 'telnet', must be one of completions, chat"),
        ("config.target.url", "ftp://x", r"could not have been: --url ftp://x"),
        ("config.load.arrivals.kind", "Tidal", r"arrivals.kind: is 'Tidal', must be one of Constant, Gamma, Poisson"),
        ("started_at", "yesterday", r"started_at: is 'yesterday', must be a time"),
        ("model", ["x" * 1000], r"model: is \['x{70,80}, must be text"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_naming_the_place(place, value, message):
    content = to_json(make_report())
    change(content, place, value)
    with pytest.raises(ReportError, match=message):
        from_json(content)


@pytest.mark.parametrize("name", ["model", "records", "config", "summary"])
def test_a_missing_field_is_named(name):
    content = to_json(make_report())
    del content["requests" if name == "records" else name]
    with pytest.raises(ReportError, match="is missing"):
        from_json(content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"schema": 1e999}'])
def test_what_is_no_run_is_refused_naming_the_file(content, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"run\.json: "):
        read_runs(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"none.json: cannot be read: No such file"):
        read_runs(tmp_path / "none.json")
