"""Quantised weights, activations as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.floating import quantize_nearest
from qcutlass.formats import CanonicalLinear
from qcutlass.formats.specs import LayerSpec
from qcutlass.formats.tensors import narrowed
from qcutlass.layers.base import QuantLinear, copied, copy_of_bias
from qcutlass.layers.offloading import HOOK, adapt
from qcutlass.layers.packed import Parts
from qcutlass.layers.short_codes import stored_bits
from qcutlass.layers.stored_form import STORED, StoredForm, from_stored
from qcutlass.products import dequantize, preprocess_weights
from qcutlass.products.checks import ceil_div, short
from qcutlass.products.layer_calls import Steps
from qcutlass.products.packing import GROUP_STEP, TILE_BITS, TILE_N, group_size_of_cut
from qcutlass.products.quantizer_operators import QuantizedRows
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall, has_whole_steps
from qcutlass.quantized import QuantizedTensor, check_zeros
from qcutlass.schemes import WeightOnly

_PROBE: Final = torch.float16  # activations that are allowed everywhere


class WeightOnlyLinear(QuantLinear, scheme=WeightOnly, stored="weight_only"):
    """A linear layer on `qcutlass.gemm`. `QuantLinear` says what all quantised layers do.

    Attributes:
        activations: None: as they are; "int8": quantised on the CPU, as by `gemm(..., activations="int8")`, where the
            groups allow it; `use_activations` sets it throughout a model. No part of the state.

        weight_dtype: of the codes, as for `gemm`.

    Buffers: `w_packed`, `scales`, `zeros`, `global_scale`, `bias`, `act_scale`, `perm`, `minimums`, `super_scales`,
    `super_minimums`, as `gemm` takes them; all but the first two may be None. Scales of two levels that CUDA's kernels
    do not take become float32 ones where the layer is on a GPU, and stay so. In converted folders, and in the state of
    layers that come from there, other tensors may say the same in fewer bytes: see `StoredForm`.

    Args:
        quantized: codes, scales, and zeros or minimums of an `[N, K]` matrix.
        bias, activation, act_scale, perm: as for `gemm`.

    Raises:
        TypeError, ValueError: as for `gemm`; also where `perm` holds values outside [0, K) or whole zeros lie outside
            [0, 2**bits], on any device.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import WeightOnlyLinear
        >>> layer = WeightOnlyLinear(qcutlass.quantize(torch.randn(48, 256), bits=4), activation="silu")
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 48])
    """

    OPTIONAL: ClassVar = (
        "zeros", "global_scale", "bias", "act_scale", "perm", "minimums", "super_scales", "super_minimums"
    )  # fmt: skip

    SETTINGS: ClassVar = ("activations",)
    SHARED: ClassVar = ("act_scale", "perm", "global_scale")
    HAS_GATES: ClassVar = True
    is_stored: ClassVar[bool] = True
    """Whether a model's state has the layer under its own name."""
    activations: str | None = None
    stored_form: StoredForm = StoredForm()
    """How the state holds the buffers."""
    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    global_scale: Tensor | None
    act_scale: Tensor | None
    perm: Tensor | None
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        act_scale: Tensor | None = None,
        perm: Tensor | None = None,
    ) -> None:
        if not isinstance(quantized, QuantizedTensor):
            raise TypeError(f"quantized: expected a qcutlass.QuantizedTensor, got {type(quantized).__name__}")
        n, k = quantized.shape
        parts = {
            "w_packed": preprocess_weights(quantized.codes, quantized.bits),
            "scales": quantized.scales,
            "zeros": quantized.zeros,
            "global_scale": quantized.global_scale,
            "bias": bias,
            "act_scale": act_scale,
            "perm": perm,
            "minimums": quantized.minimums,
            "super_scales": quantized.super_scales,
            "super_minimums": quantized.super_minimums,
        }
        group_size = min(quantized.group_size, k)
        super().__init__(k, n, quantized.bits, group_size, activation, parts, quantized.weight_dtype)

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: WeightOnly, statistics: ActivationStatistics | None, activation: str | None
    ) -> WeightOnlyLinear:
        """Statistics are not used: nothing is lost of the activations, however large."""
        return cls.of_weight(linear.weight, scheme, copy_of_bias(linear), activation)

    @staticmethod
    def of_weight(
        weight: Tensor, scheme: WeightOnly, bias: Tensor | None = None, activation: str | None = None
    ) -> WeightOnlyLinear:
        """Quantises weights `[N, K]` to the nearest; on the meta device a layer without values."""
        quantized = (_empty if weight.is_meta else _quantized)(weight, scheme)
        return WeightOnlyLinear(quantized, bias=bias, activation=activation)

    @classmethod
    def _of_stored(cls, layer: CanonicalLinear, activation: str | None) -> WeightOnlyLinear:
        return WeightOnlyLinear(
            layer.weight, bias=layer.bias, activation=activation, act_scale=layer.act_scale, perm=layer.perm
        )

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> WeightOnlyLinear:
        stored = spec.tensors(n, k)
        parts: dict[str, Any] = from_stored(stored, spec.bits, spec.weight_dtype)
        codes = torch.empty((n, k), dtype=torch.uint8, device="meta")
        scales, zeros = parts.pop("scales"), parts.pop("zeros", None)
        names = "global_scale", "minimums", "super_scales", "super_minimums"
        options = {name: parts.pop(name, None) for name in names}
        weight = QuantizedTensor(
            codes, scales, zeros, spec.bits, spec.columns(k), weight_dtype=spec.weight_dtype, **options
        )
        layer = WeightOnlyLinear(weight, **parts)
        layer.stored_form = StoredForm.of(stored, spec.bits)
        return layer

    @staticmethod
    def of_parts(
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int,
        activation: str | None,
        parts: Parts,
        weight_dtype: str | None = None,
    ) -> WeightOnlyLinear:
        """A layer of weights that are packed already: `parts` holds its buffers by name, but `layout`."""
        layer = WeightOnlyLinear.__new__(WeightOnlyLinear)
        whole = dict(parts) | {name: None for name in WeightOnlyLinear.OPTIONAL if name not in parts}
        QuantLinear.__init__(layer, in_features, out_features, bits, group_size, activation, whole, weight_dtype)
        return layer

    def _check(self, parts: Parts) -> None:
        w_packed, perm = parts["w_packed"], parts["perm"]
        if not isinstance(w_packed, Tensor):
            raise TypeError("w_packed: expected a torch.Tensor, got None")
        a = torch.empty((1, self.in_features), dtype=_PROBE, device=w_packed.device)
        operands: dict[str, Any] = {**parts}
        options: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size, "weight_dtype": self.weight_dtype}
        call = GemmCall(a, activation=self.activation, **options, **operands)
        shape = call.check(None)
        if shape.n != self.out_features:
            raise ValueError(f"scales: expected N = {self.out_features} channels, got {shape.n}")
        check_zeros(parts["zeros"], self.bits)
        if perm is not None and not perm.is_meta and not bool(((perm >= 0) & (perm < self.in_features)).all()):
            raise ValueError(f"perm: expected values in [0, {self.in_features}), got others")

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        return Steps(WEIGHT_ONLY, self.call(input, activation))

    def call(self, a: Tensor, activation: str | None) -> GemmCall:
        """The product that the layer computes of `a` with an activation, its own or another one."""
        parts: dict[str, Any] = self._buffers  # attributes of modules that are buffers take long to look up
        return GemmCall(
            a,
            parts["w_packed"],
            parts["scales"],
            parts["zeros"],
            parts["bias"],
            activation,
            parts["act_scale"],
            parts["perm"],
            self.group_size,
            self.bits,
            activations=self.activations,
            weight_dtype=self.weight_dtype,
            global_scale=parts["global_scale"],
            minimums=parts["minimums"],
            super_scales=parts["super_scales"],
            super_minimums=parts["super_minimums"],
        )

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of the layer."""
        shapes = {name: None if part is None else part.to("meta") for name, part in self._buffers.items()}
        held = self.stored_form.fitting(self._buffers).stored(shapes, self.bits, self.weight_dtype)
        return LayerSpec.of("weight_only", self.bits, self.group_size, self.in_features, held, self.weight_dtype)

    def _stored_parts(self, parts: Parts) -> dict[str, Tensor | None]:
        """What the state has of buffers."""
        return self.stored_form.fitting(parts).stored(parts, self.bits, self.weight_dtype)

    def narrow(self) -> None:
        self.scales = narrowed(self.scales)
        is_padded = self.out_features % TILE_N > 0 or self.in_features % (TILE_BITS // self.bits) > 0
        self.stored_form = StoredForm.smallest(self._buffers, self.bits, self.weight_dtype, is_padded=is_padded)
        if self.zeros is not None and not self.stored_form.minima:
            self.zeros = narrowed(self.zeros)
        if self.minimums is not None:
            self.minimums = narrowed(self.minimums)

    def expect_packed(self, shape: tuple[int, ...]) -> None:
        self.stored_form = self.stored_form._replace(code_bits=stored_bits(shape, self.bits))

    def begin_loading(self) -> None:
        self._buffers.update(self._stored_parts(self._buffers))

    def end_loading(self) -> None:
        parts = from_stored(self._buffers, self.bits, self.weight_dtype)
        for name in STORED:
            self._buffers.pop(name, None)
        self._buffers.update(parts)
        super().end_loading()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == HOOK:
            adapt(value, self)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, part in self._stored_parts(self._buffers).items():
            if part is None:
                destination.pop(f"{prefix}{name}", None)
            elif part is not self._buffers.get(name):
                destination[f"{prefix}{name}"] = part

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [name for name in (*self._buffers, *STORED) if f"{prefix}{name}" in state_dict]
        stored, errors = {name: state_dict[f"{prefix}{name}"] for name in names}, len(error_msgs)
        try:
            parts = from_stored(stored, self.bits, self.weight_dtype)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
            return
        for name in STORED:
            state_dict.pop(f"{prefix}{name}", None)
        state_dict.update({f"{prefix}{name}": part for name, part in parts.items()})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if names and len(error_msgs) == errors:
            self.stored_form = StoredForm.of(stored, self.bits)

    @property
    def quantizes_activations(self) -> bool:
        """Whether its codes and groups allow `activations="int8"`."""
        return self.weight_dtype is None and has_whole_steps(self.group_size, self.in_features)

    def canonical(self) -> CanonicalLinear:
        """The layer with its codes unpacked, as loaders of checkpoints yield it."""
        return self.canonical_of(self._codes())

    def canonical_of(self, codes: Tensor) -> CanonicalLinear:
        """The canonical form with other codes `[N, K]` than the packed ones, say without values."""
        return CanonicalLinear(self._weight(codes), self.bias, self.perm, self.act_scale)

    def weights(self) -> Tensor:
        """The weights float32 `[N, K]`, dequantised from the packed ones, columns in the activations' order."""
        weight = dequantize(
            self.w_packed,
            self.scales,
            self.zeros,
            k=self.in_features,
            group_size=self.group_size,
            bits=self.bits,
            dtype=torch.float32,
            weight_dtype=self.weight_dtype,
            global_scale=self.global_scale,
            minimums=self.minimums,
            super_scales=self.super_scales,
            super_minimums=self.super_minimums,
        )
        if self.perm is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.perm.long()] = weight
        return ordered

    def _weight(self, codes: Tensor) -> QuantizedTensor:
        """The weights in canonical form; scales and so on `[G, N]` even where one group is stored as `[N]`."""
        stored = self.scales, self.zeros, self.minimums
        scales, zeros, minimums = (part if part is None or part.ndim == 2 else part[None] for part in stored)
        assert scales is not None
        numbers = self.weight_dtype, self.global_scale
        supers = self.super_scales, self.super_minimums
        return QuantizedTensor(codes, scales, zeros, self.bits, self.group_size, *numbers, minimums, *supers)

    def _shard(self, part: slice, axis: Literal["out", "in"], step: int = GROUP_STEP) -> WeightOnlyLinear:
        """`step`: what smaller groups are multiples of."""
        if axis == "out":
            return self.rows(part)
        size = part.stop - part.start
        is_cut = size < self.in_features and self.group_size < self.in_features
        if is_cut and not group_size_of_cut(self.group_size, size, step):  # not of its first column: all ranks agree
            raise ValueError(
                f"world_size: parts of {size} columns cut groups of {self.group_size} into ones that are no multiples "
                f"of {step}, as kernels need them; use a smaller world_size or axis 'out'"
            )
        if self.perm is not None:
            raise ValueError("layer: act-order mixes the columns of all parts; cut it along axis 'out'")
        return self.columns(part)

    def rows(self, index: Tensor | slice) -> WeightOnlyLinear:
        """The layer with some of its output channels, in memory of its own; errors as for `QuantizedTensor.rows`."""
        weight = self._weight(self._codes()).rows(index)
        bias = None if self.bias is None else self.bias[index]
        return self._like(_copy(weight, bias, self.activation, self.act_scale, self.perm))

    def columns(self, part: slice) -> WeightOnlyLinear:
        """The layer of some columns, in the order in which the codes lie, in memory of its own.

        Its outputs are to be added to those of the other columns: the part with the first one has the bias. Errors are
        those of `QuantizedTensor.columns`.
        """
        weight = self._weight(self._codes()).columns(part)
        act_scale = None if self.act_scale is None else self.act_scale[part]
        bias = self.bias if part.indices(self.in_features)[0] == 0 else None
        return self._like(_copy(weight, bias, None, act_scale, None))

    def _like(self, part: WeightOnlyLinear) -> WeightOnlyLinear:
        """A part of the layer with its options."""
        part.activations = self.activations
        return part

    def _description(self) -> list[str]:
        zeros = None if self.zeros is None else short(self.zeros.dtype)
        described = [f"bits={self.bits}", f"group_size={self.group_size}"]
        described.append(f"zeros={zeros}" if self.weight_dtype is None else f"weight_dtype={self.weight_dtype!r}")
        described += [f"{name}=True" for name in ("act_scale", "perm", "minimums") if self._buffers[name] is not None]
        return described + ([] if self.activations is None else [f"activations={self.activations!r}"])


def _quantized(weight: Tensor, scheme: WeightOnly) -> QuantizedTensor:
    return quantize_nearest(weight, scheme)


def _empty(weight: Tensor, scheme: WeightOnly) -> QuantizedTensor:
    n, k = weight.shape
    step = k if scheme.group_size in (None, -1) else min(scheme.group_size or k, k)
    scales = weight.new_empty((ceil_div(k, step), n), dtype=scheme.scale_dtype)
    has_zeros = not scheme.symmetric and scheme.weight_dtype is None
    zeros = torch.empty_like(scales, dtype=torch.uint8) if has_zeros else None
    global_scale = weight.new_empty(1, dtype=torch.float32) if scales.dtype == torch.float8_e4m3fn else None
    codes = weight.new_empty((n, k), dtype=torch.uint8)
    return QuantizedTensor(codes, scales, zeros, scheme.bits, step, scheme.weight_dtype, global_scale)


def _copy(
    weight: QuantizedTensor, bias: Tensor | None, activation: str | None, act_scale: Tensor | None, perm: Tensor | None
) -> WeightOnlyLinear:
    """A layer that shares no memory with the one it is cut from."""
    scales = weight.scales.clone(memory_format=torch.contiguous_format)
    return WeightOnlyLinear(
        replace(
            weight,
            scales=scales,
            zeros=copied(weight.zeros),
            global_scale=copied(weight.global_scale),
            minimums=copied(weight.minimums),
            super_scales=copied(weight.super_scales),
            super_minimums=copied(weight.super_minimums),
        ),
        bias=copied(bias),
        activation=activation,
        act_scale=copied(act_scale),
        perm=copied(perm),
    )
