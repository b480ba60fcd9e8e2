"""Scores of prompt tokens equal transformers' log-softmax, however the prompt is cut, and change nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import LayoutError
from pdserve.core.logprobs import Logprobs
from pdserve.core.sampling import SamplingParams
from pdserve.engine import engine as engine_module
from pdserve.engine.engine import Engine
from pdserve.engine.step import Row, SampleSpec, Scored, StepPlan, StepResult
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import GREEDY, make_engine, table
from tests.engine.test_engine_parity import make_prompt, reference_model

NUM_TOP = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("scored") / "model")


def expected_scores(model_dir: Path, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab_size] log-probabilities of what follows each token."""
    with torch.inference_mode():
        return reference_model(model_dir)(torch.tensor([prompt])).logits[0].log_softmax(-1)


def scored_row(prompt: list[int], start: int, end: int, key: int = 0, first_block: int = 0, **more: object) -> Row:
    """A chunk whose every token with a successor in the prompt is scored."""
    samples = (SampleSpec(GREEDY, 0),) if end == len(prompt) else ()
    scored = Scored(tuple(prompt[start + 1 : end + 1]), NUM_TOP)
    fields = {"write_from": 0, "samples": samples, "scored": scored} | more
    return Row(key, tuple(prompt[start:end]), start, table(first_block, 12), **fields)  # type: ignore[arg-type]


def run(engine: Engine, *rows: Row) -> StepResult:
    return engine.step(StepPlan(0, rows))


def check(found: Logprobs, prompt: list[int], expected: torch.Tensor) -> None:
    assert len(found) == len(prompt) - 1
    top = expected.topk(NUM_TOP)
    for position, ((own, *likeliest), token) in enumerate(zip(found, prompt[1:], strict=True)):
        assert own.token == token
        assert own.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        assert [entry.token for entry in likeliest] == top.indices[position].tolist()
        assert [entry.logprob for entry in likeliest] == pytest.approx(top.values[position].tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 150])
def test_scores_equal_transformers_for_every_chunk_size(model_dir, chunk):
    engine, prompt = make_engine(model_dir), make_prompt(150)
    parts = [
        run(engine, scored_row(prompt, start, min(start + chunk, 150))).scores[0] for start in range(0, 150, chunk)
    ]
    check(Logprobs.join(parts), prompt, expected_scores(model_dir, prompt))


def test_scores_come_in_slices_that_hold_few_logits(model_dir, monkeypatch):
    engine, prompt = make_engine(model_dir), make_prompt(150)
    held: list[int] = []
    head = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda outputs: held.append(len(outputs)) or head(outputs))
    monkeypatch.setattr(engine_module, "SCORED_AT_ONCE", 40)
    check(run(engine, scored_row(prompt, 0, 150)).scores[0], prompt, expected_scores(model_dir, prompt))
    assert sorted(held) == [29, 40, 40, 40]


def test_tokens_of_found_blocks_are_scored_and_their_slots_not_written(model_dir):
    engine, prompt = make_engine(model_dir), make_prompt(60)
    run(engine, Row(0, tuple(prompt), 0, table(0, 12)))
    before = engine._pool.data.clone()
    found = run(engine, scored_row(prompt, 0, 60, write_from=60)).scores[0]
    check(found, prompt, expected_scores(model_dir, prompt))
    assert torch.equal(engine._pool.data.nan_to_num(7.0), before.nan_to_num(7.0))


def test_rows_of_one_step_each_get_their_own_scores(model_dir):
    """Chunks and single tokens, with and without draws, in an order that the batch does not keep."""
    engine = make_engine(model_dir, num_blocks=60)
    prompts = {key: make_prompt(length, seed=key) for key, length in enumerate((40, 33, 90, 2, 61))}
    starts = {0: 39, 1: 20, 2: 0, 3: 1, 4: 60}
    earlier = {
        key: run(engine, scored_row(prompts[key], 0, start, key, 12 * key)).scores[key]
        for key, start in starts.items()
        if start
    }
    rows = [scored_row(prompt, starts[key], len(prompt), key, 12 * key) for key, prompt in prompts.items()]
    scores = run(engine, *rows).scores
    assert set(scores) == set(prompts)
    for key, prompt in prompts.items():
        parts = [earlier[key], scores[key]] if key in earlier else [scores[key]]
        check(Logprobs.join(parts), prompt, expected_scores(model_dir, prompt))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring_changes_no_bit_of_what_else_the_step_computes(model_dir, dtype):
    params = SamplingParams(temperature=1.0, seed=5, logprobs=4)
    rows = (
        Row(0, tuple(make_prompt(45)), 0, table(0, 12), samples=(SampleSpec(params, 0),)),
        Row(1, tuple(make_prompt(30, seed=2)), 0, table(12, 12)),
        Row(2, (9,), 50, table(24, 12), samples=(SampleSpec(params, 1),)),
        Row(3, (8,), 0, table(36, 12)),
    )
    scored = tuple(replace(row, scored=Scored(row.token_ids[:29], 2)) for row in rows)
    results, pools = [], []
    for these in (rows, scored):
        engine = make_engine(model_dir, dtype, num_blocks=60)
        run(engine, Row(2, tuple(make_prompt(50, seed=3)), 0, table(24, 12)))
        results.append(run(engine, *these))
        pools.append(engine._pool.data.float().nan_to_num(7.0))
    assert results[0].draws == results[1].draws
    assert torch.equal(*pools)
    assert results[0].scores == {}
    assert {key: len(found) for key, found in results[1].scores.items()} == {0: 29, 1: 29, 2: 1, 3: 1}


def test_a_row_with_nothing_to_score_has_an_empty_answer(model_dir):
    result = run(make_engine(model_dir), scored_row([7], 0, 1))
    assert len(result.scores[0]) == 0
    assert len(result.draws[0]) == 1


@pytest.mark.parametrize(
    ("scored", "complaint"),
    [
        (Scored((1, 2, 3, 4), 1), "row 0 of 3 tokens: cannot score 4"),
        (Scored((1, 260), 1), "row 0 scores a token id outside the vocabulary of 260"),
        (Scored((-1,), 1), "outside the vocabulary"),
        (Scored((1,), -1), "-1 likeliest ids"),
    ],
)
def test_scores_that_do_not_fit_their_row_are_refused(model_dir, scored, complaint):
    engine = make_engine(model_dir)
    with pytest.raises(LayoutError, match=complaint):
        run(engine, Row(0, (5, 6, 7), 0, table(0, 12), scored=scored))
    assert engine._pool.data.isnan().all()
