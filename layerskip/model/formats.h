// How the bytes of stored weights become numbers, for formats of plain numbers, and of codes whose
// numbers are rounded to 16 bits. Those of `codes.h` are arranged in panels instead.
//
// A row consists of units of 32 numbers. `pair` reads a unit's scale and zero, where it has them.
// `numbers` unpacks LANES numbers from the i-th number of a unit on.

#pragma once

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "products.h"
#include "stored.h"

namespace stored {
namespace {

using c10::Half;

typedef int32_t Ints [[gnu::vector_size(4 * LANES)]];
typedef float Floats [[gnu::vector_size(4 * LANES)]];

template <typename T>
inline T read(const uint8_t* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

// LANES bytes, unsigned or signed. Intrinsics, because compilers widen short vectors byte by byte.
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

// Where a unit lies: its row, its first byte and its first column.
struct Place {
  const Layout& layout;
  const uint8_t *row, *unit;
  int64_t column;
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

// Codes of 4 bits: the first 16 codes are the low halves of 16 bytes, the others the high.
inline Ints nibbles(const uint8_t* from, int i) {
  return i < 16 ? bytes(from + i) & 15 : bytes(from + i - 16) >> 4;
}

template <int64_t BYTES_>
struct Units {
  static constexpr int64_t BYTES = BYTES_;
  static constexpr int64_t PAIR = 0;  // bytes of a group's scale and zero
  static void pair(const Place&, float*, float*) {}
};

struct F32 : Units<128> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    return Vec::loadu(at.unit + 4 * i);
  }
};

struct F16 : Units<64> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    Vec out;
    at::vec::load_fp32_from_fp16(reinterpret_cast<const c10::Half*>(at.unit + 2 * i), out);
    return out;
  }
};

struct BF16 : Units<64> {
  static Vec numbers(const Place& at, int i, const Vec&, const Vec&) {
    return widened(reinterpret_cast<const BFloat16*>(at.unit + 2 * i));
  }
};

// Numbers rounded to the type of the second argument, in float32.
inline Vec rounded_to(const Vec& x, float) { return x; }

// Veltkamp's splitting (Dekker 1971). The `asm` keeps compilers from merging its two steps. Trying
// all products of a bfloat16 and a code of up to 9 bits has shown that ties go to even.
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

// Formats of files other than GGUF: a row's codes, then a scale of type T for each group, then a
// zero for each group. A number is (code - zero) * scale, rounded to T.
template <int64_t BYTES_, typename T>
struct Groups : Units<BYTES_> {
  static constexpr int64_t PAIR = 2 * sizeof(T);
  static int64_t group(const Place& at) {
    return at.layout.shift < 0 ? at.column / at.layout.group : at.column >> at.layout.shift;
  }
  static float scale(const Place& at, int64_t number) {
    const uint8_t* scales = at.row + at.layout.columns * BYTES_ / UNIT;
    return static_cast<float>(read<T>(scales + sizeof(T) * number));
  }
  static void pair(const Place& at, float* by, float* zero) {
    *by = scale(at, group(at)), *zero = scale(at, at.layout.groups + group(at));
  }
  static Vec scaled(const Vec& codes, const Vec& by, const Vec& zero) {
    return rounded_to((codes - zero) * by, T{});
  }
};

template <typename T>
struct G4 : Groups<16, T> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& zero) {
    return G4::scaled(floats(nibbles(at.unit, i)), by, zero);
  }
};

template <typename T>
struct G8 : Groups<32, T> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& zero) {
    return G8::scaled(floats(bytes(at.unit + i)), by, zero);
  }
};

// E4M3: the bits of a half-precision number with a shorter exponent. Groups have no zero.
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
  static void pair(const Place& at, float* by, float*) {
    *by = F8::scale(at, F8::group(at)) * TIMES;
  }
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec&) {
    return rounded_to(values(at.unit + i) * by, T{});
  }
};

}  // namespace
}  // namespace stored
