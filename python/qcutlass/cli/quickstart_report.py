"""What `qcutlass quickstart` prints: a table of layers, and the times of passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from qcutlass.cli.quickstart import SPREAD, LayerResult, PassResult
from qcutlass.cli.terminal import markup


def layer_table(results: Sequence[LayerResult], tokens: Sequence[int], every: bool) -> Table:
    """One row for each kind, shape and scheme of layers, or for every layer: the worst error; on a GPU, mean times."""
    rows: dict[tuple[Any, ...], list[LayerResult]] = {}
    for result in results:
        rows.setdefault((result.name if every else result.kind, result.shape, result.scheme), []).append(result)
    timed = all(result.seconds is not None for result in results)
    caption = f"{' and '.join(map(str, tokens))} rows of activations; error: largest |error| / bound"
    if timed:
        caption += f"; us, dense: mean microseconds for {tokens[-1]} rows, weights in cache; ratio: dense / us"
    table = Table(caption=caption, box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", overflow="fold")
    for heading in ("N x K", "scheme"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "bits", "error", *(("us", "dense", "ratio") if timed else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for (name, (n, k), scheme), members in rows.items():
        worst = max(member.error for member in members)
        table.add_row(
            markup(name.removesuffix(".weight")),
            f"{n} x {k}",
            markup(scheme),
            str(len(members)),
            f"{members[0].bits_per_weight:.2f}",
            f"{worst:.3f}" if worst <= 1 else f"[red]{worst:.3f}[/red]",
            *(_times(members) if timed else ()),
        )
    return table


def _times(members: Sequence[LayerResult]) -> tuple[str, str, str]:
    seconds = sum(member.seconds or 0 for member in members) / len(members)
    dense = sum(member.dense_seconds or 0 for member in members) / len(members)
    return _microseconds(seconds), _microseconds(dense), f"{dense / seconds:.2f}"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}" if seconds >= 1e-4 else f"{1e6 * seconds:.1f}"


def summary(results: Sequence[LayerResult], passes: Sequence[PassResult], dense: str) -> str:
    """The verdict, the times of the passes with `dense` for the name of the dense weights' type, and a warning."""
    passed = sum(result.passed for result in results)
    worst = max(results, key=lambda result: result.error)
    weights = sum(n * k for n, k in (result.shape for result in results))
    stored = sum(result.shape[0] * result.shape[1] * result.bits_per_weight / 8 for result in results)
    verdict = "[green]passed[/green]" if passed == len(results) else "[red]FAILED[/red]"
    lines = [
        f"{verdict}: {passed} of {len(results)} linear layers within bound, largest error {worst.error:.3f} of it "
        f"({markup(worst.name)})",
        f"{weights / 1e6:.1f} M weights in {stored / 1e6:.1f} MB",
    ]
    for each in passes:
        layers = f"all {len(results)}" if each.layers == len(results) else f"the first {each.layers} of {len(results)}"
        lines.append(
            f"{each.tokens} {'row' if each.tokens == 1 else 'rows'} through {layers} layers in turn: "
            f"{1e3 * each.seconds:.2f} ms, with dense {dense} weights {1e3 * each.dense_seconds:.2f} ms"
        )
    largest = max((each.spread for each in passes), default=0.0)
    if largest > SPREAD:
        lines.append(
            f"[yellow]warning:[/yellow] the times of repeated passes differ by {100 * largest:.0f} %: other programs "
            "use this machine, so they say little; close them, or try OMP_NUM_THREADS=1"
        )
    return "\n".join(lines)
