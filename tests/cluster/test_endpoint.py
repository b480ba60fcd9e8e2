"""Links over real sockets: order, loss, backpressure, strangers."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import zmq

from pdserve.cluster.codec import MAX_FRAME_BYTES, encode
from pdserve.cluster.endpoint import Endpoint
from pdserve.cluster.messages import Blocks, Cancel, HaveEntry, Release
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NO_EPOCH, BlockHash, BlockId, Epoch, RequestId

REQUEST = RequestId(bytes(16))
WAIT_S = 10.0
TCP = "tcp://127.0.0.1:0"


class Witness:
    """An endpoint and everything it says, as a queue of (what, link, message)."""

    def __init__(self, epoch=None, on_message=None):
        self.said = asyncio.Queue()
        self.endpoint = Endpoint(
            epoch or Epoch.new(),
            on_message or (lambda link, envelope: self.said.put_nowait(("message", link, envelope.message))),
            lambda link: self.said.put_nowait(("lost", link, None)),
            lambda link: self.said.put_nowait(("writable", link, None)),
        )

    async def next(self, what):
        """The next thing said, which must be `what`: its link and message."""
        async with asyncio.timeout(WAIT_S):
            said, link, message = await self.said.get()
        assert said == what
        return link, message

    async def dial(self, address):
        link = self.endpoint.connect(address)
        assert await self.next("writable") == (link, None)
        return link

    def send(self, link, attempt):
        return self.endpoint.send(link, Cancel(REQUEST, attempt), NO_EPOCH)


@asynccontextmanager
async def witnesses(count=2, **options):
    made = [Witness(**options) for _ in range(count)]
    try:
        yield made
    finally:
        for witness in made:
            await witness.endpoint.close()


@pytest.fixture
def raw_dealer():
    """Dials an address as a stranger that speaks ZeroMQ and nothing else."""
    context = zmq.Context()
    dealers = []

    def dial(address):
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.connect(address)
        return dealer

    yield dial
    for dealer in dealers:
        dealer.close(linger=0)
    context.term()


@pytest.fixture
def private_dir(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
async def test_a_message_reaches_the_peer_and_its_answer_comes_back(kind, private_dir):
    async with witnesses() as (server, client):
        address = await server.endpoint.listen(TCP if kind == "tcp" else f"ipc://{private_dir}/node")
        link = await client.dial(address)
        assert client.send(link, 1)
        accepted, message = await server.next("message")
        assert message == Cancel(REQUEST, 1)
        assert server.send(accepted, 2)
        assert await client.next("message") == (link, Cancel(REQUEST, 2))


async def test_an_envelope_carries_the_epochs_of_sender_and_addressee():
    envelopes = asyncio.Queue()
    here, there = Epoch(1, 2), Epoch(3, 4)
    async with witnesses(on_message=lambda _link, envelope: envelopes.put_nowait(envelope), epoch=here) as (
        server,
        client,
    ):
        link = await client.dial(await server.endpoint.listen(TCP))
        client.endpoint.send(link, Release(REQUEST, 1), there)
        envelope = await asyncio.wait_for(envelopes.get(), WAIT_S)
        assert (envelope.sender, envelope.addressee) == (here, there)


async def test_blocks_arrive_with_their_bytes_and_in_order_with_other_messages():
    payloads = tuple(memoryview(secrets.token_bytes(size)) for size in (0, 1, 700_000, 5 << 20))
    entries = tuple(HaveEntry(BlockHash(bytes([i]) * 16), BlockId(i), 1, 1) for i in range(len(payloads)))
    blocks = Blocks(REQUEST, 1, 1, entries, payloads)
    async with witnesses() as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        assert client.send(link, 1)
        accepted, _ = await server.next("message")
        for attempt in range(3):
            assert server.endpoint.send(accepted, blocks, NO_EPOCH)
            assert server.send(accepted, attempt)
        for attempt in range(3):
            assert await client.next("message") == (link, blocks)
            assert await client.next("message") == (link, Cancel(REQUEST, attempt))


async def test_messages_of_a_link_arrive_in_the_order_of_sending():
    async with witnesses() as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        for attempt in range(200):
            assert client.send(link, attempt)
        arrived = [(await server.next("message"))[1].attempt for _ in range(200)]
        assert arrived == list(range(200))


async def test_a_peer_dialled_before_it_listens_becomes_writable_when_it_does(private_dir):
    address = f"ipc://{private_dir}/node"
    async with witnesses() as (server, client):
        link = client.endpoint.connect(address)
        assert not client.send(link, 1)
        await server.endpoint.listen(address)
        assert await client.next("writable") == (link, None)
        assert client.send(link, 2)
        assert (await server.next("message"))[1].attempt == 2
        assert client.endpoint.counters.num_refused == 1


async def test_a_listener_that_ends_is_lost_after_its_last_message():
    async with witnesses() as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        client.send(link, 1)
        accepted, _ = await server.next("message")
        for attempt in range(50):
            server.send(accepted, attempt)
        assert (await client.next("message"))[1].attempt == 0
        await server.endpoint.close()
        while (said := await asyncio.wait_for(client.said.get(), WAIT_S))[0] == "message":
            pass
        assert said == ("lost", link, None)
        assert not client.send(link, 2)


async def test_a_dialler_that_ends_is_lost_while_the_others_go_on():
    async with witnesses(3) as (server, first, second):
        address = await server.endpoint.listen(TCP)
        links = [await first.dial(address), await second.dial(address)]
        first.send(links[0], 1)
        first_accepted, _ = await server.next("message")
        second.send(links[1], 2)
        second_accepted, _ = await server.next("message")
        await first.endpoint.close()
        assert await server.next("lost") == (first_accepted, None)
        assert not server.send(first_accepted, 3)
        assert server.send(second_accepted, 4)
        assert (await second.next("message"))[1].attempt == 4


async def test_a_peer_that_comes_back_is_a_new_link_on_both_sides(private_dir):
    address = f"ipc://{private_dir}/node"
    async with witnesses(3) as (server, again, client):
        await server.endpoint.listen(address)
        first = await client.dial(address)
        await server.endpoint.close()
        assert await client.next("lost") == (first, None)
        await again.endpoint.listen(address)
        second = await client.dial(address)
        assert second != first
        assert client.send(second, 1)
        assert (await again.next("message"))[1].attempt == 1


PEER = """
import asyncio, sys
from pdserve.cluster.endpoint import Endpoint
from pdserve.cluster.messages import Cancel
from pdserve.core.ids import NO_EPOCH, Epoch

async def main(address):
    def greet(link):
        endpoint.send(link, Cancel(bytes(16), 1), NO_EPOCH)
    endpoint = Endpoint(Epoch.new(), lambda link, envelope: None, lambda link: None, greet)
    print(await endpoint.listen("tcp://127.0.0.1:0"), flush=True)
    endpoint.connect(address)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def spawn_peer():
    """A process that dials an address, greets, and prints where it listens itself."""
    processes = []

    def spawn(address):
        process = subprocess.Popen([sys.executable, "-c", PEER, address], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield spawn
    for process in processes:
        with process:
            process.kill()


async def test_a_killed_process_is_lost_on_the_links_of_both_directions(spawn_peer):
    async with witnesses(1) as (witness,):
        process = spawn_peer(await witness.endpoint.listen(TCP))
        accepted, _ = await witness.next("message")
        dialled = await witness.dial(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
        lost = {(await witness.next("lost"))[0], (await witness.next("lost"))[0]}
        assert lost == {accepted, dialled}


async def test_a_full_pipe_refuses_and_tells_when_there_is_room_and_loses_nothing():
    async with witnesses() as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        taken = 0
        # The receiver is on the same loop: it cannot read before we wait.
        while client.send(link, taken):
            taken += 1
            assert taken < 1_000_000
        assert client.endpoint.counters.num_refused == 1
        assert await client.next("writable") == (link, None)
        while not client.send(link, taken):
            assert await client.next("writable") == (link, None)
        arrived = [(await server.next("message"))[1].attempt for _ in range(taken + 1)]
        assert arrived == list(range(taken + 1))


async def test_an_accepted_peer_that_does_not_read_is_refused_more(raw_dealer):
    async with witnesses(1) as (server,):
        dealer = raw_dealer(await server.endpoint.listen(TCP))
        dealer.send(encode(Cancel(REQUEST, 0), NO_EPOCH, NO_EPOCH))
        link, _ = await server.next("message")
        while server.send(link, 1):
            pass
        assert server.endpoint.counters.num_refused == 1
        assert await server.next("writable") == (link, None)


async def test_a_peer_that_never_reads_is_cut_short_and_nobody_else_waits_for_it(raw_dealer):
    async with witnesses() as (server, client):
        address = await server.endpoint.listen(TCP)
        mute = raw_dealer(address)
        mute.send(encode(Cancel(REQUEST, 0), NO_EPOCH, NO_EPOCH))
        unread, _ = await server.next("message")
        link = await client.dial(address)
        assert client.send(link, 0)
        accepted, _ = await server.next("message")
        for attempt in range(1, 200):
            while server.send(unread, attempt):
                pass
            assert server.send(accepted, attempt)
            assert (await client.next("message"))[1].attempt == attempt


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\x00" * 100], [secrets.token_bytes(64)], [b"a", b"b"], [b""] * 50],
    ids=["empty", "zeros", "random", "two parts", "many parts"],
)
async def test_frames_of_a_stranger_are_counted_and_make_no_link(frames, raw_dealer):
    async with witnesses() as (server, client):
        address = await server.endpoint.listen(TCP)
        dealer = raw_dealer(address)
        dealer.send_multipart(frames)
        # The same stranger then says something good: its frames are ordered.
        dealer.send(encode(Cancel(REQUEST, 5), NO_EPOCH, NO_EPOCH))
        assert (await server.next("message"))[1].attempt == 5
        assert server.endpoint.counters.num_bad == 1
        link = await client.dial(address)
        client.send(link, 6)
        assert (await server.next("message"))[1].attempt == 6


async def test_a_frame_over_the_size_limit_breaks_only_its_own_link(raw_dealer):
    async with witnesses() as (server, client):
        address = await server.endpoint.listen(TCP)
        link = await client.dial(address)
        dealer = raw_dealer(address)
        dealer.send(encode(Cancel(REQUEST, 1), NO_EPOCH, NO_EPOCH))
        stranger, _ = await server.next("message")
        dealer.send(bytes(MAX_FRAME_BYTES + 1))
        assert await server.next("lost") == (stranger, None)
        client.send(link, 2)
        assert (await server.next("message"))[1].attempt == 2


async def test_a_closed_link_says_nothing_and_its_frames_are_dropped():
    async with witnesses() as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        client.send(link, 1)
        accepted, _ = await server.next("message")
        server.endpoint.close_link(accepted)
        client.send(link, 2)
        client.endpoint.close_link(link)
        assert not client.send(link, 3)
        link = await client.dial(await server.endpoint.listen(TCP))
        client.send(link, 4)
        assert (await server.next("message"))[1].attempt == 4
        assert client.said.empty()


async def test_a_callback_that_raises_is_counted_and_reading_goes_on(caplog):
    arrived = asyncio.Queue()

    def on_message(_link, envelope):
        arrived.put_nowait(envelope.message.attempt)
        if envelope.message.attempt == 1:
            raise ValueError("a bug in the machine")

    async with witnesses(on_message=on_message) as (server, client):
        link = await client.dial(await server.endpoint.listen(TCP))
        for attempt in (1, 2):
            client.send(link, attempt)
        assert [await asyncio.wait_for(arrived.get(), WAIT_S) for _ in range(2)] == [1, 2]
        assert server.endpoint.counters.num_callback_errors == 1
        assert "a bug in the machine" in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*",
        "tcp://:80",
        "tcp://a b:80",
        "ipc://relative",
        "ipc://@abstract",
        "ipc:///tmp/a\0b",
        "ipc:///" + "x" * 107,
        "inproc://x",
        "udp://127.0.0.1:80",
    ],
)
async def test_an_address_that_is_none_is_refused_by_listen_and_connect(address):
    async with witnesses(1) as (witness,):
        with pytest.raises(ConfigError):
            await witness.endpoint.listen(address)
        with pytest.raises(ConfigError):
            witness.endpoint.connect(address)


async def test_a_port_in_use_is_refused_naming_the_address():
    async with witnesses() as (first, second):
        address = await first.endpoint.listen(TCP)
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await second.endpoint.listen(address)


async def test_an_ipc_path_in_use_is_not_taken_over(private_dir):
    async with witnesses() as (first, second):
        address = await first.endpoint.listen(f"ipc://{private_dir}/node")
        with pytest.raises(ConfigError, match="another process does"):
            await second.endpoint.listen(address)


async def test_an_ipc_path_left_by_a_dead_process_is_used_again_and_removed_at_the_end(private_dir):
    path = private_dir / "node"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with witnesses() as (server, client):
        await client.dial(await server.endpoint.listen(f"ipc://{path}"))
    assert list(private_dir.iterdir()) == []


async def test_an_ipc_directory_open_to_others_is_refused(private_dir):
    os.chmod(private_dir, 0o755)
    async with witnesses(1) as (server,):
        with pytest.raises(ConfigError, match="mode 0755"):
            await server.endpoint.listen(f"ipc://{private_dir}/node")


async def test_a_missing_ipc_directory_is_made_for_us_alone(tmp_path):
    async with witnesses(1) as (server,):
        await server.endpoint.listen(f"ipc://{tmp_path}/new/node")
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


async def test_closing_twice_is_nothing():
    async with witnesses(1) as (server,):
        await server.endpoint.listen(TCP)
        await server.endpoint.close()
        await server.endpoint.close()
