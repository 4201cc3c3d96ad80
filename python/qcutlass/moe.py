"""Mixtures of experts: the block of a transformer in which a router sends each token to a few of many gated MLPs.

    ids, weights = ...                                  # of the router: [T, k] each
    y = moe.experts(x, gate_up, down, ids, weights)     # [T, H]

For token t it is the sum over its k slots of `weight * (down[e] @ act(gate_up[e] @ x[t]))`, e the slot's expert
(Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017). `route` lays
the slots out by expert, for `qcutlass.gemm_grouped`, which multiplies the rows of each expert by its weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcutlass.products import expert_block, moe_operators
from qcutlass.products.expert_block import ExpertsCall, ExpertWeights
from qcutlass.products.library import is_eager

__all__ = ["ExpertWeights", "Routing", "experts", "route"]


class Routing(NamedTuple):
    """Where the rows of tokens' slots go; all int32 but the last, on the device of the ids.

    Attributes:
        rows: `[R]`, R = T * k: the token of each routed row; 0 from `offsets[E]` on, in rows that belong to nobody.
        offsets: `[E + 1]`: rows `offsets[e]` to `offsets[e + 1]` belong to expert e, in the order of (token, slot).
        order: `[T, k]`: the row of each slot; -1 where its id is outside [0, E).
        row_scale: float32 `[R]`: the router's weight of each row, 0 in rows of nobody; None without weights.
    """

    rows: Tensor
    offsets: Tensor
    order: Tensor
    row_scale: Tensor | None


def route(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None = None) -> Routing:
    """Sorts the slots of tokens by expert: a stable counting sort, on a GPU in one launch that waits for nothing.

    Args:
        topk_ids: int32 or int64 `[T, k]`: the expert of each slot. Ids outside [0, E) belong to nobody, as those of
            other ranks do under expert parallelism.
        num_experts: E; on CUDA at most 2048.
        topk_weights: float32 `[T, k]`: the router's weights, laid out as rows are.

    Returns:
        The routing.

    Raises:
        TypeError, ValueError: types, shapes or devices do not fit.
        UnsupportedError: more experts than the GPU's routing has counters for.
        RuntimeError: the weights require grad and grad mode is on; qcutlass is for inference.

    Example:
        >>> import torch, qcutlass
        >>> routing = qcutlass.moe.route(torch.tensor([[1, 0], [0, -1]]), 2)
        >>> routing.offsets.tolist(), routing.rows.tolist(), routing.order.tolist()
        ([0, 2, 3], [0, 1, 0, 0], [[2, 0], [1, -1]])
    """
    if is_eager(topk_ids, topk_weights):
        found = moe_operators.route(topk_ids, num_experts, topk_weights)
    else:
        found = torch.ops.qcutlass.moe_route(topk_ids, num_experts, topk_weights)
    rows, offsets, order, row_scale = found
    return Routing(rows, offsets, order, None if topk_weights is None else row_scale)


def experts(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The block behind the router: for each token the weighted sum of its experts' gated MLPs.

    With `gate, up = gate_up[e] @ x[t] + bias` an expert gives `down[e] @ act(gate, up) + bias`, and `act` is

    * "silu": `gate * sigmoid(gate) * up` (SwiGLU), "gelu_tanh": `gelu_tanh(gate) * up` (GeGLU; Shazeer, "GLU variants
      improve transformer", 2020);
    * "swigluoai": `gate * sigmoid(alpha * gate) * (up + 1)` with gate at most `limit` and up in [-limit, limit], that
      of OpenAI's gpt-oss.

    The first product computes `act` in its epilogue if there are no `limit` and `alpha`, I is a multiple of 16, and all
    of gate lies before up; otherwise a separate kernel does. Gate and up are rounded to the type of `x` before `act`,
    except on the CPU if the product computes it. Activations and sums are computed in fp32 and rounded once; the k
    results of a token are added in the order of its slots. A token's result does not depend on other tokens, and
    repeats bit for bit; on CUDA, as long as the products' tactics are the same (they are chosen by T), or with
    `batch_invariant`.

    Memory beside the output is at most 1 GiB, or that of one token if this takes more; more tokens are computed in
    equal parts, one after the other. Each of the R = k * tokens rows takes 12 bytes, and I + H elements of the type of
    `x`, or 2 I + max(I, H) if the product does not compute `act`; with `perm`, on a GPU, 12 bytes a column of that
    product and 32 besides. Copies of operands whose rows are no multiples of 16 bytes are not counted. The host never
    waits for the GPU, so CUDA graphs can be captured.

    Args:
        x: `[T, H]`. float16 or bfloat16 on CUDA; these or float32 on the CPU.
        gate_up: of 2 I channels and H columns: I of gate, then I of up, or in turns (`ExpertWeights.interleaved`).
        down: of H channels and I columns.
        topk_ids: int32 or int64 `[T, k]`; slots whose ids are outside [0, E) add nothing.
        topk_weights: float32 `[T, k]`: what a slot's result is multiplied by.
        activation: "silu", "gelu_tanh" or "swigluoai".
        limit: bounds gate and up as above. None: 7 for "swigluoai", none for the others.
        alpha: as above, for "silu", too, whose own is 1. None: 1.702 for "swigluoai".
        batch_invariant: of both products, as for `gemm`.
        out: `[T, H]` with the type of `x`, to be written; must not share memory with an operand.

    Returns:
        `[T, H]` with the type of `x`; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `gemm_grouped` and `route`; messages about weights
            begin with "gate_up" or "down".

    Example:
        >>> import torch, qcutlass
        >>> def weights(n, k):
        ...     each = [qcutlass.quantize(torch.randn(n, k), bits=4, group_size=64) for _ in range(4)]
        ...     w_packed = qcutlass.preprocess_weights(torch.stack([q.codes for q in each]), bits=4)
        ...     scales, zeros = (torch.stack([getattr(q, name) for q in each]) for name in ("scales", "zeros"))
        ...     return qcutlass.moe.ExpertWeights(w_packed, scales, zeros)
        >>> x, scores = torch.randn(5, 256), torch.randn(5, 4).softmax(-1)
        >>> topk_weights, topk_ids = scores.topk(2)
        >>> qcutlass.moe.experts(x, weights(2 * 128, 256), weights(256, 128), topk_ids, topk_weights).shape
        torch.Size([5, 256])
    """
    weights = expert_block.weights_of("gate_up", gate_up), expert_block.weights_of("down", down)
    call = ExpertsCall(x, *weights, topk_ids, topk_weights, activation, limit, alpha, batch_invariant)
    return expert_block.compute(call, out)
