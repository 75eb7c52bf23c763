// Draws from logits of a few positions in one call, on a CPU; knows no passes, rounds or noise keys.
//
// What a draw does to a row of numbers is little, and a dozen calls into a library for it take
// longer than the numbers do. The arithmetic is torch's, number for number: one division, one sum.
// Letters: N positions, V vocabulary.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

namespace draws {

constexpr float LEAST = -std::numeric_limits<float>::infinity();
constexpr int64_t PART = 512;  // numbers that are looked at together

// The best and the second-best of some numbers, as far as they have been seen.
struct Best {
  float first = LEAST, second = LEAST;
  int64_t place = -1;  // of the first of the best; -1 where all are -inf
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
    for (int64_t i = 0; i < count; ++i) {
      if (numbers[i] > first) {
        second = first, first = numbers[i], place = begin + i;
      } else if (numbers[i] > second) {
        second = numbers[i];
      }
    }
  }
};

// Tokens of the largest of logits (N, V) / temperature + noise, (N,), -1 where there is none or a
// number is NaN, and by how much the second-best is behind, (N,), 0 or less, NaN where that is none.
// Noise: (V,) for every position, or nothing at all.
inline std::tuple<at::Tensor, at::Tensor> drawn(const at::Tensor& logits, double temperature,
                                                const std::vector<at::Tensor>& noise) {
  const auto fits = [](const at::Tensor& each) {
    return each.is_cpu() && each.scalar_type() == at::kFloat && each.is_contiguous();
  };
  TORCH_CHECK_VALUE(logits.dim() == 2 && fits(logits), "logits must be (N, V), float32, contiguous");
  const int64_t positions = logits.size(0), vocabulary = logits.size(1);
  TORCH_CHECK_VALUE(noise.empty() || static_cast<int64_t>(noise.size()) == positions,
                    "noise must be of ", positions, " positions, got ", noise.size());
  for (const auto& each : noise) {
    TORCH_CHECK_VALUE(fits(each) && each.numel() == vocabulary, "noise must be (V,), float32");
  }
  at::Tensor tokens = at::empty({positions}, logits.options().dtype(at::kLong));
  at::Tensor behind = at::empty({positions}, logits.options());
  const float divisor = static_cast<float>(temperature);
  for (int64_t n = 0; n < positions; ++n) {
    const float* row = logits.const_data_ptr<float>() + n * vocabulary;
    const float* luck = noise.empty() ? nullptr : noise[n].const_data_ptr<float>();
    Best best;
    float part[PART];
    for (int64_t begin = 0; begin < vocabulary; begin += PART) {
      const int64_t count = std::min(PART, vocabulary - begin);
      for (int64_t i = 0; i < count; ++i) part[i] = row[begin + i] / divisor;
      if (luck != nullptr) {
        for (int64_t i = 0; i < count; ++i) part[i] += luck[begin + i];
      }
      best.see(part, begin, count);
    }
    const float none = std::numeric_limits<float>::quiet_NaN();
    tokens.data_ptr<int64_t>()[n] = best.known ? best.place : -1;
    behind.data_ptr<float>()[n] = best.known ? best.second - best.first : none;
  }
  return {tokens, behind};
}

}  // namespace draws
