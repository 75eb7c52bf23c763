// Implements `integers.h`. A separate file, so that it compiles in parallel with the others.

#include "integers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "bytes.h"
#include "products.h"
#include "tiles.h"
#include "unit.h"

namespace integers {
namespace {

// Blocks that are read side by side. With several tokens, two would exceed 16 vector registers.
constexpr int BLOCKS = 2;
constexpr int blocks_of(int64_t tokens) { return MANY_REGISTERS || tokens == 1 ? BLOCKS : 1; }
// The most tokens of a step on vectors, and the lines that are unrolled. With 16-byte vectors, a
// tile has so many of them that compilers would take minutes to unroll it fully.
constexpr int MOST = VECTORS == 1 ? 8 : VECTORS == 2 ? 6 : 4;
constexpr int UNROLLED = VECTORS == 4 ? 1 : 16;

constexpr int parts_of(int bits) { return bits == 8 ? 1 : 2; }  // of a unit, each with its own sums

// ---------------------------------------------------------------------------------------------
// Inputs.

// The rounded inputs of a step's tokens, in the order of their use: numbers (units, tokens, 64), a
// scale per unit and token, and the initial value of each part's sums, which cancels the offset of
// the weight's numbers.
struct Inputs {
  int8_t* numbers;
  float* scales;
  int32_t* starts;

  // `base` has `inputs_bytes` per token. The first `before` tokens use theirs.
  Inputs(void* base, int64_t units, int64_t before, int64_t tokens) {
    uint8_t* at = static_cast<uint8_t*>(base) + before * inputs_bytes(units * UNIT);
    numbers = reinterpret_cast<int8_t*>(at);
    scales = reinterpret_cast<float*>(at + tokens * units * UNIT);
    starts = reinterpret_cast<int32_t*>(scales + tokens * units);
  }
};

// Like the public function of this name, in steps of `most_tokens`.
void round_inputs(int bits, const float* x, int64_t columns, int64_t tokens, void* room,
                  int64_t begin, int64_t end, int64_t most_tokens) {
  const int64_t units = units_of(columns);
  const int parts = parts_of(bits);
  const int32_t offset = bits == 8 ? 128 : 8;
  const Steps steps{tokens, most_tokens};
  for (int64_t step = 0; step < steps.count; ++step) {
    const int64_t first = steps.first(step), count = steps.length(step);
    const Inputs to(room, units, first, count);
    for (int64_t t = std::max<int64_t>(0, begin - first); t < std::min(count, end - first); ++t)
      for (int64_t u = 0; u < units; ++u) {
        const float* from = x + (first + t) * columns + u * UNIT;
        float rest[UNIT] = {};
        if (columns - u * UNIT < UNIT) {
          std::copy_n(from, columns - u * UNIT, rest);
          from = rest;
        }
        float most = 0;
        for (int64_t i = 0; i < UNIT; ++i) most = std::max(most, std::fabs(from[i]));
        const float by = most > 1e-30f ? 127.0f / most : 0.0f;
        int8_t* numbers = to.numbers + (u * count + t) * UNIT;
        int32_t sums[2] = {};
        for (int64_t half = 0; half < 2; ++half)
          for (int64_t i = half * UNIT / 2; i < (half + 1) * UNIT / 2; ++i) {
            // adding 1.5 * 2^23 leaves the nearest integer in the last bits
            const float shifted = from[i] * by + 12582912.0f;
            int32_t bits_of;
            std::memcpy(&bits_of, &shifted, 4);
            const int32_t number = bits_of - 0x4b400000;
            numbers[i] = static_cast<int8_t>(number);
            sums[half] += number;
          }
        to.scales[u * count + t] = most > 1e-30f ? most / 127.0f : 0.0f;
        int32_t* starts = to.starts + u * parts * count + t;
        if (parts == 1) {
          starts[0] = -offset * (sums[0] + sums[1]);
        } else {
          starts[0] = -offset * sums[0];
          starts[count] = -offset * sums[1];
        }
      }
  }
}

// ---------------------------------------------------------------------------------------------
// Products.

// The products of BLOCKS blocks, `stride` bytes apart.
template <int BITS, int TOKENS, bool DOTS>
void tile(const uint8_t* weight, int64_t stride, int64_t units, const Inputs& x,
          const uint8_t* fetch, float* out) {
  constexpr int64_t SIZE = unit_bytes(BITS);
  constexpr int PARTS = parts_of(BITS), BLOCKS = blocks_of(TOKENS);
  Floats sums[TOKENS][BLOCKS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[t][b] = zero();
  for (int64_t u = 0; u < units; ++u) {
    const uint8_t* at = weight + u * SIZE;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
      Ints some[TOKENS][BLOCKS];
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) some[t][b] = all(x.starts[(u * PARTS + part) * TOKENS + t]);
      constexpr int LINES = BITS == 8 ? 16 : 4;
#pragma GCC unroll UNROLLED
      for (int l = 0; l < LINES; ++l) {
        const int line = part * LINES + l;
        Ints w[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
          w[b] = load(at + b * stride + line * 64);
          fetch_line(fetch + b * stride + u * SIZE + line * 64);
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
          const int8_t* from = x.numbers + (u * TOKENS + t) * UNIT + line * (UNIT / LINES / PARTS);
          if constexpr (BITS == 8) {
            const Four<DOTS> four(from);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b)
              some[t][b] = dots<DOTS, BITS>(some[t][b], w[b], four);
          } else {
            const Four<DOTS> first(from), second(from + 4);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
              some[t][b] = dots<DOTS, BITS>(some[t][b], lower(w[b]), first);
              some[t][b] = dots<DOTS, BITS>(some[t][b], upper(w[b]), second);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        const float scale = x.scales[u * TOKENS + t];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
          const Floats by = BITS == 8
              ? same(scale)
              : times(widened(at + b * stride + SIZE - 64 + part * 32), scale);
          sums[t][b] = scaled(some[t][b], by, sums[t][b]);
        }
      }
    }
    if constexpr (BITS == 4)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b)
        fetch_line(fetch + b * stride + (u + 1) * SIZE - 64);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store(sums[t][b], out + (t * BLOCKS + b) * BLOCK);
}

using Tile = void (*)(const uint8_t*, int64_t, int64_t, const Inputs&, const uint8_t*, float*);

// Indexed by the tokens of a step, less 1.
template <int BITS, bool DOTS, int... TOKENS>
constexpr std::array<Tile, sizeof...(TOKENS)> tiles_of(std::integer_sequence<int, TOKENS...>) {
  return {tile<BITS, TOKENS + 1, DOTS>...};
}
template <int BITS, bool DOTS>
constexpr auto TILES = tiles_of<BITS, DOTS>(std::make_integer_sequence<int, MOST>());

// Like `tile`, on the matrix unit, for any number of tokens that fits into its tiles. It multiplies
// a part of a unit by all tokens at once, exactly as well. The caller has configured `shapes_of`.
template <int BITS>
void tile_by_unit(const uint8_t* weight, int64_t stride, int64_t units, int64_t tokens,
                  const Inputs& x, const uint8_t* fetch, float* out) {
  constexpr int64_t SIZE = unit_bytes(BITS), PARTS = parts_of(BITS), WIDTH = UNIT / PARTS;
  constexpr int64_t LINES = BITS == 8 ? 16 : 4;  // of a part
  alignas(64) uint8_t unpacked[BLOCKS][WIDTH * BLOCK];
  alignas(64) int32_t some[BLOCKS][tiles::MOST * BLOCK];
  std::fill_n(out, tokens * BLOCKS * BLOCK, 0.0f);
  for (int64_t u = 0; u < units; ++u)
    for (int64_t part = 0; part < PARTS; ++part) {
      const uint8_t* at = weight + u * SIZE;
      tiles::load<tiles::INPUTS>(x.numbers + u * tokens * UNIT + part * WIDTH, UNIT);
      const auto add = [&](auto block, auto tile) {
        const uint8_t* from = at + block * stride + part * LINES * 64;
        if constexpr (BITS == 4) {
          for (int64_t l = 0; l < LINES; ++l) {
            const Ints both = load(from + 64 * l);
            store(lower(both), unpacked[block] + 128 * l);
            store(upper(both), unpacked[block] + 128 * l + 64);
          }
          from = unpacked[block];
        }
        tiles::load<tile>(from, 64);
        tiles::zero<block>();
        tiles::add_bytes<block, tile>();
        tiles::store<block>(some[block], 4 * BLOCK);
      };
      add(std::integral_constant<int, 0>(), std::integral_constant<int, 4>());
      add(std::integral_constant<int, 1>(), std::integral_constant<int, 5>());
      for (int64_t b = 0; b < BLOCKS; ++b) {
        for (int64_t line = 0; line < SIZE; line += 64 * PARTS)
          fetch_line(fetch + b * stride + u * SIZE + line + 64 * part);
        const Floats scales = BITS == 8
            ? same(1.0f)
            : widened(at + b * stride + SIZE - 64 + part * 32);
        const int64_t first = (u * PARTS + part) * tokens;
        for (int64_t t = 0; t < tokens; ++t) {
          float* to = out + (t * BLOCKS + b) * BLOCK;
          const Ints sum = plus(load(some[b] + t * BLOCK), x.starts[first + t]);
          const float scale = x.scales[u * tokens + t];
          store(scaled(sum, BITS == 8 ? same(scale) : times(scales, scale), load(to)), to);
        }
      }
    }
}

// Sums are (tokens, rows), inputs (tokens, columns), weights (columns / 4, rows of 4 columns).
tiles::Shapes shapes_of(int bits, int64_t tokens) {
  const int64_t width = UNIT / parts_of(bits);
  tiles::Shapes out;
  for (int block = 0; block < BLOCKS; ++block) {
    out.set(block, tokens, 4 * BLOCK);
    out.set(4 + block, width / 4, 4 * BLOCK);
  }
  out.set(tiles::INPUTS, tokens, width);
  return out;
}

// Rows first to last with the inputs of one step, whose first token is number `before`. The weight
// begins with row first, a multiple of BLOCK. `then` points to what is read afterwards.
template <typename Tile>
void few(int64_t size, const uint8_t* weight, int64_t first, int64_t last, int64_t tokens,
         int64_t before, const uint8_t* then, Write write, int64_t side, const Tile& tile) {
  const int64_t blocks = (last - first + BLOCK - 1) / BLOCK;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / size);
  alignas(64) float sums[tiles::MOST * BLOCKS * BLOCK];
  for (int64_t block = 0; block < blocks; block += side) {
    const int64_t here = std::min(side, blocks - block), later = block + ahead;
    const uint8_t* fetch = later < blocks ? weight + later * size : then + (later - blocks) * size;
    // a single block stands in for the second
    const int64_t stride = here == side ? size : 0;
    tile(weight + block * size, stride, fetch, sums);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t b = 0; b < here; ++b)
        write(before + t, first + (block + b) * BLOCK, sums + (t * side + b) * BLOCK);
  }
}

// Like the public function of this name, in steps of `most_tokens`. Uses the unit for tiles::MOST.
void product(int bits, const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
             int64_t tokens, void* room, const uint8_t* then, Write write, int64_t most_tokens) {
  static const bool dots = has_dots();
  const int64_t units = units_of(columns), size = row_bytes(bits, columns);
  const Steps steps{tokens, most_tokens};
  // rows that stay in a cache until the last step has read them
  const int64_t group = steps.count == 1
      ? std::max<int64_t>(BLOCK, last - first)
      : std::max<int64_t>(2, KEPT / size / BLOCK) * BLOCK;
  int64_t configured = 0;
  for (int64_t row = first; row < last; row += group) {
    const int64_t end = std::min(last, row + group);
    const uint8_t* from = weight + (row - first) * size;
    const uint8_t* next = end < last ? from + (end - row) * size : then;
    for (int64_t step = 0; step < steps.count; ++step) {
      const int64_t before = steps.first(step), length = steps.length(step);
      const Inputs x(room, units, before, length);
      const bool by_unit = most_tokens == tiles::MOST;
      const auto with = [&](const auto& tile) {
        few(units * unit_bytes(bits), from, row, end, length, before, next, write,
            by_unit ? BLOCKS : blocks_of(length), tile);
      };
      if (by_unit) {
        if (length != configured) tiles::configure(shapes_of(bits, configured = length));
        with([&](const uint8_t* at, int64_t stride, const uint8_t* fetch, float* sums) {
          if (bits == 8) tile_by_unit<8>(at, stride, units, length, x, fetch, sums);
          else tile_by_unit<4>(at, stride, units, length, x, fetch, sums);
        });
        continue;
      }
      const auto& some = bits == 8 ? (dots ? TILES<8, KNOWS_DOTS> : TILES<8, false>)
                                   : (dots ? TILES<4, KNOWS_DOTS> : TILES<4, false>);
      with([&](const uint8_t* at, int64_t stride, const uint8_t* fetch, float* sums) {
        some[length - 1](at, stride, units, x, fetch, sums);
      });
    }
  }
  if (configured) tiles::release();
}

// ---------------------------------------------------------------------------------------------
// Vectors and the matrix unit give the same numbers, so timing decides which to use.

// The smallest number of tokens for which the unit is as fast as vectors.
int64_t unit_from(int bits) {
  constexpr int64_t COLUMNS = 512, ROWS = 64;
  const std::vector<float> x(tiles::MOST * COLUMNS, 1.0f);
  const std::vector<uint8_t> weight(ROWS * row_bytes(bits, COLUMNS));
  std::vector<uint8_t> room(tiles::MOST * inputs_bytes(COLUMNS));
  return tiles::faster_from([&](int64_t tokens, bool on_unit) {
    const int64_t most = on_unit ? tiles::MOST : MOST;
    round_inputs(bits, x.data(), COLUMNS, tokens, room.data(), 0, tokens, most);
    product(bits, weight.data(), 0, ROWS, COLUMNS, tokens, room.data(), weight.data(),
            [](int64_t, int64_t, const float*) {}, most);
  });
}

// The most tokens of a step.
int64_t step_of(int bits, int64_t tokens) {
  static const int64_t from[] = {unit_from(4), unit_from(8)};
  return tokens >= from[bits == 8] ? tiles::MOST : MOST;
}

}  // namespace

void round_inputs(int bits, const float* x, int64_t columns, int64_t tokens, void* room,
                  int64_t begin, int64_t end) {
  round_inputs(bits, x, columns, tokens, room, begin, end, step_of(bits, tokens));
}

void product(int bits, const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
             int64_t tokens, void* room, const uint8_t* then, Write write) {
  product(bits, weight, first, last, columns, tokens, room, then, write, step_of(bits, tokens));
}

}  // namespace integers
