"""The commands that make quantised models and write them for others: `qcutlass quantize`, `qcutlass export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qcutlass.algorithms.gptq import DAMPING
from qcutlass.cli.terminal import HEAD_HELP, Bits, Device, HeadBits, console, echo, printable, progress, read_text, say
from qcutlass.errors import UnsupportedError
from qcutlass.layers.replace import SKIPPED
from qcutlass.models.conversion import SHARD_BYTES
from qcutlass.models.exporting import EXPORTS, export_model, export_note
from qcutlass.models.opening import open_source
from qcutlass.models.quantizing.methods import METHODS, READERS, Method
from qcutlass.models.quantizing.run import Quantization, calibration_windows, quantize_model
from qcutlass.schemes import WeightOnly

_PARTS: Final = {
    **dict.fromkeys(("bits", "group_size", "symmetric"), "scheme"),
    **dict.fromkeys(("samples", "seqlen", "seed"), "calibration"),
}
"""Options of the command that are part of one of a method's."""


def quantize(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors files, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; OUT.work holds what is done until then.")],
    method: Annotated[
        str, typer.Option(help=f"{', '.join(METHODS)}; the last two quantise activations too, to 8 bits.")
    ] = "gptq",
    bits: Annotated[Bits, typer.Option(help="Of a weight (rtn, gptq, awq).")] = Bits.four,
    group_size: Annotated[
        int, typer.Option(help="Columns that share a scale; -1: one scale a channel (rtn, gptq, awq).")
    ] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="No zero points (rtn, gptq, awq).")] = False,
    calibration: Annotated[Path | None, typer.Option(help="A UTF-8 text file, for gptq, awq and smoothquant.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 128,
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the places of the windows.")] = 0,
    damping: Annotated[float, typer.Option(help="gptq: share of the mean diagonal that is added to it.")] = DAMPING,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: the most active columns first.")] = False,
    clip: Annotated[bool, typer.Option(help="rtn, gptq: search for clipped ranges.")] = True,
    act_scale: Annotated[
        bool, typer.Option(help="awq, smoothquant: factors of their own for layers where no norm or linear takes them.")
    ] = True,
    skip: Annotated[list[str], typer.Option(help="Layers to leave alone: names or patterns; repeatable.")] = [*SKIPPED],  # noqa: B006
    lm_head: Annotated[HeadBits, typer.Option(help=HEAD_HELP)] = HeadBits.keep,
    device: Annotated[Device, typer.Option(help="Where blocks run.")] = Device.cpu,
    threads: Annotated[int | None, typer.Option(min=1, help="On the CPU: of torch and qcutlass.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted folder.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove what an earlier run has left, and begin anew.")
    ] = False,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Largest size of a file.")] = SHARD_BYTES,
) -> None:
    """Quantise a model with calibration, block by block; after a kill the same command goes on where it was.

    An option that the method does not read is refused.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    _check_given(context, Method(method))
    scheme = WeightOnly(int(bits.value), group_size, symmetric)
    chosen = Method(method, scheme, clip=clip, damping=damping, act_order=act_order, act_scale=act_scale)
    if device is Device.cuda and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch sees no CUDA device; use --device cpu")
    ids = None
    if chosen.needs_calibration:
        if calibration is None:
            raise ValueError(f"--calibration: {chosen.name} needs a text file")
        words = read_text("--calibration", calibration)
        tokens = open_source(model, "auto", None).tokenizer()(words)["input_ids"]
        ids = calibration_windows(torch.tensor(tokens), samples, seqlen, seed)
        say(f"calibration: {samples} windows of {seqlen} of {len(tokens)} tokens, seed {seed}")
    with _bar() as bar:
        task = bar.add_task("reading headers", total=None)
        found = quantize_model(
            model,
            out,
            chosen,
            calibration=ids,
            skip=skip,
            lm_head=lm_head.bits,
            device=device.value,
            overwrite=overwrite,
            restart=restart,
            shard_bytes=shard_bytes,
            progress=lambda what, done, total: bar.update(
                task, description=printable(what), completed=done, total=total
            ),
        )
    echo(_summary(found, chosen, out))


def _check_given(context: typer.Context, method: Method) -> None:
    """Raises ValueError for an option in the command line that the method does not read, whatever its value."""
    for name in context.params:
        option, source = _PARTS.get(name, name), context.get_parameter_source(name)
        if option in READERS and source is not None and source.name != "DEFAULT":
            method.check_read(option, f"--{name.replace('_', '-')}")


def _bar() -> Progress:
    """The progress line: the step, its share, the time gone and the time left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return progress(console(stderr=True), *columns)


def _summary(found: Quantization, method: Method, out: Path) -> str:
    lines = [
        f"{method.name}: {found.layers} layers of {found.weights / 1e6:.1f} M weights; "
        f"{found.size / 1e6:.1f} MB in {printable(out)}"
    ]
    if found.resumed:
        lines.append(f"{found.resumed} blocks were taken over from an earlier run")
    errors = {name: notes["error"] for name, notes in found.notes.items() if "error" in notes}
    if errors:
        worst = max(errors, key=errors.__getitem__)
        lines.append(
            f"error of the layers' outputs, of their size: {sum(errors.values()) / len(errors):.5f} on average, "
            f"at most {errors[worst]:.5f} ({printable(worst)})"
        )
    damped = [name for name, notes in found.notes.items() if notes.get("damping", method.damping) > method.damping]
    if damped:
        lines.append(
            f"{len(damped)} layers needed more damping than {method.damping:g}: {printable(', '.join(damped[:4]))}"
        )
    return "\n".join(lines)


def export(
    folder: Annotated[Path, typer.Argument(help="A converted folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help=f"{' or '.join(EXPORTS)}.")] = "gptq",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that qcutlass made.")] = False,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Largest size of a file.")] = SHARD_BYTES,
) -> None:
    """Write a converted folder in the format of other engines; its quantised linear layers lose nothing."""
    count = export_model(folder, out, to, overwrite=overwrite, shard_bytes=shard_bytes)
    note = export_note(out)
    echo(f"{to}: {count} layers in {printable(out)}")
    if note is not None:
        say(f"note: {note}")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(quantize)
    app.command()(export)
