"""Other products of the same layer, timed beside qcutlass: one file for each, all behind `base.Peer`."""

from __future__ import annotations

from pathlib import Path

from bench.peers.base import Peer
from bench.peers.cublas import Cublas
from bench.peers.cutlass import Cutlass, CutlassInt8
from bench.peers.gemlite import Gemlite
from bench.peers.humming import Humming
from bench.peers.int4pack import Int4pack
from bench.peers.int_mm import IntMm
from bench.peers.scaled_mm import PromotedScaledMm, ScaledMm
from bench.peers.triton_blockwise import TritonBlockwise

CLASSES: tuple[type[Peer], ...] = (
    Cublas,
    Cutlass,
    CutlassInt8,
    IntMm,
    ScaledMm,
    PromotedScaledMm,
    Int4pack,
    Humming,
    Gemlite,
    TritonBlockwise,
)


def select(names: list[str], *, cutlass_library: Path | None = None, gemlite_autotune: str = "fast") -> list[Peer]:
    """Peers by name, in a fixed order; none of their libraries is loaded yet.

    Args:
        names: keys of `CLASSES`; none: all of them.
        cutlass_library: libqcutlass_bench_cutlass.so, for stock CUTLASS.
        gemlite_autotune: "default", "fast" or "max", for gemlite.

    Raises:
        ValueError: a name is not one of them.
    """
    keys = [peer.key for peer in CLASSES]
    if unknown := [name for name in names if name not in keys]:
        raise ValueError(f"peer {unknown[0]!r}: expected one of {', '.join(keys)}")
    everyone: list[Peer] = [
        Cublas(),
        Cutlass(cutlass_library),
        CutlassInt8(cutlass_library),
        IntMm(),
        ScaledMm(),
        PromotedScaledMm(),
        Int4pack(),
        Humming(),
        Gemlite(gemlite_autotune),
        TritonBlockwise(),
    ]
    return [peer for peer in everyone if not names or peer.key in names]
