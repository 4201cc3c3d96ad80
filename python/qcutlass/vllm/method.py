"""How linear layers are loaded and multiplied in vLLM, whatever the format of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.vllm import interface
from qcutlass.vllm.cutting import Share, cut_columns, cut_rows, place
from qcutlass.vllm.products import Products
from qcutlass.vllm.stored import SUFFIXES, layer_of
from qcutlass.vllm.waiting import Waiting, register

LORA_MARK: Final = "qweight"
"""The tensor by which vLLM's LoRA tells the device of a quantised layer; one element stays under this name."""


class QCutlassLinearMethod(interface.LinearMethodBase):
    """How one layer is loaded and multiplied. Layers whose checkpoint holds floats are multiplied as floats.

    Tensors wait until all are there; then they are decoded to canonical form, this rank's share is cut out, and parts
    that allow it become one product.

    Args:
        values: `quantization_config` of the folder.
        prefix: the layer's name.
        parts: the last parts of the names that layers have in the checkpoint which this one fuses.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str, parts: Sequence[str] = ()) -> None:
        self._values, self._prefix, self._parts = values, prefix, parts

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._sizes, self._k, self._dtype = output_partition_sizes, input_size_per_partition, params_dtype
        self._waiting = Waiting()
        register(layer, self._waiting, {suffix: suffix for suffix in SUFFIXES})

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "products"):
            return
        device = getattr(layer, LORA_MARK).device
        shares = self._shares(layer, device)
        self._leave(layer)
        layer.products = Products(shares, self._dtype).to(device)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = layer.products(x, bias)
        return out

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """An output head that is the embedding."""
        self._waiting.take()
        self._leave(layer)
        layer.weight, layer.quant_method = embed_tokens.weight, embed_tokens.quant_method
        return layer

    def _shares(self, layer: Any, device: torch.device) -> list[Share]:
        """This rank's share of each part."""
        whole = [] if isinstance(layer, interface.VocabParallelEmbedding) else interface.whole_sizes(layer)
        shares: dict[int, Share] = {}
        for places, tensors in self._waiting.take().items():
            found = layer_of(tensors, self._values, self._prefix, device, self._module(places))
            numbers = range(len(self._sizes)) if places is None else places
            begin = 0
            for number in numbers:
                n = found.shape[0] if len(numbers) == 1 else whole[number]
                at = begin + self._first_channel(layer, n, self._sizes[number])
                rows = cut_rows(found, at, self._sizes[number])
                first = 0 if rows.shape[1] == self._k else layer.tp_rank * self._k
                shares[number] = cut_columns(rows, first, self._k)
                begin += n
        if sorted(shares) != list(range(len(self._sizes))):
            layer_of({}, self._values, self._prefix, device)  # raises: a part has no tensors
        return [shares[number] for number in range(len(self._sizes))]

    def _module(self, places: Sequence[int] | None) -> str:
        """The name that these parts have in the checkpoint."""
        if places is None or len(places) != 1 or places[0] >= len(self._parts):
            return self._prefix
        return ".".join([*self._prefix.split(".")[:-1], self._parts[places[0]]])

    def _first_channel(self, layer: Any, whole: int, size: int) -> int:
        if isinstance(layer, interface.VocabParallelEmbedding):
            return int(layer.shard_indices.org_vocab_start_index)
        world_size = getattr(layer, "tp_size", None) or interface.get_tensor_model_parallel_world_size()
        return place(layer.tp_rank, world_size, whole, size)

    def _leave(self, layer: Any) -> None:
        """Removes the places of tensors that were waited for, but for the mark."""
        for suffix in SUFFIXES:
            if suffix != LORA_MARK:
                delattr(layer, suffix)
