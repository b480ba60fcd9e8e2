// Rows rounded to integers as they come, times a panel of weights of 8 bits: sums of integers, exact in any order.
//
// A weight is scale x n, one fp32 scale for each output. A panel holds 32 outputs: for each four inputs two vectors of 16
// outputs x 4 inputs. A row's inputs are rounded to steps between minus and plus its largest one: 127 to either side, one
// byte each, or 32767, two bytes: the row then becomes two, of upper and of lower bytes. The instructions multiply unsigned
// by signed bytes, so 128 is added to what has a sign; what that adds is known of each output.
#pragma once

#include <algorithm>
#include <vector>

#include "panel.h"

#ifdef __AVX512VNNI__

template <int64_t ROW_BYTES>
class ByteWeights {
  public:
    // Inputs are filled up with zeros to a multiple of it.
    static constexpr int64_t DEPTH = 64;

    ByteWeights(const int8_t* panels, const float* scales, int64_t in_features)
        : panels_(panels),
          scales_(scales),
          in_features_(in_features),
          width_((in_features + DEPTH - 1) / DEPTH * DEPTH) {}

    // The rows that the next panels meet.
    void begin(const Bf16* x, int64_t x_stride, int64_t num_rows) {
        inputs_.resize(std::max<size_t>(inputs_.size(), num_rows * ROW_BYTES * width_));
        steps_.resize(std::max<size_t>(steps_.size(), num_rows));
        for (int64_t row = 0; row < num_rows; ++row)
            steps_[row] = place(x + row * x_stride, inputs_.data() + row * ROW_BYTES * width_);
    }

    void open(int64_t panel) {
        panel_ = panels_ + panel * PANEL * width_;
        panel_scales_ = scales_ + panel * PANEL;
        const __m512i each = _mm512_set1_epi8(CENTRE >> 1);
        __m512i low = _mm512_setzero_si512(), high = low;
        for (int64_t i = 0; i < PANEL * width_; i += 128) {
            low = _mm512_dpbusd_epi32(low, each, _mm512_loadu_si512(panel_ + i));
            high = _mm512_dpbusd_epi32(high, each, _mm512_loadu_si512(panel_ + i + 64));
        }
        added_[0] = 2 * (Ints)low;
        added_[1] = 2 * (Ints)high;
    }

    // out[row][i] = row first + row . output i of the panel.
    void multiply(int64_t first, int64_t num_rows, Tile& out) {
        constexpr int64_t MOST = MAX_ROWS / ROW_BYTES;
        for (int64_t done = 0; done < num_rows; done += MOST)
            multiply_some(first + done, std::min(MOST, num_rows - done), out + done);
    }

  private:
    static constexpr int CENTRE = 128, MOST_STEPS = ROW_BYTES == 1 ? 127 : 32767;

    void multiply_some(int64_t first, int64_t num_rows, float (*out)[PANEL]) {
        alignas(64) Tile sums;
        products_.multiply(num_rows * ROW_BYTES, inputs_.data() + first * ROW_BYTES * width_, width_, panel_, width_ / 4, sums);
        for (int64_t row = 0; row < num_rows; ++row) {
            const Floats step = splat(steps_[first + row]);
            for (int64_t half = 0; half < 2; ++half) {
                const float* of = sums[row * ROW_BYTES] + half * LANES;
                Floats total = __builtin_convertvector((Ints)load(of) - added_[half], Floats);
                if (ROW_BYTES == 2) total = total * 256 + __builtin_convertvector((Ints)load(of + PANEL), Floats);
                store(out[row] + half * LANES, total * (step * load(panel_scales_ + half * LANES)));
            }
        }
    }

    // A row's inputs as integers; returns the size of one step. NaN and infinity make the whole row NaN.
    float place(const Bf16* x, uint8_t* to) const {
        Floats most{};
        Floats poison{};
        for (int64_t i = 0; i < in_features_; i += LANES) {
            const Floats values = inputs_at(x, i);
            poison += values * 0;
            most = maximum(most, values < Floats{} ? -values : values);
        }
        const float size = largest(most);
        const Floats per_step = splat(size > 0 ? MOST_STEPS / size : 0);
        for (int64_t i = 0; i < width_; i += LANES) {
            const Floats values = i < in_features_ ? inputs_at(x, i) : Floats{};
            const Ints rounded = (Ints)_mm512_cvtps_epi32((__m512)(values * per_step));
            const Ints upper = ROW_BYTES == 1 ? rounded : rounded >> 8;
            _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8((__m512i)(upper + CENTRE)));
            if (ROW_BYTES == 2) _mm_storeu_si128((__m128i*)(to + width_ + i), _mm512_cvtepi32_epi8((__m512i)rounded));
        }
        return size / MOST_STEPS + sum(poison);
    }

    INLINE Floats inputs_at(const Bf16* x, int64_t i) const {
        return in_features_ - i >= LANES ? load(x + i) : load_first(x + i, in_features_ - i, 0);
    }

    // Kept from call to call: an allocation of this size goes to the system each time.
    static thread_local std::vector<uint8_t> inputs_;
    static thread_local std::vector<float> steps_;

    const int8_t *panels_, *panel_ = nullptr;
    const float *scales_, *panel_scales_ = nullptr;
    int64_t in_features_, width_;
    Ints added_[2];
    ByteProducts products_;
};

template <int64_t ROW_BYTES>
thread_local std::vector<uint8_t> ByteWeights<ROW_BYTES>::inputs_;
template <int64_t ROW_BYTES>
thread_local std::vector<float> ByteWeights<ROW_BYTES>::steps_;

#endif
