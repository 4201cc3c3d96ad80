"""A GPU that is not there, for the tests of tuning."""

from __future__ import annotations

from qcutlass import _C, tuning
from qcutlass.tuning.layer import Layer

H200 = _C.DeviceTraits(90, 132, 232448)
NAME = "NVIDIA Test GPU, 141 GB"
LAYER = Layer(4096, 1024)


def look_up(m: int, layer: Layer = LAYER, traits: _C.DeviceTraits = H200) -> tuple[str, int] | None:
    plan = tuning.lookup(layer.arguments(m), traits, 0)
    return None if plan is None else (plan.tactic, plan.split_k)
