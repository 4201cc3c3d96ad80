"""explain and tactics of 8-by-8-bit products, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import UnsupportedError


def int8_product(m: int, n: int, k: int, **options: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    a_q, w_q = torch.ones(m, k, dtype=torch.int8), torch.ones(n, k, dtype=torch.int8)
    w_packed = qcutlass.preprocess_weights(w_q, bits=8, activations="int8")
    return (a_q, w_packed, torch.ones(m), torch.ones(n)), options


def float8_product(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.ones(m, k).to(dtype), torch.ones(n, k).to(torch.float8_e4m3fn), torch.ones(m), torch.ones(n)


def test_int8_products_are_explained() -> None:
    operands, options = int8_product(16, 4096, 512, bias=torch.zeros(4096), activation="silu", out_dtype=torch.bfloat16)
    why = qcutlass.explain(qcutlass.gemm_w8a8, *operands, device="h200", **options)
    assert why.problem == "16 x 512 int8 activations by 4096 x 512 int8 weights, bfloat16 out, bias, silu"
    assert why.source == "cost model"
    assert why.plan.tactic.startswith("w8a8_s8_sm80_")
    assert why.plan.tactic == why.candidates[0].plan.tactic
    assert not any(candidate.plan.dense for candidate in why.candidates)
    assert why.plan.tactic in str(why)


def test_zero_points_are_mentioned_and_sums_have_no_scales() -> None:
    operands, _ = int8_product(4, 64, 128)
    why = qcutlass.explain(qcutlass.gemm_w8a8, *operands, azp=torch.ones(4, dtype=torch.int32), device="a100")
    assert why.problem.endswith("float16 out, azp")
    sums = qcutlass.explain(qcutlass.gemm_w8a8, *operands[:2], None, None, out_dtype=torch.int32, device="a100")
    assert sums.problem.endswith("int32 out")


@pytest.mark.parametrize(
    ("dtype", "prefix"), [(torch.float8_e4m3fn, "w8a8_e4m3_sm89_"), (torch.float8_e5m2, "w8a8_e5m2_sm89_")]
)
def test_float8_products_are_explained_where_gpus_have_them(dtype: torch.dtype, prefix: str) -> None:
    operands = float8_product(8, 256, 512, dtype)
    why = qcutlass.explain(qcutlass.gemm_fp8, *operands, device="l40s")
    assert why.plan.tactic.startswith(prefix)
    assert why.problem.startswith(f"8 x 512 {str(dtype).removeprefix('torch.')} activations by 256 x 512 float8_e4m3fn")
    with pytest.raises(UnsupportedError, match=r"8\.0"):
        qcutlass.explain(qcutlass.gemm_fp8, *operands, device="a100")


def test_a_forced_tactic_is_told() -> None:
    operands, _ = int8_product(64, 1024, 1024)
    names = qcutlass.tactics(qcutlass.gemm_w8a8, *operands)
    assert len(set(names)) == len(names)
    assert all(name.startswith("w8a8_s8_") for name in names)
    why = qcutlass.explain(qcutlass.gemm_w8a8, *operands, device="h200", tactic="w8a8_s8_sm80_n64m64k128_s3", split_k=2)
    assert (why.source, why.plan.tactic, why.plan.split_k) == ("forced", "w8a8_s8_sm80_n64m64k128_s3", 2)
    with pytest.raises(ValueError, match="tactic"):
        qcutlass.explain(qcutlass.gemm_w8a8, *operands, device="h200", tactic="w4a16_f16_native_sm80_n64m64k64_s3")


def test_more_rows_take_more_time_and_fp8_on_hopper_more_than_int8() -> None:
    costs = [
        qcutlass.explain(qcutlass.gemm_w8a8, *int8_product(m, 4096, 512)[0], device="h200").cost
        for m in (16, 256, 2048)
    ]
    assert [cost.total for cost in costs] == sorted(cost.total for cost in costs)
    float8 = qcutlass.explain(
        qcutlass.gemm_fp8, *float8_product(2048, 4096, 512, torch.float8_e4m3fn), device="h200"
    ).cost
    assert float8.compute > 1.05 * costs[-1].compute  # sums leave the MMAs every 128 columns


def test_plans_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="GPU"):
        qcutlass.plan(qcutlass.gemm_w8a8, *int8_product(2, 16, 32)[0])


def test_arguments_are_those_of_the_product() -> None:
    (a, w_packed, *scales), _ = int8_product(2, 16, 32)
    with pytest.raises(TypeError, match=r"qcutlass\.gemm_w8a8 but out: missing a required argument: 'a_scale'"):
        qcutlass.explain(qcutlass.gemm_w8a8, a, w_packed, device="h200")
    with pytest.raises(TypeError, match=r"qcutlass\.gemm_w8a8 but out: .*'group_size'"):
        qcutlass.explain(qcutlass.gemm_w8a8, a, w_packed, *scales, group_size=4, device="h200")
    with pytest.raises(TypeError, match=r"qcutlass\.gemm but out: missing"):
        qcutlass.tactics(qcutlass.gemm, a.half(), w_packed)
