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

// One kv head of one row's blocks.
template <typename T>
struct Blocks {
    const T* base;
    const int64_t* table;
    int64_t block_stride, kv_stride, slot_stride, block_size;

    const T* keys(int64_t index) const { return base + table[index] * block_stride; }
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
void score(const float (*q)[MAX_HEAD_DIM], const T* keys, const T* ahead, int64_t slot_stride, int64_t head_dim,
           int64_t count, float (*weights)[MAX_BLOCK_SIZE]) {
    Floats products[G][LANES];
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t taken = std::min(LANES, count - first);
        for (int64_t slot = 0; slot < taken; ++slot) {
            const T* key = keys + (first + slot) * slot_stride;
            __builtin_prefetch(ahead + (first + slot) * slot_stride);
            __builtin_prefetch(ahead + (first + slot) * slot_stride + 64 / sizeof(T));
            Floats product[G] = {};
            for (int64_t dim = 0; dim < head_dim; dim += LANES) {
                const Floats k = load(key + dim);
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
INLINE void add_values(const float (*weights)[MAX_BLOCK_SIZE], const T* values, const T* ahead, int64_t slot_stride,
                       int64_t dim, int64_t count, Running<G>& running) {
    Floats acc[G][W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) acc[g][w] = load(running.acc[g] + dim + w * LANES);
    for (int64_t slot = 0; slot < count; ++slot) {
        __builtin_prefetch(ahead + slot * slot_stride + dim);
        __builtin_prefetch(ahead + slot * slot_stride + dim + 64 / sizeof(T));
        for (int w = 0; w < W; ++w) {
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
        const T* ahead = first + blocks.block_size < context ? blocks.keys(index + 1) : keys;
        score<T, G>(scaled, keys, ahead, blocks.slot_stride, head_dim, count, weights);
        weigh<G>(weights, count, head_dim, running);
        const T* values = keys + blocks.kv_stride;
        ahead += blocks.kv_stride;
        int64_t dim = 0;
        for (; dim + WIDTH * LANES <= head_dim; dim += WIDTH * LANES)
            add_values<T, G, WIDTH>(weights, values, ahead, blocks.slot_stride, dim, count, running);
        for (; dim < head_dim; dim += LANES)
            add_values<T, G, 1>(weights, values, ahead, blocks.slot_stride, dim, count, running);
    }
    for (int g = 0; g < G; ++g)
        for (int64_t dim = 0; dim < head_dim; dim += LANES)
            store(out + g * head_dim + dim, load(running.acc[g] + dim) / running.total[g]);
}

template <typename T>
using Attend = void (*)(const T*, int64_t, Blocks<T>, int64_t, int64_t, float, T*);

// K and V are read once for up to MAX_GROUP query heads.
template <typename T>
void decode_attention(const T* q, int64_t q_row_stride, int64_t q_head_stride, const T* kv, int64_t block_stride,
                      int64_t kv_head_stride, int64_t kv_stride, int64_t slot_stride, int64_t block_size,
                      const int64_t* tables, int64_t blocks_per_row, const int64_t* contexts, int64_t num_rows,
                      int64_t num_kv_heads, int64_t group, int64_t head_dim, float scale, T* out) {
    static const Attend<T> by_size[MAX_GROUP] = {attend<T, 1>, attend<T, 2>, attend<T, 3>, attend<T, 4>,
                                                 attend<T, 5>, attend<T, 6>, attend<T, 7>, attend<T, 8>};
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            const Blocks<T> blocks{kv + kv_head * kv_head_stride, tables + row * blocks_per_row, block_stride,
                                   kv_stride, slot_stride, block_size};
            for (int64_t first = 0; first < group; first += MAX_GROUP) {
                const int64_t head = kv_head * group + first;
                by_size[std::min(MAX_GROUP, group - first) - 1](q + row * q_row_stride + head * q_head_stride,
                                                               q_head_stride, blocks, contexts[row], head_dim, scale,
                                                               out + (row * num_kv_heads * group + head) * head_dim);
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
