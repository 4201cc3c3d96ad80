"""Tuning: with a timer of the test's own on the CPU, and for real on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.absent_gpu import H200, LAYER, look_up
from torch import Tensor, nn
from typer.testing import CliRunner

import qcutlass
from qcutlass import _C, testing, tuning
from qcutlass.cli import app
from qcutlass.products import tuned_plans as cache
from qcutlass.products.tuned_plans import TunedPlan, product_key
from qcutlass.schemes import FP8, W4A8, W8A8, Blockwise, Scheme
from qcutlass.tuning import tuner
from qcutlass.tuning.layer import Layer
from qcutlass.tuning.layers import layers_of


class FakeTimer:
    """Times each plan by its rank among the contenders."""

    def __init__(self, times: Callable[[int, int], float | None]) -> None:
        self.times = times
        self.asked: list[tuple[Layer, int, list[tuple[str, int]]]] = []

    def __call__(self, layer: Layer, m: int, plans: Sequence[_C.Plan]) -> list[float | None]:
        self.asked.append((layer, m, [(plan.tactic, plan.split_k) for plan in plans]))
        return [self.times(rank, len(plans)) for rank in range(len(plans))]


def test_the_fastest_is_stored_and_found(plans: Path) -> None:
    layers = [LAYER, Layer(512, 2048, bits=8, group_size=64, zero_dtype=torch.uint8)]
    timer = FakeTimer(lambda rank, count: 10.0 if rank != count // 2 else 5.0)
    found = list(tuner.tune_layers(layers, [1, 16, 512], H200, 0, timer))
    assert [(product.layer, product.m) for product in found] == [(layer, m) for layer in layers for m in (1, 16, 512)]
    tuning.forget()
    for product, (_, _, asked) in zip(found, timer.asked, strict=True):
        assert product.gain == 2
        assert product.plan[:2] == asked[len(asked) // 2]
        assert product.untuned[:2] == asked[0]
        assert product.measured == len(asked)
        assert look_up(product.m, product.layer) == product.plan[:2]


@pytest.mark.parametrize("m", [1, 64, 512])
def test_contenders_are_the_best_tactics_with_every_split(m: int) -> None:
    everything = [candidate.plan for candidate in _C.candidates(LAYER.arguments(m), H200, dense=True)]
    contenders = tuner.contenders(LAYER, m, H200)
    assert contenders[0].tactic == everything[0].tactic
    tactics = {plan.tactic for plan in contenders}
    assert 6 <= len(tactics) <= 7
    assert any(plan.dense for plan in contenders) == (m >= 128)
    for tactic in tactics:
        splits = [plan.split_k for plan in everything if plan.tactic == tactic]
        assert [plan.split_k for plan in contenders if plan.tactic == tactic] == splits


def test_noise_does_not_replace_the_cost_models_choice(plans: Path) -> None:
    product = tuner.best_plan(LAYER, 16, H200, FakeTimer(lambda rank, count: 10.0 if rank == 0 else 9.95))
    assert product.plan == product.untuned
    assert product.gain == 1


def test_plans_that_cannot_run_are_left_out(plans: Path) -> None:
    product = tuner.best_plan(LAYER, 16, H200, FakeTimer(lambda rank, count: None if rank < 3 else 10.0 - rank / 100))
    assert product.measured == len(tuner.contenders(LAYER, 16, H200)) - 3
    with pytest.raises(qcutlass.UnsupportedError, match=r"4096x1024 4-bit group 128.*M = 16"):
        tuner.best_plan(LAYER, 16, H200, FakeTimer(lambda rank, count: None))


def test_layers_done_before_a_failure_are_kept(plans: Path) -> None:
    def fail(rank: int, count: int) -> float:
        if len(timer.asked) > 1:
            raise RuntimeError("the GPU fell off the bus")
        return 10.0

    timer = FakeTimer(fail)
    with pytest.raises(RuntimeError, match="fell off"):
        list(tuner.tune_layers([LAYER, Layer(64, 64)], [16], H200, 0, timer))
    assert look_up(16) is not None
    assert look_up(16, Layer(64, 64)) is None


class Packed(nn.Module):
    """A layer of packed weights."""

    zeros: Tensor | None

    def __init__(self, n: int, k: int, bits: int, group_size: int, zeros: bool = True) -> None:
        super().__init__()
        q = qcutlass.quantize(
            torch.randn(n, k, dtype=torch.float16), bits=bits, group_size=group_size, symmetric=not zeros
        )
        self.in_features = k
        self.register_buffer("w_packed", qcutlass.preprocess_weights(q.codes, bits=bits))
        self.register_buffer("scales", q.scales)
        self.register_buffer("zeros", q.zeros)


def test_layers_with_minimums_are_found() -> None:
    minimums = torch.zeros(2, 16, dtype=torch.bfloat16)
    codes, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(2, 16)
    layer = qcutlass.layers.WeightOnlyLinear(qcutlass.QuantizedTensor(codes, scales, None, 4, 32, minimums=minimums))
    (found,) = layers_of(nn.ModuleList([layer]), None)
    assert (found.zero_dtype, found.minimum_dtype) == (None, torch.bfloat16)


def test_the_layers_of_a_module_are_found_once_each() -> None:
    model = nn.Sequential(
        Packed(64, 128, 4, 64), nn.Linear(4, 4), Packed(64, 128, 4, 64), Packed(48, 256, 8, 128, False)
    )
    first = Layer(64, 128, 4, 64, zero_dtype=model[0].zeros.dtype)
    last = Layer(48, 256, 8, 128, zero_dtype=None if model[3].zeros is None else model[3].zeros.dtype)
    assert layers_of(model, None) == [first, last]
    bf16 = layers_of(model, torch.bfloat16)
    assert [layer.dtype for layer in bf16] == [torch.bfloat16, torch.bfloat16]
    assert [layer.scale_dtype for layer in bf16] == [torch.float16, torch.float16]


def test_modules_that_cannot_be_tuned_say_why() -> None:
    with pytest.raises(ValueError, match="w_packed, scales, zeros and in_features, nor one of Int8Linear, Fp8Linear,"):
        layers_of(nn.Linear(4, 4), None)
    model = nn.Sequential(Packed(64, 128, 4, 64))
    model[0].in_features = 512
    with pytest.raises(ValueError, match="0: w_packed: for K = 512"):
        layers_of(model, None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model_or_shapes": []}, ValueError, "at least one pair"),
        ({"model_or_shapes": [64]}, TypeError, r"expected a module or pairs \(N, K\), got 64"),
        ({"model_or_shapes": [(64, 64, 64)]}, TypeError, "pairs"),
        ({"model_or_shapes": [(64, 0)]}, ValueError, "K: expected at least 1, got 0"),
        ({"model_or_shapes": [(64.0, 64)]}, TypeError, "N: expected an int"),
        ({"bits": 3}, ValueError, "bits: expected one of 4, 8"),
        ({"group_size": 0}, ValueError, "group_size: expected at least 1, or -1"),
        ({"dtype": torch.float32}, TypeError, "dtype: expected one of"),
        ({"zero_dtype": torch.int64}, TypeError, "zero_dtype: expected one of"),
        ({"scale_dtype": torch.int8}, TypeError, "scale_dtype: expected one of"),
        ({"ms": []}, ValueError, "ms: expected at least one"),
        ({"ms": [0]}, ValueError, "ms: expected at least 1"),
        ({"ms": [20000]}, ValueError, "ms: plans are tuned for up to 16384 rows, got 20000"),
        ({"device": "cpu"}, ValueError, "device: plans are tuned on a GPU, got cpu"),
        ({"scheme": "w8a8"}, TypeError, r"scheme: expected one of qcutlass\.W8A8, FP8, .*, got 'w8a8'; say which"),
        ({"scheme": qcutlass.WeightOnly()}, TypeError, r"got WeightOnly\(.*; say which these are by bits, group_size"),
        ({"scheme": W8A8(), "bits": 8}, ValueError, "bits: expected none beside a scheme, got 8; pass it to W8A8"),
        ({"scheme": W4A8(), "group_size": 64}, ValueError, "group_size: .*, got 64; pass it to W4A8"),
        ({"scheme": FP8(), "scale_dtype": torch.float32}, ValueError, "scale_dtype: expected none beside a scheme"),
        ({"scheme": FP8(), "zero_dtype": torch.uint8}, ValueError, "zero_dtype: expected none beside a scheme"),
        ({"scheme": FP8(), "dtype": torch.int8}, TypeError, "dtype: .* float8_e4m3fn, float8_e5m2, got torch.int8"),
        (
            {"scheme": W8A8(), "dtype": torch.float16},
            TypeError,
            r"dtype: the products of W8A8\(.* of int8, got .*leave",
        ),
        ({"scheme": FP8(), "model_or_shapes": nn.Linear(4, 4)}, ValueError, "scheme: the layers of a module say"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qcutlass.tune(**{"model_or_shapes": [(64, 64)], "progress": False} | arguments)


def test_rows_stand_for_their_buckets() -> None:
    assert tuner.buckets_of([3, 17, 4, 33, 32, 16384]) == [4, 32, 48, 16384]


def test_nothing_is_tuned_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"being captured.*call qcutlass\.tune before torch\.cuda\.graph"):
        qcutlass.tune([(64, 64)], progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(qcutlass.UnsupportedError, match="torch sees no GPU"):
        qcutlass.tune([(64, 64)], progress=False)


def qcutlass_command(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))


def test_the_command_prints_what_was_found(plan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake(shapes: object, **options: object) -> list[tuner.TunedProduct]:
        asked.update(options, shapes=shapes)
        plan, untuned = TunedPlan("some_tactic", 2, 4.0), TunedPlan("other_tactic", 1, 5.0)
        return [tuner.TunedProduct(LAYER, 16, plan, untuned, 12)]

    monkeypatch.setattr("qcutlass.tuning.tuner.tune", fake)
    result = qcutlass_command("tune", "4096x1024", "64x64", "--m", "16", "--m", "3", "--zeros", "uint8", "--bits", "8")
    assert result.exit_code == 0, result.output
    assert asked["shapes"] == [(4096, 1024), (64, 64)]
    assert (asked["ms"], asked["bits"], asked["zero_dtype"], asked["scheme"]) == ([16, 3], 8, torch.uint8, None)
    for expected in ("some_tactic", "4096x1024 4-bit group 128", "1.25", str(plan_folder)):
        assert expected in result.stdout


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ("w8a8", W8A8()),
        ("fp8", FP8()),
        ("blockwise-int8", Blockwise()),
        ("blockwise-fp8", Blockwise(type="fp8")),
        ("w4a8-int8", W4A8(128, "int8", symmetric=True)),
        ("w4a8-fp8 --group-size 64 --zeros uint8", W4A8(64, "fp8")),
        ("w4a8-fp8 --group-size -1", W4A8(-1, "fp8", symmetric=True)),
    ],
)
def test_the_command_takes_schemes(options: str, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("qcutlass.tuning.tuner.tune", lambda shapes, **options: asked.update(options) or [])
    result = qcutlass_command("tune", "64x64", "--scheme", *options.split())
    assert result.exit_code == 0, result.output
    assert (asked["scheme"], asked["dtype"]) == (scheme, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["40x"],
        ["axb"],
        ["64x64", "--m", "0"],
        ["64x64", "--device", "cpu"],
        ["64x64", "--scheme", "w8a8", "--zeros", "uint8"],
        ["64x64", "--scheme", "w8a8", "--dtype", "float16"],
        ["64x64", "--scheme", "w4a8-int8", "--zeros", "float16"],
        ["64x64", "--scheme", "w4a8-int8", "--bits", "8"],
        ["64x64", "--dtype", "float8_e5m2"],
    ],
)
def test_the_command_explains_its_errors(arguments: list[str]) -> None:
    result = qcutlass_command("tune", *arguments)
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.gpu
def test_gemm_uses_what_was_tuned_and_stays_in_bound(plan_folder: Path, seed: int, ledger: Any) -> None:
    found = qcutlass.tune([(512, 1024)], ms=[1, 16, 256], zero_dtype=torch.uint8, progress=False)
    assert [product.m for product in found] == [1, 16, 256]
    for product in found:
        problem = testing.random_problem(product.m, 512, 1024, zeros="int", device="cuda", seed=seed)
        packed = qcutlass.preprocess_weights(problem.codes, bits=4)
        tensors = problem.a, packed, problem.scales, problem.zeros
        plan = qcutlass.plan(qcutlass.gemm, *tensors, **problem.keywords)
        assert (plan.tactic, plan.split_k) == product.plan[:2]
        assert qcutlass.explain(qcutlass.gemm, *tensors, **problem.keywords).source == "tuned"
        reference = problem.reference(torch.float16 if plan.rounds_weights else None)
        ledger.close(qcutlass.gemm(*tensors, **problem.keywords), reference, problem)


@pytest.mark.gpu
def test_gemm_drops_plans_that_tuning_replaced(plan_folder: Path, seed: int, ledger: Any) -> None:
    problem = testing.random_problem(16, 512, 1024, zeros="none", device="cuda", seed=seed)
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    layer, traits = Layer(512, 1024), _C.device_traits(0)
    references = {True: problem.reference(torch.float16), False: problem.reference()}  # weights rounded, or not
    kernels = set()
    for other in _C.candidates(layer.arguments(16), traits):
        key = product_key(layer.arguments(16), 16)
        cache.store({key: TunedPlan(other.plan.tactic, other.plan.split_k, 1.0)}, traits, 0)
        out = qcutlass.gemm(problem.a, packed, problem.scales)
        ledger.close(out, references[other.plan.rounds_weights], other.plan.tactic)
        plan = qcutlass.plan(qcutlass.gemm, problem.a, packed, problem.scales)
        assert (plan.tactic, plan.split_k) == (other.plan.tactic, other.plan.split_k)
        kernels.add(launched_kernel(problem.a, packed, problem.scales))
    assert len(kernels) > 5, "gemm launched the remembered kernels, not the ones that it planned first"


def launched_kernel(*tensors: Tensor) -> str:
    """Name of the kernel that gemm spends its time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        qcutlass.gemm(*tensors)
        torch.cuda.synchronize()
    return max(profile.key_averages(), key=lambda event: event.device_time).key


@pytest.mark.gpu
def test_tuning_during_a_capture_is_refused(plan_folder: Path) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match=r"before torch\.cuda\.graph"):
        qcutlass.tune([(64, 64)], progress=False)
