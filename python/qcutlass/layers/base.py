"""The base of all quantised linear layers: making, saving, loading and moving them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Checkpoint, DequantizedLinear, Layer, QuantizedLayer
from qcutlass.formats.converted import PackedLinear
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers.loading import stored_layer
from qcutlass.layers.packed import PackedModule, Parts
from qcutlass.products import layer_calls, unpack_weights
from qcutlass.products.checks import FLOATING, check_channels, check_integer, check_options, check_tensor, shape_of
from qcutlass.products.layer_calls import Steps
from qcutlass.products.multiplying import compute
from qcutlass.products.packing import TILE_N
from qcutlass.products.quantizer_operators import QuantizedRows
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import Scheme, WeightOnly

_KINDS: Final[dict[type[Scheme], type[QuantLinear]]] = {}
"""The layers of each scheme."""
_STORED: Final[dict[str, type[QuantLinear]]] = {}
"""The layers of each kind in `qcutlass.formats.specs.LAYER_KINDS`."""


class InputCodes(NamedTuple):
    """How a layer quantises its input as it comes, without zero points, smoothing or another order of columns.

    The operator that makes the input can do this in the same pass.

    Attributes:
        dtype: of the codes.
        scale: float32 `[1]`, of all of it; None: each token has its own.
    """

    dtype: torch.dtype
    scale: Tensor | None = None


class QuantLinear(PackedModule):
    """A linear layer with quantised weights: `activation(x @ w.T + bias)`, for inference.

    `from_linear`, `from_quantized` and `from_checkpoint` make them; the kinds are `qcutlass.layers.WeightOnlyLinear`,
    `Int4Linear`, `Int8Linear`, `Fp8Linear` and `BlockwiseLinear`.

    Its argument is `input`, as that of `torch.nn.Linear`; errors of products call it `a`.

    A layer's tensors are buffers. They are numbers as quantisation made them, so `.half()`, `.to(dtype)` and the like
    convert none of them: a layer computes in the type of its input, which its output has too. `.to(device)` moves them.

    `state_dict` holds the buffers under their names, and `layout`, int64 `[5]`: the version of the packed layout, bits,
    N, K and group size. `load_state_dict` refuses another layout, shape or kind before it changes anything of the
    layer; types of scales, and which of the optional tensors there are, follow what is loaded. To load without float
    weights, make the model on the meta device and `load_state_dict(state, assign=True)`. Options that are not numbers,
    the fused activation and how dynamic activations are quantised, are the code's, not the state's.

    Attributes:
        in_features, out_features: K, N.
        bits: of a weight.
        group_size: columns that share a scale; K: one group.
        activation: None or the name of the fused one.

    Example:
        >>> import torch, qcutlass
        >>> layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(256, 48), bits=4, group_size=64)
        >>> layer
        WeightOnlyLinear(in_features=256, out_features=48, bits=4, group_size=64, zeros=uint8, bias=True)
        >>> layer(torch.randn(2, 3, 256)).shape
        torch.Size([2, 3, 48])
    """

    _stored: ClassVar[str | None] = None
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    """What a kind of layers has beside the arguments of this `__init__`."""
    SHARED: ClassVar[tuple[str, ...]] = ()
    """Buffers that belong to the input, or to all channels."""
    HAS_GATES: ClassVar[bool] = False
    """Whether `multiply` takes the gates of two layers, whose channels lie in turns."""

    bias: Tensor | None

    def __init_subclass__(
        cls, scheme: type[Scheme] | None = None, stored: str | tuple[str, ...] = (), **keywords: Any
    ) -> None:
        """Registers a kind of layers: `class MyLinear(QuantLinear, scheme=MyScheme)`.

        `stored`: its kind in converted folders, a key of `LAYER_KINDS` in `qcutlass.formats.specs`; several where its
        `spec` says which.
        """
        super().__init_subclass__(**keywords)
        if scheme is not None:
            _KINDS[scheme] = cls
        for kind in (stored,) if isinstance(stored, str) else stored:
            _STORED[kind] = cls
            cls._stored = kind

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int,
        activation: str | None,
        parts: Parts,
        weight_dtype: str | None = None,
    ) -> None:
        """`parts`: every buffer by its name, checked by the kind. `weight_dtype`: of codes, as for `gemm`."""
        super().__init__()
        check_integer("in_features", in_features, minimum=1)
        check_integer("out_features", out_features, minimum=1)
        check_activation(activation)
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size = bits, group_size
        self.activation = activation
        self.weight_dtype = weight_dtype
        self._register(parts)

    @staticmethod
    def from_linear(
        linear: nn.Linear,
        scheme: Scheme | None = None,
        *,
        statistics: ActivationStatistics | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> QuantLinear:
        """Quantises a linear layer, to the nearest.

        Args:
            linear: with float16, bfloat16 or float32 weights, on any device; it is not changed. The bias is copied.
                It has no forward hooks, no forward of its own and no parametrization, which the quantised layer would
                not run.
            scheme: `WeightOnly`, `W4A8`, `W8A8`, `FP8` or `Blockwise`; None: `WeightOnly(**options)`, that is `bits=4,
                group_size=128, symmetric=False`.
            statistics: of the layer's input, from `calibrate` or `smooth_model`; needed by static schemes.
            activation: to be fused: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".

        Returns:
            The layer, on the device of `linear`.

        Raises:
            TypeError: `linear` is not a Linear with floating weights, or an option is unknown or of another type.
            ValueError: an option has no such value, weights or statistics are not finite, statistics are missing;
                `linear` has forward hooks, a forward of its own, or weights that are not a parameter.

        Example:
            >>> import torch, qcutlass
            >>> linear = torch.nn.Linear(64, 16)
            >>> qcutlass.QuantLinear.from_linear(linear, qcutlass.W8A8(symmetric=False), activation="silu").bits
            8
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        if scheme is None:
            scheme = WeightOnly(**options)
        elif options:
            raise TypeError(f"{next(iter(options))}: pass it to the scheme, {type(scheme).__name__}(...)")
        kind = kind_of(scheme)
        check_plain("linear", linear)
        check_tensor("linear.weight", linear.weight, FLOATING)
        if not linear.weight.is_meta and not bool(linear.weight.isfinite().all()):
            raise ValueError("linear.weight: expected finite values, got NaN or infinity")
        _check_statistics(statistics, linear.in_features)
        with torch.no_grad():
            return kind._of_linear(linear, scheme, statistics, activation).train(linear.training)

    @staticmethod
    def from_quantized(
        quantized: QuantizedTensor,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        act_scale: Tensor | None = None,
        perm: Tensor | None = None,
    ) -> QuantLinear:
        """A weight-only layer of weights in canonical form, as `quantize` and the loaders of checkpoints give them.

        Args:
            quantized: codes, scales and zeros of an `[N, K]` matrix.
            bias, activation, act_scale, perm: as for `gemm`.

        Raises:
            TypeError, ValueError: as for `gemm`; also where `perm` holds values outside [0, K), on any device.

        Example:
            >>> import torch, qcutlass
            >>> q = qcutlass.quantize(torch.randn(48, 256), bits=8)
            >>> qcutlass.QuantLinear.from_quantized(q, bias=torch.zeros(48)).bits
            8
        """
        make: Any = _KINDS[WeightOnly]
        layer: QuantLinear = make(quantized, bias=bias, activation=activation, act_scale=act_scale, perm=perm)
        return layer

    @staticmethod
    def from_checkpoint(
        checkpoint: str | PathLike[str] | Mapping[str, Tensor] | Checkpoint,
        name: str,
        *,
        format: str = "auto",
        config: Mapping[str, Any] | None = None,
        activation: str | None = None,
    ) -> QuantLinear:
        """One layer of a quantised checkpoint, without loss: weights, bias, act-order, activation scales.

        Args:
            checkpoint: what `qcutlass.formats.load` opens or has opened. For many layers open it once.
            name: of the layer, a key of the opened checkpoint.
            format, config: as for `qcutlass.formats.load`.
            activation: to be fused, as for `from_linear`.

        Returns:
            The layer, on the CPU: a `WeightOnlyLinear`; for W8A8 an `Int8Linear`, for fp8 weights and activations an
            `Fp8Linear`, for 4-bit weights with 8-bit activations an `Int4Linear`, for blocks of a converted folder a
            `BlockwiseLinear`.

        Raises:
            ValueError: no layer has this name, or its weights are not quantised.
            FileNotFoundError, UnsupportedError, CheckpointError: as for `qcutlass.formats.load`.

        Example:
            >>> import torch, qcutlass
            >>> tensors = {
            ...     "up.qweight": torch.zeros(8, 32, dtype=torch.int32),  # K * 4 / 32 x N
            ...     "up.qzeros": torch.full((1, 4), 0x77777777, dtype=torch.int32),
            ...     "up.scales": torch.ones(1, 32, dtype=torch.float16),
            ... }
            >>> qcutlass.QuantLinear.from_checkpoint(tensors, "up")
            WeightOnlyLinear(in_features=64, out_features=32, bits=4, group_size=64, zeros=None, bias=False)
        """
        check_activation(activation)
        return from_layer(stored_layer(checkpoint, name, format, config), name, activation)

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: Any, statistics: ActivationStatistics | None, activation: str | None
    ) -> QuantLinear:
        """The quantised layer of a checked `linear`; on the meta device one without values, to be loaded into.

        `scheme` is of the type that the class was registered with.
        """
        raise NotImplementedError

    @classmethod
    def _of_stored(cls, layer: Any, activation: str | None) -> QuantLinear:
        """The layer of canonical form, of the class in `qcutlass.formats` that has this class's kind."""
        raise NotImplementedError

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> QuantLinear:
        """A layer `[N, K]` without values, on the meta device; `spec`: of this class's kind."""
        raise NotImplementedError

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of the layer; UnsupportedError for kinds that none holds."""
        if self._stored is None:
            raise self._unsupported("converted folders hold no")
        options = self.group_size, self.in_features, self._buffers, self.weight_dtype
        return LayerSpec.of(self._stored, self.bits, *options)

    @property
    def _is_held(self) -> bool:
        """Whether converted folders hold such layers, so that there is a `spec`."""
        return self._stored is not None

    def __dir__(self) -> list[str]:
        """Without a `spec` that there is not: torch.jit.trace, and others, ask a module for all of these names."""
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return names if self._is_held else [name for name in names if name != "spec"]

    def like(self, out_features: int, parts: Parts, kind: type[QuantLinear] | None = None) -> QuantLinear:
        """A layer of this one's options, and of its kind or `kind`, with other channels, whose buffers are `parts`."""
        kind = kind or type(self)
        layer = kind.__new__(kind)
        sizes = self.in_features, out_features, self.bits, self.group_size
        QuantLinear.__init__(layer, *sizes, self.activation, parts, self.weight_dtype)
        for name in self.SETTINGS:
            setattr(layer, name, getattr(self, name))
        return layer

    def channels_of(self, name: str) -> tuple[int, int]:
        """The dimension of a buffer that channels lie along, and how many of them have an entry in common."""
        return (0, TILE_N) if name == "w_packed" else (-1, 1)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        return self.multiply(input, self.activation)

    def multiply(self, input: Tensor, activation: str | None) -> Tensor:
        """The layer's output with another activation than its own: with a gate, where HAS_GATES."""
        return self._computed(input, activation)

    @property
    def input_codes(self) -> InputCodes | None:
        """The codes that it multiplies, where those of its input are all it needs, or None where it takes the input."""
        return None

    def _ready_codes(self, input: Tensor) -> QuantizedRows | None:
        """Codes of an input and their scale, as `input_codes` says, where somebody made them; None: nobody did."""
        return None

    def _computed(self, input: Tensor, activation: str | None) -> Tensor:
        """The output with some activation, in the shortest way that is open to it."""
        ready = self._ready_codes(input)
        is_alike = ready is None and not torch.compiler.is_compiling()
        if is_alike:
            repeated = layer_calls.repeat(self.__dict__, input, activation)
            if repeated is not None:
                return repeated
        self._check_input(input)
        begin = layer_calls.begin(self.__dict__, self.SETTINGS, input, activation) if is_alike else None
        steps = self._steps(input, activation, ready)
        out = compute(steps.kind, steps.call, None)
        if begin is not None:
            layer_calls.remember(begin, self.__dict__, input, steps)
        return out

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        """The product, to be run, with its activations quantised where it takes such, unless they are `ready`."""
        raise NotImplementedError

    def canonical(self) -> QuantizedLayer:
        """The layer with its codes unpacked, as loaders of checkpoints yield it; UnsupportedError as for `spec`."""
        raise self._unsupported("there is no canonical form of a")

    def narrow(self) -> None:
        """Holds scales and zeros, and has its state hold them, in the smallest form that says the same to the bit."""

    def expect_packed(self, shape: tuple[int, ...]) -> None:
        """Has the state hold `w_packed` in this shape, that of a file, where the kind has several."""

    def weights(self) -> Tensor:
        """The weights float32 `[N, K]`, dequantised from the packed ones; see `qcutlass.models.weights_of`."""
        raise TypeError(f"layer: expected a layer of qcutlass.layers, got {type(self).__name__}")

    def _shard(self, part: slice, axis: Literal["out", "in"]) -> QuantLinear:
        """The part of the layer with these output channels or input columns; see `qcutlass.layers.shard`."""
        raise UnsupportedError(f"layer: expected a layer of qcutlass.layers, got {type(self).__name__}")

    def _codes(self) -> Tensor:
        """Codes `[N, K]`, unpacked."""
        packed = self._buffers["w_packed"]
        assert packed is not None
        return unpack_weights(packed, self.bits, (self.out_features, self.in_features))

    def _unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"layer: {why} {type(self).__name__}")

    def _check_input(self, a: Tensor) -> None:
        """Raises ValueError unless the last dimension is K; the product checks the rest, nested tensors among it."""
        if isinstance(a, Tensor) and not a.is_nested and (a.dim() == 0 or a.shape[-1] != self.in_features):
            raise ValueError(f"input: expected shape [..., in_features] = [..., {self.in_features}], got {shape_of(a)}")

    def extra_repr(self) -> str:
        described = [f"in_features={self.in_features}, out_features={self.out_features}", *self._description()]
        described.append(f"bias={self.bias is not None}")
        if self.activation is not None:
            described.append(f"activation={self.activation!r}")
        return ", ".join(described)

    def _description(self) -> list[str]:
        """The kind's own part of `extra_repr`."""
        return []


def from_layer(layer: Layer | PackedLinear, name: str, activation: str | None = None) -> QuantLinear:
    """The layer that multiplies by weights from a file.

    Raises:
        ValueError: they are not quantised.
        UnsupportedError: no product multiplies what is stored.
        CheckpointError: the tensors of a converted folder are not those that it describes, or hold NaN or infinity.
    """
    if isinstance(layer, PackedLinear):
        return _from_packed(layer, activation)
    kind = _STORED.get(layer.kind)
    if kind is None:
        raise _refusal(layer, name)
    return kind._of_stored(layer, activation)


def _refusal(layer: Layer, name: str) -> Exception:
    if isinstance(layer, DequantizedLinear):
        return UnsupportedError(f"{name}: {layer.obstacle}")
    return ValueError(f"{name}: expected quantised weights, got {layer.words}; use QuantLinear.from_linear")


def from_spec(spec: LayerSpec, n: int, k: int) -> QuantLinear:
    """A layer `[N, K]` without values, on the meta device."""
    return _STORED[spec.kind]._empty(spec, n, k)


def empty_layer(packed: PackedLinear) -> QuantLinear:
    """A layer of a converted folder without values, on the meta device, with the tensors that the files hold of it.

    Raises:
        CheckpointError: they are not those that the folder describes.
    """
    try:
        layer = from_spec(packed.spec, *packed.shape)
    except (TypeError, ValueError) as error:  # super-blocks that do not divide this layer's groups
        raise CheckpointError(f"{packed.where}: {error}; convert the model again") from error
    layer.expect_packed(packed.packed_shape)
    expected = list(layer.state_dict())
    if sorted(packed.suffixes) != sorted(expected):
        raise CheckpointError(f"{packed.where}: expected {', '.join(expected)}, got {', '.join(packed.suffixes)}")
    return layer


def _from_packed(packed: PackedLinear, activation: str | None) -> QuantLinear:
    layer, state = empty_layer(packed), packed.read()
    try:
        layer.load_state_dict(state, assign=True)
        layer.check()
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{packed.where}: {error}; convert the model again") from error
    layer.activation = activation
    return layer


def kind_of(scheme: object) -> type[QuantLinear]:
    """The layers of a scheme; TypeError for what is none."""
    for base in type(scheme).__mro__:
        if base in _KINDS:
            return _KINDS[base]
    raise TypeError(f"scheme: expected qcutlass.WeightOnly, W4A8, W8A8, FP8 or Blockwise, got {type(scheme).__name__}")


def check_activation(activation: object) -> None:
    """Raises TypeError or ValueError unless `activation` can be fused."""
    if not isinstance(activation, str | None):
        raise TypeError(f"activation: expected a name or None, got {type(activation).__name__}")
    check_options(activation, None, 0)


def check_plain(name: str, module: nn.Module, otherwise: str = "") -> None:
    """Raises ValueError if `module` computes more than its class does; a Linear, if its weight is not its own."""
    if module._forward_pre_hooks or module._forward_hooks:
        raise ValueError(
            f"{name}: has forward hooks, which a quantised layer would not run; remove them "
            "(torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove or the hook's handle)" + otherwise
        )
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's moves tensors, and no more
        raise ValueError(
            f"{name}: its forward was replaced, by one that a quantised layer would not run; restore it "
            "(del layer.forward)" + otherwise
        )
    if hasattr(module, "_hf_hook") and any(tensor.is_meta for tensor in module.parameters(recurse=False)):
        raise ValueError(
            f"{name}: accelerate keeps its weight elsewhere, say on a disk, until it runs; load the model "
            "where it has room, or convert its folder (qcutlass convert)" + otherwise
        )
    if isinstance(module, nn.Linear) and not isinstance(module.weight, nn.Parameter):
        raise ValueError(
            f"{name}: its weight is computed, not a Parameter; make it one "
            "(torch.nn.utils.parametrize.remove_parametrizations)" + otherwise
        )


def _check_statistics(statistics: object, k: int) -> None:
    """Raises TypeError or ValueError unless these are None or statistics of `k` channels."""
    if statistics is None:
        return
    if not isinstance(statistics, ActivationStatistics):
        raise TypeError(f"statistics: expected ActivationStatistics or None, got {type(statistics).__name__}")
    if statistics.minimum.shape != (k,):
        raise ValueError(f"statistics: expected those of K = {k} channels, got {shape_of(statistics.minimum)}")
    if statistics.smooth is not None:
        check_channels("statistics.smooth", statistics.smooth, k)


def copy_of_bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach().clone()


def copied(tensor: Tensor | None) -> Tensor | None:
    """A copy that shares no memory with a part of another layer."""
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
