// A parallel loop over index ranges.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "host/openmp_team.h"
#include "host/thread_pool.h"

namespace qcutlass::host {

/// Whether other processes lately held up a loop's threads, so that the next loops had better not wait for any.
class Crowding {
 public:
  using Clock = std::chrono::steady_clock;

  static bool is_near(Clock::time_point now) { return now < end().load(std::memory_order_relaxed); }

  /// To be told of each loop: when it began, when its caller had nothing left to do, and when the others had finished.
  /// These have one range each to finish, an eighth of what each thread does (`parallel_for`).
  static void note(Clock::time_point begin, Clock::time_point own_end, Clock::time_point all_end) {
    auto const waited = all_end - own_end;
    if (waited <= kHeldUp || waited <= (own_end - begin) / 2) return;
    // A thread that has slept is served first, so that some loops go well behind each rest, however long others stay.
    Clock::duration const last = rest(), between = begin - end().load();
    auto const length = between < last ? std::min(2 * last, kLongestRest) : std::max(last / 2, kFirstRest);
    rest() = length;
    end() = all_end + length;
  }

 private:
  /// A thread that loses its core has it back after a scheduler's slice of 1 to 4 ms. Interrupts are shorter.
  static constexpr std::chrono::microseconds kHeldUp{500};
  /// So a loop in vain, of 4 ms, costs less than a tenth of the time.
  static constexpr Clock::duration kFirstRest = std::chrono::milliseconds(50);
  /// And less than 1 % where others stay: while a compiler runs, say.
  static constexpr Clock::duration kLongestRest = std::chrono::milliseconds(800);

  static std::atomic<Clock::time_point>& end() {
    static std::atomic<Clock::time_point> end{Clock::time_point{}};
    return end;
  }
  static std::atomic<Clock::duration>& rest() {
    static std::atomic<Clock::duration> rest{kFirstRest};
    return rest;
  }
};

/// Calls body(begin, end) for consecutive ranges that cover [0, count), on up to `threads` threads, the caller's
/// included: torch's own, or those of ThreadPool where torch's are not there or asleep. On a crowded machine the caller
/// may do all. Ranges are as even as whole indices allow, and hold at least `grain` indices where there are several:
/// choose it so that a range is worth a few microseconds, what handing it to another thread takes. The first exception
/// of a body stops the loop and is rethrown after every thread has finished.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, Body const& body) {
  constexpr int64_t kRangesPerThread = 8;  // so that a thread that is held up leaves most of its share to others
  int64_t ranges = std::min(count / std::max<int64_t>(grain, 1), kRangesPerThread * threads);
  if (ranges > threads) ranges -= ranges % threads;
  auto const start = Crowding::Clock::now();
  if (threads <= 1 || ranges <= 1 || Crowding::is_near(start)) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }

  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  auto const caller = std::this_thread::get_id();
  auto own_end = start;
  auto const work = [&] {
    for (int64_t i = next++; i < ranges; i = next++) {
      try {
        body(i * count / ranges, (i + 1) * count / ranges);
      } catch (...) {
        next = ranges;
        std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
    if (std::this_thread::get_id() == caller) own_end = Crowding::Clock::now();
  };
  if (OpenMPTeam::is_hot()) {
    OpenMPTeam::run(threads, work);
  } else {
    ThreadPool::instance().run(static_cast<int>(std::min<int64_t>(threads, ranges)), work);
  }
  Crowding::note(start, own_end, Crowding::Clock::now());
  if (error) std::rethrow_exception(error);
}

}  // namespace qcutlass::host
