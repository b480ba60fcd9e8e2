"""Reads safetensors checkpoints so that every tensor is accounted for: taken once, or an error naming it.

Owns the open files while a model is built. Tensors are read one by one and cast to the serving dtype,
so no second copy of the model ever exists. Used by engine/llama.py, and by Engine when all are taken.
"""

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.core.checkpoint import weight_files
from pdserve.core.errors import ModelError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Buffers that older exporters saved although they follow from config.json.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)


class WeightReader:
    """The tensors of one model folder, by name.

    dtype, device  what taken tensors are cast and moved to

    Use as a context manager; raises ModelError for unreadable files and tensors named by two shards.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: str):
        self.dtype = dtype
        self.device = device
        self._files: dict[str, tuple[Path, Any]] = {}  # of each tensor not taken yet
        self._handles: list[Any] = []
        for path in weight_files(model_dir):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        self._handles.append(handle)
        for name in names:
            if name in self._files:
                raise ModelError(f"tensor {name!r:.120} is in both {self._files[name][0].name} and {path.name}")
            self._files[name] = (path, handle)

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._files.clear()
        self._handles.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the serving dtype on the device. Raises ModelError when it is missing or misshapen."""
        tensor = self._take(name, shape)
        # The file's own memory is mapped: without a copy a later change of the file would reach the model.
        return tensor.to(self.device, self.dtype, copy=True)

    def take_joined(self, names: list[str], sizes: list[int], *shape: int) -> Tensor:
        """Tensors stacked along their first dim: [sum(sizes), *shape], each of them [size, *shape]."""
        joined = torch.empty((sum(sizes), *shape), dtype=self.dtype, device=self.device)
        for name, part in zip(names, joined.split(sizes), strict=True):
            part.copy_(self._take(name, tuple(part.shape)))
        return joined

    def drop_copy_of(self, name: str, kept: Tensor) -> None:
        """Account for a tensor that must equal one already taken. Raises ModelError when it differs."""
        if not torch.equal(self._take(name, tuple(kept.shape)).to(self.device, self.dtype), kept):
            raise ModelError(f"{name} differs from the embedding, but config.json says tie_word_embeddings")

    def finish(self) -> None:
        """Raise ModelError when a tensor was never taken: the model would not be the one in the checkpoint."""
        unused = sorted(name for name in self._files if not name.endswith(HARMLESS_SUFFIXES))
        if unused:
            shown = ", ".join(name[:120] for name in unused[:5])
            raise ModelError(f"checkpoint holds {len(unused)} tensors that the model has no place for: {shown}")

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise ModelError(f"checkpoint has no tensor {name}")
        path, handle = self._files.pop(name)
        try:
            tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {path}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: {name} has shape {tuple(tensor.shape)}, config.json makes it {shape}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ModelError(f"{path}: {name} is {tensor.dtype}, must be float32, bfloat16 or float16")
        return tensor


def return_freed_memory() -> None:
    """Give the system back what the C library keeps for later: after loading, 187 MB of 730 (SmolLM2-135M, bf16)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        # Not glibc.
        return
    trim(0)
