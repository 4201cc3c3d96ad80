"""humming-kernels (PyPI): products compiled for their shape when they are first used."""

from __future__ import annotations

import copy
import math
from typing import Any, Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, copies_for
from bench.layer import Layer, WeightOnlyLayer
from bench.layer_w4a8 import FourByEightLayer
from bench.layer_w8a8 import EightBitLayer
from bench.peers.base import Peer, Product, Skip, import_library, require
from qcutlass import testing

_CODES: Final = {torch.int8: "int8", torch.float8_e4m3fn: "float8e4m3", torch.float8_e5m2: "float8e5m2"}
_FLOAT_CODES: Final = {"e2m1": "float4e2m1", "e4m3": "float8e4m3"}
_SCALES: Final = {torch.float8_e8m0fnu: "float8e8m0", torch.float8_e4m3fn: "float8e4m3"}
_CHANNELS: Final = 128
"""N has to be a multiple of this: blocks of its wgmma kernels have four warps of 32 channels or more. humming itself
pads layers that have fewer, if it is told to."""
_SLICE_BYTES: Final = 64
"""K has to be a multiple of so many bytes of activations, and of the group. Even where humming pads K itself, it takes
whole groups alone."""


class Humming(Peer):
    """`humming.layer.HummingLayer` with the kernels that its own heuristics choose for the GPU and M."""

    key = "humming"
    label = "humming"

    def load(self) -> str:
        version: str = import_library("humming", "humming-kernels").__version__
        return version

    def prepare(self, layer: Layer) -> Product:
        if isinstance(layer, EightBitLayer):
            return _eight_bit(layer)
        if isinstance(layer, FourByEightLayer):
            return _four_by_eight(layer)
        return _weight_only(require(layer, WeightOnlyLayer))


def _layers(layer: Layer, k: int, tensors: dict[str, Tensor], weight: dict[str, Any], **options: Any) -> list[Any]:
    """Copies of the layer in humming's own form, with K padded to `k`."""
    humming = import_library("humming.layer", "humming-kernels")
    first = humming.HummingLayer(
        shape_n=layer.n,
        shape_k=k,
        weight_config=weight,
        pad_n_to_multiple=_CHANNELS,
        torch_dtype=layer.dtype,
        **options,
    ).cuda()
    first.load_from_tensors(tensors)
    first.transform()
    copies = copies_for(sum(parameter.nbytes for parameter in first.parameters()))
    return [first, *(copy.deepcopy(first) for _ in range(copies - 1))]


def _extent(a: Tensor, group_size: int) -> tuple[int, int]:
    """K as humming takes it, with zeros behind the columns of the activations `a`, and its groups."""
    k = a.shape[1]
    one = group_size >= k
    multiple = math.lcm(_SLICE_BYTES // a.itemsize, 1 if one else group_size)
    padded = -(-k // multiple) * multiple
    return padded, 1 if one else padded // group_size


def _pad_columns(rows: Tensor, k: int, value: int = 0) -> Tensor:
    """`[..., K]` as `[..., k]`: `value` behind the columns that there are."""
    if rows.shape[-1] == k:
        return rows
    padded = torch.full((*rows.shape[:-1], k), value, dtype=rows.dtype, device=rows.device)
    padded[..., : rows.shape[-1]] = rows
    return padded


def _pad_groups(groups: Tensor, count: int) -> Tensor:
    """`[G, N]` as `[count, N]`: the last group again, so that no scale is out of the range of the others."""
    if len(groups) == count:
        return groups
    return torch.cat([groups, groups[-1:].expand(count - len(groups), -1)])


def weight_config(case: testing.Case) -> dict[str, Any]:
    """What humming asks of weights for 16-bit activations, but for a global scale."""
    config: dict[str, Any] = {
        "dtype": f"uint{case.bits}" if case.weight_dtype is None else _FLOAT_CODES[case.weight_dtype],
        "group_size": 0 if case.group_size >= case.k else case.group_size,
        "has_zero_point": case.zeros != "none",
        "is_fp_zero_point": case.zeros == "real",
    }
    if case.scale_dtype in _SCALES:
        config["scale_dtype"] = _SCALES[case.scale_dtype]
    return config


def weight_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """In a type that humming takes beside activations of `dtype`."""
    return scales if scales.dtype in _SCALES else scales.to(dtype)


def _weight_only(layer: WeightOnlyLayer) -> Product:
    pack = import_library("humming.ops", "humming-kernels").pack_weight
    case, problem = layer.case, layer.problem
    if problem.minimums is not None:
        raise Skip("takes zeros, not minimums")
    if problem.super_scales is not None:
        raise Skip("takes scales of one level")
    k, groups = _extent(problem.a, case.group_size)
    a = _pad_columns(problem.a, k)
    # Padded codes stand for zero, but for zero points; rows of the activations have zeros there, too.
    codes = _pad_columns(problem.codes.to(torch.int32), k, 0 if case.weight_dtype else 1 << (case.bits - 1))

    # Codes are packed along K, integer zeros along N; both are [N, ...] as the scales are.
    scales = _pad_groups(problem.scales.reshape(-1, case.n), groups)
    tensors = {
        "weight": pack(codes.contiguous(), case.bits),
        "weight_scale": weight_scales(scales, case.dtype).T.contiguous(),
    }
    if problem.zeros is not None:
        zeros = _pad_groups(problem.zeros.reshape(-1, case.n), groups)
        packed = case.zeros == "int"
        stored = pack(zeros.to(torch.int32).contiguous(), case.bits) if packed else zeros.to(case.dtype)
        tensors["zero_point"] = stored.T.contiguous()
    config = weight_config(case)
    if problem.global_scale is not None:
        tensors["weight_scale_2"], config["scale_2_type"] = problem.global_scale, "tensor"
    layers = _layers(layer, k, tensors, config)

    def contestants(m: int) -> list[Contestant]:
        rows = a[:m]

        def launch(index: int, out: Tensor) -> Tensor:
            layers[index](rows, outputs=out)
            return out

        return [Contestant(Humming.key, launch, len(layers))]

    return contestants


def _eight_bit(layer: EightBitLayer) -> Product:
    """Activations are given as codes, so that humming does not quantise."""
    if layer.azp is not None:
        raise Skip("takes no zero points of activations")
    pack = import_library("humming.ops", "humming-kernels").pack_weight
    k, _ = _extent(layer.a, layer.k)
    # Integers are stored with an offset of 128.
    codes = layer.w.int() + 128 if layer.w.dtype == torch.int8 else layer.w.view(torch.uint8).int()
    codes = _pad_columns(codes, k, 128 if layer.w.dtype == torch.int8 else 0)
    tensors = {
        "weight": pack(codes.contiguous(), 8),
        "weight_scale": layer.w_scale[:, None].to(layer.dtype),
        "bias": layer.bias,
    }
    config = {"dtype": _CODES[layer.w.dtype], "group_size": 0, "has_zero_point": False}
    return _of_codes(layer, k, tensors, config, layer.a, layer.a_scale, has_bias=True)


def _four_by_eight(layer: FourByEightLayer) -> Product:
    """Activations are given as codes here, too."""
    pack = import_library("humming.ops", "humming-kernels").pack_weight
    p = layer.problem
    k, groups = _extent(p.a, p.group_size)
    scales = _pad_groups(p.scales.reshape(-1, layer.n), groups)
    tensors = {
        "weight": pack(_pad_columns(p.codes.to(torch.int32), k, 8).contiguous(), 4),
        "weight_scale": scales.T.to(layer.dtype).contiguous(),
    }
    if p.zeros is not None:
        zeros = _pad_groups(p.zeros.reshape(-1, layer.n), groups)
        tensors["zero_point"] = pack(zeros.to(torch.int32).contiguous(), 4).T.contiguous()
    group_size = 0 if p.group_size >= layer.k else p.group_size
    config = {"dtype": "uint4", "group_size": group_size, "has_zero_point": p.zeros is not None}
    return _of_codes(layer, k, tensors, config, p.a, p.a_scale)


def _of_codes(
    layer: Layer,
    k: int,
    tensors: dict[str, Tensor],
    weight: dict[str, Any],
    a: Tensor,
    a_scale: Tensor,
    **options: Any,
) -> Product:
    """Products of activations that are codes already, with a scale for each token."""
    inputs = {"dtype": _CODES[a.dtype], "quant_mode": "dynamic_token"}
    layers = _layers(layer, k, tensors, weight, input_config=inputs, **options)
    padded = _pad_columns(a, k)

    def contestants(m: int) -> list[Contestant]:
        rows, scales = padded[:m], a_scale[:m, None]

        def launch(index: int, out: Tensor) -> Tensor:
            layers[index](rows, outputs=out, input_scale=scales)
            return out

        return [Contestant(Humming.key, launch, len(layers))]

    return contestants
