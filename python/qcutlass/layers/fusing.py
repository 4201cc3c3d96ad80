"""Linear layers that read the same input, as one product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

from qcutlass.algorithms.blocks import weight_dequant
from qcutlass.layers.base import QuantLinear
from qcutlass.layers.blockwise import BlockwiseLinear
from qcutlass.layers.changes import Seen, has_hooks
from qcutlass.layers.eight_bit import Fp8Linear, Int8Linear
from qcutlass.layers.int4 import Int4Linear
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products.checks import ceil_div, short
from qcutlass.products.epilogue import GATE_STEP
from qcutlass.products.quantizer_operators import QuantizedRows
from qcutlass.quantized import interleave_gate_up

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcutlass.layers.stored_form import StoredForm

GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, in Llama-like models, of the layers of attention, and of a gated MLP, that read the same input."""

_Pending = tuple[Seen, tuple[Tensor, ...], int]  # outputs of the members; a bit for each that was not handed out


@dataclass(frozen=True)
class Fusion:
    """The result of `fuse_projections`.

    Attributes:
        fused: names of the layers of each group that is one product now.
        skipped: why each of the other groups is not, by the names of its layers.
    """

    fused: tuple[tuple[str, ...], ...]
    skipped: dict[tuple[str, ...], str]


def fuse_projections(model: nn.Module, groups: Iterable[Sequence[str]] = GROUPS) -> Fusion:
    """Lets layers that read the same input multiply it once, by the weights of all of them.

    One product of many channels takes less time than several of few, above all for few tokens. Layers that quantise
    their input quantise it once. The first layer of a group that is called computes the outputs of all; the others,
    called with the same tensor, return their part of it. A layer that gets another tensor multiplies that one. So
    results never depend on the order of calls, but calls with different inputs gain nothing.

    Input and weights that are changed in place between the calls are multiplied anew if torch counts such changes: not
    those through `.data`, numpy or a raw pointer, and none of weights that are tensors of inference mode. Inputs that
    are such tensors are compared with a copy on the CPU. On a GPU, and in compiled code, which counts nothing, such an
    input may be changed between the calls by hooks of the layers alone, which then multiply for themselves.

    Modules keep their names, `state_dict` has the keys and values it had (as copies), and states of the model without
    fusion are loaded. `.to(device)`, `deepcopy`, pickle, `torch.compile(fullgraph=True)`, CUDA graphs and
    `qcutlass.tune` work. Outputs are views whose rows are as far apart as those of the whole product, or copies where
    `fuse_block` has put the channels of two layers in turns.

    Args:
        model: with layers from `replace_linear`, `from_pretrained` or by hand; changed in place.
        groups: names of sibling modules, in the order of the product.

    Returns:
        What was fused, and why others were not: layers that are not quantised, with hooks or on the meta device, that
        differ in kind, K, scheme, types, act-order, scales of activations or device, or whose channels (but the last
        layer's) are no multiple of 16, or of the size of blocks, so that their weights cannot be joined as they are.

    Raises:
        TypeError: `model` is no module, or `groups` not names.
        ValueError: a group has fewer than two names, or no module has layers of such names.

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(64, 32), "up_proj": torch.nn.Linear(64, 32)})
        >>> _ = qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
        >>> qcutlass.fuse_projections(model).fused
        (('gate_proj', 'up_proj'),)
        >>> x = torch.randn(3, 64)
        >>> (torch.nn.functional.silu(model["gate_proj"](x)) * model["up_proj"](x)).shape  # one product
        torch.Size([3, 32])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    checked = [_checked(group) for group in groups]
    fused: list[tuple[str, ...]] = []
    skipped: dict[tuple[str, ...], str] = {}
    for prefix, owner in list(model.named_modules()):
        for group in checked:
            modules = dict(owner.named_children())
            if not all(name in modules for name in group):
                continue
            members = [modules[name] for name in group]
            names = tuple(f"{prefix}.{name}" if prefix else name for name in group)
            obstacle = _obstacle(group, members)
            if obstacle is not None:
                skipped[names] = obstacle
                continue
            product = _PRODUCTS[type(members[0])].of([member for member in members if isinstance(member, QuantLinear)])
            for index, (name, member) in enumerate(zip(group, members, strict=True)):
                setattr(owner, name, FusedProjection(product, index).train(member.training))
            fused.append(names)
    if not fused and not skipped:
        raise ValueError(f"groups: no module has layers named {' or '.join(', '.join(group) for group in checked)}")
    return Fusion(tuple(fused), skipped)


class FusedProjection(nn.Module):
    """A layer whose output is a part of a product that others share; `fuse_projections` makes them.

    Attributes:
        in_features, out_features: K, and its own N.
    """

    def __init__(self, product: FusedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self._index = index
        self.in_features, self.out_features = product.in_features, product.sizes[index]

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        product: Any = self._modules["product"]  # attributes of modules that are modules take long to look up
        out: Tensor = product.part(input, self._index, has_hooks(self))
        return out

    def separate(self) -> QuantLinear:
        """The layer as it was, with a copy of its weights.

        Example:
            >>> import torch, qcutlass
            >>> model = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(64, 32), "up_proj": torch.nn.Linear(64, 32)})
            >>> _ = qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
            >>> _ = qcutlass.fuse_projections(model)
            >>> model["up_proj"].separate()
            WeightOnlyLinear(in_features=64, out_features=32, bits=4, group_size=32, zeros=uint8, bias=True)
        """
        product, parts = self.product, self.product.views(self._index)
        copies = {name: None if part is None else part.clone() for name, part in parts.items()}
        layer = product.like(self.out_features, copies, product.kind)
        _set_form(layer, product.stored_forms[self._index])
        return layer.train(self.training)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.separate()._save_to_state_dict(destination, prefix, keep_vars)

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
        layer, errors = self.separate(), len(error_msgs)
        layer._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if len(error_msgs) == errors:
            try:
                self.product.write(self._index, layer)
            except ValueError as error:
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")

    def extra_repr(self) -> str:
        begin = sum(self.product.sizes[: self._index])
        channels = f"{begin} to {begin + self.out_features}"
        return f"in_features={self.in_features}, out_features={self.out_features}, channels {channels} of the product"


class FusedProduct(QuantLinear):
    """The product of a group. It is a child of each of the group's modules, which save and load its parts.

    Attributes:
        kind: of the members.
        sizes: channels of each member.
        interleaved: the channels of two members lie in turns, as `interleave` puts them, or one's behind the other's.
    """

    is_stored: ClassVar[bool] = False
    kind: ClassVar[type[QuantLinear]]
    sizes: list[int]
    stored_forms: list[StoredForm | None]
    interleaved: bool = False
    _pending: _Pending | None = None
    _ready: tuple[Seen, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, members: Sequence[QuantLinear]) -> Self:
        """The product of some layers of its kind, which can be joined."""
        first = members[0]
        names = [name for name in first._buffers if name != "layout"]
        parts = {name: _joined(first, name, [member._buffers[name] for member in members]) for name in names}
        product = first.like(sum(sizes := [member.out_features for member in members]), parts, cls)
        assert isinstance(product, cls)
        product.sizes, product.stored_forms = sizes, [getattr(member, "stored_form", None) for member in members]
        return product

    def part(self, a: Tensor, index: int, is_hooked: bool) -> Tensor:
        """The output of one member: of the product that another one asked for, if it was with the same input.

        `is_hooked`: something may change the input before the member's call or behind it.
        """
        pending, weights = self._pending, [part for part in self._buffers.values() if part is not None]
        if pending is not None and (not pending[0].is_still(a, weights) or (is_hooked and not pending[0].notices)):
            pending = None
        if pending is None or not pending[2] >> index & 1:  # or handed out already
            outs = self._members(self(a))
            pending = Seen(a, weights), outs, (1 << len(outs)) - 1
        seen, outs, left = pending
        left &= ~(1 << index)
        is_kept = left and (seen.notices or not is_hooked)
        self.__dict__["_pending"] = (seen, outs, left) if is_kept else None  # a module's own way takes a microsecond
        return outs[index]

    def interleave(self) -> bool:
        """Puts the channels of a gate and of what it multiplies in turns, for `gated`; False: they are not such two."""
        if len(self.sizes) != 2 or self.sizes[0] != self.sizes[1] or self.sizes[0] % GATE_STEP or self.activation:
            return False
        if not self.HAS_GATES:
            return False
        if not self.interleaved:
            for name, part in self._buffers.items():
                if part is not None and name not in ("layout", *self.SHARED):
                    dim, _ = self.channels_of(name)
                    halves = part.chunk(2, dim)
                    with torch.inference_mode(False):
                        self._buffers[name] = (
                            torch.stack(halves) if self._is_stacked(name) else interleave_gate_up(*halves, dim=dim)
                        )
            self.interleaved, self._pending = True, None
        return True

    def gated(self, a: Tensor, gate: str) -> Tensor:
        """The activation of one member's output times the other's, by one product: `gate` as `gemm` takes it."""
        return self.multiply(a, gate)

    def hand_codes(self, a: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Has the next product with `a` multiply these codes of it, made as `input_codes` says.

        `a` is looked at as in `part`: nothing that changes unseen may come between.
        """
        vars(self)["_ready"] = Seen(a, self._of_input()), codes, scale

    def _ready_codes(self, input: Tensor) -> QuantizedRows | None:
        ready = self._ready
        if ready is None:
            return None
        vars(self)["_ready"] = None
        seen, codes, scale = ready
        return (codes, scale, None) if seen.is_still(input, self._of_input()) else None

    def _of_input(self) -> list[Tensor]:
        """What codes of the input depend on beside the input."""
        parts = [self._buffers.get(name) for name in self.SHARED]
        return [part for part in parts if part is not None]

    def _members(self, out: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the members, from that of the product."""
        if not self.interleaved:
            return torch.split_with_sizes(out, self.sizes, dim=-1)  # what torch.split calls, behind more of Python
        return tuple(part.flatten(-2) for part in _turns(out).unbind(-2))

    def views(self, index: int) -> dict[str, Tensor | None]:
        """The buffers of one member; of interleaved ones some are copies."""
        own: dict[str, Tensor | None] = {}
        for name, part in self._buffers.items():
            if name != "layout":
                view = None if part is None else self._view(name, part, index)
                is_flat = view is None or part is None or view.dim() <= part.dim()
                own[name] = view if is_flat else view.flatten(-2)  # type: ignore[union-attr]
        return own

    def _view(self, name: str, part: Tensor, index: int) -> Tensor:
        """The part of a buffer that is one member's: in turns of channels where these are interleaved."""
        if name in self.SHARED:
            return part
        if self.interleaved and self._is_stacked(name):
            return part[index]
        if self.interleaved:
            return part[index::2] if name == "w_packed" else _turns(part).select(-2, index)
        dim, step = self.channels_of(name)
        begin = sum(self.sizes[:index]) // step
        end = begin + ceil_div(self.sizes[index], step)
        return part[begin:end] if dim == 0 else part[..., begin:end]

    def _is_stacked(self, name: str) -> bool:
        """Whether more channels than a turn has share an entry of a buffer, so that those of two lie apart."""
        return self.channels_of(name)[1] > GATE_STEP

    def write(self, index: int, layer: QuantLinear) -> None:
        """Takes a member's buffers over; ValueError if they do not suit the product."""
        if self.w_packed.is_meta:
            raise ValueError("fused layers on the meta device take no state: load it, then call fuse_projections")
        views = self.views(index)
        for name, view in views.items():
            found = layer._buffers[name]
            if _kind(found) != _kind(view):
                raise ValueError(
                    f"{name}: the fused layers have {_kind(view)}, got {_kind(found)}; load it, then fuse_projections"
                )
            if name in self.SHARED and index > 0 and view is not None and not torch.equal(view, found.to(view.device)):  # type: ignore[union-attr]
                raise ValueError(f"{name}: expected that of the layers it is fused with, got another")
        self._pending = None
        self.stored_forms[index] = getattr(layer, "stored_form", None)
        with torch.no_grad():
            for name, own in self._buffers.items():
                found = layer._buffers[name]
                if own is not None and found is not None and name != "layout":
                    view = self._view(name, own, index)
                    view.copy_(found.reshape(view.shape))

    def _save_to_state_dict(self, *arguments: Any) -> None:
        """The members do."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """The members do."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pending": None, "_ready": None}


class _FusedWeightOnly(FusedProduct, WeightOnlyLinear):
    kind: ClassVar = WeightOnlyLinear


class _FusedInt4(FusedProduct, Int4Linear):
    kind: ClassVar = Int4Linear


class _FusedInt8(FusedProduct, Int8Linear):
    kind: ClassVar = Int8Linear


class _FusedFp8(FusedProduct, Fp8Linear):
    kind: ClassVar = Fp8Linear


class _FusedBlockwise(FusedProduct, BlockwiseLinear):
    kind: ClassVar = BlockwiseLinear

    def weights(self) -> Tensor:
        """Of two whose channels lie in turns, and whose blocks do not, those of each are dequantised by themselves."""
        if not self.interleaved:
            return super().weights()
        codes = self._codes().view(-1, 2, GATE_STEP, self.in_features).unbind(1)
        return interleave_gate_up(
            *(
                weight_dequant(own.flatten(0, 1), scales, self.block_size, torch.float32)
                for own, scales in zip(codes, self.w_scale, strict=True)
            )
        )


_PRODUCTS: Final[dict[type[nn.Module], type[FusedProduct]]] = {
    product.kind: product for product in (_FusedWeightOnly, _FusedInt4, _FusedInt8, _FusedFp8, _FusedBlockwise)
}
"""The product of layers of each kind."""


def shared_product(*layers: nn.Module) -> Any:
    """The product that computes the outputs of all these layers and no others, in this order; None: there is none.

    Its `sizes` are their numbers of channels. A layer with hooks is not left out.
    """
    first = layers[0]
    if type(first) is not FusedProjection:
        return None
    product = first.product
    if len(product.sizes) != len(layers):
        return None
    for index, layer in enumerate(layers):
        if type(layer) is not FusedProjection or layer.product is not product or layer._index != index:
            return None
        if has_hooks(layer):
            return None
    return product


def _checked(group: object) -> tuple[str, ...]:
    if isinstance(group, str) or not isinstance(group, Sequence) or not all(isinstance(name, str) for name in group):
        raise TypeError(f"groups: expected lists of names, got {group!r}")
    if len(set(group)) != len(group) or len(group) < 2:
        raise ValueError(f"groups: expected two different names or more in each, got {list(group)}")
    return tuple(group)


def _obstacle(names: Sequence[str], members: Sequence[nn.Module]) -> str | None:
    """The reason why these modules cannot be one product; None if they can."""
    layers: list[QuantLinear] = []
    for name, member in zip(names, members, strict=True):
        if type(member) not in _PRODUCTS or not isinstance(member, QuantLinear):
            return f"{name}: expected a quantised linear layer, got {type(member).__name__}"
        if member._forward_hooks or member._forward_pre_hooks or "forward" in vars(member):
            return f"{name} has forward hooks"
        if member.layout.is_meta:
            return f"{name} is on the meta device; load its state first"
        layers.append(member)
    first = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return f"kinds differ: {', '.join(type(layer).__name__ for layer in layers)}"
    for attribute in ("in_features", "bits", "weight_dtype", "group_size", "activation", *first.SETTINGS):
        found = [getattr(layer, attribute) for layer in layers]
        if any(value != found[0] for value in found):
            return f"{attribute} differs: {', '.join(map(str, found))}"
    for buffer in first._buffers:
        parts = [layer._buffers[buffer] for layer in layers]
        kinds = [_kind(part, buffer in first.SHARED) for part in parts]
        if any(kind != kinds[0] for kind in kinds):
            return f"{buffer} differs: {', '.join(kinds)}"
        if buffer in first.SHARED and any(not torch.equal(part, parts[0]) for part in parts if part is not None):  # type: ignore[arg-type]
            return f"{buffer} differs in its values"
        if buffer in ("layout", *first.SHARED):
            continue
        dim, step = first.channels_of(buffer)
        for name, layer, part in zip(names, layers, parts, strict=True):
            if layer is not layers[-1] and layer.out_features % step:
                return f"{name} has {layer.out_features} channels, no multiple of {step}"
            if part is not None and (part.ndim == 0 or part.shape[dim] != ceil_div(layer.out_features, step)):
                return f"{name} has one {buffer} for all channels"
    return None


def _kind(part: Tensor | None, with_shape: bool = True) -> str:
    """A buffer's type, extent and device, in which two buffers must agree."""
    if part is None:
        return "none"
    extent = list(part.shape) if with_shape else f"{part.ndim} dimensions"
    return f"{short(part.dtype)} {extent} on {part.device}"


def _joined(first: QuantLinear, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    with torch.inference_mode(False):  # whose tensors' changes nobody counts
        return tensors[0].clone() if name in first.SHARED else torch.cat(tensors, dim=first.channels_of(name)[0])


def _set_form(layer: QuantLinear, form: StoredForm | None) -> None:
    """Has the state hold the buffers of a layer as before."""
    if isinstance(layer, WeightOnlyLinear) and form is not None:
        layer.stored_form = form


def _turns(channels: Tensor) -> Tensor:
    """`[..., N]` of two interleaved layers as `[..., N / 32, 2, 16]`."""
    return torch.unflatten(channels, -1, (-1, 2, GATE_STEP))
