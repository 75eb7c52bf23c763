// A forward pass over sublayers in one call, on a CPU.
//
// The arithmetic of the library's modules, in its order, with float32 sums; in bfloat16 models
// numbers are rounded where the library rounds them. One team of threads (torch's own) carries a
// pass: rows of a product are split over it, what is small every thread computes for itself (of many
// tokens a share), and between products the team waits for its last thread.
// Letters: B rows, T tokens of each, n = B T, H hidden width, N heads, K key-value heads, D head
// width, R rotary width, S slots of the cache, I width of the MLP, L layers, P width of a layer's own
// inputs, E experts, V vocabulary.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"
#include "draws.h"
#include "integers.h"
#include "matrix.h"
#include "pages.h"
#include "pointwise.h"
#include "products.h"
#include "stamps.h"
#include "sublayer.h"
#include "team.h"

namespace {

// ---------------------------------------------------------------------------------------------
// A pass.

template <typename S>
class Pass {
 public:
  Pass(const std::vector<const Sublayer*>& sublayers, const Tensor& hidden, const Cache& cache,
       const std::vector<Angles>& angles, const std::optional<Tensor>& layer_inputs)
      : sublayers_(sublayers), hidden_(hidden), cache_(cache), angles_(angles),
        layer_inputs_(layer_inputs) {
    rows_ = hidden.size(0), count_ = hidden.size(1), width_ = hidden.size(2);
    tokens_ = rows_ * count_;
    check_all();
    for (const Sublayer* each : sublayers) {
      int64_t outputs = 0;
      for (const Matrix& matrix : each->inputs) outputs += matrix.rows();
      if (each->mixture && each->mixture->top) {
        const Mixture& mixture = *each->mixture;
        pieces_.push_back({&mixture.router, 0, mixture.count(), Phase::experts});
        wide_ = std::max(wide_, mixture.top * std::max(mixture.inner(), width_));
        wide_ = std::max(wide_, mixture.count());
        top_ = std::max(top_, mixture.top);
        deep_ = std::max(deep_, mixture.inner());
      }
      if (each->kind == Kind::mlp && each->inputs.size() == 1) {
        // gate and up lie one behind the other
        pieces_.push_back({&each->inputs[0], 0, outputs / 2, Phase::gates});
        pieces_.push_back({&each->inputs[0], outputs / 2, outputs / 2, Phase::gates});
      } else {
        const Phase phase = each->kind == Kind::attention ? Phase::queries
                            : each->kind == Kind::mlp     ? Phase::gates
                            : each->kind == Kind::head    ? Phase::head
                                                          : Phase::other;
        for (const Matrix& matrix : each->inputs)
          pieces_.push_back({&matrix, 0, matrix.rows(), phase});
      }
      if (each->kind == Kind::attention) outputs = each->projected();
      if (each->kind == Kind::mlp) outputs /= 2;
      if (each->kind != Kind::head) wide_ = std::max(wide_, outputs);
      deep_ = std::max(deep_, width_);
      if (each->output) {
        pieces_.push_back({&*each->output, 0, width_,
                           each->kind == Kind::attention ? Phase::mixing : Phase::down});
        deep_ = std::max(deep_, each->output->columns());
      }
      if (each->tail && each->tail->gate) {
        const int64_t inner = each->tail->gate->rows();
        pieces_.push_back({&*each->tail->gate, 0, inner, Phase::other});
        pieces_.push_back({&*each->tail->projection, 0, width_, Phase::other});
        wide_ = std::max(wide_, inner), deep_ = std::max(deep_, inner);
      }
    }
    const Sublayer& last = *sublayers.back();
    if (last.kind == Kind::layer_inputs) {
      out_ = at::empty(layer_inputs->sizes(), hidden.options());  // (B, T, L, P)
    } else if (last.kind == Kind::head) {
      const int64_t vocabulary = last.inputs[0].rows();
      out_ = at::empty({rows_, count_, vocabulary}, hidden.options());  // (B, T, V)
    } else {
      out_ = at::empty(hidden.sizes(), hidden.options());  // (B, T, H)
    }
  }

  Tensor run() {
    const int threads = team();
    divided_ = threads > 1 && tokens_ >= DIVIDED;
    chosen_.resize(tokens_ * top_), weights_.resize(tokens_ * top_);
    int64_t parts = 0, attending = 0;
    for (const Sublayer* each : sublayers_)
      if (each->kind == Kind::attention) {
        const attention::Attention<S> here{*each, cache_.places};
        parts = std::max(parts, lines(here.shared_room()));
        attending = std::max(attending, lines(here.own_room()));
      }
    // of all threads: the wide products of all tokens, what attention gives, a sublayer's output
    // and the parts of attention
    const int64_t shared = lines(tokens_ * wide_) * 2 + lines(tokens_ * width_) + parts;
    // of each thread, or of all that divide the tokens
    const int64_t states = (top_ ? 3 : 2) * lines(tokens_ * width_) +
                           lines(tokens_ * packed_width(deep_));
    const int64_t needed = shared + (divided_ ? 1 : threads) * states + threads * attending;
    // kept by the calling thread from pass to pass: fresh memory costs a page fault every 4 KiB
    static thread_local Tensor kept;
    Tensor room = kept;
    if (!room.defined() || room.numel() < needed) room = at::empty({needed}, at::kFloat);
    if (needed <= MOST_KEPT) kept = room;
    float* base = static_cast<float*>(room.data_ptr());
    first_ = base, second_ = first_ + lines(tokens_ * wide_);
    result_ = second_ + lines(tokens_ * wide_), parts_ = result_ + lines(tokens_ * width_);
    Meeting meeting;
    const auto worker = [&](int number, int of) {
      float* own_attending = base + shared + number * attending;
      float* hidden = base + shared + threads * attending + (divided_ ? 0 : number * states);
      float* normed = hidden + lines(tokens_ * width_);
      float* packed = normed + lines(tokens_ * width_);
      float* gathered = packed + lines(tokens_ * packed_width(deep_));
      Worker me{number, of, meeting, hidden, normed, own_attending, packed, gathered};
      me.tokens = mine(me, tokens_);
      work(me);
      me.meet();  // here, and not at the end of OpenMP's team, where threads spin
    };
#ifdef _OPENMP
    if (threads > 1) {
      const auto start = Clock::now();
#pragma omp parallel num_threads(threads)
      worker(omp_get_thread_num(), omp_get_num_threads());
      crew.note(Clock::now() - start, Clock::duration(meeting.slept.load()));
      return out_;
    }
#endif
    worker(0, 1);
    return out_;
  }

 private:
  // Rows of a matrix that one product takes.
  struct Piece {
    const Matrix* matrix;
    int64_t first, rows;
    Phase phase;
  };

  struct Worker {
    int number, of;
    Meeting& meeting;
    // every thread's own, or all threads', where they divide the tokens
    float *hidden, *normed;  // (n, H) each
    float* attending;        // room for attention, always its own
    float* packed;           // inputs of a product
    float* gathered;         // (n, H) inputs of an expert
    Range tokens{0, 0};      // that it norms, packs and adds to
    const float* taken = nullptr;  // the same as they were
    std::vector<float> small;      // what a delta's inner part makes of them
    size_t done = 0;         // products
    std::vector<int64_t> pairs;    // of a token and an expert: places in both, by expert
    std::vector<int64_t> begins;   // (E + 1,) the first pair of each expert
    Stamps stamps{};

    const uint8_t *soon = nullptr, *until = nullptr;  // of the next product: not yet fetched

    void meet() {
      const Phase before = stamps.enter(Phase::waiting);
      meeting.wait(of, [this] {
        for (int i = 0; i < 4 && soon < until; ++i, soon += 64) __builtin_prefetch(soon, 0, 2);
      });
      stamps.enter(before);
    }
    Range share(int64_t rows) const { return ::share(rows, number, of); }
  };

  void check_all() const {
    size_t attentions = 0;
    require(cache_.bases.empty() || cache_.bases.size() == cache_.keys.size() * rows_,
            "there are ", cache_.keys.size(), " buffers of keys of ", rows_, " rows, but ",
            cache_.bases.size(), " bases");
    for (const Sublayer* each : sublayers_) {
      require(each->kind != Kind::head || each == sublayers_.back(), "a head must come last");
      require(each->kind != Kind::layer_inputs || sublayers_.size() == 1,
              "inputs of layers are made by a call of their own");
      check(each->before, width_);
      if (each->kind == Kind::layer_inputs) {
        check_layer_inputs(0);
        check(each->after, layer_inputs_->size(3));
        const int64_t outputs = layer_inputs_->size(2) * layer_inputs_->size(3);
        check_matrix(each->inputs[0], outputs, width_);
        continue;
      }
      check(each->after, width_);
      int64_t outputs = 0;
      for (const Matrix& matrix : each->inputs) {
        check_matrix(matrix, matrix.rows(), width_);
        require(matrix.bits == each->inputs[0].bits, "inputs of a sublayer differ in precision");
        outputs += matrix.rows();
      }
      if (each->kind == Kind::attention) {
        const int64_t own = each->heads * each->width, keys = each->kv_heads * each->width;
        check_heads(each->q_norm, each->width, own);
        check_heads(each->k_norm, each->width, keys);
        check(each->v_norm, each->width);
        require(outputs == each->projected() - (each->alike ? keys : 0),
                "queries, keys and values of ", outputs,
                " numbers are not those that the model was opened with; open it again");
        require(attentions < cache_.keys.size() && attentions < cache_.values.size(),
                "there are fewer caches than attention sublayers");
        check_cache(*each, cache_.keys[attentions], cache_.values[attentions], bases(attentions));
        ++attentions;
        check_matrix(*each->output, width_, own);
      } else if (each->kind == Kind::mlp) {
        if (each->mixture) check_mixture(*each->mixture);
        require(each->inputs.size() != 2 || each->inputs[0].rows() == outputs / 2,
                "gate and up differ in size");
        if (each->output) check_matrix(*each->output, width_, outputs / 2);
      }
      if (each->tail) check_tail(*each->tail);
    }
  }

  static void check(const std::optional<Norm>& norm, int64_t width) {
    if (norm && norm->weight) ::check<S>(*norm->weight, {width}, "a norm's weight");
  }

  // A norm of every head, or of all together.
  static void check_heads(const std::optional<Norm>& norm, int64_t width, int64_t all) {
    if (norm) check(norm, of_all(*norm, width) ? all : width);
  }

  static bool of_all(const std::optional<Norm>& norm, int64_t width) {
    return norm && norm->weight && norm->weight->numel() != width;
  }

  static void check_matrix(const Matrix& matrix, int64_t outputs, int64_t inputs) {
    if (matrix.bits) {
      require(matrix.rounded_rows == outputs && matrix.rounded_columns == inputs, "a rounded weight of (",
              matrix.rounded_rows, ", ", matrix.rounded_columns, ") must be (", outputs, ", ", inputs,
              "); open the model again");
    } else {
      ::check<S>(matrix.weight, {outputs, inputs}, "a weight");
    }
    if (matrix.bias) ::check<S>(*matrix.bias, {outputs}, "a bias");
  }

  void check_mixture(const Mixture& mixture) const {
    const int64_t count = mixture.count(), inner = mixture.inner();
    require(mixture.top >= 0 && mixture.top <= count, "a token takes ", mixture.top, " of ", count,
            " experts");
    check_matrix(mixture.router, count, width_);
    if (mixture.scale) ::check<S>(*mixture.scale, {width_}, "a router's scale");
    if (mixture.factors) ::check<S>(*mixture.factors, {count}, "the factors of experts");
    check_experts(mixture.expand, count, 2 * inner, width_);
    check_experts(mixture.shrink, count, width_, inner);
    for (const auto& norm : {mixture.norm, mixture.before, mixture.after, mixture.dense})
      check(norm, width_);
  }

  static void check_experts(const Matrix& matrix, int64_t count, int64_t outputs, int64_t inputs) {
    if (!matrix.bits) return ::check<S>(matrix.weight, {count, outputs, inputs}, "experts");
    check_matrix(matrix, count * outputs, inputs);
    require(outputs % integers::BLOCK == 0, "rounded experts have whole blocks of rows");
  }

  void check_layer_inputs(int64_t layer) const {
    require(layer_inputs_.has_value() && layer_inputs_->dim() == 4, "the pass needs inputs of its ",
            "layers, (rows, tokens, layers, width)");
    const auto shape = layer_inputs_->sizes();
    ::check<S>(*layer_inputs_, {rows_, count_, shape[2], shape[3]}, "inputs of layers");
    require(layer < shape[2], "there are inputs of ", shape[2], " layers, but none of layer ", layer);
  }

  void check_tail(const Tail& tail) const {
    if (tail.scalar) ::check<S>(*tail.scalar, {1}, "a layer's scalar");
    if (!tail.gate) return;
    check_layer_inputs(tail.layer);
    const int64_t inner = layer_inputs_->size(3);
    check_matrix(*tail.gate, inner, width_);
    check_matrix(*tail.projection, width_, inner);
    check(tail.norm, width_);
  }

  void check_cache(const Sublayer& layer, const Tensor& keys, const Tensor& values,
                   const int64_t* bases) const {
    const int64_t slots = keys.dim() == 4 ? keys.size(2) : 0;
    const std::array<int64_t, 4> shape{rows_, layer.kv_heads, slots, layer.width};
    ::check<S>(keys, shape, "cached keys");
    ::check<S>(values, shape, "cached values");
    require(layer.angles < static_cast<int64_t>(angles_.size()), "a rotary table is missing");
    const auto& [cos, sin, scales] = angles_[layer.angles];
    if (cos.scalar_type() == at::kFloat) {
      ::check<float>(cos, cos.sizes(), "a rotary table");
      ::check<float>(sin, cos.sizes(), "a rotary table");
    } else {
      ::check<S>(cos, cos.sizes(), "a rotary table");
      ::check<S>(sin, cos.sizes(), "a rotary table");
    }
    require(cos.dim() == 3 && cos.size(2) <= layer.width, "a rotary table is too wide");
    if (scales) ::check<S>(*scales, {cos.size(1)}, "the scales of queries");
    require(cache_.places.rows() == rows_, "there must be ", rows_, " starts, got ",
            cache_.places.rows());
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t start = cache_.places.starts[row], base = bases ? bases[row] : 0;
      require(base >= 0 && base % LINE == 0 && (base == 0 || (layer.window > 0 && layer.sink == 0)),
              "a buffer of keys begins at slot ", base, ", which must be a multiple of ", LINE,
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

  // The first slots of an attention's rows; none: all are 0.
  const int64_t* bases(int64_t attention) const {
    return cache_.bases.empty() ? nullptr : cache_.bases.data() + attention * rows_;
  }

  static constexpr int64_t LINE = 16;  // numbers; vectors have as many, or a part
  static constexpr int64_t MOST_KEPT = 4 << 20;  // numbers of room between passes
  // From so many tokens on threads divide what they do to each one, and meet once more for every
  // product; of fewer tokens every thread does all of it for itself.
  static constexpr int64_t DIVIDED = 24;
  // Who waits for others fetches what it reads next, up to so many bytes: they stay in its cache.
  static constexpr int64_t FETCHED = 256 << 10;
  static int64_t lines(int64_t numbers) { return (numbers + LINE - 1) / LINE * LINE; }

  int team() const {
    if (at::in_parallel_region()) return 1;
    // below that waiting for each other costs more than it saves
    int64_t bytes = 0;
    for (const Piece& piece : pieces_) bytes += piece.rows * piece.matrix->row_bytes();
    for (const Sublayer* each : sublayers_)
      if (each->mixture)
        bytes += each->mixture->top * each->mixture->expand.rows() / each->mixture->count() *
                 each->mixture->expand.row_bytes();
    return bytes * tokens_ < (1 << 18) ? 1 : crew.threads(at::get_num_threads());
  }

  // Where a worker's rows of a product begin.
  const uint8_t* begins(const Worker& me, const Piece& piece) const {
    const Matrix& matrix = *piece.matrix;
    const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight.const_data_ptr());
    return weight + (piece.first + me.share(piece.rows).first) * matrix.row_bytes();
  }

  // The tokens of so many that a worker norms and packs.
  Range mine(const Worker& me, int64_t tokens) const {
    if (!divided_) return {0, tokens};
    return {tokens * me.number / me.of, tokens * (me.number + 1) / me.of};
  }

  // Where threads divide the tokens: what each has made of its own is there for all.
  void meet_divided(Worker& me) const {
    if (divided_) me.meet();
  }

  // Make x (n, columns) the inputs of the products that are next in `pieces_`; a worker's own tokens
  // are there.
  void take(Worker& me, const float* x) const { take(me, *pieces_[me.done].matrix, x, tokens_); }

  // Make x (tokens, columns) the inputs of products with a matrix.
  void take(Worker& me, const Matrix& matrix, const float* x, int64_t tokens) const {
    me.stamps.enter(Phase::packing);
    me.taken = x;
    const Range own = mine(me, tokens);
    if (matrix.bits) {
      integers::round_inputs(matrix.bits, x, matrix.columns(), tokens, me.packed, own.first,
                             own.last);
    } else {
      pack_inputs<S>(x, matrix.columns(), tokens, me.packed, own.first, own.last);
    }
    meet_divided(me);
  }

  // The worker's rows of the product that is next, with the inputs taken last.
  template <typename O>
  void multiply(Worker& me, O* out, int64_t stride) const {
    const Piece& piece = pieces_[me.done++];
    const uint8_t* then = upcoming(me, piece);
    multiply(me, piece, then, tokens_, out, stride);
    if (me.done == pieces_.size()) return;
    const Range next = me.share(pieces_[me.done].rows);
    const int64_t bytes = (next.last - next.first) * pieces_[me.done].matrix->row_bytes();
    me.soon = then + AHEAD, me.until = then + std::min(bytes, FETCHED);
  }

  // What is read behind a piece, if nothing but `pieces_` is.
  const uint8_t* upcoming(const Worker& me, const Piece& piece) const {
    if (me.done < pieces_.size()) return begins(me, pieces_[me.done]);
    const Range mine = me.share(piece.rows);
    return begins(me, piece) + (mine.last - mine.first) * piece.matrix->row_bytes();
  }

  // The worker's rows of a product; `then` is what is read after them.
  template <typename O>
  void multiply(Worker& me, const Piece& piece, const uint8_t* then, int64_t tokens, O* out,
                int64_t stride) const {
    const Matrix& matrix = *piece.matrix;
    const Range mine = me.share(piece.rows);
    me.stamps.enter(piece.phase, (mine.last - mine.first) * matrix.row_bytes());
    const int64_t columns = matrix.columns();
    const uint8_t* weight = begins(me, piece);
    if (!matrix.bits) {
      const S* bias = numbers<S>(matrix.bias);
      if (bias) bias += piece.first;
      const S* rows = reinterpret_cast<const S*>(weight) - mine.first * columns;
      product(rows, bias, mine.first, mine.last, columns, me.packed, tokens, out, stride,
              reinterpret_cast<const S*>(then));
      return;
    }
    if (matrix.rank()) {
      me.small.resize(tokens * matrix.rank());
      shrink(matrix, me.taken, tokens, me.small.data());
    }
    rounded_product<S>(matrix, piece.first, mine, weight, me.packed, me.small.data(), tokens, then,
                       out, stride);
  }

  void work(Worker& me) {
    float *hidden = me.hidden, *normed = me.normed;
    const S* given = static_cast<const S*>(hidden_.const_data_ptr());
    for (int64_t i = me.tokens.first * width_; i < me.tokens.last * width_; ++i)
      hidden[i] = static_cast<float>(given[i]);
    int64_t attention = 0;
    for (const Sublayer* each : sublayers_) {
      const float* x = hidden;
      if (each->before) {
        norm_all(me, *each->before, hidden, normed);
        x = normed;
      }
      if (each->kind == Kind::layer_inputs) return combine(me, *each, x);
      if (each->kind == Kind::head) return head(me, *each, x);
      if (each->kind == Kind::attention) {
        attend_all(me, *each, x, attention++);
        add(me, second_, each->after, each->times);
      } else if (each->mixture) {
        mix(me, *each, x);
      } else if (each->kind == Kind::mlp) {
        expand(me, *each, x);
        add(me, first_, each->after, each->times);
      }
      if (each->tail) finish(me, *each->tail);
    }
    const Range numbers = divided_ ? Range{me.tokens.first * width_, me.tokens.last * width_}
                                   : me.share(tokens_ * width_);
    S* out = static_cast<S*>(out_.data_ptr());
    for (int64_t i = numbers.first; i < numbers.last; ++i) out[i] = static_cast<S>(hidden[i]);
  }

  // The norms of the worker's tokens, (n, H).
  void norm_all(Worker& me, const Norm& norm, const float* x, float* out) const {
    me.stamps.enter(Phase::norm);
    for (int64_t t = me.tokens.first; t < me.tokens.last; ++t)
      normalise<S>(norm, x + t * width_, width_, out + t * width_);
  }

  // All of what the product that is next makes of x: `result_`.
  void finish_product(Worker& me, const float* x) const {
    me.meet();
    take(me, x);
    multiply(me, result_, width_);
    me.meet();
  }

  // Add to the hidden states what the product that is next makes of x.
  void add(Worker& me, const float* x, const std::optional<Norm>& after, double times) const {
    finish_product(me, x);
    add_result(me, result_, after, times);
  }

  void add_result(Worker& me, const float* result, const std::optional<Norm>& after,
                  double times) const {
    if (after) {
      norm_all(me, *after, result, me.normed);
      result = me.normed;
    }
    me.stamps.enter(Phase::residual);
    const int64_t first = me.tokens.first * width_, last = me.tokens.last * width_;
    add_to<S>(me.hidden + first, result + first, static_cast<float>(times), last - first);
  }

  // The experts of every token and their weights, from what the router is given.
  void choose(Worker& me, const Mixture& mixture, const float* x) {
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
    std::vector<float> law(count);
    const S* factors = numbers<S>(mixture.factors);
    for (int64_t t = me.number; t < tokens_; t += me.of) {
      const float* scores = first_ + t * count;
      const float most = *std::max_element(scores, scores + count);
      float total = 0;
      for (int64_t e = 0; e < count; ++e) total += law[e] = std::exp(scores[e] - most);
      for (float& each : law) each /= total;
      float taken = 0;
      for (int64_t k = 0; k < top; ++k) {
        const int64_t best = std::max_element(law.begin(), law.end()) - law.begin();
        chosen_[t * top + k] = best;
        taken += weights_[t * top + k] = law[best];
        law[best] = -1.0f;  // below all that are left
      }
      for (int64_t i = t * top; i < (t + 1) * top; ++i) {
        if (mixture.whole) weights_[i] /= taken;
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

  // What a token's experts make of x, (n, top, H) by expert, in `second_`. Tokens of an expert are
  // multiplied together; what a token has does not depend on them.
  void run_experts(Worker& me, const Mixture& mixture, const float* x) const {
    const int64_t inner = mixture.inner(), top = mixture.top;
    const Range mine = me.share(inner);
    for (int64_t e = 0; e < mixture.count(); ++e) {
      const int64_t first = me.begins[e], tokens = me.begins[e + 1] - first;
      if (!tokens) continue;
      const Range own = this->mine(me, tokens);
      for (int64_t i = own.first; i < own.last; ++i)
        std::copy_n(x + me.pairs[first + i] / top * width_, width_, me.gathered + i * width_);
      const Piece gate{&mixture.expand, 2 * e * inner, inner, Phase::experts};
      const Piece up{&mixture.expand, (2 * e + 1) * inner, inner, Phase::experts};
      float *gates = first_ + first * inner, *ups = second_ + first * inner;
      take(me, mixture.expand, me.gathered, tokens);
      multiply(me, gate, begins(me, up), tokens, gates, inner);
      multiply(me, up, upcoming(me, up), tokens, ups, inner);
      for (int64_t i = 0; i < tokens; ++i)
        activate<S>(mixture.gelu, gates + i * inner + mine.first, ups + i * inner + mine.first,
                    mine.last - mine.first);
      meet_divided(me);  // all have read the inputs
    }
    if (!divided_) me.meet();
    for (int64_t e = 0; e < mixture.count(); ++e) {
      const int64_t first = me.begins[e], tokens = me.begins[e + 1] - first;
      if (!tokens) continue;
      const Piece down{&mixture.shrink, e * width_, width_, Phase::experts};
      take(me, mixture.shrink, first_ + first * inner, tokens);
      multiply(me, down, upcoming(me, down), tokens, second_ + first * width_, width_);
      meet_divided(me);
    }
    if (!divided_) me.meet();
  }

  // A mixture of experts, with the dense MLP beside it if there is one.
  void mix(Worker& me, const Sublayer& layer, const float* x) {
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
      meet_divided(me);  // experts take tokens of all
      run_experts(me, mixture, x);
      std::vector<int64_t> places(tokens_ * top);  // in `second_`
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
      me.meet();  // all have read what the next sublayer writes
      if (mixture.after) norm_all(me, *mixture.after, me.normed, me.normed);
    }
    if (mixture.dense) {
      me.small.resize(width_);
      for (int64_t t = me.tokens.first; t < me.tokens.last; ++t) {
        float* out = me.normed + t * width_;
        normalise<S>(*mixture.dense, result_ + t * width_, width_, me.small.data());
        for (int64_t i = 0; i < width_; ++i)
          out[i] = top ? rounded<S>(me.small[i] + out[i]) : me.small[i];
      }
    }
    add_result(me, me.normed, layer.after, layer.times);
  }

  // A layer's tail.
  void finish(Worker& me, const Tail& tail) const {
    if (tail.gate) {
      const int64_t layers = layer_inputs_->size(2), inner = layer_inputs_->size(3);
      const Range mine = me.share(inner);
      take(me, me.hidden);
      multiply(me, first_, inner);
      const S* given = numbers<S>(layer_inputs_) + tail.layer * inner + mine.first;
      for (int64_t t = 0; t < tokens_; ++t)
        activate<S>(tail.gelu, first_ + t * inner + mine.first, given + t * layers * inner,
                    mine.last - mine.first);
      add(me, first_, tail.norm, 1);
    }
    if (tail.scalar) {
      const float by = static_cast<float>(numbers<S>(tail.scalar)[0]);
      for (int64_t i = me.tokens.first * width_; i < me.tokens.last * width_; ++i)
        me.hidden[i] = rounded<S>(me.hidden[i] * by);
    }
  }

  // The inputs of all layers: a projection of what tokens are embedded as, and what each token has
  // for itself.
  void combine(Worker& me, const Sublayer& layer, const float* x) const {
    const int64_t layers = layer_inputs_->size(2), inner = layer_inputs_->size(3);
    take(me, x);
    multiply(me, first_, layers * inner);
    me.meet();
    const float scale = static_cast<float>(layer.scale), times = static_cast<float>(layer.times);
    const S* given = numbers<S>(layer_inputs_);
    S* out = static_cast<S*>(out_.data_ptr());
    for (int64_t unit = me.number; unit < tokens_ * layers; unit += me.of) {
      float* mine = first_ + unit * inner;
      for (int64_t i = 0; i < inner; ++i) mine[i] = rounded<S>(mine[i] * scale);
      if (layer.after) normalise<S>(*layer.after, mine, inner, mine);
      for (int64_t i = 0; i < inner; ++i) {
        const float sum = rounded<S>(mine[i] + static_cast<float>(given[unit * inner + i]));
        out[unit * inner + i] = static_cast<S>(sum * times);
      }
    }
  }

  void head(Worker& me, const Sublayer& layer, const float* x) const {
    const int64_t vocabulary = out_.size(2);
    const Range mine = me.share(vocabulary);
    S* out = static_cast<S*>(out_.data_ptr());
    take(me, x);
    multiply(me, out, vocabulary);
    if (layer.divisor != 1) {
      const float by = static_cast<float>(layer.divisor);
      for (int64_t t = 0; t < tokens_; ++t)
        for (int64_t i = t * vocabulary + mine.first; i < t * vocabulary + mine.last; ++i)
          out[i] = static_cast<S>(static_cast<float>(out[i]) / by);
    }
    if (layer.softcap > 0) {
      const float cap = static_cast<float>(layer.softcap);
      for (int64_t t = 0; t < tokens_; ++t) {
        S* logits = out + t * vocabulary;
        float some[LANES];
        for (int64_t i = mine.first; i < mine.last; i += LANES) {
          const int64_t here = std::min(LANES, mine.last - i);
          for (int64_t j = 0; j < here; ++j)
            some[j] = rounded<S>(static_cast<float>(logits[i + j]) / cap);
          widened(some, here).tanh().store(some);
          for (int64_t j = 0; j < here; ++j)
            logits[i + j] = static_cast<S>(rounded<S>(some[j]) * cap);
        }
      }
    }
  }

  void expand(Worker& me, const Sublayer& layer, const float* x) const {
    const int64_t inner = layer.output->columns();
    const Range mine = me.share(inner);
    take(me, x);
    multiply(me, first_, inner);
    multiply(me, second_, inner);
    me.stamps.enter(Phase::activation);
    for (int64_t t = 0; t < tokens_; ++t)
      activate<S>(layer.gelu, first_ + t * inner + mine.first, second_ + t * inner + mine.first,
                  mine.last - mine.first);
  }

  // Rotate a query or key at a place.
  static void turn(const Angles& angles, int64_t place, float* x) {
    const int64_t rotary = angles.cos.size(2), at = place * rotary;
    if (angles.cos.scalar_type() == at::kFloat)
      rotate<S>(x, numbers<float>(angles.cos) + at, numbers<float>(angles.sin) + at, rotary);
    else
      rotate<S>(x, numbers<S>(angles.cos) + at, numbers<S>(angles.sin) + at, rotary);
  }

  void attend_all(Worker& me, const Sublayer& layer, const float* x, int64_t number) const {
    const int64_t heads = layer.heads, kv = layer.kv_heads, width = layer.width;
    const int64_t stride = layer.projected();
    int64_t offset = 0;
    take(me, x);
    for (const Matrix& matrix : layer.inputs) {
      multiply(me, first_ + offset, stride);
      offset += matrix.rows();
    }
    me.meet();
    me.stamps.enter(Phase::rotation);
    const bool q_whole = of_all(layer.q_norm, width), k_whole = of_all(layer.k_norm, width);
    if (q_whole || k_whole) {
      for (int64_t unit = me.number; unit < 2 * tokens_; unit += me.of) {
        float* mine = first_ + unit / 2 * stride;
        if (unit % 2 == 0 && q_whole) normalise<S>(*layer.q_norm, mine, heads * width, mine);
        mine += heads * width;
        if (unit % 2 == 1 && k_whole) normalise<S>(*layer.k_norm, mine, kv * width, mine);
      }
      me.meet();
    }
    const Tensor &keys = cache_.keys[number], &values = cache_.values[number];
    S* key_slots = static_cast<S*>(keys.data_ptr());      // (B, K, S, D)
    S* value_slots = static_cast<S*>(values.data_ptr());  // (B, K, S, D)
    const int64_t slots = keys.size(2), *bases = this->bases(number);
    const Angles& angles = angles_[layer.angles];
    const S* scales = numbers<S>(angles.scales);
    const int64_t turned = heads + (layer.writes ? kv : 0);  // heads that rotate
    for (int64_t unit = me.number; unit < tokens_ * turned; unit += me.of) {
      const int64_t token = unit / turned, head = unit % turned;
      const int64_t row = token / count_, place = cache_.places.position(row, token % count_);
      float* x = first_ + token * stride + head * width;
      if (head < heads) {
        if (layer.q_norm && !q_whole) normalise<S>(*layer.q_norm, x, width, x);
        turn(angles, place, x);
        const float by = scales ? static_cast<float>(scales[place]) : 1.0f;
        for (int64_t i = 0; scales && i < width; ++i) x[i] = rounded<S>(x[i] * by);
        continue;
      }
      float* value = x + kv * width;
      if (layer.alike) std::copy_n(x, width, value);
      if (layer.v_norm) normalise<S>(*layer.v_norm, value, width, value);
      if (layer.k_norm && !k_whole) normalise<S>(*layer.k_norm, x, width, x);
      turn(angles, place, x);
      const int64_t slot = cache_.places.slot(row, token % count_) - (bases ? bases[row] : 0);
      const int64_t at = ((row * kv + head - heads) * slots + slot) * width;
      for (int64_t i = 0; i < width; ++i) {
        key_slots[at + i] = static_cast<S>(x[i]);
        value_slots[at + i] = static_cast<S>(value[i]);
      }
    }
    me.meet();
    me.stamps.enter(Phase::attention);
    attention::Attention<S> attention{layer, cache_.places};
    attention.queries = first_, attention.stride = stride, attention.out = second_;
    attention.keys = key_slots, attention.values = value_slots;
    attention.slots = slots, attention.bases = bases, attention.parts = parts_;
    attention.run(me.number, me.of, me.attending, [&] { me.meet(); });
  }

  const std::vector<const Sublayer*>& sublayers_;
  const Tensor& hidden_;
  const Cache& cache_;
  const std::vector<Angles>& angles_;
  const std::optional<Tensor>& layer_inputs_;  // (B, T, L, P)
  std::vector<Piece> pieces_;  // products of the pass, in order
  Tensor out_;
  int64_t rows_ = 0, count_ = 0, tokens_ = 0, width_ = 0;
  bool divided_ = false;          // threads divide the tokens
  int64_t top_ = 0;               // the most experts of a token
  std::vector<int64_t> chosen_;   // (n, top) experts
  std::vector<float> weights_;    // (n, top)
  int64_t wide_ = 0, deep_ = 0;  // the most outputs and inputs of any product but the head's
  float* parts_ = nullptr;        // of attention
  float *first_ = nullptr, *second_ = nullptr;  // (n, outputs) each
  float* result_ = nullptr;       // (n, H)
};

// ---------------------------------------------------------------------------------------------
// What Python sees.

// Lets torch's own functions take so many threads where this thread calls them, and no other does;
// how many it was before.
int64_t limit_threads(int64_t count) {
  const int64_t before = at::get_num_threads();
#ifdef _OPENMP
  omp_set_num_threads(static_cast<int>(count));
#endif
  return before;
}

struct Plan {
  std::deque<Sublayer> sublayers;  // another thread may add a head while a pass reads the others

  int64_t add(Sublayer sublayer) {
    sublayers.push_back(std::move(sublayer));
    return static_cast<int64_t>(sublayers.size()) - 1;
  }

  Tensor run(const Tensor& hidden, const std::vector<int64_t>& which,
             const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
             const std::vector<int64_t>& starts, const std::vector<Angles>& angles,
             const std::vector<int64_t>& bases, const std::optional<Tensor>& layer_inputs,
             const std::vector<int64_t>& branches) const {
    std::vector<const Sublayer*> chosen;
    for (int64_t index : which) chosen.push_back(&sublayers.at(index));
    if (chosen.empty()) return hidden;
    const pybind11::gil_scoped_release released;
    require(hidden.dim() == 3 && hidden.device().is_cpu(),
            "hidden states must be (rows, tokens, width) on the CPU, got ", hidden.sizes());
    const Cache cache{keys, values, Places(starts, hidden.size(1), branches), bases};
    const Tensor given = hidden.contiguous();
    std::optional<Tensor> further;
    if (layer_inputs) further = layer_inputs->contiguous();
    if (given.scalar_type() == at::kFloat)
      return Pass<float>(chosen, given, cache, angles, further).run();
    require(given.scalar_type() == at::kBFloat16, "hidden states must be float32 or bfloat16, got ",
            given.scalar_type());
    return Pass<BFloat16>(chosen, given, cache, angles, further).run();
  }
};

}  // namespace

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("disturbed", [] { return crew.disturbed(); });
  module.def("limit_threads", &limit_threads);
  module.def("move_to_huge_pages", &move_to_huge_pages,
             py::call_guard<py::gil_scoped_release>());
  module.def("stamps", &taken_stamps);
  module.def("tiles_refusal", &tiles::refusal);
  module.def("wide_products", &wide_products, py::call_guard<py::gil_scoped_release>());
  module.def("drawn", &draws::drawn, py::call_guard<py::gil_scoped_release>(), py::arg("logits"),
             py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("least"),
             py::arg("starts") = std::vector<int64_t>{});
  py::class_<Matrix>(module, "Matrix")
      .def(py::init<Tensor, std::optional<Tensor>>(), py::arg("weight"), py::arg("bias"))
      .def(py::init(&rounded_matrix), py::arg("numbers"), py::arg("scales"), py::arg("bias"),
           py::kw_only(), py::arg("bits"), py::arg("rows"), py::arg("columns"),
           py::arg("inner") = std::nullopt, py::arg("outer") = std::nullopt);
  py::class_<Norm>(module, "Norm")
      .def(py::init(&norm_of), py::arg("weight"), py::arg("epsilon"), py::arg("style"));
  py::class_<Tail>(module, "Tail")
      .def(py::init([](std::optional<Matrix> gate, std::optional<Matrix> projection,
                       std::optional<Norm> norm, std::optional<Tensor> scalar, int64_t layer,
                       bool gelu) {
             require(gate.has_value() == projection.has_value(), "a tail has a gate and a ",
                     "projection, or neither");
             return Tail{gate, projection, norm, scalar, layer, gelu};
           }),
           py::kw_only(), py::arg("gate"), py::arg("projection"), py::arg("norm"),
           py::arg("scalar"), py::arg("layer"), py::arg("gelu"));
  py::class_<Mixture>(module, "Mixture")
      .def(py::init([](Matrix router, std::optional<Norm> norm, std::optional<Tensor> scale,
                       double number, std::optional<Tensor> factors, bool whole, bool cast,
                       Matrix expand, Matrix shrink, std::optional<Norm> before,
                       std::optional<Norm> after, std::optional<Norm> dense, int64_t top,
                       bool gelu) {
             require(norm.has_value() == scale.has_value(), "a router's norm has a scale");
             return Mixture{router, norm, scale, number, factors, whole, cast, expand, shrink,
                            before, after, dense, top, gelu};
           }),
           py::kw_only(), py::arg("router"), py::arg("norm"), py::arg("scale"), py::arg("number"),
           py::arg("factors"), py::arg("whole"), py::arg("cast"), py::arg("expand"),
           py::arg("shrink"), py::arg("before"), py::arg("after"), py::arg("dense"),
           py::arg("top"), py::arg("gelu"));
  py::class_<Angles>(module, "Angles")
      .def(py::init<Tensor, Tensor, std::optional<Tensor>>(), py::arg("cos"), py::arg("sin"),
           py::arg("scales") = std::nullopt);
  py::class_<Plan>(module, "Plan")
      .def(py::init<>())
      .def("attention",
           [](Plan& plan, std::optional<Norm> before, std::optional<Norm> after,
              std::vector<Matrix> inputs, Matrix output, std::optional<Norm> q_norm,
              std::optional<Norm> k_norm, std::optional<Norm> v_norm, int64_t heads,
              int64_t kv_heads, int64_t width, int64_t window, int64_t angles, double scale,
              double softcap, bool eager, double times, int64_t sink) {
             Sublayer layer{Kind::attention, before, after, q_norm, k_norm, v_norm, inputs, output};
             layer.heads = heads, layer.kv_heads = kv_heads, layer.width = width;
             layer.window = window, layer.angles = angles, layer.scale = scale;
             layer.softcap = softcap, layer.eager = eager, layer.times = times;
             require(sink >= 0 && sink <= attention::SEGMENT && (window > 0 || sink == 0),
                     "a sink is of up to ", attention::SEGMENT, " slots, before a window; got ", sink);
             layer.sink = sink;
             int64_t outputs = 0;
             for (const Matrix& matrix : inputs) outputs += matrix.rows();
             layer.writes = outputs > heads * width;
             layer.alike = outputs == (heads + kv_heads) * width;
             return plan.add(std::move(layer));
           },
           py::kw_only(), py::arg("before"), py::arg("after"), py::arg("inputs"),
           py::arg("output"), py::arg("q_norm"), py::arg("k_norm"),
           py::arg("v_norm") = std::nullopt, py::arg("heads"), py::arg("kv_heads"),
           py::arg("width"), py::arg("window"), py::arg("angles"), py::arg("scale"),
           py::arg("softcap"), py::arg("eager"), py::arg("times") = 1.0, py::arg("sink") = 0)
      .def("mlp",
           [](Plan& plan, std::optional<Norm> before, std::optional<Norm> after,
              std::vector<Matrix> inputs, std::optional<Matrix> output, bool gelu, double times,
              std::optional<Tail> tail, std::optional<Mixture> mixture) {
             require(output.has_value() == !inputs.empty() && (output || mixture),
                     "an MLP has inputs and an output, or a mixture of experts");
             Sublayer layer{Kind::mlp, before, after, {}, {}, {}, inputs, output, tail, mixture};
             layer.gelu = gelu, layer.times = times;
             return plan.add(std::move(layer));
           },
           py::kw_only(), py::arg("before"), py::arg("after"), py::arg("inputs"),
           py::arg("output"), py::arg("gelu"), py::arg("times") = 1.0,
           py::arg("tail") = std::nullopt, py::arg("mixture") = std::nullopt)
      .def("tail",
           [](Plan& plan, Tail tail) {
             return plan.add({Kind::tail, {}, {}, {}, {}, {}, {}, {}, tail});
           })
      .def("layer_inputs",
           [](Plan& plan, Matrix projection, Norm norm, double scale, double times) {
             Sublayer layer{Kind::layer_inputs, {}, norm, {}, {}, {}, {projection}};
             layer.scale = scale, layer.times = times;
             return plan.add(std::move(layer));
           },
           py::kw_only(), py::arg("projection"), py::arg("norm"), py::arg("scale"),
           py::arg("times"))
      .def("head",
           [](Plan& plan, Norm before, Matrix matrix, double softcap, double divisor) {
             Sublayer layer{Kind::head, before, {}, {}, {}, {}, {matrix}};
             layer.softcap = softcap, layer.divisor = divisor;
             return plan.add(std::move(layer));
           },
           py::kw_only(), py::arg("before"), py::arg("matrix"), py::arg("softcap"),
           py::arg("divisor") = 1.0)
      .def("run", &Plan::run, py::arg("hidden"), py::arg("which"), py::arg("keys"),
           py::arg("values"), py::arg("starts"), py::arg("angles"),
           py::arg("bases") = std::vector<int64_t>{}, py::arg("layer_inputs") = std::nullopt,
           py::arg("branches") = std::vector<int64_t>{});
}
