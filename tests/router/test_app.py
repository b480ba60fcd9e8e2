import dataclasses
import subprocess
import sys

import pytest

from pdserve.router.app import create_app
from pdserve.router.generation import GenerationError, ModelCard
from tests.router.door import CARD, CONTEXT, DEFAULTS, METRICS, MODEL, Script, ScriptedService, open_door, says


async def test_the_listing_names_the_model_and_its_context(text):
    async with open_door(says(text, "ok"), text) as door:
        listing = (await door.get("/v1/models")).json
    assert listing["object"] == "list"
    [model] = listing["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert isinstance(model["created"], int)


async def test_alive_is_not_ready(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        assert (await door.get("/ready")).status == 200
        service.ready = (False, "no decode node has shaken hands")
        response = await door.get("/ready")
        assert (response.status, response.json["reason"]) == (503, "no decode node has shaken hands")
        assert (await door.get("/health")).status == 200


async def test_metrics_are_the_services_own_text(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        response = await door.get("/metrics")
    assert response.raw == service.metrics_text()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_a_completion_has_openais_shape(text):
    async with open_door(says(text, "fine"), text) as door:
        response = await door.complete("abc", max_tokens=20)
    body = response.json
    assert response.status == 200
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "fine", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        "metrics": METRICS,
    }


async def test_a_chat_completion_has_openais_shape(text):
    async with open_door(says(text, "fine"), text) as door:
        response = await door.chat()
    body = response.json
    assert response.status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "fine"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5
    assert body["metrics"] == METRICS


async def test_the_service_gets_the_rendered_conversation_and_resolved_parameters(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        await door.chat([{"role": "user", "content": "hi"}], temperature=0.5, stop_token_ids=[9])
        await door.complete([5, 6, 7], max_tokens=4, seed=-1)
    chat, completion = service.requests
    assert chat.prompt_ids == text.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (chat.params.temperature, chat.params.stop_ids) == (0.5, (2, 9))
    assert chat.params.max_tokens == CONTEXT - len(chat.prompt_ids)
    assert completion.prompt_ids == [5, 6, 7]
    assert (completion.params.max_tokens, completion.params.seed) == (4, 2**64 - 1)


async def test_the_service_gets_the_priority_turned_round_for_there_the_greater_one_is_first(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        await door.chat(priority=-5)
        await door.complete(priority=2)
        await door.complete()
    assert [request.priority for request in service.requests] == [5, -2, 0]


async def test_a_stop_string_that_is_a_special_token_stops_at_that_token(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        await door.complete(ignore_eos=True, stop=["<|im_end|>", "END"])
    assert service.requests[0].params.stop_ids == (text.special_id("<|im_end|>"),)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/", 404), ("POST", "/v1/embeddings", 404)],
)
async def test_an_unknown_path_or_method_is_an_openai_error(text, method, path, status):
    async with open_door(says(text, "ok"), text) as door:
        response = await door.send(method, path)
    assert response.status == status
    assert response.error["type"] == "invalid_request_error"
    assert ("Allow" in response.headers) == (status == 405)


async def test_an_unknown_model_is_404_and_names_the_served_one(text):
    async with open_door(says(text, "ok"), text) as door:
        response = await door.complete(model="gpt-4")
    assert response.status == 404
    assert response.error["code"] == "model_not_found"
    assert MODEL in response.error["message"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""]])
async def test_an_empty_prompt_is_400_and_the_next_request_is_served(text, prompt):
    async with open_door(says(text, "ok"), text) as door:
        response = await door.complete(prompt)
        assert response.status == 400
        assert response.error["type"] == "invalid_request_error"
        assert (await door.complete()).status == 200


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 100_000])
async def test_a_text_longer_than_the_context_is_context_length_exceeded(text, length):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        for response in (
            await door.complete("x" * length),
            await door.chat([{"role": "user", "content": "x" * length}]),
        ):
            assert response.status == 400
            assert response.error["code"] == "context_length_exceeded"
            assert str(CONTEXT) in response.error["message"]
        assert (await door.complete("x" * (CONTEXT - 1))).status == 200
    assert len(service.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_service_keeps_its_status_code_and_retry_after(text, stream):
    service = says(text, "ok")
    service.refusal = GenerationError(503, "no_node_ready", "no decode node is ready", retry_after_s=2)
    async with open_door(service, text) as door:
        response = await door.complete(stream=stream)
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert (response.error["code"], response.error["type"]) == ("no_node_ready", "server_error")
        service.refusal = GenerationError(429, "queue_full", "64 requests wait", retry_after_s=1)
        assert (await door.complete(stream=stream)).error["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status_of_its_own(text, stream):
    error = GenerationError(502, "prefill_failed", "the prefill stage failed three times")
    service = ScriptedService(Script([5, 6], error=error))
    async with open_door(service, text) as door:
        response = await door.complete(stream=stream)
    assert (response.status, response.error["code"]) == (502, "prefill_failed")
    assert service.streams[0].cancelled.is_set()


async def test_an_unforeseen_failure_is_a_500_that_tells_nothing_of_the_inside(text, caplog):
    service = ScriptedService(Script([5, 6], error=KeyError("/dev/shm/secret"), error_at=1))
    async with open_door(service, text) as door:
        response = await door.complete()
        assert response.status == 500
        assert response.error["code"] == "internal_error"
        assert b"secret" not in response.raw
        assert b"Traceback" not in response.raw
        assert (await door.get("/health")).status == 200
    assert "secret" in caplog.text


async def test_a_generation_that_ends_without_a_finish_is_no_answer(text):
    async with open_door(ScriptedService(Script([5, 6])), text) as door:
        response = await door.complete(max_tokens=10)
    assert (response.status, response.error["type"]) == (500, "server_error")


@pytest.mark.parametrize(
    ("sent", "returned"),
    [("abc-1.2_3", "abc-1.2_3"), ('a b\tc"<é>', "abc"), ("x" * 1000, "x" * 128)],
)
async def test_the_clients_request_id_comes_back_cleaned_and_bounded(text, sent, returned):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/completions", {}), ("/nowhere", {})):
            response = await door.send("POST", path, json=body, headers={"X-Request-Id": sent})
            assert response.headers["X-Request-Id"] == returned
    assert service.requests[0].label == returned


async def test_a_request_without_an_id_gets_one_of_its_own(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        ids = [(await door.complete(stream=stream)).headers["X-Request-Id"] for stream in (False, True)]
    assert ids == [request.label for request in service.requests]
    assert len(set(ids)) == 2


async def test_a_model_without_a_chat_template_still_completes(text, model_dir, tmp_path):
    from pdserve.router.tokenizer import TextModel

    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    async with open_door(says(text, "ok"), TextModel.load(tmp_path)) as door:
        response = await door.chat()
        assert (response.status, response.error["code"]) == (400, "no_chat_template")
        assert (await door.complete()).json["choices"][0]["text"] == "ok"


async def test_a_served_name_may_hold_a_slash(text):
    card = dataclasses.replace(CARD, name="org/model")
    assert isinstance(card, ModelCard)
    async with open_door(says(text, "ok"), text, card=card) as door:
        assert (await door.complete(model="org/model")).json["model"] == "org/model"


def test_the_front_door_loads_neither_torch_nor_transformers():
    program = "import sys, pdserve.router.app; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_there_are_no_routes_but_those_that_are_documented(text):
    """Nothing that changes weights, pauses or runs anything."""
    app = create_app(CARD, says(text, "ok"), text, DEFAULTS)
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    assert {(method, path) for method, path in routes if method != "HEAD"} == {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/metrics"),
        ("GET", "/cluster"),
    }
