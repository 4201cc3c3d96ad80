"""Folders with one tensor for all experts of a block, as transformers keeps them in memory and may write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import Tensors
from tests.python.models.folders import write_model, write_tokenizer
from tests.python.models.mixtures import EXPERTS, KINDS, VOCABULARY, MixtureCut, model_of
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import SCHEME, load, logits

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.formats.expert_rows import MODELS, USUAL, WORDS, rows_of, scale_rows_of
from qcutlass.models.inspection import inspect

pytest.importorskip("transformers", reason="needs transformers")
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


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


def with_stacks(source: Path, folder: Path) -> Path:
    """An fp8 folder with the tensors of experts joined, as transformers has them."""
    tensors: Tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    words = WORDS.get(config["model_type"], USUAL)
    for block in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        name = f"{block.replace('.block_sparse_moe', '.mlp')}.experts"
        for suffix, ending in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            gate, up, down = (
                [tensors.pop(f"{block}.experts.{expert}.{word}.{suffix}") for expert in range(EXPERTS)]
                for word in words
            )
            tensors[f"{name}.gate_up_proj{ending}"] = torch.stack(
                [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            )
            tensors[f"{name}.down_proj{ending}"] = torch.stack(down)
    write_model(folder, tensors, config, config.pop("quantization_config"))
    write_tokenizer(folder, VOCABULARY)
    return folder


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe"])
def test_fp8_is_read_as_that_with_tensors_for_each_expert(kind: str, tmp_path: Path) -> None:
    """In blocks; as it is, converted, and bit for bit what transformers dequantises."""
    cut = MixtureCut(tmp_path, kind).fp8()
    folder = with_stacks(cut.folder, tmp_path / "stacked")
    checkpoint = formats.load(folder)
    for name, exact in cut.weights.items():
        assert torch.equal(checkpoint[name].dequantize(torch.float32), exact)
    dequantised = Fp8Dequantize(None)
    tensors = load_file(folder / "model.safetensors")
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    whole = dequantised._dequantize_one(tensors[stack], tensors[f"{stack}_scale_inv"], torch.float32)
    gate, up, _ = WORDS.get(kind, USUAL)
    block = f"model.layers.1.{'block_sparse_moe' if kind in WORDS else 'mlp'}.experts"
    read = torch.cat([checkpoint[f"{block}.3.{part}"].dequantize(torch.float32) for part in (gate, up)])
    assert torch.equal(read, whole[3])
    models.convert(folder, tmp_path / "new", verify=True)
    models.convert(cut.folder, tmp_path / "other", verify=True)
    expected = logits(load(tmp_path / "other"))
    assert torch.equal(logits(load(tmp_path / "new")), expected)
    assert torch.equal(logits(load(folder, direct=True)), expected)
    groups = {group.name: group.count for group in inspect(folder).groups}
    assert groups[f"{block.replace('.1.', '.*.')}.*.{up}"] == 2 * EXPERTS


@pytest.mark.parametrize(
    ("rows", "scales", "block", "expected"),
    [
        (512, (2, 4, 3), 128, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (512, (2, 4, 3), None, [(0, 2), (2, 2), (4, 2), (6, 2)]),  # 128, where nothing says
        (80, (2, 2, 1), 128, [(0, 1), (1, 1), (2, 1), (3, 1)]),  # a block each, though one would do
        (80, (2, 1, 1), 128, [(0, 1), (0, 1), (1, 1), (1, 1)]),  # one for both
        (512, (2, 1, 1), None, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (512, (2, 2, 1), None, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (384, (2, 3, 3), 128, None),  # the second has rows of gate and of up
        (384, (2, 4, 3), 128, None),  # of 96 rows, or of 128 and of 64
        (512, (2, 1, 1), 128, None),
        (512, (3, 4, 3), 128, None),
        (512, (2, 4), 128, None),
        (512, (2, 4, 0), 128, None),
    ],
)
def test_scales_of_gate_and_of_up(
    rows: int, scales: tuple[int, ...], block: int | None, expected: list[tuple[int, int]] | None
) -> None:
    weights = rows_of("mlp.experts.gate_up_proj", (2, rows, 384), "olmoe")
    found = scale_rows_of(weights, scales, block)
    assert (found and [part[1:] for part in found]) == expected
    assert found is None or [f"{part.name}_scale_inv" for part in weights] == [part.name for part in found]


@pytest.mark.parametrize("change", ["blocks of both", "int", "absent", "of one expert too"])
def test_fp8_of_other_forms_is_refused(change: str, tmp_path: Path) -> None:
    """By name; e4m3 weights without scales were refused before."""
    folder = with_stacks(MixtureCut(tmp_path, "olmoe").fp8().folder, tmp_path / "stacked")
    tensors: Tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = tensors.pop(f"{name}_scale_inv")
    expected: type[Exception] = UnsupportedError
    match = rf"{name}_scale_inv: expected scales of floats .* for weights \[4, 128, 64\], .* up alone, got "
    if change == "blocks of both":
        tensors[f"{name}_scale_inv"] = scales[:, :3].contiguous()
    elif change == "int":
        tensors[f"{name}_scale_inv"] = scales.to(torch.int32)
    elif change == "absent":
        match = rf"{name}(\)|: expected floats)"
    else:
        tensors[f"{name}_scale_inv"] = scales
        tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"] = scales[2, 2:].clone()
        expected, match = CheckpointError, "up_proj.weight_scale_inv' is also there"
    write_model(folder, tensors, config, config.pop("quantization_config"))
    for read in (lambda: models.convert(folder, tmp_path / "new"), lambda: load(folder, direct=True)):
        with pytest.raises(expected, match=match):
            read()
