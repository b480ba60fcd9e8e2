import json
import re
import subprocess
import sys

import pytest

from pdserve.launch import cli

COMMANDS = ["up", "router", "prefill", "decode", "bench", "config", "demo-model"]


def run_cli(capsys, *line: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    try:
        code = cli.main(list(line))
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_one_screen(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    code, text, _ = run_cli(capsys, *command.split(), "--help")
    lines = text.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_help_configuration_and_version_import_nothing_heavy():
    code = f"""
import json, sys
from pdserve.launch import cli
for line in [[], ["--version"], ["config", "--dump"], *([c, "--help"] for c in {COMMANDS!r} if c != "bench")]:
    try:
        cli.main(line)
    except SystemExit:
        pass
print(json.dumps(sorted(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {module.split(".")[0] for module in json.loads(result.stdout.splitlines()[-1])}
    assert loaded & {"torch", "transformers", "numpy", "aiohttp", "zmq", "tokenizers"} == set()


def test_the_version_is_the_installed_one(capsys):
    code, text, _ = run_cli(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"pdserve \d+\.\d+\.\d+\n", text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dcode", "pdserve: unknown command 'dcode', did you mean decode?"),
        ("up --prot 1", "pdserve up: unknown argument '--prot', did you mean --port? (see pdserve up --help)"),
        ("up --port", "pdserve up: argument --port: expected one argument (see pdserve up --help)"),
        ("up --por 1", "pdserve up: unknown argument '--por', did you mean --port? (see pdserve up --help)"),
        ("up nonsense", "pdserve up: unknown argument 'nonsense' (see pdserve up --help)"),
        ("up --decode 0", "pdserve up: --decode: '0' is not a whole number from 1 to 64"),
        ("up --kv-memory much", "pdserve up: --kv-memory: 'much' is not a size"),
        ("up --model /does/not/exist", "pdserve up: --model: '/does/not/exist' is not a folder"),
        ("up --dtype int8", "pdserve up: --dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ("router --config /does/not/exist", "pdserve router: --config: cannot read '/does/not/exist'"),
        ("decode --role prefill", "pdserve decode: --role: 'prefill' is not one of decode, both"),
        ("prefill --cores 4000", "pdserve prefill: --cores: [4000] may not be used here, only ["),
        ("config decode --nmae x", "pdserve decode: unknown argument '--nmae', did you mean --name?"),
    ],
)
def test_a_bad_command_line_is_one_clear_line_and_exit_code_2(capsys, line, message):
    code, _, errors = run_cli(capsys, *line.split())
    assert code == 2
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1


def test_the_effective_configuration_is_dumped_with_its_sources(capsys, monkeypatch, tmp_path):
    (tmp_path / "node.toml").write_text("[steps]\nmax_running = 9\n")
    monkeypatch.setenv("PDSERVE_BLOCK_SIZE", "16")
    line = ["config", "--dump", "decode", "--name", "D7", "--config", str(tmp_path / "node.toml")]
    code, text, _ = run_cli(capsys, *line)
    assert code == 0
    assert re.search(r'^name = "D7" +# --name:', text, re.MULTILINE)
    assert re.search(r"^block_size = 16 +# PDSERVE_BLOCK_SIZE:", text, re.MULTILINE)
    assert re.search(r"^max_running = 9 +# .*node.toml:", text, re.MULTILINE)


def test_a_configuration_is_checked_without_a_dump(capsys):
    assert run_cli(capsys, "config")[:2] == (
        0,
        "router: the configuration is valid\nprefill: the configuration is valid\ndecode: the configuration is valid\n",
    )
