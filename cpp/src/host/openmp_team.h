// The OpenMP runtime that torch has loaded into this process.
//
// Its threads spin for milliseconds after each of torch's parallel regions, and a thread of another pool that is to
// work meanwhile gets half a core at best: a token of SmolLM2 took 43 ms with two such pools on two cores, 42 with one
// thread and 34 with torch's threads for the products, too. So parallel loops run on these threads as long as they
// spin.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <strings.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "host/floating_point_mode.h"

namespace qcutlass::host {

class OpenMPTeam {
 public:
  /// Whether loops are to run here: torch is loaded, with a runtime whose threads spin. OMP_WAIT_POLICY=passive has
  /// them sleep at once; then ThreadPool is faster, since nobody waits there for a thread that is still to wake. So it
  /// is in the children of a process that forks, where the runtime waits for its parent's threads.
  static bool is_hot() { return parallel().load(std::memory_order_relaxed) != nullptr; }

  /// Calls work() on `threads` threads, the caller's included, in the caller's floating-point mode; returns when every
  /// call has. Inside a parallel region the caller makes the only call. work() must not throw, and does nothing where
  /// there is nothing left to do. `threads`: as torch has, since a team of another size is made anew.
  template <class Work>
  static void run(int threads, Work const& work) {
    struct Task {
      Work const& work;
      FloatingPointMode mode;
    };
    Task task{work, FloatingPointMode::current()};
    auto const call = [](void* pointer) {
      auto const& task = *static_cast<Task const*>(pointer);
      FloatingPointMode const mode = FloatingPointMode::current();
      task.mode.make_current();
      task.work();
      mode.make_current();  // torch's threads go on as they were
    };
    parallel().load(std::memory_order_relaxed)(call, &task, static_cast<unsigned>(threads), 0);
  }

 private:
  /// What compilers call for `#pragma omp parallel`: a function, its argument, threads, flags. LLVM's and Intel's
  /// runtimes have it, too.
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

  static std::atomic<Parallel>& parallel() {
    static std::atomic<Parallel> found = [] {
      pthread_atfork(nullptr, nullptr, [] { parallel() = nullptr; });
      return find();
    }();
    return found;
  }

  /// The function of the runtime that torch is linked to: other packages bring other copies of it. Nothing is loaded.
  static Parallel find() {
    char const* const policy = std::getenv("OMP_WAIT_POLICY");
    if ((policy != nullptr && strcasecmp(policy, "passive") == 0) || is_forked()) return nullptr;
    void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch == nullptr ? nullptr : reinterpret_cast<Parallel>(dlsym(torch, "GOMP_parallel"));
  }

  /// Whether this process has begun as a copy of another: torch may have used the runtime there.
  static bool is_forked() {
    constexpr unsigned kForkedWithoutExec = 0x40;  // PF_FORKNOEXEC of the kernel
    std::ifstream file("/proc/self/stat");  // number (name) state parent group session terminal foreground flags ...
    std::string line, word;
    std::getline(file, line);
    std::istringstream words(line.substr(line.rfind(')') + 1));
    for (int i = 0; i < 6; ++i) words >> word;
    unsigned flags = 0;
    return (words >> flags) && (flags & kForkedWithoutExec) != 0;
  }
};

}  // namespace qcutlass::host
