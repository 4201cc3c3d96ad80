"""The benches of whole models as commands; they import what needs transformers when they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import torch
import typer
from rich.progress import track

from bench import schemes
from bench.command_line import Json, Markdown, chosen_device, console, parsed, size_of
from bench.report import Row

SIZES: Final = "A model: llama3-8b, qwen3-8b, qwen3-30b-a3b, smollm2-135m, tiny, tiny-qwen3 or tiny-moe."


def model_command(
    m: Annotated[list[int], typer.Option("--m", min=1, help="Batch; repeatable.")] = [1, 8, 16, 64],  # noqa: B006
    size: Annotated[str, typer.Option(help=SIZES)] = "llama3-8b",
    blocks: Annotated[int | None, typer.Option(min=1, help="Another number of blocks.")] = None,
    scheme: Annotated[str, typer.Option(help="A weight-only scheme.")] = "w4a16_g128",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """All linear layers of a large model, as decoding calls them, against dense ones; needs transformers.

    Exits with 1 if a promise is broken.
    """
    from bench import model  # which imports transformers

    kind, where = parsed(lambda: schemes.parse_weight_only(scheme)), chosen_device(device)
    dtype = kind.dtype or (torch.float16 if where.type == "cuda" else torch.float32)
    bench = model.Model(size_of("--size", size, blocks)[1], kind, dtype, where)
    rows = list(track(model.run(bench, m), "measuring", len(m), console=console, transient=True))
    report = model.report(bench, rows)
    report.print(console)
    report.write(json_path, markdown_path)
    raise typer.Exit(1 if any(row["goal_ok"] is False for row in rows) else 0)


def tokens_command(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(exists=True, help="Folders that transformers loads, or GGUF files; none: random weights."),
    ] = None,
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences; repeatable.")] = [1, 8, 32],  # noqa: B006
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that each begins with.")] = 64,
    size: Annotated[str, typer.Option(help=f"Without SOURCES. {SIZES}")] = "smollm2-135m",
    scheme: Annotated[str, typer.Option(help="Without SOURCES: a weight-only scheme.")] = "w4a16_g64",
    dtype: Annotated[list[str], typer.Option(help="f16, bf16 or f32; default: f32, on a GPU f16 and bf16.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch and qcutlass.")] = None,
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """Tokens a second and memory of a whole model against the same with dense weights; needs transformers.

    Exits with 1 if CUDA graphs make another text than eager calls.
    """
    from bench import tokens  # which imports transformers

    kind, where = parsed(lambda: schemes.parse_weight_only(scheme)), chosen_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    names = dtype or (["f16", "bf16"] if where.type == "cuda" else ["f32"])
    types = parsed(lambda: [schemes.parse_dtype(name) for name in names])
    with TemporaryDirectory() as scratch:
        if sources:
            whole = [tokens.of_folder(source, where, Path(scratch)) for source in sources]
        else:
            whole = [tokens.of_size(*size_of("--size", size, None), kind, where)]
        count = len(whole) * len(types) * len(batch) * 2 * (2 if where.type == "cuda" else 1)
        rows = (row for model in whole for row in tokens.run(model, types, batch, prompt))
        found = list(track(rows, "measuring", count, console=console, transient=True))
    report = tokens.report(where, found, prompt)
    report.print(console)
    report.write(json_path, markdown_path)
    raise typer.Exit(1 if any(row["same_text"] is False for row in found) else 0)


def step_command(
    model: Annotated[list[str], typer.Option(help=f"{SIZES} Repeatable.")] = ["llama3-8b"],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences; repeatable.")] = [1, 8, 32, 64],  # noqa: B006
    context: Annotated[
        list[int],
        typer.Option("--context", "--prompt", min=1, help="Tokens of a prompt, which is timed too; repeatable."),
    ] = [512],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="eager, graph, compiled, default; repeatable.")] = ["default"],  # noqa: B006
    scheme: Annotated[str, typer.Option(help="A weight-only scheme.")] = "w4a16_g128",
    blocks: Annotated[int | None, typer.Option(min=1, help="Another number of blocks.")] = None,
    lm_head: Annotated[int | None, typer.Option(help="8 or 4: also with an output head of so many bits.")] = None,
    projections: Annotated[bool, typer.Option("--projections", help="Also with fused projections alone.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """Prompts and steps of whole models, mixtures of experts too, dense ones beside them; needs transformers."""
    from bench import step  # which imports transformers

    kind = parsed(lambda: schemes.parse_weight_only(scheme))
    if lm_head not in (None, 8, 4):
        raise typer.BadParameter(f"--lm-head {lm_head}: expected 8 or 4")
    unknown = sorted(set(mode) - set(step.MODES))
    if unknown:
        raise typer.BadParameter(f"--mode {unknown[0]!r}: expected one of {', '.join(step.MODES)}")
    where = chosen_device(device)
    modes = [step.MODES[name] for name in mode]
    found: list[Row] = []
    for name in model:
        rows = step.run(*size_of("--model", name, blocks), kind, modes, batch, context, lm_head, projections, where)
        count = (2 + (lm_head is not None) + projections) * len(modes) * len(batch) * len(context)
        bar = track(rows, f"measuring {name}", count, console=console, transient=True)

        def collect(bar: Iterable[Row] = bar) -> None:
            for row in bar:
                found.append(row)
                step.report(found).write(json_path, markdown_path)  # a row takes minutes: what is done is kept

        parsed(collect)
    step.report(found).print(console)


def decode_command(
    path: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="A GGUF file; default: SmolLM2-135M, Q4_1.")
    ] = None,
    threads: Annotated[list[int], typer.Option(min=1, help="Repeatable.")] = [1, 2],  # noqa: B006
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 256,
    count: Annotated[int, typer.Option("--tokens", min=2, help="Tokens behind it.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="That count.")] = 5,
    dtype: Annotated[list[str], typer.Option(help="f16, bf16 or f32; repeatable.")] = ["f32", "bf16"],  # noqa: B006
    k_quants: Annotated[
        bool, typer.Option("--k-quants", help="A random model of Q4_K and Q6_K with the file's tokenizer instead.")
    ] = False,
    beside: Annotated[int, typer.Option(min=0, help="Other processes that compute meanwhile.")] = 0,
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """Tokens a second of a whole model on the CPU beside llama.cpp; needs transformers and gguf."""
    from bench import decode  # which imports transformers
    from bench import k_quants as random_file
    from qcutlass.cli.quickstart import default_model

    types = parsed(lambda: [schemes.parse_dtype(name) for name in dtype])
    path = default_model() if path is None else path
    found: list[decode.Contestant] = []
    note = None
    with TemporaryDirectory() as scratch:
        if k_quants:
            path = random_file.write(Path(scratch) / "random-Q4_K_M.gguf", path)
        folder = decode.converted(path, Path(scratch))
        ids = parsed(lambda: decode.text(folder, prompt))
        try:
            found.extend(decode.contestants(path, folder, types, prompt + count))
        except ImportError as error:
            note = f"without llama.cpp ({error}): {decode.INSTALL}"
        with decode.neighbours(beside):
            rows = decode.run(found, threads, ids, count, rounds)
    report = decode.report(path.name, rows, prompt, count, rounds, beside, note)
    report.print(console)
    report.write(json_path, markdown_path)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("model")(model_command)
    app.command("tokens")(tokens_command)
    app.command("step")(step_command)
    app.command("decode")(decode_command)
