// Products of bf16 rows with packed weights: y = x W^T and more.
//
// The weights are read once and in order, panel by panel; rows beyond MAX_ROWS find the panel in the cache. How they are
// packed and multiplied is said by panel.h, panel_nibbles.h and panel_bytes.h. Called through kernels/packed_linear.py.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "panel.h"
#include "panel_bytes.h"
#include "panel_nibbles.h"

#ifdef __AVX512BF16__

namespace {

// Rows whose inputs stay in the second-level cache while all panels meet them.
constexpr int64_t PASS_BYTES = 1 << 20;

// Weights of bf16, packed as panel.h has them.
class Bf16Weights {
  public:
    Bf16Weights(const Bf16* panels, int64_t in_features) : panels_(panels), in_features_(in_features) {}

    void begin(const Bf16* x, int64_t x_stride, int64_t) {
        x_ = x;
        x_stride_ = x_stride;
    }

    void open(int64_t panel) { panel_ = panels_ + panel * PANEL * in_features_; }

    void multiply(int64_t first, int64_t num_rows, Tile& out) {
        products_.multiply(num_rows, x_ + first * x_stride_, x_stride_, panel_, in_features_ / 2, out);
    }

  private:
    const Bf16 *panels_, *panel_ = nullptr, *x_ = nullptr;
    int64_t in_features_, x_stride_ = 0;
    Products products_;
};

// Calls finish(tile, first row, number of rows, panel) for every tile of the product. Weights say how they are multiplied:
// begin takes the rows of a pass, open the panel that they meet, multiply some of the rows.
template <typename Weights, typename Finish>
INLINE void product(Weights& weights, const Bf16* x, int64_t x_stride, int64_t num_rows, int64_t num_panels,
                    int64_t in_features, Finish finish) {
    const int64_t pass_bytes = MAX_ROWS * in_features * sizeof(Bf16);
    const int64_t pass_rows = MAX_ROWS * std::max(int64_t(1), PASS_BYTES / pass_bytes);
    for (int64_t pass = 0; pass < num_rows; pass += pass_rows) {
        const int64_t end = std::min(num_rows, pass + pass_rows);
        weights.begin(x + pass * x_stride, x_stride, end - pass);
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            weights.open(panel);
            int64_t first = pass;
            for (int64_t left = (end - pass + MAX_ROWS - 1) / MAX_ROWS; left > 0; --left) {
                const int64_t count = rows_of_block(end - first, left);
                alignas(64) Tile tile;
                weights.multiply(first - pass, count, tile);
                finish(tile, first, count, panel);
                first += count;
            }
        }
    }
}

// Of the numbers of a row, met in the order of their columns, the largest and where it was first.
struct Largest {
    Floats best = splat(MINUS_INFINITY);
    Ints columns = {};

    INLINE void add(Floats x, int64_t column) {
        x = finite(x);
        const Ints is_larger = x > best;
        best = is_larger ? x : best;
        columns = is_larger ? Ints{} + int32_t(column) : columns;
    }

    int64_t first() const {
        const float most = largest(best);
        int64_t found = std::numeric_limits<int64_t>::max();
        for (int64_t lane = 0; lane < LANES; ++lane)
            if (best[lane] == most) found = std::min(found, columns[lane] + lane);
        return found;
    }
};

// y = x W^T, + bias and + y where there are any. Calls see(results, row, first column), lanes beyond the last column
// minus infinity.
template <typename Weights, typename T, typename See>
INLINE void linear(Weights& weights, const Bf16* x, int64_t x_stride, const float* bias, T* y, int64_t num_rows,
                   int64_t out_features, int64_t in_features, bool is_added, See see) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    product(weights, x, x_stride, num_rows, num_panels, in_features,
            [=, &see](const Tile& tile, int64_t first, int64_t count, int64_t panel) {
                for (int64_t row = 0; row < count; ++row)
                    for (int64_t i = 0; i < PANEL; i += LANES) {
                        const int64_t column = panel * PANEL + i, num_columns = out_features - column;
                        T* to = y + (first + row) * out_features + column;
                        Floats sum = load(tile[row] + i);
                        if (bias) sum += load(bias + column);
                        if (num_columns >= LANES) {
                            store(to, is_added ? sum + load(to) : sum);
                            see(sum, first + row, column);
                        } else if (num_columns > 0) {
                            store_first(to, is_added ? sum + load_first(to, num_columns, 0) : sum, num_columns);
                            see(first_of(sum, num_columns, MINUS_INFINITY), first + row, column);
                        }
                    }
            });
}

// x / (1 + e^-x) without an overflow on either side.
INLINE Floats silu(Floats x) {
    const Floats e = exp_nonpositive(x < Floats{} ? x : -x);
    return x * (x < Floats{} ? e : splat(1)) / (e + 1);
}

// y = silu(x G^T) * (x U^T): the first half of a panel is G's, the second U's, of the same 16 outputs.
template <typename Weights>
INLINE void gated_linear(Weights& weights, const Bf16* x, int64_t x_stride, const float* bias, Bf16* y,
                         int64_t num_rows, int64_t out_features, int64_t in_features) {
    const int64_t num_panels = (out_features + LANES - 1) / LANES;
    product(weights, x, x_stride, num_rows, num_panels, in_features,
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

// Calls use(weights) with what multiplies the matrix.
template <typename Use>
INLINE void with_weights(const Matrix& matrix, Use use) {
    switch (matrix.format) {
        case Format::BF16: {
            Bf16Weights weights((const Bf16*)matrix.panels, matrix.in_features);
            return use(weights);
        }
        case Format::INT4: {
            NibbleWeights weights((const uint8_t*)matrix.panels, (const Bf16*)matrix.scales, matrix.in_features);
            return use(weights);
        }
#ifdef __AVX512VNNI__
        case Format::INT8: {
            ByteWeights<2> weights((const int8_t*)matrix.panels, (const float*)matrix.scales, matrix.in_features);
            return use(weights);
        }
        case Format::BYTES: {
            ByteWeights<1> weights((const int8_t*)matrix.panels, (const float*)matrix.scales, matrix.in_features);
            return use(weights);
        }
#endif
        default:
            __builtin_unreachable();
    }
}

}  // namespace

extern "C" int64_t bf16_products() { return PRODUCTS; }

extern "C" int64_t multiplies_bytes() {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

extern "C" void linear_bf16(const Matrix* matrix, const Bf16* x, int64_t x_stride, Bf16* y, int64_t num_rows,
                            int64_t is_added) {
    with_weights(*matrix, [=](auto& weights) {
        linear(weights, x, x_stride, matrix->bias, y, num_rows, matrix->out_features, matrix->in_features, is_added,
               [](Floats, int64_t, int64_t) {});
    });
}

// likeliest[row]: the first of a row's largest logits, as draw.cpp counts what is no number, found while they are in
// registers.
extern "C" void logits_bf16(const Matrix* matrix, const Bf16* x, int64_t x_stride, float* y, int64_t num_rows,
                            int64_t* likeliest) {
    std::vector<Largest> largest(num_rows);
    with_weights(*matrix, [=, &largest](auto& weights) {
        linear(weights, x, x_stride, matrix->bias, y, num_rows, matrix->out_features, matrix->in_features, false,
               [&](Floats sum, int64_t row, int64_t column) { largest[row].add(sum, column); });
    });
    for (int64_t row = 0; row < num_rows; ++row) likeliest[row] = largest[row].first();
}

extern "C" void gated_linear_bf16(const Matrix* matrix, const Bf16* x, int64_t x_stride, Bf16* y, int64_t num_rows) {
    with_weights(*matrix, [=](auto& weights) {
        gated_linear(weights, x, x_stride, matrix->bias, y, num_rows, matrix->out_features, matrix->in_features);
    });
}

#else

extern "C" int64_t bf16_products() { return 0; }

extern "C" int64_t multiplies_bytes() { return 0; }

#endif
