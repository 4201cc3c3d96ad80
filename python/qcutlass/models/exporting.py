"""Writes converted folders in formats that other engines read, without loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from qcutlass.defaults import EXPORTS as EXPORTS
from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalBlockwise, CanonicalLinear, Layer, compressed_tensors, gptq
from qcutlass.formats.config import model_types, read_json
from qcutlass.formats.converted import CONFIG, QUANTIZATION
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
    "compressed-tensors": pack-quantized, int-quantized for W8A8, float-quantized for fp8, in blocks, too, and for e4m3
    weights alone; group sizes that divide K.
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
            blocks of int8, real-valued zeros, minimums, codes of other floats than e4m3 (gptq: of any), layers that
            differ in bits or group size, scales of integers that are not of 16 bits, shapes that fill no words.
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
    old, new = Path(folder), Path(destination)
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
        store = _stored_blocks if are_blocks else compressed_tensors.store
        _check_groups(common, source, layers)
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
    takes no compressed layer for a `Conv1D`.

    Example:
        >>> import json, pathlib, tempfile
        >>> from qcutlass.models import export_note
        >>> with tempfile.TemporaryDirectory() as name:
        ...     config = {"quantization_config": {"quant_method": "gptq", "sym": False}}
        ...     _ = (pathlib.Path(name) / "config.json").write_text(json.dumps(config))
        ...     print(export_note(name))
        None
    """
    config = read_json(Path(folder) / CONFIG)
    groups = config[QUANTIZATION].get("config_groups", {})
    if groups and has_conv1d(model_types(config)):
        return (
            "transformers (5.24) puts random weights in the place of compressed-tensors layers of models with Conv1D "
            "(GPT-2); for transformers export with --to gptq, or load the folder that was exported"
        )
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
    symmetric = not any("zeros" in held or "minima" in held for held in buffers)
    act_order = any("perm" in held for held in buffers)
    return _Common(first.kind, first.bits, first.weight_dtype, group_size, symmetric, act_order)


def _check_groups(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> None:
    for name in layers:
        k = source.shape(name)[1]
        if common.group_size != -1 and k % common.group_size:
            raise UnsupportedError(
                f"{name}: compressed-tensors takes group sizes that divide K = {k}, got {common.group_size}; export to "
                "gptq, or quantise with another --group-size"
            )


def _stored(layer: QuantLinear, common: _Common) -> Layer:
    """A layer with its codes unpacked, and with zeros if any layer has them."""
    found = layer.canonical()
    return found.with_zeros() if isinstance(found, CanonicalLinear) and not common.symmetric else found


def _gptq_config(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> dict[str, Any]:
    if LAYER_KINDS[common.kind].quantises_activations:
        raise UnsupportedError("gptq: quantised activations have no place in it; export to compressed-tensors")
    if common.weight_dtype is not None:
        raise UnsupportedError(
            f"gptq: {common.weight_dtype} weights have no place in it; compressed-tensors holds e4m3 ones"
        )
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


_COMPRESSED: Final = {
    ("weight_only", None): ("pack-quantized", "int"),
    ("weight_only", "e4m3"): ("float-quantized", "float"),
    ("int8", None): ("int-quantized", "int"),
    ("fp8", None): ("float-quantized", "float"),
    ("blockwise", "e4m3"): ("float-quantized", "float"),
}
"""The words of compressed-tensors for kinds and codes of layers: of the layout, and of the type of numbers."""


def _are_in_blocks(common: _Common, source: ConvertedFolder, layers: Sequence[str]) -> bool:
    """Whether all layers have scales of square blocks, which others multiply faster than those of groups."""
    if common.weight_dtype != "e4m3" or common.group_size not in BLOCK_SIZES:
        return False
    if common.kind == CanonicalBlockwise.kind:
        return True
    scales = (source.packed(name).part("scales") for name in layers)
    return all(scales_of_blocks(found, common.group_size) is not None for found in scales)


def _stored_blocks(layer: Layer) -> dict[str, Tensor]:
    found = in_blocks(layer) if isinstance(layer, CanonicalLinear) else layer
    assert found is not None
    return compressed_tensors.store(found)


def _compressed_config(
    common: _Common, source: ConvertedFolder, layers: Sequence[str], are_blocks: bool
) -> dict[str, Any]:
    key = common.kind, common.weight_dtype
    if key not in _COMPRESSED:
        codes = "" if common.weight_dtype is None else f" and {common.weight_dtype} codes"
        raise UnsupportedError(f"compressed-tensors: layers of kind {common.kind}{codes} are not exported")
    layout, type_ = _COMPRESSED[key]
    weights: dict[str, Any] = {"num_bits": common.bits, "type": type_, "symmetric": common.symmetric, "dynamic": False}
    if are_blocks:
        weights |= {"strategy": "block", "block_structure": [common.group_size, common.group_size]}
    elif common.group_size == -1:
        weights["strategy"] = "channel"
    else:
        weights |= {"strategy": "group", "group_size": common.group_size}
    activations = None
    if LAYER_KINDS[common.kind].quantises_activations:
        static = "a_scale" in dict(source.spec[layers[0]].buffers)
        activations = {"num_bits": 8, "type": type_, "symmetric": True, "dynamic": not static}
        activations["strategy"] = "tensor" if static else "token"
        if are_blocks:
            activations |= {"strategy": "group", "group_size": common.group_size}
    listed = source.spec.modules_to_not_convert
    kept = [HEAD] if HEAD not in layers else []
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": layout}},
        "ignore": list(dict.fromkeys([*listed, *kept])),
    }
