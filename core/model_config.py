"""What a checkpoint says about itself: the architecture facts and the generation defaults.

Reads config.json and generation_config.json of a local Hugging Face folder, in the old spelling
(rope_theta, rope_scaling, torch_dtype) and in that of transformers 5 (rope_parameters, dtype). What
cannot be served is refused here, by name, before any weight is read. Used by every role; needs
neither torch nor transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import ModelError
from pdserve.core.kv_spec import DTYPE_BYTES

ARCHITECTURE = "LlamaForCausalLM"

MAX_JSON_BYTES = 64 << 20
MAX_DIMENSION = 1 << 24


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The "llama3" scaling: long wavelengths are stretched by `factor`, short ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of a Llama checkpoint.

    dtype     the checkpoint's own: float32, bfloat16 or float16 (float32 where config.json is silent)
    eos_ids   generation_config.json's list where it has one, else config.json's; only ids below vocab_size
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling where a request is silent.

    generation_config.json's temperature, top_k, top_p and repetition_penalty apply where it names them, else the
    API's own defaults (temperature 1, the others off). An explicit `do_sample: false` means greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    eos_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json of a model folder. Raises ModelError naming what is missing, wrong or unsupported."""
    fields = _Fields(model_dir / "config.json")
    architecture = _architecture(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    vocab_size = fields.integer("vocab_size")
    rope = _rope_parameters(fields)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0, low=1.0), low=1.0),
        rope_scaling=_rope_scaling(rope, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        hidden_act=fields.one_of("hidden_act", ("silu",), "silu"),
        dtype=_dtype(fields),
        eos_ids=_eos_ids(fields, model_dir, vocab_size),
        bos_id=fields.token_id("bos_token_id"),
    )
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    if config.head_dim % 2:
        raise fields.error("head_dim", config.head_dim, "even, because RoPE rotates pairs")
    return config


def load_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Read generation_config.json of a model folder; a missing file means the API's own defaults."""
    eos_ids = load_model_config(model_dir).eos_ids
    fields = _generation_fields(model_dir)
    if fields is None:
        return GenerationDefaults(eos_ids=eos_ids)
    greedy = not fields.boolean("do_sample", True)
    return GenerationDefaults(
        temperature=0.0 if greedy else fields.number("temperature", 1.0, low=0.0),
        top_k=fields.integer("top_k", 0, low=0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        eos_ids=eos_ids,
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=0.01, high=10.0),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises ModelError when it is missing, huge or no object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size} bytes, more than the limit of {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, an object is needed")
    return value


class _Fields:
    """Typed access to one JSON object; every complaint names the file, the key, the value and what is needed.

    A key that is null counts as absent, as in transformers.
    """

    def __init__(self, path: Path, values: dict[str, Any] | None = None):
        self.path = path
        self.values = read_json_object(path) if values is None else values

    def error(self, key: str, value: Any, needed: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {value!r:.80}, must be {needed}")

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {key} is missing")
        return default

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= MAX_DIMENSION:
            raise self.error(key, value, f"an integer from {low} to {MAX_DIMENSION}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e30) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false
            raise self.error(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def one_of(self, key: str, supported: tuple[str, ...], default: str) -> str:
        value: str = self.get(key, default)
        if value not in supported:
            raise self.error(key, value, "one of the supported values: " + ", ".join(supported))
        return value

    def token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        # Some checkpoints write -1 for "none": an id that is never drawn is harmless.
        if not all(type(item) is int and item >= -1 for item in ids):
            raise self.error(key, value, "a token id or a list of token ids")
        return tuple(dict.fromkeys(item for item in ids if item >= 0))


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if names is None and fields.values.get("model_type") == "llama":
        names = [ARCHITECTURE]
    if names != [ARCHITECTURE]:
        named = names if names is not None else fields.values.get("model_type")
        raise fields.error("architectures", named, f"[{ARCHITECTURE!r}], the only architecture that is supported")
    if fields.values.get("quantization_config") is not None:
        raise ModelError(f"{fields.path}: quantization_config is set; quantized checkpoints are not supported")
    return ARCHITECTURE


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.get(key, "float32")
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise fields.error(key, value, "one of " + ", ".join(DTYPE_BYTES))
    return name


def _rope_parameters(fields: _Fields) -> _Fields:
    """Both spellings merged into one object whose rope_type is "default" or "llama3"."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.get(key, {})
        if not isinstance(value, dict):
            raise fields.error(key, value, "an object")
        merged |= value
    merged.setdefault("rope_type", merged.get("type"))
    rope = _Fields(fields.path, merged)
    rope.one_of("rope_type", ("default", "llama3"), "default")
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise rope.error("partial_rotary_factor", partial, "1, a partial RoPE is not supported")
    return rope


def _rope_scaling(rope: _Fields, max_positions: int) -> RopeScaling | None:
    if rope.values["rope_type"] != "llama3":
        return None
    scaling = RopeScaling(
        factor=rope.number("factor", low=1.0),
        low_freq_factor=rope.number("low_freq_factor", low=1e-6),
        high_freq_factor=rope.number("high_freq_factor", low=1e-6),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error("high_freq_factor", scaling.high_freq_factor, "above low_freq_factor")
    return scaling


def _generation_fields(model_dir: Path) -> _Fields | None:
    path = model_dir / "generation_config.json"
    return _Fields(path) if path.exists() else None


def _eos_ids(fields: _Fields, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    generation = _generation_fields(model_dir)
    ids = generation.token_ids("eos_token_id") if generation is not None else None
    if ids is None:
        ids = fields.token_ids("eos_token_id") or ()
    return tuple(item for item in ids if item < vocab_size)
