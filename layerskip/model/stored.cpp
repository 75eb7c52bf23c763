// Implements `stored.h`. A separate file, so that it compiles in parallel with the others.

#include "stored.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

#include "formats.h"

namespace stored {
namespace {

constexpr int64_t BLOCK = 24;      // rows: whole tiles, for any number of tokens
constexpr int64_t PIECE = 256;     // columns
constexpr int64_t STEPS = 8;       // of tokens, for which pieces are unpacked
constexpr int64_t FUSED = 4;       // the most tokens for which unpacking is fused with multiplying
// Rows that are unpacked alternately.
constexpr int together(int64_t tokens) { return MANY_REGISTERS || tokens <= 2 ? 4 : 2; }

// Unpacks columns first to first + count of ROWS rows. Calls `take(i, r, numbers)` with LANES
// numbers of row r from the i-th on, in the order of i. Prefetches these columns at `fetch`.
template <typename F, int ROWS, typename Take>
[[gnu::always_inline]] inline void each_number(const Layout& layout, const uint8_t* row,
                                               int64_t first, int64_t count, const uint8_t* fetch,
                                               const Take& take) {
  const bool in_order = count == layout.columns && layout.row_bytes <= SHORT;
  const int64_t apart = in_order ? F::BYTES : layout.row_bytes;
  const uint8_t* unit = row + first / UNIT * F::BYTES;
  fetch += first / UNIT * F::BYTES;
  for (int64_t i = 0; i < count; i += UNIT, unit += F::BYTES) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const int64_t below = r * layout.row_bytes;
      const Place at{layout, row + below, unit + below, first + i};
      for (int64_t line = 0; line < F::BYTES; line += 64) fetch_line(fetch + r * apart + line);
      float by, zero;
      F::pair(at, &by, &zero);
      const Vec scale(by), offset(zero);
#pragma GCC unroll 8
      for (int k = 0; k < UNIT; k += LANES) take(i + k, r, F::numbers(at, k, scale, offset));
    }
    fetch += in_order ? ROWS * F::BYTES : F::BYTES;
  }
}

template <typename F>
void unpack(const Layout& layout, const uint8_t* row, int64_t first, int64_t count,
            const uint8_t* fetch, float* out) {
  each_number<F, 1>(layout, row, first, count, fetch,
                    [&](int64_t i, int, const Vec& numbers) { numbers.store(out + i); });
}

// Adds the products of some rows' columns first to first + count with the inputs of TOKENS tokens
// to sums, (TOKENS, BLOCK) vectors, in the order in which `add_tile` adds those of unpacked rows.
template <typename F, int ROWS, int TOKENS>
void add_rows(const Layout& layout, const uint8_t* row, int64_t first, int64_t count,
              const uint8_t* fetch, const float* x, float* sums) {
  Vec some[TOKENS][ROWS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) some[t][r] = Vec::loadu(sums + (t * BLOCK + r) * LANES);
  each_number<F, ROWS>(layout, row, first, count, fetch,
                       [&](int64_t i, int r, const Vec& numbers) {
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t)
      some[t][r] = at::vec::fmadd(numbers, Vec::loadu(x + i * TOKENS + t * LANES), some[t][r]);
  });
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) some[t][r].store(sums + (t * BLOCK + r) * LANES);
}

using AddRows = void (*)(const Layout&, const uint8_t*, int64_t, int64_t, const uint8_t*,
                         const float*, float*);

struct Format {
  const char* name;
  int64_t bytes, pair;
  void (*unpack)(const Layout&, const uint8_t*, int64_t, int64_t, const uint8_t*, float*);
  AddRows add[FUSED][2];  // by tokens; for one row, and for several together
};

template <typename F>
constexpr Format format(const char* name) {
  return {name, F::BYTES, F::PAIR, unpack<F>,
          {{add_rows<F, 1, 1>, add_rows<F, together(1), 1>},
           {add_rows<F, 1, 2>, add_rows<F, together(2), 2>},
           {add_rows<F, 1, 3>, add_rows<F, together(3), 3>},
           {add_rows<F, 1, 4>, add_rows<F, together(4), 4>}}};
}

constexpr std::array FORMATS{
    format<F32>("F32"),          format<F16>("F16"),         format<BF16>("BF16"),
    format<G4<float>>("G4-F32"), format<G4<Half>>("G4-F16"), format<G4<BFloat16>>("G4-BF16"),
    format<G8<float>>("G8-F32"), format<G8<Half>>("G8-F16"), format<G8<BFloat16>>("G8-BF16"),
    format<F8<float>>("F8-F32"), format<F8<Half>>("F8-F16"), format<F8<BFloat16>>("F8-BF16")};

// The sums of a block of rows with some steps of tokens stay whole vectors until the end of a cut,
// where plain products reduce theirs, too. For more than FUSED tokens, the block is unpacked piece
// by piece, once for all of them. For fewer, a number is multiplied as soon as it is unpacked.

template <int TILE, int TOKENS>
inline void add_tile(const float* weight, int64_t columns, const float* x, float* sums) {
  Vec some[TOKENS][TILE];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < TILE; ++r) some[t][r] = Vec::loadu(sums + (t * BLOCK + r) * LANES);
  accumulate<float, false, TILE, TOKENS>(weight, PIECE, columns, x, {weight, 1 << 30, 0, 0}, some);
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < TILE; ++r) some[t][r].store(sums + (t * BLOCK + r) * LANES);
}

// Adds the products of a piece of some rows with a step's inputs to sums, (TOKENS, BLOCK) vectors.
template <int TOKENS>
void add_piece(const float* weight, int64_t rows, int64_t columns, const float* x, float* sums) {
  constexpr int TILE = ROWS_WITH<float, TOKENS>;
  static_assert(BLOCK % TILE == 0);
  int64_t row = 0;
  for (; row + TILE <= rows; row += TILE)
    add_tile<TILE, TOKENS>(weight + row * PIECE, columns, x, sums + row * LANES);
  for (; row < rows; ++row)
    add_tile<1, TOKENS>(weight + row * PIECE, columns, x, sums + row * LANES);
}

// Indexed by the tokens of a step, less 1.
template <int... TOKENS>
constexpr std::array<decltype(&add_piece<1>), sizeof...(TOKENS)> adding(
    std::integer_sequence<int, TOKENS...>) {
  return {add_piece<TOKENS + 1>...};
}
template <int... TOKENS>
constexpr std::array<decltype(&few<float, false, float, 1>), sizeof...(TOKENS)> multiplying(
    std::integer_sequence<int, TOKENS...>) {
  return {few<float, false, float, TOKENS + 1>...};
}
constexpr std::make_integer_sequence<int, MOST<float>> EACH;
constexpr auto ADD = adding(EACH);
constexpr auto FEW = multiplying(EACH);

// For tokens of more than STEPS steps: rows are unpacked whole into the L2 cache, and multiplied as
// plain rows are, whose sums stay in registers for a whole cut.
void many(const Format& format, const Layout& layout, const uint8_t* weight, int64_t first,
          int64_t last, const float* inputs, const Steps& steps, const Write& write) {
  const int64_t columns = layout.columns;
  const Cuts<float> cuts(columns, false);
  const int64_t group = std::clamp<int64_t>(KEPT / columns / 4 / BLOCK * BLOCK, BLOCK, GROUP);
  thread_local std::vector<float> whole;
  whole.resize(group * columns);
  for (int64_t row = first; row < last; row += group) {
    const int64_t rows = std::min(group, last - row);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* from = weight + (row + r - first) * layout.row_bytes;
      format.unpack(layout, from, 0, columns, from + layout.row_bytes, whole.data() + r * columns);
    }
    for (int64_t step = 0; step < steps.count; ++step) {
      float sums[MOST<float> * GROUP];
      FEW[steps.length(step) - 1](whole.data(), nullptr, 0, rows, cuts,
                                  inputs + steps.first(step) * cuts.width(), sums, GROUP,
                                  whole.data(), step, steps.count);
      for (int64_t t = 0; t < steps.length(step); ++t)
        write(steps.first(step) + t, row, rows, sums + t * GROUP);
    }
  }
}

}  // namespace

Layout layout_of(const std::string& name, int64_t columns, int64_t group) {
  const panels::Format* coded = panels::find(name);
  const auto found = std::find_if(FORMATS.begin(), FORMATS.end(),
                                  [&](const Format& each) { return name == each.name; });
  const auto refuse = [](const auto&... words) { throw std::invalid_argument(c10::str(words...)); };
  if (!coded && found == FORMATS.end()) refuse("there is no format ", name, " of stored weights");
  const int64_t numbers = coded ? coded->numbers : UNIT, pair = coded ? 0 : found->pair;
  if (columns <= 0 || columns % numbers)
    refuse("rows of ", name, " have a multiple of ", numbers, " columns, not ", columns);
  if (pair ? group <= 0 || group % UNIT || columns % group : group != 0)
    refuse("groups of ", group, " columns do not divide ", columns, " in ", name);
  if (coded) return {coded, 0, columns, 0, 0, 0, columns / numbers * coded->bytes};
  const int64_t groups = pair ? columns / group : 0;
  int shift = -1;
  for (int power = 5; power < 40; ++power)
    if (group == int64_t{1} << power) shift = power;
  if (groups == 1) shift = 62;  // a single group
  return {nullptr, static_cast<int>(found - FORMATS.begin()), columns, group, groups, shift,
          columns / UNIT * found->bytes + groups * pair};
}

void unpack(const Layout& layout, const uint8_t* row, float* out) {
  if (layout.coded) return layout.coded->unpack(row, layout.columns, out);
  FORMATS[layout.format].unpack(layout, row, 0, layout.columns, row, out);
}

bool finite(const Layout& layout, const uint8_t* row, float* room) {
  if (layout.coded) return layout.coded->finite(row, layout.columns);
  unpack(layout, row, room);
  float total = 0;  // NaN if any number is not finite
  for (int64_t i = 0; i < layout.columns; ++i) total += room[i] * 0.0f;
  return total == 0.0f;
}

void product(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
             const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  constexpr int64_t MOST_SUMS = STEPS * MOST<float> * BLOCK;
  const Format& format = FORMATS[layout.format];
  const int64_t columns = layout.columns, row_bytes = layout.row_bytes;
  const Steps steps{tokens, MOST<float>};
  if (steps.count > STEPS)
    return many(format, layout, weight, first, last, inputs, steps, write);
  const Cuts<float> cuts(columns, false);
  alignas(64) float piece[BLOCK * PIECE], sums[MOST_SUMS * LANES], totals[MOST_SUMS];
  // What to prefetch while a row is read: rows so far ahead that the prefetch has time to finish.
  const int64_t lead = tokens > FUSED ? BLOCK : (AHEAD / 16 / row_bytes + 1) * 4;
  const auto ahead = [&](int64_t row) {
    const int64_t later = row + lead;
    return later < last ? weight + (later - first) * row_bytes : then + (later - last) * row_bytes;
  };
  for (int64_t row = first; row < last; row += BLOCK) {
    const int64_t rows = std::min(BLOCK, last - row), count = tokens * BLOCK;
    std::fill_n(totals, count, 0.0f);
    for (int64_t cut = 0; cut < cuts.count; ++cut) {
      const int64_t start = cut * cuts.span, here = std::min(cuts.span, columns - start);
      std::fill_n(sums, count * LANES, 0.0f);
      const int64_t width = cut * cuts.room();  // of a token's inputs in earlier cuts
      for (int64_t r = 0; tokens <= FUSED && r < rows;) {
        const int64_t some = r + together(tokens) <= rows ? together(tokens) : 1;
        format.add[tokens - 1][some > 1](layout, weight + (row + r - first) * row_bytes, start,
                                         here, ahead(row + r), inputs + width * tokens,
                                         sums + r * LANES);
        r += some;
      }
      for (int64_t k = 0; tokens > FUSED && k < here; k += PIECE) {
        const int64_t some = std::min(PIECE, here - k);
        for (int64_t r = 0; r < rows; ++r)
          format.unpack(layout, weight + (row + r - first) * row_bytes, start + k, some,
                        ahead(row + r), piece + r * PIECE);
        for (int64_t step = 0; step < steps.count; ++step) {
          const int64_t before = steps.first(step), length = steps.length(step);
          ADD[length - 1](piece, rows, some,
                          inputs + before * cuts.width() + (width + k) * length,
                          sums + before * BLOCK * LANES);
        }
      }
      for (int64_t i = 0; i < count; i += 8) {
        Vec some[8];
        float made[8];
        for (int64_t j = 0; j < 8; ++j) some[j] = Vec::loadu(sums + (i + j) * LANES);
        sums_of<8>(some, made);
        for (int64_t j = 0; j < 8; ++j) totals[i + j] += made[j];
      }
    }
    for (int64_t t = 0; t < tokens; ++t) write(t, row, rows, totals + t * BLOCK);
  }
}

}  // namespace stored
