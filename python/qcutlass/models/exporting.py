"""Writes converted folders in formats that other engines read, without loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from torch import Tensor

from qcutlass.defaults import EXPORTS as EXPORTS
from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalBlockwise, CanonicalLinear, Layer, compressed_tensors, gptq
from qcutlass.formats.config import model_types, read_json
from qcutlass.formats.converted import CONFIG, QUANTIZATION
from qcutlass.formats.files import as_path
from qcutlass.formats.floats import has_conv1d
from qcutlass.formats.fp8 import in_blocks, scales_of_blocks
from qcutlass.formats.specs import LAYER_KINDS
from qcutlass.layers import QuantLinear
from qcutlass.models.conversion import SHARD_BYTES, check_places
from qcutlass.models.converted import ConvertedFolder
from qcutlass.models.heads import HEAD, is_embedding
from qcutlass.models.memory import memory_told
from qcutlass.models.replacing import new_folder
from qcutlass.models.shards import ShardedWriter, write_json
from qcutlass.models.sources import copy_files, files_beside
from qcutlass.products.block_operators import BLOCK_SIZES
from qcutlass.products.checks import check_flag, check_integer

_MARK: Final = "exported_by_qcutlass"  # in config.json: a folder that may be overwritten


@dataclass(frozen=True)
class _Common:
    """The scheme that all layers of an exported folder share."""

    kind: str
    bits: int
    weight_dtype: str | None
    group_size: int
    symmetric: bool
    act_order: bool
    scales: str | None
    """The type of the scales of 4-bit floats, which tells their formats apart."""


def export_model(
    folder: str | PathLike[str],
    destination: str | PathLike[str],
    format: str = "gptq",
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes a converted folder as a GPTQ or compressed-tensors one; dequantised weights stay the same to the bit.

    Two exceptions: packed embeddings, for which these formats have no place, and an output head that is packed in
    another scheme than the layers. They are dequantised, and rounded once to float16 (to bfloat16 where that is too
    small).

    "gptq": 4 and 8 bits; version 1 where there are no zero points, else version 2, which alone holds a zero point of 0.
    "compressed-tensors": pack-quantized, with 8-bit activations, too, int-quantized for W8A8, float-quantized for fp8,
    in blocks, too, and for e4m3 weights alone, nvfp4-pack-quantized and mxfp4-pack-quantized; group sizes that divide
    K, but for e4m3.
    `export_note` says what other programs make of it.

    Args:
        folder: that `convert` or `quantize_model` wrote.
        destination: a folder that is made, as a whole or not at all.
        format: one of `EXPORTS`.
        overwrite: replaces a folder that `export_model`, `convert` or `quantize_model` made.
        shard_bytes: largest size of a file.

    Returns:
        The number of quantised layers.

    Raises:
        FileExistsError: `destination` is there and `overwrite` is False.
        ValueError: no such format; a folder to overwrite is none of these; `destination` lies in `folder`, or around
            it.
        UnsupportedError: the format cannot say it: activation scales (`act_scale`, `smooth`), act-order (gptq can),
            blocks of int8, real-valued zeros, minimums, codes of e2m1 that are neither NVFP4 nor MXFP4 (gptq: of any
            floats), layers that differ in bits or group size, scales of integers that are not of 16 bits, shapes that
            fill no words, a global scale of NVFP4 that is the reciprocal of no float32 number.
        CheckpointError: the folder is damaged, or has a link out of it beside the weights.
        OSError, MemoryError: as for `convert`.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from qcutlass import formats, models
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = pathlib.Path(name) / "float"
        ...     folder.mkdir()
        ...     _ = (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        ...     save_file({"up.weight": torch.randn(32, 64).half()}, folder / "model.safetensors")
        ...     _ = models.convert(folder, f"{name}/w4")
        ...     _ = models.export_model(f"{name}/w4", f"{name}/gptq", "gptq")
        ...     formats.detect(f"{name}/gptq")
        'gptq'
    """
    if format not in EXPORTS:
        raise ValueError(f"format: expected one of {', '.join(EXPORTS)}, got {format!r}")
    check_flag("overwrite", overwrite)
    check_integer("shard_bytes", shard_bytes, minimum=1)
    old, new = as_path("folder", folder), as_path("destination", destination)
    source = ConvertedFolder(old)
    _check_destination(old, new, overwrite)
    files_beside(old)  # refused before anything is written
    layers = _layers(source)
    common = _common(source, layers)
    store: Callable[[Layer], dict[str, Tensor]]
    if format == "gptq":
        described = _gptq_config(common, source, layers)
        store = lambda layer: gptq.store(layer, 1 if common.symmetric else 2)  # noqa: E731
    else:
        are_blocks = _are_in_blocks(common, source, layers)
        described = _compressed_config(common, source, layers, are_blocks)
        store = (lambda layer: _stored_blocks(layer, common)) if are_blocks else compressed_tensors.store
    with (
        memory_told(old),
        new_folder(new, overwrite, lambda: _check_destination(old, new, overwrite)) as written,
        ShardedWriter(written, shard_bytes) as writer,
    ):
        for name in source:
            if name not in layers:
                writer.add(_dequantized(source[name], name))
                continue
            try:
                tensors = store(_stored(source[name], common))
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from error
            writer.add({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
        for name in source.rest:
            writer.add({name: source.tensor(name)})
        copy_files(old, written)
        writer.finish()
        values = {key: value for key, value in source.config.items() if key != QUANTIZATION}
        write_json(written / CONFIG, {**values, _MARK: True, QUANTIZATION: described})
    return len(layers)


def export_note(folder: str | PathLike[str]) -> str | None:
    """A note for the user about programs that cannot load an exported folder; None: no such program is known.

    transformers 5.23 makes room for zero points of a byte each, where compressed-tensors packs them like codes, and
    takes no compressed layer for a `Conv1D`. Of 4-bit floats it makes bfloat16 weights, whatever the model's type is.

    Example:
        >>> import json, pathlib, tempfile
        >>> from qcutlass.models import export_note
        >>> with tempfile.TemporaryDirectory() as name:
        ...     config = {"quantization_config": {"quant_method": "gptq", "sym": False}}
        ...     _ = (pathlib.Path(name) / "config.json").write_text(json.dumps(config))
        ...     print(export_note(name))
        None
    """
    config = read_json(as_path("folder", folder) / CONFIG)
    if not isinstance(config.get(QUANTIZATION), dict):
        raise ValueError(f"folder: expected one that export_model wrote, got {folder} without a {QUANTIZATION}")
    groups = config[QUANTIZATION].get("config_groups", {})
    if groups and has_conv1d(model_types(config)):
        return (
            "transformers (5.24) puts random weights in the place of compressed-tensors layers of models with Conv1D "
            "(GPT-2); for transformers export with --to gptq, or load the folder that was exported"
        )
    if any(group["format"] in _BFLOAT16 for group in groups.values()):
        return "transformers (5.24) makes bfloat16 weights of 4-bit floats; load the folder with dtype=torch.bfloat16"
    if all(group["weights"]["symmetric"] for group in groups.values()):
        return None
    return (
        "transformers (5.23) does not load compressed-tensors folders with zero points, though compressed-tensors' own "
        "code does; for transformers quantise with --symmetric, or export with --to gptq"
    )


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    exported = destination / CONFIG
    mine = exported.is_file() and read_json(exported).get(_MARK) is True
    check_places(source, destination, overwrite and not mine)


def _layers(source: ConvertedFolder) -> list[str]:
    """Names of the layers that stay quantised: all but embeddings, and a head unlike the first layer."""
    names = [name for name in source if not is_embedding(name)]
    others = [name for name in names if name != HEAD]
    if not others:
        return names
    specs = {name: source.spec[name] for name in names}
    return [name for name in names if name in others or specs[name] == specs[others[0]]]


def _dequantized(layer: QuantLinear, name: str) -> dict[str, Tensor]:
    """The tensors of a layer as one that is not quantised."""
    weight = layer.canonical().effective_weight()
    short = next((w for w in (weight.half(), weight.bfloat16()) if bool(w.isfinite().all())), weight)
    bias = {} if layer.bias is None else {f"{name}.bias": layer.bias}
    return {f"{name}.weight": short, **bias}


def _common(source: ConvertedFolder, layers: Sequence[str]) -> _Common:
    specs = [source.spec[name] for name in layers]
    if not specs:
        raise UnsupportedError("the folder has no quantised layer")
    first, buffers = specs[0], [dict(spec.buffers) for spec in specs]
    group_size = max(spec.group_size for spec in specs)  # -1: one group a channel, all K columns
    for name, spec, held in zip(layers, specs, buffers, strict=True):
        fits = spec.group_size == group_size or (spec.group_size == -1 and source.shape(name)[1] <= group_size)
        if (spec.kind, spec.bits, spec.weight_dtype) != (first.kind, first.bits, first.weight_dtype) or not fits:
            raise UnsupportedError(f"{name}: expected bits and groups as in the other layers; export needs one scheme")
        if spec.has_minimums:
            raise UnsupportedError(
                f"{name}: it has minimums, which other formats do not hold; quantise the model anew: qcutlass quantize "
                "makes whole zero points"
            )
        for buffer in ("act_scale", "smooth"):
            if buffer in held:
                raise UnsupportedError(
                    f"{name}: it scales its own activations ({buffer}), which other formats do not; "
                    "quantise with --no-act-scale"
                )
    scales = {name: held["scales"] for name, held in zip(layers, buffers, strict=True) if first.weight_dtype == "e2m1"}
    kind = next(iter(scales.values()), None)
    for name, found in scales.items():
        if found != kind:
            raise UnsupportedError(
                f"{name}: its scales are of {found}, those of {layers[0]} of {kind}; export needs one scheme: quantise "
                "the model's float original with --format nvfp4"
            )
    symmetric = not any("zeros" in held or "minima" in held for held in buffers)
    act_order = any("perm" in held for held in buffers)
    return _Common(first.kind, first.bits, first.weight_dtype, group_size, symmetric, act_order, kind)


def _ragged(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> list[str]:
    """The layers whose last group is shorter than the others."""
    size = common.group_size
    return [name for name in layers if size != -1 and source.shape(name)[1] % size]


def _stored(layer: QuantLinear, common: _Common) -> Layer:
    """A layer with its codes unpacked, and with zeros if any layer has them."""
    found = layer.canonical()
    return found.with_zeros() if isinstance(found, CanonicalLinear) and not common.symmetric else found


def _gptq_config(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> dict[str, Any]:
    way_out = "export to compressed-tensors" if _layout(common) is not None else "no format of export holds them"
    if LAYER_KINDS[common.kind].quantises_activations:
        raise UnsupportedError(f"gptq: quantised activations have no place in it; {way_out}")
    if common.weight_dtype is not None:
        raise UnsupportedError(f"gptq: {common.weight_dtype} weights have no place in it; {way_out}")
    kept = [name for name in source.spec.modules_to_not_convert if name != HEAD]
    dynamic: dict[str, dict[str, str]] = {
        f"-:.*{re.escape(name)}$": {} for name in kept
    }  # as GPTQModel marks layers that are not quantised
    return {
        "quant_method": "gptq",
        "bits": common.bits,
        "group_size": common.group_size,
        "desc_act": common.act_order,
        "sym": common.symmetric,
        "lm_head": HEAD in layers,
        "checkpoint_format": "gptq" if common.symmetric else "gptq_v2",
        **({"dynamic": dynamic} if dynamic else {}),
    }


class _Layout(NamedTuple):
    """The words of compressed-tensors for a kind of layers.

    Attributes:
        format: of the tensors.
        type: of the weights' numbers.
        activations: the type of those that are quantised; None: they stay as they are.
        weights: what else describes the weights.
    """

    format: str
    type: str
    activations: str | None = None
    weights: Mapping[str, str] = MappingProxyType({})


_COMPRESSED: Final = {
    ("weight_only", None, None): _Layout("pack-quantized", "int"),
    ("weight_only", "e4m3", None): _Layout("float-quantized", "float"),
    ("weight_only", "e2m1", "float8_e4m3fn"): _Layout(
        "nvfp4-pack-quantized",
        "float",
        weights={"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    ),
    ("weight_only", "e2m1", "float8_e8m0fnu"): _Layout(
        "mxfp4-pack-quantized", "float", weights={"scale_dtype": "torch.uint8"}
    ),
    ("w4a8_fp8", None, None): _Layout("pack-quantized", "int", "float"),
    ("w4a8_int8", None, None): _Layout("pack-quantized", "int", "int"),
    ("int8", None, None): _Layout("int-quantized", "int", "int"),
    ("fp8", None, None): _Layout("float-quantized", "float", "float"),
    ("blockwise", "e4m3", None): _Layout("float-quantized", "float", "float"),
}
"""By kind and codes of layers, and the scales of 4-bit floats."""
_BFLOAT16: Final = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Formats whose weights compressed-tensors makes bfloat16, though other layers have another type."""


def _layout(common: _Common) -> _Layout | None:
    """The words for layers that compressed-tensors holds; None for others."""
    return _COMPRESSED.get((common.kind, common.weight_dtype, common.scales))


def _are_in_blocks(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> bool:
    """Whether all layers have scales of square blocks, which others multiply faster than those of groups."""
    if common.weight_dtype != "e4m3" or common.group_size not in BLOCK_SIZES:
        return False
    if common.kind == CanonicalBlockwise.kind:
        return True
    scales = (source.packed(name).part("scales") for name in layers)
    return all(scales_of_blocks(found, common.group_size) is not None for found in scales)


def _stored_blocks(layer: Layer, common: _Common) -> dict[str, Tensor]:
    found = in_blocks(layer, common.group_size) if isinstance(layer, CanonicalLinear) else layer
    assert found is not None
    return compressed_tensors.store(found)


def _compressed_config(
    common: _Common, source: ConvertedFolder, layers: Sequence[str], are_blocks: bool
) -> dict[str, Any]:
    layout = _layout(common)
    if layout is None:
        codes = "" if common.weight_dtype is None else f" and {common.weight_dtype} codes"
        scales = "" if common.scales is None else f" with scales of {common.scales}"
        raise UnsupportedError(f"compressed-tensors: layers of kind {common.kind}{codes}{scales} are not exported")
    described: dict[str, Any] = {"num_bits": common.bits, "type": layout.type, "symmetric": common.symmetric}
    groups = _groups(common, source, layers, are_blocks)
    weights = {**described, "dynamic": False, **groups, **layout.weights}
    activations: dict[str, Any] | None = None
    if layout.activations is not None:
        static = "a_scale" in dict(source.spec[layers[0]].buffers)
        activations = {"num_bits": 8, "type": layout.activations, "symmetric": True, "dynamic": not static}
        activations["strategy"] = "tensor" if static else "token"
        if are_blocks:
            activations |= {"strategy": "group", "group_size": common.group_size}
    listed = source.spec.modules_to_not_convert
    kept = [HEAD] if HEAD not in layers else []
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": layout.format}},
        "ignore": list(dict.fromkeys([*listed, *kept])),
    }


def _groups(common: _Common, source: ConvertedFolder, layers: Sequence[str], are_blocks: bool) -> dict[str, Any]:
    """The description of the weights that share a scale."""
    size = common.group_size
    if are_blocks:
        return {"strategy": "block", "block_structure": [size, size]}
    if size == -1:
        return {"strategy": "channel"}
    ragged = _ragged(common, source, layers)
    if not ragged:
        return {"strategy": "group", "group_size": size}
    if common.weight_dtype == "e4m3":  # blocks of one row, of which the last may be shorter
        return {"strategy": "block", "block_structure": [1, size]}
    way_out = "quantise with another --group-size"
    if common.weight_dtype is not None:  # groups of 4-bit floats have one size
        way_out = "quantise without this layer: --skip"
    elif not LAYER_KINDS[common.kind].quantises_activations:
        way_out = f"export to gptq, or {way_out}"
    raise UnsupportedError(
        f"{ragged[0]}: compressed-tensors takes group sizes that divide K = {source.shape(ragged[0])[1]}, got {size}; "
        f"{way_out}"
    )
