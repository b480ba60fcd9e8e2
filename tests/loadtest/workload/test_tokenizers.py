"""Exact prompt lengths: with the tokenizer of a folder, with servers of every dialect, and without any."""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.workload.alphabet import WORDS, choose_alphabet
from pdserve.loadtest.workload.chat import Chat, Message
from pdserve.loadtest.workload.folder_tokenizer import FolderTokenizer
from pdserve.loadtest.workload.lengths import Span
from pdserve.loadtest.workload.load import PromptFormat
from pdserve.loadtest.workload.notes import describe_plan
from pdserve.loadtest.workload.schedule import plan_requests
from pdserve.loadtest.workload.server_tokenizer import find_server_tokenizer
from pdserve.loadtest.workload.sharing import Conversations, SharedPrefix
from pdserve.loadtest.workload.tokenizer import choose_tokenizer
from tests.checkpoints import write_tokenizer
from tests.loadtest.samples import make_load

HELLO = Chat((Message("user", "hello"),))
FORMS = [(Api.COMPLETIONS, PromptFormat.TEXT), (Api.CHAT, PromptFormat.IDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a tokenizer with one token a byte, and a chat template."""
    path = tmp_path_factory.mktemp("bytes")
    write_tokenizer(path)
    return path


def real_folder() -> str:
    return os.environ.get("PDSERVE_TEST_MODEL", "")


def folders(folder: Path) -> list[str]:
    return [str(folder), real_folder()] if real_folder() else [str(folder)]


@pytest.mark.parametrize(("api", "prompt_format"), FORMS)
def test_a_prompt_of_text_has_exactly_the_planned_tokens(api, prompt_format, folder):
    for name in folders(folder):
        tokenizer = FolderTokenizer(name)
        load = make_load(num_requests=20, input_tokens=Span(60, 200), prompt_format=prompt_format)
        plan = plan_requests(load, api, tokenizer)
        assert [tokenizer.count(planned.prompt) for planned in plan] == [planned.input_tokens for planned in plan]
        asked = [planned.input_tokens for planned in plan_requests(load, Api.COMPLETIONS)]
        assert [planned.input_tokens for planned in plan] == asked
        assert len({planned.prompt for planned in plan}) == 20


@pytest.mark.parametrize(("api", "prompt_format"), FORMS)
def test_a_shared_system_prompt_is_counted_with_the_rest(api, prompt_format, folder):
    tokenizer = FolderTokenizer(str(folder))
    shared = SharedPrefix(40)
    load = make_load(num_requests=5, input_tokens=Span(80, 90), prompt_format=prompt_format, shared_prefix=shared)
    for planned in plan_requests(load, api, tokenizer):
        assert tokenizer.count(planned.prompt) == planned.input_tokens
        assert 120 <= planned.input_tokens <= 130


@pytest.mark.parametrize(("api", "prompt_format"), FORMS)
def test_the_turns_of_a_conversation_are_counted_whole(api, prompt_format, folder):
    for name in folders(folder):
        tokenizer = FolderTokenizer(name)
        talks = Conversations(Span(3, 3), (1.0, 1.0))
        load = make_load(1.0, 9, conversations=talks, prompt_format=prompt_format)
        for planned in plan_requests(load, api, tokenizer):
            assert tokenizer.count(planned.prompt) == planned.input_tokens


@pytest.mark.skipif(not real_folder(), reason="PDSERVE_TEST_MODEL names no model folder")
def test_the_words_are_one_token_each_for_a_usual_tokenizer():
    alphabet = choose_alphabet(FolderTokenizer(real_folder()).count)
    assert (alphabet.units, alphabet.joiner) == (WORDS, " ")


def test_a_tokenizer_of_bytes_is_written_to_in_letters(folder):
    alphabet = choose_alphabet(FolderTokenizer(str(folder)).count)
    assert (len(alphabet.units), alphabet.joiner) == (26, "")


class Halves:
    """Every word is two tokens, every letter three: no unit is one."""

    name = "halves"

    def count(self, prompt):
        return sum(2 if len(word) > 1 else 3 for word in prompt.split(" ")) + 3 * prompt.count("z")


def test_a_tokenizer_without_any_unit_of_one_token_comes_near_and_counts_what_it_is():
    load = make_load(num_requests=10, input_tokens=Span(40, 60), prompt_format=PromptFormat.TEXT)
    asked = [planned.input_tokens for planned in plan_requests(load, Api.COMPLETIONS)]
    for planned, num in zip(plan_requests(load, Api.COMPLETIONS, Halves()), asked, strict=True):
        assert Halves().count(planned.prompt) == planned.input_tokens
        assert abs(planned.input_tokens - num) <= 1


def test_prompts_too_short_for_a_template_are_longer_and_the_report_says_so(folder):
    tokenizer = FolderTokenizer(str(folder))
    load = make_load(num_requests=5)
    plan = plan_requests(load, Api.CHAT, tokenizer)
    assert {planned.input_tokens for planned in plan} == {tokenizer.count(Chat((Message("user", "x"),)))}
    notes = describe_plan(load, Api.CHAT, tokenizer, plan)
    assert notes[1].startswith("5 prompts have other lengths than were asked for")


def test_without_a_tokenizer_lengths_are_rough_and_the_report_says_so():
    load = make_load()
    plan = plan_requests(load, Api.CHAT)
    assert ["rough" in note for note in describe_plan(load, Api.CHAT, None, plan)] == [True]
    assert describe_plan(load, Api.COMPLETIONS, None, plan) == ()


def test_a_chat_is_counted_as_its_template_writes_it(folder):
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert FolderTokenizer(str(folder)).count(HELLO) == len("user\nhello\nassistant\n") + 3
    assert FolderTokenizer(str(folder)).count(text) == FolderTokenizer(str(folder)).count(HELLO)


def test_a_template_file_goes_before_the_config(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert FolderTokenizer(str(tmp_path)).count(HELLO) == 5


def write_folder(path: Path, config: object = None, template: str | None = None) -> str:
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return str(path)


@pytest.mark.parametrize(
    ("config", "template", "message"),
    [
        (None, None, "has no chat template"),
        ([], None, "is not an object"),
        ({"chat_template": [{"name": "tools", "template": "x"}]}, None, "has no chat template"),
        (None, "{% for", "its chat template cannot be used"),
        (None, "{{ raise_exception('no users') }}", "refuses a chat: no users"),
        (None, "{{ messages[7].content }}", "refuses a chat"),
        (None, "{{ messages.append(1) }}", "refuses a chat"),
        (None, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses a chat"),
    ],
)
def test_a_folder_that_cannot_count_chats_is_refused_with_the_flag(config, template, message, tmp_path):
    folder = write_folder(tmp_path, config, template)
    with pytest.raises(OptionError, match=f"--tokenizer {folder}: .*{message}"):
        FolderTokenizer(folder).count(HELLO)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"tokenizer\.json cannot be read: No such file"):
        FolderTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match=r"tokenizer\.json is no tokenizer"):
        FolderTokenizer(str(tmp_path))


# Servers. Each counts a word as a token, a text's start as one more, and a message's header as two.


def count_text(text: str) -> int:
    return 1 + len(text.split())


def count_chat(messages) -> int:
    return sum(2 + len(message["content"].split()) for message in messages)


async def vllm(request):
    body = await request.json()
    assert body["model"] == "m"
    count = count_chat(body["messages"]) if "messages" in body else count_text(body["prompt"])
    return web.json_response({"count": count, "max_model_len": 100, "tokens": [7] * count})


async def sglang(request):
    body = await request.json()
    if "prompt" not in body:
        return web.json_response({"error": "prompt: field required"}, status=400)
    return await vllm(request)


async def llama_tokenize(request):
    body = await request.json()
    # Without content it answers an empty list, not an error.
    return web.json_response({"tokens": [7] * count_text(body["content"]) if "content" in body else []})


async def llama_template(request):
    body = await request.json()
    return web.json_response({"prompt": " ".join(f"<{m['role']}> {m['content']}" for m in body["messages"]) + " <bot>"})


async def llama_python(request):
    return web.json_response({"count": count_text((await request.json())["input"])})


SERVERS = {
    "vllm": {"/tokenize": vllm},
    "sglang": {"/tokenize": sglang},
    "llama.cpp": {"/tokenize": llama_tokenize, "/apply-template": llama_template},
    "llama-cpp-python": {"/extras/tokenize/count": llama_python},
    "none": {},
}


@asynccontextmanager
async def serving(routes, keys=None):
    async def check(request, handler):
        if keys is not None:
            keys.append(request.headers.get("Authorization"))
        return await handler(request)

    app = web.Application(middlewares=[web.middleware(check)])
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("server", "api", "is_exact"),
    [
        ("vllm", Api.COMPLETIONS, True),
        ("vllm", Api.CHAT, True),
        ("sglang", Api.COMPLETIONS, True),
        ("sglang", Api.CHAT, False),
        ("llama.cpp", Api.COMPLETIONS, True),
        ("llama.cpp", Api.CHAT, True),
        ("llama-cpp-python", Api.COMPLETIONS, True),
        ("llama-cpp-python", Api.CHAT, False),
        ("none", Api.COMPLETIONS, False),
    ],
)
async def test_each_kind_of_server_is_asked_in_its_own_words(server, api, is_exact):
    load = make_load(num_requests=6, prompt_format=PromptFormat.TEXT)

    def plan(url):
        tokenizer = choose_tokenizer(load, Target(url, api=api), "m")
        return tokenizer, plan_requests(load, api, tokenizer)

    async with serving(SERVERS[server]) as url:
        tokenizer, planned = await asyncio.to_thread(plan, url)
    assert (tokenizer is not None) == is_exact
    asked = [request.input_tokens for request in plan_requests(load, Api.COMPLETIONS)]
    assert [request.input_tokens for request in planned] == asked
    if is_exact and api is Api.COMPLETIONS:
        assert [count_text(request.prompt) for request in planned] == asked
    if is_exact and server == "vllm" and api is Api.CHAT:
        assert [count_chat(request.prompt.to_json()) for request in planned] == asked


async def test_ids_need_no_tokenizer_and_ask_no_server():
    asked = []
    async with serving(SERVERS["vllm"], asked) as url:
        assert await asyncio.to_thread(choose_tokenizer, make_load(), Target(url), "m") is None
    assert asked == []


async def test_a_folder_goes_before_the_server(folder):
    load = make_load(tokenizer=str(folder), prompt_format=PromptFormat.TEXT)
    tokenizer = await asyncio.to_thread(choose_tokenizer, load, Target("http://127.0.0.1:9"), "m")
    assert tokenizer.name == f"the tokenizer in {folder}"


async def test_the_servers_key_is_sent():
    keys = []
    async with serving(SERVERS["vllm"], keys) as url:
        await asyncio.to_thread(find_server_tokenizer, Target(url, api_key="secret"), "m")
    assert set(keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"count": 0}', b'{"count": "5"}', b'{"count": 1e9}', b'{"count": NaN}']
)
async def test_an_answer_without_a_count_is_no_tokenizer(answer):
    async def respond(request):
        return web.Response(body=answer)

    async with serving({"/tokenize": respond, "/extras/tokenize/count": respond}) as url:
        assert await asyncio.to_thread(find_server_tokenizer, Target(url), "m") is None


async def test_a_server_that_stops_counting_ends_the_plan_with_its_address():
    async with serving(SERVERS["vllm"]) as url:
        tokenizer = await asyncio.to_thread(find_server_tokenizer, Target(url), "m")
    with pytest.raises(TargetError, match=f"--url {url}: .*--tokenizer DIR"):
        await asyncio.to_thread(tokenizer.count, "hello")
