"""The draw is the documented formula, bit for bit, at the edges of its parameters and of floats, too."""

import pytest
import torch

from pdserve.core.sampling import Bias
from pdserve.engine import sampler
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


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1, 2**64 - 1])
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


LIKELIEST_ALONE = [
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"temperature": 5e-324},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"top_k": 1, "temperature": 2.0},
    {"min_p": 1.0},
    {"min_p": 1.0, "top_p": 1e-9, "top_k": 1, "temperature": 2.0},
]


@pytest.mark.parametrize("params", LIKELIEST_ALONE)
def test_extreme_parameters_choose_the_most_likely_token(params, native):
    logits = make_logits(100)
    drawn = {draw_one(logits, make_spec(output_index=index, **params), native) for index in range(10)}
    assert drawn == {int(logits.argmax())}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 2.0}])
def test_a_single_choice_among_equals_is_the_lowest_id(params, native):
    logits = torch.zeros(1000)
    logits[[7, 500, 999]] = 1.0
    assert {draw_one(logits, make_spec(output_index=index, **params), native) for index in range(20)} == {7}


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}, {"temperature": 1e-5}])
def test_ids_that_tie_with_the_last_kept_one_are_kept_too(params, native):
    logits = torch.zeros(1000)
    logits[[7, 500, 999]] = 40.0
    assert {draw_one(logits, make_spec(output_index=index, **params), native) for index in range(40)} == {7, 500, 999}


def test_limits_wider_than_the_vocabulary_are_none(native):
    logits = make_logits(100)
    for index in range(10):
        spec = make_spec(output_index=index, top_k=10**9, top_p=1.0, min_p=0.0)
        assert draw_one(logits, spec, native) == draw_slowly(logits.tolist(), range(100), spec)


def test_stop_ids_are_suppressed_until_min_tokens_are_out(native):
    logits = torch.tensor([5.0, 4.0, 3.0])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_ids": (0, 99)}
    assert [draw_one(logits, make_spec(output_index=index, **params), native) for index in range(3)] == [1, 1, 0]


def test_a_request_as_long_as_its_min_tokens_never_ends_by_a_stop_id(native):
    logits, stop_ids = make_logits(20), (0, 3, 19)
    logits[list(stop_ids)] = 50.0
    for params in ({}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"logit_bias": (Bias(3, 100.0),)}):
        specs = [make_spec(index, min_tokens=30, max_tokens=30, stop_ids=stop_ids, **params) for index in range(30)]
        drawn = draw(logits.repeat(30, 1), specs, native)
        assert not {*drawn} & {*stop_ids}
        assert specs[0].params.finish_reason(30, drawn[-1]) == "length"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": tuple(Bias(token, -100.0) for token in range(30) if token != 17)},
        {"logit_bias": (Bias(17, 100.0),)},
        {"min_tokens": 5, "stop_ids": tuple(token for token in range(30) if token != 17)},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_only_id_that_is_not_banned_is_drawn(params, temperature, native):
    logits = make_logits(30)
    logits[17] = -9.0
    specs = [make_spec(sample=index, seed=4, temperature=temperature, **params) for index in range(50)]
    ((*draws,),) = sampler.draw(logits[None], [specs], native)
    assert {found.token for found in draws} == {17}


INFINITY, NAN, LARGEST = float("inf"), float("nan"), torch.finfo(torch.float32).max
ANY_PARAMS = [
    {"temperature": 0.0},
    {},
    {"temperature": 2.0},
    {"temperature": 1e-300},
    {"top_k": 3, "top_p": 0.5},
    {"min_p": 0.5},
    {"top_p": 1e-9},
    {"prompt": [0, 1], "outputs": [2, 3, 3], "repetition_penalty": 0.01, "frequency_penalty": -2.0},
    {"prompt": [0, 1], "outputs": [2, 3, 3], "repetition_penalty": 10.0, "presence_penalty": 2.0},
    {"logit_bias": (Bias(1, 100.0), Bias(2, -100.0))},
]


@pytest.mark.parametrize(
    ("logits", "possible"),
    [
        ([0.0, -INFINITY, -INFINITY, -INFINITY, 0.0], {0, 4}),
        ([LARGEST, -LARGEST, -LARGEST, -LARGEST, -INFINITY], {0}),
        ([NAN, NAN, -LARGEST, NAN, NAN], {2}),
        ([NAN, 1.0, -INFINITY, 1.0, INFINITY], {4}),
        ([-INFINITY, INFINITY, NAN, -INFINITY, INFINITY], {1, 4}),
        ([-LARGEST, -INFINITY, -LARGEST, -INFINITY, -INFINITY], {0, 2}),
        ([1e30, 1e30, 1e30, 1e30, 1e30], {0, 1, 2, 3, 4}),
        ([1e-45, 0.0, -0.0, -1e-45, 1e-45], {0, 1, 2, 3, 4}),
    ],
)
@pytest.mark.parametrize("params", ANY_PARAMS)
def test_a_logit_that_is_no_number_is_impossible_and_an_infinite_one_the_largest(logits, possible, params, native):
    row = torch.tensor(logits)
    drawn = {draw_one(row, make_spec(sample=sample, **params), native) for sample in range(10)}
    assert drawn <= possible


@pytest.mark.parametrize("logits", [[-INFINITY] * 5, [NAN] * 5, [NAN, -INFINITY, NAN, -INFINITY, -INFINITY]])
@pytest.mark.parametrize("params", [*ANY_PARAMS, {"logprobs": 2}])
def test_where_no_id_can_be_drawn_it_is_id_0(logits, params, native):
    assert draw_one(torch.tensor(logits), make_spec(**params), native) == 0


def test_where_every_id_is_held_back_it_is_id_0(native):
    spec = make_spec(min_tokens=1, stop_ids=tuple(range(30)))
    assert draw_one(make_logits(30), spec, native) == 0


def test_no_rows_draw_nothing(native):
    assert sampler.draw(torch.empty(0, 10), [], native) == []


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


@pytest.mark.parametrize("vocab_size", [64, 1003, 49152])
@pytest.mark.parametrize(
    "limits",
    [
        *({"top_k": top_k} for top_k in (2, 15, 16, 17, 500, 767, 768, 769, 5000)),
        *({"top_p": top_p} for top_p in (0.0001, 0.5, 0.99, 0.999999)),
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 900, "min_p": 0.001, "top_p": 0.7},
    ],
    ids=str,
)
def test_what_is_passed_over_beyond_a_limit_could_not_be_drawn(vocab_size: int, limits, native):
    logits = torch.stack([make_logits(vocab_size, seed=row, scale=[0.01, 1.0, 3.0, 20.0][row % 4]) for row in range(8)])
    # The largest all in one place, and many that are equal.
    logits[4:6], _ = logits[4:6].sort(descending=True)
    logits[6:] = logits[6:].round()
    specs = [make_spec(output_index=row, seed=row, temperature=[0.7, 1.5][row % 2], **limits) for row in range(8)]
    assert draw(logits, specs, native) == draw(logits, specs, None)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_a_likeliest_id_that_is_known_need_not_be_found_again(params, native):
    """Rows whose logits the request changes, or whose log-probabilities it asks for, are drawn the same, too."""
    logits = torch.stack([make_logits(1003, seed=row) for row in range(4)])
    likeliest = logits.argmax(dim=1).tolist()
    changed = make_spec(seed=3, logit_bias=(Bias(likeliest[1], -100.0),), **params)
    samples = [
        (make_spec(seed=1, **params), make_spec(seed=1, sample=1, **params)),
        (changed, make_spec(seed=2, **params)),
        (),
        (make_spec(seed=4, logprobs=2, **params),),
    ]
    assert sampler.draw(logits, samples, native, likeliest) == sampler.draw(logits, samples, native)


def test_what_is_greedy_takes_the_likeliest_id_as_it_is_told(native):
    logits = make_logits(100)[None]
    ((told,),) = sampler.draw(logits, [(make_spec(temperature=0.0),)], native, [7])
    assert told.token == 7
