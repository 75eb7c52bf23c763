// Formats whose numbers are codes of 4 to 8 bits (those of GGUF files).
//
// A number is its code times a scale, plus an offset. PART adjacent columns share both. A block
// begins with half-precision factors; some formats multiply them by further bytes for each unit.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "formats.h"
#include "panels.h"

namespace stored {
namespace {

template <int BITS_, int64_t BYTES_, int64_t NUMBERS_, int64_t HALVES_, int64_t SCALES_,
          int64_t PART_ = UNIT>
struct Coded {
  static constexpr int BITS = BITS_;                           // of a code
  static constexpr int64_t BYTES = BYTES_, NUMBERS = NUMBERS_;  // of a block
  static constexpr int64_t HALVES = HALVES_, SCALES = SCALES_;  // of a block; bytes of a unit
  static constexpr int64_t PART = PART_;
  static int64_t half_at(int64_t k) { return 2 * k; }
  static uint8_t scale(const uint8_t*, int64_t, int64_t) { return 0; }
};

// The lower or upper 4 bits of 32 bytes.
inline void nibbles(const uint8_t* from, bool upper, uint8_t* out) {
  for (int i = 0; i < UNIT; ++i) out[i] = from[i] >> (upper ? 4 : 0) & 15;
}

// The half-precision factors of LANES rows of a panel.
inline Vec halves(const uint8_t* from) {
  Vec out;
  at::vec::load_fp32_from_fp16(reinterpret_cast<const Half*>(from), out);
  return out;
}

// Blocks of one unit. Codes of ZERO mean 0; if ZERO is -1, the block has an offset instead.
template <int BITS, int ZERO>
struct Simple : Coded<BITS, (ZERO < 0 ? 4 : 2) + 4 * BITS, UNIT, ZERO < 0 ? 2 : 1, 0> {
  static void codes(const uint8_t* block, int64_t, uint8_t* out) {
    block += 2 * Simple::HALVES;
    if constexpr (BITS == 8) {
      for (int i = 0; i < UNIT; ++i) out[i] = block[i] ^ 0x80;  // they are signed
    } else {
      const uint8_t* low = block + (BITS - 4) * 4;
      for (int i = 0; i < UNIT; ++i) out[i] = low[i % 16] >> (i / 16 * 4) & 15;
      if (BITS == 5)
        for (int i = 0; i < UNIT; ++i) out[i] |= (read<uint32_t>(block) >> i & 1) << 4;
    }
  }
  static void pair(const uint8_t* factors, const uint8_t*, Vec& by, Vec& to) {
    by = halves(factors);
    to = ZERO < 0 ? halves(factors + 2 * panels::ROWS) : by * Vec(-static_cast<float>(ZERO));
  }
};
using Q4_0 = Simple<4, 8>;
using Q4_1 = Simple<4, -1>;
using Q5_0 = Simple<5, 16>;
using Q5_1 = Simple<5, -1>;
using Q8_0 = Simple<8, 128>;

// Blocks of 256 numbers: two factors, for the 6-bit scales and the 6-bit offsets of 8 units. Two
// units share bytes: the first one has the lower halves.
template <int BITS>
struct K : Coded<BITS, 16 + 32 * BITS, 256, 2, 2> {
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
  static void pair(const uint8_t* factors, const uint8_t* scales, Vec& by, Vec& to) {
    by = floats(bytes(scales)) * halves(factors);
    to = floats(bytes(scales + panels::ROWS)) * halves(factors + 2 * panels::ROWS).neg();
  }
};
using Q4_K = K<4>;
using Q5_K = K<5>;

// Low 4 bits in 128 bytes, high 2 bits in 64, scales of 16 numbers each, and their factor.
struct Q6_K : Coded<6, 210, 256, 1, 2, 16> {
  static int64_t half_at(int64_t) { return 208; }
  static uint8_t scale(const uint8_t* block, int64_t unit, int64_t k) {
    return block[192 + 2 * unit + k];
  }
  static void codes(const uint8_t* block, int64_t unit, uint8_t* out) {
    const uint8_t* high = block + 128 + unit / 4 * 32;
    nibbles(block + unit / 4 * 64 + unit % 2 * 32, unit % 4 >= 2, out);
    for (int i = 0; i < UNIT; ++i) out[i] |= (high[i] >> unit % 4 * 2 & 3) << 4;
  }
  static void pair(const uint8_t* factors, const uint8_t* scales, Vec& by, Vec& to) {
    by = floats(signed_bytes(scales)) * halves(factors);
    to = by * Vec(-32.0f);
  }
};

}  // namespace
}  // namespace stored
