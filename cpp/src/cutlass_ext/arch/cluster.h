// Thread block clusters (sm_90): blocks that share weights fill and free each other's rings, blocks that share the k
// extent of a tile add their partial sums through distributed shared memory.
#pragma once

#include "cutlass/arch/memory.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace cutlass::arch {

/// This block's rank in its cluster.
CUTLASS_DEVICE int cluster_rank() {
  int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// All threads of all blocks of the cluster; shared memory written before it is visible to the cluster after it.
CUTLASS_DEVICE void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// The place in block `rank`'s shared memory that `pointer` has in this block's.
CUTLASS_DEVICE uint32_t cluster_address(void const* pointer, int rank) {
  uint32_t address = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(cutlass_get_smem_pointer(pointer)), "r"(rank));
#endif
  return address;
}

/// Four words at the place in block `rank`'s shared memory that `pointer` has in this block's.
template <class Word>
CUTLASS_DEVICE Array<Word, 4> load_from_cluster(Word const* pointer, int rank) {
  static_assert(sizeof(Word) == 4);
  uint4 v = make_uint4(0, 0, 0, 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t const address = cluster_address(pointer, rank);
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
#endif
  return reinterpret_cast<Array<Word, 4> const&>(v);
}

/// Stores four words at such a place.
template <class Word>
CUTLASS_DEVICE void store_to_cluster(uint32_t address, Word const* words) {
  static_assert(sizeof(Word) == 4);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t const* v = reinterpret_cast<uint32_t const*>(words);
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
#endif
}

}  // namespace cutlass::arch
