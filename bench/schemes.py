"""Quantisation schemes by name: ``w4a16_g128``, ``w8a16_channel``, ``w4a16_g64_int``, ``w4a16_g32_real_bf16``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import torch

from qcutlass import testing

_PATTERN: Final = re.compile(r"w([48])a16_(?:g([1-9]\d*)|channel)(?:_(int|real))?(?:_(f16|bf16|f32))?")
_DTYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Scheme:
    """What a name stands for.

    Attributes:
        name: as given.
        bits: of a weight.
        group_size: columns that share a scale; None: one scale a channel.
        zeros: "none" (symmetric), "int" or "real".
        dtype: of the activations; None: the bench's default (float16 on a GPU, float32 on the CPU).
    """

    name: str
    bits: int
    group_size: int | None
    zeros: testing.Zeros
    dtype: torch.dtype | None

    def case(self, m: int, n: int, k: int, default_dtype: torch.dtype) -> testing.Case:
        """The product of this scheme at (m, n, k)."""
        return testing.Case(
            m,
            n,
            k,
            bits=self.bits,
            group_size=self.group_size or k,
            zeros=self.zeros,
            dtype=self.dtype or default_dtype,
        )


def parse(name: str) -> Scheme:
    """A scheme from its name.

    Raises:
        ValueError: the name does not follow the pattern.

    Example:
        >>> parse("w4a16_g64_int").group_size
        64
    """
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise ValueError(
            f"scheme {name!r}: expected w<4|8>a16_<g<size>|channel>[_int|_real][_f16|_bf16|_f32], say w4a16_g128"
        )
    bits, group, zeros, dtype = match.groups()
    kinds: dict[str | None, testing.Zeros] = {None: "none", "int": "int", "real": "real"}
    return Scheme(name, int(bits), int(group) if group else None, kinds[zeros], _DTYPES[dtype] if dtype else None)
