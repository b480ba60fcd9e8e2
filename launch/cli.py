"""The command `pdserve`: one screen of help a command, and quick, because nothing heavy is imported here.

    up       router and nodes as child processes (up.py)      bench        load test (loadtest/commands/)
    router   this process alone; likewise prefill, decode     config       check or show a configuration
    status   the nodes of a running cluster (status.py)       demo-model   convert the demo model, print its folder
    keygen   keys for a cluster (keygen.py)                    plan         what a model's KV cache takes (plan.py)

Exit code 2 is a refusal that would happen again: bad flags, configuration or model.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from pdserve.cluster.config import CONFIGS, DecodeConfig, PrefillConfig, load_config
from pdserve.cluster.settings import Loaded, Setting, did_you_mean, dump, settings_of
from pdserve.core.errors import ConfigError, ModelError, RefusedError
from pdserve.launch import lifeline
from pdserve.launch.arguments import Parser, add_settings, given, make_parser

OVERVIEW = """\
pdserve: LLM serving with prefill and decode on separate nodes

usage: pdserve COMMAND [options]

  up          start a router and its nodes on this machine: the quickest way to serve
  router      the router alone: HTTP for clients, control plane for nodes
  prefill     one prefill node
  decode      one decode node, or a colocated one with --role both
  bench       load test against any OpenAI-compatible server
  status      the nodes of a running cluster, their pools and links
  plan        what a model's KV cache takes, and how many requests fit into a size
  config      check a configuration, or show it with --dump
  demo-model  convert the demo model once and print its folder
  keygen      make the keys of a cluster that spans machines

  --version   print the version
  --help      also after each command
"""
DESCRIPTIONS = {
    "router": "The router: HTTP for clients, control plane for nodes. Nodes may start before or after it.",
    "prefill": "One prefill node: turns prompts into KV blocks for decode nodes.",
    "decode": "One decode node: pulls KV blocks and streams tokens.",
}


def main(argv: list[str] | None = None) -> int:
    lifeline.hold()
    line = sys.argv[1:] if argv is None else argv
    command = line[0] if line else "--help"
    if command in {"--help", "-h", "help"}:
        print(OVERVIEW, end="")
        return 0
    if command in {"--version", "-V", "version"}:
        print(f"pdserve {metadata.version('pdserve')}")
        return 0
    if command not in COMMANDS:
        print(f"pdserve: unknown command {command!r}{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[command](line[1:])
    except (ConfigError, ModelError, RefusedError) as error:
        print(f"pdserve {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _up(line: list[str]) -> int:
    from pdserve.launch import up

    return up.main(line)


def _bench(line: list[str]) -> int:
    from pdserve.loadtest.commands import command

    parser = make_parser("pdserve bench", "Load test against an OpenAI-compatible server.", None)
    command.add_arguments(parser)
    return command.main(parser.parse_args(line))


def _router(line: list[str]) -> int:
    config = _load_role("router", line).config
    from pdserve.router import process

    return process.run(_with_model(config))


def _prefill(line: list[str]) -> int:
    config = _load_role("prefill", line).config
    _bind_cores(config)
    from pdserve.prefill_node import process

    return process.run(_with_model(config))


def _decode(line: list[str]) -> int:
    config = _load_role("decode", line).config
    _bind_cores(config)
    from pdserve.decode_node import process

    return process.run(_with_model(config))


def _config(line: list[str]) -> int:
    roles = list(DESCRIPTIONS)
    usage = f"pdserve config [{'|'.join(roles)}] [--dump] [--config FILE] [any option of that role]"
    if set(line) & {"-h", "--help"}:
        print(f"usage: {usage}\n\nCheck the configuration of a role (without one: of all roles), or show it as TOML.")
        return 0
    chosen = [word for word in line if word in roles]
    rest = [word for word in line if word not in {*roles, "--dump"}]
    for role in chosen or roles:
        loaded = _load_role(role, rest)
        print(dump(loaded, f"pdserve {role}") if "--dump" in line else f"{role}: the configuration is valid")
    return 0


def _keygen(line: list[str]) -> int:
    from pdserve.launch import keygen

    return keygen.main(line)


def _status(line: list[str]) -> int:
    from pdserve.launch import status

    return status.main(line)


def _plan(line: list[str]) -> int:
    from pdserve.launch import plan

    return plan.main(line)


def _demo_model(line: list[str]) -> int:
    parser = make_parser("pdserve demo-model", "Convert the demo model once; print its folder.", "pdserve demo-model")
    parser.parse_line(line)
    from pdserve.launch import demo_model

    print(demo_model.convert_once())
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "up": _up,
    "router": _router,
    "prefill": _prefill,
    "decode": _decode,
    "bench": _bench,
    "config": _config,
    "demo-model": _demo_model,
    "keygen": _keygen,
    "plan": _plan,
    "status": _status,
}


def role_parser(role: str) -> Parser:
    """The parser of a role's own command."""
    parser = make_parser(f"pdserve {role}", DESCRIPTIONS[role], f"pdserve {role} [options]")
    parser.options.add_argument(
        "--config", metavar="FILE", help="TOML file, below PDSERVE_<NAME> variables, below flags"
    )
    add_settings(parser, settings_of(CONFIGS[role]))
    return parser


def _load_role(role: str, line: list[str]) -> Loaded[Any]:
    parsed = role_parser(role).parse_line(line)
    settings: tuple[Setting, ...] = settings_of(CONFIGS[role])
    file = Path(parsed.config) if parsed.config else None
    return load_config(CONFIGS[role], given(parsed, settings), file)


def _with_model(config: Any) -> Any:
    """The config with its model folder filled in: without one, the demo model's."""
    if config.serving.model is None:
        from pdserve.launch import demo_model

        config = dataclasses.replace(config, serving=dataclasses.replace(config.serving, model=demo_model.folder()))
    return config


def _bind_cores(config: PrefillConfig | DecodeConfig) -> None:
    """Keep this process on its cores, before any library has counted them."""
    cores = config.compute.cores
    if cores is None:
        return
    allowed = os.sched_getaffinity(0)
    if not set(cores) <= allowed:
        raise ConfigError(f"--cores: {sorted(set(cores) - allowed)} may not be used here, only {sorted(allowed)}")
    os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    sys.exit(main())
