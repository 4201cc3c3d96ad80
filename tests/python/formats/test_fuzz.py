"""Damaged checkpoints of all kinds: a layer comes out as it must be, or CheckpointError or UnsupportedError does.

QCUTLASS_FUZZ_INPUTS: how many are tried, 6000 by default; QCUTLASS_FUZZ_SEED: which, 1 by default.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from tests.python.formats.fuzz_corpus import subjects
from tests.python.formats.fuzzing import attempt, little_time_and_memory, load_all, write_files

from qcutlass.formats.gguf_blocks import QUANTIZED

INPUTS = int(os.environ.get("QCUTLASS_FUZZ_INPUTS", "6000"))
SEED = int(os.environ.get("QCUTLASS_FUZZ_SEED", "1"))
LAYERS = {"gguf": len(QUANTIZED) + 2, "converted shards": 2, "mxfp4": 6, "stacked floats": 6}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, to know how much memory is in use")
@pytest.mark.parametrize("subject", subjects())
def test_damaged_checkpoints(subject: str, tmp_path: Path) -> None:
    write_files(tmp_path, subjects()[subject])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_all(tmp_path) == LAYERS.get(subject, 1)
        count = -(-INPUTS // len(subjects()))
        with little_time_and_memory():
            survived = sum(attempt(subject, SEED, index, tmp_path) > 0 for index in range(count))
    assert 0 < survived < count
