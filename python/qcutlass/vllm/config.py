"""The quantisation method "qcutlass" of vLLM: layers of checkpoints that qcutlass reads, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from qcutlass.errors import UnsupportedError
from qcutlass.formats.specs import METHOD, ModelSpec
from qcutlass.vllm import interface
from qcutlass.vllm.embedding import QCutlassEmbeddingMethod
from qcutlass.vllm.method import QCutlassLinearMethod
from qcutlass.vllm.mixture import QCutlassExpertsMethod
from qcutlass.vllm.naming import Rename, with_names
from qcutlass.vllm.obstacles import obstacle

EMBEDDINGS: Final = ("embed_tokens", "wte", "embed_in", "word_embeddings")
"""The names of embeddings, for models of vLLM that do not tell theirs."""


class QCutlassConfig(interface.QuantizationConfig):
    """`quantization_config` of a folder.

    Args:
        values: keys and values.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = dict(values)
        self._stored = self.values
        self._renames: list[Rename] = []

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
        """Takes folders that qcutlass reads, unless the user asked for another method by name.

        What vLLM multiplies by units of the device that qcutlass would leave idle is taken where it is asked for.
        """
        asked = user_quant == METHOD or hf_quant_cfg.get("quant_method") == METHOD
        if user_quant not in (None, METHOD):
            return None
        native = () if asked else interface.native_floats()
        reason = obstacle(hf_quant_cfg, interface.is_mixture(hf_config), native)
        reason = reason or interface.experts_obstacle(hf_config)
        if reason is not None and asked:
            raise UnsupportedError(f"quantization: {METHOD!r} does not serve this model: {reason}")
        return METHOD if reason is None else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Keeps `g_idx`, which the base class drops since 0.30."""
        return interface.keeping_everything()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Has rules of single layers match vLLM's names, too; each part of a model may have a mapper."""
        rename = getattr(hf_to_vllm_mapper, "apply_list", None)
        if rename is not None:
            self._renames.append(rename)
            self.values = with_names(self._stored, self._renames)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """How a layer is loaded and computed; None: as vLLM does it."""
        if isinstance(layer, interface.LinearBase | interface.ParallelLMHead):
            return QCutlassLinearMethod(self.values, prefix, self._fused(prefix))
        if isinstance(layer, interface.RoutedExperts):
            return QCutlassExpertsMethod(self.values, prefix, layer.moe_config)
        if isinstance(layer, interface.VocabParallelEmbedding) and self._has_packed_embedding(prefix):
            return QCutlassEmbeddingMethod(self.values, prefix)
        return None

    def _fused(self, prefix: str) -> list[str]:
        """The last parts of the names of layers that one of vLLM's fuses."""
        fused: Mapping[str, list[str]] = getattr(self, "packed_modules_mapping", {})
        return fused.get(prefix.rpartition(".")[2], [])

    def _has_packed_embedding(self, prefix: str) -> bool:
        """Whether this is a converted folder whose embedding is not among the modules that keep their floats."""
        kept = {str(name).rpartition(".")[2] for name in self.values.get("modules_to_not_convert") or ()}
        last = prefix.rpartition(".")[2]
        return self.get_name() == self.values.get("quant_method") and not kept & ({last} if last else set(EMBEDDINGS))


def register_method() -> None:
    """Makes the method known, once."""
    if METHOD not in interface.QUANTIZATION_METHODS:
        interface.register_quantization_config(METHOD)(QCutlassConfig)
