// Vectors of 16 numbers, and products of bytes, for several kinds of CPU.
//
// `Four` is what a line of a weight is multiplied with: four inputs of a token for all rows;
// `dots<DOTS>` adds the products of four bytes each to 32-bit sums, with an instruction for them
// where there is one (DOTS, which a caller asks `has_dots` for).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace integers {
namespace {

#if defined(CPU_CAPABILITY_AVX512)

using Ints = __m512i;
using Floats = __m512;

inline Ints load(const void* from) { return _mm512_loadu_si512(from); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints plus(Ints x, int32_t y) { return _mm512_add_epi32(x, all(y)); }
inline void store(Ints x, void* to) { _mm512_storeu_si512(to, x); }
inline Floats zero() { return _mm512_setzero_ps(); }
inline Ints lower(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints upper(Ints x) { return lower(_mm512_srli_epi16(x, 4)); }
inline Floats scaled(Ints x, Floats by, Floats to) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), by, to);
}
inline Floats times(Floats a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
inline Floats same(float x) { return _mm512_set1_ps(x); }
inline Floats widened(const void* bfloats) {
  const __m256i some = _mm256_loadu_si256(static_cast<const __m256i*>(bfloats));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16));
}
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(Floats x, float* to) { _mm512_storeu_ps(to, x); }

template <bool DOTS>
struct Four {
  Ints bytes, even, odd;
  explicit Four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    bytes = all(four);
    if constexpr (!DOTS) {
      even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
      odd = _mm512_srai_epi16(bytes, 8);
    }
  }
};

template <bool DOTS, int BITS>
inline Ints dots(Ints sums, Ints weights, const Four<DOTS>& x) {
  if constexpr (DOTS) {
    // no intrinsic: that would take a file of its own, compiled for machines that have it
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x.bytes));
    return sums;
  } else if constexpr (BITS == 4) {  // 2 * 15 * 127 does not saturate
    const Ints pairs = _mm512_maddubs_epi16(weights, x.bytes);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  } else {
    const Ints even = _mm512_and_si512(weights, _mm512_set1_epi16(255));
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(even, x.even));
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), x.odd));
  }
}

inline bool has_dots() {
#ifdef WITHOUT_DOTS  // by tests
  return false;
#else
  return __builtin_cpu_supports("avx512vnni");
#endif
}

#elif defined(CPU_CAPABILITY_AVX2)

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 12
#define KNOWS_AVX_VNNI
#endif

struct Ints {
  __m256i v[2];
};
struct Floats {
  __m256 v[2];
};
template <typename Vector, typename Function>
inline Vector each(const Function& function) {
  return {{function(0), function(1)}};
}

inline Ints load(const void* from) {
  const __m256i* at = static_cast<const __m256i*>(from);
  return each<Ints>([&](int i) { return _mm256_loadu_si256(at + i); });
}
inline Ints all(int32_t x) {
  return each<Ints>([&](int) { return _mm256_set1_epi32(x); });
}
inline Ints plus(const Ints& x, int32_t y) {
  return each<Ints>([&](int i) { return _mm256_add_epi32(x.v[i], _mm256_set1_epi32(y)); });
}
inline void store(const Ints& x, void* to) {
  for (int i = 0; i < 2; ++i) _mm256_storeu_si256(static_cast<__m256i*>(to) + i, x.v[i]);
}
inline Floats zero() {
  return each<Floats>([](int) { return _mm256_setzero_ps(); });
}
inline Floats same(float x) {
  return each<Floats>([&](int) { return _mm256_set1_ps(x); });
}
inline __m256i lower(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints lower(const Ints& x) {
  return each<Ints>([&](int i) { return lower(x.v[i]); });
}
inline Ints upper(const Ints& x) {
  return each<Ints>([&](int i) { return lower(_mm256_srli_epi16(x.v[i], 4)); });
}
inline Floats scaled(const Ints& x, const Floats& by, const Floats& to) {
  return each<Floats>(
      [&](int i) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x.v[i]), by.v[i], to.v[i]); });
}
inline Floats times(const Floats& a, float b) {
  return each<Floats>([&](int i) { return _mm256_mul_ps(a.v[i], _mm256_set1_ps(b)); });
}
inline Floats widened(const void* bfloats) {
  const __m128i* at = static_cast<const __m128i*>(bfloats);
  return each<Floats>([&](int i) {
    const __m256i some = _mm256_cvtepu16_epi32(_mm_loadu_si128(at + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(some, 16));
  });
}
inline Floats load(const float* from) {
  return each<Floats>([&](int i) { return _mm256_loadu_ps(from + 8 * i); });
}
inline void store(const Floats& x, float* to) {
  for (int i = 0; i < 2; ++i) _mm256_storeu_ps(to + 8 * i, x.v[i]);
}

template <bool DOTS>
struct Four {
  __m256i bytes, even, odd;
  explicit Four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    bytes = _mm256_set1_epi32(four);
    if constexpr (!DOTS) {
      even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      odd = _mm256_srai_epi16(bytes, 8);
    }
  }
};

template <bool DOTS, int BITS>
inline Ints dots(const Ints& to, const Ints& weights, const Four<DOTS>& x) {
  return each<Ints>([&](int i) {
    __m256i sums = to.v[i];
    if constexpr (DOTS) {
#ifdef KNOWS_AVX_VNNI
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights.v[i]), "x"(x.bytes));
#endif
      return sums;
    } else if constexpr (BITS == 4) {
      const __m256i pairs = _mm256_maddubs_epi16(weights.v[i], x.bytes);
      return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      const __m256i even = _mm256_and_si256(weights.v[i], _mm256_set1_epi16(255));
      const __m256i odd = _mm256_srli_epi16(weights.v[i], 8);
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(even, x.even));
      return _mm256_add_epi32(sums, _mm256_madd_epi16(odd, x.odd));
    }
  });
}

inline bool has_dots() {
#ifdef KNOWS_AVX_VNNI
  return __builtin_cpu_supports("avxvnni");
#else
  return false;
#endif
}

#else

struct Ints {
  int32_t v[16];
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(v); }
};
struct Floats {
  float v[16];
};

inline Ints load(const void* from) {
  Ints out;
  std::memcpy(out.v, from, 64);
  return out;
}
inline Ints all(int32_t x) {
  Ints out;
  std::fill_n(out.v, 16, x);
  return out;
}
inline Ints plus(Ints x, int32_t y) {
  for (int32_t& each : x.v) each += y;
  return x;
}
inline void store(const Ints& x, void* to) { std::memcpy(to, x.v, 64); }
inline Floats zero() { return {}; }
inline Floats same(float x) {
  Floats out;
  std::fill_n(out.v, 16, x);
  return out;
}
inline Ints lower(Ints x) {
  for (int32_t& each : x.v) each &= 0x0f0f0f0f;
  return x;
}
inline Ints upper(Ints x) {
  for (int32_t& each : x.v) each = each >> 4 & 0x0f0f0f0f;
  return x;
}
inline Floats scaled(const Ints& x, const Floats& by, Floats to) {
  for (int r = 0; r < 16; ++r) to.v[r] += static_cast<float>(x.v[r]) * by.v[r];
  return to;
}
inline Floats times(Floats a, float b) {
  for (float& each : a.v) each *= b;
  return a;
}
inline Floats widened(const void* bfloats) {
  uint16_t some[16];
  std::memcpy(some, bfloats, 32);
  Floats out;
  for (int r = 0; r < 16; ++r) {
    const uint32_t bits = static_cast<uint32_t>(some[r]) << 16;
    std::memcpy(out.v + r, &bits, 4);
  }
  return out;
}
inline Floats load(const float* from) {
  Floats out;
  std::copy_n(from, 16, out.v);
  return out;
}
inline void store(const Floats& x, float* to) { std::copy_n(x.v, 16, to); }

template <bool DOTS>
struct Four {
  int32_t x[4];
  explicit Four(const int8_t* from) { std::copy_n(from, 4, x); }
};

// never inlined: unrolled a hundred times, loops of 64 steps take a compiler minutes
template <bool DOTS, int BITS>
[[gnu::noinline]] Ints dots(Ints sums, const Ints& weights, const Four<DOTS>& x) {
  const uint8_t* bytes = weights.bytes();
  for (int r = 0; r < 16; ++r)
    for (int j = 0; j < 4; ++j) sums.v[r] += bytes[4 * r + j] * x.x[j];
  return sums;
}

inline bool has_dots() { return false; }

#endif

}  // namespace
}  // namespace integers
