// The sublayers that a model consists of, and what a pass through them reads and writes.

#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "matrix.h"

namespace {

constexpr int64_t STRIPE = 32;  // slots; some kernels sum the values of so many in one step

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

enum class Act { silu, gelu, relu2, xielu };  // gelu: by tanh; relu2: the square of ReLU

// An activation. xIELU (arXiv:2411.13010) has two trained numbers (1,), before a softplus, and two
// that are fixed.
struct Activation {
  Act kind = Act::silu;
  std::optional<Tensor> positive, negative;
  double beta = 0, epsilon = 0;
};

// What some layers do after their MLP, even if it is skipped: they add a projection of the layer's
// own inputs and multiply the hidden states by a scalar.
struct Tail {
  std::optional<Matrix> gate, projection;
  std::optional<Norm> norm;
  std::optional<Tensor> scalar;  // (1,)
  int64_t layer = 0;             // whose inputs it reads
  Activation act;
};

// A mixture of experts, beside a dense MLP or in its place. Every token uses the `top` experts with
// the highest scores.
struct Mixture {
  Matrix router;                 // (E, H)
  std::optional<Norm> norm;      // before the router
  std::optional<Tensor> scale;   // (H,) multiplies the normed states, and
  double number = 1;             // so does this
  std::optional<Tensor> factors; // (E,) multiply the weights of the experts
  double factor = 1;             // multiplies them, too
  bool whole = true;             // before that, scale a token's weights to add up to 1
  bool sigmoid = false;          // scores are sigmoids, not a softmax, and
  std::optional<Tensor> bias;    // (E,) float32 is added to them for the choice only
  bool cast = false;             // weights are rounded to the model's dtype
  Matrix expand, shrink;         // (E, 2 I, H) and (E, H, I)
  std::optional<Norm> before, after, dense;  // around the experts, and after the dense MLP
  int64_t top = 0;               // experts per token
  Activation act;

  int64_t inner() const { return shrink.columns(); }
  int64_t count() const { return router.rows(); }
};

enum class Kind { attention, mlp, tail, head, layer_inputs };

struct Sublayer {
  Kind kind;
  std::optional<Norm> before, after, q_norm, k_norm, v_norm;
  std::vector<Matrix> inputs;  // q, k, v or one of all; gate, up or one of both; else one
  std::optional<Matrix> output;
  // whose sigmoid multiplies what an attention has read, or the MLP beside a mixture, (1, H)
  std::optional<Matrix> gate;
  std::optional<Tensor> sinks; // (N,) the score of a slot without a value, for each head
  std::optional<Tail> tail;
  std::optional<Mixture> mixture;
  int64_t heads = 0, kv_heads = 0, width = 0;
  int64_t window = 0;   // 0: full attention
  int64_t sink = 0;     // first slots that stay visible beside a window
  int64_t angles = 0;   // index of its rotary table
  double scale = 1, softcap = 0;
  double query_factor = 1;  // multiplies normed queries
  double times = 1;     // factor on its output
  double divisor = 1, factor = 1;  // the logits are divided and multiplied by them
  bool eager = false;   // round scores as the library's eager attention does
  bool pairs = false;   // a rotation turns neighbouring numbers, not those of two halves
  bool joined = false;  // the rows of each head's queries are followed by those of its gate
  bool late_norms = false;  // queries and keys are normalised after their rotation
  bool gated = true;    // an MLP has a gate; otherwise its only input is activated
  Activation act;

  // rows of all inputs together, without gates
  int64_t outputs() const {
    int64_t total = joined ? -heads * width : 0;
    for (const Matrix& matrix : inputs) total += matrix.rows();
    return total;
  }
  // false if it reads the keys and values of another layer
  bool writes() const { return outputs() > heads * width; }
  // values are made from the projection that keys are made from
  bool alike() const { return outputs() == (heads + kv_heads) * width; }
  // numbers of a token's queries, keys and values
  int64_t projected() const { return (heads + (writes() ? 2 * kv_heads : 0)) * width; }
  // the same with a gate, which follows them
  int64_t opened() const { return projected() + (opens() ? heads * width : 0); }
  bool opens() const { return gate || joined; }
  // inputs of an MLP's output
  int64_t inner() const { return outputs() / (gated ? 2 : 1); }
};

// The enum member whose position in `names` is that of the word.
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

// Where the tokens of a pass lie in their rows. Without branches, each token follows the one before
// it. With branches, they are the last tokens of a tree of N nodes. A node's slot is that of the
// root plus its number, and its position is that of the root plus its depth.
struct Places {
  std::vector<int64_t> starts;   // (B,) slot of each row's first token
  int64_t count = 0;             // T
  std::vector<int64_t> parents;  // (B, N) each node's parent, -1 for the root; or empty
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
  // The slot of a row's root, or of its first token without branches.
  int64_t root(int64_t row) const { return starts[row] - (nodes ? nodes - count : 0); }
  int64_t slot(int64_t row, int64_t token) const { return starts[row] + token; }
  int64_t position(int64_t row, int64_t token) const {
    return nodes ? root(row) + depths[(row + 1) * nodes - count + token] : starts[row] + token;
  }
  // The slots of the positions from the root to a token, (depth + 1,).
  void path(int64_t row, int64_t token, int64_t* slots) const {
    const int64_t* up = parents.data() + row * nodes;
    for (int64_t node = nodes - count + token; node >= 0; node = up[node])
      slots[depths[row * nodes + node]] = root(row) + node;
  }
};

struct Cache {
  std::vector<Tensor> keys, values;  // (B, K, S, D) for each attention of the pass, in order
  Places places;
  std::vector<int64_t> bases;        // (A, B) first slots of rows in A attentions; empty: all are 0

  // The first slot of each row in the buffer of an attention, or null if all are 0.
  const int64_t* bases_of(int64_t attention) const {
    return bases.empty() ? nullptr : bases.data() + attention * places.rows();
  }
};

}  // namespace
