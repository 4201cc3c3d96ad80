// Threads that stay between parallel loops: a loop of microseconds cannot pay for starting its own.
#pragma once

#include <pthread.h>

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

  /// Calls work() on the calling thread and on up to `helpers` others, those that are free before the caller's own call
  /// returns: nobody waits for a thread that has not begun, so nested and concurrent calls cannot block each other.
  /// Returns when every call has; work() must not throw, and does nothing where there is nothing left to do. All calls
  /// are made in the caller's floating-point mode, so that results do not depend on who makes which.
  template <class Work>
  void run(int helpers, Work const& work) {
    Task task;
    task.call = [](void const* pointer) { (*static_cast<Work const*>(pointer))(); };
    task.work = &work;
    task.places = helpers;
    task.mode = FloatingPointMode::current();
    submit(task);
    work();
    retire(task);
  }

 private:
  struct Task {
    void (*call)(void const*);
    void const* work;
    int places;  ///< threads that may still join
    FloatingPointMode mode;
    std::atomic<int> running{0};
  };

  /// How long an idle thread polls before it sleeps: waking it takes as long, so products in close succession find it
  /// awake.
  static constexpr std::chrono::microseconds kPollTime{50};

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
    __builtin_ia32_pause();
#endif
  }

  /// Polls until done() or for kPollTime.
  template <class Done>
  static void poll(Done const& done) {
    auto const end = std::chrono::steady_clock::now() + kPollTime;
    while (!done() && std::chrono::steady_clock::now() < end) {
      for (int i = 0; i < 8 && !done(); ++i) pause();
    }
  }

  void submit(Task& task) {
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(&task);
      places_ += task.places;
      wake = sleeping_ > 0;
      try {
        for (; threads_ < task.places; ++threads_) std::thread([this] { serve(); }).detach();
      } catch (std::system_error const&) {
        // The system gives no more threads: the ones there are share the work.
      }
    }
    if (wake) ready_.notify_all();
  }

  void retire(Task& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      places_ -= task.places;
      tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
    }
    auto const done = [&] { return task.running.load(std::memory_order_acquire) == 0; };
    for (poll(done); !done();) std::this_thread::yield();
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
      poll([&] { return places_.load(std::memory_order_relaxed) > 0; });
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
  int threads_ = 0;
  int sleeping_ = 0;
};

}  // namespace qcutlass::host
