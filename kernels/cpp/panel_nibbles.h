// Rows times a panel of weights of 4 bits, for CPUs that multiply pairs of bf16 themselves.
//
// A weight is scale x nibble + least, with a bf16 scale and a bf16 least for each output and GROUP inputs: both of a
// group's 32 outputs lie one after the other. A panel holds 32 outputs. For each 8 inputs it has two vectors of 16 outputs x 32 bits; nibble 4 h + j, counted from the lowest, is
// that of input 2 j + h. So each 16 bits of a vector, shifted by 4 j and with the upper bits replaced by those of 128.0,
// are the bf16 numbers 128 + nibble of one pair of inputs, with no conversion. What that adds is the same for all outputs:
// it is taken off where a group's sum begins.
#pragma once

#include <algorithm>
#include <vector>

#include "panel.h"

#ifdef __AVX512BF16__

constexpr int64_t GROUP = 32;

// The most rows that are multiplied by weights unpacked in registers: the weights' way from memory is what takes time.
// More rows meet a panel that was unpacked once, rounded to bf16, and is multiplied as any other.
constexpr int64_t FEW_ROWS = PRODUCTS == 2 ? 3 : 12;

class NibbleWeights {
  public:
    NibbleWeights(const uint8_t* panels, const Bf16* scales, int64_t in_features)
        : panels_(panels), scales_(scales), in_features_(in_features), num_groups_((in_features + GROUP - 1) / GROUP) {}

    // The rows that the next panels meet.
    void begin(const Bf16* x, int64_t x_stride, int64_t num_rows) {
        is_few_ = num_rows <= FEW_ROWS;
        const int64_t width = num_groups_ * GROUP;
        if (!is_few_) {
            unpacked_.resize(std::max<size_t>(unpacked_.size(), num_groups_ * GROUP * PANEL));
            x_ = x;
            x_stride_ = x_stride;
            return;
        }
        inputs_.resize(std::max<size_t>(inputs_.size(), num_rows * width));
        sums_.resize(std::max<size_t>(sums_.size(), num_rows * num_groups_));
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t group = 0; group < num_groups_; ++group) {
                Bf16* to = inputs_.data() + row * width + group * GROUP;
                sums_[row * num_groups_ + group] = place(x + row * x_stride + group * GROUP, group, to);
            }
        x_ = inputs_.data();
        x_stride_ = width;
    }

    void open(int64_t panel) {
        nibbles_ = panels_ + panel * num_groups_ * GROUP_BYTES;
        panel_scales_ = scales_ + panel * num_groups_ * 2 * PANEL;
        if (!is_few_) unpack();
    }

    // out[row][i] = row first + row . output i of the panel.
    void multiply(int64_t first, int64_t num_rows, Tile& out) {
        if (is_few_)
            multiply_most<FEW_ROWS>(first, num_rows, out);
        else
            products_.multiply(num_rows, x_ + first * x_stride_, x_stride_, unpacked_.data(), in_features_ / 2, out);
    }

  private:
    static constexpr int64_t GROUP_BYTES = GROUP * PANEL / 2;
    static constexpr int64_t STEP = 8;  // nibbles of an output in two vectors
    static constexpr float OFFSET = 128;

    // A group's inputs, filled up with zeros; returns their sum.
    float place(const Bf16* x, int64_t group, Bf16* to) const {
        const int64_t left = std::min(GROUP, in_features_ - group * GROUP);
        float total = 0;
        for (int64_t i = 0; i < GROUP; i += LANES) {
            const int64_t count = std::min(LANES, left - i);
            const Floats values = count >= LANES ? load(x + i) : count > 0 ? load_first(x + i, count, 0) : Floats{};
            total += sum(values);
            store(to + i, values);
        }
        return total;
    }

    INLINE static __m512i nibbles(__m512i packed, int j) {
        // (packed >> 4 j) & 0x000f | 128.0
        return _mm512_ternarylogic_epi32(_mm512_srli_epi16(packed, 4 * j), _mm512_set1_epi16(0x000f),
                                         _mm512_set1_epi16(0x4300), 0xea);
    }

    template <int64_t ROWS>
    void multiply_all(int64_t first, Tile& out) {
        const Bf16* x = x_ + first * x_stride_;
        const uint8_t* packed = nibbles_;
        for (int64_t group = 0; group < num_groups_; ++group) {
            __m512 low[ROWS], high[ROWS];
            for (int64_t row = 0; row < ROWS; ++row)
                low[row] = high[row] = _mm512_set1_ps(-OFFSET * sums_[(first + row) * num_groups_ + group]);
            for (int64_t step = 0; step < GROUP / STEP; ++step, packed += 2 * 64, x += STEP) {
                const __m512i left = _mm512_loadu_si512(packed), right = _mm512_loadu_si512(packed + 64);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const __m512bh a = (__m512bh)nibbles(left, j), b = (__m512bh)nibbles(right, j);
#pragma GCC unroll 12
                    for (int64_t row = 0; row < ROWS; ++row) {
                        const __m512bh both = (__m512bh)broadcast32(x + row * x_stride_ + 2 * j);
                        low[row] = _mm512_dpbf16_ps(low[row], a, both);
                        high[row] = _mm512_dpbf16_ps(high[row], b, both);
                    }
                }
            }
            const Bf16* scales = panel_scales_ + group * 2 * PANEL;
            const Floats low_scale = load(scales), high_scale = load(scales + LANES);
            const Floats low_least = load(scales + PANEL), high_least = load(scales + PANEL + LANES);
#pragma GCC unroll 12
            for (int64_t row = 0; row < ROWS; ++row) {
                const Floats sum = splat(sums_[(first + row) * num_groups_ + group]);
                const Floats a = low_scale * (Floats)low[row] + low_least * sum;
                const Floats b = high_scale * (Floats)high[row] + high_least * sum;
                store(out[row], group ? load(out[row]) + a : a);
                store(out[row] + LANES, group ? load(out[row] + LANES) + b : b);
            }
        }
    }

    template <int64_t ROWS>
    void multiply_most(int64_t first, int64_t num_rows, Tile& out) {
        if constexpr (ROWS > 1)
            if (num_rows < ROWS) return multiply_most<ROWS - 1>(first, num_rows, out);
        multiply_all<ROWS>(first, out);
    }

    // The panel as panel.h has it.
    void unpack() {
        const uint8_t* packed = nibbles_;
        Bf16* to = unpacked_.data();
        for (int64_t group = 0; group < num_groups_; ++group) {
            const Bf16* from = panel_scales_ + group * 2 * PANEL;
            const Floats scales[2] = {load(from), load(from + LANES)};
            const Floats least[2] = {load(from + PANEL), load(from + PANEL + LANES)};
            for (int64_t step = 0; step < GROUP / STEP; ++step, packed += 2 * 64)
#pragma GCC unroll 4
                for (int pair = 0; pair < STEP / 2; ++pair)
#pragma GCC unroll 2
                    for (int64_t half = 0; half < 2; ++half, to += PANEL) {
                        const __m512i words = _mm512_loadu_si512(packed + half * 64);
                        const Bits both = pair_of(words, pair, scales[half], least[half]);
                        std::memcpy(to, &both, sizeof both);
                    }
        }
    }

    // Two bf16 numbers in each 32 bits, rounded to nearest.
    INLINE static Bits pair_of(__m512i words, int pair, Floats scale, Floats least) {
        const Bits raised = (Bits)nibbles(words, pair);
        const Floats even = ((Floats)(raised << 16) - OFFSET) * scale + least;
        const Floats odd = ((Floats)(raised & 0xffff0000) - OFFSET) * scale + least;
        return ((Bits)even + 0x8000) >> 16 | (((Bits)odd + 0x8000) & 0xffff0000);
    }

    // Kept from call to call: an allocation of this size goes to the system each time.
    static thread_local std::vector<Bf16> inputs_, unpacked_;
    static thread_local std::vector<float> sums_;

    const uint8_t *panels_, *nibbles_ = nullptr;
    const Bf16 *scales_, *panel_scales_ = nullptr, *x_ = nullptr;
    int64_t in_features_, num_groups_, x_stride_ = 0;
    bool is_few_ = false;
    Products products_;
};

inline thread_local std::vector<Bf16> NibbleWeights::inputs_;
inline thread_local std::vector<Bf16> NibbleWeights::unpacked_;
inline thread_local std::vector<float> NibbleWeights::sums_;

#endif
