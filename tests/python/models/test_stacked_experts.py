"""Float folders with one tensor for all experts of a block, as transformers keeps them in memory and may write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import Tensors
from tests.python.models.folders import write_model, write_tokenizer
from tests.python.models.mixtures import EXPERTS, KINDS, VOCABULARY, model_of
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import SCHEME, load, logits

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.formats.expert_rows import MODELS, rows_of
from qcutlass.models.inspection import inspect

pytest.importorskip("transformers", reason="needs transformers")


def saved(folder: Path, kind: str, seed: int, *, stacked: bool) -> Path:
    """A folder that transformers writes in 16 bits."""
    model_of(kind, seed % 2**31).half().save_pretrained(folder, save_original_format=not stacked)
    write_tokenizer(folder, VOCABULARY)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_quantised_as_those_with_tensors_for_each_expert(kind: str, tmp_path: Path, seed: int) -> None:
    for stacked in (True, False):
        folder = saved(tmp_path / f"floats-{stacked}", kind, seed, stacked=stacked)
        names = list(load_file(folder / "model.safetensors"))
        assert any(name.endswith("experts.gate_up_proj") for name in names) == stacked
        found = models.convert(folder, tmp_path / f"new-{stacked}", scheme=SCHEME, verify=True)
        assert found.layers == found.verified
    one, other = (load(tmp_path / f"new-{stacked}") for stacked in (True, False))
    assert torch.equal(logits(one), logits(other))
    one.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(one))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_methods_and_commands(kind: str, tmp_path: Path, seed: int) -> None:
    folder = saved(tmp_path / "floats", kind, seed, stacked=True)
    ids = torch.randint(0, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(seed))
    done = models.quantize_model(folder, tmp_path / "gptq", models.Method("gptq", SCHEME), calibration=ids)
    assert sum(".experts." in name for name in done.notes) == 2 * 3 * EXPERTS
    groups = {group.name: group for group in inspect(folder).groups}
    down = {"mixtral": "block_sparse_moe.experts.*.w2"}.get(kind, "mlp.experts.*.down_proj")
    assert groups[f"model.layers.*.{down}"].count == 2 * EXPERTS
    made = command("convert", folder, tmp_path / "new", "--bits", 4, "--group-size", 32, "--verify")
    assert made.exit_code == 0, made.output
    text = command("generate", tmp_path / "new", "--prompt", "5 6 7", "--max-new-tokens", 4)
    assert text.exit_code == 0, text.output


def test_shards_hold_them_too(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "floats"
    model_of("olmoe", seed % 2**31).half().save_pretrained(folder, save_original_format=False, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    write_tokenizer(folder, VOCABULARY)
    whole = saved(tmp_path / "whole", "olmoe", seed, stacked=False)
    for each in (folder, whole):
        models.convert(each, tmp_path / f"{each.name}-new", scheme=SCHEME)
    assert torch.equal(*(logits(load(tmp_path / f"{each}-new")) for each in ("floats", "whole")))


def test_matrices_worked_out_by_hand(tmp_path: Path) -> None:
    gate_up, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    tensors = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    folder = write_model(tmp_path / "model", tensors, {"model_type": "qwen3_moe"}, None)
    checkpoint = formats.load(folder)
    assert len(checkpoint) == 6
    for expert in range(2):
        found = {name: checkpoint[f"mlp.experts.{expert}.{name}_proj"].dequantize() for name in ("gate", "up", "down")}
        assert torch.equal(found["gate"], gate_up[expert, :2])
        assert torch.equal(found["up"], gate_up[expert, 2:])
        assert torch.equal(found["down"], down[expert])


def test_names_are_those_of_the_models_that_are_taken() -> None:
    for kind in (*MODELS, "gpt_oss", "llama4"):
        assert len(rows_of("model.layers.3.mlp.experts.gate_up_proj", (4, 6, 2), kind)) == 8 * (kind in MODELS)
    for name, shape in (
        ("experts.gate_up_proj", (4, 5, 2)), ("a.experts.gate_up_proj", (4, 6)), ("a.experts.up_proj", (4, 6, 2)),
        ("a.experts.down_proj", (4, 0, 2)), ("a.experts.gate_up_proj", (4, 5, 2)),
    ):  # fmt: skip
        assert rows_of(name, shape, "mixtral") == []


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_stay_floats_keep_names_that_transformers_reads(kind: str, tmp_path: Path, seed: int) -> None:
    """`load` fails where a tensor is absent, for which transformers puts random numbers in."""
    folder = saved(tmp_path / "floats", kind, seed, stacked=True)
    models.convert(folder, tmp_path / "new", scheme=SCHEME, skip=["lm_head", "*.experts.*"])
    expected = load(folder).state_dict()
    found = {name: part for name, part in load(tmp_path / "new").state_dict().items() if ".experts." in name}
    assert found
    assert all(torch.equal(part, expected[name]) for name, part in found.items())


def test_stacks_beside_tensors_of_one_expert(tmp_path: Path, seed: int) -> None:
    folder = saved(tmp_path / "floats", "qwen3_moe", seed, stacked=True)
    tensors: Tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    twice = tensors | {f"{name}.1.down_proj.weight": torch.ones(64, 40).half()}
    save_file(twice, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.weight' is also there"):
        models.convert(folder, tmp_path / "new")
    del tensors[f"{name}.down_proj"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expert 0 of 4 has no down projection"):
        models.convert(folder, tmp_path / "new")


def test_codes_in_stacks_are_refused(tmp_path: Path, seed: int) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe", seed, stacked=True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write_model(folder, tensors, json.loads((folder / "config.json").read_text()), None)
    with pytest.raises(UnsupportedError, match=r"a mixture of experts \(model\.layers\.0\.mlp\.experts\.down_proj\)"):
        models.convert(folder, tmp_path / "new")
