// Products of weights rounded to 8 or 4 bits with inputs rounded to 8 bits.
//
// A weight consists of blocks of 16 rows, and a block of units of 64 columns. Each line of 64 bytes
// holds some columns of all 16 rows, so a vector of 32-bit sums has one sum per row, and nothing is
// ever summed across a vector:
//   8 bits: a unit has 16 lines of 4 columns; byte 4 r + j is column j of row r, offset by 128;
//   4 bits: 8 lines of 8 columns, with columns 4 to 7 in the high halves of the bytes, offset by 8;
//           then a line of bfloat16 scales: 16 for the first 32 columns, 16 for the others.
// A token's inputs have one scale per unit. Products are summed exactly, as integers. The sums of
// units are scaled and added in float32, in the order of the columns. A result therefore depends
// neither on threads, nor on the tokens beside it, nor on whether vectors or the matrix unit
// multiply.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace integers {

constexpr int64_t BLOCK = 16;  // rows
constexpr int64_t UNIT = 64;   // columns

constexpr int64_t unit_bytes(int bits) { return bits == 8 ? BLOCK * UNIT : BLOCK * UNIT / 2 + 64; }
constexpr int64_t units_of(int64_t columns) { return (columns + UNIT - 1) / UNIT; }
constexpr int64_t row_bytes(int bits, int64_t columns) {
  return units_of(columns) * unit_bytes(bits) / BLOCK;
}

// The most bytes that the rounded inputs of a token take.
constexpr int64_t inputs_bytes(int64_t columns) { return units_of(columns) * (UNIT + 12); }

// Rounds inputs x (tokens, columns) into `room` for a weight of so many bits. Only tokens begin to
// end are rounded, so that threads can share the work.
void round_inputs(int bits, const float* x, int64_t columns, int64_t tokens, void* room,
                  int64_t begin, int64_t end);

using Write = c10::function_ref<void(int64_t, int64_t, const float*)>;

// The sums of rows first to last, where the packed weight begins with row first, and the inputs are
// rounded by `round_inputs` for so many bits. `write(t, row, sums)` is called with the sums of one
// token and one block of rows.
void product(int bits, const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
             int64_t tokens, void* room, const uint8_t* then, Write write);

}  // namespace integers
