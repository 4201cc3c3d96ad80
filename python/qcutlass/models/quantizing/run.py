"""Quantises a whole model into a converted folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Layer
from qcutlass.formats.files import as_path
from qcutlass.layers.replace import SKIPPED, check_skip
from qcutlass.models.conversion import (
    SHARD_BYTES,
    Progress,
    check_matches,
    check_places,
    is_kept,
    write_folder,
)
from qcutlass.models.converted import ConvertedFolder
from qcutlass.models.experts import expert_layer
from qcutlass.models.extras import import_transformers
from qcutlass.models.fitting import check_layers, is_linear
from qcutlass.models.heads import check_head, with_head
from qcutlass.models.memory import memory_told
from qcutlass.models.opening import open_source
from qcutlass.models.quantizing.decoder import Call, Decoder, run
from qcutlass.models.quantizing.methods import BlockResult, Method, in_place, quantize_block, record
from qcutlass.models.quantizing.unrolling import expert_groups
from qcutlass.models.quantizing.wiring import InputGroup, find_groups
from qcutlass.models.quantizing.work import Work, check_destination, file_stats, work_folder
from qcutlass.models.replacing import new_folder, remove_leftovers
from qcutlass.models.sources import ModelSource
from qcutlass.products.checks import (
    as_device_here,
    check_callable,
    check_flag,
    check_integer,
    check_seed,
    check_tensor,
    check_tokens,
    check_values,
)
from qcutlass.version import __version__

_VERSION = 5  # of the work folder
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Quantization:
    """The result of `quantize_model`.

    Attributes:
        layers: how many were quantised.
        weights: how many numbers these hold.
        size: bytes of all tensors.
        files: names of the files with tensors, and of their index.
        resumed: how many blocks an earlier run had finished.
        notes: by layer: `error`, of its outputs over their size (both squared); `exponent` of AWQ or SmoothQuant;
            `damping` of GPTQ; `unreached` of an expert that no token of the calibration came to, so that it was rounded
            to nearest.
        kept: names of the linear layers that stay floats though `skip` names none of them: those outside of blocks, but
            for the output head. Empty, too, where transformers does not know the model's class.
    """

    layers: int
    weights: int
    size: int
    files: list[str]
    resumed: int
    notes: dict[str, dict[str, float]]
    kept: list[str] = field(default_factory=list)


def calibration_windows(ids: Tensor, samples: int, seqlen: int, seed: int) -> Tensor:
    """Windows of a text, at places chosen at random by `seed`, which may overlap.

    Args:
        ids: int64 `[tokens]`.

    Returns:
        int64 `[samples, seqlen]`.

    Raises:
        TypeError: `ids` is no tensor of int64, or a number no integer.
        ValueError: the text has less than `seqlen` tokens; the seed is not of 64 bits.

    Example:
        >>> import torch
        >>> from qcutlass.models import calibration_windows
        >>> calibration_windows(torch.arange(100), samples=4, seqlen=16, seed=0).shape
        torch.Size([4, 16])
    """
    check_integer("samples", samples, minimum=1)
    check_integer("seqlen", seqlen, minimum=1)
    check_seed("seed", seed)
    check_tokens("ids", ids)
    if len(ids) < seqlen:
        raise ValueError(f"calibration: expected a text of at least {seqlen} tokens, got {len(ids)}; take a longer one")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - seqlen + 1, (samples,), generator=generator)
    return ids[starts[:, None] + torch.arange(seqlen)]


class _Overlay(ModelSource):
    """A source with the quantised layers, and the norms that took factors, in place of its own."""

    def __init__(self, source: ModelSource, work: Work) -> None:
        self._source, self._work = source, work
        self.checkpoint, self.config = source.checkpoint, source.config
        self.names, self.rest = source.names, source.rest

    def layer(self, name: str) -> Layer:
        return self._work.layer(name) or self._source.layer(name)

    def tensor(self, name: str) -> Tensor:
        found = self._work.tensor(name)
        return self._source.tensor(name) if found is None else found

    def write_files(self, folder: Path) -> None:
        self._source.write_files(folder)


def open_model(
    source: Path,
    destination: Path,
    *,
    format: str = "auto",
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    restart: bool = False,
) -> ModelSource:
    """The opened source of `quantize_model`; raises as that does for places, and for models that it does not take."""
    check_places(source, destination, overwrite)
    check_destination(destination, overwrite, restart)
    with memory_told(source):
        return open_source(source, format, config)


def quantize_model(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    method: Method | str = "gptq",
    *,
    calibration: Tensor | None = None,
    skip: Sequence[str] = SKIPPED,
    lm_head: int | None = None,
    device: str | torch.device = "cpu",
    format: str = "auto",
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    restart: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Quantization:
    """Quantises the linear layers of a decoder's blocks, and writes a folder as `qcutlass.models.convert` does.

    One block is in memory at a time: its layers see what the quantised blocks before it make of the calibration tokens.
    Methods without calibration take models with an encoder, too, and quantise the blocks of both. What a finished block
    has become is kept in `<destination>.work` (shortened where that is too long for a name); the same call goes on from
    there after a kill, and gives the same bytes. The destination appears as a whole, and the folder with the work goes;
    if a kill comes between the two, the same call removes it and tells what was made.

    Args:
        source: a folder with `config.json` and safetensors files, or a GGUF file, of a model that transformers knows.
        destination: a folder that is made.
        method: a `Method`, or the name of one.
        calibration: int64 `[samples, tokens]`, see `calibration_windows`; needed by gptq, awq, smoothquant and static
            activations.
        skip: layers to leave alone: names, their last parts, or patterns of either; by default `lm_head` and routers.
        lm_head: bits of the output head, 4 or 8, as for `qcutlass.models.convert`; None: as it is.
        device: where blocks run and are quantised, in fp32.
        format, config: of the source, as for `qcutlass.formats.load`.
        overwrite: replaces a converted folder.
        restart: removes what another run has left in `<destination>.work`.
        shard_bytes: largest size of a file.
        progress: as for `convert`.

    Raises:
        FileExistsError: `destination` is there and not to be overwritten; the folder of the work is that of a run with
            another source, calibration, method or version of a package, being worked in, or holds files of others.
        UnsupportedError: transformers is absent, does not know the model, or names its weights otherwise; the model is
            a mixture of experts of a form that is not taken, or the method not one for experts: smoothquant, w8a8, gptq
            with act-order; it has an encoder, and the method needs calibration.
        TypeError, ValueError: options; calibration is missing, not of this model's tokens, or not looked at by the
            method; a pattern of `skip` matches no layer; or as for `convert`.
        CheckpointError, OSError, MemoryError: as for `convert`.

    Example:
        >>> import tempfile, torch, qcutlass
        >>> from qcutlass import models
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> config = AutoConfig.for_model("llama", vocab_size=96, **sizes)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/float")
        ...     method = models.Method("awq", qcutlass.WeightOnly(bits=4, group_size=32, symmetric=True))
        ...     ids = models.calibration_windows(torch.randint(0, 96, (500,)), samples=4, seqlen=16, seed=0)
        ...     models.quantize_model(f"{folder}/float", f"{folder}/w4", method, calibration=ids).layers
        14
    """
    chosen = Method(method) if isinstance(method, str) else method
    if not isinstance(chosen, Method):
        raise TypeError(f"method: expected a Method or its name, got {type(method).__name__}")
    check_skip(skip)
    check_head(lm_head)
    check_integer("shard_bytes", shard_bytes, minimum=1)
    check_flag("restart", restart)
    check_callable("progress", progress)
    where = as_device_here("device", device)
    ids = _checked_calibration(calibration, chosen)
    old, new = as_path("source", source), as_path("destination", destination)
    opened = with_head(
        open_model(old, new, format=format, config=config, overwrite=overwrite, restart=restart), lm_head
    )
    report = progress or (lambda name, count, total: None)
    run_through = _Run(opened, chosen, ids, skip, where, report)
    description = _description(old, opened, chosen, ids, skip, lm_head, where)
    with memory_told(old), work_folder(new, description, overwrite=overwrite, restart=restart) as work:
        told = work.made(new)
        if told is not None:
            remove_leftovers(new)
            return Quantization(**told, resumed=run_through.blocks, kept=run_through.kept)
        resumed = run_through.all(work)
        work.open()
        overlay = _Overlay(opened, work)
        with new_folder(new, overwrite, lambda: check_places(old, new, overwrite)) as folder:
            done = write_folder(overlay, overlay.layer, folder, shard_bytes, report)
            ConvertedFolder(folder)
            told = {"layers": done.layers, "weights": done.weights, "size": done.size, "files": done.files}
            told["notes"] = work.notes
            work.set_made(folder, told)
    return Quantization(**told, resumed=resumed, kept=run_through.kept)


def _checked_calibration(calibration: Tensor | None, method: Method) -> Tensor | None:
    method.check_calibrated(calibration is not None, "calibration", "tokens [samples, tokens]; see calibration_windows")
    if calibration is None:
        return None
    check_tensor("calibration", calibration, (torch.int64,))
    check_values("calibration", calibration)
    if calibration.dim() != 2 or not calibration.numel():
        raise ValueError(f"calibration: expected [samples, tokens], got {list(calibration.shape)}")
    return calibration.cpu()


def _description(
    path: Path,
    source: ModelSource,
    method: Method,
    ids: Tensor | None,
    skip: Sequence[str],
    lm_head: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """The identity of a run, for its folder: all that its bytes depend on, but for the number of threads."""
    options = asdict(method)
    options["scheme"]["scale_dtype"] = str(method.scheme.scale_dtype)
    calibration = None
    if ids is not None:
        calibration = {"shape": list(ids.shape), "sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}
    return {
        "layout": _VERSION,
        "source": file_stats(path),
        "format": source.checkpoint.format,
        "model": source.config,
        "method": options,
        "calibration": calibration,
        "skip": sorted(set(skip)),
        "lm_head": lm_head,
        "device": device.type,
        "versions": {
            "qcutlass": __version__,
            "torch": torch.__version__,
            "transformers": import_transformers("quantising a model").__version__,
        },
    }


def _check_experts(method: Method, names: Sequence[str]) -> None:
    """Raises UnsupportedError if experts are among the layers and the method does not give what their product takes."""
    name = next((name for name in names if expert_layer(name)), None)
    if name is None:
        return
    if not method.is_weight_only:
        raise UnsupportedError(
            f"{name}: experts take methods that quantise weights alone, not {method.name}; take rtn, gptq or awq, or "
            "leave experts as they are: skip with '*.experts.*' (--skip)"
        )


class _Run:
    """One run through the blocks."""

    def __init__(
        self,
        source: ModelSource,
        method: Method,
        ids: Tensor | None,
        skip: Sequence[str],
        device: torch.device,
        report: Progress,
    ) -> None:
        self._source, self._method, self._ids, self._report = source, method, ids, report
        self._decoder = Decoder(source, device, is_calibrated=ids is not None)
        self._device = device
        if ids is not None:
            self._decoder.check_ids(ids)
        check_matches(skip, [name for name, module in self._decoder.model.named_modules() if is_linear(module)])
        self._names = [
            [name for name in self._decoder.linears(index) if not is_kept(f"{block}.{name}", skip)]
            for index, block in enumerate(self._decoder.names)
        ]
        if not any(self._names):
            raise ValueError("skip: no linear layer of the blocks is left to quantise")
        _check_experts(method, [name for names in self._names for name in names])
        self.kept = [name for name in self._check_places() if not is_kept(name, skip)]
        passes = 0 if ids is None else 2 * len(ids)
        self._steps = [passes + len(names) for names in self._names]
        self.blocks = len(self._names)
        self._done = 0
        self._groups: dict[tuple[Any, ...], list[InputGroup]] = {}

    def _check_places(self) -> list[str]:
        """Raises UnsupportedError if the model could not be loaded with the layers packed that will be.

        Returns:
            Names of the linear layers that stay as they are, where the model is known.
        """
        source, found = self._source, enumerate(self._names)
        quantized = {self._decoder.stored_name(index, name) for index, names in found for name in names}
        is_float = source.checkpoint.format == "floats"

        def is_packed(name: str) -> bool:
            return not is_float or name in quantized or name not in source.checkpoint  # a tied head's embedding

        if source.model is None:
            return []
        return check_layers(filter(is_packed, source.names), source.model, source.modules)

    def all(self, work: Work) -> int:
        """Quantises what an earlier run has not; how many blocks it had finished."""
        first = work.finished()
        self._done = sum(self._steps[:first])
        if first == len(self._names):
            return first
        hidden: list[Tensor] = []
        calls: list[Call] = []
        if self._ids is not None:
            self._report("embeddings", self._done, sum(self._steps))
            hidden, calls = self._decoder.inputs(self._ids[:1] if first else self._ids)
            if first:
                hidden = [row[None] for row in work.state(first - 1).to(self._device)]
        for index in range(first, len(self._names)):
            self._block(work, index, hidden, calls[index] if calls else None)
        return first

    def _step(self, what: str) -> None:
        self._done += 1
        self._report(what, self._done, sum(self._steps))

    def _block(self, work: Work, index: int, hidden: list[Tensor], call: Call | None) -> None:
        with self._decoder.block(index) as block, torch.no_grad():
            groups = [InputGroup((name,), None) for name in self._names[index]]
            statistics = {}
            if call is not None:
                groups = self._wiring(index, block, hidden[0], call)

                def forward() -> None:
                    for x in hidden:
                        run(block, x, call)
                        self._step(f"block {index}: statistics")

                statistics = record(block, groups, self._method, len(hidden), forward)
            try:
                found = quantize_block(
                    block, groups, statistics, self._method, lambda name: self._step(f"block {index}: {name}")
                )
            except ValueError as error:
                raise CheckpointError(f"{self._decoder.names[index]}.{error}") from error
            del statistics
            self._keep_types(index, block, found)
            if call is not None:
                with in_place(block, found.layers):
                    for i, x in enumerate(hidden):
                        hidden[i] = run(block, x, call)
                        self._step(f"block {index}: outputs")
                        if not bool(hidden[i].isfinite().all()):
                            raise CheckpointError(f"{self._decoder.names[index]}: its output is not finite")
        state = torch.cat(hidden) if hidden and index + 1 < len(self._names) else None
        layers, changed, notes = found.layers, found.changed, found.notes
        work.add(index, self._stored(index, layers), self._stored(index, changed), state, self._stored(index, notes))

    def _stored(self, index: int, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """By the source's names."""
        return {self._decoder.stored_name(index, name): value for name, value in values.items()}

    def _wiring(self, index: int, block: nn.Module, hidden: Tensor, call: Call) -> list[InputGroup]:
        """Looked for once for all blocks of one kind."""
        kinds = tuple((name, type(module), tuple(module._parameters)) for name, module in block.named_modules())
        key = (*kinds, *self._names[index])
        if key not in self._groups:
            names = self._names[index]
            dense = [name for name in names if expert_layer(name) is None]
            groups = find_groups(block, dense, hidden, lambda x: run(block, x, call)) + expert_groups(names)
            if not all(group.is_telling for group in groups):
                return groups
            self._groups[key] = groups
        return self._groups[key]

    def _keep_types(self, index: int, block: nn.Module, found: BlockResult) -> None:
        """Rounds what took factors to the type that it is stored in."""
        for name, value in found.changed.items():
            dtype = self._source.tensor(self._decoder.stored_name(index, name)).dtype
            found.changed[name] = value.to(dtype)
            block.get_parameter(name).copy_(found.changed[name])
