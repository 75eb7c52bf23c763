// Products of weights in codes of 4 to 8 bits (the formats of GGUF), without any rounding.
//
// Before its first product, a weight is arranged in panels of 16 rows, in as many bytes, so that no
// vector is ever summed across. The codes of a part (the columns that share a scale) are multiplied
// with a token's inputs and summed in float32, in the order of the columns. These sums are scaled
// and added, in the order of the parts; with an offset, or a code other than 0 that means 0, the
// sum of the inputs is scaled and added, too. So a result does not depend on threads, on the tokens
// beside it, nor on the width of vectors.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace panels {

constexpr int64_t ROWS = 16;  // of a panel
constexpr int FUSED = 2;      // the most tokens for which codes are multiplied as they are unpacked

using Write = c10::function_ref<void(int64_t, int64_t, int64_t, const float*)>;

struct Format {
  const char* name;
  int64_t bytes, numbers;   // of a block in a file
  int64_t part;             // columns that share a scale
  int width;                // of a code in a word of a panel, bits

  // The bytes of a panel.
  int64_t (*panel)(int64_t columns);
  // Arranges `count` rows of a file as a panel.
  void (*arrange)(const uint8_t* rows, int64_t count, int64_t columns, uint8_t* panel);
  // Unpacks a row of a file to float32.
  void (*unpack)(const uint8_t* row, int64_t columns, float* out);
  // Whether all numbers of a row of a file are finite.
  bool (*finite)(const uint8_t* row, int64_t columns);
  // Packs inputs x (tokens, columns) into `room`, at most `packed_width` floats a token. Only tokens
  // begin to end are packed, so that threads can share the work.
  void (*pack)(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
               int64_t end);
  // The sums of rows first to last with packed inputs. `weight` points to the panel of row first, a
  // multiple of ROWS. `write(t, row, count, sums)` is called with the sums of one token and some
  // rows, and `then` points to what is read afterwards. Indexed by tokens; 0: for more than FUSED.
  void (*multiply[FUSED + 1])(const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
                              const float* inputs, int64_t tokens, const uint8_t* then,
                              Write write);

  // Whether products with both formats read the same packed inputs.
  bool alike(const Format& other) const { return part == other.part && width == other.width; }
};

// The format of a name; a null pointer if it is not one of codes.
const Format* find(const std::string& name);

}  // namespace panels
