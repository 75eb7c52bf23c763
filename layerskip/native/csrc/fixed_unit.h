// Products of codes with inputs as integers (see `fixed.h`) on the matrix unit of some CPUs.

#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "fixed.h"
#include "unit.h"

namespace panels {
namespace {

constexpr int64_t SPELL = 16;  // steps of tokens for which codes are unpacked once

// Steps of tokens. All have the same size, so the unit is configured once.
struct Even {
  int64_t tokens, count = std::max<int64_t>(1, (tokens + tiles::MOST - 1) / tiles::MOST);
  int64_t each = (tokens + count - 1) / count;
  int64_t first(int64_t step) const { return std::min(tokens, step * each); }
};

// The tiles of a step. The planes of its tokens fill USED tiles of inputs, (PLANES * tokens,
// columns), and as many of sums, (PLANES * tokens, rows), for each of up to two panels. Codes fill a
// tile for each panel, (lines, rows of 4 columns).
template <typename Split, int USED>
struct Tiles {
  static constexpr int PANELS = USED < 3 ? 2 : 1, SUMS = PANELS * USED;
  static constexpr int INPUTS = 8 - USED, CODES = INPUTS - PANELS;  // the first ones; sums begin at 0

  static tiles::Shapes shapes(int64_t tokens) {
    tiles::Shapes out;
    for (int p = 0; p < PANELS; ++p) out.set(CODES + p, Split::WIDTH / 4, 4 * ROWS);
    for (int k = 0; k < USED; ++k) {
      const int64_t rows = std::min(Split::PLANES * tokens - k * tiles::ROWS, tiles::ROWS);
      out.set(INPUTS + k, rows, Split::WIDTH);
      for (int p = 0; p < PANELS; ++p) out.set(p * USED + k, rows, 4 * ROWS);
    }
    return out;
  }
};

// Calls a function with 0 to COUNT - 1 as constants.
template <typename Call, int... N>
[[gnu::always_inline]] inline void each_of(const Call& call, std::integer_sequence<int, N...>) {
  (call(std::integral_constant<int, N>()), ...);
}
template <int COUNT, typename Call>
[[gnu::always_inline]] inline void each_of(const Call& call) {
  each_of(call, std::make_integer_sequence<int, COUNT>());
}

// Unpacks a part of a panel.
template <typename F>
inline void unpack_part(const uint8_t* codes, int part, uint8_t* to) {
  constexpr int LINES = static_cast<int>(F::PART) / 4;
#pragma GCC unroll 8
  for (int i = 0; i < LINES * VECTORS; ++i, to += sizeof(Int)) {
    Int line = F::line(codes, part * LINES + i / VECTORS, i % VECTORS);
    constexpr auto ZERO = static_cast<uint8_t>(std::max(F::ZERO, 0));
    line = reinterpret_cast<Int>(reinterpret_cast<Byte>(line) - ZERO);
    if (ForUnit<F>::PIECES == 4) {
      std::memcpy(to + 64 * LINES, &line, sizeof(line));
      line = (line & 0x0f0f0f0f) << 4;
    }
    std::memcpy(to, &line, sizeof(line));
  }
}

// A part of one or two panels, and a step of tokens that multiplies it.
template <typename Split>
struct Work {
  const uint8_t* codes;
  const float (*by)[ROWS], (*to)[ROWS];  // of each panel
  Fixed<Split> x;
  int64_t at, tokens;  // where the first token is in `x`, and how many there are
  float* totals;  // (tokens, SIDE, ROWS)
};

// Adds the stored sums of a panel to its totals, for share K of USED of the tokens.
template <typename F, int USED, int K, typename Split>
[[gnu::always_inline]] inline void add_share(const Work<Split>& work, int panel, int64_t each,
                                             const int32_t* stored) {
  const Fixed<Split> x = work.x;
  Vec by[VECTORS], to[VECTORS];
  for (int v = 0; v < VECTORS; ++v)
    by[v] = Vec::loadu(work.by[panel] + v * LANES), to[v] = Vec::loadu(work.to[panel] + v * LANES);
  float* totals = work.totals + panel * ROWS;
  const auto add = [&](int64_t t, int64_t step) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      float* total = totals + t * SIDE * ROWS + v * LANES;
      const auto plane = [&](int64_t k) {
        return read<Int>(stored + (k * step + t) * ROWS + v * LANES);
      };
      added<F>(Vec::loadu(total), x, work.at + t, by[v], to[v], plane).store(total);
    }
  };
  if (work.tokens == tiles::MOST) {  // constants make it a tenth faster
#pragma GCC unroll 16
    for (int64_t t = K * tiles::MOST / USED; t < (K + 1) * tiles::MOST / USED; ++t)
      add(t, tiles::MOST);
  } else {
    for (int64_t t = K * work.tokens / USED; t < (K + 1) * work.tokens / USED; ++t) add(t, each);
  }
}

// Up to SIDE panels times some steps of tokens, (tokens, SIDE, ROWS). Codes are unpacked once for
// all steps, in chunks that stay in the L1 cache, smaller ones if few steps use them. If the number
// of panels is odd, one that does not exist may be multiplied as well; nobody reads its sums.
template <typename F, int USED, typename Shape>
void by_unit(const Shape& shape, const uint8_t* panel, int64_t panels, void* room,
             const Even& steps, int64_t first, int64_t last, const uint8_t* next, float* out) {
  using Split = ForUnit<F>;
  using Own = Tiles<Split, USED>;
  constexpr int64_t CHUNK = 4 * Shape::PARTS, TILE = tiles::ROWS * ROWS;  // parts, sums
  const int64_t parts = shape.units * shape.PARTS, each = steps.each, begin = steps.first(first);
  const int64_t chunk = last - first > 4 ? CHUNK : CHUNK / 2;
  alignas(64) uint8_t lines[CHUNK][SIDE][Split::WIDTH * ROWS];
  alignas(64) int32_t sums[2][Own::SUMS * TILE];
  alignas(64) float by[CHUNK][SIDE][ROWS], to[CHUNK][SIDE][ROWS];
  std::fill_n(out, (steps.first(last) - begin) * SIDE * ROWS, 0.0f);

  // In each turn the unit multiplies, stores what it multiplied the turn before, and vectors add what
  // it stored the turn before that, so that neither waits for the other. They alternate tile by tile,
  // because CPUs look too few instructions ahead to overlap long runs of each.
  std::array<Work<Split>, 4> works;
  works.fill({lines[0][0], by[0], to[0], {}, 0, 0, out});
  int64_t number = 0;
  const auto turn = [&](auto multiplies) __attribute__((always_inline)) {
    const Work<Split>&now = works[number % 4], &before = works[(number + 2) % 4];
    int32_t *to_store = sums[number % 2], *stored = sums[(number + 1) % 2];
    each_of<Own::SUMS>([&](auto tile) __attribute__((always_inline)) {
      constexpr int K = tile % USED, P = tile / USED;
      constexpr int CODES = Own::CODES + P, INPUTS = Own::INPUTS + K;
      if constexpr (multiplies) {
        if (K == 0) tiles::load<CODES>(now.codes + P * Split::WIDTH * ROWS, 64);
        const int8_t* inputs = now.x.bytes + now.at * now.x.BYTES;
        if (P == 0) tiles::load<INPUTS>(inputs + K * tiles::ROWS * Split::WIDTH, Split::WIDTH);
      }
      tiles::store<tile>(to_store + tile * TILE, 4 * ROWS);
      if constexpr (multiplies) {
        tiles::zero<tile>();
        tiles::add_bytes<tile, CODES, INPUTS, (F::ZERO > 0)>();
      }
      add_share<F, USED, K>(before, P, each, stored + P * USED * TILE);
    });
    ++number;
  };

  for (int64_t start = 0; start < parts; start += chunk) {
    const int64_t here = std::min(chunk, parts - start);
    for (int64_t i = 0; i < here; ++i)
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t unit = (start + i) / shape.PARTS, part = (start + i) % shape.PARTS;
        const uint8_t* from = panel + p * shape.bytes;
        if (first == 0 && part == 0) shape.fetch(next + p * shape.bytes, unit);
        unpack_part<F>(from + shape.codes + unit * shape.CODES, static_cast<int>(part),
                       lines[i][p]);
        for (int64_t lane = 0; lane < ROWS; lane += LANES) {
          Vec scale, offset;
          shape.pair(from, unit, part, lane, scale, offset);
          scale.store(by[i][p] + lane), offset.store(to[i][p] + lane);
        }
      }
    for (int64_t step = first; step < last; ++step) {
      const int64_t before = steps.first(step), tokens = steps.first(step + 1) - before;
      const Fixed<Split> x(room, parts, before, each);
      for (int64_t i = 0; i < here; ++i)
        for (int64_t p = 0; p < panels; p += Own::PANELS) {
          float* totals = out + ((before - begin) * SIDE + p) * ROWS;
          works[number % 4] = {lines[i][p], by[i] + p, to[i] + p, x, (start + i) * each, tokens,
                               totals};
          turn(std::true_type());
        }
    }
    for (int rest = 0; rest < 2; ++rest) {
      works[number % 4].tokens = 0;
      turn(std::false_type());
    }
  }
}

template <typename F, int USED, typename Shape>
void multiply_on_tiles(const Shape& shape, const uint8_t* weight, int64_t first, int64_t last,
                       void* room, const Even& even, const uint8_t* then, Write write) {
  std::vector<float>& totals = room_of(std::min(even.tokens, SPELL * even.each) * SIDE * ROWS);
  const tiles::Kept kept;
  tiles::configure(Tiles<ForUnit<F>, USED>::shapes(even.each));
  for (int64_t row = first; row < last; row += SIDE * ROWS) {
    const int64_t rows = std::min(last - row, SIDE * ROWS), panels = (rows + ROWS - 1) / ROWS;
    const uint8_t* at = weight + (row - first) / ROWS * shape.bytes;
    const uint8_t* next = row + rows < last ? at + panels * shape.bytes : then;
    for (int64_t step = 0; step < even.count; step += SPELL) {
      const int64_t end = std::min(even.count, step + SPELL), begin = even.first(step);
      by_unit<F, USED>(shape, at, panels, room, even, step, end, next, totals.data());
      for (int64_t t = begin; t < even.first(end); ++t)
        write(t, row, rows, totals.data() + (t - begin) * SIDE * ROWS);
    }
  }
}

// Rows first to last times all tokens.
template <typename F, typename Shape>
void multiply_on_unit(const Shape& shape, const uint8_t* weight, int64_t first, int64_t last,
                      void* room, int64_t tokens, const uint8_t* then, Write write) {
  constexpr int PLANES = ForUnit<F>::PLANES;
  const Even even{tokens};
  const int64_t used = (PLANES * even.each + tiles::ROWS - 1) / tiles::ROWS;
  const auto multiply = used == 1   ? multiply_on_tiles<F, 1, Shape>
                        : used == 2 ? multiply_on_tiles<F, std::min(2, PLANES), Shape>
                                    : multiply_on_tiles<F, PLANES, Shape>;
  multiply(shape, weight, first, last, room, even, then, write);
}

}  // namespace
}  // namespace panels
