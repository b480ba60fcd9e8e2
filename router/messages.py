"""The messages of a chat request, checked and reduced to what a template reads: role and content strings.

Content may be a string or a list of text parts, which are joined by newlines. What a message cannot carry
yet (images, audio, tool calls) is refused by name. Called by api.
"""

from dataclasses import dataclass
from typing import Any

from pdserve.router.api_error import ApiError, invalid, shown
from pdserve.router.fields import Fields

ROLES = ("system", "developer", "user", "assistant")

# Members that clients copy back from an answer or send as null.
LATER: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
    "prefix": (False,),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """At least one message, each {"role", "content"} and perhaps {"name"}."""

    messages: tuple[dict[str, str], ...]


def parse_conversation(value: Any) -> Conversation:
    """The value of "messages"; raises ApiError 400."""
    if not isinstance(value, list):
        raise invalid("messages", f"a list of messages is needed, not {shown(value)}", "invalid_type")
    if not value:
        raise invalid("messages", "at least one message is needed")
    return Conversation(tuple(_parse_message(item, f"messages[{index}]") for index, item in enumerate(value)))


def _parse_message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(path, f"an object is needed, not {shown(value)}", "invalid_type")
    fields = Fields(value, path)
    role = fields.text("role")
    if role not in ROLES:
        raise fields.error("role", f"one of {', '.join(ROLES)}")
    message = {"role": role, "content": _parse_content(fields)}
    # A model may have answered nothing; nobody asks nothing.
    if not message["content"] and role != "assistant":
        raise invalid(f"{path}.content", "it must not be empty")
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    fields.refuse_rest(LATER, ())
    return message


def _parse_content(fields: Fields) -> str:
    content = fields.value("content")
    if isinstance(content, str):
        return content
    path = fields.name("content")
    if not isinstance(content, list):
        raise fields.error("content", "a string or a list of text parts", "invalid_type")
    if not content:
        raise invalid(path, "it must not be empty")
    return "\n".join(_parse_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _parse_part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise invalid(path, f"an object is needed, not {shown(value)}", "invalid_type")
    fields = Fields(value, path)
    kind = fields.text("type")
    if kind != "text":
        message = f'{path}.type: only "text" parts are supported by this server, not {shown(kind)}'
        raise ApiError(400, "unsupported_parameter", message, f"{path}.type")
    text = fields.text("text")
    if text is None:
        raise fields.error("text", "a string", "invalid_type")
    fields.refuse_rest({"cache_control": ()}, ())
    return text
