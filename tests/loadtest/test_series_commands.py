"""`pdserve bench sweep` and `goodput` against the mock server, as users run them."""

import asyncio
import json

import pytest

from pdserve.loadtest.commands.command import main
from pdserve.loadtest.errors import ReportError
from pdserve.loadtest.measures import validity
from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.mock.server import MockServer
from pdserve.loadtest.report.rates_document import describe_answer, format_known
from pdserve.loadtest.report.rates_report import SCHEMA, Units, rates_from_json, read_runs
from pdserve.loadtest.search.answer import GoodputRate
from pdserve.loadtest.search.goodput import GoodputConfig, GoodputSearch
from tests.loadtest.synthetic import run_at
from tests.loadtest.test_command import parse

SMALL = ("--input-tokens", "8-12", "--output-tokens", "4", "--ramp", "0", "--preflight", "0", "--selftest", "off")


@pytest.fixture(autouse=True)
def patience_with_a_late_client(monkeypatch):
    """Whoever else works on this machine, each run counts."""
    monkeypatch.setattr(validity, "MAX_LAG_S", 3600.0)


async def bench(server: MockServer, command: str, *words: str) -> int:
    return await asyncio.to_thread(main, parse(command, "--url", server.url, *SMALL, *words))


async def test_a_sweep_shows_each_rate_and_writes_all_of_its_runs(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    async with MockServer() as server:
        words = ("--rates", "2000,1000", "--num-requests", "5", "--slo", "ttft=3600", "--json", str(path))
        assert await bench(server, "sweep", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line[:1].isdigit()][:2] == [["1000", "100.0"], ["2000", "100.0"]]
    content = json.loads(path.read_text())
    assert content["schema"] == SCHEMA
    assert [(run.config.load.rate_per_s, run.config.load.seed) for run in read_runs(path)] == [(1000, 0), (2000, 1)]
    assert [point["num_kept"] for point in content["result"]["curve"]] == [5, 5]


async def test_a_sweep_leaves_out_the_runs_whose_client_was_late(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(validity, "MAX_LAG_S", -1.0)
    monkeypatch.setattr(validity, "MAX_LAG_SHARE_OF_TTFT", -1.0)
    async with MockServer() as server:
        outputs = ("--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "sweep.json"))
        assert await bench(server, "sweep", "--rates", "2000", "--num-requests", "5", *outputs) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "INVALID: in 1 of 1 runs the client was late; they are left out." in told
    assert "rates tried: 1, in 1 runs" in told
    assert "nothing was measured that may be believed" in told
    assert "they are left out." in (tmp_path / "page.html").read_text()
    assert not read_runs(tmp_path / "sweep.json")[0].summary.validity.is_valid


async def test_goodput_finds_a_bound_for_a_server_that_is_fast_enough_for_all(tmp_path, capsys):
    path = tmp_path / "goodput.json"
    async with MockServer() as server:
        words = ("--rate", "100000", "--num-requests", "60", "--slo", "ttft=3600", "--shares", "0.9")
        outputs = ("--json", str(path), "--html", str(tmp_path / "page.html"), "--markdown", str(tmp_path / "page.md"))
        assert await bench(server, "goodput", *words, "--per", "nodes=2,cores=4", *outputs) == 0
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    assert "90 % keep every promise up to 100,000 requests/s (95 %: 100,000 and more)" in words
    assert "50,000 a node, 25,000 a core; at least: no rate tried was too high" in words
    assert "kept by 60 of 60" in printed.err
    assert "100,000 requests/s" in (tmp_path / "page.md").read_text()
    assert "50,000 a node" in (tmp_path / "page.html").read_text()
    report = rates_from_json(json.loads(path.read_text()))
    assert (report.units, len(report.runs), report.result.is_finished) == (Units(nodes=2, cores=4), 1, True)


async def test_goodput_ends_with_its_budget_and_says_that_it_was_not_over(capsys):
    """Half of the requests are cut off: every rate fails. A run is taken for 2 s more than its requests: the first for
    62 s, which it is not, being clear after 30 requests, and the next, at half the rate, for 122 s."""
    async with MockServer([Behaviour(), Behaviour(fault=Fault.DROP)]) as server:
        words = ("--rate", "100", "--num-requests", "6000", "--slo", "ttft=3600", "--shares", "0.9")
        assert await bench(server, "goodput", *words, "--budget-s", "100") == 0
    printed = capsys.readouterr()
    assert "the lowest rate tried, fewer kept every promise" in printed.out
    assert "the search was not over" in printed.out
    assert "[90 %: below the lowest tried to 100]" in printed.err


async def test_what_was_measured_before_a_server_left_is_reported_with_exit_2(tmp_path, capsys):
    """The mock answers four requests and cuts the fifth, which is the second rate's preflight."""
    behaviours = [*[Behaviour()] * 4, Behaviour(fault=Fault.DROP)]
    async with MockServer(behaviours) as server:
        path = tmp_path / "sweep.json"
        words = ("--rates", "1000,2000", "--num-requests", "3", "--preflight", "1", "--json", str(path))
        assert await bench(server, "sweep", *words) == 2
    printed = capsys.readouterr()
    assert "the preflight request failed" in printed.err
    assert "reported is what was measured until then" in printed.err
    assert len(read_runs(path)) == 1


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("sweep", ("--rates", "1,x"), "--rates x: must be a number"),
        ("sweep", ("--rates", "1,-2"), "--rate -2"),
        ("sweep", ("--rates", "1", "--seeds", "0"), "--seeds 0"),
        ("sweep", ("--rates", "1", "--per", "nodes"), "--per"),
        ("sweep", ("--rates", "1", "--per", "racks=1"), "--per racks=1"),
        ("sweep", ("--rates", "1", "--per", "nodes=1,nodes=2"), "each once"),
        ("goodput", (), "--slo LIST: is needed"),
        ("goodput", ("--slo", "ttft=1", "--rate", "inf"), "--rate inf"),
        ("goodput", ("--slo", "ttft=1", "--rate", "x"), "--rate x"),
        ("goodput", ("--slo", "ttft=1", "--shares", "1"), "--shares 1"),
        ("goodput", ("--slo", "ttft=1", "--shares", "many"), "--shares many"),
        ("goodput", ("--slo", "ttft=1", "--tolerance", "0"), "--tolerance 0"),
        ("goodput", ("--slo", "ttft=1", "--budget-s", "nan"), "--budget-s nan"),
        ("goodput", ("--slo", "ttft=1", "--budget-s", "1"), "--budget-s 1: is too short for one run"),
        ("goodput", ("--slo", "ttft=1", "--json", "/nowhere/x.json"), "--json /nowhere/x.json"),
    ],
)
def test_a_bad_flag_exits_with_2_before_anything_is_sent(command, words, message, capsys):
    assert main(parse(command, "--url", "http://127.0.0.1:1", *words)) == 2
    assert message in capsys.readouterr().err


def test_an_answer_is_told_with_its_interval_and_per_unit():
    rate = GoodputRate(0.99, 3.0, Interval(2.0, 4.0))
    assert describe_answer(rate, Units(cores=2)) == (
        "99 % keep every promise up to 3 requests/s (95 %: 2 to 4), 1.5 a core"
    )


def test_what_is_not_bounded_is_told_as_such():
    search = GoodputSearch(GoodputConfig(1.0))
    assert format_known(search) == ""
    search.add(run_at(1.0, 150, 0))
    assert format_known(search) == "  [90 %: 1 to above the highest tried]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"runs": []}, "runs: must be a list of at least one run"),
        ({"runs": [7]}, r"runs\[0\]: holds no run"),
    ],
)
def test_a_file_without_runs_is_refused_by_field(content, message):
    with pytest.raises(ReportError, match=message):
        rates_from_json(content)


async def test_two_sweeps_are_compared_from_their_files(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, gap_s in zip(paths, (0.002, 0.2), strict=True):
        async with MockServer([Behaviour(gap_s=gap_s)]) as server:
            words = ("--rates", "100,200", "--num-requests", "20", "--slo", "tpot=0.1", "--json", path)
            assert await bench(server, "sweep", *words) == 0
    out = tmp_path / "comparison.json"
    assert main(parse("compare", *paths, "--json", str(out), "--markdown", str(tmp_path / "c.md"))) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a serves more" in told
    content = json.loads(out.read_text())
    tpot = next(ratio for ratio in content["rates"][0]["latencies"] if ratio["latency"] == "tpot")
    assert tpot["ratio"] > 3
    assert tpot["interval"]["low"] > 1
    assert "| p50 |" in (tmp_path / "c.md").read_text()


def test_files_that_cannot_be_read_exit_with_2(tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": "pdserve.loadtest.rates/1", "runs": 7}')
    assert main(parse("compare", str(broken), str(broken))) == 2
    assert f"{broken}: runs: must be a list" in capsys.readouterr().err
    assert main(parse("compare", str(tmp_path / "none.json"), str(broken))) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
