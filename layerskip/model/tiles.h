// Products of bfloat16 weights by the matrix unit that some CPUs have (AMX).
//
// The unit multiplies a tile of 16 rows and 32 columns of a weight, as it lies in memory, with the
// same columns of up to 16 tokens, and adds the products to 16 x 16 sums in float32. A sum of a row
// and a token goes through the columns in their order, so that it depends neither on threads nor on
// the rows and tokens beside it. A process takes this kind of sums for all of its bfloat16
// products, or for none.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tiles {

// Why products do not take tiles here, or null: the CPU has none, the system refuses to keep their
// registers, or a person has set LAYERSKIP_TILES=0. Asked once in a process.
const char* refusal();

// Whether a person has set LAYERSKIP_TILES=1: then they are taken wherever they are, not only where
// they are faster.
bool always();

// As the function of this name in `products.h`.
void pack_inputs(const float* x, int64_t columns, int64_t tokens, float* room, int64_t begin,
                 int64_t end);

using Write = c10::function_ref<void(int64_t, int64_t, int64_t, const float*)>;

// The sums of rows first to last of a weight with inputs that were packed; `write(t, row, count,
// sums)` takes those of a token and some rows, and `then` is what is read next.
void product(const c10::BFloat16* weight, int64_t first, int64_t last, int64_t columns,
             const float* inputs, int64_t tokens, const c10::BFloat16* then, Write write);

}  // namespace tiles
