"""Conversions that run out of disk, or are watched for memory: `python -m tests.python.models.conversions`.

A process of its own, so that what it forks has no threads. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from tests.python.formats.stored import as_awq, named, stored
from tests.python.models.folders import AWQ, random_model, write_model
from typer.testing import CliRunner

from qcutlass import models
from qcutlass.cli import app
from qcutlass.layers import WeightOnlyLinear


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else {}


def partial(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith((".partial", ".old"))]


def fill_disk(root: Path, seed: int) -> dict[str, Any]:
    """Files end at 20 kB."""
    old, new = (random_model(root / name, 8, (64, 512), seed=seed + i) for i, name in enumerate(("first", "second")))
    models.convert(old, root / "there")
    before = contents(root / "there")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    errors = []
    for name in ("there", "absent"):
        try:
            models.convert(new, root / name, overwrite=name == "there")
        except OSError as error:
            errors.append(type(error).__name__)
    same = contents(root / "there") == before
    return {"errors": errors, "intact": same, "absent": not (root / "absent").exists(), "left": partial(root)}


def watch_lines(modules: Sequence[ModuleType], reached: Callable[[], Any]) -> None:
    """Has `reached` called before each line of the modules that this thread comes to from now on."""
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            reached()
        return trace

    sys.settrace(trace)


def killed_at_every_line(act: Callable[[], Any], modules: Sequence[ModuleType]) -> Iterator[int]:
    """Lets child processes act, each killed one line of the modules later than the one before; yields that number.

    Ends when one comes to its end.
    """
    for last in count(1):
        child = os.fork()
        if child == 0:
            left = last

            def reached() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(9)

            watch_lines(modules, reached)
            try:
                act()
            except BaseException:
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), "the action has failed"
        if status == 0:
            return
        yield last


def starve(root: Path) -> dict[str, Any]:
    """Address space ends at so many MB more than are in use."""
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(1024, 4096).half() for i in range(2)}
    source = write_model(root / "source", weights, {}, None)
    models.convert(source, root / "reference", verify=True)
    errors: list[str] = []
    for extra in (0, 2, 5, 10, 20, 30, 40, 50, 60, 400):
        with limited(resource.RLIMIT_AS, address_space() + (extra << 20)):
            try:
                models.convert(source, root / "new", verify=True)
                errors.append("")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            if errors[-1]:
                assert not (root / "new").exists()
        if not errors[-1]:
            break
    large = write_model(root / "large", {"up_proj.weight": torch.ones(8192, 8192).half()}, {}, None)
    with limited(resource.RLIMIT_AS, address_space() + (40 << 20)):  # a progress bar takes a thread of 8 MB
        shown = CliRunner().invoke(app, ["convert", str(large), str(root / "command"), "--bits", "4"])
    same = contents(root / "new") == contents(root / "reference")
    return {"errors": errors, "command": [shown.exit_code, shown.stderr], "same": same, "left": partial(root)}


def address_space() -> int:
    """Bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmSize:")[2].split()[0]) * 1024


@contextmanager
def limited(what: int, size: int) -> Iterator[None]:
    """With a lower limit of this process, one of `resource.RLIMIT_*`."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def anonymous_memory() -> float:
    """MB of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def watch_memory(root: Path) -> dict[str, Any]:
    """MB in use after each layer, and after verification."""
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(512, 4096).half() for i in range(12)}
    source = write_model(root / "source", weights, {}, None)
    del weights
    used: list[float] = []

    def note(what: str, count: int, total: int) -> None:
        if what.startswith("writing model."):
            used.append(anonymous_memory())

    found = models.convert(source, root / "new", verify=True, progress=note)
    return {"used": [*used, anonymous_memory()], "size": found.size / 2**20}


def watch_loading(root: Path) -> dict[str, Any]:
    """MB that transformers takes to load a folder of another format, and those of its layers as 16-bit floats."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, dtype="float16")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).named_parameters()}
    tensors, packed, floats = {}, {}, 0
    for name, shape in shapes.items():
        if "_proj" not in name:
            tensors[name] = torch.ones(shape).half()
            continue
        floats += 2 * shape.numel()
        packed.setdefault(shape, as_awq(stored(*shape, 64, seed=0)))
        tensors |= named({suffix: part.clone() for suffix, part in packed[shape].items()}, name.removesuffix(".weight"))
    source = write_model(root / "source", tensors, config.to_dict(), AWQ)
    del tensors, packed
    quantized = checkpoint_config(source)
    used, done = [anonymous_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            used.append(anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = AutoModelForCausalLM.from_pretrained(source, config=quantized, dtype=torch.float16)
    done.set()
    watcher.join()
    layers = sum(isinstance(module, WeightOnlyLinear) for module in model.modules())
    return {"layers": layers, "peak": max(used) - used[0], "floats": floats / 2**20}


if __name__ == "__main__":
    torch.set_num_threads(1)
    action, folder, *numbers = sys.argv[1:]
    actions: dict[str, Any] = {
        "fill_disk": fill_disk, "starve": starve, "watch_memory": watch_memory,
        "watch_loading": watch_loading,
    }  # fmt: skip
    print(json.dumps(actions[action](Path(folder), *map(int, numbers))))
