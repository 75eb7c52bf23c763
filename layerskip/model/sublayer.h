// What a model is made of: sublayers, and what a pass through them reads and writes.

#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "matrix.h"

namespace {

enum class Style {
  llama,     // normalised, cast, times weight
  one_plus,  // normalised, times (1 + weight), cast
  wide,      // normalised, times weight, cast
};

struct Norm {
  std::optional<Tensor> weight;
  double epsilon;
  Style style;
};

// What some layers do behind their MLP, whether it runs or not: they add what they make of their
// own inputs, and multiply the whole stream.
struct Tail {
  std::optional<Matrix> gate, projection;
  std::optional<Norm> norm;
  std::optional<Tensor> scalar;  // (1,)
  int64_t layer = 0;             // whose inputs
  bool gelu = false;
};

// Experts, of which every token takes those with the highest scores, beside a dense MLP or in its
// place.
struct Mixture {
  Matrix router;                 // (E, H)
  std::optional<Norm> norm;      // before the router
  std::optional<Tensor> scale;   // (H,) what the normed states are multiplied by, and then
  double number = 1;             // by this
  std::optional<Tensor> factors; // (E,) of the experts' weights
  bool whole = true;             // weights of a token's experts add up to 1 before that
  bool cast = false;             // they are rounded to the model's dtype
  Matrix expand, shrink;         // (E, 2 I, H) and (E, H, I)
  std::optional<Norm> before, after, dense;  // around the experts, and behind the dense MLP
  int64_t top = 0;               // experts of a token
  bool gelu = false;

  int64_t inner() const { return shrink.columns(); }
  int64_t count() const { return router.rows(); }
};

enum class Kind { attention, mlp, tail, head, layer_inputs };

struct Sublayer {
  Kind kind;
  std::optional<Norm> before, after, q_norm, k_norm, v_norm;
  std::vector<Matrix> inputs;  // q, k, v or all three; gate, up or both; else the only one
  std::optional<Matrix> output;
  std::optional<Tail> tail;
  std::optional<Mixture> mixture;
  int64_t heads = 0, kv_heads = 0, width = 0;
  int64_t window = 0;   // 0: full attention
  int64_t sink = 0;     // first slots that are seen beside a window
  int64_t angles = 0;   // which of the rotary tables
  double scale = 1, softcap = 0;
  double times = 1;     // what its output is multiplied by
  double divisor = 1;   // of logits
  bool eager = false;   // scores are rounded as the library's eager attention rounds them
  bool gelu = false;

  // of all inputs' products
  int64_t outputs() const {
    int64_t total = 0;
    for (const Matrix& matrix : inputs) total += matrix.rows();
    return total;
  }
  // keys and values are its own, not those of another layer
  bool writes() const { return outputs() > heads * width; }
  // values are made of what keys are made of
  bool alike() const { return outputs() == (heads + kv_heads) * width; }
  // of all queries, keys and values of a token
  int64_t projected() const { return (heads + (writes() ? 2 * kv_heads : 0)) * width; }
};

// The number of a word among some, as which an enum counts it.
template <typename Enum, size_t N>
Enum named(const std::array<const char*, N>& names, const std::string& word) {
  const auto found = std::find(names.begin(), names.end(), word);
  require(found != names.end(), "expected one of ", at::ArrayRef<const char*>(names.data(), N),
          ", got ", word);
  return static_cast<Enum>(found - names.begin());
}

Norm norm_of(std::optional<Tensor> weight, double epsilon, const std::string& style) {
  return {weight, epsilon, named<Style>(std::array{"llama", "one plus", "wide"}, style)};
}

struct Angles {
  Tensor cos, sin;  // (1, S, R)
};

// Where the tokens of a pass are in their rows. With branches they are the last ones of a tree of N
// nodes: a node lies at the slot of the root plus its number, and its position is that of the root
// plus its depth. Without, each token follows the one before it.
struct Places {
  std::vector<int64_t> starts;   // (B,) the slot of each row's first token
  int64_t count = 0;             // T
  std::vector<int64_t> parents;  // (B, N) the node that each one follows, -1 for the root; or none
  std::vector<int64_t> depths;   // (B, N)
  int64_t nodes = 0;             // N

  Places(const std::vector<int64_t>& starts, int64_t count, const std::vector<int64_t>& parents)
      : starts(starts), count(count), parents(parents), depths(parents.size()) {
    if (parents.empty()) return;
    const auto rows = static_cast<int64_t>(starts.size()), all = static_cast<int64_t>(parents.size());
    nodes = rows ? all / rows : 0;
    TORCH_CHECK_VALUE(rows * nodes == all && nodes >= count, "branches must be ", rows,
                      " rows of at least ", count, " nodes, got ", all);
    for (int64_t i = 0; i < all; ++i) {
      const int64_t node = i % nodes, parent = parents[i];
      TORCH_CHECK_VALUE(node ? parent >= 0 && parent < node : parent == -1, "node ", node,
                        " must follow an earlier one, got ", parent);
      depths[i] = node ? depths[i - node + parent] + 1 : 0;
    }
  }

  int64_t rows() const { return static_cast<int64_t>(starts.size()); }
  // The slot of a row's root; without branches, of its first token.
  int64_t root(int64_t row) const { return starts[row] - (nodes ? nodes - count : 0); }
  int64_t slot(int64_t row, int64_t token) const { return starts[row] + token; }
  int64_t position(int64_t row, int64_t token) const {
    return nodes ? root(row) + depths[(row + 1) * nodes - count + token] : starts[row] + token;
  }
  // The positions behind the root that a token sees lie at these slots (depth + 1,).
  void path(int64_t row, int64_t token, int64_t* slots) const {
    const int64_t* up = parents.data() + row * nodes;
    for (int64_t node = nodes - count + token; node >= 0; node = up[node])
      slots[depths[row * nodes + node]] = root(row) + node;
  }
};

struct Cache {
  std::vector<Tensor> keys, values;  // (B, K, S, D) of every attention of the pass, in order
  Places places;
  std::vector<int64_t> bases;        // the first slot of each buffer's rows; none: all are 0

  // The first slots of an attention's rows; none: all are 0.
  const int64_t* bases_of(int64_t attention) const {
    return bases.empty() ? nullptr : bases.data() + attention * places.rows();
  }
};

}  // namespace
