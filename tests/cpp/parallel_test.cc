#include "host/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
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

/// Whether 1 + 2^-40 is more than 1 in fp32: in the mode that vector instructions obey, which fegetround does not ask.
bool rounds_upwards() {
  float volatile one = 1, tiny = 0x1p-40f;
  return one + tiny > one;
}

/// Whether both threads of a loop, the caller and one of the pool, do so.
bool all_round_upwards() {
  std::atomic<int> begun{0}, upwards{0};
  host::parallel_for(2, 1, 2, [&](int64_t, int64_t) {
    upwards += rounds_upwards();
    ++begun;
    while (begun < 2) std::this_thread::yield();  // so that each has one
  });
  return upwards == 2;
}

TEST(ParallelFor, UsesTheCallersFloatingPointMode) {
  EXPECT_FALSE(all_round_upwards());  // the pool's thread is there before the mode changes
  int const before = std::fegetround();
  std::fesetround(FE_UPWARD);
  bool const upwards = all_round_upwards();
  std::fesetround(before);
  EXPECT_TRUE(upwards);
  EXPECT_FALSE(all_round_upwards()) << "nothing is left over from the call before";
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

/// Sum of [0, count), one index a range.
int64_t parallel_sum(int64_t count, int threads) {
  std::atomic<int64_t> sum{0};
  host::parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  return sum;
}

TEST(ParallelFor, CutsEvenRanges) {
  for (int threads : {2, 3}) {
    std::atomic<int> ranges{0};
    host::parallel_for(100, 12, threads, [&](int64_t begin, int64_t end) {
      EXPECT_GE(end - begin, 12);
      ++ranges;
    });
    EXPECT_EQ(ranges % threads, 0) << threads;
  }
}

TEST(ParallelFor, SharesWorkWithOtherThreads) {
  // The first body to run waits for one on another thread.
  std::atomic<int> arrived{0};
  auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  host::parallel_for(2, 1, 2, [&](int64_t, int64_t) {
    ++arrived;
    while (arrived < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(arrived, 2);
  });
}

TEST(ParallelFor, WorksOnThreadsThatHaveFallenAsleep) {
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(parallel_sum(100, 3), 4950);
  }
}

TEST(ParallelFor, Nests) {
  std::atomic<int64_t> sum{0};
  host::parallel_for(20, 1, 3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += parallel_sum(20, 3);
  });
  EXPECT_EQ(sum, 20 * 190);
}

TEST(ParallelFor, ServesConcurrentCallers) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([] {
      for (int i = 0; i < 500; ++i) ASSERT_EQ(parallel_sum(50, 3), 1225);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ParallelFor, WorksInAChildProcess) {
  ASSERT_EQ(parallel_sum(100, 3), 4950);
  pid_t const child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    alarm(10);  // a child that waits for its parent's threads ends here
    _exit(parallel_sum(100, 3) == 4950 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace qcutlass
