"""How tokens are to be drawn: the sampling fields of a request, checked and resolved.

Where the client is silent, the checkpoint's generation_config.json decides, then OpenAI's own defaults.
Pure; called by api, which adds max_tokens and the log-probabilities.
"""

import secrets
from typing import Any, TypeVar

from pdserve.core.model_config import GenerationDefaults
from pdserve.core.sampling import Bias, SamplingParams
from pdserve.router.api_error import invalid, shown
from pdserve.router.fields import Fields
from pdserve.router.generation import ModelCard

T = TypeVar("T")

MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
UINT64_MASK = (1 << 64) - 1

# Below this, a division by the temperature says nothing that the greatest logit does not.
GREEDY_TEMPERATURE = 1e-5


def parse_sampling(fields: Fields, card: ModelCard, defaults: GenerationDefaults) -> SamplingParams:
    """Complete but for max_tokens and what is to be told of log-probabilities; raises ApiError."""
    temperature = _or(fields.number("temperature", 0.0, 2.0), defaults.temperature)
    top_p = _or(fields.number("top_p", 0.0, 1.0), defaults.top_p)
    repetition_penalty = fields.number("repetition_penalty", 0.0, MAX_REPETITION_PENALTY)
    for name in ("top_p", "repetition_penalty"):
        if fields.value(name) == 0:
            raise fields.error(name, "a number above 0")
    top_k = _or(fields.integer("top_k", -1, MAX_INT32), defaults.top_k)
    seed = fields.integer("seed", -MAX_INT64 - 1, MAX_INT64)
    return SamplingParams(
        min_tokens=_or(fields.integer("min_tokens", 0, MAX_INT32), 0),
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=0 if top_k >= card.vocab_size else max(top_k, 0),
        top_p=top_p,
        min_p=_or(fields.number("min_p", 0.0, 1.0), 0.0),
        seed=secrets.randbits(64) if seed is None else seed & UINT64_MASK,
        stop_ids=_parse_stop_ids(fields, card, defaults),
        presence_penalty=_or(fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        repetition_penalty=_or(repetition_penalty, defaults.repetition_penalty),
        logit_bias=_parse_logit_bias(fields, card),
    )


def _parse_logit_bias(fields: Fields, card: ModelCard) -> tuple[Bias, ...]:
    """In the order of ids, so that equal requests are equal."""
    value = fields.value("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise fields.error("logit_bias", f"an object of at most {MAX_BIASES} token ids and numbers")
    biases = []
    for text, bias in value.items():
        field = f"logit_bias[{text[:16]}]"
        # One spelling an id: "7" and "07" would both name it.
        if not (text.isascii() and text.isdigit() and str(int(text[:16])) == text and int(text) < card.vocab_size):
            raise invalid(field, f"a token id from 0 to {card.vocab_size - 1} is needed, not {shown(text)}")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(field, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g} is needed, not {shown(bias)}")
        biases.append(Bias(int(text), float(bias)))
    return tuple(sorted(biases, key=lambda bias: bias.token))


def _parse_stop_ids(fields: Fields, card: ModelCard, defaults: GenerationDefaults) -> tuple[int, ...]:
    eos_ids = () if fields.flag("ignore_eos") else defaults.eos_ids
    own_ids = fields.value("stop_token_ids")
    if own_ids is None:
        return eos_ids
    if not isinstance(own_ids, list) or len(own_ids) > MAX_STOP_IDS:
        raise fields.error("stop_token_ids", f"a list of at most {MAX_STOP_IDS} token ids")
    check_token_ids(own_ids, "stop_token_ids", card)
    return tuple(dict.fromkeys((*eos_ids, *own_ids)))


def check_token_ids(value: list[Any], field: str, card: ModelCard) -> None:
    """Raises ApiError naming the first item that is no token id."""
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < card.vocab_size:
        return
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < card.vocab_size:
            needed = f"a token id from 0 to {card.vocab_size - 1} is needed"
            raise invalid(f"{field}[{index}]", f"{needed}, not {shown(token_id)}")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
