"""The quantisation method "qcutlass" of vLLM: layers of checkpoints that qcutlass reads, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.errors import UnsupportedError
from qcutlass.formats.specs import METHOD, ModelSpec
from qcutlass.vllm import interface
from qcutlass.vllm.cutting import Share, cut_columns, cut_rows, place
from qcutlass.vllm.mixture import QCutlassExpertsMethod
from qcutlass.vllm.products import Products
from qcutlass.vllm.stored import SUFFIXES, layer_of, obstacle
from qcutlass.vllm.waiting import Waiting

LORA_MARK: Final = "qweight"
"""The tensor by which vLLM's LoRA tells the device of a quantised layer; one element stays under this name."""


class QCutlassConfig(interface.QuantizationConfig):
    """`quantization_config` of a folder.

    Args:
        values: keys and values.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = dict(values)

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return interface.activation_types()

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QCutlassConfig:
        if config.get("quant_method") == METHOD:
            ModelSpec.from_dict(config)  # raises for folders of other versions
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes folders that qcutlass reads, unless the user asked for another method by name."""
        asked = user_quant == METHOD or hf_quant_cfg.get("quant_method") == METHOD
        if user_quant not in (None, METHOD):
            return None
        reason = obstacle(hf_quant_cfg, interface.is_mixture(hf_config)) or interface.experts_obstacle(hf_config)
        if reason is not None and asked:
            raise UnsupportedError(f"quantization: {METHOD!r} does not serve this model: {reason}")
        return METHOD if reason is None else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Keeps `g_idx`, which the base class drops since 0.30."""
        return interface.keeping_everything()

    def get_quant_method(self, layer: Any, prefix: str) -> QCutlassLinearMethod | QCutlassExpertsMethod | None:
        if isinstance(layer, interface.LinearBase | interface.ParallelLMHead):
            return QCutlassLinearMethod(self.values, prefix)
        if isinstance(layer, interface.RoutedExperts):
            return QCutlassExpertsMethod(self.values, prefix, layer.moe_config)
        return None


class QCutlassLinearMethod(interface.LinearMethodBase):
    """How one layer is loaded and multiplied. Layers whose checkpoint holds floats are multiplied as floats.

    Tensors wait until all are there; then they are decoded to canonical form, this rank's share is cut out, and parts
    that allow it become one product.

    Args:
        values: `quantization_config` of the folder.
        prefix: the layer's name, for errors.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self._values, self._prefix = values, prefix

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
        for suffix in SUFFIXES:
            parameter: Any = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
            parameter.weight_loader = self._waiting.loader(suffix)
            layer.register_parameter(suffix, parameter)

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
        """An output head that is the embedding, which has floats."""
        self._waiting.take()
        self._leave(layer)
        layer.weight, layer.quant_method = embed_tokens.weight, embed_tokens.quant_method
        return layer

    def _shares(self, layer: Any, device: torch.device) -> list[Share]:
        """This rank's share of each part."""
        whole = interface.whole_sizes(layer) if not isinstance(layer, interface.ParallelLMHead) else []
        shares: dict[int, Share] = {}
        for places, tensors in self._waiting.take().items():
            found = layer_of(tensors, self._values, self._prefix, device)
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

    def _first_channel(self, layer: Any, whole: int, size: int) -> int:
        if isinstance(layer, interface.ParallelLMHead):
            return int(layer.shard_indices.org_vocab_start_index)
        world_size = getattr(layer, "tp_size", None) or interface.get_tensor_model_parallel_world_size()
        return place(layer.tp_rank, world_size, whole, size)

    def _leave(self, layer: Any) -> None:
        """Removes the places of tensors that were waited for, but for the mark."""
        for suffix in SUFFIXES:
            if suffix != LORA_MARK:
                delattr(layer, suffix)


def register_method() -> None:
    """Makes the method known, once."""
    if METHOD not in interface.QUANTIZATION_METHODS:
        interface.register_quantization_config(METHOD)(QCutlassConfig)
