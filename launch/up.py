"""`pdserve up`: a router and nodes on this machine, as child processes under one supervisor.

Checks everything that can be checked before anything starts, splits the cores between the nodes and
gives each child its whole command line, the one that would start it by hand.
"""

import asyncio
import errno
import os
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

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
from pdserve.cluster.machine import current_cores, split_cores
from pdserve.cluster.settings import Setting, settings_of
from pdserve.core.errors import ConfigError
from pdserve.launch.arguments import Parser, add_settings, given, make_parser
from pdserve.launch.log_stream import LogStream
from pdserve.launch.runtime_dir import runtime_dir
from pdserve.launch.supervisor import Child, Supervisor

DESCRIPTION = """\
Start a router and its nodes on this machine and keep them running. Ctrl-C stops all of them.
Without --model a small demo model is served. Each option is also PDSERVE_<NAME> in the environment."""
ROUTER_FLAGS = (
    "model",
    "served_model_name",
    "max_model_len",
    "host",
    "port",
    "api_key_file",
    "allow_unauthenticated",
    "ttft_s",
    "tpot_s",
    "cooperative_prefill",
    "prefill_policy",
    "batching",
    "prefix_cache",
)
NODE_FLAGS = (
    "model",
    "dtype",
    "device",
    "max_model_len",
    "kv_memory",
    "max_step_tokens",
    "prefill_policy",
    "transport",
    "chunked_prefill",
)
PREFILL_FLAGS = ("compute",)
DECODE_FLAGS = ("weights", "accept_compute", "batching", "prefix_cache", "kv_allocation")
FLAGS = tuple(dict.fromkeys((*ROUTER_FLAGS, *NODE_FLAGS, *PREFILL_FLAGS, *DECODE_FLAGS)))
READY_TIMEOUT_S = 2.0


def parser() -> Parser:
    up = make_parser("pdserve up", DESCRIPTION, "pdserve up [options]")
    add_settings(up, _settings())
    return up


def main(line: list[str]) -> int:
    """Run until stopped. Raises ConfigError or ModelError before anything is started."""
    started = time.monotonic()
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"needs Linux (memfd, process death signals), this is {sys.platform}")
    flags = given(parser().parse_line(line), _settings())
    topology = load_config(UpConfig, _only(flags, [item.name for item in settings_of(UpConfig)])).config
    router = load_config(RouterConfig, _only(flags, ROUTER_FLAGS)).config
    prefill = load_config(PrefillConfig, _only(flags, (*NODE_FLAGS, *PREFILL_FLAGS))).config
    decode = load_config(DecodeConfig, _only(flags, (*NODE_FLAGS, *DECODE_FLAGS))).config
    check_numbers(topology, prefill.numbers, decode.numbers)
    port = free_port(router.http)
    flags["model"] = str(_checked_model(router.serving.model))
    flags["port"] = str(port)
    url = f"http://{_url_host(router.http.host)}:{port}/v1"

    async def is_ready() -> bool:
        return await answers_ready(router.http.host, port)

    def ready_line() -> str:
        return f"ready in {time.monotonic() - started:.1f} s: {url}  (Ctrl-C stops)"

    with runtime_dir() as sockets:
        children = plan_children(topology, flags, current_cores(), sockets, own_command())
        log = LogStream([child.name for child in children], sys.stdout)
        log.say(f"pdserve {metadata.version('pdserve')}: {', '.join(child.name for child in children)}")
        supervisor = Supervisor(children, log, is_ready=is_ready, ready_line=ready_line)
        return asyncio.run(supervisor.run())


def plan_children(
    topology: UpConfig, flags: dict[str, str], cores: tuple[int, ...], sockets: Path, command: tuple[str, ...]
) -> tuple[Child, ...]:
    """The processes to keep: their names in the log and their command lines.

    flags    text by setting name, those given to `up` and those it found out
    cores    split between the nodes; the router is not bound to any, it sleeps most of the time
    sockets  a private folder: nobody else on this machine can connect
    """
    control = f"ipc://{sockets}/control.ipc"
    router = Child("router", (*command, "router", *_options(_only(flags, ROUTER_FLAGS) | {"control": control})))
    role = "both" if topology.role_mode == "both" else "decode"
    nodes: list[tuple[str, str, dict[str, str]]]
    nodes = [("prefill", f"P{index}", _only(flags, PREFILL_FLAGS)) for index in range(topology.num_prefill)]
    nodes += [("decode", f"D{index}", {"role": role} | _only(flags, DECODE_FLAGS)) for index in range(topology.decode)]
    children = [router]
    for (kind, name, extra), own_cores in zip(nodes, split_cores(cores, len(nodes)), strict=True):
        options = {
            "name": name,
            **extra,
            **_only(flags, NODE_FLAGS),
            "router": control,
            "listen": f"ipc://{sockets}/{name}.ipc",
            "cores": ",".join(map(str, own_cores)),
            "num_threads": str(len(own_cores)),
        }
        children.append(Child(name, (*command, kind, *_options(options))))
    return tuple(children)


def check_numbers(topology: UpConfig, prefill: PrefillNumbers, decode: DecodeNumbers) -> None:
    """What the nodes would refuse each other for. Raises ConfigError."""
    if not topology.num_prefill:
        if prefill.compute != "model":
            raise ConfigError(f"--compute {prefill.compute}: with --role-mode both no node only prefills")
        return
    if prefill.own not in decode.accepted:
        raise ConfigError(
            f"--compute {prefill.compute}, --weights {decode.weights}: decode nodes would go on with KV that their own "
            f"numbers have not made; if they may, say --accept-compute {prefill.compute}"
        )


def own_command() -> tuple[str, ...]:
    """How to start `pdserve` once more, so that `ps` shows it under this name where it is installed."""
    script = Path(sys.executable).with_name("pdserve")
    return (sys.executable, str(script)) if script.exists() else (sys.executable, "-m", "pdserve.launch.cli")


def free_port(http: Http) -> int:
    """The port to serve on, a free one for port 0. Raises ConfigError when it cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a port whose last connections are still closing is not in use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port: {http.port} of {http.host} is in use, choose another or stop its owner"
            ) from None
        raise ConfigError(f"--port: cannot listen on {http.host} port {http.port}: {error.strerror}") from None


async def answers_ready(host: str, port: int) -> bool:
    """Whether GET /ready is answered with 200 now."""
    writer = None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET /ready HTTP/1.1\r\nHost: {_url_host(host)}:{port}\r\nConnection: close\r\n\r\n".encode())
            status = (await reader.readline()).split()
            return len(status) > 1 and status[1] == b"200"
    except (OSError, TimeoutError, ValueError):  # nobody there, nobody answering, no line of HTTP
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


def _settings() -> tuple[Setting, ...]:
    """The options of `up`: its own, and those of the router and of nodes that make sense for all of them."""
    known = {item.name: item for config in (RouterConfig, PrefillConfig, DecodeConfig) for item in settings_of(config)}
    return (*settings_of(UpConfig), *(known[name] for name in FLAGS))


def _checked_model(model: Path | None) -> Path:
    """The model's folder, the demo model's when none was named; refused when it cannot be served."""
    from pdserve.core.model_config import load_model_config

    if model is None:
        from pdserve.launch import demo_model

        model = demo_model.folder()
    if not model.is_dir():
        raise ConfigError(f"--model: {str(model)!r} is not a folder")
    load_model_config(model)
    return Path(os.path.abspath(model))


def _only(flags: dict[str, str], names: list[str] | tuple[str, ...]) -> dict[str, str]:
    return {name: flags[name] for name in names if name in flags}


def _options(values: dict[str, str]) -> list[str]:
    """--name value pairs; a value that starts with "-" is glued to its flag."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in values.items())
    return [word for flag, value in pairs for word in ([f"{flag}={value}"] if value.startswith("-") else [flag, value])]


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
