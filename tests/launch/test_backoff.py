from pdserve.launch.backoff import Backoff


def test_delays_double_from_half_a_second():
    backoff = Backoff()
    assert [backoff.delay_s(now) for now in (0.0, 1.0, 3.0, 6.0, 11.0)] == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_the_sixth_death_within_a_minute_is_one_too_many():
    backoff = Backoff()
    delays = [backoff.delay_s(float(now)) for now in range(6)]
    assert delays[4] == 8.0
    assert delays[5] is None


def test_deaths_older_than_the_window_are_forgiven():
    backoff = Backoff()
    for now in range(5):
        backoff.delay_s(float(now))
    assert backoff.delay_s(64.0) == 0.5


def test_a_delay_is_never_longer_than_ten_seconds():
    backoff = Backoff(max_restarts=100)
    assert [backoff.delay_s(float(now)) for now in range(8)][5:] == [10.0, 10.0, 10.0]
