// Compares attention of random shapes, in buffers of exactly the right size, with sums in double
// precision. test_native.py compiles it with sanitizers. Arguments: number of cases, seed.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "attention.h"

namespace {

std::mt19937 source;

int64_t any(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(source);
}

// An allocation of exactly `size` numbers, so that sanitizers see any access beyond it.
template <typename T>
struct Buffer {
  explicit Buffer(int64_t size) : size(size), data(new T[size]) {}
  void fill() {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) data[i] = static_cast<T>(normal(source));
  }
  int64_t size;
  std::unique_ptr<T[]> data;
};

// The result of a team of threads: (B, T, N, D).
template <typename S>
std::vector<float> attend(attention::Attention<S> attention, int threads, int64_t numbers) {
  Buffer<float> out(numbers), parts(attention.shared_room());
  attention.out = out.data.get(), attention.parts = parts.data.get();
  Meeting meeting;
  std::vector<std::thread> team;
  for (int number = 0; number < threads; ++number)
    team.emplace_back([&, number] {
      Buffer<float> room(attention.own_room());
      attention.run(number, threads, room.data.get(), [&] { meeting.wait(threads, [] {}); });
    });
  for (std::thread& each : team) each.join();
  return {out.data.get(), out.data.get() + numbers};
}

// The slots that a token sees.
std::vector<int64_t> seen(const Sublayer& layer, const Places& places, int64_t row, int64_t token) {
  const int64_t last = places.position(row, token), root = places.root(row);
  std::vector<int64_t> path(places.nodes), slots;
  if (places.nodes) places.path(row, token, path.data());
  for (int64_t place = 0; place <= last; ++place)
    if (!layer.window || place > last - layer.window || place < layer.sink)
      slots.push_back(places.nodes && place >= root ? path[place - root] : place);
  return slots;
}

template <typename S>
bool agrees() {
  const int64_t widths[] = {8, 16, 24, 32, 40, 64, 80, 96, 128, 256};
  Sublayer layer{Kind::attention};
  layer.width = widths[any(0, 9)], layer.kv_heads = any(1, 3);
  layer.heads = layer.kv_heads * any(1, 5), layer.scale = 1 / std::sqrt(layer.width);
  layer.eager = any(0, 3) == 0, layer.softcap = layer.eager && any(0, 1) ? 5 : 0;
  if (any(0, 1)) layer.window = any(1, 400), layer.sink = any(0, 1) * any(0, 64);
  const int64_t rows = any(1, 3), count = any(0, 3) ? any(1, 9) : any(10, 120);
  std::vector<int64_t> starts(rows), parents;
  const int64_t nodes = any(0, 2) ? 0 : count + any(0, 3);
  for (int64_t& start : starts) start = any(0, 700) + std::max<int64_t>(0, nodes - count);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t node = 0; node < nodes; ++node) parents.push_back(node ? any(0, node - 1) : -1);
  const Places places(starts, count, parents);
  const int64_t first = *std::min_element(starts.begin(), starts.end()) - std::max<int64_t>(0, nodes - count);
  int64_t base = 0;
  if (layer.window && !layer.sink) base = std::max<int64_t>(0, first - layer.window + 1) / STRIPE * STRIPE;
  const int64_t end = *std::max_element(starts.begin(), starts.end()) + count;
  const int64_t slots = end - base + any(0, 1) * any(0, 40), width = layer.width;
  const int64_t stride = (layer.heads + any(0, 1) * 2 * layer.kv_heads) * width;
  Buffer<S> keys(rows * layer.kv_heads * slots * width), values(keys.size);
  Buffer<float> queries(rows * count * stride);
  keys.fill(), values.fill(), queries.fill();
  for (int64_t i = 0; i < queries.size; ++i) queries.data[i] = rounded<S>(queries.data[i]);
  attention::Attention<S> attention{layer, places, queries.data.get(), stride};
  attention.keys = keys.data.get(), attention.values = values.data.get();
  const std::vector<int64_t> bases(rows, base);
  attention.slots = slots, attention.bases = bases.data();
  const int64_t numbers = rows * count * layer.heads * width;
  const std::vector<float> out = attend(attention, 1, numbers);
  const std::vector<float> team = attend(attention, static_cast<int>(any(2, 3)), numbers);
  bool fine = std::memcmp(out.data(), team.data(), numbers * sizeof(float)) == 0;
  const double most = std::is_same_v<S, float> ? 2e-5 : .04;
  for (int64_t unit = 0; unit < rows * count * layer.heads; ++unit) {
    const int64_t head = unit % layer.heads, token = unit / layer.heads;
    const int64_t row = token / count, kv = row * layer.kv_heads + head / (layer.heads / layer.kv_heads);
    const float* query = queries.data.get() + token * stride + head * width;
    std::vector<double> sums(width);
    double total = 0;
    for (int64_t slot : seen(layer, places, row, token % count)) {
      const int64_t at = (kv * slots + slot - base) * width;
      double score = 0;
      for (int64_t i = 0; i < width; ++i)
        score += query[i] * static_cast<double>(static_cast<float>(keys.data[at + i]));
      score *= layer.scale;
      if (layer.softcap > 0) score = std::tanh(score / layer.softcap) * layer.softcap;
      total += std::exp(score);
      for (int64_t i = 0; i < width; ++i)
        sums[i] += std::exp(score) * static_cast<float>(values.data[at + i]);
    }
    for (int64_t i = 0; i < width; ++i)
      fine &= std::abs(out[unit * width + i] - sums[i] / total) <= most;
  }
  if (!fine)
    std::printf("width %ld heads %ld of %ld rows %ld tokens %ld nodes %ld window %ld sink %ld base %ld "
                "eager %d differ\n",
                width, layer.heads, layer.kv_heads, rows, count, nodes, layer.window, layer.sink, base,
                layer.eager);
  return fine;
}

}  // namespace

int main(int, char** arguments) {
  source.seed(std::atoi(arguments[2]));
  bool fine = true;
  for (int i = 0; i < std::atoi(arguments[1]); ++i) fine &= i % 2 ? agrees<float>() : agrees<BFloat16>();
  return !fine;
}
