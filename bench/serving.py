"""Tokens a second and time to first token through vLLM: a model with random int4 weights, by each of several kernels.

``python -m bench.serving --kernel qcutlass --kernel machete --kernel marlin --json serving.json``

Each kernel runs in a process of its own, offline, with the same prompts of random tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from bench.llama import SIZES, Size

PROMPT: Final = 512
OUTPUT: Final = 256
GROUP: Final = 128
_SEVENS: Final = 0x77777777
"""Zero points in the middle, as version 1 of GPTQ stores them."""
_RECORD: Final = "serving: "

KERNELS: Final[dict[str, dict[str, str]]] = {
    "qcutlass": {},
    "machete": {"VLLM_PLUGINS": ""},
    "marlin": {"VLLM_PLUGINS": "", "VLLM_DISABLED_KERNELS": "MacheteLinearKernel"},
}
"""The environment in which vLLM multiplies by each kernel; without plug-ins it has its own alone."""


def write_checkpoint(folder: Path, size: Size, device: str) -> None:
    """A model in GPTQ's format: random codes in groups of 128, symmetric; a file a block."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.blocks,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "vocab_size": size.vocabulary,
        "tie_word_embeddings": size.tied, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
            "checkpoint_format": "gptq",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for block in range(size.blocks):
        _save(folder, f"block-{block:03d}.safetensors", _block(size, f"model.layers.{block}", device), weight_map)
    width = size.hidden
    rest = {
        "model.embed_tokens.weight": _random(size.vocabulary, width, device),
        "model.norm.weight": torch.ones(width),
    }
    if not size.tied:
        rest["lm_head.weight"] = _random(size.vocabulary, width, device)
    _save(folder, "rest.safetensors", {name: tensor.half() for name, tensor in rest.items()}, weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _save(folder: Path, name: str, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    weight_map.update(dict.fromkeys(tensors, name))


def _random(rows: int, columns: int, device: str) -> Tensor:
    return 0.02 * torch.randn(rows, columns, device=device)


def _block(size: Size, prefix: str, device: str) -> dict[str, Tensor]:
    head = size.hidden // size.heads
    kv, width, inner = head * size.kv_heads, size.hidden, size.intermediate
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, (n, k) in shapes.items():
        words = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int32, device=device)
        tensors |= {
            f"{prefix}.{name}.qweight": words,
            f"{prefix}.{name}.qzeros": torch.full((k // GROUP, n // 8), _SEVENS, dtype=torch.int32),
            f"{prefix}.{name}.scales": (0.002 + 0.004 * torch.rand(k // GROUP, n, device=device)).half(),
            f"{prefix}.{name}.g_idx": (torch.arange(k) // GROUP).int(),
        }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(width, dtype=torch.float16)
    return tensors


def measure(
    folder: Path, batches: list[int], tensor_parallel_size: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Figures of each batch, in this process."""
    from vllm import LLM, SamplingParams

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    start = time.perf_counter()
    llm = LLM(
        str(folder), dtype="float16", max_model_len=PROMPT + OUTPUT, max_num_seqs=max(batches),
        skip_tokenizer_init=True,
        enable_prefix_caching=False, tensor_parallel_size=tensor_parallel_size, **options,
    )  # fmt: skip
    ready = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)

    def seconds(batch: int, tokens: int) -> float:
        drawn = torch.randint(2, vocabulary, (batch, PROMPT), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in drawn], params, use_tqdm=False)
        return time.perf_counter() - begin

    rows = []
    for batch in batches:
        cold = seconds(batch, 1)
        first = min(seconds(batch, 1) for _ in range(3))
        total = min(seconds(batch, OUTPUT) for _ in range(2))
        rows.append(
            {
                "batch": batch,
                "tokens_per_s": batch * OUTPUT / total,
                "first_token_ms": 1e3 * first,
                "cold_first_token_ms": 1e3 * cold,
                "decode_ms": 1e3 * (total - first) / (OUTPUT - 1),
                "start_s": ready,
            }
        )
    return rows


def main(
    kernel: Annotated[list[str], typer.Option(help=f"One of {', '.join(KERNELS)}; repeatable.")] = [*KERNELS],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences at once; repeatable.")] = [1, 8, 32, 128],  # noqa: B006
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "llama3-8b",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs.")] = 1,
    options: Annotated[str, typer.Option(help="More arguments of vllm.LLM, as JSON.")] = "{}",
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is made, or lies already.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Throughput and latency of vLLM with each kernel."""
    if here:
        assert folder is not None
        print(_RECORD + json.dumps(measure(folder, batch, tensor_parallel_size, json.loads(options))), flush=True)
        return
    unknown = set(kernel) - set(KERNELS)
    if unknown:
        raise typer.BadParameter(
            f"expected {', '.join(KERNELS)}, got {', '.join(sorted(unknown))}", param_hint="--kernel"
        )
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary) / "model"
        if not (place / "config.json").exists():
            write_checkpoint(place, SIZES[size], "cuda" if torch.cuda.is_available() else "cpu")
        rows = []
        for name in kernel:
            command = [sys.executable, "-m", "bench.serving", "--here", "--folder", str(place), "--options", options]
            command += ["--tensor-parallel-size", str(tensor_parallel_size)]
            command += [part for number in batch for part in ("--batch", str(number))]
            run = subprocess.run(
                command, env=os.environ | KERNELS[name], stdout=subprocess.PIPE, text=True, check=False
            )
            records = [line for line in run.stdout.splitlines() if line.startswith(_RECORD)]
            if run.returncode or not records:
                print(run.stdout[-2000:], file=sys.stderr)
                raise typer.Exit(run.returncode or 1)
            found = json.loads(records[0].removeprefix(_RECORD))
            rows += [{"kernel": name, **row} for row in found]
            for row in found:
                print(name, *(f"{key}={value:.6g}" for key, value in row.items()), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "size": size, "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
