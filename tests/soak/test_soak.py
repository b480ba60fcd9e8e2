"""The soak in short, and that it sees what it is there to see."""

import random
from dataclasses import replace

import pytest

from tests.soak.answer import TOLERANCE, Answer, Choice, Listed
from tests.soak.catalogue import CONTEXT, catalogue, find_stop
from tests.soak.driver import MAX_GROWTH, Report, soak

MIB = 1 << 20


@pytest.mark.slow
async def test_a_minute_of_mixed_traffic_on_small_pools_answers_all_as_alone_and_leaves_nothing():
    report = await soak(60.0, 0, lambda phase, done, figures: None)
    assert report.failures == []
    assert report.counts["cancels"]


def make_answer(
    text: str = "abcdef", finish: str | None = "stop", logprob: float = -1.5, num_tokens: int = 3
) -> Answer:
    top = (("a", -1.0), ("b", -1.0 - TOLERANCE / 2), ("c", -2.0), ("d", -3.0))
    listed = [Listed(str(number), logprob, top, 2 * number) for number in range(num_tokens)]
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    return Answer({index: Choice(text, finish, list(listed)) for index in range(2)}, usage)


def with_top(*top: tuple[str, float]) -> Answer:
    answer = make_answer()
    answer.choices[1].listed[2] = replace(answer.choices[1].listed[2], top=top)
    return answer


FOUR = (("c", -2.0), ("d", -3.0))


@pytest.mark.parametrize(
    "found",
    [
        make_answer(),
        make_answer(logprob=-1.5 + TOLERANCE / 2),
        with_top(("b", -1.0), ("a", -1.0 - TOLERANCE / 2), *FOUR),
        with_top(("a", -1.0), ("b", -1.0), ("c", -2.0), ("e", -3.0)),
    ],
    ids=["the same", "by rounding", "neighbours by rounding", "last of the likeliest by rounding"],
)
def test_answers_that_differ_by_no_more_than_rounding_are_equal(found: Answer):
    assert found.difference(make_answer()) is None


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (make_answer(text="abcxef"), "from character 3 on 'xef', alone 'def'"),
        (make_answer(text="abcde"), "from character 5 on ''"),
        (make_answer(finish="length"), "finish length, alone stop"),
        (make_answer(logprob=-1.5 + 2 * TOLERANCE), "token 0 is listed as"),
        (make_answer(num_tokens=2), "token 2 is listed as None"),
        (make_answer(num_tokens=4), "token 3 is listed as Listed"),
        (with_top(("c", -1.0), ("b", -1.0), ("a", -2.0), ("d", -3.0)), "choice 1: token 2"),
        (with_top(*FOUR), "choice 1: token 2"),
        (replace(make_answer(), usage=None), "usage None"),
        (replace(make_answer(), choices={0: make_answer().choices[0]}), "choices [0], alone [0, 1]"),
    ],
)
def test_anything_else_is_a_difference_and_is_named(found: Answer, what: str):
    assert what in str(found.difference(make_answer()))


def test_a_cut_answer_must_be_a_beginning_of_the_whole_one():
    assert make_answer("abc", None, num_tokens=1).departure(make_answer()) is None
    assert Answer().departure(make_answer()) is None
    for departed in (make_answer("abd", None), make_answer(finish="length"), make_answer("abc", None, num_tokens=4)):
        assert departed.departure(make_answer()) is not None


def test_a_stream_of_events_is_the_answer_that_is_sent_whole():
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0}, None]}
    whole = {"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": logprobs | {"text_offset": [0, 1]}}
    parts = [
        {
            "index": 0,
            "text": "ab"[number],
            "finish_reason": (None, "stop")[number],
            "logprobs": {name: [values[number]] for name, values in whole["logprobs"].items()},
        }
        for number in range(2)
    ]
    streamed = Answer()
    for part in parts:
        streamed.add({"choices": [part], "usage": None})
    streamed.add({"choices": [], "usage": {"total_tokens": 3}})
    assert streamed == Answer.of({"choices": [whole], "usage": {"total_tokens": 3}})
    with pytest.raises(ValueError, match="after the end of choice 0"):
        streamed.add({"choices": [parts[0]]})


def test_a_seed_names_what_is_asked_and_everything_asked_fits_the_context():
    conversations = catalogue(7, 300)
    assert conversations == catalogue(7, 300) != catalogue(8, 300)
    for turns in conversations:
        assert sum(len(turn.prompt) + turn.body["max_tokens"] for turn in turns) <= CONTEXT


def test_a_stop_string_is_a_piece_of_whole_characters():
    source = random.Random(0)
    assert {find_stop(source, "\ufffd" * 9), find_stop(source, "")} == {None}
    pieces = {find_stop(source, "ab\ufffdcd") for _ in range(50)} - {None}
    assert pieces >= {"c", "cd"}
    assert all(piece in "ab\ufffdcd" for piece in pieces)


@pytest.mark.parametrize(("last", "num_grown"), [(MAX_GROWTH, 0), (MAX_GROWTH + 1, 1)])
def test_memory_that_grows_after_half_time_is_named(last: int, num_grown: int):
    report = Report(resident={"P0": [10 * MIB, 30 * MIB] + [30 * MIB] * 5 + [30 * MIB + last] * 3})
    assert len(report.growth()) == num_grown
