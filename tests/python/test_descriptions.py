"""The table of descriptions: every kind has one, and every facet goes through all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from bench import schemes
from tests.python.kinds import DESCRIPTIONS, OUTLINES
from tests.python.kinds.description import Description, Product

from qcutlass.products.kind import FUNCTIONS
from qcutlass.products.kinds import KINDS

FACETS = (
    "test_bad_inputs.py",
    "test_faults.py",
    "test_torch_integration.py",
    "test_cuda_cases.py",
    "test_runtime_cuda.py",
    "test_explain.py",
    "test_bench_kinds.py",
    "wgmma_products.py",
)
kinds = pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))


def test_every_kind_has_a_description() -> None:
    assert {kind.kind.name for kind in DESCRIPTIONS.values()} | set(OUTLINES) == set(KINDS)
    assert all((Path(__file__).parent / outline.tests).is_file() for outline in OUTLINES.values())
    assert all(KINDS[kind.kind.name] is kind.kind for kind in DESCRIPTIONS.values())


def test_every_function_is_described_or_takes_fewer_operands() -> None:
    """int8_gemm is int8_addmm without a bias, which test_blockwise.py shows."""
    described = {kind.function for kind in DESCRIPTIONS.values()}
    others = {f.name for one, f in FUNCTIONS.items() if one not in described and f.kind.name not in OUTLINES}
    assert others == {"qcutlass.blockwise.int8_gemm", "qcutlass.blockwise.int8_gemm_quant"}


@pytest.mark.parametrize("facet", FACETS)
def test_every_facet_goes_through_the_table(facet: str, repository: Path) -> None:
    """And names no kind outside tests of its own: `DESCRIPTIONS` is used as a whole, and imported from there."""
    tree = ast.parse((repository / "tests/python" / facet).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "tests.python.kinds" in modules
    of_kinds = {module for module in modules if module and module.startswith("tests.python.kinds.")}
    assert of_kinds <= {"tests.python.kinds.description"}
    calls = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert any(call.startswith("DESCRIPTIONS.") for call in calls)


@kinds
def test_descriptions_are_complete(kind: Description) -> None:
    """Between them the cases have every operand, every option of a variant makes a product, and each name is used."""
    there = {name for case in [*kind.cases.values(), kind.whole] for name in kind.random(case, seed=1).operands}
    assert len(there) == kind.most_operands
    assert {*kind.of_rows, *kind.boxed, *kind.computed, kind.scale} <= there
    assert set(kind.inductor) <= set(kind.cases)
    assert set(kind.layers) <= set(kind.variants)
    for lists in (
        kind.rows,
        kind.fake_rows,
        kind.faults,
        kind.inductor,
        kind.layers,
        kind.families,
        kind.explained,
        kind.benched,
    ):
        assert lists
    for options in (*kind.variants.values(), *kind.asynchronous.values()):
        product = kind.random(kind.full(3, 40, 128, **options), seed=1)
        assert isinstance(product, Product)
        kind.assert_correct(product.outs(), product.problem)


@kinds
def test_both_oracles_judge_a_product(kind: Description, seed: int) -> None:
    product, expected = kind.products(kind.full(9, 72, 160), "cpu", seed)
    outs = product.outs()
    kind.assert_exact(outs, expected, product, kind.name)
    assert kind.assert_correct(outs, product.problem) <= 1
    wrong = (outs[0].roll(1, 0), *outs[1:])
    with pytest.raises(AssertionError):
        kind.assert_exact(wrong, expected, product, kind.name)
    with pytest.raises(AssertionError):
        kind.assert_correct(wrong, product.problem)


@kinds
def test_bytes_and_operations(kind: Description) -> None:
    product = kind.random(kind.case(2, 48, 128), seed=1)
    assert product.operations == 2 * 2 * 48 * 128
    weights = product.operands[product.weights]
    assert weights.nbytes == 48 * 128 * (4 if weights.dtype == torch.uint8 else 8) // 8
    outs = sum(out.nbytes for out in product.outs())
    assert product.moved_bytes > weights.nbytes + product.a.nbytes + outs


@kinds
def test_benched_schemes_are_understood(kind: Description) -> None:
    assert [schemes.parse(name).name for name in kind.benched] == list(kind.benched)
