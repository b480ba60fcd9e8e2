"""The techniques: what takes them away, what is sent, and what they ought to bring."""

import pytest

from pdserve.launch import up
from pdserve.loadtest.ablation.techniques import (
    PAGING_GAIN,
    STATIC_GAIN,
    TECHNIQUES,
    StepCost,
    Technique,
    exponential_lengths,
    limit_scale,
    lognormal_lengths,
    longest_of,
)
from pdserve.loadtest.client.target import Api
from pdserve.loadtest.commands import ablate
from pdserve.loadtest.workload.schedule import plan_requests


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_technique_is_undone_by_flags_that_pdserve_up_has(technique: Technique):
    parsed = vars(up.parser().parse_line([*technique.common, *technique.before]))
    flag, value = technique.before
    assert parsed[flag.removeprefix("--").replace("-", "_")] == value


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_the_requests_of_a_technique_fit_the_context_that_it_asks_for(technique: Technique):
    flags = dict(zip(technique.common[::2], technique.common[1::2], strict=True))
    assert technique.load.longest <= int(flags.get("--max-model-len", 8192))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_technique_sends_the_same_lengths_in_another_order_in_each_round(technique: Technique):
    first, second = (plan_requests(technique.load_of(seed, 1.0), Api.COMPLETIONS) for seed in (0, 1))
    assert len(first) == technique.load.num_requests
    assert [each.prompt for each in first] != [each.prompt for each in second]
    assert sorted(each.output_tokens for each in first) == sorted(each.output_tokens for each in second)


def test_less_time_sends_fewer_requests_but_never_too_few():
    (technique, *_) = TECHNIQUES
    scales = [limit_scale(scale) for scale in (9.0, 1.0, 0.5, 0.01)]
    assert [technique.load_of(0, scale).num_requests for scale in scales] == [192, 192, 96, 48]


def test_the_command_knows_the_techniques_by_name():
    assert tuple(technique.name for technique in TECHNIQUES) == ablate.NAMES


@pytest.mark.parametrize(
    ("lengths", "num_drawn", "expected"), [([7, 7, 7], 5, 7.0), ([1, 9, 20], 1, 10.0), ([1, 3], 2, 2.5)]
)
def test_the_longest_of_a_batch_is_the_mean_over_random_batches(lengths, num_drawn, expected):
    assert longest_of(lengths, num_drawn) == pytest.approx(expected)


def test_exponential_lengths_have_their_mean_and_stay_within_their_limits():
    lengths = exponential_lengths(64, 384, 512)
    assert sum(lengths) / len(lengths) == pytest.approx(64, rel=0.02)
    assert (min(lengths), max(lengths)) == (4, 384)


def test_log_normal_lengths_have_their_median_and_a_heavy_tail():
    lengths = lognormal_lengths(32, 1.25, 512, 513)
    assert sorted(lengths)[256] == 32
    assert max(lengths) == 512
    assert sum(lengths) > 2 * 32 * 513 * 0.98


def test_where_a_step_takes_the_same_time_static_batches_lose_what_their_longest_is_over_the_mean():
    cost = StepCost(fixed_s=0.01, sequence_s=0.0, prompt_token_s=0.0)
    gain = cost.tokens_per_s(2, 16, 2.0) / cost.static_tokens_per_s(2, 16, [1, 3])
    assert gain == pytest.approx(2.5 / 2)


def test_where_each_sequence_takes_its_own_time_static_batches_lose_nothing():
    cost = StepCost(fixed_s=0.0, sequence_s=0.01, prompt_token_s=0.001)
    assert cost.tokens_per_s(8, 16, 2.0) == pytest.approx(cost.static_tokens_per_s(8, 16, [1, 3]))


def test_the_loads_show_their_technique_where_steps_cost_what_they_do_on_the_reference_machine():
    assert 1.8 < STATIC_GAIN < 2.3
    assert 1.6 < PAGING_GAIN < 2.2
