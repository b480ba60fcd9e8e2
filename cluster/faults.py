"""The faults of a node process: what it does to itself when it reaches a named step of the protocol.

For tests of a whole cluster, and refused unless the node was started with --enable-faults on. The node reports
its steps to `reach`; messages pass through a FaultyEndpoint, which takes the place of the endpoint only when
faults were asked for. Which fault strikes at which step is said in fault_spec.py. Created by the node.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdserve.cluster.codec import Envelope
from pdserve.cluster.config import Trials
from pdserve.cluster.endpoint import Endpoint, LinkId
from pdserve.cluster.fault_spec import Act, Countdown, Fault
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.messages import Blocks, Have, Message
from pdserve.core.ids import BlockId, Epoch

log = logging.getLogger(__name__)


class Faults:
    """block: the bytes of a block of this node's pool, writable."""

    def __init__(self, trials: Trials, block: Callable[[BlockId], memoryview]):
        self.block = block
        self._countdown = Countdown(trials.fault or ())
        self._is_enabled = trials.enable_faults == "on"
        if self._is_enabled:
            given = ", ".join(map(str, trials.fault or ())) or "none given"
            log.warning("FAULTS ARE ENABLED (--enable-faults on): this node harms itself as told: %s", given)

    @property
    def make_endpoint(self) -> Callable[..., Endpoint]:
        """What makes the node's endpoint; an ordinary one when no faults are enabled."""
        return partial(FaultyEndpoint, self) if self._is_enabled else Endpoint

    def reach(self, step: str) -> None:
        """The node has reached a step that is no message."""
        for fault in self.due(step):
            strike(fault)

    def due(self, step: str) -> list[Fault]:
        faults = self._countdown.reach(step)
        for fault in faults:
            log.warning("fault: %s", fault)
        return faults


class FaultyEndpoint(Endpoint):
    """An endpoint whose messages and links meet faults."""

    def __init__(
        self,
        faults: Faults,
        epoch: Epoch,
        on_message: Callable[[LinkId, Envelope], None],
        on_lost: Callable[[LinkId], None],
        on_writable: Callable[[LinkId], None] | None = None,
        keys: ClusterKeys | None = None,
    ):
        super().__init__(epoch, self._meet, on_lost, on_writable, keys)
        self._faults = faults
        self._on_good_message = on_message
        self._slowed_s: dict[LinkId, float] = {}

    def send(self, link_id: LinkId, message: Message, addressee: Epoch) -> bool:
        for fault in self._faults.due(f"send:{type(message).__name__}"):
            if fault.act is Act.CUT:
                self._sever(link_id)
                return False
            if fault.act is Act.SLOW:
                self._slowed_s[link_id] = fault.seconds or 0.0
            elif fault.act is Act.CORRUPT:
                message = self._corrupted(message)
            else:
                strike(fault)
        delay_s = self._slowed_s.get(link_id)
        if delay_s is None:
            return super().send(link_id, message, addressee)
        asyncio.get_running_loop().call_later(delay_s, super().send, link_id, message, addressee)
        return True

    def _meet(self, link_id: LinkId, envelope: Envelope) -> None:
        for fault in self._faults.due(f"receive:{type(envelope.message).__name__}"):
            if fault.act is Act.CUT:
                self._sever(link_id)
            elif fault.act is Act.CORRUPT:
                envelope = replace(envelope, message=self._corrupted(envelope.message))
            else:
                strike(fault)
        self._on_good_message(link_id, envelope)

    def _corrupted(self, message: Message) -> Message:
        """The message with one byte of its first block flipped: a Have's where it lies in our pool."""
        if isinstance(message, Have) and message.entries:
            flip(self._faults.block(message.entries[0].block_id))
        elif isinstance(message, Blocks) and message.payloads:
            first = memoryview(bytearray(message.payloads[0]))
            flip(first)
            return replace(message, payloads=(first, *message.payloads[1:]))
        return message

    def _sever(self, link_id: LinkId) -> None:
        """Break the connection beneath libzmq: it and its peer learn of it as of any other."""
        descriptor = self.descriptor(link_id)
        if descriptor is None:
            log.warning("fault: nothing has come on this link yet, it cannot be cut")
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def strike(fault: Fault) -> None:
    """Kill or freeze this process; returns when it goes on."""
    if fault.act is Act.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    waker = None if fault.seconds is None else _wake_after(fault.seconds)
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def flip(block: memoryview) -> None:
    """Change the byte in the middle."""
    block[len(block) // 2] ^= 0xFF


def _wake_after(seconds: float) -> "subprocess.Popen[bytes]":
    """A process of its own, because this one will not run meanwhile."""
    words = ["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
