// Products of weights as files store them: few bits each, exactly the numbers that they mean.
//
// A row lies in blocks from end to end; `formats.h` says what the blocks of each format hold. A
// piece of some rows is unpacked to float32 in the nearest cache, once for all tokens, and
// multiplied from there as plain weights are (`products.h`), in their order: sums are those of the
// unpacked weight in float32, bit by bit.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace stored {

constexpr int64_t UNIT = 32;  // columns that are unpacked together; a row has whole units

struct Layout {
  int format;  // its number in `formats.h`
  int64_t columns;
  int64_t group, groups;  // columns that share a scale, where the format leaves that open; else 0
  int shift;              // a group has 2^shift columns, if that is so; else -1
  int64_t row_bytes;
};

// A ValueError in Python where there is no such format, or no such rows in it.
Layout layout_of(const std::string& format, int64_t columns, int64_t group);

// Columns first to first + count of a row, multiples of UNIT both.
void unpack(const Layout& layout, const uint8_t* row, int64_t first, int64_t count, float* out);

using Write = c10::function_ref<void(int64_t, int64_t, int64_t, const float*)>;

// The sums of rows first to last, of which `weight` has the first one, with inputs that
// `pack_inputs<float>` has packed; `write(t, row, count, sums)` takes those of a token and some
// rows, and `then` is what is read next.
void product(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
             const float* inputs, int64_t tokens, const uint8_t* then, Write write);

}  // namespace stored
