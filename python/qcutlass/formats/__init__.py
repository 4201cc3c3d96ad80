"""Checkpoints: each format yields linear layers in canonical form, or as floats that are still to be quantised."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import (
    awq,
    bitsandbytes,
    compressed_tensors,
    float4,
    floats,
    fp8,
    gguf,
    gguf_blocks,
    gptq,
    hqq,
    marlin,
    tensorrt_llm,
)
from qcutlass.formats.checkpoint import Checkpoint, Format
from qcutlass.formats.config import Config, read_config
from qcutlass.formats.converted import check_described
from qcutlass.formats.files import as_path, inside
from qcutlass.formats.layers import (
    CanonicalBlockwise,
    CanonicalFp8,
    CanonicalInt8,
    CanonicalLinear,
    DequantizedLinear,
    FloatLinear,
    Layer,
    QuantizedLayer,
)
from qcutlass.formats.source import MemorySource, SafetensorsSource, TensorSource, listed, open_folder
from qcutlass.formats.specs import METHOD
from qcutlass.formats.stacked import UnstackedSource, is_stacked
from qcutlass.formats.tensors import FROM_FLOATS

__all__ = [
    "FORMATS",
    "CanonicalBlockwise",
    "CanonicalFp8",
    "CanonicalInt8",
    "CanonicalLinear",
    "Checkpoint",
    "DequantizedLinear",
    "FloatLinear",
    "Format",
    "Int8Linear",
    "Layer",
    "QuantizedLayer",
    "detect",
    "load",
]

Int8Linear = CanonicalInt8
"""The former name of `CanonicalInt8`."""

_ROUNDED: Final = ("auto-round", "intel/auto-round")  # AutoRound writes other people's formats

_TABLE: Final = (
    Format(
        "gptq", "GPTQ v1 and v2, 4 and 8 bits, with and without act-order",
        "qweight", gptq.SUFFIXES, ("gptq", *_ROUNDED), gptq.matches, gptq.load,
    ),
    Format("awq", "AWQ gemm, 4 bits", "qweight", awq.SUFFIXES, ("awq", *_ROUNDED), awq.matches, awq.load),
    Format(
        "compressed-tensors",
        "pack-quantized, 4 and 8 bits; int-quantized (W8A8); float-quantized (fp8); nvfp4- and mxfp4-pack-quantized",
        "weight_scale", compressed_tensors.SUFFIXES, ("compressed-tensors",),
        compressed_tensors.matches, compressed_tensors.load,
    ),
    Format(
        "fp8", "e4m3 with a scale a tensor or a channel, for fp8 activations; in blocks, for 16-bit ones",
        "weight", fp8.SUFFIXES, ("fp8", "modelopt", "fp8_per_channel_per_token", "fp8_pb_wo"), fp8.matches, fp8.load,
        selects=True,
    ),
    Format(
        "bitsandbytes", "LLM.int8; NF4 and FP4, dequantised, to be quantised anew", "weight", bitsandbytes.SUFFIXES,
        ("bitsandbytes",), bitsandbytes.matches, bitsandbytes.load, selects=True,
    ),
    Format("marlin", "Marlin v1, 4 bits", "B", marlin.SUFFIXES, ("marlin", "gptq"), marlin.matches, marlin.load),
    Format("hqq", "HQQ axis 1, 4 and 8 bits", "W_q", hqq.SUFFIXES, ("hqq",), hqq.matches, hqq.load),
    Format(
        "tensorrt-llm", "groupwise 4 bits with scales and Z, not yet interleaved",
        "weights_scaling_factor", tensorrt_llm.SUFFIXES, ("w4a16_awq", "w4a16_gptq"),
        tensorrt_llm.matches, tensorrt_llm.load,
    ),
    Format(
        "nvfp4", "ModelOpt's NVFP4 and NVFP4_AWQ: 4-bit floats", "weight_scale_2", float4.SUFFIXES,
        ("modelopt", "modelopt_fp4", "nvfp4", "nvfp4_awq", "w4a16_nvfp4"), float4.matches, float4.load,
    ),
    Format(
        "modelopt-awq", "ModelOpt's W4A16_AWQ: groupwise 4 bits", "weight_scale", tensorrt_llm.MODELOPT_SUFFIXES,
        ("modelopt", "w4a16_awq"), tensorrt_llm.matches_modelopt, tensorrt_llm.load_modelopt,
    ),
    Format(
        "mxfp4", "gpt-oss: experts of 4-bit floats", "blocks", float4.BLOCK_SUFFIXES, ("mxfp4",),
        float4.are_blocks, float4.load_blocks,
    ),
    Format(
        "gguf",
        f"{', '.join(sorted(gguf_blocks.QUANTIZED))}; {', '.join(gguf_blocks.DEQUANTIZED)} dequantised; F32, F16, BF16 "
        "as floats",
        "weight", gguf.SUFFIXES, (), gguf.matches, gguf.load, selects=True, obstacle=gguf.obstacle,
        is_float=gguf.is_float,
    ),
    Format(
        "floats", "F32, F16, BF16 in safetensors, to be quantised",
        "weight", floats.SUFFIXES, (), floats.matches, floats.load, selects=True, obstacle=floats.obstacle,
        is_float=lambda layer: True,
    ),
)  # fmt: skip

FORMATS: Final[dict[str, Format]] = {row.name: row for row in _TABLE}
"""The formats that can be read, by name."""

_FILES: Final = (".gguf", ".safetensors")
_PICKLES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl"})


def load(
    checkpoint: str | PathLike[str] | Mapping[str, Tensor],
    format: str = "auto",
    config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens a checkpoint.

    Headers and configuration are read and checked at once; tensors when a layer is asked for, one layer in memory at a
    time. The format is told by the tensors' names, types and shapes; a configuration that says something else is not
    believed, with a warning. A checkpoint may have layers of several formats, each told by its own tensors.

    Args:
        checkpoint: a folder with safetensors files (and their index, `config.json`), or with one GGUF model; such a
            file, the first of several where a GGUF model is split; or tensors by name. Pickles are never read, and
            folders of which transformers would read other files than this (an index beside a `model.safetensors` that
            it does not name) are refused.
        format: a key of `FORMATS`, or "auto".
        config: replaces what the checkpoint says of its quantisation, key by key: `{"checkpoint_format": "gptq_v2"}`.

    Returns:
        A mapping from the names of linear layers to `CanonicalLinear` (the weights in canonical form, act-order, bias),
        `CanonicalInt8` (W8A8), `CanonicalFp8` or `FloatLinear`; `DequantizedLinear` where no product multiplies what
        is stored.

    Raises:
        FileNotFoundError: there is no such file or folder.
        UnsupportedError: pickles, and formats that are not in `FORMATS`.
        CheckpointError: a file is damaged, is none, or contradicts its index, its configuration or itself.
        TypeError: `checkpoint` is neither a path nor a mapping from names to tensors, or `config` no mapping.
        ValueError: `format` is not a key of `FORMATS`; the path is an empty text.

    Example:
        >>> import torch
        >>> from qcutlass import formats
        >>> tensors = {
        ...     "up.qweight": torch.zeros(8, 32, dtype=torch.int32),  # K * 4 / 32 x N
        ...     "up.qzeros": torch.full((1, 4), 0x77777777, dtype=torch.int32),
        ...     "up.scales": torch.ones(1, 32, dtype=torch.float16),
        ... }
        >>> checkpoint = formats.load(tensors, config={"quant_method": "gptq", "sym": True})
        >>> checkpoint.format, {name: layer.shape for name, layer in checkpoint.items()}
        ('gptq', {'up': (32, 64)})
    """
    if not isinstance(format, str) or (format != "auto" and format not in FORMATS):
        raise ValueError(f"format: expected 'auto' or one of {', '.join(FORMATS)}, got {format!r}")
    if not isinstance(config, Mapping | None):
        raise TypeError(f"config: expected a mapping from keys to values, or None, got {type(config).__name__}")
    source, found = _open(checkpoint)
    if isinstance(source, MemorySource | SafetensorsSource) and is_stacked(source.tensors):
        source = UnstackedSource(source)
    is_gguf = source.format == "gguf"
    if format != "auto" and (format == "gguf") != is_gguf:
        raise CheckpointError(f"format: got {format!r}, but this is {'a' if is_gguf else 'no'} GGUF file; pass 'auto'")
    found = found.updated(config)
    return Checkpoint(source, _detect(source, found) if format == "auto" else [FORMATS[format]], found)


def detect(checkpoint: str | PathLike[str] | Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> str:
    """The format of a checkpoint, by its content.

    Args:
        checkpoint, config: as for `load`.

    Returns:
        A key of `FORMATS`; several, joined by ", ", where layers are of several formats.

    Raises:
        FileNotFoundError, UnsupportedError, CheckpointError, TypeError, ValueError: as for `load`.

    Example:
        >>> import torch
        >>> from qcutlass import formats
        >>> formats.detect({"up.weight": torch.ones(32, 64)})
        'floats'
    """
    return load(checkpoint, config=config).format


def _open(checkpoint: str | PathLike[str] | Mapping[str, Tensor]) -> tuple[TensorSource, Config]:
    if isinstance(checkpoint, Mapping):
        return MemorySource(checkpoint), Config()
    path = as_path("checkpoint", checkpoint, ", or a mapping from names to tensors")
    suffix = path.suffix.lower()
    if os.path.isdir(path) and suffix not in _FILES:
        return _open_folder(path)
    if suffix in _PICKLES:
        raise UnsupportedError(
            f"{path}: pickled checkpoints can run code and are not read; convert to safetensors first"
        )
    if suffix and suffix not in _FILES:
        raise UnsupportedError(f"{path}: expected a folder, or a file named *{' or *'.join(_FILES)}")
    if not os.path.exists(path):  # as Path.exists, but no error for names that are too long
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_file() or not suffix:
        raise CheckpointError(f"{path}: expected a folder, or a file named *{' or *'.join(_FILES)}")
    if suffix == ".gguf":
        return gguf.GGUFSource(path), Config()
    return SafetensorsSource([path]), read_config(path.parent)


def _open_folder(folder: Path) -> tuple[TensorSource, Config]:
    source = open_folder(folder)
    if source is not None:
        return source, read_config(folder)
    names = listed(folder)
    models = gguf.models_in(names)
    if len(models) == 1:
        return _open(inside(folder, models[0], str(folder)))
    if models:
        raise CheckpointError(f"{folder}: expected one GGUF model, got {', '.join(models[:8])}; pass one of them")
    pickles = [name for name in names if Path(name).suffix.lower() in _PICKLES]
    if pickles:
        raise UnsupportedError(
            f"{folder}: pickled checkpoints ({pickles[0]}) can run code and are not read; convert to safetensors first"
        )
    raise CheckpointError(f"{folder}: expected .safetensors files or a .gguf file, got none")


def _detect(source: TensorSource, config: Config) -> list[Format]:
    """The formats of the tensors, mostly one; labels decide only where tensors do not."""
    if source.format is not None:
        return [FORMATS[source.format]]
    label = config.text("quant_method", "quant_algo")
    if label == METHOD:
        raise UnsupportedError(f"{config.where}: converted already; qcutlass.models.ConvertedFolder reads its layers")
    labelled = [row for row in _TABLE if label in row.labels]
    found = _matching(source, config, labelled)
    if not found:  # damaged throughout: the loader of the label says how
        found = [row for row in labelled if not row.selects and any(row.candidates(source, config))][:1]
    if not found and label is not None and not labelled:
        known = ", ".join(row.name for row in _TABLE if row.labels)
        raise UnsupportedError(f"{config.where}: quant_method {label!r} is not read, only {known}; {FROM_FLOATS}")
    if not found:
        check_described(source.tensors)
    found = found or [FORMATS["floats"]]
    if label is not None and any(row not in labelled for row in found):
        names = ", ".join(row.name for row in found)
        warnings.warn(
            f"{config.where}: quant_method is {label!r}, but the tensors are those of {names}: read as {names}",
            stacklevel=4,
        )
    return found


def _matching(source: TensorSource, config: Config, labelled: Sequence[Format]) -> list[Format]:
    """The quantised formats that layers have; of those that layers could be of, the labelled ones."""
    layers = {
        row.name: {layer.name for layer in row.candidates(source, config) if row.matches(layer)}
        for row in _TABLE
        if row.labels
    }
    found = [FORMATS[name] for name, names in layers.items() if names]

    def compete(a: Format, b: Format) -> bool:
        return a is not b and (a.key == b.key or not layers[a.name].isdisjoint(layers[b.name]))

    found = [row for row in found if row in labelled or not any(compete(row, b) for b in found if b in labelled)]
    if any(compete(a, b) for a in found for b in found):
        names = ", ".join(row.name for row in found)
        raise CheckpointError(f"{config.where}: tensors of several formats ({names}); pass format=")
    return found
