// Products of weights that files store in few bits, or that `rounded.py` rounds for drafts.
//
// Most formats have codes times a scale, plus an offset. Before its first product, such a weight is
// arranged in panels of 16 rows, in as many bytes, so that no vector is ever summed across. The
// codes of a part (the columns that share scale and offset) are multiplied with the inputs as
// integers (see `fixed.h`); their sum is scaled, and the offset is added times the sum of the
// inputs. Formats whose numbers are rounded one by one are read row by row (see `rows.h`).
//
// A result depends neither on threads nor on the tokens beside it. That of panels does not depend
// on the CPU either, except that last bits of codes of 8 bits differ where it has no dot products.

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

  // The bytes of a panel; null if rows are read as they are.
  int64_t (*panel)(const Layout&);
  // Arranges `count` rows as a panel.
  void (*arrange)(const Layout&, const uint8_t* rows, int64_t count, uint8_t* panel);
  // Unpacks a row to float32.
  void (*unpack)(const Layout&, const uint8_t* row, float* out);
  // Packs inputs x (tokens, columns) into `room`, at most `packed_width` floats a token. Only
  // tokens begin to end are packed, so that threads can share the work. `order`, unless it is null,
  // says which input each column multiplies.
  void (*pack)(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
               int64_t end, const int32_t* order);
  // The sums of rows first to last with packed inputs. `weight` points to row first, or to the
  // panel that begins with it. `write(t, row, count, sums)` is called with the sums of one token
  // and some rows, and `then` points to what is read afterwards.
  void (*multiply)(const Layout&, const uint8_t* weight, int64_t first, int64_t last,
                   const float* inputs, int64_t tokens, const uint8_t* then, Write write);
};

struct Layout {
  const Format* format;
  int64_t columns;  // whole units
  int64_t group;    // columns that share a scale, where files choose them; else 0
  int64_t row_bytes;
  int64_t panel_bytes;  // of 16 rows, if there are no panels
};

// Copies of `rounded.py` are filled up to whole units. Raises a ValueError in Python if there is no
// such format, or if it cannot hold such rows.
Layout layout_of(const std::string& format, int64_t columns, int64_t group);

}  // namespace panels
