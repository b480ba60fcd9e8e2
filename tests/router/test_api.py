import re
from pathlib import Path

import pytest

from pdserve.core.model_config import GenerationDefaults
from pdserve.core.sampling import Bias
from pdserve.router.api import HARMLESS_FIELDS, LATER_FIELDS, parse_chat, parse_completion
from pdserve.router.api_error import ApiError
from pdserve.router.generation import ModelCard

CARD = ModelCard("tiny", max_model_len=100, vocab_size=50)
DEFAULTS = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, eos_ids=(2, 3))
USER = [{"role": "user", "content": "hi"}]


def completion(prompt="hi", defaults=DEFAULTS, **fields):
    return parse_completion({"prompt": prompt, **fields}, CARD, defaults)


def chat(messages=USER, **fields):
    return parse_chat({"messages": messages, **fields}, CARD, DEFAULTS)


def sampling(**fields):
    return completion(**fields).params(10, CARD.max_model_len)


def refusal(call, *args, **fields):
    with pytest.raises(ApiError) as raised:
        call(*args, **fields)
    return raised.value


# Sampling


def test_where_the_client_is_silent_the_checkpoints_defaults_apply():
    params = sampling()
    assert (params.temperature, params.top_k, params.top_p, params.stop_ids) == (0.6, 20, 0.9, (2, 3))


def test_where_the_checkpoint_is_silent_too_openais_defaults_apply():
    params = completion(defaults=GenerationDefaults()).params(10, 100)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 1.0, 16)


def test_what_the_client_says_wins_and_null_says_nothing():
    params = sampling(temperature=0, top_k=5, top_p=0.5, seed=7, max_tokens=3, min_tokens=2)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 5, 0.5, 7)
    assert (params.max_tokens, params.min_tokens) == (3, 2)
    assert sampling(temperature=None, top_k=None, stop=None, max_tokens=None).temperature == 0.6


@pytest.mark.parametrize(("value", "resolved"), [(-1, 0), (0, 0), (1, 1), (49, 49), (50, 0), (10**6, 0)])
def test_top_k_off_or_beyond_the_vocabulary_is_off(value, resolved):
    assert sampling(top_k=value).top_k == resolved


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert sampling(temperature=1e-300).is_greedy
    assert not sampling(temperature=0.01).is_greedy


@pytest.mark.parametrize(("seed", "resolved"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)])
def test_any_64_bit_integer_is_a_seed(seed, resolved):
    assert sampling(seed=seed).seed == resolved


def test_a_missing_seed_is_drawn():
    seeds = {sampling().seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_ignore_eos_leaves_only_the_clients_own_stop_tokens():
    assert sampling(stop_token_ids=[7, 2, 7]).stop_ids == (2, 3, 7)
    assert sampling(ignore_eos=True, stop_token_ids=[7]).stop_ids == (7,)
    assert sampling(ignore_eos=True).stop_ids == ()


@pytest.mark.parametrize(("value", "meant"), [(None, 0), (0, 0), (-7, 7), (3, -3), (2**31 - 1, 1 - 2**31)])
def test_the_lower_priority_value_is_the_more_urgent_one(value, meant):
    assert completion(priority=value).priority == chat(priority=value).priority == meant


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.5, 2.0, "3", True, [], 2**31, 10**400)),
        *(("temperature", value) for value in (-0.1, 2.1, "1", True, 1e400, 10**400, {})),
        *(("top_p", value) for value in (0, 0.0, -1, 1.01, False, "0.5")),
        *(("top_k", value) for value in (-2, 1.0, True, 2**31)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1.0, "1", True)),
        *(("min_tokens", value) for value in (-1, 17, 0.5, True)),
        *(("ignore_eos", value) for value in (1, 0, "true")),
        *(("stream", value) for value in (1, "yes", [])),
        *(("stop_token_ids", value) for value in ([50], [-1], [True], ["a"], 5, [1] * 65)),
        *(("stop", value) for value in ("", [""], ["a"] * 17, ["a" * 257], 5, [5], {}, [None])),
        *(("include_stop_str_in_output", value) for value in (1, "x")),
        *(("stream_options", value) for value in (5, [], {"include_usage": True})),
        *(("model", value) for value in (5, [], True)),
        *(("priority", value) for value in (2**31, -(2**31), 0.5, "1", True, [])),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_400_naming_the_field(field, value):
    for call in (completion, chat):
        if call is chat and field == "min_tokens" and value == 17:
            continue  # within what chat allows by default
        error = refusal(lambda call=call: call(**{field: value}).params(10, 100))
        assert error.status == 400
        assert error.param.split("[")[0] == field
        assert field in error.message


def test_usage_is_asked_for_with_a_stream_only():
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={"include_usage": None}).include_usage
    assert not completion(stream_options={}).include_usage
    assert refusal(completion, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert refusal(completion, stream=True, stream_options={"x": 1}).param == "stream_options.x"


# Length


def test_max_tokens_absent_is_16_for_completions_and_the_rest_of_the_context_for_chat():
    assert completion().params(10, 100).max_tokens == 16
    assert completion().params(90, 100).max_tokens == 10
    assert chat().params(10, 100).max_tokens == 90


def test_max_completion_tokens_is_another_name_of_max_tokens():
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refusal(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"


@pytest.mark.parametrize("num_prompt_tokens", [100, 101])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(num_prompt_tokens):
    for call in (completion(), chat(), completion(max_tokens=1)):
        error = refusal(call.params, num_prompt_tokens, 100)
        assert error.code == "context_length_exceeded"
        assert str(num_prompt_tokens) in error.message
        assert "context is 100 tokens" in error.message


def test_a_prompt_and_max_tokens_that_fill_the_context_exactly_are_served_and_one_more_is_not():
    assert completion(max_tokens=90).params(10, 100).max_tokens == 90
    error = refusal(completion(max_tokens=91).params, 10, 100)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "101" in error.message
    assert "100" in error.message


# Prompts and messages


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_prompt_may_be_a_string_or_a_list_of_one(prompt):
    assert completion(prompt).prompt == "hi"


@pytest.mark.parametrize("prompt", [[0, 49], [[0, 49]]])
def test_a_prompt_may_be_token_ids(prompt):
    assert completion(prompt).prompt == [0, 49]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", "b"],
        [[1], [2]],
        [1, "a"],
        None,
        5,
        True,
        {},
        [None],
        [True],
        [1.0],
        [[[1]]],
    ],
)
def test_an_empty_batched_or_shapeless_prompt_is_400_naming_it(prompt):
    error = refusal(completion, prompt)
    assert error.status == 400
    assert error.param.split("[")[0] == "prompt"


@pytest.mark.parametrize("prompt", [[50], [-1], [1, 2**70], [[0, 50]]])
def test_token_ids_outside_the_vocabulary_are_400(prompt):
    assert "0 to 49" in refusal(completion, prompt).message


def test_more_token_ids_than_the_context_are_refused_before_they_are_looked_at():
    assert refusal(completion, [10**9] * 101).code == "context_length_exceeded"


def test_text_parts_are_joined_and_names_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None},
    ]
    assert chat(messages).prompt.messages == (
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": ""},
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        (5, "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "messages[0].content"),
        ([*USER, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "contents": "y"}], "messages[0].contents"),
    ],
)
def test_a_message_that_is_none_is_400_naming_the_place(messages, param):
    error = refusal(chat, messages)
    assert (error.status, error.param) == (400, param)


def test_an_image_is_refused_and_its_address_not_repeated():
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    error = refusal(chat, [{"role": "user", "content": [part]}])
    assert (error.code, error.param) == ("unsupported_parameter", "messages[0].content[0].type")
    assert "169.254" not in error.message


# Penalties and biases


def test_penalties_and_biases_are_taken_as_they_are_given():
    asked = {"presence_penalty": 0.5, "frequency_penalty": -2, "repetition_penalty": 1.2, "min_p": 0.05}
    params = completion(logit_bias={"9": -100, "3": 1.5}, **asked).sampling
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.logit_bias == (Bias(3, 1.5), Bias(9, -100.0))


def test_a_repetition_penalty_of_the_checkpoint_applies_where_the_request_is_silent():
    defaults = GenerationDefaults(repetition_penalty=1.1)
    assert completion(defaults=defaults).sampling.repetition_penalty == 1.1
    assert completion(defaults=defaults, repetition_penalty=1).sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.5),
        ("min_p", 1.1),
        ("min_p", "0.1"),
        ("presence_penalty", True),
        ("logit_bias", [1]),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
    ],
)
def test_a_penalty_out_of_range_is_400_naming_the_field(field, value):
    error = refusal(completion, **{field: value})
    assert (error.status, error.param) == (400, field)


@pytest.mark.parametrize("key", ["-1", "07", "x", "", "١", str(CARD.vocab_size), "1" * 30, "1.0", " 1"])
def test_a_bias_for_what_is_no_token_id_is_400_naming_it(key):
    error = refusal(completion, logit_bias={key: 1})
    assert (error.status, error.param) == (400, f"logit_bias[{key[:16]}]")


@pytest.mark.parametrize("bias", [101, -100.5, True, "1", None, 10**400])
def test_a_bias_that_is_no_number_in_range_is_400_naming_its_token(bias):
    assert refusal(completion, logit_bias={"5": bias}).param == "logit_bias[5]"


# Samples, log-probabilities, echo


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, -1, 129, 1.0, "2", True, [2])),
        *(("best_of", value) for value in (0, 129, True, "1")),
        *(("prompt_logprobs", value) for value in (-1, 21, True, "1", 1.0)),
    ],
)
def test_a_number_of_samples_or_tokens_out_of_range_is_400_naming_field_and_limits(field, value):
    for call in (completion, chat):
        error = refusal(call, **{field: value})
        assert (error.status, error.param) == (400, field)
        assert "1 to 128" in error.message or "0 to 20" in error.message


@pytest.mark.parametrize("value", [-1, 21, True, False, "1", 1.0])
def test_log_probabilities_of_a_completion_are_a_number_from_0_to_20(value):
    error = refusal(completion, logprobs=value)
    assert (error.status, error.param) == (400, "logprobs")
    assert "0 to 20" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"echo": True}, "echo"),
    ],
)
def test_log_probabilities_of_a_chat_are_asked_for_with_true_and_a_number(fields, param):
    error = refusal(chat, **fields)
    assert (error.status, error.param) == (400, param)


def test_the_other_endpoints_field_is_refused_unless_it_asks_for_nothing():
    assert refusal(completion, top_logprobs=1).code == "unsupported_parameter"
    assert completion(top_logprobs=0).logprobs is None
    assert chat(echo=False, top_logprobs=0).logprobs is None


def test_a_sampler_is_told_how_many_tokens_to_list():
    silent = completion().sampling
    assert (silent.logprobs, silent.prompt_logprobs) == (None, None)
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=20).sampling.logprobs == 20
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert chat(prompt_logprobs=3).sampling.prompt_logprobs == 3


def test_an_echo_with_log_probabilities_needs_the_prompts_too_and_as_many_as_are_asked_for():
    assert completion(echo=True).sampling.prompt_logprobs is None
    assert completion(echo=True, logprobs=0).sampling.prompt_logprobs == 0
    assert completion(echo=True, logprobs=4, prompt_logprobs=2).sampling.prompt_logprobs == 4
    assert completion(echo=True, logprobs=1, prompt_logprobs=2).sampling.prompt_logprobs == 2


def test_log_probabilities_of_a_prompt_are_not_streamed():
    for call in (completion, chat):
        error = refusal(call, prompt_logprobs=0, stream=True)
        assert (error.status, error.param) == (400, "prompt_logprobs")
    assert completion(echo=True, logprobs=1, stream=True).sampling.prompt_logprobs == 1


def test_best_of_is_accepted_where_it_says_what_n_says():
    assert (completion().num_samples, completion(best_of=1).num_samples) == (1, 1)
    assert (chat(n=128).num_samples, completion(n=3, best_of=3).num_samples) == (128, 3)
    for fields in ({"best_of": 2}, {"n": 2, "best_of": 1}, {"n": 2, "best_of": 3}):
        error = refusal(completion, **fields)
        assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "best_of")


def test_no_tokens_at_all_may_be_asked_for_with_echo():
    assert completion(echo=True, max_tokens=0).params(10, 100).max_tokens == 1
    assert refusal(completion, max_tokens=0).param == "max_tokens"
    assert refusal(chat, max_tokens=0).param == "max_tokens"
    assert refusal(completion(echo=True, max_tokens=0, min_tokens=1).params, 10, 100).param == "min_tokens"


def test_a_prompt_that_is_only_scored_may_fill_the_context():
    assert completion([1] * 100, echo=True, max_tokens=0).params(100, 100).max_tokens == 1
    assert refusal(completion([1] * 100, echo=True, max_tokens=1).params, 100, 100).code == "context_length_exceeded"
    assert refusal(completion(echo=True, max_tokens=0).params, 101, 100).code == "context_length_exceeded"


# Fields that come later, and fields that never will


@pytest.mark.parametrize("field", LATER_FIELDS)
def test_a_field_that_is_not_supported_passes_when_it_asks_for_nothing_and_is_refused_otherwise(field):
    for value in (None, *LATER_FIELDS[field]):
        completion(**{field: value})
        chat(**{field: value})
    for value in ({"x": 1}, 7, "something"):
        for call in (completion, chat):
            error = refusal(call, **{field: value})
            assert (error.status, error.code, error.param) == (400, "unsupported_parameter", field)
            assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("typical_p", True), ("use_beam_search", 0), ("top_logprobs", False), ("suffix", 0)]
)
def test_a_neutral_value_of_another_type_is_not_neutral(field, value):
    assert refusal(completion, **{field: value}).param == field


def test_numbers_are_neutral_in_either_spelling():
    completion(typical_p=1.0, length_penalty=1)


class Listening(dict):
    """A body that notes which of its members are asked for."""

    def __init__(self, members):
        super().__init__(members)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("endpoint", "body", "other"),
    [(parse_completion, {"prompt": "hi"}, "(chat)"), (parse_chat, {"messages": USER}, "(completions)")],
)
def test_the_fields_that_the_documentation_names_are_those_that_are_taken(endpoint, body, other):
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    rows = page.split("## Fields")[1].split("\n\n")[1].splitlines()[2:]
    told = [row for row in rows if other not in row.split("|")[1]]
    named = {name.split(".")[0] for row in told for name in re.findall(r"`([a-z_.]+)`", row.split("|")[1])}
    listening = Listening(body)
    endpoint(listening, CARD, DEFAULTS)
    assert named | {"best_of"} == listening.asked
    assert all(f"`{name}`" in page for name in HARMLESS_FIELDS | {"best_of"})


def test_fields_without_effect_on_the_answer_pass():
    completion(**dict.fromkeys(HARMLESS_FIELDS, "x"))


def test_an_unknown_field_is_400_with_the_nearest_known_one():
    error = refusal(completion, temprature=0)
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert "did you mean temperature" in error.message
    assert "did you mean" not in refusal(completion, zzzzzzz=0).message


def test_an_unknown_model_is_404_and_a_missing_one_is_the_served_one():
    error = refusal(completion, model="gpt-4")
    assert (error.status, error.code) == (404, "model_not_found")
    assert completion(model="tiny").prompt == completion(model=None).prompt


def test_no_error_message_repeats_more_than_a_little_of_what_was_sent():
    for fields in ({"model": "x" * 10**6}, {"stop": ["x" * 10**6]}, {"x" * 10**6: 1}, {"seed": 10**4000}):
        assert len(refusal(completion, **fields).message) < 500
