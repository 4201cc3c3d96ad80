"""Linear layers of public models, as (N, K) = (out_features, in_features)."""

from __future__ import annotations

from typing import Final, TypeAlias

Shape: TypeAlias = tuple[int, int]

MODELS: Final[dict[str, list[Shape]]] = {
    "smollm2-135m": [(576, 576), (192, 576), (1536, 576), (576, 1536)],
    "llama2-7b": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
    "llama2-13b": [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)],
    "llama2-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "llama3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
}
SEPARATE: Final[dict[str, list[Shape]]] = {
    "smollm2-135m": [(960, 576), (3072, 576)],
    "llama2-7b": [(11008, 4096)],
    "llama2-13b": [(13824, 5120)],
    "llama2-70b": [(1024, 8192), (28672, 8192)],
    "llama3-8b": [(1024, 4096), (14336, 4096)],
}
"""Layers of the same models where query, key and value, or gate and up, are separate; of SmolLM2, which has them so
above, fused."""

BENCH: Final[list[Shape]] = [
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (6144, 4096),
    (10240, 8192),
]
MAIN: Final = BENCH[:4]


def parse(names: list[str]) -> list[Shape]:
    """Shapes from names: "main", "bench", "all", a model's name, or "NxK"; each once, in order.

    Raises:
        ValueError: a name is none of these.

    Example:
        >>> parse(["smollm2-135m", "64x128"])
        [(576, 576), (192, 576), (1536, 576), (576, 1536), (64, 128)]
    """
    groups = MODELS | {"main": MAIN, "bench": BENCH, "all": [shape for shapes in MODELS.values() for shape in shapes]}
    found: list[Shape] = []
    for name in names:
        n, _, k = name.partition("x")
        if name in groups:
            found += groups[name]
        elif n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0:
            found.append((int(n), int(k)))
        else:
            raise ValueError(f"shape {name!r}: expected NxK, say 4096x14336, or one of {', '.join(groups)}")
    return list(dict.fromkeys(found))
