// The arguments of a pass, and their checks: a model's weights may have changed since opening.

#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "sublayer.h"

namespace {

constexpr int64_t LINE = 16;  // numbers; every vector has this many or a divisor of it

// Whether a norm spans all heads together, rather than each head.
inline bool of_all(const std::optional<Norm>& norm, int64_t width) {
  return norm && norm->weight && norm->weight->numel() != width;
}

struct Arguments {
  Arguments(const std::vector<const Sublayer*>& sublayers, const Tensor& hidden, const Cache& cache,
        const std::vector<Angles>& angles, const std::optional<Tensor>& layer_inputs)
      : sublayers_(sublayers), hidden_(hidden), cache_(cache), angles_(angles),
        layer_inputs_(layer_inputs), rows_(hidden.size(0)), count_(hidden.size(1)),
        tokens_(rows_ * count_), width_(hidden.size(2)) {}

  const std::vector<const Sublayer*>& sublayers_;
  const Tensor& hidden_;  // (B, T, H)
  const Cache& cache_;
  const std::vector<Angles>& angles_;
  const std::optional<Tensor>& layer_inputs_;  // (B, T, L, P)
  const int64_t rows_, count_, tokens_, width_;

  template <typename S>
  void check_all() const {
    size_t attentions = 0;
    require(cache_.bases.empty() || cache_.bases.size() == cache_.keys.size() * rows_,
            "there are ", cache_.keys.size(), " buffers of keys of ", rows_, " rows, but ",
            cache_.bases.size(), " bases");
    for (const Sublayer* each : sublayers_) {
      require(each->kind != Kind::head || each == sublayers_.back(), "a head must come last");
      require(each->kind != Kind::layer_inputs || sublayers_.size() == 1,
              "inputs of layers are made by a call of their own");
      check<S>(each->before, width_);
      if (each->kind == Kind::layer_inputs) {
        check_layer_inputs<S>(0);
        check<S>(each->after, layer_inputs_->size(3));
        const int64_t outputs = layer_inputs_->size(2) * layer_inputs_->size(3);
        check_matrix<S>(each->inputs[0], outputs, width_);
        continue;
      }
      check<S>(each->after, width_);
      const int64_t outputs = each->outputs();
      for (const Matrix& matrix : each->inputs) check_matrix<S>(matrix, matrix.rows(), width_);
      if (each->kind == Kind::attention) {
        const int64_t own = each->heads * each->width, keys = each->kv_heads * each->width;
        check<S>(each->q_norm, of_all(each->q_norm, each->width) ? own : each->width);
        check<S>(each->k_norm, of_all(each->k_norm, each->width) ? keys : each->width);
        check<S>(each->v_norm, each->width);
        require(outputs == each->projected() - (each->alike() ? keys : 0),
                "queries, keys and values of ", outputs,
                " numbers are not those that the model was opened with; open it again");
        require(attentions < cache_.keys.size() && attentions < cache_.values.size(),
                "there are fewer caches than attention sublayers");
        check_cache<S>(*each, cache_.keys[attentions], cache_.values[attentions], cache_.bases_of(attentions));
        ++attentions;
        check_matrix<S>(*each->output, width_, own);
        if (each->gate) check_matrix<S>(*each->gate, own, width_);
        if (each->sinks) ::check<S>(*each->sinks, {each->heads}, "sinks");
        require(!each->opens() || !each->sinks, "an attention has a gate or sinks");
        require(!each->joined || each->width % 32 == 0, "heads with gates have whole panels of rows");
      } else if (each->kind == Kind::mlp) {
        if (each->mixture) check_mixture<S>(*each->mixture);
        require(each->gated || each->inputs.size() == 1, "an MLP without a gate has one input");
        require(each->inputs.size() != 2 || each->inputs[0].rows() == outputs / 2,
                "gate and up differ in size");
        require(each->inputs.size() != 1 || !each->gated || !each->inputs[0].layout ||
                    outputs % 32 == 0,
                "gate and up have whole panels of rows");
        if (each->output) check_matrix<S>(*each->output, width_, each->inner());
        if (each->gate) check_matrix<S>(*each->gate, 1, width_);
        check_activation<S>(each->act);
      }
      if (each->tail) check_tail<S>(*each->tail);
    }
  }

  // Whether products with both matrices read the same packed inputs.
  template <typename S>
  static bool same_layout(const Matrix& a, const Matrix& b) {
    const auto packed = [](const Matrix& m) { return m.layout ? m.layout->format->inputs : -1; };
    return packed(a) == packed(b) && a.halved<S>() == b.halved<S>() && a.wide == b.wide &&
           numbers<int32_t>(a.order) == numbers<int32_t>(b.order);
  }

  template <typename S>
  static void check(const std::optional<Norm>& norm, int64_t width) {
    if (norm && norm->weight) ::check<S>(*norm->weight, {width}, "a norm's weight");
  }

  template <typename S>
  static void check_matrix(const Matrix& matrix, int64_t outputs, int64_t inputs) {
    if (matrix.halved<S>())
      ::check<BFloat16>(matrix.weight, {outputs, inputs}, "a weight");
    else if (matrix.wide)
      ::check<float>(matrix.weight, {outputs, inputs}, "a weight");
    else if (matrix.plain())
      ::check<S>(matrix.weight, {outputs, inputs}, "a weight");
    else
      require(matrix.rows() == outputs && matrix.columns() == inputs, "a packed weight of (",
              matrix.rows(), ", ", matrix.columns(), ") must be (", outputs, ", ", inputs,
              "); open the model again");
    if (matrix.bias) ::check<S>(*matrix.bias, {outputs}, "a bias");
  }

  template <typename S>
  static void check_activation(const Activation& by) {
    if (by.kind != Act::xielu) return;
    for (const auto& each : {by.positive, by.negative}) {
      require(each.has_value(), "xIELU has two numbers");
      ::check<S>(*each, {1}, "a number of xIELU");
    }
  }

  template <typename S>
  void check_mixture(const Mixture& mixture) const {
    const int64_t count = mixture.count(), inner = mixture.inner();
    require(mixture.top >= 0 && mixture.top <= count, "a token takes ", mixture.top, " of ", count,
            " experts");
    check_matrix<S>(mixture.router, count, width_);
    if (mixture.scale) ::check<S>(*mixture.scale, {width_}, "a router's scale");
    if (mixture.factors) ::check<S>(*mixture.factors, {count}, "the factors of experts");
    if (mixture.bias) ::check<float>(*mixture.bias, {count}, "the bias of experts");
    check_experts<S>(mixture.expand, count, 2 * inner, width_);
    check_experts<S>(mixture.shrink, count, width_, inner);
    for (const auto& norm : {mixture.norm, mixture.before, mixture.after, mixture.dense})
      check<S>(norm, width_);
  }

  template <typename S>
  static void check_experts(const Matrix& matrix, int64_t count, int64_t outputs, int64_t inputs) {
    if (matrix.plain()) return ::check<S>(matrix.weight, {count, outputs, inputs}, "experts");
    check_matrix<S>(matrix, count * outputs, inputs);
    require(outputs % panels::ROWS == 0, "packed experts have whole blocks of rows");
  }

  template <typename S>
  void check_layer_inputs(int64_t layer) const {
    require(layer_inputs_.has_value() && layer_inputs_->dim() == 4, "the pass needs inputs of its ",
            "layers, (rows, tokens, layers, width)");
    const auto shape = layer_inputs_->sizes();
    ::check<S>(*layer_inputs_, {rows_, count_, shape[2], shape[3]}, "inputs of layers");
    require(layer < shape[2], "there are inputs of ", shape[2], " layers, but none of layer ", layer);
  }

  template <typename S>
  void check_tail(const Tail& tail) const {
    if (tail.scalar) ::check<S>(*tail.scalar, {1}, "a layer's scalar");
    if (!tail.gate) return;
    check_layer_inputs<S>(tail.layer);
    const int64_t inner = layer_inputs_->size(3);
    check_matrix<S>(*tail.gate, inner, width_);
    check_matrix<S>(*tail.projection, width_, inner);
    check<S>(tail.norm, width_);
  }

  template <typename S>
  void check_cache(const Sublayer& layer, const Tensor& keys, const Tensor& values,
                   const int64_t* bases) const {
    const int64_t slots = keys.dim() == 4 ? keys.size(2) : 0;
    const std::array<int64_t, 4> shape{rows_, layer.kv_heads, slots, layer.width};
    ::check<S>(keys, shape, "cached keys");
    ::check<S>(values, shape, "cached values");
    require(layer.angles < static_cast<int64_t>(angles_.size()), "a rotary table is missing");
    const auto& [cos, sin] = angles_[layer.angles];
    for (const Tensor& table : {cos, sin})
      (cos.scalar_type() == at::kFloat ? ::check<float> : ::check<S>)(table, cos.sizes(),
                                                                       "a rotary table");
    require(cos.dim() == 3 && cos.size(2) <= layer.width, "a rotary table is too wide");
    require(cache_.places.rows() == rows_, "there must be ", rows_, " starts, got ",
            cache_.places.rows());
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t start = cache_.places.starts[row], base = bases ? bases[row] : 0;
      require(base >= 0 && base % STRIPE == 0 && (base == 0 || (layer.window > 0 && layer.sink == 0)),
              "a buffer of keys begins at slot ", base, ", which must be a multiple of ", STRIPE,
              ", and 0 where a layer has no window, or a sink before it");
      require(start >= 0 && start + count_ <= std::min(base + slots, cos.size(1)), count_,
              " tokens from ", start, " on are beyond ", base + slots, " slots or ", cos.size(1),
              " rotary angles");
      const int64_t first = start - std::max<int64_t>(0, cache_.places.nodes - count_);  // the root
      require(first >= 0 && (base == 0 || first - layer.window + 1 >= base), "tokens from ", start,
              " on see ",
              layer.window, " slots, of which a buffer that begins at ", base, " has only some");
    }
  }
};

}  // namespace
