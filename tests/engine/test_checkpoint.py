"""Digests differ when the content does, and a hostile folder is a ModelError."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.core.checkpoint import checkpoint_digest, kv_fingerprint, tokenizer_digest, weight_files
from pdserve.core.errors import ModelError
from pdserve.core.kv_spec import KVSpec
from pdserve.core.model_config import RopeScaling, load_model_config
from tests.checkpoints import make_llama_checkpoint

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def write_header(path: Path, header: bytes, length: int | None = None, data: bytes = b"") -> Path:
    path.mkdir(exist_ok=True)
    prefix = struct.pack("<Q", len(header) if length is None else length)
    (path / "model.safetensors").write_bytes(prefix + header + data)
    return path


def write_index(path: Path, weight_map: object) -> Path:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_the_same_checkpoint_written_twice_has_the_same_digest(model_dir, tmp_path):
    copy = make_llama_checkpoint(tmp_path / "copy")
    assert checkpoint_digest(copy) == checkpoint_digest(model_dir)
    assert tokenizer_digest(copy) == tokenizer_digest(model_dir)


def test_other_weights_of_the_same_shape_have_another_digest(model_dir, tmp_path):
    assert checkpoint_digest(make_llama_checkpoint(tmp_path / "other", seed=1)) != checkpoint_digest(model_dir)


def test_one_changed_tensor_changes_the_digest(model_dir, tmp_path):
    tensors = load_file(model_dir / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    before = checkpoint_digest(tmp_path)
    tensors["model.layers.2.mlp.down_proj.weight"] += 0.01
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint_digest(tmp_path) != before


def test_a_sharded_checkpoint_has_a_digest(tmp_path):
    sharded = make_llama_checkpoint(tmp_path / "sharded", max_shard_size="40KB")
    assert len(weight_files(sharded)) > 2
    assert len(checkpoint_digest(sharded)) == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "too few"),
        (b"\x01\x02", "too few"),
        (struct.pack("<Q", 2**63) + b"{}", "header length 9223372036854775808"),
        (struct.pack("<Q", 3) + b"{}", "header length 3"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{,", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not valid JSON"),
    ],
)
def test_a_broken_header_is_a_model_error(tmp_path, content, complaint):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        checkpoint_digest(tmp_path)


@pytest.mark.parametrize("offsets", [[0, 9], [-1, 4], [4, 2], [0], "ab", None, [0, 1.5], [False, True]])
def test_offsets_outside_the_file_are_a_model_error(tmp_path, offsets):
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    with pytest.raises(ModelError, match="data_offsets"):
        checkpoint_digest(write_header(tmp_path, header, data=bytes(8)))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "..", "a\\b.safetensors", "x.bin", "", 7, None, "a\0.safetensors"],
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, name):
    with pytest.raises(ModelError, match=r"must be a \.safetensors file of this folder"):
        weight_files(write_index(tmp_path, {"x": name}))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_is_a_model_error(tmp_path, weight_map):
    with pytest.raises(ModelError, match="weight_map"):
        weight_files(write_index(tmp_path, weight_map))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"names lost\.safetensors, which is missing"):
        weight_files(write_index(tmp_path, {"x": "lost.safetensors"}))


def test_a_folder_without_safetensors_says_what_is_needed(tmp_path):
    with pytest.raises(ModelError, match="only safetensors"):
        weight_files(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_digest(tmp_path)


def test_the_fingerprint_covers_weights_rope_and_layout(model_dir):
    config = load_model_config(model_dir)
    fingerprints = {
        kv_fingerprint("a", config, SPEC),
        kv_fingerprint("b", config, SPEC),
        kv_fingerprint("a", replace(config, rope_theta=5.0), SPEC),
        kv_fingerprint("a", replace(config, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)), SPEC),
        kv_fingerprint("a", config, replace(SPEC, dtype="bfloat16")),
        kv_fingerprint("a", config, replace(SPEC, block_size=16)),
    }
    assert len(fingerprints) == 6
    assert all(len(fingerprint) == 32 for fingerprint in fingerprints)
    assert kv_fingerprint("a", config, SPEC) in fingerprints
