// What a layer does to each token on its own: RMSNorm, RoPE, and writing its K and V into the pool.
//
// Strides count elements. Called through kernels/cpu.py, which checks shapes.
#include <cmath>

#include "vector.h"

namespace {

// out = (x * rsqrt(mean(x^2) + eps)) * weight, rounded to T before and after the last product.
template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t num_rows, int64_t hidden, float eps) {
    for (int64_t row = 0; row < num_rows; ++row, x += hidden, out += hidden) {
        Floats even = {}, odd = {};
        int64_t i = 0;
        for (; i + 2 * LANES <= hidden; i += 2 * LANES) {
            const Floats a = load(x + i), b = load(x + i + LANES);
            even += a * a;
            odd += b * b;
        }
        if (i < hidden) even += load(x + i) * load(x + i);
        const float factor = 1 / std::sqrt(sum(even + odd) / hidden + eps);
        for (i = 0; i < hidden; i += LANES) {
            T rounded[LANES];
            store(rounded, load(x + i) * factor);
            store(out + i, load(rounded) * load(weight + i));
        }
    }
}

// The two halves of a head turn against each other; `low` and `high` of the angles differ only in sin's sign.
template <typename T>
INLINE void rotate_head(T* head, const float* cos, const float* signed_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i < LANES ? half - i : LANES;
        const Floats low = load_first(head + i, count, 0), high = load_first(head + half + i, count, 0);
        const Floats c = load_first(cos + i, count, 0), s = load_first(signed_sin + half + i, count, 0);
        store_first(head + i, low * c - high * s, count);
        store_first(head + half + i, high * c + low * s, count);
    }
}

template <typename T>
INLINE void rotate_head_of_whole_vectors(T* head, const float* cos, const float* signed_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const Floats low = load(head + i), high = load(head + half + i);
        const Floats c = load(cos + i), s = load(signed_sin + half + i);
        store(head + i, low * c - high * s);
        store(head + half + i, high * c + low * s);
    }
}

// heads [num_rows, num_rotated + num_kv_heads, head_dim]: q and k are rotated in place, then k and v of `tokens`
// (all rows when null) are written to their slots.
template <typename T>
void place_heads(T* heads, const float* cos, const float* signed_sin, int64_t num_rows, int64_t num_rotated,
                 int64_t num_kv_heads, int64_t head_dim, T* kv, int64_t block_stride, int64_t kv_head_stride,
                 int64_t kv_stride, int64_t slot_stride, const int64_t* tokens, const int64_t* block_ids,
                 const int64_t* slots, int64_t num_written) {
    const int64_t row_stride = (num_rotated + num_kv_heads) * head_dim, half = head_dim / 2;
    for (int64_t row = 0; row < num_rows; ++row) {
        T* head = heads + row * row_stride;
        const float *row_cos = cos + row * head_dim, *row_sin = signed_sin + row * head_dim;
        for (int64_t i = 0; i < num_rotated; ++i, head += head_dim) {
            if (half % LANES == 0)
                rotate_head_of_whole_vectors(head, row_cos, row_sin, half);
            else
                rotate_head(head, row_cos, row_sin, half);
        }
    }
    for (int64_t i = 0; i < num_written; ++i) {
        const T* v = heads + (tokens ? tokens[i] : i) * row_stride + num_rotated * head_dim;
        const T* k = v - num_kv_heads * head_dim;
        T* to = kv + block_ids[i] * block_stride + slots[i] * slot_stride;
        for (int64_t head = 0; head < num_kv_heads; ++head) {
            std::memcpy(to + head * kv_head_stride, k + head * head_dim, head_dim * sizeof(T));
            std::memcpy(to + head * kv_head_stride + kv_stride, v + head * head_dim, head_dim * sizeof(T));
        }
    }
}

}  // namespace

#define EXPORT(suffix, T)                                                                                             \
    extern "C" void rms_norm_##suffix(const T* x, const T* weight, T* out, int64_t num_rows, int64_t hidden,          \
                                      float eps) {                                                                    \
        rms_norm(x, weight, out, num_rows, hidden, eps);                                                              \
    }                                                                                                                 \
    extern "C" void place_heads_##suffix(T* heads, const float* cos, const float* signed_sin, int64_t num_rows,       \
                                         int64_t num_rotated, int64_t num_kv_heads, int64_t head_dim, T* kv,          \
                                         int64_t block_stride, int64_t kv_head_stride, int64_t kv_stride,             \
                                         int64_t slot_stride, const int64_t* tokens, const int64_t* block_ids,        \
                                         const int64_t* slots, int64_t num_written) {                                 \
        place_heads(heads, cos, signed_sin, num_rows, num_rotated, num_kv_heads, head_dim, kv, block_stride,          \
                    kv_head_stride, kv_stride, slot_stride, tokens, block_ids, slots, num_written);                   \
    }

EXPORT(f32, float)
EXPORT(bf16, Bf16)
