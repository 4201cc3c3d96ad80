"""The quantisers to 8 bits, bit for bit against the arithmetic that their documentation states, worked out in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.quantizer_model import (
    FLOATS,
    LARGEST,
    OPTIONS,
    Options,
    Quantized,
    activations,
    assert_same,
    option_id,
    quantize,
    reference,
    smoothing,
    with_tensors,
)
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.quantizer_operators import QuantizeCall

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Around the widths of vectors, and of what the GPU's warps, blocks and large blocks hold: 8, 1024, 8192, 32768 halves.
LENGTHS = [*range(1, 18), 31, 33, 255, 512, 1000, 1023, 1025, 1032]
LONG_LENGTHS = [4095, 4096, 4104, 8192, 8193, 8200, 16384, 32768, 32776, 65536, 100001]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_agrees_with_the_stated_arithmetic(
    options: Options, dtype: torch.dtype, device: str, seeds: Iterator[int]
) -> None:
    for k in LENGTHS:
        seed = next(seeds)
        a, smooth = activations(9, k, dtype, seed, device), smoothing(k, torch.float32, seed, device)
        assert_same(quantize(a, options), reference(a, options), f"K={k} seed={seed}")
        assert_same(quantize(a, options, smooth), reference(a, options, smooth), f"K={k} smooth seed={seed}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_long_rows(options: Options, device: str, seeds: Iterator[int]) -> None:
    for k, dtype in itertools.product(LONG_LENGTHS, FLOATS):
        seed = next(seeds)
        a, smooth = activations(5, k, dtype, seed, device), smoothing(k, torch.float32, seed, device)
        assert_same(quantize(a, options), reference(a, options), f"K={k} {dtype} seed={seed}")
        assert_same(quantize(a, options, smooth), reference(a, options, smooth), f"K={k} {dtype} smooth seed={seed}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [16, 40, 1500])
def test_many_rows(k: int, device: str, seed: int) -> None:
    for options in OPTIONS:
        a = activations(1001, k, torch.float16, seed, device)
        assert_same(quantize(a, options), reference(a, options), f"{options} seed={seed}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0},
        {"scale": 0.7},
        {"scale": 3e-30},
        {"scale": 2.0**70},
        {"scale": 1.0, "azp": 127},
        {"scale": 1.0, "azp": -128},
        {"dtype": torch.float8_e4m3fn, "scale": 1.0},
        {"dtype": torch.float8_e4m3fn, "scale": 1.3},
        {"dtype": torch.float8_e5m2, "scale": 1.0},
        {"dtype": torch.float8_e5m2, "scale": 2.0**-100},
    ],
    ids=option_id,
)
def test_every_16_bit_number(options: Options, dtype: torch.dtype, device: str) -> None:
    """Ties, subnormals, both zeros, infinities and NaN included."""
    a = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(64, 1024).to(device)
    assert_same(quantize(a, options), reference(a, options), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"per_tensor": True}, {"asymmetric": True}], ids=option_id)
def test_int8_ties_go_to_even(options: Options, device: str) -> None:
    a = torch.cat([torch.arange(-126.5, 127), torch.tensor([-128.0 if options.get("asymmetric") else -127.0, 127.0])])
    out = quantize(a.to(device), options)
    assert out.scale.flatten().tolist() == [1.0]
    assert out.azp is None or out.azp.flatten().tolist() == [0]
    assert out.codes.tolist() == [round(x) for x in a.tolist()]  # Python's round() goes to even


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS[:4] + OPTIONS[6:8] + OPTIONS[9:10], ids=option_id)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_scale(bad: float, options: Options, device: str, seed: int) -> None:
    for k, smooth in itertools.product((5, 64, 3000), (None, "smooth")):
        a = activations(3, k, torch.float32, seed, device)
        a[1, k // 2] = bad
        factors = None if smooth is None else smoothing(k, torch.float32, seed, device)
        out = quantize(a, options, factors)
        assert_same(out, reference(a, options, factors), f"K={k} {smooth} seed={seed}")
        scales = out.scale.cpu()
        if options.get("per_tensor"):
            assert not bool(scales.isfinite().any())
        else:
            assert scales.isfinite().tolist() == [True, False, True]
        product = (out.codes.float() - (0 if out.azp is None else out.azp[..., None])) * out.scale[..., None]
        assert not bool(product.isfinite().flatten(1).all(1)[1])


@pytest.mark.parametrize("device", DEVICES)
def test_given_scales_and_what_is_not_finite(device: str) -> None:
    a = torch.tensor([[torch.inf, -torch.inf, 1.0, -torch.nan]], device=device)
    out = quantize(a, {"scale": 0.5})
    assert out.codes.tolist() == [[127, -127, 2, 0]]
    assert bool(out.scale.isnan().all())
    out = quantize(a[:, :3], {"scale": 0.5, "azp": 3})
    assert out.codes.tolist() == [[127, -128, 5]]
    assert out.scale.tolist() == [0.5]
    out = quantize(a, {"scale": 0.5, "dtype": torch.float8_e4m3fn})
    assert out.scale.tolist() == [0.5]
    assert out.codes.float().nan_to_num(nan=-1.0).tolist() == [[448.0, -448.0, 2.0, -1.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS[:4] + OPTIONS[6:8], ids=option_id)
def test_zeros_get_scale_1(options: Options, device: str) -> None:
    for shape in ((3, 40), (2, 5000), (0, 8)):
        out = quantize(torch.zeros(shape, dtype=torch.float16, device=device), options)
        assert bool((out.scale == 1).all())
        assert bool((out.codes.float() - (0 if out.azp is None else out.azp[..., None]) == 0).all())
        assert out.scale.shape == ((1,) if options.get("per_tensor") else shape[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_views_and_batches(options: Options, device: str, seed: int) -> None:
    base = activations(12, 96, torch.bfloat16, seed, device)
    views = {
        "columns": base[:, 8:72],
        "odd columns": base[:, 3:46],
        "every second row": base[::2, :80],
        "transposed": base.T,
        "strided": base[:, ::3],
        "expanded": base[5:6].expand(4, 96),
        "batch": base.view(2, 3, 2, 96),
        "row": base[6],
        "one column": base[:, 7:8],
        "one element": base[7, 9:10],
        "no rows": base[:0],
        "no batch": base.view(3, 4, 96)[:, :0],
        "offset": base.flatten()[5 : 5 + 11 * 96].view(11, 96),
        "offset, ragged": base.flatten()[1 : 1 + 11 * 95].view(11, 95),
    }
    for name, view in views.items():
        smooth = smoothing(view.shape[-1], torch.float16, seed, device)
        out = quantize(view, options)
        assert out.codes.shape == view.shape, name
        assert out.codes.is_contiguous(), name
        ranges = (1,) if options.get("per_tensor") or "scale" in options else view.shape[:-1]
        assert out.scale.shape == ranges, name
        if view.numel():
            assert_same(out, reference(view, options), name)
            assert_same(quantize(view, options, smooth), reference(view, options, smooth), name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_writes_its_outputs_alone(options: Options, device: str, seed: int) -> None:
    """Outputs inside a buffer of sentinels, at every alignment: the codes' bytes, then scales and zero points."""
    dtype = options.get("dtype", torch.int8)
    whole, asymmetric = options.get("per_tensor", False) or "scale" in options, "asymmetric" in options
    given = with_tensors(options, device)
    for k, offset in itertools.product((7, 24, 1100), range(9)):
        content = activations(3, k, torch.float16, seed, device)
        a = testing.Poisoned.around(content, offset=offset, padding=offset).tensor  # NaN around it
        codes = torch.full((3 * k + 64,), 0x55, dtype=torch.uint8, device=device)
        numbers = torch.full((2, 9), 0x55555555, dtype=torch.int32, device=device)
        count = 1 if whole else 3
        place = {"device": a.get_device(), "stream": torch.cuda.current_stream().cuda_stream} if a.is_cuda else {}
        call = QuantizeCall(a, dtype, whole, asymmetric, given.get("scale"), given.get("azp"))
        arguments, _ = call.fill(codes[32 + offset % 8 :], numbers[0, 3:], numbers[1, 3:] if asymmetric else None)
        workspace = torch.empty(_C.QUANTIZE_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        arguments.workspace = workspace.data_ptr()
        _C.quantize(arguments, **place)
        begin = 32 + offset % 8
        azp = numbers[1, 3 : 3 + count] if asymmetric else given.get("azp")
        out = Quantized(
            codes[begin : begin + 3 * k].view(3, k).view(dtype), numbers[0, 3 : 3 + count].view(torch.float32), azp
        )
        assert_same(out, reference(a, options), f"K={k} offset={offset} seed={seed}")
        codes[begin : begin + 3 * k] = 0x55
        numbers[0, 3 : 3 + count] = 0x55555555
        if asymmetric:
            numbers[1, 3 : 3 + count] = 0x55555555
        assert bool((codes == 0x55).all()), f"K={k} offset={offset}: codes outside the matrix"
        assert bool((numbers == 0x55555555).all()), f"K={k} offset={offset}: scales or zero points outside their place"


def test_operands_are_left_alone(seed: int) -> None:
    a, smooth, scale = activations(6, 50, torch.float32, seed), smoothing(50, torch.float16, seed), torch.tensor(0.25)
    copies = [t.clone() for t in (a, smooth, scale)]
    _, a_scale = qcutlass.quantize_activations(a, scale=scale, smooth=smooth)
    assert a_scale.data_ptr() != scale.data_ptr()
    for tensor, copy in zip((a, smooth, scale), copies, strict=True):
        testing.assert_equal(tensor, copy)


def test_any_number_of_threads_gives_the_same(seed: int) -> None:
    a = activations(300, 1000, torch.bfloat16, seed)
    threads = torch.get_num_threads()
    try:
        for options in OPTIONS:
            torch.set_num_threads(1)
            alone = quantize(a, options)
            torch.set_num_threads(3)
            assert_same(quantize(a, options), alone, options)
    finally:
        torch.set_num_threads(threads)


finite_rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(finite_rows, st.booleans())
def test_int8_is_within_half_a_step(row: list[float], asymmetric: bool) -> None:
    x = torch.tensor([row])
    out = quantize(x, {"asymmetric": asymmetric})
    step = out.scale.double()[:, None]
    q = out.codes.double() - (0 if out.azp is None else out.azp[:, None])
    # The quotient's rounding moves it by 2^-24 of up to 255, the scale's by as much.
    assert bool(((x.double() - q * step).abs() <= step * (0.5 + 255 * 2.0**-22)).all())
    if not asymmetric:
        assert int(out.codes.int().abs().max()) == 127 or float(x.abs().max()) < 127 * 2.0**-126
        assert int(out.codes.min()) >= -127
        restored = (out.codes.float() * out.scale[:, None]).contiguous()
        if float(out.scale) > 2.0**-120:
            assert torch.equal(quantize(restored, {}).codes, out.codes)  # quantising again changes nothing


@settings(max_examples=100, deadline=None, derandomize=True)
@given(finite_rows, st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
def test_fp8_is_finite_and_spans_its_range(row: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor([row])
    out = quantize(x, {"dtype": dtype})
    values = out.codes.float()
    assert bool(values.isfinite().all())
    if float(x.abs().max()) > 2.0**-100:
        assert float(values.abs().max()) == LARGEST[dtype]


@pytest.mark.parametrize("per_tensor", [False, True])
def test_weights_are_quantised_like_activations(per_tensor: bool, seed: int) -> None:
    weight = torch.nn.Parameter(activations(20, 77, torch.float16, seed))
    for function, dtype in (
        (qcutlass.quantize_weights_int8, torch.int8),
        (qcutlass.quantize_weights_fp8, torch.float8_e4m3fn),
    ):
        codes, scale = function(weight, per_tensor=per_tensor)
        assert scale.shape == ((1,) if per_tensor else (20,))
        options = {"dtype": dtype, "per_tensor": per_tensor}
        assert_same(Quantized(codes, scale), reference(weight.detach(), options), dtype)


A = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("a", "keywords", "error", "message"),
    [
        ([1.0], {}, TypeError, r"a: expected a torch.Tensor, got list"),
        (A.int(), {}, TypeError, r"a: .*float32, got int32"),
        (torch.tensor(1.0), {}, ValueError, r"a: .*\[\.\.\., K\]"),
        (A[:, :0], {}, ValueError, r"a: K must be at least 1.*\[2, 0\]"),
        (A, {"dtype": torch.uint8}, TypeError, r"dtype: .*int8.*got torch.uint8"),
        (A, {"dtype": "int8"}, TypeError, r"dtype: "),
        (A, {"per_tensor": 1}, TypeError, r"per_tensor: .*int"),
        (A, {"asymmetric": A}, TypeError, r"asymmetric: .*Tensor"),
        (A, {"asymmetric": True, "dtype": torch.float8_e5m2}, ValueError, r"asymmetric: only int8"),
        (A, {"scale": 0.5}, TypeError, r"scale: .*float"),
        (A, {"scale": torch.ones(1).half()}, TypeError, r"scale: .*float32, got float16"),
        (A, {"scale": torch.ones(2)}, ValueError, r"scale: .*\[2\]"),
        (A, {"scale": torch.ones((), device="meta")}, ValueError, r"scale is on meta, a is on cpu"),
        (A, {"scale": torch.ones(1), "asymmetric": True}, ValueError, r"azp: .*pass azp="),
        (A, {"azp": torch.zeros(1).int()}, ValueError, r"azp: .*pass scale="),
        (A, {"scale": torch.ones(1), "azp": torch.zeros(1)}, TypeError, r"azp: .*int32"),
        (A, {"scale": torch.ones(1), "azp": torch.full((1,), 128).int()}, ValueError, r"azp .*\[-128, 127\], got 128"),
        (
            A,
            {"scale": torch.ones(1), "azp": torch.zeros(1).int(), "dtype": torch.float8_e5m2},
            ValueError,
            r"azp: only int8",
        ),
        (A, {"smooth": torch.ones(7)}, ValueError, r"smooth: expected shape \[K\] = \[8\], got \[7\]"),
        (A, {"smooth": torch.ones(8).int()}, TypeError, r"smooth: "),
        (A.to_sparse(), {}, (ValueError, NotImplementedError), r"dense|sparse|Sparse"),
        (A.clone().requires_grad_(), {}, RuntimeError, r"a requires grad.*inference"),
        (A, {"smooth": torch.ones(8, requires_grad=True)}, RuntimeError, r"smooth requires grad"),
    ],
)
def test_wrong_arguments(a: Any, keywords: Options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qcutlass.quantize_activations(a, **keywords)


@pytest.mark.parametrize("function", [qcutlass.quantize_weights_int8, qcutlass.quantize_weights_fp8])
def test_wrong_weights(function: Any) -> None:
    with pytest.raises(TypeError, match=r"weight: .*got int32"):
        function(A.int())
    with pytest.raises(ValueError, match=r"weight: expected shape \[N, K\], got \[2, 2, 2\]"):
        function(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"weight: K must be at least 1"):
        function(A[:, :0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_opcheck(options: Options, device: str, seed: int) -> None:
    a, smooth = activations(6, 24, torch.float16, seed, device), smoothing(24, torch.float16, seed, device)
    keywords = with_tensors(options, device) | {"smooth": smooth}
    torch.library.opcheck(torch.ops.qcutlass.quantize_8bit.default, (a, keywords.pop("dtype", torch.int8)), keywords)


@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_compiles_in_one_graph(options: Options, seed: int) -> None:
    def layer(a: Tensor) -> Quantized:
        return quantize(a * 2, options)

    a = activations(6, 24, torch.float32, seed)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 5, 3):
        assert_same(compiled(a[:rows]), layer(a[:rows]), options)


def test_meta_tensors_get_the_right_shapes() -> None:
    a = torch.empty(3, 5, 24, dtype=torch.float16, device="meta")
    codes, scale, azp = qcutlass.quantize_activations(a, asymmetric=True)
    assert [(t.shape, t.dtype, t.device.type) for t in (codes, scale, azp)] == [
        ((3, 5, 24), torch.int8, "meta"),
        ((3, 5), torch.float32, "meta"),
        ((3, 5), torch.int32, "meta"),
    ]
    codes, scale = qcutlass.quantize_activations(a, dtype=torch.float8_e5m2, per_tensor=True)
    assert (codes.dtype, scale.shape) == (torch.float8_e5m2, (1,))


def test_inference_mode_and_parameters(seed: int) -> None:
    a = torch.nn.Parameter(activations(4, 40, torch.float32, seed))
    expected = reference(a, {})
    with torch.inference_mode():
        assert_same(quantize(a, {}), expected, "inference mode")
    with torch.no_grad():
        assert_same(quantize(a, {}), expected, "no_grad")
