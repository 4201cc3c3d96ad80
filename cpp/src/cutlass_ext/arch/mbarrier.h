// Barriers in shared memory that count arrivals and bytes (sm_90): CUTLASS's, with a wait of our own.
#pragma once

#include "cutlass/arch/barrier.h"

namespace cutlass::arch {

class TransactionBarrier : public ClusterTransactionBarrier {
 public:
  /// Waits for the end of the phase of this parity. CUTLASS's wait does not tell the compiler that memory changes.
  /// One asm block: with a loop in C++ around try_wait, ptxas runs out of registers and serialises the MMAs in flight.
  /// In debug builds (without NDEBUG) the wait ends in a trap after some seconds, so that a fault cannot hang the GPU.
  CUTLASS_DEVICE void wait(uint32_t parity) const {
    uint32_t const address = cute::cast_smem_ptr_to_uint(&this->barrier_);
#ifdef NDEBUG
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }"
        :
        : "r"(address), "r"(parity)
        : "memory");
#else
    constexpr uint32_t kMostTries = 2000000;  // of about a microsecond each
    asm volatile(
        "{ .reg .pred stop; .reg .u32 tries; mov.u32 tries, 0;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 stop, [%0], %1;\n"
        "@stop bra done;\n"
        "add.u32 tries, tries, 1; setp.lt.u32 stop, tries, %2;\n"
        "@stop bra again;\n"
        "trap;\n"
        "done: }"
        :
        : "r"(address), "r"(parity), "n"(kMostTries)
        : "memory");
#endif
  }
};

}  // namespace cutlass::arch
