"""The command that measures kernels: `qcutlass tune`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from qcutlass.cli.terminal import Bits, console, failed, markup

if TYPE_CHECKING:
    from qcutlass.schemes import Scheme
    from qcutlass.tuning.tuner import TunedProduct


class Activations(str, Enum):
    """Types of activations and scales."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e5m2 = "float8_e5m2"


class EightBitSchemes(str, Enum):
    """Schemes whose activations have 8 bits."""

    w8a8 = "w8a8"
    fp8 = "fp8"
    blockwise_int8 = "blockwise-int8"
    blockwise_fp8 = "blockwise-fp8"
    w4a8_int8 = "w4a8-int8"
    w4a8_fp8 = "w4a8-fp8"


class Zeros(str, Enum):
    """Types of zero points."""

    none = "none"
    uint8 = "uint8"
    int8 = "int8"
    int32 = "int32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def tune(
    shapes: Annotated[
        list[str], typer.Argument(metavar="SHAPE...", help="The shapes of weights, NxK, say 4096x14336.")
    ],
    bits: Annotated[Bits, typer.Option(help="The bits of a weight.")] = Bits.four,
    group_size: Annotated[int, typer.Option(help="The columns that share a scale. -1 is one scale a channel.")] = 128,
    dtype: Annotated[
        Activations | None,
        typer.Option(
            help="The type of activations and scales. By default float16. With a scheme it is that of its activations: "
            "fp8 takes float8_e5m2, too."
        ),
    ] = None,
    zeros: Annotated[Zeros, typer.Option(help="The type of the zeros. none is for symmetric weights.")] = Zeros.none,
    m: Annotated[
        list[int] | None,
        typer.Option("--m", help="A number of rows of activations. It can be repeated. By default all that are kept."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cuda|cuda:N", help="The GPU.")] = "cuda",
    scheme: Annotated[
        EightBitSchemes | None,
        typer.Option(
            help="A scheme with activations of 8 bits, in place of bits, group size and zeros. w4a8 takes the group "
            "size, and zeros of type none or uint8."
        ),
    ] = None,
) -> None:
    """Measure the kernels for products with weights of these shapes; these products use the fastest from then on.

    The winners are kept in the user's cache folder; QCUTLASS_CACHE_DIR names another.
    """
    import torch

    from qcutlass.products.tuned_plans import BUCKETS, cache_folder
    from qcutlass.tuning.tuner import tune as tune_shapes

    zero_dtype = None if zeros is Zeros.none else getattr(torch, zeros.value)
    weights: dict[str, Any] = {"group_size": group_size, "zero_dtype": zero_dtype, "scheme": None}
    if scheme in (EightBitSchemes.w4a8_int8, EightBitSchemes.w4a8_fp8):
        weights = {"scheme": _int4_scheme(scheme, group_size, zeros)}
    elif scheme is not None:
        weights["scheme"] = _scheme(scheme)  # the others are refused beside it
    try:
        found = tune_shapes(
            [_shape(text) for text in shapes],
            ms=BUCKETS if m is None else m,
            bits=int(bits.value),
            dtype=None if dtype is None else getattr(torch, dtype.value),
            device=device,
            **weights,
        )
    except TypeError as error:  # types are values of options here
        raise ValueError(error) from error
    except RuntimeError as error:  # of torch, where the GPU fails
        raise failed(error) from error
    console().print(_tuning_table(found))
    console().print(markup(f"kept in {cache_folder()}"), soft_wrap=True)


def _scheme(name: EightBitSchemes) -> Scheme:
    from qcutlass.schemes import FP8, W8A8, Blockwise

    schemes: dict[EightBitSchemes, Scheme] = {
        EightBitSchemes.w8a8: W8A8(),
        EightBitSchemes.fp8: FP8(),
        EightBitSchemes.blockwise_int8: Blockwise(),
        EightBitSchemes.blockwise_fp8: Blockwise(type="fp8"),
    }
    return schemes[name]


def _int4_scheme(name: EightBitSchemes, group_size: int, zeros: Zeros) -> Scheme:
    from qcutlass.schemes import W4A8

    if zeros not in (Zeros.none, Zeros.uint8):
        raise ValueError(f"--zeros: expected none or uint8 with {name.value}, got {zeros.value}; its zeros are whole")
    activations: Literal["int8", "fp8"] = "int8" if name is EightBitSchemes.w4a8_int8 else "fp8"
    return W4A8(group_size, activations, symmetric=zeros is Zeros.none)


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


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command()(tune)
