// The kernels of attention: scores of queries for a segment of slots, and weighted sums of values.
//
// Keys are packed so that one vector holds a piece (4 numbers) of several slots' keys. A score is
// the sum of four adjacent numbers. `attention.h` explains segments and parts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "products.h"
#include "sublayer.h"

namespace {
namespace attention {

constexpr int64_t SEGMENT = 256;        // slots
constexpr int64_t LINE = LANES;         // slots whose scores are computed together
constexpr int64_t GROUPS = 4;           // vectors per piece of a line's keys
constexpr int64_t BLOCK = 96;           // queries whose scores are kept
constexpr int ASKING = MANY_REGISTERS ? 6 : 3;  // queries whose scores are computed together
constexpr int WEIGHING = 6;                     // and whose values are summed together
constexpr int64_t UNPACKED = 24;                // more queries repay the packing of values
constexpr int SPAN = MANY_REGISTERS ? 4 : 2;    // vectors of a value, summed together
constexpr int64_t FEW = LANES / 4;              // queries of which one vector holds a piece each
constexpr int64_t DISTANCE = 8 << 10;           // bytes that few queries prefetch ahead
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The slots first to last, which a query sees besides those of the layer's sink.
struct Query {
  int64_t first, last;
};

// Where to prefetch while the keys or values (slots, width) of a segment are read: `distance` slots
// ahead, and past the end of the segment, at `then`, which is read next.
template <typename S>
struct Ahead {
  const S *rows, *then;
  int64_t left, width;

  Ahead(const S* rows, int64_t slots, int64_t width, int64_t distance, const S* then)
      : rows(rows + distance * width), then(then), left(slots - distance), width(width) {}
  Ahead behind(int64_t numbers) const {
    Ahead moved = *this;
    moved.rows += numbers, moved.then += numbers;
    return moved;
  }
  const S* at(int64_t slot) const {
    return slot < left ? rows + slot * width : then + (slot - left) * width;
  }
};

inline int64_t up_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// The floats that a packed key or value takes, and those of a query's part.
inline int64_t padded(int64_t width) { return up_to(width, LANES); }
inline int64_t part_size(int64_t width) { return padded(width) + 2; }

// The larger of two numbers each; b if one of them is no number.
inline Vec larger(const Vec& a, const Vec& b) { return at::vec::clamp_min(b, a); }

// e^x for x <= 0: 2^(n + r) with |r| <= 1/2. The polynomial is the one with the least relative error
// (9e-8) of those that are exactly 1 at 0. The result is 0 at minus infinity. COUNT vectors take
// turns, because a CPU cannot look far enough ahead to begin the next before one is done.
template <int COUNT>
inline void raise(Vec (&x)[COUNT]) {
  Vec n[COUNT], y[COUNT];
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i) {
    // Below this bound the result underflows to 0; the bound keeps the exponent in range.
    x[i] = larger(Vec(-200.0f), x[i]) * Vec(1.44269504088896341f);
    n[i] = x[i].round();
    x[i] = x[i] - n[i];
    y[i] = Vec(1.3264728769e-3f);
  }
#pragma GCC unroll 5
  for (const float factor : {9.6715131831e-3f, 5.5507337445e-2f, 2.4022242077e-1f,  //
                             6.9314697760e-1f, 1.0f})
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) y[i] = at::vec::fmadd(y[i], x[i], Vec(factor));
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i) {
#if defined(CPU_CAPABILITY_AVX512)
    x[i] = _mm512_scalef_ps(y[i], n[i]);
#else
    using Ints = at::vec::Vectorized<int32_t>;
    const Vec some = at::vec::maximum(n[i], Vec(-126.0f));
    const Ints exponent = (at::vec::convert_to_int_of_same_size<float>(some) + Ints(127)) << Ints(23);
    x[i] = Vec::blendv(y[i] * at::vec::cast<float>(exponent), Vec(0.0f), n[i] < Vec(-126.0f));
#endif
  }
}

// Calls apply(how many vectors, where they begin) for the vectors of `count` numbers, four at a time.
template <typename Apply>
inline void by_four(int64_t count, const Apply& apply) {
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) apply(std::integral_constant<int, 4>(), i);
  for (; i < count; i += LANES) apply(std::integral_constant<int, 1>(), i);
}

// Transposes LANES / 4 rows in pieces of 4 numbers: vector i gets the i-th piece of every row.
inline void pieces(const Vec* rows, float* to, int64_t stride) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), ba = _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44), dc = _mm512_shuffle_f32x4(c, d, 0xee);
  _mm512_storeu_ps(to, _mm512_shuffle_f32x4(ab, cd, 0x88));
  _mm512_storeu_ps(to + stride, _mm512_shuffle_f32x4(ab, cd, 0xdd));
  _mm512_storeu_ps(to + 2 * stride, _mm512_shuffle_f32x4(ba, dc, 0x88));
  _mm512_storeu_ps(to + 3 * stride, _mm512_shuffle_f32x4(ba, dc, 0xdd));
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_storeu_ps(to, _mm256_permute2f128_ps(rows[0], rows[1], 0x20));
  _mm256_storeu_ps(to + stride, _mm256_permute2f128_ps(rows[0], rows[1], 0x31));
#else
  float some[LANES];
  for (int64_t r = 0; r < LANES / 4; ++r) {
    rows[r].store(some);
    for (int64_t k = 0; k < LANES / 4; ++k) std::copy_n(some + 4 * k, 4, to + k * stride + 4 * r);
  }
#endif
}

// A vector that repeats a piece of 4 numbers.
inline Vec repeated(const float* piece) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_broadcast_f32x4(_mm_loadu_ps(piece));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(piece));
#else
  float all[LANES];
  for (int64_t i = 0; i < LANES; ++i) all[i] = piece[i % 4];
  return Vec::loadu(all);
#endif
}

// Sums of numbers 0 and 2, and of 1 and 3, of each piece: for each piece, of a, b, a, and b.
inline Vec folded(const Vec& a, const Vec& b) {
#ifdef INTRINSIC
  return INTRINSIC(add_ps)(INTRINSIC(unpacklo_ps)(a, b), INTRINSIC(unpackhi_ps)(a, b));
#else
  float of[2][LANES], out[LANES];
  a.store(of[0]), b.store(of[1]);
  for (int64_t i = 0; i < LANES; ++i) {
    const float* from = of[i % 2] + i / 4 * 4 + i % 4 / 2;
    out[i] = from[0] + from[2];
  }
  return Vec::loadu(out);
#endif
}

// The sums of the pieces of four vectors: number 4 r + g is the sum of piece r of vector g.
inline Vec piece_sums(const Vec (&x)[GROUPS]) {
  return folded(folded(x[0], x[2]), folded(x[1], x[3]));
}

// Stores the first `count` pieces of a vector, SEGMENT numbers apart.
inline void store_pieces(const Vec& x, int64_t count, float* to) {
#pragma GCC unroll 4
  for (int64_t r = 0; r < LANES / 4; ++r)
    if (r < count) std::memcpy(to + r * SEGMENT, reinterpret_cast<const float*>(&x) + 4 * r, 16);
}

// The kernels for keys and values of type S, multiplied in bfloat16 pairs or widened to float32.
template <typename S, bool PAIRS>
struct Kernel {
  static constexpr int64_t PACK = PAIRS ? 2 : 1;  // numbers of S per multiplied lane
  static constexpr int64_t QUERIES = BLOCK;       // the most that go through a text together

  // The lanes that a packed key takes, in whole pieces.
  static int64_t depth(int64_t width) { return up_to((width + PACK - 1) / PACK, 4); }

  static Vec add(const Vec& sums, const Vec& a, const Vec& b) {
    return PAIRS ? add_pairs(sums, a, b) : at::vec::fmadd(a, b, sums);
  }

  // Packs a query x (width,). Its numbers have been rounded to S already.
  static void pack_query(const float* x, int64_t width, float* to) {
    std::fill_n(to, depth(width), 0.0f);
    if constexpr (PAIRS) {
      S* numbers = reinterpret_cast<S*>(to);
      for (int64_t i = 0; i < width; ++i) numbers[i] = static_cast<S>(x[i]);
    } else {
      std::copy_n(x, width, to);
    }
  }

  // Packs a line of `count` keys: vector (i, g) holds piece i of the keys g, g + 4, ... `rest` is
  // scratch memory for keys that must be padded.
  static void pack_keys(const S* keys, int64_t count, int64_t width, float* rest, float* to) {
    const int64_t deep = depth(width);
    const auto turn = [&](const auto* from, int64_t stride) {
      for (int64_t i = 0; i < deep; i += LANES)
        for (int64_t g = 0; g < GROUPS; ++g) {
          Vec rows[LANES / 4];
          for (int64_t r = 0; r < LANES / 4; ++r) rows[r] = widened(from + (4 * r + g) * stride + i);
          pieces(rows, to + (i * GROUPS / 4 + g) * LANES, GROUPS * LANES);
        }
    };
    if (count == LINE && width == deep * PACK && deep % LANES == 0)
      return turn(reinterpret_cast<const std::conditional_t<PAIRS, float, S>*>(keys), deep);
    const int64_t stride = padded(deep);
    std::fill_n(rest, LINE * stride, 0.0f);
    for (int64_t s = 0; s < count; ++s) {
      const S* key = keys + s * width;
      if constexpr (PAIRS)
        std::memcpy(rest + s * stride, key, width * sizeof(S));
      else
        for (int64_t i = 0; i < width; i += LANES)
          widened(key + i, width - i).store(rest + s * stride + i);
    }
    turn(rest, stride);
  }

  // Packs values (count, width) as (count / PACK, padded width), pairs in the order of `place`.
  static void pack_values(const S* values, int64_t count, int64_t width, float* to) {
    const int64_t wide = padded(width);
    for (int64_t s = 0; s < count; s += PACK) {
      const S* value = values + s * width;
      float* row = to + s / PACK * wide;
      if constexpr (PAIRS) {
        const bool both = s + 1 < count;
        int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
        for (; both && i + 2 * LANES <= width; i += 2 * LANES) {
          const __m512i a = _mm512_loadu_si512(value + i), b = _mm512_loadu_si512(value + width + i);
          _mm512_storeu_si512(row + i, _mm512_unpacklo_epi16(a, b));
          _mm512_storeu_si512(row + i + LANES, _mm512_unpackhi_epi16(a, b));
        }
#endif
        S* pairs = reinterpret_cast<S*>(row);
        for (; i < wide; ++i) {
          const int64_t at = place(i, width);
          pairs[2 * i] = at < width ? value[at] : S(0.0f);
          pairs[2 * i + 1] = at < width && both ? value[width + at] : S(0.0f);
        }
      } else {
        for (int64_t i = 0; i < wide; i += LANES)
          widened(value + i, std::max<int64_t>(0, width - i)).store(row + i);
      }
    }
  }

  // Which number of a value `pack_values` puts at place i.
  static int64_t place(int64_t i, int64_t width) {
    const int64_t first = i / (2 * LANES) * 2 * LANES, j = i - first;
    if (!PAIRS || first + 2 * LANES > width) return i;
    return first + j % LANES / 4 * 8 + j / LANES * 4 + j % 4;
  }

  // The scores of COUNT queries for a line of slots.
  template <int COUNT>
  static void ask(const float* keys, int64_t deep, const float* q, float* out) {
    Vec sums[COUNT][GROUPS];
#pragma GCC unroll 6
    for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) sums[j][g] = Vec(0.0f);
    for (int64_t i = 0; i < deep; i += 4) {
      Vec x[COUNT];
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; ++j) x[j] = repeated(q + j * deep + i);
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) {
        const Vec some = held(Vec::loadu(keys + (i * GROUPS / 4 + g) * LANES));
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; ++j) sums[j][g] = add(sums[j][g], some, x[j]);
      }
    }
#pragma GCC unroll 6
    for (int j = 0; j < COUNT; ++j) piece_sums(sums[j]).store(out + j * SEGMENT);
  }

  // Whether keys can be multiplied without packing.
  static bool as_they_lie(int64_t width) {
    return (PAIRS || std::is_same_v<S, float>) && width % (LANES * PACK) == 0;
  }

  // Packs at most FEW queries by pieces: each vector holds the same piece of every query.
  static void pack_few(const float* q, int64_t count, int64_t deep, float* to) {
    Vec rows[FEW];
    for (int64_t i = 0; i < deep; i += LANES) {
      for (int64_t r = 0; r < FEW; ++r) rows[r] = Vec::loadu(q + std::min(r, count - 1) * deep + i);
      pieces(rows, to + i * FEW, LANES);
    }
  }

  // The scores of at most FEW queries for a line of slots, summed in the order of `ask`. The keys
  // are read unpacked, each piece for all queries at once, because packing costs more than it saves
  // for so few queries. The same number of bytes is prefetched from `next` on.
  static void ask_few(const float* keys, int64_t deep, const float* q, int64_t count, const S* next,
                      float* out) {
    constexpr int64_t SLOTS = 2 * GROUPS;
    const char* fetched = reinterpret_cast<const char*>(next);
    for (int64_t s = 0; s < LINE; s += SLOTS, keys += SLOTS * deep) {
      Vec sums[2][GROUPS];
#pragma GCC unroll 8
      for (int k = 0; k < SLOTS; ++k) sums[k / GROUPS][k % GROUPS] = Vec(0.0f);
      for (int64_t i = 0; i < deep; i += 4, fetched += 128) {
        fetch_line(fetched);
        fetch_line(fetched + 64);
        const Vec x = held(Vec::loadu(q + i * FEW));
#pragma GCC unroll 8
        for (int k = 0; k < SLOTS; ++k) {
          Vec& sum = sums[k / GROUPS][k % GROUPS];
          sum = add(sum, repeated(keys + k * deep + i), x);
        }
      }
#pragma GCC unroll 2
      for (int g = 0; g < 2; ++g)
        store_pieces(piece_sums(sums[g]), count, out + s + GROUPS * g);
    }
  }

  // The first WIDE vectors of what `pack_values` makes of two slots' values.
  template <int WIDE>
  static void paired(const S* values, int64_t width, Vec* out) {
#if defined(CPU_CAPABILITY_AVX512)
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; v += 2) {
      const __m512i a = _mm512_loadu_si512(values + v * LANES);
      const __m512i b = _mm512_loadu_si512(values + width + v * LANES);
      out[v] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
      out[v + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
    }
#endif
  }

  // Weighted sums of some slots' values for COUNT queries, WIDE vectors of each. LIE: the values
  // are pairs that are not packed. AHEAD: prefetch as many numbers as are read. `more`: add to the
  // sums that `out` already holds.
  template <int COUNT, int WIDE, bool LIE, bool AHEAD>
  static void weigh(const float* values, int64_t stride, int64_t steps, const float* powers,
                    float* out, int64_t out_stride, Ahead<S> ahead, bool more) {
    Vec sums[COUNT][WIDE];
#pragma GCC unroll 6
    for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; ++v)
        sums[j][v] = more ? Vec::loadu(out + j * out_stride + v * LANES) : Vec(0.0f);
    for (int64_t s = 0; s < steps; ++s) {
      Vec some[WIDE];
      if constexpr (AHEAD) {
        const S* next = ahead.at(s * PACK);
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; ++v) fetch_line(next + v * LANES * PACK);
      }
      if constexpr (LIE) {
        paired<WIDE>(reinterpret_cast<const S*>(values + s * stride), stride, some);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; ++v) some[v] = held(Vec::loadu(values + s * stride + v * LANES));
      }
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

  template <int WIDE, bool LIE, bool AHEAD>
  static void weigh_all(int64_t count, const float* values, int64_t stride, int64_t steps,
                        const float* powers, float* out, int64_t out_stride, Ahead<S> ahead,
                        bool more) {
    with_constant<WEIGHING>(count, [&](auto queries) {
      weigh<queries, WIDE, LIE, AHEAD>(values, stride, steps, powers, out, out_stride, ahead, more);
    });
  }

  // Turns scores into exponentials of their difference to the largest score. Returns that score and
  // the sum of the exponentials. If the largest score and the sum of the whole text are `known`,
  // they are used instead, and the results are probabilities.
  static std::pair<float, float> soften(const Sublayer& layer, const Query& query, int64_t begin,
                                        int64_t end, const float* known, float* scores) {
    // Counted from `begin`: slots before `none` belong to the sink, though never beyond the query's
    // own; then the query sees those from `first` until `last`.
    const int64_t sink = std::min(layer.sink, query.last + 1);
    const int64_t none = std::clamp<int64_t>(sink - begin, 0, end - begin);
    const int64_t first = std::clamp<int64_t>(query.first - begin, none, end - begin);
    const int64_t last = std::clamp<int64_t>(query.last + 1 - begin, none, end - begin);
    Vec scale(static_cast<float>(layer.scale));
    const Vec cap(static_cast<float>(layer.softcap));
    for (int64_t s = 0; layer.eager && s < end - begin; s += LANES) {
      Vec some = rounded<S>(rounded<S>(Vec::loadu(scores + s)) * scale);
      if (layer.softcap > 0) some = rounded<S>(rounded<S>(rounded<S>(some / cap).tanh()) * cap);
      some.store(scores + s);
    }
    if (layer.eager) scale = Vec(1.0f);
    std::fill(scores + none, scores + first, NEVER);
    std::fill(scores + last, scores + (end - begin), NEVER);
    Vec most[4] = {Vec(NEVER), Vec(NEVER), Vec(NEVER), Vec(NEVER)}, sums(0.0f);
    by_four(end - begin, [&](auto count, int64_t s) {
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) most[i] = larger(most[i], Vec::loadu(scores + s + i * LANES));
    });
    const Vec all = larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale;
    float largest = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return larger(a, b); }, all);
    if (largest == NEVER) return {NEVER, 0.0f};
    if (known) largest = known[0];
    by_four(end - begin, [&](auto count, int64_t s) {
      Vec some[count];
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i)
        some[i] = at::vec::fmsub(Vec::loadu(scores + s + i * LANES), scale, Vec(largest));
      raise(some);
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) {
        const int64_t at = s + i * LANES;
        sums = sums + some[i];
        if (known) some[i] = some[i] / Vec(known[1]);
        // as the library rounds probabilities before it multiplies values
        if constexpr (PAIRS)
          store_rounded(some[i], reinterpret_cast<S*>(scores) + at);
        else
          rounded<S>(some[i]).store(scores + at);
      }
    });
    return {largest, sum(sums)};
  }

  static void fetch(const S* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(S)) fetch_line(from + i);
  }

  // Computes the parts (see `part_size`) of a block of queries for slots begin to end of one
  // segment; begin is the start of a line. `keys` and `values` point to slot begin, and `q` holds
  // packed queries. `known` may hold the largest score of each query and the sum of its
  // exponentials. Without `weighing`, only these two are computed. From slot `shared` on, also the
  // start of a line, the queries see what `own` gathers for each token (see `Attention::Own`).
  template <typename Own>
  static void run(const Sublayer& layer, const Query* queries, int64_t count, const float* q,
                  const S* keys, const S* values, int64_t begin, int64_t shared, int64_t end,
                  const Own& own, const float* known, bool weighing, float* room, float* parts) {
    const int64_t width = layer.width, wide = padded(width), deep = depth(width);
    const int64_t slots = shared - begin;
    float *line = room, *rest = line + LINE * wide, *others = rest + LINE * wide;
    float* scores = others + SEGMENT * wide;
    S* gathered = reinterpret_cast<S*>(scores + BLOCK * SEGMENT);
    const bool few = MANY_REGISTERS && count <= FEW && as_they_lie(width);
    if (few) pack_few(q, count, deep, others);
    // With many queries, computing takes longer than reading, so a whole segment is prefetched.
    const int64_t near = up_to(DISTANCE / (width * static_cast<int64_t>(sizeof(S))), LINE);
    const int64_t distance = count <= WEIGHING ? std::min(slots, near) : slots;
    // The scores of queries from .. to for some slots, which begin `place` slots after `begin`.
    const auto ask_all = [&](const S* keys, const S* values, int64_t slots, int64_t place,
                             int64_t from, int64_t to) {
      const Ahead<S> ahead(keys, slots, width, distance, values);
      for (int64_t s = 0; s < slots; s += LINE) {
        // This keeps memory busy: reading keys prefetches the values, reading values the next keys.
        if (few && values && s + LINE <= slots) {
          ask_few(reinterpret_cast<const float*>(keys + s * width), deep, others, count,
                  ahead.at(s), scores + s);
          continue;
        }
        if (values) fetch(ahead.at(s), LINE * width);
        pack_keys(keys + s * width, std::min(LINE, slots - s), width, rest, line);
        for (int64_t j = from; j < to; j += ASKING) {
          const float* x = q + j * deep;
          float* out = scores + j * SEGMENT + place + s;
          with_constant<ASKING>(std::min<int64_t>(ASKING, to - j),
                                [&](auto some) { ask<some>(line, deep, x, out); });
        }
      }
    };
    ask_all(keys, values, slots, 0, 0, count);
    own.each(end, [&](int64_t from, int64_t to, int64_t more, int64_t token) {
      own.gather(own.keys, token, shared, more, width, gathered);
      ask_all(gathered, nullptr, more, slots, from, to);
    });
    const int64_t size = part_size(width);
    const auto soften_all = [&](int64_t from, int64_t to, int64_t slots) {
      for (int64_t j = from; j < to; ++j) {
        float* part = parts + j * size;
        const auto [most, total] =
            soften(layer, queries[j], begin, begin + up_to(slots, LINE),
                   known ? known + 2 * j : nullptr, scores + j * SEGMENT);
        part[0] = most, part[1] = total;
      }
    };
    if (shared == end) soften_all(0, count, slots);
    own.each(end, [&](int64_t from, int64_t to, int64_t more, int64_t) {
      soften_all(from, to, slots + more);
    });
    if (!weighing) return;
    // Adds the weighted values of some slots, which begin `place` slots after `begin`, to the sums
    // of queries from .. to.
    const auto weigh_some = [&](const S* values, int64_t slots, int64_t place, int64_t from,
                                int64_t to, const S* next) {
      const float* rows = reinterpret_cast<const float*>(values);
      const Ahead<S> ahead(values, slots, width, distance, next);
      int64_t lying = 0;  // slots whose values are read unpacked: few queries do not repay packing
      if (PAIRS && MANY_REGISTERS && next && to - from <= UNPACKED && width % (SPAN * LANES) == 0)
        lying = slots / PACK * PACK;
      // Those of slots first to last, which lie unpacked or are packed in `rows`.
      const auto weigh_rows = [&](int64_t first, int64_t last, bool lie) {
        for (int64_t j = from; j < to; j += WEIGHING)
          for (int64_t i = 0; i < wide;) {
            const bool span = i + SPAN * LANES <= wide;
            const bool fetches = next && first == 0 && j == from;  // the next segment only once
            const auto weigh =
                PAIRS && lie ? (fetches ? weigh_all<SPAN, true, true> : weigh_all<SPAN, true, false>)
                : span       ? (fetches ? weigh_all<SPAN, false, true> : weigh_all<SPAN, false, false>)
                             : (fetches ? weigh_all<1, false, true> : weigh_all<1, false, false>);
            weigh(std::min<int64_t>(WEIGHING, to - j),
                  lie ? reinterpret_cast<const float*>(values + i) : rows + i, wide,
                  (last - first + PACK - 1) / PACK, scores + j * SEGMENT + (place + first) / PACK,
                  parts + j * size + 2 + i, size, ahead.behind(i * PACK), place + first > 0);
            i += (span ? SPAN : 1) * LANES;
          }
      };
      if (lying) weigh_rows(0, lying, true);
      if (lying == slots) return;
      if (!std::is_same_v<S, float> || width != wide) {
        pack_values(values + lying * width, slots - lying, width, others);
        rows = others;
      }
      weigh_rows(lying, slots, false);
    };
    if (slots) weigh_some(values, slots, 0, 0, count, shared == end ? keys + slots * width : nullptr);
    own.each(end, [&](int64_t from, int64_t to, int64_t more, int64_t token) {
      if (!more) return;
      own.gather(own.values, token, shared, more, width, gathered);
      weigh_some(gathered, more, slots, from, to, nullptr);
    });
  }
};

}  // namespace attention
}  // namespace
