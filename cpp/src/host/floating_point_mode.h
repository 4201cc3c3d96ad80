// The floating-point mode of a thread: rounding, and whether denormal numbers are flushed to zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace qcutlass::host {

/// The control word of vector and scalar floating-point instructions. A thread begins with that of the thread that made
/// it; torch.set_flush_denormal, and libraries built with -ffast-math, change it later, for one thread.
class FloatingPointMode {
 public:
  static FloatingPointMode current() {
    FloatingPointMode mode;
#if defined(__x86_64__)
    mode.control_ = _mm_getcsr() & ~kExceptionFlags;
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(mode.control_));
#else
    std::fegetenv(&mode.control_);
#endif
    return mode;
  }

  void make_current() const {
#if defined(__x86_64__)
    _mm_setcsr(control_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(control_));
#else
    std::fesetenv(&control_);
#endif
  }

 private:
#if defined(__x86_64__)
  static constexpr uint32_t kExceptionFlags = 0x3f;  ///< the low bits of MXCSR: what happened, not what is asked for
  uint32_t control_ = 0;
#elif defined(__aarch64__)
  uint64_t control_ = 0;
#else
  std::fenv_t control_{};
#endif
};

}  // namespace qcutlass::host
