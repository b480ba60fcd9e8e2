"""Identity of a checkpoint: which files it is made of, and digests that two nodes compare.

A digest is made from safetensors headers, file sizes and a few bytes of every tensor, so it takes
milliseconds whatever the model's size. Used by nodes (fingerprint, weight loading) and by the
router (tokenizer). Trusts nothing in the folder: lengths, offsets and names are checked.
"""

import hashlib
import json
import os
import struct
from dataclasses import astuple
from pathlib import Path
from typing import Any

from pdserve.core.errors import ModelError
from pdserve.core.kv_spec import KVSpec
from pdserve.core.model_config import ModelConfig, read_json_object

# The limit of the safetensors format itself.
MAX_HEADER_BYTES = 100_000_000

SAMPLE_BYTES = 256


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted: model.safetensors, or the shards its index names.

    Raises ModelError when there is none, a shard is missing, or the index points outside the folder.
    """
    single = model_dir / "model.safetensors"
    index = model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"{model_dir} holds neither model.safetensors nor model.safetensors.index.json; "
            "only safetensors checkpoints are supported"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    names = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise ModelError(f"{index}: {tensor!r:.80} is in {name!r:.80}, must be a .safetensors file of this folder")
        names.add(name)
    paths = [model_dir / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{index} names {path.name}, which is missing")
    return paths


def checkpoint_digest(model_dir: Path) -> str:
    """Hex digest over all headers, sizes and byte samples; differs when any tensor plausibly does."""
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(model_dir):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = _read_header(path, file.read(8), size, file)
                digest.update(struct.pack("<QQ", size, len(header)) + header)
                for start, end in sorted(_tensor_spans(path, header, size)):
                    length = min(SAMPLE_BYTES, end - start)
                    digest.update(os.pread(file.fileno(), length, (start + end - length) // 2))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def tokenizer_digest(model_dir: Path) -> str:
    """Hex digest of tokenizer.json, the file that maps text to token ids. Raises ModelError when it is missing."""
    path = model_dir / "tokenizer.json"
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; a tokenizer.json is needed") from error


def kv_fingerprint(checkpoint: str, config: ModelConfig, spec: KVSpec) -> bytes:
    """32 bytes naming what KV means: the weights, the facts of config.json that shape KV, and the block layout.

    checkpoint  checkpoint_digest of the model folder
    """
    facts = (
        checkpoint,
        config.architecture,
        config.num_heads,
        config.rms_norm_eps,
        config.rope_theta,
        astuple(config.rope_scaling) if config.rope_scaling is not None else None,
        config.hidden_act,
        spec.digest(),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=32).digest()


def _read_header(path: Path, prefix: bytes, size: int, file: Any) -> bytes:
    if len(prefix) < 8:
        raise ModelError(f"{path} has {size} bytes, too few for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(
            f"{path}: header length {length} is beyond the file's {size} bytes or the format's {MAX_HEADER_BYTES}"
        )
    header: bytes = file.read(length)
    return header


def _tensor_spans(path: Path, header: bytes, size: int) -> list[tuple[int, int]]:
    """File offsets (start, end) of every tensor. Raises ModelError when one lies outside the file."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: header is not a JSON object")
    base, spans = 8 + len(header), []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(offset) is int for offset in offsets)
            or not 0 <= offsets[0] <= offsets[1] <= size - base
        ):
            raise ModelError(f"{path}: {name!r:.80} has data_offsets {offsets!r:.80}, outside the file's {size} bytes")
        spans.append((base + offsets[0], base + offsets[1]))
    return spans
