import asyncio
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from pdserve.cluster.config import (
    DecodeConfig,
    DecodeNumbers,
    Http,
    PrefillConfig,
    PrefillNumbers,
    RouterConfig,
    UpConfig,
    load_config,
)
from pdserve.core.errors import ConfigError, ModelError
from pdserve.launch import up
from pdserve.launch.runtime_dir import remove_abandoned, runtime_dir

SOCKETS = Path("/run/x")
CONFIGS = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}


def plan(topology: UpConfig, cores=(0, 1), **flags: str) -> dict[str, list[str]]:
    """Command lines by name, without the interpreter."""
    children = up.plan_children(topology, flags, cores, SOCKETS, ("pdserve",))
    return {child.name: list(child.command[1:]) for child in children}


def options(line: list[str]) -> dict[str, str]:
    return {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(line[1::2], line[2::2], strict=True)
    }


def test_one_prefill_and_one_decode_node_get_a_core_each():
    lines = plan(UpConfig(), model="/m", port="80", dtype="float32", served_model_name="x", kv_memory="1G")
    assert " ".join(lines["router"]) == (
        "router --model /m --served-model-name x --port 80 --control ipc:///run/x/control.ipc"
    )
    assert " ".join(lines["P0"]) == (
        "prefill --name P0 --model /m --dtype float32 --kv-memory 1G --router ipc:///run/x/control.ipc "
        "--listen ipc:///run/x/P0.ipc --cores 0 --num-threads 1"
    )
    assert " ".join(lines["D0"]) == (
        "decode --name D0 --role decode --model /m --dtype float32 --kv-memory 1G --router ipc:///run/x/control.ipc "
        "--listen ipc:///run/x/D0.ipc --cores 1 --num-threads 1"
    )


def test_one_colocated_node_gets_all_cores_and_two_share_them():
    one = plan(UpConfig(role_mode="both"))
    assert list(one) == ["router", "D0"]
    assert options(one["D0"])["role"] == "both"
    assert options(one["D0"])["cores"] == "0,1"
    two = plan(UpConfig(role_mode="both", decode=2))
    assert [options(two[name])["cores"] for name in ("D0", "D1")] == ["0", "1"]


@pytest.mark.parametrize("topology", [UpConfig(), UpConfig(prefill=2, decode=3), UpConfig(role_mode="both", decode=2)])
def test_every_command_line_is_one_that_the_role_accepts(topology):
    for name, (role, *rest) in plan(topology, max_model_len="64", max_step_tokens="16", host="::1").items():
        loaded = load_config(CONFIGS[role], options([role, *rest]), environ={})
        assert name == "router" or loaded.config.name == name


def test_older_ways_are_passed_on_to_whoever_has_them():
    given = {"batching": "static", "prefix_cache": "off", "chunked_prefill": "off", "kv_allocation": "max-length"}
    lines = plan(UpConfig(), **given)
    for name, missing in (("router", 2), ("P0", 3), ("D0", 0)):
        role, *rest = lines[name]
        config = load_config(CONFIGS[role], options([role, *rest]), environ={}).config
        passed = {item.name: given[item.name] for item in fields(config.baseline)}
        assert asdict(config.baseline) == passed
        assert len(passed) == len(given) - missing


def test_each_role_is_given_the_numbers_that_are_its_own():
    flags = {"compute": "int8", "weights": "int4", "accept_compute": "int8"}
    _, prefill, decode = up.plan_children(UpConfig(), flags, (0, 1), SOCKETS, ("pdserve",))
    assert prefill.command[4:6] == ("--compute", "int8")
    assert not {"--weights", "--accept-compute"} & set(prefill.command)
    assert decode.command[6:10] == ("--weights", "int4", "--accept-compute", "int8")
    assert "--compute" not in decode.command


@pytest.mark.parametrize(
    ("compute", "weights", "accepts"),
    [("model", "model", "same"), ("model", "int4", "model"), ("int8", "model", "int8"), ("int8", "int8", "int8")],
)
def test_numbers_that_decode_nodes_take_are_started(compute: str, weights: str, accepts: str):
    up.check_numbers(UpConfig(), PrefillNumbers(compute), DecodeNumbers(weights, accepts))


@pytest.mark.parametrize(
    ("compute", "weights", "accepts"),
    [("model", "int4", "same"), ("model", "int8", "same"), ("int8", "model", "same"), ("int8", "int8", "model")],
)
def test_numbers_that_decode_nodes_would_refuse_are_refused_before(compute: str, weights: str, accepts: str):
    with pytest.raises(ConfigError, match=f"--accept-compute {compute}"):
        up.check_numbers(UpConfig(), PrefillNumbers(compute), DecodeNumbers(weights, accepts))


def test_in_mode_both_no_node_accepts_another_and_none_only_prefills():
    topology = UpConfig(role_mode="both")
    up.check_numbers(topology, PrefillNumbers(), DecodeNumbers("int4"))
    with pytest.raises(ConfigError, match="--compute int8"):
        up.check_numbers(topology, PrefillNumbers("int8"), DecodeNumbers("int8", "int8"))


def test_a_value_that_looks_like_a_flag_stays_with_its_flag():
    assert plan(UpConfig(), served_model_name="--port")["router"][1] == "--served-model-name=--port"


def test_pdserve_is_started_under_its_own_name():
    assert up.own_command()[-1].endswith(("pdserve", "pdserve.launch.cli"))


def test_a_port_in_use_is_refused_and_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: {port} of 127.0.0.1 is in use"):
            up.free_port(Http(port=port))


def test_port_0_becomes_a_free_one():
    assert up.free_port(Http(port=0)) > 0


@pytest.mark.parametrize(
    ("status", "expected"), [("200 OK", True), ("503 Service Unavailable", False), ("", False), ("garbage", False)]
)
async def test_the_router_is_ready_when_it_answers_200(status, expected):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready HTTP/1.1\r\n")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode() if status else b"")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert await up.answers_ready("127.0.0.1", server.sockets[0].getsockname()[1]) is expected


async def test_the_router_is_not_ready_before_it_listens():
    assert await up.answers_ready("127.0.0.1", up.free_port(Http(port=0))) is False


def test_a_folder_that_holds_no_model_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ModelError, match=re.escape("config.json")):
        up.main(["--model", str(tmp_path), "--port", "0"])


def test_elsewhere_than_on_linux_up_says_so_and_stops(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux .* this is darwin"):
        up.main([])


def test_the_folder_for_sockets_is_private_short_and_gone_after_use(tmp_path):
    with runtime_dir(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path / "control.ipc")) <= 107
        remove_abandoned(tmp_path)
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_owner_was_killed_is_removed_by_the_next_one(tmp_path):
    code = f"""
import os, pathlib, signal
from pdserve.launch.runtime_dir import runtime_dir
with runtime_dir(pathlib.Path({str(tmp_path)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60)
    (abandoned,) = tmp_path.iterdir()
    with runtime_dir(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]
    assert not abandoned.exists()


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with runtime_dir() as path:
        assert path.parent == Path("/tmp")


async def test_an_answer_that_is_no_line_is_not_ready():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * (1 << 17))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert await up.answers_ready("127.0.0.1", server.sockets[0].getsockname()[1]) is False
