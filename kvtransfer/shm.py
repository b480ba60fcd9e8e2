"""KV pools in shared memory: a sealed memfd, handed to peers on this host.

    owner    PoolMemory (memfd, sealed) ── PoolServer (unix socket) ── descriptor ──┐
    reader   fetch_pool ── MappedPool (read-only) ◄──────────────────────────────────┘

The memory has no name in any file system and the socket is an abstract one, so that however a process
dies, nothing stays behind. A map stays valid after its owner's death. The seals make sure that a reader can
neither write nor be killed by a pool that shrinks under it. Used by the processes of the nodes.
"""

import array
import asyncio
import fcntl
import functools
import hmac
import logging
import os
import secrets
import socket
import struct

from pdserve.cluster.machine import available_memory_bytes
from pdserve.cluster.messages import PoolOffer
from pdserve.core.errors import ConfigError, LayoutError
from pdserve.core.ids import Epoch
from pdserve.core.kv_spec import PAGE_BYTES, data_offset
from pdserve.kvtransfer.shared_map import map_readable, map_writable

log = logging.getLogger(__name__)

# linux/fcntl.h, since Linux 5.1; the fcntl module does not name it.
F_SEAL_FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
SOCKET_PREFIX = "@pdserve-pool-"
# sun_path holds 108 bytes; an abstract name begins with a zero byte, written @ here.
MAX_SOCKET_PATH_BYTES = 108
HAND_OVER_TIMEOUT_S = 2.0
MAX_PENDING = 16
INT_BYTES = array.array("i").itemsize


@functools.cache
def host_id() -> str:
    """Equal for two processes that can reach each other's abstract sockets: one boot, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(16)}"  # equals nobody's: such a process shares no memory


class PoolMemory:
    """The bytes of this node's pool.

    buffer  writable memoryview of all of it; what still uses it after close keeps the memory alive
    fd      the memfd, never written through
    """

    def __init__(self, fd: int, buffer: memoryview) -> None:
        self.fd = fd
        self.buffer = buffer

    @classmethod
    def create(cls, name: str, num_bytes: int) -> "PoolMemory":
        """Allocate, touch every page, seal. `name` shows in /proc. Raises ConfigError when it does not fit."""
        available = available_memory_bytes()
        if not 0 < num_bytes <= available:
            raise ConfigError(
                f"a KV pool of {num_bytes} bytes does not fit the {available} bytes of memory available: "
                "change --kv-memory"
            )
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigError(f"cannot create shared memory for the KV pool: {error.strerror}") from error
        try:
            os.ftruncate(fd, num_bytes)
            # Pages are taken now: later they would cost every first write, or find no memory left.
            buffer = map_writable(fd, num_bytes)
            # Only the map above may ever write; and nobody may seal any further.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"cannot set up {num_bytes} bytes of shared memory for the KV pool: {error.strerror}"
            ) from error
        return cls(fd, buffer)

    def close(self) -> None:
        """Give the memory up; twice is nothing. It goes when the last tensor or view on it is gone.

        It is never unmapped by force: a tensor made by torch.frombuffer would not notice, and crash.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer = memoryview(b"")


class PoolServer:
    """Hands the descriptor of a pool to processes of the same user that know the owner's epoch.

    Runs on the event loop inside `async with`. A peer has 2 s to say the epoch, at most 16 are heard at once.
    """

    def __init__(self, memory: PoolMemory, epoch: Epoch, num_blocks: int, block_bytes: int) -> None:
        self.offer = PoolOffer(host_id(), SOCKET_PREFIX + secrets.token_hex(16), num_blocks, block_bytes)
        self._memory = memory
        self._token = _token(epoch)
        self._listener: socket.socket | None = None
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> "PoolServer":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(_socket_address(self.offer.socket_path))
        listener.listen(MAX_PENDING)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._listener = listener
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._pending):
            self._drop(connection)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        uid = _peer_uid(connection)
        if uid != os.geteuid() or len(self._pending) >= MAX_PENDING:
            log.warning("a process of uid %d was not given the KV pool, %d others wait", uid, len(self._pending))
            connection.close()
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._answer, connection)
        self._pending[connection] = loop.call_later(HAND_OVER_TIMEOUT_S, self._drop, connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            if hmac.compare_digest(connection.recv(len(self._token) + 1), self._token):
                socket.send_fds(connection, [b"pool"], [self._memory.fd])
            else:
                connection.send(b"this is another incarnation of the node")
        except OSError as error:
            log.warning("the KV pool could not be handed over: %s", error)
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._pending.pop(connection).cancel()
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()


class MappedPool:
    """A peer's pool, mapped read-only. buffer: memoryview, valid even after the owner's death."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def close(self) -> None:
        """Give the map up; twice is nothing. It goes when the last view on it is gone."""
        self.buffer = memoryview(b"")


def fetch_pool(offer: PoolOffer, epoch: Epoch) -> MappedPool:
    """Map the pool that the incarnation `epoch` of a peer offers; waits up to 2 s for the peer's event loop.

    Everything in the offer and about the descriptor is checked before the memory is touched; its content is
    still a stranger's. Raises LayoutError when the pool cannot be had, or is not what was offered.
    """
    if offer.host != host_id():
        raise LayoutError(f"the pool is on host {offer.host!r}, this process is on {host_id()!r}")
    if offer.num_blocks < 1 or offer.block_bytes < 1 or offer.block_bytes % PAGE_BYTES:
        raise LayoutError(f"a pool of {offer.num_blocks} blocks of {offer.block_bytes} bytes is none")
    num_bytes = data_offset(offer.num_blocks) + offer.num_blocks * offer.block_bytes
    try:
        fd = _fetch_descriptor(_socket_address(offer.socket_path), _token(epoch))
        try:
            return MappedPool(_map_sealed(fd, num_bytes))
        finally:
            os.close(fd)
    except OSError as error:
        raise LayoutError(f"cannot map the pool at {offer.socket_path}: {error}") from error


def _token(epoch: Epoch) -> bytes:
    return struct.pack("<QQ", epoch.start_ns, epoch.nonce)


def _socket_address(path: str) -> bytes:
    name = path.encode()
    if not path.startswith(SOCKET_PREFIX) or len(name) > MAX_SOCKET_PATH_BYTES:
        raise LayoutError(f"the pool's socket is {path[:128]!r}, expected {SOCKET_PREFIX}...")
    return b"\0" + name[1:]


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * INT_BYTES)
    _, uid, _ = struct.unpack("iII", credentials)
    return int(uid)


def _fetch_descriptor(address: bytes, token: bytes) -> int:
    """The one descriptor that the server sends. Raises LayoutError for any other answer, OSError for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        connection.connect(address)
        if _peer_uid(connection) != os.geteuid():
            raise LayoutError(f"the pool's socket belongs to uid {_peer_uid(connection)}, not to ours")
        connection.send(token)
        answer, ancillary, flags, _ = connection.recvmsg(256, socket.CMSG_SPACE(INT_BYTES), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % INT_BYTES])
    if len(fds) == 1 and not flags & socket.MSG_CTRUNC:
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise LayoutError(f"the pool was not handed over: {answer.decode(errors='replace') or 'connection closed'}")


def _map_sealed(fd: int, num_bytes: int) -> memoryview:
    """Map the first num_bytes read-only. Raises LayoutError when the file could change under the map."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LayoutError("the pool handed over is no sealed memory") from error
    if seals & SEALS != SEALS:
        raise LayoutError(f"the pool handed over has seals {seals:#x}, {SEALS:#x} needed")
    size = os.fstat(fd).st_size
    if size < num_bytes:
        raise LayoutError(f"the pool handed over has {size} bytes, {num_bytes} were offered")
    return map_readable(fd, num_bytes)
