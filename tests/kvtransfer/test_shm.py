"""Pools across processes: mapped read-only, alive after their owner, trusted only when verified."""

import array
import asyncio
import fcntl
import itertools
import json
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.cluster.messages import PoolOffer
from pdserve.core.errors import ConfigError, LayoutError
from pdserve.core.ids import BlockId, Epoch
from pdserve.engine.kv_pool import PoolView, buffer_bytes
from pdserve.kvtransfer import shm
from pdserve.kvtransfer.copying import SLICE_BYTES, copy_and_verify
from pdserve.kvtransfer.pull import Verdict
from pdserve.kvtransfer.shm import PoolMemory, PoolServer, fetch_pool, host_id

from .pools import GENERATION, LARGE_SPEC, NUM_BLOCKS, SPEC, content, empty_pool, make_copy, make_pool

EPOCH = Epoch(1, 2)
POOL_BYTES = buffer_bytes(SPEC, NUM_BLOCKS)


class Owner:
    """Another process that owns and serves a pool."""

    def __init__(self):
        script = Path(__file__).with_name("pools.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        said = json.loads(self.process.stdout.readline())
        self.epoch, self.offer = Epoch(**said["epoch"]), PoolOffer(**said["offer"])

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module")
def owner():
    owner = Owner()
    yield owner
    owner.end()


@pytest.fixture
def doomed_owner():
    owner = Owner()
    yield owner
    owner.end()


@pytest.fixture
def memory():
    memory = PoolMemory.create("pdserve-test", POOL_BYTES)
    yield memory
    memory.close()


@pytest.fixture
async def server(memory):
    async with PoolServer(memory, EPOCH, NUM_BLOCKS, SPEC.block_bytes) as server:
        yield server


@contextmanager
def stranger_offering(*fds):
    """A socket under a pool's name that hands over whatever it was given: its offer."""
    path = shm.SOCKET_PREFIX + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + path[1:].encode())
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                connection.sendmsg([b"pool"], [rights] if fds else [])

        thread = threading.Thread(target=serve)
        thread.start()
        yield PoolOffer(host_id(), path, NUM_BLOCKS, SPEC.block_bytes)
        thread.join()


def make_memfd(seals, num_bytes=POOL_BYTES):
    fd = os.memfd_create("pdserve-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# ---- the memory ----------------------------------------------------------------------------------


def test_the_owner_writes_through_its_map_and_nobody_writes_or_resizes_otherwise(memory):
    memory.buffer[0] = 42
    assert memory.buffer[0] == 42
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, POOL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.write(memory.fd, b"x")
    for size in (0, POOL_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_tensor_on_the_pool_stays_valid_after_close():
    memory = PoolMemory.create("pdserve-test", POOL_BYTES)
    tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    memory.close()
    memory.close()
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * POOL_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1 << 60])
def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(num_bytes):
    with pytest.raises(ConfigError, match=rf"{num_bytes} bytes .* --kv-memory"):
        PoolMemory.create("pdserve-test", num_bytes)


# ---- the hand-over -------------------------------------------------------------------------------


def test_another_process_maps_the_pool_and_reads_its_blocks(owner):
    assert owner.offer.host == host_id()
    mapped = fetch_pool(owner.offer, owner.epoch)
    view = PoolView(SPEC, NUM_BLOCKS, mapped.buffer)
    view.check_header()
    for block_id in range(NUM_BLOCKS):
        assert bytes(view.block(BlockId(block_id))) == content(SPEC, block_id)
        assert view.generations[block_id] == GENERATION + block_id
    with pytest.raises(TypeError, match="read-only"):
        view.block(BlockId(0))[0] = 1
    view.release()
    mapped.close()


def test_a_map_outlives_a_killed_owner_and_nothing_else_does(doomed_owner):
    shared_memory = set(os.listdir("/dev/shm"))
    mapped = fetch_pool(doomed_owner.offer, doomed_owner.epoch)
    doomed_owner.kill()
    target = empty_pool()
    verdicts = copy_and_verify(PoolView(SPEC, NUM_BLOCKS, mapped.buffer), target, [make_copy(3, 5)]).verdicts
    assert verdicts == (Verdict.OK,)
    assert bytes(target.view.block(BlockId(5))) == content(SPEC, 3)
    with pytest.raises(LayoutError, match="refused"):
        fetch_pool(doomed_owner.offer, doomed_owner.epoch)
    assert not any(name.startswith("pdserve") for name in set(os.listdir("/dev/shm")) - shared_memory)


def test_another_incarnation_is_not_given_the_pool(owner):
    with pytest.raises(LayoutError, match="another incarnation"):
        fetch_pool(owner.offer, replace(owner.epoch, nonce=owner.epoch.nonce ^ 1))
    fetch_pool(owner.offer, owner.epoch).close()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"host": "elsewhere/1"}, "is on host 'elsewhere/1'"),
        ({"num_blocks": 0}, "a pool of 0 blocks"),
        ({"block_bytes": 0}, "blocks of 0 bytes"),
        ({"block_bytes": 4095}, "blocks of 4095 bytes"),
        ({"num_blocks": NUM_BLOCKS + 1}, "bytes were offered|were offered"),
        ({"num_blocks": 2**32 - 1, "block_bytes": 2**64 - 4096}, "were offered"),
        ({"socket_path": "/run/docker.sock"}, "expected @pdserve-pool-"),
        ({"socket_path": shm.SOCKET_PREFIX + "x" * 108}, "expected @pdserve-pool-"),
        ({"socket_path": shm.SOCKET_PREFIX + "nobody"}, "refused"),
    ],
)
async def test_an_offer_that_is_not_true_is_refused(changes, what, server):
    with pytest.raises(LayoutError, match=what):
        await asyncio.to_thread(fetch_pool, replace(server.offer, **changes), EPOCH)


@pytest.mark.parametrize(
    "seals",
    [0, fcntl.F_SEAL_GROW | shm.F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK],
    ids=["none", "may shrink", "may be written"],
)
def test_memory_that_is_not_sealed_is_refused(seals):
    fd = make_memfd(seals)
    with stranger_offering(fd) as offer, pytest.raises(LayoutError, match="has seals"):
        fetch_pool(offer, EPOCH)
    os.close(fd)


def test_a_file_that_is_no_memory_is_refused(tmp_path):
    with open(tmp_path / "pool", "wb+") as file:
        file.truncate(POOL_BYTES)
        with stranger_offering(file.fileno()) as offer, pytest.raises(LayoutError, match="no sealed memory"):
            fetch_pool(offer, EPOCH)


@pytest.mark.parametrize("count", [0, 2, 10])
def test_an_answer_without_exactly_one_descriptor_is_refused_and_leaves_none_open(count):
    fd = make_memfd(shm.SEALS)
    with stranger_offering(*[fd] * count) as offer, pytest.raises(LayoutError, match="not handed over"):
        fetch_pool(offer, EPOCH)
    os.close(fd)


def test_sealed_memory_that_is_too_small_is_refused():
    fd = make_memfd(shm.SEALS, num_bytes=4096)
    with stranger_offering(fd) as offer, pytest.raises(LayoutError, match="4096 bytes"):
        fetch_pool(offer, EPOCH)
    os.close(fd)


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(shm, "HAND_OVER_TIMEOUT_S", 0.05)
    path = shm.SOCKET_PREFIX + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + path[1:].encode())
        listener.listen()
        with pytest.raises(LayoutError, match="timed out"):
            fetch_pool(PoolOffer(host_id(), path, NUM_BLOCKS, SPEC.block_bytes), EPOCH)


async def test_peers_that_say_nothing_are_dropped_and_do_not_add_up(server, monkeypatch):
    monkeypatch.setattr(shm, "HAND_OVER_TIMEOUT_S", 0.2)
    loop = asyncio.get_running_loop()
    silent = []
    for _ in range(shm.MAX_PENDING + 1):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].setblocking(False)
        await loop.sock_connect(silent[-1], b"\0" + server.offer.socket_path[1:].encode())
    # The one too many is refused at once, the others in their time.
    assert await asyncio.wait_for(loop.sock_recv(silent[-1], 64), 5.0) == b""
    for connection in silent:
        assert await asyncio.wait_for(loop.sock_recv(connection, 64), 5.0) == b""
        connection.close()
    (await asyncio.to_thread(fetch_pool, server.offer, EPOCH)).close()


async def test_a_process_of_another_user_is_not_given_the_pool(server, monkeypatch):
    loop = asyncio.get_running_loop()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, b"\0" + server.offer.socket_path[1:].encode())
        assert await asyncio.wait_for(loop.sock_recv(stranger, 64), 5.0) == b""


def test_a_socket_of_another_user_is_not_told_the_epoch(owner, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(LayoutError, match=f"belongs to uid {uid}"):
        fetch_pool(owner.offer, owner.epoch)


# ---- the copy ------------------------------------------------------------------------------------


def test_copied_blocks_are_verified_and_the_others_untouched():
    source, target = make_pool(), empty_pool()
    judged = copy_and_verify(source.view, target, [make_copy(0, 7), make_copy(6, 0)])
    assert judged.verdicts == (Verdict.OK, Verdict.OK)
    assert min(judged.copy_s, judged.verify_s) > 0
    assert bytes(target.view.block(BlockId(7))) == content(SPEC, 0)
    assert bytes(target.view.block(BlockId(0))) == content(SPEC, 6)
    assert not any(target.data[1:7].flatten().tolist())


def test_a_block_of_several_slices_is_copied_whole():
    source, target = make_pool(LARGE_SPEC, num_blocks=2), empty_pool(LARGE_SPEC, num_blocks=2)
    assert LARGE_SPEC.payload_bytes > SLICE_BYTES
    assert copy_and_verify(source.view, target, [make_copy(1, 0, LARGE_SPEC)]).verdicts == (Verdict.OK,)
    assert bytes(target.view.block(BlockId(0))) == content(LARGE_SPEC, 1)


def test_a_generation_that_moved_before_the_copy_is_moved():
    source = make_pool()
    source.set_generation(BlockId(2), GENERATION + 100)
    assert copy_and_verify(source.view, empty_pool(), [make_copy(2, 0), make_copy(3, 1)]).verdicts == (
        Verdict.MOVED,
        Verdict.OK,
    )


def test_a_generation_that_moves_during_the_copy_is_moved():
    class MovesAfterTheFirstLook:
        def __init__(self):
            self.looks = itertools.count(GENERATION + 2)

        def __getitem__(self, _block_id):
            return next(self.looks)

    source = make_pool().view
    source.generations = MovesAfterTheFirstLook()
    assert copy_and_verify(source, empty_pool(), [make_copy(2, 0)]).verdicts == (Verdict.MOVED,)


def test_a_flipped_bit_is_corrupt():
    source = make_pool()
    source.view.block(BlockId(2))[SPEC.payload_bytes - 1] ^= 1
    assert copy_and_verify(source.view, empty_pool(), [make_copy(2, 0)]).verdicts == (Verdict.CORRUPT,)


@pytest.mark.parametrize(
    "changes",
    [{"checksum": 0}, {"hash": bytes(16)}, {"source": NUM_BLOCKS}, {"source": 2**32 - 1}, {"source": -1}],
    ids=lambda changes: "-".join(f"{name} {value}" for name, value in changes.items()),
)
def test_an_announcement_that_is_not_true_is_corrupt(changes):
    assert copy_and_verify(make_pool().view, empty_pool(), [make_copy(2, 0, **changes)]).verdicts == (Verdict.CORRUPT,)


@pytest.mark.parametrize("target", [-1, NUM_BLOCKS])
def test_a_target_outside_our_pool_is_refused(target):
    with pytest.raises(LayoutError, match="target block"):
        copy_and_verify(make_pool().view, empty_pool(), [make_copy(2, target)])


def test_pools_of_different_layouts_are_refused():
    with pytest.raises(LayoutError, match="cannot copy between pools"):
        copy_and_verify(make_pool().view, empty_pool(replace(SPEC, block_size=8)), [make_copy(2, 0)])
