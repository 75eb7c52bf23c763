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
#include "fixed_unit.h"
#include "rows.h"

namespace panels {
namespace {

// Where a panel has its heads, one for each block, and its codes.
template <typename F>
struct Geometry {
  static constexpr int64_t PARTS = UNIT / F::PART;
  static constexpr int64_t CODES = ROWS * 4 * F::BITS;  // bytes of a unit
  int64_t units, head, codes, bytes;

  explicit Geometry(const Layout& layout)
      : units(layout.columns / UNIT),
        head(F::SCALES_AT + ROWS * F::SCALES * each()),
        codes((units / each() * head + 63) / 64 * 64),
        bytes(codes + units * CODES) {}
  // The units of a block. Where a row is a group, it is one block.
  int64_t each() const { return F::GROUPS ? units : F::NUMBERS / UNIT; }
  int64_t block(int64_t unit) const { return F::GROUPS ? 0 : unit / each(); }
  int64_t inside(int64_t unit) const { return F::GROUPS ? unit : unit % each(); }
  void pair(const uint8_t* panel, int64_t unit, int64_t part, int64_t lane, Vec& by,
            Vec& to) const {
    F::pair(panel + block(unit) * head, inside(unit), part, lane, by, to);
  }
  void fetch(const uint8_t* panel, int64_t unit) const {
    const uint8_t* own = panel + block(unit) * head;
    for (int64_t line = 0; inside(unit) == 0 && line < head; line += 64) fetch_line(own + line);
    for (int64_t line = 0; line < CODES; line += 64)
      fetch_line(panel + codes + unit * CODES + line);
  }
};

// Where in a row the block of a unit begins.
template <typename F>
int64_t block_at(int64_t unit) {
  return unit / (F::NUMBERS / UNIT) * F::BYTES;
}

// Copies a row's factors and scales of a block to its lane of a head.
template <typename F>
void place_head(const Geometry<F>& shape, const uint8_t* row, int64_t block, int64_t lane,
                uint8_t* head) {
  for (int64_t k = 0; k < F::FACTORS; ++k) {
    constexpr int64_t SIZE = sizeof(typename F::T);
    const uint8_t* from = row;
    if constexpr (F::GROUPS)
      from += shape.units * F::BYTES + SIZE * (k * (shape.units / shape.each()) + block);
    else
      from += block * F::BYTES + F::factor_at(k);
    std::memcpy(head + SIZE * (ROWS * k + lane), from, SIZE);
  }
  for (int64_t unit = 0; F::SCALES && unit < shape.each(); ++unit)
    for (int64_t k = 0; k < F::SCALES; ++k)
      head[F::SCALES_AT + ROWS * (F::SCALES * unit + k) + lane] =
          F::scale(row + block * F::BYTES, unit, k);
}

template <typename F>
void arrange(const Layout& layout, const uint8_t* rows, int64_t count, uint8_t* panel) {
  const Geometry<F> shape(layout);
  std::fill_n(panel, shape.bytes, 0);
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* row = rows + r * layout.row_bytes;
    for (int64_t block = 0; block < shape.units / shape.each(); ++block)
      place_head(shape, row, block, r, panel + block * shape.head);
    for (int64_t unit = 0; unit < shape.units; ++unit) {
      uint8_t codes[UNIT];
      F::codes(row + block_at<F>(unit), unit % (F::NUMBERS / UNIT), codes);
      F::put(codes, panel + shape.codes + unit * shape.CODES + 4 * r);
    }
  }
}

template <typename F>
void unpack(const Layout& layout, const uint8_t* row, float* out) {
  const Geometry<F> shape(layout);
  uint8_t head[ROWS * 20] = {};  // of the largest blocks, with a single lane in use
  for (int64_t unit = 0; unit < shape.units; ++unit) {
    const int64_t inside = shape.inside(unit);
    if (inside == 0)
      place_head(shape, row, shape.block(unit), 0, head);
    const uint8_t* block = row + block_at<F>(unit);
    uint8_t codes[UNIT];
    F::codes(block, unit % (F::NUMBERS / UNIT), codes);
    for (int64_t part = 0; part < shape.PARTS; ++part) {
      Vec by(0.0f), to(0.0f);
      float pair[2][LANES];
      F::pair(head, inside, part, 0, by, to);
      by.store(pair[0]), to.store(pair[1]);
      by = Vec(pair[0][0]), to = Vec(pair[1][0]);
      if (F::ZERO > 0) to = by * Vec(-static_cast<float>(F::ZERO));
      for (int64_t i = part * F::PART; i < (part + 1) * F::PART; i += LANES, out += LANES)
        at::vec::fmadd(floats(bytes<uint8_t>(codes + i)), by, to).store(out);  // the product is exact
    }
  }
}

template <typename F, typename Shape>
void multiply_fixed(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
                    const float* inputs, int64_t tokens, const uint8_t* then, Write write,
                    bool on_unit) {
  const auto multiply = on_unit ? multiply_on_unit<F, Shape> : multiply_on_vectors<F, Shape>;
  multiply(Shape(layout), weight, first, last, const_cast<float*>(inputs), tokens, then, write);
}

// Packs inputs for the matrix unit or for vectors, like `Format::pack`.
template <typename F>
void pack_fixed(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                int64_t end, const int32_t* order, bool on_unit) {
  static const bool dots = has_dots();
  const int64_t parts = (columns + F::PART - 1) / F::PART;
  const auto put = [&](auto split, int64_t first, int64_t last, int64_t count) {
    const Fixed<decltype(split)> to(room, parts, first, count);
    for (int64_t t = std::max(begin, first); t < std::min(end, last); ++t)
      for (int64_t part = 0; part < parts; ++part) {
        const float *all = x + t * columns, *from = all + part * F::PART;
        const int64_t at = part * F::PART, here = std::min(F::PART, columns - at);
        float some[F::PART] = {};
        if (order || here < F::PART) {  // inputs are copied only then: loads wait for fresh stores
          for (int64_t i = 0; i < here; ++i) some[i] = all[order ? order[at + i] : at + i];
          from = some;
        }
        to.put(from, part, t - first, count);
      }
  };
  const Steps steps{tokens, MOST<F>};
  const Even even{tokens};
  for (int64_t step = 0; on_unit && step < even.count; ++step)
    put(ForUnit<F>(), even.first(step), even.first(step + 1), even.each);
  for (int64_t step = 0; !on_unit && step < steps.count; ++step) {
    const int64_t first = steps.first(step), last = steps.first(step + 1);
    if (dots) put(ForVectors<F, true>(), first, last, last - first);
    else put(ForVectors<F, false>(), first, last, last - first);
  }
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

// Whether the matrix unit multiplies so many tokens: the same for all formats whose inputs are packed
// alike.
template <typename F>
bool on_unit(int64_t tokens) {
  using Wide = std::conditional_t<F::PART < UNIT, Q6_K, Q8_0>;
  using Fine = std::conditional_t<F::BITS == 4, Q4_0, Wide>;
  return tokens >= unit_from<std::conditional_t<F::ROUGH, F, Fine>>();
}

// A format that is arranged in panels. `inputs`: the same where inputs are packed alike.
template <typename F>
constexpr Format in_panels(const char* name) {
  Format made{name, F::BYTES, F::NUMBERS, F::GROUPS ? F::FACTORS * sizeof(typename F::T) : 0};
  // How inputs are split, and, for copies, each of which has its own `unit_from`, the bits.
  made.inputs = F::PART + 100 * ForVectors<F, false>::PIECES + 1000 * ForUnit<F>::PIECES;
  if (F::ROUGH) made.inputs += 10000 * F::BITS;
  made.panel = [](const Layout& layout) { return Geometry<F>(layout).bytes; };
  made.arrange = arrange<F>;
  made.unpack = unpack<F>;
  made.pack = [](const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end, const int32_t* order) {
    pack_fixed<F>(x, columns, tokens, room, begin, end, order, on_unit<F>(tokens));
  };
  made.multiply = [](const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
                     const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
    multiply_fixed<F, Geometry<F>>(layout, weight, first, last, inputs, tokens, then, write,
                                   on_unit<F>(tokens));
  };
  return made;
}

// A format whose rows are read as they are.
template <typename F>
constexpr Format in_rows(const char* name) {
  Format made{name, F::BYTES, F::NUMBERS, F::FACTORS * sizeof(typename F::T)};
  made.unpack = [](const Layout& layout, const uint8_t* row, float* out) {
    unpack_row<F>(RowShape<F>(layout), row, out);
  };
  made.pack = pack_rows;
  made.multiply = multiply_rows<F>;
  return made;
}

constexpr std::array FORMATS{
    in_rows<Plain<float>>("F32"),  in_rows<Plain<Half>>("F16"),
    in_panels<Q4_0>("Q4_0"),       in_panels<Q4_1>("Q4_1"),       in_panels<Q5_0>("Q5_0"),
    in_panels<Q5_1>("Q5_1"),       in_panels<Q8_0>("Q8_0"),       in_panels<Q4_K>("Q4_K"),
    in_panels<Q5_K>("Q5_K"),       in_panels<Q6_K>("Q6_K"),       in_panels<R4>("R4"),
    in_panels<R8>("R8"),
    in_rows<G4<float>>("G4-F32"),  in_rows<G4<Half>>("G4-F16"),   in_rows<G4<BFloat16>>("G4-BF16"),
    in_rows<G8<float>>("G8-F32"),  in_rows<G8<Half>>("G8-F16"),   in_rows<G8<BFloat16>>("G8-BF16"),
    in_rows<F8<float>>("F8-F32"),  in_rows<F8<Half>>("F8-F16"),   in_rows<F8<BFloat16>>("F8-BF16")};

}  // namespace

Layout layout_of(const std::string& name, int64_t columns, int64_t group) {
  const auto found = std::find_if(FORMATS.begin(), FORMATS.end(),
                                  [&](const Format& each) { return name == each.name; });
  const auto refuse = [](const auto&... words) { throw std::invalid_argument(c10::str(words...)); };
  if (found == FORMATS.end()) refuse("there is no format ", name, " of stored weights");
  const Format& format = *found;
  if (name[0] == 'R' && !group) {  // a copy, whose rows are groups in 8 bits
    columns = (columns + UNIT - 1) / UNIT * UNIT;
    group = format.factor ? columns : 0;
  }
  if (columns <= 0 || columns % format.numbers)
    refuse("rows of ", name, " have a multiple of ", format.numbers, " columns, not ", columns);
  const bool own = format.panel && group != columns;  // in panels, a row is a group
  if (format.factor ? group <= 0 || group % UNIT || columns % group || own : group != 0)
    refuse("groups of ", group, " columns do not divide ", columns, " in ", name);
  Layout layout{&format, columns, group, columns / format.numbers * format.bytes, 0};
  if (group) layout.row_bytes += columns / group * format.factor;
  layout.panel_bytes = format.panel ? format.panel(layout) : ROWS * layout.row_bytes;
  return layout;
}

}  // namespace panels
