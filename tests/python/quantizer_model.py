"""A model of the quantisers to 8 bits, written in numpy from their documentation, and inputs for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import qcutlass
from qcutlass import testing

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LEAST_SCALE = np.float32(2.0**-126)

Options = dict[str, Any]
OPTIONS: list[Options] = [
    {},
    {"per_tensor": True},
    {"asymmetric": True},
    {"asymmetric": True, "per_tensor": True},
    {"scale": 0.0371},
    {"scale": 0.0371, "azp": -19},
    {"dtype": torch.float8_e4m3fn},
    {"dtype": torch.float8_e4m3fn, "per_tensor": True},
    {"dtype": torch.float8_e4m3fn, "scale": 0.011},
    {"dtype": torch.float8_e5m2},
    {"dtype": torch.float8_e5m2, "scale": 0.0003},
]


def option_id(options: Options) -> str:
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items()) or "default"


class Quantized(NamedTuple):
    codes: Tensor
    scale: Tensor
    azp: Tensor | None = None


def with_tensors(options: Options, device: torch.device | str) -> Options:
    """Keyword arguments of `qcutlass.quantize_activations`: scalars become tensors."""
    types = {"scale": torch.float32, "azp": torch.int32}
    given = {name: torch.tensor([options[name]], dtype=types[name], device=device) for name in types.keys() & options}
    return options | given


def quantize(a: Tensor, options: Options, smooth: Tensor | None = None) -> Quantized:
    return Quantized(*qcutlass.quantize_activations(a, smooth=smooth, **with_tensors(options, a.device)))


def values_of(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The finite non-negative values of an fp8 type by their codes, from the definition of the format."""
    mantissa_bits, bias, largest = (3, 7, 0x7E) if dtype == torch.float8_e4m3fn else (2, 15, 0x7B)
    code = np.arange(largest + 1)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits + (exponent > 0)
    return np.asarray(fraction * 2.0 ** (np.maximum(exponent, 1) - bias))


def round_to_float8(x: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Codes of the nearest values, even ones on ties, by search in float64; NaN: 0x7f."""
    values = values_of(dtype)
    magnitude = np.abs(x.astype(np.float64))
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    below = above - 1
    middle = (values[below] + values[above]) / 2
    goes_up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(goes_up, above, below) | np.where(np.signbit(x), 0x80, 0)
    return np.asarray(np.where(np.isnan(x), 0x7F, code).astype(np.uint8))


def reference(a: Tensor, options: Options, smooth: Tensor | None = None) -> Quantized:
    """The codes, scales and zero points of the documentation; numpy's fp32 arithmetic rounds each operation to even."""
    dtype, one = options.get("dtype", torch.int8), np.float32(1)
    with np.errstate(all="ignore"):
        x = a.detach().cpu().float().numpy().astype(np.float32)
        if smooth is not None:
            x = x / smooth.cpu().float().numpy()
        whole = options.get("per_tensor", False) or "scale" in options
        rows = x.reshape(1, -1) if whole else x.reshape(-1, x.shape[-1])
        asymmetric, azp = options.get("asymmetric", False), None
        if "scale" in options:
            scale = np.array([options["scale"]], dtype=np.float32)
            azp = np.array([options["azp"]]) if "azp" in options else None
        elif asymmetric:
            zero = np.zeros((len(rows), 1), dtype=np.float32)
            high, low = np.hstack([rows, zero]).max(1), np.hstack([rows, zero]).min(1)
            scale = np.where(high - low == 0, one, np.maximum((high - low) / np.float32(255), LEAST_SCALE))
            azp = np.where(np.isfinite(scale), -128 - np.rint(low / scale), 0)
        else:
            extent = np.abs(rows).max(1, initial=0)
            scale = np.where(extent == 0, one, np.maximum(extent / np.float32(LARGEST[dtype]), LEAST_SCALE))
        quotients = rows / scale[:, None]
        assert quotients.dtype == np.float32
        if dtype == torch.int8:
            shift = 0 if azp is None else azp[:, None]
            rounded = np.where(np.isnan(quotients), 0, np.rint(quotients)).astype(np.float64) + shift
            codes = rounded.clip(-127 if azp is None else -128, 127).astype(np.int8)
            if "scale" in options and np.isnan(quotients).any():
                scale = scale * np.float32(np.nan)
        else:
            codes = round_to_float8(quotients, dtype)
    ranges = (1,) if whole else a.shape[:-1]
    tensors = torch.from_numpy(codes.reshape(a.shape)).view(dtype), torch.from_numpy(scale.reshape(ranges).copy())
    return Quantized(*tensors, None if azp is None else torch.from_numpy(azp.astype(np.int32).reshape(ranges)))


def assert_same(actual: Quantized, expected: Quantized, label: object) -> None:
    """Equal bits, but for those of NaN."""
    for name, got, want in zip(Quantized._fields, actual, expected, strict=True):
        assert (got is None) == (want is None), f"{label}: {name}"
        if got is None or want is None:
            continue
        got, want = got.cpu(), want.cpu()
        assert got.dtype == want.dtype, f"{label}: {name} has {got.dtype}"
        if got.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            nans = got.float().isnan(), want.float().isnan()
            got, want = (t.view(torch.uint8).masked_fill(nan, 0x7F) for t, nan in zip((got, want), nans, strict=True))
        testing.assert_equal(got, want, label=f"{label}: {name}")


def activations(rows: int, k: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """Rows of many sizes, of which one is zero and one alternates between the type's extremes."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, k, generator=g) * torch.logspace(-4, 3, rows)[:, None]
    a[:, :: max(1, k // 3)] *= 8
    a[2 % rows] = 0
    a = a.to(dtype)
    if rows > 4:
        a[3] = torch.finfo(dtype).max
        a[3, ::2] = torch.finfo(dtype).min
        a[4] = torch.finfo(dtype).smallest_normal / 8 * torch.randint(-8, 9, (k,), generator=g).to(dtype)  # subnormal
    return a.to(device)


def smoothing(k: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    return (0.25 + 4 * torch.rand(k, generator=torch.Generator().manual_seed(seed))).to(device, dtype)
