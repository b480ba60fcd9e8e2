"""Steps of the last years, each measured against the way before it: same server, same load, one setting apart. Pure.

    batching      requests join a running batch, against one batch after the other (Orca)
    paging        memory as a sequence grows, against memory for the longest one (PagedAttention)
    prefix        what prompts have in common is computed once, against never (RadixAttention)
    chunking      long prompts in parts beside running streams, against whole (Sarathi-Serve)

Owns what is measured and how two runs become a gain; who starts servers is loadtest/ablation.py. A gain above 1 says
that the step pays, for rates and for latencies alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pdserve.loadtest.measures.distribution import percentile
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.workload.lengths import DrawnLengths, Span
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.sharing import SharedPrefix
from pdserve.loadtest.workload.trace import Trace, TraceRequest

# Of all tokens: what comes before and after these is the server filling up and running empty.
EDGE_SHARE = 0.1
# Above this share of failures a run says nothing.
MAX_FAILED = 0.05
# At a quarter of the requests there are still several batches of each kind.
LEAST_SCALE = 0.25


@dataclass(frozen=True, slots=True)
class Seen:
    """What is left of a run. num_kv_tokens: those that the decode nodes' memory holds, 0 where they did not say."""

    records: Sequence[Record]
    num_kv_tokens: int = 0


class Unit(StrEnum):
    RATE = "rate"
    SECONDS = "seconds"
    COUNT = "count"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Measure:
    """read: its value of one run, None where there is none. A gain is more of it, or, of seconds, less."""

    title: str
    unit: Unit
    read: Callable[[Seen], float | None]

    def gain(self, now: float, before: float) -> float:
        """How many times better `now` is than `before`."""
        better, worse = (before, now) if self.unit is Unit.SECONDS else (now, before)
        return better / worse if worse > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Step:
    """One step, and how to see what it brings.

    common           flags of `pdserve up` in both runs, and variables of its environment
    before           the flags that undo the step
    max_concurrency  requests in flight; None: all at once
    measures         the one that is quoted first
    quoted, source   what the literature reports, and where
    differs          why it may be something else here
    """

    name: str
    title: str
    before: tuple[str, ...]
    load: Load
    max_concurrency: int | None
    measures: tuple[Measure, ...]
    quoted: str
    source: str
    differs: str
    common: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def load_of(self, seed: int, scale: float) -> Load:
        """The load of one pair of runs. scale: of the requests, at least LEAST_SCALE and at most 1."""
        scale = min(1.0, max(LEAST_SCALE, scale))
        return replace(self.load, seed=seed, num_requests=round(scale * self.load.num_requests))


@dataclass(frozen=True, slots=True)
class Pair:
    """One measure of two runs of the same schedule."""

    now: float
    before: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What a step brings by one measure: means over pairs of runs, and the gain's range among them."""

    now: float
    before: float
    factor: float
    low: float
    high: float


def gain_of(measure: Measure, pairs: Sequence[Pair]) -> Gain | None:
    """Geometric means, so that a gain and its reverse are each other's inverse; None without pairs."""
    if not pairs:
        return None
    factors = [measure.gain(pair.now, pair.before) for pair in pairs]
    now, before, factor = (
        math.exp(sum(map(_log, values)) / len(pairs))
        for values in ([pair.now for pair in pairs], [pair.before for pair in pairs], factors)
    )
    return Gain(now, before, factor, min(factors), max(factors))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


# ---- what is read off a run ------------------------------------------------------------------------


def too_many_failures(records: Sequence[Record]) -> str | None:
    """What went wrong, where so much did that the run says nothing."""
    failed = [record for record in records if not record.is_complete]
    if len(failed) <= MAX_FAILED * len(records):
        return None
    first = failed[0]
    return (
        f"{len(failed)} of {len(records)} requests failed; the first: request {first.index}, {first.error}: "
        f"{first.detail}"
    )


def busy_span(records: Sequence[Record]) -> tuple[float, float] | None:
    """From when to when the middle tokens of a run came, in seconds of the run; None without two different times."""
    times = np.sort([at for record in records for at in record.token_times_s])
    if not len(times):
        return None
    first, last = (float(times[round(share * (len(times) - 1))]) for share in (EDGE_SHARE, 1 - EDGE_SHARE))
    return (first, last) if last > first else None


def tokens_per_s(seen: Seen) -> float | None:
    """Output tokens a second while the server was busy."""
    span = busy_span(seen.records)
    if span is None:
        return None
    start, end = span
    return sum(start < at <= end for record in seen.records for at in record.token_times_s) / (end - start)


def num_at_once(seen: Seen) -> float | None:
    """How many requests were between their first and their last token, on average, while the server was busy."""
    return _mean_while_busy(seen.records, lambda record: np.ones(len(record.token_times_s)))


def kv_share(seen: Seen) -> float | None:
    """Share of the memory that holds a token of a running request, on average, while the server was busy."""
    held = _mean_while_busy(
        seen.records, lambda record: record.planned_input_tokens + np.arange(len(record.token_times_s))
    )
    return None if held is None or not seen.num_kv_tokens else held / seen.num_kv_tokens


def _mean_while_busy(records: Sequence[Record], weigh: Callable[[Record], np.ndarray]) -> float | None:
    """The mean of a sum over requests. weigh: what one adds from each of its tokens to the next, [num_token_events]."""
    span = busy_span(records)
    if span is None:
        return None
    total = 0.0
    for record in records:
        if record.token_times_s:
            total += float(weigh(record)[:-1] @ np.diff(np.clip(record.token_times_s, *span)))
    return total / (span[1] - span[0])


def first_token_s(seen: Seen) -> float | None:
    """p50 of the time to first token from the actual send; with few in flight, the others are not sent yet."""
    values = [record.service_ttft_s for record in seen.records if record.service_ttft_s is not None]
    return percentile(values, 50) if values else None


def late_gap_s(seen: Seen) -> float | None:
    """p99 of all gaps between two tokens of a request."""
    values = [gap for record in seen.records for gap in record.gaps_s]
    return percentile(values, 99) if values else None


TOKENS = Measure("output tokens/s", Unit.RATE, tokens_per_s)
AT_ONCE = Measure("requests at once", Unit.COUNT, num_at_once)
KV_SHARE = Measure("KV memory in use", Unit.SHARE, kv_share)
FIRST_TOKEN = Measure("first token, p50", Unit.SECONDS, first_token_s)
GAP = Measure("gap, p99", Unit.SECONDS, late_gap_s)


# ---- what is sent ----------------------------------------------------------------------------------


def exponential_lengths(mean: int, most: int, num_lengths: int) -> list[int]:
    """The middles of num_lengths equally likely parts of an exponential distribution, cut at `most`; 4 at least."""
    shares = [(i + 0.5) / num_lengths for i in range(num_lengths)]
    return [min(most, max(4, round(-mean * math.log(1 - share)))) for share in shares]


def slots_gain(lengths: Sequence[int], num_slots: int) -> float:
    """What batches that are refilled gain over batches that run to their end, if every step took the same time.

    A batch of num_slots takes as long as the longest of its answers, on average over random batches; refilled, each
    place is used all the time: E[max] / E[length].
    """
    ordered = sorted(lengths)
    count = len(ordered)
    # P(max <= k-th smallest) = (k / n)^slots
    share_below = [(k / count) ** num_slots for k in range(count + 1)]
    longest = sum(value * (share_below[k + 1] - share_below[k]) for k, value in enumerate(ordered))
    return longest / (sum(ordered) / count)


def _table(name: str, lengths: Sequence[tuple[int, int]]) -> Trace:
    """Lengths that are drawn without replacement, so that runs of other seeds differ in order alone."""
    return Trace(name, tuple(TraceRequest(*pair) for pair in lengths), has_times=False)


NUM_SLOTS = 8
# So that steps are made of answers, not of the prompts among them.
SHORT_PROMPT = 16
MEAN_ANSWER, LONGEST_ANSWER = 64, 384
_ANSWERS = exponential_lengths(MEAN_ANSWER, LONGEST_ANSWER, 128)


def _at_once(lengths: DrawnLengths | Trace, num_requests: int, shared_prefix: SharedPrefix | None = None) -> Load:
    return Load(math.inf, num_requests, lengths, ramp=0.0, shared_prefix=shared_prefix)


def _each_once(table: Trace) -> Load:
    return _at_once(table, len(table.requests))


_SATURATED = _each_once(_table("exponential answers", [(SHORT_PROMPT, answer) for answer in _ANSWERS]))
_SYSTEM_PROMPTS = _at_once(DrawnLengths(Span(32, 64), Span(16, 16)), 48, SharedPrefix(1024, 2))
_LONG_BESIDE_SHORT = _each_once(
    _table("heavy tail", [*[(64, 64)] * 30, *[(256, 64)] * 6, *[(1024, 64)] * 6, *[(2048, 64)] * 6])
)

STEPS = (
    Step(
        name="batching",
        title="continuous over static batching",
        before=("--batching", "static"),
        load=_SATURATED,
        max_concurrency=None,
        measures=(TOKENS, AT_ONCE),
        quoted="36.9x tokens/s at the same latency; 8x in a common reproduction",
        source="Orca (Yu et al., OSDI 2022), GPT-3 175B against FasterTransformer; Anyscale's blog, June 2023, OPT-13B",
        differs=(
            f"answers of {MEAN_ANSWER} tokens on average, {LONGEST_ANSWER} at most, in batches of {NUM_SLOTS} leave "
            f"{slots_gain(_ANSWERS, NUM_SLOTS):.1f}x to gain if a step took the same time however many run; where a "
            "step of fewer sequences takes less time, as on CPUs, a batch that empties loses less. Orca's figure also "
            "has FasterTransformer's other limits in it: padded prompts and memory for the longest answer"
        ),
        environ={"PDSERVE_MAX_RUNNING": str(NUM_SLOTS)},
    ),
    Step(
        name="paging",
        title="paged memory over memory for the longest",
        before=("--kv-allocation", "max-length"),
        load=_SATURATED,
        max_concurrency=None,
        measures=(TOKENS, AT_ONCE, KV_SHARE),
        quoted="2-4x tokens/s at the same latency",
        source="vLLM (Kwon et al., SOSP 2023), OPT-13B to 175B against Orca and FasterTransformer",
        differs=(
            "how many run at once follows from the memory, the longest request that is allowed and the requests there "
            "are, here 416 tokens and some 80; what more of them bring follows from how a step's time grows with "
            "its sequences, which on CPUs it does much sooner than on GPUs"
        ),
        # Of the demo model seven of the longest requests a node.
        common=("--kv-memory", "64MiB", "--max-model-len", "416"),
    ),
    Step(
        name="prefix",
        title="prefix cache over none",
        before=("--prefix-cache", "off"),
        load=_SYSTEM_PROMPTS,
        max_concurrency=4,
        measures=(TOKENS, FIRST_TOKEN),
        quoted="up to 6.4x requests/s",
        source="SGLang's RadixAttention (Zheng et al., NeurIPS 2024), over its benchmarks",
        differs=(
            "all of it follows from the share of tokens that prompts have in common, here 1,024 of some 1,072 in 2 "
            "groups, and from what a prompt takes beside its answer: with longer answers the gain in tokens/s shrinks, "
            "that in time to first token does not"
        ),
    ),
    Step(
        name="chunking",
        title="prompts in chunks over whole ones",
        before=("--chunked-prefill", "off"),
        load=_LONG_BESIDE_SHORT,
        max_concurrency=8,
        measures=(GAP, FIRST_TOKEN, TOKENS),
        quoted="2.6x the load within a bound on the gaps' p99",
        source="Sarathi-Serve (Agrawal et al., OSDI 2024), Mistral-7B on one A100 against vLLM; 3.7x for Yi-34B on two",
        differs=(
            "here gaps are compared at the same load, not loads at the same gaps: a gap beside a whole prompt is as "
            "long as that prompt takes, so the ratio follows from the longest prompts. First tokens and tokens/s pay "
            "for it: a prompt in chunks reads the weights more often. Where prefill has nodes of its own, no stream "
            "waits for a prompt either way"
        ),
        common=("--max-model-len", "4096"),
    ),
)
