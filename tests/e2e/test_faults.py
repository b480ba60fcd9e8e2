"""Faults at exact steps of a hand-off while another stream runs: right text, and in the end nobody holds anything.

A router and one decode node serve the whole file; each test brings the nodes that come to harm.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.client import Client, Stream
from tests.e2e.cluster import Cluster, go_on, until_ended_by, until_stopped
from tests.e2e.conftest import Connect, Start
from tests.e2e.servers import Server

LEASE_S = 2.0
BEAT_S = 0.1
NUM_TOKENS = 48
# How far /metrics may be behind, on a busy machine.
GAUGES_S = 1.0
# A prompt of SHORT tokens is one step, one of LONG tokens six small ones; both end in a partial block.
SMALL_STEPS = ("--max-step-tokens", 64)
SHORT, LONG = 200, 350
# A pool that is not offered cannot be mapped: blocks are sent.
SENT = ("--transport", "zmq")

Undisturbed = Callable[[str, int], Awaitable[str]]


@dataclass
class Steady:
    """The part of the cluster that is well: a router and D0. nodes: starts those of one test."""

    nodes: Cluster
    router: Server
    decode: Server

    async def join(self, client: Client, name: str, faults: str | None, *flags: object) -> Server:
        """Start P1, or D1 beside it; returns when it is given requests."""
        before = len(self.router.lines)
        role, pair = ("prefill", ("D0", "P1")) if name == "P1" else ("decode", ("D1", "P1"))
        flags = flags if faults is None else (*flags, "--enable-faults", "on", "--fault", faults)
        node = self.nodes.node(role, *flags, name=name)
        await asyncio.to_thread(self.router.wait_for, f"{name} joined as", since=before)
        await client.until_linked(*pair)
        return node


@pytest.fixture(scope="module")
def well(start_here: Start, small_model: Path) -> tuple[str, Server, Server]:
    cluster = Cluster(start_here, small_model)
    # A decode node that a test freezes in a hand-off keeps its request.
    router = cluster.router("--lease-s", LEASE_S, "--heartbeat-s", BEAT_S, "--handoff-deadline-s", 30)
    decode = cluster.node("decode")
    router.wait_for("D0 joined as decode")
    return cluster.control, router, decode


@pytest.fixture
def steady(well: tuple[str, Server, Server], start: Start, small_model: Path) -> Steady:
    control, router, decode = well
    return Steady(Cluster(start, small_model, control), router, decode)


@pytest.fixture
async def client(connect: Connect, steady: Steady) -> Client:
    return connect(steady.router)


@pytest.fixture
async def undisturbed(connect: Connect, small_up: Server) -> Undisturbed:
    """What a cluster to which nothing happens answers."""

    async def text(prompt: str, num_tokens: int = NUM_TOKENS) -> str:
        return (await connect(small_up).complete(prompt, num_tokens, ignore_eos=True)).text

    return text


def make_prompt(name: str, length: int) -> str:
    """A token a character. Prompts of different names share no block."""
    return (name + "".join(chr(97 + (7 * i + i * i // 5) % 26) for i in range(length)))[:length]


async def ask(client: Client, prompt: str) -> Stream:
    return await client.read_stream(prompt, NUM_TOKENS, ignore_eos=True)


def attempts(stream: Stream) -> int:
    return stream.closing["metrics"]["attempts"]


@asynccontextmanager
async def other_stream(client: Client, undisturbed: Undisturbed) -> AsyncIterator[None]:
    """A stream that D0 decodes meanwhile and that must not notice; and in the end nothing is held by anybody.

    A decode node that joined later gets the next request.
    """
    prompt, num_tokens = make_prompt("another", 20), 1000
    async with client.stream(prompt, num_tokens, ignore_eos=True) as stream:
        await stream.read(num_events=3)
        yield
        await stream.read()
    assert stream.text == await undisturbed(prompt, num_tokens)
    assert (attempts(stream), stream.closing["metrics"]["nodes"]["decode"]) == (1, "D0")
    await client.until_blocks(lambda blocks: not any(blocks.values()), LEASE_S + GAUGES_S)


# Its first message to the decode node is the other stream's; the fourth is in the middle of the long prompt.
@pytest.mark.parametrize(
    ("flags", "fault"),
    [((), "kill@send:Have#4"), pytest.param(SENT, "kill@send:Blocks#6", marks=pytest.mark.slow)],
    ids=["mapped", "sent"],
)
async def test_a_prefill_node_killed_while_its_blocks_are_copied_costs_nobody_a_token(
    steady: Steady, client: Client, undisturbed: Undisturbed, flags: tuple[object, ...], fault: str
):
    prompt = make_prompt(fault, LONG)
    prefill = await steady.join(client, "P1", fault, *SMALL_STEPS, *flags)
    async with other_stream(client, undisturbed):
        answer = await ask(client, prompt)
        await until_ended_by(signal.SIGKILL, prefill)
    assert answer.text == await undisturbed(prompt, NUM_TOKENS)
    # Nobody else computes prompts, so the decode node did.
    assert (attempts(answer), answer.closing["metrics"]["nodes"]) == (2, {"prefill": None, "decode": "D0"})


async def test_a_decode_node_finishes_its_copies_from_the_pool_of_a_dead_prefill_node(
    steady: Steady, client: Client, undisturbed: Undisturbed
):
    prompt = make_prompt("dead", LONG)
    prefill = await steady.join(client, "P1", None, *SMALL_STEPS)
    decode = await steady.join(client, "D1", "freeze@copy")
    async with other_stream(client, undisturbed), client.stream(prompt, NUM_TOKENS, ignore_eos=True) as answer:
        # The first token comes from the prefill node: it has computed and announced everything.
        await answer.read(num_events=1)
        await until_stopped(decode)
        os.kill(prefill.pid, signal.SIGKILL)
        await until_ended_by(signal.SIGKILL, prefill)
        go_on(decode)
        await answer.read()
    assert answer.text == await undisturbed(prompt, NUM_TOKENS)
    assert (attempts(answer), answer.closing["metrics"]["nodes"]) == (1, {"prefill": "P1", "decode": "D1"})


async def test_a_decode_node_killed_while_it_copies_leaves_nothing_held_on_the_prefill_node(
    steady: Steady, client: Client, undisturbed: Undisturbed
):
    prompt = make_prompt("killed", LONG)
    await steady.join(client, "P1", None, *SMALL_STEPS)
    decode = await steady.join(client, "D1", "kill@copy")
    async with other_stream(client, undisturbed), asyncio.TaskGroup() as group:
        asking = group.create_task(ask(client, prompt))
        await until_ended_by(signal.SIGKILL, decode)
        await client.until_blocks(lambda blocks: blocks.get("P1") == 0, LEASE_S + GAUGES_S)
    answer = asking.result()
    assert answer.text == await undisturbed(prompt, NUM_TOKENS)
    assert (attempts(answer), answer.closing["metrics"]["nodes"]["decode"]) == (2, "D0")


@pytest.mark.parametrize(
    ("flags", "fault"),
    [pytest.param((), "cut@send:Have#4", marks=pytest.mark.slow), (SENT, "cut@send:Blocks#6")],
    ids=["mapped", "sent"],
)
async def test_a_link_that_breaks_in_the_middle_of_a_hand_off_is_made_again(
    steady: Steady, client: Client, undisturbed: Undisturbed, flags: tuple[object, ...], fault: str
):
    prompt, next_prompt = make_prompt(fault, LONG), make_prompt("next" + fault, SHORT)
    await steady.join(client, "P1", fault, *SMALL_STEPS, *flags)
    before = len(steady.decode.lines)
    async with other_stream(client, undisturbed):
        answer = await ask(client, prompt)
        await asyncio.to_thread(steady.decode.wait_for, "lost P1", since=before)
        await asyncio.to_thread(steady.decode.wait_for, "linked to P1", since=before)
        await client.until_linked("D0", "P1")
        after = await ask(client, next_prompt)
    assert [answer.text, after.text] == [await undisturbed(text, NUM_TOKENS) for text in (prompt, next_prompt)]
    assert [attempts(answer), attempts(after)] == [2, 1]
    assert after.closing["metrics"]["nodes"] == {"prefill": "P1", "decode": "D0"}


# A block that is wrong in the pool is wrong again when it is asked for again; one that is wrong on the wire is not.
@pytest.mark.parametrize(
    ("flags", "fault", "num_corrupt"),
    [
        ((), "corrupt@send:Have#2", {"D0": 2, "P1": 1}),
        (SENT, "corrupt@send:Blocks#3", {"D0": 1, "P1": 0}),
        pytest.param(SENT, "corrupt@send:Have#2", {"D0": 2, "P1": 1}, marks=pytest.mark.slow),
    ],
    ids=["mapped, in the pool", "sent, on the wire", "sent, in the pool"],
)
async def test_a_corrupt_block_is_counted_and_never_used(
    steady: Steady,
    client: Client,
    undisturbed: Undisturbed,
    flags: tuple[object, ...],
    fault: str,
    num_corrupt: dict[str, int],
):
    prompt = make_prompt(fault + str(flags), SHORT)
    await steady.join(client, "P1", fault, *flags)
    before = await corrupt_blocks(client)
    async with other_stream(client, undisturbed):
        answer = await ask(client, prompt)
    assert (answer.text, attempts(answer)) == (await undisturbed(prompt, NUM_TOKENS), 1)
    after = await corrupt_blocks(client)
    assert {node: after[node] - before.get(node, 0) for node in after} == num_corrupt


async def corrupt_blocks(client: Client) -> dict[str, int]:
    """Known when the gauges of the same beat are: after a drain has been seen."""
    return {node: int(value) for (node, _), value in (await client.gauges("pdserve_corrupt_blocks")).items()}


# Longer than it takes until a decode node asks again.
@pytest.mark.parametrize(
    ("flags", "fault"),
    [pytest.param((), "slow=0.7@send:Have#3", marks=pytest.mark.slow), (SENT, "slow=0.7@send:Blocks#4")],
    ids=["mapped", "sent"],
)
async def test_a_link_that_becomes_slow_delays_its_own_request_and_changes_nothing(
    steady: Steady, client: Client, undisturbed: Undisturbed, flags: tuple[object, ...], fault: str
):
    prompt = make_prompt(fault, LONG)
    prefill = await steady.join(client, "P1", fault, *SMALL_STEPS, *flags)
    async with other_stream(client, undisturbed):
        answer = await ask(client, prompt)
    assert (answer.text, attempts(answer)) == (await undisturbed(prompt, NUM_TOKENS), 1)
    await asyncio.to_thread(prefill.wait_for, "fault: slow")
