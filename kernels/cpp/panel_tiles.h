// Products in tile registers (AMX): 16 rows of 64 bytes, 32 inputs of bf16 or 64 of 8 bits, meet 16 outputs in one
// instruction. Included by panel.h.
//
// Each 32 bits of a row are a pair of bf16 or four bytes. 16 of these of a panel are two such tiles of weights, as they
// lie.
#pragma once

constexpr int64_t PRODUCTS = 2;
constexpr int64_t TILE_ROWS = 16, TILE_UNITS = 16;
constexpr int64_t MAX_ROWS = 2 * TILE_ROWS;

typedef float Tile[MAX_ROWS][PANEL];

// The registers' numbers stand in the instruction.
#define MULTIPLY_TILES(sums, inputs, weights)      \
    if constexpr (sizeof(Input) == 1)              \
        _tile_dpbusd(sums, inputs, weights);       \
    else                                           \
        _tile_dpbf16ps(sums, inputs, weights)

// Owns the thread's tile registers while it lives.
template <typename Kind>
class PanelProducts {
    typedef typename Kind::Input Input;
    typedef typename Kind::Weight Weight;
    static constexpr int64_t COUNT = Kind::COUNT, HALF = COUNT * LANES;

  public:
    PanelProducts() = default;
    PanelProducts(const PanelProducts&) = delete;
    PanelProducts& operator=(const PanelProducts&) = delete;
    ~PanelProducts() {
        if (num_rows_) _tile_release();
    }

    // out[row][i] = x[row] . output i of the panel, for 1 to MAX_ROWS rows.
    void multiply(int64_t num_rows, const Input* x, int64_t x_stride, const Weight* panel, int64_t num_units, Tile& out) {
        if (num_rows != num_rows_) shape_for(num_rows);
        if (num_rows > TILE_ROWS)
            multiply_tiles<true>(x, x_stride, panel, num_units / TILE_UNITS, out);
        else
            multiply_tiles<false>(x, x_stride, panel, num_units / TILE_UNITS, out);
        const int64_t rest = num_units % TILE_UNITS, done = num_units - rest;
        if (rest) add_rest(num_rows, x + COUNT * done, x_stride, panel + 2 * HALF * done, rest, out);
    }

  private:
    // Registers: 0 to 3 sums, by rows and halves of the panel; 4 and 5 weights; 6 and 7 inputs.
    template <bool IS_TALL>
    INLINE void multiply_tiles(const Input* x, int64_t x_stride, const Weight* panel, int64_t num_tiles, Tile& out) {
        constexpr int64_t WEIGHTS_STRIDE = 2 * 64, OUT_STRIDE = PANEL * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        if (IS_TALL) {
            _tile_zero(2);
            _tile_zero(3);
        }
        const int64_t inputs_stride = x_stride * sizeof(Input);
        for (int64_t tile = 0; tile < num_tiles; ++tile, x += COUNT * TILE_UNITS, panel += 2 * HALF * TILE_UNITS) {
            _tile_loadd(4, panel, WEIGHTS_STRIDE);
            _tile_loadd(6, x, inputs_stride);
            MULTIPLY_TILES(0, 6, 4);
            _tile_loadd(5, panel + HALF, WEIGHTS_STRIDE);
            MULTIPLY_TILES(1, 6, 5);
            if (IS_TALL) {
                _tile_loadd(7, x + TILE_ROWS * x_stride, inputs_stride);
                MULTIPLY_TILES(2, 7, 4);
                MULTIPLY_TILES(3, 7, 5);
            }
        }
        _tile_stored(0, out[0], OUT_STRIDE);
        _tile_stored(1, out[0] + LANES, OUT_STRIDE);
        if (IS_TALL) {
            _tile_stored(2, out[TILE_ROWS], OUT_STRIDE);
            _tile_stored(3, out[TILE_ROWS] + LANES, OUT_STRIDE);
        }
    }

    // What does not fill a tile.
    static void add_rest(int64_t num_rows, const Input* x, int64_t x_stride, const Weight* panel, int64_t num_units,
                         Tile& out) {
        for (int64_t row = 0; row < num_rows; ++row) {
            __m512i low = (__m512i)load(out[row]), high = (__m512i)load(out[row] + LANES);
            for (int64_t unit = 0; unit < num_units; ++unit)
                Kind::add(broadcast32(x + row * x_stride + COUNT * unit), panel + 2 * HALF * unit, low, high);
            store(out[row], (Floats)low);
            store(out[row] + LANES, (Floats)high);
        }
    }

    // So that no row beyond the last is read or written.
    void shape_for(int64_t num_rows) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        const uint8_t upper = num_rows < TILE_ROWS ? num_rows : TILE_ROWS, lower = num_rows - upper;
        const uint8_t rows[8] = {upper, upper, lower, lower, TILE_UNITS, TILE_UNITS, upper, lower};
        for (int i = 0; i < 8; ++i) {
            shape.rows[i] = rows[i];
            shape.row_bytes[i] = rows[i] ? 64 : 0;
        }
        _tile_loadconfig(&shape);
        num_rows_ = num_rows;
    }

    int64_t num_rows_ = 0;
};

// Rows in the next of `left` blocks of at most MAX_ROWS: the registers are shaped anew only for the last.
INLINE int64_t rows_of_block(int64_t num_rows, int64_t) { return num_rows < MAX_ROWS ? num_rows : MAX_ROWS; }
