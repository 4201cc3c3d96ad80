"""Measuring the configurations that may serve a product, and remembering the fastest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import nn

from qcutlass import _C
from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import as_device, check_flag, check_integer, check_iterable
from qcutlass.products.extension import device_traits
from qcutlass.products.tuned_plans import BUCKETS, TunedPlan, bucket, product_key, store
from qcutlass.schemes import Scheme
from qcutlass.tuning.layer import Layer
from qcutlass.tuning.layers import check_types, layers_from, layers_of, of_options, of_scheme
from qcutlass.tuning.timer import GraphTimer

_TACTICS: Final = 6  # measured for a product: the fastest by prediction, each with all of its splits
_MARGIN: Final = 0.01  # a plan replaces the cost model's choice if it is faster by more than noise

Timer: TypeAlias = Callable[[Layer, int, Sequence[_C.Plan]], Sequence[float | None]]
"""Microseconds of each plan for m rows of a layer; None where it cannot run."""


@dataclass(frozen=True)
class TunedProduct:
    """The result of tuning for one layer and number of rows.

    Attributes:
        layer: the weights.
        m: rows of activations.
        plan: the fastest configuration, as it is remembered.
        untuned: the cost model's choice.
        measured: number of configurations that ran.
    """

    layer: Layer
    m: int
    plan: TunedPlan
    untuned: TunedPlan
    measured: int

    @property
    def gain(self) -> float:
        """Time of the cost model's choice over that of the plan: 1 where the choice was right."""
        return self.untuned.microseconds / self.plan.microseconds


def tune(
    model_or_shapes: nn.Module | Iterable[tuple[int, int]],
    *,
    ms: Iterable[int] = BUCKETS,
    bits: int = 4,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = True,
    scheme: Scheme | None = None,
) -> list[TunedProduct]:
    """Measures the kernels that may serve a model's products on this GPU, and has these use the fastest from then on.

    Optional: without it a cost model chooses. For each layer and number of rows, the best few configurations by
    prediction run with every split in CUDA graphs, with weights that are cold in L2. The winners are kept in a file of
    the user's cache folder (`QCUTLASS_CACHE_DIR` names another) for this GPU model and these kernels, and serve later
    processes too. Every kernel keeps its error bound; the last bits of results may differ from those of another one.
    Those of `gemm_w8a8` do not, as its sums are exact, but where the activation "gelu_tanh" follows them.

    Args:
        model_or_shapes: a module: tunes its layers that quantise their activations, its `QuantExperts`, and submodules
            with `w_packed`, `scales`, `zeros` and `in_features`. Or pairs (N, K): tunes such weights of the scheme that
            the other arguments describe.
        ms: numbers of rows, up to 16384, each rounded up to one of `tuning.BUCKETS`. A bucket's plan serves all numbers
            of rows above the next smaller bucket. For experts: rows of all experts, tokens times experts a token.
        bits: 4 or 8, with shapes.
        group_size: columns that share a scale, with shapes; -1: one group a channel.
        dtype: of the activations, float16 or bfloat16. Default: the type of a module's scales; float16 with shapes, and
            if scales have another type. With a scheme: a type of activations that its products multiply; FP8 takes
            float8_e5m2, too.
        scale_dtype: of the scales, with shapes. Default: `dtype`.
        zero_dtype: of the zeros, with shapes. None: symmetric.
        device: a GPU. Default: the current one.
        progress: show a progress bar on standard error.
        scheme: with shapes: `W8A8`, `FP8`, `Blockwise` or `W4A8`, whose products multiply activations of 8 bits, in
            place of `bits`, `group_size`, `scale_dtype` and `zero_dtype`. Which activations are static or symmetric
            does not matter; plans serve outputs of 16 bits. None: weight-only.

    Returns:
        What was found, by layer and number of rows.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: a CUDA graph is being captured.
        UnsupportedError: no GPU, or no kernel for this scheme.

    Example:
        >>> import torch, qcutlass
        >>> if torch.cuda.is_available():
        ...     found = qcutlass.tune([(4096, 4096)], ms=[1, 16], progress=False)
        ...     found += qcutlass.tune([(4096, 4096)], ms=[16], scheme=qcutlass.W8A8(), progress=False)
    """
    if isinstance(model_or_shapes, nn.Module):
        if scheme is not None:
            raise ValueError(f"scheme: the layers of a module say theirs, got {scheme!r}; leave it out")
        check_types(dtype, None, None)
        layers = layers_of(model_or_shapes, dtype)
    elif scheme is not None:
        options = {"bits": bits, "group_size": group_size, "scale_dtype": scale_dtype, "zero_dtype": zero_dtype}
        _check_left_out(scheme, options)
        layers = layers_from(model_or_shapes, of_scheme(scheme, dtype))
    else:
        check_types(dtype, scale_dtype, zero_dtype)
        activations = dtype or torch.float16
        weights = of_options(bits, group_size, activations, scale_dtype or activations, zero_dtype)
        layers = layers_from(model_or_shapes, weights)
    sizes = buckets_of(ms)
    check_flag("progress", progress)
    gpu = _gpu(device)
    traits = device_traits(gpu.index)
    for layer in layers:
        contenders(layer, sizes[0], traits)  # refuses what has no kernel before anything is measured
    from rich.console import Console  # here: a sixth of what the package takes to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("tuning", total=len(layers) * len(sizes))
        for product in tune_layers(layers, sizes, traits, gpu.index, GraphTimer(gpu)):
            found.append(product)
            bar.update(task, advance=1, description=f"{product.layer}, M = {product.m}")
    return found


def tune_layers(
    layers: Sequence[Layer], ms: Sequence[int], traits: _C.DeviceTraits, device: int, timer: Timer
) -> Iterator[TunedProduct]:
    """Measures every layer at every bucket, and remembers the plans of each layer as soon as it is done."""
    for layer in layers:
        plans = {}
        for m in ms:
            product = best_plan(layer, m, traits, timer)
            plans[product_key(layer.arguments(m), m)] = product.plan
            yield product
        store(plans, traits, device)


def best_plan(layer: Layer, m: int, traits: _C.DeviceTraits, timer: Timer) -> TunedProduct:
    """Measures the contenders for m rows of a layer.

    Raises:
        UnsupportedError: none of them runs.
    """
    plans = contenders(layer, m, traits)
    measured = [
        TunedPlan(plan.tactic, plan.split_k, round(time, 3))
        for plan, time in zip(plans, timer(layer, m, plans), strict=True)
        if time is not None
    ]
    if not measured:
        raise UnsupportedError(f"{layer}: none of {len(plans)} configurations runs for M = {m} on this GPU")
    untuned, fastest = measured[0], min(measured, key=lambda plan: plan.microseconds)
    if fastest.microseconds > (1 - _MARGIN) * untuned.microseconds:
        fastest = untuned
    return TunedProduct(layer, m, fastest, untuned, len(measured))


def contenders(layer: Layer, m: int, traits: _C.DeviceTraits) -> list[_C.Plan]:
    """The plans that are worth measuring, the cost model's choice first."""
    found = [candidate.plan for candidate in _C.candidates(layer.arguments(m), traits, dense=True)]
    best = list(dict.fromkeys(plan.tactic for plan in found))[:_TACTICS]
    return [plan for plan in found if plan.tactic in best or plan.dense]


def buckets_of(ms: Iterable[int]) -> list[int]:
    """The buckets of some numbers of rows, each once, in order.

    Raises:
        TypeError, ValueError: a number is no integer, less than 1 or beyond the largest bucket.
    """
    check_iterable("ms", ms, "numbers of rows")
    found = set()
    for m in ms:
        check_integer("ms", m, minimum=1)
        size = bucket(m)
        if size is None:
            raise ValueError(f"ms: plans are tuned for up to {BUCKETS[-1]} rows, got {m}")
        found.add(size)
    if not found:
        raise ValueError("ms: expected at least one number of rows, got none")
    return sorted(found)


def _check_left_out(scheme: Scheme, options: Mapping[str, object]) -> None:
    """Raises ValueError if an option of `tune` that a scheme stands for is not its default."""
    parameters = inspect.signature(tune).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(
                f"{name}: expected none beside a scheme, got {value}; pass it to {type(scheme).__name__}, "
                "if that takes it, or leave it out"
            )


def _gpu(device: torch.device | str | int | None) -> torch.device:
    """The GPU to measure on.

    Raises:
        UnsupportedError: torch sees no GPU.
        TypeError, ValueError: `device` is no GPU.
        RuntimeError: a graph is being captured.
    """
    chosen = as_device("device", "cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"device: plans are tuned on a GPU, got {chosen}")
    if not torch.cuda.is_available():
        raise UnsupportedError("tune: torch sees no GPU to measure on")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tune: a CUDA graph is being captured, and measuring would become part of it; "
            "call qcutlass.tune before torch.cuda.graph"
        )
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
