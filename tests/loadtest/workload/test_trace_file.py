"""The readers on real lines of each format, and on files that mean no good."""

import contextlib
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.trace_file import MAX_LINE_BYTES, read_trace

TRACES = Path(__file__).parents[2] / "traces"
AZURE = TRACES / "azure_conversation_sample.csv"
MOONCAKE = TRACES / "mooncake_conversation_sample.jsonl"
LENGTHS = TRACES / "sharegpt_lengths_sample.csv"
ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def read(tmp_path: Path, content: bytes | str):
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(str(path))


def test_azures_lines_have_times_of_day_and_lengths():
    trace = read_trace(str(AZURE))
    assert trace.has_times
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests[:3]] == [(374, 44), (396, 109), (879, 55)]
    assert trace.arrivals.times_s[:3] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)
    assert len(trace.requests) == 15


def test_mooncakes_lines_have_milliseconds_and_the_ids_of_blocks():
    trace = read_trace(str(MOONCAKE))
    assert len(trace.requests) == 20
    assert trace.requests[0].block_ids == tuple(range(14))
    assert (trace.requests[0].input_tokens, trace.requests[0].output_tokens) == (6758, 500)
    assert trace.arrivals.times_s[6:9] == (3.0, 12.0, 21.0)
    assert trace.block_tokens == 512


def test_a_table_of_lengths_has_no_times():
    trace = read_trace(str(LENGTHS))
    assert not trace.has_times
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests[:3]] == [(74, 918), (290, 905), (1402, 711)]
    with pytest.raises(OptionError, match="--arrivals and --rate"):
        _ = trace.arrivals


@pytest.mark.parametrize("path", [AZURE, MOONCAKE, LENGTHS], ids=lambda path: path.name)
def test_a_gzipped_file_reads_alike(path, tmp_path):
    assert read(tmp_path, gzip.compress(path.read_bytes())).requests == read_trace(str(path)).requests


def test_columns_may_stand_in_any_order_among_others(tmp_path):
    content = "Model,GeneratedTokens,TIMESTAMP,ContextTokens\r\nm,5,2024-05-10 00:00:01.5+00:00,7\r\n"
    (request,) = read(tmp_path, "\ufeff" + content).requests
    assert (request.input_tokens, request.output_tokens) == (7, 5)


def test_the_ids_of_blocks_may_be_missing(tmp_path):
    row = {name: value for name, value in ROW.items() if name != "hash_ids"}
    assert read(tmp_path, json.dumps(row)).requests[0].block_ids == ()


def test_requests_are_ordered_by_time_and_equal_times_keep_their_order(tmp_path):
    rows = [{**ROW, "timestamp": time, "output_length": n} for n, time in enumerate([3000, 0, 3000, 0], start=1)]
    trace = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert [request.output_tokens for request in trace.requests] == [2, 4, 1, 3]


def test_a_request_for_nothing_is_one_for_a_token(tmp_path):
    (request,) = read(tmp_path, "num_prefill_tokens,num_decode_tokens\n0,0\n").requests
    assert (request.input_tokens, request.output_tokens) == (1, 1)


def line(**changes) -> str:
    return json.dumps(ROW) + "\n\n" + json.dumps({**ROW, **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no requests"),
        (b"\n \n", "has no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (b"a,b\n1,2\n", "its columns are 'a', 'b'; needed are"),
        (b"{}", "its columns are none; needed are"),
        (b"\xff\xfe\n", "line 1: is not UTF-8"),
        (b"\x1f\x8b broken", "cannot be read"),
        (gzip.compress(AZURE.read_bytes(), mtime=0)[:-20], "cannot be read"),
        (b"x" * (MAX_LINE_BYTES + 2), "line 1: is longer than"),
        ("num_prefill_tokens,num_decode_tokens\n5\n", "line 2: has 1 columns, but the header has 2"),
        ('num_prefill_tokens,num_decode_tokens\n"5,6\n', "line 2: is not CSV"),
        (
            "num_prefill_tokens,num_decode_tokens\n5,x\n",
            r"line 2, column num_decode_tokens: 'x' is no number of tokens",
        ),
        ("num_prefill_tokens,num_decode_tokens\n-5,1\n", "line 2, column num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens\n99999999,1\n", "line 2, column num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens\n" + "9" * 5000 + ",1\n", "line 2, column num_prefill_tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,5,6\n", "line 2, column TIMESTAMP: 'soon' is no time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n12.5,5,6\n", "line 2, column TIMESTAMP"),
        (json.dumps(ROW) + "\n[1]", "line 2: is not a JSON object"),
        (json.dumps(ROW) + "\nnull", "line 2: is not a JSON object"),
        (json.dumps(ROW) + "\n{", "line 2: is not JSON"),
        (json.dumps(ROW) + "\n" + "[" * 100_000, "line 2: is not JSON"),
        (json.dumps(ROW) + '\n{"timestamp": 1}', "line 2: has no column input_length"),
        (line(timestamp="0"), "line 3, column timestamp"),
        (line(timestamp=True), "line 3, column timestamp"),
        (json.dumps(ROW) + '\n{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2, column timestamp"),
        (line(input_length=1.5), "line 3, column input_length: 1.5 is no number of tokens"),
        (line(output_length=None), "line 3, column output_length"),
        (line(output_length=-1), "line 3, column output_length"),
        (line(hash_ids=[0]), "line 3, column hash_ids: has 1 ids, but 600 tokens are 2 blocks of 512"),
        (line(hash_ids="0,1"), "line 3, column hash_ids: '0,1' is no list"),
        (line(hash_ids=[0, True]), "line 3, column hash_ids"),
        (line(hash_ids=[0, -1]), "line 3, column hash_ids"),
        (line(hash_ids=[0, 2**63]), "line 3, column hash_ids"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(content, message, tmp_path):
    with pytest.raises(OptionError, match=message) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("--trace ")
    assert len(str(caught.value)) < 600


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OptionError, match="nothing: cannot be read: No such file"):
        read_trace(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="cannot be read: Is a directory"):
        read_trace(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(ROW)), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(JSON, max_size=3), noise=st.binary(max_size=30))
def test_whatever_is_in_a_file_becomes_a_trace_or_an_option_error(rows, noise, tmp_path_factory):
    content = json.dumps(ROW).encode() + b"\n" + b"\n".join(json.dumps(row).encode() for row in rows) + noise
    with contextlib.suppress(OptionError):
        assert read(tmp_path_factory.getbasetemp(), content).requests
