// Products of bfloat16 weights on the matrix unit of some CPUs (AMX).
//
// The unit multiplies a tile of 16 rows and 32 columns of a weight, as it lies in memory, with the
// same columns of up to 16 tokens, and adds the products to 16 x 16 sums in float32. A sum goes
// through the columns in order, so it depends neither on threads nor on rows and tokens beside it.
// Vectors sum in another order, so a process takes the unit for all bfloat16 products or for none.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tiles {

// Why this process does not use the unit, or null: the CPU has none, the system refuses access, or
// the user has set LAYERSKIP_TILES=0. Determined once per process.
const char* refusal();

// Whether the user has set LAYERSKIP_TILES=1. Then the unit is used even where it is not faster.
bool always();

// The smallest number of tokens for which the unit multiplies bytes clearly faster than vectors do.
// `multiply(tokens, on_unit)` multiplies some rows with tokens; it is timed.
int64_t faster_from(c10::function_ref<void(int64_t, bool)> multiply);

// Like the function of this name in `products.h`.
void pack_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end);

using Write = c10::function_ref<void(int64_t, int64_t, int64_t, const float*)>;

// The sums of rows first to last with packed inputs. `write(t, row, count, sums)` is called with
// the sums of one token and some rows, and `then` points to what is read afterwards.
void product(const c10::BFloat16* weight, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, const c10::BFloat16* then, Write write);

}  // namespace tiles
