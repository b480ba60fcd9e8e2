"""What a step brings: the measures on runs of known answers, the steps themselves, and pairs of runs at servers."""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace

import pytest

from pdserve.launch import up
from pdserve.loadtest.ablation import Ablation, Ended
from pdserve.loadtest.client.target import Api
from pdserve.loadtest.commands import ablate
from pdserve.loadtest.commands.command import add_arguments, main
from pdserve.loadtest.deployment.layout import Layout
from pdserve.loadtest.report.ablation_report import AblationConfig, describe_ablation, to_json, write_json
from pdserve.loadtest.report.text import format_document
from pdserve.loadtest.search.ablation import (
    FIRST_TOKEN,
    GAP,
    STEPS,
    TOKENS,
    Pair,
    Seen,
    Step,
    busy_span,
    exponential_lengths,
    gain_of,
    kv_share,
    num_at_once,
    slots_gain,
    tokens_per_s,
    too_many_failures,
)
from pdserve.loadtest.workload.schedule import plan_requests
from tests.loadtest.samples import make_load, make_record


def seen(*token_times_s: tuple[float, ...], num_kv_tokens: int = 0) -> Seen:
    return Seen([make_record(index, token_times_s=times) for index, times in enumerate(token_times_s)], num_kv_tokens)


# ---- measures ------------------------------------------------------------------------------------


def test_a_server_is_busy_while_all_but_the_first_and_the_last_tenth_of_the_tokens_come():
    (run,) = (seen(tuple(float(i) for i in range(101))),)
    assert busy_span(run.records) == (10.0, 90.0)
    assert tokens_per_s(run) == 1.0


def test_a_slow_start_and_a_slow_end_do_not_count():
    steady = tuple(100 + 0.1 * i for i in range(96))
    assert tokens_per_s(seen((0.0, 50.0, *steady, 200.0, 300.0))) == pytest.approx(10.0)


def test_requests_at_once_are_those_between_their_first_and_last_token():
    run = seen(tuple(float(i) for i in range(101)), tuple(float(i) for i in range(50, 101)))
    span = busy_span(run.records)
    assert span is not None
    start, end = span
    assert num_at_once(run) == pytest.approx(((50 - start) + 2 * (end - 50)) / (end - start))


def test_the_share_of_memory_in_use_counts_prompts_and_what_has_come_so_far():
    # 8 prompt tokens and 10 to 90 of the answer: 58 on average, of which the newest is not computed yet.
    run = seen(tuple(float(i) for i in range(101)), num_kv_tokens=1000)
    assert kv_share(run) == pytest.approx((8 + 49.5) / 1000)
    assert kv_share(replace(run, num_kv_tokens=0)) is None


@pytest.mark.parametrize("read", [tokens_per_s, num_at_once, FIRST_TOKEN.read, GAP.read])
def test_a_run_without_tokens_has_no_value(read):
    assert read(seen(())) is None


def test_first_tokens_count_from_the_actual_send():
    records = [make_record(i, intended_s=0.0, sent_s=float(i), token_times_s=(i + 0.5, i + 1.0)) for i in range(9)]
    assert FIRST_TOKEN.read(Seen(records)) == 0.5


def test_a_run_of_which_more_than_a_twentieth_failed_says_nothing():
    complete = [make_record(index) for index in range(19)]
    failed = [make_record(19, error="timeout", detail="no end"), make_record(20, error="timeout")]
    assert too_many_failures([*complete, failed[0]]) is None
    assert too_many_failures([*complete, *failed]) == "2 of 21 requests failed; the first: request 19, timeout: no end"


# ---- gains ---------------------------------------------------------------------------------------


def test_a_gain_above_1_says_that_the_step_pays_for_rates_and_latencies_alike():
    assert gain_of(TOKENS, [Pair(now=300.0, before=100.0)]).factor == pytest.approx(3.0)
    assert gain_of(GAP, [Pair(now=0.1, before=0.3)]).factor == pytest.approx(3.0)


def test_a_gain_is_a_geometric_mean_over_pairs_with_its_range():
    gain = gain_of(TOKENS, [Pair(100.0, 50.0), Pair(100.0, 12.5)])
    assert gain.factor == pytest.approx(4.0)
    assert (gain.low, gain.high) == (2.0, 8.0)
    assert (gain.now, gain.before) == (pytest.approx(100.0), pytest.approx(25.0))


def test_without_pairs_there_is_no_gain():
    assert gain_of(TOKENS, []) is None


@pytest.mark.parametrize(
    ("lengths", "num_slots", "expected"), [([7, 7, 7], 5, 1.0), ([1, 9, 30], 1, 1.0), ([1, 3], 2, 1.25)]
)
def test_refilled_places_gain_what_the_longest_of_a_batch_is_over_the_mean(lengths, num_slots, expected):
    assert slots_gain(lengths, num_slots) == pytest.approx(expected)


def test_exponential_lengths_have_their_mean_and_stay_within_their_limits():
    lengths = exponential_lengths(64, 384, 512)
    assert sum(lengths) / len(lengths) == pytest.approx(64, rel=0.02)
    assert (min(lengths), max(lengths)) == (4, 384)


# ---- the steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_is_undone_by_flags_that_pdserve_up_has(step: Step):
    parsed = vars(up.parser().parse_line([*step.common, *step.before]))
    flag, value = step.before
    assert parsed[flag.removeprefix("--").replace("-", "_")] == value


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_requests_of_a_step_fit_the_context_that_it_asks_for(step: Step):
    flags = dict(zip(step.common[::2], step.common[1::2], strict=True))
    assert step.load.longest <= int(flags.get("--max-model-len", 8192))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_sends_the_same_lengths_in_another_order_in_each_round(step: Step):
    first, second = (plan_requests(step.load_of(seed, 1.0), Api.COMPLETIONS) for seed in (0, 1))
    assert len(first) == step.load.num_requests
    assert [each.prompt for each in first] != [each.prompt for each in second]
    assert sorted(each.output_tokens for each in first) == sorted(each.output_tokens for each in second)


def test_less_time_sends_fewer_requests_but_never_too_few():
    (step, *_) = STEPS
    assert [step.load_of(0, scale).num_requests for scale in (9.0, 1.0, 0.5, 0.01)] == [128, 128, 64, 32]


def test_the_command_knows_the_steps_by_name():
    assert tuple(step.name for step in STEPS) == ablate.NAMES


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MockLayout(Layout):
    """Mock servers in the place of `pdserve up`: the older way has its tokens much further apart."""

    def up_command(self, url, flags):
        gap_s = "0.3" if "--old" in flags else "0.005"
        command = (sys.executable, "-m", "pdserve.launch.cli", "bench", "mock", "--ttft-s", "0.01", "--gap-s", gap_s)
        return (*command, "--port", url.rpartition(":")[2])


def make_config(folder, num_rounds: int = 1, **others) -> AblationConfig:
    load = make_load(num_requests=4)
    step = replace(STEPS[-1], name="gaps", before=("--old",), common=(), load=load, measures=(GAP, TOKENS))
    fields = {"layout": MockLayout(0, 1, 1), "up_flags": (), "budget_s": 3600.0, "max_rounds": num_rounds}
    return AblationConfig(steps=(step,), folder=folder, **{**fields, **others})


def ignore(*_) -> None:
    pass


async def test_pairs_of_runs_become_a_table_with_what_others_report(tmp_path):
    told: list[Ended] = []
    report = await Ablation(make_config(tmp_path, num_rounds=2), ignore, told.append).run()
    assert [ended.name for ended in told] == ["gaps-with-0", "gaps-without-0", "gaps-without-1", "gaps-with-1"]
    (measured,) = report.measured
    assert measured.num_rounds == 2
    assert 1 < measured.gains[GAP.title].low <= measured.gains[GAP.title].high
    text = format_document(describe_ablation(report))
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "Sarathi-Serve" in words
    assert "2 pairs of runs" in words


async def test_a_report_is_written_as_json_with_what_others_report(tmp_path):
    report = await Ablation(make_config(tmp_path), ignore, ignore).run()
    write_json(report, tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content == to_json(report)
    assert content["steps"][0]["gains"][GAP.title]["factor"] > 1


async def test_a_budget_that_is_spent_still_measures_every_step_once(tmp_path):
    told: list[Ended] = []
    await Ablation(make_config(tmp_path, num_rounds=5, budget_s=0.001), ignore, told.append).run()
    assert len(told) == 2


# ---- the command ---------------------------------------------------------------------------------


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="pdserve bench")
    add_arguments(parser)
    return main(parser.parse_args(["ablate", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "speed"], "--only speed: must be some of batching,paging,prefix,chunking"),
        (["--nodes", "0"], "--nodes 0: must be N or P:D"),
        (["--nodes", "1000"], "--nodes 1000: must be N or P:D, a core for each"),
        (["--nodes", "1:0"], "--nodes 1:0: must be N or P:D"),
        (["--nodes", "1:1,2:2"], "--nodes 1:1,2:2: must be N or P:D"),
        (["--up-flags", "'--dtype"], "--up-flags '--dtype: is no command line: No closing quotation"),
        (["--nodes", "x"], "--nodes x: must be a whole number"),
        (["--budget", "nan"], "--budget nan: must be above 0"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot be made a folder"),
        (["--seed", "x"], "--seed x: must be a whole number"),
    ],
)
def test_a_bad_flag_is_refused_before_anything_starts(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(*words) == 2
    assert message in capsys.readouterr().err


def test_a_gain_over_nothing_is_infinite():
    assert math.isinf(gain_of(TOKENS, [Pair(1.0, 0.0)]).factor)
