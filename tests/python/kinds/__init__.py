"""The kinds of products as the tests know them: an entry here gives a kind every facet."""

from __future__ import annotations

from tests.python.kinds.blockwise import BLOCKWISE
from tests.python.kinds.blockwise_quantized import QUANTIZED_BLOCKWISE
from tests.python.kinds.description import Description
from tests.python.kinds.float8 import FLOAT8_PRODUCTS
from tests.python.kinds.int8 import INT8
from tests.python.kinds.weight_only import WEIGHT_ONLY

DESCRIPTIONS: dict[str, Description] = {
    kind.name: kind for kind in (WEIGHT_ONLY, INT8, FLOAT8_PRODUCTS, BLOCKWISE, QUANTIZED_BLOCKWISE)
}
