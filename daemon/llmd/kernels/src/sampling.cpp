// See sampling.h. What is filtered and in which order is llmd.sampling.sampler's; so are the comments' terms.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace llmd {
namespace {

constexpr float BOUND = 1e38f;  // as llmd.sampling.penalties
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// How far below the largest logit, in units of the temperature, candidates are looked for; the last is everywhere.
constexpr float REACH[] = {8.0f, 16.0f, INFINITE};

// Larger for a larger weight (>= 0), and among equals for the lower id.
uint64_t key_of(float weight, int32_t id) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(id));
}
int32_t id_of(uint64_t key) { return int32_t(0xffffffffu - uint32_t(key)); }
float weight_of(uint64_t key) {
    const uint32_t bits = uint32_t(key >> 32);
    float weight;
    std::memcpy(&weight, &bits, 4);
    return weight;
}

bool is_greedy(const LogitRow& wish) { return wish.temperature <= 0.0f || wish.top_k == 1; }
bool is_filtered(const LogitRow& wish) { return wish.top_k >= 1 || wish.top_p < 1.0 || wish.min_p > 0.0f; }

}  // namespace

Chooser::Chooser(int size) : size_(size), largest_(chunks(size)), weights_(size), sums_(chunks(size)), ids_(size) {}

void Chooser::run(float* logits, LogitRow& wish) {
    wish.finite = logit_kernels().scan(logits, size_, largest_.data());
    if (!wish.finite) {
        std::memset(logits, 0, size_t(size_) * 4);
        std::fill(largest_.begin(), largest_.end(), 0.0f);
    }
    const float max = *std::max_element(largest_.begin(), largest_.end());
    int token = wish.scored;
    if (token < 0) {
        penalize(logits, wish);
        if (!wish.finite) token = 0;
        else if (changed_.empty()) token = choose(logits, max, wish);
        else token = choose(logits, scan(logits), wish);
        for (; !changed_.empty(); changed_.pop_back()) logits[changed_.back().id] = changed_.back().before;
    }
    wish.token = token;
    if (!wish.wants_logprob && wish.scored < 0) return;
    const double log_sum = std::log(logit_kernels().soften(logits, size_, max, 1.0f, nullptr, nullptr));
    wish.logprob = float(double(logits[token] - max) - log_sum);
    if (wish.top_n > 0) {
        scan(logits);
        best(logits, max, log_sum, wish);
    }
}

float Chooser::scan(const float* x) {
    logit_kernels().scan(x, size_, largest_.data());
    return *std::max_element(largest_.begin(), largest_.end());
}

int Chooser::argmax(const float* x, float max) const {
    const int chunk = int(std::find(largest_.begin(), largest_.end(), max) - largest_.begin());
    const int start = std::min(chunk * CHUNK, size_ - 1), end = std::min(start + CHUNK, size_);
    const int found = int(std::find(x + start, x + end, max) - x);
    return found < end ? found : 0;
}

void Chooser::change(float* x, int32_t id, float value) {
    changed_.push_back({id, x[id]});
    x[id] = value;
}

void Chooser::penalize(float* x, const LogitRow& wish) {
    for (int i = 0; i < wish.seen_n; i++) {
        const int32_t id = wish.seen[i];
        if (id < 0 || id >= size_) continue;
        const float count = float(wish.counts[i]);
        float value = x[id] > 0.0f ? x[id] / wish.repetition : x[id] * wish.repetition;
        value = value - wish.frequency * count - (count > 0.0f ? wish.presence : 0.0f);
        change(x, id, std::min(std::max(value, -BOUND), BOUND));
    }
    for (int i = 0; i < wish.bias_n; i++) {
        const int32_t id = wish.bias_ids[i];
        if (id >= 0 && id < size_) change(x, id, x[id] + wish.biases[i]);
    }
    for (int i = 0; i < wish.banned_n; i++) {
        const int32_t id = wish.banned[i];
        if (id >= 0 && id < size_) change(x, id, -INFINITE);
    }
}

int Chooser::choose(const float* x, float max, const LogitRow& wish) {
    if (max == -INFINITE) return 0;  // all ids are banned
    if (is_greedy(wish)) return argmax(x, max);
    return is_filtered(wish) ? draw_filtered(x, max, wish) : draw(x, max, wish);
}

// By inversion: the first id whose cumulative weight, in order of ids, exceeds uniform * total.
int Chooser::draw(const float* x, float max, const LogitRow& wish) {
    const double target = wish.uniform * logit_kernels().soften(x, size_, max, wish.temperature, weights_.data(), sums_.data());
    double before = 0.0;
    size_t chunk = 0;
    while (chunk + 1 < sums_.size() && before + sums_[chunk] <= target) before += sums_[chunk++];
    const int start = int(chunk) * CHUNK, end = std::min(start + CHUNK, size_);
    int last = argmax(x, max);  // in case that rounding leaves nothing above the target
    for (int id = start; id < end; id++) {
        before += weights_[id];
        if (before > target) return id;
        if (weights_[id] > 0.0f) last = id;
    }
    return last;
}

// top_k, then top_p over what top_k left, then min_p; by inversion in order of falling weight. The largest weight is 1.
int Chooser::draw_filtered(const float* x, float max, const LogitRow& wish) {
    const double total = logit_kernels().soften(x, size_, max, wish.temperature, nullptr, nullptr);
    for (const float reach : REACH) {
        if (candidates(x, max, wish, reach, total)) break;
    }
    double whole = total;
    if (wish.top_k >= 1 && wish.top_k < size_) {
        const size_t keep = std::min(heap_.size(), size_t(wish.top_k));
        if (keep < heap_.size()) {
            std::nth_element(heap_.begin(), heap_.begin() + int64_t(keep), heap_.end(), std::greater<>());
            heap_.resize(keep);
        }
        std::sort(heap_.begin(), heap_.end(), std::greater<>());
        whole = 0.0;
        for (const uint64_t key : heap_) whole += weight_of(key);
        std::reverse(heap_.begin(), heap_.end());
    }
    std::make_heap(heap_.begin(), heap_.end());
    return draw_kept(wish, whole);
}

// Fills heap_ with ids within `reach` of the largest; false if an id beyond them could be left after the filters.
bool Chooser::candidates(const float* x, float max, const LogitRow& wish, float reach, double total) {
    const int found = logit_kernels().select(x, size_, max - wish.temperature * reach, ids_.data());
    heap_.clear();
    for (int i = 0; i < found; i++) weights_[i] = x[ids_[i]];
    logit_kernels().soften(weights_.data(), found, max, wish.temperature, weights_.data(), nullptr);
    double mass = 0.0;
    for (int i = 0; i < found; i++) {
        mass += weights_[i];
        heap_.push_back(key_of(weights_[i], ids_[i]));
    }
    if (reach == INFINITE) return true;
    if (wish.top_k >= 1 && wish.top_k < size_) return found >= wish.top_k;
    return mass >= (wish.top_p + 1e-6) * total || std::exp(-reach) < wish.min_p;
}

// Takes from heap_ in order what the nucleus and min_p leave, and draws among it.
int Chooser::draw_kept(const LogitRow& wish, double whole) {
    double mass = 0.0;
    kept_.clear();
    kept_ids_.clear();
    while (!heap_.empty()) {
        const float weight = weight_of(heap_.front());
        if (!kept_.empty() && (mass >= wish.top_p * whole || weight < wish.min_p)) break;
        mass += weight;
        kept_.push_back(mass);
        kept_ids_.push_back(id_of(heap_.front()));
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
    }
    const auto at = std::upper_bound(kept_.begin(), kept_.end(), wish.uniform * mass);
    return kept_ids_[std::min<size_t>(size_t(at - kept_.begin()), kept_.size() - 1)];
}

void Chooser::best(const float* x, float max, double log_sum, LogitRow& wish) {
    const int n = std::min(wish.top_n, size_);
    // At least n numbers are as large as the n-th largest of the chunks' largest.
    float floor = -INFINITE;
    if (size_t(n) <= largest_.size()) {
        std::vector<float> order(largest_);
        std::nth_element(order.begin(), order.begin() + (n - 1), order.end(), std::greater<>());
        floor = order[size_t(n - 1)];
    }
    const int found = logit_kernels().select(x, size_, floor, ids_.data());
    std::partial_sort(ids_.begin(), ids_.begin() + n, ids_.begin() + found, [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (int i = 0; i < n; i++) {
        wish.top_ids[i] = ids_[size_t(i)];
        wish.top_logprobs[i] = float(double(x[ids_[size_t(i)]] - max) - log_sum);
    }
}

}  // namespace llmd
