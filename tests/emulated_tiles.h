// The matrix unit in plain C++. `unit.h` includes this file inside its namespace.

bool has_unit() { return true; }
bool is_allowed() { return true; }

thread_local uint8_t registers[8][ROWS][64];
thread_local Shapes shape;

inline void configure(const Shapes& shapes) {
  shape = shapes;
  std::memset(registers, 0, sizeof registers);
}
struct Kept {
  Kept() {}
  ~Kept() { shape = Shapes(); }
};

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

// The i-th 32-bit number of a tile's row.
template <typename T>
inline T number(int tile, int64_t row, int64_t i) {
  T found;
  std::memcpy(&found, registers[tile][row] + 4 * i, 4);
  return found;
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f * x : x; }

// TDPBF16PS: the products of the first numbers of all pairs are summed with fused steps, those of
// the second numbers likewise, and the sum of both is added to the tile.
template <int SUMS, int ROW, int BY = INPUTS>
inline void add_bfloats() {
  const auto bfloat = [](int tile, int64_t row, int64_t k) {
    c10::BFloat16 found;
    std::memcpy(&found, registers[tile][row] + 2 * k, 2);
    return flushed(static_cast<float>(found));
  };
  for (int64_t r = 0; r < shape.rows[SUMS]; ++r)
    for (int64_t t = 0; t < shape.bytes[SUMS] / 4; ++t) {
      float two[2] = {};
      for (int64_t pair = 0; pair < shape.bytes[ROW] / 4; ++pair)
        for (int64_t i = 0; i < 2; ++i)
          two[i] = flushed(std::fma(bfloat(ROW, r, 2 * pair + i),
                                    bfloat(BY, pair, 2 * t + i), two[i]));
      const float sum = flushed(number<float>(SUMS, r, t) + flushed(two[0] + two[1]));
      std::memcpy(registers[SUMS][r] + 4 * t, &sum, 4);
    }
}

// TDPBSUD, TDPBSSD: products of four signed bytes of an input with four bytes of a weight, unsigned
// or signed, are added to the tile exactly.
template <int SUMS, int WEIGHT, int FROM, bool SIGNED>
inline void add_bytes() {
  for (int64_t t = 0; t < shape.rows[SUMS]; ++t)
    for (int64_t r = 0; r < shape.bytes[SUMS] / 4; ++r) {
      int32_t sum = number<int32_t>(SUMS, t, r);
      for (int64_t k = 0; k < shape.bytes[FROM]; ++k) {
        const uint8_t code = registers[WEIGHT][k / 4][4 * r + k % 4];
        sum += static_cast<int8_t>(registers[FROM][t][k]) *
            (SIGNED ? static_cast<int8_t>(code) : code);
      }
      std::memcpy(registers[SUMS][t] + 4 * r, &sum, 4);
    }
}
