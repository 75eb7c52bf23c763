// The matrix unit that some CPUs have (AMX), or for tests the same in plain C++ (EMULATED_TILES).
//
// It has eight tiles of up to 16 rows of 64 bytes. Here tiles 0 to 3 hold sums of 32 bits, 4 to 6
// parts of a weight, 7 inputs. A thread configures the unit before use, and releases it behind.

#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef EMULATED_TILES
// instructions are written as such: intrinsics would take flags of their own
#if defined(CPU_CAPABILITY_AVX512) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tiles {
namespace {

constexpr int64_t ROWS = 16;  // of a tile, at most
constexpr int64_t MOST = 16;  // tokens of a tile
constexpr int INPUTS = 7;

// Shapes of the tiles, as the instruction reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  void set(int tile, int64_t count, int64_t row_bytes) {
    rows[tile] = static_cast<uint8_t>(count);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};

#if defined(HAS_TILES)

bool has_unit() {
  unsigned a, b, c, d;  // it multiplies bfloat16, it is there, it multiplies bytes
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}

bool is_allowed() {
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

inline void configure(const Shapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
inline void release() { asm volatile("tilerelease"); }

template <int TILE>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int SUMS, int WEIGHT>
inline void add_bfloats() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(WEIGHT), "i"(INPUTS));
}
template <int SUMS, int WEIGHT>
inline void add_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHT));
}

#elif defined(EMULATED_TILES)

bool has_unit() { return true; }
bool is_allowed() { return true; }

thread_local uint8_t registers[8][ROWS][64];
thread_local Shapes shape;

inline void configure(const Shapes& shapes) {
  shape = shapes;
  std::memset(registers, 0, sizeof registers);
}
inline void release() { shape = Shapes(); }

template <int TILE>
inline void zero() {
  std::memset(registers[TILE], 0, sizeof registers[TILE]);
}
template <int TILE>
inline void load(const void* from, int64_t stride) {
  zero<TILE>();
  for (int64_t r = 0; r < shape.rows[TILE]; ++r)
    std::memcpy(registers[TILE][r], static_cast<const char*>(from) + r * stride, shape.bytes[TILE]);
}
template <int TILE>
inline void store(void* to, int64_t stride) {
  for (int64_t r = 0; r < shape.rows[TILE]; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, registers[TILE][r], shape.bytes[TILE]);
}

// A number of 32 bits of a tile.
template <typename T>
inline T number(int tile, int64_t row, int64_t i) {
  T found;
  std::memcpy(&found, registers[tile][row] + 4 * i, 4);
  return found;
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f * x : x; }

// TDPBF16PS: products of the first numbers of all pairs are summed, those of the second ones beside
// them, by fused steps; both sums together are added to what the tile held.
template <int SUMS, int WEIGHT>
inline void add_bfloats() {
  const auto bfloat = [](int tile, int64_t row, int64_t k) {
    c10::BFloat16 found;
    std::memcpy(&found, registers[tile][row] + 2 * k, 2);
    return flushed(static_cast<float>(found));
  };
  for (int64_t r = 0; r < shape.rows[SUMS]; ++r)
    for (int64_t t = 0; t < shape.bytes[SUMS] / 4; ++t) {
      float two[2] = {};
      for (int64_t pair = 0; pair < shape.bytes[WEIGHT] / 4; ++pair)
        for (int64_t i = 0; i < 2; ++i)
          two[i] = flushed(std::fma(bfloat(WEIGHT, r, 2 * pair + i),
                                    bfloat(INPUTS, pair, 2 * t + i), two[i]));
      const float sum = flushed(number<float>(SUMS, r, t) + flushed(two[0] + two[1]));
      std::memcpy(registers[SUMS][r] + 4 * t, &sum, 4);
    }
}

// TDPBSUD: products of four signed bytes of an input and four unsigned ones of a weight are added
// to what the tile held, exactly.
template <int SUMS, int WEIGHT>
inline void add_bytes() {
  for (int64_t t = 0; t < shape.rows[SUMS]; ++t)
    for (int64_t r = 0; r < shape.bytes[SUMS] / 4; ++r) {
      int32_t sum = number<int32_t>(SUMS, t, r);
      for (int64_t k = 0; k < shape.bytes[INPUTS]; ++k)
        sum += static_cast<int8_t>(registers[INPUTS][t][k]) *
            registers[WEIGHT][k / 4][4 * r + k % 4];
      std::memcpy(registers[SUMS][t] + 4 * r, &sum, 4);
    }
}

#else

bool has_unit() { return false; }
bool is_allowed() { return false; }
inline void configure(const Shapes&) {}
inline void release() {}
template <int TILE>
inline void zero() {}
template <int TILE>
inline void load(const void*, int64_t) {}
template <int TILE>
inline void store(void*, int64_t) {}
template <int SUMS, int WEIGHT>
inline void add_bfloats() {}
template <int SUMS, int WEIGHT>
inline void add_bytes() {}

#endif

}  // namespace
}  // namespace tiles
