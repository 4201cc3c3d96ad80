"""Quantised linear layers and experts, and how a model gets them."""

from qcutlass.layers.activations import use_activations
from qcutlass.layers.base import QuantLinear
from qcutlass.layers.blockwise import BlockwiseLinear
from qcutlass.layers.eight_bit import Fp8Linear, Int8Linear
from qcutlass.layers.embedding import QuantEmbedding, TiedLinear
from qcutlass.layers.experts import QuantExperts
from qcutlass.layers.fusing import FusedProjection, Fusion, fuse_projections
from qcutlass.layers.int4 import Int4Linear
from qcutlass.layers.replace import replace_linear
from qcutlass.layers.sharding import shard
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.schemes import FP8, W4A8, W8A8, Blockwise, Scheme, WeightOnly

__all__ = [
    "FP8",
    "W4A8",
    "W8A8",
    "Blockwise",
    "BlockwiseLinear",
    "Fp8Linear",
    "FusedProjection",
    "Fusion",
    "Int4Linear",
    "Int8Linear",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "Scheme",
    "TiedLinear",
    "WeightOnly",
    "WeightOnlyLinear",
    "fuse_projections",
    "replace_linear",
    "shard",
    "use_activations",
]
