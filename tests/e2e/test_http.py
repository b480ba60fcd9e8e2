"""OpenAI's surface as a client of real processes sees it, on a tiny random model."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import PATIENCE_S
from tests.e2e.conftest import SMALL_CONTEXT, SMALL_KV_BLOCKS, Connect
from tests.e2e.servers import Server

STAGES = (
    "queue_s",
    "prefill_queue_s",
    "prefill_s",
    "exposed_transfer_s",
    "wait_for_blocks_s",
    "copy_s",
    "verify_s",
    "ttft_s",
    "time_to_second_token_s",
    "tpot_s",
)
HISTOGRAMS = (
    "ttft",
    "time_to_second_token",
    "tpot",
    "queue",
    "prefill_queue",
    "exposed_transfer",
    "decode_queue",
)
BLOCK_STATES = {"free", "cached", "held", "leased"}
NODES = {("P0", "prefill"), ("D0", "decode")}
POOL_TOKENS = SMALL_KV_BLOCKS * 32
MAX_RUNNING = 64


@pytest.fixture
async def client(small_up: Server, connect: Connect):
    return connect(small_up)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}], ids=["greedy", "sampled"])
async def test_a_stream_and_a_whole_answer_are_the_same(client, sampling):
    whole = await client.complete("Once upon a time", 40, ignore_eos=True, **sampling)
    stream = await client.read_stream("Once upon a time", 40, ignore_eos=True, **sampling)
    assert stream.text == whole.text
    assert stream.finish == whole.body["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": 16, "completion_tokens": 40, "total_tokens": 56}
    assert stream.closing["usage"] == whole.body["usage"] == usage


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_the_usage_counts_exactly_the_tokens_asked_for(client, num_tokens):
    """The first token is drawn on one node and the others on another: none is counted twice or not at all."""
    whole = await client.complete("Once upon a time", num_tokens, ignore_eos=True)
    stream = await client.read_stream("Once upon a time", num_tokens, ignore_eos=True)
    for usage, finish in (
        (whole.body["usage"], whole.body["choices"][0]["finish_reason"]),
        (stream.closing["usage"], stream.finish),
    ):
        assert (usage["completion_tokens"], finish) == (num_tokens, "length")
    metrics = whole.body["metrics"]
    assert metrics["plan"] == ("prefill-only" if num_tokens == 1 else "split")
    assert metrics["nodes"]["decode"] == (None if num_tokens == 1 else "D0")


async def test_a_chat_is_answered_from_the_template(client):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = await client.post("/v1/chat/completions", **body)
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    completion = await client.complete([*client_ids(rendered)], 12)
    assert answer.status == 200
    assert answer.body["choices"][0]["message"] == {"role": "assistant", "content": completion.text}
    assert answer.body["usage"] == completion.body["usage"]


def client_ids(rendered: str) -> list[int]:
    """Token ids of the byte tokenizer of tests/checkpoints.py."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_as_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = []
    for part in rendered.replace("<|im_start|>", "\0\1\0").replace("<|im_end|>", "\0\2\0").split("\0"):
        if part in ("\1", "\2"):
            ids.append(ord(part))
        elif part:
            ids += [4 + alphabet.index(c) for c in bytes_as_text.pre_tokenize_str(part)[0][0]]
    return ids


async def test_the_usage_comes_with_the_duration_of_every_stage(client):
    prompt = list(range(10, 250))
    for closing in (
        (await client.complete(prompt, 8, ignore_eos=True)).body,
        (await client.read_stream(prompt, 8, ignore_eos=True)).closing,
    ):
        metrics = closing["metrics"]
        assert metrics["plan"] == "split"
        assert metrics["nodes"] == {"prefill": "P0", "decode": "D0"}
        assert metrics["attempts"] == 1
        assert metrics["bytes_moved"] > 0
        assert all(metrics[stage] >= 0 for stage in STAGES)
        assert metrics["queue_s"] <= metrics["ttft_s"] < metrics["time_to_second_token_s"]
        assert [tokens for tokens, _, _ in metrics["chunks"]] == [240 - metrics["cached_tokens"]]
        between_s = metrics["time_to_second_token_s"] - metrics["ttft_s"]
        for token, total_s in (("first_token", metrics["ttft_s"]), ("second_token", between_s)):
            stages = {
                name: seconds for name, seconds in metrics[token].items() if name not in ("delivery_s", "excess_s")
            }
            assert sum(stages.values()) == pytest.approx(total_s, abs=1e-4)
        # The router gave the prompt away before the node had it, and has lost no time that it could claim.
        assert metrics["first_token"]["excess_s"] <= 1e-4
        assert metrics["second_token"]["excess_s"] <= 0.05


async def test_a_request_id_is_echoed_or_made(client):
    headers = {"X-Request-Id": "order-17"}
    answer = await client.post("/v1/completions", headers, prompt="hi", max_tokens=1)
    assert answer.headers["X-Request-Id"] == "order-17"
    assert len((await client.complete("hi", 1)).headers["X-Request-Id"]) == 32
    refused = await client.post("/v1/completions", headers, prompt=3)
    assert (refused.status, refused.headers["X-Request-Id"]) == (400, "order-17")


async def test_the_model_is_listed_with_its_context(client):
    models = (await client.get("/v1/models")).body["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("small", SMALL_CONTEXT)]


async def test_metrics_name_every_node_and_every_stage(client):
    await client.complete(list(range(10, 80)), 4, ignore_eos=True)
    await client.until_blocks(lambda blocks: len(blocks) == 2, PATIENCE_S)
    families = {f.name: f for f in text_string_to_metric_families((await client.get("/metrics")).body)}
    blocks = families["pdserve_kv_blocks"].samples
    found = {(s.labels["node"], s.labels["role"], s.labels["state"]) for s in blocks}
    assert found == {(*node, state) for node in NODES for state in BLOCK_STATES}
    assert sum(sample.value for sample in blocks) == 2 * SMALL_KV_BLOCKS
    for name in ("running", "waiting", "leases"):
        samples = families[f"pdserve_{name}"].samples
        assert {(s.labels["node"], s.labels["role"]) for s in samples} == NODES
    for name in HISTOGRAMS:
        counts = [s.value for s in families[f"pdserve_{name}_seconds"].samples if s.name.endswith("_count")]
        assert counts[0] >= 1, name


async def test_what_the_pool_cannot_hold_is_refused_with_both_numbers(client):
    prompt = [10] * (POOL_TOKENS + 1)
    refused = await client.complete(prompt, 1)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert str(POOL_TOKENS + 1) in refused.error["message"]
    assert str(POOL_TOKENS) in refused.error["message"].replace(str(POOL_TOKENS + 1), "")
    refused = await client.complete(prompt[:1500], 1500)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "2999" in refused.error["message"]
    assert str(POOL_TOKENS) in refused.error["message"]


async def test_a_chat_without_max_tokens_may_use_what_the_pool_holds(client):
    answer = await client.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Go on"}], temperature=0, ignore_eos=True
    )
    assert answer.status == 200, answer.body
    assert answer.body["usage"]["total_tokens"] == POOL_TOKENS + 1


async def test_more_samples_than_a_node_runs_at_once_are_refused_with_both_numbers(client):
    refused = await client.complete("hi", 4, n=MAX_RUNNING + 1)
    assert (refused.status, refused.error["code"]) == (400, "invalid_value")
    assert f"{MAX_RUNNING + 1} samples" in refused.error["message"]
    assert f"the {MAX_RUNNING} sequences" in refused.error["message"]


async def test_samples_that_could_never_begin_side_by_side_are_refused_with_both_numbers(client):
    refused = await client.complete([10] * (POOL_TOKENS - 40), 1, n=4)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert f"need {SMALL_KV_BLOCKS + 3} KV blocks" in refused.error["message"]
    assert f"has {SMALL_KV_BLOCKS}" in refused.error["message"]
