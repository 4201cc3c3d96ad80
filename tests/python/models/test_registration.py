"""Who opens a converted folder with transformers: with qcutlass imported, in any order, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.models.folders import RandomCut

from qcutlass import CheckpointError, models

pytest.importorskip("transformers", reason="needs transformers")

LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r})
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""


@pytest.fixture(scope="module")
def converted(random_cut: RandomCut, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "converted"
    models.convert(random_cut.gptq().folder, folder)
    return folder


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "imports",
    [
        "import qcutlass",
        "import transformers, qcutlass",
        "import transformers.modeling_utils, qcutlass",
        "import qcutlass, transformers.quantizers",
        "import importlib.util, qcutlass; assert importlib.util.find_spec('transformers.quantizers.auto')",
    ],
)
def test_importing_qcutlass_is_enough(imports: str, converted: Path) -> None:
    result = run(imports + LOAD.format(folder=str(converted)))
    assert result.stdout.strip() == "WeightOnlyLinear", result.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="such finders are no longer asked")
def test_finders_of_the_old_kind() -> None:
    code = """
import sys, qcutlass
sys.meta_path.insert(1, type("Finder", (), {"find_module": lambda self, name, path: None})())
import transformers.quantizers.auto as auto
print("qcutlass" in auto.AUTO_QUANTIZER_MAPPING)
"""
    result = run(code)
    assert result.stdout.strip() == "True", result.stderr


def test_two_finders_do_not_ask_each_other_forever() -> None:
    code = """
import sys, qcutlass
del sys.modules["qcutlass._registration"]
import qcutlass._registration as again
again.register()
import transformers.quantizers.auto as auto
print("qcutlass" in auto.AUTO_QUANTIZER_MAPPING)
"""
    result = run(code)
    assert result.stdout.strip() == "True", result.stderr


def test_nothing_of_the_import_system_stays_changed() -> None:
    code = """
        import sys, qcutlass
        assert "transformers" not in sys.modules
        before = [type(finder).__module__ for finder in sys.meta_path]
        import transformers.quantizers.auto as auto, inspect
        after = [type(finder).__module__ for finder in sys.meta_path]
        assert "qcutlass" in auto.AUTO_QUANTIZER_MAPPING and "qcutlass" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
        assert auto.__loader__ is auto.__spec__.loader and type(auto.__loader__).__module__ != "qcutlass._registration"
        assert "def register_quantizer" in inspect.getsource(auto)
        print(before.count("qcutlass._registration"), after.count("qcutlass._registration"))
    """
    result = run("\n".join(line.strip() for line in code.splitlines()))
    assert result.stdout.split() == ["2", "0"], result.stderr


ODD = "register_quantizer = register_quantization_config = lambda name: None\n"  # no decorators: TypeError


@pytest.mark.parametrize("lines", ["", ODD])
def test_transformers_that_is_too_old_or_broken_is_only_warned_of(lines: str, tmp_path: Path) -> None:
    for name in ("transformers", "transformers/quantizers", "transformers/utils"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    for name, text in {
        "quantizers/auto": f"loaded = True\n{lines}",
        "quantizers/base": "class HfQuantizer: pass\n",
        "utils/quantization_config": "class QuantizationConfigMixin: pass\n",
    }.items():
        (tmp_path / "transformers" / f"{name}.py").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import qcutlass; import transformers.quantizers.auto as a"
    )
    result = run(f"{code}; print(a.loaded)")
    assert result.stdout.strip() == "True", result.stderr
    assert "qcutlass does not register its quantiser: it needs transformers 5" in result.stderr


def test_without_qcutlass_a_converted_folder_is_refused(converted: Path, tmp_path: Path) -> None:
    """Random weights and a warning otherwise. The same for a folder that transformers has saved."""
    saved = run(
        f"import qcutlass{LOAD.format(folder=str(converted))}model.save_pretrained({str(tmp_path / 'saved')!r})"
    )
    assert saved.returncode == 0, saved.stderr
    for folder in (converted, tmp_path / "saved"):
        result = run(LOAD.format(folder=str(folder)))
        assert result.returncode != 0
        assert result.stdout == ""
        assert result.stderr.rstrip().splitlines()[-1].startswith("RuntimeError: You set `ignore_mismatched_sizes`")
        assert "Unknown quantization type, got qcutlass" in result.stderr
    layers = list(models.ConvertedFolder(converted))
    assert list(models.ConvertedFolder(tmp_path / "saved")) == layers


def test_folders_of_the_first_version_are_read(converted: Path, tmp_path: Path) -> None:
    """They have no guards."""
    tensors = load_file(converted / "model.safetensors")
    layers = models.ConvertedFolder(converted)
    old = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in layers}
    assert len(old) == len(tensors) - len(layers)
    save_file(old, tmp_path / "model.safetensors")
    config = json.loads((converted / "config.json").read_text())
    config["quantization_config"]["version"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = models.ConvertedFolder(tmp_path)
    assert list(again) == list(layers)
    assert again.rest == layers.rest
    for name, layer in again.items():
        assert torch.equal(models.weights_of(layer), models.weights_of(layers[name]))
    result = run(f"import qcutlass{LOAD.format(folder=str(tmp_path))}")
    assert result.stdout.strip() == "WeightOnlyLinear", result.stderr


def test_a_guard_that_is_none_is_refused(converted: Path, tmp_path: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(256, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((converted / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj: expected .*, got .*weight"):
        dict(models.ConvertedFolder(tmp_path))
