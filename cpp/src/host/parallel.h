// A parallel loop over index ranges with plain threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace qcutlass::host {

/// Calls body(begin, end) for consecutive ranges of at most `grain` indices that cover [0, count), on up to `threads`
/// threads, the caller's included. Choose `grain` so that a range is worth far more than starting a thread (tens of
/// microseconds): with one range nothing is started. The first exception of a body stops the loop and is rethrown after
/// every thread has finished.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, Body const& body) {
  grain = std::max<int64_t>(grain, 1);
  int64_t const ranges = count / grain + (count % grain != 0);
  int64_t const workers = std::min<int64_t>(threads, ranges);
  if (workers <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }

  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  auto work = [&] {
    for (int64_t i = next++; i < ranges; i = next++) {
      try {
        body(i * grain, std::min(count, (i + 1) * grain));
      } catch (...) {
        next = ranges;
        std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  };
  std::vector<std::thread> started;
  started.reserve(workers - 1);
  try {
    while (static_cast<int64_t>(started.size()) < workers - 1) started.emplace_back(work);
  } catch (std::system_error const&) {
    // The system gives no more threads: the ones there are share the work.
  }
  work();
  for (std::thread& thread : started) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace qcutlass::host
