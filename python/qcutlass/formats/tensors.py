"""The tensors of one layer: checked against their header before they are read, and taken apart field by field."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.config import Config
from qcutlass.formats.source import FLOATS as FLOATS
from qcutlass.formats.source import TensorInfo, TensorSource
from qcutlass.products.checks import ceil_div
from qcutlass.quantized import QuantizedTensor

INT32: Final = ("I32",)
SHORT: Final = (torch.float16, torch.bfloat16)
"""Types of 16 bits, the more exact one first."""
_BITS: Final = (4, 8)
PRE_QUANT_SCALE: Final = "pre_quant_scale"
"""Suffix of ModelOpt's factors of a layer's activations."""
FROM_FLOATS: Final = "quantise the model's float original instead: qcutlass quantize"
"""What to do about a model in a format that is not read."""
REQUANTIZE: Final = (
    "qcutlass convert --requantize (requantize=True) rounds them anew, with loss; qcutlass quantize --calibration TEXT "
    "loses less"
)
"""What to do about weights that are read, but that no product multiplies as they are."""


class LayerTensors:
    """The tensors that a source holds under one name.

    Args:
        source: of the tensors.
        name: of the layer; its tensors are `name.suffix`.
        config: what the checkpoint says of its quantisation.
    """

    def __init__(self, source: TensorSource, name: str, config: Config) -> None:
        self._source, self.name, self._config = source, name, config

    @cached_property
    def config(self) -> Config:
        """What the checkpoint says of this layer's quantisation."""
        return self._config.of_layer(self.name)

    def with_config(self, config: Config) -> LayerTensors:
        """The same tensors, described by something else."""
        return LayerTensors(self._source, self.name, config)

    def full_name(self, suffix: str) -> str:
        return f"{self.name}.{suffix}" if self.name else suffix

    def __contains__(self, suffix: str) -> bool:
        return self.full_name(suffix) in self._source.tensors

    def info(self, suffix: str) -> TensorInfo:
        """Type and shape; CheckpointError if it is absent."""
        info = self._source.tensors.get(self.full_name(suffix))
        if info is None:
            tensors = self._source.tensors
            present = [name for name in tensors if name.rpartition(".")[0] == self.name]
            where = tensors[present[0]].file if present else "checkpoint"
            raise CheckpointError(f"{where}: {self.name}: expected a tensor {suffix}, got {', '.join(present[:12])}")
        return info

    def error(self, suffix: str, message: str) -> CheckpointError:
        """An error that names file and tensor."""
        info = self._source.tensors.get(self.full_name(suffix))
        return CheckpointError(f"{info.file if info else 'checkpoint'}: {self.full_name(suffix)}: {message}")

    def matrix(self, suffix: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """The shape of a matrix with at least one element; CheckpointError if it is something else."""
        info = self.info(suffix)
        if info.dtype not in dtypes or len(info.shape) != 2 or min(info.shape) < 1:
            got = f"{info.dtype} {list(info.shape)}"
            raise self.error(suffix, f"expected a matrix of {' or '.join(dtypes)} with at least one element, got {got}")
        return info.shape[0], info.shape[1]

    def check(self, suffix: str, dtypes: Sequence[str], shape: Sequence[int], why: str = "") -> None:
        """Raises CheckpointError unless the tensor has one of `dtypes` and this shape."""
        info = self.info(suffix)
        if info.dtype not in dtypes or info.shape != tuple(shape):
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            raise self.error(suffix, f"expected {expected}, got {info.dtype} {list(info.shape)}{why and f'; {why}'}")

    def read(self, suffix: str) -> Tensor:
        """A tensor whose shape has been checked."""
        tensor, info = self._source.read(self.full_name(suffix)), self.info(suffix)
        if tensor.dtype != torch.uint8 and tuple(tensor.shape) != info.shape:
            raise self.error(suffix, f"the file changed: expected {list(info.shape)}, got {list(tensor.shape)}")
        return tensor

    def finite(self, suffix: str) -> Tensor:
        """A floating tensor without NaN and infinity."""
        tensor = self.read(suffix)
        if not bool(tensor.isfinite().all()):
            where = (~tensor.isfinite()).nonzero()[0].tolist()
            raise self.error(suffix, f"expected finite numbers, got NaN or infinity at {where}; download it again")
        return tensor

    def number(self, suffix: str) -> int | None:
        """The one element of an integer tensor; None if it is absent."""
        if suffix not in self:
            return None
        info = self.info(suffix)
        if info.dtype not in ("U8", "I32", "I64") or info.shape not in ((), (1,)):
            raise self.error(suffix, f"expected one integer, got {info.dtype} {list(info.shape)}")
        return int(self.read(suffix).item())

    def one_scale(self, suffix: str) -> Tensor:
        """A scale of everything, one number above 0, as float32 `[1]`."""
        shape = self.info(suffix).shape
        self.check(suffix, FLOATS, shape if shape in ((), (1, 1)) else (1,))
        scale = self.finite(suffix).reshape(1).float()
        if float(scale) <= 0:
            raise self.error(suffix, f"expected a scale above 0, got {float(scale):g}")
        return scale

    def bias(self, n: int) -> Tensor | None:
        """The tensor `bias` `[N]`; None if it is absent."""
        if "bias" not in self:
            return None
        self.check("bias", FLOATS, (n,))
        return self.finite("bias")

    def act_scale(self, suffix: str, k: int) -> Tensor | None:
        """The factors of the activations, floating `[K]`; None if they are absent."""
        if suffix not in self:
            return None
        self.check(suffix, FLOATS, (1, k) if len(self.info(suffix).shape) == 2 else (k,))
        return self.finite(suffix).reshape(k)

    def check_no_act_scale(self, activations: str) -> None:
        """Raises UnsupportedError if ModelOpt has factors of the activations, which layers of this kind do not take."""
        if PRE_QUANT_SCALE in self:
            raise UnsupportedError(
                f"{self.full_name(PRE_QUANT_SCALE)}: factors of {activations} activations are not read; {FROM_FLOATS}"
            )

    def bits(self, suffix: str, width: int, fields: int) -> int:
        """Bits of a field, from `width` words of 32 bits that hold `fields` of them."""
        bits = 32 * width // fields
        if 32 * width != bits * fields or not 1 <= bits <= 8:
            raise self.error(suffix, f"expected {fields} fields of 4 or 8 bits, got {width} words of 32 bits")
        return self.check_bits(suffix, bits)

    def check_bits(self, suffix: str, bits: int) -> int:
        """`bits`, if it is supported and the configuration agrees."""
        if bits not in _BITS:
            raise UnsupportedError(f"{self.full_name(suffix)}: {bits}-bit weights are not supported, only 4 and 8")
        said = self.config.integer("bits", "w_bit", "num_bits")
        if said is not None and said != bits:
            raise self.error(suffix, f"holds {bits}-bit fields, {self.config.where} says {said}; correct one of them")
        return bits

    def group_size(self, suffix: str, k: int, groups: int) -> int:
        """Columns that share a scale: as many as the configuration says, which must agree with the number of groups.

        Where it says nothing, the groups have one size.
        """
        said = self.config.integer("group_size", "q_group_size")
        size = k if said is None or said == -1 else min(said, k)
        if said is not None and size >= 1 and ceil_div(k, size) == groups:
            return size
        if said is not None:
            raise self.error(
                suffix,
                f"has {groups} groups of K = {k} columns, {self.config.where} says group_size {said}; correct it",
            )
        if k % groups:
            raise self.error(suffix, f"{groups} groups do not divide K = {k}; pass config={{'group_size': ...}}")
        return k // groups

    def act_order(self, suffix: str, k: int, groups: int, size: int) -> Tensor | None:
        """The permutation int32 `[K]` that sorts columns by their group; None if they are sorted."""
        if suffix not in self or self.info(suffix).shape == (0,):
            return None
        self.check(suffix, ("I32", "I64"), (k,))
        index = self.read(suffix).long()
        if bool((index == -1).all()):  # compressed-tensors: not used
            return None
        outside = ((index < 0) | (index >= groups)).nonzero()
        if len(outside):
            at = int(outside[0])
            raise self.error(suffix, f"expected groups in [0, {groups}), got {int(index[at])} at column {at}")
        sorted_groups = torch.arange(k) // size
        if bool((index == sorted_groups).all()):
            return None
        perm = index.argsort(stable=True)
        if not bool((index[perm] == sorted_groups).all()):
            counts, expected = index.bincount(minlength=groups), sorted_groups.bincount(minlength=groups)
            group = int((counts != expected).nonzero()[0])
            raise self.error(
                suffix,
                f"expected {int(expected[group])} columns in group {group}, got {int(counts[group])}: uneven groups",
            )
        return perm.to(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Fields of int32 words `[rows, columns]`, low bits first, as uint8 `[rows, columns * 32 / bits]`."""
    stored = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # strides of [1, n] too
    if bits == 8:
        return stored
    return torch.stack([stored & 15, stored >> 4], dim=2).view(len(words), -1)


def pack(fields: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack`: int32 words `[rows, ceil(columns * bits / 32)]` of uint8 fields, zeros behind them."""
    rows, columns = fields.shape
    padded = fields.new_zeros((rows, ceil_div(columns * bits, 32) * 32 // bits))
    padded[:, :columns] = fields
    if bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    return padded.contiguous().view(torch.int32)


def narrowed(values: Tensor) -> Tensor:
    """float32 numbers in a type of 16 bits, if one holds all of them exactly; others as they are."""
    for dtype in SHORT if values.dtype == torch.float32 else ():
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values


def integers(weight: QuantizedTensor) -> QuantizedTensor:
    """Weights of integer codes with scales of one level; UnsupportedError for other codes."""
    if weight.weight_dtype is not None:
        raise UnsupportedError(f"expected integer codes, got {weight.weight_dtype} ones; quantise to integers instead")
    return weight.expanded()


def scales_16(weight: QuantizedTensor) -> Tensor:
    """Scales of one level in a type of 16 bits; UnsupportedError if that would lose something."""
    found = narrowed(weight.expanded().scales)
    if found.dtype != torch.float32:
        return found
    if weight.super_scales is not None:
        raise UnsupportedError(
            "expected scales of 16 bits, got two levels of scales (GGUF's Q3_K, Q6_K, IQ4_XS), whose products need 32; "
            "quantise the GGUF file anew: qcutlass quantize makes scales of 16 bits"
        )
    raise UnsupportedError(
        "expected scales of 16 bits, got float32 ones, as convert --bits makes of float32 weights; quantise the floats "
        "with float16 scales: qcutlass quantize makes these, so does convert(..., scheme=WeightOnly(scale_dtype="
        "torch.float16))"
    )


def check_no_minimums(weight: QuantizedTensor) -> None:
    """Raises UnsupportedError if there are minimums."""
    if weight.minimums is not None:
        raise UnsupportedError(
            "expected zero points, got minimums, which this format does not hold; quantise the model anew: qcutlass "
            "quantize makes whole zero points"
        )


def whole_zeros(weight: QuantizedTensor) -> Tensor:
    """Zero points uint8 `[G, N]` in [0, 2**bits); UnsupportedError for others, and for minimums."""
    check_no_minimums(weight)
    if weight.zeros is None:
        return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)
    if weight.zeros.is_floating_point():
        raise UnsupportedError(
            "expected whole zero points, got real-valued ones, which this format does not hold; quantise the model "
            "anew: qcutlass quantize makes whole ones"
        )
    if int(weight.zeros.max()) >= 2**weight.bits:
        raise UnsupportedError(
            f"expected zero points below {2**weight.bits}, which fit a field, got {weight.zeros.max()}"
        )
    return weight.zeros.to(torch.uint8)


def group_index(k: int, group_size: int, perm: Tensor | None) -> Tensor:
    """int32 `[K]`: the group of each column, in the order of the activations."""
    groups = torch.arange(k, dtype=torch.int32) // group_size
    if perm is None:
        return groups
    index = torch.empty_like(groups)
    index[perm.long()] = groups
    return index


def in_order(codes: Tensor, perm: Tensor | None) -> Tensor:
    """The inverse of `permuted`."""
    if perm is None:
        return codes
    ordered = torch.empty_like(codes)
    ordered[:, perm.long()] = codes
    return ordered


def settle_zeros(zeros: Tensor, bits: int) -> Tensor | None:
    """Zeros in the most special type that holds them: None (all in the middle), uint8, or the floats that they are.

    Args:
        zeros: uint8 or floating.
    """
    if bool((zeros == 2 ** (bits - 1)).all()):
        return None
    if zeros.is_floating_point():
        whole = (zeros >= 0) & (zeros < 2**bits) & (zeros == zeros.floor())
        zeros = zeros.to(torch.uint8) if bool(whole.all()) else zeros
    return zeros.contiguous()


def permuted(codes: Tensor, perm: Tensor | None) -> Tensor:
    """Codes `[N, K]` with columns in the order of `perm`."""
    return codes if perm is None else codes[:, perm.long()]
