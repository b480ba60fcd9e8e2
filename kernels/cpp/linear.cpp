// Products with packed bf16 weights on CPUs that multiply bf16 pairs themselves (AVX-512-BF16): y = x W^T and more.
//
// A panel holds 32 outputs of W, for each pair of inputs two vectors of 16 outputs x 2 inputs, so that a product
// reads all weights once and in order. Up to MAX_ROWS rows of x meet a panel in registers, one broadcast pair of
// inputs at a time; more rows find the panel in the cache. Every sum is one fp32 accumulator in the order of the
// inputs: a row's result does not depend on the rows beside it. Called through kernels/packed_linear.py.
#include "vector.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t PANEL = 2 * LANES;
// 2 accumulators a row, 2 vectors of weights and the broadcast pair: 31 of 32 registers.
constexpr int64_t MAX_ROWS = 14;

typedef float Tile[MAX_ROWS][PANEL];

template <int64_t ROWS>
INLINE void multiply(const Bf16* x, int64_t x_stride, const Bf16* panel, int64_t num_pairs, Tile& out) {
    __m512 low[ROWS], high[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; ++pair, panel += 2 * PANEL) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(panel), b = (__m512bh)_mm512_loadu_si512(panel + PANEL);
#pragma GCC unroll 14
        for (int64_t row = 0; row < ROWS; ++row) {
            int32_t inputs;
            std::memcpy(&inputs, x + row * x_stride + 2 * pair, sizeof inputs);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(inputs);
            low[row] = _mm512_dpbf16_ps(low[row], a, both);
            high[row] = _mm512_dpbf16_ps(high[row], b, both);
        }
    }
    for (int64_t row = 0; row < ROWS; ++row) {
        store(out[row], (Floats)low[row]);
        store(out[row] + LANES, (Floats)high[row]);
    }
}

template <int64_t ROWS>
void multiply_rows(int64_t num_rows, const Bf16* x, int64_t x_stride, const Bf16* panel, int64_t num_pairs, Tile& out) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS) return multiply_rows<ROWS - 1>(num_rows, x, x_stride, panel, num_pairs, out);
    multiply<ROWS>(x, x_stride, panel, num_pairs, out);
}

// Calls finish(tile, first row, number of rows, panel) for every tile of the product.
template <typename Finish>
INLINE void product(const Bf16* x, int64_t x_stride, const Bf16* weight, int64_t num_rows, int64_t num_panels,
                    int64_t in_features, Finish finish) {
    const int64_t num_blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t panel = 0; panel < num_panels; ++panel, weight += PANEL * in_features) {
        int64_t first = 0;
        for (int64_t left = num_blocks; left > 0; --left) {
            // Blocks as equal as can be: one of a row or two would cost as much as one of four.
            const int64_t count = (num_rows - first + left - 1) / left;
            alignas(64) Tile tile;
            multiply_rows<MAX_ROWS>(count, x + first * x_stride, x_stride, weight, in_features / 2, tile);
            finish(tile, first, count, panel);
            first += count;
        }
    }
}

// y = x W^T, + bias and + y where there are any.
template <typename T>
INLINE void linear(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, T* y, int64_t num_rows,
                   int64_t out_features, int64_t in_features, bool is_added) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    product(x, x_stride, weight, num_rows, num_panels, in_features,
            [=](const Tile& tile, int64_t first, int64_t count, int64_t panel) {
                for (int64_t row = 0; row < count; ++row)
                    for (int64_t i = 0; i < PANEL; i += LANES) {
                        const int64_t column = panel * PANEL + i, num_columns = out_features - column;
                        T* to = y + (first + row) * out_features + column;
                        Floats sum = load(tile[row] + i);
                        if (bias) sum += load(bias + column);
                        if (num_columns >= LANES)
                            store(to, is_added ? sum + load(to) : sum);
                        else if (num_columns > 0)
                            store_first(to, is_added ? sum + load_first(to, num_columns, 0) : sum, num_columns);
                    }
            });
}

// x / (1 + e^-x) without an overflow on either side.
INLINE Floats silu(Floats x) {
    const Floats e = exp_nonpositive(x < Floats{} ? x : -x);
    return x * (x < Floats{} ? e : splat(1)) / (e + 1);
}

}  // namespace

extern "C" int64_t multiplies_bf16() { return 1; }

extern "C" void linear_bf16(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, Bf16* y,
                            int64_t num_rows, int64_t out_features, int64_t in_features, int64_t is_added) {
    if (is_added)
        linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, true);
    else
        linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, false);
}

extern "C" void logits_bf16(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, float* y,
                            int64_t num_rows, int64_t out_features, int64_t in_features) {
    linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, false);
}

// y = silu(x G^T) * (x U^T): the first half of a panel is G's, the second U's, of the same 16 outputs.
extern "C" void gated_linear_bf16(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, Bf16* y,
                                  int64_t num_rows, int64_t out_features, int64_t in_features) {
    const int64_t num_panels = (out_features + LANES - 1) / LANES;
    product(x, x_stride, weight, num_rows, num_panels, in_features,
            [=](const Tile& tile, int64_t first, int64_t count, int64_t panel) {
                const int64_t column = panel * LANES, num_columns = out_features - column;
                for (int64_t row = 0; row < count; ++row) {
                    Floats gate = load(tile[row]), up = load(tile[row] + LANES);
                    if (bias) gate += load(bias + 2 * column), up += load(bias + 2 * column + LANES);
                    const Floats product = silu(gate) * up;
                    Bf16* to = y + (first + row) * out_features + column;
                    if (num_columns >= LANES)
                        store(to, product);
                    else
                        store_first(to, product, num_columns);
                }
            });
}

#else

extern "C" int64_t multiplies_bf16() { return 0; }

#endif
