"""act_quant, weight_quant, their inverses and int8_gelu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.python.blockwise import DEVICES, FLOATS, SIZES
from tests.python.quantizer_model import Quantized, activations, assert_same, reference
from torch import Tensor

from qcutlass import testing
from qcutlass.blockwise import act_dequant, act_quant, int8_gelu, weight_dequant, weight_quant

on_devices = pytest.mark.parametrize("device", DEVICES)
of_sizes = pytest.mark.parametrize("size", SIZES)
LENGTHS = [1, 7, 8, 16, 31, 32, 33, 64, 100, 127, 128, 129, 136, 255, 256, 257, 512, 1000, 1024, 4096]


def expected_of(x: Tensor, size: int) -> Quantized:
    """Codes and scales of blocks of columns, each quantised by the model of a row, which test_quantizers.py uses."""
    parts = [reference(part.contiguous(), {}) for part in x.cpu().split(size, -1)]
    return Quantized(torch.cat([p.codes for p in parts], -1), torch.stack([p.scale for p in parts], -1))


@on_devices
@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_agree_with_the_stated_arithmetic(
    dtype: torch.dtype, size: int, device: str, seeds: Iterator[int]
) -> None:
    for k in LENGTHS:
        x = activations(9, k, dtype, seed := next(seeds), device)
        assert_same(Quantized(*act_quant(x, size)), expected_of(x, size), f"K={k} seed={seed}")


@on_devices
@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_agree_with_the_stated_arithmetic(
    dtype: torch.dtype, size: int, device: str, seeds: Iterator[int]
) -> None:
    for n, k in [(1, 1), (1, 300), (300, 1), (31, 33), (128, 128), (129, 257), (256, 384), (200, 100), (70, 1000)]:
        w = activations(n, k, dtype, seed := next(seeds))
        codes, scales = weight_quant(w.to(device), size)
        assert scales.shape == (-(-n // size), -(-k // size))
        for i, rows in enumerate(w.split(size)):
            for j, block in enumerate(rows.split(size, 1)):
                part = reference(block.reshape(1, -1), {})
                got = codes[i * size : (i + 1) * size, j * size : (j + 1) * size].reshape(1, -1)
                assert_same(Quantized(got, scales[i, j, None]), part, f"{n} x {k} at {i}, {j} seed={seed}")


@on_devices
def test_ties_go_to_even(device: str) -> None:
    x = torch.cat([torch.arange(-126.5, 127), torch.tensor([-127.0, 127.0])])[:, None].expand(-1, 2)
    x = torch.stack([x[:, 0], torch.full_like(x[:, 0], 127.0)], 1).repeat(1, 16).contiguous()  # [256, 32]
    codes, scales = act_quant(x.to(device), 32)
    assert scales.unique().tolist() == [1.0]
    assert codes[:, 0].tolist() == [round(value) for value in x[:, 0].tolist()]  # Python's round() goes to even


@on_devices
@of_sizes
def test_zeros_get_scale_1(size: int, device: str) -> None:
    for quantize in (act_quant, weight_quant):
        codes, scales = quantize(torch.zeros(200, 300, device=device), size)
        assert not bool(codes.any())
        assert bool((scales == 1).all())


@on_devices
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_scale_of_its_block(bad: float, device: str, seed: int) -> None:
    for quantize in (act_quant, weight_quant):
        x = activations(3, 300, torch.float32, seed, device)
        x[1, 150] = bad
        codes, scales = quantize(x, 64)
        row = 1 if quantize is act_quant else 0
        wrong = ~scales.isfinite()
        assert wrong.nonzero().tolist() == [[row, 2]]
        assert not bool(codes[1, 128:192].any())
        assert bool(codes[1, 192:].any())


@on_devices
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...], device: str, seed: int) -> None:
    x = torch.randn(*leading, 300, device=device)
    codes, scales = act_quant(x)
    assert (codes.shape, scales.shape) == ((*leading, 300), (*leading, 3))
    flat = act_quant(x.reshape(-1, 300))
    testing.assert_equal(codes.reshape(-1, 300), flat[0])
    testing.assert_equal(scales.reshape(-1, 3), flat[1])
    assert act_dequant(codes, scales).shape == x.shape
    gelu = int8_gelu(codes, scales)
    assert (gelu[0].shape, gelu[1].shape) == (codes.shape, scales.shape)


def moved(x: Tensor) -> dict[str, Tensor]:
    """The same matrix at other strides, or at an odd address."""
    m, k = x.shape
    return {
        "rows apart": torch.cat([x, x], 1)[:, :k],
        "rows apart, odd": torch.cat([x, x[:, :3]], 1)[:, :k],
        "every second row": torch.stack([x, x], 1)[:, 0],
        "every second column": torch.stack([x, x], 2)[..., 0],
        "transposed": x.T.contiguous().T,
        "odd address": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(m, k),
    }


@on_devices
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [256, 300])
def test_strides_and_addresses(k: int, dtype: torch.dtype, device: str, seed: int) -> None:
    x = activations(130, k, dtype, seed, device)
    for quantize, dequantize in ((act_quant, act_dequant), (weight_quant, weight_dequant)):
        codes, scales = quantize(x, 64)
        numbers = dequantize(codes, scales, 64, dtype)
        for label, other in moved(x).items():
            for got, expected in zip(quantize(other, 64), (codes, scales), strict=True):
                testing.assert_equal(got, expected, label=label)
        for (label, q), s in zip(moved(codes).items(), moved(scales).values(), strict=True):
            testing.assert_equal(dequantize(q, s, 64, dtype), numbers, label=label)
    codes, scales = act_quant(x, 64)
    gelu = int8_gelu(codes, scales, 64)
    for (label, q), s in zip(moved(codes).items(), moved(scales).values(), strict=True):
        for got, expected in zip(int8_gelu(q, s, 64), gelu, strict=True):
            testing.assert_equal(got, expected, label=label)


@on_devices
@pytest.mark.parametrize("dtype", FLOATS)
@of_sizes
def test_numbers_are_codes_times_scales(size: int, dtype: torch.dtype, device: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for n, k in ((1, 1), (70, 300), (129, 256), (256, 1024)):
        q = torch.randint(-128, 128, (n, k), generator=g).to(torch.int8)
        s = torch.rand(n, -(-k // size), generator=g)
        expected = (q.float() * s.repeat_interleave(size, 1)[:, :k]).to(dtype)
        testing.assert_equal(act_dequant(q.to(device), s.to(device), size, dtype).cpu(), expected)
        s = torch.rand(-(-n // size), -(-k // size), generator=g)
        expected = (q.float() * s.repeat_interleave(size, 0)[:n].repeat_interleave(size, 1)[:, :k]).to(dtype)
        testing.assert_equal(weight_dequant(q.to(device), s.to(device), size, dtype).cpu(), expected)


@on_devices
def test_float16_is_what_numbers_come_out_as(device: str) -> None:
    q, s = torch.full((1, 2), 127, dtype=torch.int8, device=device), torch.full((1, 1), 1e3, device=device)
    for dequantize in (act_dequant, weight_dequant):
        assert dequantize(q, s).dtype == torch.float16
        assert dequantize(q, s).tolist() == [[torch.inf, torch.inf]]


@on_devices
@of_sizes
def test_gelu(size: int, device: str, seed: int) -> None:
    """Blocks with every code, at scales from far below 1 to far above, of either sign and of both; short blocks."""
    g = torch.Generator().manual_seed(seed)
    for k in (1, 31, 100, 128, 200, 1024):
        x = torch.randint(-128, 128, (129, k), generator=g).to(torch.int8)
        x[::3] = x[::3].abs().clamp(0, 127)
        x[1::3] = -x[1::3].abs().clamp(0, 127)
        s = torch.logspace(-30, 30, 129).log2().round().exp2()[:, None] * (
            1 + torch.rand(129, -(-k // size), generator=g)
        )
        s[::2] = torch.rand(65, s.shape[1], generator=g) * 0.1  # where GELU bends
        out = int8_gelu(x.to(device), s.to(device), size)
        testing.assert_gelu(*(t.cpu() for t in out), x, s, size, label=f"K={k} seed={seed}")


@on_devices
def test_gelu_of_every_code_at_many_scales(device: str) -> None:
    """Each code and its negative in a block of zeros, over the range where GELU is neither 0 nor the identity."""
    code = torch.arange(0, 128)
    x = torch.zeros(128, 128, dtype=torch.int8)
    x[code, 0], x[code, 1] = code.to(torch.int8), (-code).to(torch.int8)
    for scale in torch.logspace(-4, 1, 60):
        s = torch.full((128, 1), float(scale))
        out = int8_gelu(x.to(device), s.to(device))
        testing.assert_gelu(*(t.cpu() for t in out), x, s, 128, label=float(scale))


@on_devices
def test_gelu_of_zeros_and_of_scales_that_are_not_finite(device: str) -> None:
    x = torch.ones(4, 128, dtype=torch.int8, device=device)
    x[0] = 0
    s = torch.tensor([[3.0], [torch.nan], [torch.inf], [-torch.inf]], device=device)
    codes, scales = int8_gelu(x, s)
    assert not bool(codes.any())
    assert scales[0].tolist() == [1.0]
    assert bool(scales[1:].isnan().all())


@on_devices
def test_gelu_of_negative_scales(device: str, seed: int) -> None:
    x = torch.randint(-128, 128, (9, 256), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    x[0, :2] = torch.tensor([-128, 127])
    s = -torch.rand(9, 2)
    testing.assert_gelu(*(t.cpu() for t in int8_gelu(x.to(device), s.to(device))), x, s, 128)


@on_devices
@of_sizes
def test_nothing_around_is_used(size: int, device: str, seed: int) -> None:
    """NaN around activations, and 127 and NaN around codes and scales, change nothing."""
    for dtype, (offset, padding) in zip(FLOATS, [(0, 8), (1, 0), (3, 5)], strict=True):
        x = torch.randn(70, 200, device=device, generator=None).to(dtype)

        def around(tensor: Tensor, offset: int = offset, padding: int = padding) -> Tensor:
            return testing.Poisoned.around(tensor, offset=offset, padding=padding).tensor

        codes, scales = act_quant(x, size)
        pairs: list[tuple[Any, Any]] = [
            (act_quant(around(x), size), (codes, scales)),
            (weight_quant(around(x), size), weight_quant(x, size)),
            (int8_gelu(around(codes), around(scales), size), int8_gelu(codes, scales, size)),
            ((act_dequant(around(codes), around(scales), size),), (act_dequant(codes, scales, size),)),
        ]
        for got, expected in pairs:
            for one, other in zip(got, expected, strict=True):
                testing.assert_equal(one, other, label=f"{dtype} seed={seed}")


@on_devices
def test_large_matrices_and_threads(device: str, seed: int) -> None:
    x = activations(1001, 1536, torch.bfloat16, seed)
    threads = torch.get_num_threads()
    expected = act_quant(x), weight_quant(x)
    try:
        for count in (1, 5):
            torch.set_num_threads(count)
            for got, wanted in zip((act_quant(x.to(device)), weight_quant(x.to(device))), expected, strict=True):
                assert_same(Quantized(*got), Quantized(*wanted), f"{count} threads, seed={seed}")
            gelu = int8_gelu(*(t.to(device) for t in expected[0]))
            testing.assert_gelu(*(t.cpu() for t in gelu), *expected[0], 128)
    finally:
        torch.set_num_threads(threads)


def test_the_tanh_form_of_gelu_is_rejected(seed: int) -> None:
    """It differs from the erf form by up to 5e-4: codes of small blocks show it, and scales of blocks of one sign."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (64, 256), generator=g).to(torch.int8)
    x_s = torch.full((64, 2), 3.0 / 127)
    v = x.float() * (3.0 / 127)

    def quantized(approximate: str) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.gelu(v, approximate=approximate).view(64, 2, 128)
        scales = y.abs().amax(-1) / 127
        return (y / scales[..., None]).round().to(torch.int8).view(64, 256), scales

    testing.assert_gelu(*quantized("none"), x, x_s, 128)
    with pytest.raises(AssertionError, match="times what is allowed"):
        testing.assert_gelu(*quantized("tanh"), x, x_s, 128)


def test_gradients_are_refused() -> None:
    codes, scales = torch.ones(2, 8, dtype=torch.int8), torch.ones(2, 1).requires_grad_()
    for call in (
        lambda: act_quant(torch.ones(2, 8).requires_grad_()),
        lambda: weight_quant(torch.ones(2, 8).requires_grad_()),
        lambda: act_dequant(codes, scales),
        lambda: int8_gelu(codes, scales),
    ):
        with pytest.raises(RuntimeError, match="requires grad, but qcutlass is for inference"):
            call()
