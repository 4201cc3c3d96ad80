"""Rotary position embedding between the products of a decoder block: `torch.ops.qcutlass.rotary` and `rotary_append`,
one pass of the extension each, computed in fp32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    FLOATING,
    check_device,
    check_operand,
    check_tensor,
    check_vector,
    shape_of,
)
from qcutlass.products.decoder_operators import Pair, backend, check_alike, ready
from qcutlass.products.extension import DTYPES, current_device
from qcutlass.products.library import is_eager, register
from qcutlass.products.memory import interlace, overlap, overlaps_itself


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
        TypeError, ValueError: types, shapes or devices do not fit.
        RuntimeError: autograd would have to record it.

    Example:
        >>> import torch
        >>> from qcutlass.products.rotary_operators import rotary
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

    Returns:
        Queries, rotated, without gaps in memory.

    Raises:
        TypeError, ValueError, RuntimeError: as for `rotary`; keys and values have other than unit stride along a head,
            or lie on themselves, on each other or on what is read.

    Example:
        >>> import torch
        >>> from qcutlass.products.rotary_operators import rotary_append
        >>> q, k, ones = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 2, 8), torch.ones(1, 1, 8)
        >>> keys, values = torch.zeros(2, 1, 2, 16, 8)
        >>> _ = rotary_append(q, k, 3 * k, ones, 0 * ones, keys, values, torch.tensor([5]))
        >>> float(keys[0, 0, 5, 0]), float(values[0, 0, 5, 0]), float(values.sum())
        (1.0, 3.0, 48.0)
    """
    if is_eager(q, k, v, cos, sin, keys, values, place, q_norm, k_norm):
        return _rotary_append(q, k, v, cos, sin, keys, values, place, q_norm, k_norm, eps)
    found: Tensor = torch.ops.qcutlass.rotary_append(q, k, v, cos, sin, keys, values, place, q_norm, k_norm, eps)
    return found


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
    check_alike("v", v, "k", k)
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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    _check_append(k, v, keys, values, place)
    ready(v=v, keys=keys, values=values, place=place)
    _check_caches(keys, values, q=q, k=k, v=v, cos=cos, sin=sin, place=place, q_norm=q_norm, k_norm=k_norm)
    pairs = (k, keys.transpose(1, 2)), (v, values.transpose(1, 2))
    out = _rotated(q, *pairs, cos, sin, q_norm, k_norm, eps, place)
    for cache in (keys, values):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return out


def _check_caches(keys: Tensor, values: Tensor, **read: Tensor | None) -> None:
    """Raises ValueError if writing one of the caches would change itself, the other, or what is read."""
    for name, cache in (("keys", keys), ("values", values)):
        if overlaps_itself(cache):
            raise ValueError(f"{name}: expected elements that do not overlap, got strides {list(cache.stride())}")
        for other, tensor in read.items():
            if tensor is not None and overlap(cache, tensor):
                raise ValueError(f"{name} overlaps {other} in memory: pass a cache with memory of its own")
    if not interlace(keys, values):
        raise ValueError("values overlaps keys in memory: pass a cache with memory of its own")


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
) -> Tensor:
    """Queries, rotated; keys and values, pairs of input and output `[B, tokens, heads, size]`, are written."""
    ready(q=q, k=k[0], cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
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
                *backend(out),
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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    _check_rotary(q, k, cos, sin, q_norm, k_norm, eps)
    _check_append(k, v, keys, values, place)
    return q.new_empty(q.shape)


register(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) "
    "-> (Tensor, Tensor)",
    _rotary,
    _rotary_fake,
)
register(
    "rotary_append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor place, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) -> Tensor",
    _rotary_append,
    _rotary_append_fake,
)
