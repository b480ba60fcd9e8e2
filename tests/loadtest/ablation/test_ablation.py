"""Pairs of runs at servers become a report, whole, failed or interrupted; and the flags of the command."""

import argparse
import json
import sys
from dataclasses import dataclass, replace

import pytest

from pdserve.loadtest.ablation.ablation import Ablation, EndedHalf
from pdserve.loadtest.ablation.readings import GAP, TOKENS
from pdserve.loadtest.ablation.techniques import CHUNKING
from pdserve.loadtest.commands import ablate
from pdserve.loadtest.commands.command import add_arguments, main
from pdserve.loadtest.deployment.layout import Layout
from pdserve.loadtest.report.ablation_report import AblationConfig, describe_ablation, to_json, write_json
from pdserve.loadtest.report.progress import ProgressLine
from pdserve.loadtest.report.text import format_document
from tests.loadtest.samples import make_load


@dataclass(frozen=True, slots=True)
class MockLayout(Layout):
    """Mock servers in the place of `pdserve up`: the older way has its tokens much further apart."""

    def up_command(self, url, flags):
        if "--broken" in flags:
            return (sys.executable, "-c", "raise SystemExit('this cannot be')")
        gap_s = "0.05" if "--old" in flags else "0.005"
        command = (sys.executable, "-m", "pdserve.launch.cli", "bench", "mock", "--ttft-s", "0.01", "--gap-s", gap_s)
        return (*command, "--port", url.rpartition(":")[2])


def make_config(folder, num_rounds: int = 1, **others) -> AblationConfig:
    load = make_load(num_requests=4)
    technique = replace(CHUNKING, name="gaps", before=("--old",), common=(), load=load, readings=(GAP, TOKENS))
    fields = {"layout": MockLayout(0, 1, 1), "up_flags": (), "budget_s": 3600.0, "max_rounds": num_rounds}
    return AblationConfig(techniques=(technique,), folder=folder, **{**fields, **others})


def ignore(*_) -> None:
    pass


async def test_pairs_of_runs_become_a_table_with_what_others_report(tmp_path):
    told: list[EndedHalf] = []
    ablation = Ablation(make_config(tmp_path, num_rounds=2), ignore, told.append)
    await ablation.run()
    report = ablation.report()
    assert [ended.name for ended in told] == ["gaps-with-0", "gaps-without-0", "gaps-without-1", "gaps-with-1"]
    (measured,) = report.measured
    assert measured.num_pairs == 2
    assert 1 < measured.gains[GAP.title].low <= measured.gains[GAP.title].high
    text = format_document(describe_ablation(report))
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "Sarathi-Serve" in words
    assert "2 pairs of runs" in words


async def test_a_report_is_written_as_json_with_what_others_report(tmp_path):
    ablation = Ablation(make_config(tmp_path), ignore, ignore, tests_itself=True)
    await ablation.run()
    report = ablation.report()
    assert "its own error at p99" in format_document(describe_ablation(report))
    write_json(report, tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content == to_json(report)
    assert content["techniques"][0]["gains"][GAP.title]["factor"] > 1


async def test_a_budget_that_is_spent_still_measures_every_technique_once_with_fewer_requests(tmp_path):
    told: list[EndedHalf] = []
    await Ablation(make_config(tmp_path, num_rounds=5, budget_s=0.001), ignore, told.append).run()
    assert len(told) == 2
    assert len(json.loads((tmp_path / "gaps-with-0.json").read_text())["requests"]) == 1


async def test_a_technique_that_fails_is_told_and_the_others_are_measured(tmp_path):
    config = make_config(tmp_path, num_rounds=2)
    broken = replace(config.techniques[0], name="broken", before=("--broken",))
    told: list[EndedHalf] = []
    ablation = Ablation(replace(config, techniques=(broken, *config.techniques)), ignore, told.append)
    await ablation.run()
    failed, measured = ablation.report().measured
    assert (failed.num_pairs, measured.num_pairs) == (0, 2)
    assert failed.failure is not None
    assert "this cannot be" in failed.failure
    assert measured.failure is None
    # Once is enough: it would fail again.
    assert sum(ended.words.startswith("failed: ") for ended in told) == 1
    assert "broken failed: broken-without-0: ended with exit code 1" in format_document(
        describe_ablation(ablation.report())
    )


class Interrupter:
    """Whoever watches, and presses Ctrl-C after so many runs."""

    def __init__(self, num_runs: int):
        self._left = num_runs

    def __call__(self, ended: EndedHalf) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def test_an_interrupted_ablation_reports_the_pairs_it_has(tmp_path, capsys):
    ablation = Ablation(make_config(tmp_path, num_rounds=2), ignore, Interrupter(3))
    assert ablate.carry_out(ablation, ProgressLine(sys.stderr)) == 130
    (measured,) = ablation.report().measured
    assert measured.num_pairs == 1
    assert "reported is what was measured until then" in capsys.readouterr().err


def test_an_ablation_that_is_interrupted_before_its_first_pair_has_nothing_to_report(tmp_path):
    ablation = Ablation(make_config(tmp_path), ignore, Interrupter(1))
    with pytest.raises(KeyboardInterrupt):
        ablate.carry_out(ablation, ProgressLine(sys.stderr))


def test_a_failure_shows_in_the_exit_code(tmp_path):
    config = make_config(tmp_path)
    broken = replace(config.techniques[0], before=("--broken",))
    assert (
        ablate.carry_out(Ablation(replace(config, techniques=(broken,)), ignore, ignore), ProgressLine(sys.stderr)) == 2
    )


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
