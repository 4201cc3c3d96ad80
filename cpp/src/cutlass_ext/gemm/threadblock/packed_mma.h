// The base of all main loops: types of the operands, the tensor-core instruction, loaders of scales.
#pragma once

#include <type_traits>

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/arch/mma.h"
#include "cutlass_ext/arch/mma_float8.h"
#include "cutlass_ext/gemm/threadblock/block_scale_loader.h"
#include "cutlass_ext/gemm/threadblock/row_source.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"
#include "cutlass_ext/gemm/warp/float_code_scales.h"
#include "cutlass_ext/layout/gate_halves.h"
#include "cutlass_ext/layout/packed_weights.h"

namespace cutlass::gemm::threadblock {

/// Packed weights (operand A) times activations of type Element (operand B, k x tokens). kGathers: as products of
/// experts have them, tokens may be any rows of the activations, and weights those of gates and what they multiply.
template <class Element_, qcutlass::Packing kPacking_, qcutlass::ScaleMode kMode_, bool kGathers_ = false>
struct PackedMma {
  using Element = Element_;
  static constexpr qcutlass::Packing kPacking = kPacking_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  static constexpr bool kGathers = kGathers_;
  using LayoutA = layout::PackedWeights<kPacking>;
  static constexpr int kStepK = LayoutA::kStepK;
  static_assert(kStepK == qcutlass::step_k(kPacking) && sizeof(Element) == qcutlass::activation_bytes(kPacking));

  static constexpr bool kInteger = std::is_same_v<Element, int8_t>;
  static constexpr bool kFloat8 = sizeof(Element) == 1 && !kInteger;
  /// Selection offers products of 8-bit floats from sm_89 on; older code has empty kernels in their place.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  static constexpr bool kIsSupported = !kFloat8;
#else
  static constexpr bool kIsSupported = true;
#endif
  using Weight = std::conditional_t<kFloat8, float_e4m3_t, Element>;
  using Product = std::conditional_t<kInteger, int32_t, float>;  // sums of the instruction
  using Accumulator = std::conditional_t<qcutlass::is_promoted(kMode), float, Product>;
  /// CUTLASS has the integer instruction with saturation only; sums within kMaxInt8K do not reach it.
  using Operator = std::conditional_t<kInteger, arch::OpMultiplyAddSaturate, arch::OpMultiplyAdd>;
  template <class A, class B, bool kFloat8>
  struct MmaOf {
    using Type = arch::Mma<GemmShape<16, 8, kStepK>, 32, A, layout::RowMajor, B, layout::ColumnMajor, Product,
                           layout::RowMajor, Operator>;
  };
  template <class A, class B>
  struct MmaOf<A, B, true> {
    using Type = arch::MmaFloat8<A, B>;
  };
  using ArchMma = typename MmaOf<Weight, Element, kFloat8>::Type;

  /// The lane's words of a tile, from LayoutA::lane_byte(lane) of it in shared memory: one 128-bit load, or one
  /// ldmatrix of the fragment itself.
  static CUTLASS_DEVICE void load_codes(uint32_t* codes, uint8_t const* lane_bytes) {
    uint4 words;
    if constexpr (LayoutA::kConverts)
      words = *reinterpret_cast<uint4 const*>(lane_bytes);
    else
      arch::ldsm<layout::RowMajor, 4>(reinterpret_cast<Array<unsigned, 4>&>(words), lane_bytes);
    codes[0] = words.x, codes[1] = words.y, codes[2] = words.z, codes[3] = words.w;
  }

  /// Whether weights are made of small numbers (dequantize_float.h), whose scales may have rests, and after which sums
  /// may have to be multiplied by a power of two: see float_code_scales.h.
  static constexpr bool kHasSmallNumbers =
      kPacking == qcutlass::Packing::kE2M1A16 && kMode != qcutlass::ScaleMode::kFloat;
  using Scales = warp::ScalesOf<Element, kPacking, kMode>;
  using FetchedScales = typename warp::FetchedScales<Scales, kHasSmallNumbers>::Type;
  using GlobalScale = warp::GlobalScale<kPacking == qcutlass::Packing::kE2M1A16>;

  struct Arguments : GlobalScale {
    uint8_t const* weights;
    Element const* activations;
    int activation_stride;
    int channels, tokens, k;
    int tiles_n, tiles_k;
    GroupSize group_size;
    GroupMatrix scales, zeros;
    BlockScaleMatrices blocks;
    std::conditional_t<kGathers, GatheredRows, OwnRows> source;                 // of a token
    std::conditional_t<kGathers, layout::GateHalves, layout::NoHalves> halves;  // where channels lie
    SuperBlocksOf<kMode> supers;
  };
};

}  // namespace cutlass::gemm::threadblock
