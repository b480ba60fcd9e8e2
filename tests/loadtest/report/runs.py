"""Small finished runs for the tests of the report."""

from datetime import UTC, datetime

from pdserve.loadtest.client.gauges import GaugeSample, NodeSample
from pdserve.loadtest.measures.distribution import describe
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.summary import summarize
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.report import Report
from tests.loadtest.samples import make_config, make_load, make_record

PROMISES = (Promise(Measure.TTFT, 1.0),)
MIXED = (
    make_record(index=0, token_times_s=(0.5, 0.75)),
    make_record(index=1, token_times_s=(1.5, 1.75)),
    make_record(index=2, token_times_s=(0.5,), error="timeout", detail="no end", ended_s=4.0),
)


def make_report(records=MIXED, loop_lags_s=((0.001,),), rate_per_s=2.0, target=None, **others):
    fields = {
        "config": make_config("http://h:1", make_load(rate_per_s, len(records)), PROMISES, **(target or {})),
        "model": "m",
        "started_at": datetime(2026, 1, 2, tzinfo=UTC),
        "environment": describe_environment(),
        "schedule_digest": "ab",
        "summary": summarize(records, PROMISES, loop_lags_s),
        "records": tuple(records),
    }
    return Report(**{**fields, **others})


def make_harness(stamp_s=0.0002, send_s=0.0006):
    stamps, sends = describe([stamp_s]), describe([send_s])
    return HarnessError(32, 1, 50.0, 0, stamps, sends, lags=sends, loop_lag=None, lag_is_valid=True)


def make_gauges():
    nodes = (NodeSample("P0", "prefill", 1, 2, 300, 10, 20, 30, 4), NodeSample("D0", "decode", 1, 1, 1, 1, 1, 1, 1))
    return tuple(GaugeSample(float(at), 1, nodes) for at in range(4))


def make_told(index=0, start_s=0.0):
    """A request whose server tells where its time went: 0.1 s queued, 0.3 s of prefill, 0.1 s moved, then tokens."""
    ledger = {
        "first_token": {"queue_s": 0.1, "chunks_s": 0.3, "delivery_s": 0.01},
        "second_token": {"copy_s": 0.1, "first_step_s": 0.05, "delivery_s": 0.01},
    }
    times = (start_s + 0.41, start_s + 0.56, start_s + 0.7)
    return make_record(index=index, intended_s=start_s, token_times_s=times, server_metrics=ledger)
