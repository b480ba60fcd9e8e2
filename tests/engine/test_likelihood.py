"""Log-probabilities are the float32 log-softmax of the raw logits, the likeliest ids those of a stable sort."""

import math

import pytest
import torch

from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.sampling import Bias
from pdserve.engine.likelihood import finite, log_probabilities
from pdserve.engine.sampler import draw
from tests.engine.drawing import make_logits, make_spec

MINUS_INFINITY = float("-inf")


def entries(logprobs: Logprobs) -> list[list[tuple[int, float]]]:
    return [[(entry.token, entry.logprob) for entry in row] for row in logprobs]


def expected_ids(logits: torch.Tensor, num_top: int) -> list[int]:
    """The likeliest, ties to the lowest id."""
    return sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[:num_top]


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 260, 1003, 5000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 10**6])
def test_a_token_comes_with_the_likeliest_ids_best_first(vocab_size, num_top, native):
    logits, token = make_logits(vocab_size, seed=vocab_size), vocab_size // 3
    (found,) = log_probabilities([logits], [token], [num_top], native)
    ((own, *top),) = entries(found)
    exact = logits.double().log_softmax(0)
    assert own == (token, pytest.approx(float(exact[token]), abs=2e-6))
    ids = expected_ids(logits, min(num_top, vocab_size))
    assert top == [(token, pytest.approx(float(exact[token]), abs=2e-6)) for token in ids]
    assert (found.num_top, len(found)) == (min(num_top, vocab_size), 1)


@pytest.mark.parametrize("num_top", [1, 2, 3, 4, 5, 9])
def test_ids_of_equal_logits_come_lowest_first_and_the_lowest_are_taken(num_top, native):
    logits = torch.zeros(3, 300)
    logits[0, [7, 250, 251, 299]] = 2.0
    logits[1, [299, 3]] = torch.tensor([5.0, -5.0])
    for row in range(3):
        (found,) = log_probabilities([logits[row]], [0], [num_top], native)
        ((_, *top),) = entries(found)
        assert [token for token, _ in top] == expected_ids(logits[row], num_top)


def test_rows_that_ask_for_different_numbers_get_what_each_gets_alone(native):
    logits = torch.stack([make_logits(1003, seed=row, scale=[0.0, 1.0, 9.0][row % 3]) for row in range(46)])
    tokens, num_top = [row * 20 for row in range(46)], [row % 6 for row in range(46)]
    together = log_probabilities(logits.unbind(), tokens, num_top, native)
    for row in range(46):
        assert log_probabilities([logits[row]], [tokens[row]], [num_top[row]], native) == [together[row]]


def test_an_id_without_any_probability_has_minus_infinity(native):
    logits = torch.tensor([[0.0, MINUS_INFINITY, 0.0]])
    (found,) = log_probabilities(logits.unbind(), [1], [3], native)
    half = pytest.approx(math.log(0.5))
    assert entries(found) == [[(1, MINUS_INFINITY), (0, half), (2, half), (1, MINUS_INFINITY)]]


def test_no_logit_makes_a_log_probability_that_is_not_a_number(native):
    largest, infinity, nan = torch.finfo(torch.float32).max, float("inf"), float("nan")
    rows = [
        [MINUS_INFINITY] * 4,
        [nan] * 4,
        [nan, 1.0, infinity, MINUS_INFINITY],
        [infinity, infinity, 0.0, nan],
        [largest, -largest, 0.0, largest],
        [-largest] * 4,
        [88.0, 1e30, -1e30, 1e-45],
    ]
    found = log_probabilities(finite(torch.tensor(rows)).unbind(), [1] * len(rows), [4] * len(rows), native)
    values = torch.tensor([[value for _, value in row] for logprobs in found for row in entries(logprobs)])
    assert not values.isnan().any()
    assert (values <= 0).all()
    assert (values[:2] == MINUS_INFINITY).all()
    assert entries(found[2])[0][1:] == [(2, 0.0), (1, -largest), (0, MINUS_INFINITY), (3, MINUS_INFINITY)]


def test_finite_logits_are_not_copied():
    logits = make_logits(100)[None]
    assert finite(logits) is logits


def test_a_draw_tells_what_the_model_found_of_it_before_rules_and_temperature(native):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    spec = make_spec(
        prompt=[3],
        outputs=[0, 0],
        temperature=0.5,
        logit_bias=(Bias(2, 90.0),),
        repetition_penalty=1.5,
        frequency_penalty=2.0,
        min_tokens=9,
        stop_ids=(1,),
        logprobs=2,
    )
    (((found,),)) = draw(logits, [(spec,)], native)
    exact = logits[0].log_softmax(0).tolist()
    assert found.token == 2
    assert entries(found.logprobs) == [[(token, pytest.approx(exact[token])) for token in (2, 0, 1)]]


def test_only_draws_that_ask_have_log_probabilities(native):
    logits = torch.stack([make_logits(50, seed=row) for row in range(2)])
    samples = [(make_spec(seed=1),), (make_spec(seed=1, logprobs=0), make_spec(sample=1, seed=1, logprobs=0))]
    (quiet,), telling = draw(logits, samples, native)
    assert quiet.logprobs == NO_LOGPROBS
    for found in telling:
        exact = float(logits[1].log_softmax(0)[found.token])
        assert entries(found.logprobs) == [[(found.token, pytest.approx(exact))]]


def test_asking_changes_no_token(native):
    logits = torch.stack([make_logits(1003, seed=row) for row in range(8)])
    tokens = [
        [found.token for (found,) in draw(logits, [(make_spec(seed=row, logprobs=asked),) for row in range(8)], native)]
        for asked in (None, 5)
    ]
    assert tokens[0] == tokens[1]
