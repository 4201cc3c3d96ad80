"""Command line of the benches: ``python -m bench COMMAND``, say cpu, gpu, sweep, step; ``--help`` lists them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from bench import (
    cpu,
    cpu_int8,
    extracts,
    first_call,
    fit,
    gpu,
    gpu_report,
    measured,
    model_commands,
    pages,
    peers,
    plots,
    quality,
    quantizers,
    schemes,
    shapes,
    sweep,
    sweep_figure,
)
from bench.command_line import Json, Markdown, at_most_every, chosen_device, console, one_of, parsed
from bench.gpu_timing import ROUNDS
from bench.moe import problem as moe_problem
from bench.moe import run as moe_run
from bench.moe.contestants import PEERS
from bench.peers import cutlass, gemlite
from bench.report import Row

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Shapes = Annotated[
    list[str], typer.Option("--shapes", help="main, bench, all, a model (llama3-8b, ...), or NxK; repeatable.")
]
Rows = Annotated[list[int], typer.Option("--m", min=1, help="Rows of activations; repeatable.")]
Schemes = Annotated[list[str], typer.Option("--scheme", help=f"{schemes.PATTERNS}; repeatable.")]
Rounds = Annotated[int, typer.Option(min=1, help="Replays of each contestant.")]
Within = Annotated[
    float | None,
    typer.Option(
        min=1, help="Of these only what is predicted to take at most so many times the least, with any split-K."
    ),
]

_QUANTIZED = ["4096x8192", "8192x8192", "16x8192"]


def _collect(cells: Iterable[list[Row]], total: int, save: Callable[[list[Row]], None] | None = None) -> list[Row]:
    """Runs the bench with a progress bar that names what was measured last; `save` gets the rows after each cell."""
    collected: list[Row] = []
    with Progress(*Progress.get_default_columns(), "{task.fields[last]}", console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total, last="")
        for cell in cells:
            collected += cell
            if save is not None:
                save(collected)
            last = "{scheme} {shape} M={m}".format(**cell[-1])
            progress.update(task, advance=1, last=last)
    return collected


@app.command("cpu")
def cpu_command(
    shape: Shapes = ["smollm2-135m", "4096x4096", "4096x14336"],  # noqa: B006
    m: Rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    json_path: Json = None,
    markdown_path: Markdown = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch and qcutlass.")] = None,
    activations: Annotated[str | None, typer.Option(help="int8: quantised by the product.")] = None,
) -> None:
    """CPU backend against torch's fp32 product; exits with 1 if a promise (time, memory, packing) is broken.

    --scheme w8a8: int8 by int8 against torch's own product, in which nothing is promised.
    """
    layers = parsed(lambda: shapes.parse(shape))
    if threads is not None:
        torch.set_num_threads(threads)
    whole = parsed(lambda: [schemes.parse(name) for name in scheme])
    eight_bit = [kind for kind in whole if isinstance(kind, schemes.EightBit)]
    if len(eight_bit) == len(whole):
        cells = ([row] for row in cpu_int8.run(eight_bit, layers, m))
        rows = parsed(lambda: _collect(cells, len(eight_bit) * len(layers) * len(m)))
        report = cpu_int8.report(rows, cpu.machine())
        report.print(console)
        report.write(json_path, markdown_path)
        return
    kinds = parsed(lambda: [schemes.parse_weight_only(name) for name in scheme])
    seconds, times = cpu.pack_seconds(), cpu.scaling()
    cells = ([row] for row in cpu.run(kinds, layers, m, torch.float32, activations))
    rows = _collect(cells, len(kinds) * len(layers) * len(m))
    report = cpu.report(rows, seconds, times)
    report.print(console)
    report.write(json_path, markdown_path)
    raise typer.Exit(1 if cpu.failures(rows, seconds) else 0)


@app.command("gpu")
def gpu_command(
    shape: Shapes = ["main"],  # noqa: B006
    m: Rows = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    json_path: Json = None,
    markdown_path: Markdown = None,
    tactics: Annotated[
        str | None, typer.Option(help="all, or a part of the names: also time these one by one.")
    ] = None,
    split_k: Annotated[list[int], typer.Option(min=0, help="Split-K of these (0: chosen); repeatable.")] = [0],  # noqa: B006
    within: Within = None,
    peer: Annotated[
        list[str], typer.Option(help=f"Only these of {', '.join(gpu_report.LABELS)}; repeatable.", show_default=False)
    ] = [],  # noqa: B006
    use_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to run peers beside.")] = True,
    cutlass_library: Annotated[
        Path | None, typer.Option(help=f"libqcutlass_bench_cutlass.so; default: {cutlass.ENVIRONMENT_VARIABLE}.")
    ] = None,
    gemlite_autotune: Annotated[
        str, typer.Option(help=f"How much gemlite tunes: {', '.join(gemlite.AUTOTUNE_MODES)}.")
    ] = "fast",
    eager: Annotated[bool, typer.Option(help="Also measure the host time of an eager call.")] = False,
    in_situ: Annotated[
        bool, typer.Option("--in-situ", help="Also measure with an ordinary kernel before each product.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Also time the kernel of the batch-invariant product.")
    ] = False,
    rounds: Rounds = ROUNDS,
) -> None:
    """GPU kernels against their peers in the same run; stops at the first wrong result."""
    layers, kinds = parsed(lambda: shapes.parse(shape)), parsed(lambda: [schemes.parse(name) for name in scheme])
    others = parsed(lambda: peers.select(peer, cutlass_library=cutlass_library, gemlite_autotune=gemlite_autotune))
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    if within is not None and (tactics is None or split_k != [0]):
        raise typer.BadParameter("--within: expected --tactics with it, and no --split-k: it takes any")
    options = gpu.Options("" if tactics == "all" else tactics, split_k, within, eager, in_situ, batch_invariant, rounds)
    bench = gpu.Bench(others if use_peers else [], options)

    def save(rows: list[Row]) -> None:
        bench.report(rows).write(json_path, None)

    rows = _collect(bench.rows(kinds, layers, m), len(kinds) * len(layers) * len(m), save)
    report = bench.report(rows)
    report.print(console)
    report.write(json_path, markdown_path)


@app.command("sweep")
def sweep_command(
    json_path: Annotated[
        list[Path],
        typer.Option("--json", help="Rows; one that is there is gone on with; repeatable, others are read."),
    ],
    m: Rows = [*sweep.MS],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    random_layers: Annotated[int, typer.Option("--random", min=0, help="Random layers beside those of models.")] = (
        sweep.RANDOM
    ),
    models: Annotated[bool, typer.Option("--models/--no-models", help="Whether layers of models take part.")] = True,
    seed: Annotated[int, typer.Option(help="Of the random layers, and of the order.")] = 0,
    part: Annotated[tuple[int, int], typer.Option(help="I N: every N-th layer from I on, of N GPUs.")] = (
        0,
        1,
    ),
    seconds: Annotated[float, typer.Option(min=0, help="Begin no layer after so long.")] = 1e9,
    compilers: Annotated[int, typer.Option(min=0, help="Processes that let peers compile their kernels first.")] = 0,
    rounds: Rounds = sweep.ROUNDS,
    tactics: Annotated[str | None, typer.Option(help="all, or a part of the names: also time these.")] = None,
    within: Within = None,
    peer: Annotated[list[str], typer.Option(help="Only these; repeatable.")] = ["cublas", "humming"],  # noqa: B006
    markdown_path: Markdown = None,
    plots_path: Annotated[Path | None, typer.Option("--plots", file_okay=False, help="Draw heat maps here.")] = None,
) -> None:
    """GPU kernels on the layers of many models, their shards, and random ones, in pieces, on several GPUs."""
    kinds, others = parsed(lambda: [schemes.parse(name) for name in scheme]), parsed(lambda: peers.select(peer))
    if within is not None and tactics is None:
        raise typer.BadParameter("--within: expected --tactics with it")
    layers = parsed(lambda: sweep.layers(random_layers, seed, part, models))
    whole = len(sweep.layers(random_layers, seed, models=models)) * len(kinds) * len(m)
    if seconds > 0:
        if not torch.cuda.is_available():
            raise typer.BadParameter("torch sees no CUDA device; --seconds 0 reports what is in --json")
        name = torch.cuda.get_device_name()
        mine, done = parsed(lambda: (sweep.read(json_path[0], name), sweep.read_all(json_path, name)))
        begin = time.monotonic()
        if compilers > 0:
            left = sweep.unfinished(kinds, layers, m, done["rows"])
            sweep.compile_kernels(peer, kinds, left, m, compilers, seconds / 2)  # the other half is for times
        bench = gpu.Bench(
            others, gpu.Options(tactics="" if tactics == "all" else tactics, within=within, rounds=rounds)
        )

        def save(fresh: list[Row]) -> None:
            sweep.continued(mine, bench.report(fresh)).write(json_path[0], None)

        cells = sweep.run(bench, kinds, layers, m, done["rows"], max(0.0, seconds - (time.monotonic() - begin)))
        fresh = _collect(cells, len(layers) * len(kinds) * len(m), at_most_every(sweep.SAVE_SECONDS, save))
        save(fresh)
    found = parsed(lambda: sweep.read_all(json_path))
    report = sweep.report(found["facts"], found["rows"], whole, sweep.held_out(random_layers, seed))
    report.print(console)
    report.write(None, markdown_path)
    if plots_path is not None:
        for path in sweep_figure.draw(found["rows"], plots_path):
            console.print(str(path), highlight=False)


@app.command("moe")
def moe_command(
    model: Annotated[list[str], typer.Option(help=f"{', '.join(moe_problem.SIZES)}; repeatable.")] = moe_run.MODELS,
    m: Annotated[list[int], typer.Option("--m", min=1, help="Tokens; repeatable.")] = moe_run.TOKENS,
    skew: Annotated[list[str], typer.Option(help=f"Ids: {', '.join(moe_problem.SKEWS)}; repeatable.")] = ["uniform"],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    tactics: Annotated[str | None, typer.Option(help="all, or a part of the names: both products by these.")] = None,
    peer: Annotated[
        list[str], typer.Option(help=f"Only these of {', '.join(peer.key for peer in PEERS)}; repeatable.")
    ] = [],  # noqa: B006
    use_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to run peers beside.")] = True,
    rounds: Rounds = ROUNDS,
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """Blocks of mixtures of experts on a GPU, of weight-only schemes; stops at the first wrong result."""
    sizes = [moe_problem.SIZES[one_of("--model", name, moe_problem.SIZES)] for name in model]
    keys = [one_of("--peer", key, [one.key for one in PEERS]) for key in peer]
    kinds, skews = parsed(lambda: ([moe_problem.parse_scheme(name) for name in scheme], moe_problem.skews(skew)))
    chosen_device("cuda")
    others = [one() for one in PEERS if not keys or one.key in keys] if use_peers else []
    bench = moe_run.Bench(others, "" if tactics == "all" else tactics, rounds)

    def save(rows: list[Row]) -> None:
        bench.report(rows).write(json_path, markdown_path)

    rows = _collect(bench.rows(sizes, kinds, m, skews), len(sizes) * len(kinds) * len(m) * len(skews), save)
    report = bench.report(rows)
    report.print(console)
    report.write(json_path, markdown_path)


@app.command("quantize")
def quantize_command(
    shape: Annotated[list[str], typer.Option("--shapes", help="MxK; repeatable.")] = _QUANTIZED,
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """Quantisers on a GPU against a copy of as many bytes; exits with 1 if a promise is broken."""
    sizes = parsed(lambda: shapes.parse(shape))
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    rows = [row for cell in quantizers.run(sizes, [torch.float16, torch.bfloat16]) for row in cell]
    report = quantizers.report(rows)
    report.print(console)
    report.write(json_path, markdown_path)
    raise typer.Exit(1 if any(row["goal_ok"] is False for row in rows) else 0)


@app.command("quality")
def quality_command(
    results: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for quality.json, .md and .png; rows there are kept.")
    ] = Path("bench/results"),
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows of 512 tokens.")] = quality.Settings.samples,
    seed: Annotated[int, typer.Option(help="Of their places.")] = quality.Settings.seed,
    tokens: Annotated[int, typer.Option(min=512, help="Of the held-out text.")] = quality.Settings.tokens,
    restart: Annotated[bool, typer.Option("--restart", help="Measure all rows anew.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch and qcutlass.")] = None,
) -> None:
    """Perplexity of SmolLM2 under every method, in an hour of one core; exits with 1 if a promise is broken."""
    if threads is not None:
        torch.set_num_threads(threads)
    settings = quality.Settings(samples=samples, seed=seed, tokens=tokens)
    path = results / "quality.json"
    rows = [] if restart else quality.cached(path, settings)
    wanted = quality.entries()
    bar = Progress(*Progress.get_default_columns(), "{task.fields[last]}", console=console, transient=True)
    with bar as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("quantising", total=len(wanted), completed=len(rows), last="")
        for row in quality.run(settings, wanted, rows, Path(folder)):
            rows.append(row)
            quality.save(rows, settings, path)
            last = "{method}, {weights}: {perplexity:.3f}".format(**row)
            progress.update(task, advance=1, last=last)
            if not console.is_terminal:
                console.print(f"{last} ({row['seconds']:.0f} s)")
    report = quality.report(rows, settings)
    report.print(console)
    report.write(None, results / "quality.md")
    plots.draw_quality(report.rows, results / "quality.png")
    missed = quality.failures(rows)
    if missed:
        console.print(f"[red]missed:[/red] {'; '.join(missed)}")
    raise typer.Exit(1 if missed else 0)


@app.command("report")
def report_command(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="From bench gpu --json.")],
    json_path: Json = None,
    markdown_path: Markdown = None,
    plots_path: Annotated[
        Path | None, typer.Option("--plots", file_okay=False, help="Draw figures into this folder (matplotlib).")
    ] = None,
) -> None:
    """One report from the files of several runs on one GPU; a cell comes from the last file that has it."""
    report = parsed(lambda: gpu_report.merge(files))
    report.print(console)
    report.write(json_path, markdown_path)
    if plots_path is not None:
        for path in parsed(lambda: plots.draw(report, plots_path)):
            console.print(str(path), highlight=False)


@app.command("fit")
def fit_command(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Of bench gpu or sweep --tactics.")],
    device: Annotated[
        str | None, typer.Option(help=f"The GPU: {', '.join(measured.selection.GPUS)}; default: as the files say.")
    ] = None,
    fields: Annotated[
        list[str],
        typer.Option(help="Fit these alone, say 'wgmma.*'; 'gpu.*': all rates of the GPU's row; repeatable."),
    ] = [],  # noqa: B006
    hold_out: Annotated[str, typer.Option(help="Judged, not fitted: a share of the shapes, or sweep: its half.")] = "0",
    seed: Annotated[int, typer.Option(help="Of the choice of these shapes, or of the sweep.")] = 0,
    iterations: Annotated[int, typer.Option(min=0, help="Steps tried at most; 0: judges today's constants.")] = 50,
) -> None:
    """Fits the cost model's constants to measured tactics, and prints the lines of cpp/src/plan; needs scipy."""
    rows = parsed(lambda: measured.read(files, device))
    parsed(lambda: fit.calibrate(rows, fields, hold_out, seed, iterations)).print(console)


app.command("first-call")(first_call.main)
app.command("pages")(pages.pages_command)
app.command("extracts")(extracts.extracts_command)
model_commands.register(app)

if __name__ == "__main__":
    app()
