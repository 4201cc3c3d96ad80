"""A decoder of transformers whose weights are read block by block, and what its blocks are called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.algorithms.conv1d import as_linear, is_conv1d
from qcutlass.defaults import UNCALIBRATED
from qcutlass.errors import UnsupportedError
from qcutlass.models.experts import stored_forms
from qcutlass.models.extras import import_transformers
from qcutlass.models.fitting import is_linear, model_class, of_own_code
from qcutlass.models.quantizing.unrolling import unroll
from qcutlass.models.sources import ModelSource


class Call(NamedTuple):
    """The arguments of a block beside the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Enough(Exception):
    """The blocks that were to be recorded have been called."""


class Decoder:
    """A causal language model without weights, but for those of one block at a time; or one with an encoder, too.

    Args:
        source: of its weights, which become fp32.
        device: where blocks run.
        is_calibrated: whether blocks are to run, with `inputs`, one behind the other.

    Attributes:
        model: the module of transformers.
        blocks: its blocks, in which each expert of a mixture has linear layers of its own; those of an encoder first.
        names: theirs, "model.layers.0" and so on.

    Raises:
        UnsupportedError: transformers is absent or does not know the model; it has no list of blocks; it has an
            encoder, and is to be calibrated.
    """

    def __init__(self, source: ModelSource, device: torch.device, *, is_calibrated: bool) -> None:
        transformers = import_transformers("quantising a model")
        self._source, self._device = source, device
        values = of_own_code(source.config, "config.json")
        kind = values.pop("model_type", None)
        try:
            config = transformers.AutoConfig.for_model(kind, **values)
            with _parameters_on_meta():
                self.model: Any = _made(transformers, config)
        except Exception as error:  # of any type, for configurations that make no sense
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UnsupportedError(
                f"model_type {kind!r}: transformers makes no causal model of it ({reason:.200}); "
                "qcutlass.replace_linear(model, scheme) packs the linear layers of any model that is loaded"
            ) from error
        has_encoder = bool(getattr(self.model.config, "is_encoder_decoder", False))
        if has_encoder and is_calibrated:
            raise UnsupportedError(
                f"calibration: {type(self.model).__name__} has an encoder, and its activations are not recorded; take "
                f"a method without calibration, which quantises encoder and decoder: {UNCALIBRATED} (--method)"
            )
        with _parameters_on_meta():
            unroll(self.model)
            for name, module in list(self.model.named_modules()):
                if is_conv1d(module):  # which the source's layers are the transposed of
                    self.model.set_submodule(name, as_linear(module))
        found = _blocks(self.model, has_encoder)
        self.names, self.blocks = list(found), list(found.values())
        self._base = f"{self.model.base_model_prefix}."

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """The linear layers of a block, by their names inside it."""
        return {name: as_linear(module) for name, module in self.blocks[index].named_modules() if is_linear(module)}

    def check_ids(self, ids: Tensor) -> None:
        """Raises ValueError unless the model takes windows of these tokens, `[samples, tokens]`."""
        size, length = self.model.get_input_embeddings().num_embeddings, ids.shape[1]
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < size:
                raise ValueError(
                    f"calibration: expected tokens in [0, {size}), the model's vocabulary, got {token}; "
                    "take the tokenizer of this model"
                )
        longest = getattr(self.model.config, "max_position_embeddings", None) or length
        if length > longest:
            raise ValueError(
                f"calibration: expected windows of at most {longest} tokens (max_position_embeddings), got {length}"
            )

    def stored_name(self, index: int, name: str) -> str:
        """The source's name of a module or a parameter of a block."""
        return self._resolve(f"{self.names[index]}.{name}")

    def _resolve(self, name: str) -> str:
        known = (self._source.names, self._source.rest)
        suffix = name.rpartition(".")[2]
        for candidate in self._forms(name):
            stem = candidate.rpartition(".")[0]
            if any(candidate in names for names in known) or (suffix in ("weight", "bias") and stem in known[0]):
                return candidate
        raise UnsupportedError(f"{name}: expected it in the checkpoint, as {type(self.model).__name__} has it")

    def _forms(self, name: str) -> list[str]:
        """The names that the source may have for that of a module or a tensor."""
        return [form for each in (name, name.removeprefix(self._base)) for form in stored_forms(each)]

    def _value(self, name: str) -> Tensor:
        stored = self._resolve(name)
        module, _, suffix = stored.rpartition(".")
        if module in self._source.names:
            layer = self._source.layer(module)
            value = layer.bias if suffix == "bias" else layer.effective_weight()
            if value is None:
                raise UnsupportedError(f"{name}: expected it in the checkpoint; it is absent")
        else:
            value = self._source.tensor(stored)
        return value.to(self._device, torch.float32)

    def _buffer(self, module: nn.Module, prefix: str, name: str, made: Tensor) -> Tensor:
        """The checkpoint's value, where it keeps one; else that which the model was made with."""
        path, _, last = name.rpartition(".")
        found = next((form for form in self._forms(prefix + name) if form in self._source.rest), None)
        if found is None or last in module.get_submodule(path)._non_persistent_buffers_set:
            return made.to(self._device)
        return self._source.tensor(found).to(self._device, torch.float32 if made.is_floating_point() else made.dtype)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """A block with its weights, which go when the context is left."""
        block = self.blocks[index]
        with self._loaded(block, f"{self.names[index]}."):
            yield block

    @contextmanager
    def _loaded(self, module: nn.Module, prefix: str, without: str | None = None) -> Iterator[None]:
        parameters = [name for name, _ in module.named_parameters() if without is None or not name.startswith(without)]
        try:
            for name in parameters:
                _set(module, name, nn.Parameter(self._value(prefix + name), requires_grad=False))
            for name, buffer in list(module.named_buffers()):
                if without is None or not name.startswith(without):
                    _set(module, name, self._buffer(module, prefix, name, buffer))
            yield
        finally:
            for name in parameters:
                _set(module, name, nn.Parameter(torch.empty_like(module.get_parameter(name), device="meta"), False))

    @torch.no_grad()
    def inputs(self, ids: Tensor) -> tuple[list[Tensor], list[Call]]:
        """The first block's input for each row of `ids`, `[1, T, hidden]`, and the other arguments of each block.

        All rows are of one length and without padding, so that these are the same for all rows.
        """
        base, name = self.model.base_model, self.names[0].rpartition(".")[0].removeprefix(self._base)
        prefix = self._base if base is not self.model else ""
        hidden: list[Tensor] = []
        with self._loaded(base, prefix, without=f"{name}."):
            for row in ids:
                calls = self._record(base, row[None].to(self._device), stop=1)
                hidden.append(calls[0][0])
            with self.block(0) as block:
                arguments, keywords = calls[0][1]
                answer = block(hidden[0], *arguments, **keywords)
            form = (lambda x: (x, *answer[1:])) if isinstance(answer, tuple | list) else (lambda x: x)
            found = self._record(base, ids[:1].to(self._device), stop=len(self.blocks), form=form)
        return hidden, [call for _, call in found]

    def _record(
        self, base: nn.Module, ids: Tensor, stop: int, form: Any = lambda hidden: hidden
    ) -> list[tuple[Tensor, Call]]:
        """Runs the model with blocks that do nothing; `form` is how they return hidden states."""
        found: list[tuple[Tensor, Call]] = []

        def forward(*arguments: Any, **keywords: Any) -> Any:
            rest = dict(keywords)
            hidden = arguments[0] if arguments else rest.pop("hidden_states")
            found.append((hidden.clone(), Call(arguments[1:], rest)))
            if len(found) == stop:
                raise _Enough
            return form(hidden)

        try:
            for block in self.blocks:
                block.forward = forward
            base(input_ids=ids, use_cache=False)
        except _Enough:
            return found
        finally:
            for block in self.blocks:
                del block.forward
        raise UnsupportedError(f"{type(self.model).__name__}: its blocks were not called one after the other")


def run(block: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """The hidden states that a block returns; UnsupportedError if it returns something else."""
    answer = block(hidden, *call.arguments, **call.keywords)
    result = answer[0] if isinstance(answer, tuple | list) else answer
    if not isinstance(result, Tensor):
        raise UnsupportedError(
            f"calibration: {type(block).__name__} returns {type(answer).__name__}, and no hidden states that the next "
            f"block could take; take a method without calibration: {UNCALIBRATED} (--method)"
        )
    return result


def _made(transformers: Any, config: Any) -> Any:
    """The causal language model of a configuration; if that has an encoder, too, the model of the class it names."""
    make = transformers.AutoModelForCausalLM.from_config  # of one with an encoder this would be the decoder alone
    if getattr(config, "is_encoder_decoder", False):
        if not config.architectures:
            raise ValueError("it has an encoder, and config.json names no class in architectures")
        make = model_class(transformers, config.architectures[0])._from_config
    return make(config, dtype=torch.float32).eval()


def _blocks(model: Any, has_encoder: bool) -> dict[str, nn.Module]:
    """The blocks, by their names: of the list of modules that holds most of the linear layers.

    Of a model with an encoder they are those of all lists that hold some, but for lists in other blocks.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    counts = {
        name: sum(map(is_linear, found.modules())) if len({type(each) for each in found}) == 1 else 0
        for name, found in lists.items()
    }
    chosen: list[str] = []
    for name in counts if has_encoder else sorted(counts, key=counts.__getitem__, reverse=True)[:1]:
        if counts[name] and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
    if not chosen:
        raise UnsupportedError(f"{type(model).__name__}: it has no list of decoder blocks with torch.nn.Linear layers")
    return {f"{name}.{index}": block for name in chosen for index, block in enumerate(lists[name])}


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    tensors: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
    tensors[last] = value


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory, and buffers with their values."""
    module: Any = nn.Module
    original = module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(self, name, parameter)

    module.register_parameter = register
    try:
        yield
    finally:
        module.register_parameter = original
