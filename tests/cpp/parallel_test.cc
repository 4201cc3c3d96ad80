#include "host/parallel.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <mutex>
#include <optional>
#include <set>
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

/// The sum of visit() on both threads of a loop, the caller and one of the pool. On a crowded machine the caller may be
/// left alone, or one of them arrive when the other waits no longer: such a round counts for nothing, and there is
/// another. Nothing: it always was so.
template <class Visit>
std::optional<int> sum_over_both(Visit const& visit) {
  for (int round = 0; round < 1000; ++round) {
    std::atomic<int> arrived{0}, visits{0}, sum{0};
    auto const end = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    host::parallel_for(2, 1, 2, [&](int64_t begin, int64_t stop) {
      if (stop - begin == 2) return;  // alone
      ++arrived;
      while (arrived < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      if (arrived < 2) return;
      sum += visit();
      ++visits;
    });
    if (visits == 2) return sum;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return std::nullopt;
}

TEST(ParallelFor, UsesTheCallersFloatingPointMode) {
  EXPECT_EQ(sum_over_both(rounds_upwards), 0);  // the pool's thread is there before the mode changes
  int const before = std::fegetround();
  std::fesetround(FE_UPWARD);
  std::optional<int> const upwards = sum_over_both(rounds_upwards);
  std::fesetround(before);
  EXPECT_EQ(upwards, 2);
  EXPECT_EQ(sum_over_both(rounds_upwards), 0) << "nothing is left over from the call before";
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
    EXPECT_TRUE(ranges % threads == 0 || ranges == 1) << threads << " " << ranges;  // one: the machine is crowded
  }
}

TEST(ParallelFor, SharesWorkWithOtherThreads) {
  EXPECT_EQ(sum_over_both([] { return 1; }), 2);
}

/// The cores that a thread may use, 0: the caller.
cpu_set_t cores_of(pid_t thread) {
  cpu_set_t cores;
  EXPECT_EQ(sched_getaffinity(thread, sizeof cores, &cores), 0);
  return cores;
}

TEST(ParallelFor, KeepsToTheCallersCores) {
  cpu_set_t const before = cores_of(0);
  int const own = sched_getcpu();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(own, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  std::set<std::thread::id> ids;
  for (int i = 0; i < 100; ++i) {
    host::parallel_for(64, 1, 4, [&](int64_t, int64_t) { ids.insert(std::this_thread::get_id()); });
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(ids.size(), 1u) << "one core is enough for one thread";
}

TEST(ParallelFor, LeavesTheCallersCoreToTheCaller) {
  cpu_set_t const all = cores_of(0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "needs two cores";
  auto const caller = std::this_thread::get_id();
  EXPECT_EQ(sum_over_both([&] {
              cpu_set_t const own = cores_of(0);
              return std::this_thread::get_id() == caller ? 0 : CPU_COUNT(&own);
            }),
            CPU_COUNT(&all) - 1);
}

TEST(Crowding, CountsThisProcessesThreadsThatRun) {
  std::atomic<bool> ends{false};
  std::mutex asleep;
  asleep.lock();
  std::thread sleeper([&] { std::lock_guard<std::mutex> lock(asleep); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  long const before = host::own_running_threads();
  EXPECT_GE(before, 1) << "the one that asks";
  std::thread spinner([&] {
    while (!ends) {
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(host::own_running_threads(), before + 1) << "one that spins, and none that sleeps";
  ends = true;
  asleep.unlock();
  spinner.join();
  sleeper.join();
}

TEST(Crowding, FollowsALoopThatWasHeldUp) {
  using std::chrono::milliseconds;
  auto const begin = host::Crowding::Clock::now() - std::chrono::hours(1);  // so that no loop of today is concerned
  auto const is_near_after = [&](int own, int all, std::vector<int> const& later, bool others) {
    host::Crowding::note(begin, begin + milliseconds(own), begin + milliseconds(all));
    bool near = false;
    for (int ms : later) near = host::Crowding::is_near(begin + milliseconds(all + ms), [&] { return others; });
    host::Crowding::note(begin - milliseconds(10'000), begin - milliseconds(9'999), begin - milliseconds(9'000));
    host::Crowding::is_near(begin, [] { return false; });  // looks behind that rest: the next one may end as this did
    return near;
  };
  EXPECT_TRUE(is_near_after(1, 4, {10}, false));
  EXPECT_FALSE(is_near_after(1, 4, {100}, false)) << "once more";
  EXPECT_FALSE(is_near_after(1, 1, {10}, true)) << "nobody waited";
  EXPECT_FALSE(is_near_after(40, 45, {10}, true)) << "a range of a long loop takes as long";
  EXPECT_TRUE(is_near_after(1, 4, {100}, true)) << "the others have not gone";
  EXPECT_TRUE(is_near_after(1, 4, {100, 140}, true)) << "another rest";
  EXPECT_FALSE(is_near_after(1, 4, {100, 5100}, true)) << "where they run is not known: at times a loop is tried";
  EXPECT_FALSE(is_near_after(1, 4, {100, 5100, 5110}, true)) << "and those behind it";
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
