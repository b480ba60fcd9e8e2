// Log-probabilities of tokens and of the likeliest ids beside them, as engine/likelihood.py describes them.
//
// Two passes over a row: one finds the likeliest ids, the other the sum that they are measured by.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace {

// Weights of so many ids are added up in fp32, those sums in double.
constexpr int64_t PART = 64 * LANES;

struct Entry {
    float logit;
    int64_t id;
};

bool is_before(Entry a, Entry b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

bool any_above(const float* logits, int64_t count, float limit) {
    const Ints above = (count < LANES ? load_first(logits, count, MINUS_INFINITY) : load(logits)) > splat(limit);
    int32_t found = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) found |= above[lane];
    return found != 0;
}

// The first `count` ids of the order, 1 to vocab_size.
std::vector<Entry> likeliest(const float* logits, int64_t vocab_size, int64_t count) {
    std::vector<Entry> heap;  // the last of them on top
    for (int64_t start = 0; start < vocab_size; start += LANES) {
        const int64_t lanes = std::min(LANES, vocab_size - start);
        const bool is_full = int64_t(heap.size()) == count;
        // An id that only equals the last one comes after it.
        if (is_full && !any_above(logits + start, lanes, heap.front().logit)) continue;
        for (int64_t id = start; id < start + lanes; ++id) {
            const Entry entry{logits[id], id};
            if (int64_t(heap.size()) == count) {
                if (!is_before(entry, heap.front())) continue;
                std::pop_heap(heap.begin(), heap.end(), is_before);
                heap.pop_back();
            }
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), is_before);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), is_before);
    return heap;
}

// Sum of e^(logit - best)
double total_weight(const float* logits, int64_t vocab_size, float best) {
    double total = 0;
    for (int64_t start = 0; start < vocab_size; start += PART) {
        const int64_t end = std::min(start + PART, vocab_size);
        Floats weights = {};
        int64_t id = start;
        for (; id + LANES <= end; id += LANES) weights += exp_nonpositive(load(logits + id) - splat(best));
        if (id < end) weights += exp_nonpositive(load_first(logits + id, end - id, MINUS_INFINITY) - splat(best));
        total += sum(weights);
    }
    return total;
}

}  // namespace

// ids, values [num_rows, 1 + num_top]: the row's token, then the likeliest ids; num_top <= vocab_size
extern "C" void log_probabilities(const float* const* rows, int64_t num_rows, int64_t vocab_size,
                                  const int64_t* tokens, int64_t num_top, int32_t* ids, float* values) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* logits = rows[row];
        std::vector<Entry> entries = likeliest(logits, vocab_size, std::max<int64_t>(num_top, 1));
        const float best = entries[0].logit;
        const bool has_weight = best > MINUS_INFINITY;
        const double norm = has_weight ? best + std::log(total_weight(logits, vocab_size, best)) : 0.0;
        entries.resize(num_top);
        entries.insert(entries.begin(), Entry{logits[tokens[row]], tokens[row]});
        for (const Entry& entry : entries) {
            *ids++ = int32_t(entry.id);
            *values++ = has_weight ? float(entry.logit - norm) : MINUS_INFINITY;
        }
    }
}
