"""Both spellings of config.json are read, and what cannot be served is refused by name."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ModelError
from pdserve.core.model_config import GenerationDefaults, RopeScaling, load_generation_defaults, load_model_config

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write(path: Path, generation: dict | None = None, **overrides) -> Path:
    (path / "config.json").write_text(json.dumps(SMALL | overrides))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_absent_fields_mean_what_they_mean_to_transformers(tmp_path):
    config = load_model_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (config.dtype, config.tie_word_embeddings, config.rope_scaling) == ("float32", False, None)
    assert (config.eos_ids, config.bos_id, config.max_position_embeddings) == ((), None, 2048)


def test_old_and_new_spellings_say_the_same(tmp_path):
    old = load_model_config(
        write(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3"} | LLAMA3, torch_dtype="bfloat16")
    )
    new = load_model_config(
        write(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3, dtype="bfloat16")
    )
    assert old == new
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert (new.rope_theta, new.dtype) == (5e5, "bfloat16")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, "above low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"dtype": 7}, "dtype is 7"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 2}, "head_dim is 0"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, overrides, complaint):
    with pytest.raises(ModelError, match=complaint):
        load_model_config(write(tmp_path, **overrides))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00", '{"a": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_json_object_is_a_model_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_folder_without_a_config_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_model_config(tmp_path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = [*SMALL, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "eos_token_id", "rms_norm_eps"]


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3))
def test_no_config_raises_anything_but_a_model_error(tmp_path_factory, overrides):
    path = write(tmp_path_factory.mktemp("config"), **overrides)
    with contextlib.suppress(ModelError):
        load_model_config(path)


def test_the_generation_configs_eos_list_wins(tmp_path):
    write(tmp_path, {"eos_token_id": [7, 9, 7, -1, 500]}, eos_token_id=2)
    assert load_model_config(tmp_path).eos_ids == (7, 9)
    assert load_generation_defaults(tmp_path).eos_ids == (7, 9)


def test_without_a_generation_config_the_apis_defaults_apply(tmp_path):
    assert load_generation_defaults(write(tmp_path, eos_token_id=2)) == GenerationDefaults(1.0, 0, 1.0, (2,))


def test_the_generation_config_sets_defaults(tmp_path):
    defaults = load_generation_defaults(write(tmp_path, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}))
    assert defaults == GenerationDefaults(0.6, 20, 0.9, ())


def test_do_sample_false_means_greedy(tmp_path):
    assert load_generation_defaults(write(tmp_path, {"do_sample": False, "temperature": 0.6})).temperature == 0.0


def test_a_wrong_generation_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"top_p is 1\.5"):
        load_generation_defaults(write(tmp_path, {"top_p": 1.5}))
