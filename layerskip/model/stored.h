// Products of weights as files store them, in few bits each, without any further rounding.
//
// Weights of codes are arranged in panels (`panels.h`). Of others (`formats.h`), a piece of some rows
// is unpacked to float32 in the L1 cache, once for all tokens, and multiplied from there like plain
// weights, in the same order (`products.h`). The sums equal, bit by bit, those of a weight that was
// unpacked to float32 as a whole.

#pragma once

#include <cstdint>
#include <string>

#include "panels.h"

namespace stored {

constexpr int64_t UNIT = 32;  // columns unpacked together; a row has whole units

struct Layout {
  const panels::Format* coded;  // of a weight of codes; else null
  int format;                   // else the index in the table of `stored.cpp`
  int64_t columns;
  int64_t group, groups;  // columns per scale, where files choose them; else 0
  int shift;              // column >> shift is the number of the group; -1: divide
  int64_t row_bytes;
};

// Raises a ValueError in Python if there is no such format, or if it cannot hold such rows.
Layout layout_of(const std::string& format, int64_t columns, int64_t group);

// Unpacks a row to float32.
void unpack(const Layout& layout, const uint8_t* row, float* out);

// Whether all numbers of a row are finite. `room` is scratch memory for a row's numbers.
bool finite(const Layout& layout, const uint8_t* row, float* room);

using panels::Write;

// The sums of rows first to last, not of codes, with inputs packed by `pack_inputs<float>`. `weight` points to row
// first. `write(t, row, count, sums)` is called with the sums of one token and some rows, and
// `then` points to what is read afterwards.
void product(const Layout& layout, const uint8_t* weight, int64_t first, int64_t last,
             const float* inputs, int64_t tokens, const uint8_t* then, Write write);

}  // namespace stored
