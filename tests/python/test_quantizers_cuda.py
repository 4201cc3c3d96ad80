"""The quantisers on a GPU: agreement with the CPU on large data, streams, graphs, 64-bit offsets."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from tests.python.quantizer_model import (
    FLOATS,
    OPTIONS,
    Options,
    Quantized,
    activations,
    assert_same,
    option_id,
    quantize,
    smoothing,
    with_tensors,
)
from torch import Tensor

import qcutlass
from qcutlass import testing

pytestmark = pytest.mark.gpu

SLEEP = 20_000_000  # clock cycles: some 10 ms


def on_cpu(a: Tensor, options: Options, smooth: Tensor | None = None) -> Quantized:
    return quantize(a.cpu(), options, None if smooth is None else smooth.cpu())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_agrees_with_the_cpu_on_large_matrices(options: Options, dtype: torch.dtype, seeds: Iterator[int]) -> None:
    for rows, k in ((4096, 1024), (513, 8192), (257, 11008), (3, 100_000)):
        seed = next(seeds)
        a, smooth = activations(rows, k, dtype, seed, "cuda"), smoothing(k, torch.bfloat16, seed, "cuda")
        assert_same(quantize(a, options), on_cpu(a, options), f"{rows} x {k} seed={seed}")
        assert_same(quantize(a, options, smooth), on_cpu(a, options, smooth), f"{rows} x {k} smooth seed={seed}")


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_agrees_with_the_cpu_on_any_bits(dtype: torch.dtype, seed: int) -> None:
    """Numbers of every size in one row, with scales of every size: where quotients overflow and underflow."""
    g = torch.Generator().manual_seed(seed)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, (512, 1000), generator=g, dtype=integer)
    a = bits.view(dtype).nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)
    a = torch.where(a.float().abs() > torch.logspace(-37, 37, 512)[:, None], 0, a).cuda()  # rows of growing range
    scales = (2.0**-149, 1e-38, 3e-30, 2.0**-60, 0.3, 1.0, 2.0**60, 1e30, 3e38, math.inf, math.nan, 0.0, -2.0)
    for options in OPTIONS:
        for given in [{"scale": scale} for scale in scales] if "scale" in options else [{}]:
            chosen = options | given
            assert_same(quantize(a, chosen), on_cpu(a, chosen), f"{chosen} seed={seed}")


@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_runs_on_the_current_stream(options: Options, seed: int) -> None:
    a = activations(64, 3000, torch.float16, seed, "cuda")
    expected, late = on_cpu(a, options), torch.full_like(a, torch.nan)
    keywords = with_tensors(options, "cuda")
    quantize(a, options)  # loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late.copy_(a)
        out = Quantized(*qcutlass.quantize_activations(late, **keywords))
    stream.synchronize()
    assert_same(out, expected, f"seed={seed}")


@pytest.mark.parametrize("k", [40, 3000, 20_000, 70_000])
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_graph_capture_and_replay_with_new_contents(options: Options, k: int, seeds: Iterator[int]) -> None:
    a = activations(17, k, torch.bfloat16, next(seeds), "cuda")
    keywords = with_tensors(options, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = Quantized(*qcutlass.quantize_activations(a, **keywords))
    for _ in range(3):
        seed = next(seeds)
        a.copy_(activations(17, k, torch.bfloat16, seed))
        for tensor in (t for t in out if t is not None and t is not keywords.get("azp")):
            tensor.view(torch.uint8).fill_(0x55)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(out, on_cpu(a, options), f"seed={seed}")


@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_a_hundred_repetitions_are_the_same(options: Options, seed: int) -> None:
    a = activations(300, 8192, torch.float16, seed, "cuda")
    first = quantize(a, options)
    for _ in range(100):
        testing.poison_free_memory("cuda", megabytes=4)
        assert_same(quantize(a, options), first, f"seed={seed}")


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[4]], ids=option_id)
@pytest.mark.parametrize(("rows", "k"), [(66_000, 32_768), (2, 2**30 + 8), (2**31 + 40, 1)])
def test_more_than_2_to_the_31_elements(rows: int, k: int, options: Options, seed: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 32:
        pytest.skip(f"needs 32 GiB of GPU memory, {free:.1f} are free")
    a = torch.zeros(rows, k, dtype=torch.float16, device="cuda")
    assert a.numel() > 2**31
    tail, width = activations(2, min(k, 4096), torch.float16, seed, "cuda"), min(k, 4096)
    a[-2:, -width:] = tail
    out = quantize(a, options)
    if options.get("per_tensor") or "scale" in options:
        expected = on_cpu(tail, options)
        assert_same(out._replace(codes=out.codes[-2:, -width:]), expected, f"seed={seed}")
    else:
        expected = on_cpu(tail, options)
        assert_same(Quantized(out.codes[-2:, -width:], out.scale[-2:]), expected, f"seed={seed}")
        assert bool((out.scale[:-2] == 1).all())
    assert bool((out.codes[:-2] == 0).all())
    assert bool((out.codes[-2:, :-width] == 0).all())


def test_no_memory_is_kept(seed: int) -> None:
    a = activations(64, 4096, torch.float16, seed, "cuda")
    for options in OPTIONS:
        quantize(a, options)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            quantize(a, options)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_devices_may_not_be_mixed() -> None:
    a = torch.zeros(2, 8, device="cuda")
    with pytest.raises(ValueError, match=r"smooth is on cpu, a is on cuda:0"):
        qcutlass.quantize_activations(a, smooth=torch.ones(8))
