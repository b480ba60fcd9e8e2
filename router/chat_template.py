"""The model's chat template: messages to prompt text, in a sandbox, equal to transformers' rendering.

Found in the model folder by `find_template`, compiled once at start, rendered by TextModel in a worker
thread. A template is the model author's text: it runs in Jinja's immutable sandbox, sees strings only,
and whatever it raises becomes a refusal of that request.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.core.errors import ModelError
from pdserve.core.model_config import read_json_object
from pdserve.router.api_error import ApiError

MAX_REASON = 300

# A template is a small program over plain data; these are all that such a program raises by itself.
TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. Raises ModelError when the source is no template.

    special_tokens  what the template may name: bos_token, eos_token, ... to their text
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise ModelError(f"the model's chat template cannot be compiled: {_reason(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to and including the header of the assistant's turn; raises ApiError 400."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except TEMPLATE_FAILURES as error:
            message = f"messages: the model's chat template refuses them: {_reason(error)}"
            raise ApiError(400, "invalid_value", message, "messages") from error


def find_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template's source: chat_template.jinja, chat_template.json or the tokenizer's own entry, in this order.

    Of several named templates the one called "default"; None when there is none. Raises ModelError
    when a file cannot be read.
    """
    file = model_dir / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    entry = tokenizer_config.get("chat_template")
    if (model_dir / "chat_template.json").exists():
        entry = read_json_object(model_dir / "chat_template.json").get("chat_template", entry)
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; serving renders what is inside it."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter: a prompt is no web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON]
