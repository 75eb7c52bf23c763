// Attention of a pass: every key and value is read once for all queries that share it.
//
// The text is cut into segments, at the same slots in every pass. For the queries of one row that
// share a key-value head, each segment yields a part: the largest score, the sum of the
// exponentials, and the values weighted by them. Parts are joined in the order of the text, so a
// token's result depends neither on which thread computed it nor on the tokens beside it. If there
// are few queries, the threads share out the segments. The many queries of a prompt are instead cut
// into blocks, and each block goes through the whole text.
//
// With branches, the slots from the root on hold several texts. Each token then gathers its own
// slots from them, so that its sums are what they would be without the other branches.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tiled_kernel.h"

namespace {
namespace attention {

// Merge the largest score and the sum of a part into those of the parts before it. Returns the
// factors that rescale the earlier values and the new ones.
inline std::pair<float, float> join_sums(float* all, const float* part) {
  const float most = std::max(all[0], part[0]);
  // at least one factor is 1
  const float before = all[0] == most ? 1.0f : std::exp(all[0] - most);
  const float now = part[0] == most ? 1.0f : std::exp(part[0] - most);
  all[0] = most;
  all[1] = std::fma(all[1], before, part[1] * now);
  return {before, now};
}

// Merge a part of one query into the parts before it.
inline void join(float* all, const float* part, int64_t width) {
  if (part[0] == NEVER) return;
  if (all[0] == NEVER) {
    std::copy_n(part, part_size(width), all);
    return;
  }
  const auto [before, now] = join_sums(all, part);
  for (int64_t i = 0; i < padded(width); i += LANES) {
    const Vec added = Vec::loadu(part + 2 + i) * Vec(now);
    at::vec::fmadd(Vec::loadu(all + 2 + i), Vec(before), added).store(all + 2 + i);
  }
}

// The attention of one layer in a pass.
template <typename S>
struct Attention {
  const Sublayer& layer;
  const Places& places;
  const float* queries = nullptr;                   // (B, T, stride)
  int64_t stride = 0;
  const S *keys = nullptr, *values = nullptr;       // (B, K, slots, D)
  int64_t slots = 0;
  const int64_t* bases = nullptr;                   // (B,) first slots of rows; null: all are 0
  float* out = nullptr;                             // (B, T, N, D)
  float* parts = nullptr;                           // of all units, if `along()`

  // The queries of a token that share a key-value head, and of all tokens of a row. Divided once:
  // some CPUs take 40 cycles and more for a division.
  const int64_t groups = layer.heads / layer.kv_heads, asked = places.count * groups;
  // The most queries of a block.
  const int64_t most = with_kernel<S>(layer.width, [](const auto& kernel) { return kernel.QUERIES; });

  int64_t rows() const { return places.rows(); }
  int64_t base(int64_t row) const { return bases ? bases[row] : 0; }

  Query query(int64_t row, int64_t j) const {
    const int64_t place = places.position(row, j / groups);
    return {layer.window ? std::max<int64_t>(0, place - layer.window + 1) : 0, place};
  }

  // The first and last slot that any of these queries sees, apart from the sink.
  Query seen(int64_t row, int64_t begin, int64_t count) const {
    Query all{query(row, begin).first, query(row, begin + count - 1).last};
    for (int64_t j = begin; places.nodes && j < begin + count; ++j) {
      const Query one = query(row, j);
      all = {std::min(all.first, one.first), std::max(all.last, one.last)};
    }
    return all;
  }

  // The segments that a row's tokens see: the sink's, and all from `first(row)` on.
  int64_t first(int64_t row) const { return seen(row, 0, asked).first / SEGMENT; }
  bool apart(int64_t row) const { return layer.sink > 0 && first(row) > 0; }
  int64_t segments(int64_t row) const {
    return seen(row, 0, asked).last / SEGMENT + 1 - first(row) + apart(row);
  }
  int64_t segment(int64_t row, int64_t i) const {
    return apart(row) ? (i == 0 ? 0 : first(row) + i - 1) : first(row) + i;
  }

  int64_t units() const {
    int64_t total = 0;
    for (int64_t row = 0; row < rows(); ++row) total += segments(row) * layer.kv_heads;
    return total;
  }

  // Whether a thread's unit of work is a segment. Otherwise it is a block of queries.
  bool along() const { return asked <= BLOCK && units() * part_floats() <= (16 << 20); }
  int64_t part_floats() const { return asked * part_size(layer.width); }
  int64_t shared_room() const { return along() ? units() * part_floats() : 0; }

  // The floats of scratch memory that each thread needs.
  int64_t own_room() const {
    const int64_t wide = padded(layer.width);
    const int64_t gathered = places.nodes ? STRIPE + places.nodes : 0;
    return (SEGMENT + 2 * LINE + most + gathered) * wide + BLOCK * SEGMENT +
           2 * most * part_size(layer.width);
  }

  // Runs one thread's share. `meet` waits for the other threads.
  template <typename Meet>
  void run(int64_t number, int64_t of, float* room, const Meet& meet) const {
    if (along())
      run_along(number, of, room, meet);
    else
      run_blocks(number, of, room);
  }

 private:
  // Some queries of one row and key-value head, and where they are packed.
  struct Block {
    int64_t row, head, begin, count;
    Query queries[TiledKernel::QUERIES];
    float *packed, *room;
  };

  // What the queries of a block see from slot `shared` on, where each token has its own slots.
  struct Own {
    const Attention& all;
    const Block& block;
    int64_t shared, origin;  // where this row and head begin in `keys` and `values`
    const S *keys = all.keys + origin, *values = all.values + origin;

    // Call apply(from, to, count, token) for the queries of each token, where count is the number
    // of slots before `end` that the token sees from `shared` on.
    template <typename Apply>
    void each(int64_t end, const Apply& apply) const {
      for (int64_t j = 0, next = 0; shared < end && j < block.count; j = next) {
        const int64_t token = (block.begin + j) / all.groups;
        next = std::min(block.count, (token + 1) * all.groups - block.begin);
        const int64_t last = std::min(end, all.places.position(block.row, token) + 1);
        apply(j, next, std::max<int64_t>(0, last - shared), token);
      }
    }

    // Copy what lies at `count` slots of a token's own text, from position `first` on.
    void gather(const S* from, int64_t token, int64_t first, int64_t count, int64_t width,
                S* to) const {
      const int64_t root = all.places.root(block.row);
      std::vector<int64_t> slots(all.places.nodes);
      all.places.path(block.row, token, slots.data());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = first + i, slot = place < root ? place : slots[place - root];
        std::copy_n(from + (slot - all.base(block.row)) * width, width, to + i * width);
      }
    }
  };

  void gather(Block& block) const {
    with_kernel<S>(layer.width, [&](const auto& kernel) {
      const int64_t size = kernel.depth(layer.width);
      for (int64_t j = 0; j < block.count; ++j) {
        const int64_t at = block.begin + j, token = block.row * places.count + at / groups;
        const int64_t head = block.head * groups + at % groups;
        block.queries[j] = query(block.row, at);
        kernel.pack_query(queries + token * stride + head * layer.width, layer.width,
                          block.packed + j * size);
      }
    });
  }

  // Compute a block's parts for one segment (see `Kernel::run`). False if it sees nothing there.
  bool part(const Block& block, int64_t segment, const float* known, bool weighing,
            float* to) const {
    const auto [low, high] = seen(block.row, block.begin, block.count);
    const int64_t first = segment * SEGMENT, last = std::min(first + SEGMENT, high + 1);
    int64_t begin = first, end = last;
    if (first >= layer.sink)
      begin = std::max({first, base(block.row), low / STRIPE * STRIPE});
    else if (low >= last)
      end = std::min(last, up_to(layer.sink, STRIPE));
    if (begin >= end) return false;
    const int64_t from = begin - base(block.row);
    const int64_t at = ((block.row * layer.kv_heads + block.head) * slots + from) * layer.width;
    const int64_t line = places.nodes ? places.root(block.row) / STRIPE * STRIPE : end;
    const int64_t shared = std::clamp(line, begin, end);
    const Own own{*this, block, shared, at - from * layer.width};
    with_kernel<S>(layer.width, [&](const auto& kernel) {
      kernel.run(layer, block.queries, block.count, block.packed, keys + at, values + at, begin,
                 shared, end, own, known, weighing, block.room, to);
    });
    return true;
  }

  void finish(const Block& block, int64_t j, const float* all) const {
    const int64_t at = block.begin + j, head = block.head * groups + at % groups;
    const int64_t token = block.row * places.count + at / groups, width = layer.width;
    float* to = out + (token * layer.heads + head) * width;
    const float* gate = queries + token * stride + layer.projected() + head * width;
    const Vec by(layer.eager ? 1.0f : 1.0f / all[1]);
    float kept = 1.0f;  // what the sink leaves
    if (const S* sinks = numbers<S>(layer.sinks)) {
      const float seen = rounded<S>(all[0] + rounded<S>(std::log(rounded<S>(all[1]))));
      const float over = rounded<S>(seen - static_cast<float>(sinks[head]));
      kept = rounded<S>(1.0f / (1.0f + std::exp(-over)));
    }
    with_kernel<S>(width, [&](const auto& kernel) {
      float some[LANES];
      for (int64_t i = 0; i < padded(width); ++i) {
        if (i % LANES == 0) rounded<S>(Vec::loadu(all + 2 + i) * by).store(some);
        if (const int64_t at = kernel.place(i, width); at < width)
          to[at] = rounded<S>(some[i % LANES] * (layer.opens() ? gate[at] : kept));
      }
    });
  }

  template <typename Meet>
  void run_along(int64_t number, int64_t of, float* room, const Meet& meet) const {
    const int64_t size = part_size(layer.width), all = units();
    const int64_t mine = all * number / of, end = all * (number + 1) / of;
    Block block{-1, -1, 0, asked, {}, room, room + most * padded(layer.width)};
    const auto each = [&](const auto& apply) {
      int64_t unit = 0;
      for (int64_t row = 0; row < rows(); ++row)
        for (int64_t head = 0, count = segments(row); head < layer.kv_heads; ++head) {
          const int64_t first = unit;
          for (int64_t i = 0; i < count; ++i, ++unit) {
            if (unit < mine || unit >= end) continue;
            if (row != block.row || head != block.head) {
              block.row = row, block.head = head;
              gather(block);
            }
            apply(segment(row, i), parts + unit * part_floats(), parts + first * part_floats());
          }
        }
    };
    if (layer.eager) {
      // eager attention rounds probabilities, so their sums must be known first
      each([&](int64_t i, float* to, const float*) { part(block, i, nullptr, false, to); });
      meet();
      std::vector<std::vector<float>> held(rows() * layer.kv_heads);
      const auto known = [&]() -> auto& { return held[block.row * layer.kv_heads + block.head]; };
      each([&](int64_t, const float*, const float* first) {
        if (!known().empty()) return;
        for (int64_t j = 0, count = segments(block.row); j < asked; ++j) {
          float sums[2] = {NEVER, 0.0f};
          for (int64_t i = 0; i < count; ++i)
            if (const float* some = first + i * part_floats() + j * size; some[0] != NEVER)
              join_sums(sums, some);
          known().insert(known().end(), sums, sums + 2);
        }
      });
      meet();
      each([&](int64_t i, float* to, const float*) { part(block, i, known().data(), true, to); });
    } else {
      each([&](int64_t i, float* to, const float*) { part(block, i, nullptr, true, to); });
    }
    meet();
    int64_t first = 0;  // the first unit of a row and head
    for (int64_t row = 0, query = 0; row < rows(); ++row)
      for (int64_t head = 0, count = segments(row); head < layer.kv_heads; ++head, first += count)
        for (int64_t j = 0; j < asked; ++j, ++query) {
          if (query % of != number) continue;
          float* sum = parts + first * part_floats() + j * size;
          for (int64_t i = 1; i < count; ++i) join(sum, sum + i * part_floats(), layer.width);
          block.row = row, block.head = head;
          finish(block, j, sum);
        }
  }

  void run_blocks(int64_t number, int64_t of, float* room) const {
    const int64_t size = part_size(layer.width), blocks = (asked + most - 1) / most;
    float *packed = room, *sums = packed + most * padded(layer.width), *some = sums + most * size;
    float known[2 * TiledKernel::QUERIES];
    for (int64_t unit = number; unit < rows() * layer.kv_heads * blocks; unit += of) {
      const int64_t i = unit % blocks, begin = asked * i / blocks;
      Block block{unit / blocks / layer.kv_heads, unit / blocks % layer.kv_heads, begin,
                  asked * (i + 1) / blocks - begin, {}, packed, some + most * size};
      gather(block);
      const auto each = [&](const float* known, bool weighing, const auto& apply) {
        for (int64_t s = 0, count = segments(block.row); s < count; ++s)
          if (part(block, segment(block.row, s), known, weighing, some))
            for (int64_t j = 0; j < block.count; ++j) apply(j, some + j * size);
      };
      for (int64_t j = 0; j < block.count; ++j) sums[j * size] = known[2 * j] = NEVER;
      for (int64_t j = 0; j < block.count; ++j) known[2 * j + 1] = 0.0f;
      if (layer.eager)
        each(nullptr, false, [&](int64_t j, const float* part) {
          if (part[0] != NEVER) join_sums(known + 2 * j, part);
        });
      each(layer.eager ? known : nullptr, true, [&](int64_t j, const float* part) {
        join(sums + j * size, part, layer.width);
      });
      for (int64_t j = 0; j < block.count; ++j) finish(block, j, sums + j * size);
    }
  }
};

}  // namespace attention
}  // namespace
