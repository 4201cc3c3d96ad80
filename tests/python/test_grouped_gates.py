"""gemm_grouped with gates: the bits that the product and the gate behind it give, by every tactic."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.test_grouped import CODES, MODES, TYPES, Case, case_of, code_case, devices, product, tactics
from torch import Tensor

from qcutlass import testing
from qcutlass.products.decoder_operators import gate
from qcutlass.testing import GroupedCase, GroupedProblem

ACTIVATIONS = "silu_mul", "gelu_tanh_mul"
COUNTS: dict[str, tuple[int, ...]] = {
    "empty experts": (0, 3, 0, 1, 17, 0),
    "one expert": (35,),
    "a row each": (1,) * 20,
    "many rows": (130, 0, 64, 97, 257),
}


def on(case: Case, device: str) -> Case:
    """The CPU rounds neither gate nor up before they meet: float32, whose values are those of separate steps."""
    return replace(case, dtype=torch.float32) if device == "cpu" else case


def separately(problem: GroupedProblem, activation: str, tactic: str | None) -> Tensor:
    both = product(problem, activation=None, tactic=tactic)
    halves = both.chunk(2, dim=1)
    return gate(activation, halves[0].contiguous(), halves[1].contiguous())


def assert_gated(case: Case, counts: tuple[int, ...], device: str, seed: int, n: int) -> None:
    activation = ACTIVATIONS[seed % 2]
    grouped = GroupedCase(replace(case, n=n), counts, 3, 9, gathered=True, scaled=False)
    problem = grouped.random(device=device, seed=seed)
    for tactic in tactics(problem, activation=activation):
        label = f"{activation}, {tactic}: {problem}"
        box = testing.Poisoned((problem.m, n // 2), problem.a.dtype, torch.device(device), padding=3)
        product(problem, activation=activation, tactic=tactic, out=box.tensor)
        box.check(label)
        expected = separately(problem, activation, tactic)
        testing.assert_equal(box.tensor, expected, label=label)
        testing.assert_equal(
            product(problem, activation=activation, tactic=tactic), expected, label=f"aligned, {label}"
        )


@devices
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("mode", MODES)
def test_gates_give_the_bits_of_separate_steps(mode: str, name: str, device: str, seed: int) -> None:
    choose = random.Random(seed)
    for counts in COUNTS.values() if device == "cuda" else [COUNTS["empty experts"]]:
        n, k = choose.choice([(96, 256), (32, 200), (544, 136), (1056, 320)])
        case = on(case_of(mode, name, n, k, bias=mode != "fine"), device)
        assert_gated(case, counts, device, seed, n)


@devices
@pytest.mark.parametrize("name", CODES)
def test_gates_of_codes(name: str, device: str, seed: int) -> None:
    for counts in COUNTS.values() if device == "cuda" else [COUNTS["empty experts"]]:
        case = code_case(name, device)
        assert_gated(on(case, device), counts, device, seed, 288)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 48}, "activation: 'silu_mul' takes I channels of gate, then I of up, I a multiple of 16; got N = 48"),
    ({"scaled": True}, "row_scale: expected None with 'silu_mul'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    n, scaled = change.get("n", 64), change.get("scaled", False)
    problem = GroupedCase(case_of("native", "w4 float16", n, 128), (1, 2), scaled=scaled).random()
    with pytest.raises(ValueError, match=message):
        product(problem, activation="silu_mul")
