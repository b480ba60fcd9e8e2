"""The draw is the documented formula, bit for bit, and follows the exact distribution."""

import math
from collections import Counter

import pytest
import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine import sampler
from pdserve.engine.sampler import philox
from pdserve.engine.step import SampleSpec
from pdserve.kernels.draw import DrawRows, load_draw

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


@pytest.fixture(autouse=True, params=["torch", "native"])
def draw_rows(request: pytest.FixtureRequest) -> None:
    """Every test draws in torch, then in C++."""
    global way
    way = None if request.param == "torch" else load_draw()
    if request.param == "native" and way is None:
        pytest.skip("no compiler for the C++ kernels")


way: DrawRows | None = None


def draw(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    return sampler.draw(logits, specs, way)


def make_spec(output_index: int = 0, sample: int = 0, **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**{"temperature": 1.0} | params), output_index, sample)


def draw_one(logits: torch.Tensor, spec: SampleSpec) -> int:
    return draw(logits[None].clone(), [spec])[0]


def draw_slowly(logits: list[float], kept: list[int], spec: SampleSpec) -> int:
    """The formula in plain Python, an id at a time."""
    seed, temperature = spec.params.seed, spec.params.temperature

    def score(token: int) -> float:
        counter = [token >> 2, spec.output_index, spec.sample, 0]
        words = philox_slowly(counter, [seed & 0xFFFFFFFF, seed >> 32])
        exponential = -math.log1p(-(words[token & 3] + 0.5) * 2**-32)
        return logits[token] / temperature - math.log(exponential)

    return max(kept, key=lambda token: (score(token), -token))


def philox_slowly(counter: list[int], key: list[int]) -> list[int]:
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c


def make_logits(vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    def word(value):
        return torch.tensor([value])

    words = philox([word(value) for value in counter], [word(value) for value in key])
    assert [int(value) for value in words] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("vocab_size", [5, 260, 1003])
def test_a_draw_is_the_documented_formula(seed, vocab_size):
    logits = make_logits(vocab_size, seed=vocab_size)
    for index in range(5):
        spec = make_spec(output_index=index, sample=index % 2, seed=seed, temperature=0.7)
        assert draw_one(logits, spec) == draw_slowly(logits.tolist(), range(vocab_size), spec)


def test_ids_too_unlikely_to_be_drawn_are_skipped_without_changing_the_draw():
    logits = make_logits(500, scale=30.0)
    for index in range(20):
        spec = make_spec(output_index=index, seed=3)
        assert draw_one(logits, spec) == draw_slowly(logits.tolist(), range(500), spec)


def test_top_k_keeps_the_k_largest():
    logits = make_logits(200)
    kept = logits.topk(7).indices.tolist()
    for index in range(20):
        spec = make_spec(output_index=index, top_k=7, temperature=3.0)
        assert draw_one(logits, spec) == draw_slowly(logits.tolist(), kept, spec)


@pytest.mark.parametrize(("top_p", "vocab_size"), [(0.5, 200), (0.95, 200), (0.999, 3000)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, vocab_size):
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
        assert draw_one(logits, spec) == draw_slowly(logits.tolist(), kept, spec)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p):
    logits = make_logits(200)
    probabilities = (logits.double() / 2.0).softmax(0)
    kept = [token for token in range(200) if probabilities[token] >= min_p * probabilities.max()]
    for index in range(20):
        spec = make_spec(output_index=index, min_p=min_p, temperature=2.0)
        assert draw_one(logits, spec) == draw_slowly(logits.tolist(), kept, spec)


def test_top_p_acts_on_what_min_p_left():
    logits = torch.tensor([2.0, 1.9, 1.8, 1.0])
    drawn = {draw_one(logits, make_spec(output_index=i, min_p=0.85, top_p=0.5)) for i in range(50)}
    assert drawn == {0}


def test_top_p_of_a_flat_row_looks_past_its_first_candidates():
    drawn = {draw_one(torch.zeros(4000), make_spec(output_index=index, top_p=0.9)) for index in range(50)}
    assert len(drawn) > 40


def test_top_p_acts_on_what_top_k_left():
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7])
    drawn = {draw_one(logits, make_spec(output_index=i, top_k=2, top_p=0.5)) for i in range(50)}
    assert drawn == {0}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"temperature": 1e-300}])
def test_extreme_parameters_choose_the_most_likely_token(params):
    logits = make_logits(100)
    assert draw_one(logits, make_spec(**params)) == int(logits.argmax())


def test_a_greedy_tie_goes_to_the_lowest_id():
    logits = torch.zeros(1000)
    logits[[7, 500, 999]] = 1.0
    assert draw_one(logits, make_spec(temperature=0.0)) == 7


def test_stop_ids_are_suppressed_until_min_tokens_are_out():
    logits = torch.tensor([5.0, 4.0, 3.0])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_ids": (0, 99)}
    assert [draw_one(logits, make_spec(output_index=index, **params)) for index in range(3)] == [1, 1, 0]


def test_a_mixed_batch_draws_what_each_row_draws_alone():
    specs = [
        make_spec(temperature=0.0),
        make_spec(seed=1),
        make_spec(seed=1, sample=1),
        make_spec(seed=2, top_k=5, output_index=9),
        make_spec(seed=3, top_p=0.8, temperature=1.7),
        make_spec(seed=4, top_k=900, top_p=0.99, min_tokens=3, stop_ids=(1, 2)),
    ]
    logits = torch.stack([make_logits(1000, seed=row) for row in range(len(specs))])
    alone = [draw_one(logits[row], spec) for row, spec in enumerate(specs)]
    assert draw(logits.clone(), specs) == alone
    assert draw(logits.flip(0).clone(), specs[::-1]) == alone[::-1]


def test_indices_and_samples_draw_independently():
    logits = torch.zeros(5000)
    drawn = [draw_one(logits, make_spec(output_index=index, sample=s)) for index in range(20) for s in range(2)]
    assert len(set(drawn)) > 35


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"temperature": 0.5}, {"top_p": 0.7}])
def test_draws_follow_the_exact_distribution(params):
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
    counts = Counter(draw(logits.repeat(num_draws, 1), specs))
    kept = [token for token in range(12) if expected[token] > 0]
    assert set(counts) <= set(kept)
    chi_square = sum((counts[t] - num_draws * expected[t]) ** 2 / (num_draws * expected[t]) for t in kept)
    # Mean degrees of freedom, six standard deviations above it; the seed is fixed, so this never flickers.
    assert chi_square < len(kept) + 6 * math.sqrt(2 * len(kept))


def test_no_rows_draw_nothing():
    assert draw(torch.empty(0, 10), []) == []


def test_logits_that_are_not_numbers_still_give_an_id_of_the_vocabulary():
    logits = torch.full((3, 10), float("nan"))
    tokens = draw(logits, [make_spec(temperature=0.0), make_spec(), make_spec(top_k=3, top_p=0.5)])
    assert all(0 <= token < 10 for token in tokens)


@pytest.mark.parametrize("vocab_size", [1, 3, 15, 16, 17, 63, 64, 65, 1003, 49152])
def test_both_ways_draw_the_same_ids(vocab_size: int):
    rows, params = 40, [{}, {"temperature": 0.05}, {"temperature": 2.0}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}]
    logits = torch.stack(
        [make_logits(vocab_size, seed=row, scale=[0.0, 1.0, 5.0, 40.0][row % 4]) for row in range(rows)]
    )
    specs = [
        make_spec(output_index=row, sample=row % 3, seed=row**9, **params[row % len(params)]) for row in range(rows)
    ]
    assert draw(logits.clone(), specs) == sampler.draw(logits.clone(), specs)
