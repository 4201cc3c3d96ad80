"""Tuning of each kind of product: keys, plans that are found, layers, operands, and results on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.python.absent_gpu import LAYER
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import H200, Description
from torch import nn

import qcutlass
from qcutlass import _C, testing, tuning
from qcutlass.layers import QuantLinear
from qcutlass.products import kinds, product, selection
from qcutlass.products import tuned_plans as cache
from qcutlass.products.grouped import GROUPED
from qcutlass.products.kind import FUNCTIONS
from qcutlass.products.multiplying import compute
from qcutlass.products.product import Product
from qcutlass.products.tuned_plans import TunedPlan, product_key
from qcutlass.schemes import FP8, W4A8, W8A8, Blockwise, Scheme
from qcutlass.tuning import layer as layer_module
from qcutlass.tuning import timer, tuner
from qcutlass.tuning.layer import Layer
from qcutlass.tuning.layers import layers_from, layers_of, of_scheme

N, K = 512, 1024


class Tuned(NamedTuple):
    """A scheme, and the products of its layers.

    Attributes:
        scheme, dtype: as `tune` takes them.
        description: of the products.
        options: of its cases.
        key: of the plans, before the sizes.
    """

    scheme: Scheme
    dtype: torch.dtype | None
    description: Description
    options: dict[str, Any]
    key: str

    @property
    def layer(self) -> Layer:
        (found,) = layers_from([(N, K)], of_scheme(self.scheme, self.dtype))
        return found

    def product(self, m: int, device: str = "cpu", seed: int = 1) -> Any:
        return self.description.random(self.description.case(m, N, K, **self.options), device, seed)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = "scales=none/zeros=none/group=channel"
TUNED = {
    "int8": Tuned(W8A8(), None, DESCRIPTIONS["gemm_w8a8"], {}, f"w8a8/int8/{PLAIN}/out=16-bit"),
    "e4m3": Tuned(FP8(), None, DESCRIPTIONS["gemm_fp8"], {}, f"w8a8/float8_e4m3/{PLAIN}/out=16-bit"),
    "e5m2": Tuned(
        FP8("static"), E5M2, DESCRIPTIONS["gemm_fp8"], {"dtype": E5M2}, f"w8a8/float8_e5m2/{PLAIN}/out=16-bit"
    ),
    "blocks of 128": Tuned(
        Blockwise(), None, DESCRIPTIONS["blockwise"], {}, f"w8a8/int8/{PLAIN}/blocks=128/out=16-bit"
    ),
    "blocks of 32": Tuned(
        Blockwise(32), None, DESCRIPTIONS["blockwise"], {"block_size": 32}, f"w8a8/int8/{PLAIN}/blocks=32/out=16-bit"
    ),
    "blocks, fp8": Tuned(
        Blockwise(type="fp8"),
        None,
        DESCRIPTIONS["blockwise, fp8"],
        {},
        f"w8a8/float8_e4m3/{PLAIN}/blocks=128/out=16-bit",
    ),
    "w4a8, int8": Tuned(
        W4A8(64, "int8", scale_dtype=torch.float16),
        None,
        DESCRIPTIONS["gemm_w4a8"],
        {"group_size": 64},
        "w4a16/int8/scales=float16/zeros=uint8/group=64/out=16-bit",
    ),
    "w4a8, fp8": Tuned(
        W4A8(None, symmetric=True),
        E4M3,
        DESCRIPTIONS["gemm_w4a8"],
        {"group_size": K, "dtype": E4M3, "zeros": "none"},
        "w4a16/float8_e4m3/scales=float16/zeros=none/group=channel/out=16-bit",
    ),
}
each = pytest.mark.parametrize("tuned", TUNED.values(), ids=list(TUNED))


def fastest(place: int) -> tuner.Timer:
    """Measures the contender in this place, from the end if it is negative, as the fastest."""

    def time(layer: Layer, m: int, plans: Sequence[_C.Plan]) -> list[float | None]:
        return [5.0 if rank == place % len(plans) else 10.0 for rank in range(len(plans))]

    return time


def product_of(tuned: Tuned, m: int, **options: Any) -> Product:
    """The product of a problem, checked, on the CPU."""
    function = FUNCTIONS[tuned.description.function]
    call = function.call(**tuned.product(m).values | options)
    shape = call.check(None)
    return Product(function.kind, call.prepared(shape), shape, torch.empty((m, shape.n), dtype=call.out_dtype))


def test_every_kind_that_is_tuned_has_operands() -> None:
    assert set(layer_module._OPERANDS) == set(kinds.KINDS.values())
    elsewhere = {LAYER.kind, GROUPED}  # test_tuning.py, test_tuning_experts.py
    assert {tuned.layer.kind for tuned in TUNED.values()} | elsewhere == set(layer_module._OPERANDS)


@each
def test_keys_are_those_of_the_products(tuned: Tuned) -> None:
    values = tuned.product(16).values
    assert product_key(tuned.layer.arguments(16), 16) == f"{tuned.key}/{N}x{K}/m=16"
    assert product_key(selection.arguments_of(tuned.description.function, **values), 16) == f"{tuned.key}/{N}x{K}/m=16"
    if tuned.description.has_out:
        for dtype in (torch.bfloat16, torch.float32):
            other = selection.arguments_of(tuned.description.function, **values | {"out_dtype": dtype})
            assert (product_key(other, 16) == f"{tuned.key}/{N}x{K}/m=16") == (dtype == torch.bfloat16)


def test_keys_tell_kinds_apart() -> None:
    keys = {product_key(tuned.layer.arguments(16), 16) for tuned in TUNED.values()}
    assert len(keys) == len(TUNED)
    quantised = DESCRIPTIONS["blockwise, quantised"]
    values = quantised.random(quantised.case(16, N, K)).values
    assert product_key(selection.arguments_of(quantised.function, **values), 16) not in keys


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        (Layer(64, 256), "w4a16/float16/scales=float16/zeros=none/group=128/64x256/m=16"),
        (Layer(64, 256, 8, 256), "w8a16/float16/scales=float16/zeros=none/group=channel/64x256/m=16"),
        (
            Layer(64, 256, dtype=torch.bfloat16, scale_dtype=torch.float32, zero_dtype=torch.uint8),
            "w4a16/bfloat16/scales=float32/zeros=uint8/group=128/64x256/m=16",
        ),
        (
            Layer(64, 256, minimum_dtype=torch.float16),
            "w4a16/float16/scales=float16/minimums=float16/group=128/64x256/m=16",
        ),
    ],
)
def test_keys_of_weight_only_products_stay(layer: Layer, key: str) -> None:
    assert product_key(layer.arguments(16), 16) == key


@each
@pytest.mark.parametrize("m", [1, 100])
def test_what_was_tuned_is_planned(tuned: Tuned, m: int, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "device_traits", lambda index: H200)
    before = product_of(tuned, m).plan(0)
    invariant = product_of(tuned, m, batch_invariant=True).plan(0)
    (found,) = tuner.tune_layers([tuned.layer], [tuning.bucket(m) or 0], H200, 0, fastest(-1))
    tuning.forget()
    plan = product_of(tuned, m).plan(0)
    assert (plan.tactic, plan.split_k) == found.plan[:2] != (before.tactic, before.split_k)
    other = product_of(tuned, m, batch_invariant=True).plan(0)
    assert (other.tactic, other.split_k) == (invariant.tactic, invariant.split_k), "batch-invariant ones are not tuned"
    forced = product_of(tuned, m, tactic=before.tactic, split_k=before.split_k).plan(0)
    assert (forced.tactic, forced.split_k) == (before.tactic, before.split_k)


def test_quantised_outputs_have_no_plans_of_others(plans: Path) -> None:
    tuned = TUNED["blocks of 128"]
    list(tuner.tune_layers([tuned.layer], [16], H200, 0, fastest(-1)))
    quantised = DESCRIPTIONS["blockwise, quantised"]
    arguments = selection.arguments_of(quantised.function, **quantised.random(quantised.case(16, N, K)).values)
    assert tuning.lookup(tuned.layer.arguments(16), H200, 0) is not None
    assert tuning.lookup(arguments, H200, 0) is None


@each
def test_layers_of_modules_are_those_of_their_schemes(tuned: Tuned) -> None:
    scheme = tuned.scheme
    if isinstance(scheme, W8A8 | FP8):
        scheme = type(scheme)()  # static ones need statistics
    linear = nn.Linear(K, N, dtype=torch.float16)
    model = nn.Sequential(QuantLinear.from_linear(linear, scheme), nn.ReLU(), QuantLinear.from_linear(linear, scheme))
    expected = tuned.layer if tuned.dtype != E5M2 else TUNED["e4m3"].layer  # the type that layers quantise to
    for dtype in (None, torch.bfloat16):
        assert layers_of(model, dtype) == [expected]


@each
def test_operands_are_multiplied(tuned: Tuned) -> None:
    layer = replace(tuned.layer, n=48)
    call = layer.call(3, "cpu")
    out = compute(layer.kind, call, None)
    assert out.shape == (3, 48)
    assert bool(out.isfinite().all())
    again = compute(layer.kind, call._replace(**timer._copies(layer.kind.weights(call))[0]), None)
    testing.assert_equal(again, out)


@each
def test_copies_of_weights_are_cold_when_they_are_read_again(tuned: Tuned) -> None:
    call = tuned.layer.call(1, "meta")
    weights = tuned.layer.kind.weights(call)
    assert len(weights) >= 2, "codes and scales"
    copies = timer._copies(weights)
    assert all(list(copy) == list(weights) for copy in copies)
    others = (len(copies) - 1) * timer._nbytes(weights)
    assert others >= 256 << 20 or len(copies) == 256


def test_products_of_eight_bits_take_half_the_time() -> None:
    layer = TUNED["int8"].layer
    calls = [one.call(8192, "meta") for one in (layer, LAYER)]
    launches = [timer._launches(call, torch.empty(8192, N, device="meta"), 1) for call in calls]
    assert abs(launches[0] - 2 * launches[1]) <= 1


def test_layers_name_themselves() -> None:
    names = [str(TUNED[name].layer) for name in ("int8", "e5m2", "blocks of 32", "w4a8, int8")]
    assert names == [
        "512x1024 8-bit per channel by int8",
        "512x1024 8-bit per channel by float8_e5m2",
        "512x1024 8-bit group 32 by int8",
        "512x1024 4-bit group 64 by int8",
    ]


def test_sizes_that_no_product_has_are_refused() -> None:
    (layer,) = layers_from([(64, 2**18)], of_scheme(W8A8(), None))
    with pytest.raises(ValueError, match="K = 262144 is more than 131071"):
        tuner.contenders(layer, 1, H200)
    with pytest.raises(qcutlass.UnsupportedError, match=r"need a GPU of compute capability 8\.9"):
        tuner.contenders(TUNED["e4m3"].layer, 1, _C.DeviceTraits(80, 108, 166912))


@pytest.mark.gpu
@each
def test_products_use_what_was_tuned_and_stay_in_bound(tuned: Tuned, plan_folder: Path, seed: int, ledger: Any) -> None:
    tuned.description.skip_without_instructions()
    found = qcutlass.tune([(N, K)], ms=[1, 16, 256], scheme=tuned.scheme, dtype=tuned.dtype, progress=False)
    assert [one.m for one in found] == [1, 16, 256]
    for one in found:
        problem = tuned.product(one.m, "cuda", seed)
        plan = qcutlass.plan(tuned.description.function, **problem.values)
        assert (plan.tactic, plan.split_k) == one.plan[:2]
        assert problem.explain().source == "tuned"
        assert problem.explain(batch_invariant=True).source == "cost model"
        reference = tuned.description.reference(problem.problem, tactic=plan.tactic, split_k=plan.split_k)
        splits = tuned.description.splits(problem.problem, plan.split_k)
        ledger.close(problem(), reference, f"{one}: {problem.problem}", splits)


@pytest.mark.gpu
def test_tuned_plans_do_not_change_results_of_int8(plan_folder: Path, seed: int) -> None:
    tuned = TUNED["int8"]
    layer, traits = tuned.layer, _C.device_traits(0)
    problem, key = tuned.product(16, "cuda", seed), product_key(tuned.layer.arguments(16), 16)
    expected = problem()
    candidates = _C.candidates(layer.arguments(16), traits)
    assert len(candidates) > 5
    for candidate in candidates:
        cache.store({key: TunedPlan(candidate.plan.tactic, candidate.plan.split_k, 1.0)}, traits, 0)
        assert problem.explain().plan.tactic == candidate.plan.tactic
        testing.assert_equal(problem(), expected, label=candidate.plan.tactic)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [W8A8(), W8A8(symmetric=False), FP8()], ids=str)
def test_layers_use_what_was_tuned_for_their_model(scheme: Scheme, plan_folder: Path) -> None:
    TUNED["e4m3"].description.skip_without_instructions()
    layer = QuantLinear.from_linear(nn.Linear(K, N, dtype=torch.bfloat16, device="cuda"), scheme)
    (found,) = qcutlass.tune(nn.Sequential(layer), ms=[16], progress=False)
    function = qcutlass.gemm_w8a8 if isinstance(scheme, W8A8) else qcutlass.gemm_fp8
    a_q, a_scale, *_ = qcutlass.quantize_activations(
        torch.randn(16, K, device="cuda", dtype=torch.bfloat16), dtype=found.layer.dtype
    )
    why = qcutlass.explain(function, a_q, layer.w_packed, a_scale, layer.w_scale, out_dtype=torch.bfloat16)
    assert (why.source, why.plan.tactic, why.plan.split_k) == ("tuned", *found.plan[:2])
