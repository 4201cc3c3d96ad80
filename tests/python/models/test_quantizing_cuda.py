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

FLOATING = [
    (models.Method("fp8"), 0.3),
    (models.Method("blockwise-fp8"), 0.3),
    (models.Method("rtn", WeightOnly(4, 32, weight_dtype="e2m1"), clip=False), 0.7),  # MXFP4's numbers: 0.30 to 0.57
]
METHODS = [
    (models.Method("rtn", WeightOnly(8, 32)), 0.05),
    (models.Method("gptq", WeightOnly(8, 32)), 0.05),
    (models.Method("gptq", WeightOnly(8, None, symmetric=True), act_order=True), 0.05),
    (models.Method("awq", WeightOnly(8, 32)), 0.05),
    (models.Method("smoothquant"), 0.15),
    *FLOATING,
]
"""And the largest relative error of logits."""


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize(("method", "bound"), METHODS, ids=str)
def test_a_model_is_quantised(kind: str, method: models.Method, bound: float, seed: int, tmp_path: Path) -> None:
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
    assert error < bound


@pytest.mark.parametrize("method", [method for method, _ in FLOATING], ids=str)
def test_floats_are_rounded_as_on_the_cpu(method: models.Method, seed: int, tmp_path: Path) -> None:
    """But for ties that other roundings of a scale may move: quantising itself makes five times as much, or more."""
    make("llama", seed).save_pretrained(tmp_path / "source")
    for device in ("cpu", "cuda"):
        models.quantize_model(tmp_path / "source", tmp_path / device, method, device=device)
    folders = [models.ConvertedFolder(tmp_path / device) for device in ("cpu", "cuda")]
    assert folders[0].spec == folders[1].spec
    for name in folders[0]:
        expected, found = (models.weights_of(folder[name]) for folder in folders)
        assert quantizing.relative_norm(found, expected) < 0.005, name
