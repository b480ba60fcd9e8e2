import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import TemplateProcessing

from pdserve.core.errors import ModelError
from pdserve.router.api_error import ApiError
from pdserve.router.tokenizer import TextModel

BOS_ID = 1
MESSAGES = [
    {"role": "user", "content": "Hi 👩‍👩‍👧!"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "<|im_end|>"},
]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def make_model_dir(source: Path, path: Path, *, adds_bos: bool = False, **config: object) -> Path:
    """A copy of the byte model with another tokenizer configuration; a value of None removes the entry."""
    shutil.copytree(source, path)
    file = path / "tokenizer_config.json"
    entries = json.loads(file.read_text()) | config
    file.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    if adds_bos:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        bos = ("<|im_start|>", BOS_ID)
        tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", pair=None, special_tokens=[bos])
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def chat_ids(text: TextModel, messages: list[dict[str, str]]) -> list[int]:
    return text.encode_rendered(text.render_chat(messages))


def chat_ids_of_transformers(model_dir: Path, messages: list[dict[str, str]]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("adds_bos", "config", "num_bos"),
    [
        (False, {}, 4),
        (True, {"chat_template": "{{ bos_token }}" + PLAIN}, 1),
        (True, {"chat_template": "{{ bos_token }}" + PLAIN, "add_bos_token": True}, 1),
        (True, {"chat_template": PLAIN}, 0),
        (False, {"chat_template": PLAIN, "bos_token": None}, 0),
        (
            False,
            {
                "chat_template": "{{ bos_token }}" + PLAIN,
                "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"},
            },
            1,
        ),
    ],
)
def test_chat_ids_equal_transformers_and_bos_appears_as_often_as_the_template_says(
    model_dir, tmp_path, adds_bos, config, num_bos
):
    path = make_model_dir(model_dir, tmp_path / "model", adds_bos=adds_bos, **config)
    token_ids = chat_ids(TextModel.load(path), MESSAGES)
    assert token_ids == chat_ids_of_transformers(path, MESSAGES)
    assert token_ids.count(BOS_ID) == num_bos


def test_a_raw_prompt_gets_bos_by_the_tokenizers_own_rule(model_dir, tmp_path):
    with_bos = TextModel.load(make_model_dir(model_dir, tmp_path / "model", adds_bos=True))
    without = TextModel.load(model_dir)
    assert with_bos.encode("ab") == [BOS_ID, *without.encode("ab")]
    assert without.encode("ab").count(BOS_ID) == 0


def test_special_tokens_typed_into_a_prompt_become_their_ids_as_in_transformers(model_dir):
    from transformers import AutoTokenizer

    typed = "a<|im_start|>b"
    assert TextModel.load(model_dir).encode(typed) == AutoTokenizer.from_pretrained(model_dir)(typed)["input_ids"]
    assert TextModel.load(model_dir).encode(typed).count(BOS_ID) == 1


def test_truncation_and_padding_of_the_tokenizer_file_are_not_applied(model_dir, tmp_path):
    path = make_model_dir(model_dir, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path / "tokenizer.json"))
    assert len(TextModel.load(path).encode("a" * 20)) == 20


def test_a_model_without_a_template_refuses_chat_and_says_so(model_dir, tmp_path):
    text = TextModel.load(make_model_dir(model_dir, tmp_path / "model", chat_template=None))
    with pytest.raises(ApiError, match="no chat template") as refusal:
        text.render_chat(MESSAGES)
    assert refusal.value.status == 400


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe"])
def test_a_missing_or_broken_tokenizer_file_is_a_model_error_naming_it(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path)


def test_no_text_of_more_characters_than_the_bound_has_fewer_tokens(text):
    assert text.max_characters(10) >= 10
    assert len(text.encode("x" * (text.max_characters(10) + 1))) > 10


def offsets_of(text: TextModel, prompt: str) -> list[tuple[str, int]]:
    token_ids, offsets = text.encode_with_offsets(prompt)
    assert token_ids == text.encode(prompt)
    return [
        (text.vocabulary.bytes_of(token_id).decode("latin-1"), at)
        for token_id, at in zip(token_ids, offsets, strict=True)
    ]


def test_each_token_of_a_prompt_begins_where_its_character_does(model_dir, tmp_path):
    path = make_model_dir(model_dir, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    around = [("<|im_start|>", BOS_ID), ("<|pad|>", 3)]
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A <|pad|>", pair=None, special_tokens=around)
    tokenizer.save(str(path / "tokenizer.json"))
    assert offsets_of(TextModel.load(path), "aé<|im_end|>b") == [
        ("<|im_start|>", 0),
        ("a", 0),
        ("\xc3", 1),
        ("\xa9", 1),
        ("<|im_end|>", 2),
        ("b", 12),
        ("<|pad|>", 13),
    ]


def test_a_space_that_the_tokenizer_leaves_out_of_a_span_belongs_to_the_token(model_dir, tmp_path):
    path = make_model_dir(model_dir, tmp_path / "model")
    tokenizer = Tokenizer(BPE({"a": 0, "Ġ": 1, "b": 2, "Ġb": 3}, [("Ġ", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    assert offsets_of(TextModel.load(path), "a b") == [("a", 0), (" b", 1)]


def test_encoding_a_long_text_leaves_the_interpreter_to_others(text):
    long_text = "hello world " * 60_000
    turns, done = 0, threading.Event()
    worker = threading.Thread(target=lambda: (text.encode(long_text), done.set()))
    worker.start()
    while not done.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 10


@pytest.mark.skipif("PDSERVE_TEST_MODEL" not in os.environ, reason="PDSERVE_TEST_MODEL names no model folder")
def test_the_real_model_encodes_chat_and_text_as_transformers_does():
    from transformers import AutoTokenizer

    path = Path(os.environ["PDSERVE_TEST_MODEL"])
    text, tokenizer = TextModel.load(path), AutoTokenizer.from_pretrained(path)
    conversations = [
        MESSAGES,
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  삼겹살 é\n"}],
    ]
    for messages in conversations:
        assert chat_ids(text, messages) == chat_ids_of_transformers(path, messages)
    for prompt in ("The capital of France is", " leading  spaces\t", "👩‍👩‍👧 世界", "<|im_start|>user\nx<|im_end|>"):
        token_ids = text.encode(prompt)
        assert token_ids == tokenizer(prompt)["input_ids"]
        detokenizer = text.detokenizer()
        shown = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
        assert shown == tokenizer.decode(token_ids, skip_special_tokens=True)
