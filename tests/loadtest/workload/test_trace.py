"""Cutting and scaling a trace, and the prompts of its prefixes against a naive reading of its block ids."""

from pathlib import Path

import pytest
from traces import mooncake_conversation

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.arrivals import Poisson, Replay
from pdserve.loadtest.workload.lengths import Span
from pdserve.loadtest.workload.load import Load, PromptFormat, num_steady
from pdserve.loadtest.workload.schedule import plan_preflight, plan_requests
from pdserve.loadtest.workload.trace import Trace, TraceRequest, find_quantum
from pdserve.loadtest.workload.trace_file import read_trace
from pdserve.loadtest.workload.window import Window

TRACES = Path(__file__).parents[2] / "traces"
MOONCAKE = TRACES / "mooncake_conversation_sample.jsonl"


def make_trace(num=6, **others) -> Trace:
    requests = tuple(TraceRequest(100 * (i + 1), 10 * (i + 1), at_s=1000.0 + 2 * i) for i in range(num))
    return Trace("t.csv", requests, **others)


def replay(trace: Trace, ramp=0.1, **others) -> Load:
    return Load(
        trace.arrivals.own_rate_per_s, num_steady(len(trace.requests), ramp), trace, trace.arrivals, ramp=ramp, **others
    )


def test_a_span_of_the_traces_time_is_cut_from_its_first_request_on():
    cut = make_trace().within(3.0, 5.0)
    assert [request.input_tokens for request in cut.requests] == [300, 400]
    assert cut.first_s == 3.0
    assert cut.arrivals.times_s == (0.0, 2.0)


def test_a_span_without_requests_is_refused_with_the_traces_length():
    with pytest.raises(OptionError, match=r"--start-s 11 --duration-s 5: no request of t.csv, which lasts 10.0 s"):
        make_trace().within(11.0, 5.0)


def test_lengths_scale_and_never_vanish():
    scaled = make_trace().scaled(0.25)
    assert [(r.input_tokens, r.output_tokens) for r in scaled.requests[:2]] == [(25, 2), (50, 5)]
    assert make_trace().scaled(0.001).requests[0].output_tokens == 1
    assert scaled.scaled(0.5).length_scale == 0.125


def test_a_scale_to_more_than_any_prompt_is_refused():
    with pytest.raises(OptionError, match="--length-scale 100: makes 2000000 tokens"):
        Trace("t", (TraceRequest(20_000, 1),)).scaled(100)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 101.0])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(OptionError, match="--length-scale"):
        make_trace().scaled(scale)


def test_a_scale_that_leaves_a_block_no_token_is_refused():
    with pytest.raises(OptionError, match="leave a block of 512 tokens one token"):
        read_trace(str(MOONCAKE)).scaled(1 / 1024)


def test_a_cap_cuts_the_prompts_end_and_counts_whom_it_cut():
    capped = make_trace().capped(400)
    assert [(r.input_tokens, r.output_tokens) for r in capped.requests] == [
        (100, 10),
        (200, 20),
        (300, 30),
        (360, 40),
        (350, 50),
        (340, 60),
    ]
    assert capped.num_cut == 3
    assert capped.first(5).num_cut == 2


def test_a_cap_leaves_an_answer_at_most_half():
    trace = Trace("t", (TraceRequest(10, 1000), TraceRequest(1000, 1000)))
    assert [(r.input_tokens, r.output_tokens) for r in trace.capped(100).requests] == [(10, 50), (50, 50)]


def test_a_cap_of_one_token_is_refused():
    with pytest.raises(OptionError, match="--max-request-tokens 1"):
        make_trace().capped(1)


def test_the_first_requests_can_be_taken_where_there_are_as_many():
    assert len(make_trace().first(3).requests) == 3
    with pytest.raises(OptionError, match=r"--num-requests: 7 with ramps, but t\.csv has 6"):
        make_trace().first(7)


def test_a_trace_knows_its_spans():
    assert (make_trace().input_tokens, make_trace().output_tokens) == (Span(100, 600), Span(10, 60))


def test_times_in_batches_are_known_by_their_step():
    assert find_quantum([3.0 * (i // 4) for i in range(40)]) == 3.0
    assert find_quantum([1.0 * i for i in range(40)]) == 0.0
    assert find_quantum([5.0] * 40) == 0.0
    assert find_quantum([]) == 0.0


def test_a_part_of_one_batch_is_spread_to_the_rate_all_the_same():
    batch = Trace("t", tuple(TraceRequest(5, 5, at_s=6.0) for _ in range(10)), quantum_s=3.0)
    assert replay(batch).rate_per_s == pytest.approx(10 / 3)
    times = [planned.at_s for planned in plan_requests(replay(batch).at_rate(1.0), Api.COMPLETIONS)]
    assert (times[0], times[-1]) == (0.0, pytest.approx(9.0))
    assert len(set(times)) == 10


def test_a_replay_sends_the_traces_requests_at_its_times():
    plan = plan_requests(replay(make_trace()), Api.COMPLETIONS)
    assert [planned.at_s for planned in plan] == pytest.approx([0, 2, 4, 6, 8, 10])
    assert [planned.input_tokens for planned in plan] == [100, 200, 300, 400, 500, 600]
    assert [planned.output_tokens for planned in plan] == [10, 20, 30, 40, 50, 60]
    assert [len(planned.prompt) for planned in plan] == [planned.input_tokens for planned in plan]


@pytest.mark.parametrize("num", [1, 2, 5, 6, 7, 100, 999])
@pytest.mark.parametrize("ramp", [0.0, 0.1, 0.5])
def test_steady_window_and_ramps_share_all_of_a_trace(num, ramp):
    requests = tuple(TraceRequest(3, 3, at_s=float(i)) for i in range(num))
    load = replay(Trace("t", requests), ramp) if num > 1 else Load(1.0, 1, Trace("t", requests), Replay((0.0,)))
    windows = [planned.window for planned in plan_requests(load, Api.COMPLETIONS)]
    counts = [windows.count(window) for window in Window]
    assert sum(counts) == num
    assert counts[1] == load.num_requests >= 1
    assert 0 <= counts[2] - counts[0] <= 1
    assert windows == sorted(windows, key=list(Window).index)


def test_another_rate_replays_the_same_prompts_at_scaled_times():
    load = replay(read_trace(str(MOONCAKE)).scaled(1 / 16))
    slow, fast = plan_requests(load, Api.COMPLETIONS), plan_requests(load.at_rate(load.rate_per_s * 4), Api.COMPLETIONS)
    assert [planned.prompt for planned in slow] == [planned.prompt for planned in fast]
    assert [planned.at_s / 4 for planned in slow] == pytest.approx([planned.at_s for planned in fast])


def test_a_trace_can_be_sent_by_another_process():
    trace = make_trace(50)
    plan = plan_requests(Load(2.0, 40, trace, Poisson()), Api.COMPLETIONS)
    assert [planned.input_tokens for planned in plan] == [r.input_tokens for r in trace.requests[:48]]


def test_lengths_without_times_are_drawn_without_replacement():
    table = make_trace(60, has_times=False)
    one, other = (
        [p.input_tokens for p in plan_requests(Load(2.0, 50, table, seed=seed), Api.COMPLETIONS)] for seed in (1, 2)
    )
    assert len(set(one)) == len(one) == 60
    assert one != other


def common_prefix(one, other) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def shared_blocks(one: TraceRequest, other: TraceRequest) -> int:
    return common_prefix(one.block_ids, other.block_ids)


@pytest.mark.parametrize("scale", [1.0, 1 / 16, 0.1])
def test_prompts_share_exactly_the_blocks_whose_ids_are_equal(scale):
    """Every pair of real requests: the common prefix ends where the ids part, or where the shorter prompt does."""
    trace = read_trace(str(MOONCAKE)).scaled(scale)
    prompts = [planned.prompt for planned in plan_requests(replay(trace), Api.COMPLETIONS)]
    num_partial = 0
    for i, (one, prompt) in enumerate(zip(trace.requests, prompts, strict=True)):
        for other, earlier in zip(trace.requests[:i], prompts[:i], strict=True):
            num_blocks = shared_blocks(one, other)
            expected = min(round(num_blocks * trace.block_tokens), len(prompt), len(earlier))
            num_partial += expected % trace.block_tokens != 0
            # Two blocks begin alike by accident once in 29,900 pairs.
            assert expected <= common_prefix(prompt, earlier) <= expected + 1
    assert num_partial >= 2


def test_hits_in_a_block_cache_are_those_of_the_block_ids():
    """Mooncake's ids over 16: each stands for one block of 32 tokens."""
    trace = read_trace(str(MOONCAKE)).scaled(1 / 16)
    assert trace.block_tokens == 32
    seen_ids, seen_blocks = set(), set()
    for request, planned in zip(trace.requests, plan_requests(replay(trace), Api.COMPLETIONS), strict=True):
        num_full = planned.input_tokens // 32
        prefixes = [planned.prompt[: 32 * (i + 1)] for i in range(num_full)]
        assert [p in seen_blocks for p in prefixes] == [i in seen_ids for i in request.block_ids[:num_full]]
        seen_blocks.update(prefixes)
        seen_ids.update(request.block_ids[:num_full])
    assert seen_ids


def test_hits_in_a_block_cache_are_those_of_the_published_prefix_tree():
    """The first prompts of the whole trace, as full blocks: the packed file has no lengths."""
    blocks = mooncake_conversation()[:1500]
    requests = tuple(TraceRequest(32 * len(ids), 1, float(i), tuple(ids)) for i, ids in enumerate(blocks))
    load = replay(Trace("t", requests, block_tokens=32))
    seen: set[int] = set()
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    for ids, planned in zip(blocks, plan_requests(load, Api.COMPLETIONS), strict=True):
        node, hits = -1, []
        for i in range(len(ids)):
            key = (node, planned.prompt[32 * i : 32 * i + 32])
            hits.append(key in nodes)
            node = nodes.setdefault(key, len(nodes))
        assert hits == [block in seen for block in ids]
        seen.update(ids)
    assert len(nodes) == len(seen)


def test_a_capped_prompt_keeps_its_shared_beginning():
    trace = read_trace(str(MOONCAKE)).scaled(1 / 16).capped(200)
    whole = plan_requests(replay(read_trace(str(MOONCAKE)).scaled(1 / 16)), Api.COMPLETIONS)
    for cut, planned in zip(plan_requests(replay(trace), Api.COMPLETIONS), whole, strict=True):
        assert cut.prompt == planned.prompt[: cut.input_tokens]
        assert cut.input_tokens + cut.output_tokens <= 200


def test_texts_share_prefixes_as_ids_do():
    trace = read_trace(str(MOONCAKE)).scaled(1 / 16)
    load = replay(trace, prompt_format=PromptFormat.TEXT)
    texts = [planned.prompt.split(" ") for planned in plan_requests(load, Api.COMPLETIONS)]
    for i, one in enumerate(trace.requests):
        for j, other in enumerate(trace.requests[:i]):
            expected = min(shared_blocks(one, other) * 32, len(texts[i]), len(texts[j]))
            assert expected <= common_prefix(texts[i], texts[j]) < expected + 32


def test_another_seed_and_the_preflight_have_other_tokens_of_the_same_trace():
    trace = read_trace(str(MOONCAKE)).scaled(1 / 16)
    one, other = (plan_requests(replay(trace, seed=seed), Api.COMPLETIONS) for seed in (1, 2))
    preflight = plan_preflight(replay(trace, seed=1), Api.COMPLETIONS, 3)
    for plan in (other, preflight):
        assert [planned.input_tokens for planned in plan[:3]] == [planned.input_tokens for planned in one[:3]]
        assert common_prefix(plan[0].prompt, one[0].prompt) <= 1


def test_a_preflight_may_be_longer_than_the_trace():
    assert len(plan_preflight(replay(make_trace(2)), Api.COMPLETIONS, 5)) == 5


def test_a_trace_has_no_other_prompts():
    from pdserve.loadtest.workload.sharing import SharedPrefix

    with pytest.raises(OptionError, match=r"--trace t.csv: .*--shared-prefix"):
        replay(make_trace(), shared_prefix=SharedPrefix(5))


def test_more_is_not_measured_than_a_trace_has():
    trace = make_trace(3)
    with pytest.raises(OptionError, match="--num-requests 4"):
        Load(1.0, 4, trace, trace.arrivals)
