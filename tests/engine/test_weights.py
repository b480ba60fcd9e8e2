"""Every tensor of a checkpoint is accounted for, or the model is refused naming it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ModelError
from pdserve.engine.engine import Engine
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import generate, make_engine, make_row
from tests.engine.test_engine_parity import logits_of, reference_model, reference_tokens

PROMPT = list(range(4, 30))


def edit(model_dir: Path, change) -> None:
    """Rewrite the checkpoint's tensors after `change` (a function of the dict) altered them."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def model_dir(tmp_path) -> Path:
    return make_llama_checkpoint(tmp_path / "model")


@pytest.fixture
def tied_dir(tmp_path) -> Path:
    return make_llama_checkpoint(tmp_path / "tied", tie_word_embeddings=True)


def test_a_missing_tensor_is_named(model_dir):
    edit(model_dir, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Engine.load(model_dir)


def test_an_unused_tensor_is_named(model_dir):
    edit(model_dir, lambda tensors: tensors.update({"model.layers.3.extra": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"1 tensors that the model has no place for: model\.layers\.3\.extra"):
        Engine.load(model_dir)


def test_a_bias_that_the_config_does_not_announce_is_refused(model_dir):
    edit(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        Engine.load(model_dir)


def test_saved_rope_frequencies_are_accepted(model_dir):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    Engine.load(model_dir)


def test_a_misshapen_tensor_is_named_with_both_shapes(model_dir):
    edit(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(63,\), config\.json makes it \(64,\)"):
        Engine.load(model_dir)


def test_an_integer_tensor_is_refused(model_dir):
    edit(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"int8, must be float32"):
        Engine.load(model_dir)


def test_an_untied_checkpoint_without_a_head_is_refused(model_dir):
    edit(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        Engine.load(model_dir)


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(tied_dir):
    expected = generate(make_engine(tied_dir), PROMPT, 4)
    edit(tied_dir, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert generate(make_engine(tied_dir), PROMPT, 4) == expected


def test_a_tied_checkpoint_with_another_head_is_refused(tied_dir):
    head = {"lm_head.weight": torch.zeros(260, 64)}
    edit(tied_dir, lambda tensors: tensors.update(head))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embedding"):
        Engine.load(tied_dir)


def say_in_config(model_dir: Path, **fields: object) -> None:
    """Set fields of config.json; None takes one out."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def repeat_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize("kind", ["tied", "tied, the head repeated", "untied", "untied, no word of it in the config"])
def test_text_and_logits_are_transformers_own_whether_the_head_is_tied_or_not(tmp_path, kind):
    model_dir = make_llama_checkpoint(tmp_path / "model", tie_word_embeddings=kind.startswith("tied"))
    if kind == "tied, the head repeated":
        edit(model_dir, repeat_head)
    if kind == "untied, no word of it in the config":
        say_in_config(model_dir, tie_word_embeddings=None)
    assert ("lm_head.weight" in load_file(model_dir / "model.safetensors")) == (kind != "tied")
    model, engine = reference_model(model_dir), make_engine(model_dir)
    assert generate(engine, PROMPT, 12) == reference_tokens(model, PROMPT, 12)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits_of(engine, make_row(PROMPT)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_a_nested_config_says_of_the_head_does_not_count(tmp_path, is_tied):
    model_dir = make_llama_checkpoint(tmp_path / "model", tie_word_embeddings=is_tied)
    expected = generate(make_engine(model_dir), PROMPT, 8)
    say_in_config(model_dir, text_config={"tie_word_embeddings": not is_tied})
    assert generate(make_engine(model_dir), PROMPT, 8) == expected


def test_a_checkpoint_that_calls_itself_untied_never_falls_back_to_its_embedding(tied_dir):
    """Its head would be fluent-looking nonsense."""
    for flag in (False, None):
        say_in_config(tied_dir, tie_word_embeddings=flag, text_config={"tie_word_embeddings": True})
        with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
            Engine.load(tied_dir)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    model_dir = make_llama_checkpoint(tmp_path / "model", max_shard_size="40KB")
    first, second = sorted(model_dir.glob("model-*.safetensors"))[:2]
    tensors = load_file(first) | load_file(second)
    save_file(tensors, second)
    with pytest.raises(ModelError, match="is in both"):
        Engine.load(model_dir)


def test_a_damaged_file_is_refused(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot read"):
        Engine.load(model_dir)


def test_the_model_keeps_its_weights_when_the_file_changes_afterwards(model_dir):
    engine = make_engine(model_dir)
    expected = generate(engine, PROMPT, 4)
    path = model_dir / "model.safetensors"
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2)
        file.write(b"\x7f" * (size - size // 2))
    assert generate(engine, PROMPT, 4) == expected
