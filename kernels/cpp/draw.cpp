// Draws one token a row by the formula of engine/sampler.py, looking closely only at ids that could win.
//
// An id wins when scaled - ln E is largest, E = -log1p(-u) and u = (bits + 0.5) * 2^-32. Since E >= u, an id can beat
// the best score so far only if u < exp(scaled - best): one exponential in fp32, widened by more than its error, sorts
// out all but a few ids, and those are computed in double. So every row costs its random numbers (philox4x32-10, 64
// ids at a time) and little else. The limits top-k, min-p and top-p are found without a sort: ids are counted and
// weighed by buckets of their value, and only the bucket that a limit falls into is looked at one by one; ids that a
// cheaper pass over the row shows to be beyond the limit are passed over.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "vector.h"

namespace {

typedef uint64_t Longs __attribute__((vector_size(64)));

constexpr uint32_t MULTIPLIERS[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t KEY_STEPS[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int ROUNDS = 10;
constexpr double UNIT = 1.0 / 4294967296.0;
// The relative error of the bound is below 2e-5: of the exponential, and of a scaled logit of at most 87.
constexpr float WIDER = 1.001f;
// As in engine/sampler.py: an id further than this below the best can never be drawn.
constexpr double REACH = 26.1;
constexpr int64_t BUCKETS = 1024;
// Ids that one philox call draws for.
constexpr int64_t GROUP = 4 * LANES;
// How far a scaled logit in fp32 may be off: 2^-24 of REACH, a few times.
constexpr float SLACK = 1e-4f;

struct Limits {
    int64_t top_k;
    double top_p, min_p;
};

// High and low words of x * multiplier, lane by lane.
INLINE void multiply(Bits x, uint32_t multiplier, Bits& high, Bits& low) {
    const Longs mask = Longs{} + 0xffffffffull, factor = Longs{} + multiplier;
#ifdef __AVX512F__
    const Longs even = (Longs)_mm512_mul_epu32((__m512i)x, (__m512i)factor);
    const Longs odd = (Longs)_mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), (__m512i)factor);
#else
    const Longs even = ((Longs)x & mask) * factor;
    const Longs odd = ((Longs)x >> 32) * factor;
#endif
    high = (Bits)((even >> 32) | (odd & ~mask));
    low = (Bits)((even & mask) | (odd << 32));
}

// The four words of 16 neighbouring counters, quad by quad: words[i] are those of quads 4 i to 4 i + 3.
INLINE void philox(uint32_t first, const uint32_t* key, Bits words[4]) {
    Bits c0 = Bits{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    Bits c1 = Bits{} + key[0], c2 = Bits{} + key[1], c3 = Bits{};
    uint32_t k0 = key[2], k1 = key[3];
    for (int round = 0; round < ROUNDS; ++round) {
        Bits high0, low0, high1, low1;
        multiply(c0, MULTIPLIERS[0], high0, low0);
        multiply(c2, MULTIPLIERS[1], high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += KEY_STEPS[0];
        k1 += KEY_STEPS[1];
    }
    const Ints low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const Ints high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const Bits even[2] = {__builtin_shuffle(c0, c2, low), __builtin_shuffle(c0, c2, high)};
    const Bits odd[2] = {__builtin_shuffle(c1, c3, low), __builtin_shuffle(c1, c3, high)};
    for (int half = 0; half < 2; ++half) {
        words[2 * half] = __builtin_shuffle(even[half], odd[half], low);
        words[2 * half + 1] = __builtin_shuffle(even[half], odd[half], high);
    }
}

// Lanes beyond the end are minus infinity.
INLINE Floats part_of(const float* from, int64_t start, int64_t count) {
    return finite(count - start < LANES ? load_first(from + start, count - start, MINUS_INFINITY) : load(from + start));
}

// Bit i is lane i.
INLINE uint32_t mask_of(Ints lanes) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
    uint32_t mask = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) mask |= uint32_t(lanes[lane] != 0) << lane;
    return mask;
#endif
}

INLINE bool any(Ints lanes) { return mask_of(lanes) != 0; }

// A row's logits measured from the best one, in fp32 to sort most ids out, in double where it matters.
struct Scaled {
    const float* logits;
    int64_t vocab_size;
    double best_logit, temperature;
    Floats best_in_lanes, scale;

    Scaled(const float* logits, int64_t vocab_size, double best_logit, double temperature)
        : logits(logits), vocab_size(vocab_size), best_logit(best_logit), temperature(temperature) {
        // Finite, or a tie with the best logit would be 0 times infinity.
        const float most = std::numeric_limits<float>::max();
        scale = splat(temperature * most < 1.0 ? most : float(1.0 / temperature));
        best_in_lanes = splat(float(best_logit));
    }

    double exactly(int64_t id) const { return (double(finite(splat(logits[id]))[0]) - best_logit) / temperature; }

    INLINE Floats near(int64_t start) const {
        return (part_of(logits, start, vocab_size) - best_in_lanes) * scale;
    }

    // Calls visit(id, its weight in fp32, its bucket) for each id whose exact value is at least `low`, of one bucket or
    // of all.
    template <typename Visit>
    void each(double low, std::optional<int32_t> only, Visit visit) const {
        const Floats zero = {}, floor = splat(float(low) - SLACK), sure = splat(float(low) + SLACK);
        for (int64_t start = 0; start < vocab_size; start += LANES) {
            const Floats values = near(start), below = values > zero ? zero : values;
            const Ints is_kept = values >= floor;
            const Floats depths = (is_kept ? below : zero) * -float(BUCKETS / (REACH + 1.0));
            const Ints buckets = __builtin_convertvector(depths, Ints);
            uint32_t left = mask_of(only ? is_kept & (buckets == Ints{} + *only) : is_kept);
            if (!left) continue;
            const uint32_t is_close = mask_of(values < sure);
            float weights[LANES];
            int32_t bucket_of[LANES];
            store(weights, exp_nonpositive(below));
            std::memcpy(bucket_of, &buckets, sizeof buckets);
            for (; left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                if ((is_close >> lane & 1) && exactly(start + lane) < low) continue;
                visit(start + lane, weights[lane], bucket_of[lane]);
            }
        }
    }

    // Exact values of one bucket's ids that are at least `low`, the largest first.
    std::vector<double> bucket(int64_t wanted, double low) const {
        std::vector<double> found;
        each(low, int32_t(wanted), [&](int64_t id, float, int32_t) { found.push_back(exactly(id)); });
        std::sort(found.begin(), found.end(), std::greater<double>());
        return found;
    }

    // A value that top_k ids reach, or `low`: as many groups of ids as that have a largest one that does.
    double reached_by(int64_t top_k, double low) const {
        std::vector<float> tops;
        tops.reserve(vocab_size / GROUP + 1);
        for (int64_t start = 0; start < vocab_size; start += GROUP) {
            Floats top = splat(MINUS_INFINITY);
            for (int64_t first = start; first < std::min(start + GROUP, vocab_size); first += LANES)
                top = maximum(top, near(first));
            tops.push_back(largest(top));
        }
        if (top_k > int64_t(tops.size())) return low;
        std::nth_element(tops.begin(), tops.begin() + top_k - 1, tops.end(), std::greater<float>());
        return std::max(low, double(tops[top_k - 1]) - 2 * SLACK);
    }

    // The weight of all ids that can be drawn.
    double total_weight() const {
        const Floats zero = {}, floor = splat(float(-REACH));
        double total = 0;
        for (int64_t start = 0; start < vocab_size; start += 4 * GROUP) {
            Floats weights = {};
            for (int64_t first = start; first < std::min(start + 4 * GROUP, vocab_size); first += LANES) {
                const Floats values = near(first), below = values > zero ? zero : values;
                weights += values >= floor ? exp_nonpositive(below) : zero;
            }
            total += sum(weights);
        }
        return total;
    }

    // The lowest value that may be drawn.
    double cutoff(Limits limits) const {
        double low = -REACH;
        if (limits.min_p > 0) low = std::max(low, std::log(limits.min_p));
        const bool has_top_k = limits.top_k > 0 && limits.top_k < vocab_size, has_top_p = limits.top_p < 1.0;
        if (!has_top_k && !has_top_p) return low;
        if (has_top_k) low = reached_by(limits.top_k, low);
        std::optional<double> total;
        if (has_top_p && !has_top_k && limits.min_p <= 0) {
            // All ids below this weigh half of what top-p leaves out, at most.
            total = total_weight();
            low = std::max(low, std::log((1.0 - limits.top_p) * *total / (2.0 * vocab_size)));
        }
        std::vector<int64_t> counts(BUCKETS);
        std::vector<double> weights(BUCKETS);
        each(low, std::nullopt, [&](int64_t, float weight, int32_t bucket) {
            if (has_top_k) ++counts[bucket];
            weights[bucket] += weight;
        });
        if (has_top_k) low = std::max(low, lowest_of_top_k(limits.top_k, low, counts, weights));
        if (has_top_p) {
            if (!total) total = std::accumulate(weights.begin(), weights.end(), 0.0);
            low = std::max(low, lowest_of_top_p(limits.top_p * *total, low, weights));
        }
        return low;
    }

    // Buckets below the limit weigh nothing afterwards.
    double lowest_of_top_k(int64_t top_k, double low, const std::vector<int64_t>& counts,
                           std::vector<double>& weights) const {
        int64_t before = 0;
        for (int64_t at = 0; at < BUCKETS; before += counts[at++]) {
            if (before + counts[at] < top_k) continue;
            const std::vector<double> values = bucket(at, low);
            const double last = values[top_k - before - 1];
            std::fill(weights.begin() + at, weights.end(), 0.0);
            for (double value : values)
                if (value >= last) weights[at] += std::exp(value);
            return last;
        }
        return low;  // fewer than k can be drawn at all
    }

    // wanted: the weight that is to be reached
    double lowest_of_top_p(double wanted, double low, const std::vector<double>& weights) const {
        double before = 0;
        for (int64_t at = 0; at < BUCKETS; before += weights[at++]) {
            if (weights[at] == 0 || before + weights[at] < wanted) continue;
            const std::vector<double> values = bucket(at, low);
            size_t num_kept = 0;
            do before += std::exp(values[num_kept++]);
            while (num_kept < values.size() && before < wanted);
            return values[num_kept - 1];
        }
        return low;
    }
};

struct Row {
    const Scaled& values;
    double cutoff;
    double score = -std::numeric_limits<double>::infinity();
    int64_t token = 0;

    // Looks at one id exactly; the lowest of equal ones stays.
    void consider(int64_t id, uint32_t bits) {
        const double scaled = values.exactly(id);
        if (!(scaled >= cutoff)) return;
        const double found = scaled - std::log(-std::log1p(-(bits + 0.5) * UNIT));
        if (found > score || (found == score && id < token)) {
            score = found;
            token = id;
        }
    }
};

// The lowest id among equal ones; 0 when all are minus infinity. Groups of ids are compared with the best before them,
// and only the one that holds the largest is looked at again.
int64_t first_largest(const float* logits, int64_t count) {
    constexpr int64_t VECTORS = 8, COUNT = VECTORS * LANES;
    float best = MINUS_INFINITY;
    int64_t holder = 0;
    for (int64_t start = 0; start < count; start += COUNT) {
        Floats tops[VECTORS];
        if (count - start >= COUNT)
            for (int64_t i = 0; i < VECTORS; ++i) tops[i] = finite(load(logits + start + i * LANES));
        else
            for (int64_t i = 0; i < VECTORS; ++i)
                tops[i] = start + i * LANES < count ? part_of(logits, start + i * LANES, count) : splat(MINUS_INFINITY);
        for (int64_t half = VECTORS / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) tops[i] = maximum(tops[i], tops[i + half]);
        if (!any(tops[0] > splat(best))) continue;
        best = largest(tops[0]);
        holder = start;
    }
    for (int64_t id = holder; id < count; ++id)
        if (finite(splat(logits[id]))[0] == best) return id;
    return 0;
}

// What does not depend on the random numbers: the best logit and the lowest value that may be drawn.
struct Candidates {
    const float* logits;
    double temperature;
    Limits limits;
    int64_t likeliest;
    double cutoff;

    // likeliest: the first of the largest logits, or below 0 when it is to be found
    Candidates(const float* logits, int64_t vocab_size, double temperature, Limits limits, int64_t likeliest)
        : logits(logits), temperature(temperature), limits(limits),
          likeliest(likeliest < 0 ? first_largest(logits, vocab_size) : likeliest),
          cutoff(temperature > 0 ? values(vocab_size).cutoff(limits) : 0) {}

    Scaled values(int64_t vocab_size) const { return Scaled(logits, vocab_size, finite(splat(logits[likeliest]))[0], temperature); }

    bool are_those_of(const float* other, double its_temperature, Limits its) const {
        return logits == other && temperature == its_temperature && limits.top_k == its.top_k &&
               limits.top_p == its.top_p && limits.min_p == its.min_p;
    }
};

// words: output index, sample, low and high half of the seed
int64_t draw_row(const Candidates& candidates, int64_t vocab_size, const uint32_t* words) {
    const int64_t likeliest = candidates.likeliest;
    if (candidates.temperature == 0) return likeliest;
    const Scaled values = candidates.values(vocab_size);
    Row row{values, candidates.cutoff};
    row.token = likeliest;
    Bits bits[4];
    philox(uint32_t(likeliest / 4), words, bits);
    row.consider(likeliest, bits[0][likeliest % 4]);
    const Floats floor = splat(float(row.cutoff) - SLACK);
    const bool is_limited = row.cutoff > -REACH;
    for (int64_t start = 0; start < vocab_size; start += GROUP) {
        if (is_limited) {
            Floats top = splat(MINUS_INFINITY);
            for (int64_t first = start; first < std::min(start + GROUP, vocab_size); first += LANES)
                top = maximum(top, values.near(first));
            if (!any(top >= floor)) continue;
        }
        philox(uint32_t(start / 4), words, bits);
        for (int64_t part = 0; part < 4; ++part) {
            const int64_t first = start + part * LANES;
            if (first >= vocab_size) break;
            const Floats above = values.near(first) - float(row.score);
            const Floats bound = exp_nonpositive(above > Floats{} ? Floats{} : above) * (4294967296.0f * WIDER) + 1.0f;
            const Ints may_win = __builtin_convertvector(bits[part], Floats) <= bound;
            if (!any(may_win)) continue;
            for (int64_t lane = 0; lane < LANES && first + lane < vocab_size; ++lane)
                if (may_win[lane]) row.consider(first + lane, bits[part][lane]);
        }
    }
    return row.token;
}

}  // namespace

extern "C" void draw_rows(const float* const* rows, int64_t num_rows, int64_t vocab_size, const uint32_t* words,
                          const double* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
                          const int64_t* likeliest, int64_t* tokens) {
    std::optional<Candidates> candidates;
    for (int64_t row = 0; row < num_rows; ++row) {
        const Limits limits{top_k[row], top_p[row], min_p[row]};
        if (!candidates || !candidates->are_those_of(rows[row], temperatures[row], limits))
            candidates.emplace(rows[row], vocab_size, temperatures[row], limits, likeliest[row]);
        tokens[row] = draw_row(*candidates, vocab_size, words + 4 * row);
    }
}
