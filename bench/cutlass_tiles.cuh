// Launching a stock CUTLASS product, and exporting functions to ctypes: shared by all kinds of products.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"

#define QCUTLASS_BENCH_EXPORT extern "C" __attribute__((visibility("default")))

/// Launches a `cutlass::gemm::device` product that needs no workspace. Returns a cutlass::Status: 0 on success.
template <class Gemm>
int launch(typename Gemm::Arguments const& arguments, cudaStream_t stream) {
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return static_cast<int>(status);
  Gemm gemm;
  status = gemm.initialize(arguments, nullptr, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return static_cast<int>(status);
}
