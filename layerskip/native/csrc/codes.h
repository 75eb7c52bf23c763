// How the bytes of weights in panels become codes, scales and offsets, for each format.
//
// A row of a file consists of units of 32 numbers. One or more units form a block. A block has
// factors and, in some formats, further bytes of scales for each unit. From them, `pair` makes the
// scale and offset of a part of a unit, for LANES rows of a panel.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "bytes.h"
#include "panels.h"
#include "products.h"

namespace panels {
namespace {

using c10::Half;
using namespace integers;

constexpr int64_t UNIT = 32;  // columns

// LANES bytes of a signed or unsigned type. Compilers would widen short vectors byte by byte.
template <typename T>
inline Int bytes(const uint8_t* from) {
  int32_t out[LANES];
  for (int k = 0; k < LANES; ++k) out[k] = static_cast<T>(from[k]);
  return read<Int>(out);
}

// Codes of 4, 5, 6 or 8 bits, in lines of 4 columns of all rows. Codes of 4 bits share the bytes of
// two lines; those of 5 and 6 bits are put together from two planes, of the lower 4 bits and of the
// upper bits.
template <int BITS_>
struct InLines {
  static constexpr int BITS = BITS_, HIGH = BITS - 4;

  // The codes of line n of a unit, one a byte, for the rows of register v.
  static Int line(const uint8_t* codes, int n, int v) {
    const auto load = [&](int i) { return read<Int>(codes + 64 * i + sizeof(Int) * v); };
    if constexpr (BITS == 8) return load(n);
    const Int both = load(n / 2), low = (n % 2 ? both >> 4 : both) & 0x0f0f0f0f;
    if constexpr (BITS == 4) return low;
    constexpr int EACH = 8 / std::max(HIGH, 1);  // lines whose upper bits share bytes
    const Int high = load(4 + n / EACH);
    const int up = 4 - n % EACH * HIGH;
    const Int placed = up > 0 ? high << up : high >> -up;
    return low | (placed & static_cast<int32_t>(((1u << HIGH) - 1) * 0x10101010u));
  }
  // Puts a row's codes of a unit, one a byte, into its lane of the lines.
  static void put(const uint8_t* codes, uint8_t* to) {
    uint32_t lines[BITS] = {};
    for (int n = 0; n < 8; ++n) {
      const auto four = read<uint32_t>(codes + 4 * n);
      if constexpr (BITS == 8) {
        lines[n] = four;
      } else {
        lines[n / 2] |= (four & 0x0f0f0f0f) << n % 2 * 4;
        if constexpr (BITS > 4)
          lines[4 + n * HIGH / 8] |= (four >> 4 & 0x0f0f0f0f) << n * HIGH % 8;
      }
    }
    for (int n = 0; n < BITS; ++n) std::memcpy(to + 4 * ROWS * n, &lines[n], 4);
  }
};

// The factors and scales of blocks: FACTORS numbers of type T, and SCALES bytes for each unit.
// PART columns share a scale.
template <typename T_, int64_t FACTORS_, int64_t SCALES_ = 0, int64_t PART_ = UNIT>
struct Head {
  using T = T_;
  static constexpr int64_t FACTORS = FACTORS_, SCALES = SCALES_, PART = PART_;
  static constexpr int64_t SCALES_AT = ROWS * FACTORS * sizeof(T);  // in the head of a panel
  static uint8_t scale(const uint8_t*, int64_t, int64_t) { return 0; }
  // Factor k of LANES rows.
  static Vec factor(const uint8_t* head, int64_t k, int64_t lane) {
    return widened(reinterpret_cast<const T*>(head) + ROWS * k + lane);
  }
};

// Formats of GGUF. Their blocks hold everything. `codes` makes the codes of a unit, one a byte.

template <int64_t BYTES_, int64_t NUMBERS_>
struct Blocks {
  static constexpr int64_t BYTES = BYTES_, NUMBERS = NUMBERS_;
  static constexpr bool GROUPS = false;
  static constexpr int64_t factor_at(int64_t k) { return 2 * k; }
};

// Codes of 4 bits: the first 16 in the lower halves of bytes, the others in the upper ones.
inline void split_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < UNIT; ++i) codes[i] = bytes[i % 16] >> (i / 16 * 4) & 15;
}
// Codes of 8 bits, which are signed in files.
inline void flip_signs(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < UNIT; ++i) to[i] = from[i] ^ 128;
}

// Blocks of one unit. Codes of ZERO mean 0; if ZERO is -1, the block has an offset instead.
template <int BITS, int ZERO_, typename T = Half, int64_t FACTORS = ZERO_ < 0 ? 2 : 1>
struct Simple : InLines<BITS>, Head<T, FACTORS>, Blocks<2 * FACTORS + 4 * BITS, UNIT> {
  static constexpr int ZERO = ZERO_;
  static constexpr bool ROUGH = false;  // whether inputs are rounded to 8 bits
  static void codes(const uint8_t* block, int64_t, uint8_t* out) {
    const uint8_t* high = block + 2 * FACTORS;
    BITS == 8 ? flip_signs(high, out) : split_nibbles(high + (BITS - 4) * 4, out);
    if (BITS == 5)
      for (int i = 0; i < UNIT; ++i) out[i] |= (read<uint32_t>(high) >> i & 1) << 4;
  }
  static void pair(const uint8_t* head, int64_t, int64_t, int64_t lane, Vec& by, Vec& to) {
    by = Simple::factor(head, 0, lane);
    if (ZERO < 0) to = Simple::factor(head, 1, lane);
  }
};
using Q4_0 = Simple<4, 8>;
using Q4_1 = Simple<4, -1>;
using Q5_0 = Simple<5, 16>;
using Q5_1 = Simple<5, -1>;
using Q8_0 = Simple<8, 128>;

inline void nibbles(const uint8_t* from, bool upper, uint8_t* out) {
  for (int i = 0; i < UNIT; ++i) out[i] = from[i] >> (upper ? 4 : 0) & 15;
}

// Blocks of 256 numbers: two factors, for the 6-bit scales and the 6-bit offsets of 8 units. Two
// units share bytes: the first one has the lower halves.
template <int BITS>
struct K : InLines<BITS>, Head<Half, 2, 2>, Blocks<16 + 32 * BITS, 256> {
  static constexpr int ZERO = -1;
  static constexpr bool ROUGH = false;
  static uint8_t scale(const uint8_t* block, int64_t unit, int64_t k) {
    const uint8_t* from = block + 4 + unit;
    if (unit < 4) return from[4 * k] & 63;
    return (from[4] >> 4 * k & 15) | from[4 * k - 4] >> 6 << 4;
  }
  static void codes(const uint8_t* block, int64_t unit, uint8_t* out) {
    nibbles(block + 16 + (BITS - 4) * 32 + unit / 2 * 32, unit % 2, out);
    if (BITS == 5)
      for (int i = 0; i < UNIT; ++i) out[i] |= (block[16 + i] >> unit & 1) << 4;
  }
  static void pair(const uint8_t* head, int64_t unit, int64_t, int64_t lane, Vec& by, Vec& to) {
    const uint8_t* scales = head + K::SCALES_AT + 2 * ROWS * unit + lane;
    by = floats(bytes<uint8_t>(scales)) * K::factor(head, 0, lane);
    to = floats(bytes<uint8_t>(scales + ROWS)) * K::factor(head, 1, lane).neg();
  }
};
using Q4_K = K<4>;
using Q5_K = K<5>;

// Low 4 bits in 128 bytes, high 2 bits in 64, scales of 16 numbers each, and their factor.
struct Q6_K : InLines<6>, Head<Half, 1, 2, 16>, Blocks<210, 256> {
  static constexpr int ZERO = 32;
  static constexpr bool ROUGH = false;
  static constexpr int64_t factor_at(int64_t) { return 208; }
  static uint8_t scale(const uint8_t* block, int64_t unit, int64_t k) {
    return block[192 + 2 * unit + k];
  }
  static void codes(const uint8_t* block, int64_t unit, uint8_t* out) {
    const uint8_t* high = block + 128 + unit / 4 * 32;
    nibbles(block + unit / 4 * 64 + unit % 2 * 32, unit % 4 >= 2, out);
    for (int i = 0; i < UNIT; ++i) out[i] |= (high[i] >> unit % 4 * 2 & 3) << 4;
  }
  static void pair(const uint8_t* head, int64_t unit, int64_t part, int64_t lane, Vec& by, Vec&) {
    const uint8_t* scales = head + SCALES_AT + ROWS * (2 * unit + part) + lane;
    by = floats(bytes<int8_t>(scales)) * factor(head, 0, lane);
  }
};

// The copies of `rounded.py`: in 4 bits with a scale for each unit, in 8 bits for each row.
struct R4 : Simple<4, 8, BFloat16> {
  static constexpr bool ROUGH = true;
};
struct R8 : InLines<8>, Head<BFloat16, 1>, Blocks<UNIT, UNIT> {
  static constexpr int ZERO = 128;
  static constexpr bool ROUGH = true, GROUPS = true;  // a row is a group
  static void codes(const uint8_t* unit, int64_t, uint8_t* out) { flip_signs(unit, out); }
  static void pair(const uint8_t* head, int64_t, int64_t, int64_t lane, Vec& by, Vec&) {
    by = factor(head, 0, lane);
  }
};

}  // namespace
}  // namespace panels
