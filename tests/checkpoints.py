"""Tiny random Llama checkpoints with a byte-level tokenizer, made on the spot by transformers.

Every test that needs a model folder makes one here: `make_llama_checkpoint(tmp_path / "model")`.
Weights are drawn wide (and norms and biases are not left at one and zero), so that a wrong position,
block or scale changes the tokens.
"""

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|unk|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
EOS_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_llama_checkpoint(
    path: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write model, tokenizer and generation config to `path` and return it.

    dtype      of the saved weights
    overrides  LlamaConfig fields (transformers 5 spelling, e.g. rope_parameters, num_key_value_heads)
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 3,
    } | overrides
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer.json (one token a byte) and tokenizer_config.json with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|unk|>",
        "pad_token": "<|pad|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
