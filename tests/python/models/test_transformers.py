"""Models that transformers makes, with qcutlass's layers: logits, text, saving, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import as_awq, stored
from tests.python.models.folders import BLOCKS, RandomCut, SmolCut, write_model
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, models
from qcutlass.layers import WeightOnlyLinear
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")

KINDS = ("gptq", "awq", "compressed")


def load(folder: Path, dtype: torch.dtype = torch.float32, *, direct: bool = False, **keywords: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    if direct:
        keywords["config"] = checkpoint_config(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **keywords)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits  # type: ignore[no-any-return]


@pytest.fixture
def ids(seed: int) -> Tensor:
    return torch.randint(0, 49152, (1, 24), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def converted(smol: SmolCut, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smol") / "converted"  # of its own: a worker may come back to this file
    models.convert(smol.gptq().folder, folder, verify=True)
    return folder


def check(model: Any, smol: SmolCut, kind: str, ids: Tensor) -> None:
    cut = getattr(smol, kind)()
    exact, dense = (logits(smol.dense(cut, dtype), ids) for dtype in (torch.float64, torch.float32))
    ratio = noise_ratio(logits(model, ids), dense, exact)
    assert ratio <= NOISE
    layers = [name for name, module in model.named_modules() if isinstance(module, WeightOnlyLinear)]
    assert layers == sorted(cut.weights, key=layers.index)
    assert all(torch.equal(models.weights_of(model.get_submodule(name)), cut.weights[name]) for name in layers)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_other_formats_are_loaded_directly(kind: str, smol: SmolCut, ids: Tensor) -> None:
    model = load(getattr(smol, kind)().folder, direct=True)
    check(model, smol, kind, ids)
    assert (model.model.layers[0].mlp.up_proj.perm is not None) == (kind == "gptq")


@pytest.mark.parametrize("kind", KINDS)
def test_devices_are_filled_by_the_size_of_the_layers(kind: str, random_cut: RandomCut) -> None:
    """`device_map="auto"` counts a layer by its stored bytes, not as a float layer or as nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.accelerate import compute_module_sizes

    from qcutlass.models.transformers import QcutlassConfig, QcutlassQuantizer

    folder = getattr(random_cut, kind)().folder
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    quantizer = QcutlassQuantizer(QcutlassConfig())
    quantizer._process_model_before_weight_loading(model, [str(folder / "model.safetensors")])
    sizes, _ = compute_module_sizes(model, quantizer)
    stored = load_file(folder / "model.safetensors")
    for name in random_cut.names:
        assert sizes[name] == sum(tensor.nbytes for key, tensor in stored.items() if key.startswith(f"{name}."))
    assert sizes["model.norm"] == 2 * 128


@pytest.mark.parametrize("direct", [False, True])
def test_a_device_map_is_followed(direct: bool, converted: Path, smol: SmolCut, ids: Tensor) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    folder = smol.gptq().folder if direct else converted
    model = load(folder, direct=direct, device_map="auto", max_memory={"cpu": 2**33})
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    check(model, smol, "gptq", ids)


def test_a_converted_folder_is_loaded(converted: Path, smol: SmolCut, ids: Tensor) -> None:
    model = load(converted)
    check(model, smol, "gptq", ids)
    assert next(model.parameters()).dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.float16


def test_noise_is_a_bound_that_tells_wrong_weights(converted: Path, smol: SmolCut, ids: Tensor) -> None:
    """One zero point in one group of one channel."""
    model = load(converted)
    model.model.layers[1].mlp.down_proj.zeros[3, 100] += 1
    cut = smol.gptq()
    exact, dense = (logits(smol.dense(cut, dtype), ids) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(model, ids), dense, exact) > 10 * NOISE


def test_the_same_text_is_generated(converted: Path, smol: SmolCut, ids: Tensor) -> None:
    model, dense = load(converted), smol.dense(smol.gptq(), torch.float32)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))


def test_fused_layers_generate_the_same_text_and_are_saved_as_they_were(
    smol: SmolCut, ids: Tensor, tmp_path: Path
) -> None:
    model, together = (load(smol.awq().folder, direct=True) for _ in range(2))
    found = qcutlass.fuse_projections(together)
    assert (len(found.fused), found.skipped) == (2 * BLOCKS, {})
    assert torch.equal(logits(together, ids), logits(model, ids))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(together.generate(ids, **options), model.generate(ids, **options))
    together.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))


def test_bfloat16_and_batches(converted: Path, ids: Tensor) -> None:
    model = load(converted, torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16
    out = model.generate(ids.view(2, 12), max_new_tokens=4, do_sample=False, pad_token_id=2)
    assert out.shape == (2, 16)
    exact = logits(load(converted), ids)
    agreement = (logits(model, ids).argmax(-1) == exact.argmax(-1)).float().mean()
    assert agreement > 0.5


@pytest.mark.parametrize("direct", [False, True])
def test_saved_models_are_converted_folders(
    direct: bool, converted: Path, smol: SmolCut, ids: Tensor, tmp_path: Path
) -> None:
    model = load(smol.gptq().folder, direct=True) if direct else load(converted)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again, ids), logits(model, ids))
    found, expected = models.ConvertedFolder(tmp_path / "saved"), models.ConvertedFolder(converted)
    assert set(found) == set(expected)
    assert found.spec.default == expected.spec.default
    assert torch.equal(found["model.layers.1.mlp.up_proj"].w_packed, expected["model.layers.1.mlp.up_proj"].w_packed)  # type: ignore[arg-type]


def test_w8a8_layers_quantise_their_activations(smol: SmolCut, ids: Tensor, tmp_path: Path) -> None:
    cut = smol.w8a8()
    model = load(cut.folder, direct=True)
    layer = model.model.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "Int8Linear"
    assert layer.symmetric
    assert torch.equal(models.weights_of(layer), cut.weights["model.layers.0.self_attn.q_proj"])
    out, dense = logits(model, ids), logits(smol.dense(cut, torch.float32), ids)
    assert 0 < float((out - dense).norm() / dense.norm()) < 0.1
    models.convert(cut.folder, tmp_path / "converted", verify=True)
    assert torch.equal(logits(load(tmp_path / "converted"), ids), out)


def test_a_base_model_takes_its_part(converted: Path, ids: Tensor) -> None:
    from transformers import AutoModel

    model, whole = AutoModel.from_pretrained(converted, dtype=torch.float32), load(converted)
    assert isinstance(model.layers[0].mlp.up_proj, WeightOnlyLinear)
    with torch.inference_mode():
        assert torch.equal(model(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_a_float_layer_of_a_quantised_checkpoint_stays_one(smol: SmolCut, ids: Tensor, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    cut = smol.awq()
    tensors = {key: tensor for key, tensor in load_file(cut.folder / "model.safetensors").items() if name not in key}
    tensors[f"{name}.weight"] = cut.weights[name].half()
    config = json.loads((cut.folder / "config.json").read_text())
    folder = write_model(tmp_path / "mixed", tensors, config, config["quantization_config"])
    direct = load(folder, direct=True)
    assert type(direct.model.layers[0].mlp.down_proj) is torch.nn.Linear
    models.convert(folder, tmp_path / "new", verify=True)
    assert torch.equal(logits(load(tmp_path / "new"), ids), logits(direct, ids))


@pytest.mark.parametrize("suffix", ["w_packed", "zeros", "layout", "scales"])
def test_a_converted_folder_without_a_tensor_is_refused(suffix: str, converted: Path, tmp_path: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{suffix}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((converted / "config.json").read_bytes())
    with pytest.raises((CheckpointError, UnsupportedError), match=r"layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_another_layout_is_refused(converted: Path, tmp_path: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.layout"][0] -= 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((converted / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj: the weights were packed in layout version"):
        load(tmp_path)


def test_layers_without_a_place_are_refused(smol: SmolCut, tmp_path: Path, seed: int) -> None:
    tensors = load_file(smol.awq().folder / "model.safetensors")
    stray = {
        f"model.layers.1.mlp.experts.0.up_proj.{key}": tensor
        for key, tensor in as_awq(stored(16, 64, 64, seed=seed)).items()
    }
    config = json.loads((smol.awq().folder / "config.json").read_text())
    folder = write_model(tmp_path / "moe", tensors | stray, config, config["quantization_config"])
    with pytest.raises(UnsupportedError, match=r"experts\.0\.up_proj: LlamaForCausalLM has no such"):
        load(folder, direct=True)


def test_importing_qcutlass_does_not_import_transformers() -> None:
    code = "import sys, qcutlass, qcutlass.cli, qcutlass.models; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcutlass.models.extras import import_transformers

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(qcutlass.UnsupportedError, match=r"qcutlass\[models\]"):
        import_transformers("this")
