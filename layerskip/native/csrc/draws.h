// Draws tokens from the logits of a few positions in one call, on a CPU.
//
// A draw does little to a row of numbers, and a dozen library calls take longer than the
// arithmetic. The arithmetic is that of `Law.scores` and torch, number for number: a division,
// top-k and top-p, a sum. Only top-p differs: it adds up probabilities in float64, the library in
// float32. Noise is computed only for the few tokens that it could lift to the top, because two
// logarithms for every token of a vocabulary would take as long as a pass of a small model.
// Letters: N positions, V vocabulary.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <queue>
#include <tuple>
#include <vector>

namespace draws {

constexpr float LEAST = -std::numeric_limits<float>::infinity();
constexpr int64_t PART = 512;  // numbers that are examined together

inline float largest(const float* numbers, int64_t count) {
  float top = LEAST;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) top = numbers[i] > top ? numbers[i] : top;
  return top;
}

// The largest and second-largest of the numbers seen so far.
struct Best {
  float first = LEAST, second = LEAST;
  int64_t place = -1;  // the first place of the largest; -1 if all are -inf
  int64_t next = -1;   // the place of the second-largest; -1 if there is none
  bool known = true;   // no number is NaN

  void see(const float* numbers, int64_t begin, int64_t count) {
    float top = LEAST;
    int strange = 0;
#pragma omp simd reduction(max : top) reduction(| : strange)
    for (int64_t i = 0; i < count; ++i) {
      strange |= numbers[i] != numbers[i];
      top = numbers[i] > top ? numbers[i] : top;
    }
    known &= !strange;
    if (!(top > second)) return;  // most parts hold neither
    for (int64_t i = 0; i < count; ++i) see(numbers[i], begin + i);
  }

  void see(float number, int64_t at) {
    if (number > first) {
      second = first, first = number, next = place, place = at;
    } else if (number > second) {
      second = number, next = at;
    }
  }
};

struct Candidate {
  float score;
  int64_t token;
  double weight;  // exp(score - largest score)
};

// Applies top-k and top-p to the scores (V,) of one position, none of which is NaN. Top-k keeps the
// scores that are not below the k-th largest. Of these, top-p keeps a token if it and all less
// probable tokens together have more than 1 - p; of equal scores, the higher token counts as the
// more probable one. Kept tokens come in ascending order.
class Filter {
 public:
  int64_t top_k = 0;   // 0: all
  double top_p = 1.0;  // 1: all
  int64_t least = 1;   // top-p keeps at least this many tokens

  bool any() const { return top_k > 0 || top_p < 1.0; }

  void apply(const std::vector<float>& scores, std::vector<Candidate>& kept) const {
    const int64_t size = static_cast<int64_t>(scores.size());
    const float top = *std::max_element(scores.begin(), scores.end());
    const float lowest = top_k > 0 && top_k < size ? kth(scores) : LEAST;
    kept.clear();
    if (!(top > LEAST)) return;
    double total = 0.0, likely = 0.0;
    if (top_p < 1.0 && lowest == LEAST && !std::isinf(top)) {
      total = weights(scores, top);
      // All scores below this add up to less than half of what top-p removes.
      likely = (1.0 - top_p) * total / (2.0 * static_cast<double>(size));
    }
    const double bound = likely > 0.0 ? top + std::log(likely) - 1e-3 : LEAST;
    gather(scores, lowest, bound, kept);
    if (static_cast<int64_t>(kept.size()) < least) gather(scores, lowest, LEAST, kept);
    if (!(top_p < 1.0) || std::isinf(top)) return;
    for (Candidate& each : kept) each.weight = std::exp(static_cast<double>(each.score) - top);
    if (lowest > LEAST)
      for (const Candidate& each : kept) total += each.weight;
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.token > b.token;
    });
    double above = 0.0;
    size_t count = 0;
    while (count < kept.size() &&
           (static_cast<int64_t>(count) < least || total - above > (1.0 - top_p) * total))
      above += kept[count++].weight;
    kept.resize(count);
    std::sort(kept.begin(), kept.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  }

 private:
  static void gather(const std::vector<float>& scores, float lowest, double bound,
                     std::vector<Candidate>& kept) {
    kept.clear();
    const int64_t size = static_cast<int64_t>(scores.size());
    for (int64_t i = 0; i < size; ++i)
      if (scores[i] >= lowest && scores[i] >= bound && scores[i] > LEAST)
        kept.push_back({scores[i], i, 0.0});
  }

  float kth(const std::vector<float>& scores) const {
    std::priority_queue<float, std::vector<float>, std::greater<float>> best;
    const int64_t size = static_cast<int64_t>(scores.size());
    for (int64_t begin = 0; begin < size; begin += PART) {
      const int64_t end = std::min(size, begin + PART);
      const auto counts = [&](float score) {
        return static_cast<int64_t>(best.size()) < top_k || score > best.top();
      };
      if (!counts(largest(&scores[begin], end - begin))) continue;
      for (int64_t i = begin; i < end; ++i) {
        if (!counts(scores[i])) continue;
        best.push(scores[i]);
        if (static_cast<int64_t>(best.size()) > top_k) best.pop();
      }
    }
    return best.top();
  }

  // The sum of exp(score - top).
  static double weights(const std::vector<float>& scores, float top) {
    using Doubles = at::vec::Vectorized<double>;
    constexpr int64_t LANES = Doubles::size();
    const int64_t size = static_cast<int64_t>(scores.size());
    Doubles sums(0.0);
    double some[LANES];
    for (int64_t i = 0; i < size; i += LANES) {
      for (int64_t j = 0; j < LANES; ++j)
        some[j] = i + j < size ? static_cast<double>(scores[i + j]) - top : -1e300;
      sums = sums + Doubles::loadu(some).exp();
    }
    sums.store(some);
    double total = 0.0;
    for (double each : some) total += each;
    return total;
  }
};

// The 32 random bits of a stream's token, from which `uniform` is made.
inline uint32_t mixed(int64_t start, int64_t token) {
  uint64_t x = static_cast<uint64_t>(start) + static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(x >> 32);
}

// The uniform number that `noise.py` makes for the stream that begins at `start`. The same torch
// functions turn it into Gumbel noise.
inline float uniform(int64_t start, int64_t token) {
  const float bits = static_cast<float>(mixed(start, token));
  return std::min((bits + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// `luckiest` is an upper bound of a token's noise, and the noise is at most SPREAD below it. The
// noise of a uniform number u is -ln(-ln(1 - u)), which is at most -ln u. The bound rounds u down
// to a power of two. It exceeds the noise by less than 1.1 for u < 1/2, and otherwise by at most
// 3.6, because 1 - u is at least 2^-24.
constexpr float SPREAD = 4.0f;

inline float luckiest(int64_t start, int64_t token) {
  const float number = static_cast<float>(mixed(start, token)) + 0.5f;
  int32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return 0.69314718f * static_cast<float>(32 + 127 - (bits >> 23));
}

// The tokens whose logit / divisor plus noise may be the largest or second-largest, in ascending
// order. They are few, and noise is computed for these alone. False if a logit (V,) is NaN.
inline bool lucky(const float* logits, int64_t vocabulary, float divisor, int64_t start,
                  std::vector<float>& most, std::vector<Candidate>& kept) {
  Best best;
  most.resize(vocabulary);
  for (int64_t begin = 0; begin < vocabulary; begin += PART) {
    const int64_t end = std::min(vocabulary, begin + PART);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) most[i] = logits[i] / divisor + luckiest(start, i);
    best.see(&most[begin], begin, end - begin);
  }
  kept.clear();
  for (int64_t begin = 0; begin < vocabulary; begin += PART) {
    const int64_t end = std::min(vocabulary, begin + PART);
    if (largest(&most[begin], end - begin) < best.second - SPREAD) continue;
    for (int64_t i = begin; i < end; ++i)
      if (most[i] >= best.second - SPREAD && most[i] > LEAST)
        kept.push_back({logits[i] / divisor, i, 0.0});
  }
  return best.known;
}

// For each position, draws the token with the largest score plus noise. Scores are logits (N, V) /
// temperature after top-k and top-p. Noise is of the streams that begin at `starts`; without starts
// there is none. Returns three tensors (N,): the tokens, -1 if none is left or a logit is NaN; by
// how much the second-best is behind, 0 or less, NaN if a logit is NaN; and its token, or -1.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> drawn(
    const at::Tensor& logits, double temperature, int64_t top_k, double top_p, int64_t least,
    const std::vector<int64_t>& starts) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_cpu() && logits.is_contiguous() &&
                        (logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16),
                    "logits must be (N, V), float32 or bfloat16, contiguous");
  const int64_t positions = logits.size(0), vocabulary = logits.size(1);
  TORCH_CHECK_VALUE(starts.empty() || static_cast<int64_t>(starts.size()) == positions,
                    "starts must be of ", positions, " positions, got ", starts.size());
  at::Tensor tokens = at::empty({positions}, logits.options().dtype(at::kLong));
  at::Tensor behind = at::empty({positions}, logits.options().dtype(at::kFloat));
  at::Tensor next = at::empty({positions}, tokens.options());
  const float divisor = static_cast<float>(temperature);
  const Filter filter{top_k, top_p, least};
  const at::Tensor wide = logits.to(at::kFloat);
  std::vector<float> scores;
  std::vector<Candidate> kept;
  for (int64_t n = 0; n < positions; ++n) {
    const float* row = wide.const_data_ptr<float>() + n * vocabulary;
    Best best;
    if (filter.any()) {
      scores.resize(vocabulary);
      int strange = 0;
#pragma omp simd reduction(| : strange)
      for (int64_t i = 0; i < vocabulary; ++i) {
        scores[i] = row[i] / divisor;
        strange |= scores[i] != scores[i];
      }
      best.known = !strange;
      if (best.known) filter.apply(scores, kept);
    } else if (!starts.empty()) {
      best.known = lucky(row, vocabulary, divisor, starts[n], scores, kept);
    } else {
      float part[PART];
      for (int64_t begin = 0; begin < vocabulary; begin += PART) {
        const int64_t count = std::min(PART, vocabulary - begin);
        for (int64_t i = 0; i < count; ++i) part[i] = row[begin + i] / divisor;
        best.see(part, begin, count);
      }
    }
    if (starts.empty()) {
      for (const Candidate& each : kept) best.see(each.score, each.token);
    } else if (!kept.empty()) {
      at::Tensor noise = at::empty({static_cast<int64_t>(kept.size())}, behind.options());
      float* numbers = noise.data_ptr<float>();
      for (size_t i = 0; i < kept.size(); ++i) numbers[i] = uniform(starts[n], kept[i].token);
      noise.neg_().log1p_().neg_().log_().neg_();
      for (size_t i = 0; i < kept.size(); ++i) best.see(kept[i].score + numbers[i], kept[i].token);
    }
    kept.clear();
    tokens.data_ptr<int64_t>()[n] = best.known ? best.place : -1;
    behind.data_ptr<float>()[n] = best.known ? best.second - best.first : NAN;
    next.data_ptr<int64_t>()[n] = best.known ? best.next : -1;
  }
  return {tokens, behind, next};
}

}  // namespace draws
