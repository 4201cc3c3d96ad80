"""Where wgmma tiles fill several waves of SMs, blocks share the K of those in the last one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.wgmma_products import PRODUCTS, Product, on_gpu, product
from torch import Tensor

from qcutlass import testing

# 3 to 23 tiles of tokens, in one group of them or several, by 35 to 137 of channels, the last ones ragged: more than
# there are SMs, in no whole waves. With every tactic for the second shape, but not for the first, what is left over is
# less than half a wave of 132 SMs, after an even number of tiles. Nine stages of K are shared unevenly.
SHAPES = {"some in pairs": (712, 8900, 1032), "all in pairs": (708, 17444, 1032)}


def difference(out: Tensor, expected: Tensor) -> Tensor:
    """The distance of outputs in units of what another order of sums may move: a code, or 2^-7 of a number (bfloat16),
    small numbers counted as an eighth of the mean."""
    size = expected.float().abs()
    unit = torch.ones_like(size) if out.dtype == torch.int8 else 2.0**-7 * size.clamp(min=float(size.mean()) / 8)
    return (out.float() - expected.float()).abs() / unit


def test_differences_are_seen() -> None:
    numbers, codes = torch.tensor([0.01, 0.4, -0.1]), torch.tensor([3, -7], dtype=torch.int8)
    assert difference(numbers, numbers).max() == 0 == difference(codes, codes).max()
    assert difference(numbers + torch.tensor([0.0, 0.004, 0.0]), numbers).max() > 1
    assert difference(codes + 2, codes).max() > 1


@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [2, 3, 8])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_last_tiles_are_shared_and_no_others(name: str, size: str, split_k: int, ledger: Any) -> None:
    shape = SHAPES[size]
    product, tactics = on_gpu(name, shape)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    partly = 0
    for tactic in tactics:
        whole = product.run(product.a, tactic=tactic, split_k=1)
        testing.poison_free_memory("cuda")
        outs = product.run(product.a, tactic=tactic, split_k=split_k)
        plan = product.plan(tactic, split_k)
        partly += plan.shared_channel > 0
        assert plan.cluster or split_k != 2 or size != "all in pairs" or sms != 132, f"{tactic}: no clusters"
        for out, expected in zip(outs, whole, strict=True):
            shared = torch.zeros_like(out, dtype=torch.bool)
            columns = -(-shape[1] // out.shape[1])  # that an output stands for: scales are of blocks
            shared[plan.shared_token :, plan.shared_channel // columns :] = True
            ledger.equal(out[~shared], expected[~shared], f"{name}: {tactic}, K of all tiles but the last")
            assert difference(out, expected).max() <= 1, f"{name}: {tactic}, K shared by {split_k}"
            if "int8" in name:
                ledger.equal(out, expected, f"{name}: {tactic}, exact sums shared by {split_k}")
    assert partly, "no tactic has a last wave"


FLOAT_OUTPUTS = ("4 by 8 bits", "4 by fp8")  # of these products, where one rounding more or less is seen


def of_one_row(found: Product, name: str, **forced: Any) -> tuple[Tensor, ...]:
    """The outputs where all rows are the first one."""
    whole, options = found.whole, {"out_dtype": torch.float32} if name in FLOAT_OUTPUTS else {}
    names = [each for each in (*whole.description.of_rows, whole.activations) if each in whole.operands]
    same = {each: whole.operands[each][:1].expand_as(whole.operands[each]).contiguous() for each in names}
    return whole.outs(**same, **options, **forced)


def rows_differ(out: Tensor) -> bool:
    return not torch.equal(out, out[:1].expand_as(out))


@pytest.mark.parametrize("name", PRODUCTS)
def test_equal_rows_have_equal_bits_on_the_cpu(name: str) -> None:
    assert not any(map(rows_differ, of_one_row(product(name, (70, 128, 384), "cpu"), name, batch_invariant=True)))
    assert any(map(rows_differ, product(name, (70, 128, 384), "cpu").whole.outs()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_at_every_place_of_a_shared_tile(name: str, ledger: Any) -> None:
    """Whichever block of a cluster finishes it, and whichever lane."""
    found, tactics = on_gpu(name, (300, 520, 3104))
    for tactic in tactics:
        for split_k in (1, 2, 3, 5, 6):
            for out in of_one_row(found, name, tactic=tactic, split_k=split_k):
                ledger.equal(out, out[:1].expand_as(out), f"{name}: {tactic}, K shared by {split_k}")
