"""Rules for the arguments of all operators, checked once for eager calls, operators and their fake versions.

Only shapes, types and devices are looked at, so that everything but `check_memory` works on fake and meta tensors too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.errors import UnsupportedError

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32)
E8M0: Final[tuple[torch.dtype, ...]] = (
    (torch.float8_e8m0fnu,) if hasattr(torch, "float8_e8m0fnu") else ()  # torch has it since 2.7
)
DEVICES: Final = ("cpu", "meta", "cuda")
_INDICES: Final = (torch.int64, torch.int32, torch.bool)
_MOST_SPLITS: Final = 2**16  # blocks that a grid has in this direction

ACTIVATIONS: Final[dict[str | None, _C.Activation]] = {
    None: _C.Activation.NONE,
    "relu": _C.Activation.RELU,
    "gelu": _C.Activation.GELU,
    "gelu_tanh": _C.Activation.GELU_TANH,
    "silu": _C.Activation.SILU,
}

ACTIVATION_OF_GATE: Final[dict[str, _C.Activation]] = {
    "silu_mul": _C.Activation.SILU,
    "gelu_tanh_mul": _C.Activation.GELU_TANH,
}
"""The activation whose result multiplies the other half of the channels, in gated MLPs."""


class Arguments(Protocol):
    """Those of a call, in a NamedTuple."""

    def _asdict(self) -> dict[str, Any]: ...


def tensors_of(call: Arguments) -> dict[str, Tensor]:
    """The tensors among the arguments of a call, by name; those of arguments that are NamedTuples among them."""
    found: dict[str, Tensor] = {}
    for name, value in call._asdict().items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            inner: Any = value
            found |= {f"{name}_{part}": tensor for part, tensor in tensors_of(inner).items()}
    return found


def are_finite(tensor: Tensor) -> bool:
    """Whether floating numbers, those of float8_e4m3fn included, hold neither NaN nor infinity."""
    if tensor.dtype == torch.float8_e4m3fn:  # torch.isfinite does not take it; its NaN are the codes of all ones
        return bool(((tensor.view(torch.uint8) & 0x7F) != 0x7F).all())
    return bool(tensor.isfinite().all())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def short(dtype: torch.dtype) -> str:
    """The name of a type without its package."""
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _refuse_type(name: str, value: object, dtypes: Sequence[torch.dtype], where: str) -> NoReturn:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    raise TypeError(f"{name}: expected a tensor of {names_of(dtypes)}{where}, got {names_of([value.dtype])}")


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


def check_dtype(name: str, value: object, allowed: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless `value` is one of the types `allowed`."""
    if not isinstance(value, torch.dtype) or value not in allowed:
        raise TypeError(f"{name}: expected one of {names_of(allowed)}, got {value}")


def check_vector(name: str, value: Tensor, length: int, letter: str) -> None:
    if value.shape != (length,):
        raise ValueError(f"{name}: expected shape [{letter}] = [{length}], got {shape_of(value)}")


def check_group_size(value: object) -> None:
    """Raises TypeError or ValueError unless it is a number of columns, or None or -1: one group a channel."""
    if value is None:
        return
    check_integer("group_size", value)
    if isinstance(value, int) and value < 1 and value != -1:
        raise ValueError(f"group_size: expected at least 1, or -1 (or None) for one group a channel, got {value}")


def check_integer(name: str, value: object, allowed: Container[int] | None = None, minimum: int | None = None) -> None:
    """Raises TypeError unless `value` is an integer (or a symbolic one), ValueError unless it is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if allowed is not None and value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, _listed(allowed)))}, got {value}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a number (or a symbolic one)."""
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def check_share(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number in [0, 1], got {type(value).__name__}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value}")


def check_shares(name: str, values: object) -> None:
    """Raises TypeError or ValueError unless `values` is a list or another sequence of numbers in [0, 1]."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: expected a list of numbers in [0, 1], got {type(values).__name__}")
    for index, value in enumerate(values):
        check_share(f"{name}[{index}]", value)


def check_seed(name: str, value: int) -> None:
    """Raises TypeError or ValueError unless torch's generators take this seed."""
    check_integer(name, value)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name}: expected an integer of 64 bits, less than 2**64, got {value}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def check_iterable(name: str, value: object, meaning: str) -> None:
    """Raises TypeError unless `value` can be gone through; a text, or a single tensor, is none of several."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Tensor)):
        raise TypeError(f"{name}: expected several {meaning}, got {type(value).__name__}")


def check_callable(name: str, value: object) -> None:
    """Raises TypeError unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function or None, got {type(value).__name__}")


def check_pair(name: str, value: object, meaning: str) -> tuple[int, int]:
    """The two integers of `value`; raises TypeError unless it has these."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name}: expected a pair of ints {meaning}, got {value!r}")
    for index, element in enumerate(value):
        check_integer(f"{name}[{index}]", element)
    return value[0], value[1]


def _listed(allowed: Container[int]) -> list[int]:
    return [value for value in range(257) if value in allowed]


def as_device(name: str, value: object) -> torch.device:
    """The device that an argument is: one of torch's, its name, or the number of a GPU.

    Raises:
        TypeError: it is none of these.
        ValueError: torch knows no device of this name.
        UnsupportedError: qcutlass does not run on such devices.
    """
    known = "expected 'cpu', 'cuda', or 'cuda:N' for GPU number N"
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"{name}: {known}, or a torch.device, got {type(value).__name__}")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {known}, got {value!r:.80}") from error
    if value not in (device, device.index, str(device)):  # torch takes numbers modulo 256
        raise ValueError(f"{name}: {known}, got {value!r:.80}")
    if device.type not in DEVICES:
        raise UnsupportedError(f"{name}: qcutlass runs on cpu and cuda, got {device}")
    return device


def as_device_here(name: str, value: object) -> torch.device:
    """As `as_device`; UnsupportedError where tensors with values cannot be: no such GPU, or the meta device."""
    device = as_device(name, value)
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= count):
        seen = f"torch sees {count} CUDA devices" if device.type == "cuda" else "its tensors have no values"
        raise UnsupportedError(f"{name}: {seen}, got {device}; pass 'cpu'" + (", or another GPU" if count else ""))
    return device


def check_index(name: str, value: object, length: int) -> None:
    """Raises TypeError or ValueError unless `value` picks some of `length` channels: a slice, or a vector of integers.

    Integers count from the end where they are negative, as torch has it; a vector of booleans, `[length]`, tells which.
    """
    if isinstance(value, slice):
        if span_of(name, value, length).step < 1:
            raise ValueError(f"{name}: expected a step of at least 1, got {value}")
        return
    check_tensor(name, value, _INDICES)
    assert isinstance(value, Tensor)
    if value.dim() != 1 or (value.dtype == torch.bool and len(value) != length):
        expected = f"[{length}] of booleans" if value.dtype == torch.bool else "[count]"
        raise ValueError(f"{name}: expected shape {expected}, got {shape_of(value)}")
    if value.dtype == torch.bool or value.is_meta or not len(value):
        return
    low, high = (int(end) for end in value.aminmax())
    if low < -length or high >= length:
        raise ValueError(f"{name}: expected numbers of {length} channels, got {low} to {high}")


def span_of(name: str, part: slice, length: int) -> range:
    """The numbers of `length` ones that a slice picks; raises TypeError or ValueError where it is none of integers."""
    if not isinstance(part, slice):
        raise TypeError(f"{name}: expected a slice, got {type(part).__name__}")
    try:
        return range(*part.indices(length))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected a slice of integers with a step, got {part}") from None


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


def check_options(
    activation: object, tactic: object, split_k: int, batch_invariant: object = False, takes_gates: bool = False
) -> None:
    """Checks what every product takes besides tensors."""
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected True or False, got {type(batch_invariant).__name__}")
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation: expected a name or None, got {type(activation).__name__}")
    allowed = (*ACTIVATIONS, *(ACTIVATION_OF_GATE if takes_gates else ()))
    if activation not in allowed:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, allowed))}, got {activation!r}")
    if tactic is not None and not isinstance(tactic, str):
        raise TypeError(f"tactic: expected the name of a kernel configuration, got {type(tactic).__name__}")
    if tactic is not None and not tactic.isascii():
        raise ValueError(f"tactic: expected the name of a kernel configuration, got {tactic!r}")
    if type(split_k) is not int or split_k != 0:
        check_integer("split_k", split_k, minimum=0)
        if split_k > _MOST_SPLITS:
            raise ValueError(f"split_k: expected at most {_MOST_SPLITS}, got {split_k}")


def check_out(
    name: str, a: Tensor, out: Tensor, n: int, dtype: torch.dtype, where: str = "", rows: int | None = None
) -> None:
    """Raises unless `out` can hold a product of the activations `a`, called `name`, by `n` channels.

    `rows`: those of the output, where they are not those of `a`.
    """
    check_operand("out", out, (dtype,), a.device, name, where)
    expected = (*(a.shape[:-1] if rows is None else (rows,)), n)
    if out.shape != expected:
        raise ValueError(f"out: expected shape {list(expected)}, got {shape_of(out)}")


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


def check_strided(name: str, value: Tensor) -> None:
    """Raises ValueError where a tensor's elements do not lie at strides: it is sparse, say."""
    if value.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {value.layout}: pass {name}.to_dense()")


def check_memory(tensors: Mapping[str, Tensor | None]) -> None:
    """Raises unless each tensor has elements in memory, at strides."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_strided(name, tensor)
        if tensor.numel() and tensor.data_ptr() == 0:
            raise ValueError(f"{name}: its {tensor.numel()} elements have no storage; was it freed?")


def check_values(name: str, value: Tensor) -> None:
    """Raises ValueError unless a tensor has values, at strides."""
    check_strided(name, value)
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load them first")


def check_finite(name: str, value: Tensor) -> None:
    """As `check_values`; ValueError where there is NaN or infinity among the values, too."""
    check_values(name, value)
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name}: expected finite values, got NaN or infinity")


def check_dense(tensors: Mapping[str, Tensor | None]) -> None:
    """Raises UnsupportedError where a tensor is nested; jagged ones would get past other checks."""
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.is_nested:
            raise UnsupportedError(
                f"{name}: expected a dense tensor, got a nested one: pass {name}.to_padded_tensor(0.0), or its parts "
                f"({name}.unbind()) one after the other"
            )


def check_device(name: str, value: Tensor) -> None:
    """Raises UnsupportedError unless `value` is on a device qcutlass runs on, and in one piece."""
    if value.device.type not in DEVICES:
        raise UnsupportedError(f"{name} is on {value.device}: qcutlass runs on cpu and cuda tensors")
    if value.is_nested:
        check_dense({name: value})


def check_matrix(name: str, value: Tensor, dtypes: Sequence[torch.dtype], where: str = "") -> None:
    """Raises unless `value` is a matrix of one of `dtypes` on a device qcutlass runs on."""
    check_tensor(name, value, dtypes, where)
    check_device(name, value)
    check_strided(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [N, K], got {shape_of(value)}")


def check_tokens(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is a vector of tokens' numbers, with values."""
    check_tensor(name, value, (torch.int64,))
    assert isinstance(value, Tensor)
    check_values(name, value)
    if value.dim() != 1:
        raise ValueError(f"{name}: expected shape [tokens], got {shape_of(value)}")


def check_channels(name: str, value: Tensor, k: int) -> None:
    """Raises unless `value` is a finite floating vector `[K]`."""
    check_tensor(name, value, FLOATING)
    if value.shape != (k,):
        raise ValueError(f"{name}: expected shape [K] = [{k}], got {shape_of(value)}")
    check_finite(name, value)
