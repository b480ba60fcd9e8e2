"""What a request changes about its logits, against the rules written out one id at a time."""

import random

import pytest
import torch

from pdserve.core.sampling import Bias, SamplingParams
from pdserve.engine.logit_rules import apply_rules
from pdserve.engine.sampler import draw
from pdserve.engine.step import Draw, SampleSpec

VOCAB_SIZE = 50


def make_spec(prompt: list[int], outputs: list[int], **params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), len(outputs), 0, (*prompt, *outputs), len(prompt))  # type: ignore[arg-type]


def changed(logits: list[float], spec: SampleSpec) -> list[float]:
    return apply_rules(torch.tensor(logits), spec).tolist()


def slowly(logits: list[float], spec: SampleSpec) -> list[float]:
    params, outputs = spec.params, spec.history[spec.num_prompt :]
    values = list(logits)
    for bias in params.logit_bias:
        values[bias.token] += bias.value
    for token in range(len(values)):
        if token in spec.history:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        if token in outputs:
            values[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
        if token in params.stop_ids and spec.output_index < params.min_tokens:
            values[token] = float("-inf")
    return values


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_rules_is_what_they_say_one_by_one(seed: int):
    rng = random.Random(seed)
    logits = [rng.gauss(0, 3) for _ in range(VOCAB_SIZE)]
    prompt, outputs = ([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(30))] for _ in range(2))
    biased = rng.sample(range(VOCAB_SIZE), rng.randrange(5))
    spec = make_spec(
        prompt,
        outputs,
        presence_penalty=rng.choice([0.0, 0.5, -2.0, 2.0]),
        frequency_penalty=rng.choice([0.0, 0.3, -2.0, 2.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.7, 10.0, 0.01]),
        logit_bias=tuple(Bias(token, rng.choice([-100.0, rng.uniform(-9, 9), 100.0])) for token in biased),
        min_tokens=rng.choice([0, 40]),
        stop_ids=(3, 4),
    )
    assert changed(logits, spec) == pytest.approx(slowly(logits, spec), rel=1e-5, abs=1e-5)


def test_a_prompt_counts_for_the_repetition_penalty_alone():
    logits = [1.0] * VOCAB_SIZE
    assert changed(logits, make_spec([7], [], presence_penalty=1.0, frequency_penalty=1.0)) == logits
    assert changed(logits, make_spec([7], [], repetition_penalty=2.0))[7] == 0.5


def test_a_stop_id_that_is_favoured_still_cannot_be_drawn_too_soon():
    spec = make_spec([1], [], logit_bias=(Bias(3, 100.0),), min_tokens=1, stop_ids=(3, 99))
    assert changed([0.0] * VOCAB_SIZE, spec)[3] == float("-inf")


def test_penalties_and_biases_decide_greedy_draws_too():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    assert draw(logits, [(make_spec([1], []),)], None) == [(Draw(7),)]
    assert draw(logits, [(make_spec([1], [7], frequency_penalty=1.0),)], None) == [(Draw(8),)]
    assert draw(logits, [(make_spec([1], [], logit_bias=(Bias(30, 3.0),)),)], None) == [(Draw(30),)]


def test_a_row_is_copied_only_when_something_about_it_changes():
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    held_back = {"min_tokens": 2, "stop_ids": (3,)}
    unchanged = [make_spec([1], [2]), make_spec([1], [2, 3], **held_back), make_spec([], [], presence_penalty=1.0)]
    assert all(apply_rules(logits, spec) is logits for spec in unchanged)
    changing = [make_spec([1], [2], **held_back), make_spec([1, 2], [3], repetition_penalty=1.5)]
    assert not any(torch.equal(apply_rules(logits, spec), before) for spec in changing)
    assert torch.equal(logits, before)


def test_ids_outside_the_vocabulary_are_passed_over():
    spec = make_spec(
        [VOCAB_SIZE, 1],
        [-1],
        logit_bias=(Bias(VOCAB_SIZE, 5.0), Bias(-1, 5.0)),
        frequency_penalty=1.0,
        min_tokens=5,
        stop_ids=(VOCAB_SIZE + 7, -1),
    )
    assert changed([1.0] * VOCAB_SIZE, spec) == [1.0] * VOCAB_SIZE


def test_a_penalty_that_leaves_the_range_of_floats_ends_at_its_edge():
    largest = torch.finfo(torch.float32).max
    spec = make_spec([7, 8, 9], [], repetition_penalty=0.01)
    logits = [0.0] * 7 + [largest, -largest, float("-inf")] + [0.0] * 40
    assert changed(logits, spec)[7:10] == [largest, pytest.approx(-largest / 100), float("-inf")]
    spec = make_spec([7, 8, 9], [], repetition_penalty=10.0)
    assert changed(logits, spec)[7:10] == [pytest.approx(largest / 10), -largest, float("-inf")]
