// Products of plain weights with few tokens, and numbers of a model's dtype.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

using at::BFloat16;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
constexpr bool MANY_REGISTERS = LANES >= 16;  // 32 vectors, not 16

// ---------------------------------------------------------------------------------------------
// Numbers of a model's dtype S, computed with as float32.

template <typename S>
inline Vec widened(const S* from) {
  if constexpr (std::is_same_v<S, float>) {
    return Vec::loadu(from);
  } else {
    Vec out;
    at::vec::load_fp32_from_bf16(from, out);
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

inline float sum(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// ---------------------------------------------------------------------------------------------
// Products of a weight with few tokens: it is read from memory once for up to MOST of them.
//
// A tile is some rows of the weight with all of these tokens, its sums in registers. Columns are
// cut so that the inputs stay in the nearest cache, and inputs are packed in the order of their use
// (rows whose distance is a power of two would fall into the same few places of that cache). What
// comes AHEAD bytes later is fetched into the second cache: into the first, it would take the few
// slots that wait for memory from the loads themselves.

constexpr int64_t MOST = MANY_REGISTERS ? 8 : 6;
constexpr int64_t NEAR = 24 << 10;   // bytes of inputs in a cut
constexpr int64_t AHEAD = 32 << 10;  // bytes of weights between a load and its prefetch
constexpr int64_t GROUP = 240;       // rows whose sums are kept aside
constexpr int64_t KEPT = 256 << 10;  // bytes of weights that stay in a cache for further tokens

// A vector that is loaded once: compilers fold loads into every use, which costs as many loads.
inline Vec held(Vec x) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__GNUC__)
  __m512 value = x;
  asm("" : "+v"(value));
  return Vec(value);
#else
  return x;
#endif
}

// The sums of COUNT vectors each, a power of two and at most LANES: two vectors become one that
// holds sums of both by turns, and so on, for a fraction of what COUNT single sums take.
template <int COUNT>
inline void sums_of(const Vec* x, float* out) {
  Vec some[COUNT];
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) some[i] = x[i];
#pragma GCC unroll 4
  for (int half = COUNT / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const auto both = at::vec::interleave2(some[i], some[i + half]);
      some[i] = both.first + both.second;
    }
  float lanes[LANES];
  some[0].store(lanes);
  // as further vectors would have been added to: a sum is the same whatever stands beside it
#pragma GCC unroll 4
  for (int64_t half = LANES / 2; half >= COUNT; half /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  std::copy_n(lanes, COUNT, out);
}

template <int COUNT>
inline void sums_of_any(const Vec* x, float* out) {
  constexpr int MAX = static_cast<int>(LANES);
  constexpr int HERE = COUNT >= 16 && MAX >= 16 ? 16 : COUNT >= 8 && MAX >= 8 ? 8
                     : COUNT >= 4               ? 4
                     : COUNT >= 2               ? 2
                                                : 1;
  sums_of<HERE>(x, out);
  if constexpr (COUNT > HERE) sums_of_any<COUNT - HERE>(x + HERE, out + HERE);
}

// Weights of one step are PARTS vectors: of bfloat16, two lie in what is loaded, those of the even
// columns and those of the odd ones, which a shift and a mask set apart.
template <typename S>
constexpr int PARTS = std::is_same_v<S, float> ? 1 : 2;

inline Vec part(const float* from, int) { return Vec::loadu(from); }

inline Vec part(const BFloat16* from, int odd) {
  using Ints = at::vec::Vectorized<int32_t>;
  const Ints both = Ints::loadu(from);
  return at::vec::cast<float>(odd ? both & Ints(static_cast<int32_t>(0xffff0000))
                                  : both << Ints(16));
}

// Some CPUs multiply bfloat16 in pairs and add both products to a float32 sum: then the weight is
// used as it lies, and inputs, which a model has rounded anyway, are packed as bfloat16.
#if defined(CPU_CAPABILITY_AVX512) && defined(__GNUC__)
inline bool has_pairs() { return __builtin_cpu_supports("avx512bf16"); }
inline Vec add_pairs(Vec sums, Vec a, Vec b) {
  __m512 out = sums;
  // no intrinsic: that would take a file of its own, compiled for machines that have it
  asm("vdpbf16ps %2, %1, %0" : "+v"(out) : "v"(__m512(a)), "v"(__m512(b)));
  return Vec(out);
}
#else
inline bool has_pairs() { return false; }
inline Vec add_pairs(Vec sums, Vec, Vec) { return sums; }
#endif

template <typename S, bool PAIRS, int ROWS, int TOKENS>
inline void tile(const S* weight, int64_t columns, int64_t span, const float* x, int64_t stride,
                 const S* fetch, float* sums_out) {
  Vec sums[TOKENS][ROWS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[t][r] = Vec(0.0f);
  constexpr int64_t STEP = PARTS<S> * LANES, LINE = 64 / sizeof(S);
  const auto step = [&](const S* at, int64_t row, int64_t k) {
#pragma GCC unroll 2
    for (int p = 0; p < (PAIRS ? 1 : PARTS<S>); ++p) {
      Vec w[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        w[r] = PAIRS ? Vec::loadu(at + r * row) : part(at + r * row, p);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        const Vec input = held(Vec::loadu(x + t * stride + (PAIRS ? k / 2 : k + p * LANES)));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
          sums[t][r] = PAIRS ? add_pairs(sums[t][r], w[r], input)
                             : at::vec::fmadd(w[r], input, sums[t][r]);
      }
    }
  };
  int64_t k = 0;
  for (; k + STEP <= span; k += STEP) {
    const S* at = weight + k;
    if (k % LINE == 0)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) __builtin_prefetch(fetch + r * columns + k, 0, 2);
    step(at, columns, k);
  }
  if (k < span) {
    S rest[ROWS][STEP] = {};
    for (int r = 0; r < ROWS; ++r) std::copy_n(weight + r * columns + k, span - k, rest[r]);
    step(rest[0], STEP, k);
  }
  float totals[TOKENS * ROWS];
  sums_of_any<TOKENS * ROWS>(&sums[0][0], totals);
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums_out[t * GROUP + r] += totals[t * ROWS + r];
}

// How columns are cut, however many tokens there are: sums are those of the cuts, one after another.
inline int64_t cut(int64_t columns) {
  constexpr int64_t most = NEAR / 4 / MOST;
  const int64_t pieces = (columns + most - 1) / most;
  return ((columns + pieces - 1) / pieces + 31) / 32 * 32;
}

// Numbers that packed inputs of a token take, at most.
inline int64_t packed_width(int64_t columns) { return columns + columns / 8 + 128; }

// Inputs of a cut in the order of their use, with zeros up to its span.
template <typename S>
inline void pack(const float* x, int64_t count, int64_t span, bool pairs, float* to) {
  if constexpr (PARTS<S> == 1) {
    std::copy_n(x, count, to);
    std::fill(to + count, to + span, 0.0f);
  } else if (pairs) {
    S* numbers = reinterpret_cast<S*>(to);
    for (int64_t k = 0; k < span; ++k) numbers[k] = static_cast<S>(k < count ? x[k] : 0.0f);
  } else {
    for (int64_t k = 0; k < span; k += 2 * LANES)
      for (int64_t i = 0; i < LANES; ++i)
        for (int64_t odd = 0; odd < 2; ++odd) {
          const int64_t column = k + 2 * i + odd;
          to[k + odd * LANES + i] = column < count ? x[column] : 0.0f;
        }
  }
}

// Rows first to last, at most GROUP, with TOKENS inputs that are packed in cuts; `then` is what is
// read after them.
template <typename S, bool PAIRS, typename O, int TOKENS>
void few(const S* weight, const S* bias, int64_t first, int64_t last, int64_t columns,
         const float* packed, O* out, int64_t out_stride, const S* then) {
  constexpr int ROWS = MANY_REGISTERS ? (TOKENS <= 2 ? 8 : TOKENS <= 6 ? 4 : 2)
                                      : (TOKENS == 1 ? 8 : TOKENS <= 3 ? 4 : TOKENS <= 6 ? 2 : 1);
  const int64_t span = cut(columns), stride = span / (PAIRS ? 2 : 1);
  const int64_t bytes = ROWS * span * static_cast<int64_t>(sizeof(S));
  const int64_t ahead = std::max<int64_t>(1, AHEAD / bytes) * ROWS;  // rows
  alignas(64) float sums[TOKENS * GROUP] = {};
  for (int64_t k = 0; k < columns; k += span) {
    const int64_t here = std::min(span, columns - k);
    const float* x = packed + k * TOKENS / (PAIRS ? 2 : 1);
    // behind the last row of a cut come the first ones of the next cut, or what is read then
    const S* next = k + span < columns ? weight + first * columns + k + span : then;
    for (int64_t row = first; row < last;) {
      const int64_t later = row + ahead;
      const S* from = weight + row * columns + k;
      const S* fetch = later < last ? from + ahead * columns : next + (later - last) * columns;
      float* to = sums + row - first;
      if (row + ROWS <= last) {
        tile<S, PAIRS, ROWS, TOKENS>(from, columns, here, x, stride, fetch, to);
        row += ROWS;
      } else {
        tile<S, PAIRS, 1, TOKENS>(from, columns, here, x, stride, fetch, to);
        ++row;
      }
    }
  }
  for (int t = 0; t < TOKENS; ++t)
    for (int64_t row = first; row < last; ++row) {
      const float value = sums[t * GROUP + row - first];
      out[t * out_stride + row] = static_cast<O>(
          rounded<S>(bias ? value + static_cast<float>(bias[row]) : value));
    }
}

// No step of one token behind seven full ones: all steps have as many, or one less.
struct Steps {
  int64_t tokens, count = (tokens + MOST - 1) / MOST;
  int64_t first(int64_t step) const { return tokens * step / count; }
  int64_t length(int64_t step) const { return first(step + 1) - first(step); }
};

// Inputs x (tokens, columns) for products with weights of S, in `room`: of the tokens of some steps,
// from `begin` to `end`.
template <typename S>
void pack_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end) {
  const Steps steps{tokens};
  const bool pairs = PARTS<S> == 2 && has_pairs();
  const int64_t span = cut(columns);
  room += begin * ((columns + span - 1) / span * span) / (pairs ? 2 : 1);
  for (int64_t step = 0; step < steps.count; ++step) {
    if (steps.first(step) < begin || steps.first(step) >= end) continue;
    for (int64_t k = 0; k < columns; k += span)
      for (int64_t t = steps.first(step); t < steps.first(step + 1); ++t) {
        pack<S>(x + t * columns + k, std::min(span, columns - k), span, pairs, room);
        room += pairs ? span / 2 : span;
      }
  }
}

template <typename S, bool PAIRS, typename O>
void multiply(const S* weight, const S* bias, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, O* out, int64_t out_stride, const S* then) {
  const Steps steps{tokens};
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(S));
  const int64_t group = steps.count == 1 ? GROUP : std::clamp<int64_t>(KEPT / row_bytes, 24, GROUP);
  for (int64_t row = first; row < last; row += group) {
    const int64_t end = std::min(last, row + group);
    const S* next = end < last ? weight + end * columns : then;
    const float* packed = inputs;
    for (int64_t step = 0; step < steps.count; ++step) {
      const int64_t count = steps.length(step), span = cut(columns);
      O* here = out + steps.first(step) * out_stride;
#define FEW(N) \
  case N: few<S, PAIRS, O, N>(weight, bias, row, end, columns, packed, here, out_stride, next); break;
      switch (count) { FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8) }
#undef FEW
      packed += count * ((columns + span - 1) / span * span) / (PAIRS ? 2 : 1);
    }
  }
}

// out = x weight^T + bias in rows first to last of the weight, of inputs that were packed; `then`
// is what is read next.
template <typename S, typename O>
void product(const S* weight, const S* bias, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, O* out, int64_t out_stride, const S* then) {
  if constexpr (PARTS<S> == 2)
    if (has_pairs())
      return multiply<S, true>(weight, bias, first, last, columns, inputs, tokens, out, out_stride,
                               then);
  multiply<S, false>(weight, bias, first, last, columns, inputs, tokens, out, out_stride, then);
}

}  // namespace
