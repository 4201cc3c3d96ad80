"""Small random decoders; quantisations on a full disk or watched: `python -m tests.python.models.quantizations`.

A process of its own, so that what it forks has no threads. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from tests.python.models.conversions import contents, limited
from torch import Tensor
from typer.testing import CliRunner

from qcutlass import WeightOnly, models
from qcutlass.cli import app

VOCABULARY = 96
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 128, "num_key_value_heads": 2},
    "llama-mha": {"intermediate_size": 128, "attention_bias": True},
    "qwen2": {
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "olmo2": {"intermediate_size": 128},  # norms come after the linear layers
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt_neox": {"intermediate_size": 128},
}


def make(kind: str, seed: int, **options: Any) -> Any:
    """A random model whose activations and weights are as large as to be bent by activation functions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind.partition("-")[0], **{**SIZES, **KINDS.get(kind, {}), "initializer_range": 0.2, **options}
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def calibration(seed: int, samples: int = 8, tokens: int = 24) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, tokens), generator=torch.Generator().manual_seed(seed))


def fill_disk(root: Path, seed: int) -> dict[str, Any]:
    """Files end at so many bytes: in the mark, the manifest, a block, the states behind it, the new folder."""
    source = root / "source"
    make("llama", seed).save_pretrained(source)
    method = models.Method("gptq", WeightOnly(4, 32, True))
    ids = calibration(seed)

    def quantize(name: str) -> models.Quantization:
        return models.quantize_model(source, root / name, method, calibration=ids)

    reference = quantize("reference")
    outcomes: dict[int, str] = {}
    for limit in (20, 300, 3_000, 47_000, 60_000):
        with limited(resource.RLIMIT_FSIZE, limit):
            try:
                quantize("new")
            except OSError as error:
                outcomes[limit] = error.strerror or str(error)
        assert not (root / "new").exists()
    with limited(resource.RLIMIT_FSIZE, 3_000):
        command = ["quantize", str(source), str(root / "other"), "--method", "rtn"]
        shown = CliRunner().invoke(app, command)
    command_lines = [shown.exit_code, type(shown.exception).__name__, shown.stderr]
    last = quantize("new")
    left = [path.name for path in root.iterdir() if path.name not in ("source", "reference", "new", "other.work")]
    return {
        "outcomes": outcomes,
        "command": command_lines,
        "resumed": last.resumed,
        "same": contents(root / "new") == contents(root / "reference") and last.files == reference.files,
        "left": left,
    }


def watch_memory(root: Path) -> dict[str, float]:
    """MB that a quantisation adds at most, beside that of its float weights."""
    make("llama", 0, num_hidden_layers=1).save_pretrained(root / "small")
    models.quantize_model(root / "small", root / "warm", "gptq", calibration=calibration(0))
    model = make("llama", 0, hidden_size=512, intermediate_size=1024, num_hidden_layers=18)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.half().save_pretrained(root / "source", max_shard_size="10MB")
    del model
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak()
    models.quantize_model(root / "source", root / "new", "gptq", calibration=calibration(0))
    return {"used": peak() - before, "model": size / 2**20}


def peak() -> float:
    """MB of this process at most, since the peak was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def billion(root: Path, gigabytes: float) -> dict[str, float]:
    """A random model of Llama-3.2-1B's shape: minutes to hours, and 5 GB of disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
    )  # fmt: skip
    if not (root / "source").exists():
        torch.set_default_dtype(torch.bfloat16)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root / "source")
        torch.set_default_dtype(torch.float32)
    child = os.fork()
    if child == 0:
        ids = torch.randint(0, 128256, (8, 256), generator=torch.Generator().manual_seed(0))
        models.quantize_model(root / "source", root / "new", "gptq", calibration=ids, overwrite=True)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    assert status == 0
    return {"peak GB": used.ru_maxrss / 2**20, "limit GB": gigabytes, "seconds": used.ru_utime + used.ru_stime}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    action, folder, *numbers = sys.argv[1:]
    actions: dict[str, Any] = {"fill_disk": fill_disk, "watch_memory": watch_memory, "billion": billion}
    print(json.dumps(actions[action](Path(folder), *map(int, numbers))))
