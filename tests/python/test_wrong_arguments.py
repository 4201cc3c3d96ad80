"""Arguments that a call cannot mean are refused by their names: they gave numbers, or torch's errors.

Those of products stand with the products' tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import qcutlass
from qcutlass import (
    W8A8,
    QuantizedTensor,
    UnsupportedError,
    WeightOnly,
    blockwise,
    expand_scales,
    formats,
    models,
    moe,
    testing,
)
from qcutlass.algorithms import (
    InputStatistics,
    awq_scales,
    gptq,
    output_error,
    quantize_floats,
    round_to_nearest,
    search_smoothing,
)
from qcutlass.formats import FloatLinear
from qcutlass.layers import Int8Linear, QuantExperts, QuantLinear, WeightOnlyLinear, use_activations
from qcutlass.layers.embedding import QuantEmbedding, TiedLinear
from qcutlass.layers.expert_stack import ExpertStack
from qcutlass.layers.experts import Expert, Gate
from qcutlass.products.checks import as_device_here

ONE: Final = torch.ones(1)
NAN: Final = float("nan")


def quantized(**changed: Any) -> QuantizedTensor:
    parts = {"codes": torch.zeros(3, 16, dtype=torch.uint8), "scales": torch.ones(2, 3), "zeros": None}
    return QuantizedTensor(**({**parts, "bits": 4, "group_size": 8} | changed))


def int8_linear(**changed: Any) -> Int8Linear:
    codes, scales = qcutlass.quantize_weights_int8(torch.randn(32, 64))
    return Int8Linear(codes, scales, **changed)


def experts(seed: int = 0) -> QuantExperts:
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = (torch.randn(4, *shape, generator=generator) for shape in ((64, 32), (32, 32)))
    return QuantExperts.from_weights(gate_up, down, WeightOnly(4, 32))


def weight_only(**changed: Any) -> WeightOnlyLinear:
    return WeightOnlyLinear(qcutlass.quantize(torch.randn(48, 64), 4, 32), **changed)


def eight_bits() -> WeightOnlyLinear:
    return WeightOnlyLinear(qcutlass.quantize(torch.randn(48, 64), 8, 32))


def statistics(**changed: Any) -> InputStatistics:
    found = InputStatistics.empty(8, rows_a_call=2)
    found.add(torch.randn(16, 8))
    return replace(found, **changed)


def blocks() -> list[Tensor]:
    return [*blockwise.act_quant(torch.randn(2, 128)), *blockwise.weight_quant(torch.randn(16, 128))]


def gemm_weights() -> tuple[Tensor, Tensor, Tensor | None]:
    layer = weight_only()
    return layer.w_packed, layer.scales, layer.zeros


def experts_of(count: int) -> list[Expert]:
    return [experts().expert(0)] * count


def stack(*others: Any, first: int = 0) -> ExpertStack:
    """One of a layer and `others`."""
    return ExpertStack.of_layers([weight_only(), *others], 1 + len(others), first)


def embedding() -> QuantEmbedding:
    return QuantEmbedding(weight_only())


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


CALLS: Final[list[tuple[Callable[[], Any], str]]] = [
    (lambda: quantized(codes=torch.zeros(3, 16, dtype=torch.int8)), "codes: expected a tensor of uint8"),
    (lambda: quantized(codes=None), "codes: expected a torch.Tensor"),
    (lambda: quantized(bits=4.0), "bits: expected an int"),
    (lambda: quantized(group_size="8"), "group_size: expected an int"),
    (lambda: quantized(scales=torch.ones(2, 3, dtype=torch.uint8)), "scales: expected a tensor of float16"),
    (lambda: quantized(zeros=torch.ones(2, 3, dtype=torch.int64)), "zeros: expected a tensor of"),
    (lambda: quantized(global_scale=torch.ones(8)), "global_scale: "),
    (lambda: quantized().columns(3), "part: expected a slice of columns, got int"),
    (lambda: quantized().columns(slice(0, 16, 2)), "part: expected neighbouring columns of 16"),
    (lambda: quantized().columns(slice(4, 4)), "part: expected neighbouring columns of 16, at least one"),
    (lambda: quantized().columns(slice("a", "b")), "part: expected a slice of integers"),
    (lambda: quantized().rows(1), "index: expected a torch.Tensor, got int"),  # type: ignore[arg-type]
    (lambda: quantized().rows([0, 2]), "index: expected a torch.Tensor, got list"),  # type: ignore[arg-type]
    (lambda: quantized().rows(torch.tensor([0.5])), "index: expected a tensor of int64, int32, bool, got float32"),
    (lambda: quantized().rows(torch.tensor(2)), r"index: expected shape \[count\], got \[\]"),
    (lambda: quantized().rows(torch.tensor([0, 3])), "index: expected numbers of 3 channels, got 0 to 3"),
    (lambda: quantized().rows(torch.tensor([-4])), "index: expected numbers of 3 channels, got -4 to -4"),
    (lambda: quantized().rows(torch.tensor([True])), r"index: expected shape \[3\] of booleans, got \[1\]"),
    (lambda: quantized().rows(slice(None, None, -1)), "index: expected a step of at least 1"),
    (lambda: quantized().rows(slice(None, None, 0)), "index: expected a slice of integers with a step"),
    (lambda: quantized().rows(torch.tensor([0], device="meta")), "index is on meta, codes is on cpu"),
    (lambda: quantized().dequantize("cpu"), "dtype: expected one of float16, bfloat16, float32, float64, got cpu"),  # type: ignore[arg-type]
    (lambda: quantized().dequantize(torch.int8), "dtype: expected one of float16, bfloat16, float32, float64"),
    (lambda: FloatLinear(ONE[None]).dequantize(1), "dtype: expected one of"),  # type: ignore[arg-type]
    (lambda: FloatLinear(ONE[None]).rows(torch.tensor([1])), "index: expected numbers of 1 channels, got 1 to 1"),
    (lambda: weight_only().rows(torch.tensor([48])), "index: expected numbers of 48 channels, got 48 to 48"),
    (lambda: weight_only().columns(3), "part: expected a slice of columns, got int"),  # type: ignore[arg-type]
    (lambda: QuantEmbedding(weight_only(), scale="2"), "scale: expected a number, got str"),  # type: ignore[arg-type]
    (lambda: QuantEmbedding(weight_only(), "half"), "dtype: expected one of float16"),  # type: ignore[arg-type]
    (lambda: qcutlass.quantize_activations(ONE, dtype=[]), "dtype: expected torch.int8"),  # type: ignore[arg-type]
    (lambda: expand_scales(torch.ones(4, 1), torch.ones(2, 1).half()), "scales: expected a tensor of uint8"),
    (lambda: expand_scales(ONE.to(torch.uint8), ONE.half()), r"super_scales: expected shape \[B, N\]"),
    (lambda: expand_scales([1], ONE.half()), "scales: expected a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: qcutlass.quantize(torch.ones(4, 32), symmetric="no"), "symmetric: "),  # type: ignore[arg-type]
    (lambda: qcutlass.quantize(torch.ones(4, 32), scale_dtype=0), "scale_dtype: "),  # type: ignore[arg-type]
    (lambda: qcutlass.interleave_gate_up(quantized(), quantized(), dim=1), "dim: expected 0 for weights that are no"),  # type: ignore[call-overload]
    (lambda: qcutlass.interleave_gate_up(*tensors((16, 4), (16, 4)), dim="0"), "dim: expected an int"),  # type: ignore[call-overload]
    (
        lambda: qcutlass.interleave_gate_up(*(qcutlass.quantize_weights_int8(torch.randn(32, 64)) for _ in range(2))),  # type: ignore[call-overload]
        "gate: expected float32 scales of square blocks",
    ),
    (lambda: int8_linear(smooth=torch.zeros(64)), "smooth: expected numbers above 0, got 0.0"),
    (lambda: int8_linear(a_scale=torch.tensor([-0.05])), "a_scale: expected numbers above 0, got -0.05"),
    (lambda: int8_linear(a_scale=ONE, azp=torch.tensor([300], dtype=torch.int32)), r"azp: expected a value in \[-128"),
    (lambda: int8_linear(a_scale=0.1), "a_scale: expected a torch.Tensor"),
    (lambda: int8_linear(azp=torch.tensor([3], dtype=torch.int32)), "azp: a given zero point needs a given scale"),
    (
        lambda: expand_scales(torch.ones(4, 1).byte(), ONE.half()[None].to("meta")),
        "super_scales is on meta, scales is on",
    ),
    (lambda: expand_scales(torch.ones(4, 1).byte(), ONE.half()[None].to_sparse()), "super_scales: expected a dense"),
    (lambda: qcutlass.quantize(torch.ones(4, 32, device="meta")), "weight is on the meta device and has no values"),
    (lambda: quantize_floats(torch.ones(4, 32, device="meta")), "weight is on the meta device"),
    (lambda: round_to_nearest(torch.ones(4, 32, device="meta")), "weight is on the meta device"),
    (lambda: qcutlass.smooth(ONE.to("meta"), ONE[None]), "act_absmax is on the meta device"),
    (lambda: qcutlass.smooth(ONE.to_sparse(), ONE[None]), "act_absmax: expected a dense tensor"),
    (lambda: qcutlass.smooth(ONE, ONE[None].to("meta")), "weight is on the meta device"),
    (lambda: qcutlass.interleave_gate_up(*[torch.ones(16, 4).to_sparse()] * 2), "gate: expected a dense tensor"),  # type: ignore[arg-type]
    (lambda: qcutlass.interleave_gate_up(quantized(), None), "up: expected a torch.Tensor, a QuantizedTensor or"),
    (lambda: qcutlass.interleave_gate_up(None, quantized()), "gate: expected a torch.Tensor, a QuantizedTensor or"),
    (
        lambda: awq_scales([torch.ones(4, 8)], statistics(), exponents=[-1.0]),
        r"exponents\[0\]: expected a number in \[0",
    ),
    (lambda: awq_scales([torch.ones(4, 8)], statistics(), exponents=[0, "1"]), r"exponents\[1\]: expected a number in"),  # type: ignore[list-item]
    (lambda: awq_scales([torch.ones(4, 8)], statistics(), exponents=0.5), "exponents: expected a list of numbers"),  # type: ignore[arg-type]
    (lambda: awq_scales([torch.ones(4, 8)], statistics(), exponents="0.5"), "exponents: expected a list of numbers"),  # type: ignore[arg-type]
    (
        lambda: search_smoothing([torch.ones(4, 8)], statistics(), [NAN]),
        r"alphas\[0\]: expected a number in \[0, 1\], got nan",
    ),
    (lambda: search_smoothing([torch.ones(4, 8)], statistics(), None), "alphas: expected a list of numbers"),  # type: ignore[arg-type]
    (
        lambda: search_smoothing([torch.ones(4, 8)], statistics(rows=ONE)),
        r"statistics.rows: expected shape \[R, K\], K = 8",
    ),
    (lambda: search_smoothing([torch.ones(4, 8)], statistics(rows=None)), "statistics.rows: expected a torch.Tensor"),
    (lambda: statistics(count="3"), "count: expected an int, got str"),
    (lambda: statistics(rows_a_call=-1), "rows_a_call: expected at least 0, got -1"),
    (lambda: statistics().add(torch.ones(2, 8, device="meta")), "a is on the meta device and has no values"),
    (lambda: statistics().add(torch.eye(8).to_sparse()), "a: expected a dense tensor"),
    (lambda: gptq(torch.ones(4, 8), torch.eye(8).to_sparse()), "second_moment: expected a dense tensor"),
    (lambda: output_error(torch.ones(4, 8), torch.ones(4, 8).to_sparse(), torch.eye(8)), "other: expected a dense"),
    (lambda: moe.route(torch.zeros(1, 1, dtype=torch.int32), 2**70), r"num_experts: expected at most 2\^30"),
    (
        lambda: blockwise.int8_addmm_quant(*blocks(), out_block_size=None),
        "out_block_size: expected an int, got NoneType",
    ),  # type: ignore[arg-type]
    (
        lambda: qcutlass.tactics(qcutlass.gemm, torch.eye(64).half().to_sparse(), *gemm_weights()),
        "a: expected a dense tensor",
    ),
    (
        lambda: qcutlass.gemm(torch.eye(64), *gemm_weights(), super_scales=1),  # type: ignore[arg-type]
        "super_scales: expected a torch.Tensor, got int",
    ),
    (lambda: formats.load(None), "checkpoint: expected a path, as a text or a pathlib.Path, or a mapping from names"),  # type: ignore[arg-type]
    (lambda: formats.load([ONE]), "checkpoint: expected a path"),  # type: ignore[arg-type]
    (lambda: formats.load(ONE.numpy()), "checkpoint: expected a path"),
    (lambda: formats.load(b"model"), "checkpoint: expected a path"),  # type: ignore[arg-type]
    (lambda: formats.load(""), "checkpoint: expected a path, got an empty text"),
    (
        lambda: formats.load({"up.weight": ONE.numpy()}),
        r"checkpoint\['up.weight'\]: expected a torch.Tensor, got ndarray",
    ),
    (lambda: formats.load({1: ONE}), "checkpoint: expected texts as names of tensors, got 1"),  # type: ignore[dict-item]
    (
        lambda: formats.load({"up.weight": torch.eye(32).to_sparse()}),
        r"checkpoint\['up.weight'\]: expected a dense tensor",
    ),
    (
        lambda: formats.load({"up.weight": torch.eye(32, device="meta")})["up"],
        r"checkpoint\['up.weight'\] is on the meta device",
    ),
    (lambda: formats.load({}, []), "format: expected 'auto' or one of"),  # type: ignore[arg-type]
    (lambda: formats.load({}, config="gptq"), "config: expected a mapping"),  # type: ignore[arg-type]
    (lambda: formats.detect(None), "checkpoint: expected a path"),  # type: ignore[arg-type]
    (lambda: QuantLinear.from_checkpoint([1], "up"), "checkpoint: expected a path, .* or an opened checkpoint"),  # type: ignore[arg-type]
    (lambda: models.inspect(None), "path: expected a path"),  # type: ignore[arg-type]
    (lambda: models.is_converted([1]), "path: expected a path"),  # type: ignore[arg-type]
    (lambda: models.export_note(None), "folder: expected a path"),  # type: ignore[arg-type]
    (lambda: TiedLinear(None), "embedding: expected a QuantEmbedding, got NoneType"),  # type: ignore[arg-type]
    (lambda: TiedLinear(embedding(), nn.Parameter(torch.ones(1))), "bias: "),
    (lambda: use_activations(nn.Linear(4, 4), "none"), "model: expected one with quantised linear layers"),
    (lambda: use_activations(int8_linear(), "none"), "model: is itself a layer"),
    (
        lambda: qcutlass.replace_linear(linears(), W8A8(), statistics={"model.0": None}),  # type: ignore[dict-item]
        "statistics: 'model.0' names no module",
    ),
    (lambda: qcutlass.calibrate(linears(), types=nn.Linear).__enter__(), "types: expected a tuple of classes"),  # type: ignore[arg-type]
    (lambda: qcutlass.smooth_model(linears(), None), "statistics: expected a mapping"),  # type: ignore[arg-type]
    (lambda: qcutlass.smooth_model(linears(), {}, groups=["0"]), r"groups: expected pairs \(name, \[names\]\)"),  # type: ignore[list-item]
    (lambda: qcutlass.smooth_model(linears(), {}, others="no"), "others: "),  # type: ignore[arg-type]
    (lambda: qcutlass.smooth(ONE, None), "weight: expected a matrix or a list of some"),  # type: ignore[arg-type]
    (lambda: QuantExperts.from_weights(None, ONE, WeightOnly(4, 32)), "gate_up: expected a torch.Tensor"),  # type: ignore[arg-type]
    (
        lambda: QuantExperts.from_weights(
            *tensors((4, 64, 32), (4, 32, 32)), WeightOnly(4, 32), gate_up_bias=torch.ones(3, 64)
        ),
        r"gate_up_bias: expected shape \[4, 64\], got \[3, 64\]",
    ),
    (
        lambda: QuantExperts.from_weights(*tensors((4, 64, 32), (4, 32, 32)), WeightOnly(4, 32), limit=-7.0),
        "limit: ",
    ),
    (lambda: QuantExperts(weight_only(), stack(), "silu"), "gate_up: expected an ExpertStack, got WeightOnlyLinear"),  # type: ignore[arg-type]
    (lambda: QuantExperts(stack(), stack(), limit="7"), "limit: expected a number, got str"),  # type: ignore[arg-type]
    (lambda: QuantExperts(experts().gate_up, experts().down, num_experts=3), "num_experts: expected at least 4, got 3"),
    (
        lambda: QuantExperts.from_layers([weight_only()], 1),
        r"expert 0: expected an Expert \(gate, up, down\), got Weight",
    ),
    (
        lambda: QuantExperts.from_layers([Expert(*[nn.Linear(4, 4)] * 3)], 1),
        "expert 0: gate: expected a WeightOnlyLine",
    ),
    (
        lambda: QuantExperts.from_layers([experts().expert(0)], 2),
        "count: expected as many as there are layers, 1, got 2",
    ),
    (
        lambda: QuantExperts.from_layers(experts_of(3), 2),
        "count: expected as many as there are layers, got 2, and there",
    ),
    (lambda: QuantExperts.from_layers([], 0), "count: expected at least 1, got 0"),
    (lambda: QuantExperts.from_layers(None, 2), "layers: expected several Expert, got NoneType"),  # type: ignore[arg-type]
    (lambda: QuantExperts.from_layers(experts_of(1), 1, "silu"), "gate: expected a Gate, got str"),  # type: ignore[arg-type]
    (lambda: QuantExperts.from_layers(experts_of(1), 1, Gate(limit=-1.0)), "limit: expected a positive number"),
    (lambda: stack(first=-1), "first: expected at least 0, got -1"),
    (lambda: stack(weight_only(activation="relu")), r"layers\[1\] has an activation, 'relu'"),
    (lambda: stack(weight_only(act_scale=torch.ones(64))), r"layers\[1\] scales its input"),
    (lambda: stack(nn.Linear(64, 48)), r"layers\[1\]: expected a WeightOnlyLinear, got Linear"),
    (lambda: stack(weight_only().to("meta")), r"layers\[1\] is on meta, the first layer is on cpu"),
    (
        lambda: ExpertStack.of_layers([eight_bits(), weight_only()], 2),
        r"layers\[1\] has \[N, K, bits, group_size, codes",
    ),
    (lambda: stack(eight_bits()), r"layers\[1\] has \[N, K, bits"),
    (
        lambda: stack(WeightOnlyLinear(quantize_floats(torch.randn(48, 64)))),
        r"layers\[1\] has \[N, K, bits, group_size",
    ),
    (lambda: stack(weight_only()).layer(2), r"expert: expected a number in \[0, 2\), got 2"),
    (lambda: stack(weight_only()).some(slice(2, 4)), "part: expected neighbours among 2 experts, at least one"),
    (lambda: stack(weight_only()).some(1), "part: expected a slice, got int"),  # type: ignore[arg-type]
    (lambda: blockwise.fp8_silu_mul_quant(torch.ones(2, 64, requires_grad=True)), "gate_up requires grad"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{message}"):
        call()


def test_slots_of_experts_are_those_of_their_tokens(seed: int) -> None:
    """They were put into the shape of the tokens, whatever theirs was."""
    layer, x = experts(seed), torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed))
    weights, ids = torch.randn(10, 4, generator=torch.Generator().manual_seed(seed)).softmax(-1).topk(2)
    expected = layer(x.flatten(0, 1), ids, weights)
    assert torch.equal(layer(x, ids.view(2, 5, 2), weights.view(2, 5, 2)).flatten(0, 1), expected)
    for wrong in ((ids.T, weights.T), (ids, weights.T), (ids[:5], weights[:5]), (ids, weights.int())):
        with pytest.raises((TypeError, ValueError), match=r"topk_|top_k_"):
            layer(x, *wrong)
    assert layer(x.new_zeros(0, 32), ids[:0], weights[:0]).shape == (0, 32)


def test_a_tied_head_keeps_the_type_of_its_input() -> None:
    head = TiedLinear(embedding(), nn.Parameter(torch.ones(48)))
    assert head(torch.ones(3, 64, dtype=torch.float16)).dtype == torch.float16
    assert isinstance(head, QuantLinear) is False


DEVICES: Final[list[tuple[Any, str]]] = [
    ("cuda:x", "device: expected 'cpu', 'cuda', or 'cuda:N' for GPU number N, got 'cuda:x'"),
    ("gpu", "device: expected 'cpu', 'cuda', or 'cuda:N' for GPU number N, got 'gpu'"),
    ("", "device: expected 'cpu'"),
    ("cuda:256", "device: expected 'cpu', 'cuda', or 'cuda:N' for GPU number N, got 'cuda:256'"),
    (3.5, "device: expected 'cpu', 'cuda', or 'cuda:N' for GPU number N, or a torch.device, got float"),
    (True, "device: expected 'cpu'"),
    (-1, "device: expected 'cpu'"),
    (2**70, "device: expected 'cpu'"),
    ("mps", "device: qcutlass runs on cpu and cuda, got mps"),
]


@pytest.mark.parametrize(("device", "message"), DEVICES, ids=[str(device) for device, _ in DEVICES])
def test_devices_that_are_none_are_named(device: Any, message: str) -> None:
    """Torch's own errors name neither the argument nor what it takes, and it takes numbers of GPUs modulo 256."""
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=f"^{message}"):
        as_device_here("device", device)
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=f"^{message}"):
        InputStatistics.empty(4, device)
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=f"^{message}"):
        qcutlass.tune([(64, 64)], device=device)


def test_devices_that_hold_no_tensors_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"^device: its tensors have no values, got meta"):
        as_device_here("device", "meta")
    with pytest.raises(UnsupportedError, match=r"^device: torch sees \d+ CUDA devices, got cuda:99; pass 'cpu'"):
        as_device_here("device", "cuda:99")
    assert as_device_here("device", "cpu") == as_device_here("device", torch.device("cpu")) == torch.device("cpu")


def test_models_take_paths_devices_and_types_that_are_some(tmp_path: Path) -> None:
    """What is wrong is refused before anything is read."""
    transformers = pytest.importorskip("qcutlass.models.transformers", reason="needs transformers")
    old, new, scheme = tmp_path / "old", tmp_path / "new", WeightOnly(4, 32)
    wrong: Any = None
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: models.convert(wrong, new, scheme=scheme), "source: expected a path"),
        (lambda: models.convert(old, wrong, scheme=scheme), "destination: expected a path"),
        (lambda: models.convert("", new, scheme=scheme), "source: expected a path, got an empty text"),
        (lambda: models.quantize_model(wrong, new, "rtn"), "source: expected a path"),
        (lambda: models.quantize_model(old, new, "rtn", device="cuda:x"), "device: expected 'cpu'"),
        (lambda: models.export_model(wrong, new), "folder: expected a path"),
        (lambda: models.export_model(old, new, []), "format: expected one of"),  # type: ignore[arg-type]
        (lambda: models.ConvertedFolder(wrong), "folder: expected a path"),
        (lambda: transformers.load_model(wrong), "folder: expected a path"),
        (lambda: transformers.load_model(old, "gpu"), "device: expected 'cpu'"),
        (lambda: transformers.load_model(old, dtype=torch.int8), "dtype: expected one of float16"),
    ]
    for call, message in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()


@pytest.mark.parametrize("overwrite", ["no", 1, None])
def test_a_folder_is_overwritten_by_true_alone(overwrite: Any, tmp_path: Path) -> None:
    """A text was taken for it, and what was there was gone."""
    pytest.importorskip("transformers", reason="needs transformers")
    precious = tmp_path / "new" / "mine.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    source = tmp_path / "old"
    source.mkdir()
    calls: list[Callable[[], Any]] = [
        lambda: models.convert(source, precious.parent, scheme=WeightOnly(4, 32), overwrite=overwrite),
        lambda: models.quantize_model(source, precious.parent, "rtn", overwrite=overwrite),
        lambda: models.export_model(source, precious.parent, "gptq", overwrite=overwrite),
        lambda: models.convert(source, tmp_path / "other", scheme=WeightOnly(4, 32), verify=overwrite),
    ]
    for call, name in zip(calls, ["overwrite"] * 3 + ["verify"], strict=True):
        with pytest.raises(TypeError, match=f"^{name}: expected True or False"):
            call()
    assert precious.read_text() == "precious"


def test_the_first_columns_of_a_layer_keep_its_bias() -> None:
    """Without a number at its beginning a slice was taken for one of later columns."""
    layer = weight_only(bias=torch.ones(48))
    for part, has_bias in ((slice(None, 32), True), (slice(-64, 32), True), (slice(32, None), False)):
        assert (layer.columns(part).bias is not None) == has_bias


@pytest.mark.parametrize("weight_dtype", ["e2m1", "e4m3"])
def test_no_channels_are_quantised_to_none(weight_dtype: str) -> None:
    """As by `quantize`; it was an error of torch's about a shape."""
    found = quantize_floats(torch.ones(0, 48), weight_dtype, 32)
    assert (found.shape, found.scales.shape) == ((0, 48), (2, 0))


def test_a_moment_that_requires_grad_is_taken_as_it_is(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(16, 32, generator=generator), torch.randn(64, 32, generator=generator)
    moment = x.T @ x / 64
    expected = gptq(weight, moment).weight
    assert torch.equal(gptq(weight, moment.requires_grad_()).weight.codes, expected.codes)


CASES: Final[list[tuple[Callable[[], Any], str]]] = [
    (lambda: testing.Case("2", 16, 64), "m: expected int, got str"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16.0, 64), "n: expected int, got float"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, True), "k: expected int, got bool"),
    (lambda: testing.Case(-2, 16, 64), "m: expected at least 0, got -2"),
    (lambda: testing.Case(2, 16, 64, bits=3), "bits: expected one of 4, 8, got 3"),
    (lambda: testing.Case(2, 16, 64, group_size=0), "group_size: expected at least 1, got 0"),
    (
        lambda: testing.Case(2, 16, 64, zeros="some"),
        "zeros: expected one of 'none', 'int', 'real', 'minimum', got 'some'",
    ),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64, dtype="half"), "dtype: expected dtype, got str"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64, scale_dtype=1), "scale_dtype: expected dtype or None, got int"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64, bias=1), "bias: expected bool, got int"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64, activation=1), "activation: expected str or None, got int"),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64).random(device="gpu"), "device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
    (
        lambda: testing.Case(2, 16, 64).random(device=3.5),
        "device: expected 'cpu', 'cuda' or 'cuda:N', or a torch.device",
    ),  # type: ignore[arg-type]
    (lambda: testing.Case(2, 16, 64).exact(seed="1"), "seed: expected an int, got str"),  # type: ignore[arg-type]
    (lambda: testing.random_problem(2, 16, None), "k: expected int, got NoneType"),  # type: ignore[arg-type]
    (lambda: testing.GroupedCase(None, (1, 2)), "case: expected Case, got NoneType"),  # type: ignore[arg-type]
    (lambda: testing.GroupedCase(testing.Case(2, 16, 64), [1, 2]), "counts: expected tuple, got list"),  # type: ignore[arg-type]
    (lambda: testing.Int4Case(2, 16, 64, a_scale="all"), "a_scale: expected one of 'one', 'each', got 'all'"),  # type: ignore[arg-type]
    (lambda: testing.EightBitCase(2, 16, 64, azp=True), "azp: expected one of"),  # type: ignore[arg-type]
    (lambda: testing.BlockwiseCase(2, 16, 64, out_dtype=None), "out_dtype: expected dtype, got NoneType"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_fields_of_cases_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()
