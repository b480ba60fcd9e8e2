"""What a node knows of its steps before the first request."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import StepPlan, StepResult
from pdserve.engine.step_cost import StepCost, StepWork
from pdserve.engine.warm_up import LENGTHS, warm_up
from tests.checkpoints import make_llama_checkpoint


class PacedEngine(Engine):
    """Says of each step that it took a tenth of what a token is taken for before any was measured."""

    def step(self, plan: StepPlan) -> StepResult:
        return replace(super().step(plan), forward_s=1e-4 * plan.num_tokens)


@pytest.mark.parametrize("num_blocks", [2, 64])
def test_steps_of_every_length_that_fits_are_learned_from(tmp_path: Path, num_blocks: int):
    make_llama_checkpoint(tmp_path)
    engine = PacedEngine.load(tmp_path, dtype="float32")
    spec = engine.kv_spec(8)
    pool = KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)))
    engine.attach(pool)
    cost = warm_up(engine, pool)
    chunk = StepWork().plus_chunk(0, min(max(LENGTHS), num_blocks * 8))
    assert 0 < cost.predict_s(chunk) < StepCost().predict_s(chunk) / 2
    engine.detach()
