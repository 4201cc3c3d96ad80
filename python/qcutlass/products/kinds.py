"""The table of the kinds of products."""

from __future__ import annotations

from typing import Final

from qcutlass.products.blockwise import BLOCKWISE
from qcutlass.products.float8 import FLOAT8
from qcutlass.products.grouped import GROUPED
from qcutlass.products.int4 import INT4
from qcutlass.products.int8 import INT8
from qcutlass.products.kind import Kind
from qcutlass.products.weight_only import WEIGHT_ONLY

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (WEIGHT_ONLY, GROUPED, INT4, INT8, FLOAT8, BLOCKWISE)}
"""Each kind by the name of its operator."""
