"""Techniques of the last years, each with the load that shows it: same server, same load, one setting apart. Pure.

    batching      requests join a running batch, against one batch after the other (Orca)
    paging        memory as a sequence grows, against memory for the longest one (PagedAttention)
    prefix        what prompts have in common is computed once, against never (RadixAttention)
    chunking      long prompts in parts beside running streams, against whole (Sarathi-Serve)

What each ought to bring follows from what steps cost; who starts servers is ablation.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, mean

from pdserve.loadtest.ablation.readings import (
    AT_ONCE,
    FIRST_TOKEN,
    GAP,
    KV_SHARE,
    LONG_FIRST_TOKEN,
    SHORT_FIRST_TOKEN,
    TOKENS,
    Reading,
)
from pdserve.loadtest.workload.lengths import DrawnLengths, Span
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.sharing import SharedPrefix
from pdserve.loadtest.workload.trace import Trace, TraceRequest

# At a quarter of the requests there are still several batches of each kind.
LEAST_SCALE = 0.25


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique, and how to see what it brings.

    common           flags of `pdserve up` in both runs, and variables of its environment
    before           the flags that take it away
    max_concurrency  requests in flight; None: all at once
    readings         the one that is quoted first
    quoted, source   what the literature reports, and where
    differs          why it may be something else here, and what follows from the cost of steps
    """

    name: str
    title: str
    before: tuple[str, ...]
    load: Load
    max_concurrency: int | None
    readings: tuple[Reading, ...]
    quoted: str
    source: str
    differs: str
    common: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def load_of(self, seed: int, scale: float) -> Load:
        """The load of one pair of runs. scale: of the requests, as limit_scale leaves it."""
        return replace(self.load, seed=seed, num_requests=round(scale * self.load.num_requests))


def limit_scale(scale: float) -> float:
    """At most all of the requests, and never too few to show anything."""
    return min(1.0, max(LEAST_SCALE, scale))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a decode step: fixed, and more for each sequence; and of each token of a prompt."""

    fixed_s: float
    sequence_s: float
    prompt_token_s: float

    def step_s(self, num_sequences: int) -> float:
        return self.fixed_s + num_sequences * self.sequence_s

    def tokens_per_s(self, num_sequences: int, num_prompt: int, num_answer: float) -> float:
        """Of so many sequences all the time, whose prompts are computed between steps."""
        token_s = self.step_s(num_sequences) / num_sequences + num_prompt * self.prompt_token_s / num_answer
        return 1 / token_s

    def static_tokens_per_s(self, num_slots: int, num_prompt: int, answers: Sequence[int]) -> float:
        """Of batches that run to their end: the fixed part of a step is spent until the longest answer is done."""
        num_tokens = num_slots * mean(answers)
        prompts_s = num_slots * num_prompt * self.prompt_token_s
        batch_s = self.fixed_s * longest_of(answers, num_slots) + self.sequence_s * num_tokens + prompts_s
        return num_tokens / batch_s


# Of the demo model on one core of the reference machine; a line through the medians in docs/performance.md, "One core":
# 18.5 ms with 1 sequence, 22.5 with 4, 32.6 with 8, 56.4 with 16; 614 ms for 512 tokens.
COST = StepCost(fixed_s=0.0155, sequence_s=0.0025, prompt_token_s=0.0012)


def longest_of(lengths: Sequence[int], num_drawn: int) -> float:
    """The mean of the longest of num_drawn random lengths."""
    ordered, count = sorted(lengths), len(lengths)
    # P(max <= k-th smallest) = (k / n)^drawn
    share_below = [(k / count) ** num_drawn for k in range(count + 1)]
    return sum(length * (share_below[k + 1] - share_below[k]) for k, length in enumerate(ordered))


def exponential_lengths(mean_length: int, most: int, num_lengths: int) -> list[int]:
    """The middles of num_lengths equally likely parts of an exponential distribution, cut at `most`; 4 at least."""
    return [min(most, max(4, round(-mean_length * math.log(1 - share)))) for share in _middles(num_lengths)]


def lognormal_lengths(median: int, sigma: float, most: int, num_lengths: int) -> list[int]:
    """Likewise of a log-normal distribution, whose tail is heavier."""
    normal = NormalDist(math.log(median), sigma)
    return [min(most, max(4, round(math.exp(normal.inv_cdf(share))))) for share in _middles(num_lengths)]


def _middles(num_parts: int) -> list[float]:
    return [(i + 0.5) / num_parts for i in range(num_parts)]


def _at_once(lengths: DrawnLengths | Trace, num_requests: int, shared_prefix: SharedPrefix | None = None) -> Load:
    return Load(math.inf, num_requests, lengths, ramp=0.0, shared_prefix=shared_prefix)


def _each_once(name: str, lengths: Sequence[tuple[int, int]]) -> Load:
    """Lengths that are drawn without replacement, so that runs of other seeds differ in order alone."""
    table = Trace(name, tuple(TraceRequest(*pair) for pair in lengths), has_times=False)
    return _at_once(table, len(table.requests))


# So that steps are made of answers, not of the prompts among them.
OWN_PROMPT = 16

NUM_SLOTS = 8
HEAVY_TAIL = lognormal_lengths(32, 1.25, 512, 192)
STATIC_GAIN = COST.tokens_per_s(NUM_SLOTS, OWN_PROMPT, mean(HEAVY_TAIL)) / COST.static_tokens_per_s(
    NUM_SLOTS, OWN_PROMPT, HEAVY_TAIL
)
BATCHING = Technique(
    name="batching",
    title="continuous over static batching",
    before=("--batching", "static"),
    load=_each_once("log-normal answers", [(OWN_PROMPT, answer) for answer in HEAVY_TAIL]),
    max_concurrency=None,
    readings=(TOKENS, AT_ONCE),
    quoted="36.9x tokens/s at the same latency; 8x in a common reproduction",
    source="Orca (Yu et al., OSDI 2022), GPT-3 175B against FasterTransformer; Anyscale's blog, June 2023, OPT-13B",
    differs=(
        f"the longest of {NUM_SLOTS} answers is {longest_of(HEAVY_TAIL, NUM_SLOTS) / mean(HEAVY_TAIL):.1f} times as "
        "long as their mean, which is the gain where a step takes the same time however many run, as on GPUs. On one "
        f"core of the reference machine a step of {NUM_SLOTS} takes {COST.step_s(NUM_SLOTS) / COST.step_s(1):.1f} "
        f"times as long as one of 1, so a batch that empties loses less, and {STATIC_GAIN:.1f}x is to be expected. "
        "Orca's figure also has FasterTransformer's other limits in it: padding, and memory for the longest answer"
    ),
    environ={"PDSERVE_MAX_RUNNING": str(NUM_SLOTS)},
)

# Of the demo model (23,040 bytes a token) 65 blocks of 32 tokens a node: four of the longest requests.
NUM_LONGEST, LONGEST = 4, 512
MEAN_ANSWER = 64
# A sequence that runs is on average as far as the mean answer (which an exponential one's remaining length is too),
# and its last block is half empty.
NUM_PAGED = NUM_LONGEST * LONGEST // (OWN_PROMPT + MEAN_ANSWER + 16)
PAGING_GAIN = COST.tokens_per_s(NUM_PAGED, OWN_PROMPT, MEAN_ANSWER) / COST.tokens_per_s(
    NUM_LONGEST, OWN_PROMPT, MEAN_ANSWER
)
PAGING = Technique(
    name="paging",
    title="paged memory over memory for the longest",
    before=("--kv-allocation", "max-length"),
    load=_each_once(
        "exponential answers", [(OWN_PROMPT, answer) for answer in exponential_lengths(MEAN_ANSWER, 384, 192)]
    ),
    max_concurrency=None,
    readings=(TOKENS, AT_ONCE, KV_SHARE),
    quoted="2-4x tokens/s at the same latency, with 30 sequences at once instead of 7",
    source="vLLM (Kwon et al., SOSP 2023), OPT-13B to 175B against Orca and FasterTransformer",
    differs=(
        f"memory for {NUM_LONGEST} requests of {LONGEST} tokens holds some {NUM_PAGED} that are as long as they have "
        f"become, a node: {NUM_PAGED / NUM_LONGEST:.1f} times as many, somewhat more than there. What they bring "
        "follows from how a step's time grows with its sequences, on CPUs much sooner than on GPUs: on the reference "
        f"machine {PAGING_GAIN:.1f}x is to be expected, less what is computed again after a sequence had to yield"
    ),
    common=("--kv-memory", "46MiB", "--max-model-len", str(LONGEST)),
)

SYSTEM_PROMPT, NUM_SYSTEM_PROMPTS = 1024, 2
OWN = Span(32, 64)
SHORT_ANSWER = 16
PREFIX = Technique(
    name="prefix",
    title="prefix cache over none",
    before=("--prefix-cache", "off"),
    load=_at_once(
        DrawnLengths(OWN, Span(SHORT_ANSWER, SHORT_ANSWER)), 64, SharedPrefix(SYSTEM_PROMPT, NUM_SYSTEM_PROMPTS)
    ),
    max_concurrency=4,
    readings=(TOKENS, FIRST_TOKEN),
    quoted="up to 6.4x requests/s",
    source="SGLang's RadixAttention (Zheng et al., NeurIPS 2024), over its benchmarks",
    differs=(
        f"all of it follows from the share that prompts have in common, here {SYSTEM_PROMPT:,} of some 1,072 tokens in "
        f"{NUM_SYSTEM_PROMPTS} groups, and from what a prompt takes beside its answer: on one core of the reference "
        f"machine 1.4 s, or 0.07 s for its own tokens, and 0.17 s for {SHORT_ANSWER} tokens out of two at once, so "
        "some 6x in tokens/s is to be expected and more than 10x in time to first token. With longer answers the "
        "gain in tokens/s shrinks, that in time to first token does not"
    ),
)

LONG_PROMPT = 1536
CHUNKING = Technique(
    name="chunking",
    title="prompts in chunks over whole ones",
    before=("--chunked-prefill", "off"),
    load=_each_once("long among short", [(64, 32)] * 72 + [(LONG_PROMPT, 16)] * 24),
    max_concurrency=16,
    readings=(GAP, SHORT_FIRST_TOKEN, LONG_FIRST_TOKEN, TOKENS),
    quoted="2.6x the load within a bound on the gaps' p99",
    source="Sarathi-Serve (Agrawal et al., OSDI 2024), Mistral-7B on one A100 against vLLM; 3.7x for Yi-34B on two",
    differs=(
        "here gaps are compared at the same load, not loads at the same gaps. Beside a whole prompt every stream of "
        f"the node waits as long as it takes, some 2.3 s for {LONG_PROMPT:,} tokens on one core of the reference "
        "machine, and with a few streams beside each of them that is more than a hundredth of all gaps; in chunks a "
        "step takes twice its streams' own time, some 70 ms: 30x is to be expected at p99. Prompts pay for it, long "
        "ones most: they get what a step has left beside its streams, and shorter ones go first. Short ones gain "
        "little, since going first is what they do either way, and most do not come while a whole one is computed. "
        "Where prefill has nodes of its own, no stream waits for a prompt either way"
    ),
    common=("--max-model-len", "4096"),
)

TECHNIQUES = (BATCHING, PAGING, PREFIX, CHUNKING)
