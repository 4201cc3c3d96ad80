// What racecheck says of the streaming loop's way to share a ring of copies, in the plainest program that has it.
//
// As in StreamRing, the threads of a set, one or two warps, fill a ring of their own. Each thread copies its part of a
// stage, waits for its own copies of the stage that is read next, meets the other threads of the set, requests the
// stage that takes the place read before, and reads what another thread has copied. Nothing is read before all have
// waited for it and met, nothing is copied over before all that read it have met again. Behind the loop all threads of
// the block meet twice, as in the epilogue: before sums take the rings' memory, and before others read them. Variants
// differ in how the threads of a set meet
//
//   block   __syncthreads(), which is more than is needed
//   named   a barrier of the set, bar.sync with a number and the set's threads: StreamRing where a set has two warps
//   warp    __syncwarp(): StreamRing where it has one
//   none    nothing: wrong, by the programming model at least
//
// in the warps of a set, in whether copies are cp.async or loads and stores, and in whether all sets have as many
// stages: where k is no multiple of what all slices take in a turn, some of the streaming loop's have fewer, and meet
// less often. racecheck_rings.sh runs them all.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "variants.h"

namespace {

enum class Meeting { kBlock, kNamed, kWarp, kNone };

constexpr int kRings = 4, kPlaces = 3, kStages = 24, kBlocks = 4;

template <Meeting kMeeting, int kThreads>
__device__ void meet(int ring) {
  if constexpr (kMeeting == Meeting::kBlock) __syncthreads();
  if constexpr (kMeeting == Meeting::kNamed) asm volatile("bar.sync %0, %1;" ::"r"(8 + ring), "n"(kThreads) : "memory");
  if constexpr (kMeeting == Meeting::kWarp) __syncwarp();
  if constexpr (kMeeting == Meeting::kNone) asm volatile("" ::: "memory");
}

/// Copies 16 bytes to shared memory, at once or, with kAsync, some time before wait() has returned.
template <bool kAsync>
__device__ void copy(uint4* to, uint4 const* from) {
  if constexpr (kAsync)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
  else
    *to = *from;
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until all but the last kPlaces - 2 groups of this thread's copies are there.
__device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPlaces - 2) : "memory"); }

/// Stages of a ring.
template <bool kUneven>
__host__ __device__ constexpr int stages_of(int ring) {
  return kUneven ? kStages - 5 * ring : kStages;
}

/// in: [block][ring][stage][thread]. out: [block][ring][thread], the sum over all stages of another thread's numbers,
/// of the next ring's thread.
template <Meeting kMeeting, int kWarps, bool kAsync, bool kUneven>
__global__ void add_stages(uint4 const* in, uint32_t* out) {
  constexpr int kThreads = 32 * kWarps;
  __shared__ uint4 rings[kRings][kPlaces][kThreads];
  int const ring = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  int const other = (thread + kThreads / 2 + 1) % kThreads;  // of the other warp where there are two
  int const all = blockIdx.x * kRings + ring;
  uint4 const* const from = in + all * kStages * kThreads + thread;
  for (int stage = 0; stage < kPlaces - 1; ++stage) {
    copy<kAsync>(&rings[ring][stage][thread], from + stage * kThreads);
    commit();
  }
  uint32_t sum = 0;
  int const stages = stages_of<kUneven>(ring);
  for (int stage = 0; stage < stages; ++stage) {
    wait();
    meet<kMeeting, kThreads>(ring);
    int const next = stage + kPlaces - 1;  // into the place of the stage before
    if (next < stages) copy<kAsync>(&rings[ring][next % kPlaces][thread], from + next * kThreads);
    commit();
    uint4 const read = rings[ring][stage % kPlaces][other];
    sum += read.x + 3 * read.y + 5 * read.z + 7 * read.w;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  uint32_t* const sums = reinterpret_cast<uint32_t*>(rings);
  sums[threadIdx.x] = sum;
  __syncthreads();
  out[all * kThreads + thread] = sums[(threadIdx.x + kThreads) % (kRings * kThreads)];
}

/// Whether all sums are right.
template <Meeting kMeeting, int kWarps, bool kAsync, bool kUneven = false>
bool run() {
  constexpr int kThreads = 32 * kWarps, kAll = kBlocks * kRings;
  std::vector<uint32_t> numbers(size_t(kAll) * kStages * kThreads * 4), sums(size_t(kAll) * kThreads);
  uint32_t state = 1;
  for (uint32_t& number : numbers) number = state = state * 1664525 + 1013904223;
  uint4* in = nullptr;
  uint32_t* out = nullptr;
  cudaMalloc(&in, numbers.size() * 4);
  cudaMalloc(&out, sums.size() * 4);
  cudaMemcpy(in, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice);
  add_stages<kMeeting, kWarps, kAsync, kUneven><<<kBlocks, kRings * kThreads>>>(in, out);
  cudaMemcpy(sums.data(), out, sums.size() * 4, cudaMemcpyDeviceToHost);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    return false;
  }
  for (int i = 0; i < kAll * kThreads; ++i) {
    int const ring = (i / kThreads + 1) % kRings, all = i / kThreads / kRings * kRings + ring;
    int const other = (i % kThreads + kThreads / 2 + 1) % kThreads;
    uint32_t expected = 0;
    for (int stage = 0; stage < stages_of<kUneven>(ring); ++stage) {
      uint32_t const* const n = &numbers[(size_t(all * kStages + stage) * kThreads + other) * 4];
      expected += n[0] + 3 * n[1] + 5 * n[2] + 7 * n[3];
    }
    if (sums[i] != expected) return false;
  }
  return true;
}

constexpr Variant kVariants[] = {
    {"block,2,copies", run<Meeting::kBlock, 2, true>},
    {"block,2,stores", run<Meeting::kBlock, 2, false>},
    {"named,2,copies", run<Meeting::kNamed, 2, true>},
    {"named,2,stores", run<Meeting::kNamed, 2, false>},
    {"block,1,copies", run<Meeting::kBlock, 1, true>},
    {"block,1,stores", run<Meeting::kBlock, 1, false>},
    {"named,1,copies", run<Meeting::kNamed, 1, true>},
    {"named,1,stores", run<Meeting::kNamed, 1, false>},
    {"warp,1,copies", run<Meeting::kWarp, 1, true>},
    {"warp,1,stores", run<Meeting::kWarp, 1, false>},
    {"none,2,copies", run<Meeting::kNone, 2, true>},
    {"none,2,stores", run<Meeting::kNone, 2, false>},
    {"none,1,copies", run<Meeting::kNone, 1, true>},
    {"none,1,stores", run<Meeting::kNone, 1, false>},
    {"named,2,copies,uneven", run<Meeting::kNamed, 2, true, true>},
    {"named,2,stores,uneven", run<Meeting::kNamed, 2, false, true>},
    {"warp,1,copies,uneven", run<Meeting::kWarp, 1, true, true>},
    {"none,2,copies,uneven", run<Meeting::kNone, 2, true, true>},
};

}  // namespace

int main(int count, char** words) { return run_variant(count, words, kVariants); }
