// Products of weights rounded to 8 or 4 bits with inputs rounded to 8.
//
// A weight lies in blocks of 16 rows, which are cut into units of 64 columns. One line of 64 bytes
// holds some columns of all 16 rows, so that a vector of 32-bit sums has one sum for every row and
// nothing is ever summed across it:
//   8 bits: a unit has 16 lines of 4 columns, byte 4 r + j for column j of row r, offset by 128;
//   4 bits: 8 lines of 8 columns, columns 4 to 7 in the upper half of the bytes, offset by 8; then
//           a line of scales in bfloat16, 16 for the first 32 columns and 16 for the others.
// A token's inputs are rounded with one scale for every unit. Their products with numbers of the
// weight are summed exactly, as integers; every unit's sum is scaled and added in float32, in the
// order of the columns, so that a sum depends neither on threads nor on the tokens beside it, nor on
// what multiplies: vectors, or the matrix unit where it is there and faster.

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

// What the rounded inputs of a token take, at most.
constexpr int64_t inputs_bytes(int64_t columns) { return units_of(columns) * (UNIT + 12); }

// Round inputs x (tokens, columns) for a weight of so many bits, in a room that has place for them:
// those of tokens begin to end, so that several threads can share the work.
void round_inputs(int bits, const float* x, int64_t columns, int64_t tokens, void* room,
                  int64_t begin, int64_t end);

using Write = c10::function_ref<void(int64_t, int64_t, const float*)>;

// The sums of rows first to last of a packed weight, which begins with row first, with inputs that
// `round_inputs` has rounded for so many bits; `write(t, row, sums)` takes those of a token and a
// block of rows.
void product(int bits, const uint8_t* weight, int64_t first, int64_t last, int64_t columns,
             int64_t tokens, void* room, const uint8_t* then, Write write);

}  // namespace integers
