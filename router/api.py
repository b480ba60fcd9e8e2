"""What a client may ask for: the body of a completion or chat request, checked and resolved.

    body -> parse_completion / parse_chat -> Call -> Call.params(prompt length) -> SamplingParams

Pure: no I/O, no tokenizer. Where the client is silent, the checkpoint's generation_config.json decides,
then OpenAI's own defaults. Fields this server does not support are refused by name unless their value
asks for nothing. Called by app.
"""

from dataclasses import dataclass, replace
from typing import Any

from pdserve.core.model_config import GenerationDefaults
from pdserve.core.sampling import SamplingParams
from pdserve.router.api_error import ApiError, invalid, shown
from pdserve.router.fields import Fields
from pdserve.router.generation import ModelCard
from pdserve.router.messages import Conversation, parse_conversation
from pdserve.router.sampling_fields import MAX_INT32, check_token_ids, parse_sampling

Prompt = str | list[int] | Conversation

DEFAULT_COMPLETION_TOKENS = 16
MAX_SAMPLES = 128
# vLLM's default; OpenAI allows 5 for completions and 20 for chat.
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256

LATER_FIELDS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "length_penalty": (1,),
    "typical_p": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "prompt_embeds": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
}

# Of one endpoint, and not supported by the other.
COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = {"echo": (False,)}
CHAT_FIELDS: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,)}

HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked.

    max_tokens        None when the client left it open; 0 with echo alone
    sampling          complete but for max_tokens, which needs the length of the prompt
    logprobs          how many of the likeliest tokens are listed beside each token; None: no token is
    prompt_logprobs   the same of the prompt's tokens, in vLLM's own list
    echo              the prompt's text, and where logprobs are asked for its tokens, open every choice
    keep_stop         whether the stop string (or token) that ended the answer is part of it
    priority          who has the greater one is served first
    """

    prompt: Prompt
    stream: bool
    include_usage: bool
    max_tokens: int | None
    num_samples: int
    sampling: SamplingParams
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    stop_strings: tuple[str, ...]
    keep_stop: bool
    priority: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Conversation)

    @property
    def prompt_field(self) -> str:
        return "messages" if self.is_chat else "prompt"

    @property
    def is_scoring(self) -> bool:
        """Nothing is to be generated: the prompt itself is the answer."""
        return self.max_tokens == 0

    def params(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Sampling parameters for a prompt of this length; raises ApiError when the context is too short.

        A prompt that is only scored draws one token, which nobody is shown: a token drawn last is never run, so
        it needs no room.
        """
        room = max_model_len - num_prompt_tokens
        if room < (0 if self.is_scoring else 1):
            raise prompt_too_long(f"{num_prompt_tokens} tokens", max_model_len, self.prompt_field)
        if self.max_tokens is not None and self.max_tokens > room:
            message = (
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {self.max_tokens}, "
                f"{num_prompt_tokens + self.max_tokens} together; this model's context is {max_model_len} tokens"
            )
            raise ApiError(400, "context_length_exceeded", message, self.prompt_field)
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = room if self.is_chat else min(room, DEFAULT_COMPLETION_TOKENS)
        if self.sampling.min_tokens > max_tokens:
            raise invalid("min_tokens", f"{self.sampling.min_tokens} is more than max_tokens ({max_tokens})")
        return replace(self.sampling, max_tokens=max(max_tokens, 1))


def prompt_too_long(length: str, max_model_len: int, field: str) -> ApiError:
    message = (
        f"the prompt has {length}; this model's context is {max_model_len} tokens "
        "and at least one must be left for the answer"
    )
    return ApiError(400, "context_length_exceeded", message, field)


def parse_completion(body: dict[str, Any], card: ModelCard, defaults: GenerationDefaults) -> Call:
    """A body of POST /v1/completions; raises ApiError."""
    fields = Fields(body)
    check_model(fields, card)
    prompt = _parse_prompt(fields.value("prompt"), card)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    call = _parse_call(fields, prompt, logprobs, fields.flag("echo"), card, defaults)
    fields.refuse_rest(LATER_FIELDS | CHAT_FIELDS, HARMLESS_FIELDS)
    return call


def parse_chat(body: dict[str, Any], card: ModelCard, defaults: GenerationDefaults) -> Call:
    """A body of POST /v1/chat/completions; raises ApiError."""
    fields = Fields(body)
    check_model(fields, card)
    conversation = parse_conversation(fields.value("messages"))
    call = _parse_call(fields, conversation, _parse_chat_logprobs(fields), False, card, defaults)
    fields.refuse_rest(LATER_FIELDS | COMPLETION_FIELDS, HARMLESS_FIELDS)
    return call


def _parse_call(
    fields: Fields, prompt: Prompt, logprobs: int | None, echo: bool, card: ModelCard, defaults: GenerationDefaults
) -> Call:
    stream = fields.flag("stream")
    prompt_logprobs = _parse_prompt_logprobs(fields, stream)
    # An echo lists the prompt's tokens like the answer's; whoever wants more of them gets as many as both need.
    of_prompt = [num_top for num_top in (prompt_logprobs, logprobs if echo else None) if num_top is not None]
    sampling = parse_sampling(fields, card, defaults)
    return Call(
        prompt=prompt,
        stream=stream,
        include_usage=_parse_include_usage(fields, stream),
        max_tokens=_parse_max_tokens(fields, 0 if echo else 1),
        num_samples=_parse_num_samples(fields),
        sampling=replace(sampling, logprobs=logprobs, prompt_logprobs=max(of_prompt, default=None)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        stop_strings=_parse_stop_strings(fields),
        keep_stop=fields.flag("include_stop_str_in_output"),
        # The field is vLLM's, where the lower value is handled earlier.
        priority=-(fields.integer("priority", -MAX_INT32, MAX_INT32) or 0),
    )


def check_model(fields: Fields, card: ModelCard) -> None:
    """Raises ApiError 404 where another model is asked for."""
    name = fields.text("model")
    if name is not None and name != card.name:
        message = f"model: {shown(name)} is not served here; {shown(card.name)} is"
        raise ApiError(404, "model_not_found", message, "model")


def _parse_prompt(value: Any, card: ModelCard) -> str | list[int]:
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value[:2]):
        if len(value) > 1:
            raise invalid("prompt", f"a batch of {len(value)} prompts is not supported; send one request for each")
        value = value[0]
    if not isinstance(value, str | list):
        raise invalid("prompt", f"a string or a list of token ids is needed, not {shown(value)}", "invalid_type")
    if not value:
        raise invalid("prompt", "it must not be empty")
    if isinstance(value, list):
        if len(value) > card.max_model_len:
            raise prompt_too_long(f"{len(value)} tokens", card.max_model_len, "prompt")
        check_token_ids(value, "prompt", card)
    return value


def _parse_chat_logprobs(fields: Fields) -> int | None:
    is_wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_top and not is_wanted:
        raise invalid("top_logprobs", f"{num_top} needs logprobs to be true")
    return (num_top or 0) if is_wanted else None


def _parse_prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    num_top = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if num_top is not None and stream:
        raise invalid("prompt_logprobs", f"{num_top} is not supported with stream; a stream with echo has them")
    return num_top


def _parse_num_samples(fields: Fields) -> int:
    num_samples = fields.integer("n", 1, MAX_SAMPLES) or 1
    best_of = fields.integer("best_of", 1, MAX_SAMPLES)
    if best_of not in (None, num_samples):
        message = f"best_of: {best_of} is not supported by this server; only what n is ({num_samples})"
        raise ApiError(400, "unsupported_parameter", message, "best_of")
    return num_samples


def _parse_max_tokens(fields: Fields, least: int) -> int | None:
    max_tokens = fields.integer("max_tokens", least, MAX_INT32)
    newer_name = fields.integer("max_completion_tokens", least, MAX_INT32)
    if max_tokens is not None and newer_name is not None and max_tokens != newer_name:
        raise invalid("max_completion_tokens", f"{newer_name} contradicts max_tokens ({max_tokens})")
    return newer_name if max_tokens is None else max_tokens


def _parse_stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    needed = f"a string or a list of at most {MAX_STOP_STRINGS} strings"
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings[: MAX_STOP_STRINGS + 1]):
        raise fields.error("stop", needed, "invalid_type")
    if len(strings) > MAX_STOP_STRINGS:
        raise fields.error("stop", needed)
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise invalid("stop", f"a string of {len(string)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed")
    return tuple(dict.fromkeys(strings))


def _parse_include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    include_usage = options.flag("include_usage")
    options.refuse_rest({"continuous_usage_stats": (False,)}, ("include_obfuscation",))
    if include_usage and not stream:
        raise invalid("stream_options", "include_usage needs stream to be true; the answer has its usage anyway")
    return include_usage
