import asyncio
import itertools
import time

import pytest

from pdserve.loadtest.client.lag import PERIOD_S, LagCanary


async def test_a_stall_counts_as_often_as_the_timer_should_have_fired_meanwhile():
    canary = LagCanary()
    watching = asyncio.create_task(canary.watch())
    await asyncio.sleep(0)
    time.sleep(10 * PERIOD_S)  # noqa: ASYNC251 - the loop is to stall
    while not canary.lags_s:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    watching.cancel()
    lags_s = list(canary.lags_s)
    assert len(lags_s) >= 9
    assert lags_s[0] >= 9 * PERIOD_S
    assert 0 < lags_s[-1] <= PERIOD_S
    assert all(earlier - later == pytest.approx(PERIOD_S) for earlier, later in itertools.pairwise(lags_s))
