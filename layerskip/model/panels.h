// Products of weights in few bits: as files store them, or rounded by `rounded.py` for drafts.
//
// Before its first product, a weight is arranged in panels of 16 rows, in as many bytes, so that no
// vector is ever summed across. A sum goes through the columns in order. Where numbers are codes
// times a scale, plus an offset, the codes of a part (the columns that share both) are multiplied
// with the inputs first, as integers (see `fixed.h`); their sum is scaled, and the offset is added
// times the sum of the inputs. So a result depends neither on threads, nor on the tokens beside it,
// nor on the CPU, except that last bits of codes of 8 bits differ where it has no dot products.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace panels {

constexpr int64_t ROWS = 16;  // of a panel

using Write = c10::function_ref<void(int64_t, int64_t, int64_t, const float*)>;

struct Layout;

// What can be done with the weights of a format.
struct Format {
  const char* name;
  int64_t bytes, numbers;  // of a block in a file
  int64_t factor;          // bytes of a group's scale and zero, where files choose groups; else 0
  int64_t inputs;          // the same for formats for which inputs are packed alike

  // The bytes of a panel.
  int64_t (*panel)(const Layout&);
  // Arranges `count` rows as a panel, or the reverse (null for formats of GGUF).
  void (*arrange)(const Layout&, uint8_t* rows, int64_t count, uint8_t* panel);
  void (*restore)(const Layout&, uint8_t* rows, int64_t count, uint8_t* panel);
  // Unpacks a row to float32.
  void (*unpack)(const Layout&, const uint8_t* row, float* out);
  // Packs inputs x (tokens, columns) into `room`, at most `packed_width` floats a token. Only
  // tokens begin to end are packed, so that threads can share the work. `order`, unless it is null,
  // says which input each column multiplies.
  void (*pack)(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
               int64_t end, const int32_t* order);
  // The sums of rows first to last with packed inputs. `weight` points to the panel of row first, a
  // multiple of ROWS. `write(t, row, count, sums)` is called with the sums of one token and some
  // rows, and `then` points to what is read afterwards.
  void (*multiply)(const Layout&, const uint8_t* weight, int64_t first, int64_t last,
                   const float* inputs, int64_t tokens, const uint8_t* then, Write write);
};

struct Layout {
  const Format* format;
  int64_t columns;
  int64_t group;  // columns that share a scale, where files choose them; else 0
  int64_t row_bytes, panel_bytes;
};

// Raises a ValueError in Python if there is no such format, or if it cannot hold such rows.
Layout layout_of(const std::string& format, int64_t columns, int64_t group);

}  // namespace panels
