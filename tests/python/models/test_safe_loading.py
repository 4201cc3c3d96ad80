"""`load_model` reads what qcutlass has checked, no pickle, and runs no code of a folder."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.models.folders import RandomCut

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, models

pytest.importorskip("transformers", reason="needs transformers")


def copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


def configured(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize("kind", ["floats", "gptq"])
def test_weights_come_from_the_checked_file(kind: str, random_cut: RandomCut, tmp_path: Path) -> None:
    """A pickle beside a file of a name that transformers does not look for; a configuration that names another."""
    from qcutlass.models.transformers import load_model

    folder = copied(getattr(random_cut, kind)().folder, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in load_file(folder / "other.safetensors").items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    configured(folder, transformers_weights="adapter_model.bin")
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="two sources of weights"):
        load_model(folder)
    configured(folder, transformers_weights=None)
    model, _ = load_model(folder)
    assert torch.equal(model.model.norm.weight, random_cut.rest["model.norm.weight"].float())
    shutil.copyfile(folder / "other.safetensors", folder / "rest.safetensors")
    with pytest.raises(CheckpointError, match="is also in"):
        load_model(folder)
    save_file({"more": torch.ones(1)}, folder / "rest.safetensors")
    with pytest.raises(UnsupportedError, match=r"one \.safetensors file, or those that an index lists"):
        load_model(folder)


def test_the_quantiser_refuses_files_that_were_not_checked(random_cut: RandomCut, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    folder = copied(random_cut.gptq().folder, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(load_file(folder / "other.safetensors"), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: transformers reads it, qcutlass .*other\.safetens"):
        AutoModelForCausalLM.from_pretrained(folder, config=checkpoint_config(folder), use_safetensors=False)


def test_code_of_a_folder_is_not_run_and_nobody_is_asked(random_cut: RandomCut, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (classes := tmp_path / "evil.py").write_text(
        f"{code}from transformers import PreTrainedConfig, PreTrainedTokenizerFast\n"
        "class EvilConfig(PreTrainedConfig):\n    model_type = 'evil'\n"
        "class EvilTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    folders = {}
    for name, values in {
        "config": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}},
        "model": {"auto_map": {"AutoModelForCausalLM": "evil.EvilModel", "AutoConfig": "evil.EvilConfig"}},
        "tokenizer": {},
    }.items():
        folder = configured(copied(random_cut.gptq().folder, tmp_path / name), **values)
        shutil.copyfile(classes, folder / "evil.py")
        folders[name] = folder
    path = folders["tokenizer"] / "tokenizer_config.json"
    values = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    script = """
import sys
from pathlib import Path
from qcutlass.models.opening import open_source
from qcutlass.models.transformers import checkpoint_config, load_model
for folder in sys.argv[1:]:
    for read in (load_model, checkpoint_config, lambda folder: open_source(Path(folder), "auto", None).tokenizer()):
        try:
            read(folder)
        except Exception as error:
            print(type(error).__name__, error, file=sys.stderr)
"""
    command = [sys.executable, "-c", script, *map(str, folders.values())]
    result = subprocess.run(command, input="y\n" * 99, capture_output=True, text=True, check=True)
    assert result.stdout == ""  # where the question would be
    assert not (tmp_path / "ran").exists(), result.stderr
    assert "UnsupportedError" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_implementation", "somebody/kernel"),
        ("_attn_implementation", "flash_attention_2"),
        ("text_config", {"attn_implementation": {"": "somebody/kernel"}}),
        ("experts_implementation", "somebody/kernel"),
    ],
)
def test_kernels_that_a_configuration_names_are_not_fetched(
    name: str, value: Any, random_cut: RandomCut, tmp_path: Path
) -> None:
    from qcutlass.models.transformers import load_model

    folder = configured(copied(random_cut.gptq().folder, tmp_path / "model"), **{name: value})
    with pytest.raises(UnsupportedError, match="which may be code from elsewhere"):
        load_model(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00000-model-00001-of-00001.safetensors"])
def test_what_transformers_would_read_beside_the_model(name: str, random_cut: RandomCut, tmp_path: Path) -> None:
    from qcutlass.models.transformers import load_model

    folder = copied(random_cut.gptq().folder, tmp_path / "model")
    (folder / name).write_bytes(b"{}")
    with pytest.raises(UnsupportedError, match="adapters and shards of a distributed model are not read"):
        load_model(folder)


def test_every_from_pretrained_says_so() -> None:
    package = Path(qcutlass.__file__).parent
    found = 0
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                options = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                expected = "SAFE_WEIGHTS" if "Model" in ast.unparse(node.func) else "SAFE"
                assert any(expected in option for option in options), f"{path}:{node.lineno}"
                found += 1
    assert found >= 5
    assert models.extras.SAFE == {"trust_remote_code": False}
    assert models.extras.SAFE_WEIGHTS == {"trust_remote_code": False, "use_safetensors": True}
