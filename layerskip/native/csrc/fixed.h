// Products of codes of few bits with inputs as integers.
//
// The inputs of a part become multiples of a number, its step. For weights of files, integers have
// 24 bits, and the step is a power of two, the smallest with which the largest input fits: inputs
// keep all their bits unless they are smaller than their neighbours, so that results are no less
// exact than sums in float32. For copies that only drafts use, they have 8 bits.
//
// Integers are split into signed bytes, because CPUs multiply bytes. Sums of codes times integers
// are exact, in whatever order and by whatever instruction they are made. The sum of a part is
// rounded to float32, scaled, and added to the sums of the parts before it.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "codes.h"

namespace panels {
namespace {

constexpr int64_t SIDE = 4;  // the most panels that are multiplied together
// Lines that are unrolled: without wide vectors, compilers would take minutes to unroll them all.
constexpr int UNROLLED = KNOWS_DOTS ? 8 : 1;

// The most tokens of a step on vectors, and the panels that are multiplied together then: as many
// as the registers have room for.
template <typename F>
constexpr int MOST = F::ROUGH && KNOWS_DOTS ? 8 : 4;
constexpr int64_t side_of(int64_t tokens) {
  if (tokens == 1) return SIDE;
  return MANY_REGISTERS ? 2 : 1;
}

// How integers are split into PIECES, which lie in planes. 1: a single byte. 2: low + 2^16 high, in
// 16 bits each, for CPUs that multiply these faster than bytes. 3: low + 2^8 middle + 2^16 high. 4:
// low + 2^12 high, each of which is 16 upper + lower; the matrix unit multiplies codes of 4 bits
// with both in one step, since 16 times a code is a byte, too.
template <int64_t PART_, int PIECES_>
struct Split {
  static constexpr int64_t PART = PART_;
  static constexpr int PIECES = PIECES_, PLANES = PIECES == 4 ? 2 : PIECES;
  static constexpr int SIZE = PIECES % 2 ? 1 : 2;  // bytes of a column in a plane
  static constexpr int64_t WIDTH = SIZE * PART;  // bytes of a token in a plane

  // Puts the integer of column i of a token.
  static void put(int32_t x, int64_t i, int8_t* to, int64_t plane) {
    to += i;
    if constexpr (PIECES == 2) {
      constexpr int PLACES[] = {0, 2, 1, 3};
      const auto low = static_cast<int16_t>(x), high = static_cast<int16_t>((x - low) >> 16);
      to += 2 * (i / 4 * 4 + PLACES[i % 4]) - i;
      std::memcpy(to, &low, 2), std::memcpy(to + plane, &high, 2);
    } else if constexpr (PIECES == 4) {
      const int32_t low = ((x + 0x808) & 0xfff) - 0x808, both[] = {low, (x - low) >> 12};
      for (int k = 0; k < 2; ++k) {
        to[k * plane] = static_cast<int8_t>((both[k] + 8) >> 4);
        to[k * plane + PART] = static_cast<int8_t>(((both[k] + 8) & 15) - 8);
      }
    } else {
      const int32_t bytes = (x + 0x808080) ^ 0x808080;
      for (int k = 0; k < PIECES; ++k) to[k * plane] = static_cast<int8_t>(bytes >> 8 * k);
    }
  }
};
template <typename F, bool DOTS>
using ForVectors = Split<F::PART, F::ROUGH ? 1 : F::BITS == 8 && !DOTS ? 2 : 3>;
template <typename F>
using ForUnit = Split<F::PART, F::ROUGH ? 1 : F::BITS == 4 ? 4 : 3>;

// The inputs of some tokens as integers. Part after part, the room holds for all tokens the planes
// of bytes (PLANES, tokens, WIDTH), the steps, the sums of the inputs, the sums of the last plane's
// integers, and the sums of the integers below it.
template <typename Split>
struct Fixed {
  int8_t* bytes;
  float *steps, *sums;
  int32_t *lows, *highs;

  static constexpr int64_t BYTES = Split::PLANES * Split::WIDTH;  // of a part and a token
  Fixed() = default;
  // The room of all tokens begins at `base`, and the first `before` tokens use theirs.
  Fixed(void* base, int64_t parts, int64_t before, int64_t tokens) {
    bytes = static_cast<int8_t*>(base) + before * parts * (BYTES + 16);
    steps = reinterpret_cast<float*>(bytes + parts * tokens * BYTES);
    sums = steps + parts * tokens;
    lows = reinterpret_cast<int32_t*>(sums + parts * tokens);
    highs = lows + parts * tokens;
  }

  // Puts the inputs of a part of token t of `tokens`. Those below 2^-100 count as 0.
  void put(const float* x, int64_t part, int64_t t, int64_t tokens) const {
    int32_t most = 0, low = 0, high = 0;
    for (int64_t i = 0; i < Split::PART; ++i) most = std::max(most, bits_of(x[i]) & 0x7fffffff);
    const bool finite = most < 0x7f800000, some = finite && most > 0x0d800000;
    float step = 0, by = 0;
    if (some && Split::PIECES == 1) {
      step = float_of(most) / 127, by = 127 / float_of(most);
    } else if (some) {
      // the largest integer whose upper byte is at most 127, however it is split
      const int32_t exponent = bits_of(float_of(most) * (0x1.000002p23f / 0x7f77f7)) >> 23;
      step = float_of((exponent - 22) << 23), by = float_of((276 - exponent) << 23);
    }
    float integers[Split::PART];
    for (int64_t i = 0; i < Split::PART; i += LANES)
      (some ? (Vec::loadu(x + i) * Vec(by)).round() : Vec(0.0f)).store(integers + i);
    int8_t* to = bytes + part * tokens * BYTES + t * Split::WIDTH;
    for (int64_t i = 0; i < Split::PART; ++i) {
      const auto integer = static_cast<int32_t>(integers[i]);
      Split::put(integer, i, to, tokens * Split::WIDTH);
      low += integer, high += (integer + (Split::PIECES == 2 ? 0x8000 : 0x8080)) >> 16;
    }
    const int64_t at = part * tokens + t;
    steps[at] = finite ? step : std::numeric_limits<float>::quiet_NaN();
    sums[at] = static_cast<float>(low) * steps[at];
    lows[at] = low - high * 65536, highs[at] = high;
  }

  static int32_t bits_of(float x) { return read<int32_t>(&x); }
  static float float_of(int32_t bits) { return read<float>(&bits); }
};

// Adds a part to a token's sums of the rows of a register. `plane(k)` are the sums of codes times the
// k-th plane, less those of the codes' offset.
template <typename F, typename Split, typename Plane>
[[gnu::always_inline]] inline Vec added(const Vec& total, const Fixed<Split>& x, int64_t at,
                                        const Vec& by, const Vec& to, const Plane& plane) {
  Int low = plane(0);
  if constexpr (Split::PIECES == 3) low += plane(1) << 8;
  Vec rounded = floats(low);  // of codes of 4 bits, it is exact
  if constexpr (Split::PIECES > 1)
    rounded = at::vec::fmadd(floats(plane(Split::PLANES - 1)),
                             Vec(Split::PIECES == 4 ? 4096.0f : 65536.0f), rounded);
  const Vec out = at::vec::fmadd(rounded, by * Vec(x.steps[at]), total);
  return F::ZERO < 0 ? at::vec::fmadd(to, Vec(x.sums[at]), out) : out;
}

// Adds units first to last of PANELS panels times COUNT tokens to `out`, whose tokens are `stride`
// numbers apart. Unless it is null, `next` points to the panels that are read afterwards.
template <typename F, int PANELS, int COUNT, bool DOTS, typename Shape>
void by_vectors(const Shape& shape, const uint8_t* panel, int64_t first, int64_t last, void* room,
                int64_t before, const uint8_t* next, float* out, int64_t stride) {
  using Split = ForVectors<F, DOTS>;
  constexpr int LINES = static_cast<int>(F::PART) / 4, PLANES = Split::PLANES, SIZE = Split::SIZE;
  const Fixed<Split> x(room, shape.units * shape.PARTS, before, COUNT);
  const int64_t ahead = std::clamp<int64_t>(AHEAD / (PANELS * shape.CODES), 1, last - first);
  Vec totals[COUNT][PANELS * VECTORS];
  for (int t = 0; t < COUNT; ++t)
    for (int r = 0; r < PANELS * VECTORS; ++r) totals[t][r] = Vec::loadu(out + t * stride + r * LANES);
  for (int64_t unit = first, at = unit * shape.PARTS; unit < last; ++unit) {
    const int64_t later = unit + ahead;
    const bool inside = later < last;
    for (int p = 0; next && p < PANELS; ++p)
      shape.fetch((inside ? panel : next) + p * shape.bytes,
                  inside ? later : first + later - last);
    for (int part = 0; part < shape.PARTS; ++part, ++at) {
      const uint8_t* codes = panel + shape.codes + unit * shape.CODES;
      const int8_t* bytes = x.bytes + at * COUNT * x.BYTES;
      Int sums[PANELS * VECTORS][PLANES * COUNT];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        // Loads inputs again for each register; compilers would keep them all on the stack.
        asm volatile("" : "+r"(bytes));
        Dots<DOTS, F::BITS, SIZE> some[PANELS][PLANES * COUNT];
        if constexpr (F::ZERO > 0)
#pragma GCC unroll 8
          for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p) {
              const int64_t sum = at * COUNT + t, upper = (PLANES - 1) * COUNT + t;
              some[p][t].sums = Int{} - F::ZERO * x.lows[sum];
              if (PLANES > 1) some[p][upper].sums = Int{} - F::ZERO * x.highs[sum];
            }
#pragma GCC unroll UNROLLED
        for (int n = 0; n < LINES; ++n) {
          Int line[PANELS];
#pragma GCC unroll 8
          for (int p = 0; p < PANELS; ++p)
            line[p] = F::line(codes + p * shape.bytes, part * LINES + n, v);
#pragma GCC unroll 16
          for (int k = 0; k < PLANES * COUNT; ++k)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
              some[p][k].add(line[p], bytes + k * Split::WIDTH + 4 * SIZE * n, n);
        }
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
          for (int k = 0; k < PLANES * COUNT; ++k) sums[p * VECTORS + v][k] = some[p][k].sums;
      }
#pragma GCC unroll 8
      for (int r = 0; r < PANELS * VECTORS; ++r) {
        Vec by, to;
        shape.pair(panel + r / VECTORS * shape.bytes, unit, part, r % VECTORS * LANES, by, to);
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t)
          totals[t][r] = added<F>(totals[t][r], x, at * COUNT + t, by, to,
                                  [&](int k) { return sums[r][k * COUNT + t]; });
      }
    }
  }
  for (int t = 0; t < COUNT; ++t)
    for (int r = 0; r < PANELS * VECTORS; ++r) totals[t][r].store(out + t * stride + r * LANES);
}

// The function for a step of `count` tokens and some panels.
template <typename F, bool DOTS, typename Shape>
auto step_for(int64_t count, int64_t panels) {
  auto found = by_vectors<F, SIDE, 1, DOTS, Shape>;
  if (panels == SIDE) return found;
  with_constant<MOST<F>>(count, [&](auto tokens) {
    constexpr int PAIR = MANY_REGISTERS && tokens > 1 ? 2 : 1;
    found = panels == 2 ? by_vectors<F, PAIR, tokens, DOTS, Shape>
                        : by_vectors<F, 1, tokens, DOTS, Shape>;
  });
  return found;
}

// Memory for sums, which a thread keeps.
inline std::vector<float>& room_of(int64_t size) {
  static thread_local std::vector<float> room;
  room.resize(std::max<int64_t>(size, room.size()));
  return room;
}

// Rows first to last times all tokens, on vectors, in steps of MOST tokens. During several steps, a
// group of panels stays in the L2 cache, and the inputs of some units stay in the L1 cache.
template <typename F, typename Shape>
void multiply_on_vectors(const Shape& shape, const uint8_t* weight, int64_t first, int64_t last,
                         void* room, int64_t tokens, const uint8_t* then, Write write) {
  static const bool dots = has_dots();
  const Steps steps{tokens, MOST<F>};
  const int64_t side = side_of(tokens), bytes = UNIT * Fixed<ForVectors<F, true>>::BYTES / F::PART;
  const int64_t group = side * std::clamp<int64_t>(KEPT / (side * shape.bytes), 1, 16 / side);
  const int64_t near = std::max<int64_t>(1, NEAR / bytes / MOST<F>);
  const int64_t span = steps.count == 1 ? shape.units : near;
  const int64_t stride = group * ROWS;
  std::vector<float>& totals = room_of(stride * MOST<F>);
  for (int64_t row = first; row < last; row += stride) {
    const int64_t rows = std::min(last - row, stride), panels = (rows + ROWS - 1) / ROWS;
    const uint8_t* at = weight + (row - first) / ROWS * shape.bytes;
    for (int64_t step = 0; step < steps.count; ++step) {
      const int64_t before = steps.first(step), count = steps.length(step);
      std::fill_n(totals.data(), count * stride, 0.0f);
      for (int64_t unit = 0; unit < shape.units; unit += span)
        for (int64_t p = 0, here; p < panels; p += here) {
          here = panels - p < side ? 1 : side;
          const uint8_t* next = at + (p + here) * shape.bytes;
          if (row + (p + here) * ROWS >= last) next = then;
          const auto some = dots ? step_for<F, KNOWS_DOTS, Shape>(count, here)
                                 : step_for<F, false, Shape>(count, here);
          some(shape, at + p * shape.bytes, unit, std::min(shape.units, unit + span), room, before,
               step ? nullptr : next, totals.data() + p * ROWS, stride);
        }
      for (int64_t t = 0; t < count; ++t) write(before + t, row, rows, totals.data() + t * stride);
    }
  }
}

}  // namespace
}  // namespace panels
