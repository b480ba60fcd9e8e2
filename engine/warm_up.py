"""A few steps before the first request, so that it pays no first-time cost and the node knows what steps take.

Called once in the engine thread, by kvtransfer/node_parts.py, before the node says hello. Owns nothing.
"""

from pdserve.core.ids import BlockId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool
from pdserve.engine.step import Row, SampleSpec, StepPlan
from pdserve.engine.step_cost import StepCost, StepWork

# Tokens of a step: one that decodes, and chunks of which the second tells what a token adds.
LENGTHS = (1, 16, 64)


def warm_up(engine: Engine, pool: KVPool) -> StepCost:
    """Run steps of several lengths over the pool's first blocks, whose content is lost; the cost learned from them."""
    cost = StepCost()
    most = min(engine.max_model_len, pool.num_blocks * pool.spec.block_size)
    for length in LENGTHS:
        num_tokens = min(length, most)
        blocks = tuple(BlockId(index) for index in range(pool.spec.num_blocks_for(num_tokens)))
        row = Row(0, (0,) * num_tokens, 0, blocks, 0, (SampleSpec(SamplingParams(max_tokens=1), 0),))
        # The first run of each length prepares memory and code.
        engine.step(StepPlan(0, (row,)))
        cost.learn(StepWork.of((row,)), engine.step(StepPlan(0, (row,))).forward_s)
    return cost
