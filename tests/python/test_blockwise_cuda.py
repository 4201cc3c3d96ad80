"""What blockwise int8 alone has on a GPU: its quantisers and GELU among products, rings, scales, 64-bit offsets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.blockwise import (
    FLOATS,
    SIZES,
    function_of,
    multiply,
    multiply_quantized,
    pack,
    splits_of,
)
from tests.python.kinds.description import tactics_here
from tests.python.quantizer_model import Quantized, activations, assert_same
from tests.python.running import SLEEP, captured
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem

pytestmark = pytest.mark.gpu


def tactics(size: int, out_size: int | None = None) -> list[str]:
    """Names of this GPU's configurations for blocks of this size, and outputs of such blocks or floating ones."""
    a, b = torch.ones(1, 256, dtype=torch.int8), torch.ones(256, 256, dtype=torch.int8)
    blocks = -(-256 // size)
    function, options = function_of(out_size)
    operands = (a, torch.ones(1, blocks), b, torch.ones(blocks, blocks))
    return tactics_here(function, *operands, block_size=size, **options)


def product(p: BlockwiseProblem, out_size: int | None, b: Tensor | None = None, **forced: Any) -> tuple[Tensor, ...]:
    """The output, or codes and scales."""
    if out_size is None:
        return (multiply(p, b, **forced),)
    return multiply_quantized(p, out_size, b, **forced)


def assert_correct(
    outs: tuple[Tensor, ...], p: BlockwiseProblem, out_size: int | None, ledger: Any, **more: Any
) -> None:
    splits, label = splits_of(p, more.get("split_k", 0)), f"{more} {out_size}: {p}"
    if out_size is None:
        ledger.close(outs[0], p.reference(), label, splits)
    else:
        testing.assert_quantized(*outs, p.reference(torch.float32), out_size, splits=splits, label=label)
        ledger.cases += 1


@pytest.mark.parametrize("m", [261, 450, 1029])
def test_rings_go_round_and_blocks_take_more_tiles(m: int, seeds: Iterator[int], ledger: Any) -> None:
    """More stages than a ring has places, an odd number of them; more tiles than SMs, which persistent blocks share.

    Of 64 and of 128 tokens these are 5 and 3 tiles, which blocks take alone, 8 and 4, which pairs that share weights
    take, and 17 and 9, where the last pair has one tile. Results of 16 bits and codes leave through memory that
    those of the next tile take, too."""
    sms, served = torch.cuda.get_device_properties(0).multi_processor_count, 0
    n, k = 128 * (sms * 128 // m), 11 * 128 - 7
    for name in tactics(128):
        if "_sm90a_" in name:
            for more, out_dtype in ((9, torch.float32), (9, torch.bfloat16), (16, torch.float16)):
                problem, expected = BlockwiseCase(m, n + more, k, 128, out_dtype).exact(device="cuda", seed=next(seeds))
                ledger.equal(multiply(problem, pack(problem), tactic=name, split_k=1), expected, f"{name}: {problem}")
            for more, out_size in ((9, 128), (16, 32)):
                problem = BlockwiseCase(m, n + more, k, 128, torch.float32).random(device="cuda", seed=next(seeds))
                assert_correct(product(problem, out_size, tactic=name, split_k=1), problem, out_size, ledger, split_k=1)
            served += 1
    assert served == 2 or not _C.device_traits(torch.cuda.current_device()).wgmma


@pytest.mark.parametrize("size", SIZES)
def test_each_block_has_its_own_scales(size: int, ledger: Any) -> None:
    """Identity activations return the weights of each block times both its scales, all of them different."""
    n, k = 384, 512
    g = torch.Generator("cuda").manual_seed(1)
    b = torch.randint(-127, 128, (n, k), generator=g, device="cuda").to(torch.int8)
    blocks = k // size
    a_s = torch.exp2(torch.arange(k * blocks, device="cuda").view(k, blocks) % 23.0)
    b_s = torch.exp2(-(torch.arange(n // size * blocks, device="cuda").view(-1, blocks) % 19.0))
    p = BlockwiseProblem(torch.eye(k, device="cuda").to(torch.int8), a_s, b, b_s, None, None, torch.float32, size)
    of_columns = torch.arange(k, device="cuda") // size
    expected = (
        b.float() * a_s[torch.arange(k, device="cuda"), of_columns] * b_s.repeat_interleave(size, 0)[:, of_columns]
    )
    packed, served = pack(p), 0
    for name in tactics(size):
        with contextlib.suppress(qcutlass.UnsupportedError):  # needs more memory than this GPU has for so many rows
            ledger.identity(multiply(p, packed, tactic=name), expected.T.contiguous(), f"{name}: {p}")
            served += 1
    assert served > 3


@pytest.mark.parametrize("split_k", [1, 3])
def test_the_largest_sums_of_blocks(split_k: int, ledger: Any) -> None:
    """-128 times -128: each block's sum is 2^21, the largest there is."""
    for size in SIZES:
        a, b = (torch.full((rows, 1024), -128, dtype=torch.int8, device="cuda") for rows in (9, 144))
        a[1], b[3] = 127, 127
        blocks = 1024 // size
        one, ones = torch.ones(9, blocks, device="cuda"), torch.ones(-(-144 // size), blocks, device="cuda")
        p = BlockwiseProblem(a, one, b, ones, None, None, torch.float32, size)
        packed, expected, served = pack(p), p.reference().value.float(), 0
        for name in tactics(size):
            with contextlib.suppress(qcutlass.UnsupportedError):  # a stage holds so much of K that it has fewer shares
                ledger.equal(multiply(p, packed, tactic=name, split_k=split_k), expected, f"{name}: {p}")
                served += 1
        assert served > 2


@pytest.mark.parametrize("m", [1, 16, 77, 512])
def test_graph_capture_and_replay_with_new_contents(m: int, seeds: Iterator[int], ledger: Any) -> None:
    """The whole family: activations quantised, multiplied, quantised in the epilogue, through GELU, dequantised."""
    case = BlockwiseCase(m, 520, 1024, bias=True)
    p = case.random(device="cuda", seed=next(seeds))
    b = pack(p)
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        x_q, x_s = blockwise.act_quant(x)
        out = blockwise.int8_addmm(x_q, x_s, b, p.b_s, p.bias)
        hidden = blockwise.int8_addmm_quant(x_q, x_s, b, p.b_s, p.bias)
        gelu = blockwise.int8_gelu(*hidden)
        plain = blockwise.int8_gemm(x_q, x_s, p.b, p.b_s)  # packed in the graph
        w_q, w_s = blockwise.weight_quant(x)
        return [x_q, x_s, out, *hidden, *gelu, plain, w_q, w_s, blockwise.act_dequant(*gelu)]

    results, replay = captured(run)  # nothing of this shape has run before: capture must need no warm-up
    for _ in range(3):
        new = case.random(device="cuda", seed=next(seeds))
        for name in ("b", "b_s", "bias"):
            getattr(p, name).copy_(getattr(new, name))
        b.copy_(pack(new))
        x.copy_(torch.randn(m, 1024, device="cuda"))
        for result in results:
            result.view(torch.uint8).fill_(0x7F)
        replay()
        torch.cuda.synchronize()
        for result, expected in zip(results, run(), strict=True):
            ledger.equal(result, expected, new)


def test_runs_on_the_current_stream(seed: int, ledger: Any) -> None:
    problem, expected = BlockwiseCase(16, 512, 1024, bias=True).exact(device="cuda", seed=seed)
    b = pack(problem)
    quantized = multiply_quantized(problem, 128, b)
    late = {name: torch.zeros_like(getattr(problem, name)) for name in ("a", "a_s")}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for name, tensor in late.items():
            tensor.copy_(getattr(problem, name))
        p = replace(problem, **late)
        out, codes, gelu = multiply(p, b), multiply_quantized(p, 128, b), blockwise.int8_gelu(*quantized)
    stream.synchronize()
    ledger.equal(out, expected, problem)
    for got, wanted in zip((*codes, *gelu), (*quantized, *blockwise.int8_gelu(*quantized)), strict=True):
        ledger.equal(got, wanted, problem)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_quantisers_agree_with_the_cpu_on_large_matrices(size: int, dtype: torch.dtype, seeds: Iterator[int]) -> None:
    for rows, k in ((4096, 1024), (513, 8192), (257, 11008), (3, 100_001)):
        seed = next(seeds)
        x = activations(rows, k, dtype, seed, "cuda")
        for quantize in (blockwise.act_quant, blockwise.weight_quant):
            expected = Quantized(*quantize(x.cpu(), size))
            assert_same(Quantized(*quantize(x, size)), expected, f"{rows} x {k} seed={seed}")
        codes, scales = expected.codes, expected.scale
        numbers = blockwise.weight_dequant(codes.cuda(), scales.cuda(), size, dtype).cpu()
        testing.assert_equal(numbers, blockwise.weight_dequant(codes, scales, size, dtype), label=f"seed={seed}")
        codes, scales = blockwise.act_quant(x.float().clamp(-6, 6), size)
        gelu = blockwise.int8_gelu(codes, scales, size)
        testing.assert_gelu(*gelu, codes, scales, size, label=f"{rows} x {k} seed={seed}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantisers_agree_with_the_cpu_on_any_bits(dtype: torch.dtype, seed: int) -> None:
    """Numbers of every size in one block, with scales of every size: where quotients overflow and underflow."""
    g = torch.Generator().manual_seed(seed)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, (512, 1000), generator=g, dtype=integer)
    x = bits.view(dtype).nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)
    x = torch.where(x.float().abs() > torch.logspace(-37, 37, 512)[:, None], 0, x)  # rows of growing range
    for quantize in (blockwise.act_quant, blockwise.weight_quant):
        assert_same(Quantized(*quantize(x.cuda(), 64)), Quantized(*quantize(x, 64)), f"seed={seed}")


@pytest.mark.parametrize(("rows", "k"), [(66_000, 32_768), (2, 2**30 + 128)])
def test_quantisers_of_more_than_2_to_the_31_elements(rows: int, k: int, seed: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 40:
        pytest.skip(f"needs 40 GiB of GPU memory, {free:.1f} are free")
    x = torch.zeros(rows, k, dtype=torch.float16, device="cuda")
    assert x.numel() > 2**31
    tail = activations(2, 4096, torch.float16, seed, "cuda")
    x[-2:, -4096:] = tail
    codes, scales = blockwise.act_quant(x)
    del x
    expected = blockwise.act_quant(tail)
    for got, wanted, width in zip((codes, scales), expected, (4096, 32), strict=True):
        testing.assert_equal(got[-2:, -width:], wanted)
    assert not bool(codes[:-2].any())
    assert bool((scales[:-2] == 1).all())
    gelu = blockwise.int8_gelu(codes, scales)
    for got, wanted, width in zip(gelu, blockwise.int8_gelu(*expected), (4096, 32), strict=True):
        testing.assert_equal(got[-2:, -width:], wanted)
    assert bool((gelu[1][:-2] == 1).all())


@pytest.mark.parametrize(("m", "n", "k"), [(33000, 65544, 128), (5, 70000, 32800), (66000, 24, 32800)])
def test_products_of_more_than_2_to_the_31_elements(m: int, n: int, k: int, seed: int, ledger: Any) -> None:
    """So many outputs, weights, or activations."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 40:
        pytest.skip(f"needs 40 GiB of GPU memory, {free:.1f} are free")
    assert max(m * n, n * k, m * k) > 2**31
    g = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randint(-128, 128, (rows, k), generator=g, device="cuda", dtype=torch.int8) for rows in (m, n))
    blocks = -(-k // 128)
    a_s, b_s = (torch.rand(rows, blocks, generator=g, device="cuda") / 64 for rows in (m, -(-n // 128)))
    p = BlockwiseProblem(a, a_s, b, b_s, out_dtype=torch.bfloat16, seed=seed)
    packed = pack(p)
    for out_size in (None, 128):
        outs = product(p, out_size, packed)
        for rows in (slice(0, 64), slice(m - 64 if m > 64 else 0, m)):
            first = max(n - 1024, 0) // 128 * 128
            part = replace(p, a=a[rows], a_s=a_s[rows], b=b[first:], b_s=b_s[first // 128 :])
            cut = (outs[0][rows, first:], *(scales[rows, first // 128 :] for scales in outs[1:]))
            assert_correct(cut, part, out_size, ledger)


def test_no_memory_is_kept(seed: int) -> None:
    p = BlockwiseCase(16, 256, 8192, bias=True).random(device="cuda", seed=seed)
    b, x = pack(p), torch.randn(16, 8192, device="cuda")

    def run() -> None:
        multiply(p, b)
        multiply(p, p.b)
        blockwise.int8_gelu(*multiply_quantized(p, 128, b))
        blockwise.act_dequant(*blockwise.act_quant(x))

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_second_device_while_the_first_is_current(seed: int, ledger: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    problem, expected = BlockwiseCase(16, 256, 512).exact(device="cuda:1", seed=seed)
    with torch.cuda.device(0):
        out = multiply(problem)
        codes, scales = blockwise.int8_gelu(*multiply_quantized(problem, 128))
        assert torch.cuda.current_device() == 0
    assert out.device == codes.device == scales.device == torch.device("cuda:1")
    ledger.equal(out, expected, problem)


def test_an_architecture_that_was_not_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _C, "device_traits", lambda index: (_ for _ in ()).throw(qcutlass.UnsupportedError("not built"))
    )
    monkeypatch.setattr("qcutlass.products.extension._devices", {})
    with pytest.raises(qcutlass.UnsupportedError, match="not built"):
        blockwise.act_quant(torch.ones(1, 32, device="cuda"))
