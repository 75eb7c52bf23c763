// Products of codes of few bits with inputs in fixed point.
//
// The inputs of a part become integers of 24 bits: multiples of a power of two, the smallest with
// which the largest of them fits. So an input keeps all of its own bits, unless it is smaller than
// its neighbours, and the sums of codes times inputs are exact, in whatever order and by whatever
// instruction they are made. Integers are split into three bytes each, their digits, because CPUs
// multiply bytes. The exact sum of a part is rounded to float32 once, then scaled.

#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "codes.h"
#include "unit.h"

namespace panels {
namespace {

using Sums = integers::Ints;  // of ROWS rows
using integers::Floats;

constexpr int DIGITS = 3;
constexpr int MOST = MANY_REGISTERS ? 4 : 2;  // the most tokens of a step on vectors
constexpr int64_t SIDE = 4;     // the most panels that are multiplied together
constexpr int64_t SPELL = 16;   // steps for which the matrix unit unpacks codes once

// The bytes that the integers of a part are split into, in planes. An integer is low + 2^8 middle +
// 2^16 high in three signed bytes. For codes of 4 bits, which the matrix unit reads twice, once
// multiplied by 16, it is split into two numbers of 12 bits, and each of these into 16 upper + lower.
template <int64_t PART_, bool TWELVES_>
struct Split {
  static constexpr int64_t PART = PART_;
  static constexpr bool TWELVES = TWELVES_;
  static constexpr int64_t WIDTH = TWELVES ? 2 * PART : PART;  // bytes of a token in a plane
  static constexpr int64_t PLANES = TWELVES ? 2 : 3;

  static void put(int32_t x, int8_t* to, int64_t plane) {
    if constexpr (TWELVES) {
      const int32_t low = ((x + 0x800) & 0xfff) - 0x800, high = (x - low) >> 12;
      to[0] = static_cast<int8_t>((low + 8) >> 4);
      to[PART] = static_cast<int8_t>(((low + 8) & 15) - 8);
      to[plane] = static_cast<int8_t>((high + 8) >> 4);
      to[plane + PART] = static_cast<int8_t>(((high + 8) & 15) - 8);
    } else {
      const int32_t bytes = (x + 0x808080) ^ 0x808080;
      for (int k = 0; k < 3; ++k) to[k * plane] = static_cast<int8_t>(bytes >> 8 * k);
    }
  }
};

// How a format's inputs are split for the matrix unit, or for vectors.
template <typename F, bool UNIT>
using SplitOf = Split<F::PART, UNIT && F::BITS == 4>;

// The inputs of a step's tokens in fixed point. `T` tokens have, for each part in turn: their bytes
// (PLANES, T, WIDTH), lowest first; what the integers are multiples of; the sums of the inputs; and
// the sums of the integers without their highest bytes, and of these.
template <typename Split>
struct Fixed {
  int8_t* bytes;
  float *units, *sums;
  int32_t *lows, *highs;

  static constexpr int64_t BYTES = Split::PLANES * Split::WIDTH;  // of a part and a token
  // The room of all tokens begins at `base`, and the first `before` tokens use theirs.
  Fixed(void* base, int64_t parts, int64_t before, int64_t tokens) {
    bytes = static_cast<int8_t*>(base) + before * parts * (BYTES + 16);
    units = reinterpret_cast<float*>(bytes + parts * tokens * BYTES);
    sums = units + parts * tokens;
    lows = reinterpret_cast<int32_t*>(sums + parts * tokens);
    highs = lows + parts * tokens;
  }

  // Puts the inputs of a part of token t of `tokens`.
  void put(const float* x, int64_t part, int64_t t, int64_t tokens) const {
    constexpr int64_t PART = Split::PART;
    int32_t most = 0, low = 0, high = 0;
    for (int64_t i = 0; i < PART; ++i) most = std::max(most, bits_of(x[i]) & 0x7fffffff);
    const bool finite = most < 0x7f800000;
    // The upper byte of 12 bits is at most 127, so that the largest integer is 0x7f77ff. Inputs
    // below 2^-100 count as 0.
    const int32_t exponent = bits_of(float_of(most) * (0x1.000002p23f / 0x7f77ff)) >> 23;
    const bool some = finite && exponent > 26;
    const Vec by(some ? float_of((276 - exponent) << 23) : 0.0f);
    float integers[PART];
    for (int64_t i = 0; i < PART; i += LANES)
      (some ? (Vec::loadu(x + i) * by).round() : by).store(integers + i);
    int8_t* to = bytes + part * tokens * BYTES + t * Split::WIDTH;
    for (int64_t i = 0; i < PART; ++i) {
      const auto integer = static_cast<int32_t>(integers[i]);
      Split::put(integer, to + i, tokens * Split::WIDTH);
      low += integer, high += (integer + 0x8080) >> 16;
    }
    const int64_t at = part * tokens + t;
    units[at] = finite ? some ? float_of((exponent - 22) << 23) : 0.0f
                       : std::numeric_limits<float>::quiet_NaN();
    sums[at] = static_cast<float>(low) * units[at];
    lows[at] = low - high * 65536;
    highs[at] = high;
  }

  static int32_t bits_of(float x) { return read<int32_t>(reinterpret_cast<uint8_t*>(&x)); }
  static float float_of(int32_t bits) { return read<float>(reinterpret_cast<uint8_t*>(&bits)); }
};

// Adds a part to the sums of a token's rows: those of codes times the planes of bytes.
template <typename F, typename Split>
inline Floats added(const Floats& total, const Sums* sums, const Floats& by, const Floats& to,
                    float unit, float inputs) {
  using namespace integers;
  Floats rounded;
  if constexpr (Split::TWELVES) {
    rounded = scaled(sums[1], same(4096.0f), converted(sums[0]));
  } else {
    const Sums low = each<Sums>([&](int i) { return sums[0].v[i] + (sums[1].v[i] << 8); });
    rounded = scaled(sums[2], same(65536.0f), converted(low));
  }
  const Floats out = scaled(rounded, times(by, unit), total);
  return F::ZERO < 0 ? scaled(to, same(inputs), out) : out;
}

// The factors of a part of a panel's rows.
template <typename F, typename Shape>
inline void pair_of(const Shape& shape, const uint8_t* panel, int64_t unit, int64_t part,
                    Floats& by, Floats& to) {
  float both[2][ROWS];
  for (int64_t lane = 0; lane < ROWS; lane += LANES) {
    Vec scale(0.0f), offset(0.0f);
    shape.pair(panel, unit, part, lane, scale, offset);
    scale.store(both[0] + lane), offset.store(both[1] + lane);
  }
  by = integers::load(both[0]), to = integers::load(both[1]);
}

// PANELS panels times COUNT tokens, (COUNT, PANELS, ROWS).
template <typename F, int PANELS, int COUNT, bool DOTS, typename Shape>
void by_vectors(const Shape& shape, const uint8_t* panel, const Fixed<SplitOf<F, false>>& x,
                const uint8_t* next, float* out) {
  constexpr int LINES = static_cast<int>(F::PART) / 4;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / (PANELS * shape.CODES));
  Floats totals[COUNT][PANELS];
  for (auto& some : totals)
    for (Floats& each : some) each = integers::zero();
  for (int64_t unit = 0, at = 0; unit < shape.units; ++unit) {
    const int64_t later = unit + ahead;
    for (int p = 0; p < PANELS; ++p)
      shape.fetch((later < shape.units ? panel : next) + p * shape.bytes, later % shape.units);
    for (int part = 0; part < shape.PARTS; ++part, ++at) {
      const uint8_t* codes = panel + shape.codes + unit * shape.CODES;
      const int8_t* bytes = x.bytes + at * COUNT * x.BYTES;
      Sums sums[COUNT][PANELS][DIGITS];
#pragma GCC unroll 8
      for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 4
          for (int d = 0; d < DIGITS; ++d) sums[t][p][d] = {};
#pragma GCC unroll 8
      for (int n = 0; n < LINES; ++n) {
        Sums line[PANELS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p) line[p] = F::line(codes + p * shape.bytes, part * LINES + n);
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 4
          for (int d = 0; d < DIGITS; ++d) {
            const integers::Four<DOTS> four(bytes + (d * COUNT + t) * F::PART + 4 * n);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
              sums[t][p][d] = integers::dots<DOTS, F::BITS>(sums[t][p][d], line[p], four);
          }
      }
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; ++p) {
        Floats by, to;
        pair_of<F>(shape, panel + p * shape.bytes, unit, part, by, to);
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t) {
          const int64_t one = at * COUNT + t;
          Sums* some = sums[t][p];
          if (F::ZERO > 0) {
            some[0] = integers::plus(some[0], -F::ZERO * x.lows[one]);
            some[2] = integers::plus(some[2], -F::ZERO * x.highs[one]);
          }
          totals[t][p] = added<F, SplitOf<F, false>>(totals[t][p], some, by, to, x.units[one],
                                                     x.sums[one]);
        }
      }
    }
  }
  for (int t = 0; t < COUNT; ++t)
    for (int p = 0; p < PANELS; ++p) integers::store(totals[t][p], out + (t * PANELS + p) * ROWS);
}

// Steps for the matrix unit: all have room for as many tokens, so that it is configured once.
struct Even {
  int64_t tokens, count = (tokens + tiles::MOST - 1) / tiles::MOST;
  int64_t each = (tokens + count - 1) / count;
  int64_t first(int64_t step) const { return std::min(tokens, step * each); }
};

// Unpacks a part of a panel for the matrix unit.
template <typename F>
inline void unpack_part(const uint8_t* codes, int part, uint8_t* to) {
  constexpr int LINES = static_cast<int>(F::PART) / 4;
#pragma GCC unroll 8
  for (int n = 0; n < LINES; ++n) {
    Sums line = F::line(codes, part * LINES + n);
    if (F::ZERO > 0) line = integers::minus_bytes(line, F::ZERO);
    if (SplitOf<F, true>::TWELVES) {
      integers::store(integers::times_16(line), to + 64 * n);
      integers::store(line, to + 64 * (LINES + n));
    } else {
      integers::store(line, to + 64 * n);
    }
  }
}

// Sums are (tokens, rows), inputs (tokens, columns), weights (lines, rows of 4 columns).
template <typename Split>
tiles::Shapes shapes_of(int64_t tokens) {
  tiles::Shapes out;
  for (int plane = 0; plane < Split::PLANES; ++plane) {
    out.set(plane, tokens, 4 * ROWS);
    out.set(5 + plane, tokens, Split::WIDTH);
  }
  out.set(4, Split::WIDTH / 4, 4 * ROWS);
  return out;
}

// Up to SIDE panels times some steps of tokens, (tokens, SIDE, ROWS), on the matrix unit. Codes are
// unpacked once for all steps, in chunks that stay in the L1 cache.
template <typename F, typename Shape>
void by_unit(const Shape& shape, const uint8_t* panel, int64_t panels, void* room,
             const Even& steps, int64_t first, int64_t last, const uint8_t* next, float* out) {
  using Split = SplitOf<F, true>;
  constexpr int64_t SIZE = Split::WIDTH * ROWS;  // bytes of an unpacked part
  constexpr int64_t CHUNK = 4 * Shape::PARTS;    // parts
  constexpr bool SIGNED = F::ZERO > 0;
  const int64_t parts = shape.units * shape.PARTS, begin = steps.first(first);
  alignas(64) uint8_t lines[CHUNK][SIDE][SIZE];
  alignas(64) int32_t sums[Split::PLANES][tiles::MOST * ROWS];
  const auto each_plane = [](const auto& call) {
    call(std::integral_constant<int, 0>());
    call(std::integral_constant<int, 1>());
    if constexpr (Split::PLANES > 2) call(std::integral_constant<int, 2>());
  };
  Floats by[CHUNK][SIDE], to[CHUNK][SIDE];
  std::fill_n(out, (steps.first(last) - begin) * SIDE * ROWS, 0.0f);
  for (int64_t start = 0; start < parts; start += CHUNK) {
    const int64_t here = std::min(CHUNK, parts - start);
    for (int64_t i = 0; i < here; ++i)
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t unit = (start + i) / shape.PARTS, part = (start + i) % shape.PARTS;
        const uint8_t* from = panel + p * shape.bytes;
        if (first == 0 && part == 0) shape.fetch(next + p * shape.bytes, unit);
        unpack_part<F>(from + shape.codes + unit * shape.CODES, static_cast<int>(part), lines[i][p]);
        pair_of<F>(shape, from, unit, part, by[i][p], to[i][p]);
      }
    for (int64_t step = first; step < last; ++step) {
      const Fixed<Split> x(room, parts, steps.first(step), steps.each);
      const int64_t tokens = steps.first(step + 1) - steps.first(step);
      // Products of a part and a panel. They are stored, and the next ones begun, before they are
      // added, so that the unit does not wait for the vectors.
      const auto multiply = [&](int64_t number) {
        const int64_t i = number / panels, p = number % panels;
        const int8_t* bytes = x.bytes + (start + i) * steps.each * x.BYTES;
        tiles::load<4>(lines[i][p], 64);
        const auto add = [&](auto plane) {
          constexpr int FROM = 5 + plane;
          if (p == 0) tiles::load<FROM>(bytes + plane * steps.each * Split::WIDTH, Split::WIDTH);
          tiles::zero<plane>();
          tiles::add_bytes<plane, 4, FROM, SIGNED>();
        };
        each_plane(add);
      };
      const int64_t count = panels * here;
      multiply(0);
      for (int64_t number = 0; number < count; ++number) {
        each_plane([&](auto plane) { tiles::store<plane>(sums[plane], 4 * ROWS); });
        if (number + 1 < count) multiply(number + 1);
        const int64_t i = number / panels, p = number % panels;
        const Floats scale = by[i][p], offset = to[i][p];
        const float* units = x.units + (start + i) * steps.each;
        const float* inputs = x.sums + (start + i) * steps.each;
        float* total = out + ((steps.first(step) - begin) * SIDE + p) * ROWS;
#pragma GCC unroll 4
        for (int64_t t = 0; t < tokens; ++t, total += SIDE * ROWS) {
          Sums some[Split::PLANES];
          for (int plane = 0; plane < Split::PLANES; ++plane)
            some[plane] = integers::load(sums[plane] + t * ROWS);
          integers::store(added<F, Split>(integers::load(total), some, scale, offset, units[t],
                                          inputs[t]), total);
        }
      }
    }
  }
}

// Indexed by the tokens of a step, less 1.
template <typename F, int PANELS, bool DOTS, typename Shape, int... COUNT>
constexpr auto some_by_vectors(std::integer_sequence<int, COUNT...>) {
  return std::array{by_vectors<F, PANELS, COUNT + 1, DOTS, Shape>...};
}

// Panels that vectors multiply together, with so many tokens.
constexpr int64_t side_of(int64_t tokens) { return !MANY_REGISTERS ? 1 : tokens == 1 ? SIDE : 2; }

// Rows first to last times all tokens, on the matrix unit or in steps of MOST.
template <typename F, typename Shape>
void fixed_product(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
                   const float* inputs, int64_t tokens, const uint8_t* then, Write write,
                   bool on_unit) {
  static const bool dots = integers::has_dots();
  const Shape shape(layout);
  void* room = const_cast<float*>(inputs);
  const Steps steps{tokens, MOST};
  const Even even{tokens};
  const int64_t side = on_unit ? SIDE : side_of(steps.length(0));
  static thread_local std::vector<float> totals;
  totals.resize(on_unit ? std::min(tokens, SPELL * tiles::MOST) * SIDE * ROWS : MOST * SIDE * ROWS);
  if (on_unit) tiles::configure(shapes_of<SplitOf<F, true>>(even.each));
  for (int64_t row = first; row < last;) {
    const int64_t left = (last - row + ROWS - 1) / ROWS;
    const int64_t here = left >= side ? side : on_unit ? left : 1;
    const uint8_t* at = weight + (row - first) / ROWS * shape.bytes;
    const int64_t rows = std::min(here * ROWS, last - row);
    const uint8_t* next = row + rows < last ? at + here * shape.bytes : then;
    const auto done = [&](int64_t begin, int64_t end, int64_t panels) {
      for (int64_t t = begin; t < end; ++t)
        write(t, row, rows, totals.data() + (t - begin) * panels * ROWS);
    };
    for (int64_t step = 0; on_unit && step < even.count; step += SPELL) {
      const int64_t end = std::min(even.count, step + SPELL);
      by_unit<F>(shape, at, here, room, even, step, end, next, totals.data());
      done(even.first(step), even.first(end), SIDE);
    }
    for (int64_t step = 0; !on_unit && step < steps.count; ++step) {
      const int64_t before = steps.first(step), count = steps.length(step);
      const Fixed<SplitOf<F, false>> x(room, shape.units * shape.PARTS, before, count);
      const auto with = [&](auto panels, auto known) {
        static constexpr auto SOME =
            some_by_vectors<F, decltype(panels)::value, decltype(known)::value, Shape>(
                std::make_integer_sequence<int, MOST>());
        SOME[count - 1](shape, at, x, step ? at : next, totals.data());
      };
      const auto either = [&](auto panels) {
        if (dots) with(panels, std::bool_constant<integers::KNOWS_DOTS>());
        else with(panels, std::false_type());
      };
      if (here == 4) either(std::integral_constant<int, MANY_REGISTERS ? 4 : 1>());
      else if (here == 2) either(std::integral_constant<int, MANY_REGISTERS ? 2 : 1>());
      else either(std::integral_constant<int, 1>());
      done(before, before + count, here);
    }
    row += rows;
  }
  if (on_unit) tiles::release();
}

// Packs the inputs of tokens begin to end for the matrix unit, or for vectors.
template <typename F>
void fixed_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                  int64_t end, const int32_t* order, bool on_unit) {
  constexpr int64_t PART = F::PART;
  const int64_t parts = columns / PART;
  const auto put = [&](auto split, int64_t first, int64_t last, int64_t count) {
    const Fixed<decltype(split)> to(room, parts, first, count);
    for (int64_t t = std::max(begin, first); t < std::min(end, last); ++t)
      for (int64_t part = 0; part < parts; ++part) {
        float sorted[PART];
        for (int64_t i = 0; order && i < PART; ++i)
          sorted[i] = x[t * columns + order[part * PART + i]];
        to.put(order ? sorted : x + t * columns + part * PART, part, t - first, count);
      }
  };
  const Steps steps{tokens, MOST};
  const Even even{tokens};
  for (int64_t step = 0; step < (on_unit ? even.count : steps.count); ++step)
    if (on_unit) put(SplitOf<F, true>(), even.first(step), even.first(step + 1), even.each);
    else put(SplitOf<F, false>(), steps.first(step), steps.first(step + 1), steps.length(step));
}

}  // namespace
}  // namespace panels
