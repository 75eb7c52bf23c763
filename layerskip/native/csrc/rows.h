// Weights that are read row by row, as files have them: plain numbers, and codes whose numbers are
// rounded one by one.
//
// A row has its codes, in units of 32 columns, then a scale of type T for each group of columns,
// then a zero for each group. A number is (code - zero) * scale, rounded to T. Where vectors can be
// looked up in, the 16 numbers that codes of 4 bits may mean are computed once for a group.
//
// Results are those of plain float32 weights with these numbers, whatever the number of tokens.

#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "codes.h"

namespace panels {
namespace {

constexpr int EACH = static_cast<int>(UNIT / LANES);  // vectors of a unit

// Numbers rounded to the type of the second argument, in float32.
inline Vec rounded_to(const Vec& x, float) { return x; }

// Veltkamp's splitting (Dekker 1971). The `asm` keeps compilers from merging its two steps. Trying
// all products of a bfloat16 and a code of up to 9 bits has shown that ties go to even.
inline Vec rounded_to(const Vec& x, BFloat16) {
#ifdef INTRINSIC
  Float wide = x * Vec(65537.0f);
  asm("" : "+v"(wide));
  return Vec(wide) - (Vec(wide) - x);
#else
  return rounded<BFloat16>(x);
#endif
}

inline Vec rounded_to(const Vec& x, Half) {
#ifdef INTRINSIC
  return Vec(INTRINSIC(cvtph_ps)(INTRINSIC(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT)));
#else
  float some[LANES];
  x.store(some);
  for (float& each : some) each = static_cast<float>(Half(each));
  return Vec::loadu(some);
#endif
}

// The scale and the zero point of a group.
struct Pair {
  Vec scale, zero;
  Pair(float scale, float zero) : scale(scale), zero(zero) {}
};

// A format has units of BYTES and, for each group, FACTORS numbers of type T, of which a `State` is
// made. `unpack` makes the numbers of a unit.
template <int64_t BYTES_, typename T_, int64_t FACTORS_>
struct InRows {
  using T = T_;
  using State = Pair;
  static constexpr int64_t BYTES = BYTES_, NUMBERS = UNIT, FACTORS = FACTORS_;
};

template <typename N>
struct Plain : InRows<UNIT * sizeof(N), N, 0> {
  static void unpack(const uint8_t* from, const Pair&, Vec (&out)[EACH]) {
    for (int i = 0; i < EACH; ++i) out[i] = widened(reinterpret_cast<const N*>(from) + i * LANES);
  }
};

template <typename T>
struct G8 : InRows<UNIT, T, 2> {
  static void unpack(const uint8_t* from, const Pair& by, Vec (&out)[EACH]) {
    for (int i = 0; i < EACH; ++i)
      out[i] = rounded_to((floats(bytes<uint8_t>(from + i * LANES)) - by.zero) * by.scale, T{});
  }
};

// E4M3: the bits of a half-precision number with a shorter exponent, which is 2^8 times too small.
template <typename T>
struct F8 : InRows<UNIT, T, 1> {
  static Vec value(const uint8_t* from) {
    uint16_t halves[LANES];
    for (int k = 0; k < LANES; ++k) halves[k] = static_cast<int8_t>(from[k]) << 7 & 0xbf80;
    return widened(reinterpret_cast<const Half*>(halves));
  }
  static void unpack(const uint8_t* from, const Pair& by, Vec (&out)[EACH]) {
    const Vec scale = by.scale * Vec(256.0f);
    for (int i = 0; i < EACH; ++i) out[i] = rounded_to(value(from + i * LANES) * scale, T{});
  }
};

// The numbers of codes first to first + LANES.
template <typename T>
inline Vec meant(int first, float scale, float zero) {
  return rounded_to((Vec::arange(static_cast<float>(first), 1.0f) - Vec(zero)) * Vec(scale), T{});
}

// The first 16 codes of a unit are the lower halves of its bytes.
#if defined(CPU_CAPABILITY_AVX512)
template <typename T>
struct G4 : InRows<16, T, 2> {
  struct State {
    __m512 numbers;
    State(float scale, float zero) : numbers(meant<T>(0, scale, zero)) {}
  };
  static void unpack(const uint8_t* from, const State& by, Vec (&out)[EACH]) {
    const __m512i codes = _mm512_cvtepu8_epi32(read<__m128i>(from));
    out[0] = _mm512_permutexvar_ps(codes, by.numbers);  // which ignores upper bits
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), by.numbers);
  }
};
#elif defined(CPU_CAPABILITY_AVX2)
template <typename T>
struct G4 : InRows<16, T, 2> {
  struct State {
    __m256 low, high;
    State(float scale, float zero)
        : low(meant<T>(0, scale, zero)), high(meant<T>(8, scale, zero)) {}
  };
  // Looks up codes of 4 bits, which begin at bit `places` of each lane.
  static Vec found(const State& by, __m256i codes, int places) {
    const __m256i code = _mm256_srli_epi32(codes, places);
    const __m256i upper = _mm256_slli_epi32(codes, 28 - places);  // a negative number from 8 on
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(by.low, code),
                            _mm256_permutevar8x32_ps(by.high, code), _mm256_castsi256_ps(upper));
  }
  static void unpack(const uint8_t* from, const State& by, Vec (&out)[EACH]) {
    for (int i = 0; i < 2; ++i) {
      const __m256i codes = reinterpret_cast<__m256i>(bytes<uint8_t>(from + i * LANES));
      out[i] = found(by, codes, 0), out[i + 2] = found(by, codes, 4);
    }
  }
};
#else
template <typename T>
struct G4 : InRows<16, T, 2> {
  static void unpack(const uint8_t* from, const Pair& by, Vec (&out)[EACH]) {
    for (int i = 0; i < UNIT; i += LANES) {
      const Vec codes = floats(bytes<uint8_t>(from + i % 16) >> i / 16 * 4 & 15);
      out[i / LANES] = rounded_to((codes - by.zero) * by.scale, T{});
    }
  }
};
#endif

template <typename F>
struct RowShape {
  int64_t units, groups, each, bytes;  // `each`: units of a group

  explicit RowShape(const Layout& layout)
      : units(layout.columns / UNIT),
        groups(F::FACTORS ? layout.columns / layout.group : 1),
        each(units / groups),
        bytes(layout.row_bytes) {}
  typename F::State state(const uint8_t* row, int64_t group) const {
    const uint8_t* at = row + units * F::BYTES + group * sizeof(typename F::T);
    const auto factor = [&](int64_t k) {
      if (k >= F::FACTORS) return 0.0f;
      return static_cast<float>(read<typename F::T>(at + k * groups * sizeof(typename F::T)));
    };
    return {factor(0), factor(1)};
  }
};

// Unpacks a row to float32.
template <typename F>
void unpack_row(const RowShape<F>& shape, const uint8_t* row, float* out) {
  for (int64_t group = 0, unit = 0; group < shape.groups; ++group) {
    const auto state = shape.state(row, group);
    for (; unit < (group + 1) * shape.each; ++unit, out += UNIT) {
      Vec numbers[EACH];
      fetch_line(row + unit * F::BYTES + AHEAD / 4);
      F::unpack(row + unit * F::BYTES, state, numbers);
      for (int i = 0; i < EACH; ++i) numbers[i].store(out + i * LANES);
    }
  }
}

constexpr int64_t BLOCK = 48;  // the most rows whose sums are kept for all cuts

// Adds the products of units first to last of ROWS rows with TOKENS packed inputs to `out`,
// (TOKENS, BLOCK). Prefetches as many bytes at `fetch`, and returns where they end.
template <typename F, int ROWS, int TOKENS>
const uint8_t* add_rows(const RowShape<F>& shape, const uint8_t* row, int64_t first, int64_t last,
                        const float* x, const uint8_t* fetch, float* out) {
  const int64_t pace = ROWS * shape.bytes / shape.units + 1;
  Vec sums[TOKENS][ROWS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[t][r] = Vec(0.0f);
  int64_t group = first / shape.each;
  for (int64_t unit = first; unit < last; ++group) {
    const int64_t end = std::min(last, (group + 1) * shape.each);
    const auto states = [&]<int... R>(std::integer_sequence<int, R...>) {
      return std::array{shape.state(row + R * shape.bytes, group)...};
    }(std::make_integer_sequence<int, ROWS>());
    for (; unit < end; ++unit, fetch += pace) {
#pragma GCC unroll 8
      for (int line = 0; line <= ROWS * F::BYTES / 64; ++line) fetch_line(fetch + 64 * line);
      Vec numbers[ROWS][EACH];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        F::unpack(row + r * shape.bytes + unit * F::BYTES, states[r], numbers[r]);
#pragma GCC unroll 8
      for (int i = 0; i < EACH; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t, x += LANES) {
          const Vec input = held(Vec::loadu(x));
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r)
            sums[t][r] = at::vec::fmadd(numbers[r][i], input, sums[t][r]);
        }
    }
  }
  add_totals<BLOCK>(sums, out);
  return fetch;
}

// A block of rows times the inputs of TOKENS tokens, (TOKENS, BLOCK).
template <typename F, int TOKENS>
void multiply_block(const RowShape<F>& shape, const uint8_t* block, int64_t rows,
                    const Cuts<float>& cuts, const float* inputs, const uint8_t* next, float* out) {
  constexpr int TILE = MANY_REGISTERS ? ROWS_WITH<float, TOKENS> : TOKENS <= 2 ? 4 : 2;
  std::fill_n(out, TOKENS * BLOCK, 0.0f);
  for (int64_t cut = 0; cut < cuts.count; ++cut) {
    const int64_t first = cut * cuts.span / UNIT;
    const int64_t last = std::min(shape.units, first + cuts.span / UNIT);
    const float* x = inputs + cut * TOKENS * cuts.room();
    int64_t row = 0;
    for (; row + TILE <= rows; row += TILE)
      next = add_rows<F, TILE, TOKENS>(shape, block + row * shape.bytes, first, last, x, next,
                                       out + row);
    for (; row < rows; ++row)
      next = add_rows<F, 1, TOKENS>(shape, block + row * shape.bytes, first, last, x, next,
                                    out + row);
  }
}

// Rows first to last times all tokens. For those of several steps, rows are unpacked to the L2
// cache and multiplied as plain rows are.
template <typename F>
void multiply_rows(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
                   const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  const RowShape<F> shape(layout);
  const Cuts<float> cuts(layout.columns, false);
  const Steps steps{tokens, ::MOST<float>};
  const bool once = steps.count == 1;
  const int64_t kept = once ? KEPT / 4 / shape.bytes : KEPT / 4 / layout.columns;
  const int64_t most = std::clamp<int64_t>(kept / 24 * 24, 24, once ? BLOCK : GROUP);
  static thread_local std::vector<float> room, many;
  if (!once) room.resize(most * layout.columns + 16), many.resize(tokens * most);
  float* unpacked = room.data();
  while (reinterpret_cast<uintptr_t>(unpacked) % 64) ++unpacked;
  float few[::MOST<float> * BLOCK], *sums = once ? few : many.data();
  for (int64_t row = first; row < last; row += most) {
    const int64_t rows = std::min(most, last - row);
    const uint8_t* block = weight + (row - first) * shape.bytes;
    if (once) {
      const uint8_t* next = row + rows < last ? block + rows * shape.bytes : then;
      with_constant<::MOST<float>>(tokens, [&](auto count) {
        multiply_block<F, count>(shape, block, rows, cuts, inputs, next, sums);
      });
    } else {
      for (int64_t r = 0; r < rows; ++r)
        unpack_row(shape, block + r * shape.bytes, unpacked + r * layout.columns);
      ::multiply<float, false>(unpacked, static_cast<const float*>(nullptr), 0, rows,
                               layout.columns, inputs, tokens, sums, most, unpacked);
    }
    for (int64_t t = 0; t < tokens; ++t) write(t, row, rows, sums + t * (once ? BLOCK : most));
  }
}

// Packs inputs as for plain float32 weights.
inline void pack_rows(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                      int64_t end, const int32_t* order) {
  static thread_local std::vector<float> moved;
  moved.resize(order ? columns : 0);
  ::pack_inputs<float>([&](int64_t t) {
    const float* from = x + t * columns;
    for (int64_t i = 0; order && i < columns; ++i) moved[i] = from[order[i]];
    return order ? moved.data() : from;
  }, columns, tokens, room, begin, end, false);
}

}  // namespace
}  // namespace panels
