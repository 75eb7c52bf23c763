// The matrix unit of some CPUs (AMX). With EMULATED_TILES, the tests replace it with plain C++.
//
// The unit has eight tile registers of up to 16 rows of 64 bytes. In products of bfloat16 numbers,
// tiles 0 to 3 hold sums, tile 4 a part of a weight, and tile 7 inputs; `fixed_unit.h` states its own.
// The fewer tiles are in use, the better: a thread that shares its core has hardly more registers in
// hardware, and each load then waits for one (with eight in use, products take four times as long).
// A thread configures the unit before it uses it. `Kept` restores what it found.

#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(CPU_CAPABILITY_AVX512) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {
namespace {

constexpr int64_t ROWS = 16;  // of a tile register
constexpr int64_t MOST = 16;  // tokens in one tile
constexpr int WEIGHT = 4, INPUTS = 7;

// The shapes of the tiles, laid out as `ldtilecfg` reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // in a row of each tile
  uint8_t rows[16] = {};

  void set(int tile, int64_t count, int64_t row_bytes) {
    rows[tile] = static_cast<uint8_t>(count);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};

#ifdef EMULATED_TILES
#include "emulated_tiles.h"
#else

// Inline assembly, because the intrinsics would need compiler flags of their own.
#ifdef HAS_TILES
#define ON_UNIT(...) asm volatile(__VA_ARGS__)

bool has_unit() {
  unsigned a, b, c, d;  // bits 22, 24 and 25 of d: AMX-BF16, AMX-TILE and AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}

bool is_allowed() {
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}
#else
#define ON_UNIT(...)

bool has_unit() { return false; }
bool is_allowed() { return false; }
#endif

inline void configure(const Shapes& shapes) { ON_UNIT("ldtilecfg %0" : : "m"(shapes)); }
// Restores the thread's shapes at its end: other libraries rely on theirs.
struct Kept {
  Shapes before;
  Kept() { ON_UNIT("sttilecfg %0" : "=m"(before)); }
  ~Kept() { configure(before); }
};

template <int TILE>
inline void load(const void* from, int64_t stride) {
  ON_UNIT("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void zero() {
  ON_UNIT("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
inline void store(void* to, int64_t stride) {
  ON_UNIT("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int SUMS, int ROW, int BY = INPUTS>
inline void add_bfloats() {
  ON_UNIT("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROW), "i"(BY));
}
// Signed bytes of tile FROM times signed or unsigned ones of a weight.
template <int SUMS, int WEIGHT, int FROM, bool SIGNED>
inline void add_bytes() {
  if constexpr (SIGNED)
    ON_UNIT("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(FROM), "i"(WEIGHT));
  else
    ON_UNIT("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(FROM), "i"(WEIGHT));
}

#endif

}  // namespace
}  // namespace tiles
