import json

import pytest

from pdserve.router.api_error import ApiError
from pdserve.router.app import FrontDoorLimits
from pdserve.router.body import decode_object
from tests.router.door import MODEL, open_door, says

GOOD = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
JSON_HEADERS = {"Content-Type": "application/json"}


async def post(door, data, headers=JSON_HEADERS):
    return await door.send("POST", "/v1/completions", data=data, headers=headers)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1, x}', "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"5", "must be a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' appears twice"),
        (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (json.dumps({"a": 1}).encode("utf-16"), "not UTF-8"),
        (json.dumps({"a": 1}).encode("utf-16-le"), "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (rb'{"a": "\ud800"}', "lone surrogate"),
        (rb'{"\uDFFF": 1}', "lone surrogate"),
    ],
)
def test_what_is_not_one_plain_json_object_is_refused_with_the_reason(raw, reason):
    with pytest.raises(ApiError, match=reason) as refusal:
        decode_object(raw)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("value", ["👧", "\\ud800", "\\", "삼"])
def test_escaped_characters_that_are_whole_are_read(value):
    assert decode_object(json.dumps({"a": value}).encode()) == {"a": value}


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
async def test_another_media_type_charset_or_encoding_is_415(text, headers):
    async with open_door(says(text, "ok"), text) as door:
        response = await post(door, GOOD, headers)
        assert response.status == 415
        assert response.error["type"] == "invalid_request_error"
        assert (await door.complete()).status == 200


async def test_a_body_over_the_cap_is_413_whether_its_length_is_announced_or_not(text):
    async def chunks():
        for _ in range(40):
            yield b"x" * 100

    limits = FrontDoorLimits(max_body_bytes=1000)
    async with open_door(says(text, "ok"), text, limits=limits) as door:
        for data in (b"x" * 1001, chunks()):
            response = await post(door, data)
            assert response.status == 413
            assert "1000 bytes" in response.error["message"]
            assert "max_body_bytes" in response.error["message"]
        assert (await door.complete()).status == 200


async def test_a_body_in_many_small_chunks_is_read(text):
    async def chunks():
        for byte in GOOD:
            yield bytes([byte])

    async with open_door(says(text, "ok"), text) as door:
        assert (await post(door, chunks())).json["choices"][0]["text"] == "ok"


async def test_a_body_that_never_ends_is_408(text, raw_connection):
    limits = FrontDoorLimits(body_timeout_s=0.05)
    async with open_door(says(text, "ok"), text, limits=limits) as door:
        reader, writer = await raw_connection(door)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n')
        assert b" 408 " in await reader.readline()
        assert (await door.complete()).status == 200


async def test_a_broken_chunk_is_a_400_and_the_server_lives(text, raw_connection):
    async with open_door(says(text, "ok"), text) as door:
        reader, writer = await raw_connection(door)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n")
        assert b" 400 " in await reader.readline()
        assert (await door.complete()).status == 200
