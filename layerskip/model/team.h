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
// hundred times longer. A thread that has waited longer than PATIENCE therefore sleeps, so that the
// system can move the last thread to the freed core. After a pass that spent much of its time
// asleep, the next few passes of few tokens use one thread, which waits for nobody. If a team then
// does no better, twice as many passes use one thread.

using Clock = std::chrono::steady_clock;
constexpr auto PATIENCE = std::chrono::microseconds(50);  // about the cost of waking a thread
constexpr int SPELL = 256;                                // passes that run on one thread, at most

class Crew {
 public:
  // How many threads the next pass uses, of those wanted.
  int threads(int wanted) {
    if (!disturbed()) return wanted;
    alone_.fetch_sub(1, std::memory_order_relaxed);
    return 1;
  }

  bool disturbed() const { return alone_.load(std::memory_order_relaxed) > 0; }

  // Report how long a pass of several threads took, and how long all of them slept together. At each
  // meeting all but the last thread may sleep: the more threads there are, the more they sleep.
  void note(Clock::duration whole, Clock::duration slept, int threads) {
    const int spell = spell_.load(std::memory_order_relaxed);
    if (slept * 4 < whole * (threads - 1)) {
      spell_.store(std::max(1, spell / 2), std::memory_order_relaxed);
      return;
    }
    alone_.store(spell * 2, std::memory_order_relaxed);
    spell_.store(std::min(SPELL / 2, spell * 2), std::memory_order_relaxed);
  }

 private:
  std::atomic<int> alone_{0};  // passes left to run on one thread
  std::atomic<int> spell_{1};  // half the number of such passes next time
};

inline Crew crew;  // shared by all passes of the process, because they share its cores

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
    } while (Clock::now() - start < PATIENCE);
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
