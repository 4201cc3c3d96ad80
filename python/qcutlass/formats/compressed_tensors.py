"""compressed-tensors (llm-compressor): pack-quantized, int-quantized and float-quantized weights, 4-bit floats.

pack-quantized: `weight_packed` int32 `[N, ceil(K * bits / 32)]`, fields from low to high bits with 2**(bits - 1) added
to their signed value, `weight_scale` `[N, G]`, `weight_zero_point` int32 `[ceil(N * bits / 32), G]` packed alike along
N (or int8 `[N, G]`), `weight_shape` int64 (N, K), `weight_g_idx` int32 `[K]`.
int-quantized: `weight` int8 `[N, K]`, `weight_scale` `[N, 1]`, for int8 activations; their scale is computed token by
token, or it is `input_scale`, one number. Where no activations are quantised, only the storage is int8. Codes of up to
4 bits (`num_bits`) lie in bytes, too, with `weight_scale` `[N, G]`. They and packed weights of 4 bits may have
activations of 8 bits, whose scale is computed token by token. Others than such activations are refused.
float-quantized: `weight` float8_e4m3fn `[N, K]`, which `qcutlass.formats.fp8` reads; `weight_scale` of the strategies
"tensor" `[1]`, "channel" `[N, 1]`, "block" `[ceil(N / rows), ceil(K / columns)]` and "group" `[N, G]`.
mxfp8-quantized: the same in groups of 32, with exponents uint8 for scales.
nvfp4-pack-quantized and mxfp4-pack-quantized: `weight_packed` uint8 `[N, K / 2]`; see `float4`.

`config_groups` describe weights and activations of the layers that their `targets` match.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import float4, fp8
from qcutlass.formats.config import Config, pattern
from qcutlass.formats.layers import (
    CanonicalBlockwise,
    CanonicalFp8,
    CanonicalInt4Fp8,
    CanonicalInt4Int8,
    CanonicalInt8,
    CanonicalLinear,
    Layer,
    for_eight_bits,
)
from qcutlass.formats.tensors import (
    FLOATS,
    FROM_FLOATS,
    INT32,
    LayerTensors,
    check_no_minimums,
    integers,
    pack,
    permuted,
    scales_16,
    settle_zeros,
    unpack,
    whole_zeros,
)
from qcutlass.products.checks import ceil_div
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "input_global_scale", "weight", "input_scale", "input_zero_point", "bias",
)  # fmt: skip
_INT8: Final = ("I8",)
_EIGHT_BITS: Final = {"int": "int8", "float": "fp8"}
"""Activations of 8 bits by the type that a configuration says they have."""
_SAID: Final = ("num_bits", "type", "strategy", "group_size", "dynamic")
"""What a configuration says of activations, for messages."""
_PATTERN: Final = "re:"
"""What patterns among the targets begin with; others are names and classes of modules."""
_CLASSES: Final = ("Embedding", "Linear")
"""The classes of modules that may be targets, those of embeddings first."""
_LEAVE_OUT: Final = "remove input_activations from its group in config.json to multiply by activations of 16 bits"


def matches(layer: LayerTensors) -> bool:
    """Whether there are packed or int8 weights, or those of fp8 that the label says are of this format."""
    if "weight_packed" in layer:
        return True
    labelled = layer.config.text("quant_method") == "compressed-tensors"
    return "weight" in layer and (layer.info("weight").dtype == "I8" or (labelled and fp8.matches(layer)))


def load(layer: LayerTensors) -> CanonicalLinear | CanonicalInt8 | CanonicalFp8:
    """See `qcutlass.formats.load`."""
    for key, reason in {"transform_config": "weights behind a transform", "sparsity_config": "sparse weights"}.items():
        section = layer.config.section(key)
        if section and section.text("format") != "dense":
            raise UnsupportedError(f"{section.where}: {reason} are not read")
    if "weight_packed" in layer:
        return _load_packed(layer, _group(layer))
    if layer.info("weight").dtype in fp8.FLOAT8:
        return _load_fp8(layer, _group(layer))
    return _load_int8(layer, _group(layer))


def _group(layer: LayerTensors) -> Config:
    """The group that a layer belongs to, as compressed-tensors finds it; empty where there are no groups.

    Its name goes before patterns, these in the order of the alphabet before its class. What no target matches belongs
    to the only group, or to any of groups that are alike but for their targets.
    """
    groups = layer.config.section("config_groups")
    if len(groups.values) < 2:
        return groups.section(*groups.values)
    found = _by_target(groups)
    target = _target(found, layer.name, groups.where)
    if target is not None:
        return groups.section(found[target])
    alike = [{**groups.section(name).values, "targets": None} for name in groups.values]
    if any(group != alike[0] for group in alike):
        raise CheckpointError(
            f"{groups.where}: expected a target that matches {layer.name}, got {', '.join(found)[:120]}; add its name "
            "to the targets of its group"
        )
    return groups.section(next(iter(groups.values)))


def is_named(config: Config, name: str) -> bool:
    """Whether a target of several groups is a layer's name, or a pattern that matches it, rather than its class."""
    groups = config.section("config_groups")
    if len(groups.values) < 2:
        return False
    return _target(_by_target(groups), name, groups.where) not in (None, *_CLASSES)


def _by_target(groups: Config) -> dict[str, str]:
    """The groups' names by their targets."""
    return {target: name for name in groups.values for target in _targets(groups.section(name))}


def _target(targets: Collection[str], name: str, where: str) -> str | None:
    """The target that a layer belongs to; None: there is none."""
    patterns = sorted(target for target in targets if target.startswith(_PATTERN))
    classes: tuple[str, ...] = _CLASSES if "embed" in name.rpartition(".")[2] else ("Linear",)
    for target in [name, *patterns, *classes]:
        if target in targets and (not target.startswith(_PATTERN) or _matches(target, name, where)):
            return target
    return None


def _matches(target: str, name: str, where: str) -> bool:
    return pattern(target.removeprefix(_PATTERN), where).match(name) is not None


def _targets(group: Config) -> list[str]:
    targets = group.values.get("targets") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{group.where}: targets: expected a list of names and patterns, got {targets!r:.60}")
    return targets


def _load_fp8(layer: LayerTensors, group: Config) -> CanonicalFp8 | CanonicalLinear:
    found = fp8.load_described(layer, _described(group))
    if isinstance(found, CanonicalFp8):  # scales of blocks and groups leave activations as they are
        _check_activations(layer, group.section("input_activations"), "float")
    _check_plain(layer, found)
    return found


def _check_plain(layer: LayerTensors, found: CanonicalFp8 | CanonicalLinear) -> None:
    """Raises UnsupportedError for zero points and act-order of weights that are floats."""
    suffix = "weight_zero_point"
    if suffix in layer and bool(layer.read(suffix).float().any()):
        raise UnsupportedError(f"{layer.full_name(suffix)}: floats with zero points are not read; {FROM_FLOATS}")
    if isinstance(found, CanonicalLinear):
        weight, suffix = found.weight, "weight_g_idx"
        if layer.act_order(suffix, found.shape[1], len(weight.scales), weight.group_size) is not None:
            raise UnsupportedError(f"{layer.full_name(suffix)}: floats with act-order are not read; {FROM_FLOATS}")


def _described(group: Config) -> fp8.Description:
    """The description of fp8 weights."""
    weights, inputs = group.section("weights"), group.section("input_activations")
    strategy = weights.text("strategy")
    if strategy not in (None, "tensor", "channel", "block", "group"):
        raise UnsupportedError(
            f"{weights.where}: strategy {strategy!r} of fp8 weights is not read, only tensor, channel, block and "
            f"group; {FROM_FLOATS}"
        )
    block = group_size = activations = None
    if strategy == "block":
        block = fp8.block_of(weights, "block_structure") or fp8.BLOCK
    if strategy == "group":
        size = weights.integer("group_size")
        group_size = size if size is not None and size > 0 else None  # -1: one group, a channel
    if group:
        activations = "none"
    if inputs:
        activations = "static" if _are_static(inputs) else "dynamic"
    return fp8.Description(weights.where, block, activations, group_size)


def _load_packed(layer: LayerTensors, group: Config) -> CanonicalLinear:
    weights, inputs = group.section("weights"), group.section("input_activations")
    if layer.info("weight_packed").dtype == "U8":
        found = float4.load_packed(layer.with_config(weights))
        _check_plain(layer, found)
        return found
    if layer.info("weight_packed").dtype != "I32":
        raise UnsupportedError(
            f"{layer.full_name('weight_packed')}: expected words of integers or bytes of 4-bit floats, got "
            f"{layer.info('weight_packed').dtype}; {FROM_FLOATS}"
        )
    layer = layer.with_config(weights)
    n, width = layer.matrix("weight_packed", INT32)
    layer.check("weight_shape", ("I64", "I32"), (2,))
    rows, k = layer.read("weight_shape").tolist()
    if rows != n or k < 1:
        raise layer.error("weight_shape", f"expected {n} rows as weight_packed has, got shape {[rows, k]}")
    bits = next((bits for bits in range(1, 9) if ceil_div(k * bits, 32) == width), 0)
    said = weights.integer("num_bits")
    if said is not None and 1 <= said <= 8 and ceil_div(k * said, 32) == width:
        bits = said  # a few columns fill as many words with more bits as with fewer
    if bits == 0:
        raise layer.error("weight_packed", f"expected words for rows of {k} 4-bit or 8-bit fields, got {width} words")
    layer.check_bits("weight_packed", bits)
    groups = _check_scales(layer, n)
    size = layer.group_size("weight_scale", k, groups)
    codes = unpack(layer.read("weight_packed"), bits)[:, :k]
    return _with_activations(layer, "weight_packed", _linear(layer, codes, bits, groups, size), inputs)


def _linear(layer: LayerTensors, codes: Tensor, bits: int, groups: int, size: int) -> CanonicalLinear:
    """The layer of codes uint8 `[N, K]` in the order of the activations, beside checked scales."""
    n, k = codes.shape
    perm = layer.act_order("weight_g_idx", k, groups, size)
    bias = layer.bias(n)
    zeros = _zeros(layer, n, groups, bits)
    weight = QuantizedTensor(permuted(codes, perm).contiguous(), _scales(layer, n), zeros, bits, size)
    return CanonicalLinear(weight, bias, perm)


def _with_activations(layer: LayerTensors, suffix: str, found: CanonicalLinear, inputs: Config) -> CanonicalLinear:
    """The layer of weights from `suffix` for the activations that are described."""
    if not inputs:
        return found
    takes = _eight_bits(inputs, "int") if inputs.values.get("dynamic") is True else None
    quantising = for_eight_bits(found, takes) if takes is not None else None
    if quantising is None:
        kind = "packed weights" if suffix == "weight_packed" else "4-bit weights"
        raise UnsupportedError(
            f"{layer.full_name(suffix)}: {kind} with quantised activations are read where these have 8 bits and a "
            f"dynamic scale a token, and the weights 4 bits, {_words(inputs)}; {_LEAVE_OUT}"
        )
    _tell_of_rounding(inputs)
    return quantising


def _check_activations(layer: LayerTensors, inputs: Config, type_: str) -> None:
    """Raises UnsupportedError for other activations than those of 8 bits that weights of one scale a channel take."""
    expected = _EIGHT_BITS[type_]
    if _eight_bits(inputs, type_) != expected:
        raise UnsupportedError(
            f"{layer.full_name('weight')}: {expected} weights are read with {expected} activations, which have a "
            f"dynamic scale a token or a static one for all, {_words(inputs)}; {_LEAVE_OUT}"
        )
    _tell_of_rounding(inputs)


def _eight_bits(inputs: Config, type_: str) -> str | None:
    """ "int8" or "fp8": activations with one scale a token or for all, where nothing is said `type_`; None: others."""
    bits, strategy = inputs.integer("num_bits"), inputs.text("strategy")
    fit = bits in (None, 8) and strategy in (None, "token", "tensor")
    fit = fit and isinstance(inputs.values.get("dynamic"), bool | None)
    return _EIGHT_BITS.get(inputs.text("type") or type_) if fit else None


def _are_static(inputs: Config) -> bool:
    return inputs.values.get("dynamic") is False


def _words(inputs: Config) -> str:
    said = [f"{key} {inputs.values[key]!s:.40}" for key in _SAID if inputs.values.get(key) is not None]
    return f"{inputs.where} says {', '.join(said) or 'nothing of them'}"


def _tell_of_rounding(inputs: Config) -> None:
    """Warns of activations that are quantised otherwise than the file says, though not multiplied wrongly."""
    if inputs.flag("symmetric") is False:
        warnings.warn(
            f"{inputs.where}: symmetric is false; each token of activations is quantised without a zero point, which "
            "rounds it a little more coarsely",
            stacklevel=2,
        )
    if inputs.text("strategy") == "tensor" and inputs.values.get("dynamic") is True:
        warnings.warn(
            f"{inputs.where}: strategy tensor is dynamic; each token of activations is quantised with a scale of its "
            "own, which rounds it a little more finely",
            stacklevel=2,
        )


def _load_int8(layer: LayerTensors, group: Config) -> CanonicalLinear | CanonicalInt8:
    weights, inputs = group.section("weights"), group.section("input_activations")
    if layer.info("weight").dtype not in _INT8:
        raise UnsupportedError(
            f"{layer.full_name('weight')}: {layer.info('weight').dtype} weights are not read, only I8 and F8_E4M3; "
            f"{FROM_FLOATS}"
        )
    layer = layer.with_config(weights)
    n, k = layer.matrix("weight", _INT8)
    groups = _check_scales(layer, n)
    size = layer.group_size("weight_scale", k, groups)
    codes, bits = _codes_of_bytes(layer)
    if (group and not inputs) or (bits == 4 and not _are_static(inputs)):  # only the storage is int8
        unsigned = codes.view(torch.uint8) ^ 0x80 if bits == 8 else (codes + 8).view(torch.uint8)
        return _with_activations(layer, "weight", _linear(layer, unsigned, bits, groups, size), inputs)
    if groups != 1:
        raise UnsupportedError(
            f"{layer.full_name('weight_scale')}: int8 activations need one scale a channel; {_LEAVE_OUT}"
        )
    _check_activations(layer, inputs, "int")
    for suffix in ("weight_zero_point", "input_zero_point"):
        if suffix in layer and bool(layer.read(suffix).any()):
            raise UnsupportedError(
                f"{layer.full_name(suffix)}: only symmetric int8 weights and activations are read; {_LEAVE_OUT}"
            )
    layer.check_no_act_scale("int8")
    bias, scales = layer.bias(n), _scales(layer, n).view(n).float()
    input_scale = None
    if "input_scale" in layer:
        input_scale = layer.one_scale("input_scale")
    elif _are_static(inputs):
        static = f"as {inputs.where} says that activations are static"
        raise layer.error("weight", f"expected input_scale beside it, {static}; it is absent")
    return CanonicalInt8(codes, scales, input_scale, bias)


def _codes_of_bytes(layer: LayerTensors) -> tuple[Tensor, int]:
    """int8 `[N, K]`, and the bits that hold them: 4, where the configuration says that they have no more, or 8."""
    codes, said = layer.read("weight"), layer.config.integer("num_bits")
    if said is None:
        return codes, 8
    where = layer.config.where
    if not 1 <= said <= 8:
        raise CheckpointError(f"{where}: num_bits: expected 1 to 8 of integers in bytes, got {said}; correct it")
    low, high, half = int(codes.min()), int(codes.max()), 2 ** (said - 1)
    if low < -half or high >= half:
        raise layer.error(
            "weight",
            f"expected codes in [{-half}, {half}), as {where} says num_bits {said}, got {low} to {high}; correct it",
        )
    return codes, 4 if said <= 4 else 8


def store(layer: Layer) -> dict[str, Tensor]:
    """The tensors of a layer, which `load` reads back without loss.

    Raises:
        UnsupportedError: activation scales, act-order, real-valued zeros, scales of 32 bits.
    """
    if layer.kind not in _STORES:
        raise UnsupportedError(_HOLDS)
    tensors = _STORES[layer.kind](layer)
    return tensors if layer.bias is None else {**tensors, "bias": layer.bias}


def _store_eight_bit(layer: CanonicalInt8 | CanonicalFp8) -> dict[str, Tensor]:
    """The tensors of int-quantized and float-quantized weights."""
    if layer.smooth is not None:
        raise UnsupportedError("compressed-tensors holds no smoothing factors of a layer's own")
    tensors = {"weight": layer.codes, "weight_scale": layer.scales[:, None].contiguous()}
    return tensors if layer.input_scale is None else {**tensors, "input_scale": layer.input_scale}


def _store_weights(layer: CanonicalLinear) -> dict[str, Tensor]:
    """The tensors of weights for activations as they are, and of those of 4 bits for activations of 8."""
    if layer.act_scale is not None:
        raise UnsupportedError(_HOLDS)
    if layer.perm is not None:
        way_out = "quantise without --act-order" if layer.quantises_activations else "export to gptq"
        raise UnsupportedError(f"compressed-tensors has given up act-order with groups of its own; {way_out}")
    if layer.weight.weight_dtype == "e2m1":
        return float4.store_packed(layer.weight)
    return _store_float8(layer.weight) if layer.weight.weight_dtype == "e4m3" else _store_packed(layer)


def _store_float8(weight: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of float-quantized weights with a scale a channel or group."""
    return {"weight": weight.codes.view(torch.float8_e4m3fn), "weight_scale": weight.scales.T.contiguous()}


def _store_blocks(layer: CanonicalBlockwise) -> dict[str, Tensor]:
    """The tensors of float-quantized weights with a scale a block."""
    if layer.codes.dtype == torch.int8:
        raise UnsupportedError(_HOLDS)
    return {"weight": layer.codes, "weight_scale": layer.scales}


def _store_packed(layer: CanonicalLinear) -> dict[str, Tensor]:
    """The tensors of pack-quantized weights."""
    weight, (n, k) = integers(layer.weight), layer.shape
    check_no_minimums(weight)
    tensors = {
        "weight_packed": pack(weight.codes, weight.bits),
        "weight_scale": scales_16(layer.weight).T.contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack(whole_zeros(weight), weight.bits).T.contiguous()
    return tensors


_HOLDS: Final = "compressed-tensors holds quantised weights without activation scales alone, and blocks of e4m3"
_STORES: Final[dict[str, Callable[[Any], dict[str, Tensor]]]] = {
    CanonicalLinear.kind: _store_weights,
    CanonicalInt4Fp8.kind: _store_weights,
    CanonicalInt4Int8.kind: _store_weights,
    CanonicalInt8.kind: _store_eight_bit,
    CanonicalFp8.kind: _store_eight_bit,
    CanonicalBlockwise.kind: _store_blocks,
}


def _check_scales(layer: LayerTensors, n: int) -> int:
    """The number of groups."""
    shape = layer.info("weight_scale").shape
    if shape in ((), (1,), (1, 1)):  # one for the whole tensor
        layer.check("weight_scale", FLOATS, shape)
        return 1
    _, groups = layer.matrix("weight_scale", FLOATS)
    layer.check("weight_scale", FLOATS, (n, groups))
    return groups


def _scales(layer: LayerTensors, n: int) -> Tensor:
    """`[G, N]`."""
    scales = layer.finite("weight_scale")
    return scales.reshape(1, 1).repeat(1, n) if scales.numel() == 1 else scales.T.contiguous()


def _zeros(layer: LayerTensors, n: int, groups: int, bits: int) -> Tensor | None:
    """`[G, N]`, or None."""
    suffix = "weight_zero_point"
    if suffix not in layer:
        return None
    if layer.info(suffix).dtype == "I8":
        shape = layer.info(suffix).shape
        layer.check(suffix, _INT8, (n, groups) if shape not in ((), (1,)) else shape)
        stored = layer.read(suffix)
        low, high, half = int(stored.min()), int(stored.max()), 2 ** (bits - 1)
        if low < -half or high >= half:
            raise layer.error(suffix, f"expected zero points in [{-half}, {half}), got {low} to {high}")
        zeros = (stored.to(torch.int16) + half).to(torch.uint8)
        return settle_zeros(zeros.expand(n, groups).T, bits)
    layer.check(suffix, INT32, (ceil_div(n * bits, 32), groups))
    return settle_zeros(unpack(layer.read(suffix).T, bits)[:, :n], bits)
