import numpy as np
import pytest

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.lengths import Span
from pdserve.loadtest.workload.load import Vocabulary
from pdserve.loadtest.workload.schedule import digest_schedule, plan_preflight, plan_requests
from tests.loadtest.samples import BOTH_APIS, make_load, planned_ids


@pytest.mark.parametrize("api", BOTH_APIS)
def test_the_same_seed_plans_the_same_requests(api):
    load = make_load(rate_per_s=2.0, num_requests=50, seed=7)
    assert plan_requests(load, api) == plan_requests(load, api)
    assert digest_schedule(plan_requests(load, api)) == digest_schedule(plan_requests(load, api))


def test_another_seed_plans_other_times_lengths_and_prompts():
    one, other = (plan_requests(make_load(2.0, 50, seed=seed), Api.COMPLETIONS) for seed in (1, 2))
    assert [planned.at_s for planned in one] != [planned.at_s for planned in other]
    assert [planned.input_tokens for planned in one] != [planned.input_tokens for planned in other]
    assert not set(planned_ids(one)) & set(planned_ids(other))
    assert digest_schedule(one) != digest_schedule(other)


def test_another_rate_scales_the_times_and_keeps_the_prompts():
    slow, fast = (plan_requests(make_load(rate, 50), Api.COMPLETIONS) for rate in (1.0, 4.0))
    assert [planned.at_s / 4 for planned in slow] == pytest.approx([planned.at_s for planned in fast])
    assert planned_ids(slow) == planned_ids(fast)


def test_gaps_between_arrivals_are_exponential_with_the_mean_of_the_rate():
    schedule = plan_requests(make_load(5.0, 20_000), Api.COMPLETIONS)
    gaps = np.diff([planned.at_s for planned in schedule])
    assert gaps.min() >= 0
    # Three standard errors of the mean and of the share, for this fixed seed.
    assert gaps.mean() == pytest.approx(0.2, rel=3 / np.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
    assert (gaps > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.011)


def test_the_first_request_is_due_at_the_start():
    assert plan_requests(make_load(rate_per_s=0.01), Api.COMPLETIONS)[0].at_s == 0


def test_an_infinite_rate_sends_all_at_once():
    assert {planned.at_s for planned in plan_requests(make_load(float("inf"), 20), Api.COMPLETIONS)} == {0.0}


def test_lengths_reach_both_ends_of_their_span():
    load = make_load(num_requests=500, input_tokens=Span(5, 9), output_tokens=Span(1, 3))
    schedule = plan_requests(load, Api.COMPLETIONS)
    assert {planned.input_tokens for planned in schedule} == {5, 6, 7, 8, 9}
    assert {planned.output_tokens for planned in schedule} == {1, 2, 3}


def test_a_prompt_has_exactly_the_planned_number_of_ids_of_the_vocabulary():
    load = make_load(num_requests=500, vocabulary=Vocabulary(1000, 1700))
    schedule = plan_requests(load, Api.COMPLETIONS)
    assert [len(planned.prompt) for planned in schedule] == [planned.input_tokens for planned in schedule]
    ids = {token for prompt in planned_ids(schedule) for token in prompt}
    assert min(ids) == 1000
    assert max(ids) == 1699


@pytest.mark.parametrize("end", [1500, 2**31])
def test_prompts_of_any_vocabulary_are_plain_numbers(end):
    (planned, *_) = plan_requests(make_load(vocabulary=Vocabulary(1000, end)), Api.COMPLETIONS)
    assert {type(token) for token in planned.prompt} == {int}


def test_prompts_share_the_numbers_they_consist_of():
    load = make_load(num_requests=200, vocabulary=Vocabulary(1000, 1300))
    objects = {id(token) for prompt in planned_ids(plan_requests(load, Api.COMPLETIONS)) for token in prompt}
    assert len(objects) == 300


def test_a_chat_prompt_has_the_planned_number_of_words():
    schedule = plan_requests(make_load(num_requests=50), Api.CHAT)
    assert [len(planned.prompt.messages[0].content.split()) for planned in schedule] == [
        planned.input_tokens for planned in schedule
    ]


def test_no_two_prompts_start_with_the_same_id():
    load = make_load(num_requests=700, vocabulary=Vocabulary(1000, 1700))
    prompts = planned_ids(plan_requests(load, Api.COMPLETIONS))
    assert len({prompt[0] for prompt in prompts}) == 700


def test_more_prompts_than_ids_differ_in_as_few_first_ids_as_possible():
    load = make_load(num_requests=100, vocabulary=Vocabulary(0, 10))
    prompts = planned_ids(plan_requests(load, Api.COMPLETIONS))
    assert len({prompt[:2] for prompt in prompts}) == 100


@pytest.mark.parametrize("vocabulary", [Vocabulary(0, 10), Vocabulary(0, 1)])
def test_prompts_too_short_to_differ_are_refused(vocabulary):
    load = make_load(num_requests=101, input_tokens=Span(2, 9), vocabulary=vocabulary)
    with pytest.raises(OptionError, match=r"--num-requests 101: .*--input-tokens"):
        plan_requests(load, Api.COMPLETIONS)


def test_preflight_prompts_are_not_those_of_the_run():
    load = make_load(num_requests=20)
    preflight = plan_preflight(load, Api.COMPLETIONS, 5)
    assert len(preflight) == 5
    assert not set(planned_ids(preflight)) & set(planned_ids(plan_requests(load, Api.COMPLETIONS)))
    assert plan_preflight(load, Api.COMPLETIONS, 0) == ()
