"""GPUs that are not there, for the tests of tuning, and of layers for which one has no kernel."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from qcutlass import _C, tuning
from qcutlass.layers import activations, base
from qcutlass.products import selection
from qcutlass.tuning.layer import Layer

H200 = _C.DeviceTraits(90, 132, 232448)
NAME = "NVIDIA Test GPU, 141 GB"
LAYER = Layer(4096, 1024)


def look_up(m: int, layer: Layer = LAYER, traits: _C.DeviceTraits = H200) -> tuple[str, int] | None:
    plan = tuning.lookup(layer.arguments(m), traits, 0)
    return None if plan is None else (plan.tactic, plan.split_k)


def refuse_as(gpu: str, patch: pytest.MonkeyPatch) -> None:
    """Has layers refuse what this GPU, a name for `explain`, has no kernels for; the CPU computes the rest.

    Inputs are float16 or bfloat16, as on a GPU.
    """
    own = base.compute

    def compute(kind: Any, call: Any, out: Tensor | None) -> Tensor:
        _C.select(selection.arguments_of_call(kind, call), selection.GPUS[gpu], "", 0, kind.dequantises)
        return own(kind, call, out)

    patch.setattr(base, "compute", compute)
    patch.setattr(activations, "_is_gpu", lambda device: True)
