"""Lets transformers (version 5) load converted folders, and folders of other formats, with qcutlass's layers.

`import qcutlass` registers the quantiser, in any order with `import transformers`, which it does not import.

    import qcutlass
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("converted")

`checkpoint_config` makes the configuration with which `from_pretrained` reads a GPTQ, AWQ or compressed-tensors folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qcutlass import formats
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.converted import QUANTIZATION, PackedFolder, is_converted
from qcutlass.formats.files import as_path
from qcutlass.formats.specs import GUARD, METHOD, LayerSpec, ModelSpec
from qcutlass.layers import QuantEmbedding, QuantExperts, QuantLinear, TiedLinear, WeightOnlyLinear, use_activations
from qcutlass.layers.activations import check_activations, fit_activations
from qcutlass.layers.base import from_layer
from qcutlass.layers.packed import PackedModule
from qcutlass.layers.replace import AFTER
from qcutlass.models.converted import ConvertedFolder
from qcutlass.models.expert_modules import Block, expert_modules, find_blocks
from qcutlass.models.experts import expert_layer, module_forms
from qcutlass.models.extras import SAFE, SAFE_WEIGHTS, check_alone, checked_files, load_tokenizer, reading
from qcutlass.models.fitting import (
    absent,
    check_codes,
    check_decoder,
    is_initialised_alone,
    is_linear,
    left_out,
    places,
    scale_of,
    skeleton,
    unloaded,
    weight_shape,
)
from qcutlass.models.saving import Saved, floats, save, saved_tensors
from qcutlass.products.checks import FLOATING, as_device_here, check_dtype

if TYPE_CHECKING:  # this module is imported while transformers' own models are not yet
    from transformers import PreTrainedModel

_DEFAULT: Final = "default"


@register_quantization_config(METHOD)
class QcutlassConfig(QuantizationConfigMixin):
    """`quantization_config` for qcutlass.

    Args:
        checkpoint: for folders that are not converted: replaces what they say of their quantisation, as `config` of
            `qcutlass.formats.load` does.
        values: of a converted folder's `config.json`.

    Example:
        >>> from qcutlass.models.transformers import QcutlassConfig
        >>> QcutlassConfig().quant_method
        'qcutlass'
    """

    def __init__(self, checkpoint: dict[str, Any] | None = None, **values: Any) -> None:
        values.pop("quant_method", None)
        self.quant_method = METHOD
        if checkpoint is not None:
            self.checkpoint = checkpoint
        self.__dict__.update(values)


class _Awaited(nn.Module):
    """Stands where a layer will be, while transformers places and loads everything else.

    Its one byte goes where the layer is to be; in plans for the devices' memory it counts as the layer's size.

    Args:
        size: of the layer, in bytes.
        bias: of a head whose weights are those of an embedding; it is loaded as any other tensor.
    """

    place: Tensor

    def __init__(self, size: int, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.size = size
        self.bias = bias
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError("a packed layer has no weight, which this model reads itself; convert says of which")
        return super().__getattr__(name)


@register_quantizer(METHOD)
class QcutlassQuantizer(HfQuantizer):
    """Puts qcutlass's layers into a model that transformers makes and loads.

    The layers of a converted folder are made empty, as `config.json` describes them, and loaded by transformers as any
    other tensor. Those of other formats are read by `qcutlass.formats` when everything else is loaded, one at a time,
    each to the device of its neighbours. Either way the model can be saved, as a converted folder.
    """

    quantization_config: QcutlassConfig
    requires_calibration = True  # floats are not quantised here

    def __init__(self, quantization_config: QcutlassConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self._awaited: dict[str, Callable[[], nn.Module]] = {}
        self._blocks: list[Block] = []
        self._specs: dict[str, LayerSpec] = {}
        self._source: str | None = None
        self._places: dict[str, str] = {}  # of layers, by their names in the files
        self._types: dict[str, torch.dtype] = {}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        files = checked_files(checkpoint_files, model.config)
        self._types = _parameter_types(model)
        folder = Path(files[0]).parent
        values = self.quantization_config.to_dict()
        if _DEFAULT in values:
            converted = ConvertedFolder(folder)
            _check_files(files, converted.files)
            self._check_complete(model, converted)
            self._place(model, converted)
        else:
            checkpoint = formats.load(folder, config=values.get("checkpoint"))
            _check_files(files, checkpoint.files)
            check_codes(checkpoint, model)
            self._await(model, checkpoint)

    def _place(self, model: PreTrainedModel, converted: ConvertedFolder) -> None:
        names = _loaded(model, converted)
        blocks, others = find_blocks(names, model)
        self._specs = {name: converted.spec[name] for name in names}
        self._await_experts(model, blocks, converted, converted.__getitem__)
        found = places(others, model)
        # Some names are the model's by then: transformers compares files' names after it has changed them.
        _ignore(model, (rf"^{re.escape(name)}\.{GUARD}$" for name in (*names, *found)))
        for place, (name, module) in found.items():
            layer = converted.empty(name)
            if (layer.out_features, layer.in_features) != weight_shape(module):
                raise CheckpointError(f"{name}: {layer} is in the place of {module}")
            if isinstance(module, nn.Embedding):
                layer = _embedding(layer, module, name)
            _replace(model, place, layer)
            layer.begin_loading()
            self._places[name] = place
        self._tie(model, converted.rest)

    def _check_complete(self, model: PreTrainedModel, converted: ConvertedFolder) -> None:
        """transformers fills in random numbers, with a warning, where weights are absent."""
        listed = [*converted, *converted.spec.modules_to_not_convert]
        blocks = {layer.block for name in listed if (layer := expert_layer(name)) is not None}
        listed += (form for block in blocks for form in module_forms(block))
        for name in absent(listed, model, (*_linears(model.base_model), *expert_modules(model.base_model))):
            raise CheckpointError(f"{name}: expected it among the layers of the converted folder; it is absent")

    def _await(self, model: PreTrainedModel, checkpoint: formats.Checkpoint) -> None:
        def read(name: str) -> QuantLinear:
            return from_layer(checkpoint[name], name)

        def read_for(module: nn.Module, name: str) -> QuantLinear:
            return _embedding(read(name), module, name) if isinstance(module, nn.Embedding) else read(name)

        blocks, others = find_blocks(_loaded(model, checkpoint), model)
        self._source = checkpoint.format
        self._await_experts(model, blocks, checkpoint, read)
        for place, (name, module) in places(others, model).items():
            self._awaited[place] = partial(read_for, module, name)
            self._places[name] = place
            _replace(model, place, _Awaited(sum(info.nbytes for info in checkpoint.tensors_of(name))))
            _ignore(model, (rf"^{re.escape(each)}\." for each in (place, name)))
        self._tie(model, checkpoint.rest)

    def _tie(self, model: PreTrainedModel, floats: Container[str]) -> None:
        """Has the heads that are tied to packed embeddings share them, and transformers tie nothing that is packed.

        Args:
            floats: names of tensors in the files; a head whose weights are among them keeps these.
        """
        tied = dict(model.all_tied_weights_keys)
        for target, source in model.all_tied_weights_keys.items():
            (place, _, _), (owner, _, _) = target.rpartition("."), source.rpartition(".")
            embedding, head = model.get_submodule(owner), model.get_submodule(place)
            if type(head) is nn.Linear and target not in floats:
                if isinstance(embedding, QuantEmbedding):
                    model.set_submodule(place, TiedLinear(embedding, head.bias))
                elif isinstance(embedding, _Awaited):
                    model.set_submodule(place, _Awaited(1, head.bias))
                    self._awaited[place] = partial(_tied, model, place, owner)
            if any(isinstance(module, QuantLinear | _Awaited) for module in (embedding, head)):
                del tied[target]
        if tied != model.all_tied_weights_keys:
            model.all_tied_weights_keys, model._tied_weights_keys = tied, dict(tied)

    def _await_experts(
        self, model: PreTrainedModel, blocks: list[Block], source: Any, read: Callable[[str], QuantLinear]
    ) -> None:
        """`source` knows the tensors of a layer."""
        self._blocks = blocks
        for block in blocks:
            self._awaited[block.place] = partial(block.read, read)
            size = sum(info.nbytes for name in block.names for info in source.tensors_of(name))
            model.set_submodule(block.place, _Awaited(size))
            _ignore(model, [rf"^{re.escape(block.place)}\."])

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        self._fill(model)
        # Not get_input_embeddings(), which is an error of models of sounds and pictures.
        if any(isinstance(module, QuantEmbedding) for module in model.modules()):
            model.resize_token_embeddings = partial(_resize, model)
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                module.end_loading()
                try:
                    module.check()
                except (TypeError, ValueError) as error:
                    raise CheckpointError(f"{name}: {error}") from error
        _cast_parameters(model, self._types)
        model.save_pretrained = partial(save, model, self.saved)
        _save_as_converted(model)  # its base model, which is saved with other names
        return model

    def _fill(self, model: PreTrainedModel) -> None:
        """Reads what transformers has not; describes it as it will be saved."""
        for place, read in self._awaited.items():
            layer, device = read(), model.get_submodule(place).place.device
            if isinstance(layer, QuantLinear):
                self._specs[place] = layer.spec
            model.set_submodule(place, layer.to("cpu" if device.type == "meta" else device).eval())
        for block in self._blocks:  # joined experts have types in common
            self._specs |= block.specs(model.get_submodule(block.place))
        if self._awaited:
            self.quantization_config = model.config.quantization_config = self.described(model, self._specs)
        self._awaited = {}

    def described(self, model: PreTrainedModel, specs: Mapping[str, LayerSpec]) -> QcutlassConfig:
        """The configuration that says what the layers are."""
        values: dict[str, Any] = self.quantization_config.to_dict()
        listed = [*values.get("modules_to_not_convert", ()), *floats(model)]
        kept = [name for name in dict.fromkeys(listed) if name not in specs]
        found = ModelSpec.of(specs, kept, self._source or values.get("source", "floats")).to_dict()
        found |= {key: values[key] for key in ("requantized",) if key in values}
        return QcutlassConfig(**found)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes of an element, by which devices are filled."""
        module = model.get_submodule(param_name.rpartition(".")[0])
        return float(module.size if isinstance(module, _Awaited) else param.element_size())

    def saved(self, model: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> Saved:
        """The tensors that `save_pretrained` writes, and their configuration: None where no layer is packed.

        The layers that are there now are described: others may have been put in their place since.
        """
        tensors, specs = saved_tensors(model, state)
        if not specs:
            return tensors, None
        modules = dict(model.named_modules(remove_duplicate=False))
        for block in self._blocks:
            experts = modules.get(block.place)
            if isinstance(experts, QuantExperts):
                specs |= block.specs(experts)
        specs |= {name: specs[place] for name, place in self._places.items() if place in specs}
        return tensors, self.described(model, specs)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors that transformers writes where it is not asked by the `save_pretrained` of the model."""
        tensors, config = self.saved(model)
        model.config.__dict__.pop(QUANTIZATION, None)
        model.config.__dict__.update({} if config is None else {QUANTIZATION: config})
        return tensors, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _save_as_converted(model: nn.Module) -> None:
    """Has `save_pretrained` of a model whose layers were replaced, and of those in it, write a converted folder."""
    from transformers import PreTrainedModel

    for module in model.modules():
        quantised = getattr(module, "hf_quantizer", None) is not None or "save_pretrained" in vars(module)
        if isinstance(module, PreTrainedModel) and not quantised:
            module.save_pretrained = partial(save, module, QcutlassQuantizer(QcutlassConfig()).saved)


AFTER.append(_save_as_converted)


def _ignore(model: PreTrainedModel, patterns: Iterable[str]) -> None:
    """Has transformers pass over these names in the files."""
    model._keys_to_ignore_on_load_unexpected = {*patterns, *(model._keys_to_ignore_on_load_unexpected or ())}


def _check_files(read: Iterable[str], checked: Iterable[str]) -> None:
    """Raises CheckpointError where transformers is about to read a file that qcutlass has not checked."""
    known = {Path(file).resolve() for file in checked}
    for file in read:
        if Path(file).resolve() not in known:
            raise CheckpointError(f"{file}: transformers reads it, qcutlass {', '.join(sorted(checked))}; keep one")


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_linear(module)]


def _embedding(layer: QuantLinear, module: nn.Embedding, name: str) -> QuantEmbedding:
    """The layer in the place of an embedding, of whose type it gives rows."""
    try:
        if not isinstance(layer, WeightOnlyLinear):
            raise TypeError(f"expected weights alone to be quantised, got {type(layer).__name__}")
        return QuantEmbedding(layer, module.weight.dtype, scale_of(module))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}") from error


def _tied(model: PreTrainedModel, place: str, owner: str) -> TiedLinear:
    """The head for a place, that shares the weights of an embedding."""
    embedding: Any = model.get_submodule(owner)
    return TiedLinear(embedding, model.get_submodule(place).bias)


def _loaded(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The layers that the model loads; transformers passes over the tensors of the others, without a warning."""
    names = list(names)
    others = set(left_out(names, model))
    _ignore(model, unloaded(model))
    return [name for name in names if name not in others]


def _replace(model: PreTrainedModel, place: str, layer: nn.Module) -> None:
    """Puts a layer into a model, of which no owner then initialises weights that it no longer has."""
    model.set_submodule(place, layer)
    owner: Any = model.get_submodule(place.rpartition(".")[0])
    if is_initialised_alone(owner):
        owner._is_hf_initialized = True


def _resize(model: PreTrainedModel, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
    """In place of `resize_token_embeddings`, for packed embeddings."""
    embedding: Any = model.get_input_embeddings()
    if new_num_tokens not in (None, embedding.num_embeddings):
        raise UnsupportedError(
            f"resize_token_embeddings: the {embedding.num_embeddings} embeddings are packed, and stay as many; resize "
            "the model that they come from, and convert it again"
        )
    return embedding


def _parameter_types(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """What transformers loads parameters as: the type asked for, but where it or a module keeps another."""
    kept = [
        *((model._keep_in_fp32_modules or ()) if model.dtype == torch.float16 else ()),
        *((model._keep_in_fp32_modules_strict or ()) if model.dtype in (torch.float16, torch.bfloat16) else ()),
    ]
    return {
        name: torch.float32 if any(fnmatchcase(name, f"*{pattern}*") for pattern in kept) else parameter.dtype
        for name, parameter in model.named_parameters()
    }


def _cast_parameters(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Casts parameters, which transformers 5.17 omits where files have other names for them: base models', routers'."""
    for name, parameter in model.named_parameters():
        dtype = types.get(name, parameter.dtype)
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def checkpoint_config(folder: str | PathLike[str], config: dict[str, Any] | None = None, **keywords: Any) -> Any:
    """The configuration with which `from_pretrained` reads a quantised folder of another format.

    Neither gptqmodel nor optimum, autoawq or compressed-tensors is needed.

    Args:
        folder: or a name on the hub, with safetensors files of a format in `qcutlass.formats.FORMATS`.
        config: replaces what the folder says of its quantisation, key by key.
        keywords: for `transformers.AutoConfig.from_pretrained`.

    Returns:
        A `transformers.PreTrainedConfig`; with `config=` it goes to `from_pretrained`.

    Example:
        >>> from qcutlass.models.transformers import checkpoint_config
        >>> def load(folder):  # a GPTQ, AWQ or compressed-tensors folder
        ...     return AutoModelForCausalLM.from_pretrained(folder, config=checkpoint_config(folder))
    """
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder, **{**SAFE, **keywords})
    found.quantization_config = QcutlassConfig(checkpoint=config).to_dict()
    return found


def load_model(
    folder: str | PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    activations: str | None = None,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a converted folder or one that `qcutlass.formats` reads.

    Weights come from the files that qcutlass has checked. Pickles are never read, and no code of the folder is run.

    Args:
        folder: also one with floats, which then stay floats.
        device: to which the model is moved.
        dtype: of embeddings, norms and activations; None: float32 on the CPU, on a GPU the configuration's, or float16.
        activations: "int8" or "fp8": weight-only layers quantise their input; "none": no layer does;
            all as `layers.use_activations` says. None: as the folder has it; layers of 8-bit activations for which a
            GPU has no kernel, as fp8 ones before compute capability 8.9, become weight-only ones, with a warning.

    Raises:
        FileNotFoundError: there is no such folder.
        UnsupportedError: as for `qcutlass.formats.load`; transformers reads no model or tokenizer there; the model has
            an encoder; the folder holds adapters, or asks for code from elsewhere.
        CheckpointError: as for `qcutlass.formats.load`; some of the model's tensors are absent.
        TypeError, ValueError: an argument is not as described.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path, where = as_path("folder", folder), as_device_here("device", device)
    check_activations(activations)
    check_dtype("dtype", torch.float32 if dtype is None else dtype, FLOATING)
    if not path.is_dir():
        a_file = "a file, expected a folder; qcutlass convert makes one of a GGUF file"
        raise FileNotFoundError(f"{path}: {a_file if path.is_file() else 'no such folder'}")
    # Both check the headers, with errors that say more than those of transformers.
    opened = PackedFolder(path) if is_converted(path) else formats.load(path)
    check_alone(path)
    with reading(path, "configuration"):
        config = AutoConfig.from_pretrained(path, **SAFE)
    check_decoder(config, path)
    config.transformers_weights = _weights_file(path, opened.files)
    if isinstance(opened, formats.Checkpoint):
        if opened.format == "floats":
            if any(opened.codes()):
                check_codes(opened, skeleton(config.to_dict(), opened, path))
            config.__dict__.pop(QUANTIZATION, None)  # whatever it says
        else:
            config.quantization_config = QcutlassConfig().to_dict()
    if dtype is None and where.type == "cpu":
        dtype = torch.float32
    elif dtype is None:
        dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.float16
    tokenizer = load_tokenizer(path)
    with reading(path, "causal language model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **SAFE_WEIGHTS
        )
    if report["missing_keys"]:  # which transformers fills with random numbers
        names = sorted(report["missing_keys"])
        raise CheckpointError(f"{path}: {len(names)} of the model's tensors are absent: {', '.join(names[:4])}")
    model = model.to(where).eval()
    if activations is not None:
        use_activations(model, activations)
    fit_activations(model)
    return model, tokenizer


def _weights_file(folder: Path, files: Iterable[str]) -> str:
    """The file, or the index of several, that has been checked and that transformers is to read."""
    found = [path.name for path in folder.glob("*.safetensors.index.json")] or [Path(file).name for file in files]
    if len(found) != 1 or not found[0].endswith((".safetensors", ".json")):
        raise UnsupportedError(
            f"{folder}: transformers reads one .safetensors file, or those that an index lists, got "
            f"{', '.join(found[:4])}; convert it first: qcutlass convert"
        )
    return found[0]
