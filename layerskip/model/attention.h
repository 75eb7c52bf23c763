// Attention of a pass: every key and value is read once for all queries that share it.
//
// Text is cut in segments, at the same slots in every pass. What the queries of a row that share a
// key-value head make of a segment is a part: the largest score, the sum of all powers, and the
// values weighed by these. Parts are joined in the order of the text, so that a token's numbers
// depend neither on who computed them, nor on the tokens beside it. Few queries spread the segments
// of a text over the threads; the many ones of a prompt are cut in blocks, which go through the
// text each for itself.
// Keys are packed so that a vector has one number of many slots, and nothing is summed across it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "products.h"
#include "sublayer.h"

namespace {
namespace attention {

constexpr int64_t SEGMENT = 256;        // slots
constexpr int64_t LINE = 2 * LANES;     // slots whose scores are computed together
constexpr int64_t BLOCK = 96;           // queries that go through a text together, at most
constexpr int ASKING = MANY_REGISTERS ? 12 : 6;  // queries whose scores are computed together
constexpr int WEIGHING = 6;                      // and whose values are
constexpr int SPAN = MANY_REGISTERS ? 4 : 2;     // vectors of a value
constexpr int64_t SOON = 8 << 10;       // bytes between what is read and its prefetch
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The slots from first to last that a query sees, besides those below the layer's sink.
struct Query {
  int64_t first, last;
};

inline int64_t up_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Numbers that a packed key, value or part of a query takes.
inline int64_t padded(int64_t width) { return up_to(width, LANES); }
inline int64_t part_size(int64_t width) { return padded(width) + 2; }

// e^x for x <= 0, by Cephes' polynomial: 1 at 0, and 0 at minus infinity.
inline Vec power(const Vec& x) {
  const Vec low(-87.0f), kept = at::vec::maximum(x, low);
  const Vec n = (kept * Vec(1.44269504088896341f)).round();
  const Vec r = at::vec::fmadd(n, Vec(2.12194440e-4f), at::vec::fmadd(n, Vec(-0.693359375f), kept));
  Vec y(1.9875691500e-4f);
  y = at::vec::fmadd(y, r, Vec(1.3981999507e-3f));
  y = at::vec::fmadd(y, r, Vec(8.3334519073e-3f));
  y = at::vec::fmadd(y, r, Vec(4.1665795894e-2f));
  y = at::vec::fmadd(y, r, Vec(1.6666665459e-1f));
  y = at::vec::fmadd(y, r, Vec(5.0000001201e-1f));
  y = at::vec::fmadd(y, r * r, r + Vec(1.0f));
  using Ints = at::vec::Vectorized<int32_t>;
  const Ints exponent = (at::vec::convert_to_int_of_same_size<float>(n) + Ints(127)) << Ints(23);
  return Vec::blendv(y * at::vec::cast<float>(exponent), Vec(0.0f), x < low);
}

// A square of LANES numbers, turned.
inline void turn(const float* from, int64_t stride, float* to, int64_t to_stride) {
#if defined(CPU_CAPABILITY_AVX512)
  at::vec::transpose_mxn<float, 16, 16>(from, stride, to, to_stride);
#elif defined(CPU_CAPABILITY_AVX2)
  at::vec::transpose_mxn<float, 8, 8>(from, stride, to, to_stride);
#else
  for (int64_t i = 0; i < LANES; ++i)
    for (int64_t j = 0; j < LANES; ++j) to[j * to_stride + i] = from[i * stride + j];
#endif
}

// The kernels, for keys and values of S, by pairs or widened.
template <typename S, bool PAIRS>
struct Kernel {
  static constexpr int64_t PACK = PAIRS ? 2 : 1;  // numbers of S in what is multiplied at once

  static int64_t depth(int64_t width) { return (width + PACK - 1) / PACK; }

  static Vec add(const Vec& sums, const Vec& a, const Vec& b) {
    return PAIRS ? add_pairs(sums, a, b) : at::vec::fmadd(a, b, sums);
  }

  // Numbers x (count,) in the form that is multiplied: rounded to S anyway.
  static void pack_row(const float* x, int64_t count, float* to) {
    if constexpr (PAIRS) {
      S* numbers = reinterpret_cast<S*>(to);
      for (int64_t i = 0; i < count; ++i) numbers[i] = static_cast<S>(x[i]);
      if (count % 2) numbers[count] = S(0.0f);
    } else {
      std::copy_n(x, count, to);
    }
  }

  // LINE keys, of which there are `count`: (depth, LINE); `rest` is room for them as rows.
  static void pack_keys(const S* keys, int64_t count, int64_t width, float* rest, float* to) {
    const int64_t deep = depth(width), wide = padded(deep);
    const float* from = reinterpret_cast<const float*>(keys);
    int64_t stride = width / PACK;
    if (count < LINE || deep % LANES || width % PACK || !(PAIRS || std::is_same_v<S, float>)) {
      std::fill_n(rest, LINE * wide, 0.0f);
      for (int64_t s = 0; s < count; ++s) {
        const S* key = keys + s * width;
        if constexpr (PAIRS)
          std::memcpy(rest + s * wide, key, width * sizeof(S));
        else
          for (int64_t i = 0; i < width; i += LANES)
            widened(key + i, width - i).store(rest + s * wide + i);
      }
      from = rest, stride = wide;
    }
    for (int64_t i = 0; i < count * width; i += 64 / sizeof(S))
      __builtin_prefetch(keys + i + SOON / sizeof(S), 0, 2);
    for (int64_t s = 0; s < LINE; s += LANES)
      for (int64_t i = 0; i < deep; i += LANES)
        turn(from + s * stride + i, stride, to + i * LINE + s, LINE);
  }

  // Values (count, width): (count / PACK, padded width).
  static void pack_values(const S* values, int64_t count, int64_t width, float* to) {
    const int64_t wide = padded(width);
    for (int64_t s = 0; s < count; s += PACK) {
      const S* value = values + s * width;
      float* row = to + s / PACK * wide;
      for (int64_t i = 0; i < PACK * width; i += 64 / sizeof(S))
        __builtin_prefetch(value + i + SOON / sizeof(S), 0, 2);
      if constexpr (PAIRS) {
        const bool both = s + 1 < count;
        int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
        for (; both && i + LANES <= width; i += LANES) {
          const auto some = [&](const S* at) {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
          };
          const __m512i pair = _mm512_or_si512(
              some(value + i), _mm512_slli_epi32(some(value + width + i), 16));
          _mm512_storeu_si512(row + i, pair);
        }
#endif
        S* pairs = reinterpret_cast<S*>(row);
        for (; i < wide; ++i) {
          pairs[2 * i] = i < width ? value[i] : S(0.0f);
          pairs[2 * i + 1] = i < width && both ? value[width + i] : S(0.0f);
        }
      } else {
        for (int64_t i = 0; i < wide; i += LANES)
          widened(value + i, std::max<int64_t>(0, width - i)).store(row + i);
      }
    }
  }

  // Scores of COUNT queries at a line of slots.
  template <int COUNT>
  static void ask(const float* keys, int64_t deep, const float* q, int64_t q_stride, float* out) {
    Vec sums[COUNT][2];
#pragma GCC unroll 12
    for (int j = 0; j < COUNT; ++j) sums[j][0] = sums[j][1] = Vec(0.0f);
    for (int64_t i = 0; i < deep; ++i) {
      const Vec low = held(Vec::loadu(keys + i * LINE));
      const Vec high = held(Vec::loadu(keys + i * LINE + LANES));
#pragma GCC unroll 12
      for (int j = 0; j < COUNT; ++j) {
        const Vec x(q[j * q_stride + i]);
        sums[j][0] = add(sums[j][0], low, x);
        sums[j][1] = add(sums[j][1], high, x);
      }
    }
#pragma GCC unroll 12
    for (int j = 0; j < COUNT; ++j) {
      sums[j][0].store(out + j * SEGMENT);
      sums[j][1].store(out + j * SEGMENT + LANES);
    }
  }

  // Values of some slots, weighed for COUNT queries: WIDE vectors of each.
  template <int COUNT, int WIDE>
  static void weigh(const float* values, int64_t stride, int64_t steps, const float* powers,
                    float* out, int64_t out_stride) {
    Vec sums[COUNT][WIDE];
#pragma GCC unroll 6
    for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) sums[j][v] = Vec(0.0f);
    for (int64_t s = 0; s < steps; ++s) {
      Vec some[WIDE];
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) some[v] = held(Vec::loadu(values + s * stride + v * LANES));
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; ++j) {
        const Vec by(powers[j * SEGMENT + s]);
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; ++v) sums[j][v] = add(sums[j][v], some[v], by);
      }
    }
#pragma GCC unroll 6
    for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v) sums[j][v].store(out + j * out_stride + v * LANES);
  }

  template <int WIDE>
  static void weigh_all(int count, const float* values, int64_t stride, int64_t steps,
                        const float* powers, float* out, int64_t out_stride) {
    switch (count) {
#define SOME(N) \
  case N: weigh<N, WIDE>(values, stride, steps, powers, out, out_stride); break;
      SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
#undef SOME
    }
  }

  // Scores as powers of their difference to the largest one, which is returned with their sum. Where
  // those of the whole text are known, they are used instead, and probabilities come out.
  static std::pair<float, float> soften(const Sublayer& layer, const Query& query, int64_t begin,
                                        int64_t end, const float* known, float* scores) {
    // slots that are not seen, from `begin` on
    const int64_t none = std::clamp<int64_t>(layer.sink - begin, 0, end - begin);
    const int64_t first = std::clamp<int64_t>(query.first - begin, none, end - begin);
    const int64_t last = std::clamp<int64_t>(query.last + 1 - begin, none, end - begin);
    const Vec scale(static_cast<float>(layer.scale)), cap(static_cast<float>(layer.softcap));
    for (int64_t s = 0; s < end - begin; s += LANES) {
      Vec some = Vec::loadu(scores + s);
      if (layer.eager) {
        some = in_s(in_s(some) * scale);
        if (layer.softcap > 0) some = in_s(in_s(in_s(some / cap).tanh()) * cap);
      } else {
        some = some * scale;
      }
      some.store(scores + s);
    }
    std::fill(scores + none, scores + first, NEVER);
    std::fill(scores + last, scores + (end - begin), NEVER);
    Vec most(NEVER);
    for (int64_t s = 0; s < end - begin; s += LANES)
      most = at::vec::maximum(most, Vec::loadu(scores + s));
    float largest =
        at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, most);
    if (largest == NEVER) return {NEVER, 0.0f};
    if (known) largest = known[0];
    Vec sums(0.0f);
    for (int64_t s = 0; s < end - begin; s += LANES) {
      Vec some = power(Vec::loadu(scores + s) - Vec(largest));
      sums = sums + some;
      if (known) some = some / Vec(known[1]);
      // probabilities are rounded before they weigh values
      if constexpr (PAIRS)
        store_rounded(some, reinterpret_cast<S*>(scores) + s);
      else
        in_s(some).store(scores + s);
    }
    return {largest, sum(sums)};
  }

  static Vec in_s(const Vec& x) {
    if constexpr (std::is_same_v<S, float>) {
      return x;
    } else {
      S some[LANES];
      store_rounded(x, some);
      return widened(some);
    }
  }

  static void store_rounded(const Vec& x, S* to) {
    if constexpr (std::is_same_v<S, float>) {
      x.store(to);
    } else {
      at::vec::convert_from_float<S>(x, x).store(to, static_cast<int>(LANES));
    }
  }

  // Parts of a block of queries at slots begin to end of one segment, which begin a line of it.
  // `keys` and `values` lie at slot begin, `q` is packed, and parts are those of `part_size`.
  // `known`, if anything, has the largest score of each query, and the sum of its powers; without
  // `weighing` these are all that is computed.
  static void run(const Sublayer& layer, const Query* queries, int64_t count, const float* q,
                  const S* keys, const S* values, int64_t begin, int64_t end, const float* known,
                  bool weighing, float* room, float* parts) {
    const int64_t width = layer.width, wide = padded(width), deep = depth(width);
    const int64_t slots = end - begin, whole = up_to(slots, LINE);
    float *line = room, *rest = line + LINE * wide, *others = rest + LINE * wide;
    float* scores = others + SEGMENT * wide;
    for (int64_t s = 0; s < whole; s += LINE) {
      pack_keys(keys + s * width, std::min(LINE, slots - s), width, rest, line);
      for (int64_t j = 0; j < count; j += ASKING) {
        const float* x = q + j * deep;
        float* out = scores + j * SEGMENT + s;
        switch (std::min<int64_t>(ASKING, count - j)) {
#define SOME(N) \
  case N: ask<N>(line, deep, x, deep, out); break;
          SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
#if defined(CPU_CAPABILITY_AVX512)
          SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#endif
#undef SOME
        }
      }
    }
    const int64_t size = part_size(width);
    for (int64_t j = 0; j < count; ++j) {
      float* part = parts + j * size;
      const auto [most, total] =
          soften(layer, queries[j], begin, begin + whole, known ? known + 2 * j : nullptr,
                 scores + j * SEGMENT);
      part[0] = most, part[1] = total;
    }
    if (!weighing) return;
    const float* rows = reinterpret_cast<const float*>(values);
    if (!std::is_same_v<S, float> || width != wide) {
      pack_values(values, slots, width, others);
      rows = others;
    }
    const int64_t steps = (slots + PACK - 1) / PACK;
    for (int64_t j = 0; j < count; j += WEIGHING) {
      const int some = static_cast<int>(std::min<int64_t>(WEIGHING, count - j));
      const float* powers = scores + j * SEGMENT;
      for (int64_t i = 0; i < wide;) {
        float* out = parts + j * size + 2 + i;
        if (i + SPAN * LANES <= wide) {
          weigh_all<SPAN>(some, rows + i, wide, steps, powers, out, size);
          i += SPAN * LANES;
        } else {
          weigh_all<1>(some, rows + i, wide, steps, powers, out, size);
          i += LANES;
        }
      }
    }
  }
};

// Add the largest score and the sum of a part to those of the parts before it; by what either is
// multiplied.
inline std::pair<float, float> join_sums(float* all, const float* part) {
  const float most = std::max(all[0], part[0]);
  const float before = std::exp(all[0] - most), now = std::exp(part[0] - most);
  all[0] = most;
  all[1] = std::fma(all[1], before, part[1] * now);
  return {before, now};
}

// Add a part of a query to the parts before it.
inline void join(float* all, const float* part, int64_t width) {
  if (part[0] == NEVER) return;
  if (all[0] == NEVER) {
    std::copy_n(part, part_size(width), all);
    return;
  }
  const auto [before, now] = join_sums(all, part);
  for (int64_t i = 0; i < padded(width); i += LANES) {
    const Vec added = Vec::loadu(part + 2 + i) * Vec(now);
    at::vec::fmadd(Vec::loadu(all + 2 + i), Vec(before), added).store(all + 2 + i);
  }
}

template <typename S>
void pack_query(const float* x, int64_t width, float* to) {
  if constexpr (PARTS<S> == 2)
    if (has_pairs()) return Kernel<S, true>::pack_row(x, width, to);
  Kernel<S, false>::pack_row(x, width, to);
}

// Numbers that a packed query takes.
template <typename S>
int64_t query_size(int64_t width) {
  if constexpr (PARTS<S> == 2)
    if (has_pairs()) return Kernel<S, true>::depth(width);
  return width;
}

template <typename S, typename... Rest>
void run(const Rest&... rest) {
  if constexpr (PARTS<S> == 2)
    if (has_pairs()) return Kernel<S, true>::run(rest...);
  Kernel<S, false>::run(rest...);
}

// The attention of a layer in a pass: `count` tokens of every row, from the slots `starts` on.
template <typename S>
struct Attention {
  const Sublayer& layer;
  const std::vector<int64_t>& starts;
  int64_t count;
  const float* queries = nullptr;                   // (B, T, stride)
  int64_t stride = 0;
  const S *keys = nullptr, *values = nullptr;       // (B, K, slots, D), the first slot is `base`
  int64_t slots = 0, base = 0;
  float* out = nullptr;                             // (B, T, N, D)
  float* parts = nullptr;                           // of all units, where `along` holds

  int64_t groups() const { return layer.heads / layer.kv_heads; }
  int64_t asked() const { return count * groups(); }  // queries of a row and key-value head
  int64_t rows() const { return static_cast<int64_t>(starts.size()); }

  Query query(int64_t row, int64_t j) const {
    const int64_t place = starts[row] + j / groups();
    return {layer.window ? std::max<int64_t>(0, place - layer.window + 1) : 0, place};
  }

  // The segments that a row's tokens see: the sink's, and those from the first one on.
  int64_t first(int64_t row) const { return query(row, 0).first / SEGMENT; }
  bool apart(int64_t row) const { return layer.sink > 0 && first(row) > 0; }
  int64_t segments(int64_t row) const {
    return (starts[row] + count - 1) / SEGMENT + 1 - first(row) + apart(row);
  }
  int64_t segment(int64_t row, int64_t i) const {
    return apart(row) ? (i == 0 ? 0 : first(row) + i - 1) : first(row) + i;
  }

  int64_t units() const {
    int64_t total = 0;
    for (int64_t row = 0; row < rows(); ++row) total += segments(row) * layer.kv_heads;
    return total;
  }

  // Whether units are segments; else they are blocks of queries.
  bool along() const { return asked() <= BLOCK && units() * part_floats() <= (16 << 20); }
  int64_t part_floats() const { return asked() * part_size(layer.width); }
  int64_t shared_room() const { return along() ? units() * part_floats() : 0; }

  // Room that a thread needs, in floats.
  int64_t own_room() const {
    const int64_t wide = padded(layer.width);
    return (SEGMENT + 2 * LINE + BLOCK) * wide + BLOCK * (SEGMENT + 2 * part_size(layer.width));
  }

  // A thread's share; `meet` waits for the others.
  template <typename Meet>
  void run(int64_t number, int64_t of, float* room, const Meet& meet) const {
    if (along())
      run_along(number, of, room, meet);
    else
      run_blocks(number, of, room);
  }

 private:
  // Some queries of a row and key-value head, and where they are packed.
  struct Block {
    int64_t row, head, begin, count;
    Query queries[BLOCK];
    float *packed, *room;
  };

  void gather(Block& block) const {
    const int64_t size = query_size<S>(layer.width);
    for (int64_t j = 0; j < block.count; ++j) {
      const int64_t at = block.begin + j;
      block.queries[j] = query(block.row, at);
      const int64_t head = block.head * groups() + at % groups();
      const float* x = queries + (block.row * count + at / groups()) * stride + head * layer.width;
      pack_query<S>(x, layer.width, block.packed + j * size);
    }
  }

  // Whether a block sees anything of a segment; then its parts, as of `Kernel::run`.
  bool part(const Block& block, int64_t segment, const float* known, bool weighing,
            float* to) const {
    const int64_t low = block.queries[0].first, high = block.queries[block.count - 1].last;
    const int64_t first = segment * SEGMENT, last = std::min(first + SEGMENT, high + 1);
    int64_t begin = first, end = last;
    if (first >= layer.sink)
      begin = std::max({first, base, low / LINE * LINE});
    else if (low >= last)
      end = std::min(last, up_to(layer.sink, LINE));
    if (begin >= end) return false;
    const int64_t at =
        ((block.row * layer.kv_heads + block.head) * slots + begin - base) * layer.width;
    attention::run<S>(layer, block.queries, block.count, block.packed, keys + at, values + at,
                      begin, end, known, weighing, block.room, to);
    return true;
  }

  void finish(const Block& block, int64_t j, const float* all) const {
    const int64_t at = block.begin + j, head = block.head * groups() + at % groups();
    const int64_t token = block.row * count + at / groups(), width = layer.width;
    float* to = out + (token * layer.heads + head) * width;
    const float by = layer.eager ? 1.0f : 1.0f / all[1];
    for (int64_t i = 0; i < width; ++i) to[i] = rounded<S>(all[2 + i] * by);
  }

  template <typename Meet>
  void run_along(int64_t number, int64_t of, float* room, const Meet& meet) const {
    const int64_t size = part_size(layer.width), all = units();
    const int64_t mine = all * number / of, end = all * (number + 1) / of;
    Block block{-1, -1, 0, asked(), {}, room, room + BLOCK * padded(layer.width)};
    const auto each = [&](const auto& apply) {
      int64_t unit = 0;
      for (int64_t row = 0; row < rows(); ++row)
        for (int64_t head = 0; head < layer.kv_heads; ++head) {
          const int64_t first = unit;
          for (int64_t i = 0; i < segments(row); ++i, ++unit) {
            if (unit < mine || unit >= end) continue;
            if (row != block.row || head != block.head) {
              block.row = row, block.head = head;
              gather(block);
            }
            apply(segment(row, i), parts + unit * part_floats(), parts + first * part_floats());
          }
        }
    };
    if (layer.eager) {
      // probabilities are rounded, and not their shares: sums come first
      each([&](int64_t i, float* to, const float*) { part(block, i, nullptr, false, to); });
      meet();
      std::vector<float> known;
      each([&](int64_t, const float*, const float* first) {
        for (int64_t j = 0; j < asked(); ++j) {
          float sums[2] = {NEVER, 0.0f};
          for (int64_t i = 0; i < segments(block.row); ++i)
            if (const float* some = first + i * part_floats() + j * size; some[0] != NEVER)
              join_sums(sums, some);
          known.insert(known.end(), sums, sums + 2);
        }
      });
      meet();
      const float* next = known.data();
      each([&](int64_t i, float* to, const float*) {
        part(block, i, next, true, to);
        next += 2 * asked();
      });
    } else {
      each([&](int64_t i, float* to, const float*) { part(block, i, nullptr, true, to); });
    }
    meet();
    int64_t first = 0;  // unit of a row
    for (int64_t row = 0, query = 0; row < rows(); ++row)
      for (int64_t head = 0; head < layer.kv_heads; ++head, first += segments(row))
        for (int64_t j = 0; j < asked(); ++j, ++query) {
          if (query % of != number) continue;
          float* sum = parts + first * part_floats() + j * size;
          for (int64_t i = 1; i < segments(row); ++i)
            join(sum, sum + i * part_floats(), layer.width);
          block.row = row, block.head = head;
          finish(block, j, sum);
        }
  }

  void run_blocks(int64_t number, int64_t of, float* room) const {
    const int64_t size = part_size(layer.width), blocks = (asked() + BLOCK - 1) / BLOCK;
    float *packed = room, *sums = packed + BLOCK * padded(layer.width), *some = sums + BLOCK * size;
    float known[2 * BLOCK];
    for (int64_t unit = number; unit < rows() * layer.kv_heads * blocks; unit += of) {
      const int64_t i = unit % blocks, begin = asked() * i / blocks;
      Block block{unit / blocks / layer.kv_heads, unit / blocks % layer.kv_heads, begin,
                  asked() * (i + 1) / blocks - begin, {}, packed, some + BLOCK * size};
      gather(block);
      const auto each = [&](const float* known, bool weighing, const auto& apply) {
        for (int64_t s = 0; s < segments(block.row); ++s)
          if (part(block, segment(block.row, s), known, weighing, some))
            for (int64_t j = 0; j < block.count; ++j) apply(j, some + j * size);
      };
      for (int64_t j = 0; j < block.count; ++j) sums[j * size] = known[2 * j] = NEVER;
      for (int64_t j = 0; j < block.count; ++j) known[2 * j + 1] = 0.0f;
      if (layer.eager)
        each(nullptr, false, [&](int64_t j, const float* part) {
          if (part[0] != NEVER) join_sums(known + 2 * j, part);
        });
      each(layer.eager ? known : nullptr, true, [&](int64_t j, const float* part) {
        join(sums + j * size, part, layer.width);
      });
      for (int64_t j = 0; j < block.count; ++j) finish(block, j, sums + j * size);
    }
  }
};

}  // namespace attention
}  // namespace
