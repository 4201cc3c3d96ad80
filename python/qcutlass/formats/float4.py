"""Weights of 4-bit floats, e2m1: those of compressed-tensors (NVFP4, MXFP4), ModelOpt's NVFP4, and gpt-oss's MXFP4.

Two codes a byte, the first one in the low four bits: uint8 `[N, K / 2]`. NVFP4 has float8_e4m3fn scales `[N, K / 16]`
and a float32 number for the whole tensor, by which ModelOpt (`weight_scale_2`) multiplies and compressed-tensors
(`weight_global_scale`) divides; MXFP4 has exponents uint8 `[N, K / 32]`: scales of 2**(exponent - 127). gpt-oss calls
its codes `blocks`, uint8 `[N, K / 32, 16]`, and the exponents `scales`; `stacked` makes layers of its experts.

Activations stay as they are: what a file says of quantising them (`input_scale`, `input_global_scale`) is not read.
`pre_quant_scale` of ModelOpt's NVFP4_AWQ, floating `[K]`, is: they are multiplied by it.
`store_packed` writes the files of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FROM_FLOATS, PRE_QUANT_SCALE, LayerTensors
from qcutlass.products.checks import E8M0, short
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = ("weight", "weight_scale", "weight_scale_2", PRE_QUANT_SCALE, "input_scale", "bias")
_BYTES: Final = ("U8",)
_POWERS: Final = ("U8", "F8_E8M0")
_SCALES: Final = ("F8_E4M3",)
_NUMBER: Final = ("F32",)
_GROUPS: Final = {torch.float8_e4m3fn: 16, **dict.fromkeys(E8M0, 32)}
"""Columns that share a scale of these types."""

BLOCK_SUFFIXES: Final = ("blocks", "scales", "bias")


def are_blocks(layer: LayerTensors) -> bool:
    """Whether the weights are blocks of 16 bytes, as gpt-oss has them."""
    info = layer.info("blocks")
    return info.dtype in _BYTES and len(info.shape) == 3 and info.shape[2] == 16


def load_blocks(layer: LayerTensors) -> CanonicalLinear:
    """Those of gpt-oss; see `qcutlass.formats.load`."""
    if not are_blocks(layer):
        info = layer.info("blocks")
        raise layer.error("blocks", f"expected U8 [N, K / 32, 16], got {info.dtype} {list(info.shape)}")
    n, groups, _ = layer.info("blocks").shape
    if not n or not groups:
        raise layer.error("blocks", f"expected at least one block, got {[n, groups, 16]}")
    scales = _powers(layer, "blocks", "scales", n, groups)
    codes = _nibbles(layer.read("blocks").flatten(1))
    return CanonicalLinear(QuantizedTensor(codes, scales, None, 4, 32, "e2m1"), layer.bias(n))


def matches(layer: LayerTensors) -> bool:
    """Whether the weights are ModelOpt's NVFP4."""
    types = {"weight": _BYTES, "weight_scale": _SCALES}
    return all(suffix in layer and layer.info(suffix).dtype in dtypes for suffix, dtypes in types.items())


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    n, k = _shape(layer, "weight")
    scales, act_scale = _small_scales(layer, n, k), layer.act_scale(PRE_QUANT_SCALE, k)
    weight = QuantizedTensor(_codes(layer, "weight"), scales, None, 4, 16, "e2m1", _number(layer, "weight_scale_2"))
    return CanonicalLinear(weight, layer.bias(n), None, act_scale)


def load_packed(layer: LayerTensors) -> CanonicalLinear:
    """Those of compressed-tensors, from `weight_packed`."""
    n, k = _shape(layer, "weight_packed")
    if "weight_global_scale" not in layer:
        return CanonicalLinear(_mxfp4(layer, n, k), layer.bias(n))
    scales, divisor = _small_scales(layer, n, k), _number(layer, "weight_global_scale")
    codes, factor = _codes(layer, "weight_packed"), reciprocal(divisor, scales)
    if factor is None:
        return CanonicalLinear(QuantizedTensor(codes, scales.float() / divisor, None, 4, 16, "e2m1"), layer.bias(n))
    return CanonicalLinear(QuantizedTensor(codes, scales, None, 4, 16, "e2m1", factor), layer.bias(n))


def store_packed(weight: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of compressed-tensors' NVFP4 or MXFP4, which `load_packed` reads back without loss.

    Raises:
        UnsupportedError: scales or groups of neither; a global scale that is the reciprocal of no float32 number.
    """
    size = _GROUPS.get(weight.scales.dtype)
    if size is None:
        raise UnsupportedError(
            f"expected e2m1 codes with scales of float8_e4m3fn (NVFP4) or float8_e8m0fnu (MXFP4), got "
            f"{short(weight.scales.dtype)}; {FROM_FLOATS} --format nvfp4"
        )
    if weight.group_size != size or weight.shape[1] % size:
        name = "mxfp4" if size == 32 else "nvfp4"
        raise UnsupportedError(
            f"expected whole groups of {size} columns beside scales of {short(weight.scales.dtype)}, got groups of "
            f"{weight.group_size} and K = {weight.shape[1]}; {FROM_FLOATS} --format {name}"
        )
    codes, scales = weight.codes, weight.scales.view(torch.uint8).T.contiguous()
    tensors = {"weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4), "weight_scale": scales}
    if size == 32:
        return tensors
    factor = torch.ones(1, dtype=torch.float32) if weight.global_scale is None else weight.global_scale
    found = scales.view(torch.float8_e4m3fn)
    return {**tensors, "weight_scale": found, "weight_global_scale": _divisor(factor, found)}


def _divisor(factor: Tensor, scales: Tensor) -> Tensor:
    """float32 `[1]` of which `reciprocal` makes `factor` again."""
    for number in _near(1 / factor, 4):
        found = reciprocal(number, scales) if bool(number.isfinite() & (number > 0)) else None
        if found is not None and torch.equal(found, factor):
            return number
    raise UnsupportedError(
        f"global_scale: expected the reciprocal of a float32 number, by which compressed-tensors divides, got "
        f"{float(factor):.9g}, which is none; {FROM_FLOATS} --format nvfp4"
    )


def _near(number: Tensor, steps: int) -> Iterator[Tensor]:
    """A number, and those that so many steps of float32 lead to, the nearest first."""
    yield number
    below = above = number
    for _ in range(steps):
        below, above = below.nextafter(torch.zeros_like(below)), above.nextafter(torch.full_like(above, torch.inf))
        yield from (below, above)


def reciprocal(divisor: Tensor, scales: Tensor) -> Tensor | None:
    """A number float32 `[1]` that scales may be multiplied by, rather than divided by `divisor`.

    With it every weight of 16 bits is the same to the bit; None where there is no such number.
    """
    used = torch.unique(scales.view(torch.uint8)).view(torch.float8_e4m3fn).float()
    numbers = torch.tensor([1.0, 3.0], dtype=torch.float32)[:, None]  # times powers of two: all of e2m1
    right = numbers * (used / divisor)
    for factor in _near(1 / divisor, 1):
        found = numbers * (used * factor)
        if all(torch.equal(found.to(dtype), right.to(dtype)) for dtype in (torch.float16, torch.bfloat16)):
            return factor
    return None


def _mxfp4(layer: LayerTensors, n: int, k: int) -> QuantizedTensor:
    if k % 32:
        raise layer.error("weight_packed", f"expected whole groups of 32 columns, got K = {k}")
    scales = _powers(layer, "weight_packed", "weight_scale", n, k // 32)
    return QuantizedTensor(_codes(layer, "weight_packed"), scales, None, 4, 32, "e2m1")


def _powers(layer: LayerTensors, codes: str, suffix: str, n: int, groups: int) -> Tensor:
    """float8_e8m0fnu `[G, N]`."""
    if not E8M0:
        raise UnsupportedError(f"{layer.full_name(codes)}: scales of MXFP4 need torch 2.7 or newer; update it")
    layer.check(suffix, _POWERS, (n, groups))
    exponents = layer.read(suffix).view(torch.uint8)
    if bool((exponents == 0xFF).any()):
        raise layer.error(suffix, "expected powers of two, got NaN; download it again")
    return exponents.T.contiguous().view(E8M0[0])


def _shape(layer: LayerTensors, suffix: str) -> tuple[int, int]:
    """(N, K)."""
    n, width = layer.matrix(suffix, _BYTES)
    said = layer.config.text("type") if layer.config else None
    if said not in (None, "float"):
        raise UnsupportedError(f"{layer.full_name(suffix)}: bytes of {said} weights are not read; {FROM_FLOATS}")
    return n, 2 * width


def _codes(layer: LayerTensors, suffix: str) -> Tensor:
    return _nibbles(layer.read(suffix))


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _small_scales(layer: LayerTensors, n: int, k: int) -> Tensor:
    """float8_e4m3fn `[G, N]` of groups of 16."""
    if k % 16:
        raise layer.error("weight_scale", f"expected whole groups of 16 columns, got K = {k}")
    layer.check("weight_scale", _SCALES, (n, k // 16))
    stored = layer.read("weight_scale")
    if bool(stored.float().isnan().any()):
        raise layer.error("weight_scale", "expected finite numbers, got NaN; download it again")
    return stored.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)


def _number(layer: LayerTensors, suffix: str) -> Tensor:
    """float32 `[1]`, positive."""
    layer.check(suffix, _NUMBER, () if layer.info(suffix).shape == () else (1,))
    number = layer.finite(suffix).reshape(1)
    if float(number) <= 0:
        raise layer.error(suffix, f"expected a positive number, got {float(number)}")
    return number
