"""Where compiled steps are kept, and what becomes of steps that cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers")

VARIABLES = "TORCHINDUCTOR_CACHE_DIR", "QCUTLASS_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "TRITON_CACHE_DIR"
LLAMA = "from transformers.models.llama.modeling_llama import LlamaModel"
COMPILER = "import torch._dynamo, torch._inductor.codecache"  # which sets torch's variable
PLACES: dict[str, tuple[str, dict[str, str], str]] = {  # what is imported before, variables, the folder
    "the user's caches": ("", {}, "users/qcutlass/inductor"),
    "behind transformers": (LLAMA, {}, "users/qcutlass/inductor"),
    "behind torch's compiler": (COMPILER, {"QCUTLASS_CACHE_DIR": "ours"}, "ours/inductor"),
    "torch's variable": (COMPILER, {"QCUTLASS_CACHE_DIR": "ours", "TORCHINDUCTOR_CACHE_DIR": "own"}, "own"),
}


def printed(code: str, **variables: object) -> str:
    """What a fresh process prints, of whose environment nothing else names a cache."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {name: str(value) for name, value in variables.items()}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("place", PLACES)
def test_compiled_code_stays_in_the_users_cache(place: str, tmp_path: Path) -> None:
    before, variables, folder = PLACES[place]
    chosen = {name: tmp_path / value for name, value in variables.items()}
    code = f"{before}\nfrom qcutlass.models.stepping import compiled_code\nprint(compiled_code())"
    found = printed(code, XDG_CACHE_HOME=tmp_path / "users", TMPDIR=tmp_path, **chosen)
    assert found == str(tmp_path / folder)


def test_torch_compiles_into_that_folder(tmp_path: Path) -> None:
    code = """
import torch, torch._dynamo
from qcutlass.models.compiling import compiled
print(compiled(lambda x: x.sin() + 1)(torch.zeros(2)).tolist())
"""
    assert printed(code, QCUTLASS_CACHE_DIR=tmp_path / "ours", TMPDIR=tmp_path) == "[1.0, 1.0]"
    assert list((tmp_path / "ours/inductor").rglob("*.py"))
    assert not list(tmp_path.glob("torchinductor_*/**/*.py"))
