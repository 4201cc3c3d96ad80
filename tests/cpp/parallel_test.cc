#include "host/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace qcutlass {
namespace {

TEST(ParallelFor, CoversEveryIndexOnce) {
  for (int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (int64_t grain : {0, 1, 3, 64, 5000}) {
      for (int threads : {1, 2, 5}) {
        std::vector<std::atomic<int>> visits(count);
        host::parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
          ASSERT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        for (int64_t i = 0; i < count; ++i)
          EXPECT_EQ(visits[i], 1) << count << " " << grain << " " << threads << " " << i;
      }
    }
  }
}

TEST(ParallelFor, StaysOnTheCallingThreadWhenOneRangeSuffices) {
  std::thread::id id;
  host::parallel_for(10, 10, 8, [&](int64_t, int64_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(ParallelFor, RethrowsAnExceptionAfterAllThreadsHaveFinished) {
  for (int threads : {1, 4}) {
    std::atomic<int> running{0};
    auto const body = [&](int64_t begin, int64_t end) {
      ++running;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      --running;
      if (begin <= 17 && 17 < end) throw std::runtime_error("index 17");
    };
    try {
      host::parallel_for(100, 1, threads, body);
      FAIL() << "no exception";
    } catch (std::runtime_error const& error) {
      EXPECT_STREQ(error.what(), "index 17");
    }
    EXPECT_EQ(running, 0);
  }
}

}  // namespace
}  // namespace qcutlass
