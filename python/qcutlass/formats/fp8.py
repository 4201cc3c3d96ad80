"""fp8 weights: "fp8" (DeepSeek, Qwen3 in fp8, AutoFP8), modelopt's FP8 and float-quantized of compressed-tensors.

`weight` float8_e4m3fn `[N, K]` and the scales that it is multiplied by: `weight_scale`, or `weight_scale_inv`, which is
no inverse despite its name. One scale (`[]`, `[1]`, `[1, 1]`) or one a channel (`[N]`, `[N, 1]`) are for fp8
activations; their scale is computed token by token, or it is `input_scale` (`activation_scale`), one number. With
scales of blocks, `[ceil(N / rows), ceil(K / columns)]` with `weight_block_size` (128 x 128 where nothing says; modelopt
has them as `[ceil(N / 128), 1, ceil(K / 128), 1]`), and of groups, `[N, G]`, activations stay 16-bit: scales of blocks
become those of groups of as many columns. `in_blocks` makes blocks of them again, for fp8 activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import floats
from qcutlass.formats.config import Config
from qcutlass.formats.layers import CanonicalBlockwise, CanonicalFp8, CanonicalLinear, FloatLinear
from qcutlass.formats.tensors import FLOATS, PRE_QUANT_SCALE, LayerTensors
from qcutlass.products.block_operators import BLOCK_SIZES
from qcutlass.products.checks import E8M0, are_finite, ceil_div
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = (
    "weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale", PRE_QUANT_SCALE, "bias",
)  # fmt: skip
E4M3: Final = ("F8_E4M3",)
FLOAT8: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALES: Final = (*FLOATS, "F8_E8M0")
BLOCK: Final = (128, 128)
_ONE: Final = ((), (1,), (1, 1))


@dataclass(frozen=True)
class Description:
    """What a configuration says of fp8 layers.

    Attributes:
        where: for messages.
        block: rows and columns of blocks; None: it speaks of none.
        activations: "dynamic", "static", or "none" where weights alone are quantised; None: it does not say.
        group_size: columns that share a scale; None: it speaks of no groups.
    """

    where: str
    block: tuple[int, int] | None = None
    activations: str | None = None
    group_size: int | None = None

    @staticmethod
    def of(config: Config) -> Description:
        """From the configuration of "fp8" and modelopt folders."""
        activations = config.text("activation_scheme")
        if activations not in (None, "dynamic", "static"):
            raise UnsupportedError(
                f"{config.where}: activation_scheme {activations!r} is not read, dynamic and static are"
            )
        return Description(config.where, block_of(config, "weight_block_size"), activations)


def block_of(config: Config, key: str) -> tuple[int, int] | None:
    """Rows and columns of blocks under a key; None where it is absent or null."""
    value = config.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(x) is int and x > 0 for x in value):
        raise CheckpointError(f"{config.where}: {key}: expected [rows, columns] of a block, got {value!r:.60}")
    return value[0], value[1]


def matches(layer: LayerTensors) -> bool:
    """Whether there is a matrix of fp8."""
    info = layer.info("weight")
    return info.dtype in FLOAT8 and len(info.shape) == 2


def load(layer: LayerTensors) -> CanonicalFp8 | CanonicalLinear | FloatLinear:
    """See `qcutlass.formats.load`."""
    if layer.info("weight").dtype in FLOATS:
        return floats.load(layer)  # a layer that was left as it was, asked for by its name
    return load_described(layer, Description.of(layer.config))


def load_described(layer: LayerTensors, described: Description) -> CanonicalFp8 | CanonicalLinear:
    """A layer of float8 weights, of a folder that is so described."""
    kind = layer.info("weight").dtype
    if kind not in E4M3:
        raise UnsupportedError(
            f"{layer.full_name('weight')}: {kind} weights are not read, of float8 types only F8_E4M3"
        )
    n, k = layer.matrix("weight", E4M3)
    suffix = _one_of(layer, "weight_scale", "weight_scale_inv")
    if suffix is None:
        raise layer.error("weight", "expected weight_scale or weight_scale_inv beside fp8 weights; it is absent")
    size = _group_size(layer, suffix, n, k, described)
    bias = layer.bias(n)
    scales = layer.finite(suffix) if layer.info(suffix).dtype in FLOATS else _of_e8m0(layer, suffix)
    codes = layer.read("weight")
    if not are_finite(codes):
        raise layer.error("weight", "expected finite numbers, got NaN; download it again")
    if size is not None or described.activations == "none":
        rows, _ = described.block or BLOCK
        grouped = _of_groups(scales, n, rows)
        weight = QuantizedTensor(codes.view(torch.uint8), grouped, None, 8, size or k, "e4m3")
        return CanonicalLinear(weight, bias, None, layer.act_scale(PRE_QUANT_SCALE, k))
    layer.check_no_act_scale("fp8")
    channels = scales.float().reshape(-1).expand(n).contiguous()
    return CanonicalFp8(codes, channels, _input_scale(layer, described), bias)


def in_blocks(layer: CanonicalLinear, size_of_one: int = BLOCK[1]) -> CanonicalBlockwise | None:
    """The same weights for fp8 activations in blocks; None where they are not e4m3 with scales of square blocks.

    Layers of so few columns that they are one group have blocks of `size_of_one`.
    """
    weight, k = layer.weight, layer.shape[1]
    size = size_of_one if weight.group_size >= k and k <= size_of_one else weight.group_size
    is_plain = layer.perm is None and layer.act_scale is None and weight.global_scale is None
    if weight.weight_dtype != "e4m3" or not is_plain or size not in BLOCK_SIZES:
        return None
    blocks = scales_of_blocks(weight.scales, size)
    if blocks is None:
        return None
    return CanonicalBlockwise(weight.codes.view(torch.float8_e4m3fn), blocks, size, layer.bias)


def scales_of_blocks(scales: Tensor, size: int) -> Tensor | None:
    """float32 `[ceil(N / size), G]` of the scales `[G, N]` of groups; None where so many channels have others."""
    found = scales.float().T
    blocks = found[::size].contiguous()
    return blocks if torch.equal(blocks.repeat_interleave(size, 0)[: len(found)], found) else None


def _one_of(layer: LayerTensors, *suffixes: str) -> str | None:
    """The suffix that is there; None where none is."""
    found = [suffix for suffix in suffixes if suffix in layer]
    if len(found) > 1:
        raise layer.error(found[1], f"expected it or {found[0]}, got both")
    return found[0] if found else None


def _group_size(layer: LayerTensors, suffix: str, n: int, k: int, described: Description) -> int | None:
    """Columns of a block or group, None where a channel or more share one scale; the shape of the scales is checked."""
    shape = layer.info(suffix).shape
    expected: tuple[int, ...]
    if described.block is None and described.group_size is None and shape in (*_ONE, (n,), (n, 1)):
        layer.check(suffix, _SCALES, shape)
        return None
    if described.group_size is not None:
        size = min(described.group_size, k)
        expected, meaning = (n, ceil_div(k, size)), f"groups of {size} columns"
    else:
        rows, size = described.block or BLOCK
        expected, meaning = (ceil_div(n, rows), ceil_div(k, size)), f"blocks of {rows} x {size}"
        if len(shape) == 4:  # modelopt's FP8_PB_WO
            expected = (expected[0], 1, expected[1], 1)
    powers = ("U8",) if described.group_size is not None else ()  # mxfp8-quantized
    layer.check(suffix, (*_SCALES, *powers), expected, f"weights {[n, k]} in {meaning}, as {described.where} has it")
    return min(size, k)


def _of_e8m0(layer: LayerTensors, suffix: str) -> Tensor:
    """Powers of two, which bfloat16 holds."""
    stored = layer.read(suffix).view(torch.uint8)
    if bool((stored == 0xFF).any()):
        raise layer.error(suffix, "expected finite numbers, got NaN; download it again")
    if not E8M0:
        raise UnsupportedError(f"{layer.full_name(suffix)}: exponents for scales need torch 2.7 or newer; update it")
    return stored.view(E8M0[0]).to(torch.bfloat16)


def _of_groups(scales: Tensor, n: int, rows: int) -> Tensor:
    """`[G, N]`, of scales of blocks, channels or the whole matrix."""
    if scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    repeated = scales if len(scales) == n else scales.repeat_interleave(n if len(scales) == 1 else rows, dim=0)[:n]
    return repeated.T.contiguous()


def _input_scale(layer: LayerTensors, described: Description) -> Tensor | None:
    suffix = _one_of(layer, "input_scale", "activation_scale")
    if suffix is None:
        if described.activations == "static":
            static = f"as {described.where} says that activations are static"
            raise layer.error("weight", f"expected input_scale beside it, {static}; it is absent")
        return None
    return layer.one_scale(suffix)
