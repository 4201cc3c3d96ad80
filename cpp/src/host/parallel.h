// A parallel loop over index ranges.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "host/openmp_team.h"
#include "host/thread_pool.h"

namespace qcutlass::host {

/// Threads of this process that run or wait for a core.
inline long own_running_threads() {
  long count = 0;
  std::error_code error;
  std::filesystem::directory_iterator thread("/proc/self/task", error);
  for (; thread != std::filesystem::directory_iterator(); thread.increment(error)) {
    std::ifstream file(thread->path() / "stat");  // number (name) state ...
    std::string line;
    std::getline(file, line);
    auto const end = line.rfind(") ");
    count += end != std::string::npos && line.compare(end + 2, 1, "R") == 0;
  }
  return count;
}

/// Whether other processes lately held up a loop's threads, so that the next loops had better not wait for any.
class Crowding {
 public:
  using Clock = std::chrono::steady_clock;

  /// Whether the next loop should stay on its caller's thread. `others` tells whether threads of other processes leave
  /// no core but the caller's.
  template <class Others = bool (*)()>
  static bool is_near(Clock::time_point now, Others const& others = others_fill_the_cores) {
    Clock::time_point const end = rest_end();
    if (now < end) return true;
    if (looked().exchange(end) == end) return false;  // once behind each rest: 20 us a thread
    if (now - held_up().load() > kLongestRest || !others()) return false;
    rest_end() = now + kRest;
    return true;
  }

  /// Call it after each loop, with the times when the loop began, when the caller had no ranges left, and when all
  /// threads had finished. At the second time each other thread has at most one range left, an eighth of its share.
  static void note(Clock::time_point begin, Clock::time_point own_end, Clock::time_point all_end) {
    auto const waited = all_end - own_end;
    if (waited <= kHeldUp || waited <= (own_end - begin) / 2) return;
    held_up() = all_end;
    rest_end() = all_end + kRest;
  }

 private:
  /// A longer wait counts as a lost core. A thread that loses its core gets it back after a scheduler's slice of 1 to
  /// 4 ms; interrupts are shorter.
  static constexpr std::chrono::microseconds kHeldUp{500};
  /// How long the caller then computes alone. A loop that waits 4 ms in vain after each rest costs less than a tenth of
  /// the time.
  static constexpr std::chrono::milliseconds kRest{50};
  /// How long rests may be repeated while others stay, before a loop is tried again: the number of their threads is
  /// known, but not their cores. A trial costs the slice, and 10 to 15 ms in which torch's threads spin on a core of
  /// others: less than 1 % of the time.
  static constexpr std::chrono::seconds kLongestRest{5};

  /// Linux's number of running threads on the whole machine, minus this process's own: torch's threads count as running
  /// while they spin.
  static bool others_fill_the_cores() {
    std::ifstream file("/proc/loadavg");  // three averages, then running/all threads
    std::string average;
    long running = 0;
    for (int i = 0; i < 3; ++i) file >> average;
    return (file >> running) && running - own_running_threads() >= sysconf(_SC_NPROCESSORS_ONLN) - 1;
  }

  template <int kWhich>
  static std::atomic<Clock::time_point>& time() {
    static std::atomic<Clock::time_point> time{Clock::time_point{}};
    return time;
  }
  static std::atomic<Clock::time_point>& rest_end() { return time<0>(); }
  static std::atomic<Clock::time_point>& held_up() { return time<1>(); }
  static std::atomic<Clock::time_point>& looked() { return time<2>(); }  ///< rest_end() that was looked behind
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
