"""All mutants."""

from __future__ import annotations

from tests.python.device_mutants import hopper, loops, others
from tests.python.device_mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *loops.STREAM,
    *loops.MULTISTAGE,
    *loops.BLOCKWISE,
    *loops.GROUPS,
    *loops.OUTPUT,
    *hopper.RINGS_OF_WGMMA,
    *hopper.WGMMA_SS,
    *hopper.WGMMA_RS,
    *hopper.WGMMA_GROUPS,
    *hopper.SHARES_OF_K,
    *others.EXPERTS,
    *others.STEPS_OF_MIXTURES,
    *others.GATES,
    *others.NORMS,
    *others.QUANTISERS,
    *others.DEQUANTISERS,
)
