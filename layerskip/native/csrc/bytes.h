// Dot products of bytes, for several kinds of CPU.
//
// The numbers of a panel's 16 rows take 1, 2 or 4 registers. With DOTS, `Dots` uses the CPU's
// instruction for dot products of four bytes. Callers must first ask `has_dots` for it.

#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"

namespace integers {
namespace {

constexpr int BYTES = 4 * LANES;  // of a register
constexpr int VECTORS = 64 / BYTES;
typedef int32_t Int [[gnu::vector_size(BYTES)]];
typedef int16_t Short [[gnu::vector_size(BYTES)]];
typedef uint16_t Unsigned [[gnu::vector_size(BYTES)]];
typedef uint8_t Byte [[gnu::vector_size(BYTES)]];
typedef float Float [[gnu::vector_size(BYTES)]];

template <typename T>
inline T read(const void* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

inline Vec floats(const Int& x) {
  const Float made = __builtin_convertvector(x, Float);
  return read<Vec>(&made);
}

#ifdef INTRINSIC

constexpr bool KNOWS_DOTS = true;  // whether some of these CPUs have the instruction
typedef long long Whole [[gnu::vector_size(BYTES)]];

// Products of 16-bit numbers, summed in pairs.
inline Int pairs(Short a, Short b) {
  return reinterpret_cast<Int>(
      INTRINSIC(madd_epi16)(reinterpret_cast<Whole>(a), reinterpret_cast<Whole>(b)));
}
// Products of bytes, unsigned in `a` and signed in `b`, summed in pairs.
inline Short byte_pairs(Int a, Int b) {
  return reinterpret_cast<Short>(
      INTRINSIC(maddubs_epi16)(reinterpret_cast<Whole>(a), reinterpret_cast<Whole>(b)));
}
#else

constexpr bool KNOWS_DOTS = false;
inline Int pairs(Short a, Short b) {
  const Int x = reinterpret_cast<Int>(a), y = reinterpret_cast<Int>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
inline Short byte_pairs(Int a, Int b) {
  const Short x = reinterpret_cast<Short>(a), y = reinterpret_cast<Short>(b);
  return (x & 255) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
}

#endif

// Inline assembly, because the intrinsic would need a file compiled for CPUs that have it. Tests
// define WITHOUT_DOTS.
#if defined(CPU_CAPABILITY_AVX512) && !defined(WITHOUT_DOTS)
inline void add_dots(Int& sums, Int a, Int b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
inline bool has_dots() { return __builtin_cpu_supports("avx512vnni"); }
#elif defined(CPU_CAPABILITY_AVX2) && !defined(WITHOUT_DOTS) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 12)
inline void add_dots(Int& sums, Int a, Int b) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
}
inline bool has_dots() { return __builtin_cpu_supports("avxvnni"); }
#else
inline void add_dots(Int&, Int, Int) {}
inline bool has_dots() { return false; }
#endif

// Keeps compilers from reordering sums, for which they would need more registers than there are.
template <typename Vector>
inline void settle(Vector& sums) {
#ifdef INTRINSIC
  asm("" : "+v"(sums));
#endif
}

// The sums of codes of so many bits times signed numbers, of 1 or 2 bytes each, in the rows of one
// register. Without the CPU's instruction, codes of up to 6 bits are multiplied in pairs, whose
// sums fit into 16 bits for some lines.
template <bool DOTS, int BITS, int SIZE>
struct Dots {
  static constexpr int FITTING = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;  // lines
  Int sums = {};
  Short few = {};

  // Adds a line: the codes of 4 columns, times the numbers of these. Numbers of 2 bytes are in the
  // order of columns 0, 2, 1, 3.
  void add(const Int& codes, const int8_t* numbers, int line) {
    const Int first = all_of(numbers);
    const Unsigned bytes = reinterpret_cast<Unsigned>(codes);
    if constexpr (DOTS) {
      add_dots(sums, codes, first);
    } else if constexpr (BITS < 8) {
      few += byte_pairs(codes, first);
      settle(few);
      if ((line + 1) % FITTING) return;
      sums += pairs(few, 1 - Short{});
      few = Short{};
      settle(sums);
    } else if constexpr (SIZE == 2) {
      sums += pairs(reinterpret_cast<Short>(bytes & 255), reinterpret_cast<Short>(first));
      sums += pairs(reinterpret_cast<Short>(bytes >> 8),
                    reinterpret_cast<Short>(all_of(numbers + 4)));
      settle(sums);
    } else {
      const Short odd = reinterpret_cast<Short>(first);
      sums += pairs(reinterpret_cast<Short>(bytes & 255), odd << 8 >> 8);
      sums += pairs(reinterpret_cast<Short>(bytes >> 8), odd >> 8);
      settle(sums);
    }
  }

  static Int all_of(const int8_t* four) {
    return read<int32_t>(four) - Int{};
  }
};

}  // namespace
}  // namespace integers
