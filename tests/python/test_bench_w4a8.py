"""The bench of products of 8-bit activations by 4-bit weights without its measurements. One run on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bench import gpu, peers, schemes
from bench.layer_w4a8 import FourByEightLayer
from bench.peers import base
from tests.python.wgmma_products import needs_wgmma

import qcutlass

M, N, K = 20, 160, 256
NAMES = ("w4a8_g128", "w4a8_int8_g64_int_f16", "w4a8_channel")


def layer_of(name: str) -> FourByEightLayer:
    """A layer on the CPU."""
    scheme = schemes.parse(name)
    assert isinstance(scheme, schemes.FourByEight)
    return FourByEightLayer(scheme, (N, K), M, device="cpu")


def test_schemes_by_name() -> None:
    fp8, brain = torch.float8_e4m3fn, torch.bfloat16
    assert schemes.parse("w4a8_g128") == schemes.FourByEight("w4a8_g128", fp8, 128, "none", brain)
    named = schemes.parse("w4a8_int8_channel_int_f16")
    assert named == schemes.FourByEight("w4a8_int8_channel_int_f16", torch.int8, None, "int", torch.float16)
    assert (named.operands, schemes.parse("w4a8_g32").operands) == ("int8", "fp8")
    assert named.words == "int4 weights (a scale a channel, integer zeros), int8 activations, fp16 output"
    for wrong in ("w4a8", "w4a8_g0", "w4a8_g128_real"):
        with pytest.raises(ValueError, match=rf"scheme '{wrong}': expected .*w4a8\[_int8\]"):
            schemes.parse(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_within_its_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel and, relatively, of cuBLAS's product of its dense forms."""
    monkeypatch.setattr(qcutlass, "plan", lambda *operands, **options: SimpleNamespace(tactic="some", split_k=1))
    layer = layer_of(name)
    ours = layer.plan(7)
    assert layer.check(ours, ours.launch(0, torch.empty(7, N, dtype=layer.dtype))) <= 1
    (peer,) = peers.select(["cublas"])
    (contestant,) = peer.prepare(layer)(M)
    out = contestant.launch(0, torch.empty(M, N, dtype=layer.dtype))
    assert base.relative_error(out, layer.expected(M)) < base.MAX_ERROR


def test_moved_bytes_count_every_operand_once() -> None:
    assert layer_of("w4a8_g128").moved_bytes(3) == N * K // 2 + 2 * N * 2 + 3 * (K + 4 + 2 * N)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu(name: str) -> None:
    needs_wgmma()
    bench = gpu.Bench(peers.select(["cublas"]), gpu.Options(tactics="sm90a"))
    for selected, *_ in bench.rows([schemes.parse(name)], [(512, 256)], [1, 33]):
        assert selected["selected"]
        assert 0 <= selected["error"] <= 1
        assert selected["cublas_ratio"] > 0
