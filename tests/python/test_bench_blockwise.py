"""The bench of blockwise int8 without its measurements: schemes, layers, peers. One run on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import gpu, gpu_report, peers, schemes
from bench.layer_blockwise import BlockwiseLayer
from bench.peers import base, triton_blockwise
from torch import Tensor

import qcutlass
from qcutlass import blockwise

M, N, K = 20, 160, 256
NAMES = ("blockwise", "blockwise_bf16", "blockwise_quant", "blockwise_fp8")


def layer_of(name: str) -> BlockwiseLayer:
    """A layer on the CPU."""
    scheme = schemes.parse(name)
    assert isinstance(scheme, schemes.Blockwise)
    return BlockwiseLayer(scheme, (N, K), M, device="cpu")


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a GPU, though the products run on the CPU."""
    plan = SimpleNamespace(tactic="stream", split_k=2)
    monkeypatch.setattr(qcutlass, "plan", lambda *operands, **options: plan)


def test_schemes_by_name() -> None:
    half, brain = torch.float16, torch.bfloat16
    assert schemes.parse("blockwise") == schemes.Blockwise("blockwise", False, half)
    assert schemes.parse("blockwise_quant_bf16") == schemes.Blockwise("blockwise_quant_bf16", True, brain)
    assert schemes.parse("blockwise").operands == "int8"
    assert schemes.parse("blockwise_fp8").operands == "fp8"
    for wrong in ("blockwise_f32", "blockwise_bf16_quant", "blockwise_azp"):
        with pytest.raises(ValueError, match=rf"scheme '{wrong}': expected .*blockwise\[_quant\|_fp8\]"):
            schemes.parse(wrong)


@pytest.mark.usefixtures("no_gpu_needed")
def test_forced_tactics_reach_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(blockwise, "int8_gemm", lambda *operands, **options: calls.append(options))
    layer = layer_of("blockwise")
    layer.plan(4, "some", 2).launch(0, torch.empty(4, N))
    layer.plan(4).launch(0, torch.empty(4, N))
    assert [(call.get("tactic"), call.get("split_k")) for call in calls] == [("some", 2), (None, None)]


def test_moved_bytes_count_every_operand_once() -> None:
    weights, rows = N * K + 4 * 2 * 2, K + 4 * 2
    assert layer_of("blockwise").moved_bytes(3) == weights + 3 * (rows + 2 * N)
    assert layer_of("blockwise_quant").moved_bytes(3) == weights + 3 * (rows + N + 4 * 2)


def test_a_report_names_the_peer() -> None:
    row = {"qcutlass_us": 2.0, "triton_blockwise_us": 9.0, "cublas_us": 8.0}
    found = gpu_report.comparison(row, ["triton_blockwise", "cublas"])
    assert (found["triton_blockwise_ratio"], found["best_peer"]) == (4.5, "cublas")
    assert "Triton / qcutlass" in [column.heading for column in gpu_report.COLUMNS]


@pytest.mark.parametrize("name", NAMES)
def test_cublas_computes_the_layer(name: str) -> None:
    layer = layer_of(name)
    (peer,) = peers.select(["cublas"])
    (contestant,) = peer.prepare(layer)(M)
    out = contestant.launch(0, torch.empty(M, N, dtype=layer.dtype))
    assert base.relative_error(contestant.completed(out), layer.expected(M)) < base.MAX_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_triton_gets_its_operands_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeKernel:
        """The product of triton_kernel.py, with operands in its order."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert grid == (2,)
            return self.run

        def run(
            self, a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, out: Tensor, out_s: Tensor, *sizes: Any, **_: int
        ) -> None:
            assert sizes == (M, N, K, 128, 8, out.dtype == torch.int8, a.dtype != torch.int8)
            if a.dtype != torch.int8:
                blockwise.fp8_gemm(a, a_s, b, b_s, out.dtype, out=out)
            elif out.dtype == torch.int8:
                codes, scales = blockwise.int8_gemm_quant(a, a_s, b, b_s)
                out.copy_(codes)
                out_s.copy_(scales)
            else:
                blockwise.int8_gemm(a, a_s, b, b_s, out.dtype, out=out)

    monkeypatch.setattr(triton_blockwise, "_kernel", FakeKernel)
    layer = layer_of(name)
    contestants = triton_blockwise.TritonBlockwise().prepare(layer)(M)
    assert [contestant.name for contestant in contestants] == [
        "triton_blockwise w4_s3",
        "triton_blockwise w8_s3",
        "triton_blockwise w8_s4",
    ]
    for contestant in contestants:
        out = contestant.launch(contestant.copies - 1, torch.empty(M, N, dtype=layer.dtype))
        assert base.relative_error(contestant.completed(out), layer.expected(M)) < base.MAX_ERROR


@pytest.mark.parametrize(("key", "scheme"), [("triton_blockwise", "w8a8"), ("int_mm", "blockwise")])
def test_peers_say_what_they_do_not_take(key: str, scheme: str) -> None:
    from tests.python.test_bench_w8a8 import layer_of as other_layer_of

    layer = layer_of(scheme) if scheme == "blockwise" else other_layer_of(scheme)
    (peer,) = peers.select([key])
    with pytest.raises(base.Skip, match=r"multiplies .* alone"):
        peer.prepare(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu(name: str) -> None:
    bench = gpu.Bench(peers.select(["cublas", "triton_blockwise"]), gpu.Options(tactics="stream", eager=True))
    cells = list(bench.rows([schemes.parse(name)], [(512, 256)], [1, 33]))
    for selected, *_ in cells:
        assert selected["selected"]
        assert 0 <= selected["error"] <= 1
        assert selected["cublas_ratio"] > 0
        assert selected["eager_us"] > 0
        if "triton_blockwise" in bench.versions:
            assert selected["triton_blockwise_error"] < base.MAX_ERROR
