"""Processes started one by one, in any order, and what a router says while nodes are missing or do not fit."""

import asyncio
from pathlib import Path

import pytest

from tests.checkpoints import make_llama_checkpoint
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import Connect


async def check_not_ready(client: Client, reason: str) -> None:
    ready = await client.get("/ready")
    assert (ready.status, ready.body) == (503, {"status": "not ready", "reason": reason})
    assert (await client.get("/health")).status == 200
    refused = await client.complete("hi", 4)
    assert (refused.status, refused.error["code"]) == (503, "no_node_ready")
    assert reason in refused.error["message"]
    assert int(refused.headers["Retry-After"]) >= 1


async def check_serves(client: Client) -> str:
    assert (await client.get("/ready")).body == {"status": "ready", "reason": "ready"}
    return (await client.complete("hi", 4, ignore_eos=True)).text


async def test_a_router_serves_while_both_roles_are_there_whoever_started_first(cluster: Cluster, connect: Connect):
    decode = cluster.node("decode")
    decode.wait_for("started in")
    router = cluster.router()
    client = connect(router)
    await asyncio.to_thread(router.wait_for, "D0 joined as decode")
    await check_not_ready(client, "no prefill node has joined")
    cluster.node("prefill")
    await asyncio.to_thread(router.wait_for, r"\bserving$")
    text = await check_serves(client)

    before = len(router.lines)
    assert await asyncio.to_thread(decode.stop) == 0
    await asyncio.to_thread(router.wait_for, "lost D0", since=before)
    await check_not_ready(client, "no decode node has joined")
    cluster.node("decode")
    await asyncio.to_thread(router.wait_for, r"\bserving$", since=before)
    assert await check_serves(client) == text


@pytest.mark.parametrize("field", ["checkpoint", "tokenizer", "compute", "kv_spec"])
async def test_a_node_that_differs_is_refused_by_name_and_ends(
    cluster: Cluster, connect: Connect, tmp_path: Path, small_model: Path, field: str
):
    router = cluster.router()
    prefill = cluster.node("prefill")
    router.wait_for("P0 joined as prefill")
    flags, model = {"compute": ("--dtype", "bfloat16"), "kv_spec": ("--block-size", 16)}.get(field, ()), small_model
    if field == "checkpoint":
        model = make_llama_checkpoint(tmp_path / "other", seed=1, max_position_embeddings=4096, num_hidden_layers=2)
    elif field == "tokenizer":
        model = copy_with_other_tokenizer(small_model, tmp_path / "other")
    decode = cluster.node("decode", *flags, model=model)
    assert await asyncio.to_thread(decode.wait) == 2
    decode.wait_for(f"^pdserve decode: handshake refused, field '{field}': ")
    router.wait_for(f"D0 is refused: {field}: ")
    # Nobody else was disturbed by it.
    await check_not_ready(connect(router), "no decode node has joined")
    assert prefill.lines


def copy_with_other_tokenizer(model: Path, path: Path) -> Path:
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tokenizer = path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|unk|>", "<|???|>"))
    return path
