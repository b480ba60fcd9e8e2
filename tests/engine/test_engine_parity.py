"""Greedy tokens and logits equal transformers' in fp32, whatever the chunks, tables and neighbours."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine.batch import build_batch
from pdserve.engine.step import Row, SampleSpec, StepPlan
from tests.checkpoints import VOCAB_SIZE, make_llama_checkpoint
from tests.engine.steps import BLOCK_SIZE, generate, make_engine, make_row, table, tokens_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS = {
    "grouped": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "wide_heads": {"head_dim": 24, "num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 4, "num_hidden_layers": 1},
    "sharded": {"max_shard_size": "40KB"},
}


def make_prompt(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCAB_SIZE) for _ in range(length)]


def reference_model(model_dir: Path, dtype: torch.dtype = torch.float32):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


def reference_tokens(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by one forward a token, without any cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logits_of(engine, row: Row) -> torch.Tensor:
    """The row's logits, [vocab_size], before sampling."""
    batch = build_batch([row], engine._pool.spec, torch.device("cpu"), 4)
    with torch.inference_mode():
        return engine.model.forward(batch, engine._layer_kvs).logits[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("grouped") / "model")


@pytest.fixture(scope="module")
def model(model_dir):
    return reference_model(model_dir)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers_for_every_kind_of_config(tmp_path, name):
    model_dir = make_llama_checkpoint(tmp_path / "model", **CONFIGS[name])
    prompt = make_prompt(41)
    assert generate(make_engine(model_dir), prompt, 12) == reference_tokens(reference_model(model_dir), prompt, 12)


@pytest.mark.parametrize("chunk", [16, 64, None])
@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 150])
def test_tokens_do_not_depend_on_chunks_or_block_edges(model_dir, model, length, chunk):
    prompt = make_prompt(length)
    assert generate(make_engine(model_dir), prompt, 4, chunk=chunk) == reference_tokens(model, prompt, 4)


@pytest.mark.parametrize("start", [0, 16, 23])
def test_logits_equal_transformers_with_and_without_a_cached_prefix(model_dir, model, start):
    engine, prompt = make_engine(model_dir), make_prompt(150)
    if start:
        engine.step(StepPlan(0, (make_row(prompt[:start], params=None),)))
    logits = logits_of(engine, make_row(prompt[start:], start))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_log_probabilities_of_drawn_tokens_are_the_models_own(model_dir, model):
    engine, prompt, blocks = make_engine(model_dir), make_prompt(30), table(0, 12)
    params = SamplingParams(temperature=0.7, top_k=5, seed=4, presence_penalty=1.0, logprobs=3)
    tokens = list(prompt)
    for start in (0, 30, 31, 32):
        spec = SampleSpec(params, len(tokens) - 30, history=tuple(tokens), num_prompt=30)
        row = Row(0, tuple(tokens[start:]), start, blocks, samples=(spec,))
        (draw,) = engine.step(StepPlan(0, (row,))).draws[0]
        with torch.inference_mode():
            exact = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        ((own, *top),) = draw.logprobs
        assert (own.token, own.logprob) == (draw.token, pytest.approx(float(exact[draw.token]), abs=1e-4))
        assert [entry.token for entry in top] == exact.topk(3).indices.tolist()
        tokens.append(draw.token)


def test_llama3_rope_frequencies_equal_transformers(tmp_path):
    model_dir = make_llama_checkpoint(tmp_path / "model", rope_parameters=LLAMA3_ROPE, head_dim=32)
    expected = reference_model(model_dir).model.rotary_emb.inv_freq
    torch.testing.assert_close(make_engine(model_dir).model.rope.inv_freq, expected, rtol=1e-6, atol=0.0)


def test_a_block_table_in_any_order_gives_the_same_tokens(model_dir, model):
    prompt = make_prompt(60)
    blocks = table(0, 12)
    shuffled = tuple(random.Random(3).sample(blocks, len(blocks)))
    expected = reference_tokens(model, prompt, 6)
    assert generate(make_engine(model_dir), prompt, 6, blocks=shuffled) == expected


def test_a_step_of_prefill_chunks_and_ragged_decodes_gives_each_row_its_own_tokens(model_dir, model):
    engine = make_engine(model_dir, num_blocks=80)
    prompts = [make_prompt(length, seed=length) for length in (3, 16, 33, 200, 47, 21)]
    tables = [table(13 * index, 13) for index in range(6)]
    last = {}
    for key, prompt in enumerate(prompts[:4]):
        row = make_row(prompt, key=key, blocks=tables[key])
        last[key] = tokens_of(engine.step(StepPlan(0, (row,))))[key]
    engine.step(StepPlan(0, (make_row(prompts[5][:9], key=5, blocks=tables[5], params=None),)))
    rows = [make_row([last[key]], len(prompts[key]), key=key, blocks=tables[key], output_index=1) for key in range(4)]
    rows.insert(1, make_row(prompts[4], key=4, blocks=tables[4]))
    rows.insert(3, make_row(prompts[5][9:], 9, key=5, blocks=tables[5]))
    mixed = tokens_of(engine.step(StepPlan(1, tuple(rows))))
    expected = {key: reference_tokens(model, prompts[key], 2)[1] for key in range(4)}
    expected |= {key: reference_tokens(model, prompts[key], 1)[0] for key in (4, 5)}
    assert mixed == expected


def test_a_row_without_a_sample_writes_kv_and_draws_nothing(model_dir):
    engine = make_engine(model_dir)
    result = engine.step(StepPlan(0, (make_row(make_prompt(20), params=None),)))
    assert result.draws == {}
    assert not engine._pool.data[table(0, 12)[0]].isnan().any()


def test_positions_below_write_from_are_not_written_and_still_attended_to(model_dir, model):
    engine, prompt = make_engine(model_dir), make_prompt(40)
    expected = generate(engine, prompt, 1)
    data = engine._pool.data
    before = data[:, :, :, :, :].clone()
    row = make_row(prompt[20:], 20, write_from=32)
    data[table(0, 12)[2], :, :, :, :8] = float("nan")  # positions 32 to 39, which the row does write
    assert list(tokens_of(engine.step(StepPlan(0, (row,)))).values()) == expected == reference_tokens(model, prompt, 1)
    untouched = [block for block in range(len(data)) if block != table(0, 12)[2]]
    assert torch.equal(data[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_a_decode_row_whose_position_is_below_write_from_leaves_the_pool_as_it_was(model_dir, model):
    engine, prompt = make_engine(model_dir), make_prompt(32)
    expected = generate(engine, prompt, 1)
    before = engine._pool.data.clone()
    tokens = tokens_of(engine.step(StepPlan(0, (make_row(prompt[31:], 31, write_from=32),))))
    assert list(tokens.values()) == expected
    assert torch.equal(engine._pool.data.nan_to_num(7.0), before.nan_to_num(7.0))


def test_nothing_outside_the_named_blocks_is_written(model_dir):
    engine = make_engine(model_dir)
    generate(engine, make_prompt(100), 5, chunk=33, blocks=table(10, 8))
    others = [block for block in range(len(engine._pool.data)) if not 10 <= block < 18]
    assert engine._pool.data[others].isnan().all()


@pytest.mark.parametrize("saved", ["float16", "bfloat16"])
def test_a_16_bit_checkpoint_served_in_float32_equals_transformers_in_float32(tmp_path, saved):
    model_dir = make_llama_checkpoint(tmp_path / "model", dtype=saved)
    prompt = make_prompt(37)
    assert generate(make_engine(model_dir), prompt, 8) == reference_tokens(reference_model(model_dir), prompt, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_are_as_close_to_float32_as_transformers_own(tmp_path, dtype):
    model_dir = make_llama_checkpoint(tmp_path / "model", dtype=dtype, initializer_range=0.1)
    prompt = make_prompt(100)
    logits = logits_of(make_engine(model_dir, dtype), make_row(prompt))
    with torch.inference_mode():
        exact = reference_model(model_dir)(torch.tensor([prompt])).logits[0, -1]
        theirs = reference_model(model_dir, getattr(torch, dtype))(torch.tensor([prompt])).logits[0, -1].float()
    assert (logits - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-3 * exact.norm()


def test_a_sequence_draws_the_same_tokens_alone_and_in_a_batch(model_dir):
    params = SamplingParams(max_tokens=8, temperature=0.8, top_k=40, top_p=0.9, seed=77)
    engine, prompt = make_engine(model_dir), make_prompt(30)
    alone = tokens_of(engine.step(StepPlan(0, (make_row(prompt, params=params),))))[0]
    others = [make_row(make_prompt(25, seed=9), key=9, blocks=table(20, 4), params=replace(params, seed=5))]
    together = tokens_of(engine.step(StepPlan(0, (*others, make_row(prompt, params=params)))))
    assert together[0] == alone


def test_prompts_of_one_token_and_full_blocks_only_work(model_dir, model):
    for length in (1, 2, BLOCK_SIZE):
        prompt = make_prompt(length, seed=40 + length)
        assert generate(make_engine(model_dir), prompt, 3) == reference_tokens(model, prompt, 3)
