// What a pass computes number by number, or along one token: norms, rotation, activations.

#pragma once

#include <algorithm>
#include <cmath>

#include "products.h"
#include "sublayer.h"

namespace {

// out = norm(x), of one token or head of some width; may be x itself
template <typename S>
void normalise(const Norm& norm, const float* x, int64_t width, float* out) {
  Vec squares[2] = {Vec(0.0f), Vec(0.0f)};
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES)
    for (int j = 0; j < 2; ++j) {
      const Vec some = Vec::loadu(x + i + j * LANES);
      squares[j] = at::vec::fmadd(some, some, squares[j]);
    }
  float total = sum(squares[0] + squares[1]);
  for (; i < width; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / width + static_cast<float>(norm.epsilon));
  const S* weight = numbers<S>(norm.weight);
  if (!weight)
    for (int64_t j = 0; j < width; ++j) out[j] = rounded<S>(x[j] * factor);
  else if (norm.style == Style::one_plus)
    for (int64_t j = 0; j < width; ++j)
      out[j] = rounded<S>(x[j] * factor * (1.0f + static_cast<float>(weight[j])));
  else if (norm.style == Style::wide)
    for (int64_t j = 0; j < width; ++j)
      out[j] = rounded<S>(x[j] * factor * static_cast<float>(weight[j]));
  else
    for (int64_t j = 0; j < width; ++j)
      out[j] = rounded<S>(rounded<S>(x[j] * factor) * static_cast<float>(weight[j]));
}

// Rotate one head in place; the angles of its place are (R,) each. Angles of float32 are products of
// float32, too.
template <typename S, typename A>
void rotate(float* x, const A* cos, const A* sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = rounded<S>(rounded<A>(a * static_cast<float>(cos[i])) +
                      rounded<A>(-b * static_cast<float>(sin[i])));
    x[i + half] = rounded<S>(rounded<A>(b * static_cast<float>(cos[i + half])) +
                             rounded<A>(a * static_cast<float>(sin[i + half])));
  }
}

// gate = activation(gate) * up
template <typename S, typename U>
void activate(bool gelu, float* gate, const U* up, int64_t count) {
  const auto apply = [&](const Vec& x) {
    if (!gelu) return x / (Vec(1.0f) + x.neg().exp());
    const Vec inner = Vec(static_cast<float>(M_SQRT2 * M_2_SQRTPI * 0.5)) *
                      (x + Vec(0.044715f) * x * x * x);
    return Vec(0.5f) * x * (Vec(1.0f) + inner.tanh());
  };
  float some[LANES];
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t here = std::min(LANES, count - i);
    apply(widened(gate + i, here)).store(some);
    for (int64_t j = 0; j < here; ++j)
      gate[i + j] = rounded<S>(rounded<S>(some[j]) * static_cast<float>(up[i + j]));
  }
}

}  // namespace
