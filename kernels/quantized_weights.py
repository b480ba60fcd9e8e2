"""Weights of 8 or 4 bits: how they are rounded, and how cpp/linear.cpp wants them packed.

    format  a weight has                                      a number of a row has        multiplied by
    BF16    what the model gives it                           bf16                         cpp/panel.h
    INT4    4 bits; scale and least one of GROUP inputs bf16  bf16                         cpp/panel_nibbles.h
    INT8    8 bits; scale of an output fp32                   16 bits; scale of the row    cpp/panel_bytes.h
    BYTES   the same                                          8 bits; scale of the row     cpp/panel_bytes.h

INT4 and INT8 make a step of few rows faster, which waits for weights; BYTES one of many, which waits for products.
Rounding is to nearest: of 8 and 16 bits around zero, of 4 between the least and the largest weight of a group. Called
by kernels/packed_linear.py, and by engine/linear.py where no kernel multiplies them.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
PANEL = 2 * LANES
GROUP = 32
# Inputs of INT8 and BYTES are filled up to a multiple of it.
DEPTH = 64


class Format(IntEnum):
    """The numbers are those of cpp/kernels.h."""

    BF16 = 0
    INT4 = 1
    INT8 = 2
    BYTES = 3


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [out_features, num_groups, GROUP] float32 in 0..15, scales and leasts [out_features, num_groups] bf16.

    weight  [out_features, in_features]; missing inputs of the last group are zero
    """
    groups = _filled(weight.float(), GROUP).unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    least, scales = least.bfloat16(), ((most - least) / 15).bfloat16()
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    return ((groups - least.float()) / divisors).round_().clamp_(0, 15), scales.squeeze(2), least.squeeze(2)


def quantize_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [out_features, in_features] float32 in -127..127 and scales [out_features] float32."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    return (weight / scales.masked_fill(scales == 0, 1.0)[:, None]).round_(), scales


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight of 4 or 8 bits, not packed: a byte each.

    integers  [out_features, num_groups, GROUP] int8, or one group of all inputs
    scales    [out_features, num_groups]
    least     the same, what an integer 0 stands for
    """

    integers: Tensor
    scales: Tensor
    least: Tensor
    in_features: int

    @classmethod
    def of(cls, weight: Tensor, form: Format) -> "Quantized":
        if form == Format.INT4:
            integers, scales, least = quantize_groups(weight)
        else:
            integers, scales = (part.unsqueeze(1) for part in quantize_outputs(weight))
            least = torch.zeros_like(scales)
        return cls(integers.to(torch.int8), scales, least, weight.shape[1])

    def weight(self) -> Tensor:
        """[out_features, in_features] float32: the numbers that it stands for."""
        spread = self.integers * self.scales.float()[:, :, None] + self.least.float()[:, :, None]
        return spread.flatten(1)[:, : self.in_features]


def rounded_rows(x: Tensor, form: Format) -> Tensor:
    """What of x [num_rows, in_features] the weights meet; in its dtype, though products take the sums of integers."""
    if form in (Format.BF16, Format.INT4):
        return x
    most_steps = 127 if form == Format.BYTES else 32767
    steps = x.float().abs().amax(1, keepdim=True) / most_steps
    return ((x.float() / steps.masked_fill(steps == 0, 1.0)).round_() * steps).to(x.dtype)


def pack(weight: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Panels [num_panels, ...] and their scales.

    weight  [num_panels * PANEL, in_features] bf16
    """
    if form == Format.BF16:
        return weight.view(-1, 2, LANES, weight.shape[1] // 2, 2).permute(0, 3, 1, 2, 4), None
    if form != Format.INT4:
        integers, scales = quantize_outputs(weight)
        filled = _filled(integers, DEPTH).to(torch.int8)
        return filled.view(-1, 2, LANES, filled.shape[1] // 4, 4).permute(0, 3, 1, 2, 4), scales.view(-1, PANEL)
    integers, scales, least = quantize_groups(weight)
    # [num_panels, num_groups, 2, PANEL]
    by_panel = torch.stack((scales, least)).view(2, -1, PANEL, scales.shape[1]).permute(1, 3, 0, 2)
    nibbles = integers.flatten(1).to(torch.uint8)
    # ..., two bytes of each half, two pairs in each byte, inputs of a pair
    pairs = nibbles.view(-1, 2, LANES, nibbles.shape[1] // 8, 2, 2, 2).permute(0, 3, 1, 2, 6, 4, 5)
    return (pairs[..., 0] | pairs[..., 1] << 4).flatten(4), by_panel


def _filled(rows: Tensor, multiple: int) -> Tensor:
    return F.pad(rows, (0, -rows.shape[1] % multiple))
