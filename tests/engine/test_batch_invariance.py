"""A sequence gets the same tokens alone and among others, whatever their number and the size of chunks.

In fp32 the last bits of logits may differ with the shape of a batch, tokens do not. In bf16 the first difference must
be a near tie; after it the texts are different texts. Compiled kernels compute each row by itself, so nothing differs.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pdserve.core.logprobs import TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.step import Row, SampleSpec, StepPlan
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import BLOCK_SIZE, make_engine, table
from tests.engine.test_engine_parity import make_prompt

GREEDY = SamplingParams(logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, logprobs=2)
NUM_TOKENS = 8
# A unit in the last place of the logits of these models, some 8 in size, when they are rounded to bf16, on both sides.
NEAR_TIE = 2 * 2**-4
MATRIX = [(size, chunk) for size in (2, 7, 16, 45) for chunk in (64, 256, None)]
FEW = [(2, None), (7, 64), (16, 256), (45, 64)]


@dataclass(slots=True)
class Run:
    """One sequence on its way. tokens: its prompt, then what was drawn; found: log-probabilities of each draw."""

    prompt: list[int]
    params: SamplingParams
    first_block: int
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    found: list[list[TokenLogprob]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def row(self, key: int, chunk: int | None) -> Row:
        missing = self.tokens[self.num_computed :][:chunk]
        is_last = self.num_computed + len(missing) == len(self.tokens)
        samples = (SampleSpec(self.params, len(self.outputs)),) if is_last else ()
        num_blocks = -(-(len(self.prompt) + NUM_TOKENS) // BLOCK_SIZE)
        return Row(key, tuple(missing), self.num_computed, table(self.first_block, num_blocks), samples=samples)


def run_together(engine: Engine, prompts: list[tuple[list[int], SamplingParams]], chunk: int | None) -> list[Run]:
    """Each step has the next token or chunk of every sequence, until all have their tokens."""
    first_block, runs = 0, []
    for prompt, params in prompts:
        runs.append(Run(prompt, params, first_block))
        first_block += -(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)
    while running := {key: run for key, run in enumerate(runs) if len(run.outputs) < NUM_TOKENS}:
        rows = [run.row(key, chunk) for key, run in running.items()]
        result = engine.step(StepPlan(0, tuple(rows)))
        for row in rows:
            run = runs[row.key]
            run.num_computed += len(row.token_ids)
            for draw in result.draws.get(row.key, ()):
                run.tokens.append(draw.token)
                run.found += draw.logprobs
    return runs


def make_others(num_others: int, length: int) -> list[tuple[list[int], SamplingParams]]:
    """Unrelated, longer, and with parameters of their own."""
    return [
        (make_prompt(length - seed, seed=1000 + seed), SAMPLED if seed % 2 else GREEDY) for seed in range(num_others)
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("batches") / "model")


def engines(model_dir: Path, dtype: str, num_rows: int) -> Engine:
    return make_engine(model_dir, dtype, num_blocks=num_rows * 34)


def check(alone: Run, beside: Run, dtype: str, where: str) -> None:
    for position, (mine, theirs) in enumerate(zip(alone.found, beside.found, strict=True)):
        if mine[0].token != theirs[0].token:
            gap = mine[1].logprob - mine[2].logprob
            assert dtype != "float32", where
            assert gap < NEAR_TIE, f"{where}: output {position} differs, and the likeliest two by {gap}"
            return
        assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=1e-4 if dtype == "float32" else 0.1), where


def compare(model_dir: Path, dtype: str, size: int, chunk: int | None, num_prompts: int, length: int) -> None:
    engine = engines(model_dir, dtype, size)
    for index in range(num_prompts):
        subject = (
            make_prompt(5 + 17 * index, seed=index),
            SAMPLED if index % 4 == 3 and dtype == "float32" else GREEDY,
        )
        (alone,) = run_together(engine, [subject], None)
        others = make_others(size - 1, length)
        place = index % size
        together = run_together(engine, [*others[:place], subject, *others[place:]], chunk)
        check(alone, together[place], dtype, f"prompt {index}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "chunk"), FEW)
def test_tokens_are_those_of_the_sequence_alone(model_dir, dtype, size, chunk):
    compare(model_dir, dtype, size, chunk, num_prompts=2, length=150)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "chunk"), MATRIX)
def test_tokens_of_many_prompts_are_those_of_each_alone(model_dir, dtype, size, chunk):
    compare(model_dir, dtype, size, chunk, num_prompts=20, length=480)


def test_compiled_kernels_give_the_same_bits_alone_and_among_others(model_dir):
    engine = engines(model_dir, "bfloat16", 16)
    if engine.model.native is None or not engine.model.native.can_multiply:
        pytest.skip("this CPU does not multiply bf16 itself")
    subject = (make_prompt(70), SAMPLED)
    (alone,) = run_together(engine, [subject], None)
    for size, chunk in ((2, 64), (16, 33)):
        others = make_others(size - 1, 150)
        assert run_together(engine, [*others, subject], chunk)[-1].found == alone.found


def test_the_same_step_repeated_gives_the_same_bits(model_dir):
    engine = engines(model_dir, "float32", 7)
    prompts = make_others(7, 100)
    runs = [[run.found for run in run_together(engine, prompts, 64)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_an_earlier_use_of_its_blocks_leaves_no_trace(model_dir):
    """Slots that were written before and are not this sequence's do not count."""
    subject = (make_prompt(37), GREEDY)
    fresh = run_together(engines(model_dir, "float32", 2), [subject], 16)[0]
    engine = engines(model_dir, "float32", 2)
    run_together(engine, make_others(2, 300), None)
    engine._pool.data[:, :, :, 0].mul_(torch.tensor(1e3))
    assert run_together(engine, [subject], 16)[0].found == fresh.found
