"""Whole models quantised on a GPU: what they compute, that it repeats, and that a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcutlass import WeightOnly, models
from qcutlass.testing import quantizing

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.conversions import contents
from tests.python.models.quantizations import calibration, make
from tests.python.models.test_quantizing import loaded

pytestmark = pytest.mark.gpu

METHODS = [
    models.Method("rtn", WeightOnly(8, 32)),
    models.Method("gptq", WeightOnly(8, 32)),
    models.Method("gptq", WeightOnly(8, None, symmetric=True), act_order=True),
    models.Method("awq", WeightOnly(8, 32)),
    models.Method("smoothquant"),
]


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_model_is_quantised(kind: str, method: models.Method, seed: int, tmp_path: Path) -> None:
    model, ids = make(kind, seed), calibration(seed)
    model.save_pretrained(tmp_path / "source")
    needed = ids if method.needs_calibration else None

    def quantize(name: str, stop: str = "never") -> models.Quantization:
        def progress(what: str, done: int, total: int) -> None:
            if what.startswith(stop):
                raise _Stopped

        return models.quantize_model(
            tmp_path / "source", tmp_path / name, method, calibration=needed, device="cuda", progress=progress
        )

    quantize("first")
    with pytest.raises(_Stopped):
        quantize("second", stop="block 2")
    assert quantize("second").resumed == 2
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    with torch.no_grad():
        error = quantizing.relative_norm(loaded(tmp_path / "first")(ids).logits, model(ids).logits)
    assert error < (0.05 if method.is_weight_only else 0.15)
