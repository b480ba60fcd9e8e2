"""Router, prefill node and decode node on hosts of their own: what crosses the network, who is let in, and bad links.

The commands are those of docs/deploy.md, as far as they differ from one host's. The client is a fourth host.
"""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.cluster.keys import ClusterKeys
from pdserve.launch.keygen import main as keygen
from tests.e2e.client import PATIENCE_S, Client
from tests.e2e.conftest import Connect, Start
from tests.e2e.namespaces import Host, Network, NoNamespacesError
from tests.e2e.servers import Server

API_KEY = "an-api-key-of-the-tests"
CONTROL, DATA = 5757, 5758
NODE = ("--kv-memory", "16MiB", "--num-threads", 1)
# One token a byte; 60 blocks of 32 tokens, the last one not full, of 16 KiB each.
LONG, LONG_BYTES = 1900, 60 * 16384
SLOW_MEGABITS = 16


@dataclass
class Hosts:
    """A cluster over three hosts, started as its parts are asked for."""

    network: Network
    start: Start
    model: Path
    folder: Path

    def __post_init__(self) -> None:
        self.key_file = self.make_key_file("cluster.key")
        self.api_key_file = self.folder / "api.keys"
        self.api_key_file.write_text(API_KEY + "\n")
        self.api_key_file.chmod(0o600)
        self.at = {name: self.network.add_host(name) for name in ("router", "prefill", "decode", "other")}
        self.router = self._start_router()
        self.prefill = self.node("prefill", "P0", self.at["prefill"])
        self.decode = self.node("decode", "D0", self.at["decode"])
        self.router.wait_for(r"\bserving$")

    def make_key_file(self, name: str) -> Path:
        path = self.folder / name
        assert keygen([str(path)]) == 0
        return path

    def _start_router(self) -> Server:
        address = self.at["router"].address
        words = ("--model", self.model, "--host", address, "--port", 8000, "--control", f"tcp://{address}:{CONTROL}")
        # Every prompt is to cross the network, however busy the prefill node is.
        words += ("--cooperative-prefill", "off")
        keys = ("--key-file", self.key_file, "--api-key-file", self.api_key_file)
        return self.start("router", *words, *keys, through=self.at["router"].through).wait_listening()

    def node(
        self,
        role: str,
        name: str,
        host: Host,
        *flags: object,
        key_file: Path | None = None,
        start: Start | None = None,
    ) -> Server:
        """A node for as long as the cluster, or as what `start` starts."""
        where = ("--router", f"tcp://{self.at['router'].address}:{CONTROL}", "--key-file", key_file or self.key_file)
        listen = ("--listen", f"tcp://0.0.0.0:{DATA}", "--advertise", f"tcp://{host.address}:{DATA}")
        words = ("--name", name, "--model", self.model, *where, *listen, *NODE, *flags)
        return (start or self.start)(role, *words, through=host.through)


@pytest.fixture(scope="module")
def hosts(network: Network, start_here: Start, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(network, start_here, small_model, tmp_path_factory.mktemp("hosts"))


@pytest.fixture
async def client(hosts: Hosts, connect: Connect) -> Client:
    return connect(hosts.router, hosts.network.switch, API_KEY)


@pytest.fixture
async def one_host(small_up: Server, connect: Connect) -> Client:
    """The same model on one host, in shared memory."""
    return connect(small_up)


def long_prompt(number: int, num_tokens: int = LONG) -> str:
    """A token a byte; two numbers share no block."""
    return f"{number} {'lorem ipsum dolor ' * LONG}"[:num_tokens]


def slowed_down(host: Host) -> AbstractContextManager[None]:
    """A link of SLOW_MEGABITS; skips the test where the kernel has no such thing."""
    try:
        return host.slowed_down(SLOW_MEGABITS)
    except NoNamespacesError as error:
        pytest.skip(f"links cannot be slowed down here: {error}")


async def test_blocks_cross_hosts_in_frames_and_the_text_is_that_of_one_host(
    hosts: Hosts, client: Client, one_host: Client, connect: Connect
):
    hosts.decode.wait_for("linked to P0, transport ZeroMQ")
    prompt = long_prompt(0, 1000)
    answer = await client.complete(prompt, 32, ignore_eos=True)
    assert answer.body["metrics"]["bytes_moved"] == 32 * 16384
    assert answer.body["metrics"]["nodes"] == {"prefill": "P0", "decode": "D0"}
    assert answer.text == (await one_host.complete(prompt, 32, ignore_eos=True)).text
    assert not [line for line in hosts.decode.lines if "shared memory" in line]
    stranger = connect(hosts.router, hosts.network.switch)
    assert (await stranger.get("/ready")).status == 200
    assert (await stranger.complete(prompt, 4)).status == 401


async def test_shared_memory_across_hosts_is_refused_by_name(hosts: Hosts, client: Client, start: Start):
    alone = hosts.node("decode", "D1", hosts.at["other"], "--transport", "shm", start=start)
    await asyncio.to_thread(
        alone.wait_for, "cannot take blocks from P0: it is on another host, and --transport shm allows no other way"
    )
    found = (await client.get("/cluster")).body
    links = {node["node"]: [link["node"] for link in node["links"]] for node in found["nodes"]}
    assert (links["D0"], links.get("D1", [])) == (["P0"], [])
    assert await asyncio.to_thread(alone.stop) == 0


async def test_a_node_with_a_key_that_is_not_allowed_gets_nowhere_and_disturbs_nobody(
    hosts: Hosts, client: Client, one_host: Client, start: Start
):
    """It even knows the cluster's public key, so that it is the cluster that turns it away."""
    key_file = hosts.make_key_file("stranger.key")
    known = ClusterKeys.read(hosts.key_file).public.decode()
    key_file.write_text(f'server = "{known}"\n' + key_file.read_text())
    before = len(hosts.router.lines), len(hosts.decode.lines)
    async with client.stream("Go on", 1000, ignore_eos=True) as stream:
        await stream.read(num_events=3)
        stranger = hosts.node("prefill", "P1", hosts.at["other"], key_file=key_file, start=start)
        refused = "no connection on tcp://10.77.0.2:5757 .*the other side has no key that is allowed here"
        await asyncio.to_thread(stranger.wait_for, refused)
        await asyncio.to_thread(hosts.router.wait_for, "no connection on", before[0])
        await stream.read()
    assert stream.closing["metrics"]["attempts"] == 1
    assert stream.text == (await one_host.complete("Go on", 1000, ignore_eos=True)).text
    assert await asyncio.to_thread(stranger.stop) == 0
    assert not [line for line in hosts.router.lines[before[0] :] if "P1" in line]
    assert not [line for line in stranger.lines if "joined the router" in line]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("router", "--control", "tcp://10.77.0.2:5757"), "--key-file"),
        (("router", "--host", "10.77.0.2"), "--api-key-file"),
        (("prefill", "--router", "tcp://10.77.0.2:5757"), "--key-file"),
        (("decode", "--listen", "tcp://10.77.0.4:5758"), "--key-file"),
        (("decode", "--listen", "tcp://0.0.0.0:5758"), "--advertise"),
    ],
)
def test_beyond_this_host_nothing_starts_without_saying_how(start: Start, words: tuple[str, ...], option: str):
    server = start(*words)
    assert server.wait() == 2
    (line,) = server.lines
    assert option in line
    assert words[2] in line


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_cable_pulled_out_and_put_back_costs_no_stream_a_token(
    hosts: Hosts, client: Client, one_host: Client, name: str
):
    node = {"prefill": "P0", "decode": "D0"}[name]
    before = len(hosts.router.lines)
    async with client.stream("Go on", 1500, ignore_eos=True) as stream:
        await stream.read(num_events=3)
        hosts.at[name].unplug()
        try:
            await asyncio.to_thread(hosts.router.wait_for, f"lost {node}", before)
        finally:
            hosts.at[name].plug()
        await stream.read()
    assert stream.closing["usage"]["completion_tokens"] == 1500
    # A stream is its decode node's alone. That one's other links may be found broken after it is back: a third attempt.
    assert (stream.closing["metrics"]["attempts"] == 1) == (name == "prefill")
    assert stream.text == (await one_host.complete("Go on", 1500, ignore_eos=True)).text
    await asyncio.to_thread(hosts.router.wait_for, r"\bserving$", before)
    prompt = long_prompt(100 + len(name), 500)
    answer = await client.complete(prompt, 8, ignore_eos=True)
    assert answer.body["metrics"]["bytes_moved"] == 16 * 16384
    assert answer.text == (await one_host.complete(prompt, 8, ignore_eos=True)).text


async def test_a_cable_pulled_out_in_the_middle_of_a_hand_off_costs_time_and_no_token(
    hosts: Hosts, client: Client, one_host: Client
):
    prompts = [long_prompt(number) for number in range(10, 13)]
    before = len(hosts.router.lines)
    with slowed_down(hosts.at["prefill"]):
        answers = [asyncio.create_task(client.complete(prompt, 8, ignore_eos=True)) for prompt in prompts]
        await client.until_blocks(lambda blocks: blocks["P0"] > 0 and blocks["D0"] > 0, PATIENCE_S)
        hosts.at["prefill"].unplug()
        try:
            await asyncio.to_thread(hosts.router.wait_for, "lost P0", before)
            done = await asyncio.gather(*answers)
        finally:
            hosts.at["prefill"].plug()
    assert [answer.text for answer in done] == [
        (await one_host.complete(prompt, 8, ignore_eos=True)).text for prompt in prompts
    ]
    assert max(answer.body["metrics"]["attempts"] for answer in done) > 1
    await asyncio.to_thread(hosts.router.wait_for, r"\bserving$", before)


async def test_a_slow_link_makes_transfers_wait_and_sends_nothing_twice(hosts: Hosts, client: Client, one_host: Client):
    """They share it, so that some hear nothing of their own blocks for longer than it takes to miss a message."""
    prompts = [long_prompt(number) for number in range(1, 7)]
    link = hosts.at["prefill"]
    before = link.num_bytes_sent
    with slowed_down(link):
        answers = await asyncio.gather(*(client.complete(prompt, 8, ignore_eos=True) for prompt in prompts))
    moved = [answer.body["metrics"]["bytes_moved"] for answer in answers]
    assert moved == [LONG_BYTES] * len(prompts)
    assert max(answer.body["metrics"]["exposed_transfer_s"] for answer in answers) > 1.0
    expected = [(await one_host.complete(prompt, 8, ignore_eos=True)).text for prompt in prompts]
    assert [answer.text for answer in answers] == expected
    # Even what was sent in vain has had the time to come, on a link that is fast again.
    assert link.num_bytes_sent - before < 1.1 * sum(moved)
