// Products with packed bf16 weights: y = x W^T and more.
//
// The weights are read once and in order, panel by panel (see panel.h); rows beyond MAX_ROWS find the panel in the
// cache. Called through kernels/packed_linear.py.
#include <algorithm>
#include <vector>

#include "panel.h"

#ifdef __AVX512BF16__

namespace {

// Rows whose inputs stay in the second-level cache while all panels meet them.
constexpr int64_t PASS_BYTES = 1 << 20;

// Calls finish(tile, first row, number of rows, panel) for every tile of the product.
template <typename Finish>
INLINE void product(const Bf16* x, int64_t x_stride, const Bf16* weight, int64_t num_rows, int64_t num_panels,
                    int64_t in_features, Finish finish) {
    const int64_t pass_bytes = MAX_ROWS * in_features * sizeof(Bf16);
    const int64_t pass_rows = MAX_ROWS * std::max(int64_t(1), PASS_BYTES / pass_bytes);
    Products products;
    for (int64_t pass = 0; pass < num_rows; pass += pass_rows) {
        const int64_t end = std::min(num_rows, pass + pass_rows);
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            int64_t first = pass;
            for (int64_t left = (end - pass + MAX_ROWS - 1) / MAX_ROWS; left > 0; --left) {
                const int64_t count = rows_of_block(end - first, left);
                alignas(64) Tile tile;
                products.multiply(count, x + first * x_stride, x_stride, weight + panel * PANEL * in_features,
                                  in_features / 2, tile);
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
template <typename T, typename See>
INLINE void linear(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, T* y, int64_t num_rows,
                   int64_t out_features, int64_t in_features, bool is_added, See see) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    product(x, x_stride, weight, num_rows, num_panels, in_features,
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

}  // namespace

extern "C" int64_t bf16_products() { return PRODUCTS; }

extern "C" void linear_bf16(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, Bf16* y,
                            int64_t num_rows, int64_t out_features, int64_t in_features, int64_t is_added) {
    const auto unseen = [](Floats, int64_t, int64_t) {};
    if (is_added)
        linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, true, unseen);
    else
        linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, false, unseen);
}

// likeliest[row]: the first of a row's largest logits, as draw.cpp counts what is no number, found while they are in
// registers.
extern "C" void logits_bf16(const Bf16* x, int64_t x_stride, const Bf16* weight, const float* bias, float* y,
                            int64_t num_rows, int64_t out_features, int64_t in_features, int64_t* likeliest) {
    std::vector<Largest> largest(num_rows);
    linear(x, x_stride, weight, bias, y, num_rows, out_features, in_features, false,
           [&](Floats sum, int64_t row, int64_t column) { largest[row].add(sum, column); });
    for (int64_t row = 0; row < num_rows; ++row) likeliest[row] = largest[row].first();
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

extern "C" int64_t bf16_products() { return 0; }

#endif
