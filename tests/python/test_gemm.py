"""qcutlass.gemm on CPU tensors against oracles E and T, and what it alone has: groups, orders of columns, zeros."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.python.kinds.description import half
from tests.python.kinds.weight_only import WEIGHT_ONLY, K, M, N
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import testing

Multiply = Callable[..., Tensor]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [*range(18), 33, 64, 65, 127, 128, 129, 257]
GROUPS = [7, 16, 32, 48, 64, 128, 10**6]  # the last: one a channel
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


def test_every_number_of_rows(multiply: Multiply, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for m in ROWS:
        for dtype in DTYPES:
            bits, zeros = choose.choice([4, 8]), choose.choice(["none", "int", "real"])
            case = testing.Case(m, 67, 333, bits=bits, group_size=choose.choice(GROUPS), zeros=zeros, dtype=dtype)
            problem, expected = case.exact(seed=next(seeds))
            testing.assert_equal(multiply(problem), expected, label=problem)
            problem = case.random(seed=next(seeds))
            testing.assert_close(multiply(problem), problem.reference(), label=problem)


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("bits", [4, 8])
def test_residues_of_channels_and_columns(bits: int, m: int, multiply: Multiply, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    residues = [(n, choose.randrange(1, 200)) for n in range(1, 36)]
    residues += [(choose.randrange(1, 40), k) for k in range(1, 131)]
    for n, k in residues:
        case = testing.Case(m, n, k, bits=bits, group_size=choose.choice(GROUPS), dtype=choose.choice(DTYPES))
        problem, expected = case.exact(seed=next(seeds))
        testing.assert_equal(multiply(problem), expected, label=problem)


@pytest.mark.parametrize("m", [1, 3, 17, 130])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "int", "real"])
@pytest.mark.parametrize("group_size", GROUPS)
def test_schemes(
    group_size: int, zeros: testing.Zeros, bits: int, m: int, multiply: Multiply, seeds: Iterator[int]
) -> None:
    choose = random.Random(next(seeds))
    for dtype in DTYPES:
        types = {"dtype": dtype, "scale_dtype": choose.choice(DTYPES)}
        types["zero_dtype"] = choose.choice([torch.uint8, torch.int32] if zeros == "int" else DTYPES)
        case = testing.Case(m, 50, 448, bits=bits, group_size=group_size, zeros=zeros, **types)
        problem, expected = case.exact(seed=next(seeds))
        testing.assert_equal(multiply(problem), expected, label=problem)
        problem = case.random(seed=next(seeds))
        testing.assert_close(multiply(problem), problem.reference(), label=problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 70])
def test_epilogues(
    m: int, activation: str | None, dtype: torch.dtype, multiply: Multiply, seeds: Iterator[int]
) -> None:
    for bits in (4, 8):
        for bias, act_scale, perm in [
            (False, False, False),
            (True, False, True),
            (False, True, True),
            (True, True, False),
        ]:
            case = testing.Case(
                m, 70, 256, bits=bits, group_size=64, dtype=dtype, activation=activation,
                bias=bias, act_scale=act_scale, perm=perm,
            )  # fmt: skip
            problem = case.random(seed=next(seeds))
            testing.assert_close(multiply(problem), problem.reference(), label=problem)
            if activation in (None, "relu"):
                problem, expected = case.exact(seed=next(seeds))
                testing.assert_equal(multiply(problem), expected, label=problem)


def test_bias_and_act_scale_of_other_types(multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(6, 48, 128, dtype=torch.bfloat16, bias=True, act_scale=True, seed=seed)
    assert p.bias is not None
    assert p.act_scale is not None
    for dtype in DTYPES:
        other = testing.Problem(
            p.a, p.codes, p.scales, p.zeros, p.bits, p.group_size, p.bias.to(dtype), None, p.act_scale.to(dtype)
        )
        testing.assert_close(multiply(other), other.reference(), label=other)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (3001, 2999)])
@pytest.mark.parametrize("m", [1, 4, 64])
def test_large_layers(m: int, n: int, k: int, multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(m, n, k, dtype=torch.float16, seed=seed)
    testing.assert_close(multiply(p), p.reference(), label=p)


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("bits", [4, 8])
def test_identity_returns_the_weights(m: int, bits: int, multiply: Multiply, seed: int) -> None:
    """Rows of the identity: each output is one fp32 weight, rounded once."""
    p = testing.random_problem(m, 60, 80, bits=bits, group_size=16, seed=seed)
    for begin in range(0, 80, m):
        a = torch.eye(80, dtype=torch.float16)[begin : begin + m]
        problem = testing.Problem(a, p.codes, p.scales, p.zeros, bits, 16, seed=seed)
        testing.assert_equal(multiply(problem), problem.weight(torch.float16).T[begin : begin + m], label=problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 9, 66])
def test_nothing_around_the_inputs_is_used_or_around_the_output_written(
    m: int, dtype: torch.dtype, multiply: Multiply, seed: int
) -> None:
    case = testing.Case(
        m, 45, 117, group_size=32, zeros="real", dtype=dtype, bias=True, act_scale=True, activation="silu"
    )
    p = case.random(seed=seed)
    for offset, padding in [(0, 3), (1, 0), (3, 8), (5, 1)]:
        around = lambda t, o=offset, s=padding: testing.Poisoned.around(t, offset=o, padding=s).tensor  # noqa: E731
        assert p.zeros is not None
        assert p.bias is not None
        assert p.act_scale is not None
        boxed = testing.Problem(
            around(p.a), p.codes, around(p.scales), around(p.zeros), p.bits, p.group_size,
            around(p.bias), p.activation, around(p.act_scale), seed=seed,
        )  # fmt: skip
        box = testing.Poisoned((m, 45), dtype, offset=offset, padding=padding)
        result = multiply(boxed, out=box.tensor)
        assert result.data_ptr() == box.tensor.data_ptr()
        box.check(boxed)
        testing.assert_close(box.tensor, p.reference(), label=boxed)


@pytest.mark.parametrize("m", [2, 40])
def test_strides_of_activations(m: int, multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(m, 33, 96, seed=seed)
    expected = multiply(p)
    every_second = torch.zeros(2 * m, 96, dtype=p.a.dtype)[::2].copy_(p.a)
    wide = torch.zeros(m, 2 * 96, dtype=p.a.dtype)[:, ::2].copy_(p.a)
    for a in (every_second, wide, p.a.T.contiguous().T, p.a[:1].expand(m, 96)):
        view = testing.Problem(a, p.codes, p.scales, p.zeros, p.bits, p.group_size, seed=seed)
        testing.assert_close(multiply(view), view.reference(), label=view)
    testing.assert_equal(multiply(testing.Problem(wide, p.codes, p.scales, p.zeros, 4, p.group_size)), expected)


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...], multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(max(1, torch.Size(leading).numel()), 20, 64, seed=seed)
    a = p.a[: torch.Size(leading).numel()].reshape(*leading, 64)
    out = multiply(testing.Problem(a, p.codes, p.scales, p.zeros, p.bits, p.group_size))
    assert out.shape == (*leading, 20)
    testing.assert_close(out, testing.reference(a, p.weight()), label=p)


def test_batched_views_without_a_common_row_stride(multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(24, 20, 64, seed=seed)
    a = p.a.reshape(4, 6, 64).transpose(0, 1)
    out = multiply(testing.Problem(a, p.codes, p.scales, p.zeros, p.bits, p.group_size))
    testing.assert_close(out, testing.reference(a, p.weight()), label=p)


def test_out_of_higher_rank(multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(6, 20, 64, seed=seed)
    a, out = p.a.reshape(2, 3, 64), torch.full((2, 3, 20), torch.nan, dtype=torch.float16)
    result = multiply(testing.Problem(a, p.codes, p.scales, p.zeros, p.bits, p.group_size), out=out)
    assert result.data_ptr() == out.data_ptr()
    testing.assert_equal(out.reshape(6, 20), multiply(p))


@pytest.mark.parametrize("m", [3, 40])
def test_out_of_any_strides(m: int, multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(m, 20, 64, seed=seed)
    expected = multiply(p)
    for out in (torch.zeros(20, m).half().T, torch.zeros(m, 40).half()[:, ::2], torch.zeros(2 * m, 20).half()[::2]):
        assert multiply(p, out=out) is out
        testing.assert_equal(out, expected, label=p)


def test_no_channels() -> None:
    packed = qcutlass.preprocess_weights(torch.empty(0, 64, dtype=torch.uint8), bits=4)
    out = qcutlass.gemm(torch.ones(3, 64, dtype=torch.float16), packed, torch.empty(1, 0, dtype=torch.float16))
    assert out.shape == (3, 0)


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_propagate(
    activation: str | None, value: float, m: int, multiply: Multiply, seed: int
) -> None:
    p = testing.random_problem(m, 33, 100, group_size=32, activation=activation, bias=True, seed=seed)
    p.a[m // 2, 99] = value
    testing.assert_close(multiply(p), p.reference(), label=p)


@pytest.mark.parametrize("m", [1, 7, 80])
def test_repeats_bit_for_bit_on_any_number_of_threads(m: int, multiply: Multiply, seed: int) -> None:
    p = testing.random_problem(m, 200, 1000, dtype=torch.float32, seed=seed)
    first = multiply(p)
    threads = torch.get_num_threads()
    testing.assert_close(first, p.reference(), label=p)
    try:
        for count in (threads, 1, 2, 3):
            torch.set_num_threads(count)
            testing.assert_equal(multiply(p), first, label=p)
    finally:
        torch.set_num_threads(threads)


def test_out_may_share_a_storage_without_overlap() -> None:
    values = WEIGHT_ONLY.random(WEIGHT_ONLY.whole, seed=1).values
    storage = torch.zeros(M * K + M * N, dtype=torch.float16)
    a = storage[: M * K].view(M, K).copy_(values["a"])
    expected = qcutlass.gemm(**values)
    testing.assert_equal(qcutlass.gemm(**(values | {"a": a}), out=storage[M * K :].view(M, N)), expected)


def test_ragged_groups_need_their_size() -> None:
    p = testing.random_problem(M, N, 100, group_size=48, seed=1)
    packed = qcutlass.preprocess_weights(p.codes, bits=4)
    with pytest.raises(ValueError, match=r"(?s)group_size.*100|100.*group_size"):
        qcutlass.gemm(p.a, packed, p.scales, p.zeros)
    with pytest.raises(ValueError, match=r"(?s)group_size.*100|100.*group_size"):
        qcutlass.dequantize(packed, p.scales, p.zeros, k=100)
    assert qcutlass.gemm(p.a, packed, p.scales, p.zeros, group_size=48).shape == (M, N)


@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("index", [-1, K, 10**6])
def test_perm_out_of_range(index: int, m: int) -> None:
    values = WEIGHT_ONLY.random(WEIGHT_ONLY.whole, seed=1).values
    values |= {"a": half(m, K), "residual": half(m, N)}
    values["perm"][3] = index
    box = testing.Poisoned((m, N), torch.float16)
    with pytest.raises(ValueError, match=rf"perm.*\b{K}.*{index}"):
        qcutlass.gemm(**values, out=box.tensor)
    assert box.is_untouched()


EPILOGUE_FAULTS: dict[str, Callable[[testing.Problem, Tensor], Tensor]] = {
    "bias left out": lambda p, total: testing.activate(total, p.activation),
    "bias after the activation": lambda p, total: testing.activate(total, p.activation) + p.bias.float(),
    "bias of the neighbouring channel": lambda p, total: testing.activate(total + p.bias.float().roll(1), p.activation),
    "no activation": lambda p, total: total + p.bias.float(),
    "16-bit argument": lambda p, total: testing.activate((total + p.bias.float()).to(p.a.dtype).float(), p.activation),
}


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("fault", EPILOGUE_FAULTS)
def test_epilogue_faults_are_rejected(fault: str, activation: str, seed: int) -> None:
    p = testing.random_problem(64, 256, 4096, dtype=torch.bfloat16, bias=True, activation=activation, seed=seed)
    total = p.a.float() @ p.weight().T
    sound = testing.activate(total + p.bias.float(), activation).bfloat16()
    testing.assert_close(sound, p.reference(), label=p)
    if (fault, activation) != ("16-bit argument", "relu"):  # rounding commutes with relu: no fault
        ratio = testing.error_ratio(EPILOGUE_FAULTS[fault](p, total).bfloat16(), p.reference())
        assert ratio > 1, f"{fault}: ratio {ratio}, seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_two_gelus_are_told_apart(dtype: torch.dtype, seed: int) -> None:
    p = testing.random_problem(64, 256, 256, dtype=dtype, activation="gelu", seed=seed)
    out = testing.activate(p.a.float() @ p.weight().T, "gelu_tanh").to(dtype)
    assert testing.error_ratio(out, p.reference()) > 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [4, 8])
def test_opcheck_weights(bits: int, device: str) -> None:
    p = testing.random_problem(1, 40, 128, bits=bits, device=device, seed=1)
    packed, scales, zeros = qcutlass.preprocess_weights(p.codes, bits=bits), p.scales, p.zeros
    torch.library.opcheck(torch.ops.qcutlass.pack.default, (p.codes, bits, "16bit"))
    torch.library.opcheck(torch.ops.qcutlass.unpack.default, (packed, bits, 40, 128))
    torch.library.opcheck(torch.ops.qcutlass.dequantize.default, (packed, scales, zeros, 128))
    torch.library.opcheck(
        torch.ops.qcutlass.dequantize.default, (packed, scales, zeros, 128), {"dtype": torch.float32, "row_end": 7}
    )


def test_packing_and_out_compile_in_one_graph() -> None:
    p = WEIGHT_ONLY.cases["epilogue"].random(seed=1)
    a, packed, scales, zeros = p.a, qcutlass.preprocess_weights(p.codes, bits=4), p.scales, p.zeros

    def everything(codes: Tensor, a: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        weights = qcutlass.preprocess_weights(codes, bits=4)
        qcutlass.gemm(a, weights, scales, zeros, out=out, **p.keywords)
        return qcutlass.unpack_weights(weights, bits=4, shape=(64, 256)), qcutlass.dequantize(
            weights, scales, zeros, k=256
        )

    out = torch.full((20, 64), torch.nan, dtype=torch.float16)
    codes, dense = torch.compile(everything, fullgraph=True, backend="aot_eager")(p.codes, a, out)
    testing.assert_equal(out, qcutlass.gemm(a, packed, scales, zeros, **p.keywords))
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

    p = testing.random_problem(5, 32, 128, seed=1)
    a, packed, scales, zeros = p.a, qcutlass.preprocess_weights(p.codes, bits=4), p.scales, p.zeros
    assert zeros is not None
    layer = Layer(packed, scales, zeros)
    program = torch.export.export(layer, (a,))
    testing.assert_equal(program.module()(a), layer(a), label=p)


def test_fake_codes_are_packed_into_the_right_shape() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        packed = qcutlass.preprocess_weights(torch.empty(20, 70, dtype=torch.uint8), bits=4)
        assert packed.shape == (2, 2, 32, 16)


def test_batches_of_fake_activations() -> None:
    product = WEIGHT_ONLY.random(WEIGHT_ONLY.cases["epilogue"], seed=1)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = product.mapped(mode.from_tensor)
        assert fake(a=fake.a.expand(2, 20, 256)).shape == (2, 20, 64)
