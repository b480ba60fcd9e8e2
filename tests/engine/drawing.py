"""Logits, specs and the documented formula an id at a time, for tests of drawing."""

import math
from collections.abc import Iterable, Sequence

import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine import sampler
from pdserve.engine.step import SampleSpec
from pdserve.kernels.draw import DrawKernels


def make_spec(
    output_index: int = 0,
    sample: int = 0,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    **params: object,
) -> SampleSpec:
    """Temperature 1 unless another is given; output_index counts the outputs if there are any."""
    resolved = SamplingParams(**{"temperature": 1.0} | params)  # type: ignore[arg-type]
    return SampleSpec(resolved, len(outputs) or output_index, sample, (*prompt, *outputs), len(prompt))


def make_logits(vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, specs: Sequence[SampleSpec], native: DrawKernels | None) -> list[int]:
    """One token a row."""
    return [found.token for (found,) in sampler.draw(logits, [(spec,) for spec in specs], native)]


def draw_one(logits: torch.Tensor, spec: SampleSpec, native: DrawKernels | None) -> int:
    return draw(logits[None], [spec], native)[0]


def draw_slowly(logits: Sequence[float], kept: Iterable[int], spec: SampleSpec) -> int:
    """The formula in plain Python, an id at a time."""
    seed, temperature = spec.params.seed, spec.params.temperature

    def score(token: int) -> float:
        counter = [token >> 2, spec.output_index, spec.sample, 0]
        words = philox_slowly(counter, [seed & 0xFFFFFFFF, seed >> 32])
        exponential = -math.log1p(-(words[token & 3] + 0.5) * 2**-32)
        return logits[token] / temperature - math.log(exponential)

    return max(kept, key=lambda token: (score(token), -token))


def philox_slowly(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c
