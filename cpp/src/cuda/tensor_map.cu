#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

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

/// All that a map depends on.
struct Key {
  void const* data = nullptr;
  int element_bytes = 0, count = 0;
  bool swizzled = false;
  std::array<TensorMapDimension, 5> dimensions{};

  bool operator==(Key const& other) const {
    auto const same = [](TensorMapDimension const& a, TensorMapDimension const& b) {
      return a.extent == b.extent && a.box == b.box && a.stride == b.stride;
    };
    return data == other.data && element_bytes == other.element_bytes && count == other.count &&
           swizzled == other.swizzled &&
           std::equal(dimensions.begin(), dimensions.end(), other.dimensions.begin(), same);
  }
  size_t hash() const {
    uint64_t mixed = reinterpret_cast<uintptr_t>(data);
    for (TensorMapDimension const& d : dimensions) {
      for (int64_t value : {int64_t(d.extent), int64_t(d.box), int64_t(d.stride)})
        mixed = (mixed ^ uint64_t(value)) * 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
    }
    return mixed >> 32;
  }
};

CUtensorMap encode(Key const& key) {
  CUtensorMapDataType const type = key.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : key.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  constexpr int kMost = std::tuple_size_v<decltype(Key::dimensions)>;
  cuuint64_t extents[kMost], strides[kMost];
  cuuint32_t boxes[kMost], steps[kMost];
  for (int i = 0; i < key.count; ++i) {
    TensorMapDimension const& d = key.dimensions[i];
    extents[i] = cuuint64_t(d.extent), strides[i] = cuuint64_t(d.stride);
    boxes[i] = cuuint32_t(d.box), steps[i] = 1;
  }
  CUtensorMap map;
  CUresult const status =
      encoder()(&map, type, cuuint32_t(key.count), const_cast<void*>(key.data), extents, strides + 1, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, key.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return map;
  std::string shape;
  for (int i = 0; i < key.count; ++i) shape += (shape.empty() ? "" : " x ") + std::to_string(key.dimensions[i].extent);
  throw CudaError("cuTensorMapEncodeTiled failed with status " + std::to_string(status) + " for a tensor of " + shape);
}

}  // namespace

CUtensorMap make_tensor_map(void const* data, int element_bytes, std::initializer_list<TensorMapDimension> dimensions,
                            bool swizzled) {
  // A launch has five, and the driver takes most of a microsecond for one. They hold addresses and numbers alone, so
  // that those of an earlier call never grow old: 200 layers have a thousand.
  struct Known {
    Key key;
    CUtensorMap map;
  };
  constexpr size_t kPlaces = 2048;
  static thread_local std::vector<Known> known(kPlaces);
  Key key{data, element_bytes, int(dimensions.size()), swizzled};
  std::copy(dimensions.begin(), dimensions.end(), key.dimensions.begin());
  Known& place = known[key.hash() % kPlaces];
  if (!(place.key == key)) {
    place.map = encode(key);
    place.key = key;
  }
  return place.map;
}

}  // namespace qcutlass::cuda
