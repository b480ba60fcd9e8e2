"""docs/deploy.md followed to the letter on two hosts, and its systemd units and log lines held against the code."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.cluster.config import Network
from pdserve.router.process import CLOSE_S
from tests.e2e import console
from tests.e2e.conftest import Start
from tests.e2e.console import ROOT
from tests.e2e.namespaces import Host
from tests.e2e.namespaces import Network as Hosts
from tests.e2e.servers import PATIENCE_S, Server

DOCUMENT = ROOT / "docs" / "deploy.md"
UNITS = sorted((ROOT / "configs" / "systemd").glob("*.service"))
PDSERVE = "/opt/pdserve/.venv/bin/pdserve"
# Copies between hosts are made by the test, and who installs has more rights than who tests.
NOT_TRIED = ("sudo make -C ", "sudo useradd ", "sudo install -d ", "sudo cp ", "sudo systemctl enable ", "scp -p ")
# Above what the files say, which leave it to the machine.
SMALL = {"PDSERVE_KV_MEMORY": "1MiB", "PDSERVE_NUM_THREADS": "1"}
# The prompt of the document has a token a byte: one block.
NUM_BYTES_MOVED = 16384


@dataclass
class Place:
    """One host of the document: its /etc/pdserve is `folder`."""

    host: Host
    folder: Path
    model: Path

    def local(self, text: str) -> str:
        own = f"{sys.executable} -m pdserve.launch.cli"
        text = text.replace(PDSERVE, own).replace("/etc/pdserve", str(self.folder))
        return text.replace("/srv/models/MODEL", str(self.model))

    def run(self, command: str) -> str:
        words = [*self.host.through, "bash", "-euc", self.local(command)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def places(network: Hosts, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    folder = tmp_path_factory.mktemp("deploy")
    found = {name: Place(network.add_host(name), folder / name, small_model) for name in "AB"}
    for place in found.values():
        place.folder.mkdir()
    assert [place.host.address for place in found.values()] == ["10.77.0.2", "10.77.0.3"]
    return found


def steps() -> list[tuple[str, str]]:
    """Every command of the document, with the host it is for; what is for both counts for A."""
    return [(block.title.split()[1], command) for block in console.blocks(DOCUMENT) for command in block.commands]


def starts() -> dict[str, tuple[str, str]]:
    """Host and command that start each role."""
    found = [(re.match(rf"{PDSERVE} (router|prefill|decode) ", command), host, command) for host, command in steps()]
    return {match[1]: (host, command) for match, host, command in found if match is not None}


def checks() -> list[tuple[str, str]]:
    return [step for step in steps() if step[1].startswith(("curl ", f"{PDSERVE} status "))]


def test_a_cluster_over_two_hosts_comes_up_as_the_document_says(places: dict[str, Place], start: Start):
    for block in console.blocks(DOCUMENT, "toml"):
        _, host, path = block.title.replace(":", "").split()
        place = places[host]
        Path(place.local(path)).write_text(place.local(block.text))
    for host, command in steps():
        if command.startswith((f"{PDSERVE} keygen ", "umask ")):
            places[host].run(command)
        elif command.startswith("scp "):
            shutil.copy2(places["A"].folder / "cluster.key", places["B"].folder)
    servers: dict[str, Server] = {}
    for role, (host, command) in starts().items():
        words = shlex.split(places[host].local(command.removeprefix(f"{PDSERVE} ")))
        servers[role] = start(*words, through=places[host].host.through, **SMALL)
    servers["router"].wait_for(r"\bserving$")
    servers["decode"].wait_for("linked to P0, transport ZeroMQ")

    ready, status, answer = (places[host].run(command) for host, command in checks())
    assert json.loads(ready)["status"] == "ready"
    assert re.search(r"^D0 .* P0 zmq ", status, re.MULTILINE), status
    assert json.loads(answer)["metrics"]["bytes_moved"] == NUM_BYTES_MOVED
    for server in servers.values():
        assert server.stop() == 0


def test_every_command_of_the_document_is_tried_or_known_not_to_be():
    tried = {command for _, command in (*starts().values(), *checks())}
    left = {command for _, command in steps()} - tried
    assert [c for c in left if not c.startswith((f"{PDSERVE} keygen ", "umask ", *NOT_TRIED))] == []
    assert set(starts()) == {"router", "prefill", "decode"}
    assert len(checks()) == 3


def test_every_line_that_the_document_says_is_in_a_log_is_in_the_code():
    cells = re.findall(r"^\| `([^`]+)`.*\|", DOCUMENT.read_text().split("## What goes wrong")[1], re.MULTILINE)
    folders = ("cluster", "router", "decode_node", "kvtransfer", "core")
    code = "".join(path.read_text() for folder in folders for path in (ROOT / folder).glob("*.py"))
    assert len(cells) > 8
    assert [cell for cell in cells if cell not in code] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_what_the_document_starts_and_waits_for_a_drain(unit: Path):
    role = unit.stem.removeprefix("pdserve-")
    parser = configparser.ConfigParser(comment_prefixes="#", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    service = parser["Service"]
    assert service["ExecStart"] == starts()[role][1]
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > (Network().drain_s if role != "router" else CLOSE_S)
    assert any(f"/{unit.name} " in f"{command} " for _, command in steps())


def test_systemd_understands_the_units(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PDSERVE, sys.executable))
    words = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
