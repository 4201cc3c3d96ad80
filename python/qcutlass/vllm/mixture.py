"""How the experts of a mixture are loaded and multiplied in vLLM, whatever the format of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.layers.experts import Expert
from qcutlass.vllm import interface
from qcutlass.vllm.cutting import place
from qcutlass.vllm.experts import ExpertLayers, cut_expert, experts_of, of_weights_alone
from qcutlass.vllm.stored import SUFFIXES, is_float, layer_of
from qcutlass.vllm.waiting import ExpertPart, WaitingExperts, register

_NAMES: Final = {f"{stack}_{suffix}": suffix for stack in ("w13", "w2") for suffix in (*SUFFIXES, "bias")}
"""The parameters under which vLLM looks for the loaders of experts' tensors, and the suffixes in the checkpoint."""


class QCutlassExpertsMethod(interface.FusedMoEMethodBase):
    """The experts of one block. Those that the checkpoint holds in floats are left to vLLM's own method for floats.

    Tensors wait until all are there, whole on each rank; then each expert is decoded to canonical form, this rank's
    share is cut out, and all of them become two products. With expert parallelism a rank has whole experts.

    Args:
        values: `quantization_config` of the folder.
        prefix: the block's name.
        moe: vLLM's description of the block.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self._values, self._prefix = values, prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._gate = interface.gate_of(layer, self._prefix)
        self._sizes: dict[str, Any] = {
            "num_experts": num_experts, "hidden_size": hidden_size,
            "intermediate_size_per_partition": intermediate_size_per_partition, "params_dtype": params_dtype,
        }  # fmt: skip
        self._waiting = WaitingExperts(interface.local_expert(layer))
        register(layer, self._waiting, _NAMES)

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "products"):
            return
        device = layer.w13_weight.device
        parts = self._waiting.take()
        for name in _NAMES:
            delattr(layer, name)
        if parts and all(is_float(tensors) for tensors in parts.values()):
            self._leave(layer, parts, device)
            return
        count, dtype = self._sizes["num_experts"], self._sizes["params_dtype"]
        shares = (self._share(layer, self._layers(parts, expert, device)) for expert in range(count))
        layer.products = experts_of(shares, count, self._gate, dtype, self._prefix).to(device)
        layer.register_buffer("places", interface.places_of_experts(layer, device), persistent=False)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """vLLM's own kernels are not used."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts here; shared ones are the engine's."""
        ids = topk_ids if layer.places is None else layer.places[topk_ids.long()]
        out: Tensor = layer.products(x, ids, topk_weights)
        return out

    def _layers(
        self, parts: Mapping[ExpertPart, Mapping[str, Tensor]], expert: int, device: torch.device
    ) -> ExpertLayers:
        """One expert, whole."""

        def layers() -> Iterator[Any]:
            for part in Expert._fields:
                name = f"{self._prefix}: {part} of expert {expert} of this rank"
                modules = [f"{self._prefix}.{module}" for module in self._waiting.names(expert, part)]
                found = layer_of(parts.get(ExpertPart(expert, part), {}), self._values, name, device, *modules)
                yield of_weights_alone(found, name)

        return ExpertLayers(*layers())

    def _share(self, layer: Any, expert: ExpertLayers) -> ExpertLayers:
        return cut_expert(expert, *self._channels(layer, expert.down.shape[1]))

    def _channels(self, layer: Any, whole: int) -> tuple[int, int]:
        """The first of this rank's channels between the products, and how many they are."""
        size = self._sizes["intermediate_size_per_partition"]
        return place(*interface.rank_among_experts(layer), whole, size), size

    def _leave(self, layer: Any, parts: Mapping[ExpertPart, Mapping[str, Tensor]], device: torch.device) -> None:
        """Has vLLM multiply by floats."""
        method = interface.UnquantizedFusedMoEMethod(self.moe)
        with device:
            method.create_weights(layer, **self._sizes)
        size = self._sizes["intermediate_size_per_partition"]
        for (expert, part), tensors in parts.items():
            axis = int(part == "down")
            begin, _ = self._channels(layer, tensors["weight"].shape[axis])
            into = layer.w2_weight if part == "down" else layer.w13_weight[:, size * (part == "up") :]
            share = tensors["weight"].narrow(axis, begin, size)
            into.data[expert, : len(share)].copy_(share)
        interface.replace_method(layer, method)
        method.process_weights_after_loading(layer)
