// The part of a pass that runs a mixture of experts. Letters are those of `pass.h`.

#pragma once

#include "pass.h"

namespace {

// Chooses each token's experts and their weights from the inputs of the router.
template <typename S>
void Pass<S>::choose(Worker& me, const Mixture& mixture, const float* x) {
  if (mixture.norm) {
    norm_all(me, *mixture.norm, x, me.gathered);
    const S* scale = numbers<S>(mixture.scale);
    const float number = static_cast<float>(mixture.number);
    for (int64_t i = me.tokens.first * width_; i < me.tokens.last * width_; ++i) {
      const float by = static_cast<float>(scale[i % width_]);
      me.gathered[i] = rounded<S>(rounded<S>(me.gathered[i] * by) * number);
    }
    x = me.gathered;
  }
  const int64_t count = mixture.count(), top = mixture.top;
  take(me, x);
  multiply(me, first_, count);
  me.meet();
  std::vector<float> law(count), rank(count);
  const S* factors = numbers<S>(mixture.factors);
  const float *bias = numbers<float>(mixture.bias), factor = static_cast<float>(mixture.factor);
  for (int64_t t = me.number; t < tokens_; t += me.of) {
    const float* scores = first_ + t * count;
    if (mixture.sigmoid) {
      map(count, law.data(), [](Vec x) { return sigmoid(x); }, scores);
    } else {
      const float most = *std::max_element(scores, scores + count);
      float total = 0;
      for (int64_t e = 0; e < count; ++e) total += law[e] = std::exp(scores[e] - most);
      for (float& each : law) each /= total;
    }
    for (int64_t e = 0; e < count; ++e) rank[e] = law[e] + (bias ? bias[e] : 0.0f);
    float taken = 0;
    for (int64_t k = 0; k < top; ++k) {
      const int64_t best = std::max_element(rank.begin(), rank.end()) - rank.begin();
      chosen_[t * top + k] = best;
      taken += weights_[t * top + k] = law[best];
      rank[best] = -INFINITY;  // below all remaining scores
    }
    for (int64_t i = t * top; i < (t + 1) * top; ++i) {
      if (mixture.whole) weights_[i] /= taken;
      weights_[i] *= factor;
      if (factors) weights_[i] *= static_cast<float>(factors[chosen_[i]]);
      if (mixture.cast) weights_[i] = rounded<S>(weights_[i]);
    }
  }
  me.meet();
  me.begins.assign(count + 1, 0);
  for (int64_t i = 0; i < tokens_ * top; ++i) ++me.begins[chosen_[i] + 1];
  for (int64_t e = 0; e < count; ++e) me.begins[e + 1] += me.begins[e];
  std::vector<int64_t> next(me.begins.begin(), me.begins.end() - 1);
  me.pairs.resize(tokens_ * top);
  for (int64_t i = 0; i < tokens_ * top; ++i) me.pairs[next[chosen_[i]]++] = i;
}

// The outputs of the experts for x, (n, top, H) sorted by expert, in `second_`. The tokens of an
// expert are multiplied together, but this does not change a token's results.
template <typename S>
void Pass<S>::run_experts(Worker& me, const Mixture& mixture, const float* x) const {
  const int64_t inner = mixture.inner(), top = mixture.top;
  const Range mine = me.share(inner);
  for (int64_t e = 0; e < mixture.count(); ++e) {
    const int64_t first = me.begins[e], tokens = me.begins[e + 1] - first;
    if (!tokens) continue;
    const Range own = this->mine(me, tokens);
    for (int64_t i = own.first; i < own.last; ++i)
      std::copy_n(x + me.pairs[first + i] / top * width_, width_, me.gathered + i * width_);
    const Piece gate{&mixture.expand, 2 * e * inner, inner};
    const Piece up{&mixture.expand, (2 * e + 1) * inner, inner};
    float *gates = first_ + first * inner, *ups = second_ + first * inner;
    take(me, mixture.expand, me.gathered, tokens);
    multiply(me, gate, begins(me, up), tokens, gates, inner);
    multiply(me, up, upcoming(me, up), tokens, ups, inner);
    for (int64_t i = 0; i < tokens; ++i)
      activate<S>(mixture.act, gates + i * inner + mine.first, ups + i * inner + mine.first,
                  mine.last - mine.first);
    meet_divided(me);  // until all threads have read the inputs
  }
  if (!divided_) me.meet();
  for (int64_t e = 0; e < mixture.count(); ++e) {
    const int64_t first = me.begins[e], tokens = me.begins[e + 1] - first;
    if (!tokens) continue;
    const Piece down{&mixture.shrink, e * width_, width_};
    take(me, mixture.shrink, first_ + first * inner, tokens);
    multiply(me, down, upcoming(me, down), tokens, second_ + first * width_, width_);
    meet_divided(me);
  }
  if (!divided_) me.meet();
}

// A mixture of experts, and the dense MLP beside it if there is one.
template <typename S>
void Pass<S>::mix(Worker& me, const Sublayer& layer, const float* x) {
  const Mixture& mixture = *layer.mixture;
  const int64_t top = mixture.top;
  if (top) choose(me, mixture, mixture.dense ? me.hidden : x);
  if (layer.output) {
    expand(me, layer, x);
    finish_product(me, first_);
  }
  if (top) {
    if (mixture.before) {
      norm_all(me, *mixture.before, me.hidden, me.normed);
      x = me.normed;
    }
    meet_divided(me);  // experts read the tokens of all threads
    run_experts(me, mixture, x);
    std::vector<int64_t> places(tokens_ * top);  // places of the pairs in `second_`
    for (int64_t i = 0; i < tokens_ * top; ++i) places[me.pairs[i]] = i;
    for (int64_t t = me.tokens.first; t < me.tokens.last; ++t) {
      float* out = me.normed + t * width_;
      std::fill_n(out, width_, 0.0f);
      for (int64_t k = t * top; k < (t + 1) * top; ++k) {
        const float *from = second_ + places[k] * width_, by = weights_[k];
        if (mixture.cast)
          for (int64_t i = 0; i < width_; ++i) out[i] += rounded<S>(from[i] * by);
        else
          for (int64_t i = 0; i < width_; ++i) out[i] += from[i] * by;
      }
      for (int64_t i = 0; i < width_; ++i) out[i] = rounded<S>(out[i]);
    }
    if (mixture.after) norm_all(me, *mixture.after, me.normed, me.normed);
  }
  if (layer.output) {
    me.row.resize(width_);
    for (int64_t t = me.tokens.first; t < me.tokens.last; ++t) {
      float *out = me.normed + t * width_, *row = me.row.data();
      const float* beside = result_ + t * width_;
      const Vec by = layer.gate ? rounded<S>(sigmoid(Vec(gates_[t]))) : Vec(1.0f);
      if (mixture.dense)
        normalise<S>(*mixture.dense, beside, width_, row);
      else
        map(width_, row, [&](Vec x) { return rounded<S>(x * by); }, beside);
      for (int64_t i = 0; i < width_; ++i) out[i] = top ? rounded<S>(row[i] + out[i]) : row[i];
    }
  }
  me.meet();  // until all threads have read what the next sublayer overwrites
  add_result(me, me.normed, layer.after, layer.times);
}

}  // namespace
