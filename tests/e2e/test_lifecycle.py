"""Processes that come and go: killed and started again, frozen for a while. Streams end with the right text.

SIGTERM is in test_drain.py, kill -9 under a supervisor in test_kill.py.
"""

import asyncio
import os
import signal
import time

from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, go_on, until_ended_by, until_stopped
from tests.e2e.conftest import Connect
from tests.e2e.servers import Server, free_address

# Promised are 2 s from the moment at which a node is ready; the rest is for a machine that does other things, too.
WITHIN_S = 5.0
LEASE_S = 1.0
BEATS = ("--heartbeat-s", 0.1)
GAUGES_S = 1.0
NUM_TOKENS = 600
ENABLED = ("--enable-faults", "on", "--fault")
SMALL_STEPS = ("--max-step-tokens", 64)
PROMPT = "".join(chr(97 + (7 * i + i * i // 5) % 26) for i in range(300))


async def undisturbed(connect: Connect, small_up: Server, prompt: str, num_tokens: int = NUM_TOKENS) -> str:
    """What a cluster to which nothing happens answers."""
    return (await connect(small_up).complete(prompt, num_tokens, ignore_eos=True)).text


async def is_drained(client: Client, within_s: float) -> None:
    await client.until_blocks(lambda blocks: len(blocks) > 1 and not any(blocks.values()), within_s)


async def kill(server: Server) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await until_ended_by(signal.SIGKILL, server)


async def test_a_node_killed_and_started_again_at_its_address_serves_within_seconds(
    cluster: Cluster, connect: Connect, small_up: Server
):
    text = await undisturbed(connect, small_up, PROMPT)
    listen = {role: ("--listen", free_address()) for role in ("prefill", "decode")}
    router = cluster.router(*BEATS, "--cooperative-prefill", "off")
    nodes = {role: cluster.node(role, *listen[role]) for role in listen}
    router.wait_for(r"\bserving$")
    client = connect(router)
    for role in listen:
        async with client.stream(PROMPT, NUM_TOKENS, ignore_eos=True) as stream:
            await stream.read(num_events=3)
            await kill(nodes[role])
            nodes[role] = cluster.node(role, *listen[role])
            await asyncio.to_thread(nodes[role].wait_for, "started in")
            ready_at = time.monotonic()
            await client.until_linked("D0", "P0")
            again = await client.complete("Back?" + role, 4, ignore_eos=True)
            assert time.monotonic() - ready_at < WITHIN_S
            await stream.read()
        assert stream.text == text
        assert again.body["metrics"]["nodes"] == {"prefill": "P0", "decode": "D0"}
    await is_drained(client, GAUGES_S)


async def test_what_a_replaced_node_still_says_is_not_listened_to(cluster: Cluster, connect: Connect, small_up: Server):
    text = await undisturbed(connect, small_up, PROMPT)
    router = cluster.router(*BEATS, "--cooperative-prefill", "off")
    client = connect(router)
    replaced = cluster.node("prefill", *SMALL_STEPS, *ENABLED, "freeze@stepped#3")
    cluster.node("decode")
    await client.until_linked("D0", "P0")
    async with client.stream(PROMPT, NUM_TOKENS, ignore_eos=True) as stream:
        await until_stopped(replaced)
        before = len(router.lines)
        cluster.node("prefill")
        await asyncio.to_thread(router.wait_for, "P0 joined as", since=before)
        await client.until_linked("D0", "P0")
        # It computes on, announces blocks and a token, and would like to be let in again.
        go_on(replaced)
        await asyncio.to_thread(replaced.wait_for, "lost the connection to the router|saying hello again")
        again = await client.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
        await stream.read()
    assert [stream.text, again.text] == [text, text]
    assert (again.body["metrics"]["attempts"], again.body["metrics"]["nodes"]["decode"]) == (1, "D0")
    assert len([line for line in router.lines[before:] if "P0 joined as" in line]) == 1


async def test_what_a_dead_router_had_asked_for_is_free_within_one_lease(
    cluster: Cluster, connect: Connect, small_up: Server
):
    text = await undisturbed(connect, small_up, PROMPT)
    times = (*BEATS, "--lease-s", LEASE_S)
    router = cluster.router(*times)
    cluster.node("prefill", *SMALL_STEPS)
    # It never comes to release what it pulls.
    decode = cluster.node("decode", *ENABLED, "freeze@copy")
    router.wait_for(r"\bserving$")
    client = connect(router)
    async with client.stream(PROMPT, NUM_TOKENS, ignore_eos=True) as stream:
        await stream.read(num_events=1)
        await until_stopped(decode)
        await client.until_blocks(lambda blocks: blocks.get("P0", 0) > 0, GAUGES_S)
        await kill(router)
    router = cluster.router(*times)
    await asyncio.to_thread(router.wait_for, "P0 joined as prefill")
    client = connect(router)
    await client.until_blocks(lambda blocks: blocks.get("P0") == 0, LEASE_S + GAUGES_S)
    go_on(decode)
    await asyncio.to_thread(router.wait_for, r"\bserving$")
    await is_drained(client, LEASE_S + GAUGES_S)
    again = await client.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    assert (again.text, again.body["metrics"]["attempts"]) == (text, 1)


async def test_nodes_frozen_for_less_than_the_router_waits_lose_nothing(
    cluster: Cluster, connect: Connect, small_up: Server
):
    text = await undisturbed(connect, small_up, PROMPT)
    router = cluster.router(*BEATS, "--cooperative-prefill", "off")
    prefill = cluster.node("prefill", *SMALL_STEPS, *ENABLED, "freeze=2@stepped#3")
    decode = cluster.node("decode", *ENABLED, "freeze=2@stepped#20")
    router.wait_for(r"\bserving$")
    client = connect(router)
    answer = await client.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    assert (answer.text, answer.body["metrics"]["attempts"]) == (text, 1)
    for node in (prefill, decode):
        node.wait_for("fault: freeze")
    await is_drained(client, GAUGES_S)


async def test_streams_of_nodes_that_stay_frozen_go_on_elsewhere_and_they_come_back(
    cluster: Cluster, connect: Connect, small_up: Server
):
    text = await undisturbed(connect, small_up, PROMPT)
    router = cluster.router(*BEATS, "--lease-s", LEASE_S, "--node-lost-s", 0.5)
    client = connect(router)
    frozen = [
        cluster.node("prefill", *SMALL_STEPS, *ENABLED, "freeze@stepped#3"),
        cluster.node("decode", *ENABLED, "freeze@stepped#20"),
    ]
    await client.until_linked("D0", "P0")
    async with client.stream(PROMPT, NUM_TOKENS, ignore_eos=True) as stream:
        # In the middle of the prompt, which the decode node then computes, and in the middle of the output.
        for node in frozen:
            await until_stopped(node)
        cluster.node("prefill", name="P1")
        cluster.node("decode", name="D1")
        await stream.read()
    assert (stream.text, stream.closing["metrics"]["attempts"]) == (text, 3)
    assert stream.closing["metrics"]["nodes"]["decode"] == "D1"
    before = len(router.lines)
    for node in frozen:
        go_on(node)
    for name in ("P0", "D0"):
        await asyncio.to_thread(router.wait_for, f"{name} joined as", since=before)
    await is_drained(client, LEASE_S + GAUGES_S)
