// Rows times a panel of bf16 weights, on CPUs that multiply pairs of bf16 themselves (AVX-512-BF16).
//
// A panel holds 32 outputs: for each pair of inputs two vectors of 16 outputs x 2 inputs; of bytes, for each four inputs
// two vectors of 16 outputs x 4. `Products` multiplies up to MAX_ROWS rows with one; every sum is one fp32 accumulator in the order of the inputs: a row's result does not depend
// on the rows beside it. Two kinds of CPU have one each: panel_tiles.h where there are tile registers, else
// panel_vectors.h.
#pragma once

#include "vector.h"

#ifdef __AVX512BF16__

constexpr int64_t PANEL = 2 * LANES;

// What each 32 bits of a row hold, and how they are added to the sums of a row: two vectors of weights, two of sums.
struct Pairs {
    typedef Bf16 Input;
    typedef Bf16 Weight;
    static constexpr int64_t COUNT = 2;

    INLINE static void add(__m512i inputs, const Weight* weights, __m512i& low, __m512i& high) {
        const __m512bh both = (__m512bh)inputs;
        low = (__m512i)_mm512_dpbf16_ps((__m512)low, (__m512bh)_mm512_loadu_si512(weights), both);
        high = (__m512i)_mm512_dpbf16_ps((__m512)high, (__m512bh)_mm512_loadu_si512(weights + PANEL), both);
    }
};

// Sums are int32, in a tile's memory, too.
struct Fours {
    typedef uint8_t Input;
    typedef int8_t Weight;
    static constexpr int64_t COUNT = 4;

#ifdef __AVX512VNNI__
    INLINE static void add(__m512i inputs, const Weight* weights, __m512i& low, __m512i& high) {
        low = _mm512_dpbusd_epi32(low, inputs, _mm512_loadu_si512(weights));
        high = _mm512_dpbusd_epi32(high, inputs, _mm512_loadu_si512(weights + 2 * PANEL));
    }
#endif
};

template <typename Input>
INLINE __m512i broadcast32(const Input* inputs) {
    int32_t bits;
    std::memcpy(&bits, inputs, sizeof bits);
    return _mm512_set1_epi32(bits);
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(NO_TILES)
#include "panel_tiles.h"
#else
#include "panel_vectors.h"
#endif

typedef PanelProducts<Pairs> Products;
typedef PanelProducts<Fours> ByteProducts;

#endif
