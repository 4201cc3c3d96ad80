"""humming-kernels (PyPI): products compiled for their shape when they are first used."""

from __future__ import annotations

import copy
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


def _layers(layer: Layer, tensors: dict[str, Tensor], weight: dict[str, Any], **options: Any) -> list[Any]:
    """Copies of the layer in humming's own form."""
    humming = import_library("humming.layer", "humming-kernels")
    first = humming.HummingLayer(
        shape_n=layer.n, shape_k=layer.k, weight_config=weight, torch_dtype=layer.dtype, **options
    ).cuda()
    first.load_from_tensors(tensors)
    first.transform()
    copies = copies_for(sum(parameter.nbytes for parameter in first.parameters()))
    return [first, *(copy.deepcopy(first) for _ in range(copies - 1))]


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
    groups = case.k // case.group_size

    # Codes are packed along K, integer zeros along N; both are [N, ...] as the scales are.
    scales = problem.scales.reshape(groups, case.n)
    tensors = {
        "weight": pack(problem.codes.to(torch.int32).contiguous(), case.bits),
        "weight_scale": weight_scales(scales, case.dtype).T.contiguous(),
    }
    if case.zeros == "int":
        assert problem.zeros is not None
        tensors["zero_point"] = pack(problem.zeros.to(torch.int32).contiguous(), case.bits).T.contiguous()
    elif case.zeros == "real":
        assert problem.zeros is not None
        tensors["zero_point"] = problem.zeros.T.to(case.dtype).contiguous()
    config = weight_config(case)
    if problem.global_scale is not None:
        tensors["weight_scale_2"], config["scale_2_type"] = problem.global_scale, "tensor"
    layers = _layers(layer, tensors, config)

    def contestants(m: int) -> list[Contestant]:
        a = problem.a[:m]

        def launch(index: int, out: Tensor) -> Tensor:
            layers[index](a, outputs=out)
            return out

        return [Contestant(Humming.key, launch, len(layers))]

    return contestants


def _eight_bit(layer: EightBitLayer) -> Product:
    """Activations are given as codes, so that humming does not quantise."""
    if layer.azp is not None:
        raise Skip("takes no zero points of activations")
    pack = import_library("humming.ops", "humming-kernels").pack_weight
    # Integers are stored with an offset of 128.
    codes = layer.w.int() + 128 if layer.w.dtype == torch.int8 else layer.w.view(torch.uint8).int()
    tensors = {
        "weight": pack(codes.contiguous(), 8),
        "weight_scale": layer.w_scale[:, None].to(layer.dtype),
        "bias": layer.bias,
    }
    config = {"dtype": _CODES[layer.w.dtype], "group_size": 0, "has_zero_point": False}
    return _of_codes(layer, tensors, config, layer.a, layer.a_scale, has_bias=True)


def _four_by_eight(layer: FourByEightLayer) -> Product:
    """Activations are given as codes here, too."""
    pack = import_library("humming.ops", "humming-kernels").pack_weight
    p = layer.problem
    groups = -(-layer.k // p.group_size)
    tensors = {
        "weight": pack(p.codes.to(torch.int32).contiguous(), 4),
        "weight_scale": p.scales.reshape(groups, layer.n).T.to(layer.dtype).contiguous(),
    }
    if p.zeros is not None:
        tensors["zero_point"] = pack(p.zeros.to(torch.int32).contiguous(), 4).T.contiguous()
    group_size = 0 if groups == 1 else p.group_size
    config = {"dtype": "uint4", "group_size": group_size, "has_zero_point": p.zeros is not None}
    return _of_codes(layer, tensors, config, p.a, p.a_scale)


def _of_codes(
    layer: Layer, tensors: dict[str, Tensor], weight: dict[str, Any], a: Tensor, a_scale: Tensor, **options: Any
) -> Product:
    """Products of activations that are codes already, with a scale for each token."""
    inputs = {"dtype": _CODES[a.dtype], "quant_mode": "dynamic_token"}
    layers = _layers(layer, tensors, weight, input_config=inputs, **options)

    def contestants(m: int) -> list[Contestant]:
        rows, scales = a[:m], a_scale[:m, None]

        def launch(index: int, out: Tensor) -> Tensor:
            layers[index](rows, outputs=out, input_scale=scales)
            return out

        return [Contestant(Humming.key, launch, len(layers))]

    return contestants
