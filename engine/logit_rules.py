"""What a request changes about its logits before anything is drawn: biases, penalties, stop ids held back.

    logit_bias                added to the logit of each id that it names
    repetition_penalty r      ids of prompt and outputs: a logit above 0 is divided by r, one below multiplied
                              (Keskar et al., "CTRL", 2019, section 4.1)
    frequency_penalty f       f times how often an id is among the outputs is taken off its logit
    presence_penalty p        p is taken off the logit of each id that is among the outputs
    min_tokens                stop ids cannot be drawn before so many outputs

In this order, before the temperature, for greedy draws, too. Nothing is kept between draws: all follows from the
tokens, so a hand-off, a preemption or another attempt changes nothing. Called by the sampler.
"""

import torch
from torch import Tensor

from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import SampleSpec


def apply_rules(logits: Tensor, spec: SampleSpec) -> None:
    """Change the logits of one row in place. logits: [vocab_size] float32."""
    params = spec.params
    if params.logit_bias:
        ids = [bias.token for bias in params.logit_bias]
        values = torch.tensor([bias.value for bias in params.logit_bias], dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _ids(ids, logits), values)
    if params.has_penalties:
        _penalise(logits, params, spec)
    if spec.output_index < params.min_tokens:
        stop_ids = [token for token in params.stop_ids if 0 <= token < len(logits)]
        logits.index_fill_(0, _ids(stop_ids, logits), float("-inf"))


def _penalise(logits: Tensor, params: SamplingParams, spec: SampleSpec) -> None:
    if params.repetition_penalty != 1.0:
        seen = _ids(sorted(set(spec.history)), logits)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    outputs = spec.history[spec.num_prompt :]
    if outputs and (params.frequency_penalty or params.presence_penalty):
        ids, counts = _ids(list(outputs), logits).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts.to(logits.dtype) + params.presence_penalty


def _ids(tokens: list[int], logits: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
