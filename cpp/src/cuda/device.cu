// The architectures of this build, and the traits of the devices it runs on.
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <string>

#include "cuda/cuda_check.h"
#include "cuda/device.h"
#include "plan/architectures.h"
#include "qcutlass/error.h"

namespace qcutlass::cuda {
namespace {

DeviceTraits query_traits(int device) {
  auto const attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    cudaError_t const status = cudaDeviceGetAttribute(&value, name, device);
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver || status == cudaErrorInvalidDevice)
      throw Unsupported("GPU " + std::to_string(device) + " is not available (" + cudaGetErrorString(status) +
                        "); this build has kernels for " + QCUTLASS_CUDA_ARCHITECTURES +
                        ". CPU tensors work without a GPU");
    QCUTLASS_CUDA_CHECK(status);
    return value;
  };
  DeviceTraits traits;
  traits.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  traits.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  traits.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  traits.code_capability = serving_architecture(built_architectures(), traits.compute_capability);
  traits.wgmma = serves_wgmma(built_architectures(), traits.compute_capability);
  if (traits.code_capability == 0)
    throw Unsupported("GPU " + std::to_string(device) + " has compute capability " +
                      std::to_string(traits.compute_capability / 10) + "." +
                      std::to_string(traits.compute_capability % 10) + ", but this build has kernels for " +
                      QCUTLASS_CUDA_ARCHITECTURES +
                      " only; rebuild with QCUTLASS_CUDA_ARCHITECTURES=" + std::to_string(traits.compute_capability));
  return traits;
}

}  // namespace

bool is_built() { return true; }

std::vector<std::string> built_architectures() { return split_architectures(QCUTLASS_CUDA_ARCHITECTURES); }

DeviceTraits const& device_traits(int device) {
  static DeviceTraits table[kMaxDevices];
  static std::atomic<bool> filled[kMaxDevices];
  static std::mutex filling;
  if (device < 0 || device >= kMaxDevices)
    throw InvalidArgument("device: expected an index in [0, " + std::to_string(kMaxDevices) + "), got " +
                          std::to_string(device));
  if (!filled[device].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(filling);
    if (!filled[device].load(std::memory_order_relaxed)) {
      table[device] = query_traits(device);
      filled[device].store(true, std::memory_order_release);
    }
  }
  return table[device];
}

}  // namespace qcutlass::cuda
