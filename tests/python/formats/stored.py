"""Layers as formats store them, written field by field from the formats' descriptions, and what they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

import qcutlass
from qcutlass.formats import CanonicalLinear, Layer

Array = NDArray[Any]
Tensors = dict[str, Tensor]

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The number of each code."""


@dataclass(frozen=True)
class Stored:
    """w[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n], g = group_of[k], columns in the activations' order."""

    codes: Array  # [N, K]
    zeros: Array  # [G, N]
    scales: Array  # float16 [G, N]
    group_of: Array  # [K]
    bits: int
    group_size: int

    @property
    def weight(self) -> Tensor:
        """float32 [N, K], exact."""
        zeros, scales = (values[self.group_of].T.astype(np.float32) for values in (self.zeros, self.scales))
        return torch.from_numpy((self.codes.astype(np.float32) - zeros) * scales)


def stored(
    n: int, k: int, group_size: int, bits: int = 4, *, seed: int, symmetric: bool = False, act_order: bool = False
) -> Stored:
    """A random layer."""
    random = np.random.default_rng(seed)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    zeros = np.full((groups, n), 2 ** (bits - 1)) if symmetric else random.integers(0, 2**bits, (groups, n))
    group_of = np.arange(k) // size
    return Stored(
        random.integers(0, 2**bits, (n, k)),
        zeros,
        random.uniform(0.001, 0.02, (groups, n)).astype(np.float16),
        random.permutation(group_of) if act_order else group_of,
        bits,
        size,
    )


def pack_fields(values: Array, bits: int, axis: int) -> Tensor:
    """int32 words of unsigned fields along an axis: field i in bits [i * bits, (i + 1) * bits), zeros behind."""
    fields = np.moveaxis(values, axis, -1)
    rows, count = fields.shape
    words = np.zeros((rows, -(-count * bits // 32)), dtype=np.uint64)
    for index in range(count):
        words[:, index * bits // 32] |= fields[:, index].astype(np.uint64) << np.uint64(index * bits % 32)
    packed = torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))
    return packed.clone(memory_format=torch.contiguous_format)  # the strides of a file, in one row too


def half(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.float16)))


def as_gptq(layer: Stored, version: int = 1, *, g_idx: bool = True) -> Tensors:
    zeros = (layer.zeros - 1) % 2**layer.bits if version == 1 else layer.zeros
    tensors = {
        "qweight": pack_fields(layer.codes.T, layer.bits, axis=0),
        "qzeros": pack_fields(zeros, layer.bits, axis=1),
        "scales": half(layer.scales),
    }
    if g_idx:
        tensors["g_idx"] = torch.from_numpy(layer.group_of.astype(np.int32))
    return tensors


def awq_words(values: Array) -> Tensor:
    """int32 [rows, columns / 8]."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for column in range(values.shape[1]):
        nibble = AWQ_COLUMNS.index(column % 8)
        words[:, column // 8] |= values[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def as_awq(layer: Stored) -> Tensors:
    return {"qweight": awq_words(layer.codes.T), "qzeros": awq_words(layer.zeros), "scales": half(layer.scales)}


def as_marlin(layer: Stored) -> Tensors:
    """Every code by its own indices: which lane of which tile holds it, in which word and nibble."""
    n, k = layer.codes.shape
    words = np.zeros((k // 16, 2 * n), dtype=np.uint32)
    for row in range(k):
        for column in range(n):
            lane = 4 * (column % 8) + row % 8 // 2
            element = 4 * (column % 16 // 8) + 2 * (row % 16 // 8) + row % 2
            word = 128 * (column // 64) + 4 * lane + column % 64 // 16
            words[row // 16, word] |= np.uint32(int(layer.codes[column, row]) << (4 * AWQ_COLUMNS.index(element)))
    if len(layer.scales) > 1:
        order = [8 * (i % 8) + i // 8 for i in range(64)]
    else:
        order = [2 * i + pair for i in range(4) for pair in (0, 1, 8, 9, 16, 17, 24, 25)]
    columns = [begin + offset for begin in range(0, n, len(order)) for offset in order]
    return {"B": torch.from_numpy(words.view(np.int32)), "s": half(layer.scales[:, columns])}


def as_compressed(layer: Stored, *, act_order: bool = False) -> Tensors:
    """pack-quantized."""
    tensors = {
        "weight_packed": pack_fields(layer.codes, layer.bits, axis=1),
        "weight_scale": half(layer.scales.T),
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if (layer.zeros != 2 ** (layer.bits - 1)).any():
        tensors["weight_zero_point"] = pack_fields(layer.zeros.T, layer.bits, axis=0)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(layer.group_of.astype(np.int32))
    return tensors


def as_hqq(layer: Stored) -> Tensors:
    """With the zeros that the layer has, which may be real-valued."""
    groups = layer.codes.reshape(-1, layer.group_size).astype(np.uint8)
    packed = groups if layer.bits == 8 else groups[: len(groups) // 2] * 16 + groups[len(groups) // 2 :]
    return {
        "W_q": torch.from_numpy(packed),
        "scale": half(layer.scales.T).reshape(-1, 1),
        "zero": half(layer.zeros.T).reshape(-1, 1),
        "shape": torch.tensor(layer.codes.shape),
        "nbits": torch.tensor(layer.bits, dtype=torch.int32),
        "group_size": torch.tensor(layer.group_size, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
    }


def as_tensorrt_llm(layer: Stored, offsets: Array | None, *, channels_first: bool) -> Tensors:
    """`offsets` are Z."""
    n, k = layer.codes.shape
    weight = np.zeros((n // 2, k), dtype=np.uint8)
    for channel in range(n):
        weight[channel // 2] |= ((layer.codes[channel] - 8) % 16 << 4 * (channel % 2)).astype(np.uint8)
    tensors = {"weight": torch.from_numpy(weight).view(torch.int8), "weights_scaling_factor": half(layer.scales.T)}
    if offsets is not None:
        tensors["zero"] = half(offsets.T)
    return tensors if channels_first else {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def as_modelopt(layer: Stored) -> Tensors:
    """As ModelOpt packs two channels a byte: of rows of the transpose, the first one in the low nibble."""
    signed = torch.from_numpy(layer.codes - 8).T.reshape(-1, len(layer.codes) // 2, 2)
    packed = (signed[..., 0] & 15) | ((signed[..., 1] & 15) << 4)
    return {"weight": packed.T.contiguous().to(torch.uint8), "weight_scale": half(layer.scales.T)}


def as_fp8(
    weight: Tensor,
    block: tuple[int, int] | None = None,
    name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensors, Tensor]:
    """e4m3 weights with a scale of `dtype` for each block (None: each channel, [N, 1]), and what they stand for."""
    n, k = weight.shape
    rows, columns = block or (1, k)
    scales = torch.empty(-(-n // rows), -(-k // columns), dtype=dtype)
    codes, exact = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j].float()).to(codes.dtype)
            exact[at] = codes[at].float() * scales[i, j].float()
    return {"weight": codes, name: scales}, exact


def as_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """4-bit floats in groups of 16, divided by a power of two; and what they stand for."""
    n, k = weight.shape
    divisor = torch.exp2((448 * 6 / weight.abs().max()).log2().floor()).reshape(1)
    groups = weight.view(n, k // 16, 16)
    scales = (groups.abs().amax(2) / 6 * divisor).clamp(min=2**-6).to(torch.float8_e4m3fn)
    spread = (scales.float() / divisor)[:, :, None]
    codes = ((groups / spread)[..., None] - E2M1).abs().argmin(-1)
    exact = (E2M1[codes] * spread).view(n, k)
    codes = codes.view(n, k).to(torch.uint8)
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    return tensors | {"weight_global_scale": divisor}, exact


def named(tensors: Tensors, layer: str = "model.layers.0.mlp.up_proj") -> Tensors:
    return {f"{layer}.{suffix}": tensor for suffix, tensor in tensors.items()}


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """A folder with `model.safetensors`, and `config.json` where there is a configuration."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return folder


def canonical(layer: Layer) -> CanonicalLinear:
    """The layer, which must be in canonical form."""
    assert isinstance(layer, CanonicalLinear)
    weight = layer.weight
    (n, k), groups = weight.codes.shape, -(-weight.codes.shape[1] // weight.group_size)
    assert weight.codes.dtype == torch.uint8
    assert weight.codes.is_contiguous()
    assert int(weight.codes.max()) < 2**weight.bits
    assert weight.scales.shape == (groups, n)
    assert weight.scales.is_contiguous()
    if weight.zeros is not None:
        assert weight.zeros.shape == (groups, n)
        assert weight.zeros.is_contiguous()
        assert weight.zeros.dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
        assert not bool((weight.zeros == 2 ** (weight.bits - 1)).all())
    if layer.perm is not None:
        assert layer.perm.dtype == torch.int32
        assert layer.perm.sort().values.tolist() == list(range(k))
    return layer


def dequantized(layer: CanonicalLinear) -> Tensor:
    """float32 `[N, K]`, by the library: packed, unpacked, multiplied."""
    weight, (n, k) = layer.weight, layer.shape
    packed = qcutlass.preprocess_weights(weight.codes, bits=weight.bits)
    keywords: dict[str, Any] = {
        "group_size": weight.group_size, "bits": weight.bits, "minimums": weight.minimums,
        "super_scales": weight.super_scales, "super_minimums": weight.super_minimums,
        "global_scale": weight.global_scale,
    }  # fmt: skip
    if weight.weight_dtype is not None:
        keywords["weight_dtype"] = weight.weight_dtype
    ordered = qcutlass.dequantize(packed, weight.scales, weight.zeros, k=k, dtype=torch.float32, **keywords)
    result = torch.empty(n, k)
    result[:, slice(None) if layer.perm is None else layer.perm.long()] = ordered
    assert torch.equal(result, layer.dequantize(torch.float32))
    product = qcutlass.gemm(torch.eye(k), packed, weight.scales, weight.zeros, perm=layer.perm, **keywords)
    assert torch.equal(product.T, result)
    return result
