"""The draw is the documented formula, bit for bit, and follows the exact distribution."""

import math
from collections import Counter

import pytest
import torch

from pdserve.engine.sampler import philox
from tests.engine.drawing import draw, draw_one, draw_slowly, make_logits, make_spec

# Published known answers of philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    def word(value):
        return torch.tensor([value])

    words = philox([word(value) for value in counter], [word(value) for value in key])
    assert [int(value) for value in words] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("vocab_size", [5, 260, 1003])
def test_a_draw_is_the_documented_formula(seed, vocab_size, native):
    logits = make_logits(vocab_size, seed=vocab_size)
    for index in range(5):
        spec = make_spec(output_index=index, sample=index % 2, seed=seed, temperature=0.7)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), range(vocab_size), spec)


def test_ids_too_unlikely_to_be_drawn_are_skipped_without_changing_the_draw(native):
    logits = make_logits(500, scale=30.0)
    for index in range(20):
        spec = make_spec(output_index=index, seed=3)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), range(500), spec)


def test_top_k_keeps_the_k_largest(native):
    logits = make_logits(200)
    kept = logits.topk(7).indices.tolist()
    for index in range(20):
        spec = make_spec(output_index=index, top_k=7, temperature=3.0)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), kept, spec)


@pytest.mark.parametrize(("top_p", "vocab_size"), [(0.5, 200), (0.95, 200), (0.999, 3000)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, vocab_size, native):
    logits = make_logits(vocab_size)
    order = logits.sort(descending=True).indices.tolist()
    probabilities = (logits.double() / 2.0).softmax(0)
    kept, total = [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += float(probabilities[token])
    for index in range(20):
        spec = make_spec(output_index=index, top_p=top_p, temperature=2.0)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), kept, spec)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p, native):
    logits = make_logits(200)
    probabilities = (logits.double() / 2.0).softmax(0)
    kept = [token for token in range(200) if probabilities[token] >= min_p * probabilities.max()]
    for index in range(20):
        spec = make_spec(output_index=index, min_p=min_p, temperature=2.0)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), kept, spec)


def test_top_p_acts_on_what_min_p_left(native):
    logits = torch.tensor([2.0, 1.9, 1.8, 1.0])
    drawn = {draw_one(logits, make_spec(output_index=i, min_p=0.85, top_p=0.5), native) for i in range(50)}
    assert drawn == {0}


def test_top_p_of_a_flat_row_looks_past_its_first_candidates(native):
    drawn = {draw_one(torch.zeros(4000), make_spec(output_index=index, top_p=0.9), native) for index in range(50)}
    assert len(drawn) > 40


def test_top_p_acts_on_what_top_k_left(native):
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7])
    drawn = {draw_one(logits, make_spec(output_index=i, top_k=2, top_p=0.5), native) for i in range(50)}
    assert drawn == {0}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"temperature": 1e-300}])
def test_extreme_parameters_choose_the_most_likely_token(params, native):
    logits = make_logits(100)
    assert draw_one(logits, make_spec(**params), native) == int(logits.argmax())


def test_a_greedy_tie_goes_to_the_lowest_id(native):
    logits = torch.zeros(1000)
    logits[[7, 500, 999]] = 1.0
    assert draw_one(logits, make_spec(temperature=0.0), native) == 7


def test_stop_ids_are_suppressed_until_min_tokens_are_out(native):
    logits = torch.tensor([5.0, 4.0, 3.0])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_ids": (0, 99)}
    assert [draw_one(logits, make_spec(output_index=index, **params), native) for index in range(3)] == [1, 1, 0]


def test_a_mixed_batch_draws_what_each_row_draws_alone(native):
    specs = [
        make_spec(temperature=0.0),
        make_spec(seed=1),
        make_spec(seed=1, sample=1),
        make_spec(seed=2, top_k=5, output_index=9),
        make_spec(seed=3, top_p=0.8, temperature=1.7),
        make_spec(seed=4, top_k=900, top_p=0.99, min_tokens=3, stop_ids=(1, 2)),
    ]
    logits = torch.stack([make_logits(1000, seed=row) for row in range(len(specs))])
    alone = [draw_one(logits[row], spec, native) for row, spec in enumerate(specs)]
    assert draw(logits, specs, native) == alone
    assert draw(logits.flip(0), specs[::-1], native) == alone[::-1]


def test_indices_and_samples_draw_independently(native):
    logits = torch.zeros(5000)
    drawn = [draw_one(logits, make_spec(output_index=index, sample=s), native) for index in range(20) for s in range(2)]
    assert len(set(drawn)) > 35


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"temperature": 0.5}, {"top_p": 0.7}])
def test_draws_follow_the_exact_distribution(params, native):
    logits, num_draws = make_logits(12, seed=5, scale=1.0), 4000
    temperature = params.get("temperature", 1.0)
    expected = (logits.double() / temperature).softmax(0)
    order = expected.sort(descending=True)
    if "top_k" in params:
        expected[order.indices[5:]] = 0
    if "top_p" in params:
        expected[order.indices[order.values.cumsum(0) - order.values >= 0.7]] = 0
    expected /= expected.sum()
    specs = [make_spec(output_index=index, seed=11, **params) for index in range(num_draws)]
    counts = Counter(draw(logits.repeat(num_draws, 1), specs, native))
    kept = [token for token in range(12) if expected[token] > 0]
    assert set(counts) <= set(kept)
    chi_square = sum((counts[t] - num_draws * expected[t]) ** 2 / (num_draws * expected[t]) for t in kept)
    # Mean degrees of freedom, six standard deviations above it; the seed is fixed, so this never flickers.
    assert chi_square < len(kept) + 6 * math.sqrt(2 * len(kept))


def test_no_rows_draw_nothing(native):
    assert draw(torch.empty(0, 10), [], native) == []


def test_logits_that_are_not_numbers_still_give_an_id_of_the_vocabulary(native):
    logits = torch.full((3, 10), float("nan"))
    tokens = draw(logits, [make_spec(temperature=0.0), make_spec(), make_spec(top_k=3, top_p=0.5)], native)
    assert all(0 <= token < 10 for token in tokens)


@pytest.mark.parametrize("vocab_size", [1, 3, 15, 16, 17, 63, 64, 65, 1003, 49152])
def test_both_ways_draw_the_same_ids(vocab_size: int, native):
    rows, params = 40, [{}, {"temperature": 0.05}, {"temperature": 2.0}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}]
    logits = torch.stack(
        [make_logits(vocab_size, seed=row, scale=[0.0, 1.0, 5.0, 40.0][row % 4]) for row in range(rows)]
    )
    specs = [
        make_spec(output_index=row, sample=row % 3, seed=row**9, **params[row % len(params)]) for row in range(rows)
    ]
    assert draw(logits, specs, native) == draw(logits, specs, None)
