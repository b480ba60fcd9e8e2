"""What a client may ask POST /tokenize: the token ids that a prompt or a conversation becomes. vLLM's body and answer.

Pure: no I/O, no tokenizer. Called by app.
"""

from dataclasses import dataclass
from typing import Any

from pdserve.router.api import check_model
from pdserve.router.api_error import invalid, shown
from pdserve.router.fields import Fields
from pdserve.router.generation import ModelCard
from pdserve.router.messages import Conversation, parse_conversation

# A template writes its own special tokens, and always the header of the answer.
CHAT_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}
LATER_FIELDS: dict[str, tuple[Any, ...]] = {"return_token_strs": (False,), "mm_processor_kwargs": ({},)}


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """add_special_tokens: what the tokenizer puts around a text, as /v1/completions has it; a chat has its template."""

    prompt: str | Conversation
    add_special_tokens: bool


def parse_tokenize(body: dict[str, Any], card: ModelCard) -> TokenizeCall:
    """A body of POST /tokenize, with a prompt or with messages; raises ApiError."""
    fields = Fields(body)
    check_model(fields, card)
    prompt, messages = fields.value("prompt"), fields.value("messages")
    if messages is not None:
        if prompt is not None:
            raise invalid("prompt", "it cannot be given beside messages")
        call = TokenizeCall(parse_conversation(messages), add_special_tokens=False)
        fields.refuse_rest(LATER_FIELDS | CHAT_FIELDS, ())
        return call
    if not isinstance(prompt, str):
        raise invalid("prompt", f"a string is needed, or messages, not {shown(prompt)}", "invalid_type")
    add_special_tokens = fields.value("add_special_tokens") is None or fields.flag("add_special_tokens")
    fields.refuse_rest(LATER_FIELDS, ())
    return TokenizeCall(prompt, add_special_tokens)
