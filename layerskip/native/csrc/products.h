// Products of plain weights with few tokens, and conversions of a model's dtype.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "tiles.h"

namespace {

using at::BFloat16;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
constexpr bool MANY_REGISTERS = LANES >= 16;  // 32 vector registers rather than 16

// The name of an intrinsic for vectors, where they have the same ones but for their width.
#if defined(CPU_CAPABILITY_AVX512)
#define INTRINSIC(name) _mm512_##name
#elif defined(CPU_CAPABILITY_AVX2)
#define INTRINSIC(name) _mm256_##name
#endif

// ---------------------------------------------------------------------------------------------
// Numbers of a model's dtype S; arithmetic is in float32.

template <typename S>
inline Vec widened(const S* from) {
  if constexpr (std::is_same_v<S, float>) {
    return Vec::loadu(from);
  } else {
    Vec out;
    if constexpr (std::is_same_v<S, BFloat16>)
      at::vec::load_fp32_from_bf16(from, out);
    else
      at::vec::load_fp32_from_fp16(from, out);
    return out;
  }
}

template <typename S>
inline Vec widened(const S* from, int64_t count) {
  if (count >= LANES) return widened(from);
  float some[LANES] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = static_cast<float>(from[i]);
  return Vec::loadu(some);
}

template <typename S>
inline float rounded(float x) {
  return static_cast<float>(static_cast<S>(x));
}

// Each number rounded to S: to nearest, ties to even.
template <typename S>
inline Vec rounded(const Vec& x) {
  if constexpr (std::is_same_v<S, float>) return x;
  using Ints = at::vec::Vectorized<int32_t>;
  const Ints bits = at::vec::cast<int32_t>(x), odd = (bits >> Ints(16)) & Ints(1);
  const Vec near = at::vec::cast<float>((bits + odd + Ints(0x7fff)) & Ints(-0x10000));
  return Vec::blendv(Vec(NAN), near, x == x);
}

inline float sum(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// ---------------------------------------------------------------------------------------------
// Products of a weight with few tokens: the weight is read from memory once for all of them.
//
// A tile multiplies some rows of the weight with some tokens and keeps its sums in registers. More
// tokens are processed in steps, for which a group of rows stays in the L2 cache. The columns are
// cut so that the inputs of a step stay in the L1 cache, and the inputs are packed in the order of
// their use. Prefetches go to the L2 cache, because the L1 cache has only few slots for outstanding
// misses, which the loads need themselves. A single step prefetches AHEAD bytes ahead. Several
// steps share the prefetches of the next group, so that memory is never idle.

constexpr int64_t NEAR = 24 << 10;   // bytes of a cut's inputs
constexpr int64_t AHEAD = 16 << 10;  // bytes of weights between a load and its prefetch
constexpr int64_t GROUP = 240;       // the most rows whose sums are kept
constexpr int64_t KEPT = 256 << 10;  // bytes of weights that stay in a cache for further steps
// Rows of at most so many bytes are prefetched in the order of memory: the hardware prefetcher runs
// past the end of short rows. For wide vectors this has not been timed.
constexpr int64_t SHORT = MANY_REGISTERS ? 0 : 2 << 10;

// Prefetch a line into L2. With `__builtin_prefetch`, GCC spills the sums of some loops to memory.
inline void fetch_line(const void* from) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 (%0)" : : "r"(from));
#else
  __builtin_prefetch(from, 0, 2);
#endif
}

// A vector that is loaded once. Compilers would otherwise repeat the load for every use.
inline Vec held(Vec x) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__GNUC__)
  __m512 value = x;
  asm("" : "+v"(value));
  return Vec(value);
#else
  return x;
#endif
}

constexpr int power_above(int count) { return count <= 1 ? 1 : 2 * power_above((count + 1) / 2); }

// The sums of COUNT vectors. Two vectors are folded into one that alternates partial sums of both,
// and so on, which costs a fraction of COUNT single sums.
template <int COUNT>
inline void sums_of(const Vec* x, float* out) {
  constexpr int MAX = static_cast<int>(LANES), HERE = std::min(COUNT, MAX);
  constexpr int PADDED = power_above(HERE);
  Vec some[PADDED];
#pragma GCC unroll 16
  for (int i = 0; i < PADDED; ++i) some[i] = i < HERE ? x[i] : Vec(0.0f);
#pragma GCC unroll 4
  for (int half = PADDED / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const auto both = at::vec::interleave2(some[i], some[i + half]);
      some[i] = both.first + both.second;
    }
  float lanes[LANES];
  some[0].store(lanes);
  // the order in which more vectors would be folded: no sum depends on its neighbours
#pragma GCC unroll 4
  for (int64_t half = LANES / 2; half >= PADDED; half /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  std::copy_n(lanes, HERE, out);
  if constexpr (COUNT > HERE) sums_of<COUNT - HERE>(x + HERE, out + HERE);
}

// Weights are split into PARTS float32 vectors. A loaded vector of bfloat16 holds two: a shift
// extracts the even columns and a mask the odd ones.
template <typename S>
constexpr int PARTS = std::is_same_v<S, float> ? 1 : 2;

inline Vec part(const float* from, int) { return Vec::loadu(from); }

inline Vec part(const BFloat16* from, int odd) {
  using Ints = at::vec::Vectorized<int32_t>;
  const Ints both = Ints::loadu(from);
  return at::vec::cast<float>(odd ? both & Ints(static_cast<int32_t>(0xffff0000))
                                  : both << Ints(16));
}

// Some CPUs multiply pairs of bfloat16 and add both products to a float32 sum. There the weight is
// used as it is, and the inputs, which the model has rounded anyway, are packed as bfloat16.
#if defined(CPU_CAPABILITY_AVX512) && defined(__GNUC__)
inline bool has_pairs() { return __builtin_cpu_supports("avx512bf16"); }
inline Vec add_pairs(Vec sums, Vec a, Vec b) {
  __m512 out = sums;
  // inline assembly, because the intrinsic would need a file compiled for CPUs that have it
  asm("vdpbf16ps %2, %1, %0" : "+v"(out) : "v"(__m512(a)), "v"(__m512(b)));
  return Vec(out);
}
#else
inline bool has_pairs() { return false; }
inline Vec add_pairs(Vec sums, Vec, Vec) { return sums; }
#endif

// Stores a vector's numbers rounded to bfloat16.
inline void store_rounded(const Vec& x, BFloat16* to) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__GNUC__) && !defined(EMULATED_TILES)
  __m256i out;
  asm("vcvtneps2bf16 %1, %0" : "=v"(out) : "v"(__m512(x)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), out);
#else
  float all[LANES];
  x.store(all);
  std::copy_n(all, LANES, to);
#endif
}

// What to prefetch: after `every` vectors, one line of weights for each row of a tile. These lines
// are `apart` numbers from each other and `on` numbers from the next ones. And at every step, one
// line of the inputs that are needed next, `inputs_on` numbers behind the last one.
template <typename S>
struct Fetch {
  const S* at;
  int64_t every, apart, on;
  const float* inputs;
  int64_t inputs_on;
};

// Adds the products of a tile over `span` columns to its sums. Inputs are ordered by columns, then
// by tokens.
template <typename S, bool PAIRS, int ROWS, int TOKENS>
[[gnu::always_inline]] inline void accumulate(const S* weight, int64_t columns, int64_t span,
                                              const float* x, Fetch<S> fetch,
                                              Vec (&sums)[TOKENS][ROWS]) {
  constexpr int64_t STEP = PARTS<S> * LANES;
  const int64_t whole = span / STEP * STEP;
  S rest[ROWS][STEP];
  if (whole < span)  // before the loop: a call after it would spill its sums
    for (int r = 0; r < ROWS; ++r) {
      std::fill_n(rest[r], STEP, S(0));
      std::copy_n(weight + r * columns + whole, span - whole, rest[r]);
    }
  const auto step = [&](const S* at, int64_t row) {
#pragma GCC unroll 2
    for (int p = 0; p < (PAIRS ? 1 : PARTS<S>); ++p) {
      Vec w[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        w[r] = PAIRS ? Vec::loadu(at + r * row) : part(at + r * row, p);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        const Vec input = held(Vec::loadu(x + t * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
          sums[t][r] = PAIRS ? add_pairs(sums[t][r], w[r], input)
                             : at::vec::fmadd(w[r], input, sums[t][r]);
      }
      x += TOKENS * LANES;
    }
  };
  int64_t left = 1;
  for (int64_t k = 0; k < whole; k += STEP) {
    if (--left == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) fetch_line(fetch.at + r * fetch.apart);
      fetch.at += fetch.on;
      left = fetch.every;
    }
    fetch_line(fetch.inputs);
    fetch.inputs += fetch.inputs_on;
    step(weight + k, columns);
  }
  if (whole < span) step(rest[0], STEP);
}

// Adds the sums of a tile's vectors to `out`, whose tokens are STRIDE numbers apart.
template <int64_t STRIDE, int TOKENS, int ROWS>
[[gnu::always_inline]] inline void add_totals(const Vec (&sums)[TOKENS][ROWS], float* out) {
  float totals[TOKENS * ROWS];
  sums_of<TOKENS * ROWS>(&sums[0][0], totals);
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) out[t * STRIDE + r] += totals[t * ROWS + r];
}

// Adds the sums of a tile over `span` columns to sums_out.
template <typename S, bool PAIRS, int ROWS, int TOKENS>
inline void tile(const S* weight, int64_t columns, int64_t span, const float* x, Fetch<S> fetch,
                 float* sums_out) {
  Vec sums[TOKENS][ROWS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[t][r] = Vec(0.0f);
  accumulate<S, PAIRS, ROWS, TOKENS>(weight, columns, span, x, fetch, sums);
  add_totals<GROUP>(sums, sums_out);
}

// The most tokens of a step, and the rows of a tile: as many sums as the registers hold.
template <typename S>
constexpr int MOST = MANY_REGISTERS ? 8 : PARTS<S> == 1 ? 4 : 6;

template <typename S, int TOKENS>
constexpr int ROWS_WITH = MANY_REGISTERS   ? (TOKENS <= 2 ? 8 : TOKENS <= 6 ? 4 : 3)
                          : PARTS<S> == 1 ? (TOKENS == 1 ? 8 : TOKENS <= 3 ? 4 : 3)
                                          : (TOKENS == 1 ? 8 : TOKENS == 2 ? 4 : 2);

// Calls a function with a number of 1 to MOST as a constant.
template <int MOST, typename Call>
inline void with_constant(int64_t number, const Call& call) {
  if constexpr (MOST > 1)
    if (number < MOST) return with_constant<MOST - 1>(number, call);
  call(std::integral_constant<int, MOST>());
}

// Divides tokens into steps of at most `most`, whose lengths differ by at most one.
struct Steps {
  int64_t tokens, most, count = (tokens + most - 1) / most;
  int64_t first(int64_t step) const { return tokens * step / count; }
  int64_t length(int64_t step) const { return first(step + 1) - first(step); }
};

// How columns are cut. Sums add their cuts in order, so cuts must not depend on how many tokens
// there are.
template <typename S>
struct Cuts {
  int64_t columns, span, count;
  bool pairs;

  Cuts(int64_t columns, bool pairs) : columns(columns), pairs(pairs) {
    const int64_t most = NEAR / (pairs ? 2 : 4) / MOST<S>;
    const int64_t pieces = (columns + most - 1) / most;
    span = ((columns + pieces - 1) / pieces + 31) / 32 * 32;
    count = (columns + span - 1) / span;
  }
  // The floats of a token's packed inputs: of one cut, and of all.
  int64_t room() const { return pairs ? span / 2 : span; }
  int64_t width() const { return room() * count; }
};

// An upper bound of `width()`.
inline int64_t packed_width(int64_t columns) { return columns + columns / 5 + 128; }

// Packs a token's inputs of one cut, padded to its span with zeros, a vector every `stride` floats.
template <typename S>
inline void pack(const float* x, int64_t count, int64_t span, bool pairs, float* to,
                 int64_t stride) {
  constexpr int64_t STEP = PARTS<S> * LANES;
  float rest[STEP];
  for (int64_t k = 0; k < span; k += STEP) {
    const float* from = x + k;
    if (k + STEP > count) {
      std::fill_n(rest, STEP, 0.0f);
      if (k < count) std::copy_n(from, count - k, rest);
      from = rest;
    }
    const Vec first = Vec::loadu(from);
    if constexpr (PARTS<S> == 1) {
      first.store(to);
    } else {
      const Vec second = Vec::loadu(from + LANES);
      if (pairs) {
        at::vec::convert_from_float<S>(first, second).store(to);
      } else {
        const auto [even, odd] = at::vec::deinterleave2(first, second);
        even.store(to);
        odd.store(to += stride);
      }
    }
    to += stride;
  }
}

// Whether weights of S in a model of M are multiplied as pairs of bfloat16 numbers: those of a
// float32 model are widened instead, because its inputs are not rounded.
template <typename S, typename M>
constexpr bool PAIRED = PARTS<S> == 2 && std::is_same_v<S, M>;

// Packs inputs (tokens, columns) into `room` for products with weights of S. `inputs(t)` points to
// those of a token. Only tokens begin to end are packed, so that threads can share the work.
template <typename S, typename Inputs>
void pack_inputs(const Inputs& inputs, int64_t columns, int64_t tokens, float* room,
                 int64_t begin, int64_t end, bool pairs) {
  const Steps steps{tokens, MOST<S>};
  const Cuts<S> cuts(columns, pairs);
  for (int64_t step = 0; step < steps.count; ++step) {
    const int64_t first = steps.first(step), length = steps.length(step);
    for (int64_t t = std::max(begin, first); t < std::min(end, first + length); ++t) {
      const float* x = inputs(t);
      for (int64_t cut = 0; cut < cuts.count; ++cut) {
        const int64_t k = cut * cuts.span, count = std::min(cuts.span, columns - k);
        float* to = room + first * cuts.width() + cut * length * cuts.room() + (t - first) * LANES;
        pack<S>(x + k, count, cuts.span, cuts.pairs, to, length * LANES);
      }
    }
  }
}

// The same for inputs x (tokens, columns) of a model of M.
template <typename S, typename M = S>
void pack_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end) {
  if constexpr (PAIRED<S, M>)
    if (!tiles::refusal()) return tiles::pack_inputs(x, columns, tokens, room, begin, end);
  pack_inputs<S>([&](int64_t t) { return x + t * columns; }, columns, tokens, room, begin, end,
                 PAIRED<S, M> && has_pairs());
}

// The outputs for the sums of some rows: bias added, and rounded to the model's dtype.
template <typename M, typename O>
inline void finish(const float* sums, const M* bias, int64_t count, O* out) {
  int64_t i = 0;
  if constexpr (std::is_same_v<O, float>)
    for (; i + LANES <= count; i += LANES) {
      const Vec some = Vec::loadu(sums + i);
      rounded<M>(bias ? some + widened(bias + i) : some).store(out + i);
    }
  for (; i < count; ++i)
    out[i] = static_cast<O>(rounded<M>(bias ? sums[i] + static_cast<float>(bias[i]) : sums[i]));
}

template <typename S>
bool short_rows(int64_t columns) {
  return columns * static_cast<int64_t>(sizeof(S)) <= SHORT;
}

// Rows first to last, at most GROUP, times the TOKENS packed inputs of one of several steps. `then`
// points to what is read afterwards.
template <typename S, bool PAIRS, typename O, int TOKENS, int ROWS = ROWS_WITH<S, TOKENS>,
          typename M>
void few(const S* weight, const M* bias, int64_t first, int64_t last, const Cuts<S>& cuts,
         const float* packed, O* out, int64_t out_stride, const S* then, int64_t step,
         int64_t steps) {
  constexpr int64_t LINE = 64 / sizeof(S);
  constexpr int64_t VECTORS = std::max<int64_t>(1, 64 / (PARTS<S> * LANES * sizeof(S)));
  const int64_t columns = cuts.columns;
  const int64_t bytes = ROWS * cuts.span * static_cast<int64_t>(sizeof(S));
  // In rows. Each of several steps prefetches its part of the same rows of the next group.
  const int64_t ahead = steps == 1 ? std::max<int64_t>(1, AHEAD / bytes) * ROWS : last - first;
  const bool in_order = steps == 1 && short_rows<S>(columns);
  alignas(64) float sums[TOKENS * GROUP] = {};
  for (int64_t cut = 0; cut < cuts.count; ++cut) {
    const int64_t k = cut * cuts.span, here = std::min(cuts.span, columns - k);
    const float* x = packed + cut * TOKENS * cuts.room();
    // Each row of the group prefetches its part of the inputs of the next step.
    const int64_t part = steps > 1 ? TOKENS * cuts.room() / (last - first) : 0;
    const int64_t on = part * ROWS * PARTS<S> * LANES / cuts.span;
    // After the last row of a cut come the first rows of the next cut, or what `then` points to.
    const S* next = steps > 1              ? then + k + here * step / steps
                    : cut + 1 < cuts.count ? weight + first * columns + k + cuts.span
                                           : then;
    for (int64_t row = first; row < last;) {
      const int64_t later = row + ahead;
      const S* from = weight + row * columns + k;
      const Fetch<S> fetch{later < last ? from + ahead * columns : next + (later - last) * columns,
                           VECTORS * steps, in_order ? LINE : columns,
                           in_order ? ROWS * LINE : LINE,
                           x + (steps > 1 ? TOKENS * cuts.width() : 0) + (row - first) * part,
                           on};
      float* to = sums + row - first;
      if (row + ROWS <= last) {
        tile<S, PAIRS, ROWS, TOKENS>(from, columns, here, x, fetch, to);
        row += ROWS;
      } else {
        tile<S, PAIRS, 1, TOKENS>(from, columns, here, x, fetch, to);
        ++row;
      }
    }
  }
  for (int t = 0; t < TOKENS; ++t)
    finish(sums + t * GROUP, bias ? bias + first : nullptr, last - first,
           out + t * out_stride + first);
}

template <typename S, bool PAIRS, typename M, typename O>
void multiply(const S* weight, const M* bias, int64_t first, int64_t last, int64_t columns,
              const float* inputs, int64_t tokens, O* out, int64_t out_stride, const S* then) {
  const Steps steps{tokens, MOST<S>};
  const Cuts<S> cuts(columns, PAIRS);
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(S));
  const int64_t group =
      steps.count == 1 ? GROUP : std::clamp<int64_t>(KEPT / row_bytes / 24 * 24, 24, GROUP);
  for (int64_t row = first; row < last; row += group) {
    const int64_t end = std::min(last, row + group);
    const S* next = end < last ? weight + end * columns : then;
    for (int64_t step = 0; step < steps.count; ++step) {
      const float* packed = inputs + steps.first(step) * cuts.width();
      O* here = out + steps.first(step) * out_stride;
      if (tokens == 1 && short_rows<S>(columns)) {
        few<S, PAIRS, O, 1, 4>(weight, bias, row, end, cuts, packed, here, out_stride, next, 0, 1);
        continue;
      }
      with_constant<MOST<S>>(steps.length(step), [&](auto count) {
        few<S, PAIRS, O, count>(weight, bias, row, end, cuts, packed, here, out_stride, next, step,
                                steps.count);
      });
    }
  }
}

// out = x weight^T + bias for rows first to last of the weight, where x is packed. `then` points to
// what is read afterwards.
template <typename S, typename M, typename O>
void product(const S* weight, const M* bias, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, O* out, int64_t out_stride, const S* then) {
  if constexpr (PAIRED<S, M>) {
    if (!tiles::refusal())
      return tiles::product(weight, first, last, columns, inputs, tokens, then,
                            [&](int64_t t, int64_t row, int64_t count, const float* sums) {
                              finish(sums, bias ? bias + row : nullptr, count,
                                     out + t * out_stride + row);
                            });
    if (has_pairs())
      return multiply<S, true>(weight, bias, first, last, columns, inputs, tokens, out, out_stride,
                               then);
  }
  multiply<S, false>(weight, bias, first, last, columns, inputs, tokens, out, out_stride, then);
}

}  // namespace
