"""Draws follow the exact distribution that the parameters describe, and are independent of each other.

Vocabularies are small enough to write each distribution down. Seeds are fixed, so no test flickers; a limit leaves
room for one false alarm in some 10,000 had they been chosen anew.
"""

import math
from collections import Counter
from itertools import combinations

import pytest
import torch

from pdserve.core.sampling import Bias
from pdserve.engine import sampler
from pdserve.engine.step import SampleSpec
from pdserve.kernels.draw import DrawKernels
from tests.engine.drawing import make_logits, make_spec

VOCAB_SIZE = 12
SEEDS = (0, 1, 2, 3, 77, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1)
NUM_SAMPLES = 400
Z = 3.7


def exact_distribution(logits: list[float], spec: SampleSpec) -> list[float]:
    """Probability of each id, by the documented rules in plain Python."""
    params, outputs = spec.params, spec.history[spec.num_prompt :]
    values = list(logits)
    for bias in params.logit_bias:
        values[bias.token] += bias.value
    for token in set(spec.history):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(outputs):
        values[token] -= outputs.count(token) * params.frequency_penalty + params.presence_penalty
    if spec.output_index < params.min_tokens:
        for token in params.stop_ids:
            values[token] = -math.inf
    best = max(values)
    weights = [math.exp((value - best) / params.temperature) for value in values]
    if params.top_k:
        least = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    wanted, total, kept = params.top_p * sum(weights), 0.0, set()
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if total >= wanted:
            break
        kept.add(token)
        total += weights[token]
    return [weight / total if token in kept else 0.0 for token, weight in enumerate(weights)]


def chi_square_limit(degrees: int) -> float:
    """What chi-square exceeds with the probability of Z standard deviations (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + Z * math.sqrt(spread)) ** 3


def check(counts: Counter, expected: list[float]) -> None:
    """G-test of the counts; an id without probability must not occur. Ids hardly ever drawn are taken together."""
    num_draws = counts.total()
    assert set(counts) <= {token for token, share in enumerate(expected) if share > 0}
    cells, rare = [], [0.0, 0.0]
    for token, share in enumerate(expected):
        cell = [counts[token], share * num_draws]
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    cells += [rare] if rare[1] >= 5 else []
    g = 2 * sum(seen * math.log(seen / due) for seen, due in cells if seen)
    # An id hardly ever drawn that is left out moves the sum by its share of the draws.
    assert g - 2 * sum(seen - due for seen, due in cells) < chi_square_limit(max(len(cells) - 1, 1))


def draws_of(logits: torch.Tensor, specs: list[SampleSpec], native: DrawKernels | None) -> list[int]:
    """Many draws from one row of logits."""
    (draws,) = sampler.draw(logits[None], [specs], native)
    return [found.token for found in draws]


PENALISED = {"prompt": [0, 5], "outputs": [1, 1, 1, 2, 5]}
PARAMS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.15},
    "top-k, then top-p": {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    "min-p, then top-p": {"min_p": 0.1, "top_p": 0.9, "temperature": 1.5},
    "repetition penalty": {"repetition_penalty": 1.8, **PENALISED},
    "frequency and presence penalties": {"frequency_penalty": 0.4, "presence_penalty": -0.9, **PENALISED},
    "biases": {"logit_bias": (Bias(3, 1.5), Bias(7, -2.0), Bias(9, -100.0))},
    "stop ids held back": {"min_tokens": 1, "stop_ids": (4, 8)},
    "everything": {
        "temperature": 1.3,
        "top_k": 8,
        "min_p": 0.01,
        "top_p": 0.95,
        "logit_bias": (Bias(4, 5.0), Bias(10, 1.0)),
        "repetition_penalty": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "min_tokens": 9,
        "stop_ids": (4,),
        **PENALISED,
    },
}


@pytest.mark.parametrize("name", PARAMS)
def test_draws_follow_the_exact_distribution(name, native):
    logits = make_logits(VOCAB_SIZE, seed=5, scale=1.0)
    specs = [make_spec(sample=sample, seed=seed, **PARAMS[name]) for seed in SEEDS for sample in range(NUM_SAMPLES)]
    check(Counter(draws_of(logits, specs, native)), exact_distribution(logits.tolist(), specs[0]))


def test_ids_of_equal_logits_are_drawn_equally_often(native):
    specs = [make_spec(output_index=index, seed=seed) for seed in SEEDS for index in range(NUM_SAMPLES)]
    check(Counter(draws_of(torch.zeros(VOCAB_SIZE), specs, native)), [1 / VOCAB_SIZE] * VOCAB_SIZE)


def test_every_part_of_a_wide_vocabulary_is_drawn_as_often_as_it_should(native):
    logits, part = make_logits(2003, seed=9), 200
    specs = [make_spec(output_index=index, seed=8, temperature=2.0) for index in range(1500)]
    expected = (logits.double() / 2.0).softmax(0)
    counts = Counter(token // part for token in draws_of(logits, specs, native))
    check(counts, [float(share.sum()) for share in expected.split(part)])


def check_independence(pairs: list[tuple[int, int]], shares: list[float]) -> None:
    """Both of a pair follow `shares`, whatever the other one is."""
    size = len(shares)
    check(Counter(a * size + b for a, b in pairs), [one * other for one in shares for other in shares])


@pytest.fixture
def few_ids() -> torch.Tensor:
    return torch.tensor([0.8, 0.0, 0.5, -0.3, 0.2])


def test_each_sample_is_independent_of_every_other(native, few_ids):
    shares, num_draws = few_ids.double().softmax(0).tolist(), 3000
    drawn = {
        sample: draws_of(few_ids, [make_spec(index, sample, seed=21) for index in range(num_draws)], native)
        for sample in (0, 1, 2, 3, 127)
    }
    for one, other in combinations(drawn, 2):
        check_independence(list(zip(drawn[one], drawn[other], strict=True)), shares)


@pytest.mark.parametrize("distance", [1, 2, 256])
def test_a_token_is_independent_of_those_before_it(native, few_ids, distance):
    drawn = draws_of(few_ids, [make_spec(index, seed=33) for index in range(4000)], native)
    pairs = list(zip(drawn, drawn[distance:], strict=False))
    check_independence(pairs, few_ids.double().softmax(0).tolist())


@pytest.mark.parametrize("other_seed", [101, 100 + 2**32, 2**64 - 1 - 100])
def test_seeds_that_differ_little_draw_independently(native, few_ids, other_seed):
    one, other = (
        draws_of(few_ids, [make_spec(index, seed=seed) for index in range(3000)], native) for seed in (100, other_seed)
    )
    check_independence(list(zip(one, other, strict=True)), few_ids.double().softmax(0).tolist())


def test_a_sample_is_no_other_sample_at_another_index(native, few_ids):
    one = draws_of(few_ids, [make_spec(index, 0, seed=5) for index in range(1, 3001)], native)
    other = draws_of(few_ids, [make_spec(index, 1, seed=5) for index in range(3000)], native)
    check_independence(list(zip(one, other, strict=True)), few_ids.double().softmax(0).tolist())


def test_the_check_notices_a_distribution_that_is_slightly_off(native):
    """Or all of the above would prove nothing."""
    logits = make_logits(VOCAB_SIZE, seed=5, scale=1.0)
    specs = [make_spec(sample=sample, seed=seed) for seed in SEEDS for sample in range(NUM_SAMPLES)]
    counts = Counter(draws_of(logits, specs, native))
    with pytest.raises(AssertionError):
        check(counts, exact_distribution(logits.tolist(), make_spec(temperature=1.1)))
