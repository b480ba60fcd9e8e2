"""The A/B over real processes: mock servers of known times, of which one keeps its promises."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from pdserve.loadtest.ab import Ab
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.commands import ab as command
from pdserve.loadtest.deployment.server import Server, free_url
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.report.ab_document import describe_ab
from pdserve.loadtest.report.ab_report import AbConfig, AbReport, write_json
from pdserve.loadtest.report.text import format_document
from tests.loadtest.samples import make_load
from tests.loadtest.test_command import parse

COMMAND = (sys.executable, "-m", "pdserve.launch.cli", "bench", "mock", "--gap-s", "0")
PROMISES = (Promise(Measure.TTFT, 1.0),)


def mock(name: str, ttft_s: float, is_split: bool) -> Server:
    url = free_url()
    port = url.rpartition(":")[2]
    return Server(name, url, (*COMMAND, "--port", port, "--ttft-s", str(ttft_s)), 2, 2, is_split)


async def run_ab(folder: Path, budget_s: float) -> tuple[AbReport, list[str]]:
    order: list[str] = []
    servers = (mock("2 both", 0.0, False), mock("1P1D", 2.0, True))
    load = make_load(rate_per_s=1.0, num_requests=60)
    config = AbConfig(
        servers, Target("http://unused"), load, PROMISES, budget_s, folder, first_rate_per_s=40.0, step=2.0
    )
    report = await Ab(config, lambda *_: None, lambda ended: order.append(ended.name)).run()
    return report, order


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[AbReport, list[str], Path]:
    """One A/B for all tests: it starts a dozen processes."""
    folder = tmp_path_factory.mktemp("ab")
    return *asyncio.run(run_ab(folder, 10.0)), folder


def test_servers_are_run_in_turn(finished):
    _, order, _ = finished
    assert order[:2] == ["2 both", "1P1D"]


def test_the_server_that_keeps_its_promises_wins_and_the_other_is_explained(finished):
    report, _, _ = finished
    good, bad = report.contestants
    assert good.result.curve[0].attainment == 1.0
    assert {point.attainment for point in bad.result.curve} == {0.0}
    assert report.conclusion.headline.startswith("Colocated wins here")
    assert "because the split one is prefill-bound" in report.conclusion.headline
    assert report.ranking.best == "2 both"


def test_every_run_leaves_its_log_and_its_report(finished):
    _, order, folder = finished
    runs = sorted(folder.glob("*.json"))
    assert len(runs) == len(order)
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
