"""Draws tokens from logits: the same integers for the same seed on every device, alone or in a batch.

    bits  = philox4x32-10(key = seed, counter = (id >> 2, output index, sample, 0))[id & 3]
    E     = -log1p(-(bits + 0.5) * 2^-32)                       standard exponential
    token = argmax over kept ids of logit / T - ln E            Gumbel-max, ties to the lowest id

Nothing of a random state exists between draws, so a sequence continues anywhere from its seed and index.
Kept ids are those whose logit reaches a cutoff per row: top-k and min-p, then top-p of what they left, each give
one (ids that tie with the last kept one are kept too, so order never matters; top-k 1 is greedy). What a request
changes about its logits before that stands in logit_rules, which works on copies: samples share the logits of their
row, and log-probabilities (likelihood.py) are those of the model itself. Philox: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011. On a CPU the draw itself is kernels/draw.py, which looks only at ids that could
win. Called by Engine.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdserve.core.sampling import SamplingParams
from pdserve.engine.likelihood import finite, log_probabilities
from pdserve.engine.logit_rules import apply_rules, changes_logits
from pdserve.engine.step import Draw, SampleSpec
from pdserve.kernels.draw import DrawKernels

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
U32 = 0xFFFFFFFF

# -ln E lies between -ln(33 ln 2) = -3.13 (largest bits) and 33 ln 2 = 22.88 (smallest), so an id further
# than their difference below the best one can never be drawn, and is not worth a random number.
REACH = 26.1

# Top-p first looks among this many largest logits; a flatter row than that is sorted whole.
TOP_P_CANDIDATES = 256


def draw(
    logits: Tensor,
    samples: Sequence[Sequence[SampleSpec]],
    native: DrawKernels | None,
    likeliest: Sequence[int] | None = None,
) -> list[tuple[Draw, ...]]:
    """The draws of each row's samples, in their order, with the log-probabilities that they ask for.

    logits     [num_sampled, vocab_size] float32, read only
    samples    what to draw from each row; all of a row's share its logits
    native     draws in C++ (kernels/draw.py); without it torch does, on any device
    likeliest  of each row the first id of its largest logits, if that is known: what is greedy takes it

    A row without a likeliest id, because none is left to be drawn, gives id 0.
    """
    specs = [spec for row_specs in samples for spec in row_specs]
    if not specs:
        return [() for _ in samples]
    if native is None or any(changes_logits(spec) or spec.params.logprobs is not None for spec in specs):
        # Drawing in C++ takes any number.
        logits = finite(logits)
    known = _known(samples, likeliest)
    tokens = [token if spec.params.is_greedy else None for token, spec in zip(known, specs, strict=True)]
    if None in tokens or any(spec.params.logprobs is not None for spec in specs):
        owners = [row for row, row_specs in zip(logits.unbind(), samples, strict=True) for _ in row_specs]
        found = iter(_draws(owners, specs, _drawn(owners, specs, tokens, known, native), native))
    else:
        found = iter([Draw(token) for token in tokens if token is not None])
    return [tuple(next(found) for _ in row_specs) for row_specs in samples]


def _known(samples: Sequence[Sequence[SampleSpec]], likeliest: Sequence[int] | None) -> list[int | None]:
    """Of each sample the likeliest id of what it is drawn from, where that is known."""
    if likeliest is None:
        return [None for row_specs in samples for _ in row_specs]
    rows = zip(likeliest, samples, strict=False)
    return [None if changes_logits(spec) else token for token, row_specs in rows for spec in row_specs]


def _drawn(
    owners: list[Tensor],
    specs: list[SampleSpec],
    tokens: list[int | None],
    known: list[int | None],
    native: DrawKernels | None,
) -> list[int]:
    """The tokens, those that are None drawn; owners and known of each."""
    left = [index for index, token in enumerate(tokens) if token is None]
    drawn: list[int] = []
    if left:
        asking = [specs[index] for index in left]
        rows = _changed([owners[index] for index in left], asking)
        if native is not None:
            drawn = _draw_natively(rows, asking, [known[index] for index in left], native)
        else:
            drawn = _draw_in_torch(rows, asking)
    by_index = dict(zip(left, drawn, strict=True))
    return [by_index[index] if token is None else token for index, token in enumerate(tokens)]


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """philox4x32-10 on u32 words held in int64 tensors that broadcast together; four words each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product may wrap into int64's sign, which leaves its 64 bits, and so both halves, intact.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & U32) ^ c1 ^ k0, p1 & U32, ((p0 >> 32) & U32) ^ c3 ^ k1, p0 & U32
        k0, k1 = (k0 + KEY_STEPS[0]) & U32, (k1 + KEY_STEPS[1]) & U32
    return c0, c1, c2, c3


def _changed(rows: list[Tensor], specs: Sequence[SampleSpec]) -> list[Tensor]:
    """What each is drawn from: one tensor for neighbours of a row that differ in nothing but the sample."""
    changed: list[Tensor] = []
    for index, (row, spec) in enumerate(zip(rows, specs, strict=True)):
        is_same = (
            index > 0 and row is rows[index - 1] and replace(spec, sample=specs[index - 1].sample) == specs[index - 1]
        )
        changed.append(changed[-1] if is_same else apply_rules(row, spec))
    return changed


def _draws(rows: list[Tensor], specs: list[SampleSpec], tokens: list[int], native: DrawKernels | None) -> list[Draw]:
    """rows: the raw logits that each was drawn for."""
    wanted = {index: spec.params.logprobs for index, spec in enumerate(specs) if spec.params.logprobs is not None}
    draws = [Draw(token) for token in tokens]
    if wanted:
        asking, drawn = [rows[index] for index in wanted], [tokens[index] for index in wanted]
        found = log_probabilities(asking, drawn, list(wanted.values()), native)
        for index, logprobs in zip(wanted, found, strict=True):
            draws[index] = Draw(tokens[index], logprobs)
    return draws


def _draw_natively(
    rows: list[Tensor], specs: list[SampleSpec], likeliest: list[int | None], native: DrawKernels
) -> list[int]:
    params = [spec.params for spec in specs]
    temperatures = [0.0 if param.is_greedy else param.temperature for param in params]
    return native.draw_rows(
        rows,
        _words(specs),
        temperatures,
        [param.top_k for param in params],
        [param.top_p for param in params],
        [param.min_p for param in params],
        likeliest,
    )


def _draw_in_torch(rows: list[Tensor], specs: list[SampleSpec]) -> list[int]:
    logits = torch.stack(rows)
    tokens = logits.argmax(dim=-1)
    random = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if random:
        chosen = torch.tensor(random, device=logits.device)
        params = [specs[row].params for row in random]
        temperatures = torch.tensor([param.temperature for param in params], dtype=torch.float64, device=logits.device)
        scaled = _scaled(logits.index_select(0, chosen), temperatures[:, None])
        scaled[scaled < _cutoffs(scaled, params)] = float("-inf")
        tokens[chosen] = _draw_scaled(scaled, [specs[row] for row in random])
    return tokens.tolist()


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Measured from the row's best logit, a tiny temperature makes the others -inf and never inf - inf."""
    best = logits.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return (logits.double() - best.double()) / temperatures


def _draw_scaled(scaled: Tensor, specs: list[SampleSpec]) -> Tensor:
    """The formula in torch, for any device. scaled [num_rows, vocab_size] float64, -inf where an id is not kept."""
    device = scaled.device
    num_rows, vocab_size = scaled.shape
    words = torch.tensor(_words(specs), device=device).T  # [4, num_rows]
    # Words of one counter serve four neighbouring ids: a row of quads is what one philox call draws for.
    quads = torch.nn.functional.pad(scaled, (0, -vocab_size % 4), value=float("-inf")).view(num_rows, -1, 4)
    kept = (quads > float("-inf")).any(dim=-1)
    if int(kept.sum()) * 2 > kept.numel():
        scores = quads - _log_exponentials(torch.arange(kept.shape[1], device=device), words[:, :, None])
    else:
        # Few are left: drawing for those alone gives them the same numbers.
        row, quad = kept.nonzero(as_tuple=True)
        scores = torch.full_like(quads, float("-inf"))
        scores[row, quad] = quads[row, quad] - _log_exponentials(quad, words[:, row])
    return scores.view(num_rows, -1).argmax(dim=1)


def _words(specs: list[SampleSpec]) -> list[tuple[int, int, int, int]]:
    """Output index, sample and the two halves of the seed of each draw."""
    return [
        (spec.output_index & U32, spec.sample & U32, spec.params.seed & U32, (spec.params.seed >> 32) & U32)
        for spec in specs
    ]


def _log_exponentials(quad: Tensor, words: Tensor) -> Tensor:
    """ln E of the four ids of each quad, [..., 4] float64; quad and the four words (see _words) broadcast together."""
    index, sample, low, high = words
    bits = torch.stack(
        torch.broadcast_tensors(*philox((quad, index, sample, torch.zeros_like(index)), (low, high))), -1
    )
    return bits.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().log_()


def _cutoffs(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The lowest kept value of each row, [num_rows, 1] float64. scaled [num_rows, vocab_size], best value 0."""
    cutoffs = torch.full((len(params), 1), float("-inf"), dtype=torch.float64, device=scaled.device)
    vocab_size = scaled.shape[1]
    limits = {row: param.top_k for row, param in enumerate(params) if 0 < param.top_k < vocab_size}
    if limits:
        rows = torch.tensor(list(limits), device=scaled.device)
        largest = scaled.index_select(0, rows).topk(max(limits.values()), dim=1).values
        last = torch.tensor(list(limits.values()), device=scaled.device)[:, None] - 1
        cutoffs[rows] = largest.gather(1, last)
    for row, param in enumerate(params):
        if param.min_p > 0.0:
            # The best value is 0: this is the logarithm of a share of the likeliest id's probability.
            cutoffs[row].clamp_(min=math.log(param.min_p))
        if param.top_p < 1.0:
            cutoffs[row] = _top_p_cutoff(scaled[row], cutoffs[row], param.top_p)
    return cutoffs.clamp_(min=-REACH)


def _top_p_cutoff(scaled: Tensor, cutoff: Tensor, top_p: float) -> Tensor:
    """Value of the last id in the smallest set of most likely ids whose probability reaches top_p.

    scaled  [vocab_size]; only values at or above `cutoff` count, so top-p acts after top-k
    """
    kept = torch.where(scaled >= cutoff, scaled, float("-inf"))
    wanted = kept.exp().sum() * top_p
    values = kept.topk(min(TOP_P_CANDIDATES, len(kept))).values
    if values.exp().sum() < wanted:
        values = kept.sort(descending=True).values
    weights = values.exp()
    num_kept = (weights.cumsum(0) - weights < wanted).sum().clamp_(min=1)
    return values[num_kept - 1]
