// Threads that stay between parallel loops: a loop of microseconds cannot pay for starting its own.
//
// What was measured with products of 80 us on two cores, one of them wanted by other processes, too: a caller that
// never waits for a thread which has no core is not slowed down by asking for one (75 us instead of 79; a barrier, as
// OpenMP has it, made it 150). A thread that is woken must not land on its caller's core, where the kernel likes to put
// it: 58 us instead of 73. Polling for as long as the next product takes to come saves most wake-ups: 51 us.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "host/floating_point_mode.h"

namespace qcutlass::host {

class ThreadPool {
 public:
  /// The pool of this process. It is never destroyed: its threads may outlive static objects.
  static ThreadPool& instance() { return *current(); }

  /// Calls work() on the calling thread and on others, `threads` in all and not more than it has cores; on those that
  /// are free before the caller's own call returns: nobody waits for a thread that has not begun, so nested and
  /// concurrent calls cannot block each other. Returns when every call has; work() must not throw, and does nothing
  /// where there is nothing left to do. All calls are made in the caller's floating-point mode, so that results do not
  /// depend on who makes which.
  template <class Work>
  void run(int threads, Work const& work) {
    Task task;
    task.call = [](void const* pointer) { (*static_cast<Work const*>(pointer))(); };
    task.work = &work;
    task.places = threads - 1;
    task.mode = FloatingPointMode::current();
    submit(task);
    work();
    retire(task);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Task {
    void (*call)(void const*);
    void const* work;
    int places;  ///< threads that may still join
    FloatingPointMode mode;
    std::atomic<int> running{0};
  };

  /// How long an idle thread polls before it sleeps: what torch does between two products of a model takes a few 100
  /// us.
  static constexpr std::chrono::milliseconds kPollTime{1};
  /// A step of polling takes 1 us; after one that took so long, somebody else wants the core, and the thread sleeps.
  static constexpr std::chrono::microseconds kHeldUp{200};
  /// How long a caller polls for others' last ranges before it lets other threads have its core: a few ranges.
  static constexpr std::chrono::microseconds kWaitTime{50};

  static ThreadPool*& current() {
    static ThreadPool* pool = [] {
      // A child process has none of its parent's threads, and locks as they happened to be: it begins with a new pool.
      pthread_atfork(nullptr, nullptr, [] { current() = new ThreadPool; });
      return new ThreadPool;
    }();
    return pool;
  }

  static void pause() {
#if defined(__x86_64__)
    for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#endif
  }

  void submit(Task& task) {
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task.places = std::min(task.places, find_cores());
      tasks_.push_back(&task);
      places_ += task.places;
      wake = sleeping_ > 0 && task.places > 0;
      try {
        while (static_cast<int>(threads_.size()) < task.places) start();
      } catch (std::system_error const&) {
        // The system gives no more threads: the ones there are share the work.
      }
    }
    if (wake) ready_.notify_all();
  }

  /// Lets the threads run on the cores that the caller may use, but for the one where it is; returns how many these
  /// are.
  int find_cores() {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1 << 20;  // more cores than the set has bits
    int const own = sched_getcpu();
    if (own >= 0) CPU_CLR(own, &cores);
    int const count = CPU_COUNT(&cores);
    if (count > 0 && !CPU_EQUAL(&cores, &cores_)) {
      cores_ = cores;
      for (pthread_t thread : threads_) pthread_setaffinity_np(thread, sizeof cores_, &cores_);
    }
    return count;
  }

  void start() {
    std::thread thread([this] { serve(); });
    threads_.push_back(thread.native_handle());
    pthread_setaffinity_np(threads_.back(), sizeof cores_, &cores_);
    thread.detach();
  }

  void retire(Task& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      places_ -= task.places;
      tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
    }
    auto const done = [&] { return task.running.load(std::memory_order_acquire) == 0; };
    for (auto const end = Clock::now() + kWaitTime; !done() && Clock::now() < end;) pause();
    while (!done()) std::this_thread::yield();
  }

  /// Waits until a task may have a place, for a while.
  void poll() {
    auto const begin = Clock::now();
    for (auto last = begin; places_.load(std::memory_order_relaxed) <= 0;) {
      pause();
      auto const now = Clock::now();
      if (now - begin > kPollTime || now - last > kHeldUp) return;
      last = now;
    }
  }

  /// The loop of a thread of the pool: takes a place in a task or sleeps, forever.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      auto const open = std::find_if(tasks_.begin(), tasks_.end(), [](Task* task) { return task->places > 0; });
      if (open != tasks_.end()) {
        Task& task = **open;
        --task.places;
        --places_;
        ++task.running;
        lock.unlock();
        task.mode.make_current();
        task.call(task.work);
        task.running.fetch_sub(1, std::memory_order_release);  // the task may be gone from here on
      } else {
        lock.unlock();
      }
      poll();
      lock.lock();
      ++sleeping_;
      ready_.wait(lock, [&] { return places_ > 0; });
      --sleeping_;
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Task*> tasks_;    ///< whose callers have not finished their own part
  std::atomic<int> places_{0};  ///< sum of the tasks' places
  std::vector<pthread_t> threads_;
  cpu_set_t cores_{};  ///< where they may run
  int sleeping_ = 0;
};

}  // namespace qcutlass::host
