"""Weights and activations of 8 bits: SmoothQuant's W8A8, and the same in fp8."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.eight_bit import (
    quantize_activations,
    quantize_weights_fp8,
    quantize_weights_int8,
    quantized,
)
from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalFp8, CanonicalInt8
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers.base import InputCodes, QuantLinear, copied, copy_of_bias
from qcutlass.layers.packed import Parts
from qcutlass.products import preprocess_weights, weight_sums
from qcutlass.products.checks import check_flag, check_matrix, check_operand, check_tensor
from qcutlass.products.float8 import FLOAT8, Float8Call
from qcutlass.products.int8 import INT8, Int8Call
from qcutlass.products.layer_calls import Steps
from qcutlass.products.packing import check_packed_form
from qcutlass.products.quantizer_operators import QuantizeCall, QuantizedRows, check_quantize
from qcutlass.schemes import FP8, W8A8


def _smoothed_weight(linear: nn.Linear, statistics: ActivationStatistics | None) -> tuple[Tensor, Tensor | None]:
    """The weights, times the factors that the layer is to divide its input by, and those."""
    weight = linear.weight.detach()
    if statistics is None or statistics.smooth is None:
        return weight, None
    smooth = statistics.smooth.to(weight.device)
    smoothed = weight * smooth  # in fp32, as the factors are
    if not weight.is_meta and not bool((smooth > 0).all()):
        raise ValueError(f"statistics.smooth: expected factors above 0, got {float(smooth.amin())}")
    if not weight.is_meta and not bool(smoothed.isfinite().all()):
        raise ValueError("statistics.smooth: linear.weight times these factors is more than float32 holds")
    return smoothed, smooth


def _static_range(
    statistics: ActivationStatistics | None, device: torch.device, dtype: torch.dtype, asymmetric: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Scale `[1]`, and zero point `[1]` if asymmetric, that `quantize_activations` gives what was recorded."""
    if device.type == "meta":
        ends = torch.empty((1, 2), dtype=torch.float32, device=device)
    elif statistics is None:
        raise ValueError("statistics: static activations need them; record some with qcutlass.calibrate(model)")
    else:
        ends = torch.stack(statistics.extremes())[None].to(device)
    _, scale, *azp = quantize_activations(ends, dtype=dtype, per_tensor=True, asymmetric=asymmetric)
    return scale, azp[0] if azp else None


class _EightBitLinear(QuantLinear):
    """What layers with 8-bit weights and activations share: their canonical forms."""

    SHARED: ClassVar = ("a_scale", "azp", "smooth")
    HAS_GATES: ClassVar = True
    _form: ClassVar[type[CanonicalInt8] | type[CanonicalFp8]]
    _codes_dtype: ClassVar[torch.dtype]

    w_packed: Tensor
    w_scale: Tensor
    a_scale: Tensor | None
    smooth: Tensor | None

    @classmethod
    def _of_stored(cls, layer: CanonicalInt8 | CanonicalFp8, activation: str | None) -> QuantLinear:
        make: Any = cls
        options = {"bias": layer.bias, "a_scale": layer.input_scale, "smooth": layer.smooth, "activation": activation}
        found: QuantLinear = make(layer.codes, layer.scales, **options)
        return found

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> QuantLinear:
        make: Any = cls
        codes = torch.empty((n, k), dtype=cls._codes_dtype, device="meta")
        found: QuantLinear = make(codes, torch.empty(n, dtype=torch.float32, device="meta"), **spec.tensors(n, k))
        return found

    def canonical(self) -> CanonicalInt8 | CanonicalFp8:
        """The layer with its codes unpacked, as loaders of checkpoints yield it."""
        return self._form(self._codes(), self.w_scale, self.a_scale, self.bias, self.smooth)

    def weights(self) -> Tensor:
        """The weights float32 `[N, K]`, dequantised from the packed ones."""
        return self._codes().float() * self.w_scale[:, None]

    @property
    def input_codes(self) -> InputCodes | None:
        if self._buffers["smooth"] is not None or not self._is_symmetric:
            return None
        return InputCodes(self._codes_dtype, self._buffers["a_scale"])

    @property
    def _is_symmetric(self) -> bool:
        """Whether activations have no zero points."""
        return True


class Int8Linear(_EightBitLinear, scheme=W8A8, stored="int8"):
    """A linear layer on `qcutlass.gemm_w8a8`: `quantize_activations`, then one product. See also `QuantLinear`.

    Buffers: `w_packed` int8; `w_scale` float32 `[N]`; `bias` `[N]` or None; `a_scale` float32 `[1]` for static
    activations, None for dynamic ones; `azp` int32 `[1]`, the zero point of static asymmetric ones, else None;
    `w_sums` int32 `[N]`, which zero points need, or None; `smooth` float32 `[K]`, by which the activations are divided
    first, or None.

    Args:
        w_q: int8 `[N, K]`: of the weights times `smooth`.
        w_scale, bias, a_scale, azp, smooth: the buffers.
        symmetric: False: each token of dynamic activations gets a zero point; static ones need `azp`.
        activation: as for `gemm_w8a8`.

    Raises:
        TypeError, ValueError: as for `quantize_activations` and `gemm_w8a8`; static, not symmetric and without `azp`.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import Int8Linear
        >>> layer = Int8Linear(*qcutlass.quantize_weights_int8(torch.randn(48, 256)))
        >>> layer(torch.randn(2, 3, 256)).shape
        torch.Size([2, 3, 48])
    """

    OPTIONAL: ClassVar = ("bias", "a_scale", "azp", "w_sums", "smooth")
    SETTINGS: ClassVar = ("symmetric",)
    _form: ClassVar = CanonicalInt8
    _codes_dtype: ClassVar = torch.int8

    azp: Tensor | None
    w_sums: Tensor | None

    def __init__(
        self,
        w_q: Tensor,
        w_scale: Tensor,
        *,
        bias: Tensor | None = None,
        a_scale: Tensor | None = None,
        azp: Tensor | None = None,
        smooth: Tensor | None = None,
        symmetric: bool = True,
        activation: str | None = None,
    ) -> None:
        check_matrix("w_q", w_q, (torch.int8,))
        check_flag("symmetric", symmetric)
        if a_scale is not None and azp is None and not symmetric:
            raise ValueError("azp: expected the zero point of static activations that are not symmetric, got None")
        n, k = w_q.shape
        parts = {
            "w_packed": preprocess_weights(w_q, 8, "int8"),
            "w_scale": w_scale,
            "bias": bias,
            "a_scale": a_scale,
            "azp": azp,
            "w_sums": None if symmetric and azp is None else weight_sums(w_q),
            "smooth": smooth,
        }
        super().__init__(k, n, 8, k, activation, parts)
        self.symmetric = symmetric

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: W8A8, statistics: ActivationStatistics | None, activation: str | None
    ) -> Int8Linear:
        weight, smooth = _smoothed_weight(linear, statistics)
        a_scale = azp = None
        if scheme.activations == "static":
            a_scale, azp = _static_range(statistics, weight.device, torch.int8, not scheme.symmetric)
        return Int8Linear(
            *quantize_weights_int8(weight),
            bias=copy_of_bias(linear),
            a_scale=a_scale,
            azp=azp,
            smooth=smooth,
            symmetric=scheme.symmetric,
            activation=activation,
        )

    def _check(self, parts: Parts) -> None:
        a_q = _check_quantiser(torch.int8, self.in_features, parts)
        operands: dict[str, Any] = {**parts, "a_scale": a_q.new_empty(1, dtype=torch.float32)}
        del operands["smooth"]
        Int8Call(a_q, activation=self.activation, n=self.out_features, **operands).check(None)

    def _missing(self, parts: Parts) -> dict[str, Tensor]:
        w_packed = parts["w_packed"]
        assert w_packed is not None
        shifted = parts["azp"] is not None or (parts["a_scale"] is None and not self.symmetric)
        if not shifted or parts["w_sums"] is not None or w_packed.is_meta:
            return {}
        return {"w_sums": weight_sums(w_packed, self.out_features)}

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        parts: dict[str, Any] = self._buffers  # attributes of modules that are buffers take long to look up
        scale, azp, smooth = parts["a_scale"], parts["azp"], parts["smooth"]
        asymmetric = scale is None and not self.symmetric
        quantizer = QuantizeCall(input, torch.int8, False, asymmetric, scale, azp, smooth)
        codes, a_scale, azp = outputs = ready or quantized(quantizer)
        call = Int8Call(
            codes,
            parts["w_packed"],
            a_scale,
            parts["w_scale"],
            parts["bias"],
            azp,
            activation,
            input.dtype,
            self.out_features,
            None if azp is None else parts["w_sums"],
        )
        return Steps(INT8, call, quantizer, outputs)

    @property
    def _is_held(self) -> bool:
        return super()._is_held and self._is_symmetric

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of the layer; UnsupportedError for zero points of activations."""
        self._check_symmetric("converted folders hold no")
        return super().spec

    def canonical(self) -> CanonicalInt8 | CanonicalFp8:
        """The layer with its codes unpacked, as loaders of checkpoints yield it; UnsupportedError as for `spec`."""
        self._check_symmetric("there is no canonical form of an")
        return super().canonical()

    def _shard(self, part: slice, axis: Literal["out", "in"]) -> Int8Linear:
        codes, w_scale, options = _part(self, part, axis)
        return Int8Linear(codes, w_scale, azp=copied(self.azp), symmetric=self._is_symmetric, **options)

    def _check_symmetric(self, why: str) -> None:
        if not self._is_symmetric:
            raise UnsupportedError(f"layer: {why} Int8Linear with zero points of activations; use symmetric=True")

    @property
    def _is_symmetric(self) -> bool:
        parts = self._buffers
        return self.symmetric if parts["a_scale"] is None else parts["azp"] is None

    def _description(self) -> list[str]:
        return [*_describe_activations(self.a_scale, self.smooth), f"symmetric={self._is_symmetric}"]


class Fp8Linear(_EightBitLinear, scheme=FP8, stored="fp8"):
    """A linear layer on `qcutlass.gemm_fp8`: `quantize_activations`, then one product. See also `QuantLinear`.

    Buffers: `w_packed` float8_e4m3fn; `w_scale` float32 `[N]`; `bias` `[N]` or None; `a_scale` float32 `[1]` for static
    activations, None for dynamic ones; `smooth` float32 `[K]`, by which the activations are divided first, or None.

    Args:
        w_q: float8_e4m3fn `[N, K]`: of the weights times `smooth`.
        w_scale, bias, a_scale, smooth: the buffers.
        activation: as for `gemm_fp8`.

    Raises:
        TypeError, ValueError: as for `quantize_activations` and `gemm_fp8`.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import Fp8Linear
        >>> layer = Fp8Linear(*qcutlass.quantize_weights_fp8(torch.randn(48, 256)))
        >>> layer(torch.randn(2, 3, 256, dtype=torch.bfloat16)).shape
        torch.Size([2, 3, 48])
    """

    OPTIONAL: ClassVar = ("bias", "a_scale", "smooth")
    _form: ClassVar = CanonicalFp8
    _codes_dtype: ClassVar = torch.float8_e4m3fn

    def __init__(
        self,
        w_q: Tensor,
        w_scale: Tensor,
        *,
        bias: Tensor | None = None,
        a_scale: Tensor | None = None,
        smooth: Tensor | None = None,
        activation: str | None = None,
    ) -> None:
        check_matrix("w_q", w_q, (torch.float8_e4m3fn,))
        n, k = w_q.shape
        w_packed = preprocess_weights(w_q, 8, "fp8")
        parts = {"w_packed": w_packed, "w_scale": w_scale, "bias": bias, "a_scale": a_scale, "smooth": smooth}
        super().__init__(k, n, 8, k, activation, parts)

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: FP8, statistics: ActivationStatistics | None, activation: str | None
    ) -> Fp8Linear:
        weight, smooth = _smoothed_weight(linear, statistics)
        a_scale = None
        if scheme.activations == "static":
            a_scale, _ = _static_range(statistics, weight.device, torch.float8_e4m3fn)
        w_q, w_scale = quantize_weights_fp8(weight)
        return Fp8Linear(w_q, w_scale, bias=copy_of_bias(linear), a_scale=a_scale, smooth=smooth, activation=activation)

    def _check(self, parts: Parts) -> None:
        a_q = _check_quantiser(torch.float8_e4m3fn, self.in_features, parts)
        w_packed, w_scale, bias = (parts[name] for name in ("w_packed", "w_scale", "bias"))
        assert w_packed is not None
        check_packed_form("w_packed", w_packed)
        operands: dict[str, Any] = {"a_scale": a_q.new_empty(1, dtype=torch.float32), "w_scale": w_scale, "bias": bias}
        Float8Call(a_q, w_packed, activation=self.activation, n=self.out_features, **operands).check(None)

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        parts: dict[str, Any] = self._buffers
        quantizer = QuantizeCall(input, torch.float8_e4m3fn, scale=parts["a_scale"], smooth=parts["smooth"])
        codes, a_scale, _ = outputs = ready or quantized(quantizer)
        call = Float8Call(
            codes,
            parts["w_packed"],
            a_scale,
            parts["w_scale"],
            parts["bias"],
            activation,
            input.dtype,
            self.out_features,
        )
        return Steps(FLOAT8, call, quantizer, outputs)

    def _shard(self, part: slice, axis: Literal["out", "in"]) -> Fp8Linear:
        codes, w_scale, options = _part(self, part, axis)
        return Fp8Linear(codes, w_scale, **options)

    def _description(self) -> list[str]:
        return _describe_activations(self.a_scale, self.smooth)


def _part(
    layer: Int8Linear | Fp8Linear, part: slice, axis: Literal["out", "in"]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes, scales and other arguments of a part of a layer, in memory of their own."""
    codes, w_scale, bias, smooth = layer._codes(), layer.w_scale, layer.bias, layer.smooth
    if axis == "out":
        codes = codes[part]
        w_scale = w_scale if w_scale.numel() == 1 else w_scale.reshape(-1)[part]  # one for all, or one a channel
        bias = None if bias is None else bias[part]
    else:
        codes = codes[:, part]
        bias = bias if part.start == 0 else None
        smooth = None if smooth is None else smooth[part]
    tensors = {"bias": copied(bias), "a_scale": copied(layer.a_scale), "smooth": copied(smooth)}
    return codes, w_scale.clone(), {**tensors, "activation": layer.activation}


def _check_quantiser(dtype: torch.dtype, k: int, parts: Parts) -> Tensor:
    """Checks the tensors that quantise activations `[..., k]`; returns codes `[1, k]` beside the weights."""
    w_packed = parts["w_packed"]
    check_tensor("w_packed", w_packed, (dtype,))
    assert w_packed is not None
    a = torch.empty((1, k), dtype=torch.float32, device=w_packed.device)
    a_scale, azp, smooth = parts["a_scale"], parts.get("azp"), parts["smooth"]
    if azp is not None and a_scale is None:
        raise ValueError(
            "azp: a given zero point needs a given scale: pass a_scale, too, or symmetric=False without azp"
        )
    for name, part in (("a_scale", a_scale), ("azp", azp), ("smooth", smooth)):
        if isinstance(part, Tensor):
            check_operand(name, part, (part.dtype,), w_packed.device, "w_packed")
    try:
        check_quantize(QuantizeCall(a, dtype, scale=a_scale, azp=azp, smooth=smooth))
    except (TypeError, ValueError) as error:  # the quantiser's `scale` is the layer's `a_scale`
        message = str(error)
        raise type(error)(f"a_{message}" if message.startswith("scale:") else message) from None
    if azp is not None and not azp.is_meta and not -128 <= int(azp) <= 127:
        raise ValueError(f"azp: expected a value in [-128, 127], got {int(azp)}")
    for name, part in (("a_scale", a_scale), ("smooth", smooth)):
        if part is not None and not part.is_meta and not bool((part > 0).all()):
            raise ValueError(f"{name}: expected numbers above 0, got {float(part.amin())}")
    return a.to(dtype)


def _describe_activations(a_scale: Tensor | None, smooth: Tensor | None) -> list[str]:
    described = [f"activations={'dynamic' if a_scale is None else 'static'}"]
    return described if smooth is None else [*described, "smooth=True"]
