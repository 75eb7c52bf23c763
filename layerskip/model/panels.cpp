// Implements `panels.h`. A separate file, so that it compiles in parallel with the others.
//
// A panel holds 16 rows: first all factors and scales, then all codes. A lane of a vector holds
// codes of one row, as a word of 32 bits: 8 codes of 4 bits, or 4 codes of 8. Masks take the codes
// of a column out of the words, at their places, and inputs are divided by the powers of two that
// the places mean. Codes of 5 and 6 bits lie in two planes, from which words of 8 bits are made.

#include "panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "codes.h"

namespace panels {
namespace {

using stored::UNIT;
typedef uint32_t Words [[gnu::vector_size(4 * LANES)]];

constexpr int VECTORS = static_cast<int>(ROWS / LANES);  // of a panel's rows
constexpr int STEP = 6;                          // the most tokens of a step
constexpr int64_t TOKENS = 10 * STEP;           // tokens for which a unit is unpacked once

// How many bits of a word each code takes, and words of a unit.
constexpr int width(int bits) { return bits == 4 ? 4 : 8; }
constexpr int words(int bits) { return width(bits); }

// Word n of the unit's codes that begin at `codes`.
template <int BITS>
inline Words word(const uint8_t* codes, int n) {
  using stored::read;
  if constexpr (BITS == 4 || BITS == 8) {
    return read<Words>(codes + 4 * ROWS * n);
  } else {
    constexpr int HIGH = BITS - 4, EACH = 8 / HIGH;  // bits of the high plane, words of its lines
    const Words low = read<Words>(codes + 4 * ROWS * (n / 2)) >> (n % 2 * 4);
    const Words high = read<Words>(codes + 4 * ROWS * (4 + n / EACH));
    const int up = 4 - n % EACH * HIGH;
    const Words placed = up > 0 ? high << up : high >> -up;
    return (low & 0x0f0f0f0f) | (placed & ((1 << HIGH) - 1) * 0x10101010u);
  }
}

// The j-th code of each lane's word, times `place(width, j)`.
template <int WIDTH>
inline Vec code(const Words& word, int j) {
  const int shift = WIDTH * j;
  const Words taken = shift == 32 - WIDTH ? word >> shift : word & ((1u << WIDTH) - 1) << shift;
  return stored::floats(reinterpret_cast<const stored::Ints&>(taken));
}
inline float place(int width, int j) {
  return width * (j + 1) == 32 ? 1.0f : static_cast<float>(int64_t{1} << width * j);
}

// Where a format keeps what in a panel.
template <typename F>
struct Lie {
  static constexpr int64_t UNITS = F::NUMBERS / UNIT, PARTS = UNIT / F::PART;
  static constexpr int64_t HEAD = ROWS * (2 * F::HALVES + F::SCALES * UNITS);  // of a block
  static constexpr int64_t CODES = ROWS * 4 * F::BITS;                          // of a unit
  int64_t units, codes, bytes;  // `codes`: where codes begin

  explicit Lie(int64_t columns)
      : units(columns / UNIT),
        codes((units / UNITS * HEAD + 63) / 64 * 64),
        bytes(codes + units * CODES) {}
  static int64_t factors(int64_t unit) { return unit / UNITS * HEAD; }
  static int64_t scales(int64_t unit) {
    return factors(unit) + ROWS * (2 * F::HALVES + F::SCALES * (unit % UNITS));
  }
  // What a token multiplies: its inputs, and their sums over each part.
  static int64_t inputs(int64_t columns) { return columns + columns / F::PART; }
  // The scales and offsets of some lanes of a panel.
  void pair(const uint8_t* panel, int64_t unit, int64_t part, int64_t lane, Vec& by,
            Vec& to) const {
    const int64_t skipped = F::PART < UNIT ? ROWS * part : 0;
    F::pair(panel + factors(unit) + 2 * lane, panel + scales(unit) + skipped + lane, by, to);
  }
  void fetch(const uint8_t* panel, int64_t unit) const {
    if (unit % UNITS == 0)
      for (int64_t line = 0; line < HEAD; line += 64) fetch_line(panel + factors(unit) + line);
    for (int64_t line = 0; line < CODES; line += 64)
      fetch_line(panel + codes + unit * CODES + line);
  }
};

// Puts what a row's block says of a unit's scales into the row's lane.
template <typename F>
void place_scales(const uint8_t* block, int64_t unit, int64_t row, uint8_t* factors,
                  uint8_t* scales) {
  for (int64_t k = 0; k < F::HALVES; ++k)
    std::memcpy(factors + 2 * (k * ROWS + row), block + F::half_at(k), 2);
  for (int64_t k = 0; k < F::SCALES; ++k) scales[k * ROWS + row] = F::scale(block, unit, k);
}

// The lower 4 bits of 8 bytes, in order.
inline uint32_t squeezed(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// Arranges the `count` rows of a panel.
template <typename F>
void arrange(const uint8_t* rows, int64_t count, int64_t columns, uint8_t* out) {
  const Lie<F> lie(columns);
  const int64_t row_bytes = columns / F::NUMBERS * F::BYTES;
  std::fill_n(out, lie.bytes, 0);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t unit = 0; unit < lie.units; ++unit) {
      const uint8_t* block = rows + r * row_bytes + unit / lie.UNITS * F::BYTES;
      place_scales<F>(block, unit % lie.UNITS, r, out + lie.factors(unit), out + lie.scales(unit));
      uint8_t codes[UNIT];
      F::codes(block, unit % lie.UNITS, codes);
      uint32_t lines[F::BITS] = {};  // of this row
      for (int n = 0; n < words(F::BITS); ++n) {
        if constexpr (F::BITS == 4) {
          lines[n] = squeezed(stored::read<uint64_t>(codes + 8 * n));
          continue;
        }
        const auto word = stored::read<uint32_t>(codes + 4 * n);
        if constexpr (F::BITS == 8) {
          lines[n] = word;
        } else if constexpr (F::BITS > 4) {
          constexpr int HIGH = F::BITS - 4, EACH = 8 / HIGH;
          lines[n / 2] |= (word & 0x0f0f0f0f) << n % 2 * 4;
          lines[4 + n / EACH] |= (word >> 4 & 0x0f0f0f0f) << n % EACH * HIGH;
        }
      }
      uint8_t* to = out + lie.codes + unit * lie.CODES + 4 * r;
      for (int line = 0; line < F::BITS; ++line)
        std::memcpy(to + 4 * ROWS * line, &lines[line], 4);
    }
}

// Unpacks a row to float32.
template <typename F>
void unpack(const uint8_t* row, int64_t columns, float* out) {
  for (int64_t unit = 0; unit < columns / UNIT; ++unit, out += UNIT) {
    const uint8_t* block = row + unit / Lie<F>::UNITS * F::BYTES;
    uint8_t codes[UNIT], factors[2 * F::HALVES * ROWS] = {}, scales[2 * ROWS] = {};
    F::codes(block, unit % Lie<F>::UNITS, codes);
    place_scales<F>(block, unit % Lie<F>::UNITS, 0, factors, scales);
    for (int64_t part = 0; part < Lie<F>::PARTS; ++part) {
      Vec by, to;
      F::pair(factors, scales + ROWS * part, by, to);
      float pair[2][LANES];
      by.store(pair[0]), to.store(pair[1]);
      for (int64_t i = part * F::PART; i < (part + 1) * F::PART; i += LANES)
        at::vec::fmadd(stored::floats(stored::bytes(codes + i)), Vec(pair[0][0]), Vec(pair[1][0]))
            .store(out + i);
    }
  }
}

// Whether a row's factors, and so its numbers, are finite.
template <typename F>
bool finite(const uint8_t* row, int64_t columns) {
  bool all = true;
  for (int64_t block = 0; block < columns / F::NUMBERS; ++block)
    for (int64_t k = 0; k < F::HALVES; ++k)
      all &= std::isfinite(stored::half(row + block * F::BYTES + F::half_at(k)));
  return all;
}

// Adds the sums of a part to those of a row, as every product does.
inline Vec added(const Vec& total, const Vec& sum, const Vec& by, const Vec& inputs, const Vec& to) {
  return at::vec::fmadd(inputs, to, at::vec::fmadd(sum, by, total));
}

// PANELS panels times COUNT tokens, (COUNT, PANELS, ROWS).
template <typename F, int PANELS, int COUNT>
void fuse(const Lie<F>& lie, const uint8_t* panel, const float* x, const uint8_t* next,
          float* out) {
  constexpr int VECS = PANELS * VECTORS, WIDTH = width(F::BITS), FIELDS = 32 / WIDTH;
  constexpr int WORDS = words(F::BITS) / lie.PARTS;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / (PANELS * lie.CODES));
  const float* input_sums = x + lie.units * UNIT * COUNT;
  Vec totals[COUNT][VECS];
  for (auto& some : totals)
    for (Vec& each : some) each = Vec(0.0f);
  for (int64_t unit = 0; unit < lie.units; ++unit) {
    const int64_t later = unit + ahead;
    for (int p = 0; p < PANELS; ++p)
      lie.fetch((later < lie.units ? panel : next) + p * lie.bytes, later % lie.units);
    for (int64_t part = 0; part < lie.PARTS; ++part) {
      const uint8_t* codes = panel + lie.codes + unit * lie.CODES;
      Vec sums[COUNT][VECS];
#pragma GCC unroll 8
      for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < VECS; ++r) sums[t][r] = Vec(0.0f);
#pragma GCC unroll 8
      for (int n = 0; n < WORDS; ++n) {
        Words some[VECS];
#pragma GCC unroll 16
        for (int r = 0; r < VECS; ++r)
          some[r] = word<F::BITS>(codes + r / VECTORS * lie.bytes + r % VECTORS * 4 * LANES,
                                  static_cast<int>(part) * WORDS + n);
#pragma GCC unroll 8
        for (int j = 0; j < FIELDS; ++j, x += COUNT) {
          Vec given[COUNT];
#pragma GCC unroll 8
          for (int t = 0; t < COUNT; ++t) given[t] = held(Vec(x[t]));
#pragma GCC unroll 16
          for (int r = 0; r < VECS; ++r) {
            const Vec number = code<WIDTH>(some[r], j);
#pragma GCC unroll 8
            for (int t = 0; t < COUNT; ++t)
              sums[t][r] = at::vec::fmadd(number, given[t], sums[t][r]);
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < VECS; ++r) {
        Vec by, to;
        lie.pair(panel + r / VECTORS * lie.bytes, unit, part, r % VECTORS * LANES, by, to);
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t)
          totals[t][r] = added(totals[t][r], sums[t][r], by, Vec(input_sums[t]), to);
      }
      input_sums += COUNT;
    }
  }
  for (int t = 0; t < COUNT; ++t)
    for (int r = 0; r < VECS; ++r) totals[t][r].store(out + (t * VECS + r) * LANES);
}

// Adds the products of a part of PANELS unpacked panels, (columns, PANELS, ROWS), with the inputs
// of COUNT tokens.
template <int COLUMNS, int PANELS, int COUNT>
void add(const float* numbers, const Vec* by, const Vec* to, const float* x,
         const float* input_sums, float* totals) {
  constexpr int VECS = PANELS * VECTORS;
  Vec sums[COUNT][VECS];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) sums[t][r] = Vec(0.0f);
#pragma GCC unroll 4
  for (int column = 0; column < COLUMNS; ++column) {
    Vec some[VECS];
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) some[r] = Vec::loadu(numbers + (column * VECS + r) * LANES);
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t) {
      const Vec given = held(Vec(x[column * COUNT + t]));
#pragma GCC unroll 16
      for (int r = 0; r < VECS; ++r) sums[t][r] = at::vec::fmadd(some[r], given, sums[t][r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) {
      float* at = totals + (t * VECS + r) * LANES;
      added(Vec::loadu(at), sums[t][r], by[r], Vec(input_sums[t]), to[r]).store(at);
    }
}

// Indexed by the tokens of a step, less 1.
template <int COLUMNS, int PANELS, int... COUNT>
constexpr auto adding(std::integer_sequence<int, COUNT...>) {
  return std::array{add<COLUMNS, PANELS, COUNT + 1>...};
}
template <int COLUMNS, int PANELS>
constexpr auto ADD = adding<COLUMNS, PANELS>(std::make_integer_sequence<int, STEP>());

// PANELS panels times some steps of tokens, (tokens, PANELS, ROWS). A unit is unpacked once.
template <typename F, int PANELS>
void unfold(const Lie<F>& lie, const uint8_t* panel, const float* inputs, const Steps& steps,
            int64_t first, int64_t last, const uint8_t* next, float* totals) {
  constexpr int VECS = PANELS * VECTORS, WIDTH = width(F::BITS), FIELDS = 32 / WIDTH;
  const int64_t columns = lie.units * UNIT, begin = steps.first(first);
  alignas(64) float numbers[UNIT * VECS * LANES];
  std::fill_n(totals, (steps.first(last) - begin) * VECS * LANES, 0.0f);
  for (int64_t unit = 0; unit < lie.units; ++unit) {
    for (int r = 0; r < VECS; ++r) {
      const uint8_t* codes = panel + r / VECTORS * lie.bytes + lie.codes + unit * lie.CODES;
#pragma GCC unroll 8
      for (int n = 0; n < words(F::BITS); ++n) {
        const Words some = word<F::BITS>(codes + r % VECTORS * 4 * LANES, n);
#pragma GCC unroll 8
        for (int j = 0; j < FIELDS; ++j)
          code<WIDTH>(some, j).store(numbers + ((n * FIELDS + j) * VECS + r) * LANES);
      }
    }
    for (int p = 0; p < PANELS; ++p) lie.fetch(next + p * lie.bytes, unit);
    for (int64_t part = 0; part < lie.PARTS; ++part) {
      Vec by[VECS], to[VECS];
      for (int r = 0; r < VECS; ++r)
        lie.pair(panel + r / VECTORS * lie.bytes, unit, part, r % VECTORS * LANES, by[r], to[r]);
      for (int64_t step = first; step < last; ++step) {
        const int64_t before = steps.first(step), count = steps.length(step);
        const float* x = inputs + before * lie.inputs(columns);
        ADD<F::PART, PANELS>[count - 1](numbers + part * F::PART * VECS * LANES, by, to,
                                        x + (unit * UNIT + part * F::PART) * count,
                                        x + (columns + unit * lie.PARTS + part) * count,
                                        totals + (before - begin) * VECS * LANES);
      }
    }
  }
}

// How many panels are multiplied at once: as many as keep the CPU's units busy without more sums than
// the registers hold.
constexpr int side(int tokens, int bits) {
  if (MANY_REGISTERS) return 4;
  return tokens > FUSED ? 1 : tokens == 1 && (bits == 4 || bits == 8) ? 4 : 2;
}

// The rows first to last times all inputs: those of COUNT tokens, or of more than FUSED if it is 0.
template <typename F, int COUNT>
void multiply(const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
              const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  const Lie<F> lie(columns);
  const Steps steps{tokens, STEP};
  alignas(64) float totals[TOKENS * side(COUNT ? COUNT : STEP, F::BITS) * ROWS];
  int64_t row = first;
  const auto some = [&](auto panels) {
    constexpr int PANELS = decltype(panels)::value;
    const uint8_t* at = weight + (row - first) / ROWS * lie.bytes;
    const int64_t rows = std::min<int64_t>(PANELS * ROWS, last - row);
    const uint8_t* next = row + rows < last ? at + PANELS * lie.bytes : then;
    const auto done = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        write(t, row, rows, totals + (t - begin) * PANELS * ROWS);
    };
    if constexpr (COUNT > 0) {
      fuse<F, PANELS, COUNT>(lie, at, inputs, next, totals);
      done(0, COUNT);
    } else {
      for (int64_t step = 0; step < steps.count; step += TOKENS / STEP) {
        const int64_t end = std::min(steps.count, step + TOKENS / STEP);
        unfold<F, PANELS>(lie, at, inputs, steps, step, end, next, totals);
        done(steps.first(step), steps.first(end));
      }
    }
    row += rows;
  };
  constexpr int PANELS = side(COUNT ? COUNT : STEP, F::BITS);
  while (row + (PANELS - 1) * ROWS < last) some(std::integral_constant<int, PANELS>());
  while (row < last) some(std::integral_constant<int, 1>());
}

// Packs inputs x (tokens, columns) for products with a format, in steps of tokens. A step has its
// inputs (columns, tokens), divided by the places of codes, and their sums (parts, tokens).
template <typename F>
void pack(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin, int64_t end) {
  constexpr int WIDTH = width(F::BITS);
  float places[LANES];
  for (int64_t i = 0; i < LANES; ++i) places[i] = 1 / place(WIDTH, i % (32 / WIDTH));
  const Vec divided = Vec::loadu(places);
  const Steps steps{tokens, tokens <= FUSED ? FUSED : STEP};
  for (int64_t step = 0; step < steps.count; ++step) {
    const int64_t before = steps.first(step), count = steps.length(step);
    for (int64_t t = std::max(begin, before); t < std::min(end, before + count); ++t) {
      float* to = room + before * Lie<F>::inputs(columns) + t - before;
      float* sums = to + columns * count;
      for (int64_t column = 0; column < columns; column += F::PART, sums += count) {
        const float* from = x + t * columns + column;
        float made[F::PART], total[4] = {};
        for (int64_t i = 0; i < F::PART; i += LANES)
          (Vec::loadu(from + i) * divided).store(made + i);
        for (int64_t i = 0; i < F::PART; ++i) to[(column + i) * count] = made[i];
        for (int64_t i = 0; i < F::PART; ++i) total[i % 4] += from[i];  // not in the order of lanes
        *sums = (total[0] + total[2]) + (total[1] + total[3]);
      }
    }
  }
}

template <typename F>
constexpr Format format(const char* name) {
  return {name, F::BYTES, F::NUMBERS, F::PART, width(F::BITS),
          [](int64_t columns) { return Lie<F>(columns).bytes; },
          arrange<F>, unpack<F>, finite<F>, pack<F>,
          {multiply<F, 0>, multiply<F, 1>, multiply<F, 2>}};
}

constexpr std::array FORMATS{
    format<stored::Q4_0>("Q4_0"), format<stored::Q4_1>("Q4_1"), format<stored::Q5_0>("Q5_0"),
    format<stored::Q5_1>("Q5_1"), format<stored::Q8_0>("Q8_0"), format<stored::Q4_K>("Q4_K"),
    format<stored::Q5_K>("Q5_K"), format<stored::Q6_K>("Q6_K")};

}  // namespace

const Format* find(const std::string& name) {
  const auto found = std::find_if(FORMATS.begin(), FORMATS.end(),
                                  [&](const Format& each) { return name == each.name; });
  return found == FORMATS.end() ? nullptr : &*found;
}

}  // namespace panels
