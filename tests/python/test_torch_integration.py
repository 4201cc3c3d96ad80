"""The registered operators as torch sees them: opcheck, fake and meta tensors, compilation, inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import testing

Multiply = Callable[..., Tensor]
OPERATORS = torch.ops.qcutlass
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

CASES = [
    testing.Case(3, 40, 128, zeros="none"),
    testing.Case(9, 33, 100, bits=8, group_size=48, zeros="int", dtype=torch.bfloat16, activation="silu"),
    testing.Case(20, 64, 256, zeros="real", bias=True, act_scale=True, perm=True, activation="gelu"),
]


def problem_of(case: testing.Case, device: str) -> tuple[testing.Problem, tuple[Any, ...], dict[str, Any]]:
    """A problem with the positional and keyword arguments of its operator."""
    p = case.random(device=device, seed=1)
    return p, (p.a, qcutlass.preprocess_weights(p.codes, bits=p.bits), p.scales, p.zeros), p.keywords


def test_every_registered_operator_is_checked_here() -> None:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:10] == "qcutlass::"
    }
    kinds = ("gemm", "gemm_w8a8", "gemm_fp8", "blockwise_gemm")
    products = {f"{name}{suffix}" for name in kinds for suffix in ("", "_out")} | {"blockwise_gemm_quant"}
    blocks = {"quantize_blocks", "dequantize_blocks", "gelu_blocks"}
    assert names == products | blocks | {"pack", "unpack", "dequantize", "quantize_8bit"}  # some in other files


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=["plain", "ragged", "epilogue"])
def test_opcheck_gemm(case: testing.Case, device: str) -> None:
    _, arguments, keywords = problem_of(case, device)
    torch.library.opcheck(OPERATORS.gemm.default, arguments, keywords)
    out = arguments[0].new_empty(case.m, case.n)
    torch.library.opcheck(OPERATORS.gemm_out.default, arguments, keywords | {"out": out})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [4, 8])
def test_opcheck_weights(bits: int, device: str) -> None:
    p, (_, packed, scales, zeros), _ = problem_of(testing.Case(1, 40, 128, bits=bits), device)
    torch.library.opcheck(OPERATORS.pack.default, (p.codes, bits, "16bit"))
    torch.library.opcheck(OPERATORS.unpack.default, (packed, bits, 40, 128))
    torch.library.opcheck(OPERATORS.dequantize.default, (packed, scales, zeros, 128))
    torch.library.opcheck(
        OPERATORS.dequantize.default, (packed, scales, zeros, 128), {"dtype": torch.float32, "row_end": 7}
    )


@pytest.mark.parametrize("case", CASES, ids=["plain", "ragged", "epilogue"])
def test_the_operator_and_the_function_agree(case: testing.Case, multiply: Multiply) -> None:
    p, arguments, keywords = problem_of(case, "cpu")
    testing.assert_equal(OPERATORS.gemm(*arguments, **keywords), multiply(p))
    out = torch.empty(case.m, case.n, dtype=case.dtype)
    assert OPERATORS.gemm_out(*arguments, **keywords, out=out) is None
    testing.assert_equal(out, multiply(p))


@pytest.mark.parametrize("case", CASES, ids=["plain", "ragged", "epilogue"])
def test_fake_and_meta_tensors_get_the_right_shapes(case: testing.Case) -> None:
    _, arguments, keywords = problem_of(case, "cpu")
    meta = [None if t is None else t.to("meta") for t in arguments]
    options = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in keywords.items()}
    out = qcutlass.gemm(*meta, **options)
    assert (out.shape, out.dtype, out.device.type) == ((case.m, case.n), case.dtype, "meta")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [None if t is None else mode.from_tensor(t) for t in arguments]
        options = {name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in keywords.items()}
        out = qcutlass.gemm(fake[0].expand(2, case.m, case.k), *fake[1:], **options)
        assert (out.shape, out.dtype, out.device.type) == ((2, case.m, case.n), case.dtype, "cpu")
        packed = qcutlass.preprocess_weights(torch.empty(20, 70, dtype=torch.uint8), bits=4)
        assert packed.shape == (2, 2, 32, 16)


def test_fake_tensors_meet_the_same_checks() -> None:
    p, arguments, _ = problem_of(CASES[0], "cpu")
    arguments = tuple(None if t is None else t.to("meta") for t in arguments)
    with pytest.raises(ValueError, match="bias"):
        qcutlass.gemm(*arguments, bias=torch.empty(41, dtype=torch.float16, device="meta"))
    with pytest.raises(TypeError, match=r"a: .*int8"):
        qcutlass.gemm(p.a.to("meta", torch.int8), *arguments[1:])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", CASES, ids=["plain", "ragged", "epilogue"])
def test_compiles_in_one_graph(case: testing.Case, backend: str) -> None:
    p, (a, *weights), keywords = problem_of(case, "cpu")

    def layer(a: Tensor) -> Tensor:
        return qcutlass.gemm(a * 2, *weights, **keywords) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        testing.assert_equal(compiled(a), layer(a), label=p)


def test_compiles_once_for_any_number_of_rows() -> None:
    p, (a, *weights), _ = problem_of(CASES[0], "cpu")
    graphs = CompileCounter()

    def layer(a: Tensor) -> Tensor:
        return qcutlass.gemm(a, *weights)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for m in (5, 9, 17, 41):  # sizes that no other dimension has: equal ones make torch specialise
        rows = a[:1].expand(m, p.a.shape[1])
        testing.assert_equal(compiled(rows), layer(rows), label=p)
    assert graphs.frame_count == 1


def test_packing_and_out_compile_in_one_graph() -> None:
    p, (a, packed, scales, zeros), keywords = problem_of(CASES[2], "cpu")

    def everything(codes: Tensor, a: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        weights = qcutlass.preprocess_weights(codes, bits=4)
        qcutlass.gemm(a, weights, scales, zeros, out=out, **keywords)
        return qcutlass.unpack_weights(weights, bits=4, shape=(64, 256)), qcutlass.dequantize(
            weights, scales, zeros, k=256
        )

    torch._dynamo.reset()
    out = torch.full((20, 64), torch.nan, dtype=torch.float16)
    codes, dense = torch.compile(everything, fullgraph=True, backend="aot_eager")(p.codes, a, out)
    testing.assert_equal(out, qcutlass.gemm(a, packed, scales, zeros, **keywords))
    testing.assert_equal(codes, p.codes)
    testing.assert_equal(dense, p.weight(torch.float16))


def test_a_module_can_be_exported() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, packed: Tensor, scales: Tensor, zeros: Tensor) -> None:
            super().__init__()
            self.register_buffer("packed", packed)
            self.register_buffer("scales", scales)
            self.register_buffer("zeros", zeros)

        def forward(self, a: Tensor) -> Tensor:
            return qcutlass.gemm(a, self.packed, self.scales, self.zeros)

    p, (a, packed, scales, zeros), _ = problem_of(testing.Case(5, 32, 128), "cpu")
    layer = Layer(packed, scales, zeros)
    program = torch.export.export(layer, (a,))
    testing.assert_equal(program.module()(a), layer(a), label=p)


def test_inference_mode(multiply: Multiply) -> None:
    p = CASES[2].random(seed=1)
    expected = multiply(p)
    with torch.inference_mode():
        inside = multiply(p)
        out = torch.empty_like(inside)
        multiply(p, out=out)
    assert inside.is_inference()
    testing.assert_equal(inside.clone(), expected)
    testing.assert_equal(out.clone(), expected)


def test_writing_out_is_seen_by_autograd(multiply: Multiply) -> None:
    p = testing.random_problem(4, 32, 64, dtype=torch.float32, seed=1)
    out = torch.ones(4, 32)
    product = (torch.ones(4, 32, requires_grad=True) * out).sum()
    multiply(p, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_without_gradient_are_ordinary_tensors(multiply: Multiply) -> None:
    p = CASES[0].random(seed=1)
    packed = torch.nn.Parameter(qcutlass.preprocess_weights(p.codes, bits=4), requires_grad=False)
    scales = torch.nn.Parameter(p.scales, requires_grad=False)
    testing.assert_equal(qcutlass.gemm(p.a, packed, scales), multiply(p))
