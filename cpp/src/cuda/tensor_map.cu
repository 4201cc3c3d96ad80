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

CUtensorMap make_tensor_map(void const* data, int element_bytes, std::initializer_list<TensorMapDimension> dimensions,
                            bool swizzled) {
  constexpr int kMost = 5;
  CUtensorMapDataType const type = element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  cuuint64_t extents[kMost], strides[kMost];
  cuuint32_t boxes[kMost], steps[kMost];
  int count = 0;
  for (TensorMapDimension const& d : dimensions) {
    extents[count] = cuuint64_t(d.extent), strides[count] = cuuint64_t(d.stride);
    boxes[count] = cuuint32_t(d.box), steps[count] = 1;
    ++count;
  }
  CUtensorMap map;
  CUresult const status =
      encoder()(&map, type, cuuint32_t(count), const_cast<void*>(data), extents, strides + 1, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return map;
  std::string shape;
  for (TensorMapDimension const& d : dimensions) shape += (shape.empty() ? "" : " x ") + std::to_string(d.extent);
  throw CudaError("cuTensorMapEncodeTiled failed with status " + std::to_string(status) + " for a tensor of " + shape);
}

}  // namespace qcutlass::cuda
