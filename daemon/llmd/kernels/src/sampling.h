// Choosing a token from a row of logits, and log-probabilities, as llmd.sampling.sampler does it; a row never leaves this library.
#pragma once

#include <cstdint>
#include <vector>

#include "logits.h"

namespace llmd {

// What is wanted of one row of logits, and what came of it. Part of the C ABI; ../sampling.py holds the same as a numpy type.
struct LogitRow {
    int64_t row;            // of the step's tokens
    double uniform;         // in [0, 1), decides a random choice
    double top_p;           // 1: off
    const int32_t* seen;    // ids of prompt and output, each once
    const int32_t* counts;  // how often each is in the output
    const int32_t* bias_ids;
    const float* biases;
    const int32_t* banned;
    int32_t* top_ids;       // [top_n], most likely first; of equals the lower id
    float* top_logprobs;
    float temperature;      // 0: greedy
    float min_p;            // 0: off
    float repetition;       // 1: off
    float frequency;
    float presence;
    int32_t top_k;          // < 1: off
    int32_t seen_n;
    int32_t bias_n;
    int32_t banned_n;
    int32_t top_n;
    int32_t scored;         // >= 0: nothing is chosen, the log-probability of this id is wanted
    int32_t wants_logprob;  // of the chosen token
    // Results
    int32_t token;
    int32_t finite;         // 0: the row held NaN or Inf, and counts as all zeros
    float logprob;
    int32_t reserved;
};

// One thread's working memory. `size`: ids that may be sampled.
class Chooser {
  public:
    explicit Chooser(int size);
    // Fill in the results of `wish` from its logits [size]. The logits are changed only where they are not finite.
    void run(float* logits, LogitRow& wish);

  private:
    struct Changed {
        int32_t id;
        float before;
    };

    int size_;
    std::vector<float> largest_, weights_;
    std::vector<double> sums_;
    std::vector<int32_t> ids_, kept_ids_;
    std::vector<uint64_t> heap_;
    std::vector<double> kept_;
    std::vector<Changed> changed_;

    float scan(const float* x);
    int argmax(const float* x, float max) const;
    void change(float* x, int32_t id, float value);
    void penalize(float* x, const LogitRow& wish);
    int choose(const float* x, float max, const LogitRow& wish);
    int draw(const float* x, float max, const LogitRow& wish);
    int draw_filtered(const float* x, float max, const LogitRow& wish);
    bool candidates(const float* x, float max, const LogitRow& wish, float reach, double total);
    int draw_kept(const LogitRow& wish, double whole);
    void best(const float* x, float max, double log_sum, LogitRow& wish);
};

}  // namespace llmd
