"""The model on one device: loads a checkpoint, runs steps over a KV pool, draws tokens, seals blocks.

Owns the weights and reads the pool it was attached to; which block belongs to whom is the event loop's
business and comes with each StepPlan. Not thread-safe: the thread that calls it owns it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError, LayoutError
from pdserve.core.kv_spec import DTYPE_BYTES, KVSpec
from pdserve.core.logprobs import Logprobs
from pdserve.core.model_config import ModelConfig, load_model_config
from pdserve.engine.batch import Decoding, build_batch, check_moves, check_rows
from pdserve.engine.checksum import block_checksum
from pdserve.engine.kv_pool import KVPool
from pdserve.engine.likelihood import finite, log_probabilities
from pdserve.engine.linear import is_native_on_cpu
from pdserve.engine.llama import Llama, load_llama
from pdserve.engine.sampler import draw
from pdserve.engine.step import BlockMove, Draw, Row, Seal, StepPlan, StepResult
from pdserve.engine.weights import WeightReader, return_freed_memory
from pdserve.kernels.draw import load_draw
from pdserve.kernels.quantized_weights import Format

# What the layers multiply with, in the words of Facts.compute.
MODEL_NUMBERS = "model"
FORMATS = {
    MODEL_NUMBERS: Format.BF16,
    "int4 weights": Format.INT4,
    "int8 weights": Format.INT8,
    "int8 compute": Format.BYTES,
}

# Tokens whose logits are held at once when the tokens of prompts are scored: 13 MB with 49,152 ids.
SCORED_AT_ONCE = 64

Progress = Callable[[str, float], None]


class Engine:
    """A loaded model; see Engine.load. Nothing can be stepped before `attach`."""

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        dtype: str,
        device: str,
        max_model_len: int,
        batch_invariant: bool = False,
        numbers: str = MODEL_NUMBERS,
    ):
        self.config = config
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.model = model
        self._device = torch.device(device)
        self._is_batch_invariant = batch_invariant
        self._numbers = numbers
        self._decoding = Decoding.PADDED
        self._draw_kernels = load_draw() if device == "cpu" else None
        self._pool: KVPool | None = None
        self._layer_kvs: list[torch.Tensor] = []

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_model_len: int | None = None,
        num_threads: int = 1,
        batch_invariant: bool = False,
        numbers: str = MODEL_NUMBERS,
        progress: Progress | None = None,
    ) -> "Engine":
        """Load a Hugging Face folder.

        dtype          "auto" (see resolve_dtype) or a name in DTYPE_BYTES
        max_model_len  None means the checkpoint's own limit
        num_threads    of the calling thread's tensor operations on the CPU
        batch_invariant  a token's result has the same bits whatever is computed in the same step; attach refuses what
                       cannot be
        numbers        a key of FORMATS, what the layers multiply with
        progress       hears (phase, share done in 0..1)
        Raises ModelError for a checkpoint that cannot be served, ConfigError for a setting.
        """
        config = load_model_config(model_dir)
        length = _resolve_length(max_model_len, config)
        name = resolve_dtype(dtype, config.dtype, device)
        if device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"--device {device}: this torch ({torch.__version__}) sees no CUDA device")
        torch.set_num_threads(num_threads)
        report = progress or (lambda phase, share: None)
        with torch.inference_mode(), WeightReader(model_dir, getattr(torch, name), device) as reader:
            model = load_llama(
                config, reader, FORMATS[numbers], lambda index: report("load weights", (index + 1) / config.num_layers)
            )
        return_freed_memory()
        return cls(model, config, name, device, length, batch_invariant, numbers)

    @property
    def compute(self) -> str:
        """What its numbers depend on: nodes that differ in it do not take each other's KV."""
        return self.compute_with(self._numbers)

    def compute_with(self, numbers: str) -> str:
        """The same of a node that differs in these alone."""
        parts = [self.dtype] if numbers == MODEL_NUMBERS else [self.dtype, numbers]
        if self._is_batch_invariant and self.model.native is not None:
            parts += ["batch-invariant", self.model.native.products]
        return ", ".join(parts)

    def kv_spec(self, block_size: int = 32) -> KVSpec:
        """The layout of this model's KV blocks in its serving dtype."""
        config = self.config
        return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, block_size)

    def attach(self, pool: KVPool) -> None:
        """Use this pool from now on. Raises LayoutError when it was made for another model or device, ConfigError when
        results cannot be batch-invariant, but are to be."""
        expected = self.kv_spec(pool.spec.block_size)
        if pool.spec != expected:
            raise LayoutError(f"pool holds {pool.spec}, the model needs {expected}")
        if pool.data.device.type != self._device.type:
            raise LayoutError(f"pool is on {pool.data.device}, the model on {self._device}")
        self._pool = pool
        self._layer_kvs = [pool.data[:, :, index] for index in range(self.config.num_layers)]
        self._decoding = self._decoding_of(self._layer_kvs[0])

    def _decoding_of(self, layer_kv: torch.Tensor) -> Decoding:
        if not self._is_batch_invariant:
            return Decoding.IN_PLACE if self.model.reads_in_place(layer_kv) else Decoding.PADDED
        if not self.model.is_batch_invariant(layer_kv):
            raise ConfigError(
                f"--batch-invariant on: {self.dtype} with heads of {self.config.head_dim} on this machine is computed "
                "by kernels whose sums depend on the batch; it takes bfloat16, heads of a multiple of 32, one thread, "
                "a CPU with AVX-512-BF16, and no --weights int4"
            )
        return Decoding.AS_CHUNKS

    def detach(self) -> None:
        """Drop every view of the pool, so that its owner can close the buffer."""
        self._pool = None
        self._layer_kvs = []

    def step(self, plan: StepPlan) -> StepResult:
        """Copy the blocks that are to be written apart, run the plan's rows, draw and score where asked, seal blocks.

        On return all KV writes are in memory and every seal's checksum covers them. Raises LayoutError, before
        anything is written, when a row or a move does not fit its block table, the vocabulary or the pool.
        """
        assert self._pool is not None, "attach a pool first"
        started = time.perf_counter()
        check_rows(plan.rows, self._pool.spec, self._pool.num_blocks, self.config.vocab_size)
        check_moves(plan.moves, self._pool.num_blocks)
        with torch.inference_mode():
            self._copy(plan.moves, self._pool)
            draws, scores = self._forward(plan, self._pool) if plan.rows else ({}, {})
            checksums = {seal.block_id: self._seal(seal, self._pool) for seal in plan.seals}
        return StepResult(plan.step, draws, checksums, time.perf_counter() - started, scores)

    def _copy(self, moves: Sequence[BlockMove], pool: KVPool) -> None:
        for move in moves:
            pool.data[move.target].copy_(pool.data[move.source])

    def _forward(self, plan: StepPlan, pool: KVPool) -> tuple[dict[int, tuple[Draw, ...]], dict[int, Logprobs]]:
        """Draws and scores by row key."""
        batch = build_batch(plan.rows, pool.spec, self._device, self.model.min_rows, self._decoding)
        outputs = self.model.forward(batch, self._layer_kvs)
        samples = [row.samples for row in batch.sampled_rows]
        draws = draw(outputs.logits, samples, self._draw_kernels, outputs.likeliest)
        scores = self._score(outputs.scored, batch.scored_rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {row.key: row_draws for row, row_draws in zip(batch.sampled_rows, draws, strict=True)}, scores

    def _score(self, outputs: torch.Tensor, rows: Sequence[Row]) -> dict[int, Logprobs]:
        """What the rows asked of their tokens; outputs [num_scored, hidden], one row's after another's."""
        wanted = [(row.key, row.scored) for row in rows if row.scored is not None]
        token_ids = [token for _, scored in wanted for token in scored.token_ids]
        num_top = [scored.num_top for _, scored in wanted for _ in scored.token_ids]
        found: list[Logprobs] = []
        for first in range(0, len(token_ids), SCORED_AT_ONCE):
            part = slice(first, first + SCORED_AT_ONCE)
            logits = finite(self.model.logits(outputs[part]))
            found += log_probabilities(logits.unbind(), token_ids[part], num_top[part], self._draw_kernels)
        each = iter(found)
        return {key: Logprobs.join(islice(each, len(scored.token_ids))) for key, scored in wanted}

    def _seal(self, seal: Seal, pool: KVPool) -> int:
        pool.data[seal.block_id, :, :, :, seal.num_tokens :].zero_()
        pool.publish(seal.block_id)
        return block_checksum(pool.view.block(seal.block_id), seal.block_hash)


def resolve_dtype(requested: str, checkpoint: str, device: str) -> str:
    """The serving dtype.

    "auto" is the checkpoint's own where the device computes it natively, else float32: a CPU without
    bfloat16 or float16 instructions converts every product, which is slower than float32 and less exact.
    """
    if requested != "auto":
        if requested not in DTYPE_BYTES:
            raise ConfigError(f"--dtype {requested}: must be auto, " + ", ".join(DTYPE_BYTES))
        return requested
    if checkpoint == "float32" or device != "cpu" or is_native_on_cpu(getattr(torch, checkpoint)):
        return checkpoint
    return "float32"


def _resolve_length(requested: int | None, config: ModelConfig) -> int:
    if requested is None:
        return config.max_position_embeddings
    if not 1 <= requested <= config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {requested}: must be from 1 to the checkpoint's "
            f"max_position_embeddings of {config.max_position_embeddings}"
        )
    return requested
