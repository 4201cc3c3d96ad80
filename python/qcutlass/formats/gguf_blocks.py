"""The blocks of GGUF files, decoded: bytes to codes, scales, and zeros or minimums.

Four kinds of blocks. 32 columns with a float16 scale d (and minimum m): Q4_0, Q5_0, Q8_0 are `d * (q - offset)`, Q4_1
and Q5_1 `d * q + m`. 256 columns in sub-blocks of 16 or 32, the K-quants, whose scales and minimums are small integers
times d and dmin: `d * sc * q - dmin * m`; both levels are kept. IQ4_NL, IQ4_XS, whose q are looked up in a table. And
floats of 4 bits, MXFP4 and NVFP4, whose scales are powers of two, or e4m3 numbers. Of the types in `DEQUANTIZED` the
gguf package makes numbers.
Products of a float16 number by such an integer are exact in float32; what is rounded is the weight, once, as the gguf
package rounds it.
The layouts are those of ggml-common.h in the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.products.checks import E8M0
from qcutlass.quantized import QuantizedTensor

_SHORT, _LONG = 32, 256  # columns of a block
_FOUR_GROUPS: Final = 64  # of 16 columns
_TABLE: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the codes of IQ4_NL and IQ4_XS stand for."""


class Blocks(NamedTuple):
    """A type of blocks.

    Attributes:
        columns: of a block.
        halves: where in a block its float16 numbers lie.
        decode: uint8 `[N, blocks of a row, bytes]` to the matrix.
        bytes: bytes of a block that are scales by themselves, where 255 is no number.
    """

    columns: int
    halves: tuple[int, ...]
    decode: Callable[[Tensor], QuantizedTensor]
    bytes: tuple[int, ...] = ()

    def is_finite(self, blocks: Tensor) -> bool:
        """Whether all scales and minimums are."""
        halves = all(bool(_halves(blocks, begin).isfinite().all()) for begin in self.halves)
        return halves and not any(bool((blocks[:, :, begin] == 0xFF).any()) for begin in self.bytes)


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number in bytes [begin, begin + 2) of every block, `[N, B, 1]`."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16)


def _planes(packed: Tensor, bits: int) -> Tensor:
    """Fields `[..., 8 / bits, bytes]` of `[..., bytes]`: first the lowest one of every byte, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    fields: Tensor = packed[..., None, :] >> shifts & 2**bits - 1
    return fields


def _runs(packed: Tensor, bits: int) -> Tensor:
    """Fields `[..., bytes * 8 / bits]` of `[..., bytes]`: first those of the first byte, the lowest before."""
    fields: Tensor = packed[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & 2**bits - 1
    return fields.flatten(-2)


def _chunked(packed: Tensor, size: int, bits: int) -> Tensor:
    """Fields of one block after the other `[N, B, columns]`; planes of `size` bytes at a time."""
    return _planes(packed.reshape(*packed.shape[:2], -1, size), bits).flatten(2)


def _matrix(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of blocks `[N, B, columns]`."""
    return codes.flatten(1).contiguous()


def _groups(values: Tensor) -> Tensor:
    """`[G, N]` of values `[N, B, sub-blocks]`."""
    return values.flatten(1).T.contiguous()


# Blocks of 32.


def _fifth_bits(blocks: Tensor, begin: int) -> Tensor:
    """The bits of value 16 of 32 codes, which lie in four bytes."""
    return _runs(blocks[:, :, begin : begin + 4], 1) << 4


def _q4_0(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, 2:], 16, 4)
    return QuantizedTensor(_matrix(codes), _groups(_halves(blocks, 0)), None, 4, _SHORT)


def _q4_1(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, 4:], 16, 4)
    minimums = -_groups(_halves(blocks, 2))
    return QuantizedTensor(_matrix(codes), _groups(_halves(blocks, 0)), None, 4, _SHORT, minimums=minimums)


def _q5_0(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, 6:], 16, 4) | _fifth_bits(blocks, 2)
    return QuantizedTensor(_matrix(codes + (128 - 16)), _groups(_halves(blocks, 0)), None, 8, _SHORT)


def _q5_1(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, 8:], 16, 4) | _fifth_bits(blocks, 4)
    minimums = -_groups(_halves(blocks, 2))
    return QuantizedTensor(_matrix(codes), _groups(_halves(blocks, 0)), None, 8, _SHORT, minimums=minimums)


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    codes = blocks[:, :, 2:] ^ 0x80  # q + 128
    return QuantizedTensor(_matrix(codes), _groups(_halves(blocks, 0)), None, 8, _SHORT)


def _looked_up(indices: Tensor) -> Tensor:
    """The numbers of the table, plus 128."""
    return (torch.tensor(_TABLE) + 128).to(torch.uint8)[indices.int()]


def _iq4_nl(blocks: Tensor) -> QuantizedTensor:
    codes = _looked_up(_chunked(blocks[:, :, 2:], 16, 4))
    return QuantizedTensor(_matrix(codes), _groups(_halves(blocks, 0)), None, 8, _SHORT)


def _mxfp4(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, 1:], 16, 4)
    return QuantizedTensor(_matrix(codes), _groups(blocks[:, :, :1]).view(E8M0[0]), None, 4, _SHORT, "e2m1")


def _nvfp4(blocks: Tensor) -> QuantizedTensor:
    """Blocks of 64. The sign of scales is left out, and one of 127, which would be NaN, is 0."""
    scales = blocks[:, :, :4] & 0x7F
    scales = torch.where(scales == 0x7F, 0, scales)
    codes = _chunked(blocks[:, :, 4:], 8, 4)
    return QuantizedTensor(_matrix(codes), _groups(scales).view(torch.float8_e4m3fn), None, 4, 16, "e2m1")


# Blocks of 256.


class _Scales(NamedTuple):
    """Scales, or minimums, of two levels: of sub-blocks, `[G, N]`, and of blocks, `[B, N]`."""

    integers: Tensor
    halves: Tensor


def _scaled(blocks: Tensor, begin: int, integers: Tensor) -> _Scales:
    """The integers `[N, B, sub-blocks]` and the half in every block that they are times."""
    return _Scales(_groups(integers), _groups(_halves(blocks, begin)))


def _of_sub_blocks(
    codes: Tensor, bits: int, size: int, scales: _Scales, minimums: _Scales | None = None
) -> QuantizedTensor:
    """The matrix of codes `[N, B, 256]` in sub-blocks of `size` columns."""
    matrix = QuantizedTensor(_matrix(codes), scales.integers, None, bits, size, super_scales=scales.halves)
    if minimums is None:
        return matrix
    return replace(matrix, minimums=minimums.integers, super_minimums=minimums.halves)


def _less_32(integers: Tensor) -> Tensor:
    """int8 of six bits, uint8, that stand for numbers from -32."""
    return (integers.short() - 32).to(torch.int8)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums of Q4_K and Q5_K, `[N, B, 8]` each, of 12 bytes.

    Of the first four sub-blocks they lie in the low six bits of bytes 0 to 3 and 4 to 7; of the others their low four
    bits in bytes 8 to 11, scales in the low halves, their high two bits on top of bytes 0 to 3 and 4 to 7.
    """
    first, second, third = packed.reshape(*packed.shape[:2], 3, 4).unbind(2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=2)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=2)
    return scales, minimums


def _q2_k(blocks: Tensor) -> QuantizedTensor:
    integers, codes = _planes(blocks[:, :, :16], 4), _chunked(blocks[:, :, 16:80], 32, 2)
    scales, minimums = _scaled(blocks, 80, integers[:, :, 0]), _scaled(blocks, 82, integers[:, :, 1])
    return _of_sub_blocks(codes, 4, 16, scales, minimums)


def _q3_k(blocks: Tensor) -> QuantizedTensor:
    high, low, packed = blocks[:, :, :32], blocks[:, :, 32:96], blocks[:, :, 96:108]
    codes = _chunked(low, 32, 2) + (_chunked(high, 32, 1) << 2) + (8 - 4)  # less 4 where the high bit is not set
    integers = _planes(packed[:, :, :8], 4).flatten(2) | _planes(packed[:, :, 8:], 2).flatten(2) << 4
    return _of_sub_blocks(codes, 4, 16, _scaled(blocks, 108, _less_32(integers)))


def _q4_k(blocks: Tensor) -> QuantizedTensor:
    scales, minimums = _six_bit_pairs(blocks[:, :, 4:16])
    codes = _chunked(blocks[:, :, 16:], 32, 4)
    return _of_sub_blocks(codes, 4, 32, _scaled(blocks, 0, scales), _scaled(blocks, 2, minimums))


def _q5_k(blocks: Tensor) -> QuantizedTensor:
    scales, minimums = _six_bit_pairs(blocks[:, :, 4:16])
    codes = _chunked(blocks[:, :, 48:], 32, 4) | _chunked(blocks[:, :, 16:48], 32, 1) << 4
    return _of_sub_blocks(codes, 8, 32, _scaled(blocks, 0, scales), _scaled(blocks, 2, minimums))


def _q6_k(blocks: Tensor) -> QuantizedTensor:
    codes = _chunked(blocks[:, :, :128], 64, 4) | _chunked(blocks[:, :, 128:192], 32, 2) << 4
    scales = _scaled(blocks, 208, blocks[:, :, 192:208].contiguous().view(torch.int8))
    return _of_sub_blocks(codes + (128 - 32), 8, 16, scales)


def _iq4_xs(blocks: Tensor) -> QuantizedTensor:
    integers = _runs(blocks[:, :, 4:8], 4) | _runs(blocks[:, :, 2:4], 2) << 4
    codes = _looked_up(_chunked(blocks[:, :, 8:], 16, 4))
    return _of_sub_blocks(codes, 8, 32, _scaled(blocks, 0, _less_32(integers)))


QUANTIZED: Final = {
    "IQ4_NL": Blocks(_SHORT, (0,), _iq4_nl),
    "IQ4_XS": Blocks(_LONG, (0,), _iq4_xs),
    **({"MXFP4": Blocks(_SHORT, (), _mxfp4, (0,))} if E8M0 else {}),
    "NVFP4": Blocks(_FOUR_GROUPS, (), _nvfp4, (0, 1, 2, 3)),
    "Q2_K": Blocks(_LONG, (80, 82), _q2_k),
    "Q3_K": Blocks(_LONG, (108,), _q3_k),
    "Q4_0": Blocks(_SHORT, (0,), _q4_0),
    "Q4_1": Blocks(_SHORT, (0, 2), _q4_1),
    "Q4_K": Blocks(_LONG, (0, 2), _q4_k),
    "Q5_0": Blocks(_SHORT, (0,), _q5_0),
    "Q5_1": Blocks(_SHORT, (0, 2), _q5_1),
    "Q5_K": Blocks(_LONG, (0, 2), _q5_k),
    "Q6_K": Blocks(_LONG, (208,), _q6_k),
    "Q8_0": Blocks(_SHORT, (0,), _q8_0),
}
"""The types of blocks that are read as they are. MXFP4 is among them from torch 2.7 on, which has powers of two."""

FLOAT_CODES: Final = ("MXFP4", "NVFP4")
"""Those whose codes are floats, in which no embeddings are looked up."""

DEQUANTIZED: Final = (
    "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0",
)  # fmt: skip
"""The types of blocks of which the gguf package makes numbers, and that no product multiplies as they are."""


def dequantized(rows: Tensor, kind: str) -> Tensor:
    """float32 `[N, K]` of uint8 `[N, bytes]` of a type in `DEQUANTIZED`."""
    from gguf import GGMLQuantizationType, quants

    numbers = quants.dequantize(rows.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(numbers)
