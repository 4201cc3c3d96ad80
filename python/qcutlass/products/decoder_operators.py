"""What a decoder block computes between its products: `torch.ops.qcutlass.add_rms_norm`, `rms_norm`, `silu_mul`,
`gelu_tanh_mul`, `rotary` and `rotary_append`.

Each is one pass of the extension, computed in fp32 and rounded once. On a GPU of sm_90 a pass lets the kernel behind it
start early: a product then loads its first weights meanwhile. The functions here call the extension directly where
nothing traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    ACTIVATION_OF_GATE,
    FLOATING,
    check_device,
    check_inference,
    check_memory,
    check_operand,
    check_tensor,
    check_vector,
    shape_of,
)
from qcutlass.products.extension import DTYPES, current_device, device_traits
from qcutlass.products.library import is_eager, register
from qcutlass.products.memory import as_rows

Pair: TypeAlias = tuple[Tensor, Tensor]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    """The residual stream and its norm: `sum = x + residual`, `sum * weight / sqrt(mean(sum^2) + eps)`.

    The norm is that of Zhang and Sennrich, "Root mean square layer normalization" (2019), over the last dimension.

    Args:
        x: float16, bfloat16 or float32 `[..., K]`.
        residual: of the same shape and type.
        weight: floating `[K]`.
        eps: added to the mean square, at least 0.

    Returns:
        The sum, rounded to the type of `x`, and its norm, of that type too.

    Raises:
        TypeError, ValueError: types, shapes or devices do not fit.
        RuntimeError: autograd would have to record it.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import add_rms_norm
        >>> x, residual = torch.ones(2, 64), torch.ones(2, 64)
        >>> [float(out[0, 0]) for out in add_rms_norm(x, residual, torch.ones(64), 0.0)]
        [2.0, 1.0]
    """
    if is_eager(x, residual, weight):
        return _add_rms_norm(x, residual, weight, eps)
    found: Pair = torch.ops.qcutlass.add_rms_norm(x, residual, weight, eps)
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm alone; arguments and errors are those of `add_rms_norm`.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import rms_norm
        >>> float(rms_norm(torch.full((1, 64), 3.0), torch.ones(64), 0.0)[0, 0])
        1.0
    """
    if is_eager(x, weight):
        return _rms_norm(x, weight, eps)
    found: Tensor = torch.ops.qcutlass.rms_norm(x, weight, eps)
    return found


def gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` or `gelu_tanh(gate) * up`, of a gated MLP (Shazeer, "GLU variants improve transformer", 2020).

    Args:
        name: "silu_mul" or "gelu_tanh_mul".
        gate, up: float16, bfloat16 or float32, of one shape and type; parts of a tensor's rows need no copy.

    Returns:
        Of that shape and type.

    Raises:
        TypeError, ValueError, RuntimeError: as for `add_rms_norm`; KeyError: of another name.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import gate
        >>> float(gate("silu_mul", torch.full((1,), 100.0), torch.full((1,), 2.0)))
        200.0
    """
    if is_eager(gate, up):
        return _gate(name, gate, up)
    found: Tensor = getattr(torch.ops.qcutlass, name)(gate, up)
    return found


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Pair:
    """Rotary position embedding of queries and keys (Su et al., "RoFormer", 2021), in halves as Llama has it.

    Args:
        q, k: float16, bfloat16 or float32 `[B, tokens, heads, size]`, each with its own number of heads; size is even.
            Unit stride along a head avoids a copy.
        cos, sin: of that type, `[B or 1, tokens, size]`.
        q_norm, k_norm: floating `[size]`, both of one type: weights of an RMS norm of each head before it is rotated;
            None: no norm.
        eps: of these norms.

    Returns:
        Both, rotated, without gaps in memory.

    Raises:
        TypeError, ValueError, RuntimeError: as for `add_rms_norm`.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import rotary
        >>> q, k, zeros = torch.ones(1, 5, 4, 8), torch.ones(1, 5, 2, 8), torch.zeros(1, 5, 8)
        >>> bool((rotary(q, k, zeros, zeros + 1)[0][..., :4] == -1).all())  # by a right angle
        True
    """
    if is_eager(q, k, cos, sin, q_norm, k_norm):
        return _rotary(q, k, cos, sin, q_norm, k_norm, eps)
    found: Pair = torch.ops.qcutlass.rotary(q, k, cos, sin, q_norm, k_norm, eps)
    return found


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    ahead: Sequence[Tensor] = (),
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rotary`, whose keys go into a static cache, and with them the values.

    Args:
        q, k, v, cos, sin, q_norm, k_norm, eps: as for `rotary`; v: of the shape of k.
        keys, values: of that type `[B, heads, room, size]`, unit stride along a head; written.
        place: int64 `[1]`, on the same device: the token of the cache that the first one becomes. On a GPU no host code
            reads it. Tokens outside the cache are dropped.
        ahead: what the kernels behind will read from memory, packed weights say: on a GPU the first two are requested
            into its L2 cache meanwhile, which changes no result.

    Returns:
        Queries, rotated, without gaps in memory.

    Raises:
        TypeError, ValueError, RuntimeError: as for `rotary`.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import rotary_append
        >>> q, k, ones = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 2, 8), torch.ones(1, 1, 8)
        >>> keys, values = torch.zeros(2, 1, 2, 16, 8)
        >>> _ = rotary_append(q, k, 3 * k, ones, 0 * ones, keys, values, torch.tensor([5]))
        >>> float(keys[0, 0, 5, 0]), float(values[0, 0, 5, 0]), float(values.sum())
        (1.0, 3.0, 48.0)
    """
    if is_eager(q, k, v, cos, sin, keys, values, place, q_norm, k_norm, *ahead):
        return _rotary_append(q, k, v, cos, sin, keys, values, place, ahead, q_norm, k_norm, eps)
    found: Tensor = torch.ops.qcutlass.rotary_append(
        q, k, v, cos, sin, keys, values, place, list(ahead), q_norm, k_norm, eps
    )
    return found


def _check_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    check_tensor("x", x, FLOATING)
    check_device("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape [..., K] with K at least 1, got {shape_of(x)}")
    if residual is not None:
        _check_alike("residual", residual, "x", x)
    check_operand("weight", weight, FLOATING, x.device, "x")
    check_vector("weight", weight, x.shape[-1], "K")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps}")


def _check_alike(name: str, tensor: Tensor, first: str, x: Tensor) -> None:
    check_operand(name, tensor, (x.dtype,), x.device, first)
    if tensor.shape != x.shape:
        raise ValueError(f"{name}: expected the shape of {first}, {shape_of(x)}, got {shape_of(tensor)}")


def _check_gate(gate: Tensor, up: Tensor) -> None:
    check_tensor("gate", gate, FLOATING)
    check_device("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate: expected shape [..., N], got a tensor without dimensions")
    _check_alike("up", up, "gate", gate)


def _check_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
) -> None:
    check_tensor("q", q, FLOATING)
    check_device("q", q)
    check_operand("k", k, (q.dtype,), q.device, "q")
    if q.dim() != 4 or q.shape[-1] % 2 or not q.shape[-1] or not q.shape[2]:
        raise ValueError(f"q: expected shape [B, tokens, heads, size] with an even size, got {shape_of(q)}")
    batch, tokens, _, size = q.shape
    if k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != size or not k.shape[2]:
        raise ValueError(f"k: expected shape [{batch}, {tokens}, heads, {size}], got {shape_of(k)}")
    for name, angles in (("cos", cos), ("sin", sin)):
        check_operand(name, angles, (q.dtype,), q.device, "q")
        if angles.dim() != 3 or angles.shape[0] not in (1, batch) or angles.shape[1:] != (tokens, size):
            raise ValueError(f"{name}: expected shape [{batch} or 1, {tokens}, {size}], got {shape_of(angles)}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected the shape of cos, {shape_of(cos)}, got {shape_of(sin)}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_operand(name, weight, FLOATING, q.device, "q")
            check_vector(name, weight, size, "size")
    if q_norm is not None and k_norm is not None and q_norm.dtype != k_norm.dtype:
        raise TypeError(f"k_norm: expected the type of q_norm, {q_norm.dtype}, got {k_norm.dtype}")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps}")


def _check_append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> None:
    _check_alike("v", v, "k", k)
    batch, _, heads, size = k.shape
    for name, cache in (("keys", keys), ("values", values)):
        check_operand(name, cache, (k.dtype,), k.device, "q")
        if cache.dim() != 4 or cache.shape[:2] != (batch, heads) or cache.shape[3] != size:
            raise ValueError(f"{name}: expected shape [{batch}, {heads}, room, {size}], got {shape_of(cache)}")
        if cache.stride(3) != 1:
            raise ValueError(f"{name}: expected unit stride along a head, got {list(cache.stride())}")
    if keys.shape != values.shape:
        raise ValueError(f"values: expected the shape of keys, {shape_of(keys)}, got {shape_of(values)}")
    check_operand("place", place, (torch.int64,), k.device, "q")
    if place.shape != (1,):
        raise ValueError(f"place: expected shape [1], got {shape_of(place)}")


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """`[..., K]` with unit stride along K and one distance of rows, and that distance."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = as_rows(tensor)
    return rows, rows.stride(0)


def _ready(**tensors: Tensor | None) -> None:
    """Raises unless the tensors can be read by address, and nothing records gradients."""
    check_memory(tensors)
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        check_inference(**tensors)


def _backend(tensor: Tensor) -> tuple[int, int, int]:
    """Threads on the CPU, device and stream on a GPU: the last three arguments of the extension's functions."""
    if not tensor.is_cuda:
        return torch.get_num_threads(), -1, 0
    index = tensor.get_device()
    device_traits(index)
    return 1, index, torch._C._cuda_getCurrentRawStream(index)


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    _check_norm(x, weight, eps, residual)
    _ready(x=x, residual=residual, weight=weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(out)
    if out.numel():
        columns = x.shape[-1]
        x, stride = _rows(x)
        added, added_stride = (None, 0) if residual is None else _rows(residual)
        weight = weight.contiguous()
        with current_device(x):
            _C.add_rms_norm(
                out.numel() // columns,
                columns,
                DTYPES[out.dtype],
                x.data_ptr(),
                stride,
                0 if added is None else added.data_ptr(),
                added_stride,
                DTYPES[weight.dtype],
                weight.data_ptr(),
                eps,
                0 if total is None else total.data_ptr(),
                out.data_ptr(),
                *_backend(x),
            )
    return total, out


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    total, out = _launch_norm(x, residual, weight, eps)
    assert total is not None
    return total, out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_norm(x, None, weight, eps)[1]


def _gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    activation = ACTIVATION_OF_GATE[name]
    _check_gate(gate, up)
    _ready(gate=gate, up=up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        columns = gate.shape[-1]
        gate, gate_stride = _rows(gate)
        up, up_stride = _rows(up)
        with current_device(gate):
            _C.gate(
                out.numel() // columns,
                columns,
                DTYPES[out.dtype],
                activation,
                gate.data_ptr(),
                gate_stride,
                up.data_ptr(),
                up_stride,
                out.data_ptr(),
                *_backend(gate),
            )
    return out


def _composed_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    numbers = x.float()
    factor = torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    return (numbers * factor * weight.float()).to(x.dtype)


def _rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Pair:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _rotated(q, (k, k_out), None, cos, sin, q_norm, k_norm, eps), k_out


def _rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    ahead: Sequence[Tensor] = (),
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    _check_append(k, v, keys, values, place)
    _ready(v=v, keys=keys, values=values, place=place)
    pairs = (k, keys.transpose(1, 2)), (v, values.transpose(1, 2))
    return _rotated(q, *pairs, cos, sin, q_norm, k_norm, eps, place, ahead)


def _rotated(
    q: Tensor,
    k: Pair,
    v: Pair | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    place: Tensor | None = None,
    ahead: Sequence[Tensor] = (),
) -> Tensor:
    """Queries, rotated; keys and values, pairs of input and output `[B, tokens, heads, size]`, are written."""
    _ready(q=q, k=k[0], cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        batch, tokens, _, size = q.shape
        if cos.stride() != sin.stride() or cos.stride(2) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        norm = q_norm if q_norm is not None else k_norm
        q_norm, k_norm = (None if weight is None else weight.contiguous() for weight in (q_norm, k_norm))
        parts = [_Heads(q, q_norm, out), _Heads(k[0], k_norm, k[1]), None if v is None else _Heads(v[0], None, v[1])]
        with current_device(q):
            _C.rotate(
                batch,
                tokens,
                size,
                DTYPES[out.dtype],
                *(None if part is None else part.numbers() for part in parts),
                cos.data_ptr(),
                sin.data_ptr(),
                0 if cos.shape[0] == 1 else cos.stride(0),
                cos.stride(1),
                _C.DType.NONE if norm is None else DTYPES[norm.dtype],
                eps,
                0 if place is None else place.data_ptr(),
                0 if place is None else k[1].shape[1],
                [(tensor.data_ptr(), tensor.nbytes) for tensor in ahead],
                *_backend(out),
            )
    return out


class _Heads:
    """One of the parts of a rotation: it holds the input, of unit stride along a head, for the call."""

    def __init__(self, x: Tensor, norm: Tensor | None, out: Tensor) -> None:
        self.x = x if x.stride(3) == 1 else x.contiguous()
        self.norm, self.out = norm, out

    def numbers(self) -> _C._Heads:
        """What the extension takes."""
        norm = 0 if self.norm is None else self.norm.data_ptr()
        batch, token, head, _ = self.x.stride()
        out_batch, out_token, out_head, _ = self.out.stride()
        x, out = self.x.data_ptr(), self.out.data_ptr()
        return self.x.shape[2], x, batch, token, head, norm, out, out_batch, out_token, out_head


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    _check_norm(x, weight, eps, residual)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check_norm(x, weight, eps, None)
    return x.new_empty(x.shape)


def _gate_fake(gate: Tensor, up: Tensor) -> Tensor:
    _check_gate(gate, up)
    return gate.new_empty(gate.shape)


def _rotary_fake(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Pair:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotary_append_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    ahead: Sequence[Tensor] = (),
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    _check_append(k, v, keys, values, place)
    return q.new_empty(q.shape)


def _register() -> None:
    register(
        "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        _add_rms_norm,
        _add_rms_norm_fake,
    )
    register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
    for name in ACTIVATION_OF_GATE:

        def implementation(gate: Tensor, up: Tensor, name: str = name) -> Tensor:
            return _gate(name, gate, up)

        register(f"{name}(Tensor gate, Tensor up) -> Tensor", implementation, _gate_fake)
    register(
        "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) "
        "-> (Tensor, Tensor)",
        _rotary,
        _rotary_fake,
    )
    register(
        "rotary_append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor place, Tensor[] ahead, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) -> Tensor",
        _rotary_append,
        _rotary_append_fake,
    )


_register()
