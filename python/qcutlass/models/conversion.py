"""Writes a checkpoint of any format as a folder with packed layers, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcutlass.algorithms.floating import quantize_nearest
from qcutlass.defaults import SHARD_BYTES as SHARD_BYTES
from qcutlass.errors import CheckpointError
from qcutlass.formats import CanonicalLinear, FloatLinear, Layer
from qcutlass.formats.activations import STORED_ACTIVATIONS, Activations
from qcutlass.formats.converted import CONFIG, QUANTIZATION, is_converted
from qcutlass.formats.files import as_path
from qcutlass.formats.specs import GUARD, LAYER_KINDS, LayerSpec, ModelSpec, Requantized, guard
from qcutlass.layers import QuantLinear
from qcutlass.layers.activations import check_activations
from qcutlass.layers.base import from_layer
from qcutlass.layers.replace import SKIPPED, check_skip
from qcutlass.models.converted import ConvertedFolder
from qcutlass.models.experts import STACKED, ExpertBlocks, expert_layer, is_router
from qcutlass.models.fitting import check_layers, embeddings
from qcutlass.models.heads import HEAD, check_head, is_embedding, with_head
from qcutlass.models.memory import memory_told
from qcutlass.models.opening import open_source
from qcutlass.models.replacing import new_folder
from qcutlass.models.requantizing import Requantizer, take_float_experts
from qcutlass.models.shards import ShardedWriter, as_bytes, write_json
from qcutlass.models.sources import ModelSource
from qcutlass.products.checks import check_callable, check_flag, check_integer
from qcutlass.schemes import WeightOnly

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes:
        source: the format that was read, a key of `qcutlass.formats.FORMATS`, or several, joined by ", ".
        layers: how many were packed.
        weights: how many numbers these hold.
        verified: how many layers were read back and compared.
        size: bytes of all tensors.
        files: names of the files with tensors, and of their index.
        requantized: the layers that lost something, by name: what they were, and how much.
    """

    source: str
    layers: int
    weights: int
    verified: int
    size: int
    files: list[str]
    requantized: Mapping[str, Requantized] = field(default_factory=dict)


def is_kept(name: str, skip: Sequence[str]) -> bool:
    """Whether a layer is to stay as it is: its name, or its last part, matches one of these, or it is a router."""
    return is_router(name) or any(
        fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern) for pattern in skip
    )


def check_matches(skip: Sequence[str], names: Collection[str]) -> None:
    """Raises ValueError if a pattern, other than those of `SKIPPED`, matches none of the layers `names`."""
    for pattern in skip:
        if pattern in SKIPPED or any(is_kept(name, [pattern]) for name in names):
            continue
        parts = sorted({name.rpartition(".")[2] for name in names})
        close = get_close_matches(pattern, [*parts, *names]) or get_close_matches(pattern.rpartition(".")[2], parts)
        raise ValueError(f"skip: {pattern!r} matches no layer; there are {', '.join(close or parts)}")


@dataclass(frozen=True)
class _Plan:
    """The way layers are made; they are made the same way again to verify them."""

    source: ModelSource
    scheme: WeightOnly
    skip: Sequence[str]
    requantizer: Requantizer
    activations: Activations | None
    embeddings: Collection[str]

    def layer(self, name: str) -> Layer:
        """A layer of the source; quantised, unless it is to stay as it is."""
        layer = self._weights(name)
        is_whole = name in self.embeddings or expert_layer(name) is not None or is_kept(name, self.skip)
        if self.activations is None or (is_whole and self.activations.quantise):
            return layer
        found = self.activations.form(layer)
        return layer if found is None else found

    def check_layers(self) -> None:
        """Raises UnsupportedError if the model could not be loaded with these layers packed."""
        is_float = self.source.checkpoint.format == "floats"
        if self.source.model is not None:
            names = [name for name in self.source.names if not (is_float and is_kept(name, self.skip))]
            check_layers(names, self.source.model, self.source.modules)

    def _weights(self, name: str) -> Layer:
        """Its weights, whatever its activations are."""
        layer, keep = self.source.layer(name), is_kept(name, self.skip)
        if not isinstance(layer, FloatLinear) or not self.source.checkpoint.is_float:
            return self.requantizer.layer(name, layer, keep)
        if keep:
            return layer
        try:
            quantized = quantize_nearest(layer.weight, self.scheme)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        return CanonicalLinear(quantized, layer.bias)


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    format: str = "auto",
    config: Mapping[str, Any] | None = None,
    scheme: WeightOnly | None = None,
    skip: Sequence[str] = SKIPPED,
    lm_head: int | None = None,
    requantize: bool = False,
    activations: str | None = None,
    verify: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:
    """Writes a model with packed layers, which `transformers` loads where qcutlass is imported.

    Quantised layers are taken over without loss. Float layers of a checkpoint that is not quantised are quantised, to
    the nearest; those in a quantised checkpoint stay floats, as embeddings and norms do. Embeddings that a GGUF file
    holds in blocks stay packed, and an output head that is tied to them multiplies by the same packed weights. The
    folder gets safetensors files, `config.json` with `quantization_config`, and the source's tokenizer. It appears as a
    whole when it is complete and on the disk, or not at all.

    Args:
        source: a folder with `config.json` and safetensors files, or a GGUF file, which transformers is needed for.
        destination: a folder that is made.
        format, config: of the source, as for `qcutlass.formats.load`.
        scheme: for float layers, and those that `requantize` means; None: `WeightOnly()`.
        skip: float layers to leave alone: names, their last parts, or patterns of either; by default `lm_head` and
            routers. Routers of mixtures always are.
        lm_head: bits of the output head, 8 (groups of 128) or 4 (groups of 32), symmetric: it is quantised to the
            nearest, whatever it is in the source, and with it an embedding that is tied to it. None: as it is.
        requantize: quantises anew, to the nearest, what can't be kept without loss: layers in codes that no product
            multiplies (`DequantizedLinear`), and experts of a form that their product does not take. `Conversion`, the
            folder's `config.json` and `inspect` say which, and what they lost. False: such a layer is refused.
        activations: "fp8" or "int8": layers of 4-bit codes with integer zeros, or none, become those of the scheme
            `W4A8`, with "fp8" also those of e4m3 weights in square blocks those of `Blockwise`, which run on the CPU
            and, fp8 from compute capability 8.9 on, on GPUs; others, embeddings, experts and what `skip` names stay as
            they are, but one layer has to become so. "none": layers whose activations the source quantises become
            weight-only ones, with the same codes and scales, for every GPU. None: all stay.
        verify: reads every tensor back before the folder appears: dequantised weights and all others must be those of
            the source, bit for bit. What dequantisation of the source is, `qcutlass.formats` defines.
        overwrite: replaces a converted folder.
        shard_bytes: largest size of a file.
        progress: called with what is done, how many steps of the present stage are, and of how many; 0 of 0 where
            there are none to count.

    Raises:
        FileNotFoundError: no such source.
        FileExistsError: `destination` is there and `overwrite` is False.
        TypeError: `scheme` is not a WeightOnly, `skip` no list of names, `requantize` no bool, `shard_bytes` no
            integer.
        ValueError: `activations` is another name, or no layer has such codes; source and destination are the same
            folder or one in the other; the source is converted already; a folder to overwrite is not a converted one;
            `skip` has a pattern that no layer matches; `lm_head` is neither 4 nor 8.
        CheckpointError, UnsupportedError: as for `qcutlass.formats.load`; a file beside the weights that is to be
            copied is a link out of the folder; what was written is not what was read; the model is a mixture of
            experts of a form that is not taken: see the manual's page on models; a layer would lose something, and
            `requantize` is False; the model of `config.json` has no place for a packed layer, or the checkpoint codes
            that no layer has.
        OSError: the disk is full.
        MemoryError: the memory does not suffice for a layer, and for what making it takes.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from qcutlass import models
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = pathlib.Path(name) / "float"
        ...     folder.mkdir()
        ...     _ = (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        ...     save_file({"up.weight": torch.randn(32, 64)}, folder / "model.safetensors")
        ...     models.convert(folder, pathlib.Path(name) / "w4", verify=True).layers
        1
    """
    if not isinstance(scheme, WeightOnly | None):
        raise TypeError(f"scheme: expected a qcutlass.WeightOnly or None, got {type(scheme).__name__}")
    check_skip(skip)
    check_head(lm_head)
    if not isinstance(requantize, bool):
        raise TypeError(f"requantize: expected True or False, got {type(requantize).__name__}")
    check_activations(activations)
    check_integer("shard_bytes", shard_bytes, minimum=1)
    check_flag("verify", verify)
    check_callable("progress", progress)
    old, new = as_path("source", source), as_path("destination", destination)
    check_places(old, new, overwrite)
    report = progress or (lambda name, count, total: None)
    with memory_told(old):
        opened, rounding = open_source(old, format, config), scheme or WeightOnly()
        if requantize:
            take_float_experts(opened)
        opened = with_head(opened, lm_head)
        rows = {*filter(is_embedding, opened.names)}  # are looked up: nothing is multiplied
        rows |= set() if opened.model is None else {*embeddings(opened.names, opened.model)}
        wanted = None if activations is None else STORED_ACTIVATIONS[activations]
        plan = _Plan(opened, rounding, skip, Requantizer(opened, rounding, requantize), wanted, rows)
        plan.check_layers()
        check_matches(skip, plan.source.modules)
        with new_folder(new, overwrite, lambda: check_places(old, new, overwrite)) as folder:
            lost = plan.requantizer.done
            done = write_folder(plan.source, plan.layer, folder, shard_bytes, report, lost)
            verified = _check_written(plan, folder, verify, report)
            report("putting files in place", 0, 0)
    read = plan.source.checkpoint.format
    return Conversion(read, done.layers, done.weights, verified, done.size, done.files, lost)


def check_places(source: Path, destination: Path, overwrite: bool) -> None:
    """Raises unless there is a source, and `destination` is a place for a folder apart from it."""
    check_flag("overwrite", overwrite)
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    old, new = source.resolve(), destination.resolve()
    if old == new or old in new.parents or new in old.parents:
        raise ValueError(f"destination: expected a folder apart from the source {source}, got {destination}")
    parent = next(folder for folder in new.parents if folder.exists())
    if not parent.is_dir():
        raise FileExistsError(f"{destination}: {parent} is a file, not a folder to make it in")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise FileExistsError(f"{destination}: expected a folder or nothing, got a file or a link")
    if overwrite and destination.is_dir() and any(destination.iterdir()) and not is_converted(destination):
        raise ValueError(f"destination: {destination} is not a converted folder; remove it yourself")


def write_folder(
    source: ModelSource,
    layer_of: Callable[[str], Layer],
    folder: Path,
    shard_bytes: int,
    progress: Progress,
    requantized: Mapping[str, Requantized] | None = None,
) -> Conversion:
    """Writes a converted folder: the layers that `layer_of` gives for the source's names, and what else it holds.

    Args:
        requantized: filled by `layer_of`; for the folder's description.
    """
    specs: dict[str, LayerSpec] = {}
    kept: list[str] = []
    weights = size = 0
    experts = ExpertBlocks(stacked=source.config.get("model_type") in STACKED)
    with ShardedWriter(folder, shard_bytes) as writer:
        for count, name in enumerate(source.names):
            layer = layer_of(name)
            if layer.kind not in LAYER_KINDS:
                tensors = layer.tensors
                kept.append(name)
                experts.add(name, None, layer.shape)
            else:
                packed = _packed(layer, name)
                experts.add(name, packed.spec, layer.shape, packed._buffers.get("perm"))
                tensors = {**packed.state_dict(), GUARD: guard()}
                specs[name] = packed.spec
                weights += packed.in_features * packed.out_features
            writer.add({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
            size += sum(tensor.nbytes for tensor in tensors.values())
            progress(f"writing {name}", count + 1, len(source.names))
        progress("writing embeddings and norms", 0, 0)
        for name in source.rest:
            tensor = source.tensor(name)
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and tensor.ndim == 2:
                kept.append(module)
                experts.add(module, None, (tensor.shape[0], tensor.shape[1]))
            writer.add({name: tensor})
            size += tensor.nbytes
        experts.finish()
        progress("writing the tokenizer", 0, 0)
        source.write_files(folder)
        progress("writing the index", 0, 0)
        files = writer.finish()
    if not specs:
        raise CheckpointError(f"{source.checkpoint.format}: no layer to convert")
    if HEAD not in specs and HEAD not in kept and not any(map(is_embedding, specs)):
        kept.append(HEAD)  # one that is tied to floats is in no file
    spec = ModelSpec.of(specs, kept, source.checkpoint.format, requantized)
    write_json(folder / CONFIG, {**source.config, QUANTIZATION: spec.to_dict()})
    return Conversion(source.checkpoint.format, len(specs), weights, 0, size, files)


def _packed(layer: Layer, name: str) -> QuantLinear:
    """The layer as a folder holds it."""
    packed = from_layer(layer, name)
    packed.narrow()
    return packed


def _check_written(plan: _Plan, folder: Path, verify: bool, progress: Progress) -> int:
    """Opens what was written; reads and compares all of it if `verify`."""
    written = ConvertedFolder(folder)
    wanted = plan.activations
    if wanted is not None and not any(written.spec[name].kind in wanted.kinds for name in written.names):
        raise ValueError(
            f"activations: expected {wanted.expected}; there are none in this model; leave it out (--activations)"
        )
    if not verify:
        return 0
    for count, name in enumerate(plan.source.names):
        progress(f"verifying {name}", count, len(plan.source.names))
        layer = plan.layer(name)
        if layer.kind not in LAYER_KINDS:
            pairs = [(written.tensor(f"{name}.{suffix}"), tensor) for suffix, tensor in layer.tensors.items()]
        else:
            found = written[name]
            buffers, others = (dict(each.named_buffers()) for each in (found, _packed(layer, name)))
            if buffers.keys() != others.keys():
                raise CheckpointError(f"{name}: expected {', '.join(others)}, read back {', '.join(buffers)}")
            pairs = [(buffers[key], others[key]) for key in buffers]
            pairs.append((weights_of(found), layer.dequantize(torch.float32)))
        if not all(_is_same(a, b) for a, b in pairs):
            raise CheckpointError(f"{name}: read back, it differs from the source; is the disk damaged?")
    for name in plan.source.rest:
        if not _is_same(written.tensor(name), plan.source.tensor(name)):
            raise CheckpointError(f"{name}: read back, it differs from the source; is the disk damaged?")
    return len(written)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same bits: a NaN is itself, 0.0 is not -0.0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def weights_of(layer: QuantLinear) -> Tensor:
    """The weights float32 `[N, K]` of a layer, dequantised from its packed ones, columns in the activations' order.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.models import weights_of
        >>> weights_of(qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 16))).shape
        torch.Size([16, 64])
    """
    if not isinstance(layer, QuantLinear):
        raise TypeError(f"layer: expected a layer of qcutlass.layers, got {type(layer).__name__}")
    return layer.weights()
