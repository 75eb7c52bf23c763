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

// Rotate one head in place by the angles of its position, (R,) each, where they turn neighbouring
// numbers. Products are rounded to A.
template <typename S, typename A>
void rotate_pairs(float* x, const A* cos, const A* sin, int64_t rotary) {
  for (int64_t i = 0; i < rotary / 2; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    const float by = static_cast<float>(cos[i]), across = static_cast<float>(sin[i]);
    x[2 * i] = rounded<S>(rounded<A>(a * by) + rounded<A>(-b * across));
    x[2 * i + 1] = rounded<S>(rounded<A>(b * by) + rounded<A>(a * across));
  }
}

// The same where they turn numbers of two halves.
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

inline Vec sigmoid(const Vec& x) { return Vec(1.0f) / (Vec(1.0f) + x.neg().exp()); }

// gate = function(gate) * up, or function(gate) if `up` is null
template <typename S, typename Function, typename U>
void activated(const Function& function, float* gate, const U* up, int64_t count) {
  if (!up) return map(count, gate, [&](Vec x) { return rounded<S>(function(x)); }, gate);
  map(count, gate, [&](Vec x, Vec up) { return rounded<S>(rounded<S>(function(x)) * up); }, gate,
      up);
}

// The same with an activation.
template <typename S, typename U>
void activate(const Activation& by, float* gate, const U* up, int64_t count) {
  const Vec one(1.0f), half(0.5f), part(0.044715f), none(0.0f);
  const Vec scale(static_cast<float>(M_SQRT2 * M_2_SQRTPI * 0.5));
  if (by.kind == Act::silu)
    return activated<S>([&](Vec x) { return x / (one + x.neg().exp()); }, gate, up, count);
  if (by.kind == Act::gelu)
    return activated<S>([&](Vec x) {
      const Vec inner = scale * (x + part * x * x * x);
      return half * x * (one + inner.tanh());
    }, gate, up, count);
  if (by.kind == Act::relu2)
    return activated<S>([&](Vec x) {
      const Vec above = at::vec::maximum(x, none);
      return above * above;
    }, gate, up, count);
  const auto soft = [](const std::optional<Tensor>& of) {  // softplus
    return rounded<S>(std::log1p(std::exp(static_cast<float>(numbers<S>(of)[0]))));
  };
  const float fixed = rounded<S>(static_cast<float>(by.beta));
  const Vec beta(fixed), positive(soft(by.positive));
  const Vec negative(rounded<S>(fixed + soft(by.negative)));
  const Vec epsilon(rounded<S>(static_cast<float>(by.epsilon)));
  activated<S>([&](Vec x) {
    const Vec line = rounded<S>(beta * x);
    const Vec above = rounded<S>(rounded<S>(positive * x) * x) + line;
    const Vec low = rounded<S>(rounded<S>(at::vec::minimum(x, epsilon).expm1()) - x);
    return Vec::blendv(rounded<S>(low * negative) + line, above, x > none);
  }, gate, up, count);
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
