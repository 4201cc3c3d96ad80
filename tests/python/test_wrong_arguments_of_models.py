"""Wrong arguments of what works on layers and whole models: statistics, tuning, calibration, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn

import qcutlass
from qcutlass import W8A8, WeightOnly, blockwise, models, tuning
from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.layers import BlockwiseLinear, Int8Linear, WeightOnlyLinear

WRONG: Final[Any] = None
ONES: Final = torch.ones(64)
IDS: Final = torch.arange(100)


def int8_linear(**changed: Any) -> Int8Linear:
    return Int8Linear(*qcutlass.quantize_weights_int8(torch.randn(32, 64)), **changed)


def statistics(k: int = 64, **changed: Any) -> ActivationStatistics:
    parts: dict[str, Any] = {"minimum": -torch.ones(k), "maximum": torch.ones(k)}
    return ActivationStatistics(**(parts | changed))


def tune(*shapes: Any, **options: Any) -> Any:
    return qcutlass.tune(list(shapes), **options)


def replaced(**options: Any) -> list[str]:
    return qcutlass.replace_linear(nn.Sequential(nn.Linear(64, 64)), WeightOnly(4, 32), **options)


CALLS: Final[list[tuple[Callable[[], Any], str]]] = [
    (lambda: statistics(minimum=None), "minimum: expected a torch.Tensor, got NoneType"),
    (
        lambda: statistics(maximum=torch.ones(8)),
        r"minimum, maximum: expected shape \[K\] of both",
    ),
    (lambda: statistics(smooth=ONES.double()), "smooth: expected a tensor of float32, got float64"),
    (lambda: ActivationStatistics.of(WRONG), "a: expected a torch.Tensor"),
    (
        lambda: ActivationStatistics.of(torch.ones(0, 4)),
        r"a: expected shape \[..., K\], of at least one row and column",
    ),
    (lambda: ActivationStatistics.of(torch.tensor(1.0)), r"a: expected shape \[..., K\]"),
    (lambda: statistics().merged(WRONG), "other: expected ActivationStatistics, got NoneType"),
    (lambda: statistics().merged(statistics(8)), r"other: expected K = 64 channels, got \[8\]"),
    (lambda: int8_linear(a_scale=torch.ones(1, device="meta")), "a_scale is on meta, w_packed is on cpu"),
    (lambda: int8_linear(smooth=ONES.to("meta")), "smooth is on meta, w_packed is on cpu"),
    (lambda: int8_linear(smooth=ONES.to_sparse()), "smooth: expected a dense tensor"),
    (lambda: int8_linear(bias=torch.ones(32).to_sparse()), "bias: expected a dense tensor"),
    (
        lambda: WeightOnlyLinear(qcutlass.quantize(torch.randn(16, 64), 4, 32), act_scale=ONES.to_sparse()),
        "act_scale: expected a dense tensor",
    ),
    (
        lambda: BlockwiseLinear(*blockwise.weight_quant(torch.randn(16, 64)), bias=torch.ones(16).to_sparse()),
        "bias: expected a dense tensor",
    ),
    (lambda: replaced(skip=torch.tensor(1)), "skip: expected a list of names, got Tensor"),
    (
        lambda: qcutlass.fold_smoothing(nn.LayerNorm(64), torch.tensor(1), ONES),
        "linears: expected a torch.nn.Linear or",
    ),
    (lambda: qcutlass.fold_smoothing(nn.LayerNorm(64), nn.Linear(64, 8), ONES.to("meta")), "s, for .* the meta device"),
    (lambda: models.weights_of(WRONG), "layer: expected a layer of qcutlass.layers, got NoneType"),
    (lambda: models.calibration_windows(WRONG, 4, 16, 0), "ids: expected a torch.Tensor, got NoneType"),
    (lambda: models.calibration_windows(IDS.float(), 4, 16, 0), "ids: expected a tensor of int64, got float32"),
    (lambda: models.calibration_windows(IDS[None], 4, 16, 0), r"ids: expected shape \[tokens\], got \[1, 100\]"),
    (lambda: models.calibration_windows(IDS, 4, 16, WRONG), "seed: expected an int, got NoneType"),
    (lambda: models.calibration_windows(IDS, 4, 16, 0.5), "seed: expected an int, got float"),  # type: ignore[arg-type]
    (lambda: qcutlass.tune(WRONG), r"model_or_shapes: expected several pairs \(N, K\), or a module, got NoneType"),
    (lambda: tune((64, 64), ms=8), "ms: expected several numbers of rows, got int"),
    (lambda: tune((64, 64), ms="8"), "ms: expected several numbers of rows, got str"),
    (lambda: tune((64, 64), dtype="half"), "dtype: expected one of torch.float16"),
    (lambda: tune((64, 64), progress="no"), "progress: expected True or False, got str"),
    (lambda: tuning.bucket("8"), "m: expected an int, got str"),  # type: ignore[arg-type]
    (lambda: tuning.bucket(-8), "m: expected at least 0, got -8"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_sampling_takes_numbers() -> None:
    sampling = pytest.importorskip("qcutlass.models.sampling")
    for options, message in (
        ({"temperature": "0.7"}, "temperature: expected a number, got str"),
        ({"temperature": True}, "temperature: expected a number, got bool"),
        ({"temperature": 0.7, "top_p": None}, "top_p: expected a number, got NoneType"),
        ({"temperature": 0.7, "seed": "1"}, "seed: expected an int, got str"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            sampling.Sampling(**options)


def test_perplexity_takes_tokens() -> None:
    evaluation = pytest.importorskip("qcutlass.models.evaluation")
    for ids, message in (
        ([1, 2, 3], "ids: expected a torch.Tensor, got list"),
        (IDS.float(), "ids: expected a tensor of int64, got float32"),
        (IDS[None], r"ids: expected shape \[tokens\]"),
        (IDS.to("meta"), "ids is on the meta device"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            evaluation.perplexity(nn.Linear(4, 4), ids, 4)


def test_static_layers_take_statistics_of_their_channels() -> None:
    with pytest.raises(ValueError, match=r"^statistics: expected those of K = 64 channels"):
        Int8Linear.from_linear(nn.Linear(64, 16), W8A8("static"), statistics=statistics(8))


def test_models_take_functions_that_are_told() -> None:
    """What is no function was called in the middle of the work."""
    evaluation = pytest.importorskip("qcutlass.models.evaluation")
    generation = pytest.importorskip("qcutlass.models.generation")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: models.convert("old", "new", progress="bar"), "progress: expected a function or None, got str"),  # type: ignore[arg-type]
        (lambda: models.quantize_model("old", "new", "rtn", restart="no"), "restart: expected True or False, got str"),  # type: ignore[arg-type]
        (lambda: models.export_model("old", "new", shard_bytes=-1), "shard_bytes: expected at least 1, got -1"),
        (lambda: models.quantize_model("old", "new", "rtn", progress=1), "progress: expected a function or None"),  # type: ignore[arg-type]
        (lambda: models.quantize_model("old", "new", "awq", calibration=IDS[None].to("meta")), "calibration is on the"),
        (lambda: evaluation.perplexity(nn.Linear(4, 4), IDS, 4, progress=1), "progress: expected a function or None"),
        (lambda: generation.generate(None, None, "a", on_text=1), "on_text: expected a function or None, got int"),
        (lambda: generation.generate(None, None, "a", chat="yes"), "chat: expected True or False, got str"),
        (
            lambda: generation.generate(None, None, "a", sampling=0.7),
            "sampling: expected a Sampling or None, got float",
        ),
    ]
    for call, message in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()
