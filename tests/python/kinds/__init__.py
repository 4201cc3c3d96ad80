"""The kinds of products as the tests know them: an entry here gives a kind every facet."""

from __future__ import annotations

from typing import NamedTuple

from tests.python.kinds.blockwise import BLOCKWISE
from tests.python.kinds.blockwise_float8 import FLOAT8_BLOCKWISE
from tests.python.kinds.blockwise_quantized import QUANTIZED_BLOCKWISE
from tests.python.kinds.description import Description
from tests.python.kinds.float8 import FLOAT8_PRODUCTS
from tests.python.kinds.int4 import INT4
from tests.python.kinds.int8 import INT8
from tests.python.kinds.minimums import MINIMUMS
from tests.python.kinds.weight_only import WEIGHT_ONLY

DESCRIPTIONS: dict[str, Description] = {
    kind.name: kind
    for kind in (WEIGHT_ONLY, MINIMUMS, INT4, INT8, FLOAT8_PRODUCTS, BLOCKWISE, QUANTIZED_BLOCKWISE, FLOAT8_BLOCKWISE)
}


class Outline(NamedTuple):
    """What the table of kinds shows of one that has no description.

    Attributes:
        schema, settling: as those of `Description`.
        tests: the file that shows of it what the facets show of others.
    """

    schema: str
    settling: tuple[str, ...]
    tests: str


OUTLINES = {
    "gemm_grouped": Outline(
        "Tensor a, Tensor w_packed, Tensor scales, Tensor offsets, Tensor? zeros=None, Tensor? rows=None, "
        "Tensor? row_scale=None, Tensor? bias=None, str? activation=None, int? group_size=None, int? bits=None, "
        "str? tactic=None, str? weight_dtype=None, Tensor? global_scale=None, Tensor? minimums=None, "
        "bool batch_invariant=False, Tensor? super_scales=None, Tensor? super_minimums=None, Tensor? perm=None",
        ("w_packed", "scales", "zeros", "minimums", "super_scales", "super_minimums"),
        "test_grouped.py",
    )
}
"""Kinds whose rows are data: facets take a row of the output for each of the activations, and share K among blocks."""
