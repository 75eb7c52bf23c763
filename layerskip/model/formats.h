// How the bytes of stored weights become numbers, for each format.
//
// A number is its code times a scale, plus an offset. SAME adjacent numbers share a scale and an
// offset. `pairs` reads all scales and offsets of a block. `numbers` unpacks LANES numbers from the
// i-th number of a step on. A step has STEP numbers, because some formats put several numbers of a
// step in each byte.

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

// Where a step lies: in which row and block, at which column, and as the j-th step of its block.
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

// This rounds only once, because the product of a code and its scale is exact in float32.
inline Vec affine(const Ints& codes, const Vec& by, const Vec& to) {
  return at::vec::fmadd(floats(codes), by, to);
}

// Codes of 4 bits: the first HALF codes are the low halves of HALF bytes, the others the high.
template <int HALF = 16>
inline Ints nibbles(const uint8_t* from, int i) {
  return i < HALF ? bytes(from + i) & 15 : bytes(from + i - HALF) >> 4;
}

// The fifth bits of codes from the i-th on.
inline Ints fifth(uint32_t bits, int i) {
  Ints places;
  for (int k = 0; k < LANES; ++k) places[k] = i + k;
  return (((Ints{} + static_cast<int32_t>(bits)) >> places) & 1) << 4;
}

template <int64_t BYTES_, int64_t NUMBERS_ = UNIT, int SAME_ = UNIT, int STEP_ = UNIT>
struct Blocks {
  static constexpr int64_t BYTES = BYTES_, NUMBERS = NUMBERS_;
  static constexpr int SAME = SAME_, STEP = STEP_;
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

// Blocks of one unit that begin with a scale, followed by an offset if ZERO is -1.
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

// Blocks of 256 numbers. They begin with two half-precision factors, for the 6-bit scales and the
// 6-bit offsets of 8 units. Two units share bytes: the first one has the low halves.
template <int64_t BYTES_>
struct K : Blocks<BYTES_, 256, UNIT, 64> {
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
};

struct Q4_K : K<144> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    return affine(nibbles<32>(at.block + 16 + 32 * at.j, i), by, to);
  }
};

struct Q5_K : K<176> {
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    const Ints high = bytes(at.block + 16 + i % 32) >> static_cast<int>(2 * at.j);
    const Ints fifth = high << (i < 32 ? 4 : 3) & 16;
    return affine(nibbles<32>(at.block + 48 + 32 * at.j, i) | fifth, by, to);
  }
};

// Low 4 bits in 128 bytes, high 2 bits in 64, scales of 16 numbers each, and their factor.
struct Q6_K : Blocks<210, 256, 16, 128> {
  static void pairs(const Place& at, float* by, float* to) {
    const Vec times(half(at.block + 208)), zero(-32.0f);
    for (int i = 0; i < 16; i += LANES) {
      const Vec scales = floats(signed_bytes(at.block + 192 + i)) * times;
      scales.store(by + i), (scales * zero).store(to + i);
    }
  }
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec& to) {
    const Ints both = bytes(at.block + 128 + 32 * at.j + i % 32);
    const Ints high = i < 64 ? both << (4 - i / 32 * 2) : both >> (i / 32 * 2 - 4);
    return affine(nibbles<64>(at.block + 64 * at.j, i) | (high & 48), by, to);
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
  static void pairs(const Place& at, float* by, float*) {
    *by = F8::scale(at, F8::group(at)) * TIMES;
  }
  static Vec numbers(const Place& at, int i, const Vec& by, const Vec&) {
    return rounded_to(values(at.block + i) * by, T{});
  }
};

}  // namespace
}  // namespace stored
