"""The Llama architecture over a paged KV pool: weights into layers, a batch into logits.

Tokens of all rows are flattened to [num_tokens, hidden]; only attention sees rows. q, k, v are one linear.
Owned by Engine; knows nothing of requests, and of the pool only each layer's view.
Dims are listed in engine/batch.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_config import ModelConfig
from pdserve.engine.batch import Batch, ChunkRow
from pdserve.engine.linear import GatedLinear, Linear, LinearMaker
from pdserve.engine.rope import Rope
from pdserve.engine.weights import WeightReader
from pdserve.kernels import reference
from pdserve.kernels.cpu import CpuKernels, load_kernels
from pdserve.kernels.layer_stack import LayerStack, StackLayer, StackRows, StackShape
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from pdserve.kernels.quantized_weights import Format

AnyLinear = Linear | PackedLinear
AnyGatedLinear = GatedLinear | PackedGatedLinear


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer; norms are [hidden]."""

    attention_norm: Tensor
    qkv: AnyLinear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    out: AnyLinear  # num_heads * head_dim -> hidden
    mlp_norm: Tensor
    gated: AnyGatedLinear  # hidden -> intermediate
    down: AnyLinear  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of one batch. Logits of scored tokens are for the caller to ask for, as many at once as it has memory for."""

    logits: Tensor  # [num_sampled, vocab_size] float32
    likeliest: Sequence[int] | None  # of each row of logits, where the head has looked already
    scored: Tensor  # [num_scored, hidden], see Llama.logits


class Llama:
    """A Llama model ready to run; see load_llama.

    With tied embeddings the head still has its own packed copy of the vocabulary matrix: a look-up needs
    plain rows, and the packed product takes 3 ms a step instead of 7 (49152 x 576, bf16, one core).
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: list[LlamaLayer],
        norm: Tensor,
        head: AnyLinear,
        native: CpuKernels | None,
        min_rows: int,
    ):
        self.config = config
        self.min_rows = min_rows
        self.embedding = embedding  # [vocab_size, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head
        self.rope = Rope(config, embedding.device)
        self.scale = config.head_dim**-0.5
        self.native = native
        self.kernels = self.native or reference
        self.causal = reference.causal_tile(embedding.dtype, embedding.device)
        self.stack = _stack(config, layers[:-1], native, self.scale)

    def forward(self, batch: Batch, layer_kvs: list[Tensor]) -> Outputs:
        """Run the batch; writes its KV into the pool.

        layer_kvs  per layer [num_blocks, num_kv_heads, kv(2), block_size, head_dim], the pool's own memory
        """
        hidden = F.embedding(batch.token_ids, self.embedding)
        angles = self.rope.angles(batch.positions)
        if self.stack is not None and self.native is not None and self.native.can_attend_chunks(layer_kvs[0]):
            self.stack.run(hidden, *angles, layer_kvs, _stack_rows(batch))
        else:
            for layer, layer_kv in zip(self.layers[:-1], layer_kvs, strict=False):
                q, keys, values = self._project(layer, hidden, angles, layer_kv, batch)
                attended = self._attend(q, keys, values, layer_kv, batch, batch.chunks)
                hidden = self._finish_layer(layer, hidden, attended)
        # Of the last layer every token's KV is needed, but the output of sampled and of scored tokens only. Those go
        # through it apart: what is drawn has the same bits whether scores are wanted or not.
        layer_kv = layer_kvs[-1]
        q, keys, values = self._project(self.layers[-1], hidden, angles, layer_kv, batch)
        logits = hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        likeliest: Sequence[int] | None = None
        scored = hidden.new_empty(0, self.config.hidden_size)
        if batch.num_sampled:
            attended = self._attend(q, keys, values, layer_kv, batch, batch.chunk_ends)
            logits, likeliest = self.head.logits(self._finish(hidden, attended, batch.sampled))
            logits = logits[: batch.num_sampled]
        if len(batch.scored):
            attended = self._attend(q, keys, values, layer_kv, batch, batch.scored_chunks)
            scored = self._finish(hidden, attended, batch.scored)
        return Outputs(logits, likeliest, scored)

    def reads_in_place(self, layer_kv: Tensor) -> bool:
        """Whether decode rows are read to their own lengths; see build_batch."""
        return self.native is not None and self.native.can_decode(layer_kv)

    def is_batch_invariant(self, layer_kv: Tensor) -> bool:
        """Whether a token's bits do not depend on the other rows of its step, while rows are attended as chunks."""
        independent = all(
            isinstance(layer.qkv, PackedLinear) and layer.qkv.has_independent_rows for layer in self.layers
        )
        return independent and self.native is not None and self.native.can_attend_chunks(layer_kv)

    def logits(self, outputs: Tensor) -> Tensor:
        """[num_rows, vocab_size] float32 of outputs [num_rows, hidden]"""
        return self.head.logits(outputs)[0]

    def _project(
        self, layer: LlamaLayer, hidden: Tensor, angles: tuple[Tensor, Tensor], layer_kv: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [num_rows, num_heads, head_dim], k and v [num_rows, num_kv_heads, head_dim]; k and v go to the pool too."""
        normed = self.kernels.rms_norm(hidden, layer.attention_norm, self.config.rms_norm_eps)
        heads = layer.qkv(normed).unflatten(-1, (-1, self.config.head_dim))
        writes = batch.writes
        return self.kernels.place_heads(heads, *angles, layer_kv, writes.tokens, writes.block_ids, writes.slots)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, batch: Batch, chunks: tuple[ChunkRow, ...]
    ) -> Tensor:
        """[num_rows, num_heads * head_dim]; rows that are in no group and no chunk are zero."""
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for group in batch.decode_groups:
            rows = slice(group.first, group.first + group.num_rows)
            if self.native is not None and self.native.can_decode(layer_kv):
                self.native.decode_attention(q[rows], layer_kv, group.block_ids, group.contexts, self.scale, out[rows])
            else:
                out[rows] = reference.decode_attention(
                    q[rows], layer_kv, group.block_ids, group.length, group.tail, group.mask, self.scale
                )
        for chunk in chunks:
            end = chunk.first + chunk.num_tokens
            rows = slice(chunk.first, end)
            if self.native is not None and self.native.can_attend_chunks(layer_kv):
                self.native.paged_chunk_attention(
                    q[rows], layer_kv, chunk.block_ids, chunk.context, self.scale, out[rows]
                )
                continue
            if chunk.is_whole:
                own = slice(end - chunk.context, end)
                keys, values = k[own].transpose(0, 1).contiguous(), v[own].transpose(0, 1).contiguous()
            else:
                keys, values = reference.gather_kv(layer_kv, chunk.block_ids)[:, :, : chunk.context]
            self.kernels.chunk_attention(q[rows], keys, values, self.causal, self.scale, out[rows])
        return out.flatten(1)

    def _finish(self, hidden: Tensor, attended: Tensor, rows: Tensor) -> Tensor:
        """Outputs of these rows of the last layer, [len(rows), hidden], normed as the head takes them."""
        finished = self._finish_layer(self.layers[-1], hidden.index_select(0, rows), attended.index_select(0, rows))
        return self.kernels.rms_norm(finished, self.norm, self.config.rms_norm_eps)

    def _finish_layer(self, layer: LlamaLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, in the place of `hidden`."""
        hidden = layer.out.add_to(hidden, attended)
        normed = self.kernels.rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        return layer.down.add_to(hidden, layer.gated(normed))


def _stack(config: ModelConfig, layers: list[LlamaLayer], native: CpuKernels | None, scale: float) -> LayerStack | None:
    """The layers as one call, where the kernels take all of them."""
    shape = StackShape(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.rms_norm_eps,
        scale,
    )
    if native is None or not layers or not shape.is_whole_vectors:
        return None
    packed = [
        StackLayer(layer.attention_norm, layer.qkv, layer.out, layer.mlp_norm, layer.gated, layer.down)
        for layer in layers
        if isinstance(layer.qkv, PackedLinear)
        and isinstance(layer.out, PackedLinear)
        and isinstance(layer.gated, PackedGatedLinear)
        and isinstance(layer.down, PackedLinear)
    ]
    return native.layer_stack(packed, shape) if len(packed) == len(layers) else None


def _stack_rows(batch: Batch) -> StackRows:
    return StackRows(
        (batch.writes.tokens, batch.writes.block_ids, batch.writes.slots),
        [(group.first, group.num_rows, group.block_ids, group.contexts) for group in batch.decode_groups],
        [(chunk.first, chunk.num_tokens, chunk.context, chunk.block_ids) for chunk in batch.chunks],
    )


def load_llama(config: ModelConfig, reader: WeightReader, form: Format, on_layer: Callable[[int], None]) -> Llama:
    """Build the model from a checkpoint; `on_layer` hears each finished layer. Raises ModelError naming a tensor."""
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    native = load_kernels(embedding.dtype, embedding.device)
    in_features = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    maker = LinearMaker.of(native, form, *in_features)
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(config, reader, maker, f"model.layers.{index}."))
        on_layer(index)
    norm = reader.take("model.norm.weight", config.hidden_size)
    if not config.tie_word_embeddings:
        head = maker.head.linear(reader.take("lm_head.weight", config.vocab_size, config.hidden_size))
    else:
        if "lm_head.weight" in reader:
            reader.drop_copy_of("lm_head.weight", embedding)
        head = maker.head.linear(embedding)
    reader.finish()
    min_rows = maker.min_rows if embedding.device.type == "cpu" else 1
    return Llama(config, embedding, layers, norm, head, native, min_rows)


def _load_layer(config: ModelConfig, reader: WeightReader, maker: LinearMaker, prefix: str) -> LlamaLayer:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def tensors(names: list[str], sizes: list[int], in_features: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        paths = [prefix + name for name in names]
        weight = reader.take_joined([path + ".weight" for path in paths], sizes, in_features)
        bias = reader.take_joined([path + ".bias" for path in paths], sizes) if has_bias else None
        return weight, bias

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    gate, gate_bias = tensors(["mlp.gate_proj"], [intermediate], hidden, config.mlp_bias)
    up, up_bias = tensors(["mlp.up_proj"], [intermediate], hidden, config.mlp_bias)
    return LlamaLayer(
        attention_norm=reader.take(prefix + "input_layernorm.weight", hidden),
        qkv=maker.linear(*tensors(qkv, [q_size, kv_size, kv_size], hidden, config.attention_bias)),
        out=maker.linear(*tensors(["self_attn.o_proj"], [hidden], q_size, config.attention_bias)),
        mlp_norm=reader.take(prefix + "post_attention_layernorm.weight", hidden),
        gated=maker.gated(gate, up, gate_bias, up_bias),
        down=maker.linear(*tensors(["mlp.down_proj"], [hidden], intermediate, config.mlp_bias)),
    )
