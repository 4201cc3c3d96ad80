"""What surrounds blockwise products, as torch sees it: quantisers, GELU, a multilayer perceptron, options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from tests.python.kinds.blockwise_quantized import QUANTIZED_BLOCKWISE
from tests.python.kinds.description import Product
from tests.python.manual import run_by
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.products import launching
from qcutlass.testing import BlockwiseCase

OPERATORS = torch.ops.qcutlass
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


@on_devices
@pytest.mark.parametrize("square", [False, True])
def test_opcheck_of_quantisers(square: bool, device: str) -> None:
    x = torch.randn(70, 200, device=device)
    torch.library.opcheck(OPERATORS.quantize_blocks.default, (x, 64, square, torch.int8))
    codes, scales = OPERATORS.quantize_blocks(x, 64, square, torch.int8)
    torch.library.opcheck(OPERATORS.dequantize_blocks.default, (codes, scales, 64, square, torch.bfloat16))
    if not square:
        torch.library.opcheck(OPERATORS.gelu_blocks.default, (codes, scales, 64))


def test_fake_and_meta_tensors_get_the_right_shapes() -> None:
    """Those of quantisers of a product, through GELU and back."""
    product = QUANTIZED_BLOCKWISE.random(QUANTIZED_BLOCKWISE.cases["everything"], seed=1)

    def check(product: Product, leading: tuple[int, ...], device: str) -> None:
        m, n, _ = product.problem.shape
        codes, scales = product()
        assert (codes.shape, scales.shape) == ((*leading, n), (*leading, -(-n // 32)))
        numbers = blockwise.act_dequant(codes, scales, 32)
        q, s = blockwise.act_quant(numbers, 64)
        assert (q.shape, s.shape, s.device.type) == (codes.shape, (*leading, -(-n // 64)), device)
        assert [t.shape for t in blockwise.int8_gelu(q, s, 64)] == [q.shape, s.shape]
        assert numbers.shape == q.shape
        if len(leading) == 1:
            q, s = blockwise.weight_quant(numbers, 64)
            assert s.shape == (-(-m // 64), -(-n // 64))
            assert blockwise.weight_dequant(q, s, 64).dtype == torch.float16

    check(product.mapped(lambda t: t.to("meta")), (9,), "meta")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = product.mapped(mode.from_tensor)
        check(fake, (9,), "cpu")
        batch = replace(fake, operands=fake.operands | {"a": fake.a.expand(1, 9, 96)})
        check(batch, (1, 9), "cpu")


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

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for m in (5, 9, 17, 41):  # sizes that no other dimension has: equal ones make torch specialise
        for got, expected in zip(compiled(p.a[:m], p.a_s[:m]), layer(p.a[:m], p.a_s[:m]), strict=True):
            testing.assert_equal(got, expected)
    assert graphs.frame_count == 1


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


def test_freed_codes_and_scales_are_refused() -> None:
    codes, scales = torch.ones(4, 96, dtype=torch.int8), torch.ones(4, 1)
    blockwise.int8_gelu(codes, scales)
    scales.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"s_x: its 4 elements have no storage"):
        blockwise.int8_gelu(codes, scales)
