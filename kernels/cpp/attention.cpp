// Attention of single queries over a paged KV pool, and the softmax of a chunk's scores.
//
// Strides count elements; every tensor's last dim is dense. Called through kernels/cpu.py, which checks shapes.
#include <algorithm>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t MAX_BLOCK_SIZE = 256;
constexpr int64_t MAX_GROUP = 8;

// The block that is read next: each step over a slot of this one, first for the scores and then for the values, asks for
// a row of it. The memory is read fastest when the level-2 cache is told, which can wait for more lines than the first
// level, and when K's page and V's take turns: 8.4 GB/s without, 17 and 21 with the first and with both (8 KB pieces of
// 190 MB, one core, December 2026).
template <typename T>
struct Ahead {
    const T* keys;
    int64_t kv_stride, slot_stride;

    // Not inlined it would be a function without effect to GCC, and left out.
    INLINE void fetch(int64_t step, int64_t dim) const {
        __builtin_prefetch(keys + step / 2 * slot_stride + (step & 1) * kv_stride + dim, 0, 2);
    }
};

// One kv head of one row's blocks; `after` is where the blocks begin that are read next.
template <typename T>
struct Blocks {
    const T* base;
    const int64_t* table;
    const T* after;
    int64_t block_stride, kv_stride, slot_stride, block_size;

    const T* keys(int64_t index) const { return base + table[index] * block_stride; }

    Ahead<T> ahead(int64_t first, int64_t index, int64_t context) const {
        return {first + block_size < context ? keys(index + 1) : after, kv_stride, slot_stride};
    }
};

// G query heads that share a kv head: what has been seen of the context so far.
template <int G>
struct Running {
    float acc[G][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float largest[G];
    float total[G];
};

// weights[g][slot] = q_g . k_slot for `count` slots, -inf up to the next multiple of LANES.
template <typename T, int G>
void score(const float (*q)[MAX_HEAD_DIM], const T* keys, Ahead<T> ahead, int64_t slot_stride, int64_t head_dim,
           int64_t count, float (*weights)[MAX_BLOCK_SIZE]) {
    Floats products[G][LANES];
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t taken = std::min(LANES, count - first);
        for (int64_t slot = 0; slot < taken; ++slot) {
            const T* key = keys + (first + slot) * slot_stride;
            Floats product[G] = {};
            for (int64_t dim = 0; dim < head_dim; dim += LANES) {
                const Floats k = load(key + dim);
                ahead.fetch(first + slot, dim);
                for (int g = 0; g < G; ++g) product[g] += load(q[g] + dim) * k;
            }
            for (int g = 0; g < G; ++g) products[g][slot] = product[g];
        }
        for (int g = 0; g < G; ++g) {
            for (int64_t slot = taken; slot < LANES; ++slot) products[g][slot] = Floats{};
            store(weights[g] + first, first_of(sums(products[g]), taken, MINUS_INFINITY));
        }
    }
}

// Turn scores into weights relative to the largest score so far; what was summed before shrinks with it.
template <int G>
void weigh(float (*weights)[MAX_BLOCK_SIZE], int64_t count, int64_t head_dim, Running<G>& running) {
    for (int g = 0; g < G; ++g) {
        Floats top = splat(running.largest[g]);
        for (int64_t first = 0; first < count; first += LANES) top = maximum(top, load(weights[g] + first));
        const float largest_now = largest(top);
        if (largest_now > running.largest[g]) {
            const float shrink = exp_nonpositive(splat(running.largest[g] - largest_now))[0];
            for (int64_t dim = 0; dim < head_dim; dim += LANES)
                store(running.acc[g] + dim, load(running.acc[g] + dim) * shrink);
            running.total[g] *= shrink;
            running.largest[g] = largest_now;
        }
        Floats total = {};
        for (int64_t first = 0; first < count; first += LANES) {
            const Floats weight = exp_nonpositive(load(weights[g] + first) - running.largest[g]);
            store(weights[g] + first, weight);
            total += weight;
        }
        running.total[g] += sum(total);
    }
}

// acc_g += sum over slots of weights[g][slot] * v_slot, for W vectors of head_dim at once.
template <typename T, int G, int W>
INLINE void add_values(const float (*weights)[MAX_BLOCK_SIZE], const T* values, Ahead<T> ahead, int64_t slot_stride,
                       int64_t dim, int64_t block_size, int64_t count, Running<G>& running) {
    Floats acc[G][W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) acc[g][w] = load(running.acc[g] + dim + w * LANES);
    for (int64_t slot = 0; slot < count; ++slot) {
        for (int w = 0; w < W; ++w) {
            ahead.fetch(block_size + slot, dim + w * LANES);
            const Floats v = load(values + slot * slot_stride + dim + w * LANES);
            for (int g = 0; g < G; ++g) acc[g][w] += weights[g][slot] * v;
        }
    }
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) store(running.acc[g] + dim + w * LANES, acc[g][w]);
}

// The softmax never sees a whole row of scores: blocks are taken one by one, their maximum corrected as it grows.
template <typename T, int G>
void attend(const T* q, int64_t q_head_stride, Blocks<T> blocks, int64_t context, int64_t head_dim, float scale, T* out) {
    float scaled[G][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float weights[G][MAX_BLOCK_SIZE] __attribute__((aligned(64)));
    Running<G> running;
    for (int g = 0; g < G; ++g) {
        running.largest[g] = MINUS_INFINITY;
        running.total[g] = 0;
        for (int64_t dim = 0; dim < head_dim; dim += LANES) {
            store(scaled[g] + dim, load(q + g * q_head_stride + dim) * scale);
            store(running.acc[g] + dim, Floats{});
        }
    }
    constexpr int WIDTH = G <= 4 ? 4 : 2;
    for (int64_t first = 0, index = 0; first < context; first += blocks.block_size, ++index) {
        const int64_t count = std::min(blocks.block_size, context - first);
        const T* keys = blocks.keys(index);
        const Ahead<T> ahead = blocks.ahead(first, index, context);
        score<T, G>(scaled, keys, ahead, blocks.slot_stride, head_dim, count, weights);
        weigh<G>(weights, count, head_dim, running);
        const T* values = keys + blocks.kv_stride;
        int64_t dim = 0;
        for (; dim + WIDTH * LANES <= head_dim; dim += WIDTH * LANES)
            add_values<T, G, WIDTH>(weights, values, ahead, blocks.slot_stride, dim, blocks.block_size, count, running);
        for (; dim < head_dim; dim += LANES)
            add_values<T, G, 1>(weights, values, ahead, blocks.slot_stride, dim, blocks.block_size, count, running);
    }
    for (int g = 0; g < G; ++g)
        for (int64_t dim = 0; dim < head_dim; dim += LANES)
            store(out + g * head_dim + dim, load(running.acc[g] + dim) / running.total[g]);
}

#ifdef __AVX512BF16__

// The same where the CPU multiplies pairs of bf16 itself: of neighbouring dims for the scores, of neighbouring slots for
// the values. Weights are rounded to bf16, as those of chunks are. head_dim is a multiple of PAIRED.
constexpr int64_t PAIRED = 2 * LANES;
typedef __m512bh PairedQuery[MAX_HEAD_DIM / PAIRED];

INLINE __m512i load_pairs(const Bf16* from) { return _mm512_loadu_si512(from); }

template <int G>
INLINE void score_pairs(const PairedQuery* q, float scale, const Bf16* keys, Ahead<Bf16> ahead, int64_t slot_stride,
                        int64_t head_dim, int64_t count, float (*weights)[MAX_BLOCK_SIZE]) {
    Floats products[G][LANES];
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t taken = std::min(LANES, count - first);
        for (int64_t slot = 0; slot < taken; ++slot) {
            const int64_t offset = (first + slot) * slot_stride;
            __m512 product[G];
            for (int g = 0; g < G; ++g) product[g] = _mm512_setzero_ps();
            for (int64_t dim = 0; dim < head_dim; dim += PAIRED) {
                const __m512bh k = (__m512bh)load_pairs(keys + offset + dim);
                ahead.fetch(first + slot, dim);
                for (int g = 0; g < G; ++g) product[g] = _mm512_dpbf16_ps(product[g], q[g][dim / PAIRED], k);
            }
            for (int g = 0; g < G; ++g) products[g][slot] = (Floats)product[g];
        }
        for (int g = 0; g < G; ++g) {
            for (int64_t slot = taken; slot < LANES; ++slot) products[g][slot] = Floats{};
            store(weights[g] + first, first_of(sums(products[g]) * scale, taken, MINUS_INFINITY));
        }
    }
}

// W times PAIRED dims at once. Two slots' values are interleaved within each quarter of a vector, so an accumulator
// holds dims 0-3, 8-11, 16-19 and 24-27 of its 32 and the next one the others, until in_order.
template <int G, int W>
INLINE void add_pairs(const Bf16 (*weights)[MAX_BLOCK_SIZE], const Bf16* values, Ahead<Bf16> ahead,
                      int64_t slot_stride, int64_t dim, int64_t block_size, int64_t count, Running<G>& running) {
    __m512 acc[G][2 * W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < 2 * W; ++w) acc[g][w] = (__m512)load(running.acc[g] + dim + w * LANES);
    for (int64_t slot = 0; slot < count; slot += 2) {
        __m512bh v[2 * W];
        for (int w = 0; w < W; ++w) {
            const int64_t offset = slot * slot_stride + dim + w * PAIRED;
            ahead.fetch(block_size + slot, dim + w * PAIRED);
            ahead.fetch(block_size + slot + 1, dim + w * PAIRED);
            const __m512i even = load_pairs(values + offset);
            // Whatever lies beyond the context must not be multiplied, not even by 0.
            const __m512i odd = slot + 1 < count ? load_pairs(values + offset + slot_stride) : _mm512_setzero_si512();
            v[2 * w] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            v[2 * w + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        }
        for (int g = 0; g < G; ++g) {
            int32_t both;
            std::memcpy(&both, weights[g] + slot, sizeof both);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
            for (int w = 0; w < 2 * W; ++w) acc[g][w] = _mm512_dpbf16_ps(acc[g][w], v[w], weight);
        }
    }
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < 2 * W; ++w) store(running.acc[g] + dim + w * LANES, (Floats)acc[g][w]);
}

// PAIRED dims of add_pairs in their order.
INLINE void in_order(float* dims) {
    const Floats even = load(dims), odd = load(dims + LANES);
    store(dims, __builtin_shuffle(even, odd, Ints{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}));
    store(dims + LANES, __builtin_shuffle(even, odd, Ints{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31}));
}

template <int G>
void attend_pairs(const Bf16* q, int64_t q_head_stride, Blocks<Bf16> blocks, int64_t context, int64_t head_dim,
                  float scale, Bf16* out) {
    PairedQuery queries[G];
    float weights[G][MAX_BLOCK_SIZE] __attribute__((aligned(64)));
    Bf16 rounded[G][MAX_BLOCK_SIZE] __attribute__((aligned(64)));
    Running<G> running;
    for (int g = 0; g < G; ++g) {
        running.largest[g] = MINUS_INFINITY;
        running.total[g] = 0;
        for (int64_t dim = 0; dim < head_dim; dim += PAIRED)
            queries[g][dim / PAIRED] = (__m512bh)load_pairs(q + g * q_head_stride + dim);
        for (int64_t dim = 0; dim < head_dim; dim += LANES) store(running.acc[g] + dim, Floats{});
    }
    constexpr int WIDTH = G <= 6 ? 2 : 1;
    for (int64_t first = 0, index = 0; first < context; first += blocks.block_size, ++index) {
        const int64_t count = std::min(blocks.block_size, context - first);
        const Bf16* keys = blocks.keys(index);
        const Ahead<Bf16> ahead = blocks.ahead(first, index, context);
        score_pairs<G>(queries, scale, keys, ahead, blocks.slot_stride, head_dim, count, weights);
        weigh<G>(weights, count, head_dim, running);
        for (int g = 0; g < G; ++g)
            for (int64_t slot = 0; slot < count; slot += LANES) store(rounded[g] + slot, load(weights[g] + slot));
        const Bf16* values = keys + blocks.kv_stride;
        int64_t dim = 0;
        for (; dim + WIDTH * PAIRED <= head_dim; dim += WIDTH * PAIRED)
            add_pairs<G, WIDTH>(rounded, values, ahead, blocks.slot_stride, dim, blocks.block_size, count, running);
        for (; dim < head_dim; dim += PAIRED)
            add_pairs<G, 1>(rounded, values, ahead, blocks.slot_stride, dim, blocks.block_size, count, running);
    }
    for (int g = 0; g < G; ++g) {
        for (int64_t dim = 0; dim < head_dim; dim += PAIRED) in_order(running.acc[g] + dim);
        for (int64_t dim = 0; dim < head_dim; dim += LANES)
            store(out + g * head_dim + dim, load(running.acc[g] + dim) / running.total[g]);
    }
}

#endif

template <typename T>
using Attend = void (*)(const T*, int64_t, Blocks<T>, int64_t, int64_t, float, T*);

// By the number of query heads that share a kv head, less one.
template <typename T>
const Attend<T>* attend_by_size(int64_t) {
    static const Attend<T> by_size[MAX_GROUP] = {attend<T, 1>, attend<T, 2>, attend<T, 3>, attend<T, 4>,
                                                 attend<T, 5>, attend<T, 6>, attend<T, 7>, attend<T, 8>};
    return by_size;
}

#ifdef __AVX512BF16__
template <>
const Attend<Bf16>* attend_by_size<Bf16>(int64_t head_dim) {
    static const Attend<Bf16> whole[MAX_GROUP] = {attend<Bf16, 1>, attend<Bf16, 2>, attend<Bf16, 3>, attend<Bf16, 4>,
                                                  attend<Bf16, 5>, attend<Bf16, 6>, attend<Bf16, 7>, attend<Bf16, 8>};
    static const Attend<Bf16> paired[MAX_GROUP] = {attend_pairs<1>, attend_pairs<2>, attend_pairs<3>, attend_pairs<4>,
                                                   attend_pairs<5>, attend_pairs<6>, attend_pairs<7>, attend_pairs<8>};
    return head_dim % PAIRED ? whole : paired;
}
#endif

// K and V are read once for up to MAX_GROUP query heads.
template <typename T>
void decode_attention(const T* q, int64_t q_row_stride, int64_t q_head_stride, const T* kv, int64_t block_stride,
                      int64_t kv_head_stride, int64_t kv_stride, int64_t slot_stride, int64_t block_size,
                      const int64_t* tables, int64_t blocks_per_row, const int64_t* contexts, int64_t num_rows,
                      int64_t num_kv_heads, int64_t group, int64_t head_dim, float scale, T* out) {
    const Attend<T>* by_size = attend_by_size<T>(head_dim);
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t* table = tables + row * blocks_per_row;
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            const T* base = kv + kv_head * kv_head_stride;
            const T* after = base + table[0] * block_stride;
            if (kv_head + 1 < num_kv_heads)
                after += kv_head_stride;
            else if (row + 1 < num_rows)
                after = kv + table[blocks_per_row] * block_stride;
            const Blocks<T> blocks{base, table, after, block_stride, kv_stride, slot_stride, block_size};
            for (int64_t first = 0; first < group; first += MAX_GROUP) {
                const int64_t head = kv_head * group + first;
                by_size[std::min(MAX_GROUP, group - first) - 1](q + row * q_row_stride + head * q_head_stride,
                                                               q_head_stride, blocks, contexts[row], head_dim, scale,
                                                               out + (row * num_kv_heads * group + head) * head_dim);
            }
        }
    }
}

// In place: softmax over the first `seen` of `width` scores, the others become 0.
template <typename T>
void softmax_row(T* scores, int64_t seen, int64_t width, float* wide) {
    const int64_t whole = seen / LANES * LANES;
    const int64_t rest = seen - whole;
    // Within the row a whole vector may be loaded; copying only some of its lanes takes several times as long.
    const bool fits = whole + LANES <= width;
    const Floats last = fits ? first_of(load(scores + whole), rest, MINUS_INFINITY)
                             : load_first(scores + whole, rest, MINUS_INFINITY);
    Floats top = last, other_top = last;
    int64_t pair = 0;
    for (; pair + LANES < whole; pair += 2 * LANES) {
        top = maximum(top, load(scores + pair));
        other_top = maximum(other_top, load(scores + pair + LANES));
    }
    if (pair < whole) top = maximum(top, load(scores + pair));
    const float top_score = largest(maximum(top, other_top));
    Floats total = exp_nonpositive(last - top_score);
    store(wide + whole, total);
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats weight = exp_nonpositive(load(scores + i) - top_score);
        store(wide + i, weight);
        total += weight;
    }
    const float share = 1 / sum(total);
    for (int64_t i = 0; i < whole; i += LANES) store(scores + i, load(wide + i) * share);
    const Floats last_share = load(wide + whole) * share;
    if (fits)
        store(scores + whole, last_share);
    else
        store_first(scores + whole, last_share, width - whole);
    const int64_t written = std::min(whole + LANES, width);
    std::memset(static_cast<void*>(scores + written), 0, (width - written) * sizeof(T));
}

// scores [num_rows, width], dense. Row r is query r % tile of the last `tile` positions of `width`.
template <typename T>
void causal_softmax(T* scores, int64_t num_rows, int64_t tile, int64_t width) {
    struct alignas(64) Line {
        float lanes[LANES];
    };
    std::vector<Line> wide(width / LANES + 1);
    for (int64_t row = 0; row < num_rows; ++row)
        softmax_row(scores + row * width, width - tile + row % tile + 1, width, wide[0].lanes);
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
    extern "C" void decode_attention_##suffix(                                                                         \
        const T* q, int64_t q_row_stride, int64_t q_head_stride, const T* kv, int64_t block_stride,                    \
        int64_t kv_head_stride, int64_t kv_stride, int64_t slot_stride, int64_t block_size, const int64_t* tables,     \
        int64_t blocks_per_row, const int64_t* contexts, int64_t num_rows, int64_t num_kv_heads, int64_t group,        \
        int64_t head_dim, float scale, T* out) {                                                                       \
        decode_attention(q, q_row_stride, q_head_stride, kv, block_stride, kv_head_stride, kv_stride, slot_stride,     \
                         block_size, tables, blocks_per_row, contexts, num_rows, num_kv_heads, group, head_dim, scale, \
                         out);                                                                                         \
    }                                                                                                                  \
    extern "C" void causal_softmax_##suffix(T* scores, int64_t num_rows, int64_t tile, int64_t width) {                \
        causal_softmax(scores, num_rows, tile, width);                                                                 \
    }

EXPORT(f32, float)
EXPORT(bf16, Bf16)
