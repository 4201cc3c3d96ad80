"""Models whose Linear layers are replaced: which ones, which are refused, and that a failure changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from tests.python.modules import random_linear
from torch import Tensor, nn

import qcutlass
from qcutlass import QuantLinear, WeightOnly, testing


class Block(nn.Module):
    """Linears in the places where models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q_proj": nn.Linear(32, 32), "k_proj": nn.Linear(32, 32)})
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.special = torch.nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)
        self.lm_head = nn.Linear(32, 8)
        self.tied = self.mlp[0]

    def forward(self, a: Tensor) -> Tensor:
        hidden = self.attention["q_proj"](a) + self.attention["k_proj"](a) + self.special(a)
        out: Tensor = self.lm_head(self.mlp(hidden) + self.mlp[2](self.tied(hidden)))
        return out


@pytest.mark.parametrize(
    ("skip", "replaced"),
    [
        (None, ["attention.q_proj", "attention.k_proj", "mlp.0", "mlp.2", "tied"]),
        ([], ["attention.q_proj", "attention.k_proj", "mlp.0", "mlp.2", "lm_head", "tied"]),
        (["lm_head", "attention"], ["mlp.0", "mlp.2", "tied"]),
        (["q_proj", "mlp.2"], ["attention.k_proj", "mlp.0", "lm_head", "tied"]),
        (["*_proj", "tied"], ["mlp.2", "lm_head"]),
        (["mlp.*"], ["attention.q_proj", "attention.k_proj", "lm_head"]),
    ],
)
def test_linears_are_replaced_but_those_to_skip(skip: list[str] | None, replaced: list[str]) -> None:
    model = Block()
    before = dict(model.named_modules(remove_duplicate=False))
    assert qcutlass.replace_linear(model, WeightOnly(bits=8, group_size=32), skip) == replaced
    for name, module in model.named_modules(remove_duplicate=False):
        assert isinstance(module, QuantLinear) == (name in replaced), name
        assert name in replaced or module is before[name], name
    assert model.tied is model.mlp[0]
    with torch.no_grad():
        assert model(torch.randn(3, 32)).shape == (3, 8)


def test_a_failure_replaces_nothing() -> None:
    model = Block()
    with torch.no_grad():
        model.mlp[2].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"mlp\.2: linear\.weight: expected finite values"):
        qcutlass.replace_linear(model, WeightOnly())
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        ("model", {}, TypeError, "model: expected a torch.nn.Module, got str"),
        (nn.Linear(8, 8), {}, ValueError, "model: is itself a Linear; use qcutlass.QuantLinear.from_linear"),
        (nn.Sequential(nn.ReLU()), {}, ValueError, "model: it has no torch.nn.Linear to replace"),
        (nn.Sequential(nn.Linear(8, 8)), {"scheme": 4}, TypeError, "scheme: expected qcutlass.WeightOnly"),
        (nn.Sequential(nn.Linear(8, 8)), {"skip": "0"}, TypeError, "skip: expected a list of names"),
        (nn.Sequential(nn.Linear(8, 8)), {"skip": [0]}, TypeError, "skip: expected a list of names, got one with 0"),
        (nn.Sequential(nn.Linear(8, 8)), {"skip": 0}, TypeError, "skip: expected a list of names, got int"),
        (nn.Sequential(nn.Linear(8, 8)), {"statistics": [1]}, TypeError, "statistics: expected a mapping by names"),
        (nn.Sequential(nn.Linear(8, 8)), {"statistics": {"0": 1}}, TypeError, "0: statistics: expected ActivationStat"),
        (nn.Sequential(nn.Linear(8, 8)), {"skip": ["lm_head"]}, ValueError, "skip: 'lm_head' matches no module"),
        (nn.Sequential(nn.Linear(8, 8)), {"skip": ["0"]}, ValueError, "no torch.nn.Linear to replace"),
    ],
)
def test_replace_linear_says_what_is_wrong(
    model: nn.Module, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        qcutlass.replace_linear(model, **({"scheme": WeightOnly()} | arguments))


def weight_norm(linear: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the function is deprecated, but models have it
        torch.nn.utils.weight_norm(linear)


HOOKED: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": weight_norm,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "pruning": lambda linear: torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.5),
    "hook": lambda linear: linear.register_forward_hook(lambda module, inputs, out: 2 * out),
    "pre_hook": lambda linear: linear.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "keyword_hook": lambda linear: linear.register_forward_pre_hook(lambda *call: None, with_kwargs=True),
}


@pytest.mark.parametrize("kind", HOOKED)
def test_linears_with_hooks_are_refused_before_any_is_replaced(kind: str) -> None:
    model = Block()
    HOOKED[kind](model.mlp[2])
    with pytest.raises(ValueError, match=r"mlp\.2: has forward hooks, .*remove_weight_norm.* or list it in skip$"):
        qcutlass.replace_linear(model, WeightOnly())
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    with pytest.raises(ValueError, match=r"linear: has forward hooks, .*prune\.remove"):
        QuantLinear.from_linear(model.mlp[2])
    replaced = qcutlass.replace_linear(model, WeightOnly(), skip=["mlp.2"])
    assert "mlp.0" in replaced
    assert "mlp.2" not in replaced


def test_linears_whose_forward_was_replaced_are_refused_before_any_is_replaced() -> None:
    """The quantised layer would pass it over, as it does those of accelerate, which only move tensors."""
    model = Block()
    linear = model.mlp[2]
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    with pytest.raises(ValueError, match=r"mlp\.2: its forward was replaced, .* or list it in skip$"):
        qcutlass.replace_linear(model, WeightOnly())
    with pytest.raises(ValueError, match=r"linear: its forward was replaced, .*\(del layer\.forward\)$"):
        QuantLinear.from_linear(linear)
    assert "mlp.2" not in qcutlass.replace_linear(model, WeightOnly(), skip=["mlp.2"])
    linear._hf_hook = None  # type: ignore[assignment]
    QuantLinear.from_linear(linear)


def test_hooks_that_are_removed_are_no_obstacle(seed: int) -> None:
    linear = random_linear(16, 64, seed, bias=False)
    weight_norm(linear)
    with torch.no_grad():
        linear.weight_g *= 2
    torch.nn.utils.remove_weight_norm(linear)
    layer: Any = QuantLinear.from_linear(linear, bits=8)
    testing.assert_equal(layer.scales, qcutlass.quantize(linear.weight, bits=8).scales)


def test_weights_that_are_computed_are_refused() -> None:
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 16))
    with pytest.raises(ValueError, match=r"linear: its weight is computed, not a Parameter; .*remove_parametrizations"):
        QuantLinear.from_linear(linear)
    plain = nn.Linear(64, 16)
    weight = plain.weight.detach()
    del plain.weight
    plain.weight = weight
    with pytest.raises(ValueError, match=r"^0: its weight is computed.* or list it in skip$"):
        qcutlass.replace_linear(nn.Sequential(plain), WeightOnly())


def test_encoder_layers_keep_what_they_read_themselves() -> None:
    """In inference torch's encoder multiplies by the weights of its Linears itself."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.adapter = nn.Linear(32, 32)

        def forward(self, a: Tensor) -> Tensor:
            out: Tensor = self.adapter(self.encoder(a))
            return out

    model = Encoder().eval()
    a = torch.randn(2, 5, 32)
    with torch.inference_mode():
        expected = model.encoder(a)
    assert qcutlass.replace_linear(model, WeightOnly()) == ["adapter"]
    with torch.inference_mode():
        testing.assert_equal(model(a), model.adapter(expected))
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear to replace"):
        qcutlass.replace_linear(model.encoder, WeightOnly())


def test_weights_that_accelerate_keeps_elsewhere_are_refused() -> None:
    """They were packed without numbers."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    from accelerate import cpu_offload

    model = cpu_offload(nn.Sequential(nn.Linear(32, 32)), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^0: accelerate keeps its weight elsewhere.* or list it in skip$"):
        qcutlass.replace_linear(model, WeightOnly())


def test_owners_keep_layers_whose_weights_their_code_reads() -> None:
    class Owner(nn.Module):
        def __init__(self, names: Sequence[str]) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(32, 32))
            self.read.weight.data.clamp_(-1, 1)

        def _init_weights(self) -> None:
            self.set_up.weight.data.zero_()

        @torch.no_grad()
        def forward(self, a: Tensor) -> Tensor:
            a = self.asked(a.to(self.asked.weight.dtype))
            layer = self.named
            other, layer.training = self.read, False
            a = a @ layer.weight.T
            return a @ self.multiplied.weight.T + self.stepped.weight.sum() + other(a)

    names = ["read", "set_up", "asked", "multiplied", "stepped", "named"]
    model = nn.Sequential(Owner(names))
    assert qcutlass.replace_linear(model, WeightOnly()) == ["0.read", "0.set_up"]

    class Bloom(Owner):
        slow_but_exact = False

    assert qcutlass.replace_linear(nn.Sequential(Bloom(names)), WeightOnly()) == [f"0.{name}" for name in names]
