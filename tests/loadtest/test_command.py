import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.loadtest.commands.command import COMMANDS, add_arguments, main
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.mock.server import MockServer


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdserve bench")
    add_arguments(parser)
    return parser.parse_args(words)


async def bench(server: MockServer, *words: str) -> int:
    """Run the command as users do, with its own event loop, beside the mock's."""
    small = (
        "--rate",
        "inf",
        "--num-requests",
        "4",
        "--input-tokens",
        "8-12",
        "--output-tokens",
        "4",
        "--selftest",
        "off",
    )
    return await asyncio.to_thread(main, parse("run", "--url", server.url, *small, *words))


async def test_a_run_prints_its_table_and_writes_its_json(tmp_path, capsys):
    path = tmp_path / "run.json"
    async with MockServer() as server:
        code = await bench(server, "--slo", "ttft=3600,tpot=3600", "--seed", "3", "--json", str(path))
    assert code == 0
    assert "kept by 100.0 % (95" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["slo_attainment"] == 1.0
    assert content["goodput_per_s"] > 0
    assert content["config"]["load"]["seed"] == 3
    assert [request["output_tokens"] for request in content["requests"]] == [4, 4, 4, 4]


async def test_a_run_writes_every_format_that_is_asked_for(tmp_path):
    paths = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "markdown", "html")}
    async with MockServer() as server:
        assert await bench(server, *(f"--{name}={path}" for name, path in paths.items())) == 0
    begins = {name: path.read_text()[:12] for name, path in paths.items()}
    assert begins == {"json": '{"schema": "', "csv": "index,intend", "markdown": "### mock at ", "html": "<!doctype ht"}


def test_a_page_without_plotly_is_refused_before_the_run_naming_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(parse("run", "--rate", "1", "--html", "x.html")) == 2
    assert "the extra `report`" in capsys.readouterr().err


async def test_a_run_quotes_a_self_test_unless_told_otherwise(capsys):
    async with MockServer() as server:
        assert await bench(server, "--selftest", "on") == 0
        assert "its own error at p99" in capsys.readouterr().out
        assert await bench(server) == 0
        assert "its own error at p99" not in capsys.readouterr().out


TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation_sample.jsonl"


async def test_a_replay_sends_the_traces_lengths_and_says_what_it_did(tmp_path, capsys):
    path = tmp_path / "run.json"
    flags = (
        "--length-scale",
        "0.01",
        "--max-request-tokens",
        "80",
        "--rate",
        "500",
        "--ramp",
        "0",
        "--selftest",
        "off",
    )
    async with MockServer() as server:
        words = ("replay", "--url", server.url, "--trace", str(TRACE), *flags, "--json", str(path))
        assert await asyncio.to_thread(main, parse(*words)) == 0
    requests = json.loads(path.read_text())["requests"]
    assert [request["prompt_tokens"] for request in requests[:3]] == [68, 73, 72]
    assert [request["output_tokens"] for request in requests[:3]] == [5, 5, 8]
    assert len(requests) == 20
    out = capsys.readouterr().out
    assert "mooncake_conversation_sample.jsonl: 20 requests, lengths times 0.01" in out
    assert "common prefixes are the trace's" in out


def test_a_replay_without_a_trace_exits_with_2(capsys):
    assert main(parse("replay", "--rate", "1")) == 2
    assert "--trace FILE: is needed" in capsys.readouterr().err


async def test_too_many_failures_exit_with_1_and_the_first_reason(capsys):
    async with MockServer([Behaviour(), Behaviour(fault=Fault.SHORT)]) as server:
        assert await bench(server, "--preflight", "0") == 1
    assert "2 of 4 requests failed, above --max-failed 0.05" in capsys.readouterr().err


async def test_failures_within_the_allowed_share_exit_with_0():
    async with MockServer([Behaviour(), Behaviour(fault=Fault.SHORT)]) as server:
        assert await bench(server, "--preflight", "0", "--max-failed", "0.5") == 0


async def test_an_unknown_model_exits_with_2(capsys):
    async with MockServer() as server:
        assert await bench(server, "--model", "other") == 2
    assert "--model other" in capsys.readouterr().err


async def test_a_server_that_is_gone_exits_with_2(capsys):
    async with MockServer() as server:
        url = server.url
    assert await asyncio.to_thread(main, parse("run", "--url", url, "--rate", "1", "--selftest", "off")) == 2
    assert f"--url {url}: cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--url", "nonsense"),
        ("--rate", "fast"),
        ("--rate", "0"),
        ("--num-requests", "1.5"),
        ("--input-tokens", "9-3"),
        ("--output-tokens", "x"),
        ("--slo", "ttft"),
        ("--seed", "-1"),
        ("--vocab", "9"),
        ("--timeout-s", "soon"),
        ("--preflight", "-1"),
        ("--max-concurrency", "0"),
        ("--max-failed", "2"),
        ("--max-failed", "nan"),
        ("--selftest", "maybe"),
        ("--json", "/"),
        ("--json", "/nowhere/at/all.json"),
        ("--html", "/nowhere/at/all.html"),
    ],
)
def test_a_bad_flag_exits_with_2_before_anything_is_sent(flag, value, capsys):
    words = ["--rate", "1", f"{flag}={value}"]
    assert main(parse("run", *words)) == 2
    message = capsys.readouterr().err
    assert flag in message
    assert value in message


def test_a_mock_with_bad_flags_exits_with_2(capsys):
    assert main(parse("mock", "--port", "99999")) == 2
    assert main(parse("mock", "--ttft-s", "nan")) == 2
    assert "--port 99999" in capsys.readouterr().err


async def test_a_mock_on_a_port_in_use_exits_with_2(capsys):
    async with MockServer() as server:
        port = server.url.rsplit(":", 1)[1]
        assert await asyncio.to_thread(main, parse("mock", "--port", port)) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_one_screen(command, capsys):
    with pytest.raises(SystemExit):
        parse(command, "--help")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_help_does_not_load_numpy_or_aiohttp():
    code = "import sys, pdserve.loadtest.commands.command; print({'numpy', 'aiohttp'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
