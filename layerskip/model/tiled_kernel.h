// The kernel of attention for bfloat16 keys and values on the matrix unit of some CPUs (AMX).
//
// Up to 16 queries are the rows of a tile. The keys of a segment are packed once for all queries of
// a block, and so are its values. A score does not depend on its neighbours, and values are summed
// by groups of 32 slots, which begin at the same slots in every pass.

#pragma once

#include <algorithm>
#include <tuple>

#include "kernel.h"
#include "unit.h"

namespace {
namespace attention {

struct TiledKernel : Kernel<BFloat16, true> {
  using S = BFloat16;
  static constexpr int64_t SIDE = tiles::ROWS;  // queries, slots, or pairs of numbers in a tile

  static bool takes(int64_t width) { return !tiles::refusal() && width % (2 * SIDE) == 0; }

  // Some tiles in memory: their rows are `stride` floats apart, the tiles that are multiplied one
  // after the other `step`, and those that stand side by side `next`.
  struct Tiles {
    const float* at;
    int64_t stride, step, next;
  };

  // Writes the products of a tile of rows with COUNT tiles side by side, (queries, COUNT x SIDE).
  template <int COUNT>
  static void multiply(const Tiles& rows, const Tiles& by, int64_t steps, float* out,
                       int64_t stride) {
    using namespace tiles;
    zero<0>(), zero<1>();
    if constexpr (COUNT > 2) zero<2>(), zero<3>();
    for (int64_t k = 0; k < steps; ++k) {
      const float* from = by.at + k * by.step;
      load<4>(rows.at + k * rows.step, 4 * rows.stride);
      load<5>(from, 4 * by.stride);
      add_bfloats<0, 4, 5>();
      load<6>(from + by.next, 4 * by.stride);
      add_bfloats<1, 4, 6>();
      if constexpr (COUNT > 2) {
        load<5>(from + 2 * by.next, 4 * by.stride);
        add_bfloats<2, 4, 5>();
        load<6>(from + 3 * by.next, 4 * by.stride);
        add_bfloats<3, 4, 6>();
      }
    }
    store<0>(out, 4 * stride), store<1>(out + SIDE, 4 * stride);
    if constexpr (COUNT > 2) store<2>(out + 2 * SIDE, 4 * stride);
    if constexpr (COUNT > 2) store<3>(out + 3 * SIDE, 4 * stride);
  }

  // The same for `count` tiles side by side, an even number.
  static void multiply_all(const Tiles& rows, Tiles by, int64_t steps, int64_t count, float* out,
                           int64_t stride) {
    for (; count > 2; count -= 4, by.at += 4 * by.next, out += 4 * SIDE)
      multiply<4>(rows, by, steps, out, stride);
    if (count > 0) multiply<2>(rows, by, steps, out, stride);
  }

  // Packs keys (slots, width) as (slots / SIDE, width / 2, SIDE) pairs of numbers. As many bytes are
  // prefetched from `then` on.
  static void pack_keys(const S* keys, int64_t slots, int64_t width, const S* then, float* rest,
                        float* to) {
    const int64_t deep = depth(width);
    for (int64_t s = 0; s < slots; s += SIDE) {
      if (then) fetch(then + s * width, SIDE * width);
      const float* from = reinterpret_cast<const float*>(keys + s * width);
      if (s + SIDE > slots) {
        std::copy_n(from, (slots - s) * deep, rest);
        from = rest;
      }
      for (int64_t i = 0; i < deep; i += SIDE)
        at::vec::transpose_mxn<float>(from + i, deep, to + s * deep + i * SIDE, SIDE, SIDE, SIDE);
    }
  }

  // Packs values (slots, width) as (slots / 2, width) pairs of slots, padded to whole stripes.
  static void pack_values(const S* values, int64_t slots, int64_t width, const S* then, float* to) {
    for (int64_t s = 0; s < slots; s += STRIPE) {
      const int64_t here = std::min(STRIPE, slots - s), pairs = (here + 1) / 2;
      if (then) fetch(then + s * width, STRIPE * width);
      Kernel::pack_values(values + s * width, here, width, to + s / 2 * width);
      std::fill_n(to + (s / 2 + pairs) * width, (SIDE - pairs) * width, 0.0f);
    }
  }

  // Computes what `Kernel::run` does.
  template <typename Own>
  static void run(const Sublayer& layer, const Query* queries, int64_t count, const float* q,
                  const S* keys, const S* values, int64_t begin, int64_t shared, int64_t end,
                  const Own& own, const float* known, bool weighing, float* room, float* parts) {
    const int64_t width = layer.width, deep = depth(width), size = part_size(width);
    const int64_t slots = shared - begin;
    float *packed_keys = room, *packed_values = packed_keys + SEGMENT * deep;
    float *scores = packed_values + SEGMENT * deep, *rest = scores + SIDE * SEGMENT;
    S* gathered = reinterpret_cast<S*>(rest + SIDE * deep);
    const tiles::Kept kept;
    int64_t configured = 0;
    // The parts of queries from .. to for the first `slots` slots that are packed.
    const auto attend = [&](int64_t from, int64_t to, int64_t slots) {
      const int64_t stripes = up_to(slots, STRIPE) / STRIPE;
      for (int64_t j = from; j < to; j += SIDE) {
        const int64_t here = std::min(SIDE, to - j);
        if (here != configured) configure(configured = here);
        multiply_all({q + j * deep, deep, SIDE}, {packed_keys, SIDE, SIDE * SIDE, SIDE * deep},
                     deep / SIDE, 2 * stripes, scores, SEGMENT);
        for (int64_t i = 0; i < here; ++i) {
          float* part = parts + (j + i) * size;
          std::tie(part[0], part[1]) =
              soften(layer, queries[j + i], begin, begin + stripes * STRIPE,
                     known ? known + 2 * (j + i) : nullptr, scores + i * SEGMENT);
        }
        if (weighing)
          multiply_all({scores, SEGMENT, SIDE}, {packed_values, width, SIDE * width, SIDE}, stripes,
                       width / SIDE, parts + j * size + 2, size);
      }
    };
    pack_keys(keys, slots, width, weighing ? values : nullptr, rest, packed_keys);
    if (weighing) pack_values(values, slots, width, keys + slots * width, packed_values);
    if (shared == end) attend(0, count, slots);
    own.each(end, [&](int64_t from, int64_t to, int64_t more, int64_t token) {
      own.gather(own.keys, token, shared, more, width, gathered);
      pack_keys(gathered, more, width, nullptr, rest, packed_keys + slots * deep);
      if (weighing) own.gather(own.values, token, shared, more, width, gathered);
      if (weighing) pack_values(gathered, more, width, nullptr, packed_values + slots / 2 * width);
      attend(from, to, slots + more);
    });
  }

 private:
  // Tiles 0 to 3 hold sums, 4 the rows of some queries, 5 and 6 what they are multiplied with.
  static void configure(int64_t queries) {
    tiles::Shapes shapes;
    for (int tile = 0; tile < 7; ++tile) shapes.set(tile, tile < 5 ? queries : SIDE, 64);
    tiles::configure(shapes);
  }
};

// Calls `apply` with the kernel for keys and values of type S and some width on this CPU.
template <typename S, typename Apply>
auto with_kernel(int64_t width, const Apply& apply) {
  if constexpr (PARTS<S> == 2) {
    if (TiledKernel::takes(width)) return apply(TiledKernel());
    if (has_pairs()) return apply(Kernel<S, true>());
  }
  return apply(Kernel<S, false>());
}

}  // namespace attention
}  // namespace
