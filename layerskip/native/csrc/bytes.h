// Vectors of 16 numbers, and dot products of bytes, for several kinds of CPU.
//
// One such vector takes 1, 2 or 4 of the CPU's registers. With DOTS, `Dots` uses the CPU's
// instruction for dot products of four bytes. Callers must first ask `has_dots` for it.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace integers {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int VECTORS = 1;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int VECTORS = 2;
#else
constexpr int VECTORS = 4;
#endif

constexpr int BYTES = 64 / VECTORS;  // of a register
constexpr bool KNOWS_DOTS = VECTORS < 4;  // whether such CPUs may have the instruction
typedef int32_t Int [[gnu::vector_size(BYTES)]];
typedef int16_t Short [[gnu::vector_size(BYTES)]];
typedef uint16_t Unsigned [[gnu::vector_size(BYTES)]];
typedef float Float [[gnu::vector_size(BYTES)]];

struct Ints {
  Int v[VECTORS];
};
struct Floats {
  Float v[VECTORS];
};

// Always inlined, because a call would cost more than its body.
template <typename Vectors, typename Function, int... I>
[[gnu::always_inline]] inline Vectors each(const Function& function,
                                              std::integer_sequence<int, I...>) {
  return {{function(I)...}};
}

// Applies a function to the index of each register.
template <typename Vectors, typename Function>
[[gnu::always_inline]] inline Vectors each(const Function& function) {
  return each<Vectors>(function, std::make_integer_sequence<int, VECTORS>());
}

template <typename Vector>
inline Vector loaded(const void* from, int number) {
  Vector out;
  std::memcpy(&out, static_cast<const char*>(from) + number * sizeof(out), sizeof(out));
  return out;
}

inline Ints load(const void* from) {
  return each<Ints>([&](int i) { return loaded<Int>(from, i); });
}
inline Floats load(const float* from) {
  return each<Floats>([&](int i) { return loaded<Float>(from, i); });
}
inline void store(const Ints& x, void* to) { std::memcpy(to, x.v, 64); }
inline void store(const Floats& x, float* to) { std::memcpy(to, x.v, 64); }
inline Floats same(float x) {
  return each<Floats>([&](int) { return x - Float{}; });
}
// The lower and the upper four bits of every byte.
inline Ints lower(const Ints& x) {
  return each<Ints>([&](int i) { return x.v[i] & 0x0f0f0f0f; });
}
inline Ints upper(const Ints& x) {
  return each<Ints>([&](int i) { return (x.v[i] >> 4) & 0x0f0f0f0f; });
}
inline Ints minus_bytes(const Ints& x, uint8_t y) {
  typedef uint8_t Byte [[gnu::vector_size(BYTES)]];
  return each<Ints>([&](int i) {
    return reinterpret_cast<Int>(reinterpret_cast<Byte>(x.v[i]) - y);
  });
}
inline Floats times(const Floats& a, float b) {
  return each<Floats>([&](int i) { return a.v[i] * b; });
}

inline Floats converted(const Ints& x) {
  return each<Floats>([&](int i) { return __builtin_convertvector(x.v[i], Float); });
}

// x * by + to
inline Floats scaled(const Floats& x, const Floats& by, const Floats& to) {
  return each<Floats>([&](int i) {
#if defined(CPU_CAPABILITY_AVX512)
    return static_cast<Float>(_mm512_fmadd_ps(x.v[i], by.v[i], to.v[i]));
#elif defined(CPU_CAPABILITY_AVX2)
    return static_cast<Float>(_mm256_fmadd_ps(x.v[i], by.v[i], to.v[i]));
#elif defined(__FP_FAST_FMAF)
    Float out = to.v[i];
    for (int k = 0; k < BYTES / 4; ++k) out[k] = __builtin_fmaf(x.v[i][k], by.v[i][k], out[k]);
    return out;
#else
    return to.v[i] + x.v[i] * by.v[i];
#endif
  });
}

#if defined(CPU_CAPABILITY_AVX512)

// Products of 16-bit numbers, summed in pairs.
inline Int pairs(Short a, Short b) {
  return reinterpret_cast<Int>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
// Products of bytes, unsigned in `a` and signed in `b`, summed in pairs.
inline Short byte_pairs(Int a, Int b) {
  return reinterpret_cast<Short>(
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
// inline assembly, because the intrinsic would need a file compiled for CPUs that have it
inline void add_dots(Int& sums, Int a, Int b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
inline bool cpu_has_dots() { return __builtin_cpu_supports("avx512vnni"); }

#elif defined(CPU_CAPABILITY_AVX2)

inline Int pairs(Short a, Short b) {
  return reinterpret_cast<Int>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Short byte_pairs(Int a, Int b) {
  return reinterpret_cast<Short>(
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 12
inline void add_dots(Int& sums, Int a, Int b) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
}
inline bool cpu_has_dots() { return __builtin_cpu_supports("avxvnni"); }
#else
inline void add_dots(Int&, Int, Int) {}
inline bool cpu_has_dots() { return false; }
#endif

#else

inline Int pairs(Short a, Short b) {
  const Int x = reinterpret_cast<Int>(a), y = reinterpret_cast<Int>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
inline Short byte_pairs(Int a, Int b) {
  const Short x = reinterpret_cast<Short>(a), y = reinterpret_cast<Short>(b);
  return (x & 255) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
}
inline void add_dots(Int&, Int, Int) {}
inline bool cpu_has_dots() { return false; }

#endif

#ifdef WITHOUT_DOTS  // defined by tests
inline bool has_dots() { return false; }
#else
inline bool has_dots() { return cpu_has_dots(); }
#endif

// Keeps compilers from reordering sums, for which they would need more registers than there are.
template <typename Vector>
inline void settle(Vector& sums) {
#if defined(__x86_64__)
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
    int32_t word;
    std::memcpy(&word, four, 4);
    return word - Int{};
  }
};

}  // namespace
}  // namespace integers
