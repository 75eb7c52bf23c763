// Elementwise operations of a pass, and those along one token: norms, rotation, activations.

#pragma once

#include <algorithm>
#include <cmath>

#include "products.h"
#include "sublayer.h"

namespace {

// out = function(from...), vector by vector; out may be one of the inputs.
template <typename Function, typename... From>
inline void map(int64_t count, float* out, const Function& function, const From*... from) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) function(widened(from + i)...).store(out + i);
  if (const int64_t rest = count - i; rest > 0)
    function(widened(from + i, rest)...).store(out + i, static_cast<int>(rest));
}

// out = norm(x), for one token or one head; out may be x.
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
  const Vec by(1.0f / std::sqrt(total / width + static_cast<float>(norm.epsilon))), one(1.0f);
  const S* weight = numbers<S>(norm.weight);
  if (!weight)
    map(width, out, [&](Vec x) { return rounded<S>(x * by); }, x);
  else if (norm.style == Style::one_plus)
    map(width, out, [&](Vec x, Vec w) { return rounded<S>(x * by * (one + w)); }, x, weight);
  else if (norm.style == Style::wide)
    map(width, out, [&](Vec x, Vec w) { return rounded<S>(x * by * w); }, x, weight);
  else
    map(width, out, [&](Vec x, Vec w) { return rounded<S>(rounded<S>(x * by) * w); }, x, weight);
}

// Rotate one head in place by the angles of its position, (R,) each. Products are rounded to A.
template <typename S, typename A>
void rotate(float* x, const A* cos, const A* sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t here = std::min(LANES, half - i);
    const Vec a = widened(x + i, here), b = widened(x + i + half, here);
    const Vec first = rounded<A>(a * widened(cos + i, here)) +
                      rounded<A>(b.neg() * widened(sin + i, here));
    const Vec second = rounded<A>(b * widened(cos + i + half, here)) +
                       rounded<A>(a * widened(sin + i + half, here));
    rounded<S>(first).store(x + i, static_cast<int>(here));
    rounded<S>(second).store(x + i + half, static_cast<int>(here));
  }
}

// gate = activation(gate) * up
template <typename S, typename U>
void activate(bool gelu, float* gate, const U* up, int64_t count) {
  const Vec one(1.0f), half(0.5f), part(0.044715f);
  const Vec scale(static_cast<float>(M_SQRT2 * M_2_SQRTPI * 0.5));
  if (!gelu)
    map(count, gate, [&](Vec x, Vec up) {
      return rounded<S>(rounded<S>(x / (one + x.neg().exp())) * up);
    }, gate, up);
  else
    map(count, gate, [&](Vec x, Vec up) {
      const Vec inner = scale * (x + part * x * x * x);
      return rounded<S>(rounded<S>(half * x * (one + inner.tanh())) * up);
    }, gate, up);
}

// hidden += by * result
template <typename S>
void add_to(float* hidden, const float* result, float by, int64_t count) {
  const Vec times(by);
  if (by == 1.0f)
    map(count, hidden, [](Vec x, Vec y) { return rounded<S>(x + y); }, hidden, result);
  else
    map(count, hidden, [&](Vec x, Vec y) { return rounded<S>(x + rounded<S>(y * times)); }, hidden,
        result);
}

}  // namespace
