"""Tuning of products of experts: their layers in modules, keys, operands, what launches read in turn, plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.kinds.description import H200
from tests.python.models.mixtures import model_of
from tests.python.test_grouped import POWERS
from tests.python.test_tuning import Packed
from torch import Tensor, nn

import qcutlass
from qcutlass import _C, WeightOnly, moe, testing, tuning
from qcutlass.algorithms import quantize_floats
from qcutlass.layers import QuantExperts, WeightOnlyLinear
from qcutlass.layers.experts import Expert
from qcutlass.products import grouped, product, selection
from qcutlass.products.grouped import GROUPED, GroupedCall
from qcutlass.products.multiplying import compute
from qcutlass.products.product import Product
from qcutlass.products.tuned_plans import product_key
from qcutlass.products.weight_only import WEIGHT_ONLY
from qcutlass.tuning import timer, tuner
from qcutlass.tuning.layer import SLOTS, Layer
from qcutlass.tuning.layers import layers_of

E, H, I = 6, 256, 128  # noqa: E741
GATE_UP = Layer(2 * I, H, 4, 64, zero_dtype=torch.uint8, kind=GROUPED, experts=E, gathers=True)
DOWN = replace(GATE_UP, n=H, k=I, gathers=False)
LAYERS = {
    "gate_up": GATE_UP,
    "down": DOWN,
    "8 bits": replace(GATE_UP, bits=8, group_size=H, zero_dtype=None),
    "minimums": replace(DOWN, group_size=32, zero_dtype=None, minimum_dtype=torch.float32, scale_dtype=torch.float32),
    "two levels": replace(GATE_UP, group_size=32, zero_dtype=None, scale_dtype=torch.int8, super_groups=8),
}
FLOATS = {
    "fp8": replace(GATE_UP, bits=8, group_size=H, scale_dtype=torch.float32, zero_dtype=None, weight_dtype="e4m3"),
    "MXFP4": replace(GATE_UP, group_size=32, scale_dtype=POWERS, zero_dtype=None, weight_dtype="e2m1"),
    "NVFP4": replace(GATE_UP, group_size=16, scale_dtype=torch.float8_e4m3fn, zero_dtype=None, weight_dtype="e2m1"),
}
"""Gate and up whose codes are floating numbers."""
LAYERS |= FLOATS
each = pytest.mark.parametrize("name", LAYERS)


def experts_of(scheme: WeightOnly = WeightOnly(4, 64, scale_dtype=torch.float16)) -> QuantExperts:  # noqa: B008
    return QuantExperts.from_weights(torch.randn(E, 2 * I, H), torch.randn(E, H, I), scheme)


def experts_of_floats(gate_up: Layer) -> QuantExperts:
    """Those with weights like `gate_up`; gate and up are equal, and so is what NVFP4's scales are multiplied by."""
    up, down = (torch.randn(n, k) / 8 for n, k in ((I, H), (H, I)))
    code, scale_dtype = str(gate_up.weight_dtype), gate_up.scale_dtype
    size = None if gate_up.group_size == H else gate_up.group_size
    found = (quantize_floats(weight, code, size, scale_dtype=scale_dtype) for weight in (up, up, down))
    return QuantExperts.from_layers([Expert(*map(WeightOnlyLinear, found))] * E, E)


def test_both_layers_of_experts_are_found_once_each() -> None:
    model = nn.Sequential(experts_of(), Packed(64, 128, 4, 64), experts_of())
    assert layers_of(model, None) == [GATE_UP, DOWN, *layers_of(model[1], None)]
    assert layers_of(model[0], torch.bfloat16)[0] == replace(GATE_UP, dtype=torch.bfloat16)


def test_a_mixture_of_transformers_is_tuned() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    model = model_of("mixtral").half()
    qcutlass.replace_linear(model, WeightOnly(4, 32))
    found = layers_of(model, None)
    assert [(layer.n, layer.k, layer.experts, layer.gathers) for layer in found if layer.kind is GROUPED] == [
        (128, 64, 4, True), (64, 64, 4, False)
    ]  # fmt: skip
    assert {layer.experts for layer in found} == {0, 4}


def test_experts_in_another_order_gather_no_rows() -> None:
    """As torch does it before their product."""
    q = [qcutlass.quantize(torch.randn(n, k), bits=4, group_size=32) for n, k in ((I, H), (I, H), (H, I))]
    perms = torch.randperm(H).int(), None
    layers = [WeightOnlyLinear(one, perm=perms[place // 2]) for place, one in enumerate(q)]
    found = layers_of(QuantExperts.from_layers([Expert(*layers)] * 3, 3), None)
    assert [(layer.n, layer.gathers) for layer in found] == [(2 * I, False), (H, False)]


@pytest.mark.parametrize("name", FLOATS)
def test_experts_of_floating_codes_are_found(name: str) -> None:
    gate_up, experts = LAYERS[name], experts_of_floats(LAYERS[name])
    down = replace(gate_up, n=H, k=I, group_size=min(gate_up.group_size, I), gathers=False)
    assert layers_of(experts, None) == [gate_up, down]
    assert [layer.dtype for layer in layers_of(experts, torch.bfloat16)] == [torch.bfloat16] * 2
    dense = experts.down.layer(0)
    assert layers_of(dense, None) == [replace(down, kind=WEIGHT_ONLY, experts=0)]


def arguments(layer: Layer, m: int, seed: int = 1) -> dict[str, Any]:
    """Those of a product of these experts, as one of a block is."""
    torch.manual_seed(seed)
    values = layer.call(m, "cpu")._asdict()
    return values | {"bias": torch.randn(E, layer.n), "row_scale": None if layer.gathers else torch.rand(m)}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gate_up", "w4a16/float16/scales=float16/zeros=uint8/group=64/experts=6/gathered/256x256/m=48"),
        ("down", "w4a16/float16/scales=float16/zeros=uint8/group=64/experts=6/256x128/m=48"),
        ("8 bits", "w8a16/float16/scales=float16/zeros=none/group=channel/experts=6/gathered/256x256/m=48"),
        ("fp8", "e4m3a16/float16/scales=float32/zeros=none/group=channel/experts=6/gathered/256x256/m=48"),
        ("MXFP4", "e2m1a16/float16/scales=float8_e8m0/zeros=none/group=32/experts=6/gathered/256x256/m=48"),
        ("NVFP4", "e2m1a16/float16/scales=float8_e4m3/zeros=none/group=16/experts=6/gathered/256x256/m=48"),
    ],
)
def test_keys_are_those_of_the_products(name: str, key: str) -> None:
    layer = LAYERS[name]
    assert product_key(layer.arguments(48), 48) == key
    given = arguments(layer, 48)
    assert product_key(selection.arguments_of(qcutlass.gemm_grouped, **given), 48) == key
    others = {"experts": 7, "gathers": not layer.gathers, "n": 272}
    assert all(product_key(replace(layer, **{at: new}).arguments(48), 48) != key for at, new in others.items())
    one = replace(layer, kind=WEIGHT_ONLY, experts=0, gathers=False)
    assert product_key(one.arguments(48), 48) == key.replace("/experts=6", "").replace("/gathered", "")


@pytest.mark.parametrize("name", ["gate_up", "down", *FLOATS])
@pytest.mark.parametrize("m", [1, 100])
def test_what_was_tuned_is_planned(m: int, name: str, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "device_traits", lambda index: H200)
    layer = LAYERS[name]
    given = arguments(layer, m)

    def plan(**changes: Any) -> _C.Plan:
        call = GroupedCall(**given | changes)
        shape = call.check(None)
        return Product(GROUPED, call.prepared(shape), shape, torch.empty((m, shape.n), dtype=call.out_dtype)).plan(0)

    def another_is_fastest(layer: Layer, m: int, contenders: Sequence[_C.Plan]) -> list[float | None]:
        other = next(one for one in reversed(contenders) if one.tactic != before.tactic)
        return [5.0 if one is other else 10.0 for one in contenders]

    before, invariant = plan(), plan(batch_invariant=True)
    (found,) = tuner.tune_layers([layer], [tuning.bucket(m) or 0], H200, 0, another_is_fastest)
    tuning.forget()
    assert plan().tactic == found.plan.tactic != before.tactic
    assert plan(batch_invariant=True).tactic == invariant.tactic
    assert plan(tactic=before.tactic).tactic == before.tactic
    if layer.gathers:
        assert plan(activation="silu_mul").tactic == found.plan.tactic, "a gate ends the same product"


@each
def test_operands_are_multiplied(name: str) -> None:
    layer = LAYERS[name]
    call = layer.call(10, "cpu")
    assert call.a.shape == (-(-10 // SLOTS) if layer.gathers else 10, layer.k)
    out = compute(GROUPED, call, None)
    assert out.shape == (10, layer.n)
    assert bool(out.isfinite().all())
    (copy, *_) = timer._copies(GROUPED.weights(call))
    testing.assert_equal(compute(GROUPED, call._replace(**copy), None), out)
    moved = call._replace(offsets=torch.tensor([0] * E + [10], dtype=torch.int32))
    assert not torch.equal(compute(GROUPED, moved, None), out), "experts have weights of their own"


@pytest.mark.parametrize("m", [1, 8, 5000])
def test_rows_go_to_any_expert(m: int) -> None:
    offsets = GATE_UP.offsets(m, "cpu")
    assert offsets.dtype == torch.int32
    assert offsets.shape == (E + 1,)
    assert (int(offsets[0]), int(offsets[-1])) == (0, m)
    counts = offsets.diff()
    assert bool((counts >= 0).all())
    assert m < 5000 or bool((counts > m / E * 0.8).all())
    assert GATE_UP.offsets(m, "meta").shape == (E + 1,)


def distinct(turns: Sequence[dict[str, Tensor]]) -> int:
    return len({tuple(turn["offsets"].tolist()) for turn in turns})


def test_launches_read_other_experts_in_turn() -> None:
    """So many that those of a launch are cold when they are read again. Other layers have copies alone."""
    layer = replace(GATE_UP, experts=64)
    weights = {"w_packed": torch.empty(64 << 20, dtype=torch.uint8), "scales": torch.empty(1 << 20)}
    copies = [weights, weights]
    assert timer._turns(Layer(64, 64), 4, copies) is copies
    for m, share in ((1, 1 / 64), (8, 1 - (63 / 64) ** 8), (4096, 1.0)):
        assert abs(layer.share_read(m) - share) < 1e-12
        turns = timer._turns(layer, m, copies)
        read = share * (68 << 20)
        assert 2 <= len(turns) <= 256
        assert (len(turns) - 1) * read >= 256 << 20 or len(turns) == 256
        assert all(list(turn) == ["w_packed", "scales", "offsets"] for turn in turns)
        assert distinct(turns) > min(len(turns), 40) // 2


def test_calls_are_forced_to_plans() -> None:
    layers = GATE_UP, Layer(256, 256)
    calls = [layer.call(4, "meta") for layer in layers]
    plans = [_C.candidates(layer.arguments(4), H200)[0].plan for layer in layers]
    forced = [timer._forced(call, plan)._asdict() for call, plan in zip(calls, plans, strict=True)]
    assert [call["tactic"] for call in forced] == [plan.tactic for plan in plans]
    assert "split_k" not in forced[0]
    assert forced[1]["split_k"] == plans[1].split_k


def test_layers_of_experts_name_themselves() -> None:
    assert str(GATE_UP) == "256x256 4-bit group 64 by float16, 6 experts"
    assert str(LAYERS["MXFP4"]) == "256x256 e2m1 group 32 by float16, 6 experts"


def test_columns_in_another_order_are_tuned_as_gathered_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "IN_ANY_ORDER", ())
    given = arguments(GATE_UP, 48)
    perm = torch.stack([torch.randperm(H) for _ in range(E)]).int()
    key = product_key(selection.arguments_of(qcutlass.gemm_grouped, **given | {"perm": perm}), 48)
    assert key == product_key(replace(GATE_UP, gathers=False).arguments(48), 48)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gate_up", *FLOATS])
def test_blocks_use_what_was_tuned_and_stay_in_bound(name: str, plan_folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = LAYERS[name]
    experts = (experts_of_floats(gate_up) if name in FLOATS else experts_of()).to("cuda")
    found = qcutlass.tune(experts, ms=[16, 512], progress=False)
    assert [(one.layer.gathers, one.m) for one in found] == [(first, m) for first in (True, False) for m in (16, 512)]
    assert found[0].layer == gate_up
    for tokens, slots in ((8, 2), (256, 2)):
        x = torch.randn(tokens, H, device="cuda", dtype=torch.float16)
        weights, ids = torch.rand(tokens, E, device="cuda").softmax(-1).topk(slots)
        routing = moe.route(ids, E, weights)
        parts = experts.gate_up.weights._asdict()
        del parts["interleaved"]
        why = qcutlass.explain(qcutlass.gemm_grouped, x, **parts, offsets=routing.offsets, rows=routing.rows)
        wanted = next(one for one in found if one.layer == gate_up and one.m == tokens * slots)
        assert (why.source, why.plan.tactic) == ("tuned", wanted.plan.tactic)
        tuned = experts(x, ids, weights)
        exact = experts.to("cpu")(x.cpu().float(), ids.cpu(), weights.cpu())
        experts.to("cuda")
        assert float((tuned.cpu().float() - exact).norm() / exact.norm()) < 0.01
