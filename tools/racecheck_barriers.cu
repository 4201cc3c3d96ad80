// What racecheck says of a ring whose places are handed over by barriers that count arrivals (mbarrier), in the
// plainest program that has one.
//
// As the warps that make operands do for those that convert weights (operand_producer.h), one warp stores numbers into
// the places of a ring, and another reads what other lanes have stored. A place is full when the writers have arrived
// at its first barrier, empty when the readers have at its second. Variants name how writers and readers arrive
//
//   lanes   every lane does
//   warp    lane 0 does, behind __syncwarp(): right too, since that orders what all lanes have done before it
//   late    every lane does, but those on the other side access the place first and wait then: wrong
//
// Both sides wait at each place in each variant, so that none is a phase ahead of what a parity can tell: all come to
// their ends, as tests/python/test_racecheck_barriers.py shows of a model. racecheck_rings.sh runs them all.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "variants.h"

namespace {

enum class Arrival { kLanes, kWarp, kLate };

constexpr int kPlaces = 3, kStages = 50;

__device__ unsigned shared_address(void const* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ void initialize(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
template <Arrival kArrival>
__device__ void arrive(uint64_t* barrier) {
  if (kArrival == Arrival::kWarp) __syncwarp();
  if (kArrival != Arrival::kWarp || threadIdx.x % 32 == 0)
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
                 : "memory");
}
__device__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Accesses a place behind its barrier, or before it.
template <Arrival kArrival, typename Access>
__device__ void guarded(uint64_t* barrier, int parity, Access access) {
  if (kArrival == Arrival::kLate) access();
  wait(barrier, parity);
  if (kArrival != Arrival::kLate) access();
}

/// The first warp stores stage * 32 + lane, the second adds up what the lane after next has stored.
template <Arrival kFull, Arrival kEmpty>
__global__ void add_stages(uint32_t* out) {
  __shared__ uint32_t ring[kPlaces][32];
  __shared__ uint64_t full[kPlaces], empty[kPlaces];
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int place = 0; place < kPlaces; ++place) {
      initialize(&full[place], kFull == Arrival::kWarp ? 1 : 32);
      initialize(&empty[place], kEmpty == Arrival::kWarp ? 1 : 32);
    }
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int stage = 0; stage < kStages; ++stage) {
    int const place = stage % kPlaces, parity = stage / kPlaces % 2;
    if (threadIdx.x < 32) {
      guarded<kEmpty>(&empty[place], parity ^ 1, [&] { ring[place][lane] = stage * 32 + lane; });
      arrive<kFull>(&full[place]);
    } else {
      guarded<kFull>(&full[place], parity, [&] { sum += ring[place][(lane + 2) % 32]; });
      arrive<kEmpty>(&empty[place]);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

/// Whether all sums are right.
template <Arrival kFull, Arrival kEmpty>
bool run() {
  uint32_t *out = nullptr, sums[32];
  cudaMalloc(&out, sizeof(sums));
  add_stages<kFull, kEmpty><<<1, 64>>>(out);
  cudaMemcpy(sums, out, sizeof(sums), cudaMemcpyDeviceToHost);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    return false;
  }
  for (int lane = 0; lane < 32; ++lane)
    if (sums[lane] != uint32_t(kStages * (kStages - 1) / 2 * 32 + kStages * ((lane + 2) % 32))) return false;
  return true;
}

constexpr Variant kVariants[] = {
    {"lanes,lanes", run<Arrival::kLanes, Arrival::kLanes>}, {"lanes,warp", run<Arrival::kLanes, Arrival::kWarp>},
    {"warp,lanes", run<Arrival::kWarp, Arrival::kLanes>},   {"warp,warp", run<Arrival::kWarp, Arrival::kWarp>},
    {"late,lanes", run<Arrival::kLate, Arrival::kLanes>},   {"lanes,late", run<Arrival::kLanes, Arrival::kLate>},
};

}  // namespace

int main(int count, char** words) { return run_variant(count, words, kVariants); }
