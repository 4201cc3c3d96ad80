"""The rules of the operators' arguments, checked once for eager calls, registered operators and their fake versions.

Only shapes, types and devices are looked at, so that everything here works on fake and meta tensors too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.errors import UnsupportedError

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32)
_CODES: Final = (torch.uint8,)
_PERM: Final = (torch.int32,)
_ZEROS: Final = (torch.uint8, torch.int8, torch.int32, *FLOATING)
_ACTIVATIONS_ON: Final = {"cpu": FLOATING, "meta": FLOATING, "cuda": (torch.float16, torch.bfloat16)}

PACKINGS: Final = {4: _C.Packing.W4A16, 8: _C.Packing.W8A16}
"""Packing for 16-bit activations, by bits of a weight."""

TILE_N: Final = 16
TILE: Final = (32, 16)  # lanes (or halves of rows), bytes of each
_TILE_K: Final = {bits: _C.tile_k(packing) for bits, packing in PACKINGS.items()}
_AMBIGUOUS_K: Final = min(_TILE_K.values())  # up to here both packings have one tile along K
_CUDA_GROUP_STEP: Final = 16
_MOST_SPLITS: Final = 2**16  # blocks that a grid has in this direction

ACTIVATIONS: Final[dict[str | None, _C.Activation]] = {
    None: _C.Activation.NONE,
    "relu": _C.Activation.RELU,
    "gelu": _C.Activation.GELU,
    "gelu_tanh": _C.Activation.GELU_TANH,
    "silu": _C.Activation.SILU,
}


class Call(Protocol):
    """The arguments of one product, in the order of its operator's schema: what every kind of product has."""

    @property
    def a(self) -> Tensor:
        """The activations, the first argument."""

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def activation(self) -> str | None: ...

    @property
    def out_dtype(self) -> torch.dtype: ...

    @property
    def tactic(self) -> str | None: ...

    @property
    def split_k(self) -> int: ...

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of the extension's `GemmArguments.at` or `at_sums`."""

    @property
    def options(self) -> tuple[Any, ...]:
        """All that is no tensor; types beside values where a wrong one may equal a right one, as True and 1.0 do 1."""

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""

    def __iter__(self) -> Iterator[Any]: ...

    def _asdict(self) -> dict[str, Any]: ...


class Arguments(Protocol):
    """Those of a call, in a NamedTuple."""

    def _asdict(self) -> dict[str, Any]: ...


def tensors_of(call: Arguments) -> dict[str, Tensor]:
    """The tensors among the arguments of a call, by name."""
    return {name: value for name, value in call._asdict().items() if isinstance(value, Tensor)}


class GemmCall(NamedTuple):
    """The arguments of one product, in the order of the operator's schema; `qcutlass.gemm` describes them."""

    a: Tensor
    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    act_scale: Tensor | None = None
    perm: Tensor | None = None
    group_size: int | None = None
    bits: int | None = None
    tactic: str | None = None
    split_k: int = 0

    @property
    def out_dtype(self) -> torch.dtype:
        return self.a.dtype

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.a, self.w_packed, self.scales, self.zeros, self.bias, self.act_scale, self.perm

    @property
    def options(self) -> tuple[Any, ...]:
        group_size, bits, split_k = self.group_size, self.bits, self.split_k
        types = (type(group_size), type(bits), type(split_k))
        return self.activation, self.tactic, group_size, bits, split_k, types

    def check(self, out: Tensor | None) -> WeightShape:
        return check_gemm(self, out)


class DequantizeCall(NamedTuple):
    """The arguments of a dequantisation, in the order of the schema; `qcutlass.dequantize` describes them."""

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    k: int
    group_size: int | None = None
    bits: int | None = None
    dtype: torch.dtype | None = None
    row_begin: int = 0
    row_end: int | None = None


class WeightShape(NamedTuple):
    """What the shapes of a packed weight and its scales say."""

    n: int
    k: int
    bits: int
    group_size: int  # k: one group


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _refuse_type(name: str, value: object, dtypes: Sequence[torch.dtype], where: str) -> NoReturn:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    raise TypeError(f"{name}: expected a tensor of {_names(dtypes)}{where}, got {_names([value.dtype])}")


def check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype], where: str = "") -> None:
    """Raises TypeError unless `value` is a tensor of one of `dtypes`."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        _refuse_type(name, value, dtypes, where)


def check_operand(
    name: str, value: object, dtypes: Sequence[torch.dtype], device: torch.device, first: str, where: str = ""
) -> None:
    """Raises unless `value` is a tensor of one of `dtypes` on the `device` that the operand named `first` is on."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        _refuse_type(name, value, dtypes, where)
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, {first} is on {device}: move one of them, e.g. {name}.to({str(device)!r})"
        )


def check_vector(name: str, value: Tensor, length: int, letter: str) -> None:
    if value.shape != (length,):
        raise ValueError(f"{name}: expected shape [{letter}] = [{length}], got {shape_of(value)}")


def check_integer(name: str, value: object, allowed: Container[int] | None = None, minimum: int | None = None) -> None:
    """Raises TypeError unless `value` is an integer (or a symbolic one), ValueError unless it is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if allowed is not None and value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, _listed(allowed)))}, got {value}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def check_pair(name: str, value: object, meaning: str) -> tuple[int, int]:
    """The two integers of `value`; raises TypeError unless it has these."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name}: expected a pair of ints {meaning}, got {value!r}")
    for index, element in enumerate(value):
        check_integer(f"{name}[{index}]", element)
    return value[0], value[1]


def _listed(allowed: Container[int]) -> list[int]:
    return [value for value in range(65) if value in allowed]


def check_packed_form(name: str, w_packed: Tensor) -> None:
    """Raises ValueError unless the shape is that of some packed weight, and its bytes lie together."""
    if len(w_packed.shape) != 4 or w_packed.shape[2:] != TILE:
        raise ValueError(
            f"{name}: expected shape [ceil(N/16), tiles along K, 32, 16] as preprocess_weights returns it, "
            f"got {shape_of(w_packed)}"
        )
    _check_contiguous(name, w_packed)


def _check_contiguous(name: str, w_packed: Tensor) -> None:
    if not w_packed.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {list(w_packed.stride())}; call .contiguous() once"
        )


def _bits(w_packed: Tensor, k: int, bits: int | None) -> int:
    """Bits of a weight, from the number of tiles along K."""
    tiles = w_packed.shape[1]
    if bits is None and k > _AMBIGUOUS_K:  # the common case, without building lists
        for candidate, tile_k in _TILE_K.items():
            if -(-k // tile_k) == tiles:
                return candidate
    fitting = [candidate for candidate, tile_k in _TILE_K.items() if ceil_div(k, tile_k) == tiles]
    if bits is not None:
        check_integer("bits", bits, _TILE_K)
        if bits in fitting:
            return bits
        raise ValueError(
            f"w_packed: {bits}-bit weights of K = {k} have shape [ceil(N/16), {ceil_div(k, _TILE_K[bits])}, 32, 16], "
            f"got {shape_of(w_packed)}"
        )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"bits: with K = {k} the shape of w_packed, {shape_of(w_packed)}, is the same for 4-bit and 8-bit weights: "
            "pass bits=4 or bits=8"
        )
    expected = " or ".join(f"{ceil_div(k, tile_k)} ({bits} bits)" for bits, tile_k in _TILE_K.items())
    raise ValueError(
        f"w_packed: for K = {k} its second dimension must be {expected}, got shape {shape_of(w_packed)}; "
        "was it packed from a matrix with another number of columns?"
    )


def _group_size(groups: int, k: int, group_size: int | None) -> int:
    """Columns that share a scale, from the number of groups."""
    if group_size is None:
        if groups == 1:
            return k
        if groups == 0 or k % groups != 0:
            raise ValueError(
                f"group_size: scales have G = {groups} groups, which does not divide K = {k}; pass group_size= "
                "(a last group that is shorter than the others is allowed)"
            )
        return k // groups
    check_integer("group_size", group_size)
    if group_size == -1:
        group_size = k
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, or -1 for one group a channel, got {group_size}")
    if ceil_div(k, group_size) != groups:
        raise ValueError(
            f"group_size: {group_size} with K = {k} needs scales of {ceil_div(k, group_size)} groups, got {groups}"
        )
    return k if groups == 1 else group_size


def check_channels(source: str, n: int, name: str, w_packed: Tensor) -> None:
    """Raises ValueError unless the packed weight has as many tiles as `n` channels need; `source` says whence `n`."""
    if w_packed.shape[0] != ceil_div(n, TILE_N):
        raise ValueError(
            f"{source} needs {name} of {ceil_div(n, TILE_N)} tiles of 16 channels, got shape {shape_of(w_packed)}"
        )


def check_weights(
    w_packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    group_size: int | None,
    bits: int | None,
    device: torch.device,
    first: str,
) -> WeightShape:
    """Checks a packed weight of K = `k` columns with its scales and zeros; `first` names the operand on `device`."""
    if isinstance(w_packed, Tensor) and w_packed.dtype == torch.int8:
        raise ValueError(
            "w_packed was packed for int8 activations (activations='int8', dtype int8), but this product takes weights "
            "packed for 16-bit activations (dtype uint8): pack the codes with preprocess_weights(codes, bits=8)"
        )
    check_operand("w_packed", w_packed, _CODES, device, first)
    check_operand("scales", scales, FLOATING, device, first)
    check_packed_form("w_packed", w_packed)
    if scales.dim() not in (1, 2):
        raise ValueError(f"scales: expected shape [G, N] or [N], got {shape_of(scales)}")
    if k < 1:
        raise ValueError(f"K must be at least 1, got {k}")
    n = scales.shape[-1]
    check_channels(f"scales: N = {n} from shape {shape_of(scales)}", n, "w_packed", w_packed)
    if zeros is not None:
        check_operand("zeros", zeros, _ZEROS, device, first)
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros: expected the shape of scales, {shape_of(scales)}, got {shape_of(zeros)}")
    groups = scales.shape[0] if scales.dim() == 2 else 1
    return WeightShape(n, k, _bits(w_packed, k, bits), _group_size(groups, k, group_size))


def check_gemm(call: GemmCall, out: Tensor | None) -> WeightShape:
    """Checks every argument of `qcutlass.gemm` but what needs memory addresses."""
    a, w_packed, scales, zeros, bias, activation, act_scale, perm, group_size, bits, tactic, split_k = call
    device = check_activations("a", a, _ACTIVATIONS_ON)
    shape = check_weights(w_packed, scales, zeros, a.shape[-1], group_size, bits, device, "a")
    n, k = shape.n, shape.k
    if bias is not None:
        check_operand("bias", bias, FLOATING, device, "a")
        check_vector("bias", bias, n, "N")
    if act_scale is not None:
        check_operand("act_scale", act_scale, FLOATING, device, "a")
        check_vector("act_scale", act_scale, k, "K")
    if perm is not None:
        check_operand("perm", perm, _PERM, device, "a")
        check_vector("perm", perm, k, "K")
    check_options(activation, tactic, split_k)
    if out is not None:
        check_out("a", a, out, n, a.dtype)
    if device.type == "cuda" and shape.group_size < k and shape.group_size % _CUDA_GROUP_STEP != 0:
        raise UnsupportedError(
            f"group_size: on CUDA groups are multiples of {_CUDA_GROUP_STEP} columns, or one a channel; "
            f"got {shape.group_size}. Quantise with another group size, or use CPU tensors"
        )
    return shape


def check_activations(name: str, a: object, allowed: Mapping[str, Sequence[torch.dtype]]) -> torch.device:
    """Raises unless `a` has a shape `[..., K]` and a type that is allowed on its device, which is returned."""
    if not isinstance(a, Tensor):
        _refuse_type(name, a, allowed["cpu"], "")
    device = a.device
    check_device(name, a)
    if a.dtype not in allowed[device.type]:
        _refuse_type(name, a, allowed[device.type], f" on {device.type}")
    if a.dim() == 0:
        raise ValueError(f"{name}: expected shape [..., K], got a tensor without dimensions")
    return device


def check_options(activation: object, tactic: object, split_k: int) -> None:
    """Checks what every product takes besides tensors."""
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation: expected a name or None, got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if tactic is not None and not isinstance(tactic, str):
        raise TypeError(f"tactic: expected the name of a kernel configuration, got {type(tactic).__name__}")
    if tactic is not None and not tactic.isascii():
        raise ValueError(f"tactic: expected the name of a kernel configuration, got {tactic!r}")
    if type(split_k) is not int or split_k != 0:
        check_integer("split_k", split_k, minimum=0)
        if split_k > _MOST_SPLITS:
            raise ValueError(f"split_k: expected at most {_MOST_SPLITS}, got {split_k}")


def check_out(name: str, a: Tensor, out: Tensor, n: int, dtype: torch.dtype, where: str = "") -> None:
    """Raises unless `out` can hold a product of the activations `a`, called `name`, by `n` channels."""
    check_operand("out", out, (dtype,), a.device, name, where)
    if out.shape != (*a.shape[:-1], n):
        raise ValueError(f"out: expected shape {[*a.shape[:-1], n]}, got {shape_of(out)}")


def check_inference(**tensors: Tensor | None) -> None:
    """Raises RuntimeError if autograd would have to record the operation."""
    backward, forward = torch.is_grad_enabled(), torch.autograd.forward_ad._current_level >= 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if backward and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires grad, but qcutlass is for inference: call under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach()"
            )
        if forward and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError(f"{name} has a forward-mode tangent, but qcutlass is for inference: pass its primal")


def check_memory(tensors: Mapping[str, Tensor | None]) -> None:
    """Raises unless each tensor has elements in memory, at strides."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: expected a dense tensor, got layout {tensor.layout}: pass {name}.to_dense()")
        if tensor.numel() and tensor.data_ptr() == 0:
            raise ValueError(f"{name}: its {tensor.numel()} elements have no storage; was it freed?")


def check_device(name: str, value: Tensor) -> None:
    """Raises UnsupportedError unless `value` is on a device qcutlass runs on."""
    if value.device.type not in _ACTIVATIONS_ON:
        raise UnsupportedError(f"{name} is on {value.device}: qcutlass runs on cpu and cuda tensors")


def check_matrix(name: str, value: Tensor, dtypes: Sequence[torch.dtype], where: str = "") -> None:
    """Raises unless `value` is a matrix of one of `dtypes` on a device qcutlass runs on."""
    check_tensor(name, value, dtypes, where)
    check_device(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [N, K], got {shape_of(value)}")


def packed_shape(n: int, k: int, packing: _C.Packing) -> tuple[int, int, int, int]:
    """Shape of a packed `[n, k]` matrix."""
    return (ceil_div(n, TILE_N), ceil_div(k, _C.tile_k(packing)), *TILE)


_EIGHT_BIT: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of weights by what activations they will meet."""


def _packing(bits: int, activations: str) -> _C.Packing:
    check_integer("bits", bits, PACKINGS)
    if not isinstance(activations, str):
        raise TypeError(f"activations: expected '16bit', 'int8' or 'fp8', got {type(activations).__name__}")
    if activations == "16bit":
        return PACKINGS[bits]
    if activations not in _EIGHT_BIT:
        raise ValueError(f"activations: expected '16bit', 'int8' or 'fp8', got {activations!r}")
    if bits != 8:
        raise ValueError(f"bits: weights for {activations} activations have 8 bits, got {bits}")
    return _C.Packing.W8A8


def check_pack(codes: Tensor, bits: int, activations: str) -> _C.Packing:
    """Checks the arguments of `qcutlass.preprocess_weights`."""
    packing = _packing(bits, activations)
    check_matrix("codes", codes, (_EIGHT_BIT.get(activations, torch.uint8),), f" for activations={activations!r}")
    return packing


def check_unpack(w_packed: Tensor, bits: int, n: int, k: int) -> _C.Packing:
    """Checks the arguments of `qcutlass.unpack_weights`."""
    check_tensor("w_packed", w_packed, (torch.uint8, *_EIGHT_BIT.values()))
    check_device("w_packed", w_packed)
    meets = {dtype: activations for activations, dtype in _EIGHT_BIT.items()}
    packing = _packing(bits, meets.get(w_packed.dtype, "16bit"))
    check_integer("shape[0]", n, minimum=0)
    check_integer("shape[1]", k, minimum=0)
    expected = packed_shape(n, k, packing)
    if w_packed.shape != expected:
        raise ValueError(
            f"w_packed: {bits}-bit weights of shape {[n, k]} are packed as {list(expected)}, got {shape_of(w_packed)}"
        )
    _check_contiguous("w_packed", w_packed)
    return packing


def check_dequantize(call: DequantizeCall) -> tuple[WeightShape, torch.dtype, int]:
    """Checks the arguments of `qcutlass.dequantize`; returns the shape, the type of the result and its last row."""
    w_packed, scales, zeros, k, group_size, bits, dtype, begin, end = call
    check_tensor("w_packed", w_packed, (torch.uint8, torch.int8))
    check_device("w_packed", w_packed)
    check_integer("k", k, minimum=1)
    shape = check_weights(w_packed, scales, zeros, k, group_size, bits, w_packed.device, "w_packed")
    dtype = scales.dtype if dtype is None else dtype
    if dtype not in FLOATING:
        raise TypeError(f"dtype: expected one of {_names(FLOATING)}, got {dtype}")
    end = shape.n if end is None else end
    if not 0 <= begin <= end <= shape.n:
        raise ValueError(f"rows: expected 0 <= begin <= end <= N = {shape.n}, got ({begin}, {end})")
    return shape, dtype, end
