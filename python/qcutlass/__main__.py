"""`python -m qcutlass` is the command `qcutlass`."""

from __future__ import annotations

import os
import sys
from typing import Final

_COMPUTING: Final = ("quickstart", "eval", "generate", "chat", "quantize")


def main() -> None:
    """The command, in a process of its own."""
    # torch's threads would spin for milliseconds behind each parallel region, and with them whoever waits for one that
    # has no core: a token of SmolLM2 on two cores, one of them busy, takes 106 ms so and 47 otherwise. torch's OpenMP
    # runtime reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if len(sys.argv) > 1 and sys.argv[1] in _COMPUTING:
        _tell_load()

    from qcutlass.cli import app

    app(prog_name="qcutlass")


def _tell_load() -> None:
    """Says that others use this machine, which explains a slow run."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        print(f"note: other programs keep this machine busy (load {load:.1f} on {cores} cores)", file=sys.stderr)


if __name__ == "__main__":
    main()
