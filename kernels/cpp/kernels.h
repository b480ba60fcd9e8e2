// What the other files export and layers.cpp calls. Meanings stand where they are defined.
#pragma once

#include "vector.h"

// How weights are packed; the numbers are those of kernels/quantized_weights.py.
enum class Format : int64_t { BF16 = 0, INT4 = 1, INT8 = 2, BYTES = 3 };

// The weights of a linear layer. scales: null with BF16; bias: null or one a panel's output.
struct Matrix {
    Format format;
    const void *panels, *scales;
    const float* bias;
    int64_t out_features, in_features;
};

extern "C" {
void rms_norm_bf16(const Bf16* x, const Bf16* weight, Bf16* out, int64_t num_rows, int64_t hidden, float eps);
void place_heads_bf16(Bf16* heads, const float* cos, const float* signed_sin, int64_t num_rows, int64_t num_rotated,
                      int64_t num_kv_heads, int64_t head_dim, Bf16* kv, int64_t block_stride, int64_t kv_head_stride,
                      int64_t kv_stride, int64_t slot_stride, const int64_t* tokens, const int64_t* block_ids,
                      const int64_t* slots, int64_t num_written);
void decode_attention_bf16(const Bf16* q, int64_t q_row_stride, int64_t q_head_stride, const Bf16* kv,
                           int64_t block_stride, int64_t kv_head_stride, int64_t kv_stride, int64_t slot_stride,
                           int64_t block_size, const int64_t* tables, int64_t blocks_per_row, const int64_t* contexts,
                           int64_t num_rows, int64_t num_kv_heads, int64_t group, int64_t head_dim, float scale,
                           Bf16* out);
#ifdef __AVX512BF16__
void linear_bf16(const Matrix* matrix, const Bf16* x, int64_t x_stride, Bf16* y, int64_t num_rows, int64_t is_added);
void gated_linear_bf16(const Matrix* matrix, const Bf16* x, int64_t x_stride, Bf16* y, int64_t num_rows);
void chunk_attention_bf16(const Bf16* q, int64_t q_row_stride, int64_t q_head_stride, const Bf16* kv,
                          int64_t block_stride, int64_t kv_head_stride, int64_t kv_stride, int64_t slot_stride,
                          int64_t block_size, const int64_t* table, int64_t context, int64_t num_queries,
                          int64_t num_kv_heads, int64_t group, int64_t head_dim, float scale, Bf16* out);
#endif
}
