// Rows times a panel of bf16 weights, on CPUs that multiply pairs of bf16 themselves (AVX-512-BF16).
//
// A panel holds 32 outputs: for each pair of inputs two vectors of 16 outputs x 2 inputs. `Products` multiplies up to
// MAX_ROWS rows with one; every sum is one fp32 accumulator in the order of the inputs: a row's result does not depend
// on the rows beside it. Two kinds of CPU have one each: panel_tiles.h where there are tile registers, else
// panel_vectors.h.
#pragma once

#include "vector.h"

#ifdef __AVX512BF16__

constexpr int64_t PANEL = 2 * LANES;

// One more input pair of a row: two vectors of weights, two accumulators.
INLINE void add_pair(const Bf16* inputs, const Bf16* weights, __m512& low, __m512& high) {
    int32_t pair;
    std::memcpy(&pair, inputs, sizeof pair);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
    low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_loadu_si512(weights), both);
    high = _mm512_dpbf16_ps(high, (__m512bh)_mm512_loadu_si512(weights + PANEL), both);
}

#if defined(__AMX_BF16__) && !defined(NO_TILES)
#include "panel_tiles.h"
#else
#include "panel_vectors.h"
#endif

#endif
