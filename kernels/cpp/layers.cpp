// All layers of a step in one call: between two of them nothing returns to Python.
//
// What runs is what the other files export, in the order of engine/llama.py. The structures are filled by
// kernels/layer_stack.py, which says what they hold.
#include "kernels.h"

#ifdef __AVX512BF16__

struct LayerWeights {
    const Bf16 *attention_norm, *mlp_norm;
    const Matrix *qkv, *out, *gated, *down;
};

struct StackShape {
    int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scale;
};

struct PoolLayout {
    Bf16* kv;  // of the first layer
    int64_t layer_stride, block_stride, kv_head_stride, kv_stride, slot_stride, block_size;
};

struct DecodeRows {
    int64_t first, num_rows, blocks_per_row;
    const int64_t *tables, *contexts;
};

struct ChunkRows {
    int64_t first, num_tokens, context;
    const int64_t* table;
};

struct StackStep {
    Bf16* hidden;
    const float *cos, *signed_sin;
    int64_t num_rows, num_written;
    const int64_t *tokens, *block_ids, *slots;
    int64_t num_groups, num_chunks;
    const DecodeRows* groups;
    const ChunkRows* chunks;
    Bf16 *normed, *heads, *attended, *inner;
};

static void attend(const StackShape& shape, const PoolLayout& pool, const Bf16* kv, const StackStep& step) {
    const int64_t head_dim = shape.head_dim, out_stride = shape.num_heads * head_dim;
    const int64_t row_stride = out_stride + 2 * shape.num_kv_heads * head_dim;
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int64_t i = 0; i < step.num_groups; ++i) {
        const DecodeRows& rows = step.groups[i];
        decode_attention_bf16(step.heads + rows.first * row_stride, row_stride, head_dim, kv, pool.block_stride,
                              pool.kv_head_stride, pool.kv_stride, pool.slot_stride, pool.block_size, rows.tables,
                              rows.blocks_per_row, rows.contexts, rows.num_rows, shape.num_kv_heads, group, head_dim,
                              shape.scale, step.attended + rows.first * out_stride);
    }
    for (int64_t i = 0; i < step.num_chunks; ++i) {
        const ChunkRows& rows = step.chunks[i];
        chunk_attention_bf16(step.heads + rows.first * row_stride, row_stride, head_dim, kv, pool.block_stride,
                             pool.kv_head_stride, pool.kv_stride, pool.slot_stride, pool.block_size, rows.table,
                             rows.context, rows.num_tokens, shape.num_kv_heads, group, head_dim, shape.scale,
                             step.attended + rows.first * out_stride);
    }
}

extern "C" void run_layers_bf16(const LayerWeights* layers, int64_t num_layers, const StackShape* shape,
                                const PoolLayout* pool, const StackStep* step) {
    const int64_t num_rows = step->num_rows, hidden = shape->hidden, inner = shape->intermediate;
    const int64_t attended = shape->num_heads * shape->head_dim;
    const int64_t num_rotated = shape->num_heads + shape->num_kv_heads;
    for (int64_t i = 0; i < num_layers; ++i) {
        const LayerWeights& layer = layers[i];
        Bf16* kv = pool->kv + i * pool->layer_stride;
        rms_norm_bf16(step->hidden, layer.attention_norm, step->normed, num_rows, hidden, shape->eps);
        linear_bf16(layer.qkv, step->normed, hidden, step->heads, num_rows, 0);
        place_heads_bf16(step->heads, step->cos, step->signed_sin, num_rows, num_rotated, shape->num_kv_heads,
                         shape->head_dim, kv, pool->block_stride, pool->kv_head_stride, pool->kv_stride,
                         pool->slot_stride, step->tokens, step->block_ids, step->slots, step->num_written);
        attend(*shape, *pool, kv, *step);
        linear_bf16(layer.out, step->attended, attended, step->hidden, num_rows, 1);
        rms_norm_bf16(step->hidden, layer.mlp_norm, step->normed, num_rows, hidden, shape->eps);
        gated_linear_bf16(layer.gated, step->normed, hidden, step->inner, num_rows);
        linear_bf16(layer.down, step->inner, inner, step->hidden, num_rows, 1);
    }
}

#endif
