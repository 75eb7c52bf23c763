// What `integers.h` promises, for several kinds of CPU; a file of its own, which compiles beside the
// other one.

#include "integers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace integers {
namespace {

constexpr int BLOCKS = 2;  // that are read side by side
constexpr int64_t MOST = MANY_REGISTERS ? 8 : 6;  // tokens of a step

// ---------------------------------------------------------------------------------------------
// Vectors of 16 numbers. `Four` is what a line is multiplied with: four inputs of a token for all
// rows; `dots<DOTS>` adds the products of four bytes each to 32-bit sums, with an instruction for
// them where there is one (DOTS, which a caller asks `has_dots` for).

#if defined(CPU_CAPABILITY_AVX512)

using Ints = __m512i;
using Floats = __m512;

inline Ints load(const void* from) { return _mm512_loadu_si512(from); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
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

// ---------------------------------------------------------------------------------------------
// Inputs.

// Rounded inputs of the tokens of one step, in the order of their use: numbers (units, tokens, 64),
// a scale for each unit and token, and what the sums of each part of a unit start from, since the
// numbers of a weight have an offset.
struct Inputs {
  int8_t* numbers;
  float* scales;
  int32_t* starts;

  // In a room of `inputs_bytes` a token, of which tokens before take theirs.
  Inputs(void* base, int64_t units, int64_t before, int64_t tokens) {
    uint8_t* at = static_cast<uint8_t*>(base) + before * inputs_bytes(units * UNIT);
    numbers = reinterpret_cast<int8_t*>(at);
    scales = reinterpret_cast<float*>(at + tokens * units * UNIT);
    starts = reinterpret_cast<int32_t*>(scales + tokens * units);
  }
};

}  // namespace

void round_inputs(int bits, const float* x, int64_t columns, int64_t tokens, void* room,
                  int64_t begin, int64_t end) {
  const int64_t units = units_of(columns);
  const int parts = bits == 8 ? 1 : 2;
  const int32_t offset = bits == 8 ? 128 : 8;
  const Steps steps{tokens, MOST};
  for (int64_t step = 0; step < steps.count; ++step) {
    const int64_t first = steps.first(step), count = steps.length(step);
    const Inputs to(room, units, first, count);
    for (int64_t t = std::max<int64_t>(0, begin - first); t < std::min(count, end - first); ++t)
      for (int64_t u = 0; u < units; ++u) {
        const float* from = x + (first + t) * columns + u * UNIT;
        float rest[UNIT] = {};
        if (columns - u * UNIT < UNIT) {
          std::copy_n(from, columns - u * UNIT, rest);
          from = rest;
        }
        float most = 0;
        for (int64_t i = 0; i < UNIT; ++i) most = std::max(most, std::fabs(from[i]));
        const float by = most > 1e-30f ? 127.0f / most : 0.0f;
        int8_t* numbers = to.numbers + (u * count + t) * UNIT;
        int32_t sums[2] = {};
        for (int64_t half = 0; half < 2; ++half)
          for (int64_t i = half * UNIT / 2; i < (half + 1) * UNIT / 2; ++i) {
            // the nearest integer is in the last bits of what 1.5 * 2^23 is added to
            const float shifted = from[i] * by + 12582912.0f;
            int32_t bits_of;
            std::memcpy(&bits_of, &shifted, 4);
            const int32_t number = bits_of - 0x4b400000;
            numbers[i] = static_cast<int8_t>(number);
            sums[half] += number;
          }
        to.scales[u * count + t] = most > 1e-30f ? most / 127.0f : 0.0f;
        int32_t* starts = to.starts + u * parts * count + t;
        if (parts == 1) {
          starts[0] = -offset * (sums[0] + sums[1]);
        } else {
          starts[0] = -offset * sums[0];
          starts[count] = -offset * sums[1];
        }
      }
  }
}

namespace {

// ---------------------------------------------------------------------------------------------
// Products.

// Of BLOCKS blocks, `stride` bytes apart.
template <int BITS, int TOKENS, bool DOTS>
inline void tile(const uint8_t* weight, int64_t stride, int64_t units, const Inputs& x,
                 const uint8_t* fetch, float* out) {
  constexpr int64_t SIZE = unit_bytes(BITS);
  constexpr int PARTS = BITS == 8 ? 1 : 2;  // of a unit, with sums of their own
  Floats sums[TOKENS][BLOCKS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[t][b] = zero();
  for (int64_t u = 0; u < units; ++u) {
    const uint8_t* at = weight + u * SIZE;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
      Ints some[TOKENS][BLOCKS];
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) some[t][b] = all(x.starts[(u * PARTS + part) * TOKENS + t]);
      constexpr int LINES = BITS == 8 ? 16 : 4;
#pragma GCC unroll 16
      for (int l = 0; l < LINES; ++l) {
        const int line = part * LINES + l;
        Ints w[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
          w[b] = load(at + b * stride + line * 64);
          __builtin_prefetch(fetch + b * stride + u * SIZE + line * 64, 0, 2);
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
          const int8_t* from = x.numbers + (u * TOKENS + t) * UNIT + line * (UNIT / LINES / PARTS);
          if constexpr (BITS == 8) {
            const Four<DOTS> four(from);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b)
              some[t][b] = dots<DOTS, BITS>(some[t][b], w[b], four);
          } else {
            const Four<DOTS> first(from), second(from + 4);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
              some[t][b] = dots<DOTS, BITS>(some[t][b], lower(w[b]), first);
              some[t][b] = dots<DOTS, BITS>(some[t][b], upper(w[b]), second);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        const float scale = x.scales[u * TOKENS + t];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
          const Floats by = BITS == 8
              ? same(scale)
              : times(widened(at + b * stride + SIZE - 64 + part * 32), scale);
          sums[t][b] = scaled(some[t][b], by, sums[t][b]);
        }
      }
    }
    if constexpr (BITS == 4)
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b)
        __builtin_prefetch(fetch + b * stride + (u + 1) * SIZE - 64, 0, 2);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store(sums[t][b], out + (t * BLOCKS + b) * BLOCK);
}

// Rows first to last, where the weight begins with row first, a multiple of BLOCK, with the inputs
// of one step, whose first token is `before`; `then` is what is read after them.
template <int BITS, int TOKENS, bool DOTS>
void few(const uint8_t* weight, int64_t first, int64_t last, int64_t units, const Inputs& x,
         int64_t before, const uint8_t* then, Write write) {
  const int64_t size = units * unit_bytes(BITS), blocks = (last - first + BLOCK - 1) / BLOCK;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / size);
  alignas(64) float sums[TOKENS * BLOCKS * BLOCK];
  for (int64_t block = 0; block < blocks; block += BLOCKS) {
    const int64_t here = std::min<int64_t>(BLOCKS, blocks - block), later = block + ahead;
    const uint8_t* fetch = later < blocks ? weight + later * size : then + (later - blocks) * size;
    // a single block stands for two
    const int64_t stride = here == BLOCKS ? size : 0;
    tile<BITS, TOKENS, DOTS>(weight + block * size, stride, units, x, fetch, sums);
    for (int t = 0; t < TOKENS; ++t)
      for (int64_t b = 0; b < here; ++b)
        write(before + t, first + (block + b) * BLOCK, sums + (t * BLOCKS + b) * BLOCK);
  }
}

}  // namespace

void product(int bits, const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
             int64_t tokens, void* room, const uint8_t* then, Write write) {
  static const bool dots = has_dots();
  const int64_t units = units_of(columns), size = row_bytes(bits, columns);
  const Steps steps{tokens, MOST};
  // rows that stay in a cache until the last step has read them
  const int64_t group = steps.count == 1
      ? std::max<int64_t>(BLOCK, last - first)
      : std::max<int64_t>(2, KEPT / size / BLOCK) * BLOCK;
  for (int64_t row = first; row < last; row += group) {
    const int64_t end = std::min(last, row + group);
    const uint8_t* from = weight + (row - first) * size;
    const uint8_t* next = end < last ? from + (end - row) * size : then;
    for (int64_t step = 0; step < steps.count; ++step) {
      const int64_t before = steps.first(step);
      const Inputs x(room, units, before, steps.length(step));
#define SOME(BITS, N, DOTS) few<BITS, N, DOTS>(from, row, end, units, x, before, next, write)
#define FEW(N)                                        \
  case N:                                             \
    if (bits == 8 && dots) SOME(8, N, true);          \
    else if (bits == 8) SOME(8, N, false);            \
    else if (dots) SOME(4, N, true);                  \
    else SOME(4, N, false);                           \
    break;
      switch (steps.length(step)) { FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8) }
#undef FEW
#undef SOME
    }
  }
}

}  // namespace integers
