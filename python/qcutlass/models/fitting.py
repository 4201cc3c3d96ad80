"""What of a checkpoint fits a model of transformers: the modules that layers are for, and what is never loaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.algorithms.conv1d import is_conv1d
from qcutlass.errors import UnsupportedError
from qcutlass.formats import Checkpoint
from qcutlass.formats.tensors import FROM_FLOATS
from qcutlass.layers.experts import REPLACED
from qcutlass.models.expert_modules import check_counts, of_experts
from qcutlass.models.experts import is_router
from qcutlass.models.extras import check_implementations, import_transformers
from qcutlass.models.heads import HEAD, HEADS

_WEIGHT: Final = ".weight"  # transformers may give such tensors other names, those of experts
_LINEARS: Final = ("FalconLinear",)
"""Types of transformers that are derived from `torch.nn.Linear` and compute what it does."""
_MOST_NEXT: Final = 16
"""Blocks that predict further tokens; published models have one or a few."""
_INSTEAD: Final = (
    "a float layer can stay as it is (skip=, --skip); of a quantised model take the float original: "
    "qcutlass.replace_linear(model, scheme, skip=...) packs the other layers, once transformers has loaded it"
)
_RENAMED: Final = (
    "transformers gives some tensors of the files other names when it loads them, which it can't do for packed ones; "
    "take the float original: qcutlass.replace_linear(model, scheme) packs its layers once transformers has loaded it; "
    "save_pretrained then writes a converted folder"
)
_WITHOUT_HEAD: Final = (
    "it does more than look up rows, as packed ones do; leave out lm_head= (--lm-head) if it was given, else "
    f"{FROM_FLOATS}"
)
_TOKENS: Final = (1, 2)
_SCALED: Final = tuple(f"{name}TextScaledWordEmbedding" for name in ("Gemma", "Gemma2", "Gemma3", "VaultGemma"))
"""Types of transformers that are derived from `torch.nn.Embedding` and multiply rows by `scalar_embed_scale`."""
_BLOCKS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
"""Where configurations say how many blocks there are."""
_ATTENTION: Final = ("attn_implementation", "_attn_implementation")
"""How attention is to be computed, of which models that are made here take nothing."""


def skeleton(config: Mapping[str, Any], checkpoint: Checkpoint, where: object) -> Any:
    """The model of a configuration, on the meta device; None, with a warning, where transformers can't make it.

    Without a warning, where the configuration names no class (`architectures`), or transformers is absent. No code of
    others is run, and nothing is made of more blocks than the checkpoint has tensors.
    """
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str):
        return None
    try:
        transformers = import_transformers("a model")
    except UnsupportedError:
        return None
    try:
        values = of_own_code(config, where)
        found = model_class(transformers, name)
        blocks = _most_blocks(values)
        if blocks > len(checkpoint.tensors):
            raise UnsupportedError(f"{blocks} blocks of {len(checkpoint.tensors)} tensors")
        with torch.device("meta"):
            return found(found.config_class.from_dict({**values, _ATTENTION[0]: "eager"}))
    except Exception as error:  # configurations raise errors of any type
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"{where}: transformers makes no {name:.80} ({reason:.200}): that it can load the layers is not checked",
            stacklevel=2,
        )
        return None


def of_own_code(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A configuration of which transformers makes a model that runs no code of others.

    UnsupportedError, with `where`, if a part of it asks for such code.
    """
    values = {key: value for key, value in config.items() if key not in _ATTENTION}
    check_implementations(values, where)
    return values


def model_class(transformers: Any, name: str) -> Any:
    """The class that `architectures` of a configuration names; an error of any type where there is none."""
    found = getattr(transformers, name)
    if not issubclass(found, transformers.PreTrainedModel):
        raise UnsupportedError("it is no model")
    return found


def check_decoder(config: Any, where: object) -> None:
    """Raises UnsupportedError for a model with an encoder, of which transformers would load the decoder alone."""
    if getattr(config, "is_encoder_decoder", False):
        name = (config.architectures or ["AutoModelForSeq2SeqLM"])[0]
        raise UnsupportedError(
            f"{where}: expected a causal language model, got {name}, which has an encoder; where qcutlass is imported, "
            f"transformers.{name}.from_pretrained loads it"
        )


def _most_blocks(config: Mapping[str, Any]) -> int:
    """The most blocks of a part of a model."""
    own = [blocks for key in _BLOCKS if isinstance(blocks := config.get(key), int)]
    parts = [_most_blocks(part) for name, part in config.items() if name.endswith("config") and isinstance(part, dict)]
    return max([0, *own, *parts])


def unloaded(model: Any) -> list[str]:
    """Patterns of the names that a model says it never loads: those of its class, and those of the blocks behind the
    last one, which predict further tokens."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    blocks, more = (getattr(model.config, key, None) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    if isinstance(blocks, int) and isinstance(more, int):
        patterns += (rf"(^|\.)layers\.{blocks + i}\." for i in range(min(more, _MOST_NEXT)))
    return patterns


def left_out(names: Iterable[str], model: Any) -> list[str]:
    """Those of these names of layers or tensors that are `unloaded`, and that the model has no place for."""
    patterns = [re.compile(pattern) for pattern in unloaded(model)]

    def is_left_out(name: str) -> bool:
        forms = _forms(name, model)
        is_named = any(pattern.search(form) for pattern in patterns for form in forms)
        return is_named and not any(_has(model, form) for form in forms)

    return [name for name in names if is_left_out(name)]


def _forms(name: str, model: Any) -> tuple[str, ...]:
    """The names that a model may have for what files call `name`: those of a base model lack the whole one's prefix."""
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _has(model: nn.Module, name: str) -> bool:
    """Whether a module or a tensor has this name, or it is one of experts, which are all in one tensor."""
    module = model
    for part in name.split("."):
        child = module._modules.get(part)
        if child is None:
            return type(module).__name__ in REPLACED or part in module._parameters or part in module._buffers
        module = child
    return True


def check_codes(checkpoint: Checkpoint, model: Any) -> None:
    """Raises UnsupportedError if codes that no layer has the scales of would become parameters.

    Args:
        model: that the checkpoint is of; None: it is not known, and its parameters may be all that end in ".weight".
    """
    names = list(checkpoint.codes())
    if model is None:
        names = [name for name in names if name.endswith(_WEIGHT)]
    elif names:
        parameters, gone = {name for name, _ in model.named_parameters()}, set(left_out(names, model))
        names = [name for name in names if name.endswith(_WEIGHT) or parameters.intersection(_forms(name, model))]
        names = [name for name in names if name not in gone]
    if names:
        info = checkpoint.info(names[0])
        more = f" ({len(names) - 1} more)" if len(names) > 1 else ""
        raise UnsupportedError(
            f"{info.file}: {names[0]}: expected floats beside the layers of {checkpoint.format}, got {info.dtype} "
            f"{list(info.shape)}{more}, codes that would be wrong weights without their scales; leave out format= "
            f"(--from) if it was given, else {FROM_FLOATS}"
        )


def places(names: Iterable[str], model: Any) -> dict[str, tuple[str, nn.Module]]:
    """By the names of modules: the layer of a checkpoint that each is for; UnsupportedError if a layer has no place.

    A base model takes its part, and one of another task, which predicts no tokens, leaves the output head.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[str, nn.Module]] = {}
    for name in names:
        forms = _forms(name, model)
        place = next((form for form in forms if form in modules), None)
        module = None if place is None else modules[place]
        if place is not None and module is not None and (is_linear(module) or is_embedding(module)):
            found[place] = name, module
        elif place is None and name in HEADS and model.get_output_embeddings() is None:
            continue
        elif model.base_model is not model or name.startswith(f"{model.base_model_prefix}."):
            got = "" if module is None else f", but a {type(module).__name__}"
            instead = _WITHOUT_HEAD if isinstance(module, nn.Embedding) else _INSTEAD
            raise UnsupportedError(
                f"{name}: {type(model).__name__} has no such torch.nn.Linear or Embedding to replace{got}; {instead}"
            )
    return found


def embeddings(names: Iterable[str], model: Any) -> list[str]:
    """Those of these names of layers that are embeddings in the model."""
    found = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return [name for name in names if found.intersection(_forms(name, model))]


def is_linear(module: nn.Module) -> bool:
    """Whether a packed linear layer computes what the module does: those of derived types may scale, or return more."""
    is_known = isinstance(module, nn.Linear) and type(module).__name__ in _LINEARS
    return type(module) is nn.Linear or is_known or is_conv1d(module)


def is_embedding(module: nn.Module) -> bool:
    """Whether a packed embedding looks up what the module does: rows, or rows times a number, as in Gemma."""
    return type(module) is nn.Embedding or type(module).__name__ in _SCALED


def scale_of(embedding: nn.Module) -> float:
    """What an embedding multiplies its rows by."""
    return float(getattr(embedding, "scalar_embed_scale", 1.0))


def weight_shape(module: Any) -> tuple[int, int]:
    """(N, K) of a linear layer, (rows, columns) of an embedding."""
    first, second = module.weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


def absent(listed: Iterable[str], model: Any, modules: Iterable[str]) -> list[str]:
    """Those of these modules of a base model that the layers and tensors `listed` in files do not name."""
    prefix = f"{model.base_model_prefix}."
    known = {name.removeprefix(prefix) for name in listed}
    return [name for name in modules if name not in known]


def _check_complete(listed: Iterable[str], model: Any) -> None:
    """Raises UnsupportedError if the model has a linear layer that files name otherwise: `places` takes those names for
    layers behind a base model, such as heads."""
    linears = [name for name, module in model.base_model.named_modules() if is_linear(module)]
    if missing := absent([*listed, HEAD], model, linears):
        raise UnsupportedError(
            f"{missing[0]}: {type(model).__name__} has this layer, the files have none of this name; {_RENAMED}"
        )


def check_layers(names: Iterable[str], model: Any, listed: Iterable[str]) -> list[str]:
    """Raises UnsupportedError if a model could not be loaded with packed layers of these names; it is changed.

    CheckpointError, if a block has more or fewer experts than the model.

    Of models of several parts, as those that see, files may have other names than transformers gives their modules:
    where a layer has no place there, that is a warning.

    Args:
        listed: names of all modules that the files have, those that stay floats, too.

    Returns:
        Names of the model's linear layers that stay as they are, but for the output head; none, after that warning.
    """
    experts, others = of_experts((name for name in names if not is_router(name)), model)
    check_counts(experts, model)
    owners: dict[type[nn.Module], nn.Module] = {}
    try:
        found = places(others, model)
        _check_complete(listed, model)
    except UnsupportedError as error:
        if not model.config.sub_configs:
            raise
        warnings.warn(f"{error}: transformers may not load the folder, others that name it so may", stacklevel=2)
        return []
    for place, (name, module) in found.items():
        model.set_submodule(place, _Packed(module, name))
        owner = model.get_submodule(place.rpartition(".")[0])
        if not is_initialised_alone(owner):
            owners[type(owner)] = owner
    tokens = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    model.eval()  # some scale weights for inference

    def initialise() -> None:
        for owner in owners.values():
            model._init_weights(owner)

    try:
        _runs(initialise)
        if not _runs(partial(model, attention_mask=tokens, **inputs)):
            _runs(partial(model, **inputs))  # some look at the numbers of masks
    except _WeightRead as error:
        raise UnsupportedError(
            f"{error.name}: {type(model).__name__} reads the weight of this layer itself, which a packed one lacks; "
            f"{_INSTEAD}"
        ) from error
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if is_linear(module) and module is not head]


def _runs(act: Callable[[], object]) -> bool:
    """Whether it can be done without numbers: if not, nothing is known of what it reads; else raises _WeightRead."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act()
    except _WeightRead:
        raise
    except Exception:  # of any type
        return False
    return True


def is_initialised_alone(owner: nn.Module) -> bool:
    """Whether a module has nothing to initialise but its layers."""
    return not owner._parameters and not owner._buffers


class _WeightRead(AttributeError):
    """A model asks for the weight of the layer `name`."""


class _Packed(nn.Module):
    """Stands where a packed layer will be, and lacks the weight as that does."""

    bias: None

    def __init__(self, module: Any, name: str) -> None:
        super().__init__()
        self._size, self._is_linear = weight_shape(module), is_linear(module)
        self._dtype, self._name, self.bias = module.weight.dtype, name, None

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise _WeightRead(name=self._name)
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self._size
        shape = (*x.shape[:-1], rows) if self._is_linear else (*x.shape, columns)
        return torch.empty(shape, dtype=x.dtype if self._is_linear else self._dtype, device=x.device)
