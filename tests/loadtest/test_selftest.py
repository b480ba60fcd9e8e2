"""The harness's error is what both sides' clocks say, and the bars are the stated ones. How large it is here and now
belongs to `pdserve bench selftest`: other processes of the machine decide it, too."""

import pytest

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.measures.distribution import describe
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.mock.server import MockServer
from pdserve.loadtest.selftest import Size, compare_times, measure
from tests.loadtest.samples import make_load, worker_in_process


def make_error(stamp_s=0.0004, send_s=0.001, **others):
    fields = {
        "num_streams": 4,
        "num_processes": 1,
        "tokens_per_s": 50.0,
        "num_failed": 0,
        "stamps": describe([stamp_s]),
        "sends": describe([send_s]),
        "lags": describe([0.0]),
        "loop_lag": None,
        "lag_is_valid": True,
    }
    return HarnessError(**fields | others)


def test_a_harness_within_its_limits_has_no_faults():
    assert make_error(stamp_s=0.0005, send_s=0.0015).is_within_bars


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (make_error(stamp_s=0.00051), "stamp p99 above 0.5 ms"),
        (make_error(send_s=0.00151), "send p99 above 1.5 ms"),
        (make_error(lag_is_valid=False), "INVALID by its lag"),
        (make_error(num_failed=2), "2 requests failed"),
    ],
)
def test_each_fault_of_a_harness_is_named(error, fault):
    assert error.faults == (fault,)
    assert not error.is_within_bars


async def test_errors_are_differences_between_the_clients_times_and_the_servers():
    async with MockServer([Behaviour(first_token_s=0.01, gap_s=0.002)]) as server:
        error = await compare_times(Target(server.url), make_load(), 4, 1, worker_in_process)
    arrivals = [received.arrived_at for received in server.received]
    assert error.num_failed == 0
    assert (error.stamps.count, error.sends.count, error.lags.count) == (16, 4, 4)
    assert 0 <= error.stamps.p50 <= error.stamps.max
    # All four were intended at once, so arrivals are as far apart as the errors of their sends.
    assert error.sends.max - error.sends.p50 <= max(arrivals) - min(arrivals) + 1e-6
    assert error.lags.max <= error.sends.max


async def test_a_request_that_fails_is_counted_and_not_measured():
    async with MockServer([Behaviour(), Behaviour(fault=Fault.SHORT)]) as server:
        error = await compare_times(Target(server.url), make_load(), 4, 1, worker_in_process)
    assert error.num_failed == 2
    assert (error.stamps.count, error.sends.count) == (8, 2)


async def test_the_mock_and_two_clients_run_as_processes_of_their_own():
    error = await measure(Size(num_streams=4, stream_s=0.2, duration_s=0.2), num_processes=2)
    assert error.num_failed == 0
    assert error.num_processes == 2
    assert (error.stamps.count, error.sends.count) == (40, 4)
    assert error.stamps.p50 > 0
