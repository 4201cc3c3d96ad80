"""What `import qcutlass` and the command load, and when: torch takes seconds."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import qcutlass
from qcutlass import _public

HEAVY = {"torch", "numpy", "gguf", "transformers", "matplotlib", "qcutlass._public", "qcutlass.products"}
MOST_SECONDS = 1.0  # of the processor, for help and errors of the command line
MOST_SECONDS_BEYOND_TORCH = 0.3

LINES = {
    "help": (["--help"], 0),
    "no arguments": ([], 2),
    **{f"help of {name}": ([name, "--help"], 0) for name in ("convert", "quantize", "generate", "quickstart", "tune")},
    "a misspelt command": (["convrt"], 2),
    "a misspelt option": (["generate", "folder", "--promt", "x"], 2),
    "an argument of the wrong type": (["generate", "folder", "--prompt", "x", "--threads", "many"], 2),
    "a missing argument": (["quantize", "model"], 2),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def printed(code: str) -> str:
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_needs_nothing_heavy(line: str) -> None:
    arguments, status = LINES[line]
    result = run("-X", "importtime", "-m", "qcutlass", *arguments)
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", result.stderr, flags=re.MULTILINE))
    assert {"qcutlass", "typer"} <= imported
    assert imported & HEAVY == set()
    assert result.returncode == status
    assert "Usage" in result.stdout + result.stderr


def test_help_takes_little_time() -> None:
    """Time of the processor, which neighbours lengthen less than that of a clock."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("-m", "qcutlass", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) <= MOST_SECONDS


MAIN = """
import os, sys
from qcutlass import __main__ as command
assert "torch" not in sys.modules
os.getloadavg = lambda: ({load}, 0, 0)
os.cpu_count = lambda: 2
sys.argv = ["qcutlass", {name!r}, "--help"]
try:
    command.main()
except SystemExit:
    pass
print(os.environ["OMP_WAIT_POLICY"])
"""


def test_torchs_threads_sleep_in_the_command_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert printed(MAIN.format(load=1, name="generate")).splitlines()[-1] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert printed(MAIN.format(load=1, name="generate")).splitlines()[-1] == "active"


@pytest.mark.parametrize(("load", "name", "told"), [(1.9, "eval", False), (2.3, "eval", True), (9, "inspect", False)])
def test_commands_that_compute_tell_of_a_busy_machine(load: float, name: str, told: bool) -> None:
    line = f"note: other programs keep this machine busy (load {load:.1f} on 2 cores)"
    assert (line in run("-c", MAIN.format(load=load, name=name)).stderr.splitlines()) is told


def test_the_package_adds_little_to_torch() -> None:
    code = "import time, torch; begin = time.process_time(); import qcutlass; print(time.process_time() - begin)"
    assert min(float(printed(code)) for _ in range(3)) <= MOST_SECONDS_BEYOND_TORCH


def test_torch_is_loaded_with_the_first_name_that_needs_it() -> None:
    code = """
import sys, qcutlass
qcutlass.UnsupportedError, qcutlass.errors, qcutlass.__version__, dir(qcutlass)
try:
    qcutlass.gem
except AttributeError as error:
    print(error, "torch" in sys.modules)
qcutlass.{name}
print("torch" in sys.modules, {name!r} in vars(qcutlass), "qcutlass.models" in sys.modules)
"""
    for name in ("gemm", "WeightOnly", "blockwise", "formats", "fuse_block"):
        lines = printed(code.format(name=name)).splitlines()
        needed = name == "fuse_block"
        assert lines == ["module 'qcutlass' has no attribute 'gem' False", f"True True {needed}"], name


def test_every_name_is_there() -> None:
    names = {name for name in vars(_public) if not name.startswith("_")}
    assert set(qcutlass.__all__) - names == {"CheckpointError", "UnsupportedError", "__version__", "blockwise", "moe"}
    assert names <= set(qcutlass.__all__)
    assert all(getattr(qcutlass, name) is getattr(_public, name) for name in names)
    assert set(dir(qcutlass)) == {*qcutlass.__all__, *qcutlass._PARTS}  # what completion offers
    assert printed("from qcutlass import *; print(gemm.__module__, blockwise.__name__)").endswith("qcutlass.blockwise")


@pytest.mark.parametrize(
    "imports",
    [
        "import qcutlass, torch",
        "import torch, qcutlass",
        "import qcutlass, torch.nn",
        "import qcutlass.products.checks, torch",  # torch is first imported by a part of what registers operators
        "import qcutlass.layers, torch",
        "import qcutlass, transformers",
    ],
)
def test_operators_are_there_with_torch(imports: str) -> None:
    code = f"{imports}; import torch; print(torch.ops.qcutlass.gemm, torch.ops.qcutlass.gemm_out)"
    assert printed(code) == "qcutlass.gemm qcutlass.gemm_out"


def test_an_exported_program_needs_the_import_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "program.pt2")
    printed(f"""
import torch, qcutlass
packed = qcutlass.preprocess_weights(torch.randint(0, 16, (32, 64), dtype=torch.uint8), bits=4)
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("scales", torch.ones(1, 32))
    def forward(self, a):
        return qcutlass.gemm(a, self.packed, self.scales)
torch.export.save(torch.export.export(Layer(), (torch.ones(2, 64),)), {path!r})
""")
    code = f"import qcutlass, torch; print(*torch.export.load({path!r}).module()(torch.ones(2, 64)).shape)"
    assert printed(code) == "2 32"


def test_a_torch_that_is_too_old_or_broken_is_only_warned_of(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("loaded = True\n")
    result = run(
        "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import qcutlass, torch; print(torch.loaded)"
    )
    assert result.stdout.strip() == "True", result.stderr
    assert "qcutlass does not register its operators" in result.stderr


def test_compiled_code_may_be_the_first_to_use_a_name() -> None:
    code = """
import qcutlass, torch
from qcutlass.products.weights import preprocess_weights
packed = preprocess_weights(torch.randint(0, 16, (32, 64), dtype=torch.uint8), bits=4)
assert "gemm" not in vars(qcutlass)
compiled = torch.compile(lambda a: qcutlass.gemm(a, packed, torch.ones(1, 32)), fullgraph=True, backend="eager")
print(*compiled(torch.ones(2, 64)).shape)
"""
    assert printed(code) == "2 32"
