"""Operators between the products of a decoder block: values, strides, compilation, wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.modules import randn
from tests.python.running import assert_replays
from torch import Tensor

from qcutlass import quantize, testing
from qcutlass.layers import QuantLinear
from qcutlass.products.decoder_operators import add_rms_norm, gate, rms_norm
from qcutlass.products.rotary_operators import rotary, rotary_append
from qcutlass.testing.decoder import answer_ratio, gate_answer, rms_norm_answer, rotary_answer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
GATES = {"silu_mul": "silu", "gelu_tanh_mul": "gelu_tanh"}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return randn(*shape, seed=seed).to(device, dtype)


def angles(
    batch: int, tokens: int, size: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    half = 10 * randn(batch, tokens, size // 2, seed=seed)
    whole = torch.cat((half, half), dim=-1)
    return whole.cos().to(device, dtype), whole.sin().to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 5, 64), (40, 1000), (2, 1), (7, 33), (2, 20000), (1, 4096)])
def test_norms_are_within_their_bound(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> None:
    x, residual = (numbers(*shape, seed=seed + i, dtype=dtype, device=device) for i in range(2))
    for kind in {torch.float32, dtype}:
        weight = numbers(shape[-1], seed=seed + 2, dtype=kind, device=device)
        total, normed = add_rms_norm(x, residual, weight, EPS)
        testing.assert_equal(total, x + residual)
        assert normed.dtype == dtype
        assert answer_ratio(normed, rms_norm_answer(total, weight, EPS)) <= 1
        testing.assert_equal(rms_norm(total, weight, EPS), normed)


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_rows_at_any_address(device: str, seed: int) -> None:
    rows = numbers(5, 131, seed=seed, dtype=torch.float16, device=device)
    weight = numbers(128, seed=seed + 1, device=device)
    for first in (0, 1, 3):
        x = rows[:, first : first + 128]
        total, normed = add_rms_norm(x, x, weight, EPS)
        testing.assert_equal(total, x + x)
        assert answer_ratio(normed, rms_norm_answer(total, weight, EPS)) <= 1


@pytest.mark.gpu
def test_products_behind_a_norm_read_what_it_wrote(seed: int) -> None:
    """They start while it runs; neither activations nor weights that it writes may be read before it has ended.

    Norms of three rows take turns: what memory holds from the last two is wrong, whichever of them it is."""
    k, weight = 4096, torch.ones(4096, device="cuda")
    layer = QuantLinear.from_quantized(quantize(randn(512, k, seed=seed).half().cuda()))
    inputs = [numbers(3, k, seed=seed + 1 + i, dtype=torch.float16, device="cuda") for i in range(3)]
    residual = torch.zeros_like(inputs[0])
    expected = [layer(rms_norm(x, weight, EPS)) for x in inputs]
    outs = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs * 7:
            total, normed = add_rms_norm(x, residual, weight, EPS)
            outs.append(layer(normed))
            residual.copy_(total - x)
    assert_replays(graph, outs, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", [(1, 1, 1536), (3, 5, 70), (30, 1111), (4, 14336)])
def test_gates_are_within_their_bound(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int
) -> None:
    both = (8 * randn(*shape[:-1], 2 * shape[-1], seed=seed)).to(device, dtype)
    for first, second in (both.chunk(2, dim=-1), [part.contiguous() for part in both.chunk(2, dim=-1)]):
        out = gate(name, first, second)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert answer_ratio(out, gate_answer(GATES[name], first, second)) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GATES)
def test_gates_far_from_zero(name: str, device: str) -> None:
    """Where exp() overflows, or is too small to count; infinities and NaN as torch has them."""
    far = torch.tensor([-3e38, -1e4, -89.0, -88.0, -87.0, -0.0, 0.0, 87.0, 88.7, 89.0, 1e4, 3e38], device=device)
    ones = torch.ones_like(far)
    assert answer_ratio(gate(name, far, ones), gate_answer(GATES[name], far, ones)) <= 1
    special = torch.tensor([torch.inf, torch.nan], device=device)
    assert str(gate(name, special, torch.ones_like(special)).tolist()) == "[inf, nan]"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False], ids=["one row of angles", "angles of each"])
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "normalised"])
def test_rotations_are_within_their_bound(
    with_norms: bool, shared: bool, dtype: torch.dtype, device: str, seed: int
) -> None:
    batch, tokens, size = 3, 5, 24
    rows = numbers(batch, tokens, 7 * size, seed=seed, dtype=dtype, device=device)
    q, k = (
        rows[..., : 4 * size].view(batch, tokens, 4, size),
        rows[..., 4 * size : 6 * size].view(batch, tokens, 2, size),
    )
    cos, sin = angles(1 if shared else batch, tokens, size, dtype, seed + 1, device)
    norms = [numbers(size, seed=seed + 2 + i, dtype=dtype, device=device) if with_norms else None for i in range(2)]
    found = rotary(q, k, cos, sin, *norms, eps=EPS)
    for out, x, norm in zip(found, (q, k), norms, strict=True):
        assert out.is_contiguous()
        assert answer_ratio(out, rotary_answer(x, cos, sin, norm, EPS)) <= 1
    transposed = rotary(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)), cos, sin, *norms, eps=EPS)
    for out, expected in zip(transposed, found, strict=True):
        testing.assert_equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side_by_side", [False, True], ids=["apart", "side by side"])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "place"),
    [
        *((1, 4, 128, 7), (1, 3, 40, 0), (5, 1, 24, 3), (1, 2, 576, 15), (4, 2, 16, 14), (3, 1, 16, -1)),
        *((1, 1, 16, 16), (2, 1, 16, 2**63 - 1), (2, 1, 16, -(2**63))),
    ],
)
def test_rotated_keys_and_values_go_to_their_place(
    tokens: int, heads: int, size: int, place: int, side_by_side: bool, dtype: torch.dtype, device: str, seed: int
) -> None:
    """In a part of a larger cache: whatever lies around the place stays as it was."""
    batch, room = 2, 16
    rows = numbers(batch, tokens, 4 * heads * size, seed=seed, dtype=dtype, device=device)
    parts = rows.split([2 * heads * size, heads * size, heads * size], dim=-1)
    q, k, v = (part.view(batch, tokens, -1, size) for part in parts)
    cos, sin = angles(batch, tokens, size, dtype, seed + 1, device)
    norms = [numbers(size, seed=seed + 2 + i, device=device) for i in range(2)]
    if side_by_side:  # keys and values of a token beside each other, one token more than there is room
        whole = numbers(batch, room + 1, 2, heads, size, seed=seed + 4, dtype=dtype, device=device)
        views = [whole[:, :room, i].transpose(1, 2) for i in range(2)]
    else:
        whole = numbers(2, 2, batch, heads, room, size, seed=seed + 4, dtype=dtype, device=device)
        views = list(whole[0])
    before = whole.clone()
    queries, rotated = rotary(q, k, cos, sin, *norms, eps=EPS)
    wanted = [view.clone() for view in views]
    for token in range(tokens):
        if 0 <= place + token < room:
            wanted[0][:, :, place + token] = rotated[:, token]
            wanted[1][:, :, place + token] = v[:, token]
    version = views[0]._version
    gaps = torch.stack((v, v), dim=-1)[..., 0]  # not of unit stride along a head
    out = rotary_append(q, k, gaps, cos, sin, *views, torch.tensor([place], device=device), *norms, EPS)
    assert views[0]._version > version, "autograd would not know that they changed"
    testing.assert_equal(out, queries)
    for view, expected in zip(views, wanted, strict=True):
        testing.assert_equal(view, expected)
        view.zero_()
    (before[:, :room] if side_by_side else before[0]).zero_()
    testing.assert_equal(whole, before)  # nothing beside the caches was written


def test_a_cache_may_have_no_room() -> None:
    q, empty = torch.ones(1, 1, 2, 8), torch.ones(1, 2, 0, 8)
    angle = torch.ones(1, 1, 8)
    out = rotary_append(q, q, q, angle, angle, empty, empty.clone(), torch.tensor([0]))
    testing.assert_equal(out, rotary(q, q, angle, angle)[0])


def calls(seed: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator."""
    x, weight = numbers(2, 3, 64, seed=seed), numbers(64, seed=seed + 1)
    q, k = numbers(2, 3, 4, 16, seed=seed + 2), numbers(2, 3, 2, 16, seed=seed + 3)
    return {
        "add_rms_norm": (x, x + 1, weight, EPS),
        "rms_norm": (x, weight, EPS),
        "silu_mul": (x, x + 1),
        "gelu_tanh_mul": (x, x + 1),
        "rotary": (q, k, *angles(2, 3, 16, torch.float32, seed), weight[:16], weight[16:32], EPS),
        "rotary_append": (
            *(q, k, k + 1, *angles(2, 3, 16, torch.float32, seed)),
            *(torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16), torch.tensor([4]), *2 * [weight[:16]], EPS),
        ),
    }


@pytest.mark.parametrize("name", calls(0))
def test_operators_are_torch_operators(name: str, seed: int) -> None:
    torch.library.opcheck(getattr(torch.ops.qcutlass, name).default, calls(seed)[name])


def test_functions_compile_without_a_break(seed: int) -> None:
    def block(x: Tensor, weight: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        total, normed = add_rms_norm(x, x, weight, EPS)
        return total, gate("silu_mul", normed, total), rms_norm(total, weight, EPS), *rotary(q, k, cos, sin)

    arguments = (*calls(seed)["rms_norm"][:2], *calls(seed)["rotary"][:4])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for out, expected in zip(compiled(*arguments), block(*arguments), strict=True):
            testing.assert_equal(out, expected)


def test_results_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    x, weight = numbers(300, 576, seed=seed), numbers(576, seed=seed + 1)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append((*add_rms_norm(x, x, weight, EPS), gate("silu_mul", x, x)))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        testing.assert_equal(one, three)


def test_there_may_be_no_rows() -> None:
    empty = torch.empty(0, 64)
    total, normed = add_rms_norm(empty, empty, torch.ones(64), EPS)
    assert total.shape == normed.shape == gate("silu_mul", empty, empty).shape == (0, 64)
    q = torch.empty(0, 5, 4, 16)
    assert rotary(q, q, torch.empty(1, 5, 16), torch.empty(1, 5, 16))[1].shape == q.shape


X = torch.ones(2, 64)
Q, ANGLES = torch.ones(2, 3, 4, 16), torch.ones(1, 3, 16)
CACHE = torch.zeros(2, 2, 8, 16)


def append(**changed: Tensor) -> Tensor:
    """A call with some arguments changed."""
    k = Q[:, :, :2]
    call: dict[str, Any] = {
        "q": Q,
        "k": k,
        "v": k,
        "cos": ANGLES,
        "sin": ANGLES,
        "keys": CACHE,
        "values": CACHE.clone(),
    }
    return rotary_append(**(call | {"place": torch.tensor([0])} | changed))


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "type": (lambda: rms_norm(X.double(), X[0], EPS), TypeError, "x: expected a tensor of float16"),
    "no numbers": (lambda: rms_norm(torch.tensor(1.0), X[0], EPS), ValueError, r"x: expected shape \[\.\.\., K\]"),
    "weight": (lambda: rms_norm(X, X[0, 1:], EPS), ValueError, r"weight: expected shape \[K\] = \[64\]"),
    "eps": (lambda: rms_norm(X, X[0], -1.0), ValueError, "eps: expected at least 0"),
    "residual": (lambda: add_rms_norm(X, X[0], X[0], EPS), ValueError, "residual: expected the shape of x"),
    "other type": (lambda: add_rms_norm(X, X.half(), X[0], EPS), TypeError, "residual: expected a tensor of float32"),
    "up": (lambda: gate("silu_mul", X, X[:1]), ValueError, "up: expected the shape of gate"),
    "device": (lambda: gate("silu_mul", X, X.to("meta")), ValueError, "up is on meta, gate is on cpu"),
    "odd": (lambda: rotary(Q[..., 1:], Q[..., 1:], ANGLES, ANGLES), ValueError, "q: expected shape .* even size"),
    "k": (lambda: rotary(Q, Q[:1], ANGLES, ANGLES), ValueError, r"k: expected shape \[2, 3, heads, 16\]"),
    "cos": (lambda: rotary(Q, Q, ANGLES[:, 1:], ANGLES), ValueError, r"cos: expected shape \[2 or 1, 3, 16\]"),
    "norm": (lambda: rotary(Q, Q, ANGLES, ANGLES, X[0]), ValueError, r"q_norm: expected shape \[size\] = \[16\]"),
    "v": (lambda: append(v=Q), ValueError, "v: expected the shape of k"),
    "cache": (lambda: append(keys=CACHE[:, :1]), ValueError, r"keys: expected shape \[2, 2, room, 16\]"),
    "caches": (lambda: append(values=CACHE[:, :, 1:]), ValueError, "values: expected the shape of keys"),
    "strides": (lambda: append(keys=CACHE.mT.contiguous().mT), ValueError, "keys: expected unit stride"),
    "on itself": (lambda: append(keys=CACHE[:, :1].expand(2, 2, 8, 16)), ValueError, "keys: expected elements that do"),
    "on each other": (lambda: append(values=CACHE), ValueError, "values overlaps keys"),
    "on an input": (lambda: append(v=CACHE[:, :, 1:4].transpose(1, 2)), ValueError, "keys overlaps v"),
    "place": (lambda: append(place=torch.tensor(3)), ValueError, r"place: expected shape \[1\]"),
    "place's type": (lambda: append(place=torch.tensor([3.0])), TypeError, "place: expected a tensor of int64"),
    "gradient": (
        lambda: rms_norm(X, torch.nn.Parameter(torch.ones(64)), EPS),
        RuntimeError,
        "weight requires grad, but qcutlass is for inference",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
