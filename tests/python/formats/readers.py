"""Every file that qcutlass reads, and what reads it: `fuzzing.py` damages one file of each and calls that.

Headers, configurations and indexes of all formats, the metadata of GGUF models, the tuned plans, and what a
quantisation leaves to go on from. Folders lie in memory (a tmpfs where there is one); data behind a header are a hole.
"""

from __future__ import annotations

import functools
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tests.python.formats.fuzz_corpus import Files, gguf_parts, subjects

from qcutlass import CheckpointError, UnsupportedError, WeightOnly, formats, models
from qcutlass.formats import CanonicalLinear
from qcutlass.formats.converted import PackedFolder, is_converted
from qcutlass.models.opening import open_source
from qcutlass.models.quantizing.work import Work, work_folder
from qcutlass.products import tuned_plans

INDEX = "model.safetensors.index.json"
EXPECTED = (CheckpointError, UnsupportedError)


@dataclass(frozen=True)
class Reader:
    """One file in a folder, and what reads it.

    Attributes:
        file: that is damaged.
        files: of the folder, this one whole.
        read: reads the folder; what it raises beside `errors` is a finding.
        hole: bytes of the file behind those that are damaged; they are zeros in a file that has as many, whatever the
            header's length.
        share: of the inputs, relative to others: those that take longer get fewer.
        errors: that it may raise, each of which names the folder, or a file in it.
    """

    file: str
    files: Files
    read: Callable[[Path], object]
    hole: int = 0
    share: int = 4
    errors: tuple[type[Exception], ...] = EXPECTED

    @property
    def data(self) -> bytes:
        """The bytes that are damaged."""
        data = self.files[self.file]
        assert isinstance(data, bytes)
        return data[: len(data) - self.hole]


def names(error: Exception, folder: Path, *layers: str) -> bool:
    """Whether an error names the folder, or a file in it; or begins with one of the layers that were asked for."""
    return str(folder) in str(error) or str(error).startswith(tuple(f"{name}{end}" for name in layers for end in ":."))


@contextmanager
def refusals(folder: Path, *layers: str) -> Iterator[None]:
    """Goes on where layers or other tensors are refused; AssertionError where that names none of them, and no file."""
    try:
        yield
    except EXPECTED as error:
        if not names(error, folder, *layers):
            raise AssertionError(f"names neither {', '.join(layers) or 'a layer'} nor a file: {error!r}") from error


def open_headers(folder: Path) -> int:
    """Opens a folder, or the GGUF file in it, without its tensors; their number."""
    if is_converted(folder):
        converted = PackedFolder(folder)
        for name in converted.names:
            with refusals(folder, name):
                converted.spec[name].tensors(8, 64)
        return len(converted.tensors)
    return len(formats.load(folder).tensors)


def open_layers(folder: Path) -> int:
    """Opens a folder and reads its layers as its configuration says."""
    opened: Any = models.ConvertedFolder(folder) if is_converted(folder) else formats.load(folder)
    found = 0
    for name in opened:
        with refusals(folder, name):
            found += opened[name] is not None
    return found


def open_gguf_model(folder: Path) -> int:
    """The layers of a GGUF model, as `qcutlass convert` reads them."""
    source = open_source(folder / "model.gguf", "auto", None)
    found = 0
    for name in source.names:
        with refusals(folder, name):
            found += source.layer(name) is not None
    return found


def open_model(folder: Path) -> int:
    """A folder, as `qcutlass convert` opens it: with what `config.json` says of the model."""
    if is_converted(folder):
        return len(PackedFolder(folder).config)
    return 1 + len(open_source(folder, "auto", None).config)


@functools.cache
def readers() -> dict[str, Reader]:
    """By name."""
    found: dict[str, Reader] = {}
    for subject, files in subjects().items():
        for name, data in files.items():
            assert isinstance(data, bytes)
            if name.endswith(".safetensors") and name in ("model.safetensors", "b.safetensors"):
                hole = len(data) - 8 - struct.unpack("<Q", data[:8])[0]
                found[f"{subject}: header"] = Reader(name, files, open_headers, hole)
            elif name.endswith(".gguf"):
                found[f"{subject}: header"] = Reader(name, files, open_headers, len(gguf_parts()["data"]))
            elif name.endswith(".json"):
                label = "index" if name == INDEX else name
                read = open_headers if name == INDEX else open_layers
                found[f"{subject}: {label}"] = Reader(name, files, read, share=4 if name == INDEX else 1)
    gptq = subjects()["gptq"]
    described = json.loads(_content(gptq, "config.json"))["quantization_config"]
    weights = {"model.safetensors": gptq["model.safetensors"]}
    for name, value in (("quantize_config.json", described), ("hf_quant_config.json", {"quantization": described})):
        files = {**weights, name: json.dumps(value).encode()}
        found[f"gptq: {name}"] = Reader(name, files, open_layers, share=1)
    found["gptq: model"] = Reader("config.json", gptq, open_model)
    found["mixture: model"] = Reader("config.json", {**weights, "config.json": _mixture(described)}, open_model)
    found["tuned plans"] = Reader(PLANS.name, {PLANS.name: _plans()}, read_plans, errors=())
    found |= work_readers()
    with suppress(ImportError):
        import transformers  # noqa: F401  # reads the configuration of GGUF models

        model = gguf_model()
        hole = len(model) - model.index(ONES)
        found["gguf: model"] = Reader("model.gguf", {"model.gguf": model}, open_gguf_model, hole, share=1)
    return found


def _content(files: Files, name: str) -> bytes:
    data = files[name]
    assert isinstance(data, bytes)
    return data


def _mixture(described: dict[str, Any]) -> bytes:
    experts = {"num_experts": 4, "ffn_config": {"moe_num_experts": 4, "sizes": [1, [2]]}, "model_type": "qwen3_moe"}
    return json.dumps({**experts, "text_config": {"num_local_experts": 1}, "quantization_config": described}).encode()


GPU = tuned_plans.Gpu("A GPU", 78)
PLANS = Path("tuned-a-gpu-78-0123.json")


def _plans() -> bytes:
    plan = tuned_plans.TunedPlan("sm80_ring_16x64x128", 2, 12.5)
    key = "int4/float16/scales=float16/zeros=none/group=128/4096x4096/m="
    return tuned_plans._render({f"{key}{m}": plan for m in (1, 16)}, GPU, "0123").encode()


def read_plans(folder: Path) -> int:
    """The plans of a cache folder: whatever lies there is ignored, or whole."""
    tuned_plans._warned.clear()
    plans = tuned_plans.PlanCache(GPU, "0123", folder)._plans
    for key, (tactic, split_k, microseconds) in plans.items():
        assert isinstance(key, str)
        assert isinstance(tactic, str)
        assert 1 <= split_k <= 16
        assert microseconds > 0
    return len(plans)


def work_readers() -> dict[str, Reader]:
    """The record of a block, and the manifest, in the folder of a run that was killed."""
    with tempfile.TemporaryDirectory() as root:
        destination = Path(root) / "new"
        with suppress(KeyboardInterrupt), work_folder(destination, RUN) as made:
            codes = qcutlass_quantized()
            destination.mkdir()
            (destination / "config.json").write_text("{}")
            made.set_made(destination, {"layers": 1, "notes": {}})
            made.add(0, {"up": codes}, {"norm": torch.ones(3)}, torch.ones(2, 3), {"up": {"error": 0.5}})
            raise KeyboardInterrupt  # as a kill
        files: Files = {path.name: path.read_bytes() for path in Path(f"{destination}.work").iterdir()}
    return {
        "work: record": Reader("block-00000.json", files, read_work, share=2),
        "work: manifest": Reader(
            "manifest.json", files, read_manifest, share=2, errors=(CheckpointError, FileExistsError)
        ),
    }


RUN = {"method": {"name": "rtn", "scheme": {"bits": 4}}, "source": {"model.safetensors": [1, 2]}}


def qcutlass_quantized() -> CanonicalLinear:
    """A small layer."""
    from qcutlass.algorithms.floating import quantize_nearest

    weight = torch.arange(2.0 * 64).view(2, 64)
    return CanonicalLinear(quantize_nearest(weight, WeightOnly(4, 32)), torch.ones(2))


def read_work(folder: Path) -> int:
    """What a run finds finished, all of it read."""
    found = Work(folder)
    count = found.finished()
    if count:
        found.open()
        for name in ("up", "norm"):
            found.layer(name)
            found.tensor(name)
        assert isinstance(found.notes, dict)
        found.state(count - 1)
    return count


def read_manifest(folder: Path) -> int:
    """Whether it is of this run, and whether that has made its destination."""
    with suppress(KeyboardInterrupt), work_folder(folder.with_suffix(""), RUN) as work:
        work.made(folder)
        raise KeyboardInterrupt
    return 1


ONES = gguf.quantize(np.ones((1, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0).tobytes()


def gguf_model() -> bytes:
    """A Llama of one block, as the gguf package writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(32)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(16)
        writer.add_token_list(["a", "b", "c", "d"])
        shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        shapes |= {"ffn_gate": (32, 64), "ffn_up": (32, 64), "ffn_down": (64, 32)}
        for name, shape in shapes.items():
            tensor = np.ones(shape, dtype=np.float32)
            blocks = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
        writer.add_tensor("token_embd.weight", np.ones((4, 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()
