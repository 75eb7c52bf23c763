// What `stored.h` promises; a file of its own, which compiles beside the other ones.

#include "stored.h"

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "products.h"

namespace stored {
namespace {

using c10::Half;

constexpr int64_t BLOCK = 24;      // rows: whole tiles, whatever a step's tokens
constexpr int64_t PIECE = 256;     // columns
constexpr int64_t STEPS = 8;       // of tokens
constexpr int64_t FUSED = 4;       // tokens, at most
// Rows that are unpacked by turns, for so many tokens.
constexpr int together(int64_t tokens) { return MANY_REGISTERS || tokens <= 2 ? 4 : 2; }

typedef int32_t Ints [[gnu::vector_size(4 * LANES)]];
typedef float Floats [[gnu::vector_size(4 * LANES)]];

template <typename T>
inline T read(const uint8_t* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

// LANES bytes, without a sign or with one. (Compilers widen short vectors byte by byte.)
#if defined(CPU_CAPABILITY_AVX512)
inline Ints bytes(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(read<__m128i>(from)));
}
inline Ints signed_bytes(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(read<__m128i>(from)));
}
#elif defined(CPU_CAPABILITY_AVX2)
inline Ints bytes(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(from))));
}
inline Ints signed_bytes(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(from))));
}
#else
inline Ints bytes(const uint8_t* from) {
  Ints out;
  for (int k = 0; k < LANES; ++k) out[k] = from[k];
  return out;
}
inline Ints signed_bytes(const uint8_t* from) { return bytes(from) << 24 >> 24; }
#endif

// ---------------------------------------------------------------------------------------------
// Formats. The numbers of a block are codes times a scale, plus an offset; SAME of them share both.
// `pairs` finds these of all numbers of a block, `numbers` makes LANES numbers from the i-th of a
// unit on.

// Where a unit lies: in its row, and of a block that has several units the j-th.
struct Place {
  const Layout& layout;
  const uint8_t *row, *block;
  int64_t column, j;
};

inline float half(const uint8_t* from) {
  return static_cast<float>(read<Half>(from));
}

inline Vec floats(const Ints& x) {
  const Floats made = __builtin_convertvector(x, Floats);
  Vec out;
  std::memcpy(&out, &made, sizeof(out));
  return out;
}

// Rounded once: the product of a code and its scale is a float32.
inline Vec affine(const Ints& codes, const Vec& by, const Vec& to) {
  return at::vec::fmadd(floats(codes), by, to);
}

// 32 codes of 4 bits in 16 bytes, the first 16 in their lower halves.
inline Ints nibbles(const uint8_t* from, int i) {
  return i < 16 ? bytes(from + i) & 15 : bytes(from + i - 16) >> 4;
}

// One bit of 32, behind 4 others.
inline Ints fifth(uint32_t bits, int i) {
  Ints places;
  for (int k = 0; k < LANES; ++k) places[k] = i + k;
  return (((Ints{} + static_cast<int32_t>(bits)) >> places) & 1) << 4;
}

template <int64_t BYTES_, int64_t NUMBERS_ = UNIT, int SAME_ = UNIT>
struct Blocks {
  static constexpr int64_t BYTES = BYTES_, NUMBERS = NUMBERS_;
  static constexpr int SAME = SAME_;
  static constexpr int64_t PAIR = 0;  // bytes of a group's scale and zero
  static void pairs(const Place&, float*, float*) {}
};

struct F32 : Blocks<128> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    return Vec::loadu(at.block + 4 * i);
  }
};

struct F16 : Blocks<64> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    Vec out;
    at::vec::load_fp32_from_fp16(reinterpret_cast<const c10::Half*>(at.block + 2 * i), out);
    return out;
  }
};

struct BF16 : Blocks<64> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    return widened(reinterpret_cast<const BFloat16*>(at.block + 2 * i));
  }
};

// Blocks of a unit that begin with its scale, and with its offset or a fixed zero.
template <int64_t BYTES_, int ZERO>
struct Simple : Blocks<BYTES_> {
  static constexpr int64_t HEAD = ZERO < 0 ? 4 : 2;
  static void pairs(const Place& at, float* by, float* to) {
    *by = half(at.block), *to = ZERO < 0 ? half(at.block + 2) : -ZERO * *by;
  }
};

struct Q8_0 : Simple<34, 0> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec&) {
    return floats(signed_bytes(at.block + HEAD + i)) * by;
  }
};

template <int64_t BYTES_, int ZERO>
struct FourBits : Simple<BYTES_, ZERO> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    return affine(nibbles(at.block + FourBits::HEAD, i), by, to);
  }
};
using Q4_0 = FourBits<18, 8>;
using Q4_1 = FourBits<20, -1>;

template <int64_t BYTES_, int ZERO>
struct FiveBits : Simple<BYTES_, ZERO> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    const uint8_t* bits = at.block + FiveBits::HEAD;
    return affine(nibbles(bits + 4, i) | fifth(read<uint32_t>(bits), i), by, to);
  }
};
using Q5_0 = FiveBits<22, 16>;
using Q5_1 = FiveBits<24, -1>;

// Blocks of 256 numbers: two halves, and 8 units' scales and offsets, of 6 bits, that they scale.
template <int64_t BYTES_>
struct K : Blocks<BYTES_, 256> {
  static void pairs(const Place& at, float* by, float* to) {
    const auto first = read<uint32_t>(at.block + 4), second = read<uint32_t>(at.block + 8);
    const auto third = read<uint32_t>(at.block + 12);
    constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x03030303;
    const uint32_t scales[] = {first & SIX, (third & FOUR) | (first >> 6 & TWO) << 4};
    const uint32_t offsets[] = {second & SIX, (third >> 4 & FOUR) | (second >> 6 & TWO) << 4};
    spread(scales, half(at.block), by);
    spread(offsets, -half(at.block + 2), to);
  }
  static void spread(const uint32_t* from, float times, float* to) {
    alignas(16) uint8_t room[16] = {};
    std::memcpy(room, from, 8);
    for (int i = 0; i < 8; i += LANES)
      (floats(bytes(room + i)) * Vec(times)).store(to + i, static_cast<int>(std::min<int64_t>(8, LANES)));
  }
  // of two units that lie together the lower halves of bytes are the first one's
  static Ints lower(const Place& at, int64_t offset, int i) {
    return (bytes(at.block + offset + at.j / 2 * 32 + i) >> static_cast<int>(at.j % 2 * 4)) & 15;
  }
};

struct Q4_K : K<144> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    return affine(lower(at, 16, i), by, to);
  }
};

struct Q5_K : K<176> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    const Ints high = (bytes(at.block + 16 + i) >> static_cast<int>(at.j)) & 1;
    return affine(lower(at, 48, i) | high << 4, by, to);
  }
};

// 4 lower bits in 128 bytes, 2 upper ones in 64, 16 scales of 16 numbers each, and theirs.
struct Q6_K : Blocks<210, 256, 16> {
  static void pairs(const Place& at, float* by, float* to) {
    const Vec times(half(at.block + 208)), zero(-32.0f);
    for (int i = 0; i < 16; i += LANES) {
      const Vec scales = floats(signed_bytes(at.block + 192 + i)) * times;
      scales.store(by + i), (scales * zero).store(to + i);
    }
  }
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    const int64_t part = at.j / 4, q = at.j % 4;
    const Ints low = bytes(at.block + 64 * part + 32 * (q % 2) + i) >> static_cast<int>(q / 2 * 4);
    const Ints high = bytes(at.block + 128 + 32 * part + i) >> static_cast<int>(2 * q);
    return affine((low & 15) | (high & 3) << 4, by, to);
  }
};

// Numbers rounded to a type, in float32.
inline Vec rounded_to(const Vec& x, float) { return x; }

// Veltkamp's splitting (Dekker 1971), whose two steps a compiler must not join. Ties go to even for
// all products of a bfloat16 and a code, of 9 bits at most, as trying all of them shows.
inline Vec rounded_to(const Vec& x, BFloat16) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 wide = x * Vec(65537.0f);
  asm("" : "+v"(wide));
  return Vec(wide) - (Vec(wide) - x);
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 wide = x * Vec(65537.0f);
  asm("" : "+x"(wide));
  return Vec(wide) - (Vec(wide) - x);
#else
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & static_cast<int32_t>(0xffff0000);
  Vec out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
#endif
}

inline Vec rounded_to(const Vec& x, Half) {
#if defined(CPU_CAPABILITY_AVX512)
  return Vec(_mm512_cvtph_ps(_mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT)));
#elif defined(CPU_CAPABILITY_AVX2)
  return Vec(_mm256_cvtph_ps(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT)));
#else
  float some[LANES];
  x.store(some);
  for (float& each : some) each = static_cast<float>(Half(each));
  return Vec::loadu(some);
#endif
}

// Of other files than GGUF: codes of a row, then a scale for each of its groups, a T, and then a
// zero for each. A number is (code - zero) * scale, rounded to a T.
template <int64_t BYTES_, typename T>
struct Groups : Blocks<BYTES_> {
  static constexpr int64_t PAIR = 2 * sizeof(T);
  static int64_t group(const Place& at) {
    return at.layout.shift < 0 ? at.column / at.layout.group : at.column >> at.layout.shift;
  }
  static float scale(const Place& at, int64_t number) {
    const uint8_t* scales = at.row + at.layout.columns * BYTES_ / UNIT;
    return static_cast<float>(read<T>(scales + sizeof(T) * number));
  }
  static void pairs(const Place& at, float* by, float* zero) {
    *by = scale(at, group(at)), *zero = scale(at, at.layout.groups + group(at));
  }
  static Vec scaled(const Vec& codes, const Vec& by, const Vec& zero) {
    return rounded_to((codes - zero) * by, T{});
  }
};

template <typename T>
struct G4 : Groups<16, T> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& zero) {
    return G4::scaled(floats(nibbles(at.block, i)), by, zero);
  }
};

template <typename T>
struct G8 : Groups<32, T> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& zero) {
    return G8::scaled(floats(bytes(at.block + i)), by, zero);
  }
};

// E4M3: bits of a half with a smaller exponent. They have no zeros.
template <typename T>
struct F8 : Groups<32, T> {
  static constexpr int64_t PAIR = sizeof(T);
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  static constexpr float TIMES = 256;
  static Vec values(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(read<__m128i>(from)), 7);
    return Vec(_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(-0x4080))));
#else
    const __m128i codes = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(read<int64_t>(from)));
    return Vec(_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(-0x4080))));
#endif
  }
#else
  static constexpr float TIMES = 1;
  static Vec values(const uint8_t* from) {
    float some[LANES];
    for (int k = 0; k < LANES; ++k)
      some[k] = c10::Float8_e4m3fn(from[k], c10::Float8_e4m3fn::from_bits());
    return Vec::loadu(some);
  }
#endif
  static void pairs(const Place& at, float* by, float*) {
    *by = F8::scale(at, F8::group(at)) * TIMES;
  }
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec&) {
    return rounded_to(values(at.block + i) * by, T{});
  }
};

// `take(i, r, numbers)` is given the numbers of columns first to first + count of ROWS rows, LANES
// from the i-th of them on, in the order of i; the same columns of the rows at `fetch` are fetched.
template <typename F, int ROWS, typename Take>
[[gnu::always_inline]] inline void each_number(const Layout& layout, const uint8_t* row,
                                               int64_t first, int64_t count, const uint8_t* fetch,
                                               const Take& take) {
  constexpr int PAIRS = F::NUMBERS / F::SAME, PER_UNIT = UNIT / F::SAME;
  constexpr int64_t UNIT_BYTES = F::BYTES * UNIT / F::NUMBERS;
  const bool in_order = count == layout.columns && layout.row_bytes <= SHORT;
  const int64_t apart = in_order ? UNIT_BYTES : layout.row_bytes;
  float by[ROWS][PAIRS], to[ROWS][PAIRS];
  const int64_t begin = first / F::NUMBERS * F::BYTES;
  const uint8_t* block = row + begin;
  fetch += begin;
  int64_t j = first % F::NUMBERS / UNIT;
  bool entered = true;
  for (int64_t column = first; column < first + count; column += UNIT) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const int64_t below = r * layout.row_bytes;
      const Place at{layout, row + below, block + below, column, j};
      fetch_line(fetch + r * apart);
      if (entered) F::pairs(at, by[r], to[r]);
#pragma GCC unroll 2
      for (int part = 0; part < PER_UNIT; ++part) {
        const Vec scale(by[r][j * PER_UNIT + part]), offset(to[r][j * PER_UNIT + part]);
#pragma GCC unroll 8
        for (int i = part * F::SAME; i < (part + 1) * F::SAME; i += LANES)
          take(column - first + i, r, F::numbers(at, i, scale, offset));
      }
    }
    fetch += in_order ? ROWS * UNIT_BYTES : UNIT_BYTES;
    entered = ++j == F::NUMBERS / UNIT;
    if (entered) block += F::BYTES, j = 0;
  }
}

template <typename F>
void unpack(const Layout& layout, const uint8_t* row, int64_t first, int64_t count,
            const uint8_t* fetch, float* out) {
  each_number<F, 1>(layout, row, first, count, fetch,
                    [&](int64_t i, int, const Vec& numbers) { numbers.store(out + i); });
}

// Products of some rows' columns first to first + count with inputs of TOKENS tokens are added to
// sums, (tokens, ROWS) vectors, as `add_tile` adds those of unpacked rows.
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
  int64_t bytes, numbers, pair;
  void (*unpack)(const Layout&, const uint8_t*, int64_t, int64_t, const uint8_t*, float*);
  AddRows add[FUSED][2];  // by tokens, for one row and for those together
};

template <typename F>
constexpr Format format(const char* name) {
  return {name, F::BYTES, F::NUMBERS, F::PAIR, unpack<F>,
          {{add_rows<F, 1, 1>, add_rows<F, together(1), 1>},
           {add_rows<F, 1, 2>, add_rows<F, together(2), 2>},
           {add_rows<F, 1, 3>, add_rows<F, together(3), 3>},
           {add_rows<F, 1, 4>, add_rows<F, together(4), 4>}}};
}

constexpr std::array FORMATS{
    format<F32>("F32"),   format<F16>("F16"),   format<BF16>("BF16"),   format<Q8_0>("Q8_0"),
    format<Q4_0>("Q4_0"), format<Q4_1>("Q4_1"), format<Q5_0>("Q5_0"),   format<Q5_1>("Q5_1"),
    format<Q4_K>("Q4_K"), format<Q5_K>("Q5_K"), format<Q6_K>("Q6_K"),
    format<G4<float>>("G4-F32"), format<G4<Half>>("G4-F16"), format<G4<BFloat16>>("G4-BF16"),
    format<G8<float>>("G8-F32"), format<G8<Half>>("G8-F16"), format<G8<BFloat16>>("G8-BF16"),
    format<F8<float>>("F8-F32"), format<F8<Half>>("F8-F16"), format<F8<BFloat16>>("F8-BF16")};

// ---------------------------------------------------------------------------------------------
// Products. The sums of a block of rows with some steps of tokens are kept vector by vector until the
// end of a cut, where plain products sum them up, too. For more than FUSED tokens the block is
// unpacked piece by piece, once for all of them; for fewer a number is used as it is unpacked.

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

// Products of some rows' piece with a step's inputs are added to sums, (tokens, BLOCK) vectors.
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

using Add = void (*)(const float*, int64_t, int64_t, const float*, float*);

// By the tokens of a step.
template <int... TOKENS>
constexpr std::array<Add, sizeof...(TOKENS)> adding(std::integer_sequence<int, TOKENS...>) {
  return {add_piece<TOKENS + 1>...};
}
constexpr auto ADD = adding(std::make_integer_sequence<int, MOST<float>>());

}  // namespace

Layout layout_of(const std::string& name, int64_t columns, int64_t group) {
  const auto found = std::find_if(FORMATS.begin(), FORMATS.end(),
                                  [&](const Format& each) { return name == each.name; });
  const auto refuse = [](const auto&... words) { throw std::invalid_argument(c10::str(words...)); };
  if (found == FORMATS.end()) refuse("there is no format ", name, " of stored weights");
  const Format& format = *found;
  if (columns <= 0 || columns % format.numbers)
    refuse("rows of ", name, " have a multiple of ", format.numbers, " columns, not ", columns);
  if (format.pair ? group <= 0 || group % UNIT || columns % group : group != 0)
    refuse("groups of ", group, " columns do not divide ", columns, " in ", name);
  const int64_t bytes = columns / format.numbers * format.bytes;
  const int64_t groups = format.pair ? columns / group : 0;
  int shift = -1;
  for (int power = 5; power < 40; ++power)
    if (group == int64_t{1} << power) shift = power;
  if (groups == 1) shift = 62;  // the only one
  return {static_cast<int>(found - FORMATS.begin()), columns, group, groups, shift,
          bytes + groups * format.pair};
}

void unpack(const Layout& layout, const uint8_t* row, int64_t first, int64_t count, float* out) {
  FORMATS[layout.format].unpack(layout, row, first, count, row, out);
}

void product(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
             const float* inputs, int64_t tokens, const uint8_t* then, Write write) {
  constexpr int64_t MOST_SUMS = STEPS * MOST<float> * BLOCK;
  const Format& format = FORMATS[layout.format];
  const int64_t columns = layout.columns, row_bytes = layout.row_bytes;
  const Steps steps{tokens, MOST<float>};
  const Cuts<float> cuts(columns, false);
  alignas(64) float piece[BLOCK * PIECE], sums[MOST_SUMS * LANES], totals[MOST_SUMS];
  // what is fetched while a row is read: as far behind it as takes some time to read
  const int64_t lead = tokens > FUSED ? BLOCK : (AHEAD / 16 / row_bytes + 1) * 4;
  const auto ahead = [&](int64_t row) {
    const int64_t later = row + lead;
    return later < last ? weight + (later - first) * row_bytes : then + (later - last) * row_bytes;
  };
  for (int64_t row = first; row < last; row += BLOCK)
    for (int64_t begin = 0; begin < steps.count; begin += STEPS) {
      const int64_t rows = std::min(BLOCK, last - row), end = std::min(steps.count, begin + STEPS);
      const int64_t before = steps.first(begin), count = (steps.first(end) - before) * BLOCK;
      std::fill_n(totals, count, 0.0f);
      for (int64_t cut = 0; cut < cuts.count; ++cut) {
        const int64_t start = cut * cuts.span, here = std::min(cuts.span, columns - start);
        std::fill_n(sums, count * LANES, 0.0f);
        const int64_t width = cut * cuts.room();  // of a token's inputs before
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
          for (int64_t step = begin; step < end; ++step) {
            const float* x = inputs + steps.first(step) * cuts.width();
            const int64_t length = steps.length(step);
            ADD[length - 1](piece, rows, some, x + (width + k) * length,
                            sums + (steps.first(step) - before) * BLOCK * LANES);
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
      for (int64_t i = 0; i < count; i += BLOCK) write(before + i / BLOCK, row, rows, totals + i);
    }
}

}  // namespace stored
