"""Weights of 4 bits, activations of 8: the scheme W4A8."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.eight_bit import quantized
from qcutlass.formats.layers import CanonicalInt4, canonical_int4, for_eight_bits
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers.base import InputCodes, QuantLinear, copied, copy_of_bias
from qcutlass.layers.packed import Parts
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products import dequantize, preprocess_weights
from qcutlass.products.checks import short
from qcutlass.products.int4 import INT4, TYPES, Int4Call
from qcutlass.products.layer_calls import Steps
from qcutlass.products.quantizer_operators import QuantizeCall, QuantizedRows
from qcutlass.products.weight_only import GemmCall
from qcutlass.quantized import QuantizedTensor, check_zeros
from qcutlass.schemes import W4A8

_GROUP_STEP: Final = 32
"""Columns of which groups are multiples in kernels for GPUs."""


class Int4Linear(QuantLinear, scheme=W4A8, stored=("w4a8_fp8", "w4a8_int8")):
    """A linear layer on `qcutlass.gemm_w4a8`: each token is quantised, then one product.

    `QuantLinear` says what all quantised layers do. Buffers: `w_packed`, `scales`, integer `zeros` or None, `bias` or
    None, `act_scale` `[K]` or None, by which the input is multiplied first, and `perm` int32 `[K]` or None: column k
    of the codes meets column perm[k] of that.

    Attributes:
        activations: "fp8" or "int8". No part of the state.

    Args:
        quantized: codes of 4 bits, scales, integer zeros or none, of an `[N, K]` matrix.
        activations: "fp8" or "int8".
        bias, activation, act_scale, perm: as for `WeightOnlyLinear`.

    Raises:
        TypeError, ValueError: as for `gemm_w4a8`; also where `perm` holds values outside [0, K), or zeros such outside
            [0, 16], on any device.
        UnsupportedError: a call has its tensors on a GPU that has no kernel for it: use the scheme `WeightOnly`.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import Int4Linear
        >>> layer = Int4Linear(qcutlass.quantize(torch.randn(48, 256)), "int8")
        >>> layer(torch.randn(2, 3, 256)).shape
        torch.Size([2, 3, 48])
    """

    OPTIONAL: ClassVar = ("zeros", "bias", "act_scale", "perm")
    SETTINGS: ClassVar = ("activations",)
    SHARED: ClassVar = ("act_scale", "perm")
    HAS_GATES: ClassVar = True

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    act_scale: Tensor | None
    perm: Tensor | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        activations: Literal["fp8", "int8"] = "fp8",
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        act_scale: Tensor | None = None,
        perm: Tensor | None = None,
    ) -> None:
        if not isinstance(quantized, QuantizedTensor):
            raise TypeError(f"quantized: expected a qcutlass.QuantizedTensor, got {type(quantized).__name__}")
        if quantized.bits != 4 or quantized.weight_dtype is not None or quantized.minimums is not None:
            raise ValueError("quantized: expected integer codes of 4 bits with zeros or none; use WeightOnlyLinear")
        n, k = quantized.shape
        parts = {
            "w_packed": preprocess_weights(quantized.codes, 4, W4A8(activations=activations).activations),
            "scales": quantized.scales,
            "zeros": quantized.zeros,
            "bias": bias,
            "act_scale": act_scale,
            "perm": perm,
        }
        super().__init__(k, n, 4, min(quantized.group_size, k), activation, parts)
        self.activations = activations

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: W4A8, statistics: ActivationStatistics | None, activation: str | None
    ) -> Int4Linear:
        """Statistics are not used: each token has its own scale."""
        weights = WeightOnlyLinear.of_weight(linear.weight, scheme.weights, copy_of_bias(linear)).canonical()
        return Int4Linear(weights.weight, scheme.activations, bias=weights.bias, activation=activation)

    @classmethod
    def _of_stored(cls, layer: CanonicalInt4, activation: str | None) -> Int4Linear:
        options: dict[str, Any] = {"bias": layer.bias, "act_scale": layer.act_scale, "perm": layer.perm}
        return Int4Linear(layer.weight, layer.activations, activation=activation, **options)

    @staticmethod
    def of_weight_only(layer: WeightOnlyLinear, activations: Literal["fp8", "int8"]) -> Int4Linear | None:
        """The layer with the same weights, whose codes, of one order for all activations, stay where they are.

        None: they have not 4 bits, or zeros that are no integers.
        """
        unseen = torch.empty((layer.out_features, layer.in_features), dtype=torch.uint8, device="meta")
        form = for_eight_bits(layer.canonical_of(unseen), activations)
        if form is None:
            return None
        parts = {"w_packed": layer.w_packed, "scales": form.weight.scales, "zeros": form.weight.zeros}
        of_input = {"bias": form.bias, "act_scale": form.act_scale, "perm": form.perm}
        made = layer.like(layer.out_features, parts | of_input, Int4Linear)
        assert isinstance(made, Int4Linear)
        made.activations = activations
        return made

    def weights_alone(self) -> WeightOnlyLinear:
        """The layer with the same weights for activations as they are: its tensors are this one's."""
        parts = {name: self._buffers.get(name) for name in ("w_packed", "scales", *WeightOnlyLinear.OPTIONAL)}
        sizes = self.in_features, self.out_features, self.bits, self.group_size
        return WeightOnlyLinear.of_parts(*sizes, self.activation, parts)

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> Int4Linear:
        buffers: dict[str, Any] = spec.tensors(n, k)
        codes = torch.empty((n, k), dtype=torch.uint8, device="meta")
        scales, zeros = buffers.pop("scales"), buffers.pop("zeros", None)
        weight = QuantizedTensor(codes, scales, zeros, spec.bits, spec.columns(k))
        activations: Any = spec.kind.removeprefix("w4a8_")
        return Int4Linear(weight, activations, **buffers)

    def _check(self, parts: Parts) -> None:
        w_packed, perm = parts["w_packed"], parts["perm"]
        if not isinstance(w_packed, Tensor):
            raise TypeError("w_packed: expected a torch.Tensor, got None")
        k, device = self.in_features, w_packed.device
        names = "w_packed", "scales", "zeros", "bias"
        operands: dict[str, Any] = {name: parts[name] for name in names}
        a = torch.empty((1, k), dtype=torch.int8, device=device)
        a_scale = torch.empty(1, dtype=torch.float32, device=device)
        call = Int4Call(a, a_scale=a_scale, activation=self.activation, group_size=self.group_size, **operands)
        shape = call.check(None)
        if shape.n != self.out_features:
            raise ValueError(f"scales: expected N = {self.out_features} channels, got {shape.n}")
        check_zeros(parts["zeros"], 4)
        # Those that products of 16-bit activations apply to them have the same rules.
        of_input: dict[str, Any] = {name: parts[name] for name in ("act_scale", "perm")}
        GemmCall(a.half(), w_packed, operands["scales"], group_size=self.group_size, bits=4, **of_input).check(None)
        if perm is not None and not perm.is_meta and not bool(((perm >= 0) & (perm < k)).all()):
            raise ValueError(f"perm: expected values in [0, {k}), got others")

    def multiply(self, input: Tensor, activation: str | None) -> Tensor:
        parts: dict[str, Any] = self._buffers  # attributes of modules that are buffers take long to look up
        act_scale, perm, x = parts["act_scale"], parts["perm"], input
        if act_scale is not None or perm is not None:
            self._check_input(input)
            x = x if act_scale is None else (input.float() * act_scale.float()).to(input.dtype)
            x = x if perm is None else x.index_select(-1, perm)
        return self._computed(x, activation)

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        parts: dict[str, Any] = self._buffers
        quantizer = QuantizeCall(input, TYPES[self.activations])
        codes, a_scale, _ = outputs = ready or quantized(quantizer)
        call = Int4Call(
            codes,
            parts["w_packed"],
            a_scale,
            parts["scales"],
            parts["zeros"],
            parts["bias"],
            activation,
            input.dtype,
            self.group_size,
        )
        return Steps(INT4, call, quantizer, outputs)

    @property
    def input_codes(self) -> InputCodes | None:
        is_plain = self._buffers["act_scale"] is None and self._buffers["perm"] is None
        return InputCodes(TYPES[self.activations]) if is_plain else None

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of the layer."""
        return LayerSpec.of(f"w4a8_{self.activations}", 4, self.group_size, self.in_features, self._buffers)

    def canonical(self) -> CanonicalInt4:
        """The layer with its codes unpacked, as converted folders hold it."""
        return canonical_int4(self.activations)(self._weight(), self.bias, self.perm, self.act_scale)

    def weights(self) -> Tensor:
        """The weights float32 `[N, K]`, dequantised from the packed ones, columns in the activations' order."""
        options: dict[str, Any] = {"k": self.in_features, "group_size": self.group_size, "bits": 4}
        weight = dequantize(self.w_packed, self.scales, self.zeros, dtype=torch.float32, **options)
        if self.perm is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.perm.long()] = weight
        return ordered

    def _weight(self) -> QuantizedTensor:
        """The weights in canonical form; scales and zeros `[G, N]` even where one group is stored as `[N]`."""
        scales, zeros = (part if part is None or part.ndim == 2 else part[None] for part in (self.scales, self.zeros))
        assert scales is not None
        return QuantizedTensor(self._codes(), scales, zeros, 4, self.group_size)

    def _shard(self, part: slice, axis: Literal["out", "in"]) -> Int4Linear:
        whole = WeightOnlyLinear(
            self._weight(), bias=self.bias, activation=self.activation, act_scale=self.act_scale, perm=self.perm
        )
        cut = whole._shard(part, axis, _GROUP_STEP)
        stored = cut.canonical()
        options: dict[str, Any] = {"bias": copied(stored.bias), "act_scale": stored.act_scale, "perm": stored.perm}
        return Int4Linear(stored.weight, self.activations, activation=cut.activation, **options)

    def _description(self) -> list[str]:
        zeros = None if self.zeros is None else short(self.zeros.dtype)
        described = [f"activations={self.activations!r}", f"group_size={self.group_size}", f"zeros={zeros}"]
        return described + [f"{name}=True" for name in ("act_scale", "perm") if self._buffers[name] is not None]
