"""What a request changes about its logits before anything is drawn: biases, penalties, stop ids held back.

    logit_bias                added to the logit of each id that it names
    repetition_penalty r      ids of prompt and outputs: a logit above 0 is divided by r, one below multiplied
                              (Keskar et al., "CTRL", 2019, section 4.1)
    frequency_penalty f       f times how often an id is among the outputs is taken off its logit
    presence_penalty p        p is taken off the logit of each id that is among the outputs
    min_tokens                stop ids cannot be drawn before so many outputs

In this order, before the temperature, for greedy draws, too. Ids outside the vocabulary are passed over. Nothing is
kept between draws: all follows from the tokens, so a hand-off, a preemption or another attempt changes nothing.
Called by the sampler.
"""

from collections.abc import Iterable

import numpy
import torch
from torch import Tensor

from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import SampleSpec


def changes_logits(spec: SampleSpec) -> bool:
    return bool(spec.params.logit_bias) or _penalises(spec) or _holds_back(spec)


def apply_rules(logits: Tensor, spec: SampleSpec) -> Tensor:
    """What is to be drawn from: a changed copy of a row, or the row itself when the spec changes nothing.

    logits  [vocab_size] float32, no NaN and no plus infinity, and so is what is returned
    """
    if not changes_logits(spec):
        return logits
    params = spec.params
    logits = logits.clone()
    if params.logit_bias:
        biases = [bias for bias in params.logit_bias if 0 <= bias.token < len(logits)]
        values = torch.tensor([bias.value for bias in biases], dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _ids((bias.token for bias in biases), logits), values)
    if _penalises(spec):
        _penalise(logits, params, spec)
    if _holds_back(spec):
        logits.index_fill_(0, _ids(params.stop_ids, logits), float("-inf"))
    return logits


def _penalises(spec: SampleSpec) -> bool:
    return spec.params.has_penalties and bool(spec.history)


def _holds_back(spec: SampleSpec) -> bool:
    return spec.output_index < spec.params.min_tokens and bool(spec.params.stop_ids)


def _penalise(logits: Tensor, params: SamplingParams, spec: SampleSpec) -> None:
    if params.repetition_penalty != 1.0:
        seen = _ids(spec.history, logits)
        values = logits[seen]
        factor = params.repetition_penalty
        # An id that is there twice is written twice, the same value. One that could be drawn still can.
        largest = torch.finfo(logits.dtype).max
        changed = torch.where(values > 0, values / factor, values * factor).clamp_(-largest, largest)
        logits[seen] = torch.where(values.isfinite(), changed, values)
    outputs = spec.history[spec.num_prompt :]
    if outputs and (params.frequency_penalty or params.presence_penalty):
        ids, counts = _ids(outputs, logits).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts.to(logits.dtype) + params.presence_penalty


def _ids(tokens: Iterable[int], logits: Tensor) -> Tensor:
    """Those of the vocabulary, [num_ids] int64."""
    ids = torch.from_numpy(numpy.fromiter(tokens, dtype=numpy.int64))
    return ids[(ids >= 0) & (ids < len(logits))].to(logits.device)
