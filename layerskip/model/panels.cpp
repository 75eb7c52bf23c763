// Implements `panels.h`. A separate file, so that it compiles in parallel with the others.

#include "panels.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "codes.h"
#include "fixed.h"

namespace panels {
namespace {

constexpr int VECTORS = static_cast<int>(ROWS / LANES);  // of a panel's rows
constexpr int FUSED = 2;               // the most tokens for which numbers are multiplied at once
constexpr int STEP = 6;                // the most tokens of a step
constexpr int64_t TOKENS = 10 * STEP;  // tokens for which a unit is unpacked once

// Where a panel has its heads, one for each block, and its codes.
template <typename F>
struct Geometry {
  static constexpr int64_t PARTS = UNIT / F::PART;
  static constexpr int64_t CODES = ROWS * 4 * F::BITS;  // bytes of a unit
  int64_t units, group, head, codes, bytes;

  explicit Geometry(const Layout& layout)
      : units(layout.columns / UNIT),
        group(layout.group / UNIT),
        head(F::SCALES_AT + ROWS * F::SCALES * each()),
        codes((units / each() * head + 63) / 64 * 64),
        bytes(codes + units * CODES) {}
  // The units of a block.
  int64_t each() const { return F::GROUPS ? group : F::NUMBERS / UNIT; }
  void pair(const uint8_t* panel, int64_t unit, int64_t part, int64_t lane, Vec& by,
            Vec& to) const {
    F::pair(panel + unit / each() * head, unit % each(), part, lane, by, to);
  }
  void fetch(const uint8_t* panel, int64_t unit) const {
    const uint8_t* own = panel + unit / each() * head;
    for (int64_t line = 0; unit % each() == 0 && line < head; line += 64) fetch_line(own + line);
    for (int64_t line = 0; line < CODES; line += 64)
      fetch_line(panel + codes + unit * CODES + line);
  }
};

// Whether inputs become integers.
template <typename F>
constexpr bool FIXED = requires { F::ZERO; };

// Where in a row the block of a unit begins.
template <typename F>
int64_t block_at(int64_t unit) {
  return unit / (F::NUMBERS / UNIT) * F::BYTES;
}

// Copies a row's factors and scales of a block to its lane of a head; BACK: the factors from there.
template <typename F, bool BACK = false>
void place_head(const Geometry<F>& shape, uint8_t* row, int64_t block, int64_t lane,
                uint8_t* head) {
  for (int64_t k = 0; k < F::FACTORS; ++k) {
    constexpr int64_t SIZE = sizeof(typename F::T);
    uint8_t *own = head + SIZE * (ROWS * k + lane), *from = row;
    if constexpr (F::GROUPS)
      from += shape.units * F::BYTES + SIZE * (k * (shape.units / shape.each()) + block);
    else
      from += block * F::BYTES + F::factor_at(k);
    BACK ? std::memcpy(from, own, SIZE) : std::memcpy(own, from, SIZE);
  }
  for (int64_t unit = 0; F::SCALES && unit < shape.each(); ++unit)
    for (int64_t k = 0; k < F::SCALES; ++k)
      head[F::SCALES_AT + ROWS * (F::SCALES * unit + k) + lane] =
          F::scale(row + block * F::BYTES, unit, k);
}

// Copies rows to a panel; BACK: from a panel.
template <typename F, bool BACK>
void copy(const Layout& layout, uint8_t* rows, int64_t count, uint8_t* panel) {
  const Geometry<F> shape(layout);
  if (!BACK) std::fill_n(panel, shape.bytes, 0);
  for (int64_t r = 0; r < count; ++r) {
    uint8_t* row = rows + r * layout.row_bytes;
    for (int64_t block = 0; block < shape.units / shape.each(); ++block)
      place_head<F, BACK>(shape, row, block, r, panel + block * shape.head);
    for (int64_t unit = 0; unit < shape.units; ++unit) {
      uint8_t *codes = panel + shape.codes + unit * shape.CODES, *block = row + block_at<F>(unit);
      if constexpr (!F::IN_LINES) {
        for (int64_t i = 0; i < UNIT; ++i) {
          uint8_t* own = codes + F::SIZE * (ROWS * i + r);
          uint8_t* from = block + F::SIZE * i;
          BACK ? std::memcpy(from, own, F::SIZE) : std::memcpy(own, from, F::SIZE);
        }
      } else if constexpr (BACK) {
        uint8_t each[UNIT];
        F::get(codes + 4 * r, each);
        F::encode(each, block);
      } else {
        uint8_t each[UNIT];
        F::codes(block, unit % (F::NUMBERS / UNIT), each);
        F::put(each, codes + 4 * r);
      }
    }
  }
}

template <typename F>
void unpack(const Layout& layout, const uint8_t* row, float* out) {
  const Geometry<F> shape(layout);
  uint8_t head[ROWS * 20] = {};  // of the largest blocks, with a single lane in use
  for (int64_t unit = 0; unit < shape.units; ++unit) {
    const int64_t inside = unit % shape.each();
    if (inside == 0)
      place_head<F>(shape, const_cast<uint8_t*>(row), unit / shape.each(), 0, head);
    const uint8_t* block = row + block_at<F>(unit);
    uint8_t codes[UNIT];
    if constexpr (F::IN_LINES) F::codes(block, unit % (F::NUMBERS / UNIT), codes);
    for (int64_t part = 0; part < shape.PARTS; ++part) {
      Vec by(0.0f), to(0.0f);
      float pair[2][LANES];
      F::pair(head, inside, part, 0, by, to);
      by.store(pair[0]), to.store(pair[1]);
      by = Vec(pair[0][0]), to = Vec(pair[1][0]);
      if constexpr (FIXED<F>)
        if (F::ZERO > 0) to = by * Vec(-static_cast<float>(F::ZERO));
      for (int64_t i = part * F::PART; i < (part + 1) * F::PART; i += LANES, out += LANES) {
        Vec number;
        if constexpr (F::IN_LINES)
          number = floats(bytes(codes + i));
        else
          number = F::value(block + F::SIZE * i);
        if constexpr (FIXED<F>)  // rounds once, because the product is exact
          number = at::vec::fmadd(number, by, to);
        else
          number = F::number(number, by, to);
        number.store(out);
      }
    }
  }
}

// The numbers of LANES rows in a column of a unit.
template <typename F>
inline Vec number_at(const uint8_t* codes, int64_t column, int64_t lane, const Vec& by,
                     const Vec& to) {
  if constexpr (F::IN_LINES)
    return F::number(F::value(codes, column, lane), by, to);
  else
    return F::number(F::value(codes + F::SIZE * (ROWS * column + lane)), by, to);
}

// PANELS panels times COUNT tokens, (COUNT, PANELS, ROWS).
template <typename F, int PANELS, int COUNT>
void fuse(const Geometry<F>& shape, const uint8_t* panel, const float* x, const uint8_t* next,
          float* out) {
  constexpr int VECS = PANELS * VECTORS;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / (PANELS * shape.CODES));
  Vec sums[COUNT][VECS];
  for (auto& some : sums)
    for (Vec& each : some) each = Vec(0.0f);
  for (int64_t unit = 0; unit < shape.units; ++unit) {
    const int64_t later = unit + ahead;
    for (int p = 0; p < PANELS; ++p)
      shape.fetch((later < shape.units ? panel : next) + p * shape.bytes, later % shape.units);
    const uint8_t* codes = panel + shape.codes + unit * shape.CODES;
    Vec by[VECS], to[VECS];
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r)
      shape.pair(panel + r / VECTORS * shape.bytes, unit, 0, r % VECTORS * LANES, by[r], to[r]);
#pragma GCC unroll 8
    for (int column = 0; column < UNIT; ++column, x += COUNT) {
      Vec given[COUNT];
#pragma GCC unroll 8
      for (int t = 0; t < COUNT; ++t) given[t] = held(Vec(x[t]));
#pragma GCC unroll 16
      for (int r = 0; r < VECS; ++r) {
        const Vec number = number_at<F>(codes + r / VECTORS * shape.bytes, column,
                                        r % VECTORS * LANES, by[r], to[r]);
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t) sums[t][r] = at::vec::fmadd(number, given[t], sums[t][r]);
      }
    }
  }
  for (int t = 0; t < COUNT; ++t)
    for (int r = 0; r < VECS; ++r) sums[t][r].store(out + (t * VECS + r) * LANES);
}

// Adds the products of some units of PANELS unpacked panels, (columns, PANELS, ROWS), with the
// inputs of COUNT tokens.
template <typename F, int PANELS, int COUNT>
void add(const float* numbers, int64_t units, const float* x, float* totals) {
  constexpr int VECS = PANELS * VECTORS;
  Vec sums[COUNT][VECS];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) sums[t][r] = Vec::loadu(totals + (t * VECS + r) * LANES);
#pragma GCC unroll 4
  for (int64_t column = 0; column < units * UNIT; ++column, x += COUNT, numbers += VECS * LANES) {
    Vec some[VECS];
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) some[r] = Vec::loadu(numbers + r * LANES);
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t) {
      const Vec given = held(Vec(x[t]));
#pragma GCC unroll 16
      for (int r = 0; r < VECS; ++r) sums[t][r] = at::vec::fmadd(some[r], given, sums[t][r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < VECS; ++r) sums[t][r].store(totals + (t * VECS + r) * LANES);
}

// Indexed by the tokens of a step, less 1.
template <typename F, int PANELS, int... COUNT>
constexpr auto adding(std::integer_sequence<int, COUNT...>) {
  return std::array{add<F, PANELS, COUNT + 1>...};
}
template <typename F, int PANELS>
constexpr auto ADD = adding<F, PANELS>(std::make_integer_sequence<int, STEP>());

// PANELS panels times some steps of tokens, (tokens, PANELS, ROWS). A unit is unpacked once.
template <typename F, int PANELS>
void unfold(const Geometry<F>& shape, const uint8_t* panel, const float* inputs, const Steps& steps,
            int64_t first, int64_t last, const uint8_t* next, float* totals) {
  constexpr int VECS = PANELS * VECTORS;
  const int64_t columns = shape.units * UNIT, begin = steps.first(first);
  constexpr int64_t CHUNK = MANY_REGISTERS ? 2 : 4;  // units
  alignas(64) float numbers[CHUNK * UNIT * VECS * LANES];
  std::fill_n(totals, (steps.first(last) - begin) * VECS * LANES, 0.0f);
  for (int64_t start = 0; start < shape.units; start += CHUNK) {
    const int64_t units = std::min(CHUNK, shape.units - start);
    for (int64_t at = 0; at < units; ++at) {
      for (int p = 0; first == 0 && p < PANELS; ++p)  // once for all tokens
        shape.fetch(next + p * shape.bytes, start + at);
      for (int r = 0; r < VECS; ++r) {
        const uint8_t* from = panel + r / VECTORS * shape.bytes;
        const int64_t lane = r % VECTORS * LANES;
        Vec by(0.0f), to(0.0f);
        shape.pair(from, start + at, 0, lane, by, to);
        float* made = numbers + (at * UNIT * VECS + r) * LANES;
#pragma GCC unroll 8
        for (int column = 0; column < UNIT; ++column)
          number_at<F>(from + shape.codes + (start + at) * shape.CODES, column, lane, by, to)
              .store(made + column * VECS * LANES);
      }
    }
    for (int64_t step = first; step < last; ++step) {
      const int64_t before = steps.first(step), count = steps.length(step);
      ADD<F, PANELS>[count - 1](numbers, units, inputs + before * columns + start * UNIT * count,
                                totals + (before - begin) * VECS * LANES);
    }
  }
}

// The rows first to last times all inputs: those of COUNT tokens, or of more than FUSED if it is 0.
template <typename F, int COUNT>
void multiply_all(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
                  const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  constexpr int SIDE = MANY_REGISTERS ? 4 : COUNT ? 2 : 1;
  const Geometry<F> shape(layout);
  const Steps steps{tokens, STEP};
  alignas(64) float totals[TOKENS * SIDE * ROWS];
  int64_t row = first;
  const auto some = [&](auto panels) {
    constexpr int PANELS = decltype(panels)::value;
    const uint8_t* at = weight + (row - first) / ROWS * shape.bytes;
    const int64_t rows = std::min<int64_t>(PANELS * ROWS, last - row);
    const uint8_t* next = row + rows < last ? at + PANELS * shape.bytes : then;
    const auto done = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        write(t, row, rows, totals + (t - begin) * PANELS * ROWS);
    };
    if constexpr (COUNT > 0) {
      fuse<F, PANELS, COUNT>(shape, at, inputs, next, totals);
      done(0, COUNT);
    } else {
      for (int64_t begin = 0; begin < steps.count; begin += TOKENS / STEP) {
        const int64_t end = std::min(steps.count, begin + TOKENS / STEP);
        unfold<F, PANELS>(shape, at, inputs, steps, begin, end, next, totals);
        done(steps.first(begin), steps.first(end));
      }
    }
    row += rows;
  };
  while (row + (SIDE - 1) * ROWS < last) some(std::integral_constant<int, SIDE>());
  while (row < last) some(std::integral_constant<int, 1>());
}

// The smallest number of tokens for which the matrix unit is faster than vectors, timed once.
template <typename F>
int64_t unit_from() {
  static const int64_t found = [] {
    constexpr int64_t COLUMNS = 512, PANELS = 16;
    const Layout layout{nullptr, COLUMNS, F::GROUPS ? COLUMNS : 0};
    const std::vector<float> x(tiles::MOST * COLUMNS, 1.0f);
    const std::vector<uint8_t> weight(PANELS * Geometry<F>(layout).bytes);
    std::vector<float> room(tiles::MOST * packed_width(COLUMNS));
    return tiles::faster_from([&](int64_t tokens, bool on_unit) {
      pack_fixed<F>(x.data(), COLUMNS, tokens, room.data(), 0, tokens, nullptr, on_unit);
      multiply_fixed<F, Geometry<F>>(layout, weight.data(), 0, PANELS * ROWS, room.data(), tokens,
                                     weight.data(), [](int64_t, int64_t, int64_t, const float*) {},
                                     on_unit);
    });
  }();
  return found;
}

// Whether the matrix unit multiplies so many tokens: the same for all formats of `inputs_of`.
template <typename F>
bool on_unit(int64_t tokens) {
  using Wide = std::conditional_t<F::PART < UNIT, Q6_K, Q8_0>;
  using Fine = std::conditional_t<F::BITS == 4, Q4_0, Wide>;
  return tokens >= unit_from<std::conditional_t<F::ROUGH, F, Fine>>();
}

template <typename F>
void multiply(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
              const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  if constexpr (FIXED<F>) {
    multiply_fixed<F, Geometry<F>>(layout, weight, first, last, inputs, tokens, then, write,
                                   on_unit<F>(tokens));
  } else {
    const auto some = std::array{multiply_all<F, 0>, multiply_all<F, 1>, multiply_all<F, 2>};
    some[tokens > FUSED ? 0 : tokens](layout, weight, first, last, inputs, tokens, then, write);
  }
}

// Packs inputs x (tokens, columns): in fixed point, or in steps of (columns, tokens). `order` says
// which input each column multiplies.
template <typename F>
void pack(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin, int64_t end,
          const int32_t* order) {
  if constexpr (FIXED<F>)
    return pack_fixed<F>(x, columns, tokens, room, begin, end, order, on_unit<F>(tokens));
  const Steps steps{tokens, tokens <= FUSED ? FUSED : STEP};
  for (int64_t step = 0; step < steps.count; ++step) {
    const int64_t before = steps.first(step), count = steps.length(step);
    for (int64_t t = std::max(begin, before); t < std::min(end, before + count); ++t) {
      float* to = room + before * columns + t - before;
      for (int64_t i = 0; i < columns; ++i) to[i * count] = x[t * columns + (order ? order[i] : i)];
    }
  }
}

// The same for all formats for which inputs are packed alike.
template <typename F>
constexpr int64_t inputs_of() {
  if constexpr (FIXED<F>) return F::ROUGH ? 100 + F::BITS : F::BITS == 4 ? 4 : F::PART;
  return 0;
}

template <typename F>
constexpr Format format(const char* name) {
  constexpr int64_t FACTORS = F::FACTORS * sizeof(typename F::T);
  Format made{name, F::BYTES, F::NUMBERS, F::GROUPS ? FACTORS : 0,
              inputs_of<F>(),
              [](const Layout& layout) { return Geometry<F>(layout).bytes; },
              copy<F, false>, nullptr, unpack<F>, pack<F>, multiply<F>};
  if constexpr (F::GROUPS || requires { F::encode; }) made.restore = copy<F, true>;
  return made;
}

constexpr std::array FORMATS{
    format<Plain<float>>("F32"), format<Plain<Half>>("F16"),
    format<Q4_0>("Q4_0"),        format<Q4_1>("Q4_1"),       format<Q5_0>("Q5_0"),
    format<Q5_1>("Q5_1"),        format<Q8_0>("Q8_0"),       format<Q4_K>("Q4_K"),
    format<Q5_K>("Q5_K"),        format<Q6_K>("Q6_K"),       format<R4>("R4"),
    format<R8>("R8"),
    format<G4<float>>("G4-F32"), format<G4<Half>>("G4-F16"), format<G4<BFloat16>>("G4-BF16"),
    format<G8<float>>("G8-F32"), format<G8<Half>>("G8-F16"), format<G8<BFloat16>>("G8-BF16"),
    format<F8<float>>("F8-F32"), format<F8<Half>>("F8-F16"), format<F8<BFloat16>>("F8-BF16")};

}  // namespace

Layout layout_of(const std::string& name, int64_t columns, int64_t group) {
  const auto found = std::find_if(FORMATS.begin(), FORMATS.end(),
                                  [&](const Format& each) { return name == each.name; });
  const auto refuse = [](const auto&... words) { throw std::invalid_argument(c10::str(words...)); };
  if (found == FORMATS.end()) refuse("there is no format ", name, " of stored weights");
  const Format& format = *found;
  if (columns <= 0 || columns % format.numbers)
    refuse("rows of ", name, " have a multiple of ", format.numbers, " columns, not ", columns);
  if (format.factor ? group <= 0 || group % UNIT || columns % group : group != 0)
    refuse("groups of ", group, " columns do not divide ", columns, " in ", name);
  Layout layout{&format, columns, group, columns / format.numbers * format.bytes, 0};
  if (group) layout.row_bytes += columns / group * format.factor;
  layout.panel_bytes = format.panel(layout);
  return layout;
}

}  // namespace panels
