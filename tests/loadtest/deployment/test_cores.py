import os

import pytest

from pdserve.loadtest.deployment.cores import confined, usable_cores


def test_what_is_started_within_runs_on_those_cores():
    before = os.sched_getaffinity(0)
    with confined((min(before),)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_no_cores_confine_nothing():
    before = os.sched_getaffinity(0)
    with confined(()):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text", ["max 100000\n", "nonsense", "", "100000 0"])
def test_without_a_quota_all_cores_are_usable(tmp_path, text):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert usable_cores(quota) == tuple(sorted(os.sched_getaffinity(0)))
    assert usable_cores(tmp_path / "none") == tuple(sorted(os.sched_getaffinity(0)))


def test_a_quota_of_one_core_and_a_half_is_one_core(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert usable_cores(quota) == (min(os.sched_getaffinity(0)),)
