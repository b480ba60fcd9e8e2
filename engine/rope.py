"""Rotary position embedding: frequencies of the model, angles of a step. Used by engine/llama.py.

Angles are computed in fp32 from the step's positions, so there is no table as long as the context.
"""

import math

import torch
from torch import Tensor

from pdserve.core.model_config import ModelConfig, RopeScaling


class Rope:
    """Owns inv_freq [head_dim / 2] float32, computed as transformers does, so that fp32 runs agree with it."""

    def __init__(self, config: ModelConfig, device: str | torch.device):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        inv_freq = 1.0 / (config.rope_theta**exponents)
        if config.rope_scaling is not None:
            inv_freq = _stretch(inv_freq, config.rope_scaling)
        self.inv_freq = inv_freq.to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [num_tokens, 1, head_dim] float32, as kernels.reference.rotate takes them.

        positions  [num_tokens] int64
        """
        freqs = positions.float()[:, None] * self.inv_freq
        cos, sin = freqs.cos(), freqs.sin()
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _stretch(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: divide by `factor` below low_freq_factor turns of the original context, keep above
    high_freq_factor turns, and interpolate linearly in the number of turns between."""
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / scaling.factor + keep * inv_freq
