// The token of one row from its logits: greedy, or inverse CDF over the distribution left by top-k, then top-p.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "vec.h"

namespace shoal {

// In place of a token: the row holds NaN, or its largest logit is infinite.
constexpr int32_t NOT_FINITE = -1;

// Lowest id among the largest logits, or NOT_FINITE. A maximum forgets a NaN that it meets, so NaN is counted beside it.
static inline int32_t argmax(const float* x, int n) {
    int i = 0;
    V top = splat(-INFINITY), none = V{};
    for (; i + LANES <= n; i += LANES) {
        const V value = load(x + i);
        top = max(top, value);
        none = value == value ? none : splat(1.0f);
    }
    float best = max_lanes(top);
    bool has_nan = max_lanes(none) > 0.0f;
    for (; i < n; i++) best = x[i] > best ? x[i] : best, has_nan |= x[i] != x[i];
    if (has_nan || !(best - best == 0.0f)) return NOT_FINITE;
    for (i = 0; i < n; i++)
        if (x[i] == best) return i;
    return NOT_FINITE;
}

class Sampler {
  public:
    // NOT_FINITE as argmax. temperature > 0; top_k 0, top_p 1 and min_p 0 mean off; uniform in [0, 1).
    int32_t sample(const float* logits, int n, float temperature, int top_k, float top_p, float min_p, double uniform) {
        const int32_t likeliest = argmax(logits, n);
        if (likeliest == NOT_FINITE) return NOT_FINITE;
        double total = weigh(logits, n, logits[likeliest], 1.0f / temperature, min_p);
        const bool by_count = top_k > 0 && top_k < n;
        if (!by_count && top_p >= 1.0f) return walk(n, uniform * total);
        if (by_count) {
            collect(n, [&](double) { return (int)kept_.size() >= top_k; });
            if ((int)kept_.size() > top_k) kept_.resize(top_k);
            total = 0;
            for (auto& token : kept_) total += token.first;
        } else {
            collect(n, [&](double sum) { return sum >= top_p * total; });
        }
        if (top_p < 1.0f) total = keep_mass(top_p * total);
        double target = uniform * total, sum = 0;
        for (auto& token : kept_)
            if ((sum += token.first) > target) return token.second;
        return kept_.back().second;
    }

  private:
    static constexpr int BLOCK = 1024;
    // exp() ends at 1.6e-38, also for minus infinity: a masked token must weigh nothing.
    static constexpr float LEAST_WEIGHT = 1e-37f;
    std::vector<float> weights_;
    std::vector<double> block_sums_;
    std::vector<std::pair<float, int32_t>> kept_;

    // Weights relative to the likeliest token's, which is 1: so what min_p takes away is all below min_p.
    double weigh(const float* logits, int n, float top, float inverse_temperature, float min_p) {
        weights_.resize((size_t)(n + LANES));
        block_sums_.clear();
        const V cut = splat(std::max(min_p, LEAST_WEIGHT));
        double total = 0;
        for (int start = 0; start < n; start += BLOCK) {
            V sum = V{};
            const int stop = std::min(n, start + BLOCK);
            for (int i = start; i < stop; i += LANES) {
                float tail[LANES];
                V x;
                if (i + LANES <= n) x = load(logits + i);
                else {
                    for (int j = 0; j < LANES; j++) tail[j] = i + j < n ? logits[i + j] : -INFINITY;
                    x = load(tail);
                }
                V w = exp((x - splat(top)) * splat(inverse_temperature));
                w = w >= cut ? w : V{};
                store(weights_.data() + i, w);
                sum = sum + w;
            }
            block_sums_.push_back(sum_lanes(sum));
            total += block_sums_.back();
        }
        return total;
    }

    // First token, in id order, at which the running mass passes `target`.
    int32_t walk(int n, double target) const {
        double sum = 0;
        size_t block = 0;
        while (block + 1 < block_sums_.size() && sum + block_sums_[block] <= target) sum += block_sums_[block++];
        int32_t last = 0;
        for (int i = (int)block * BLOCK; i < n; i++) {
            if (weights_[i] <= 0) continue;
            last = i;
            if ((sum += weights_[i]) > target) return i;
        }
        if (weights_[last] > 0) return last;
        for (last = n - 1; last > 0 && weights_[last] <= 0; last--) {}
        return last;
    }

    // The heaviest tokens, sorted (weight down, id up), at least as many as `enough(mass)` asks for. A full sort of 49,152
    // tokens takes about 3 ms in torch; almost always the first threshold leaves a few dozen.
    template <typename Enough> void collect(int n, const Enough& enough) {
        for (float limit = 1.0f / 64; ; limit /= 256) {
            kept_.clear();
            double sum = 0;
            if (limit < 1e-30f) limit = 0;
            for (int i = 0; i < n; i++)
                if (weights_[i] >= limit) kept_.emplace_back(weights_[i], i), sum += weights_[i];
            if (limit == 0 || enough(sum)) break;
        }
        std::sort(kept_.begin(), kept_.end(), [](auto& a, auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
    }

    // Shortest prefix of the kept tokens whose mass reaches `mass`; returns its mass.
    double keep_mass(double mass) {
        double sum = 0;
        size_t count = 0;
        while (count < kept_.size() && sum < mass) sum += kept_[count++].first;
        kept_.resize(std::max<size_t>(1, count));
        return count ? sum : kept_[0].first;
    }
};

}  // namespace shoal
