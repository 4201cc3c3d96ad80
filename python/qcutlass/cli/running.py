"""The commands that run a model: `qcutlass eval` and `qcutlass generate`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qcutlass.cli.terminal import Steps, chosen_device, console, decoded_text, echo, read_text, say, steps

if TYPE_CHECKING:
    from qcutlass.models.generation import Generation


class Floats(str, Enum):
    """Types of embeddings, norms and activations."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class QuantizedActivations(str, Enum):
    """Types to which layers quantise their input."""

    int8 = "int8"
    fp8 = "fp8"
    none = "none"


Folder = Annotated[
    Path,
    typer.Argument(
        help="A converted folder, a folder in one of the formats that convert reads, a GGUF file, or OWNER/NAME of "
        "the hub, if it has been downloaded."
    ),
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="The device on which the model runs.")]
Fuse = Annotated[
    bool | None,
    typer.Option(
        "--fuse/--no-fuse",
        help="Run blocks in fewer operators, such as one product for q, k and v. By default where that is faster.",
        show_default=False,
    ),
]
Quantized = Annotated[
    QuantizedActivations | None,
    typer.Option(
        "--activations",
        help="Layers quantise their input, which is less exact. int8: on the CPU weight-only layers, in blocks of 32 "
        "columns, which is faster; on a GPU layers of 4-bit weights with whole zero points, token by token (W4A8). "
        "fp8: layers of 4-bit weights with whole zero points, and of e4m3 weights in blocks, on the CPU and on GPUs "
        "that have kernels for it. none: no layer does, whatever the folder says.",
    ),
]
Eager = Annotated[
    bool, typer.Option("--eager", help="On a GPU, do not compile the steps of decoding, which takes half a minute.")
]
AsItIs = Annotated[
    bool, typer.Option("--eager", help="On a GPU, do not fuse blocks, as --no-fuse; nothing is compiled in any case.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="The number of threads on the CPU, of torch and of qcutlass.")]
Type = Annotated[
    Floats | None, typer.Option(help="The type of activations. By default float32 on the CPU, 16 bits on a GPU.")
]

Temperature = Annotated[
    float, typer.Option(min=0, help="0 takes the likeliest token each time. Larger values sample: 0.7 is usual.")
]
TopP = Annotated[
    float, typer.Option(min=0, max=1, help="Sample among the likeliest tokens that have this probability together.")
]
Seed = Annotated[int | None, typer.Option(help="The seed of sampling. By default a random one.")]


def evaluate(
    folder: Folder,
    text: Annotated[Path, typer.Option(help="A text file in UTF-8.")],
    tokens: Annotated[
        int | None, typer.Option(min=2, help="How many tokens of the text are used. By default all of them.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="The number of tokens that are predicted from each other.")] = 512,
    device: Device = "cpu",
    dtype: Type = None,
    fuse: Fuse = None,
    activations: Quantized = None,
    eager: AsItIs = False,
    threads: Threads = None,
) -> None:
    """Compute a model's perplexity on a text."""
    if tokens is not None and tokens < window:
        raise ValueError(f"--tokens {tokens}: expected at least one window of {window}; pass --window {tokens} as well")
    words = read_text("--text", text)
    with steps(console(stderr=True), "loading") as report:
        model, tokenizer = load(folder, device, dtype, fuse, activations, threads, report, eager)
        report("tokenizing", 0, 0)
        ids = tokenizer(words, return_tensors="pt")["input_ids"][0][:tokens]
        from qcutlass.models.evaluation import perplexity

        found = perplexity(model, ids, window, lambda done, total: report("windows", done, total))
    echo(
        f"perplexity {found.perplexity:.4f} of {found.tokens} tokens in windows of {window}, "
        f"{found.tokens / found.seconds:.0f} tokens/s"
    )


def generate(
    folder: Folder,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="The text to continue. By default it is read from a pipe on stdin. Repeated, all are continued "
            "together, and printed at the end.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The largest number of new tokens. The model may end earlier.")
    ] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: Device = "cpu",
    dtype: Type = None,
    fuse: Fuse = None,
    activations: Quantized = None,
    eager: Eager = False,
    threads: Threads = None,
) -> None:
    """Continue a prompt, and print the text as it comes, or several prompts; rates go to stderr."""
    from qcutlass.models.sampling import Sampling

    sampling = Sampling(temperature, top_p, seed)
    prompts = prompt or [_standard_input()]
    with steps(console(stderr=True), "loading") as report:
        model, tokenizer = load(folder, device, dtype, fuse, activations, threads, report, eager)
    from qcutlass.models.generation import Interrupted
    from qcutlass.models.generation import generate as generate_text

    if not chat and getattr(tokenizer, "chat_template", None):
        say("note: this model has a chat template; --chat puts the prompt into it")

    def finish(found: Sequence[Generation]) -> None:
        if len(found) == 1:
            echo("")
        for number, each in enumerate(found if len(found) > 1 else (), start=1):
            say(f"prompt {number} of {len(found)}:")
            echo(each.text, keep="\n\t")
        say(_speed(found))
        note_faster(model, activations)

    try:
        found = generate_text(
            model,
            tokenizer,
            prompts,
            max_new_tokens,
            chat=chat,
            sampling=sampling,
            eager=eager,
            on_note=say,
            on_text=(lambda text: echo(text, end="", keep="\n\t")) if len(prompts) == 1 else None,
        )
    except Interrupted as error:
        finish(error.generations)
        raise typer.Exit(130) from error
    finish(found)


def _speed(found: Sequence[Generation]) -> str:
    """How long one text or several took, in a line."""
    read, made, first = (sum(each.prompt_tokens for each in found), sum(each.tokens for each in found), found[0])
    seconds = max((each.tokens - 1) / (each.tokens_per_second or 1) for each in found)
    rate = (made - len(found)) / seconds if seconds else 0.0
    who = "of prompt, the first new one" if len(found) == 1 else f"of {len(found)} prompts, the first new ones"
    return (
        f"{read} tokens {who} after {1e3 * first.first_seconds:.0f} ms, then {rate:.1f} tokens/s"
        f"{' of all' * (len(found) > 1)}; {made} in all"
    )


def note_faster(model: Any, activations: QuantizedActivations | None) -> None:
    """Says that there is a faster way on a CPU."""
    from qcutlass.layers import WeightOnlyLinear

    layers = [layer for layer in model.modules() if isinstance(layer, WeightOnlyLinear)]
    if activations is None and any(layer.w_packed.is_cpu and layer.quantizes_activations for layer in layers):
        say("note: --activations int8 is faster, and less exact: it rounds activations as llama.cpp does")


def _standard_input() -> str:
    """The prompt from a pipe, without the newline that ends it."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError('--prompt: expected a text, or one from a pipe: echo "Hello" | qcutlass generate FOLDER')
    words = decoded_text("stdin", sys.stdin.buffer).removesuffix("\n")
    if not words:
        raise ValueError("--prompt: it was left out, and stdin is empty; pass one of them")
    return words


def load(
    folder: Path,
    device: str,
    dtype: Floats | None,
    fuse: bool | None,
    activations: QuantizedActivations | None,
    threads: int | None,
    report: Steps,
    eager: bool,
) -> tuple[Any, Any]:
    """The model and its tokenizer; `fuse` None: fused on the CPU, and on a GPU that does not run eagerly."""
    import torch

    from qcutlass.cli.places import runnable_model
    from qcutlass.layers import fuse_projections
    from qcutlass.models.block_fusing import fuse_block
    from qcutlass.models.extras import import_transformers

    where = chosen_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    logging = import_transformers("a whole model").utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its reports of tensors are printed as they are named; load_model checks them
    from qcutlass.models.transformers import load_model

    place = runnable_model(folder, report)
    report("loading", 0, 0)
    numbers = None if dtype is None else getattr(torch, dtype.value)
    model, tokenizer = load_model(place, where, numbers, None if activations is None else activations.value)
    skipped: dict[Any, str] = {}
    if fuse or (fuse is None and (where.type == "cpu" or not eager)):
        skipped = dict(fuse_block(model).skipped)
    if fuse is None and where.type != "cpu" and not eager:  # of other families, mixtures of experts say
        with contextlib.suppress(ValueError):  # layers of other names are left as they are
            fuse_projections(model)
    for names, reason in skipped.items() if fuse else ():
        say(f"not fused: {names}: {reason}")
    return model, tokenizer


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("eval")(evaluate)
    app.command()(generate)
