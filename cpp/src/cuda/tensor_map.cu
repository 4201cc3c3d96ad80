#include <cuda_runtime_api.h>

#include <string>

#include "cuda/cuda_check.h"
#include "cuda/tensor_map.h"
#include "qcutlass/error.h"

namespace qcutlass::cuda {
namespace {

/// The driver's function, found through the runtime, so that nothing is linked against the driver.
auto encoder() {
  static auto const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    constexpr unsigned kSince = 12000;  // the version that introduced it
    QCUTLASS_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince, cudaEnableDefault, &found));
#else
    QCUTLASS_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess) throw Unsupported("the CUDA driver has no tensor maps: update it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

}  // namespace

CUtensorMap make_tensor_map(TensorMapSource const& s, int box_columns, int box_rows, int box_layers, bool swizzled) {
  CUtensorMap map;
  CUtensorMapDataType const type = s.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : s.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  cuuint64_t const extents[] = {cuuint64_t(s.columns), cuuint64_t(s.rows), cuuint64_t(s.layers)};
  cuuint64_t const strides[] = {cuuint64_t(s.row_bytes), cuuint64_t(s.layer_bytes)};
  cuuint32_t const box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows), cuuint32_t(box_layers)};
  cuuint32_t const steps[] = {1, 1, 1};
  CUresult const status =
      encoder()(&map, type, s.layers > 0 ? 3 : 2, const_cast<void*>(s.data), extents, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw CudaError("cuTensorMapEncodeTiled failed with status " + std::to_string(status) + " for a matrix of " +
                    std::to_string(s.rows) + " x " + std::to_string(s.columns));
  return map;
}

}  // namespace qcutlass::cuda
