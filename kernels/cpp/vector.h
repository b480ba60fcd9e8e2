// Sixteen floats at a time, in GCC's vector extension: one register with AVX-512, several elsewhere.
//
// All arithmetic is fp32; bf16 is widened when loaded and rounded to nearest even when stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int64_t LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));

struct Bf16 {
    uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

INLINE Floats splat(float x) { return Floats{} + x; }

INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE Floats load(const Bf16* from) {
    HalfBits half;
    std::memcpy(&half, from, sizeof half);
#ifdef __AVX512F__
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (Floats)(__builtin_convertvector(half, Bits) << 16);
#endif
}

INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

INLINE void store(Bf16* to, Floats x) {
#ifdef __AVX512BF16__
    // The same rounding, but for subnormal floats, which become 0.
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
    const Bits bits = (Bits)x;
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Bits is_nan = (Bits)(x != x);
    const HalfBits half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), HalfBits);
#endif
    std::memcpy(to, &half, sizeof half);
}

// The first `count` lanes of x, the others `filler`.
INLINE Floats first_of(Floats x, int64_t count, float filler) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lanes < Ints{} + int32_t(count) ? x : splat(filler);
}

// The first `count` lanes, the others `filler`; reads nothing beyond them.
template <typename T>
INLINE Floats load_first(const T* from, int64_t count, float filler) {
    T lanes[LANES];
    store(lanes, splat(filler));
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}

template <typename T>
INLINE void store_first(T* to, Floats x, int64_t count) {
    T lanes[LANES];
    store(lanes, x);
    std::memcpy(to, lanes, count * sizeof(T));
}

// As engine/likelihood.py counts what is no number: NaN as minus infinity, plus infinity as the largest float.
INLINE Floats finite(Floats x) {
    const Floats most = splat(std::numeric_limits<float>::max());
    x = x == x ? x : splat(MINUS_INFINITY);
    return x < most ? x : most;
}

INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// What is at lane i comes from lane i + N.
template <int N>
INLINE Floats turned(Floats x) {
    const Ints from = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(x, (from + N) & 15);
}

INLINE float largest(Floats x) {
    x = maximum(x, turned<8>(x));
    x = maximum(x, turned<4>(x));
    x = maximum(x, turned<2>(x));
    return maximum(x, turned<1>(x))[0];
}

INLINE float sum(Floats x) {
    x += turned<8>(x);
    x += turned<4>(x);
    x += turned<2>(x);
    return (x + turned<1>(x))[0];
}

// Lane i of the result is the sum of a's lanes (first half of the indices) and b's that `low` and `high` pair.
INLINE Floats fold(Floats a, Floats b, Ints low, Ints high) {
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// Lane i is the sum of all lanes of rows[i].
INLINE Floats sums(const Floats rows[LANES]) {
    Floats by8[8], by4[4], by2[2];
    for (int i = 0; i < 8; ++i)
        by8[i] = fold(rows[2 * i], rows[2 * i + 1], Ints{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
                      Ints{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    for (int i = 0; i < 4; ++i)
        by4[i] = fold(by8[2 * i], by8[2 * i + 1], Ints{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
                      Ints{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
    for (int i = 0; i < 2; ++i)
        by2[i] = fold(by4[2 * i], by4[2 * i + 1], Ints{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
                      Ints{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
    return fold(by2[0], by2[1], Ints{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
                Ints{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

// e^x for x <= 0, within 2e-7 of it relatively; 0 below -87, where floats become subnormal; NaN stays NaN.
// x = (n + f) ln 2 with |f| <= 1/2, and 2^f by its Taylor series, whose seventh-order rest is below 2e-8.
INLINE Floats exp_nonpositive(Floats x) {
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats floor = splat(-87.0f);
    const Floats clamped = x < floor ? floor : x;
    const Floats shifted = clamped * 1.44269504f + shift;
    const Floats n = shifted - shift;
    // ln 2 in two parts, the first with few enough bits that n * part is exact.
    const Floats f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const Floats result = (Floats)((Bits)p + (((Bits)shifted) << 23));
    return x < floor ? Floats{} : result;
}
