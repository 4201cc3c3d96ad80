"""Modules of packed weights: the check of their buffers, their state, moving them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from qcutlass.products.checks import E8M0, FLOATING, are_finite, check_strided, check_tensor
from qcutlass.products.layer_calls import CALLS
from qcutlass.products.packing import fit_cuda, one_level
from qcutlass.version import LAYOUT_VERSION

Parts = Mapping[str, Tensor | None]

_E4M3: Final = torch.float8_e4m3fn
_NUMBERS: Final = (*FLOATING, _E4M3)
_FLOATS_8: Final = (_E4M3, *E8M0)
_AS_BYTES: Final = "_as_bytes"  # in pickled states: the types of such buffers
_SUPERS: Final = ("super_scales", "super_minimums")
_ASKING: Final = ("cuda",)
"""Devices whose kernels do not take any scales of two levels."""


def _for_device(parts: Parts, device: torch.device, group_size: int) -> Parts:
    """The buffers with scales of one level where a device has them, or gets them, that does not take their two."""
    supers, scales = parts.get("super_scales"), parts.get("scales")
    if supers is None or scales is None or not {device.type, supers.device.type} & set(_ASKING):
        return parts
    return parts if fit_cuda(scales, supers, group_size) else one_level(parts)


class PackedModule(nn.Module, ABC):
    """Weights `[N, K]`, or one such matrix for each expert, whose tensors are buffers.

    Casts (`.half()`) convert none of them, `.to(device)` moves them; a state of another layout, shape or kind is
    refused before anything is changed.

    Attributes:
        in_features, out_features: K, N.
        bits: of a weight.
        group_size: columns that share a scale; K: one group.
        weight_dtype: of codes that are floats, as for `gemm`; None: integers.
    """

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Buffers that may be None."""
    _LAYOUT: ClassVar[tuple[str, ...]] = ("version", "bits", "N", "K", "group_size")
    """The numbers of `layout`, which each state holds."""

    in_features: int
    out_features: int
    bits: int
    group_size: int
    weight_dtype: str | None = None
    layout: Tensor
    _names: tuple[str, ...] = ()

    def _register(self, parts: Parts) -> None:
        """Checks the buffers, and takes them with their layout."""
        for name, part in parts.items():
            if isinstance(part, Tensor):
                check_strided(name, part)
        device = next(part.device for part in parts.values() if part is not None)
        parts = _for_device(parts, device, self.group_size)
        self._check(parts)
        for name, part in parts.items():
            self.register_buffer(name, None if part is None else part.detach().contiguous())
        self.register_buffer("layout", torch.tensor(self._layout, device=device))
        self._names = tuple(self._buffers)
        self._put_absent_last()

    def _put_absent_last(self) -> None:
        """Orders buffers, of which `torch.export` of the module itself counts those that are None as inputs, too."""
        places = {name: place for place, name in enumerate(self._names)}
        names = sorted(self._buffers, key=lambda name: (self._buffers[name] is None, places.get(name, len(places))))
        if names != list(self._buffers):
            ordered = {name: self._buffers[name] for name in names}
            self._buffers.clear()
            self._buffers.update(ordered)

    def check(self) -> None:
        """Raises TypeError or ValueError unless the buffers are those of such a layer, in this layout, and finite.

        For code that sets buffers itself or does not trust them; `load_state_dict` checks all but NaN and infinity.

        Example:
            >>> import torch, qcutlass
            >>> qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 16)).check()
        """
        self._check_layout(self.layout)
        self._check({name: part for name, part in self._buffers.items() if name != "layout"})
        for name, part in self._buffers.items():
            if part is not None and part.dtype in _NUMBERS and not part.is_meta and not are_finite(part):
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")

    def begin_loading(self) -> None:
        """Makes the buffers those of the state, for loaders that set one after the other; `end_loading` follows."""

    def end_loading(self) -> None:
        """Makes the buffers those of the module again."""
        self._settle()

    def _settle(self) -> None:
        """Has scales of one level where the device does not take their two."""
        self._buffers.update(_for_device(self._buffers, self.layout.device, self.group_size))
        self._put_absent_last()

    @abstractmethod
    def _check(self, parts: Parts) -> None:
        """Raises TypeError or ValueError unless these are the buffers of such a module."""

    def _missing(self, parts: Parts) -> dict[str, Tensor]:
        """Optional tensors that checked buffers lack and the layer needs, computed from the others."""
        return {}

    @property
    def _layout(self) -> list[int]:
        # Those of floating codes are negative: nobody shall take them for integers.
        bits = self.bits if self.weight_dtype is None else -self.bits
        return [LAYOUT_VERSION, bits, self.out_features, self.in_features, self.group_size]

    def _check_layout(self, layout: Tensor) -> None:
        """Raises TypeError or ValueError unless `layout` describes this layer."""
        check_tensor("layout", layout, (torch.int64,))
        if layout.is_meta:
            return
        found = layout.tolist()
        if not isinstance(found, list) or len(found) != len(self._layout):
            raise ValueError(f"layout: expected [{', '.join(self._LAYOUT)}], got {found}")
        if found[0] != LAYOUT_VERSION:
            raise ValueError(
                f"the weights were packed in layout version {found[0]}, this build reads version {LAYOUT_VERSION}: "
                "quantise or convert the model again"
            )
        if found != self._layout:
            (_, *theirs), (_, *ours) = found, self._layout
            named = zip(self._LAYOUT[1:], theirs, ours, strict=True)
            differing = [f"{name} = {a}, not {b}" for name, a, b in named if a != b]
            raise ValueError(f"the weights to load have {'; '.join(differing)}: build the layer with the same scheme")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Moves the buffers; leaves their types alone."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        parts: Parts = {name: state_dict.get(prefix + name) for name in self._buffers}
        if any(part is not None for part in parts.values()):
            layout = parts["layout"]
            parts = {name: part for name, part in parts.items() if name != "layout"}
            if (settled := _for_device(parts, self.layout.device, self.group_size)) is not parts:
                parts = settled
                state_dict.update({prefix + name: part for name, part in parts.items() if part is not None})
                for name in _SUPERS:
                    state_dict.pop(prefix + name, None)
            try:
                if layout is None:
                    raise ValueError("no `layout` beside the buffers: not the state of packed weights")
                self._check_layout(layout)
                self._check(parts)
                computed = self._missing(parts)
                parts = {**parts, **computed}
                state_dict.update({prefix + name: part for name, part in computed.items()})
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
                return
            device = self.layout.device
            for name, part in parts.items():
                own = self._buffers[name]
                if part is None or own is None or own.dtype != part.dtype or own.shape != part.shape:
                    self._buffers[name] = None if part is None else torch.empty_like(part, device=device)
            self._put_absent_last()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        """With floats of 8 bits as bytes: torch reads no pickles of such tensors."""
        parts = {name: part for name, part in self._buffers.items() if part is not None and part.dtype in _FLOATS_8}
        attributes = {name: value for name, value in self.__dict__.items() if name != CALLS}
        if not parts:
            return attributes
        codes = {name: part.view(torch.uint8) for name, part in parts.items()}
        kinds = {name: part.dtype for name, part in parts.items()}
        return attributes | {"_buffers": self._buffers | codes, _AS_BYTES: kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds: dict[str, torch.dtype] = state.get(_AS_BYTES, {})
        super().__setstate__({name: value for name, value in state.items() if name != _AS_BYTES})  # type: ignore[no-untyped-call]
        for name, dtype in kinds.items():
            part = self._buffers[name]
            assert part is not None
            self._buffers[name] = part.view(dtype)
        self._check_layout(self.layout)
        self._settle()
