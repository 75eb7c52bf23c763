// The threads that run a pass together, and how they wait for each other.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace {

// A team waits for its last thread some hundred times per pass, normally for microseconds. If
// another process occupies that thread's core, the wait takes a scheduler time slice, which is a
// hundred times longer. A thread that has waited longer than its patience therefore sleeps, so that
// the system can move the last thread to the freed core. After a pass that spent much of its time
// asleep, the next few passes of few tokens use half the threads, or still fewer if these sleep as
// much. If the whole team then does no better, that lasts for twice as many passes.

using Clock = std::chrono::steady_clock;
// About the cost of waking all sleepers, which are woken one after the other.
inline Clock::duration patience(int threads) {
  return std::chrono::microseconds(50) * (1 + threads / 4);
}
constexpr int SPELL = 256;  // passes that run on fewer threads, at most

class Crew {
 public:
  // How many threads the next pass uses, of those wanted.
  int threads(int wanted) {
    if (!disturbed()) return wanted;
    left_.fetch_sub(1, std::memory_order_relaxed);
    return std::max(1, wanted >> halvings_.load(std::memory_order_relaxed));
  }

  bool disturbed() const { return left_.load(std::memory_order_relaxed) > 0; }

  // Report how long a pass took on several threads, of those wanted, and how long all of them slept
  // together. At each meeting all but the last may sleep: more threads sleep more.
  void note(Clock::duration whole, Clock::duration slept, int threads, int wanted) {
    const int spell = spell_.load(std::memory_order_relaxed);
    const int halvings = halvings_.load(std::memory_order_relaxed);
    const bool calm = slept * 4 < whole * (threads - 1);
    if (threads < wanted) {
      if (!calm) halvings_.store(std::min(halvings + 1, 16), std::memory_order_relaxed);
      return;
    }
    if (calm) {
      spell_.store(std::max(1, spell / 2), std::memory_order_relaxed);
      if (spell == 1) halvings_.store(1, std::memory_order_relaxed);
      return;
    }
    left_.store(spell * 2, std::memory_order_relaxed);
    spell_.store(std::min(SPELL / 2, spell * 2), std::memory_order_relaxed);
  }

 private:
  std::atomic<int> left_{0};      // passes left to run on fewer threads
  std::atomic<int> spell_{1};     // half the number of such passes next time
  std::atomic<int> halvings_{1};  // of the threads in such passes
};

inline Crew crew;  // shared by all passes of the process, because they share its cores

// The threads that this thread's passes want, while torch's own work takes fewer; 0: torch's number.
inline thread_local int usual_threads = 0;

struct alignas(64) Meeting {
  std::atomic<int> waiting{0};
  alignas(64) std::atomic<int> round{0};
  std::atomic<int> sleepers{0};
  std::atomic<Clock::rep> slept{0};  // summed over all threads

  // Wait until all threads have arrived, calling `idle` repeatedly meanwhile.
  template <typename Idle>
  void wait(int threads, const Idle& idle) {
    if (threads == 1) return;
    const int now = round.load(std::memory_order_relaxed);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      waiting.store(0, std::memory_order_relaxed);
      round.store(now + 1);
      if (sleepers.load() > 0) wake();
      return;
    }
    const auto start = Clock::now();
    do {
      for (int spins = 0; spins < 100; ++spins) {
        if (round.load(std::memory_order_acquire) != now) return;
        idle();
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
    } while (Clock::now() - start < patience(threads));
    sleepers.fetch_add(1);
    while (round.load() == now) sleep(now);
    sleepers.fetch_sub(1);
    slept.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
  }

 private:
#ifdef __linux__
  void sleep(int now) { syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
  static_assert(sizeof(std::atomic<int>) == sizeof(int));
#else
  void sleep(int) { sched_yield(); }
  void wake() {}
#endif
};

struct Range {
  int64_t first, last;
};

// One thread's share of the rows: whole cache lines of output, so that threads never share one.
inline Range share(int64_t rows, int thread, int threads) {
  const int64_t lines = (rows + 15) / 16;
  return {std::min(rows, lines * thread / threads * 16),
          std::min(rows, lines * (thread + 1) / threads * 16)};
}

}  // namespace
