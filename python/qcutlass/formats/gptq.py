"""GPTQ (AutoGPTQ, GPTQModel, AutoRound): `qweight` int32 `[K * bits / 32, N]` packed along K, `qzeros` int32
`[G, N * bits / 32]` packed along N, `scales` `[G, N]`, `g_idx` int32 `[K]`: the group of each column.

Fields lie from low to high bits. `checkpoint_format`, or `format`, "gptq" (version 1) stores zero points minus one,
modulo 2**bits; "gptq_v2" stores them as they are. GPTQModel writes version 1 by subtracting one from all fields of a
word at once, which borrows from the next field where a zero point is 0; AutoGPTQ, and what reads its files, take each
field for itself. AutoRound's `packing_format` (`backend`) is of version 1 where "gptq" is in it, else of version 2. The
method: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022).
"""

from __future__ import annotations

import warnings
from typing import Final

from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.config import PACKINGS, Config
from qcutlass.formats.layers import CanonicalLinear, Layer
from qcutlass.formats.tensors import (
    FLOATS,
    INT32,
    LayerTensors,
    group_index,
    in_order,
    integers,
    pack,
    permuted,
    scales_16,
    settle_zeros,
    unpack,
    whole_zeros,
)
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = ("qweight", "qzeros", "scales", "g_idx", "bias")
_VERSIONS: Final = {"gptq": 1, "gptq_v2": 2}


def matches(layer: LayerTensors) -> bool:
    """Whether there is one column of words in `qweight` for each of `scales`."""
    words = layer.info("qweight")
    return "scales" in layer and words.dtype in INT32 and words.shape[1:] == layer.info("scales").shape[1:]


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    groups, n = layer.matrix("scales", FLOATS)
    rows, _ = layer.matrix("qweight", INT32)
    _, width = layer.matrix("qzeros", INT32)
    bits = layer.bits("qzeros", width, n)
    layer.check("qzeros", INT32, (groups, width), f"scales has {groups} groups")
    layer.check("qweight", INT32, (rows, n), f"scales has {n} channels")
    k = rows * 32 // bits
    size = layer.group_size("scales", k, groups)
    perm = layer.act_order("g_idx", k, groups, size)
    bias = layer.bias(n)
    scales = layer.finite("scales")
    zeros = _zeros(layer, layer.read("qzeros"), bits)
    codes = permuted(unpack(layer.read("qweight").T, bits), perm)
    return CanonicalLinear(QuantizedTensor(codes, scales, zeros, bits, size), bias, perm)


def store(layer: Layer, version: int) -> dict[str, Tensor]:
    """The tensors of a layer, which `load` reads back without loss.

    Raises:
        UnsupportedError: activation scales, real-valued zeros, scales of 32 bits, or sizes that fill no words.
    """
    if not isinstance(layer, CanonicalLinear) or layer.act_scale is not None:
        raise UnsupportedError("gptq holds weights without activation scales alone")
    weight, (n, k) = integers(layer.weight), layer.shape
    fields = 32 // weight.bits
    if n % fields or k % fields:
        raise UnsupportedError(f"gptq packs {fields} codes in a word: N and K must be multiples, got {[n, k]}")
    zeros = whole_zeros(weight)
    if version == 1:
        zeros = (zeros - 1) & (2**weight.bits - 1)
    tensors = {
        "qweight": pack(in_order(weight.codes, layer.perm), weight.bits).T.contiguous(),
        "qzeros": pack(zeros, weight.bits),
        "scales": scales_16(layer.weight),
        "g_idx": group_index(k, weight.group_size, layer.perm),
    }
    return tensors if layer.bias is None else {**tensors, "bias": layer.bias}


def _versions(config: Config) -> dict[str, str]:
    """What the folder says of the version, by place; AutoRound names the packing."""
    said = config.versions()
    for key in PACKINGS:
        packing = (config.text(key) or "").replace("-", "_")
        if packing.startswith(("auto_round", "autoround")):
            said[f"{config.where}: {key}"] = "gptq" if "gptq" in packing else "gptq_v2"
    return said


def _zeros(layer: LayerTensors, words: Tensor, bits: int) -> Tensor | None:
    """Zero points uint8 `[G, N]`; None if they are in the middle."""
    stored = unpack(words, bits)
    middle = 2 ** (bits - 1)
    said = _versions(layer.config)
    for place, label in said.items():
        if label not in _VERSIONS:
            raise UnsupportedError(f"{place} {label!r} is not read, only gptq and gptq_v2")
    symmetric = layer.config.flag("sym")
    low, high = int(stored.min()), int(stored.max())
    if low == high and low in (middle - 1, middle) and symmetric is not False:
        found = "gptq" if low == middle - 1 else "gptq_v2"
        for place, label in said.items():
            if label != found:
                warnings.warn(
                    f"{place} is {label}, but the zero points of symmetric weights are all stored as {low}, as in "
                    f"{found}: read as {found}",
                    stacklevel=2,
                )
        return None
    if len(set(said.values())) > 1:
        each = " and ".join(f"{label} in {place}" for place, label in said.items())
        raise layer.error(
            "qzeros", f"expected one version, got {each}; pass config={{'checkpoint_format': 'gptq'}} or 'gptq_v2'"
        )
    version = next(iter(said.values()), None)
    if version is None and (symmetric or not layer.config):
        reason = "the weights are said to be symmetric" if symmetric else "nothing says which version this is"
        raise layer.error(
            "qzeros",
            f"expected zero points all {middle - 1} (version 1) or all {middle} (version 2), got {low} to {high}, and "
            f"{reason}; pass config={{'checkpoint_format': 'gptq'}} or 'gptq_v2'",
        )
    if symmetric:
        warnings.warn(
            f"{layer.config.where}: sym is true, but zero points are stored as {low} to {high}: read as {version}",
            stacklevel=2,
        )
    if _VERSIONS[version or "gptq"] == 1:  # files without the label are older than version 2
        ones = sum(1 << shift for shift in range(0, 32, bits))
        borrows = "gptqmodel" in str(layer.config.section("meta").values.get("quantizer"))
        stored = unpack(words + ones, bits) if borrows else (stored + 1) & (2**bits - 1)
    return settle_zeros(stored, bits)
