import json
from pathlib import Path

import pytest

from pdserve.core.errors import ModelError
from pdserve.router.api_error import ApiError
from pdserve.router.chat_template import ChatTemplate, find_template

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "삼겹살?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why"},
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "blocks are trimmed": """
        {% for message in messages %}
            {% if message.role == 'user' %}
        U: {{ message.content | trim }}
            {% endif %}
        {% endfor %}
        {% if add_generation_prompt %}A:{% endif %}
    """,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{{ pad_token }}",
    "JSON without HTML escapes": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}!{% endfor %}",
    "assignments inside the generation tag": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}"
    "{% endgeneration %}{{ x }}",
    "namespaces and macros": "{% set ns = namespace(n=0) %}"
    "{% macro say(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ say(m) }}{% endfor %}",
    "absent tools": "{% if tools is none and not documents %}plain{% endif %}{{ tools is defined }}",
    "date": "{{ strftime_now('%Y') }}",
    "slices and string methods": "{{ messages[1:][::-1] | length }}{{ messages[0].content.upper().split(' ')[0] }}",
}


def render_with_transformers(source: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, documents=None, **SPECIAL_TOKENS
    )
    return rendered[0]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_renders_as_in_transformers(source):
    assert ChatTemplate(source, SPECIAL_TOKENS).render(MESSAGES) == render_with_transformers(source)


def test_a_template_that_raises_refuses_the_messages_with_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ApiError, match="roles must alternate") as refusal:
        template.render(MESSAGES)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({}) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_the_sandbox_refuses_the_request(source):
    with pytest.raises(ApiError) as refusal:
        ChatTemplate(source, {}).render(MESSAGES)
    assert refusal.value.status == 400
    assert len(refusal.value.message) < 400


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_the_template_file_wins_over_the_entries(tmp_path: Path):
    config = {"chat_template": "from the tokenizer"}
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, config) == "from the tokenizer"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from the JSON file"}))
    assert find_template(tmp_path, config) == "from the JSON file"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert find_template(tmp_path, config) == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    assert find_template(tmp_path, {"chat_template": named[:1]}) is None
