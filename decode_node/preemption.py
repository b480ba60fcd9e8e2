"""Who yields when a decode node is out of blocks, and in which way.

    swap       its blocks are copied to the host pool, and back when there is room again
    recompute  its blocks are dropped; it catches up from its tokens, of which prefixes may still be cached
    return     the request goes back to the router, which may know another node with room

The newest, least important sequence yields. By policy in one way, where that is possible, or in the one that costs
least: no token is lost in any, and none changes. Who has yielded MAX_YIELDS times, here or elsewhere, comes back
only to all the blocks that it may ever need, and yields no more: so everybody gets done. Owns what is on its way to
the host pool. Called by Growth and DecodeScheduler.
"""

from enum import StrEnum

from pdserve.cluster.messages import Send
from pdserve.decode_node.ends import Ends
from pdserve.decode_node.hand_offs import HandOffs
from pdserve.decode_node.job import Job, Jobs, Phase, yields_first
from pdserve.decode_node.reservations import Reservations
from pdserve.decode_node.swap import SwapOut, Swapped, SwappedIn, SwappedOut
from pdserve.engine.step_cost import StepCost, StepWork
from pdserve.kvtransfer.pull import Verdict

# What copying a block takes until the first one was measured: memory to memory on one core, there and back.
ASSUMED_BYTES_PER_S = 4e9
# A request that goes back is placed, prefilled and pulled again: messages and waiting that no estimate of the work has.
DETOUR_S = 0.02

Action = Send | SwapOut


class Mode(StrEnum):
    """How sequences yield; see the module."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    RETURN = "return"


class Preemption:
    """block_bytes: of a block; cost: what steps take here"""

    def __init__(
        self,
        jobs: Jobs,
        reservations: Reservations,
        ends: Ends,
        hand_offs: HandOffs,
        cost: StepCost,
        block_bytes: int,
        mode: Mode,
    ):
        self.num_leaving = 0
        self.num_corrupt = 0
        self._jobs = jobs
        self._reservations = reservations
        self._ends = ends
        self._hand_offs = hand_offs
        self._cost = cost
        self._block_bytes = block_bytes
        self._mode = mode
        self._block_s = block_bytes / ASSUMED_BYTES_PER_S
        self._actions: list[Action] = []

    def victim(self) -> Job:
        """Who yields next. Whoever asks for a block is running and has not settled, so there is one."""
        return min((job for job in self._jobs.running() if not job.has_settled), key=yields_first)

    def preempt(self, job: Job, now: float) -> None:
        """Let it yield; the messages and copies that this takes are in `actions` then. No step may name its blocks."""
        mode = self._way(job)
        job.num_yields += 1
        self._reservations.num_yielded[mode] += 1
        if mode is Mode.SWAP:
            self._swap_out(job)
        elif mode is Mode.RETURN:
            self._actions += self._ends.send_back(job, now)
        else:
            self._reservations.requeue(job)

    def actions(self) -> list[Action]:
        """What is to be done since the last call."""
        actions, self._actions = self._actions, []
        return actions

    # ---- which way -------------------------------------------------------------------------------

    def _way(self, job: Job) -> Mode:
        possible = self._costs(job)
        if self._mode is Mode.AUTO:
            return min(possible, key=lambda mode: possible[mode])
        return self._mode if self._mode in possible else Mode.RECOMPUTE

    def _costs(self, job: Job) -> dict[Mode, float]:
        """Seconds that each way takes which is possible."""
        sequence, size = job.sequence, job.sequence.block_size
        num_blocks = -(-sequence.num_computed // size)
        # Others keep what they share with it.
        num_kept = sum(self._reservations.pool.num_refs(block_id) > 1 for block_id in sequence.block_ids)
        num_lost = max(0, sequence.num_computed - num_kept * size)
        costs = {Mode.RECOMPUTE: self._compute_s(num_lost)}
        # Of a prompt whose log-probabilities are wanted, half would be missing.
        if 0 < num_blocks <= self._reservations.space.num_free and not sequence.scores_prompt:
            costs[Mode.SWAP] = 2 * num_blocks * self._block_s
        is_alone = not job.samples and len(self._jobs.of(sequence.request)) == 1
        if is_alone and self._hand_offs.links:
            speed = max(link.bytes_per_s for link in self._hand_offs.links.values()) or ASSUMED_BYTES_PER_S
            # A prefill node is likely to have the prompt still.
            compute_s = self._compute_s(sequence.num_outputs)
            costs[Mode.RETURN] = DETOUR_S + compute_s + num_blocks * self._block_bytes / speed
        return costs

    def _compute_s(self, num_tokens: int) -> float:
        return self._cost.predict_s(StepWork().plus_chunk(0, num_tokens)) if num_tokens else 0.0

    # ---- the host pool ---------------------------------------------------------------------------

    def _swap_out(self, job: Job) -> None:
        sequence = job.sequence
        block_ids = tuple(sequence.block_ids[: -(-sequence.num_computed // sequence.block_size)])
        job.swapped = Swapped(self._reservations.space.take(len(block_ids)), sequence.num_computed)
        job.phase = Phase.SWAPPING_OUT
        sequence.busy += 1
        self.num_leaving += 1
        self._actions.append(SwapOut(sequence.key, block_ids, job.swapped.slots))

    def swapped_out(self, event: SwappedOut) -> None:
        """Its blocks are safe: others may have them, and it stands in line."""
        job = self._jobs.by_key[event.key]
        assert job.swapped is not None
        job.sequence.busy -= 1
        self.num_leaving -= 1
        if event.checksums:
            self._block_s = event.busy_s / len(event.checksums)
        job.swapped.checksums = event.checksums
        if job.cancelled:
            self._ends.free_if_idle(job)
        else:
            self._reservations.requeue(job)

    def swapped_in(self, event: SwappedIn) -> None:
        """Its blocks are back; if they are not what they were, it computes them again."""
        job = self._jobs.by_key[event.key]
        swapped = job.swapped
        assert swapped is not None
        job.sequence.busy -= 1
        self._reservations.forget_swapped(job)
        self.num_corrupt += sum(verdict is not Verdict.OK for verdict in event.verdicts)
        if job.cancelled:
            self._ends.free_if_idle(job)
        elif all(verdict is Verdict.OK for verdict in event.verdicts):
            job.sequence.num_computed, job.phase = swapped.num_computed, Phase.RUNNING
        else:
            self._reservations.requeue(job)
