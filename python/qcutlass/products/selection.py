"""Which kernel serves a product, and why: what was built, what is chosen, what each choice is predicted to cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products import epilogue, tuned_plans
from qcutlass.products.checks import check_strided, names_of, tensors_of
from qcutlass.products.extension import device_traits
from qcutlass.products.functions import gemm
from qcutlass.products.kind import FUNCTIONS, Call, Kind
from qcutlass.products.packing import WeightShape
from qcutlass.products.product import Product

GPUS: Final = {
    "a100": _C.DeviceTraits(80, 108, 166912),
    "a10": _C.DeviceTraits(86, 72, 101376),
    "rtx3090": _C.DeviceTraits(86, 82, 101376),
    "l40s": _C.DeviceTraits(89, 142, 101376),
    "rtx4090": _C.DeviceTraits(89, 128, 101376),
    "h100": _C.DeviceTraits(90, 132, 232448, wgmma=True),
    "h200": _C.DeviceTraits(90, 132, 232448, wgmma=True),
    "b200": _C.DeviceTraits(100, 148, 232448),
    "rtx5090": _C.DeviceTraits(120, 170, 101376),
}
"""GPUs that `explain` knows by name."""

Source: TypeAlias = Literal["cost model", "tuned", "forced"]

_REASONS: Final[dict[str, str]] = {
    "cost model": "chosen by the cost model",
    "tuned": "measured as the fastest by qcutlass.tune",
    "forced": "forced by the caller",
}


@dataclass(frozen=True)
class Explanation:
    """The choice of a kernel for a product, with the alternatives; `str()` is a table.

    Attributes:
        problem: the product, in words.
        device: the GPU, in words.
        fitted: the rates of this GPU were fitted to measured times; if not, predictions follow from a data sheet.
        source: "cost model", "tuned" or "forced".
        batch_invariant: one order of sums serves every number of rows; candidates are those that have it.
        plan: what runs: tactic, split, workspace.
        candidates: all that was considered, the least predicted time first. Each has a `plan` and a `cost` with
            `load`, `compute`, `fixed` and `total` in microseconds; loads and arithmetic overlap, so that the total is
            less than their sum.
    """

    problem: str
    device: str
    fitted: bool
    source: Source
    batch_invariant: bool
    plan: _C.Plan
    candidates: tuple[_C.Candidate, ...]

    @property
    def cost(self) -> _C.Cost:
        """Prediction for the plan."""
        return next(c.cost for c in self.candidates if _name(c.plan) == _name(self.plan))

    def __str__(self) -> str:
        lines = [self.problem, f"on {self.device}: {self._launch()}", self._reason()]
        if self.source == "cost model" and not self.fitted:
            lines.append("the rates of this GPU are not fitted to measured times: qcutlass.tune measures on it")
        return "\n".join((*lines, "", *self._table()))

    def _launch(self) -> str:
        plan = self.plan
        if plan.dense:
            how = f"slices of {plan.slice} rows of the weights, dequantised and multiplied by torch.mm"
        elif plan.split_k == 1:
            how = "K not shared"
        else:
            whose = "K of the last tiles" if plan.shared_channel or plan.shared_token else "K"
            how = f"{whose} shared by {plan.split_k} blocks{' of a cluster' if plan.cluster else ''}"
        space = f"{plan.workspace_bytes / 2**20:.1f} MiB" if plan.workspace_bytes else "no"
        return f"{plan.tactic}, {how}, {space} workspace"

    def _reason(self) -> str:
        cost, plan = self.cost, self.plan
        invariant = "batch-invariant, one order of sums whatever M is, " if self.batch_invariant else ""
        parts = (
            {"dequantising": cost.load, "the dense product": cost.compute, "launches": cost.fixed}
            if plan.dense
            else {"loads": cost.load, "arithmetic": cost.compute, "fixed costs": cost.fixed}
        )
        part = max(parts, key=lambda name: parts[name])
        why = invariant + _REASONS[self.source]
        reason = f"{why}: {cost.total:.1f} us predicted, most of it {part} ({parts[part]:.1f} us)"
        others = [c for c in self.candidates if c.plan.tactic != plan.tactic]
        if not others:
            return reason
        best = others[0]
        return f"{reason}; the best other tactic {best.cost.total:.1f} us ({best.cost.total / cost.total - 1:+.0%})"

    def _table(self) -> list[str]:
        """A row for the plan, and one for the best split of each other tactic."""
        rows = {c.plan.tactic: c for c in reversed(self.candidates)}  # the first of a tactic wins
        rows[self.plan.tactic] = next(c for c in self.candidates if _name(c.plan) == _name(self.plan))
        shown = sorted(rows.values(), key=lambda c: c.cost.total)
        width = max(len(tactic) for tactic in rows)
        lines = [f"  {'tactic':<{width}}  split    loads  arithmetic    fixed  total us"]
        for c in shown:
            mark, cost = ">" if _name(c.plan) == _name(self.plan) else " ", c.cost
            lines.append(
                f"{mark} {c.plan.tactic:<{width}}  {c.plan.split_k:5d} {cost.load:8.1f} {cost.compute:11.1f} "
                f"{cost.fixed:8.1f} {cost.total:9.1f}"
            )
        hidden = len(self.candidates) - len(shown)
        return [*lines, f"  and {hidden} other splits of these tactics"] if hidden else lines


def _name(plan: _C.Plan) -> tuple[str, int]:
    return plan.tactic, plan.split_k


def explain(
    product: Callable[..., Any] | Tensor, *operands: Any, device: str | _C.DeviceTraits | None = None, **options: Any
) -> Explanation:
    """Says which kernel a product would use, why, and what each other one was predicted to take.

    Predictions are those of the cost model (waves of blocks, bytes, issue slots, fixed costs; rates of each GPU),
    which ranks kernels; `tune` measures. Nothing is launched.

    Args:
        product: the function that computes it: `qcutlass.gemm`, `gemm_w4a8`, `gemm_w8a8`, `gemm_fp8`, `gemm_grouped`,
            or one of the products in `qcutlass.blockwise`. A tensor is the first operand of `qcutlass.gemm`.
        operands, options: the arguments of that function but `out`. With `device` they may be CPU or meta tensors of 8
            or 16-bit types.
        device: "a100", "a10", "rtx3090", "l40s", "rtx4090", "h100", "h200", "b200" or "rtx5090", or the traits of any
            other GPU. Default: the GPU of the tensors, with what was tuned for it.

    Returns:
        The plan, where it comes from, and all candidates with their predicted microseconds; `str` of it is a table.

    Raises:
        TypeError, ValueError: as for the product; no such product or GPU; or an empty product, for which nothing runs.
        UnsupportedError: no kernel serves this product.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(4096, 1024, dtype=torch.float16), bits=4, group_size=128)
        >>> w_packed, a = qcutlass.preprocess_weights(q.codes, bits=4), torch.randn(16, 1024, dtype=torch.float16)
        >>> why = qcutlass.explain(qcutlass.gemm, a, w_packed, q.scales, q.zeros, device="h200")
        >>> why.source, why.plan.tactic == why.candidates[0].plan.tactic
        ('cost model', True)
        >>> print(str(why).splitlines()[0])
        16 x 1024 float16 activations by 4096 x 1024 4-bit weights, groups of 128, float16 scales, uint8 zeros
    """
    kind, call = _call(product, operands, options)
    shape, a = call.check(None), call.a
    rows = kind.rows(call)
    if rows == 0 or shape.n == 0:
        raise ValueError(f"a: a product of M = {rows}, N = {shape.n} is empty, and no kernel runs")
    index, traits, name = _target(a, device)
    query = _query(kind, call, shape)
    arguments, dense = _arguments(query), query.can_be_dense()
    candidates = _C.candidates(arguments, traits, dense=dense)
    source: Source = "cost model"
    plan = candidates[0].plan
    if call.tactic or call.split_k:
        source = "forced"
        plan = _C.select(arguments, traits, call.tactic or "", call.split_k, dense)
    elif index is not None and query.can_be_tuned():
        tuned = tuned_plans.lookup(arguments, traits, index)
        if tuned is not None:
            source, plan = "tuned", tuned
    if all(_name(c.plan) != _name(plan) for c in candidates):  # a choice that the rules of selection leave out
        candidates += _C.candidates(arguments, traits, plan.tactic, plan.split_k, dense)
        candidates.sort(key=lambda candidate: candidate.cost.total)
    capability = divmod(traits.compute_capability, 10)
    where = f"{name} (compute capability {capability[0]}.{capability[1]}, {traits.sm_count} SMs)"
    _, _, fitted = _C.gpu_class(traits)
    words, invariant = _describe(kind, call, shape), arguments.batch_invariant
    return Explanation(words, where, fitted, source, invariant, plan, tuple(candidates))


def arguments_of(product: Callable[..., Any], *operands: Any, **options: Any) -> _C.GemmArguments:
    """A product as the extension's selection and cost model take it; nothing can be run with it.

    Args:
        product, operands, options: the function and its arguments, as for `explain`; meta tensors do.

    Raises:
        TypeError, ValueError: as for the product; no such product.
    """
    return arguments_of_call(*_call(product, operands, options))


def arguments_of_call(kind: Kind, call: Call) -> _C.GemmArguments:
    """The same of a call; TypeError or ValueError as for the product."""
    return _arguments(_query(kind, call, call.check(None)))


_SOME_ADDRESS: Final = 4096


def _arguments(query: Product) -> _C.GemmArguments:
    """Those of the query; of tensors without addresses what counts is that they are there."""
    if not query.a.is_meta:
        return query.arguments
    addresses = [0 if operand is None else _SOME_ADDRESS for operand in query.kind.operands(query.call)]
    return query.rebinding()(addresses, _SOME_ADDRESS)


def _target(a: Tensor, device: object) -> tuple[int | None, _C.DeviceTraits, str]:
    """Index of the GPU if it is the tensors' own, its traits, its name."""
    known = f"expected one of {', '.join(map(repr, GPUS))}, or qcutlass._C.DeviceTraits"
    if isinstance(device, _C.DeviceTraits):
        return None, device, "a GPU"
    if isinstance(device, str):
        name = device.lower().replace(" ", "").replace("-", "").replace("_", "")
        if name not in GPUS:
            raise ValueError(f"device: {known}, got {device!r}")
        return None, GPUS[name], name.upper()
    if device is not None:
        raise TypeError(f"device: {known}, got {type(device).__name__}")
    if not a.is_cuda:
        raise ValueError(f"device: the tensors are on {a.device}, so name a GPU: {known}")
    index = a.get_device()
    return index, device_traits(index), torch.cuda.get_device_name(index)


def _describe(kind: Kind, call: Call, shape: WeightShape) -> str:
    activations = names_of([call.a.dtype])
    weights, parts = call.describe(shape)
    sizes = f"{kind.rows(call)} x {shape.k} {activations} activations by {shape.n} x {shape.k} {weights}"
    finished = [] if call.activation is None else [call.activation]
    finished += [] if call.residual is None else ["residual"]
    return ", ".join([sizes, *parts, *finished])


def tactics(product: Callable[..., Any] | Tensor, *operands: Any, **options: Any) -> list[str]:
    """Names of the kernel configurations built for a product, on whatever GPU; the products take them as `tactic`.

    Those of `gemm` end with the one that dequantises slices of the weights and multiplies them with `torch.mm`.

    Args:
        product, operands, options: the function and its arguments, as for `explain`. CPU tensors of 8 or 16-bit types
            do.

    Returns:
        The names, in the order of the table of configurations.

    Raises:
        TypeError, ValueError: as for the product; no such product.
        UnsupportedError: the CUDA kernels do not cover this kind of product.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(48, 256, dtype=torch.float16))
        >>> w_packed = qcutlass.preprocess_weights(q.codes, bits=4)
        >>> a = torch.randn(8, 256, dtype=torch.float16)
        >>> names = qcutlass.tactics(qcutlass.gemm, a, w_packed, q.scales, q.zeros)
        >>> all(name.startswith("w4a16_f16_") for name in names)
        True
    """
    kind, call = _call(product, operands, options)
    arguments = _query(kind, call, call.check(None)).arguments
    names = [traits.name for traits in _C.tactics(arguments)]
    return [*names, _C.dense_tactic(arguments)] if kind.dequantises else names


def configurations(product: Callable[..., Any] | Tensor, *operands: Any, **options: Any) -> list[_C.TacticTraits]:
    """What `tactics` names, but for the dense one: shapes, and what a GPU has to have."""
    kind, call = _call(product, operands, options)
    return _C.tactics(_query(kind, call, call.check(None)).arguments)


def plan(product: Callable[..., Any] | Tensor, *operands: Any, **options: Any) -> _C.Plan:
    """The configuration, split and workspace that a product would use for CUDA tensors; nothing is launched.

    Args:
        product, operands, options: the function and its arguments, as for `explain`, on one GPU.

    Returns:
        What would run: `tactic` (a name of `tactics`), `split_k` (blocks that share the K extent of an output tile),
        `cluster` (whether these are a thread block cluster), `shared_channel` and `shared_token` (the first of the
        tiles whose K is shared), `workspace_bytes`, `rounds_weights` (whether weights are rounded to the type of `a`),
        `dense` (whether slices of `slice` rows of the weights are dequantised for `torch.mm`).

    Raises:
        TypeError: as for the product; no such product.
        ValueError: the tensors are not on a GPU, or as for the product.
        UnsupportedError: as for the product.

    Example:
        >>> import torch, qcutlass
        >>> if torch.cuda.is_available():
        ...     q = qcutlass.quantize(torch.randn(48, 256, dtype=torch.float16, device="cuda"))
        ...     w_packed = qcutlass.preprocess_weights(q.codes, bits=4)
        ...     a = torch.randn(8, 256, dtype=torch.float16, device="cuda")
        ...     name = qcutlass.plan(qcutlass.gemm, a, w_packed, q.scales, q.zeros).tactic
    """
    kind, call = _call(product, operands, options)
    if isinstance(call.a, Tensor) and not call.a.is_cuda:
        raise ValueError(f"a: configurations are chosen for a GPU, got a tensor on {call.a.device}")
    return _query(kind, call, call.check(None)).plan(call.a.get_device())


def weight_dtype(
    a: Tensor, w_packed: Tensor, scales: Tensor, zeros: Tensor | None = None, **options: Any
) -> torch.dtype:
    """The type that the weights of a `gemm` are rounded to before they meet the activations.

    float32 on the CPU, and for kernels that scale sums: it holds (code - zero) * scale unrounded. The type of `a` for
    other kernels. With a global scale, float32 as well, since kernels multiply sums by it and round nothing else (codes
    times scales are exact in the type of `a`); but the type of `a` for dense products, which dequantise the weights.

    Args:
        a, w_packed, scales, zeros, options: as for `gemm`.
    """
    if not a.is_cuda:
        return torch.float32
    found = plan(gemm, a, w_packed, scales, zeros, **options)
    scales_sums = options.get("global_scale") is not None and not found.dense
    return a.dtype if found.rounds_weights and not scales_sums else torch.float32


def _call(product: object, operands: tuple[Any, ...], options: dict[str, Any]) -> tuple[Kind, Call]:
    """The kind of a product, and the call that the function named by `product` makes."""
    if isinstance(product, Tensor):
        _check_is_of_gemm(product)
        product, operands = gemm, (product, *operands)
    function = FUNCTIONS.get(product) if callable(product) else None
    if function is None:
        names = ", ".join(one.name for one in FUNCTIONS.values())
        raise TypeError(f"product: expected one of {names}, or a tensor, the first operand of gemm; got {product!r}")
    call = function.call(*operands, **options)
    for name, tensor in tensors_of(call).items():
        check_strided(name, tensor)
    return function.kind, call


def _check_is_of_gemm(a: Tensor) -> None:
    """Raises TypeError, which names the functions to pass, if only other products take such activations."""
    if a.dtype in FUNCTIONS[gemm].activations:
        return
    others = [one.name for one in FUNCTIONS.values() if a.dtype in one.activations]
    if others:
        raise TypeError(
            f"product: a tensor as the first argument is the activations of qcutlass.gemm, which has no "
            f"{names_of([a.dtype])} ones; pass the function first, one of {', '.join(others)}"
        )


def _query(kind: Kind, call: Call, shape: WeightShape) -> Product:
    """The product as selection sees it: what kernels compute of it."""
    out = call.a.new_empty((kind.rows(call), epilogue.columns(call, shape.n)), dtype=call.out_dtype)
    return Product(kind, kind.planned(call), shape, out)
