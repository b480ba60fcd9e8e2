"""When enough requests were seen to say on which side of a threshold the share of kept ones is. Pure.

One looks after every request and stops when it is clear, so an interval for one look would be too narrow: looked at
often enough, it leaves the truth out at some time. The test used here may be looked at whenever one likes. With
k kept of n requests, a prior Beta(a, b) over the share, and the threshold t, the ratio

    M = B(a + k, b + n - k) / (B(a, b) t^k (1 - t)^(n - k))

is a martingale of mean 1 while the share is t, so it ever reaches 1 / error with a probability of at most `error`
(Ville 1939). All t with M < 1 / error are a confidence sequence: Robbins 1970, Statistical methods related to the law
of the iterated logarithm (Ann. Math. Stat. 41); Howard, Ramdas, McAuliffe and Sekhon 2021, Time-uniform confidence
sequences (Ann. Stat. 49). Where the share is below t, to pass by mistake is less probable still.
"""

import math
from enum import StrEnum

# The wrong decisions that are allowed, as a share, for one rate however often it is looked at.
MAX_ERROR = 0.05
# The prior counts as much as so many requests and has its mean at the threshold, where decisions are hard.
_PRIOR_REQUESTS = 10.0


class Decision(StrEnum):
    PASSES = "passes"
    FAILS = "fails"
    OPEN = "open"


def decide(num_kept: int, num_requests: int, threshold: float, max_error: float = MAX_ERROR) -> Decision:
    """On which side of the threshold, strictly within 0 and 1, the share is; OPEN while that is not clear."""
    if num_requests == 0 or log_evidence(num_kept, num_requests, threshold) < -math.log(max_error):
        return Decision.OPEN
    return Decision.PASSES if num_kept > threshold * num_requests else Decision.FAILS


def log_evidence(num_kept: int, num_requests: int, threshold: float) -> float:
    """log M, the evidence that the share is not the threshold."""
    num_broken = num_requests - num_kept
    a, b = _PRIOR_REQUESTS * threshold, _PRIOR_REQUESTS * (1 - threshold)
    mixture = _log_beta(a + num_kept, b + num_broken) - _log_beta(a, b)
    return mixture - num_kept * math.log(threshold) - num_broken * math.log1p(-threshold)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
