"""GGUF files, against the gguf package."""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.python.formats.gguf_files import KINDS, blocks_of_every_scale, random_blocks, random_rows
from tests.python.formats.stored import canonical, dequantized
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, QuantizedTensor, UnsupportedError, formats, testing
from qcutlass.formats import DequantizedLinear, FloatLinear
from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED

Q8_1 = gguf.GGMLQuantizationType.Q8_1  # of sums on the way: no file has it, and the package makes no numbers of it


def write(path: Path, tensors: dict[str, Any], **types: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_bool("llama.flag", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=types.get(name.split(".")[-2]) if name.endswith("weight") else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(blocks: np.ndarray, kind: str) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, KINDS[kind]))


def test_blocks_worked_out_by_hand(tmp_path: Path) -> None:
    """Low nibbles are elements 0 to 15 of a block, high ones 16 to 31; 0x3C00 is 1.0, 0x4000 is 2.0, 0xBC00 is -1.0."""
    nibbles = bytes([0xF0, 0x21, *[0x88] * 14])
    bytes_of = {
        "Q4_0": bytes([0x00, 0x40]) + nibbles,
        "Q4_1": bytes([0x00, 0x40, 0x00, 0xBC]) + nibbles,
        "Q8_0": bytes([0x00, 0x40, 0x80, 0x7F, *[0] * 30]),
    }
    expected = {
        "Q4_0": [2.0 * (q - 8) for q in [0, 1, *[8] * 14, 15, 2, *[8] * 14]],
        "Q4_1": [2.0 * q - 1 for q in [0, 1, *[8] * 14, 15, 2, *[8] * 14]],
        "Q8_0": [-256.0, 254.0, *[0.0] * 30],
    }
    for kind, data in bytes_of.items():
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
        path = write(tmp_path / f"{kind}.gguf", {"blk.0.ffn_up.weight": blocks}, ffn_up=KINDS[kind])
        layer = canonical(formats.load(path)["blk.0.ffn_up"])
        assert dequantized(layer).tolist() == [expected[kind]]


def by_hand(size: int, parts: dict[int, bytes]) -> bytes:
    """A block of zeros but for some bytes."""
    block = bytearray(size)
    for begin, data in parts.items():
        block[begin : begin + len(data)] = data
    return bytes(block)


def test_blocks_of_256_worked_out_by_hand(tmp_path: Path) -> None:
    """Bits of scales that lie apart, negative scales, and sub-blocks with a scale of 0 and a minimum."""
    rising = list(range(16))
    blocks, expected = {}, {}
    # Q4_K: scales 3, 18 and minimums 1, 3 of sub-blocks 0 and 5; a minimum of 5 alone of sub-block 2; d 1, dmin 2.
    blocks["Q4_K"] = by_hand(
        144,
        {0: b"\x00\x3c\x00\x40", 4: bytes([3, 0x40, 0, 0, 1, 0, 5, 0, 0, 0x32, 0, 0]), 16: bytes(rising * 2),
         16 + 64: bytes(q << 4 for q in rising * 2)},
    )  # fmt: skip
    expected["Q4_K"] = [0.0] * 256
    expected["Q4_K"][:32] = [3.0 * q - 2 for q in rising * 2]
    expected["Q4_K"][64:96] = [-10.0] * 32
    expected["Q4_K"][160:192] = [18.0 * q - 6 for q in rising * 2]
    # Q6_K: scales -1 and 2 of sub-blocks 0 and 9; d 0.5; codes 16 to 31 (high bits 1) and 0 to 15.
    blocks["Q6_K"] = by_hand(
        210,
        {0: bytes(rising), 64 + 16: bytes(rising), 128: bytes([1] * 16), 192: b"\xff", 192 + 9: b"\x02",
         208: b"\x00\x38"},
    )  # fmt: skip
    expected["Q6_K"] = [0.0] * 256
    expected["Q6_K"][:16] = [-0.5 * (16 + q - 32) for q in rising]
    expected["Q6_K"][144:160] = [float(q - 32) for q in rising]
    for kind, data in blocks.items():
        rows = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
        path = write(tmp_path / f"{kind}.gguf", {"blk.0.ffn_up.weight": rows}, ffn_up=KINDS[kind])
        found = dequantized(canonical(formats.load(path)["blk.0.ffn_up"]))
        assert torch.equal(found, torch.tensor([expected[kind]])), kind


SUB_SCALES = {
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31),
}  # fmt: skip
"""The least and the greatest scale of sub-blocks, and minimum where there are such, of ggml-common.h."""
BYTES = {"MXFP4": (0, 252), "NVFP4": (0, 0x7E)}
"""The same of blocks whose scales are bytes, as bits: 2**-127 to 2**125, and 0 to 448 without the sign."""


def check_every_scale(weight: QuantizedTensor, kind: str) -> None:
    """Every code and scale that the type has is there, and with each sign of its block's scale and minimum."""
    assert len(weight.codes.unique()) == 2 ** int(next(filter(str.isdigit, kind)))  # type: ignore[no-untyped-call]
    if kind in BYTES:
        bits = weight.scales.view(torch.uint8)
        assert (int(bits.min()), int(bits.max())) == BYTES[kind]
        return
    integers = {"scales": weight.scales, "minimums": weight.minimums}
    supers = {"scales": weight.super_scales, "minimums": weight.super_minimums}
    halves = [half for half in (supers if kind in SUB_SCALES else integers).values() if half is not None]
    assert len(halves) == len(QUANTIZED[kind].halves)
    signs = [half.sign().flatten().tolist() for half in halves]
    assert set(zip(*signs, strict=True)) == set(product((-1, 0, 1), repeat=len(halves)))
    for half in halves:
        assert {6e-8, 65504} <= {round(value, 8) for value in half.abs().flatten().tolist()}
    for name, half in supers.items():
        if half is None:
            continue
        part = integers[name]
        assert part is not None
        of_blocks = part.view(len(half), -1, part.shape[1])
        least, greatest = SUB_SCALES[kind]
        for sign in (-1, 0, 1):
            values = of_blocks.transpose(1, 2)[half.sign() == sign]
            assert sorted(set(values.flatten().tolist())) == [*range(least, greatest + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_numbers_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """To the bit, but for signs of zeros: as they are read, and once packed; of few rows, and odd numbers of blocks."""
    random = np.random.default_rng(0)
    every = blocks_of_every_scale(random, 120, 3, kind)
    for blocks in (every, *(random_blocks(random, n, count, kind) for n, count in ((1, 1), (7, 5), (17, 2)))):
        path = write(tmp_path / "tiny.gguf", {"blk.0.ffn_up.weight": blocks}, ffn_up=KINDS[kind])
        checkpoint, expected = formats.load(path), reference(blocks, kind)
        layer = canonical(checkpoint["blk.0.ffn_up"])
        if blocks is every:
            check_every_scale(layer.weight, kind)
        testing.assert_equal(dequantized(layer), expected, label=kind)
        packed = qcutlass.QuantLinear.from_checkpoint(checkpoint, "blk.0.ffn_up")
        testing.assert_equal(packed.weights(), expected, label=kind)


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_blocks_that_no_product_multiplies_are_numbers(kind: str, seed: int, tmp_path: Path) -> None:
    """Those of the gguf package; the layer says what it was, and how many bytes it had."""
    rows = random_rows(np.random.default_rng(seed), 24, 512, kind)
    of_kind = gguf.GGMLQuantizationType[kind]
    names = "blk.0.ffn_up.weight", "token_embd.weight"
    path = write(tmp_path / "tiny.gguf", dict.fromkeys(names, rows), ffn_up=of_kind, token_embd=of_kind)
    checkpoint, expected = formats.load(path), torch.from_numpy(gguf.quants.dequantize(rows, of_kind))
    layer = checkpoint["blk.0.ffn_up"]
    assert isinstance(layer, DequantizedLinear)
    assert torch.equal(layer.weight, expected)
    assert (layer.words, layer.nbytes, checkpoint.is_float) == (kind, rows.nbytes, False)
    assert "qcutlass convert --requantize" in layer.obstacle
    assert torch.equal(checkpoint.tensor("token_embd.weight"), expected)


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    """A scale of infinity, and an exponent that stands for none."""
    random = np.random.default_rng(0)
    infinite = random_rows(random, 4, 256, "IQ2_XXS")
    infinite[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    blocks = random_blocks(random, 4, 2, "MXFP4")
    blocks[2, 17] = 0xFF
    for kind, rows in (("IQ2_XXS", infinite), ("MXFP4", blocks)):
        types = {"ffn_up": gguf.GGMLQuantizationType[kind]}
        path = write(tmp_path / f"{kind}.gguf", {"blk.0.ffn_up.weight": rows}, **types)
        with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight: expected finite scales"):
            formats.load(path)["blk.0.ffn_up"]


def test_scales_of_whole_matrices(tmp_path: Path) -> None:
    """Of NVFP4, for each expert, too; beside other types they are refused, and what activations have is not read."""
    random, scales = np.random.default_rng(0), np.array([0.5, 3.0, 0.75], np.float32)
    blocks = [random_blocks(random, 16, 2, "NVFP4") for _ in range(3)]
    expected = [reference(each, "NVFP4") * float(scale) for each, scale in zip(blocks, scales, strict=True)]
    tensors = {
        "blk.0.ffn_up.weight": blocks[0], "blk.0.ffn_up.scale": scales[:1], "blk.0.ffn_up.input_scale": scales[1:2],
        "blk.0.ffn_down_exps.weight": np.stack(blocks), "blk.0.ffn_down_exps.scale": scales,
        "blk.0.ffn_down_exps.input_scale": scales,
        "blk.0.attn_q.weight": random_blocks(random, 16, 2, "Q4_0"), "blk.0.attn_q.scale": scales[:1],
    }  # fmt: skip
    nvfp4 = KINDS["NVFP4"]
    path = write(tmp_path / "tiny.gguf", tensors, ffn_up=nvfp4, ffn_down_exps=nvfp4, attn_q=KINDS["Q4_0"])
    checkpoint = formats.load(path)
    names = ["blk.0.ffn_up", *(f"blk.0.ffn_down.{expert}" for expert in range(3))]
    assert sorted(checkpoint) == sorted(names)
    for name, weight in zip(names, [expected[0], *expected], strict=True):
        testing.assert_equal(dequantized(canonical(checkpoint[name])), weight, label=name)
    assert list(checkpoint.skipped) == ["blk.0.attn_q"]
    assert checkpoint.skipped["blk.0.attn_q"].startswith("a scale of the whole matrix is read beside NVFP4 alone")
    assert not [name for name in checkpoint.rest if "ffn" in name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    weight = random.normal(0, 0.05, (48, 96)).astype(np.float32)
    return write(
        tmp_path / "tiny.gguf",
        {
            "token_embd.weight": gguf.quants.quantize(weight, KINDS["Q8_0"]),
            "blk.0.attn_norm.weight": weight[0],
            "blk.0.attn_q.weight": weight.astype(np.float16),
            "blk.0.attn_q.bias": weight[:, 0].copy(),
            "blk.0.ffn_up.weight": gguf.quants.quantize(weight, KINDS["Q4_0"]),
            "blk.0.ffn_up.bias": weight[:, 1].copy(),
            "blk.0.ffn_down.weight": np.ones((48, gguf.GGML_QUANT_SIZES[Q8_1][1]), np.uint8),
        },
        token_embd=KINDS["Q8_0"], ffn_up=KINDS["Q4_0"], ffn_down=Q8_1,
    )  # fmt: skip


def test_a_file_is_of_its_format_alone(model: Path) -> None:
    with pytest.raises(CheckpointError, match="format: got 'gptq', but this is a GGUF file; pass 'auto'"):
        formats.load(model, "gptq")
    with pytest.raises(CheckpointError, match="format: got 'gguf', but this is no GGUF file; pass 'auto'"):
        formats.load({"up.weight": torch.ones(32, 64)}, "gguf")
    assert list(formats.load(model, "gguf")) == list(formats.load(model))


def test_layers_biases_and_the_rest(model: Path) -> None:
    checkpoint = formats.load(model)
    assert checkpoint.format == "gguf"
    assert list(checkpoint) == ["blk.0.attn_q", "blk.0.ffn_up"]
    assert list(checkpoint.skipped) == ["blk.0.ffn_down"]
    assert checkpoint.skipped["blk.0.ffn_down"].startswith("Q8_1 blocks are not read")
    assert checkpoint.rest == ["token_embd.weight", "blk.0.attn_norm.weight", "blk.0.ffn_down.weight"]
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model).tensors}
    dense, layer = checkpoint["blk.0.attn_q"], canonical(checkpoint["blk.0.ffn_up"])
    assert isinstance(dense, FloatLinear)
    assert torch.equal(dense.weight, torch.from_numpy(tensors["blk.0.attn_q.weight"].copy()))
    for found, name in ((dense, "attn_q"), (layer, "ffn_up")):
        assert found.bias is not None
        assert torch.equal(found.bias, torch.from_numpy(tensors[f"blk.0.{name}.bias"].copy()))
    embedding = reference(tensors["token_embd.weight"].copy(), "Q8_0")
    assert torch.equal(checkpoint.tensor("token_embd.weight"), embedding)
    norm = torch.from_numpy(tensors["blk.0.attn_norm.weight"].copy())
    assert torch.equal(checkpoint.tensor("blk.0.attn_norm.weight"), norm)
    with pytest.raises(UnsupportedError, match="Q8_1"):
        checkpoint.tensor("blk.0.ffn_down.weight")


def test_bfloat16(tmp_path: Path) -> None:
    weight = torch.randn(8, 32).bfloat16()
    data = weight.view(torch.int16).numpy().view(np.uint8)
    path = write(tmp_path / "tiny.gguf", {"blk.0.ffn_up.weight": data}, ffn_up=gguf.GGMLQuantizationType.BF16)
    layer = formats.load(path)["blk.0.ffn_up"]
    assert isinstance(layer, FloatLinear)
    assert torch.equal(layer.weight, weight)


def header(*, tensors: int = 0, pairs: int = 0, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


F32 = 0
PAIR = text("key")
BAD_HEADERS = {
    "another magic": (header(magic=b"GGML"), "begin with GGUF"),
    "too many tensors": (header(tensors=2**40), "at most 65536 tensors"),
    "too many pairs": (header(pairs=2**60), "at most 16384 keys"),
    "fewer pairs than said": (header(pairs=2**10), "expected 8 more bytes, got 0"),
    "a string longer than the file": (header(pairs=1, body=struct.pack("<Q", 2**20)), "more bytes"),
    "a string longer than any": (header(pairs=1, body=struct.pack("<Q", 2**60)), "at most 16777216 bytes"),
    "an array longer than the file": (
        header(pairs=1, body=PAIR + struct.pack("<IIQ", 9, 0, 2**60)),
        "expected 1152921504606846976 more bytes",
    ),
    "an array of arrays without end": (
        header(pairs=1, body=PAIR + struct.pack("<IIQ", 9, 9, 2**20) + struct.pack("<IQ", 0, 0) * 50),
        "more bytes",
    ),
    "too many strings": (header(pairs=1, body=PAIR + struct.pack("<IIQ", 9, 8, 2**60)), "at most 2097152 strings"),
    "arrays that are too deep": (
        header(pairs=1, body=PAIR + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
        "from 0 to 12, got 9",
    ),
    "an unknown type of value": (header(pairs=1, body=PAIR + struct.pack("<IQ", 13, 0)), "from 0 to 12, got 13"),
    "a key that is not UTF-8": (header(pairs=1, body=struct.pack("<Q", 1) + b"\xff"), "UTF-8"),
    "no alignment": (header(pairs=1, body=text("general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
    "five dimensions": (header(tensors=1, body=tensor_info("a", (1,) * 5, F32, 0)), "at most 4 dimensions"),
    "an unknown type of tensor": (header(tensors=1, body=tensor_info("a", (1,), 999, 0)), "unknown type 999"),
    "two of one name": (header(tensors=2, body=2 * tensor_info("a", (1,), F32, 0) + bytes(64)), "two tensors"),
    "no rows": (header(tensors=1, body=tensor_info("a.weight", (64, 0), 2, 0)), r"shape \[0, 64\]"),
    "no columns": (header(tensors=1, body=tensor_info("a.weight", (0, 4), 2, 0)), r"shape \[4, 0\]"),
    "no rows of 2**63": (header(tensors=1, body=tensor_info("a.weight", (2**63, 0), F32, 0)), r"shape \[0, "),
    "half a block": (header(tensors=1, body=tensor_info("a", (16, 2), 2, 0) + bytes(64)), "whole number of Q4_0"),
    "an odd offset": (header(tensors=1, body=tensor_info("a", (1,), F32, 4) + bytes(64)), "multiple of 32"),
    "overlapping tensors": (
        header(tensors=2, body=tensor_info("a", (16,), F32, 0) + tensor_info("b", (1,), F32, 32) + bytes(128)),
        "also those of another",
    ),
    "a shape that lies": (
        header(tensors=1, body=tensor_info("a.weight", (2**30, 2**30), F32, 0) + bytes(64)),
        "end at",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_headers_that_lie(case: str, tmp_path: Path) -> None:
    data, message = BAD_HEADERS[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"bad\.gguf.*{message}"):
        formats.load(path)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions(version: int, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(header(version=version))
    with pytest.raises(UnsupportedError, match=f"version {version} is not read"):
        formats.load(path)


def test_every_truncation(model: Path) -> None:
    """None is taken for the whole file."""
    data = model.read_bytes()
    end_of_header = len(data) - 20000
    for length in [*range(0, end_of_header, 7), *range(end_of_header, len(data), 501), len(data) - 1]:
        model.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            formats.load(model)


def test_a_file_that_shrinks_while_it_is_open(model: Path) -> None:
    checkpoint = formats.load(model)
    model.write_bytes(model.read_bytes()[:-20000])
    with pytest.raises(qcutlass.CheckpointError, match="the file changed"):
        checkpoint["blk.0.ffn_up"]


def test_sparse_files_of_terabytes(tmp_path: Path) -> None:
    """Zeros that take no place on the disk: neither memory nor time out of proportion."""
    key = text("key")
    bodies = {
        "no memory": header(tensors=1, body=tensor_info("up.weight", (2**20, 2**20), F32, 0)),
        "a string of at most": header(pairs=1, body=struct.pack("<Q", 2**40)),
        "strings in arrays": header(pairs=1, body=key + struct.pack("<IIQ", 9, 8, 2**38)),
        "at most 16777216 bytes": header(pairs=1, body=key + struct.pack("<IQ", 8, 2**40)),
        "of a header of at most": header(pairs=1, body=key + struct.pack("<IIQ", 9, 0, 2**40)),
    }
    for message, data in bodies.items():
        path = tmp_path / "sparse.gguf"
        with path.open("wb") as file:
            file.write(data)
            file.truncate(2**42 + 4096)
        with pytest.raises(CheckpointError, match=message):
            formats.load(path)["up"]
