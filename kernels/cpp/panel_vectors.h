// Products in vector registers: 32 broadcast bits of inputs at a time meet two vectors of weights. Included by panel.h.
#pragma once

constexpr int64_t PRODUCTS = 1;
// 2 accumulators a row, 2 vectors of weights and the broadcast pair: 31 of 32 registers.
constexpr int64_t MAX_ROWS = 14;

// With many rows the hardware reads ahead too late: it sees the next weights only when the products reach them. With few
// it does better alone. 8 rows 15.7 -> 13.1 ms, 16 rows 27.4 -> 22.9 ms (SmolLM2-135M, one core, December 2026).
constexpr int64_t AHEAD_ROWS = 5, AHEAD_BYTES = 16384;

typedef float Tile[MAX_ROWS][PANEL];

template <typename Kind>
class PanelProducts {
    typedef typename Kind::Input Input;
    typedef typename Kind::Weight Weight;
    static constexpr int64_t COUNT = Kind::COUNT, HALF = COUNT * LANES;

  public:
    // out[row][i] = x[row] . output i of the panel, for 1 to MAX_ROWS rows.
    void multiply(int64_t num_rows, const Input* x, int64_t x_stride, const Weight* panel, int64_t num_units, Tile& out) {
        multiply_most<MAX_ROWS>(num_rows, x, x_stride, panel, num_units, out);
    }

  private:
    template <int64_t ROWS>
    INLINE void multiply_all(const Input* x, int64_t x_stride, const Weight* panel, int64_t num_units, Tile& out) {
        __m512i low[ROWS], high[ROWS];
        for (int64_t row = 0; row < ROWS; ++row) low[row] = high[row] = _mm512_setzero_si512();
        for (int64_t unit = 0; unit < num_units; ++unit, panel += 2 * HALF) {
            if (ROWS >= AHEAD_ROWS) {
                __builtin_prefetch((const char*)panel + AHEAD_BYTES, 0, 2);
                __builtin_prefetch((const char*)panel + AHEAD_BYTES + 64, 0, 2);
            }
#pragma GCC unroll 14
            for (int64_t row = 0; row < ROWS; ++row)
                Kind::add(broadcast32(x + row * x_stride + COUNT * unit), panel, low[row], high[row]);
        }
        for (int64_t row = 0; row < ROWS; ++row) {
            store(out[row], (Floats)low[row]);
            store(out[row] + LANES, (Floats)high[row]);
        }
    }

    template <int64_t ROWS>
    void multiply_most(int64_t num_rows, const Input* x, int64_t x_stride, const Weight* panel, int64_t num_units,
                       Tile& out) {
        if constexpr (ROWS > 1)
            if (num_rows < ROWS) return multiply_most<ROWS - 1>(num_rows, x, x_stride, panel, num_units, out);
        multiply_all<ROWS>(x, x_stride, panel, num_units, out);
    }
};

// Rows in the next of `left` blocks of at most MAX_ROWS, all as equal as can be: a block of two rows would take
// as long as one of four.
INLINE int64_t rows_of_block(int64_t num_rows, int64_t left) { return (num_rows + left - 1) / left; }
