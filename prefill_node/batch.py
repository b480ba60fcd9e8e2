"""The steps of a prefill node: which chunks the next one computes, and what one that is over has changed.

At most one step is under way. The Planner says whose prompt is computed next. Owned by PrefillScheduler.
"""

from dataclasses import dataclass

from pdserve.core.ids import BlockHash, BlockId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.planner import Planner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw, StepPlan, StepResult
from pdserve.engine.step_cost import StepCost, StepWork
from pdserve.kvtransfer.offer import OfferBook
from pdserve.prefill_node.prompt import Prompt, Prompts
from pdserve.prefill_node.tail_chunk import cut_tail


@dataclass(frozen=True, slots=True)
class Computed:
    """A prompt whose chunk a step has run: the full blocks that it wrote, and what was drawn after the last chunk."""

    prompt: Prompt
    sealed: tuple[tuple[BlockId, BlockHash], ...] = ()
    draws: tuple[Draw, ...] = ()


class Batch:
    """planner: with the budget of a step. cost: what steps take here, which each teaches."""

    def __init__(self, prompts: Prompts, pool: BlockPool, offers: OfferBook, planner: Planner, cost: StepCost):
        self._prompts = prompts
        self._pool = pool
        self._offers = offers
        self._planner = planner
        self._cost = cost
        self._step: StepPlan | None = None
        self._step_at = 0.0
        self._num_steps = 0

    def __len__(self) -> int:
        """Prompts that have all of their blocks and lack chunks."""
        return len(self._planner)

    @property
    def is_running(self) -> bool:
        return self._step is not None

    @property
    def token_s(self) -> float:
        """Seconds that each token of a prompt is expected to take."""
        most = self._planner.step_tokens
        return self._cost.predict_s(StepWork().plus_chunk(0, most)) / most

    def join(self, prompt: Prompt) -> None:
        self._planner.add(prompt.sequence)

    def leave(self, prompt: Prompt) -> None:
        """Who is not here leaves nothing."""
        self._planner.remove(prompt.sequence)

    def plan(self, now: float) -> StepPlan | None:
        """Begin the next step, or None when there is nothing to run."""
        assert self._step is None, "a step is under way"
        rows, seals = [], []
        chunks = self._planner.chunks(lambda _: self._planner.step_tokens, self.token_s, now, cut=self._cut_tail)
        for sequence, num_tokens in chunks:
            sequence.take_blocks(self._pool, sequence.num_computed + num_tokens)
            rows.append(sequence.row(num_tokens))
            seals += sequence.seals(num_tokens)
            sequence.busy += 1
            sequence.started_at = now if sequence.started_at is None else sequence.started_at
        if not rows:
            return None
        self._num_steps += 1
        self._step, self._step_at = StepPlan(self._num_steps, tuple(rows), tuple(seals)), now
        return self._step

    def _cut_tail(self, sequence: Sequence, num_tokens: int) -> int:
        offer = self._offers.find(sequence.request, sequence.attempt)
        return num_tokens if offer is None else cut_tail(sequence, num_tokens, offer.link_token_s, self._cost)

    def take(self, result: StepResult, now: float) -> list[Computed]:
        """The step is over: what it has computed. Cancelled prompts are only let go of."""
        plan = self._step
        assert plan is not None, "a result although no step is running"
        assert plan.step == result.step, "a result of another step"
        self._step = None
        self._cost.learn(StepWork.of(plan.rows), result.forward_s)
        names = {seal.block_id: seal.block_hash for seal in plan.seals}
        taken = []
        for row in plan.rows:
            prompt = self._prompts.by_key[row.key]
            sequence = prompt.sequence
            sequence.busy -= 1
            if prompt.cancelled:
                taken.append(Computed(prompt))
                continue
            sequence.num_computed += len(row.token_ids)
            sequence.ran_chunk(len(row.token_ids), self._step_at, now, result.forward_s)
            self._planner.progressed(sequence)
            sequence.commit_full(self._pool, result.checksums)
            sealed = tuple((block_id, names[block_id]) for block_id in sequence.block_ids if block_id in names)
            for block_id, _ in sealed:
                self._pool.note_checksum(block_id, result.checksums[block_id])
            if row.key in result.scores:
                sequence.scores.append(result.scores[row.key])
            taken.append(Computed(prompt, sealed, result.draws.get(row.key, ())))
        return taken
