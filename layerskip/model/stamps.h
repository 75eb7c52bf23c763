// Times passes by phase in builds with LAYERSKIP_STAMPS. In other builds this costs nothing.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#ifdef LAYERSKIP_STAMPS
#include <array>
#include <chrono>
#include <mutex>
#endif

namespace {

enum class Phase {
  start, norm, packing, queries, rotation, attention, mixing, gates, activation, down, experts,
  residual, head, other, waiting,
};

using Spent = std::map<std::string, std::pair<double, int64_t>>;  // seconds of threads, bytes read

#ifdef LAYERSKIP_STAMPS

constexpr std::array NAMES{
    "start", "norm", "packing", "queries", "rotation", "attention", "mixing", "gates", "activation",
    "down", "experts", "residual", "head", "other", "waiting",
};

inline std::mutex stamps_lock;
inline Spent spent;

// The clock of one thread in one pass.
class Stamps {
 public:
  ~Stamps() {
    enter(phase_);
    const std::lock_guard<std::mutex> locked(stamps_lock);
    for (size_t i = 0; i < NAMES.size(); ++i) {
      auto& total = spent[NAMES[i]];
      total.first += std::chrono::duration<double>(times_[i]).count(), total.second += bytes_[i];
    }
  }

  // Begin a phase that reads this many bytes of weights. Returns the phase that ends.
  Phase enter(Phase next, int64_t bytes = 0) {
    const auto now = std::chrono::steady_clock::now();
    times_[static_cast<size_t>(phase_)] += now - since_;
    bytes_[static_cast<size_t>(next)] += bytes;
    since_ = now;
    return std::exchange(phase_, next);
  }

 private:
  Phase phase_ = Phase::start;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::array<std::chrono::steady_clock::duration, NAMES.size()> times_{};
  std::array<int64_t, NAMES.size()> bytes_{};
};

// The totals of all passes since the last call.
inline Spent taken_stamps() {
  const std::lock_guard<std::mutex> locked(stamps_lock);
  return std::exchange(spent, {});
}

#else

struct Stamps {
  Phase enter(Phase next, int64_t = 0) { return next; }
};

inline Spent taken_stamps() { return {}; }

#endif

}  // namespace
