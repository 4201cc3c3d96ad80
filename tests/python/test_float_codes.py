"""Weight-only products of codes that are floating numbers, e2m1 and e4m3: every code, every type of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.kinds.description import tactics_here
from torch import Tensor

import qcutlass
from qcutlass import QuantizedTensor, UnsupportedError, testing
from qcutlass.algorithms import quantize_floats
from qcutlass.algorithms.floating import nearest_e2m1
from qcutlass.products.checks import E8M0
from qcutlass.products.selection import weight_dtype as rounded_type
from qcutlass.quantized import numbers_of

pytestmark = pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
BITS = {"e2m1": 4, "e4m3": 8}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
POWERS = torch.float8_e8m0fnu if E8M0 else torch.float32
SCALES = [
    *(("e4m3", size, dtype) for size in (1024, 128, 48) for dtype in FLOATS),
    *(("e2m1", size, dtype) for size in (1024, 32, 16) for dtype in (*FLOATS, POWERS, torch.float8_e4m3fn)),
]


def number(weight_dtype: str, code: int) -> float:
    """The value of a code, field by field (OCP 8-bit floating point and Microscaling specifications)."""
    if weight_dtype == "e2m1":
        return E2M1[code]
    exponent, mantissa, sign = code >> 3 & 15, code & 7, -1.0 if code & 128 else 1.0
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def numbers(weight_dtype: str) -> Tensor:
    return torch.tensor([number(weight_dtype, code) for code in range(2 ** BITS[weight_dtype])], dtype=torch.float64)


def random_weight(weight_dtype: str, n: int, k: int, size: int, scales: torch.dtype, seed: int) -> QuantizedTensor:
    """Every code but NaN, scales within a factor of 4."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** BITS[weight_dtype], (n, k), generator=g, dtype=torch.uint8)
    if weight_dtype == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x31
    groups = -(-k // size)
    if scales == POWERS:
        values = torch.randint(118, 123, (groups, n), generator=g).to(torch.uint8).view(POWERS)
    else:
        values = ((1 + 3 * torch.rand(groups, n, generator=g)) / 64).to(scales)
    whole = torch.tensor([0.37]) if scales == torch.float8_e4m3fn else None
    return QuantizedTensor(codes, values, None, BITS[weight_dtype], size, weight_dtype, whole)


def exact(weight: QuantizedTensor) -> Tensor:
    """float64 `[N, K]`, from the tables of numbers; scales times the global one rounded to float32."""
    scales = weight.scales.float() if weight.global_scale is None else weight.scales.float() * weight.global_scale
    spread = scales.double().repeat_interleave(weight.group_size, dim=0)[: weight.shape[1]].T
    return numbers(str(weight.weight_dtype))[weight.codes.long()] * spread


def arguments(weight: QuantizedTensor, device: str = "cpu") -> dict[str, Any]:
    """Those of `gemm` but the activations."""
    codes = weight.codes.view(torch.float8_e4m3fn) if weight.bits == 8 else weight.codes
    whole = None if weight.global_scale is None else weight.global_scale.to(device)
    return {
        "w_packed": qcutlass.preprocess_weights(codes, weight.bits).to(device),
        "scales": weight.scales.to(device),
        "group_size": weight.group_size,
        "weight_dtype": weight.weight_dtype,
        "global_scale": whole,
    }


def judged(a: Tensor, weight: Tensor) -> testing.Reference:
    return testing.reference(a.cpu(), weight)


@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", BITS)
def test_every_code_at_every_place(weight_dtype: str, dtype: torch.dtype, rows: int) -> None:
    """Products with rows of the identity are columns of the weights; NaN codes give NaN."""
    span = 2 ** BITS[weight_dtype]
    n, k = torch.arange(span)[:, None], torch.arange(68)
    codes = ((n + 3 * k) % span).to(torch.uint8)
    weight = QuantizedTensor(codes, torch.full((1, span), 2.0), None, BITS[weight_dtype], 68, weight_dtype)
    given = arguments(weight)
    if weight_dtype == "e4m3":  # a NaN would reach every product of its channel
        keep = codes & 0x7F != 0x7F
        nan = qcutlass.gemm(torch.ones(rows, 68, dtype=dtype), **given)
        assert bool((nan.isnan() == ~keep.all(dim=1)).all())
        given = arguments(replace(weight, codes=torch.where(keep, codes, 0)))
        codes = torch.where(keep, codes, 0)
    found = torch.cat([qcutlass.gemm(a, **given) for a in torch.eye(68, dtype=dtype).split(rows)])
    assert torch.equal(found.T.double(), 2 * numbers(weight_dtype)[codes.long()])


@pytest.mark.parametrize(("weight_dtype", "size", "scales"), SCALES)
def test_types_of_scales(weight_dtype: str, size: int, scales: torch.dtype, seed: int) -> None:
    weight = random_weight(weight_dtype, 40, 1000, size, scales, seed)
    given, expected = arguments(weight), exact(weight)
    a = torch.randn(5, 1000, generator=torch.Generator().manual_seed(seed))
    for dtype in FLOATS:
        dequantized = qcutlass.dequantize(**given, k=1000, dtype=dtype)
        assert torch.equal(dequantized, expected.float().to(dtype))
        assert torch.equal(weight.dequantize(dtype), dequantized)
        for rows in (1, 5):
            x = a[:rows].to(dtype)
            testing.assert_close(qcutlass.gemm(x, **given), judged(x, expected.float()), label=(weight, dtype, rows))


def sign_lost(weight: QuantizedTensor) -> QuantizedTensor:
    return replace(weight, codes=weight.codes & (2 ** (weight.bits - 1) - 1))


def subnormals_flushed(weight: QuantizedTensor) -> QuantizedTensor:
    mantissa, exponents = (1, 3) if weight.bits == 4 else (3, 15)
    return replace(weight, codes=torch.where(weight.codes >> mantissa & exponents == 0, 0, weight.codes))


def scale_of_the_next_group(weight: QuantizedTensor) -> QuantizedTensor:
    scales = weight.scales.view(torch.uint8).roll(-1, 0).view(weight.scales.dtype)
    return replace(weight, scales=scales)


def global_scale_forgotten(weight: QuantizedTensor) -> QuantizedTensor:
    return replace(weight, global_scale=None)


@pytest.mark.parametrize(
    "fault", [sign_lost, subnormals_flushed, scale_of_the_next_group, global_scale_forgotten], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("weight_dtype", BITS)
def test_faults_are_found(weight_dtype: str, fault: Callable[[QuantizedTensor], QuantizedTensor], seed: int) -> None:
    if fault is global_scale_forgotten and weight_dtype == "e4m3":
        pytest.skip("these have none")
    scales = torch.float8_e4m3fn if weight_dtype == "e2m1" else torch.bfloat16
    weight = random_weight(weight_dtype, 64, 256, 16, scales, seed)
    if fault is subnormals_flushed:  # beside large numbers they are lost in the roundings
        weight = replace(weight, codes=weight.codes & (0b1011 if weight.bits == 4 else 0b10001111))
    a = torch.randn(16, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    right = judged(a, weight.dequantize(torch.bfloat16).float())
    assert testing.error_ratio((a.float() @ weight.dequantize(torch.bfloat16).float().T).bfloat16(), right) <= 1
    wrong = fault(weight).dequantize(torch.bfloat16).float()
    assert testing.error_ratio((a.float() @ wrong.T).bfloat16(), right) > 1


def test_wrong_arguments() -> None:
    weight = random_weight("e2m1", 16, 64, 16, torch.float8_e4m3fn, 0)
    given, a = arguments(weight), torch.randn(2, 64)
    with pytest.raises(ValueError, match=r"zeros: e2m1 codes have signs and no zero points; pass None"):
        qcutlass.gemm(a, zeros=torch.zeros(4, 16, dtype=torch.uint8), **given)
    with pytest.raises(ValueError, match=r"weight_dtype: expected 'e2m1', 'e4m3' or None for integers, got 'e3m0'"):
        qcutlass.gemm(a, **given | {"weight_dtype": "e3m0"})
    with pytest.raises(ValueError, match=r"bits: e2m1 codes have 4 bits, got 8"):
        qcutlass.gemm(a, bits=8, **given)
    with pytest.raises(TypeError, match=r"scales: expected a tensor of float16, bfloat16, float32, got float8_e4m3fn"):
        qcutlass.gemm(a, **given | {"weight_dtype": "e4m3", "w_packed": torch.zeros(1, 2, 32, 16, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"global_scale: expected shape \[1\], got \[\]"):
        qcutlass.gemm(a, **given | {"global_scale": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"global_scale: stands beside scales of float8_e4m3fn, got .* float32"):
        qcutlass.gemm(a, **given | {"scales": weight.scales.float()})
    with pytest.raises(UnsupportedError, match=r"activations: 'int8' is for integer codes"):
        qcutlass.gemm(a, activations="int8", **given)
    with pytest.raises(ValueError, match=r"zeros: e4m3 codes have signs"):
        QuantizedTensor(torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), torch.ones(1, 1), 8, 32, "e4m3")
    with pytest.raises(ValueError, match=r"symmetric: e2m1 codes have signs"):
        qcutlass.WeightOnly(symmetric=True, weight_dtype="e2m1")


def test_nearest_numbers_lose_ties_to_even_codes() -> None:
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert numbers_of(nearest_e2m1(between), "e2m1").tolist() == [0, 1, 1, 2, 2, 4, 4]
    eps = 2.0**-20
    assert numbers_of(nearest_e2m1(-between - eps), "e2m1").tolist() == [-0.5, -1, -1.5, -2, -3, -4, -6]
    assert numbers_of(nearest_e2m1(between - eps), "e2m1").tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert nearest_e2m1(torch.tensor([-0.1, 100.0, -100.0])).tolist() == [0, 7, 15]


@pytest.mark.parametrize(("weight_dtype", "size", "scales"), SCALES)
def test_quantisers_take_the_nearest(weight_dtype: str, size: int, scales: torch.dtype, seed: int) -> None:
    weight = torch.randn(24, 200, generator=torch.Generator().manual_seed(seed))
    weight[3, :16] = 0
    found = quantize_floats(weight, weight_dtype, size, scale_dtype=scales)
    grid = numbers(weight_dtype)
    grid = grid[grid.isfinite()]
    spread = found.scales.float() * (1 if found.global_scale is None else found.global_scale)
    spread = spread.repeat_interleave(found.group_size, dim=0)[:200].T
    quotient = (weight / spread).nan_to_num().double()  # groups of zeros may have scale 0
    chosen = numbers(weight_dtype)[found.codes.long()]
    assert torch.equal((quotient - chosen).abs(), (quotient[:, :, None] - grid).abs().amin(dim=2))
    if scales == POWERS:
        amax = weight[:, :size].abs().amax(dim=1)
        assert torch.equal(found.scales[0].float(), torch.where(amax > 0, 2.0 ** (amax.log2().floor() - 2), 1.0))
    if scales == torch.float8_e4m3fn:
        assert found.global_scale is not None
        assert torch.equal(found.global_scale, 1 / (torch.tensor([6.0 * 448]) / weight.abs().max()))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-36, 1e-42, 0.0])
def test_global_scales_are_reciprocals(scale: float) -> None:
    """Files of compressed-tensors hold the divisor, by which they can hold what is quantised here."""
    for seed in range(40):
        weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * scale
        found = quantize_floats(weight, "e2m1", 16, scale_dtype=torch.float8_e4m3fn)
        whole, amax = found.global_scale, weight.abs().max().reshape(1)
        assert whole is not None
        if amax > 1e-35:
            assert torch.equal(1 / (torch.tensor([6.0 * 448]) / amax), whole)
        elif amax > 0:  # whose divisor is beyond float32
            assert torch.equal(whole, amax / (6 * 448))
        else:
            assert whole == 1
        assert found.dequantize(torch.float32).isfinite().all()


@pytest.mark.parametrize(("weight_dtype", "size", "scales"), SCALES)
def test_layers_keep_the_type_of_codes(weight_dtype: str, size: int, scales: torch.dtype, seed: int) -> None:
    weight = random_weight(weight_dtype, 32, 96, size, scales, seed)
    layer = qcutlass.QuantLinear.from_quantized(weight, bias=torch.randn(32))
    assert torch.equal(layer.weights().double(), exact(weight).float().double())
    assert layer.canonical().weight.weight_dtype == weight_dtype
    twin = qcutlass.QuantLinear.from_quantized(replace(weight, codes=weight.codes ^ 1), bias=torch.zeros(32))
    twin.load_state_dict(layer.state_dict())
    a = torch.randn(3, 96)
    assert torch.equal(twin(a), layer(a))
    integers = QuantizedTensor(weight.codes, torch.ones(1, 32), None, weight.bits, 96)
    with pytest.raises(RuntimeError, match="bits = -"):
        qcutlass.QuantLinear.from_quantized(integers).load_state_dict(layer.state_dict(), strict=False)
    with pytest.raises(UnsupportedError, match=rf"embeddings look up integer codes, got {weight_dtype}"):
        qcutlass.layers.QuantEmbedding(qcutlass.QuantLinear.from_quantized(weight))


CUDA = [
    *(("e4m3", size, dtype) for size in (576, 64, 128) for dtype in FLOATS),
    *(("e2m1", size, dtype) for size in (576, 64, 32, 16) for dtype in (*FLOATS, POWERS, torch.float8_e4m3fn)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_dtype", "size", "scales"), CUDA)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_every_tactic(
    dtype: torch.dtype, weight_dtype: str, size: int, scales: torch.dtype, seeds: Iterator[int]
) -> None:
    """Identity activations give the weights back bit for bit, and random products are within bounds."""
    weight = random_weight(weight_dtype, 272, 576, size, scales, next(seeds))
    given = arguments(weight, "cuda")
    identity = torch.eye(576, dtype=dtype, device="cuda")
    expected = exact(weight).float()
    dequantized = qcutlass.dequantize(**given, k=576, dtype=dtype).cpu()
    assert torch.equal(dequantized, expected.to(dtype))
    bias = torch.ones(272)
    rows = {
        m: torch.randn(m, 576, generator=torch.Generator().manual_seed(next(seeds))).to(dtype) for m in (1, 33, 200)
    }
    # The global scale is applied to the sums of exact products.
    sound = {t: expected if weight.global_scale is not None else expected.to(t).float() for t in (dtype, torch.float32)}
    refs = {(m, t): testing.reference(a, w, bias=bias) for m, a in rows.items() for t, w in sound.items()}
    tactics = tactics_of_this_gpu(identity, given)[:-1]  # without the dense one, whose library adds otherwise
    assert len(tactics) > 3
    for tactic in tactics:
        found = qcutlass.gemm(identity, tactic=tactic, **given).cpu()
        assert weight.global_scale is not None or torch.equal(found.T, expected.to(dtype)), tactic
        for m, a in rows.items():
            rounded = rounded_type(a.cuda(), **given, tactic=tactic)
            out = qcutlass.gemm(a.cuda(), tactic=tactic, bias=bias.cuda(), **given)
            testing.assert_close(out.cpu(), refs[m, rounded], splits=64, label=(tactic, m))


def tactics_of_this_gpu(a: Tensor, given: dict[str, Any]) -> list[str]:
    """All configurations of a product, but those of instructions that the GPU, or the build, has not."""
    return tactics_here(qcutlass.gemm, a, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("weight_dtype", BITS)
def test_every_code_on_cuda(weight_dtype: str, dtype: torch.dtype) -> None:
    span = 2 ** BITS[weight_dtype]
    codes = ((torch.arange(span)[:, None] + 3 * torch.arange(128)) % span).to(torch.uint8)
    keep = torch.full_like(codes, True, dtype=torch.bool) if span == 16 else codes & 0x7F != 0x7F
    sound = torch.where(keep, codes, 0)
    scales = torch.ones(1, span, dtype=dtype)
    for scale_dtype in (dtype, torch.float32):
        weight = QuantizedTensor(sound, scales.to(scale_dtype), None, BITS[weight_dtype], 128, weight_dtype)
        given = arguments(weight, "cuda")
        identity = torch.eye(128, dtype=dtype, device="cuda")
        for tactic in (None, *tactics_of_this_gpu(identity, given)):
            found = qcutlass.gemm(identity, tactic=tactic, **given)
            assert torch.equal(found.T.cpu().double(), numbers(weight_dtype)[sound.long()]), tactic
            if span == 256:
                nan = arguments(replace(weight, codes=codes), "cuda")
                found = qcutlass.gemm(identity, tactic=tactic, **nan)
                assert bool((found.isnan().cpu() == ~keep.all(dim=1)).all()), tactic


@pytest.mark.gpu
def test_powers_beyond_fp16_as_scales() -> None:
    """2^-40 to 2^16: the weights are those of fp32, rounded once to fp16."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(64, 8)
    scales = torch.arange(87, 151).clamp(max=143).to(torch.uint8).repeat(4, 1).view(POWERS)
    weight = QuantizedTensor(codes, scales, None, 4, 32, "e2m1")
    given, identity = arguments(weight, "cuda"), torch.eye(128, dtype=torch.float16, device="cuda")
    for tactic in tactics_of_this_gpu(identity, given):
        found = qcutlass.gemm(identity, tactic=tactic, **given).T.cpu()
        expected = exact(weight).half()
        some = expected.isfinite().all(dim=1)
        assert torch.equal(found[some], expected[some]), tactic


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["floats", "powers"])
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_scales_of_any_size(dtype: torch.dtype, scales: str, seed: int) -> None:
    """Those below 2 and those that leave a rest, in one channel and beside each other: weights are rounded once."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (272, 576), generator=g, dtype=torch.uint8)
    low, high = (-24, 16) if dtype == torch.float16 else (-120, 120)
    if scales == "powers":
        values = torch.randint(127 + low, 127 + high, (18, 272), generator=g).to(torch.uint8).view(POWERS)
    else:
        sizes = (low + (high - low) * torch.rand(18, 272, generator=g)).exp2()
        values = (sizes * torch.randint(-1, 2, (18, 272), generator=g)).to(dtype)
    weight = QuantizedTensor(codes, values, None, 4, 32, "e2m1")
    given, identity = arguments(weight, "cuda"), torch.eye(576, dtype=dtype, device="cuda")
    expected = exact(weight).to(dtype)
    finite = expected.isfinite().all(dim=1)
    assert finite.sum() > 8
    for tactic in tactics_of_this_gpu(identity, given):
        found = qcutlass.gemm(identity, tactic=tactic, **given).T.cpu()
        assert torch.equal(found[finite], expected[finite]), tactic


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_one_scale_is_nan(dtype: torch.dtype, seed: int) -> None:
    """It reaches the products of its channel and no other."""
    for scales, code in ((dtype, 0x7FFF), (POWERS, 0xFF), (torch.float8_e4m3fn, 0x7F)):
        weight = random_weight("e2m1", 272, 576, 32, scales, seed)
        word = torch.int16 if scales == dtype else torch.uint8
        weight.scales.view(word)[5, 77] = code
        given, a = arguments(weight, "cuda"), torch.ones(20, 576, dtype=dtype, device="cuda")
        for tactic in tactics_of_this_gpu(a, given):
            found = qcutlass.gemm(a, tactic=tactic, **given).isnan()
            assert torch.equal(found.all(dim=0), found.any(dim=0)), tactic
            assert found[0].nonzero().tolist() == [[77]], tactic


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_every_power(dtype: torch.dtype) -> None:
    """All codes of e8m0, in groups of 32 and 16: each number, in a column of its own of a channel a scale."""
    scales = torch.arange(256).to(torch.uint8).view(POWERS)
    first = 2 if dtype == torch.bfloat16 else 0  # whose weights are no subnormals of fp32, the type of sums
    for size in (32, 16):
        for code, value in enumerate(E2M1):
            codes = torch.zeros(256, 64, dtype=torch.uint8)
            codes[:, 5] = code
            weight = QuantizedTensor(codes, scales.repeat(64 // size, 1), None, 4, size, "e2m1")
            given, a = arguments(weight, "cuda"), torch.ones(3, 64, dtype=dtype, device="cuda")
            expected = (scales.double() * value).float().to(dtype)[first:]
            for tactic in tactics_of_this_gpu(a, given):
                found = qcutlass.gemm(a, tactic=tactic, **given).cpu()[:, first:]
                testing.assert_equal(found, expected.expand(3, -1), label=(tactic, size, value))
