"""Rows and files as the GPU bench writes them, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import gpu_report, limits, schemes

GPU = "NVIDIA H200"


def row(
    shape: str, m: int, tactic: str, microseconds: float, scheme: str = "w4a16_g128", **more: Any
) -> dict[str, Any]:
    """A row of the selected tactic, unless `more` says otherwise; microseconds of 0 are to be filled in."""
    n, k = map(int, shape.split("x"))
    operands = schemes.parse(scheme).operands
    moved = (n * k // 2 + 2 * m * (n + k)) if operands == "16-bit" else n * k + m * (k + 2 * n)
    machine = limits.machine(GPU)
    assert machine is not None
    limit = 1e6 * machine.seconds(moved, 2 * m * n * k, operands)
    return {
        "scheme": scheme,
        "shape": shape,
        "m": m,
        "tactic": tactic,
        "selected": True,
        "qcutlass_us": microseconds,
        "spread": 0.01,
        "limit_us": limit,
        "limit_share": limit / microseconds if microseconds else None,
        "moved_bytes": moved,
    } | more


def compared(row: dict[str, Any], share: float, **peers: float) -> dict[str, Any]:
    """The row with a time at this share of the limit, and with peers that take so many times as long."""
    ours = row["limit_us"] / share
    times = {f"{key}_us": ratio * ours for key, ratio in peers.items()}
    measured = row | {"qcutlass_us": ours, "limit_share": share} | times
    return measured | gpu_report.comparison(measured, peers)


def write(path: Path, rows: list[dict[str, Any]], **facts: Any) -> Path:
    path.write_text(json.dumps({"title": gpu_report.TITLE, "facts": {"GPU": GPU} | facts, "rows": rows}))
    return path
