"""The command line and the checkpoints it reads: small real files, and damaged ones."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from bench.gguf_weights import random_gguf_weights
from safetensors.torch import save_file
from tests.python.formats.gguf_files import KINDS
from typer.testing import CliRunner

import qcutlass
from qcutlass import formats, testing
from qcutlass.cli import app
from qcutlass.cli.quickstart import default_model
from qcutlass.formats import CanonicalLinear

GGUF_TYPES = {name: gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0")}
SHAPE = (48, 96)


def qcutlass_command(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))


def weights(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (rows, columns)).astype(np.float32)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", weights(64, SHAPE[1]))
    writer.add_tensor("blk.0.attn_norm.weight", weights(1, SHAPE[1])[0])
    for block, kind in enumerate(GGUF_TYPES.values()):
        data = weights(*SHAPE, seed=block)
        data[3, :32] = 0.25  # a group without spread
        writer.add_tensor(f"blk.{block}.ffn_up.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.weight", weights(*SHAPE).astype(np.float16))
    writer.add_tensor(
        "blk.0.ffn_down.weight",
        gguf.quants.quantize(weights(*SHAPE), gguf.GGMLQuantizationType.Q5_0),
        raw_dtype=gguf.GGMLQuantizationType.Q5_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def safetensors_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    tensors = {
        "model.embed_tokens.weight": torch.from_numpy(weights(64, 96)),
        "model.layers.0.self_attn.q_proj.weight": torch.from_numpy(weights(48, 96)).half(),
        "model.layers.0.mlp.up_proj.weight": torch.from_numpy(weights(80, 100)).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": torch.from_numpy(weights(33, 65)),
        "model.layers.0.input_layernorm.weight": torch.ones(96),
        "model.layers.0.mlp.counts.weight": torch.ones(4, 4, dtype=torch.int64),
    }
    save_file(tensors, path)
    return path


def test_info_as_json() -> None:
    result = qcutlass_command("info", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["build"]["version"] == qcutlass.__version__
    assert facts["torch"] == torch.__version__
    assert facts["self_check"]["cpu"] == "passed"
    assert facts["cuda_architectures"] == list(qcutlass._C.cuda_architectures())
    assert len(facts["gpus"]) == torch.cuda.device_count()


def test_info_as_a_table() -> None:
    result = qcutlass_command("info")
    assert result.exit_code == 0, result.output
    assert qcutlass.__version__ in result.stdout
    assert "self-check" in result.stdout


def test_info_notices_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    right = qcutlass.gemm
    monkeypatch.setattr("qcutlass.cli.info.gemm", lambda *args, **keywords: right(*args, **keywords) * 1.01)
    result = qcutlass_command("info", "--json")
    assert result.exit_code == 1
    assert "times the error bound" in json.loads(result.stdout)["self_check"]["cpu"]


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "qcutlass", "info", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["build"]["version"] == qcutlass.__version__


def test_quickstart_on_gguf(gguf_file: Path) -> None:
    result = qcutlass_command("quickstart", str(gguf_file), "--device", "cpu", "--seed", "1", "--all")
    assert result.exit_code == 0, result.output
    for expected in ("blk.0.ffn_up", "blk.1.ffn_up", "blk.2.ffn_up", "blk.0.attn_q", "blk.0.ffn_down", "48 x 96"):
        assert expected in result.stdout, result.stdout
    assert "passed: 5 of 5 linear layers within bound" in " ".join(result.stdout.split())
    assert "token_embd" not in result.stdout


@pytest.mark.parametrize("options", [(), ("--bits", "8", "--group-size", "-1"), ("--group-size", "7", "--tokens", "1")])
def test_quickstart_on_safetensors(options: tuple[str, ...], safetensors_file: Path) -> None:
    result = qcutlass_command("quickstart", str(safetensors_file), "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert "passed: 3 of 3 linear layers within bound" in " ".join(result.stdout.split())
    assert "skipped model.layers.0.mlp.counts: I64" in result.stdout


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_1", "Q6_K"])
def test_quickstart_multiplies_by_what_is_stored(
    kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def recorded(a: torch.Tensor, *operands: Any, **keywords: Any) -> torch.Tensor:
        products.append((a, qcutlass.gemm(a, *operands, **keywords)))
        return products[-1][1]

    monkeypatch.setattr("qcutlass.cli.quickstart.gemm", recorded)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = random_gguf_weights(np.random.default_rng(seed), 48, 512, kind, 0.05)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = qcutlass_command("quickstart", str(path), "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "passed: 1 of 1 linear layers within bound" in " ".join(result.stdout.split())
    stored = torch.from_numpy(gguf.quants.dequantize(blocks, KINDS[kind]))
    for a, product in products:
        testing.assert_close(product, testing.reference(a, stored), label=kind)


def test_quickstart_on_the_file_that_the_environment_names(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUTLASS_SMOLLM2", str(gguf_file))
    assert default_model() == gguf_file
    result = qcutlass_command("quickstart")
    assert result.exit_code == 0, result.output
    assert "passed: 5 of 5 linear layers within bound" in " ".join(result.stdout.split())
    monkeypatch.setenv("QCUTLASS_SMOLLM2", f"{gguf_file}.absent")
    result = qcutlass_command("quickstart")
    assert result.exit_code == 2
    assert "QCUTLASS_SMOLLM2: expected the name of a GGUF file, got '" in result.output


@pytest.mark.parametrize("options", [("--bits", "8"), ("--group-size", "64"), ()])
def test_quickstart_says_that_quantised_weights_stay_as_they_are(options: tuple[str, ...], tmp_path: Path) -> None:
    path, kind = tmp_path / "quantised.gguf", GGUF_TYPES["Q4_0"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(weights(*SHAPE), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = qcutlass_command("quickstart", str(path), "--device", "cpu", *options)
    assert done.exit_code == 0, done.output
    assert ("--bits and --group-size change nothing" in done.output) == bool(options)


@pytest.mark.gpu
def test_quickstart_on_a_gpu(gguf_file: Path) -> None:
    result = qcutlass_command("quickstart", str(gguf_file), "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert "passed: 5 of 5 linear layers within bound" in " ".join(result.stdout.split())


def test_quickstart_fails_on_a_wrong_product(safetensors_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = qcutlass.gemm
    monkeypatch.setattr("qcutlass.cli.quickstart.gemm", lambda *args, **keywords: right(*args, **keywords) * 1.01)
    result = qcutlass_command("quickstart", str(safetensors_file), "--device", "cpu")
    assert result.exit_code == 1
    assert "FAILED: 0 of 3 linear layers" in " ".join(result.stdout.split())


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_gguf_blocks_keep_their_values(kind: str, gguf_file: Path) -> None:
    name = f"blk.{list(GGUF_TYPES).index(kind)}.ffn_up.weight"
    layer = formats.load(gguf_file)[name.removesuffix(".weight")]
    assert isinstance(layer, CanonicalLinear)
    loaded = layer.weight
    assert loaded.bits == (8 if kind == "Q8_0" else 4)
    assert (loaded.shape, loaded.group_size) == (SHAPE, 32)
    assert loaded.zeros is None
    assert (loaded.minimums is not None) == (kind == "Q4_1")
    stored = next(tensor for tensor in gguf.GGUFReader(gguf_file).tensors if tensor.name == name)
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, GGUF_TYPES[kind]))
    testing.assert_equal(loaded.dequantize(torch.float32), expected, label=kind)


def damage_safetensors(path: Path, how: str) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    first, second = list(header)[:2]
    if how == "cut in the data":
        path.write_bytes(data[:-100])
        return
    if how == "cut in the header":
        path.write_bytes(data[: 8 + length // 2])
        return
    if how == "huge header":
        path.write_bytes(struct.pack("<Q", 2**60) + data[8:])
        return
    if how == "no header":
        path.write_bytes(b"")
        return
    if how == "shape that lies":
        header[first]["shape"] = [2**20, 2**20]
    elif how == "negative shape":
        header[first]["shape"] = [-1, 96]
    elif how == "overlap":
        header[second]["data_offsets"] = header[first]["data_offsets"]
    elif how == "offsets past the end":
        header[first]["data_offsets"] = [0, 2**40]
    elif how == "unknown type":
        header[first]["dtype"] = "F7"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


SAFETENSORS_DAMAGE = [
    "cut in the data", "cut in the header", "huge header", "no header", "shape that lies", "negative shape", "overlap",
    "offsets past the end", "unknown type",
]  # fmt: skip


@pytest.mark.parametrize("how", SAFETENSORS_DAMAGE)
def test_damaged_safetensors(how: str, safetensors_file: Path) -> None:
    damage_safetensors(safetensors_file, how)
    with pytest.raises(qcutlass.CheckpointError, match=r"tiny\.safetensors"):
        formats.load(safetensors_file)
    result = qcutlass_command("quickstart", str(safetensors_file), "--device", "cpu")
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 400, -100, -4000])
def test_truncated_gguf(keep: int, gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:keep])
    with pytest.raises(qcutlass.CheckpointError, match=r"tiny\.gguf"):
        formats.load(gguf_file)
    result = qcutlass_command("quickstart", str(gguf_file), "--device", "cpu")
    assert result.exit_code == 2
    assert "error:" in result.stderr


@pytest.mark.parametrize("position", [0, 8, 16])
def test_gguf_with_a_wrong_header(position: int, gguf_file: Path) -> None:
    """The magic number, the number of tensors and the number of key-value pairs."""
    data = bytearray(gguf_file.read_bytes())
    data[position : position + 8] = struct.pack("<Q", 2**56)
    gguf_file.write_bytes(data)
    with pytest.raises(qcutlass.CheckpointError, match=r"tiny\.gguf"):
        formats.load(gguf_file)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite(value: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    blocks = gguf.quants.quantize(weights(*SHAPE), gguf.GGMLQuantizationType.Q4_0)
    blocks.reshape(-1, 18)[5, :2] = np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(qcutlass.CheckpointError, match=r"blk\.0\.ffn_up\.weight"):
        formats.load(path)["blk.0.ffn_up"]


def test_float_weights_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file({"layer.weight": torch.full((4, 4), torch.nan)}, path)
    with pytest.raises(qcutlass.CheckpointError, match=r"layer\.weight"):
        formats.load(path)["layer"]


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pth", "model.ckpt"])
def test_pickles_are_never_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save({"weight": torch.ones(2, 2)}, path)
    with pytest.raises(qcutlass.UnsupportedError, match="safetensors"):
        formats.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        formats.load(tmp_path / "missing.gguf")
    with pytest.raises(qcutlass.UnsupportedError, match=r"\.gguf.*\.safetensors"):
        formats.load(tmp_path / "model.onnx")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(qcutlass.CheckpointError, match="folder"):
        formats.load(tmp_path / "folder.gguf")


def test_a_checkpoint_without_linear_layers(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    save_file({"norm.weight": torch.ones(4)}, path)
    result = qcutlass_command("quickstart", str(path), "--device", "cpu")
    assert result.exit_code == 2
    assert "no linear layer" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_quickstart_without_the_gpu_it_was_asked_for(safetensors_file: Path) -> None:
    result = qcutlass_command("quickstart", str(safetensors_file), "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cpu" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "/absent/{name}"),
        ("quickstart", "/absent/{name}"),
        ("convert", "/absent/{name}", "/absent/new"),
        ("tune", "{name}"),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("name", ["[/x]", "d[red]x", "a:x:b"])
def test_errors_hold_what_was_given(arguments: tuple[str, ...], name: str) -> None:
    result = qcutlass_command(*(argument.format(name=name) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.lstrip().startswith("error: ")
    assert name in result.stderr


@pytest.mark.parametrize("name", ["[/x]", "d[red]x", "a:x:b"])
def test_names_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name.replace("/", "")
    folder.mkdir()
    path = folder / f"{folder.name}.safetensors"
    tensors = {f"{name}.weight": torch.from_numpy(weights(48, 96)), f"{name}.skipped.weight": torch.ones(4, 4).double()}
    save_file(tensors, path)
    result = qcutlass_command("quickstart", str(path), "--device", "cpu", "--all")
    assert result.exit_code == 0, result.output
    heading, *lines = result.stdout.splitlines()
    assert path.name in heading
    assert any(line.startswith(f"skipped {name}.skipped") for line in lines)
    assert any(line.lstrip().startswith(f"{name} ") for line in lines)
    assert f"({name}.weight)" in result.stdout or f"({name})" in result.stdout
    table = qcutlass_command("inspect", str(path))
    assert table.exit_code == 0, table.output
    assert f" {name} " in f" {table.stdout}"
    save_file({"norm.weight": torch.ones(4)}, path)
    result = qcutlass_command("quickstart", str(path), "--device", "cpu")
    assert result.exit_code == 2
    assert f"{path}: no linear layer found" in result.stderr
