"""Blocks for the prompts of a prefill node: who waits for them, who gets them, and who holds them until a Release.

    line ── all blocks at once, hits held ──► RUNNING ── park ──► pinned under the lease ── free ──► cached

Nothing is started while more than half of the pool is parked, but for the next attempt of what was parked here: it
finds its blocks again. Owns the line and the pool's reservations. Used by PrefillScheduler.
"""

from pdserve.core.admission import AdmissionLine
from pdserve.engine.block_pool import BlockPool
from pdserve.prefill_node.prompt import Phase, Prompt, Prompts


class Reservations:
    def __init__(self, pool: BlockPool, prompts: Prompts):
        self._pool = pool
        self._prompts = prompts
        self._line = AdmissionLine()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def starts_no_prompt(self) -> bool:
        """Decode nodes take over more slowly than prompts are computed: more would only wait in their place."""
        return self._pool.num_leased > self._pool.num_blocks // 2

    def wait(self, prompt: Prompt) -> None:
        """Stand in line for blocks. A stream that stands still has waited before."""
        self._line.join(prompt.sequence.key, prompt.sequence.priority, resumed=prompt.was_parked)

    def leave(self, prompt: Prompt) -> None:
        """Who is not in line leaves nothing."""
        self._line.leave(prompt.sequence.key)

    def admit(self) -> list[Prompt]:
        """Reserve for those in line, in order, as far as there is room; returns who runs from now on."""
        return [self._prompts.by_key[key] for key in self._line.admit(self._reserve)]

    def _reserve(self, key: int) -> bool:
        prompt = self._prompts.by_key[key]
        if self.starts_no_prompt and not prompt.was_parked:
            return False
        sequence = prompt.sequence
        hits = self._pool.match(sequence.hashes)
        missing = sequence.num_blocks - len(hits)
        if not self._pool.can_reserve(missing, hits):
            return False
        sequence.claim(self._pool, hits, missing)
        prompt.phase = Phase.RUNNING
        return True

    def park(self, prompt: Prompt) -> None:
        """It is computed: its lease holds the blocks from now on."""
        sequence = prompt.sequence
        prompt.phase = Phase.PARKED
        self._pool.pin(sequence.block_ids)
        prompt.leased = list(sequence.block_ids)
        sequence.give_back(self._pool)

    def free_if_idle(self, prompt: Prompt) -> None:
        """Free what a prompt that has ended still holds, once no step names it."""
        sequence = prompt.sequence
        if sequence.busy:
            return
        if prompt.phase is Phase.RUNNING:
            sequence.give_back(self._pool)
        elif prompt.phase is Phase.PARKED:
            self._pool.unpin(prompt.leased)
        del self._prompts.by_key[sequence.key]

    def check(self) -> None:
        """Invariants over pool, sequences and line; raises AssertionError."""
        sequences = [prompt.sequence for prompt in self._prompts.by_key.values()]
        self._pool.check(sequence.block_ids for sequence in sequences)
        reserved = sum(sequence.num_reserved for sequence in sequences)
        assert reserved == self._pool.num_reserved, f"{self._pool.num_reserved} reserved, sequences have {reserved}"
        queued = [prompt for prompt in self._prompts if prompt.phase is Phase.QUEUED]
        assert len(self._line) == len(queued), "a queued prompt stands in no line"
