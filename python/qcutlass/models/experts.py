"""Mixtures of experts, which converted folders do not hold: how they are told, and what their users can do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from qcutlass.errors import UnsupportedError

_COUNTS: Final = (  # in configurations: of the experts that tokens are sent to
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
_NAME: Final = re.compile(r"(^|\.)(experts|block_sparse_moe)(\.|$)")


def check_configuration(values: Any, where: object) -> None:
    """Raises UnsupportedError if this is the configuration of a mixture of experts."""
    for name, count in _counts(values):
        raise _refused(where, f"{name} is {count}")


def check_names(names: Iterable[str], where: object) -> None:
    """Raises UnsupportedError if layers or tensors of such names belong to a mixture of experts."""
    for name in names:
        if _NAME.search(name):
            raise _refused(where, name)


def _counts(values: Any) -> Iterator[tuple[str, Any]]:
    """At any depth: `text_config`, `ffn_config`; a dense model may say 0 or 1."""
    for value in values if isinstance(values, list) else ():
        yield from _counts(value)
    for key, value in values.items() if isinstance(values, dict) else ():
        counts = value if isinstance(value, list) else [value]
        if key in _COUNTS and any(isinstance(count, int) and count > 1 for count in counts):
            yield key, value
        yield from _counts(value)


def _refused(where: object, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: a mixture of experts ({reason}); converted folders hold dense models. Load this one with "
        "transformers and call qcutlass.replace_linear(model, scheme), which packs the dense layers and leaves routers "
        "and experts as they are"
    )
