"""Whether a run may be believed: the client must have been punctual enough. Pure; called by summary.py."""

from dataclasses import dataclass

from pdserve.loadtest.measures.distribution import Distribution

# A run is believed while the client's p99 lag is not above the larger of these.
MAX_LAG_S = 0.005
MAX_LAG_SHARE_OF_TTFT = 0.05


@dataclass(frozen=True, slots=True)
class Validity:
    """The client's p99 lag against what is allowed."""

    lag_p99_s: float
    max_lag_s: float

    @property
    def is_valid(self) -> bool:
        return self.lag_p99_s <= self.max_lag_s


def judge_lags(lags: tuple[Distribution | None, ...], ttft: Distribution | None) -> Validity:
    """Compare the worst of the client's lags with the times it measured."""
    return Validity(
        lag_p99_s=max((lag.p99 for lag in lags if lag is not None), default=0.0),
        max_lag_s=max(MAX_LAG_S, MAX_LAG_SHARE_OF_TTFT * ttft.p50 if ttft is not None else 0.0),
    )
