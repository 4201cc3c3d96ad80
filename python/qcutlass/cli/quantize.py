"""The commands that make quantised models and write them for others: `qcutlass quantize`, `qcutlass export`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qcutlass.cli.terminal import (
    HEAD_HELP,
    Bits,
    HeadBits,
    Skip,
    chosen_device,
    console,
    echo,
    note_group_size,
    printable,
    read_text,
    say,
    steps,
)
from qcutlass.defaults import DAMPING, EXPORTS, FLOAT_FORMATS, METHODS, SHARD_BYTES, SKIPPED

if TYPE_CHECKING:
    from qcutlass.models.quantizing.methods import Method
    from qcutlass.models.quantizing.run import Quantization

_PARTS: Final = {
    **dict.fromkeys(("bits", "group_size", "symmetric", "format"), "scheme"),
    **dict.fromkeys(("samples", "seqlen", "seed"), "calibration"),
}
"""Options of the command that are part of one of a method's."""
_TOLD: Final = 4  # names of layers in a line


class Activations(str, Enum):
    """How quantised activations get their scales."""

    dynamic = "dynamic"
    static = "static"


def quantize(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json and safetensors files, a GGUF file, or OWNER/NAME of the hub, if it has "
            "been downloaded."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to make. OUT.work holds what is done until then.")],
    method: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(METHODS)}. The last five quantise activations too, to 8 bits."),
    ] = "gptq",
    bits: Annotated[Bits, typer.Option(help="The bits of a weight (rtn, gptq, awq).")] = Bits.four,
    group_size: Annotated[
        int, typer.Option(help="The columns that share a scale. -1 is one scale a channel (rtn, gptq, awq).")
    ] = 128,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Quantise without zero points (rtn, gptq, awq).")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            help=f"A format of 4-bit floats, {' or '.join(FLOAT_FORMATS)}, in place of --bits, --group-size and "
            "--symmetric (rtn)."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A text file in UTF-8, which gptq, awq, smoothquant and static activations need."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="The number of windows that are taken from the text.")] = 128,
    seqlen: Annotated[int, typer.Option(min=1, help="The number of tokens in a window.")] = 512,
    seed: Annotated[int, typer.Option(help="The seed by which the windows are chosen.")] = 0,
    damping: Annotated[
        float, typer.Option(help="The share of the Hessian's mean diagonal that is added to it (gptq).")
    ] = DAMPING,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="Quantise the most active columns first (gptq).")
    ] = False,
    clip: Annotated[bool, typer.Option(help="Search for clipped ranges (rtn, gptq).")] = True,
    act_scale: Annotated[
        bool,
        typer.Option(help="Give layers factors of their own where no norm or linear takes them (awq, smoothquant)."),
    ] = True,
    activations: Annotated[
        Activations,
        typer.Option(help="A scale for each token as it comes, or one from calibration (smoothquant, w8a8, fp8)."),
    ] = Activations.dynamic,
    skip: Skip = [*SKIPPED],  # noqa: B006
    lm_head: Annotated[HeadBits, typer.Option(help=HEAD_HELP)] = HeadBits.keep,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda|cuda:N", help="The device on which blocks run and are quantised.")
    ] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="The number of threads on the CPU, of torch and of qcutlass.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted folder.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove what an earlier run has left, and begin anew.")
    ] = False,
    shard_bytes: Annotated[int, typer.Option(min=1, help="The largest size of a file, in bytes.")] = SHARD_BYTES,
) -> None:
    """Quantise a model with calibration, block by block; after a kill the same command goes on where it was.

    An option that the method does not read is refused.
    """
    import torch

    from qcutlass.cli.places import found_model
    from qcutlass.models.quantizing.decoder import Decoder
    from qcutlass.models.quantizing.methods import Method
    from qcutlass.models.quantizing.run import calibration_windows, open_model, quantize_model
    from qcutlass.schemes import WeightOnly, float_format

    if threads is not None:
        torch.set_num_threads(threads)
    _check_given(context, Method(method))
    scheme = WeightOnly(int(bits.value), group_size, symmetric)
    if format is not None:
        if scheme != WeightOnly() or not clip:
            raise ValueError(
                "--format: it says bits, group size and zero points; leave out their options and --no-clip"
            )
        scheme = float_format(format)
    chosen = Method(method, scheme, clip, damping, act_order, act_scale, activations.value)
    where = chosen_device(device)
    text = "a text file, some hundred kilobytes of what the model is to read"
    chosen.check_calibrated(calibration is not None, "--calibration", text)
    words = None if calibration is None else read_text("--calibration", calibration)
    model = found_model(model)
    with steps(console(stderr=True), "reading headers") as report:
        source = open_model(model, out, overwrite=overwrite, restart=restart)
        if chosen.is_weight_only:
            note_group_size(scheme.group_size or -1)
        ids = None
        if words is not None:
            Decoder(source, where, is_calibrated=True)  # whether the model is one to calibrate
            report("tokenizing", 0, 0)
            tokens = source.tokenizer()(words)["input_ids"]
            ids = calibration_windows(torch.tensor(tokens, dtype=torch.int64), samples, seqlen, seed)
            say(f"calibration: {samples} windows of {seqlen} of {len(tokens)} tokens, seed {seed}")
        found = quantize_model(
            model,
            out,
            chosen,
            calibration=ids,
            skip=skip,
            lm_head=lm_head.bits,
            device=where,
            overwrite=overwrite,
            restart=restart,
            shard_bytes=shard_bytes,
            progress=report,
        )
    echo(_summary(found, chosen, out))


def _check_given(context: typer.Context, method: Method) -> None:
    """Raises ValueError for an option in the command line that the method does not read, whatever its value."""
    from qcutlass.models.quantizing.methods import READERS

    for name in context.params:
        option, source = _PARTS.get(name, name), context.get_parameter_source(name)
        if option in READERS and source is not None and source.name != "DEFAULT":
            method.check_read(option, f"--{name.replace('_', '-')}")


def _summary(found: Quantization, method: Method, out: Path) -> str:
    from qcutlass.models.quantizing.methods import UNREACHED

    lines = [
        f"{method.name}: {found.layers} layers of {found.weights / 1e6:.1f} M weights; "
        f"{found.size / 1e6:.1f} MB in {printable(out)}"
    ]
    if found.kept:
        more = ", ..." if len(found.kept) > _TOLD else ""
        lines.append(
            f"{len(found.kept)} linear layers outside of the blocks stay floats: "
            f"{printable(', '.join(found.kept[:_TOLD]))}{more}"
        )
    if found.resumed:
        lines.append(f"{found.resumed} blocks were taken over from an earlier run")
    errors = {name: notes["error"] for name, notes in found.notes.items() if "error" in notes}
    if errors:
        worst = max(errors, key=errors.__getitem__)
        lines.append(
            f"relative squared error of the layers' outputs: {sum(errors.values()) / len(errors):.5f} on average, "
            f"{errors[worst]:.5f} at most ({printable(worst)})"
        )
    unreached = [name for name, notes in found.notes.items() if UNREACHED in notes]
    if unreached:
        lines.append(
            f"{len(unreached)} layers of experts got no token of the calibration and were rounded to nearest: "
            f"{printable(', '.join(unreached[:_TOLD]))}"
        )
    damped = [name for name, notes in found.notes.items() if notes.get("damping", method.damping) > method.damping]
    if damped:
        lines.append(
            f"{len(damped)} layers needed more damping than {method.damping:g}: {printable(', '.join(damped[:_TOLD]))}"
        )
    return "\n".join(lines)


def export(
    folder: Annotated[Path, typer.Argument(help="A converted folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help=f"The format: {' or '.join(EXPORTS)}.")] = "gptq",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that qcutlass made.")] = False,
    shard_bytes: Annotated[int, typer.Option(min=1, help="The largest size of a file, in bytes.")] = SHARD_BYTES,
) -> None:
    """Write a converted folder in the format of other engines; its quantised linear layers lose nothing."""
    from qcutlass.models.exporting import export_model, export_note

    count = export_model(folder, out, to, overwrite=overwrite, shard_bytes=shard_bytes)
    note = export_note(out)
    echo(f"{to}: {count} layers in {printable(out)}")
    if note is not None:
        say(f"note: {note}")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(quantize)
    app.command()(export)
