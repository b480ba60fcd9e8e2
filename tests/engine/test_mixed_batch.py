"""What a row draws does not depend on the rows around it: every kind of request alone, together and in any order."""

import random
from collections.abc import Sequence

import pytest
import torch

from pdserve.core.sampling import Bias
from pdserve.engine import sampler
from pdserve.engine.step import Draw, SampleSpec
from pdserve.kernels.draw import DrawKernels
from tests.engine.drawing import make_logits, make_spec

NUM_ROWS = 46


def make_samples(row: int, vocab_size: int) -> tuple[SampleSpec, ...]:
    """The row's own mix: every parameter is off in some rows and at several values in others."""
    rng = random.Random(row)
    prompt, outputs = (
        [rng.randrange(vocab_size) for _ in range(rng.choice((0, 1, 40)))] for _ in ("prompt", "outputs")
    )
    params = {
        "temperature": (0.0, 1.0, 0.3, 2.0, 1e-5)[row % 5],
        "top_k": (0, 5, 1, 900)[row % 4],
        "top_p": (1.0, 0.9, 1e-9)[row % 3],
        "min_p": (0.0, 0.0, 0.05, 0.0, 1.0)[row // 5 % 5],
        "repetition_penalty": (1.0, 1.0, 10.0, 0.01)[row // 3 % 4],
        "presence_penalty": (0.0, 2.0, -2.0)[row // 2 % 3],
        "frequency_penalty": (0.0, 0.0, 0.5)[row // 4 % 3],
        "logit_bias": tuple(Bias(token, rng.uniform(-9, 9)) for token in range(row % 3)),
        "min_tokens": (0, 50)[row // 2 % 2],
        "stop_ids": (2, 7)[: row % 3],
        "logprobs": (None, 0, 5, None, 20)[row // 2 % 5],
        "seed": rng.choice((0, 2**63 - 1, 2**64 - 1, rng.getrandbits(64))),
    }
    num_samples = (1, 1, 4, 1, 2)[row // 2 % 5]
    if row % 7:
        return tuple(make_spec(row, sample, prompt, outputs, **params) for sample in range(num_samples))
    # Samples that went different ways have outputs of their own.
    return tuple(make_spec(row, sample, prompt, [*outputs, sample], **params) for sample in range(num_samples))


def make_batch(vocab_size: int) -> tuple[torch.Tensor, list[tuple[SampleSpec, ...]]]:
    scales = (3.0, 1.0, 12.0, 0.0)
    logits = torch.stack([make_logits(vocab_size, seed=row, scale=scales[row % 4]) for row in range(NUM_ROWS)])
    # Rounded logits have ties.
    logits[::3] = logits[::3].bfloat16().float()
    return logits, [make_samples(row, vocab_size) for row in range(NUM_ROWS)]


def draw_alone(
    logits: torch.Tensor, samples: Sequence[Sequence[SampleSpec]], native: DrawKernels | None
) -> list[tuple[Draw, ...]]:
    return [sampler.draw(logits[row].clone()[None], [samples[row]], native)[0] for row in range(len(samples))]


@pytest.mark.parametrize("vocab_size", [260, 1003, pytest.param(49152, marks=pytest.mark.slow)])
def test_a_row_draws_the_same_bytes_alone_and_among_45_others_in_any_order(vocab_size, native):
    logits, samples = make_batch(vocab_size)
    alone = draw_alone(logits, samples, native)
    for order in (range(NUM_ROWS), range(NUM_ROWS)[::-1], random.Random(1).sample(range(NUM_ROWS), NUM_ROWS)):
        together = sampler.draw(logits[list(order)], [samples[row] for row in order], native)
        assert together == [alone[row] for row in order]


@pytest.mark.parametrize("num_rows", [2, 7, 16])
def test_a_row_draws_the_same_bytes_in_every_smaller_batch(num_rows, native):
    logits, samples = make_batch(1003)
    alone = draw_alone(logits, samples, native)
    for first in range(0, NUM_ROWS - num_rows, num_rows):
        rows = slice(first, first + num_rows)
        assert sampler.draw(logits[rows], samples[rows], native) == alone[rows]


def test_a_sample_draws_the_same_alone_and_beside_its_siblings(native):
    logits, samples = make_batch(1003)
    together = sampler.draw(logits, samples, native)
    for row, (specs, draws) in enumerate(zip(samples, together, strict=True)):
        for spec, found in zip(specs, draws, strict=True):
            assert sampler.draw(logits[row : row + 1], [(spec,)], native) == [(found,)]


def test_draws_with_different_limits_from_the_same_logits_are_those_of_each_alone(native):
    logits = make_logits(1003)[None]
    # Each differs from its neighbours in one of them.
    others = [{"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.7}, {"temperature": 9.0}, {"temperature": 0.0}]
    limits = [params for other in others for params in ({"temperature": 2.0}, {"temperature": 2.0} | other)]
    specs = [make_spec(index, seed=6, **params) for index in range(5) for params in limits]
    (together,) = sampler.draw(logits, [specs], native)
    assert list(together) == [sampler.draw(logits, [(spec,)], native)[0][0] for spec in specs]


def test_the_batch_has_every_kind_of_request_and_both_ways_draw_the_same(native):
    logits, samples = make_batch(1003)
    params = [specs[0].params for specs in samples]
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logprobs"):
        assert len({getattr(param, name) for param in params}) > 1
    assert {len(specs) for specs in samples} == {1, 2, 4}
    drawn, in_torch = (
        [draw for draws in sampler.draw(logits, samples, way) for draw in draws] for way in (native, None)
    )
    assert [draw.token for draw in drawn] == [draw.token for draw in in_torch]
    assert [draw.logprobs.token_ids for draw in drawn] == [draw.logprobs.token_ids for draw in in_torch]
    values, expected = (
        [entry.logprob for draw in draws for entries in draw.logprobs for entry in entries]
        for draws in (drawn, in_torch)
    )
    assert values == pytest.approx(expected, abs=1e-5)


def test_drawing_leaves_the_logits_as_they_were(native):
    logits, samples = make_batch(260)
    before = logits.clone()
    sampler.draw(logits, samples, native)
    assert torch.equal(logits, before)
