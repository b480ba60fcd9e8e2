"""System prompts and conversations: what prompts share, and that they share no more."""

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.lengths import Span
from pdserve.loadtest.workload.load import PromptFormat
from pdserve.loadtest.workload.schedule import plan_preflight, plan_requests
from pdserve.loadtest.workload.sharing import Conversations, SharedPrefix, parse_seconds
from tests.loadtest.samples import make_load, planned_ids

TALKS = Conversations(Span(1, 4), (5.0, 15.0))


def by_conversation(plan):
    talks = defaultdict(list)
    for planned in plan:
        talks[planned.conversation].append(planned)
    return talks


def test_each_prompt_begins_with_one_of_the_system_prompts_and_goes_on_alone():
    load = make_load(num_requests=60, shared_prefix=SharedPrefix(20, 3))
    prompts = planned_ids(plan_requests(load, Api.COMPLETIONS))
    assert len({prompt[:20] for prompt in prompts}) == 3
    assert len({prompt[20] for prompt in prompts}) == 60


def test_a_system_prompt_comes_on_top_of_the_prompts_own_tokens_which_stay_the_same():
    alone = plan_requests(make_load(num_requests=10), Api.COMPLETIONS)
    shared = plan_requests(make_load(num_requests=10, shared_prefix=SharedPrefix(20)), Api.COMPLETIONS)
    assert [planned.prompt[20:] for planned in shared] == [planned.prompt for planned in alone]
    assert [planned.input_tokens for planned in shared] == [planned.input_tokens + 20 for planned in alone]


def test_the_preflight_leaves_the_system_prompts_uncached():
    load = make_load(shared_prefix=SharedPrefix(20))
    run, preflight = plan_requests(load, Api.COMPLETIONS), plan_preflight(load, Api.COMPLETIONS, 2)
    assert not {planned.prompt[:2] for planned in run} & {planned.prompt[:2] for planned in preflight}


def test_a_chat_has_the_system_prompt_as_its_system_message():
    plan = plan_requests(make_load(shared_prefix=SharedPrefix(20)), Api.CHAT)
    assert {tuple(message.role for message in planned.prompt.messages) for planned in plan} == {("system", "user")}
    assert len({planned.prompt.messages[0].content for planned in plan}) == 1


def test_too_many_system_prompts_to_differ_are_refused():
    load = make_load(shared_prefix=SharedPrefix(1, 50_000))
    with pytest.raises(OptionError, match=r"--prefix-groups 50000: .*--shared-prefix"):
        plan_requests(load, Api.COMPLETIONS)


@pytest.mark.parametrize(("num_tokens", "num_groups"), [(0, 1), (5, 0), (10**7, 1)])
def test_a_shared_prefix_out_of_limits_is_refused(num_tokens, num_groups):
    with pytest.raises(OptionError, match=r"--shared-prefix|--prefix-groups"):
        SharedPrefix(num_tokens, num_groups)


def test_turns_are_numbered_in_order_of_time_and_think_times_are_kept():
    plan = plan_requests(make_load(1.0, 300, conversations=TALKS), Api.COMPLETIONS)
    assert len(plan) == 300
    assert [planned.at_s for planned in plan] == sorted(planned.at_s for planned in plan)
    assert plan[0].at_s == 0
    for talk in by_conversation(plan).values():
        assert [planned.turn for planned in talk] == list(range(len(talk)))
        assert 1 <= len(talk) <= 4
        thinks = np.diff([planned.at_s for planned in talk])
        assert all(5.0 <= think <= 15.0 for think in thinks)


@pytest.mark.parametrize("shared", [None, SharedPrefix(10, 2)])
def test_a_turns_prompt_is_the_one_before_with_its_planned_answer_and_a_new_message(shared):
    load = make_load(1.0, 100, conversations=TALKS, shared_prefix=shared)
    plan = plan_requests(load, Api.COMPLETIONS)
    if shared is not None:
        assert len({planned.prompt[:10] for planned in plan}) == 2
    for talk in by_conversation(plan).values():
        for before, after in pairwise(talk):
            assert after.prompt[: before.input_tokens] == before.prompt
            new = after.input_tokens - before.input_tokens - before.output_tokens
            assert load.lengths.input_tokens.low <= new <= load.lengths.input_tokens.high
    assert max(planned.input_tokens + planned.output_tokens for planned in plan) <= load.longest


def test_conversations_share_nothing_with_each_other():
    plan = plan_requests(make_load(1.0, 100, conversations=TALKS), Api.COMPLETIONS)
    firsts = [talk[0].prompt[0] for talk in by_conversation(plan).values()]
    assert len(set(firsts)) == len(firsts)


def test_a_chats_turns_are_messages_of_both_sides():
    plan = plan_requests(make_load(1.0, 40, conversations=TALKS), Api.CHAT)
    for talk in by_conversation(plan).values():
        for number, planned in enumerate(talk):
            roles = [message.role for message in planned.prompt.messages]
            assert roles == ["user", "assistant"] * number + ["user"]
            assert planned.prompt.messages[: 2 * number - 1] == (talk[number - 1].prompt.messages if number else ())


def test_a_text_goes_on_where_the_turn_before_ended():
    load = make_load(1.0, 40, conversations=TALKS, prompt_format=PromptFormat.TEXT)
    for talk in by_conversation(plan_requests(load, Api.COMPLETIONS)).values():
        for before, after in pairwise(talk):
            assert after.prompt.startswith(before.prompt + " ")


def test_conversations_come_so_often_that_their_turns_have_the_rate():
    load = make_load(5.0, 4000, conversations=Conversations(Span(3, 3), (1.0, 1.0)))
    times = np.array([planned.at_s for planned in plan_requests(load, Api.COMPLETIONS)])
    counts = np.histogram(times, bins=np.arange(10, 800, 100))[0] / 100
    # Turns of a conversation come in groups of three, so counts vary three times as much as Poisson's.
    assert counts == pytest.approx(np.full(7, 5.0), abs=4 * math.sqrt(3 * 5.0 / 100))


def test_another_rate_sends_the_same_conversations_in_the_same_order_with_scaled_think_times():
    load = make_load(1.0, 60, conversations=TALKS)
    slow, fast = plan_requests(load, Api.COMPLETIONS), plan_requests(load.at_rate(4.0), Api.COMPLETIONS)
    assert [planned.prompt for planned in slow] == [planned.prompt for planned in fast]
    assert [planned.at_s / 4 for planned in slow] == pytest.approx([planned.at_s for planned in fast])
    assert load.at_rate(4.0).conversations.think_s == (1.25, 3.75)


def test_a_conversation_that_cannot_fit_at_all_is_refused():
    with pytest.raises(OptionError, match="--input-tokens"):
        make_load(input_tokens=Span(2000, 2000), conversations=Conversations(Span(900, 900), (1.0, 1.0)))


@pytest.mark.parametrize(
    ("turns", "think_s", "flag"),
    [
        (Span(0, 1), (1.0, 1.0), "--turns"),
        (Span(3, 2), (1.0, 1.0), "--turns"),
        (Span(1, 2000), (1.0, 1.0), "--turns"),
        (Span(1, 2), (2.0, 1.0), "--think-s"),
        (Span(1, 2), (0.0, math.inf), "--think-s"),
        (Span(1, 2), (math.nan, 1.0), "--think-s"),
    ],
)
def test_conversations_out_of_limits_are_refused(turns, think_s, flag):
    with pytest.raises(OptionError, match=flag):
        Conversations(turns, think_s)


def test_seconds_are_two_numbers_or_one():
    assert parse_seconds("--think-s", "5-15.5") == (5.0, 15.5)
    assert parse_seconds("--think-s", "2") == (2.0, 2.0)


@pytest.mark.parametrize("text", ["", "-1", "a", "1-2-3", "1e3", "nan", "1-", "١"])
def test_malformed_seconds_are_refused(text):
    with pytest.raises(OptionError, match="--think-s"):
        parse_seconds("--think-s", text)
