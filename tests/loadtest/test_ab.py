"""The A/B over real processes: mock servers of known times, of which one keeps its promises."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from pdserve.loadtest.ab import NUM_ALONE, Ab, EndedRun
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.commands import ab as command
from pdserve.loadtest.deployment.server import LOOPBACK_URL, PORT, Server
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.report.ab_document import describe_ab
from pdserve.loadtest.report.ab_report import AbConfig, AbReport, write_json
from pdserve.loadtest.report.text import format_document
from pdserve.loadtest.workload.arrivals import Replay
from pdserve.loadtest.workload.load import Load
from tests.loadtest.samples import make_load
from tests.loadtest.test_command import parse

COMMAND = (sys.executable, "-m", "pdserve.launch.cli", "bench", "mock", "--gap-s", "0")
BUDGET_S = 120.0
PROMISES = (Promise(Measure.TTFT, 1.0),)


def mock(name: str, ttft_s: float, is_split: bool) -> Server:
    command = (*COMMAND, "--port", PORT, "--ttft-s", str(ttft_s))
    return Server(name, LOOPBACK_URL, command, num_nodes=2, is_split=is_split)


async def run_ab(folder: Path, *servers: Server, load: Load | None = None, **others) -> tuple[AbReport, list[EndedRun]]:
    """Two runs of each server, unless others say otherwise; nothing depends on how long they take."""
    ended: list[EndedRun] = []
    load = load or make_load(rate_per_s=1.0, num_requests=60)
    settings = {"first_rate_per_s": 100.0, "step": 2.0, "max_runs": 2, **others}
    config = AbConfig(servers, Target("http://unused"), load, PROMISES, BUDGET_S, folder, **settings)
    ab = Ab(config, lambda *_: None, ended.append, tests_itself=False)
    await ab.run()
    report = ab.report()
    assert report is not None
    return report, ended


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[AbReport, list[EndedRun], Path]:
    """One A/B for several tests: it starts eight processes."""
    folder = tmp_path_factory.mktemp("ab")
    servers = (mock("2 both", 0.0, False), mock("1P1D", 1.5, True))
    return *asyncio.run(run_ab(folder, *servers)), folder


def test_servers_are_run_in_turn(finished):
    _, ended, _ = finished
    assert [each.name for each in ended][:2] == ["2 both", "1P1D"]
    assert len(ended) == 4


def test_the_server_that_keeps_its_promises_wins_and_the_other_is_explained(finished):
    report, _, _ = finished
    good, bad = report.contestants
    assert good.result.curve[0].attainment == 1.0
    assert {point.attainment for point in bad.result.curve} == {0.0}
    assert report.conclusion.headline.startswith("Colocated wins here")
    assert "because the split one is prefill-bound" in report.conclusion.headline
    assert report.conclusion.verdict.winner == "2 both"


def test_every_run_leaves_its_log_and_its_report(finished):
    _, ended, folder = finished
    runs = sorted(folder.glob("*.json"))
    assert len(runs) == len(ended)
    assert {path.with_suffix(".log").exists() for path in runs} == {True}
    assert json.loads(runs[0].read_text())["schema"].startswith("pdserve.loadtest.run/")


def test_the_report_says_what_was_found_within_100_columns(finished):
    report, _, _ = finished
    text = format_document(describe_ab(report))
    assert report.conclusion.headline[:60] in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_json_has_the_verdict_and_no_key(finished, tmp_path):
    report, _, _ = finished
    write_json(report, tmp_path / "ab.json")
    content = json.loads((tmp_path / "ab.json").read_text())
    assert content["verdict"] == report.conclusion.headline
    assert [each["server"]["name"] for each in content["contestants"]] == ["2 both", "1P1D"]
    assert "shown" not in content


async def test_a_server_that_cannot_be_run_leaves_with_its_reason_and_the_others_go_on(tmp_path):
    broken = Server("1P1D", LOOPBACK_URL, (sys.executable, "-c", "print('no such model')"), is_split=True)
    report, ended = await run_ab(tmp_path, broken, mock("2 both", 0.0, False))
    assert "no such model" in report.contestants[0].failure
    assert [each.name for each in ended] == ["1P1D", "2 both", "2 both"]
    assert report.conclusion.headline.startswith("No verdict: no split layout")
    assert "no such model" in format_document(describe_ab(report))


async def test_the_first_rate_is_found_with_a_few_requests_of_a_trace_not_with_all_of_it(tmp_path):
    load = make_load(2.0, 60, arrivals=Replay(tuple(i / 2 for i in range(60))), ramp=0.0)
    servers = (mock("2 both", 0.0, False), mock("1P1D", 0.0, True))
    await run_ab(tmp_path, *servers, load=load, first_rate_per_s=None, max_runs=1)
    (first,) = tmp_path.glob("2_both-inf-*.json")
    assert len(json.loads(first.read_text())["requests"]) == NUM_ALONE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "0"), "--budget 0: must be above 0"),
        (("--budget", "soon"), "--budget soon: must be a number"),
        (("--cores", "1"), "--cores 1: splitting needs"),
        (("--cores", "4096"), "--cores 4096: this machine"),
        (("--ratios", "3"), "--ratios 3: must be P:D"),
        (("--server", "name"), "--server name: must be"),
        (("--csv", "x.csv"), "--csv x.csv: an A/B has no table"),
        (("--out", "/proc/x"), "--out /proc/x: cannot be made"),
        (("--tolerance", "x"), "--tolerance x: must be a number"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_started(words, message):
    with pytest.raises(OptionError, match=message):
        command.main(parse("ab", *words))
