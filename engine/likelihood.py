"""How likely the model itself found tokens: log-probabilities of raw logits, and the likeliest ids beside them.

Natural logarithms, the log-softmax of a row in float32, before anything a request changes about its logits. Each
row is computed by itself, so its numbers are the same bits whatever rows are beside it. Called by the sampler for
drawn tokens and by Engine for the tokens of prompts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.logprobs import Logprobs
from pdserve.kernels.draw import DrawKernels


def finite(logits: Tensor) -> Tensor:
    """The same tensor, or a copy without NaN, which counts as minus infinity, and plus infinity, the largest float.

    logits  [num_rows, vocab_size] float32. What is left of a row may be minus infinity throughout.
    """
    if bool(logits.amax(dim=-1).isfinite().all()):
        return logits
    return logits.nan_to_num(nan=float("-inf"), posinf=torch.finfo(logits.dtype).max, neginf=float("-inf"))


def log_probabilities(
    rows: Sequence[Tensor], tokens: Sequence[int], num_top: Sequence[int], native: DrawKernels | None
) -> list[Logprobs]:
    """Of one token a row, with its num_top likeliest ids (as many as there are at most), ties to the lowest id.

    rows    at least one, each [vocab_size] float32, of logits as `finite` returns them, read only. An id without any
            probability has minus infinity; in a row of minus infinity all have.
    native  computes in C++; without it torch does, on any device
    """
    most = min(max(num_top), len(rows[0]))
    ids, values = native.log_probabilities(rows, tokens, most) if native else _in_torch(rows, tokens, most)
    packed_ids, packed_values = ids.numpy(), values.numpy()
    widths = [1 + min(num, most) for num in num_top]
    return [
        Logprobs(width - 1, packed_ids[row, :width].tobytes(), packed_values[row, :width].tobytes())
        for row, width in enumerate(widths)
    ]


def _in_torch(rows: Sequence[Tensor], tokens: Sequence[int], num_top: int) -> tuple[Tensor, Tensor]:
    logits = torch.stack(list(rows))
    ids = torch.cat((torch.tensor(tokens, device=logits.device)[:, None], _likeliest(logits, num_top)), dim=1)
    values = logits.log_softmax(dim=-1).gather(1, ids).nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    return ids.to(torch.int32).cpu(), values.cpu()


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """[num_rows, count] int64 ids, the largest logits first, the lowest id first among equal ones."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    # One more shows whether others tie with the last: topk takes any of those.
    values, ids = logits.topk(min(count + 1, logits.shape[1]))
    is_split = values[:, count - 1] == values[:, -1] if values.shape[1] > count else values.new_zeros(len(values))
    ids, order = ids[:, :count].sort()
    values, order = values[:, :count].gather(1, order).sort(descending=True, stable=True)
    ids = ids.gather(1, order)
    for row in is_split.nonzero().flatten().tolist():
        tied = values[row] == values[row, -1]
        ids[row, tied] = (logits[row] == values[row, -1]).nonzero().flatten()[: int(tied.sum())]
    return ids
