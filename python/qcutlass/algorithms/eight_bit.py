"""Quantising activations and weights to 8 bits, for `gemm_w8a8` and `gemm_fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.products import quantizer_operators
from qcutlass.products.checks import FLOATING, check_dense, check_inference, check_matrix, shape_of
from qcutlass.products.library import is_eager
from qcutlass.products.quantizer_operators import QuantizeCall, QuantizedRows


def quantized(call: QuantizeCall) -> QuantizedRows:
    """Codes, scales and zero points, new ones or those that the call gives."""
    check_inference(**call.tensors)
    if is_eager(*call):
        codes, scale, azp = quantizer_operators.quantize(call)
    else:
        check_dense(call.tensors)
        codes, scale, azp = torch.ops.qcutlass.quantize_8bit(*call)
    return codes, scale, azp if call.asymmetric and call.azp is None else call.azp


def quantize_activations(
    a: Tensor,
    *,
    dtype: torch.dtype = torch.int8,
    per_tensor: bool = False,
    scale: Tensor | None = None,
    asymmetric: bool = False,
    azp: Tensor | None = None,
    smooth: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Quantises activations to int8 or fp8, each token or all of them with one scale: `a ~ (a_q - azp) * a_scale`.

    With x = `a`, or `a / smooth`, and lo = min(x, 0), hi = max(x, 0) over a token's K values (over all values with
    `per_tensor`), all in fp32, where every division and sum is rounded to nearest even:

    * symmetric: a_scale = max|x| / 127 (e4m3: 448, e5m2: 57344), a_q = round(x / a_scale), int8 within +-127;
    * asymmetric: a_scale = (hi - lo) / 255, azp = -128 - round(lo / a_scale), a_q = round(x / a_scale) + azp, within
      -128 and 127. Zero is reproduced exactly.

    round() goes to the nearest value of `dtype`, to the even one of two, and saturates. Tokens of zeros get scale 1; no
    scale is below 2**-126. CPU and CUDA agree bit for bit.

    A token with NaN or infinity gets a scale of NaN or infinity, so that a product with it shows what happened: its
    int8 codes are 0, its fp8 codes 0 or NaN. With a given `scale`, infinities saturate as other large values do; fp8
    keeps NaN, int8 cannot, and the returned scale is NaN then.

    Per-token scales are those of Yao et al., "ZeroQuant" (2022); dividing by `smooth` first is the activations' side of
    Xiao et al., "SmoothQuant" (2023).

    Args:
        a: float16, bfloat16 or float32 `[..., K]`. Unit stride along K avoids a copy.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        per_tensor: one scale for all of `a` instead of one a token.
        scale: float32 `[]` or `[1]`: a static scale for all of `a`, used as it is.
        asymmetric: whether there are zero points; int8 only.
        azp: int32 `[]` or `[1]`, in [-128, 127] (checked on the CPU only): the static zero point that goes with
            `scale`.
        smooth: float16, bfloat16 or float32 `[K]`: `a` is divided by it first. float32 saves a conversion.

    Returns:
        (a_q, a_scale), or (a_q, a_scale, azp) where there are zero points: `a_q` shaped as `a`, `a_scale` float32 and
        `azp` int32 shaped `a.shape[:-1]`, or `[1]` with `per_tensor` or `scale`. A given `azp` comes back as it is.

    Raises:
        TypeError: an operand is not a tensor, or not of an allowed type.
        ValueError: shapes or devices disagree, or options contradict each other.
        RuntimeError: an operand requires grad and grad mode is on; qcutlass is for inference.
        UnsupportedError: valid, but this build or this GPU has no kernel for it.

    Example:
        >>> import torch, qcutlass
        >>> a_q, a_scale = qcutlass.quantize_activations(torch.tensor([[127.0, 2.5, -1.0], [0.0, 0.0, 0.0]]))
        >>> a_q, a_scale
        (tensor([[127,   2,  -1],
                [  0,   0,   0]], dtype=torch.int8), tensor([1., 1.]))
    """
    call = QuantizeCall(a, dtype, per_tensor, asymmetric, scale, azp, smooth)
    codes, own_scale, own_azp = quantized(call)
    return (codes, own_scale) if own_azp is None else (codes, own_scale, own_azp)


def _quantize_weights(weight: Tensor, dtype: torch.dtype, per_tensor: bool) -> tuple[Tensor, Tensor]:
    check_matrix("weight", weight, FLOATING)
    if weight.shape[1] < 1:
        raise ValueError(f"weight: K must be at least 1, got shape {shape_of(weight)}")
    codes, scale, _ = quantized(QuantizeCall(weight.detach(), dtype, per_tensor))
    return codes, scale


def quantize_weights_int8(weight: Tensor, *, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises a weight matrix to int8, each channel with its own scale: `weight ~ w_q * w_scale[:, None]`.

    Symmetric, w_scale = max|w| / 127 over a channel, w_q = round(w / w_scale) within +-127, with the arithmetic of
    `quantize_activations`, which also says what becomes of NaN.

    Args:
        weight: float16, bfloat16 or float32 `[N, K]` (out_features, in_features).
        per_tensor: one scale for the whole matrix.

    Returns:
        int8 `[N, K]`, for `preprocess_weights(..., activations="int8")`, and float32 `[N]`, or `[1]` with `per_tensor`.

    Raises:
        TypeError: `weight` is not a floating tensor.
        ValueError: `weight` is not a matrix.
        UnsupportedError: this build or this GPU has no kernel for it.

    Example:
        >>> import torch, qcutlass
        >>> w_q, w_scale = qcutlass.quantize_weights_int8(torch.tensor([[63.5, -127.0], [1.0, 0.25]]))
        >>> w_q, w_scale[0]
        (tensor([[  64, -127],
                [ 127,   32]], dtype=torch.int8), tensor(1.))
    """
    return _quantize_weights(weight, torch.int8, per_tensor)


def quantize_weights_fp8(weight: Tensor, *, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises a weight matrix to float8_e4m3fn, each channel with its own scale: `weight ~ w_q * w_scale[:, None]`.

    w_scale = max|w| / 448 over a channel, w_q = w / w_scale rounded to nearest even, with the arithmetic of
    `quantize_activations`, which also says what becomes of NaN. The format is that of Micikevicius et al., "FP8 Formats
    for Deep Learning" (2022).

    Args:
        weight: float16, bfloat16 or float32 `[N, K]` (out_features, in_features).
        per_tensor: one scale for the whole matrix.

    Returns:
        float8_e4m3fn `[N, K]` and float32 `[N]`, or `[1]` with `per_tensor`.

    Raises:
        TypeError: `weight` is not a floating tensor.
        ValueError: `weight` is not a matrix.
        UnsupportedError: this build or this GPU has no kernel for it.

    Example:
        >>> import torch, qcutlass
        >>> w_q, w_scale = qcutlass.quantize_weights_fp8(torch.tensor([[448.0, 1.06], [-7.0, 0.0]]))
        >>> w_q.float(), w_scale
        (tensor([[ 448.,    1.],
                [-448.,    0.]]), tensor([1.0000, 0.0156]))
    """
    return _quantize_weights(weight, torch.float8_e4m3fn, per_tensor)
