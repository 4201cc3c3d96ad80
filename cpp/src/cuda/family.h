// A kernel family from outside: one launch function over plain data.
#pragma once

#include "cutlass_ext/epilogue/output_arguments.h"
#include "plan/tactics.h"

namespace qcutlass::cuda {

/// A product whose operands already have the alignment that the kernels need: see workspace.h.
struct Launch {
  struct Groups {  // scales, or zeros or minimums: rows of `row_bytes` bytes, a multiple of 16
    void const* data = nullptr;
    int64_t stride_bytes = 0;
    int element_bytes = 0;
    int row_bytes = 0;
    DType type = DType::kNone;
  };

  void const* weights;
  int tiles_n, tiles_k;
  void const* activations;  // [tokens, k rounded up to a multiple of 16 bytes]
  int64_t activation_stride;
  int channels, tokens, k;
  int group_size;
  Groups scales, zeros;
  Groups super_scales, super_minimums;  // without data: scales have one level
  int super_block;                      // columns
  float const* global_scale;
  BlockScales blocks;
  cutlass::epilogue::thread::OutputArguments output;
  int split_k;
  bool cluster;
  bool programmatic;  // the kernel itself waits for what precedes it: sm_90
  bool prefetch;      // and loads weights, scales and zeros meanwhile
  void* partials;     // of the type of the sums
  int64_t partial_stride;
  int shared_channel, shared_token;  // first ones of the tiles whose k is shared
  int sm_count;
  ExpertRows experts;       // of grouped products
  int64_t scale_rows;       // of an expert
  int64_t super_rows;       // likewise
  int least_shared_memory;  // that a block takes: 0, or see spread_shared_memory
  bool first_use;           // of the configuration on this device: its shared-memory limit is still to be raised
  int shared_memory_limit;  // of a block on this device; a full tile may need more than the rows at hand do
};

template <DType kType, Packing kPacking, ScaleMode kMode>
struct Family {
  static void launch(int tactic, Launch const& launch, void* stream);
  struct Impl;
};

/// The same for the rows of experts.
template <DType kType, Packing kPacking, ScaleMode kMode>
struct GroupedFamily {
  static void launch(int tactic, Launch const& launch, void* stream);
  struct Impl;
};

/// The same for the configurations whose main loops are of wgmma.
template <DType kType, Packing kPacking, ScaleMode kMode>
struct WgmmaFamily {
  static void launch(int tactic, Launch const& launch, void* stream);
  struct Impl;
};

/// Those of wgmma for the rows of experts.
template <DType kType, Packing kPacking, ScaleMode kMode>
struct WgmmaGroupedFamily {
  static void launch(int tactic, Launch const& launch, void* stream);
  struct Impl;
};

}  // namespace qcutlass::cuda
