// Causal attention of a prompt's chunk over a paged KV pool, in products of bf16 panels (see panel.h).
//
// The context is taken a span of 128 slots at a time: their K becomes panels of 32 outputs over the head's dims, their V
// panels of 32 dims over the slots. The queries of all heads that share a KV head are the rows. Softmax is corrected as
// larger scores appear, in fp32; only its weights are rounded to bf16. Called through kernels/cpu.py.
#include <algorithm>
#include <vector>

#include "panel.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t SPAN_PANELS = 4, SPAN = SPAN_PANELS * PANEL;
// Queries of one pass: their accumulators should stay in the second-level cache.
constexpr int64_t MAX_PASS_ROWS = 768;

// One KV head of a request's blocks; slots from `context` on belong to nobody.
struct Slots {
    const Bf16* kv;
    const int64_t* table;
    int64_t block_stride, kv_stride, slot_stride, block_size, context, head_dim;

    const Bf16* key(int64_t slot) const {
        return kv + table[slot / block_size] * block_stride + slot % block_size * slot_stride;
    }
    const Bf16* value(int64_t slot) const { return key(slot) + kv_stride; }
};

// Of 16 rows of 16 the columns.
INLINE void transpose(__m512i (&rows)[LANES]) {
    __m512i pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // fours[4 i + j] has column j of each four columns, of rows 4 i to 4 i + 3.
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m512i even_upper = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        const __m512i odd_upper = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
        const __m512i even_lower = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
        const __m512i odd_lower = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
        rows[j] = _mm512_shuffle_i32x4(even_upper, even_lower, 0x88);
        rows[4 + j] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88);
        rows[8 + j] = _mm512_shuffle_i32x4(even_upper, even_lower, 0xdd);
        rows[12 + j] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xdd);
    }
}

// panels[32 slots][dim pair][half][slot of the half][2]
void pack_keys(const Slots& slots, int64_t first, Bf16* panels) {
    for (int64_t slot = 0; slot < SPAN; slot += LANES)
        for (int64_t dim = 0; dim < slots.head_dim; dim += PANEL) {
            __m512i pairs[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                pairs[i] = first + slot + i < slots.context ? _mm512_loadu_si512(slots.key(first + slot + i) + dim)
                                                            : _mm512_setzero_si512();
            transpose(pairs);
            Bf16* to = panels + slot / PANEL * PANEL * slots.head_dim + dim * PANEL + slot % PANEL * 2;
            for (int64_t i = 0; i < LANES; ++i) _mm512_storeu_si512(to + 2 * PANEL * i, pairs[i]);
        }
}

// panels[32 dims][slot pair][half][dim of the half][2]
void pack_values(const Slots& slots, int64_t first, Bf16* panels) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t pair = 0; pair < SPAN / 2; ++pair) {
        const int64_t slot = first + 2 * pair;
        const Bf16* low = slot < slots.context ? slots.value(slot) : nullptr;
        const Bf16* high = slot + 1 < slots.context ? slots.value(slot + 1) : nullptr;
        for (int64_t dim = 0; dim < slots.head_dim; dim += LANES) {
            const __m512i a = low ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(low + dim))) : zero;
            const __m512i b = high ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(high + dim))) : zero;
            Bf16* to = panels + dim / PANEL * SPAN * PANEL + 2 * (pair * PANEL + dim % PANEL);
            _mm512_storeu_si512(to, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
        }
    }
}

// What has been seen of the context by each row so far. The lanes of `total` are summed at the end.
struct Running {
    std::vector<float> acc, total;  // [num_rows, head_dim], [num_rows, LANES]
    std::vector<float> largest;

    Running(int64_t num_rows, int64_t head_dim)
        : acc(num_rows * head_dim), total(num_rows * LANES), largest(num_rows, MINUS_INFINITY) {}
};

constexpr float LOG2_E = 1.44269504f;

// 2^x, within 4e-6 of it relatively, which is little beside what bf16 rounds; 0 for -inf, NaN for NaN.
// A polynomial of degree 4 that was fitted to 2^f for |f| <= 1/2 with the least relative error.
INLINE Floats power_of_two(Floats x) {
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 0);
    Floats p = f * 0.00957006f + 0.05597077f;
    p = p * f + 0.24025244f;
    p = p * f + 0.6931134f;
    p = p * f + 0.9999988f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
}

// Scores of a span, of which the row sees `seen` >= 1 slots, all of them if IS_WHOLE, become bf16 weights; returns what
// earlier sums shrink by.
// scale: from scores to exponents of 2; more than 0
template <bool IS_WHOLE>
float weigh(const Tile* scores, int64_t row, int64_t num_panels, int64_t seen, float scale, Bf16* weights,
                   float& largest_score, float* total) {
    const int64_t num_vectors = IS_WHOLE ? 2 * SPAN_PANELS : 2 * num_panels;
    Floats all[2 * SPAN_PANELS];
    Floats top = splat(MINUS_INFINITY);
#pragma GCC unroll 8
    for (int64_t i = 0; i < num_vectors; ++i) {
        all[i] = load(scores[i / 2][row] + i % 2 * LANES);
        if (!IS_WHOLE) all[i] = first_of(all[i], seen - i * LANES, MINUS_INFINITY);
        top = maximum(top, all[i]);
    }
    float shrink = 1;
    // Seldom true after the first span, and only then the largest lane has to be found.
    if (_mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(largest_score), _CMP_NLE_UQ)) {
        const float largest_now = largest(top);
        shrink = power_of_two(splat((largest_score - largest_now) * scale))[0];
        largest_score = largest_now;
    }
    const float largest_exponent = largest_score * scale;
    Floats sum = load(total) * shrink;
#pragma GCC unroll 8
    for (int64_t i = 0; i < num_vectors; ++i) {
        const Floats weight = power_of_two(all[i] * scale - largest_exponent);
        store(weights + i * LANES, weight);
        sum += weight;
    }
    store(total, sum);
    return shrink;
}

// Rows first .. first + count - 1 of a pass take in a span. Row r is query r / group, at position start + r / group.
void take_in(Products& products, const Bf16* q, const Bf16* keys, const Bf16* values, int64_t first, int64_t count,
             int64_t group, int64_t start, int64_t slot, int64_t head_dim, float scale, Running& running) {
    alignas(64) Tile scores[SPAN_PANELS], tile;
    alignas(64) Bf16 weights[MAX_ROWS][SPAN];
    float shrink[MAX_ROWS];
    const auto seen_by = [=](int64_t row) { return std::min(SPAN, start + (first + row) / group + 1 - slot); };
    const int64_t num_panels = (seen_by(count - 1) + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < num_panels; ++panel)
        products.multiply(count, q + first * head_dim, head_dim, keys + panel * PANEL * head_dim, head_dim / 2,
                          scores[panel]);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t seen = seen_by(row);
        const auto weigh_row = seen == SPAN ? weigh<true> : weigh<false>;
        shrink[row] = weigh_row(scores, row, num_panels, seen, scale * LOG2_E, weights[row],
                                running.largest[first + row], &running.total[(first + row) * LANES]);
    }
    for (int64_t dim = 0; dim < head_dim; dim += PANEL, values += SPAN * PANEL) {
        products.multiply(count, weights[0], SPAN, values, num_panels * PANEL / 2, tile);
        for (int64_t row = 0; row < count; ++row)
            for (int64_t i = 0; i < PANEL; i += LANES) {
                float* acc = running.acc.data() + (first + row) * head_dim + dim + i;
                store(acc, load(acc) * shrink[row] + load(tile[row] + i));
            }
    }
}

// Queries of one KV head at positions start .. start + num_queries - 1; q and out hold `group` heads side by side.
void attend(Products& products, const Bf16* q, int64_t q_row_stride, int64_t q_head_stride, const Slots& slots, int64_t start,
            int64_t num_queries, int64_t group, float scale, Bf16* out, int64_t out_row_stride) {
    const int64_t head_dim = slots.head_dim, num_rows = num_queries * group;
    std::vector<Bf16> rows(num_rows * head_dim), keys(SPAN * head_dim), values(SPAN * head_dim);
    for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(&rows[row * head_dim], q + row / group * q_row_stride + row % group * q_head_stride,
                    head_dim * sizeof(Bf16));
    Running running(num_rows, head_dim);
    for (int64_t slot = 0; slot < start + num_queries; slot += SPAN) {
        pack_keys(slots, slot, keys.data());
        pack_values(slots, slot, values.data());
        int64_t first = std::max(int64_t(0), slot - start) * group;
        for (int64_t left = (num_rows - first + MAX_ROWS - 1) / MAX_ROWS; left > 0; --left) {
            const int64_t count = rows_of_block(num_rows - first, left);
            take_in(products, rows.data(), keys.data(), values.data(), first, count, group, start, slot, head_dim, scale,
                    running);
            first += count;
        }
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        const float share = 1 / sum(load(&running.total[row * LANES]));
        for (int64_t dim = 0; dim < head_dim; dim += LANES)
            store(out + row / group * out_row_stride + row % group * head_dim + dim,
                  load(&running.acc[row * head_dim + dim]) * share);
    }
}

}  // namespace

// q [num_queries, num_kv_heads * group, head_dim], the last positions of `context`; out the same, dense.
extern "C" void chunk_attention_bf16(const Bf16* q, int64_t q_row_stride, int64_t q_head_stride, const Bf16* kv,
                                     int64_t block_stride, int64_t kv_head_stride, int64_t kv_stride,
                                     int64_t slot_stride, int64_t block_size, const int64_t* table, int64_t context,
                                     int64_t num_queries, int64_t num_kv_heads, int64_t group, int64_t head_dim,
                                     float scale, Bf16* out) {
    const int64_t pass = std::max(int64_t(1), MAX_PASS_ROWS / group), out_row_stride = num_kv_heads * group * head_dim;
    Products products;
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        const Slots slots{kv + kv_head * kv_head_stride, table, block_stride, kv_stride, slot_stride, block_size,
                          context, head_dim};
        const int64_t head = kv_head * group;
        for (int64_t first = 0; first < num_queries; first += pass)
            attend(products, q + first * q_row_stride + head * q_head_stride, q_row_stride, q_head_stride, slots,
                   context - num_queries + first, std::min(pass, num_queries - first), group, scale,
                   out + first * out_row_stride + head * head_dim, out_row_stride);
    }
}

#endif
