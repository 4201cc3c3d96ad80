// A parallel loop over index ranges.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "host/thread_pool.h"

namespace qcutlass::host {

/// Calls body(begin, end) for consecutive ranges that cover [0, count), on up to `threads` threads, the caller's
/// included. Ranges are as even as whole indices allow, and hold at least `grain` indices where there are several:
/// choose it so that a range is worth a few microseconds, what handing it to another thread takes. The first exception
/// of a body stops the loop and is rethrown after every thread has finished.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, Body const& body) {
  constexpr int64_t kRangesPerThread = 8;  // so that a thread that is held up leaves most of its share to others
  int64_t ranges = std::min(count / std::max<int64_t>(grain, 1), kRangesPerThread * threads);
  if (ranges > threads) ranges -= ranges % threads;
  if (threads <= 1 || ranges <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }

  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
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
  };
  ThreadPool::instance().run(static_cast<int>(std::min<int64_t>(threads, ranges)) - 1, work);
  if (error) std::rethrow_exception(error);
}

}  // namespace qcutlass::host
