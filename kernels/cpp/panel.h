// Rows times a panel, on CPUs that multiply pairs of bf16 themselves (AVX-512-BF16).
//
// A panel holds 32 outputs: for each pair of inputs two vectors of 16 outputs x 2 inputs. Up to MAX_ROWS rows meet it
// in registers, one broadcast pair of inputs at a time. Every sum is one fp32 accumulator in the order of the inputs:
// a row's result does not depend on the rows beside it.
#pragma once

#include "vector.h"

#ifdef __AVX512BF16__

constexpr int64_t PANEL = 2 * LANES;
// 2 accumulators a row, 2 vectors of weights and the broadcast pair: 31 of 32 registers.
constexpr int64_t MAX_ROWS = 14;

// With many rows the hardware reads ahead too late: it sees the next weights only when the products reach them. With few
// it does better alone. 8 rows 15.7 -> 13.1 ms, 16 rows 27.4 -> 22.9 ms (SmolLM2-135M, one core, December 2026).
constexpr int64_t AHEAD_ROWS = 5, AHEAD = 8192;

typedef float Tile[MAX_ROWS][PANEL];

template <int64_t ROWS>
INLINE void multiply(const Bf16* x, int64_t x_stride, const Bf16* panel, int64_t num_pairs, Tile& out) {
    __m512 low[ROWS], high[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; ++pair, panel += 2 * PANEL) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(panel), b = (__m512bh)_mm512_loadu_si512(panel + PANEL);
        if (ROWS >= AHEAD_ROWS) {
            __builtin_prefetch(panel + AHEAD, 0, 2);
            __builtin_prefetch(panel + AHEAD + PANEL, 0, 2);
        }
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
void multiply_most(int64_t num_rows, const Bf16* x, int64_t x_stride, const Bf16* panel, int64_t num_pairs, Tile& out) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS) return multiply_most<ROWS - 1>(num_rows, x, x_stride, panel, num_pairs, out);
    multiply<ROWS>(x, x_stride, panel, num_pairs, out);
}

// out[row][i] = x[row] . output i of the panel, for 1 to MAX_ROWS rows.
inline void multiply_rows(int64_t num_rows, const Bf16* x, int64_t x_stride, const Bf16* panel, int64_t num_pairs,
                          Tile& out) {
    multiply_most<MAX_ROWS>(num_rows, x, x_stride, panel, num_pairs, out);
}

// Rows in the next of `left` blocks of at most MAX_ROWS, all as equal as can be: a block of two rows would take
// as long as one of four.
INLINE int64_t rows_of_block(int64_t num_rows, int64_t left) { return (num_rows + left - 1) / left; }

#endif
