"""Lets transformers (version 5) load converted folders, and folders of other formats, with qcutlass's layers.

Importing this module registers the quantiser; nothing else does, and `import qcutlass` does not import transformers.

    import qcutlass.models.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("converted")

`checkpoint_config` makes the configuration with which `from_pretrained` reads a GPTQ, AWQ or compressed-tensors folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qcutlass import formats
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.layers import QuantLinear
from qcutlass.layers.loading import from_layer
from qcutlass.models.converted import QUANTIZATION, ConvertedFolder, is_converted
from qcutlass.models.specs import METHOD, LayerSpec, ModelSpec

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
    """

    place: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)


@register_quantizer(METHOD)
class QcutlassQuantizer(HfQuantizer):
    """Puts qcutlass's layers into a model that transformers makes and loads.

    The layers of a converted folder are made empty, as `config.json` describes them, and loaded by transformers as any
    other tensor. Those of other formats are read by `qcutlass.formats` when everything else is loaded, one at a time,
    each to the device of its neighbours. Either way the model can be saved, as a converted folder.
    """

    requires_calibration = True  # floats are not quantised here

    def __init__(self, quantization_config: QcutlassConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self._awaited: dict[str, str] = {}
        self._checkpoint: formats.Checkpoint | None = None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise UnsupportedError(
                "from_pretrained: expected the name of a folder; quantised layers come from its files"
            )
        folder = Path(checkpoint_files[0]).parent
        values = self.quantization_config.to_dict()
        if _DEFAULT in values:
            converted = ConvertedFolder(folder)
            self._check_complete(model, converted)
            for place, (name, linear) in _places(converted, model).items():
                layer = converted.empty(name)
                if (layer.out_features, layer.in_features) != (linear.out_features, linear.in_features):
                    raise CheckpointError(f"{name}: {layer} is in the place of {linear}")
                model.set_submodule(place, layer)
        else:
            self._await(model, formats.load(folder, config=values.get("checkpoint")))

    def _check_complete(self, model: PreTrainedModel, converted: ConvertedFolder) -> None:
        """transformers fills in random numbers, with a warning, where weights are absent."""
        prefix = f"{model.base_model_prefix}."
        known = {name.removeprefix(prefix) for name in (*converted, *converted.spec.modules_to_not_convert)}
        for name in _linears(model.base_model):
            if name not in known:
                raise CheckpointError(f"{name}: expected it among the layers of the converted folder; it is absent")

    def _await(self, model: PreTrainedModel, checkpoint: formats.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._awaited = {place: name for place, (name, _) in _places(checkpoint, model).items()}
        for place, name in self._awaited.items():
            model.set_submodule(place, _Awaited(sum(info.nbytes for info in checkpoint.tensors_of(name))))
        names = {name for pair in self._awaited.items() for name in pair}
        ignored = {rf"^{re.escape(name)}\." for name in names}
        model._keys_to_ignore_on_load_unexpected = ignored | set(model._keys_to_ignore_on_load_unexpected or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if self._checkpoint is not None:
            self._fill(model, self._checkpoint)
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                try:
                    module.check()
                except (TypeError, ValueError) as error:
                    raise CheckpointError(f"{name}: {error}") from error
        if model.base_model is model and not model._keep_in_fp32_modules:
            _cast_parameters(model, model.config.dtype)
        return model

    def _fill(self, model: PreTrainedModel, checkpoint: formats.Checkpoint) -> None:
        specs: dict[str, LayerSpec] = {}
        for place, name in self._awaited.items():
            layer, device = from_layer(checkpoint[name], name), model.get_submodule(place).place.device
            specs[place] = LayerSpec.of(layer)
            model.set_submodule(place, layer.to("cpu" if device.type == "meta" else device).eval())
        self._checkpoint = None
        spec = ModelSpec.of(specs, list(_linears(model)), checkpoint.format)
        self.quantization_config = model.config.quantization_config = QcutlassConfig(**spec.to_dict())

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes of an element, by which devices are filled."""
        module = model.get_submodule(param_name.rpartition(".")[0])
        return float(module.size if isinstance(module, _Awaited) else param.element_size())

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def _cast_parameters(model: nn.Module, dtype: Any) -> None:
    """What transformers 5.17 does not do for a base model, whose tensors have other names in the files."""
    for parameter in model.parameters() if isinstance(dtype, torch.dtype) else ():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _places(names: Iterable[str], model: PreTrainedModel) -> dict[str, tuple[str, nn.Linear]]:
    """By the names of modules: the layer of a checkpoint that each is for; UnsupportedError if a layer has no place.

    The modules of a base model lack the prefix that those of the whole model have. A base model takes its part.
    """
    linears, prefix = _linears(model), f"{model.base_model_prefix}."
    found: dict[str, tuple[str, nn.Linear]] = {}
    for name in names:
        candidates = (name, prefix + name, name.removeprefix(prefix))
        place = next((place for place in candidates if place in linears), None)
        if place is not None:
            found[place] = name, linears[place]
        elif model.base_model is not model or name.startswith(prefix):
            raise UnsupportedError(f"{name}: {type(model).__name__} has no such torch.nn.Linear to replace")
    return found


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
    found = AutoConfig.from_pretrained(folder, **keywords)
    found.quantization_config = QcutlassConfig(checkpoint=config).to_dict()
    return found


def load_model(
    folder: str | PathLike[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a converted folder or one that `qcutlass.formats` reads.

    Args:
        folder: also one with floats, which then stay floats.
        device: to which the model is moved.
        dtype: of embeddings, norms and activations; None: float32 on the CPU, on a GPU the configuration's, or float16.

    Raises:
        FileNotFoundError: there is no such folder.
        UnsupportedError: as for `qcutlass.formats.load`; transformers reads no tokenizer there.
        CheckpointError: as for `qcutlass.formats.load`; some of the model's tensors are absent.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder; a GGUF file is converted first: qcutlass convert")
    # Both check the headers, with errors that say more than those of transformers.
    format = METHOD if is_converted(path) and ConvertedFolder(path) else formats.detect(path)
    config = AutoConfig.from_pretrained(path)
    if format == "floats":
        config.__dict__.pop(QUANTIZATION, None)  # whatever it says
    elif format != METHOD:
        config.quantization_config = QcutlassConfig().to_dict()
    where = torch.device(device)
    if dtype is None and where.type == "cpu":
        dtype = torch.float32
    elif dtype is None:
        dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.float16
    tokenizer = _tokenizer(path)
    model, report = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:  # which transformers fills with random numbers
        names = sorted(report["missing_keys"])
        raise CheckpointError(f"{path}: {len(names)} of the model's tensors are absent: {', '.join(names[:4])}")
    return model.to(where).eval(), tokenizer


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"{folder}: transformers reads no tokenizer there ({reason})") from error
