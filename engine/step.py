"""What the event loop asks of the engine thread, and what comes back: plain data, no torch.

The loop owns the block pool; a StepPlan names every block the step may read or write, and none of
them is reassigned before the StepResult is in.
"""

from dataclasses import dataclass, field

from pdserve.core.ids import BlockHash, BlockId
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw one token from the last position of a row.

    output_index  how many outputs the sequence has already: the draw's counter, and what min_tokens counts
    sample        which of the n samples of the request this is
    history       prompt, then outputs, where the params have penalties, else nothing; num_prompt: of the former
    """

    params: SamplingParams
    output_index: int
    sample: int = 0
    history: tuple[int, ...] = ()
    num_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities are wanted of given tokens: token_ids[i] as what follows query token i of the row."""

    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    key         the node's handle of the sequence, echoed in the result
    token_ids   the query tokens of this step, at positions start .. start + len(token_ids) - 1
    start       tokens whose KV is already in the pool
    block_ids   the block table, covering start + len(token_ids) tokens
    write_from  KV of positions below it is not written: those blocks were found by hash and are immutable
    samples     tokens to draw after the last query token, one for each; none when more of the sequence is to come
    scored      prompt tokens whose log-probabilities are wanted
    """

    key: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    write_from: int = 0
    samples: tuple[SampleSpec, ...] = ()
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Before the rows run, all of `source` is copied to `target`: the first write to a block that others share."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class Seal:
    """After the step, zero the unwritten slots of this block and compute its checksum."""

    block_id: BlockId
    block_hash: BlockHash
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]
    seals: tuple[Seal, ...] = ()
    moves: tuple[BlockMove, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token, and its log-probabilities where they were asked for."""

    token: int
    logprobs: Logprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class StepResult:
    """By row key: the draws of its samples, in their order, and what was asked of scored tokens.

    checksums by block id for each Seal; forward_s: busy seconds
    """

    step: int
    draws: dict[int, tuple[Draw, ...]]
    checksums: dict[BlockId, int] = field(default_factory=dict)
    forward_s: float = 0.0
    scores: dict[int, Logprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunStep:
    """Action: hand this plan to the engine thread."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class StepDone:
    """Event: the engine thread returned this result."""

    result: StepResult
