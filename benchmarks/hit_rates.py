"""How much of the prompts of a conversation a prefix cache of a given size holds: python benchmarks/hit_rates.py.

Replays the prefixes of Mooncake's conversation trace through the block pool, the way a prefill node uses it: one
pool block for each of the trace's blocks of 512 tokens. Needs no model and prints a Markdown table; the figures are
the same on every machine.
"""

import argparse
from collections import deque
from collections.abc import Iterable

from traces import MOONCAKE_BLOCK_TOKENS, mooncake_conversation

from pdserve.core.ids import BlockHash, BlockId, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence

POOL_BLOCKS = (1_000, 5_000, 20_000, 60_000, 200_000)


class Replay:
    """Prompts on a prefill node, one arrival after the other.

    A prompt's blocks are findable once `num_computing` more have arrived, and leased until `num_parked` more have
    after that; sooner where the pool has no room for the next prompt.
    """

    def __init__(self, pool: BlockPool, num_computing: int = 0, num_parked: int = 0):
        self.pool = pool
        self._num_computing = num_computing
        self._num_parked = num_parked
        self._computing: deque[Sequence] = deque()
        self._parked: deque[list[BlockId]] = deque()

    def arrive(self, key: int, hashes: list[BlockHash]) -> int | None:
        """How many of the prompt's tokens need not be computed; None when it fits into no empty pool."""
        if len(hashes) > self.pool.num_blocks:
            return None
        sequence = make_sequence(key, hashes)
        while not self._reserve(sequence):
            self._end_oldest()
        num_found = sequence.num_computed
        sequence.take_blocks(self.pool, sequence.num_tokens)
        self._computing.append(sequence)
        self._advance(self._num_computing, self._num_parked)
        return num_found

    def end(self) -> None:
        """Compute and release what is left: nothing is held or leased then."""
        self._advance(0, 0)

    def _reserve(self, sequence: Sequence) -> bool:
        hits = self.pool.match(sequence.hashes)
        missing = sequence.num_blocks - len(hits)
        if not self.pool.can_reserve(missing, hits):
            return False
        sequence.claim(self.pool, hits, missing)
        return True

    def _end_oldest(self) -> None:
        if self._parked:
            self._advance(len(self._computing), len(self._parked) - 1)
        else:
            self._advance(len(self._computing) - 1, 0)

    def _advance(self, num_computing: int, num_parked: int) -> None:
        """Finish and release the oldest, until so many are left."""
        while len(self._computing) > num_computing:
            sequence = self._computing.popleft()
            sequence.num_computed = sequence.num_tokens
            sequence.commit_full(self.pool, {})
            self.pool.pin(sequence.block_ids)
            self._parked.append(list(sequence.block_ids))
            sequence.give_back(self.pool)
        while len(self._parked) > num_parked:
            self.pool.unpin(self._parked.popleft())


def make_sequence(key: int, hashes: list[BlockHash]) -> Sequence:
    """A prompt whose blocks have these names; what its tokens are does not matter."""
    tokens = [0] * (len(hashes) * MOONCAKE_BLOCK_TOKENS)
    return Sequence(
        key,
        RequestId(key.to_bytes(16, "little")),
        1,
        tokens,
        len(tokens),
        SamplingParams(),
        list(hashes),
        MOONCAKE_BLOCK_TOKENS,
    )


def named(prompts: Iterable[list[int]]) -> list[list[BlockHash]]:
    return [[BlockHash(number.to_bytes(16, "little")) for number in blocks] for blocks in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=POOL_BLOCKS, help="sizes of the pool")
    options = parser.parse_args()
    prompts = named(mooncake_conversation())
    print(table(prompts, {size: blocks_found(prompts, size) for size in options.blocks}))


def blocks_found(prompts: list[list[BlockHash]], num_blocks: int) -> int:
    """All prompts one after the other through a pool of this size."""
    replay = Replay(BlockPool(num_blocks))
    # A block that ends a prompt saves one token less: the last token is always run.
    return sum(-(-(replay.arrive(*arrival) or 0) // MOONCAKE_BLOCK_TOKENS) for arrival in enumerate(prompts))


def table(prompts: list[list[BlockHash]], found: dict[int, int]) -> str:
    total = sum(map(len, prompts))
    lines = [
        f"{len(prompts):,} prompts, {total:,} blocks of {MOONCAKE_BLOCK_TOKENS} tokens",
        "",
        "| blocks in the pool | tokens | blocks found | hit rate |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {size:,} | {size * MOONCAKE_BLOCK_TOKENS / 1e6:.1f} million | {num_found:,} | {num_found / total:.1%} |"
        for size, num_found in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
