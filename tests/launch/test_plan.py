"""What `pdserve plan` says of a model's KV cache is what a node makes of it."""

from pathlib import Path

import pytest

from pdserve.core.kv_spec import KVSpec
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.launch.cli import main
from tests.checkpoints import make_llama_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_checkpoint(
        tmp_path_factory.mktemp("plan") / "tiny",
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        max_position_embeddings=1000,
    )


def test_the_formula_is_spelled_out_and_the_counts_are_those_of_a_pool(model: Path, capsys):
    assert main(["plan", "--model", str(model), "--kv-memory", "8MiB", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert "2 (K and V) x 3 layers x 2 KV heads x 16 dimensions x 2 bytes (bfloat16) = 384 bytes" in shown
    assert "32 tokens = 12288 bytes, 12288 in whole pages of 4096" in shown
    assert f"{8 * MIB} bytes = 682 blocks = 21824 tokens" in shown
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["512", "tokens", "42.6"],
        ["1000", "tokens", "21.3"],
    ]


@pytest.mark.parametrize("num_bytes", [MIB, 3 * MIB + 4096, 100 * MIB])
@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_a_pool_of_so_many_blocks_fits_and_one_more_does_not(num_bytes: int, block_size: int):
    spec = KVSpec(2, 2, 24, "float32", block_size)
    num_blocks = spec.num_blocks_within(num_bytes)
    assert buffer_bytes(spec, num_blocks) <= num_bytes
    # The header is rounded up to whole pages, so that at most one block is given away.
    assert buffer_bytes(spec, num_blocks + 2) > num_bytes
    assert KVPool(spec, num_blocks, bytearray(num_bytes)).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-memory", "1GB"), "--kv-memory 1GB is ambiguous: write 1GiB"),
        (("--kv-memory", "1K"), "--kv-memory 1024 bytes holds 0 KV blocks"),
        (("--kv-memory", "1MiB", "--dtype", "int3"), "--dtype int3: must be float32, bfloat16, float16"),
        (("--kv-memory", "1MiB", "--block-size", "12"), "--block-size 12: must be a multiple of 8 from 8 to 256"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(model: Path, capsys, flags: tuple[str, ...], message: str):
    assert main(["plan", "--model", str(model), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys):
    assert main(["plan", "--model", str(tmp_path), "--kv-memory", "1MiB"]) == 2
    assert "config.json" in capsys.readouterr().err
