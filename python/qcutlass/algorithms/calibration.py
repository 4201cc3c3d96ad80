"""Extremes of the activations of a model's linear layers, recorded while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qcutlass.algorithms.conv1d import is_conv1d
from qcutlass.products.checks import FLOATING, check_channels, check_strided, check_tensor, shape_of


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """The extremes of a linear layer's input.

    Attributes:
        minimum, maximum: float32 `[K]`: of each channel, over all tokens seen.
        smooth: float32 `[K]`: factors by which the quantised layer itself divides its input, where nothing that comes
            before the layer could take them (`smooth_model`); None: no such division.
    """

    minimum: Tensor
    maximum: Tensor
    smooth: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("minimum", self.minimum, (torch.float32,))
        check_tensor("maximum", self.maximum, (torch.float32,))
        if self.minimum.dim() != 1 or self.maximum.shape != self.minimum.shape:
            raise ValueError(
                f"minimum, maximum: expected shape [K] of both, got {shape_of(self.minimum)} and "
                f"{shape_of(self.maximum)}"
            )
        if self.smooth is not None:  # a layer checks how many they are
            check_tensor("smooth", self.smooth, (torch.float32,))

    @classmethod
    def of(cls, a: Tensor) -> ActivationStatistics:
        """Of activations `[..., K]`, at least one row; TypeError or ValueError for others."""
        check_tensor("a", a, (*FLOATING, torch.float64))
        check_strided("a", a)
        if a.dim() == 0 or a.numel() == 0:
            raise ValueError(f"a: expected shape [..., K], of at least one row and column, got {shape_of(a)}")
        rows = a.detach().reshape(-1, a.shape[-1])
        return cls(rows.amin(dim=0).float(), rows.amax(dim=0).float())

    @property
    def absmax(self) -> Tensor:
        """float32 `[K]`: largest |activation| of each channel."""
        return self.maximum.maximum(-self.minimum)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Scalars: smallest and largest value that the layer quantises, zero included; ValueError if not finite."""
        divisor = 1 if self.smooth is None else self.smooth
        low, high = (self.minimum / divisor).amin().clamp(max=0), (self.maximum / divisor).amax().clamp(min=0)
        if not bool((high - low).isfinite()):
            raise ValueError("statistics: the recorded activations hold NaN or infinity, or span more than float32")
        return low, high

    def merged(self, other: ActivationStatistics) -> ActivationStatistics:
        """Of the inputs of both, which are of as many channels."""
        if not isinstance(other, ActivationStatistics):
            raise TypeError(f"other: expected ActivationStatistics, got {type(other).__name__}")
        if other.minimum.shape != self.minimum.shape:
            raise ValueError(f"other: expected K = {len(self.minimum)} channels, got {shape_of(other.minimum)}")
        return replace(self, minimum=self.minimum.minimum(other.minimum), maximum=self.maximum.maximum(other.maximum))

    def divided(self, factors: Tensor) -> ActivationStatistics:
        """Of the same inputs once something before the layer divides them by `factors`, float32 `[K]`."""
        check_channels("factors", factors, self.minimum.shape[0])
        return replace(self, minimum=self.minimum / factors, maximum=self.maximum / factors)


@contextmanager
def calibrate(
    model: nn.Module, types: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> Iterator[dict[str, ActivationStatistics]]:
    """Records the extremes of each channel of what the linear layers of a model get, while the block runs.

    Run the model inside the block, as often as wanted, on inputs that are typical of its use: a few hundred tokens do.
    The hooks go when the block is left, by an exception too.

    Args:
        model: any module, not compiled; its layers may be shared.
        types: kinds of layers to watch; the first argument of their `forward` is a floating `[..., K]`. With
            `torch.nn.Linear` transformers' `Conv1D` is meant, too.

    Yields:
        Statistics in fp32 by the layer's name in `model.named_modules()`, on the device of its input, as they grow. A
        layer that was not called, or on no tokens only, is not in it; one with several names is under each.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no such layer.

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> with torch.no_grad(), qcutlass.calibrate(model) as statistics:
        ...     for _ in range(4):
        ...         _ = model(torch.randn(32, 8))
        >>> [(name, tuple(record.absmax.shape)) for name, record in statistics.items()]
        [('0', (8,)), ('2', (16,))]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(types, tuple) or not all(isinstance(kind, type) for kind in types):
        raise TypeError(f"types: expected a tuple of classes of modules, got {types!r}")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, types) or (nn.Linear in types and is_conv1d(module)):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(f"model: it has no layer of type {', '.join(kind.__name__ for kind in types)} to record")

    statistics: dict[str, ActivationStatistics] = {}
    with ExitStack() as hooks:
        for module, aliases in names.items():
            hooks.enter_context(module.register_forward_pre_hook(_recorder(aliases, statistics), with_kwargs=True))
        yield statistics


def _recorder(names: list[str], statistics: dict[str, ActivationStatistics]) -> Callable[..., None]:
    """A forward pre-hook for the layer with these names."""

    def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        a: Tensor = arguments[0] if arguments else next(iter(keywords.values()))
        if a.numel() == 0:
            return
        with torch.no_grad():
            seen = ActivationStatistics.of(a)
            before = statistics.get(names[0])
            seen = seen if before is None else before.merged(seen)
        statistics.update(dict.fromkeys(names, seen))

    return record
