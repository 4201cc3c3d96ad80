"""Blockwise int8 as torch sees it: operators, fake tensors, compilation, and calls that repeat an earlier one."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.blockwise import (
    DEVICES,
    assert_correct,
    assert_quantized,
    multiply,
    multiply_quantized,
    pack,
)
from tests.python.manual import run_by
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.products import launching
from qcutlass.products.blockwise import BLOCKWISE, BlockwiseCall
from qcutlass.testing import BlockwiseCase

OPERATORS = torch.ops.qcutlass
CASES = {
    "plain": BlockwiseCase(3, 160, 200),
    "everything": BlockwiseCase(9, 72, 96, 32, torch.bfloat16, True, torch.float16, "silu"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
on_devices = pytest.mark.parametrize("device", DEVICES)


def call_of(case: BlockwiseCase, device: str = "cpu", seed: int = 1, quantized: bool = False) -> BlockwiseCall:
    """The operator's arguments; packed weights in one of the two cases."""
    p = case.random(device=device, seed=seed)
    b = pack(p) if p.bias is not None else p.b
    dtype, size = (torch.int8, case.block_size) if quantized else (case.out_dtype, None)
    return BlockwiseCall(p.a, p.a_s, b, p.b_s, p.bias, p.activation, dtype, case.n, case.block_size, size)


def run(call: BlockwiseCall, **changes: Any) -> Tensor:
    """int8_addmm with the call's arguments by name."""
    arguments = call._asdict() | changes
    del arguments["out_block_size"], arguments["out_s"]
    return blockwise.int8_addmm(**arguments)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


@on_devices
@cases
def test_opcheck_of_products(case: BlockwiseCase, device: str) -> None:
    names = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    call = call_of(case, device)
    torch.library.opcheck(OPERATORS.blockwise_gemm.default, BLOCKWISE.arguments(call), test_utils=names)
    out = torch.empty(case.m, case.n, dtype=case.out_dtype, device=device)
    torch.library.opcheck(
        OPERATORS.blockwise_gemm_out.default, BLOCKWISE.arguments(call), {"out": out}, test_utils=names
    )
    quantized = BLOCKWISE.arguments(call_of(case, device, quantized=True))
    torch.library.opcheck(OPERATORS.blockwise_gemm_quant.default, quantized, test_utils=names)


@on_devices
@pytest.mark.parametrize("square", [False, True])
def test_opcheck_of_quantisers(square: bool, device: str) -> None:
    x = torch.randn(70, 200, device=device)
    torch.library.opcheck(OPERATORS.quantize_blocks.default, (x, 64, square))
    codes, scales = OPERATORS.quantize_blocks(x, 64, square)
    torch.library.opcheck(OPERATORS.dequantize_blocks.default, (codes, scales, 64, square, torch.bfloat16))
    if not square:
        torch.library.opcheck(OPERATORS.gelu_blocks.default, (codes, scales, 64))


@cases
def test_the_operators_and_the_functions_agree(case: BlockwiseCase) -> None:
    call = call_of(case)
    expected = run(call)
    testing.assert_equal(OPERATORS.blockwise_gemm(*BLOCKWISE.arguments(call)), expected)
    out = torch.empty_like(expected)
    assert OPERATORS.blockwise_gemm_out(*BLOCKWISE.arguments(call), out=out) is None
    testing.assert_equal(out, expected)
    p = case.random(seed=1)
    through = OPERATORS.blockwise_gemm_quant(*BLOCKWISE.arguments(call_of(case, quantized=True)))
    for got, wanted in zip(through, multiply_quantized(p, case.block_size), strict=True):
        testing.assert_equal(got, wanted)


@cases
def test_fake_and_meta_tensors_get_the_right_shapes(case: BlockwiseCase) -> None:
    call = call_of(case)

    def mapped(call: BlockwiseCall, change: Any) -> BlockwiseCall:
        return call._replace(**{name: change(v) for name, v in call._asdict().items() if isinstance(v, Tensor)})

    def check(call: BlockwiseCall, leading: tuple[int, ...], device: str) -> None:
        out = run(call)
        assert (out.shape, out.dtype, out.device.type) == ((*leading, case.n), case.out_dtype, device)
        options = call._asdict()
        for name in ("out_dtype", "out_block_size", "out_s"):
            del options[name]
        codes, scales = blockwise.int8_addmm_quant(**options, out_block_size=32)
        assert (codes.shape, codes.dtype, codes.device.type) == ((*leading, case.n), torch.int8, device)
        assert (scales.shape, scales.dtype) == ((*leading, -(-case.n // 32)), torch.float32)
        q, s = blockwise.act_quant(out, 64)
        assert (q.shape, s.shape, s.device.type) == (codes.shape, (*leading, -(-case.n // 64)), device)
        assert [t.shape for t in blockwise.int8_gelu(q, s, 64)] == [q.shape, s.shape]
        assert blockwise.act_dequant(q, s, 64).shape == q.shape
        if len(leading) == 1:
            q, s = blockwise.weight_quant(out, 64)
            assert s.shape == (-(-case.m // 64), -(-case.n // 64))
            assert blockwise.weight_dequant(q, s, 64).dtype == torch.float16

    check(mapped(call, lambda t: t.to("meta")), (case.m,), "meta")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = mapped(call, mode.from_tensor)
        check(fake, (case.m,), "cpu")
        check(fake._replace(a=fake.a.expand(1, case.m, case.k)), (1, case.m), "cpu")
        with pytest.raises(ValueError, match="a_s: expected shape"):
            run(fake, block_size=64 if case.block_size == 128 else 128)


def mlp(x: Tensor, up: tuple[Tensor, ...], down: tuple[Tensor, ...]) -> Tensor:
    """Two layers, the activations between them int8 all the way."""
    hidden = blockwise.int8_addmm_quant(*blockwise.act_quant(x), *up)
    return blockwise.int8_addmm(*blockwise.int8_gelu(*hidden), *down, out_dtype=x.dtype)


def mlp_weights(device: str, packed: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    def layer(n: int, k: int, seed: int) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        w_q, w_s = blockwise.weight_quant((torch.randn(n, k, generator=g) / k**0.5).to(device))
        bias = torch.randn(n, generator=g).to(device)
        return (qcutlass.preprocess_weights(w_q, 8, "int8") if packed else w_q), w_s, bias

    return layer(300, 200, 1), layer(200, 300, 2)


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_a_multilayer_perceptron_compiles_in_one_graph(packed: bool, device: str) -> None:
    up, down = mlp_weights(device, packed)
    x = torch.randn(2, 9, 200, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    testing.assert_equal(compiled(x, up, down), mlp(x, up, down))


@on_devices
def test_a_multilayer_perceptron_errs_as_its_roundings_do(device: str) -> None:
    """Against floats: a few thousandths of the outputs' size, as six roundings to int8 in blocks give."""
    up, down = mlp_weights(device, packed=False)
    x = torch.randn(50, 200, device=device)
    w_up, w_down = (blockwise.weight_dequant(q, s, output_dtype=torch.float32) for q, s, _ in (up, down))
    hidden = torch.nn.functional.gelu(x @ w_up.T + up[2])
    expected = hidden @ w_down.T + down[2]
    error = (mlp(x, up, down) - expected).norm() / expected.norm()
    assert 1e-4 < error < 1 / 64  # a quarter of a step, 1/127, of the largest number of a block, three times over


def test_the_example_of_the_manual(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(run_by(repository / "docs/products.md", "tests/python/test_blockwise_torch.py").text, {})
    of_tokens, of_blocks = (float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines())
    assert 1e-4 < of_blocks < of_tokens / 10


def test_compiles_once_for_any_number_of_rows() -> None:
    p = BlockwiseCase(41, 40, 128).random(seed=1)
    packed, graphs = pack(p), CompileCounter()

    def layer(a: Tensor, a_s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = blockwise.int8_gemm(a, a_s, packed, p.b_s, n=40)
        return out, *blockwise.int8_gemm_quant(a, a_s, packed, p.b_s, n=40)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for m in (5, 9, 17, 41):  # sizes that no other dimension has: equal ones make torch specialise
        for got, expected in zip(compiled(p.a[:m], p.a_s[:m]), layer(p.a[:m], p.a_s[:m]), strict=True):
            testing.assert_equal(got, expected)
    assert graphs.frame_count == 1


@cases
def test_inference_mode_and_parameters(case: BlockwiseCase) -> None:
    call = call_of(case)
    expected = run(call)
    with torch.inference_mode():
        inside = run(call)
        out = torch.empty_like(inside)
        run(call, out=out)
    assert inside.is_inference()
    testing.assert_equal(inside.clone(), expected)
    testing.assert_equal(out.clone(), expected)
    testing.assert_equal(run(call, b_s=torch.nn.Parameter(call.b_s, requires_grad=False)), expected)


def test_writing_out_is_seen_by_autograd() -> None:
    call = call_of(BlockwiseCase(4, 32, 64, out_dtype=torch.float32))
    out = torch.ones(4, 32)
    product = (torch.ones(4, 32, requires_grad=True) * out).sum()
    run(call, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@on_devices
def test_repeated_calls_of_many_kinds_in_any_order(device: str, seed: int) -> None:
    choose = random.Random(seed)
    kinds = [BlockwiseCase(m, n, 200, size, bias=True) for m in (3, 5) for n in (40, 150) for size in (64, 128)]
    problems = [case.random(device=device, seed=seed + i) for i, case in enumerate(kinds)]
    weights = [pack(p) for p in problems]
    for _ in range(150):
        index = choose.randrange(len(problems))
        p, b = problems[index], weights[index]
        assert_correct(multiply(p, b), p)
        size = choose.choice([32, 64, 128])
        assert_quantized(multiply_quantized(p, size, b), p, size)
    assert len(launching._launches) > 16


def test_a_repeated_call_is_remembered_and_reads_its_own_operands() -> None:
    case = BlockwiseCase(4, 48, 96, bias=True)
    for seed in range(1, 5):
        p = case.random(seed=seed)
        assert_correct(multiply(p, pack(p)), p)
        assert_quantized(multiply_quantized(p, 32, pack(p)), p, 32)
    assert len(launching._launches) == 2
    call = call_of(case)
    references = [weakref.ref(value) for value in call if isinstance(value, Tensor)]
    run(call)
    del call
    assert [reference() for reference in references] == [None] * 5


def test_calls_that_differ_in_an_option_are_told_apart() -> None:
    p = BlockwiseCase(4, 48, 32, bias=True).random(seed=1)  # one block, whatever its size
    packed = pack(p)
    for _ in range(2):
        for size in (32, 64, 128):
            codes, scales = multiply_quantized(p, size, packed, block_size=64)
            assert scales.shape == (4, 2 if size == 32 else 1)
            assert_quantized((codes, scales), p, size)
        assert_correct(multiply(p, packed), p)
        assert multiply(p, packed, out_dtype=torch.float32).dtype == torch.float32
        relu = multiply_quantized(p, 128, packed, activation="relu")
        assert int(relu[0].min()) == 0
    with pytest.raises(TypeError, match="block_size: expected an int"):
        multiply(p, packed, block_size=128.0)


def test_forward_mode_tangents_and_lazy_signs() -> None:
    call = call_of(CASES["plain"])
    testing.assert_equal(run(call, a_s=torch._neg_view(call.a_s)), -run(call))
    with (
        torch.autograd.forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="a_s has a forward-mode tangent"),
    ):
        run(call, a_s=torch.autograd.forward_ad.make_dual(call.a_s, torch.ones_like(call.a_s)))


def test_freed_operands_are_refused() -> None:
    call = call_of(BlockwiseCase(4, 48, 96, bias=True))
    run(call)
    call.a_s.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a_s: its 4 elements have no storage"):
        run(call)
    with pytest.raises(ValueError, match=r"s_x: its 4 elements have no storage"):
        blockwise.int8_gelu(call.a, call.a_s)


def test_products_are_explained_without_a_gpu() -> None:
    p = BlockwiseCase(16, 4096, 512, bias=True).random(seed=1)
    operands = (p.a, p.a_s, pack(p), p.b_s, p.bias)
    names: dict[str, tuple[Any, dict[str, Any]]] = {
        "float16 out, bias": (blockwise.int8_addmm, {}),
        "int8 out in blocks of 64, bias": (blockwise.int8_addmm_quant, {"out_block_size": 64}),
        "int8 out in blocks of 128, bias": (blockwise.int8_addmm_quant, {}),
        "bfloat16 out, bias, silu": (blockwise.int8_addmm, {"out_dtype": torch.bfloat16, "activation": "silu"}),
    }
    for end, (function, options) in names.items():
        why = qcutlass.explain(function, *operands, device="h200", **options)
        assert why.problem == f"16 x 512 int8 activations by 4096 x 512 int8 weights, blocks of 128, {end}"
        assert why.plan.tactic in qcutlass.tactics(function, *operands, **options)
    why = qcutlass.explain(blockwise.int8_gemm, *operands[:4], torch.bfloat16, device="h200")
    assert why.problem.endswith("blocks of 128, bfloat16 out")
    why = qcutlass.explain(blockwise.int8_gemm_quant, *operands[:4], 32, device="h200")
    assert why.problem.endswith("blocks of 128, int8 out in blocks of 32")
    with pytest.raises(TypeError, match=r"qcutlass\.blockwise\.int8_addmm but out: missing"):
        qcutlass.explain(blockwise.int8_addmm, p.a, p.a_s, device="h200")
