"""The in-process cluster on a tiny random Llama in fp32, and what its answers must be.

Fixtures `tiny_model` and `oracle` (conftest) hand out one checkpoint and one GreedyOracle a run.
"""

import random
from pathlib import Path

import torch

from pdserve.core.ids import RequestId
from pdserve.core.logprobs import Logprobs
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool
from tests.checkpoints import VOCAB_SIZE
from tests.in_process import InProcessCluster

BLOCK_SIZE = 16
NUM_OUTPUTS = 20
# What fp32 allows two runs of other batch shapes to differ by.
LOGPROB_TOLERANCE = 1e-4


class GreedyOracle:
    """Greedy continuation by transformers, remembered by prompt."""

    def __init__(self, model_dir: Path):
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._known: dict[tuple[float, ...], list[int]] = {}

    def __call__(self, prompt: list[int], num_tokens: int = NUM_OUTPUTS, repetition_penalty: float = 1.0) -> list[int]:
        key = (repetition_penalty, *prompt)
        if len(self._known.get(key, [])) < num_tokens:
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                repetition_penalty=repetition_penalty,
            )
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key][:num_tokens]


def make_prompt(num_tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]


def make_cluster(model_dir: Path, num_prefill: int = 1, **options: object) -> InProcessCluster:
    spec = Engine.load(model_dir, dtype="float32").kv_spec(BLOCK_SIZE)

    def make_engine(pool: KVPool) -> Engine:
        engine = Engine.load(model_dir, dtype="float32")
        engine.attach(pool)
        # What nobody wrote must not matter.
        pool.data.fill_(float("nan"))
        return engine

    return InProcessCluster(num_prefill, spec=spec, make_engine=make_engine, **options)  # type: ignore[arg-type]


def logprobs_of(cluster: InProcessCluster, request: RequestId, sample: int = 0) -> list[tuple[int, float]]:
    """Ids and log-probabilities of all that is listed of a sample's tokens, flat and in order."""
    joined = Logprobs.join(cluster.outcomes[request].logprobs[sample])
    return [(each.token, each.logprob) for row in joined for each in row]


def assert_close(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """The same ids with the same log-probabilities, as far as fp32 allows."""
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, value), (_, wanted) in zip(found, expected, strict=True):
        assert abs(value - wanted) <= LOGPROB_TOLERANCE
