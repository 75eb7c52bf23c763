// The kernel of attention for bfloat16 keys and values on the matrix unit of some CPUs (AMX).
//
// 16 queries are the rows of a tile. The keys of a segment are packed once for all queries of
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
  static constexpr int64_t QUERIES = 192;       // twice as many gain nothing more

  static bool takes(int64_t width) { return !tiles::refusal() && width % (2 * SIDE) == 0; }

  // Tiles in memory: their rows are `stride` floats apart, the tiles that are multiplied one after
  // the other `step`, and two that are multiplied at once `next`.
  struct Tiles {
    const float* at;
    int64_t stride, step, next;
  };

  // What is read next. Packing keys prefetches the values. Packing values prefetches half of the next
  // segment's keys, and the products prefetch the rest, so that memory is never idle.
  struct Ahead {
    const S *at = nullptr, *end = nullptr;

    // Prefetches `lines` lines, a multiple of 4.
    void fetch(int64_t lines) {
      for (; lines > 0 && at < end; lines -= 4, at += 256 / sizeof(S))
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) fetch_line(at + i * 64 / sizeof(S));
    }
  };
  static constexpr int64_t MULTIPLYING = 8;  // lines that are prefetched in a step of a product

  // Writes the products of one or two tiles of queries with `count` others side by side, an even
  // number: (queries, count x SIDE).
  template <bool TWO>
  static void multiply(const Tiles& queries, Tiles by, int64_t steps, int64_t count, Ahead& ahead,
                       float* out, int64_t stride) {
    using namespace tiles;
    for (; count > 0; count -= 2, by.at += 2 * by.next, out += 2 * SIDE) {
      zero<0>(), zero<1>();
      if constexpr (TWO) zero<2>(), zero<3>();
      for (int64_t k = 0; k < steps; ++k) {
        const float *rows = queries.at + k * queries.step, *from = by.at + k * by.step;
        load<4>(rows, 4 * queries.stride);
        load<7>(from, 4 * by.stride);
        add_bfloats<0, 4, 7>();
        load<7>(from + by.next, 4 * by.stride);
        add_bfloats<1, 4, 7>();
        if constexpr (TWO) {
          load<5>(rows + queries.next, 4 * queries.stride);
          add_bfloats<3, 5, 7>();
          load<7>(from, 4 * by.stride);
          add_bfloats<2, 5, 7>();
        }
        ahead.fetch(MULTIPLYING);
      }
      store<0>(out, 4 * stride), store<1>(out + SIDE, 4 * stride);
      if constexpr (TWO) store<2>(out + SIDE * stride, 4 * stride);
      if constexpr (TWO) store<3>(out + SIDE * (stride + 1), 4 * stride);
    }
  }

  // Packs keys (slots, width) as (slots / SIDE, width / 2, SIDE) pairs of numbers.
  static void pack_keys(const S* keys, int64_t slots, int64_t width, Ahead& ahead, float* rest,
                        float* to) {
    const int64_t deep = depth(width);
    for (int64_t s = 0; s < slots; s += SIDE) {
      ahead.fetch(SIDE * width / 32);
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
  static void pack_values(const S* values, int64_t slots, int64_t width, Ahead& ahead, float* to) {
    for (int64_t s = 0; s < slots; s += STRIPE) {
      const int64_t here = std::min(STRIPE, slots - s), pairs = (here + 1) / 2;
      ahead.fetch(STRIPE * width / 32 / 2);
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
    float *scores = packed_values + SEGMENT * deep, *rest = scores + 2 * SIDE * SEGMENT;
    S* gathered = reinterpret_cast<S*>(rest + SIDE * deep);
    const tiles::Kept kept;
    int64_t configured = 0;
    Ahead ahead{values, values + slots * width};
    // The parts of queries from .. to for the first `slots` slots that are packed.
    const auto attend = [&](int64_t from, int64_t to, int64_t slots) {
      const int64_t stripes = up_to(slots, STRIPE) / STRIPE;
      for (int64_t j = from; j < to; j += 2 * SIDE) {
        const int64_t here = std::min(2 * SIDE, to - j);
        if (here != configured) configure(configured = here);
        const auto multiply_all = here > SIDE ? multiply<true> : multiply<false>;
        multiply_all({q + j * deep, deep, SIDE, SIDE * deep},
                     {packed_keys, SIDE, SIDE * SIDE, SIDE * deep}, deep / SIDE, 2 * stripes,
                     ahead, scores, SEGMENT);
        for (int64_t i = 0; i < here; ++i) {
          float* part = parts + (j + i) * size;
          std::tie(part[0], part[1]) =
              soften(layer, queries[j + i], begin, begin + stripes * STRIPE,
                     known ? known + 2 * (j + i) : nullptr, scores + i * SEGMENT);
        }
        if (weighing)
          multiply_all({scores, SEGMENT, SIDE, SIDE * SEGMENT},
                       {packed_values, width, SIDE * width, SIDE}, stripes, width / SIDE,
                       ahead, parts + j * size + 2, size);
      }
    };
    pack_keys(keys, slots, width, ahead, rest, packed_keys);
    ahead = {keys + slots * width, keys + 2 * slots * width};
    if (weighing) pack_values(values, slots, width, ahead, packed_values);
    if (shared == end) attend(0, count, slots);
    own.each(end, [&](int64_t from, int64_t to, int64_t more, int64_t token) {
      own.gather(own.keys, token, shared, more, width, gathered);
      pack_keys(gathered, more, width, ahead, rest, packed_keys + slots * deep);
      if (weighing) own.gather(own.values, token, shared, more, width, gathered);
      if (weighing) pack_values(gathered, more, width, ahead, packed_values + slots / 2 * width);
      attend(from, to, slots + more);
    });
  }

 private:
  // Tiles 0 to 3 hold sums, 4 and 5 queries or their scores, and 7 keys or values.
  static void configure(int64_t queries) {
    const int64_t first = std::min(SIDE, queries), second = std::max<int64_t>(1, queries - SIDE);
    tiles::Shapes shapes;
    for (int tile = 0; tile < 8; ++tile)
      shapes.set(tile, tile == 7 ? SIDE : tile == 2 || tile == 3 || tile == 5 ? second : first, 64);
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
