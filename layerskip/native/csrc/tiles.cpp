// Implements `tiles.h`.

#include "tiles.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "unit.h"

namespace tiles {
namespace {

using c10::BFloat16;

constexpr int64_t COLUMNS = 32;  // in a tile of a weight
constexpr int64_t BLOCKS = 4;    // of rows that are multiplied in turn
constexpr int64_t FEW = 2;       // the same for few tokens, and those that are read side by side
constexpr int64_t SUMS = ROWS * MOST;
constexpr int64_t KEPT = 512 << 10;  // bytes of weights that stay in a cache for further steps

constexpr int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The length of a step. All steps but the last have MOST tokens.
inline int64_t length(int64_t tokens, int64_t begin) { return std::min(MOST, tokens - begin); }

// Prefetches fours of lines. It takes few instructions, because a CPU looks only so many ahead: the
// unit would wait for weights that it could have begun to load.
inline void fetch(const char*& next, int64_t fours) {
  for (int64_t i = 0; i < fours; ++i, next += 256)
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
}

// Sums are (rows, tokens), inputs (pairs of columns, pairs of tokens).
Shapes shapes_of(int64_t tokens) {
  Shapes out;
  for (int tile = 0; tile < 8; ++tile) out.set(tile, ROWS, tile == WEIGHT ? 64 : 4 * tokens);
  return out;
}

// 16 rows of a weight: the whole tiles, and the remaining columns padded with zeros to a tile.
struct Block {
  const BFloat16* at;
  int64_t stride;  // bytes
  const BFloat16* rest;
  int64_t rest_stride, whole;  // columns in whole tiles

  void load(int64_t k) const {
    if (k < whole)
      tiles::load<WEIGHT>(at + k, stride);
    else
      tiles::load<WEIGHT>(rest, rest_stride);
  }
};

// The sums of one or two blocks of rows for a step of tokens, (COUNT x ROWS, MOST), or for two whole
// steps, BLOCKS x SUMS apart. Two steps read each tile of a weight once. CPUs prefetch fewer rows into
// the first cache if more than two blocks are read side by side.
template <int COUNT, bool TWO>
void sums_of(const Block* blocks, int64_t columns, const float* inputs, int64_t tokens,
             const char*& next, int64_t fours, float* sums) {
  const float* others = inputs + up(columns, COLUMNS) / 2 * MOST;
  zero<0>(), zero<2>();
  if constexpr (TWO) zero<1>(), zero<3>();
  for (int64_t k = 0; k < columns; k += COLUMNS) {
    const auto take = [&](const float* from) { load<INPUTS>(from + k / 2 * tokens, 4 * tokens); };
    take(inputs);
    blocks[0].load(k);
    add_bfloats<0, WEIGHT>();
    if constexpr (TWO) take(others), add_bfloats<1, WEIGHT>();
    if constexpr (COUNT == 2) {
      blocks[1].load(k);
      if constexpr (TWO) add_bfloats<3, WEIGHT>(), take(inputs);
      add_bfloats<2, WEIGHT>();
    }
    fetch(next, fours);
  }
  store<0>(sums, 4 * MOST);
  if constexpr (TWO) store<1>(sums + BLOCKS * SUMS, 4 * MOST);
  if constexpr (COUNT == 2) store<2>(sums + SUMS, 4 * MOST);
  if constexpr (COUNT == 2 && TWO) store<3>(sums + (BLOCKS + 1) * SUMS, 4 * MOST);
}

}  // namespace

const char* refusal() {
  static const char* const reason = []() -> const char* {
    const char* wanted = std::getenv("LAYERSKIP_TILES");
    if (wanted && std::strcmp(wanted, "0") == 0) return "LAYERSKIP_TILES is 0";
    if (!has_unit()) return "the CPU has none";
    return is_allowed() ? nullptr : "the system refuses them";
  }();
  return reason;
}

bool always() {
  const char* wanted = std::getenv("LAYERSKIP_TILES");
  return wanted && std::strcmp(wanted, "1") == 0;
}

int64_t faster_from(c10::function_ref<void(int64_t, bool)> multiply) {
  constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();
  if (refusal()) return NEVER;
  if (always()) return 1;
  const auto seconds = [&](int64_t tokens, bool on_unit) {
    double least = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < 20; ++repeat) {  // the unit takes some time to wake up
      const auto began = std::chrono::steady_clock::now();
      multiply(tokens, on_unit);
      const auto took = std::chrono::steady_clock::now() - began;
      least = std::min(least, std::chrono::duration<double>(took).count());
    }
    return least;
  };
  for (const int64_t tokens : {1, 2, 3, 4, 6, 8, 12, 16})
    if (1.1 * seconds(tokens, true) <= seconds(tokens, false)) return tokens;
  return NEVER;
}

// Ordered by steps of tokens, then by pairs of columns, then by the tokens of the step.
void pack_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end) {
  const int64_t width = up(columns, COLUMNS);
  for (int64_t t = begin; t < end;) {
    const int64_t first = t / MOST * MOST, count = length(tokens, first);
    const int64_t here = std::min(end, first + MOST) - t;
    float* to = room + first * width / 2 + t - first;
    for (int64_t k = 0; k < width; k += COLUMNS, to += COLUMNS / 2 * count) {
      alignas(64) BFloat16 some[MOST * COLUMNS];
      const int64_t whole = std::min(COLUMNS, columns - k);
      for (int64_t i = 0; i < here; ++i) {
        BFloat16* pairs = some + i * COLUMNS;
        at::vec::convert(x + (t + i) * columns + k, pairs, whole);
        std::fill(pairs + whole, pairs + COLUMNS, BFloat16(0.0f));
      }
      const float* from = reinterpret_cast<const float*>(some);
      if (count == 1)
        std::copy_n(from, COLUMNS / 2, to);
      else
        at::vec::transpose_mxn<float>(from, COLUMNS / 2, to, count, static_cast<int>(here),
                                      COLUMNS / 2);
    }
    t += here;
  }
}

void product(const BFloat16* weight, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, const BFloat16* then, Write write) {
  const int64_t width = up(columns, COLUMNS), whole = columns / COLUMNS * COLUMNS;
  const int64_t row_bytes = 2 * columns;
  const int64_t most =
      std::clamp<int64_t>(KEPT / (ROWS * row_bytes), 1, tokens <= MOST ? FEW : BLOCKS);
  static thread_local std::vector<BFloat16> padded;  // rows of an incomplete tile, with zeros
  alignas(64) BFloat16 rests[BLOCKS][ROWS * COLUMNS] = {};
  alignas(64) float sums[2 * BLOCKS * SUMS], turned[MOST * BLOCKS * ROWS];
  const Kept kept;
  int64_t configured = 0;  // tokens
  for (int64_t row = first; row < last; row += most * ROWS) {
    const int64_t end = std::min(last, row + most * ROWS), count = (end - row + ROWS - 1) / ROWS;
    Block blocks[BLOCKS];
    for (int64_t b = 0; b < count; ++b) {
      const BFloat16* from = weight + (row + b * ROWS) * columns;
      const int64_t rows = std::min(ROWS, end - row - b * ROWS);
      if (rows < ROWS) {
        padded.assign(ROWS * width, BFloat16(0.0f));
        for (int64_t r = 0; r < rows; ++r)
          std::copy_n(from + r * columns, columns, padded.data() + r * width);
        blocks[b] = {padded.data(), 2 * width, padded.data() + whole, 2 * width, whole};
        continue;
      }
      for (int64_t r = 0; r < ROWS; ++r)
        std::copy_n(from + r * columns + whole, columns - whole, rests[b] + r * COLUMNS);
      blocks[b] = {from, row_bytes, rests[b], 2 * COLUMNS, whole};
    }
    // All passes over these rows share the prefetches of as many bytes of what is read next.
    const char* next = reinterpret_cast<const char*>(end < last ? weight + end * columns : then);
    const int64_t parts = (tokens + 2 * MOST - 1) / (2 * MOST) * ((count + 1) / 2) * width / COLUMNS;
    const int64_t fours = (count * ROWS * row_bytes / 256 + parts - 1) / parts;
    for (int64_t begin = 0, here; begin < tokens; begin += here) {
      const bool two = tokens - begin >= 2 * MOST;
      here = two ? 2 * MOST : length(tokens, begin);
      const int64_t each = std::min(MOST, here);
      if (each != configured) configure(shapes_of(configured = each));
      const float* x = inputs + begin * width / 2;
      const auto one = two ? sums_of<1, true> : sums_of<1, false>;
      const auto pair = two ? sums_of<2, true> : sums_of<2, false>;
      for (int64_t b = 0; b < count; b += 2)
        (b + 1 < count ? pair : one)(blocks + b, columns, x, each, next, fours, sums + b * SUMS);
      for (int64_t step = begin; step < begin + here; step += MOST) {
        const float* from = sums + (step - begin) / MOST * BLOCKS * SUMS;
        for (int64_t b = 0; b < count; ++b)
          at::vec::transpose_mxn<float>(from + b * SUMS, MOST, turned + b * ROWS, BLOCKS * ROWS,
                                        ROWS, static_cast<int>(each));
        for (int64_t t = 0; t < each; ++t)
          write(step + t, row, end - row, turned + t * BLOCKS * ROWS);
      }
    }
  }
}

}  // namespace tiles
