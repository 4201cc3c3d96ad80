// Versions that the CUDA backend was compiled with: the build passes them in.
#include "qcutlass/gemm.h"

namespace qcutlass::cuda {

std::string toolkit_version() { return QCUTLASS_CUDA_VERSION; }
std::string cutlass_version() { return QCUTLASS_CUTLASS_VERSION; }

}  // namespace qcutlass::cuda
