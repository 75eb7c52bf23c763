// A forward pass over sublayers in one call, on a CPU.
//
// The arithmetic is that of the library's modules, in the same order, with float32 sums. In
// bfloat16 models, numbers are rounded where the library rounds them. One team of threads (torch's
// own) runs a pass. Each thread computes its share of the rows of a product. Small work is repeated
// by every thread, or divided by tokens if there are many. Between products, the team waits for its
// last thread.
//
// Letters: B rows, T tokens of each, n = B T, H hidden width, N heads, K key-value heads, D head
// width, R rotary width, S slots of the cache, I width of the MLP, L layers, P width of a layer's
// own inputs, E experts, V vocabulary.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"
#include "arguments.h"
#include "pointwise.h"
#include "products.h"
#include "team.h"

namespace {

template <typename S>
class Pass : Arguments {
 public:
  Pass(const std::vector<const Sublayer*>& sublayers, const Tensor& hidden, const Cache& cache,
       const std::vector<Angles>& angles, const std::optional<Tensor>& layer_inputs)
      : Arguments(sublayers, hidden, cache, angles, layer_inputs) {
    check_all<S>();
    for (const Sublayer* each : sublayers) {
      int64_t outputs = each->outputs();
      if (each->kind == Kind::mlp) outputs = each->inner();
      if (each->mixture && each->mixture->top) {
        const Mixture& mixture = *each->mixture;
        pieces_.push_back({&mixture.router, 0, mixture.count()});
        wide_ = std::max(wide_, mixture.top * std::max(mixture.inner(), width_));
        wide_ = std::max(wide_, mixture.count());
        top_ = std::max(top_, mixture.top);
        deep_ = std::max(deep_, mixture.inner());
      }
      if (each->kind == Kind::mlp && each->inputs.size() == 1 && each->gated) {
        // the rows of gate are followed by those of up
        pieces_.push_back({&each->inputs[0], 0, outputs});
        pieces_.push_back({&each->inputs[0], outputs, outputs});
      } else {
        const int64_t heads = each->joined ? each->heads : 0, width = each->width;
        for (int64_t h = 0; h < heads; ++h)
          pieces_.push_back({&each->inputs[0], 2 * h * width, width});
        for (size_t i = each->joined; i < each->inputs.size(); ++i)
          pieces_.push_back({&each->inputs[i], 0, each->inputs[i].rows()});
        for (int64_t h = 0; h < heads; ++h)
          pieces_.push_back({&each->inputs[0], (2 * h + 1) * width, width});
      }
      if (each->gate) pieces_.push_back({&*each->gate, 0, each->gate->rows()});
      if (each->kind == Kind::attention) outputs = each->opened();
      if (each->kind != Kind::head) wide_ = std::max(wide_, outputs);
      deep_ = std::max(deep_, width_);
      if (each->output) {
        pieces_.push_back({&*each->output, 0, width_});
        deep_ = std::max(deep_, each->output->columns());
      }
      if (each->tail && each->tail->gate) {
        const int64_t inner = each->tail->gate->rows();
        pieces_.push_back({&*each->tail->gate, 0, inner});
        pieces_.push_back({&*each->tail->projection, 0, width_});
        wide_ = std::max(wide_, inner), deep_ = std::max(deep_, inner);
      }
    }
    const Sublayer& last = *sublayers.back();
    out_ = at::empty_like(last.kind == Kind::layer_inputs ? *layer_inputs : hidden);
    if (last.kind == Kind::head)
      out_ = at::empty({rows_, count_, last.inputs[0].rows()}, hidden.options());  // (B, T, V)
  }

  Tensor run() {
    const int threads = team();
    divided_ = threads > 1 && tokens_ >= DIVIDED;
    chosen_.resize(tokens_ * top_), weights_.resize(tokens_ * top_), gates_.resize(tokens_);
    int64_t parts = 0, attending = 0;
    for (const Sublayer* each : sublayers_)
      if (each->kind == Kind::attention) {
        const attention::Attention<S> here{*each, cache_.places};
        parts = std::max(parts, lines(here.shared_room()));
        attending = std::max(attending, lines(here.own_room()));
      }
    // Of all threads: two buffers for wide products, a sublayer's output, and attention's parts.
    const int64_t shared = lines(tokens_ * wide_) * 2 + lines(tokens_ * width_) + parts;
    // One for each thread, or one for all threads if they divide the tokens.
    const int64_t states = (top_ ? 3 : 2) * lines(tokens_ * width_) +
                           lines(tokens_ * packed_width(deep_));
    const int64_t needed = shared + (divided_ ? 1 : threads) * states + threads * attending;
    // Kept by the calling thread between passes, because fresh memory costs a page fault per 4 KiB.
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
      me.meet();  // wait here, because threads spin at the end of an OpenMP region
    };
#ifdef _OPENMP
    if (threads > 1) {
      const auto start = Clock::now();
#pragma omp parallel num_threads(threads)
      worker(omp_get_thread_num(), omp_get_num_threads());
      crew.note(Clock::now() - start, Clock::duration(meeting.slept.load()), threads, wanted());
      return out_;
    }
#endif
    worker(0, 1);
    return out_;
  }

 private:
  // The rows of a matrix that one product uses.
  struct Piece {
    const Matrix* matrix;
    int64_t first, rows;
  };

  struct Worker {
    int number, of;
    Meeting& meeting;
    // Each thread's own, or shared by all threads if they divide the tokens.
    float *hidden, *normed;  // (n, H) each
    float* attending;        // room for attention, always its own
    float* packed;           // inputs of a product
    float* gathered;         // (n, H) inputs of an expert
    Range tokens{0, 0};      // which this thread norms, packs and adds to
    const float* taken = nullptr;  // the inputs in float32, before packing
    const Matrix* taken_for = nullptr;  // the matrix they were packed for
    std::vector<float> row;        // (H,) one token's numbers
    size_t done = 0;         // products finished so far
    std::vector<int64_t> pairs;    // token-expert pairs, sorted by expert
    std::vector<int64_t> begins;   // (E + 1,) the first pair of each expert

    const uint8_t *soon = nullptr, *until = nullptr;  // next weights not yet fetched

    void meet() {
      meeting.wait(of, [this] {
        for (int i = 0; i < 4 && soon < until; ++i, soon += 64) __builtin_prefetch(soon, 0, 2);
      });
    }
    Range share(int64_t rows) const { return ::share(rows, number, of); }
  };

  static constexpr int64_t MOST_KEPT = 4 << 20;  // floats of memory kept between passes
  // From this many tokens on, the threads divide the work on single tokens, and meet once more per
  // product. With fewer tokens, each thread does all of this work itself.
  static constexpr int64_t DIVIDED = 24;
  // The most bytes of its next weights that a waiting thread prefetches; its cache must hold them.
  static constexpr int64_t FETCHED = 256 << 10;
  static constexpr int64_t PROMPT = 32;  // with more tokens, waiting is short beside the products
  static int64_t lines(int64_t numbers) { return (numbers + LINE - 1) / LINE * LINE; }

  static int wanted() { return usual_threads ? usual_threads : at::get_num_threads(); }

  int team() const {
    if (at::in_parallel_region()) return 1;
    // Below 2^18 bytes of weights times tokens, waiting for each other costs more than it saves.
    int64_t bytes = 0;
    for (const Piece& piece : pieces_) bytes += piece.rows * piece.matrix->row_bytes();
    for (const Sublayer* each : sublayers_)
      if (each->mixture)
        bytes += each->mixture->top * each->mixture->expand.rows() / each->mixture->count() *
                 each->mixture->expand.row_bytes();
    if (bytes * tokens_ < (1 << 18)) return 1;
    return tokens_ > PROMPT ? wanted() : crew.threads(wanted());
  }

  // The first of a thread's rows in a product.
  const uint8_t* begins(const Worker& me, const Piece& piece) const {
    const Matrix& matrix = *piece.matrix;
    const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight.const_data_ptr());
    return weight + (piece.first + me.share(piece.rows).first) * matrix.row_bytes();
  }

  // The tokens that a thread norms and packs, of `tokens`.
  Range mine(const Worker& me, int64_t tokens) const {
    if (!divided_) return {0, tokens};
    return {tokens * me.number / me.of, tokens * (me.number + 1) / me.of};
  }

  // If threads divide the tokens, wait until the tokens of all threads are ready.
  void meet_divided(Worker& me) const {
    if (divided_) me.meet();
  }

  // Pack x (n, columns) as inputs of the next products. The thread's own tokens must be ready.
  void take(Worker& me, const float* x) const { take(me, *pieces_[me.done].matrix, x, tokens_); }

  // Pack x (tokens, columns) as inputs of products with a matrix.
  void take(Worker& me, const Matrix& matrix, const float* x, int64_t tokens) const {
    me.taken = x, me.taken_for = &matrix;
    const Range own = mine(me, tokens);
    if (matrix.layout) {
      matrix.layout->format->pack(x, matrix.columns(), tokens, me.packed, own.first, own.last,
                                  numbers<int32_t>(matrix.order));
    } else if (matrix.halved<S>()) {
      pack_inputs<BFloat16, float>(x, matrix.columns(), tokens, me.packed, own.first, own.last);
    } else if (matrix.wide) {
      pack_inputs<float>(x, matrix.columns(), tokens, me.packed, own.first, own.last);
    } else {
      pack_inputs<S>(x, matrix.columns(), tokens, me.packed, own.first, own.last);
    }
    meet_divided(me);
  }

  // The thread's rows of the next product, with the inputs that were packed last. They are packed
  // again if this matrix needs them in another form.
  template <typename O>
  void multiply(Worker& me, O* out, int64_t stride) const {
    const Piece& piece = pieces_[me.done++];
    if (!Arguments::same_layout<S>(*piece.matrix, *me.taken_for)) {
      meet_divided(me);  // until all threads have read the packed inputs
      take(me, *piece.matrix, me.taken, tokens_);
    }
    const uint8_t* then = upcoming(me, piece);
    multiply(me, piece, then, tokens_, out, stride);
    if (me.done == pieces_.size()) return;
    const Range next = me.share(pieces_[me.done].rows);
    const int64_t bytes = (next.last - next.first) * pieces_[me.done].matrix->row_bytes();
    me.soon = then + AHEAD, me.until = then + std::min(bytes, FETCHED);
  }

  // What is read after a piece if only `pieces_` are read.
  const uint8_t* upcoming(const Worker& me, const Piece& piece) const {
    if (me.done < pieces_.size()) return begins(me, pieces_[me.done]);
    const Range mine = me.share(piece.rows);
    return begins(me, piece) + (mine.last - mine.first) * piece.matrix->row_bytes();
  }

  // The thread's rows of a product. `then` points to what is read afterwards.
  template <typename O>
  void multiply(Worker& me, const Piece& piece, const uint8_t* then, int64_t tokens, O* out,
                int64_t stride) const {
    const Matrix& matrix = *piece.matrix;
    const Range mine = me.share(piece.rows);
    const int64_t columns = matrix.columns();
    const uint8_t* weight = begins(me, piece);
    const S* bias = numbers<S>(matrix.bias);
    if (bias) bias += piece.first;
    if (matrix.layout)
      return stored_product<S>(matrix, piece.first, mine, weight, me.packed, tokens, then, out,
                               stride);
    const auto plain = [&](auto number, const auto* bias) {
      using N = decltype(number);
      product(reinterpret_cast<const N*>(weight) - mine.first * columns, bias, mine.first,
              mine.last, columns, me.packed, tokens, out, stride,
              reinterpret_cast<const N*>(then));
    };
    const float* none = nullptr;  // products with a bias in float32 are not rounded
    if (matrix.wide) return matrix.halved<S>() ? plain(BFloat16(), none) : plain(float(), none);
    if (matrix.halved<S>()) return plain(BFloat16(), bias);
    plain(S(), bias);
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

  // The norms of the thread's tokens, (n, H).
  void norm_all(Worker& me, const Norm& norm, const float* x, float* out) const {
    for (int64_t t = me.tokens.first; t < me.tokens.last; ++t)
      normalise<S>(norm, x + t * width_, width_, out + t * width_);
  }

  // All rows of the next product, with inputs x, in `result_`.
  void finish_product(Worker& me, const float* x) const {
    me.meet();
    take(me, x);
    multiply(me, result_, width_);
    me.meet();
  }

  // Add the next product, with inputs x, to the hidden states.
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
    const int64_t first = me.tokens.first * width_, last = me.tokens.last * width_;
    add_to<S>(me.hidden + first, result + first, static_cast<float>(times), last - first);
  }

  void choose(Worker& me, const Mixture& mixture, const float* x);
  void run_experts(Worker& me, const Mixture& mixture, const float* x) const;
  void mix(Worker& me, const Sublayer& layer, const float* x);

  void finish(Worker& me, const Tail& tail) const {
    if (tail.gate) {
      const int64_t layers = layer_inputs_->size(2), inner = layer_inputs_->size(3);
      const Range mine = me.share(inner);
      take(me, me.hidden);
      multiply(me, first_, inner);
      const S* given = numbers<S>(layer_inputs_) + tail.layer * inner + mine.first;
      for (int64_t t = 0; t < tokens_; ++t)
        activate<S>(tail.act, first_ + t * inner + mine.first, given + t * layers * inner,
                    mine.last - mine.first);
      add(me, first_, tail.norm, 1);
    }
    if (tail.scalar) {
      const float by = static_cast<float>(numbers<S>(tail.scalar)[0]);
      for (int64_t i = me.tokens.first * width_; i < me.tokens.last * width_; ++i)
        me.hidden[i] = rounded<S>(me.hidden[i] * by);
    }
  }

  // The inputs of all layers: a projection of the embedded tokens, plus embeddings for each layer.
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
    if (layer.divisor != 1 || layer.factor != 1) {
      const float by = static_cast<float>(layer.divisor);
      const float times = static_cast<float>(layer.factor);
      for (int64_t t = 0; t < tokens_; ++t)
        for (int64_t i = t * vocabulary + mine.first; i < t * vocabulary + mine.last; ++i)
          out[i] = static_cast<S>(rounded<S>(static_cast<float>(out[i]) / by) * times);
    }
    if (layer.softcap > 0) {
      const Vec cap(static_cast<float>(layer.softcap));
      for (int64_t t = 0; t < tokens_; ++t) {
        S* logits = out + t * vocabulary;
        float some[LANES];
        for (int64_t i = mine.first; i < mine.last; i += LANES) {
          const int64_t here = std::min(LANES, mine.last - i);
          const Vec part = rounded<S>(widened(logits + i, here) / cap);
          (rounded<S>(part.tanh()) * cap).store(some);
          std::copy_n(some, here, logits + i);
        }
      }
    }
  }

  void expand(Worker& me, const Sublayer& layer, const float* x) {
    const int64_t inner = layer.output->columns();
    const Range mine = me.share(inner);
    take(me, x);
    multiply(me, first_, inner);
    if (layer.gated) multiply(me, second_, inner);
    if (layer.gate) multiply(me, gates_.data(), 1);
    for (int64_t t = 0; t < tokens_; ++t) {
      const int64_t at = t * inner + mine.first;
      activate<S>(layer.act, first_ + at, layer.gated ? second_ + at : nullptr,
                  mine.last - mine.first);
    }
  }

  // Rotate a query or key to its position.
  static void turn(const Angles& angles, bool pairs, int64_t place, float* x) {
    const int64_t rotary = angles.cos.size(2), at = place * rotary;
    const auto by = [&](const auto* cos, const auto* sin) {
      if (pairs)
        rotate_pairs<S>(x, cos, sin, rotary);
      else
        rotate<S>(x, cos, sin, rotary);
    };
    if (angles.cos.scalar_type() == at::kFloat)
      by(numbers<float>(angles.cos) + at, numbers<float>(angles.sin) + at);
    else
      by(numbers<S>(angles.cos) + at, numbers<S>(angles.sin) + at);
  }

  void attend_all(Worker& me, const Sublayer& layer, const float* x, int64_t number) const {
    const int64_t heads = layer.heads, kv = layer.kv_heads, width = layer.width;
    const int64_t stride = layer.opened(), gate = layer.projected();
    int64_t offset = 0;
    take(me, x);
    for (size_t left = layer.inputs.size() + (layer.joined ? heads - 1 : 0); left; --left) {
      const int64_t rows = pieces_[me.done].rows;
      multiply(me, first_ + offset, stride);
      offset += rows;
    }
    const int64_t gates = layer.gate ? 1 : layer.joined ? heads : 0;
    for (int64_t h = 0; h < gates; ++h) multiply(me, first_ + gate + h * width, stride);
    me.meet();
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
    const int64_t slots = keys.size(2), *bases = cache_.bases_of(number);
    const Angles& angles = angles_[layer.angles];
    const int64_t turned = heads + (layer.writes() ? kv : 0);  // heads to rotate
    const bool alike = layer.alike();
    const Vec factor(static_cast<float>(layer.query_factor));
    for (int64_t unit = me.number; unit < tokens_ * turned; unit += me.of) {
      const int64_t token = unit / turned, head = unit % turned;
      const int64_t row = token / count_, place = cache_.places.position(row, token % count_);
      float* x = first_ + token * stride + head * width;
      const auto norm_and_turn = [&](const std::optional<Norm>& norm) {
        if (layer.late_norms) turn(angles, layer.pairs, place, x);
        if (norm) normalise<S>(*norm, x, width, x);
        if (head < heads && layer.query_factor != 1)
          map(width, x, [&](Vec x) { return rounded<S>(x * factor); }, x);
        if (!layer.late_norms) turn(angles, layer.pairs, place, x);
      };
      if (head < heads) {
        norm_and_turn(q_whole ? std::nullopt : layer.q_norm);
        float* open = first_ + token * stride + gate + head * width;
        if (layer.opens()) map(width, open, [](Vec x) { return rounded<S>(sigmoid(x)); }, open);
        continue;
      }
      float* value = x + kv * width;
      if (alike) std::copy_n(x, width, value);
      if (layer.v_norm) normalise<S>(*layer.v_norm, value, width, value);
      norm_and_turn(k_whole ? std::nullopt : layer.k_norm);
      const int64_t slot = cache_.places.slot(row, token % count_) - (bases ? bases[row] : 0);
      const int64_t at = ((row * kv + head - heads) * slots + slot) * width;
      for (int64_t i = 0; i < width; ++i) {
        key_slots[at + i] = static_cast<S>(x[i]);
        value_slots[at + i] = static_cast<S>(value[i]);
      }
    }
    me.meet();
    attention::Attention<S> attention{layer, cache_.places};
    attention.queries = first_, attention.stride = stride, attention.out = second_;
    attention.keys = key_slots, attention.values = value_slots;
    attention.slots = slots, attention.bases = bases, attention.parts = parts_;
    attention.run(me.number, me.of, me.attending, [&] { me.meet(); });
  }

  std::vector<Piece> pieces_;  // the products of the pass, in order
  Tensor out_;
  bool divided_ = false;          // whether threads divide the tokens
  int64_t top_ = 0;               // the most experts per token
  std::vector<int64_t> chosen_;   // (n, top) experts
  std::vector<float> weights_;    // (n, top)
  std::vector<float> gates_;      // (n,) of the MLP beside a mixture
  int64_t wide_ = 0, deep_ = 0;  // the most outputs and inputs of any product except the head's
  float* parts_ = nullptr;        // of attention
  float *first_ = nullptr, *second_ = nullptr;  // (n, outputs) each
  float* result_ = nullptr;       // (n, H)
};

}  // namespace
