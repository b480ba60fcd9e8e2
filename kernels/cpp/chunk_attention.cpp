// Causal attention of a prompt's chunk over a paged KV pool, in products of bf16 panels (see panel.h).
//
// The context is taken 32 slots at a time: their K becomes a panel of 32 outputs over the head's dims, their V panels
// of 32 dims over the slots. The queries of all heads that share a KV head are the rows. Softmax is corrected as
// larger scores appear, in fp32; only its weights are rounded to bf16. Called through kernels/cpu.py.
#include <algorithm>
#include <vector>

#include "panel.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t SLOTS = PANEL;
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

// panel[dim pair][half][slot of the half][2]
void pack_keys(const Slots& slots, int64_t first, Bf16* panel) {
    const int64_t num_pairs = slots.head_dim / 2;
    for (int64_t slot = 0; slot < SLOTS; ++slot) {
        const bool is_owned = first + slot < slots.context;
        const Bf16* key = is_owned ? slots.key(first + slot) : nullptr;
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            uint32_t both = 0;
            if (is_owned) std::memcpy(&both, key + 2 * pair, sizeof both);
            std::memcpy(panel + 2 * (pair * SLOTS + slot), &both, sizeof both);
        }
    }
}

// panels[32 dims][slot pair][half][dim of the half][2]
void pack_values(const Slots& slots, int64_t first, Bf16* panels) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t pair = 0; pair < SLOTS / 2; ++pair) {
        const int64_t slot = first + 2 * pair;
        const Bf16* low = slot < slots.context ? slots.value(slot) : nullptr;
        const Bf16* high = slot + 1 < slots.context ? slots.value(slot + 1) : nullptr;
        for (int64_t dim = 0; dim < slots.head_dim; dim += LANES) {
            const __m512i a = low ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(low + dim))) : zero;
            const __m512i b = high ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(high + dim))) : zero;
            Bf16* to = panels + dim / PANEL * SLOTS * PANEL + 2 * (pair * PANEL + dim % PANEL);
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

// Scores of 32 slots, of which the row sees `seen` >= 1, become bf16 weights; returns what earlier sums shrink by.
INLINE float weigh(const float* scores, int64_t seen, float scale, Bf16* weights, float& largest_score, float* total) {
    Floats low = load(scores) * scale, high = load(scores + LANES) * scale;
    if (seen < SLOTS) {
        low = first_of(low, seen, MINUS_INFINITY);
        high = first_of(high, seen - LANES, MINUS_INFINITY);
    }
    const Floats top = maximum(low, high);
    float shrink = 1;
    // Seldom true after the first slots, and only then the largest lane has to be found.
    if (_mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(largest_score), _CMP_NLE_UQ)) {
        const float largest_now = largest(top);
        shrink = exp_nonpositive(splat(largest_score - largest_now))[0];
        largest_score = largest_now;
    }
    const Floats low_weights = exp_nonpositive(low - largest_score), high_weights = exp_nonpositive(high - largest_score);
    store(weights, low_weights);
    store(weights + LANES, high_weights);
    store(total, load(total) * shrink + (low_weights + high_weights));
    return shrink;
}

// Rows first .. first + count - 1 of a pass take in 32 slots. Row r is query r / group, at position start + r / group.
void take_in(const Bf16* q, const Bf16* keys, const Bf16* values, int64_t first, int64_t count, int64_t group,
             int64_t start, int64_t slot, int64_t head_dim, float scale, Running& running) {
    alignas(64) Tile tile;
    alignas(64) Bf16 weights[MAX_ROWS][SLOTS];
    float shrink[MAX_ROWS];
    multiply_rows(count, q + first * head_dim, head_dim, keys, head_dim / 2, tile);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t seen = std::min(SLOTS, start + (first + row) / group + 1 - slot);
        shrink[row] = weigh(tile[row], seen, scale, weights[row], running.largest[first + row],
                            &running.total[(first + row) * LANES]);
    }
    for (int64_t dim = 0; dim < head_dim; dim += PANEL, values += SLOTS * PANEL) {
        multiply_rows(count, weights[0], SLOTS, values, SLOTS / 2, tile);
        for (int64_t row = 0; row < count; ++row)
            for (int64_t i = 0; i < PANEL; i += LANES) {
                float* acc = running.acc.data() + (first + row) * head_dim + dim + i;
                store(acc, load(acc) * shrink[row] + load(tile[row] + i));
            }
    }
}

// Queries of one KV head at positions start .. start + num_queries - 1; q and out hold `group` heads side by side.
void attend(const Bf16* q, int64_t q_row_stride, int64_t q_head_stride, const Slots& slots, int64_t start,
            int64_t num_queries, int64_t group, float scale, Bf16* out, int64_t out_row_stride) {
    const int64_t head_dim = slots.head_dim, num_rows = num_queries * group;
    std::vector<Bf16> rows(num_rows * head_dim), keys(SLOTS * head_dim), values(SLOTS * head_dim);
    for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(&rows[row * head_dim], q + row / group * q_row_stride + row % group * q_head_stride,
                    head_dim * sizeof(Bf16));
    Running running(num_rows, head_dim);
    for (int64_t slot = 0; slot < start + num_queries; slot += SLOTS) {
        pack_keys(slots, slot, keys.data());
        pack_values(slots, slot, values.data());
        int64_t first = std::max(int64_t(0), slot - start) * group;
        for (int64_t left = (num_rows - first + MAX_ROWS - 1) / MAX_ROWS; left > 0; --left) {
            const int64_t count = rows_of_block(num_rows - first, left);
            take_in(rows.data(), keys.data(), values.data(), first, count, group, start, slot, head_dim, scale,
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
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        const Slots slots{kv + kv_head * kv_head_stride, table, block_stride, kv_stride, slot_stride, block_size,
                          context, head_dim};
        const int64_t head = kv_head * group;
        for (int64_t first = 0; first < num_queries; first += pass)
            attend(q + first * q_row_stride + head * q_head_stride, q_row_stride, q_head_stride, slots,
                   context - num_queries + first, std::min(pass, num_queries - first), group, scale,
                   out + first * out_row_stride + head * head_dim, out_row_stride);
    }
}

#endif
