"""Nothing a client sends makes the front door answer with a 5xx, or with anything but JSON."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.api import HARMLESS_FIELDS, LATER_FIELDS
from tests.router.door import MODEL, open_door, says

PATHS = ("/v1/completions", "/v1/chat/completions")
KNOWN_FIELDS = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
)

numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308])
texts = st.text(max_size=20) | st.sampled_from(["user", "system", "text", "<|im_end|>", "\x00", "👩‍👩‍👧"])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from([*KNOWN_FIELDS, *KNOWN_FIELDS, *LATER_FIELDS, *HARMLESS_FIELDS]) | st.text(max_size=8),
    values,
    max_size=4,
)


# Values that are mostly in range, so that they meet each other.
num_tops = st.sampled_from([None, 0, 1, 20, 21, True])
sampling_fields = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(0, 3),
        "best_of": st.integers(1, 3),
        "logprobs": num_tops,
        "top_logprobs": num_tops,
        "prompt_logprobs": num_tops,
        "echo": st.booleans(),
        "stream": st.booleans(),
        "max_tokens": st.integers(0, 5),
        "min_tokens": st.integers(0, 2),
        "stop": st.sampled_from(["o", "k", "ok", "x"]),
        "include_stop_str_in_output": st.booleans(),
    },
)


def valid_body(path):
    prompt = {"prompt": "hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": MODEL, "max_tokens": 4, **prompt}


def check_bodies(text, strategy, num_examples):
    """Post what the strategy draws, path and bytes, to one front door."""
    with asyncio.Runner() as runner:
        context = open_door(says(text, "ok"), text)
        door = runner.run(context.__aenter__())

        @settings(max_examples=num_examples)
        @given(strategy)
        def check(drawn):
            path, body = drawn
            headers = {"Content-Type": "application/json"}
            response = runner.run(door.send("POST", path, data=body, headers=headers))
            assert response.status in (200, 400, 404, 413)
            if response.status != 200:
                assert response.error["type"] == "invalid_request_error"
            elif "event-stream" in response.headers["Content-Type"]:
                assert response.events[-1] == "[DONE]"
            else:
                assert response.json["choices"][0]["finish_reason"] in ("stop", "length")

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))


def test_any_field_of_any_value_is_served_or_refused(text):
    drawn = st.tuples(st.sampled_from(PATHS), fields).map(
        lambda item: (item[0], json.dumps(valid_body(item[0]) | item[1]).encode())
    )
    check_bodies(text, drawn, 300)


def test_any_samples_and_log_probabilities_are_served_or_refused(text):
    prompts = st.sampled_from(["hi", "삼👧", [259, 0, 1, 100]])
    drawn = st.tuples(st.sampled_from(PATHS), sampling_fields, prompts).map(
        lambda item: (item[0], valid_body(item[0]) | item[1] | ({"prompt": item[2]} if item[0] == PATHS[0] else {}))
    )
    check_bodies(text, drawn.map(lambda item: (item[0], json.dumps(item[1]).encode())), 200)


def test_any_bytes_are_served_or_refused(text):
    whole = json.dumps(valid_body(PATHS[0])).encode()
    cut = st.integers(0, len(whole)).flatmap(
        lambda at: st.binary(max_size=3).map(lambda b: whole[:at] + b + whole[at:])
    )
    check_bodies(text, st.tuples(st.sampled_from(PATHS), st.binary(max_size=40) | cut), 150)
