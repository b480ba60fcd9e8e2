"""How tokens are drawn for one request, after the router has resolved every default."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the logit of a token id."""

    token: int
    value: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters; the same object on router, prefill node and decode node.

    temperature 0 means greedy; top_k 0, top_p 1.0, min_p 0, penalties 0 and a repetition_penalty of 1 mean off.
    The router draws a missing seed. stop_ids are the token ids that end the request (EOS ids unless ignore_eos
    was asked); they are suppressed until min_tokens tokens are out.

    logprobs, prompt_logprobs  None: not asked for; else how many of the likeliest ids beside each token
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[Bias, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest id is taken, the lowest one of equals."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it by more than the model."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def finish_reason(self, num_outputs: int, last_token: int) -> str | None:
        """Why the request ends once `last_token` is output number `num_outputs` (1-based), or None."""
        if last_token in self.stop_ids and num_outputs > self.min_tokens:
            return "stop"
        if num_outputs >= self.max_tokens:
            return "length"
        return None
